"""Tensors on a mesh: how they are kept, and told from dense ones.

A Tensor whose array is its value is an ordinary Tensor whose array has a NamedSharding; its Form is noted
beside it, or read off the sharding. Only what is partial, uneven or cut by a split_factor is of a class of its own,
which keeps that array and makes the value of it where something reads `_array`: tape, capture, checkpoints, the host.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from polyreme.core import state
from polyreme.core.state import TensorState, Tracer
from polyreme.core.symbol import Symbol
from polyreme.distributed.auto_parallel.tensors.form import Form, of_sharding
from polyreme.distributed.auto_parallel.tensors.process_mesh import mesh_of
from polyreme.eager.dist_members import lookup
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import PlacementError
from polyreme.nn.parameter import Parameter
from polyreme.ops import OPS

_slot: Any = TensorState.__dict__["_array"]


class _Started:
    """The function to call when the first Tensor is put on a mesh, if any."""

    __slots__ = ("call",)

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None

    def now(self) -> None:
        """Call it, once."""
        if self.call is not None:
            call, self.call = self.call, None
            lookup.used = True
            call()


started: _Started = _Started()


class _InForm:
    """The value of a Tensor that is kept in another form: made when read, taken apart when written."""

    own_form = True
    __dict__: dict[str, Any]
    _form: Form

    @property
    def stored(self) -> jax.Array:
        """The array that is kept."""
        return _slot.__get__(self)

    @property
    def _array(self) -> Any:
        attributes = self.__dict__
        if "_whole" in attributes:  # while captured: the value in the program
            return attributes["_whole"]
        seen = attributes.get("_seen")
        value = seen() if seen is not None else None
        if value is None:
            value = _now(_decoder(self._form), self.stored)
            attributes["_seen"] = weakref.ref(value)
        return value

    @_array.setter
    def _array(self, value: Any) -> None:
        attributes, seen = self.__dict__, self.__dict__.get("_seen")
        attributes.pop("_whole", None)
        if seen is not None and seen() is value:
            return
        if isinstance(value, (Tracer, Symbol)):
            attributes["_whole"] = value
            return
        if tuple(value.shape) != self._form.shape:
            self._leave(value)
            return
        _slot.__set__(self, encoded(value, self._form))
        attributes["_seen"] = weakref.ref(value)

    def _leave(self, value: Any) -> None:
        """An ordinary Tensor from now on."""
        for name in ("_form", "_seen", "_whole"):
            self.__dict__.pop(name, None)
        self.__class__ = Parameter if isinstance(self, Parameter) else Tensor  # type: ignore[assignment]
        _slot.__set__(self, value)

    @property
    def shape(self) -> list[int]:
        """Size of each dim of the value."""
        return list(self._form.shape)

    @property
    def ndim(self) -> int:
        return len(self._form.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the stored array."""
        return self._form.sharding

    def detach(self) -> Tensor:
        """The same value outside the tape, kept the same way."""
        return in_form(self.stored, self._form) if "_whole" not in self.__dict__ else Tensor.detach(self)  # type: ignore[arg-type]

    def clone(self) -> Tensor:
        """A copy that gradients flow through."""
        return OPS["clone"](self)

    def __deepcopy__(self, memo: dict) -> Tensor:
        if self._node is not None:  # type: ignore[attr-defined]
            return Tensor.__deepcopy__(self, memo)  # type: ignore[arg-type]  (which refuses)
        copied = type(self).__new__(type(self))
        _adopt(copied, self.stored, self._form)
        copied.stop_gradient = self.stop_gradient  # type: ignore[attr-defined]
        own = ("_hooks", "_name", "_seen", "_whole")
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
        memo[id(self)] = copied
        return copied  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        dense = copy.deepcopy(self.detach() if self._node is not None else self)  # type: ignore[attr-defined]
        dense._leave(jnp.asarray(np.asarray(dense._array)))  # type: ignore[attr-defined]
        if "_name" in self.__dict__:
            dense.__dict__["_name"] = self.__dict__["_name"]
        return _same, (dense,)


class DistTensor(_InForm, Tensor):
    """A Tensor that is partial, or in uneven pieces."""


class DistParameter(_InForm, Parameter):
    """A Parameter that is in uneven pieces."""


def _same(dense: Tensor) -> Tensor:
    return dense


