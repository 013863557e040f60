"""Layers with 1.7's parameters, each the one of polyreme.nn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme import nn as ours
from polyreme.fluid.layers.image import pool2d
from polyreme.nn import BatchNorm
from polyreme.program.activations import activate


class Linear(ours.Linear):
    """act(x W + b): [*b, input_dim] -> [*b, output_dim]."""

    def __init__(
        self, input_dim: int, output_dim: int, param_attr: Any = None, bias_attr: Any = None, act: str | None = None,
        dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(input_dim, output_dim, param_attr, bias_attr)
        self._act = act
        self.to(dtype=dtype)

    def forward(self, input: Any) -> Any:
        return activate(super().forward(input), self._act)


class Conv2D(ours.Conv2D):
    """act(filters * x + bias): [n, c, h, w] -> [n, num_filters, h', w']. use_cudnn: the values are the same."""

    def __init__(
        self, num_channels: int, num_filters: int, filter_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int | None = None, param_attr: Any = None, bias_attr: Any = None,
        use_cudnn: bool = True, act: str | None = None, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(
            num_channels, num_filters, filter_size, stride, padding, dilation, groups or 1, weight_attr=param_attr,
            bias_attr=bias_attr,
        )  # fmt: skip
        self._act = act
        self.to(dtype=dtype)

    def forward(self, x: Any) -> Any:
        return activate(super().forward(x), self._act)


class Pool2D(ours.Layer):
    """The largest ("max") or the mean ("avg") of each window. use_cudnn: the values are the same."""

    def __init__(
        self, pool_size: Any = -1, pool_type: str = "max", pool_stride: Any = 1, pool_padding: Any = 0,
        global_pooling: bool = False, use_cudnn: bool = True, ceil_mode: bool = False, exclusive: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self._settings = {
            "pool_size": pool_size, "pool_type": pool_type, "pool_stride": pool_stride, "pool_padding": pool_padding,
            "global_pooling": global_pooling, "ceil_mode": ceil_mode, "exclusive": exclusive,
        }  # fmt: skip

    def forward(self, input: Any) -> Any:
        return pool2d(input, **self._settings)


class Embedding(ours.Embedding):
    """Rows of a table of shape size; is_sparse and the others as in layers.embedding."""

    def __init__(
        self, size: Sequence[int], is_sparse: bool = False, is_distributed: bool = False,
        padding_idx: int | None = None, param_attr: Any = None, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(size[0], size[1], padding_idx, sparse=bool(is_sparse), weight_attr=param_attr)
        self.to(dtype=dtype)


class LayerNorm(ours.LayerNorm):
    """act of the last dims, of this shape, to mean 0 and variance 1, scaled and shifted."""

    def __init__(
        self, normalized_shape: Any, scale: bool = True, shift: bool = True, epsilon: float = 1e-05,
        param_attr: Any = None, bias_attr: Any = None, act: str | None = None, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(
            normalized_shape, epsilon, weight_attr=param_attr if scale else False,
            bias_attr=bias_attr if shift else False,
        )  # fmt: skip
        self._act = act
        self.to(dtype=dtype)

    def forward(self, input: Any) -> Any:
        return activate(super().forward(input), self._act)


__all__ = ["BatchNorm", "Conv2D", "Embedding", "LayerNorm", "Linear", "Pool2D"]
