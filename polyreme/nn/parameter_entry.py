"""Parameters of Layers of one structure, kept as one for all: each Layer's own is an entry of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices.abstract import Abstract
from polyreme.core.devices.device_memory import part
from polyreme.core.engine.turns import turns
from polyreme.core.kernel import Kernel
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.memory import ElementCount, Size
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn.parameter import Parameter, Unmade, is_made

_slot: Any = TensorState._array


class ParameterEntry(Parameter):
    """One entry of the first dim of another Parameter, its whole, which alone is placed, trained and updated.

    Reading it reads the whole as it is now, and gradients flow there; writing it writes there. An optimizer takes the
    whole, so whether it is trained is said for all entries: ConfigError for one.
    """

    own_form = True
    _whole: Parameter
    _entry_index: int

    @property
    def whole(self) -> Parameter:
        """What it is an entry of."""
        return self._whole

    @property
    def at(self) -> int:
        """Which entry it is."""
        return self._entry_index

    def lend(self, array: Any) -> Any:
        """Be this array, whatever the whole is, until what this returns is lent in its place."""
        before = _slot.__get__(self)
        _slot.__set__(self, array)
        return before

    @property
    def holder(self) -> TensorState | None:
        """The whole, whose state its value is; None while it is lent an array."""
        return None if self._lent is not None else self._whole

    @property
    def _lent(self) -> Any:
        # what is there otherwise: nothing, or what its initial value is drawn by
        array = _slot.__get__(self)
        return None if isinstance(array, Unmade) else array

    @property
    def _array(self) -> Any:
        if self._lent is not None:
            return self._lent
        if not is_made(self._whole):
            return _slot.__get__(self)
        whole = state.read(self._whole)
        if isinstance(whole, Abstract):
            return Abstract.of(whole.shape[1:], whole.dtype, None)
        if isinstance(whole, state.Tracer):
            return whole[self._entry_index]
        return turns.end(_entry(whole, self._entry_index, _entry_sharding(whole)))

    @_array.setter
    def _array(self, value: Any) -> None:
        if self._lent is not None:
            _slot.__set__(self, value)
            return
        self._whole.initialize()
        array = state.read(self._whole)
        if tuple(value.shape) != tuple(array.shape[1:]):
            raise ShapeError(f"{self.name}: shape {list(array.shape[1:])} cannot become {list(value.shape)}")
        array = array.astype(value.dtype)  # what casts one entry casts them all
        if isinstance(array, state.Tracer) or isinstance(value, state.Tracer):
            state.write(self._whole, array.at[self._entry_index].set(value))
        else:
            state.write(self._whole, turns.end(_with_entry(array, value, self._entry_index, array.sharding)))

    @property
    def _node(self) -> Any:
        if self._lent is not None or self.stop_gradient or not tape.grad_mode.enabled or not is_made(self._whole):
            return None
        arrays, edges = (state.read(self._whole),), (tape.edge_of(self._whole),)
        return tape.apply(_kernel(self._entry_index), arrays, edges)._node

    @property
    def _index(self) -> int:
        return 0

    @property
    def stop_gradient(self) -> bool:
        """Whether the whole is frozen."""
        return self._whole.stop_gradient

    @stop_gradient.setter
    def stop_gradient(self, value: bool) -> None:
        if bool(value) != self._whole.stop_gradient:
            self._refuse(f"stop_gradient={value}")

    @property
    def _grad(self) -> Tensor | None:
        gradient = self._whole.grad
        return None if gradient is None else Tensor(state.read(gradient)[self._entry_index])

    @_grad.setter
    def _grad(self, value: Tensor | None) -> None:
        have = self._whole._grad
        if value is None and have is None:
            return
        array = jnp.zeros(self._whole.shape, self.dtype) if have is None else state.read(have)
        entry = 0 if value is None else state.read(value)
        self._whole.grad = Tensor(array.at[self._entry_index].set(entry))

    @property
    def shape(self) -> Size:
        return Size.of(self._whole._array.shape[1:])

    @property
    def size(self) -> int:
        shape = tuple(self._whole._array.shape[1:])
        return ElementCount.of(shape, math.prod(shape))

    @property
    def ndim(self) -> int:
        return self._whole.ndim - 1

    @property
    def dtype(self) -> np.dtype:
        return self._whole.dtype

    @property
    def is_leaf(self) -> bool:
        return True

    def initialize(self) -> Parameter:
        """Give all entries of the whole their initial values."""
        self._whole.initialize()
        return self

    def register_hook(self, hook: Any) -> Any:
        """Refused: gradients are the whole's."""
        return self._refuse("register_hook")

    def __deepcopy__(self, memo: dict[Any, Any]) -> ParameterEntry:
        whole = memo.get(id(self._whole))
        if whole is None:
            whole = self._whole.__deepcopy__(memo)
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_name"})
        copied._whole = cast(Parameter, whole)
        _slot.__set__(copied, _slot.__get__(self))
        return copied

    def _refuse(self, what: str) -> Any:
        raise ConfigError(
            f"{what} of {self.name!r}, which is entry {self._entry_index} of one parameter of shape "
            f"{list(self._whole.shape)} for all: say it of all of them (the parameters() of the Layer that holds them "
            "all), or set this one apart before they are put together"
        )


@part("parameters", ParameterEntry)
def _value_of(entry: Any) -> Iterable[Any]:
    return ()  # the whole has it


@part("gradients", ParameterEntry)
def _gradient_of(entry: Any) -> Iterable[Any]:
    return ()


