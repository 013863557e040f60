"""LazyGuard: layers made inside it have parameters of a shape and a dtype, but no memory until they are initialized."""

from __future__ import annotations

from typing import Any, Self

from polyreme.nn import parameter


class LazyGuard:
    """Inside the block, parameters are made without values; `param.initialize()` or loading a state gives them theirs.

    >>> from polyreme.nn.layers.linear import Linear
    >>> with LazyGuard():
    ...     net = Linear(2, 3)
    >>> net.weight.shape, [p.initialize() is p for p in net.parameters()]
    (paddle.Size([2, 3]), [True, True])
    """

    def __enter__(self) -> Self:
        self._outer, parameter.making.lazily = parameter.making.lazily, True
        return self

    def __exit__(self, *_: Any) -> None:
        parameter.making.lazily = self._outer


__all__ = ["LazyGuard"]