def _now(run: Callable[[Any], Any], array: Any) -> Any:
    """run(array) at once, also while a function is being captured."""
    if isinstance(array, Tracer) or state.watch.active is None:
        return run(array)
    with jax.ensure_compile_time_eval():
        return run(array)


@functools.lru_cache(maxsize=4096)
def _decoder(form: Form) -> Callable[[Any], Any]:
    def decode(stored: Any) -> Any:
        return form.decode(stored)

    return jax.jit(decode, out_shardings=form.everywhere)


@functools.lru_cache(maxsize=4096)
def _encoder(form: Form) -> Callable[[Any], Any]:
    def encode(value: Any) -> Any:
        return form.encode(value)

    return jax.jit(encode, out_shardings=form.sharding)


def encoded(value: Any, form: Form) -> jax.Array:
    """The stored array, in the given form, of a value that lies anywhere."""
    if form.plain:
        return put(value, form.sharding)
    return _now(_encoder(form), put(value, form.everywhere))


def in_form(stored: Any, form: Form) -> Tensor:
    """A Tensor around an array that is kept in this form."""
    tensor = Tensor.__new__(Tensor if form.plain else DistTensor)
    _adopt(tensor, stored, form)
    return tensor


def _adopt(tensor: Any, stored: Any, form: Form) -> None:
    """Make a new Tensor's array one kept in this form."""
    note(tensor, form)
    if form.plain:
        TensorState.__init__(tensor, stored)
        return
    tensor.__dict__["_seen"] = lambda: stored  # what is set is not the value
    TensorState.__init__(tensor, stored)
    del tensor.__dict__["_seen"]
    _slot.__set__(tensor, stored)


def note(tensor: Any, form: Form) -> None:
    """Say of a Tensor how it lies."""
    if started.call is not None:
        started.now()
    tensor.__dict__["_form"] = form


def form_of(tensor: Any) -> Form | None:
    """The Form of a Tensor on a mesh; None for a dense one.

    What was noted counts while the array lies so; an array that was put in its place since is read off its sharding.
    """
    noted = tensor.__dict__.get("_form")
    if tensor.own_form:
        return noted
    array = tensor._array
    if isinstance(array, (Tracer, Symbol)):
        return noted if noted is not None and noted.shape == tuple(array.shape) else None
    sharding = getattr(array, "sharding", None)  # a constant of a Program that is recorded is an ndarray
    if not isinstance(sharding, NamedSharding):
        return None
    if noted is not None and noted.shape == array.shape and _layout_of(sharding, noted, array.ndim):
        return noted
    mesh = mesh_of(sharding.mesh)
    if mesh is None:
        return None
    found = tensor.__dict__["_form"] = of_sharding(mesh, sharding, array.shape)
    return found


def _layout_of(sharding: NamedSharding, form: Form, ndim: int) -> bool:
    return sharding is form.sharding or sharding == form.sharding or sharding.is_equivalent_to(form.sharding, ndim)


def stored_of(tensor: Any) -> Any:
    """The array that is kept for a Tensor on a mesh: its value, unless it is of a form of its own."""
    return tensor.stored if tensor.own_form and "_whole" not in tensor.__dict__ else state.read(tensor)


def _local(tensor: Any, process_id: int | None) -> Tensor:
    form = form_of(tensor)
    assert form is not None
    state.host(tensor, "Tensor._local_value()") if state.capturing() else None
    return Tensor(form.local_value(stored_of(tensor), form.mesh.here if process_id is None else process_id))


def place(tensor: Any, form: Form) -> None:
    """Put a Tensor or Parameter in place in this form, value and identity kept; it leaves the tape."""
    if isinstance(tensor, Parameter) and tensor.whole is not tensor:
        raise PlacementError(
            f"{tensor.name!r} is an entry of one parameter of shape {list(tensor.whole.shape)} for all experts; place "
            "that one, which parameters() of the layer that holds them has"
        )
    value = state.read(tensor)
    if tensor.own_form:
        tensor._leave(value)
    stored = value if isinstance(value, Tracer) else encoded(value, form)
    tensor._node, tensor._index = None, 0
    if form.plain or isinstance(value, Tracer):
        state.write(tensor, stored)
    else:
        tensor.__class__ = DistParameter if isinstance(tensor, Parameter) else DistTensor
        _slot.__set__(tensor, stored)
    note(tensor, form)
    if isinstance(tensor, Parameter):
        tensor.layouts = {kind: form.sharding for kind in ("param", "grad", "state")} if form.plain else {}


lookup.form, lookup.local = form_of, _local
