"""The eager mode: run an op now, through a kernel found by the op's attributes.

This is the hot path of imperative code: a call that was seen before costs a tuple, a dict lookup and the
jitted call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import amp_policy, backend, layout, mode, rng, state
from polyreme.core import dtype as dtypes
from polyreme.core.op import ATTR, KEY, TENSOR, Op, freeze
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.errors import CaptureError, DeviceError, DTypeError, GradError, ShapeError

_watch = state.watch
_autocast = amp_policy.active
_placed = layout.active
_default = dtypes.default
_config = backend.config
edge_of = tape.edge_of
T = TypeVar("T", bound=TensorState)


class Eager:
    """Runs ops as they are called."""

    def run(self, op: Op, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of the op, taped when an input wants a gradient."""
        # read once: they are per thread, which makes reading them dear
        watching, placed = _watch.active, _placed.layout
        if watching is not None and watching.records:
            return watching.call(op.name, args, kwargs)
        out = None
        if kwargs:
            kwargs.pop("name", None)
            out = kwargs.pop("out", None)
        full = op.bind(args, kwargs) if kwargs or len(args) != len(op.names) else args
        arrays: list[Any] = []
        edges: list[Any] = []
        key: list[Any] = [(_autocast.policy, _default.dtype)]
        for value, kind in zip(full, op.kinds, strict=True):
            if kind is TENSOR:
                if isinstance(value, TensorState):
                    arrays.append(value._array if watching is None else watching.read(value))
                    edges.append(None if value.stop_gradient else edge_of(value))
                    key.append(-1 if placed is None else _gathered(value))
                elif value is None:
                    key.append((None,))
                else:
                    arrays.append(constant(value))
                    edges.append(None)
                    key.append(-1)
            elif kind is ATTR:
                cls = value.__class__
                if cls is not int and cls is not bool and cls is not str and value is not None:
                    value = freeze(value)
                    cls = _types(value)
                key.append((value, cls))
            elif kind is KEY:
                arrays.append(rng.default_generator.next_key() if value is _EMPTY or value is None else constant(value))
                edges.append(None)
                key.append(-1)
            else:
                tensors = _tensor_list(op, value)
                for t in tensors:
                    if isinstance(t, TensorState):
                        arrays.append(state.read(t))
                        edges.append(edge_of(t))
                    else:
                        arrays.append(constant(t))
                        edges.append(None)
                key.append(len(tensors))
        found = tuple(key)
        try:
            kernel = op.kernels.get(found)
        except TypeError as error:
            raise TypeError(
                f"{op.name}: an attribute cannot be hashed ({error}); attributes are plain Python values"
            ) from None
        if kernel is None:
            template = tuple((slot[0],) if isinstance(slot, tuple) else slot for slot in key[1:])
            kernel = op.kernels[found] = op.kernel(template, _autocast.policy)
        try:
            result = tape.apply(kernel, tuple(arrays), tuple(edges))
        except ValueError as error:
            unmade = next((a for a in arrays if hasattr(type(a), "refuse")), None)
            raise _device_error(op, error) if unmade is None else unmade.refuse() from error
        except NotImplementedError as error:
            if "Unsupported dtype" not in str(error):
                raise
            given = ", ".join(sorted({a.dtype.name for a in arrays}))
            raise DTypeError(f"{op.name}: there is no routine for {given}; use astype('float32')") from error
        except jax.errors.UnexpectedTracerError as error:
            raise CaptureError(
                f"{op.name}: an input belongs to a captured function that has ended and has no value; return it from "
                "that function instead of keeping it in a list or attribute outside"
            ) from error
        if out is not None:
            return rebind(out, result, op.name)
        if watching is not None:
            watching.called(op.name, full, {}, result)
        return result


_EMPTY = inspect.Parameter.empty


def _gathered(tensor: TensorState) -> Any:
    """The kernel's slot for a Tensor under a plan: how a parameter kept in pieces is laid out while it is read."""
    layouts = getattr(tensor, "layouts", None)
    return layouts.get("use", -1) if layouts else -1


def _types(value: Any) -> Any:
    """The types inside a frozen attribute: 1, 1.0 and True are equal and hash alike but mean different kernels."""
    return tuple(_types(v) for v in value) if isinstance(value, tuple) else value.__class__


def _tensor_list(op: Op, value: Any) -> list[Any]:
    if isinstance(value, TensorState) or not isinstance(value, (list, tuple)):
        raise TypeError(f"{op.name} takes a list of Tensors, got {type(value).__name__}")
    return list(value)


def _device_error(op: Op, error: ValueError) -> Exception:
    text = str(error)
    if "incompatible devices" in text:
        return DeviceError(
            f"{op.name}: inputs live on different devices; move them with .to(...): {text.splitlines()[0]}"
        )
    return error


