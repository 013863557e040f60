"""Pooling, Linear, Softmax and Unfold with the parameters and layouts of other libraries."""

from __future__ import annotations

from typing import Any

from polyreme.compat.nn import functional as F
from polyreme.nn import initializer
from polyreme.nn.layer import Layer
from polyreme.nn.layers import pooling
from polyreme.nn.parameter import Parameter


class AvgPool1D(pooling.AvgPool1D):
    """Mean of each window of [batch, channel, length]; padding counts unless count_include_pad is False."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(kernel_size, stride, padding, not count_include_pad, ceil_mode)


class AvgPool2D(pooling.AvgPool2D):
    """Mean of each window of [batch, channel, height, width], or its sum / divisor_override; padding counts unless
    count_include_pad is False.
    """

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, ceil_mode, not count_include_pad, divisor_override)


class AvgPool3D(pooling.AvgPool3D):
    """Mean of each window of [batch, channel, depth, height, width], or its sum / divisor_override; padding counts
    unless count_include_pad is False.
    """

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, ceil_mode, not count_include_pad, divisor_override)


class Linear(Layer):
    """x W^T + b with W [out, in]; both start uniform in +-1 / sqrt(in).

    >>> Linear(3, 5).weight.shape
    paddle.Size([5, 3])
    """

    weight: Parameter
    bias: Parameter | None

    in_features: int
    out_features: int

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(dtype=dtype)
        self.in_features, self.out_features = in_features, out_features
        bound = in_features**-0.5 if in_features else 0.0
        start = initializer.Uniform(-bound, bound)
        self.weight = self.create_parameter([out_features, in_features], default_initializer=start)
        self.bias = self.create_parameter([out_features], default_initializer=start) if bias else None
        if device is not None:
            self.to(device=device)

    def forward(self, input: Any) -> Any:
        """[*b, in] -> [*b, out]."""
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes, as repr shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Softmax(Layer):
    """exp(x) over its sum along dim; without dim, along the first of 0, 1 or 3 dims, along the second of others."""

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: Any) -> Any:
        """-> input's shape."""
        return F.softmax(input, self.dim)


class Unfold(Layer):
    """Every window of an image as a column: [N, C, H, W] -> [N, C * kh * kw, windows]."""

    windows: dict[str, Any]

    def __init__(self, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> None:
        super().__init__()
        self.windows = {"kernel_size": kernel_size, "dilation": dilation, "padding": padding, "stride": stride}

    def forward(self, input: Any) -> Any:
        """[N, C, H, W] -> [N, C * kh * kw, windows]."""
        return F.unfold(input, **self.windows)
