"""Layers that pass on or reshape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.nn.layer import Layer
from polyreme.nn.layers.functional_layer import FunctionalLayer
from polyreme.ops.manipulation import flatten, unflatten


class Identity(Layer):
    """The input, unchanged; takes and ignores any arguments, so that it can stand in for another layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Any) -> Any:
        return input


class Flatten(FunctionalLayer):
    """Merges dims start_axis to stop_axis, both included, into one.

    >>> from polyreme.eager.tensor import to_tensor
    >>> Flatten()(to_tensor([[[1.0], [2.0]]])).shape
    paddle.Size([1, 2])
    """

    _function = staticmethod(flatten)

    def __init__(self, start_axis: int = 1, stop_axis: int = -1) -> None:
        super().__init__(None, start_axis=start_axis, stop_axis=stop_axis)


class Unflatten(FunctionalLayer):
    """Splits dim axis into dims of the sizes in shape, one of which may be -1."""

    _function = staticmethod(unflatten)

    def __init__(self, axis: int, shape: Sequence[int], name: str | None = None) -> None:
        super().__init__(name, axis=axis, shape=shape)