@functools.lru_cache(maxsize=4096)
def _scalar(cls: type, value: Any, text: str, device: Any) -> jax.Array:
    # cls and text are part of the key because 1, 1.0 and True are equal, and so are 0.0 and -0.0
    with jax.ensure_compile_time_eval():
        return jnp.asarray(value)


def constant(value: Any) -> Any:
    """An array for something that is not a Tensor: a weakly typed scalar, or an ndarray or nested list as it stands."""
    if isinstance(value, (bool, int, float, complex)):
        return _scalar(value.__class__, value, "" if value else repr(value), _config.jax_default_device)
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (np.ndarray, np.generic, list, tuple)):
        array = np.asarray(value)
        if array.dtype.kind in "OUSM":
            raise TypeError(f"cannot make a Tensor of {type(value).__name__} with dtype {array.dtype}; give numbers")
        return jnp.asarray(array)
    advice = "to_dense() makes one" if hasattr(value, "to_dense") else "give a Tensor, a number or an ndarray"
    raise TypeError(f"cannot make a Tensor of {type(value).__name__}; {advice}")


def rebind(target: T, result: TensorState, what: str, *, retype: bool = False) -> T:
    """Write result into target in place, tape entry included; target keeps its dtype unless retype. Under no_grad only
    the value changes: a Parameter written there still wants its gradient.

    Raises GradError for a leaf that wants a gradient, DTypeError if the result has another dtype.
    """
    if tape.grad_mode.enabled and not target.stop_gradient and target._node is None:
        raise GradError(
            f"{what}: in-place change of a leaf Tensor that wants a gradient; do it under no_grad(), or use the form "
            "that returns a new Tensor"
        )
    if result._array.dtype != target._array.dtype and not retype:
        raise DTypeError(
            f"{what}: the result is {result._array.dtype.name}, the Tensor changed in place is "
            f"{target._array.dtype.name}; cast an input, or use the form that returns a new Tensor"
        )
    refuse_copy(target, what)
    state.write(target, result._array)
    target.__dict__["_version"] = target.__dict__.get("_version", 0) + 1
    if tape.grad_mode.enabled:
        target._node = result._node
        target._index = result._index
        target.stop_gradient = result.stop_gradient
    return target


def refuse_copy(target: TensorState, what: str) -> None:
    """Raise GradError for what x.data gives inside a capture: a copy, writes to which would reach nothing."""
    if "_copy_of_data" in target.__dict__:
        raise GradError(
            f"{what}: x.data is a copy inside a captured function or a static Program, so writing to it changes "
            "nothing; write to x itself, under no_grad() if it wants a gradient, or use x.set_value"
        )


def inplace(fn: Any) -> Any:
    """The `name_` form of an op: writes the result into its first argument and returns it."""

    @functools.wraps(fn)
    def run(x: TensorState, *args: Any, **kwargs: Any) -> TensorState:
        result = fn(x, *args, **kwargs)
        # reshape_ and its like change the shape, but none changes how many elements there are
        if result._array.size != x._array.size:
            raise ShapeError(
                f"{run.__name__}: the result has shape {list(result._array.shape)}, the Tensor changed in place "
                f"{list(x._array.shape)}, which does not grow; use the form that returns a new Tensor"
            )
        return rebind(x, result, run.__name__)

    run.__name__ = run.__qualname__ = f"{fn.__name__}_"
    run.__doc__ = f"In-place form of `{fn.__name__}`: the result is written into the first argument, which is returned."
    return run


_eager = Eager()
mode.current.settle(_eager)


class Operator:
    """A binary op as Python's operators call it: two Tensors and fixed attributes, the shortest way to the kernel.

    Anything else (a number, a plan or capture in force, another mode, an error) goes through the mode, as all calls do.
    """

    __slots__ = ("kernels", "op", "rest")

    def __init__(self, fn: Callable[..., Any], *rest: Any) -> None:
        self.op: Op = fn.op  # type: ignore[attr-defined]  (what @op puts on the public function)
        self.rest = rest
        self.kernels: dict[Any, Any] = {}

    def __call__(self, x: Any, y: Any) -> Any:
        current = mode.current.mode
        if (
            current is _eager
            and isinstance(x, TensorState)
            and isinstance(y, TensorState)
            and _watch.active is None
            and _placed.layout is None
        ):
            kernel = self.kernels.get((_autocast.policy, _default.dtype))
            if kernel is not None:
                edges = (None if x.stop_gradient else edge_of(x), None if y.stop_gradient else edge_of(y))
                try:
                    return tape.apply(kernel, (x._array, y._array), edges)
                except (ValueError, jax.errors.UnexpectedTracerError):
                    pass  # the long way says what is wrong
            else:
                self._find_kernel()
        return current.run(self.op, (x, y, *self.rest), {})

    def _find_kernel(self) -> None:
        modes = (_autocast.policy, _default.dtype)
        key = (modes, -1, -1, *((value, value.__class__) for value in self.rest))
        kernel = self.op.kernels.get(key)
        if kernel is not None:
            self.kernels[modes] = kernel
