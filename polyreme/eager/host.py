"""Values on the host turned into arrays: numbers, nested lists, ndarrays and Tensors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices import place as places
from polyreme.core.devices.abstract import Abstract, mode
from polyreme.core.devices.device_memory import raise_explained
from polyreme.core.devices.transfer import aligned_copy, from_host
from polyreme.core.state import TensorState
from polyreme.core.symbol import refuse_sizes
from polyreme.errors import DTypeError, ShapeError

_SMALL = 1 << 22  # bytes; one thread copies them sooner than a program of several threads compiles, in 50 ms


def as_array(data: Any, dtype: Any, place: Any) -> Any:
    """An array with a copy of data, in a dtype and on a place if given; DTypeError or ShapeError for what is none."""
    to = None if dtype is None else dtypes.as_dtype(dtype)
    if isinstance(data, TensorState):
        array = state.read(data)
        array = jnp.array(array if to is None else dtypes.convert(array, to), copy=True)
    else:
        source = data
        if not isinstance(data, (np.ndarray, np.generic, jax.Array)):
            data = _from_python(data)
            if to is None:
                to = _python_dtype(data.dtype)
            elif data.dtype.kind in "iuf" and data.size and dtypes.is_integer(to):
                for value in (data.min().item(), data.max().item()):
                    dtypes.check_holds("to_tensor", to, value)
        if data.dtype.kind in "OUSmM":
            raise DTypeError(f"cannot make a Tensor of {_shown(source, data)}; give numbers")
        array = jnp.array(data, dtype=to, copy=True) if isinstance(data, jax.Array) else from_host(data, to)
    return array if place is None else jax.device_put(array, places.as_place(place).device())


def _shown(data: Any, array: Any) -> str:
    """What was to become numbers, as an error names it."""
    if isinstance(data, (list, tuple, np.ndarray)):
        names = {type(entry).__name__ for entry in np.asarray(array).ravel()[:100].tolist()}
        return f"{type(data).__name__} that holds {' and '.join(sorted(names))}"
    return "None" if data is None else type(data).__name__


def _from_python(data: Any) -> np.ndarray:
    if state.recording():
        refuse_sizes("to_tensor", data)
    if isinstance(data, (list, tuple)) and any(isinstance(d, TensorState) for d in data):
        data = [np.asarray(d) for d in data]
    try:
        return np.asarray(data)
    except ValueError as error:
        raise ShapeError(f"cannot make a Tensor of nested lists of unequal lengths: {error}") from None


def _python_dtype(dtype: np.dtype) -> np.dtype:
    if dtype == dtypes.float64:
        return dtypes.default_dtype()
    return dtypes.complex64 if dtype == dtypes.complex128 else dtype


def like(array: Any, reference: Any) -> Any:
    """array in reference's dtype, laid out over devices as reference is."""
    if isinstance(reference, state.Tracer) or isinstance(array, state.Tracer):
        return jnp.asarray(array, reference.dtype)
    if isinstance(array, jax.Array):
        array = array.astype(reference.dtype)
        return array if array.sharding == reference.sharding else put(array, reference.sharding)
    if not getattr(reference, "committed", True):
        return from_host(np.asarray(array), reference.dtype)
    host = np.array(array, dtype=reference.dtype, copy=True)
    where = reference.sharding
    return jax.device_put(host, where) if _is_local(where) else _over_processes(host, where)


def put(array: jax.Array | np.ndarray, where: Any) -> jax.Array:
    """array on a device or over a mesh, in a buffer of its own: a captured program may donate the one it came from.

    Over a mesh that spans processes, what this process holds for itself must be the same in every process.
    """
    if mode.is_on:
        return Abstract.of(array.shape, array.dtype, where)  # type: ignore[return-value]  # stands for one
    if isinstance(array, jax.Array) and isinstance(where, NamedSharding) and _is_small_on_cpu(array):
        array = aligned_copy(np.asarray(array))  # jax compiles a program for each shape of its own arrays that it cuts
    try:
        return jax.device_put(array, where, may_alias=False) if _is_local(where) else _over_processes(array, where)
    except jax.errors.JaxRuntimeError as error:
        raise_explained(error, f"placing an array {list(array.shape)} {array.dtype}")


def _is_small_on_cpu(array: jax.Array) -> bool:
    devices = array.sharding.device_set
    is_plain = not jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return is_plain and array.nbytes <= _SMALL and len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _is_local(where: Any) -> bool:
    """True for a device or mesh of this process alone."""
    return getattr(where, "is_fully_addressable", True)


def _over_processes(array: Any, where: jax.sharding.Sharding) -> jax.Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=where)(array)
    # jax.device_put would compare the values over all processes each time
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index], dtype=host.dtype)
