"""Normalization over features, groups of channels, single channels and neighbouring channels.

Batch normalization is in batch_norm.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.core.alias import Alias
from polyreme.core.spelling import takes_second_names
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.nn.argument_order import also_in_order
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttrLike, Parameter


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + epsilon) over the last dims, times weight plus bias. Source: arXiv:1607.06450.

    normalized_shape: sizes of those dims. Parameters are vectors of their product, with the logical dim "embed" if
    there is one such dim. elementwise_affine=False leaves both out, bias=False the bias.

    >>> LayerNorm([3, 4]).weight.shape
    paddle.Size([12])
    """

    weight: Parameter
    bias: Parameter

    normalized_shape: Alias[list[int]] = Alias("_normalized_shape")
    epsilon: Alias[float] = Alias("_epsilon")

    @takes_second_names
    @also_in_order(2, ("weight_attr", "bias_attr", "name"))
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        epsilon: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        name: str | None = None,
    ) -> None:
        super().__init__(dtype=dtype)
        if not isinstance(elementwise_affine, bool) or not isinstance(bias, bool):
            raise ConfigError(
                "LayerNorm: elementwise_affine and bias are True or False; name weight_attr= and bias_attr="
            )
        sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        self._normalized_shape, self._epsilon = sizes, epsilon
        self._weight_attr = weight_attr if elementwise_affine else False
        self._bias_attr = bias_attr if elementwise_affine and bias else False
        dims = ("embed",) if len(sizes) == 1 else (None,)
        count = [math.prod(sizes)]
        self.weight = self.create_parameter(count, self._weight_attr, default_initializer=Constant(1.0), dims=dims)
        self.bias = self.create_parameter(count, self._bias_attr, is_bias=True, dims=dims)
        if device is not None:
            self.to(device=device)

    def forward(self, input: Any) -> Any:
        return F.layer_norm(input, self._normalized_shape, self.weight, self.bias, self._epsilon)

    def extra_repr(self) -> str:
        return f"normalized_shape={self._normalized_shape}, epsilon={self._epsilon}"


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + epsilon) over the last dims, times weight. Source: arXiv:1910.07467.

    weight_attr=False leaves the weight out. offset: what a subclass adds to the weight before it multiplies.

    >>> RMSNorm(8).weight.dims
    ('embed',)
    """

    weight: Parameter
    offset: float = 0.0

    normalized_shape: Alias[list[int]] = Alias("_normalized_shape")
    epsilon: Alias[float] = Alias("_epsilon")

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        epsilon: float = 1e-5,
        weight_attr: ParamAttrLike = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        self._normalized_shape, self._epsilon = sizes, epsilon
        dims = ("embed",) if len(sizes) == 1 else (None,) * len(sizes)
        self.weight = self.create_parameter(sizes, weight_attr, default_initializer=Constant(1.0), dims=dims)

    def forward(self, input: Any) -> Any:
        return F.rms_norm(input, self._normalized_shape, self.weight, self._epsilon)

    def extra_repr(self) -> str:
        return f"normalized_shape={self._normalized_shape}, epsilon={self._epsilon}"


class GroupNorm(Layer):
    """Normalization over each of num_groups groups of channels, weight and bias a channel: arXiv:1803.08494."""

    weight: Parameter
    bias: Parameter

    num_groups: Alias[int] = Alias("_num_groups")
    num_channels: Alias[int] = Alias("_num_channels")
    epsilon: Alias[float] = Alias("_epsilon")
    data_format: Alias[str] = Alias("_data_format")

    @takes_second_names
    @also_in_order(3, ("weight_attr", "bias_attr", "data_format", "name"))
    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        epsilon: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__(dtype=dtype)
        if not isinstance(affine, bool):
            raise ConfigError("GroupNorm: affine is True or False; name weight_attr=")
        if num_groups < 1 or num_channels % num_groups:
            raise ConfigError(f"GroupNorm: {num_channels} channels do not split into {num_groups} equal groups")
        self._num_groups, self._num_channels = num_groups, num_channels
        self._epsilon, self._data_format = epsilon, data_format
        self._weight_attr, self._bias_attr = (weight_attr, bias_attr) if affine else (False, False)
        self.weight = self.create_parameter([num_channels], self._weight_attr, default_initializer=Constant(1.0))
        self.bias = self.create_parameter([num_channels], self._bias_attr, is_bias=True)
        if device is not None:
            self.to(device=device)

    def forward(self, input: Any) -> Any:
        return F.group_norm(
            input, self._num_groups, self._epsilon, self.weight, self.bias, data_format=self._data_format
        )

    def extra_repr(self) -> str:
        return f"num_groups={self._num_groups}, num_channels={self._num_channels}, epsilon={self._epsilon}"


class _InstanceNorm(Layer):
    """Normalization of each channel of each sample, `scale` and `bias` a channel. Source: arXiv:1607.08022."""

    scale: Parameter | None
    bias: Parameter | None

    num_features: Alias[int] = Alias("_num_features")
    epsilon: Alias[float] = Alias("_epsilon")
    momentum: Alias[float] = Alias("_momentum")
    data_format: Alias[str] = Alias("_data_format")
    ndims: tuple[int, ...] = ()

    def __init__(
        self,
        num_features: int,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__()
        if (weight_attr is False) != (bias_attr is False):
            raise ConfigError(
                f"{type(self).__name__}: leave out both scale and bias (False for both attributes) or neither"
            )
        self._num_features, self._epsilon, self._momentum, self._data_format = (
            num_features,
            epsilon,
            momentum,
            data_format,
        )
        self._weight_attr, self._bias_attr = weight_attr, bias_attr
        self.scale = self.create_parameter([num_features], weight_attr, default_initializer=Constant(1.0))
        self.bias = self.create_parameter([num_features], bias_attr, is_bias=True)

    def forward(self, input: Any) -> Any:
        check_ndim(self, input, self.ndims)
        return F.instance_norm(
            input,
            weight=self.scale,
            bias=self.bias,
            momentum=self._momentum,
            eps=self._epsilon,
            data_format=self._data_format,
        )

    def extra_repr(self) -> str:
        return f"num_features={self._num_features}, epsilon={self._epsilon}"


class InstanceNorm1D(_InstanceNorm):
    """InstanceNorm of [batch, channel, length]."""

    ndims: tuple[int, ...] = (2, 3)

    def __init__(
        self,
        num_features: int,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCL",
        name: str | None = None,
    ) -> None:
        super().__init__(num_features, epsilon, momentum, weight_attr, bias_attr, data_format, name)


class InstanceNorm2D(_InstanceNorm):
    """InstanceNorm of [batch, channel, height, width]."""

    ndims: tuple[int, ...] = (4,)


class InstanceNorm3D(_InstanceNorm):
    """InstanceNorm of [batch, channel, depth, height, width]."""

    ndims: tuple[int, ...] = (5,)

    def __init__(
        self,
        num_features: int,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCDHW",
        name: str | None = None,
    ) -> None:
        super().__init__(num_features, epsilon, momentum, weight_attr, bias_attr, data_format, name)


class LocalResponseNorm(Layer):
    """x / (k + alpha * mean of squares over `size` neighbouring channels)^beta.

    Source: Krizhevsky et al., 2012, section 3.3.
    """

    name: str | None
    size: int
    alpha: float
    beta: float
    k: float
    data_format: str

    def __init__(
        self,
        size: int,
        alpha: float = 1e-4,
        beta: float = 0.75,
        k: float = 1.0,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.name, self.size, self.alpha, self.beta, self.k, self.data_format = name, size, alpha, beta, k, data_format

    def forward(self, input: Any) -> Any:
        return F.local_response_norm(input, self.size, self.alpha, self.beta, self.k, self.data_format)

    def extra_repr(self) -> str:
        return f"size={self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"


def check_ndim(layer: Layer, x: Any, allowed: tuple[int, ...]) -> None:
    """Raise ShapeError unless x has one of the allowed numbers of dims."""
    if x.ndim not in allowed:
        wanted = " or ".join(map(str, allowed))
        raise ShapeError(f"{type(layer).__name__} takes {wanted} dims, got shape {list(x.shape)}")
