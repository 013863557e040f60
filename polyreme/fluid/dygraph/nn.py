"""Layers with 1.7's parameters, each the one of polyreme.nn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme import nn as ours
from polyreme.core.rng import fixed_key
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.fluid.absent import refusing
from polyreme.fluid.dygraph.layers import Layer, of_1_7
from polyreme.fluid.dygraph.name_scopes import FC, ByScope, OfChannels
from polyreme.fluid.layers.image import pool2d
from polyreme.nn.initializer import Constant
from polyreme.ops import OPS
from polyreme.ops.math import maximum, minimum
from polyreme.ops.neural import dropout_train
from polyreme.program.activations import activate
from polyreme.static.nn.sampled import class_chances, noise_contrastive_loss


class Linear(Layer, ours.Linear):
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


class _Convolution(OfChannels, Layer):
    """act(a convolution, or its transpose). use_cudnn: the values are the same."""

    def __init__(
        self, num_channels: int, num_filters: int, filter_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int | None = None, param_attr: Any = None, bias_attr: Any = None,
        use_cudnn: bool = True, act: str | None = None, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(
            num_channels, num_filters, filter_size, stride=stride, padding=padding, dilation=dilation,
            groups=groups or 1, weight_attr=param_attr, bias_attr=bias_attr,
        )  # fmt: skip
        self._act = act
        self.to(dtype=dtype)

    @of_1_7
    def forward(self, input: Any) -> Any:
        return activate(super().forward(input), self._act)


class Conv2D(_Convolution, ours.Conv2D):
    """act(filters * x + bias): [n, c, h, w] -> [n, num_filters, h', w']. use_cudnn: the values are the same."""


class Conv3D(_Convolution, ours.Conv3D):
    """act(filters * x + bias): [n, c, d, h, w] -> [n, num_filters, d', h', w']. use_cudnn: the values are the same."""


class Conv2DTranspose(_Convolution, ours.Conv2DTranspose):
    """act(the transpose of a convolution + bias): [n, c, h, w] -> [n, num_filters, h', w'], or of size output_size."""

    def __init__(
        self, num_channels: int, num_filters: int, filter_size: Any, output_size: Any = None, padding: Any = 0,
        stride: Any = 1, dilation: Any = 1, groups: int | None = None, param_attr: Any = None, bias_attr: Any = None,
        use_cudnn: bool = True, act: str | None = None, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(
            num_channels, num_filters, filter_size, stride, padding, dilation, groups, param_attr, bias_attr,
            use_cudnn, act, dtype,
        )  # fmt: skip
        self._output_size = [output_size] * 2 if isinstance(output_size, int) else output_size

    @classmethod
    def of_scope(
        cls, input: Any, num_filters: int, output_size: Any = None, filter_size: Any = None, *args: Any, **kwargs: Any
    ) -> Conv2DTranspose:
        """The layer for an input; without filter_size it follows from output_size and the settings that are named."""
        if filter_size is None:
            filter_size = _filter_size(input.shape[2:], output_size, kwargs)
        return cls(input.shape[1], num_filters, filter_size, output_size, *args, **kwargs)

    @of_1_7
    def forward(self, input: Any) -> Any:
        return activate(ours.Conv2DTranspose.forward(self, input, self._output_size), self._act)


def _filter_size(sizes: Sequence[int], output_size: Any, settings: dict[str, Any]) -> list[int]:
    """Sizes of the filters that make images of these sizes ones of output_size."""
    if output_size is None:
        raise ConfigError("dygraph.Conv2DTranspose: give filter_size, or output_size from which it follows")

    def each(value: Any) -> list[int]:
        return [value] * 2 if isinstance(value, int) else list(value)

    strides, pads, dilations = (each(settings.get(n, d)) for n, d in (("stride", 1), ("padding", 0), ("dilation", 1)))
    every = zip(sizes, each(output_size), strides, pads, dilations, strict=True)
    return [(out - (size - 1) * stride + 2 * pad - 1) // dilation + 1 for size, out, stride, pad, dilation in every]


class Conv3DTranspose(_Convolution, ours.Conv3DTranspose):
    """act(the transpose of a convolution + bias): [n, c, d, h, w] -> [n, num_filters, d', h', w']."""

    def __init__(
        self, num_channels: int, num_filters: int, filter_size: Any, padding: Any = 0, stride: Any = 1,
        dilation: Any = 1, groups: int | None = None, param_attr: Any = None, bias_attr: Any = None,
        use_cudnn: bool = True, act: str | None = None, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(
            num_channels, num_filters, filter_size, stride, padding, dilation, groups, param_attr, bias_attr,
            use_cudnn, act, dtype,
        )  # fmt: skip


class Pool2D(ByScope, Layer):
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


class Embedding(ByScope, Layer, ours.Embedding):
    """Rows of a table of shape size; is_sparse and the others as in layers.embedding."""

    def __init__(
        self, size: Sequence[int], is_sparse: bool = False, is_distributed: bool = False,
        padding_idx: int | None = None, param_attr: Any = None, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(size[0], size[1], padding_idx, sparse=bool(is_sparse), weight_attr=param_attr)
        self.to(dtype=dtype)

    @of_1_7
    def forward(self, input: Any) -> Any:
        return super().forward(input)


class BatchNorm(ByScope, Layer, ours.BatchNorm):
    """act of each channel to mean 0 and variance 1, scaled and shifted."""


class LayerNorm(ByScope, Layer, ours.LayerNorm):
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

    @classmethod
    def of_scope(
        cls, input: Any, scale: bool = True, shift: bool = True, begin_norm_axis: int = 1, *args: Any, **kwargs: Any
    ) -> LayerNorm:
        """The layer for an input, over its dims from begin_norm_axis on."""
        return cls(list(input.shape[begin_norm_axis:]), scale, shift, *args, **kwargs)


class GroupNorm(OfChannels, Layer, ours.GroupNorm):
    """act of each group of channels to mean 0 and variance 1, scaled and shifted. Source: arXiv:1803.08494.

    Raises ConfigError for a data_layout other than NCHW.
    """

    def __init__(
        self, channels: int, groups: int, epsilon: float = 1e-05, param_attr: Any = None, bias_attr: Any = None,
        act: str | None = None, data_layout: str = "NCHW", dtype: Any = "float32",
    ) -> None:  # fmt: skip
        if data_layout != "NCHW":
            raise ConfigError(f"dygraph.GroupNorm: data_layout={data_layout!r}; it is NCHW, transpose the input")
        super().__init__(groups, channels, epsilon, weight_attr=param_attr, bias_attr=bias_attr)
        self._act = act
        self.to(dtype=dtype)

    def forward(self, input: Any) -> Any:
        return activate(super().forward(input), self._act)


class InstanceNorm(Layer, ours.InstanceNorm2D):
    """Each channel of each image [n, c, h, w] to mean 0 and variance 1, scaled and shifted (arXiv:1607.08022)."""

    def __init__(
        self, num_channels: int, epsilon: float = 1e-05, param_attr: Any = None, bias_attr: Any = None,
        dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(num_channels, epsilon, weight_attr=param_attr, bias_attr=bias_attr)
        self.to(dtype=dtype)


class SpectralNorm(Layer, ours.SpectralNorm):
    """A weight over its largest singular value. Source: arXiv:1802.05957, algorithm 1."""

    @of_1_7
    def forward(self, weight: Any) -> Any:
        return super().forward(weight)


class Dropout(Layer, ours.Dropout):
    """Elements set to 0 with probability p in training; dropout_implementation says where the others are scaled.

    With a seed every call draws the same ones.
    """

    def __init__(
        self, p: float = 0.5, seed: int | None = None, dropout_implementation: str = "downgrade_in_infer",
        is_test: bool = False,
    ) -> None:  # fmt: skip
        modes = {"downgrade_in_infer": "downscale_in_infer", "upscale_in_train": "upscale_in_train"}
        if dropout_implementation not in modes:
            raise ConfigError(
                f"dygraph.Dropout: dropout_implementation={dropout_implementation!r}; there are {', '.join(modes)}"
            )
        super().__init__(p, mode=modes[dropout_implementation])
        self._is_test, self._seed = is_test, seed

    def forward(self, input: Any) -> Any:
        if self._seed and self.training and not self._is_test:
            return dropout_train(input, self.p, mode=self.mode, **fixed_key(self._seed))
        if not self._is_test or not self.training:
            return super().forward(input)
        return input if self.mode == "upscale_in_train" else input * (1 - self.p)


class PRelu(Layer):
    """x where x > 0, else a learned slope times x, at first 1; mode: one slope for "all", each "channel" or "element".

    Slopes are [1], [1, channel, 1, 1] or [1, *input_shape[1:]].
    """

    def __init__(
        self, mode: str, channel: int | None = None, input_shape: Sequence[int] | None = None, param_attr: Any = None,
        dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__("prelu", dtype)
        shapes = {"all": [1]}
        if channel is not None:
            shapes["channel"] = [1, channel, 1, 1]
        if input_shape is not None:
            shapes["element"] = [1, *input_shape[1:]]
        if mode not in shapes:
            raise ConfigError(
                f"dygraph.PRelu: mode={mode!r}; it is 'all', 'channel' with channel=, or 'element' with input_shape="
            )
        self.weight = self.create_parameter(shapes[mode], param_attr, dtype=dtype, default_initializer=Constant(1.0))

    def forward(self, input: Any) -> Any:
        return maximum(input, 0.0) + self.weight * minimum(input, 0.0)


class BilinearTensorProduct(Layer, ours.Bilinear):
    """act(x W_i y + bias) for each i of output_dim: [n, a], [n, b] -> [n, output_dim]."""

    def __init__(
        self, input1_dim: int, input2_dim: int, output_dim: int, name: str | None = None, act: str | None = None,
        param_attr: Any = None, bias_attr: Any = None, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(input1_dim, input2_dim, output_dim, param_attr, bias_attr, name)
        self._act = act
        self.to(dtype=dtype)

    @of_1_7
    def forward(self, x: Any, y: Any) -> Any:
        return activate(super().forward(x, y), self._act)


class GRUUnit(ByScope, Layer):
    """One step of a GRU: input [n, size] and hidden [n, size / 3] -> (new hidden, reset * hidden, gates [n, size]).

    Source: arXiv:1406.1078; origin_mode: as written there, else with the two shares of the update swapped.
    """

    def __init__(
        self, size: int, param_attr: Any = None, bias_attr: Any = None, activation: str = "tanh",
        gate_activation: str = "sigmoid", origin_mode: bool = False, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(dtype=dtype)
        if size % 3:
            raise ShapeError(f"dygraph.GRUUnit: size={size} is no multiple of 3, for two gates and a candidate")
        self.weight = self.create_parameter([size // 3, size], param_attr, dtype=dtype)
        self.bias = self.create_parameter([1, size], bias_attr, dtype=dtype, is_bias=True)
        self._settings = (activation, gate_activation, origin_mode)

    def forward(self, input: Any, hidden: Any) -> Any:
        return OPS["gru_unit"](input, hidden, self.weight, self.bias, *self._settings)


class NCE(ByScope, Layer):
    """layers.nce as a Layer: the loss of each row [n, dim] with labels [n, t] against num_neg_samples drawn classes.

    sample_weight [n, 1]: factors of the rows. With a seed every call draws the same classes.
    """

    def __init__(
        self, num_total_classes: int, dim: int, sample_weight: Any = None, param_attr: Any = None,
        bias_attr: Any = None, num_neg_samples: int | None = None, sampler: str = "uniform",
        custom_dist: Sequence[float] | None = None, seed: int = 0, is_sparse: bool = False, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(dtype=dtype)
        self._seed = seed
        self._draws = 10 if num_neg_samples is None else num_neg_samples
        self._sample_weight = sample_weight
        chances = class_chances(sampler, num_total_classes, custom_dist)
        self.weight = self.create_parameter([num_total_classes, dim], param_attr, dtype=dtype)
        self.bias = self.create_parameter([num_total_classes, 1], bias_attr, dtype=dtype, is_bias=True)
        self.register_buffer("_expected", to_tensor(chances * self._draws, dtype=dtype), persistable=False)
        self.register_buffer("_upto", to_tensor(np.cumsum(chances), dtype=dtype), persistable=False)

    def forward(self, input: Any, label: Any, sample_weight: Any = None) -> Any:
        loss = noise_contrastive_loss(
            input, label, self.weight, self.bias, self._expected, self._upto, self._draws, self._seed
        )
        factors = self._sample_weight if sample_weight is None else sample_weight
        return loss if factors is None else loss * factors


__all__ = [
    "FC",
    "NCE", "BatchNorm", "BilinearTensorProduct", "Conv2D", "Conv2DTranspose", "Conv3D", "Conv3DTranspose", "Dropout",
    "Embedding", "GRUUnit", "GroupNorm", "InstanceNorm", "LayerNorm", "Linear", "PRelu", "Pool2D", "SpectralNorm",
]  # fmt: skip

__getattr__ = refusing("fluid.dygraph.nn", __name__)