def put_together(layers: Sequence[Any], dim: str) -> bool:
    """Keep the parameters of Layers of one structure as one for all, with a first dim of this logical name.

    The Layers keep their Parameters, each of which becomes an entry. Nothing is done, and False returned, where
    parameters differ in name, shape, dtype or how they are trained, where Layers share one, and where one has a
    gradient already.
    """
    columns = _columns(layers)
    if not columns:
        return False
    lazily = _Drawing([p for layer in layers for p in layer.parameters()])
    for entries in columns:
        whole = _stacked(entries, dim, lazily)
        for at, p in enumerate(entries):
            kept = p._array if isinstance(p._array, Unmade) else None
            p.__class__ = ParameterEntry
            p._whole, p._entry_index = whole, at
            _slot.__set__(p, kept)
    return True


def wholes(named: Iterable[tuple[str, Parameter]]) -> Iterator[tuple[str, Parameter]]:
    """(name, parameter), where all entries of one are among them that one in place of its first: under their name with
    * for what differs."""
    listed = list(named)
    entries: dict[int, dict[int, str]] = {}
    for name, p in listed:
        if isinstance(p, ParameterEntry):
            entries.setdefault(id(p.whole), {}).setdefault(p.at, name)
    for name, p in listed:
        if not isinstance(p, ParameterEntry) or len(entries[id(p.whole)]) < p.whole.shape[0]:
            yield name, p
        elif (names := entries[id(p.whole)])[p.at] == name and p.at == min(names):
            yield _common(list(names.values())), p.whole


def _common(names: Sequence[str]) -> str:
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(same[0] if len(set(same)) == 1 else "*" for same in parts)


def _columns(layers: Sequence[Any]) -> list[list[Parameter]]:
    """The parameters of each name, one of each Layer; none where they cannot be one."""
    named = [list(layer.named_parameters()) for layer in layers]
    everything = [p for listed in named for _, p in listed]
    if len({id(p) for p in everything}) < len(everything) or len({len(listed) for listed in named}) > 1:
        return []
    if any(type(p) is not Parameter or p._grad is not None or p._node is not None for p in everything):
        return []
    if any(p.__dict__.get("_hooks") or p.after_update or p.layouts or p.is_statistic for p in everything):
        return []
    columns = [list(column) for column in zip(*named, strict=True)]
    if any(len({(name, *_form(p)) for name, p in column}) > 1 for column in columns):
        return []
    return [[p for _, p in column] for column in columns]


def _form(p: Parameter) -> tuple:
    how = (
        p.stop_gradient,
        p.need_clip,
        p.do_model_average,
        repr(p.optimize_attr),
        id(p.regularizer),
        p.split_axis,
        p.is_distributed,
    )
    place = None if not isinstance(p._array, jax.Array) else p._array.sharding
    return (tuple(p.shape), p.dtype, p.dims, is_made(p), place, *how)


def _stacked(entries: Sequence[Parameter], dim: str, lazily: _Drawing) -> Parameter:
    first = entries[0]
    shape = (len(entries), *first.shape)
    if is_made(first):
        array = jnp.stack([state.read(p) for p in entries])
    else:
        array = Unmade(first.name, shape, first.dtype)
        array.initializer = _DrawnTogether(lazily, [p._array for p in entries])
    whole = Parameter(array, trainable=not first.stop_gradient, name=first.name, dims=(dim, *first.dims))
    whole.has_entries = True
    for name in ("optimize_attr", "regularizer", "need_clip", "do_model_average", "is_distributed"):
        setattr(whole, name, getattr(first, name))
    return whole


class _Drawing:
    """Draws the first values of parameters made under LazyGuard, in the order in which they were made, at once."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        unmade = [p._array for p in parameters if isinstance(p._array, Unmade)]
        self._unmade = sorted(unmade, key=lambda u: u.number)
        self._values: dict[int, Any] = {}

    def take(self, unmade: Sequence[Unmade]) -> list[Any]:
        """The values of these, which are then let go."""
        if any(u.number not in self._values for u in unmade):
            self._values |= {u.number: u.initializer.values(list(u.shape), u.dtype) for u in self._unmade}
        return [self._values.pop(u.number) for u in unmade]


class _DrawnTogether:
    """An initializer of one parameter whose entries have initializers of their own."""

    def __init__(self, drawing: _Drawing, unmade: Sequence[Unmade]) -> None:
        self._drawing, self._unmade = drawing, list(unmade)

    def values(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """The values of all entries."""
        return jnp.stack(self._drawing.take(self._unmade)).astype(dtypes.as_dtype(dtype))


@functools.lru_cache(maxsize=1024)
def _kernel(at: int) -> Kernel:
    return Kernel(lambda whole: whole[at], "parameter_entry")


def _entry_sharding(whole: jax.Array) -> Any:
    """Where an entry is read to: laid out as in the whole, and over the axes that split entries along another dim."""
    if not isinstance(whole.sharding, NamedSharding):
        return None
    mesh, spec = whole.sharding.mesh, (*whole.sharding.spec, *(None,) * whole.ndim)[: whole.ndim]
    splits: list[tuple[str, ...]] = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    ways = [int(np.prod([mesh.shape[axis] for axis in axes], dtype=int)) for axes in splits]
    for dim in range(1, whole.ndim):
        if whole.shape[dim] % (ways[0] * ways[dim]) == 0:
            splits[dim] += splits[0]
            break
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in splits[1:])))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _entry(whole: Any, at: int, sharding: Any) -> Any:
    return whole[at] if sharding is None else jax.lax.with_sharding_constraint(whole[at], sharding)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _with_entry(whole: Any, value: Any, at: int, sharding: Any) -> Any:
    changed = whole.at[at].set(value)
    return jax.lax.with_sharding_constraint(changed, sharding) if isinstance(sharding, NamedSharding) else changed


__all__ = ["ParameterEntry", "put_together", "wholes"]
