"""Layers that do the same but for their values, which may share a compiled program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.core.part_table import PartTable
from polyreme.core.state import TensorState
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr

_IDENTITY = frozenset({"_full_name", "_parameters", "_buffers", "_sub_layers", "_made", "place"})
"""Attributes of a Layer that say which one it is, or that are compared by themselves."""
_UNREAD = _IDENTITY | {"_non_persistable_buffer_names_set"}
"""Attributes of a Layer that its forward does not read."""
_CONTAINERS = (list, tuple, dict, set)


class AlikeLayers:
    """Which of some layers are alike, told anew when one of them may have changed; to ask costs microseconds.

    layers: the layers as they are now, None for one that is like no other. firsts: of each, the number of the first
    that is like it.
    """

    firsts: list[int]

    def __init__(self, layers: Callable[[], Sequence[Layer | None]]) -> None:
        self._layers = layers
        self._versions: tuple[int, ...] = ()
        self._tensors: list[TensorState] = []
        self._stops: list[bool] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self.firsts = []

    def have_changed(self) -> bool:
        """Whether a layer, one of its Tensors or a setting may be another one than at the last call, and at the first
        call; firsts are then up to date. Values of Tensors do not count."""
        versions = (state.attributes.version, state.layer_parts.version, state.leaf_hooks.version)
        if (
            versions == self._versions
            and [t.stop_gradient for t in self._tensors] == self._stops
            and all(_are_same(_contents(container), before) for container, before in self._containers)
        ):
            return False
        layers = self._layers()
        self._versions, self.firsts = versions, _firsts(layers)
        parts = [part for layer in layers if layer is not None for part in layer.sublayers(include_self=True)]
        self._tensors = [t for layer in layers if layer is not None for t in tensors_of(layer)]
        self._stops = [t.stop_gradient for t in self._tensors]
        # an assignment is counted, a change of a list in place is not
        self._containers = [
            (value, _contents(value))
            for part in parts
            for name, value in vars(part).items()
            if name not in _UNREAD and not isinstance(value, PartTable) and _can_change(value)
        ]
        return True


def are_alike(one: Layer, other: Layer) -> bool:
    """Whether two layers do the same but for the values of their parameters and buffers, as far as can be told.

    >>> from polyreme.nn.layers.linear import Linear
    >>> are_alike(Linear(2, 3), Linear(2, 3)), are_alike(Linear(2, 3), Linear(3, 3))
    (True, False)
    """
    return _do_the_same(one, other) and _places(one) == _places(other)


def tensors_of(layer: Layer) -> list[TensorState]:
    """Parameters, then buffers: of layers that are alike, in the same order."""
    return [*layer.parameters(), *layer.buffers()]


def _firsts(layers: Sequence[Layer | None]) -> list[int]:
    """Of each layer the number of the first that is like it."""
    firsts: list[int] = []
    for number, layer in enumerate(layers):
        for first in dict.fromkeys(firsts):
            other = layers[first]
            if layer is not None and other is not None and are_alike(other, layer):
                firsts.append(first)
                break
        else:
            firsts.append(number)
    return firsts


def _can_change(value: Any) -> bool:
    """Whether a value is a list, dict or set, or a tuple with one in it."""
    return isinstance(value, (list, dict, set)) or (isinstance(value, tuple) and any(map(_can_change, value)))


def _contents(value: Any) -> list[Any]:
    """What a list, tuple, dict or set holds, and what is in those among that."""
    contents = [*value, *value.values()] if isinstance(value, dict) else [*value]
    return contents + [part for inner in contents if isinstance(inner, _CONTAINERS) for part in _contents(inner)]


def _are_same(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists are of the very same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _do_the_same(one: Layer, other: Layer) -> bool:
    if type(one) is not type(other) or one._sub_layers.keys() != other._sub_layers.keys():
        return False
    mine, others = (
        {name: value for name, value in vars(layer).items() if name not in _IDENTITY} for layer in (one, other)
    )
    if mine.keys() != others.keys() or any(not _is_same(mine[name], others[name]) for name in mine):
        return False
    tables = ((one._parameters, other._parameters), (one._buffers, other._buffers))
    if any(_forms(table) != _forms(of_other) for table, of_other in tables):
        return False
    pairs = zip(one._sub_layers.values(), other._sub_layers.values(), strict=True)
    return all(a is b or (a is not None and b is not None and _do_the_same(a, b)) for a, b in pairs)


def first_places(values: Iterable[Any]) -> list[int]:
    """Of each value, where among all of them it stands first: of one that comes several times, the same number."""
    first: dict[int, int] = {}
    return [first.setdefault(id(value), number) for number, value in enumerate(values)]


def _places(layer: Layer) -> list[int]:
    """first_places of parameters and buffers by every name that they have."""
    parts = (layer, *layer.sublayers())
    return first_places(tensor for p in parts for tensor in (*p._parameters.values(), *p._buffers.values()))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two attributes are the same object, equal plain values, or say how parameters begin."""
    if one is other or (isinstance(one, ParamAttr) and isinstance(other, ParamAttr)):
        return True
    if isinstance(one, MethodType):
        return one == other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    # numbers by their text: 0.0 is not -0.0
    return isinstance(one, (bool, int, float, str, set, np.dtype)) and repr(one) == repr(other)


def _forms(tensors: Any) -> list[tuple]:
    return [
        (name, t if t is None else (tuple(t.shape), t.dtype, t.stop_gradient, repr(getattr(t, "dims", None))))
        for name, t in tensors.items()
    ]
