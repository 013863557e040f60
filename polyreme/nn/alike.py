"""Layers that do the same but for their values, which may share a compiled program."""

from __future__ import annotations

from types import MethodType
from typing import Any

import numpy as np

from polyreme.core.state import TensorState
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr

_IDENTITY = frozenset({"_full_name", "_parameters", "_buffers", "_sub_layers", "_made", "place"})
"""Attributes of a Layer that say which one it is, or that are compared by themselves."""


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


def _places(layer: Layer) -> list[int]:
    """Of each parameter and buffer, where among all of them it stands first: of one that has several names, the same
    number at each."""
    first: dict[int, int] = {}
    return [
        first.setdefault(id(tensor), number)
        for number, tensor in enumerate(
            tensor
            for part in (layer, *layer.sublayers())
            for tensor in (*part._parameters.values(), *part._buffers.values())
        )
    ]


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
