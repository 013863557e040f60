"""What several families are made of: a convolution with its normalization and activation; widths that suit hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyreme.nn import BatchNorm2D, Conv2D, Layer, ReLU, Sequential


class ConvNorm(Sequential):
    """Convolution without bias, batch normalization and activation (None: none): [n, c, h, w] -> [n, out, h', w'].

    padding is (size - 1) / 2 unless given.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int | Sequence[int] = 3,
        stride: int = 1,
        padding: Any = None,
        groups: int = 1,
        norm: Callable[[int], Layer] = BatchNorm2D,
        activation: Callable[[], Layer] | None = ReLU,
    ) -> None:
        if padding is None:
            padding = (size - 1) // 2 if isinstance(size, int) else [(s - 1) // 2 for s in size]
        layers: list[Layer] = [
            Conv2D(inputs, outputs, size, stride, padding, groups=groups, bias_attr=False), norm(outputs)
        ]  # fmt: skip
        super().__init__(*layers, *([] if activation is None else [activation()]))


def divisible(width: float, by: int = 8) -> int:
    """The multiple of `by` nearest to width, but no more than a tenth below it."""
    near = max(by, int(width + by / 2) // by * by)
    return near + by if near < 0.9 * width else near
