"""Batch normalization.

Running statistics are the parameters `_mean` and `_variance`, which want no gradient: the forward moves them, no
optimizer does. A Tensor laid out over a mesh is one Tensor, so the statistics of a batch split over devices are those
of the whole batch: every BatchNorm here is a synchronized one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from polyreme.core import dtype as dtypes
from polyreme.core.alias import Alias
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.layers.norm import check_ndim
from polyreme.nn.parameter import ParamAttr, ParamAttrLike, Parameter
from polyreme.ops.normalization import sync_batch_norm


class _BatchNorm(Layer):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias for each channel. Source: arXiv:1502.03167.

    mean and variance are the batch's while training, which moves the running ones: momentum * running +
    (1 - momentum) * batch; in eval mode, or with use_global_stats, the running ones are used.
    """

    weight: Parameter | None
    bias: Parameter | None

    num_features: Alias[int] = Alias("_num_features")
    momentum: Alias[float] = Alias("_momentum")
    epsilon: Alias[float] = Alias("_epsilon")
    data_format: Alias[str] = Alias("_data_format")
    use_global_stats: Alias[bool | None] = Alias("_use_global_stats")
    ndims: tuple[int, ...] = (2, 3, 4, 5)
    _trainable_statistics = False  # the batch's in eval mode too
    _statistic_names: tuple[str | None, str | None] = (None, None)

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCHW",
        use_global_stats: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._name, self._weight_attr, self._bias_attr = name, weight_attr, bias_attr
        self._num_features, self._momentum, self._epsilon = num_features, momentum, epsilon
        self._data_format, self._use_global_stats = data_format, use_global_stats
        self.weight = self.create_parameter([num_features], weight_attr, default_initializer=Constant(1.0))
        self.bias = self.create_parameter([num_features], bias_attr, is_bias=True)
        for name, given, start in zip(("_mean", "_variance"), self._statistic_names, (0.0, 1.0), strict=True):
            self.add_parameter(name, self._statistic(given, start))

    def _statistic(self, name: str | None, start: float) -> Any:
        # statistics of half-precision activations would not add up in half precision
        wide = dtypes.float64 if dtypes.default_dtype() == dtypes.float64 else dtypes.float32
        attr = ParamAttr(name=name, initializer=Constant(start), trainable=False)
        statistic = self.create_parameter([self._num_features], attr, wide)
        statistic.is_statistic = True
        return statistic

    _normalize: ClassVar[Callable[..., Any]] = staticmethod(F.batch_norm)

    def forward(self, input: Any) -> Any:
        check_ndim(self, input, self.ndims)
        return self._normalize(
            input,
            self._mean,
            self._variance,
            self.weight,
            self.bias,
            training=self.training or self._trainable_statistics,
            momentum=self._momentum,
            epsilon=self._epsilon,
            data_format=self._data_format,
            use_global_stats=self._use_global_stats,
        )

    def extra_repr(self) -> str:
        layout = "" if self._data_format == "NCHW" else f", data_format={self._data_format}"
        return f"num_features={self._num_features}, momentum={self._momentum}, epsilon={self._epsilon}{layout}"


class BatchNorm1D(_BatchNorm):
    """BatchNorm of [batch, channel] or [batch, channel, length]."""

    ndims: tuple[int, ...] = (2, 3)

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCL",
        use_global_stats: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(num_features, momentum, epsilon, weight_attr, bias_attr, data_format, use_global_stats, name)


class BatchNorm2D(_BatchNorm):
    """BatchNorm of [batch, channel, height, width].

    >>> sorted(BatchNorm2D(3).state_dict())
    ['_mean', '_variance', 'bias', 'weight']
    """

    ndims: tuple[int, ...] = (4,)


class BatchNorm3D(_BatchNorm):
    """BatchNorm of [batch, channel, depth, height, width]."""

    ndims: tuple[int, ...] = (5,)

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCDHW",
        use_global_stats: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(num_features, momentum, epsilon, weight_attr, bias_attr, data_format, use_global_stats, name)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over the whole batch of all devices.

    The same as BatchNorm, because a Tensor is global, but in a Program that CompiledProgram.with_data_parallel runs on
    part of the batch on each device.
    """

    _normalize = staticmethod(sync_batch_norm)

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__(num_features, momentum, epsilon, weight_attr, bias_attr, data_format, None, name)

    def forward(self, x: Any) -> Any:  # type: ignore[override]  (its name in the public API)
        return super().forward(x)

    @classmethod
    def convert_sync_batchnorm(cls, layer: Layer) -> Layer:
        """The layer, every BatchNorm in it replaced by a SyncBatchNorm that shares its parameters and statistics."""
        return with_twins(layer, _BatchNorm, cls)


def with_twins(layer: Layer, kind: type[_BatchNorm], twin: Any) -> Layer:
    """The layer, in which every layer of a kind is replaced by a twin that shares its parameters and statistics."""
    if isinstance(layer, kind) and not isinstance(layer, twin):
        replacement = twin(layer.num_features, layer.momentum, layer.epsilon, False, False)
        replacement._parameters.clear()  # the order is the other's
        for name in ("weight", "bias", "_mean", "_variance", "_data_format", "_use_global_stats", "training"):
            setattr(replacement, name, getattr(layer, name))
        return replacement
    for name, inner in layer.named_children():
        converted = with_twins(inner, kind, twin)
        if converted is not inner:
            layer.add_sublayer(name, converted)
    return layer


class BatchNorm(_BatchNorm):
    """BatchNorm of any number of dims, in the older spelling of its settings; act: an activation applied after.

    trainable_statistics: mean and variance are the batch's in eval mode too. in_place: as without it, which the
    compiler decides.
    """

    act: Alias[str | None] = Alias("_act")

    def __init__(
        self,
        num_channels: int,
        act: str | None = None,
        is_test: bool = False,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        param_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        dtype: Any = "float32",
        data_layout: str = "NCHW",
        in_place: bool = False,
        moving_mean_name: str | None = None,
        moving_variance_name: str | None = None,
        do_model_average_for_mean_and_var: bool = True,
        use_global_stats: bool = False,
        trainable_statistics: bool = False,
    ) -> None:
        if not do_model_average_for_mean_and_var:
            raise ConfigError("BatchNorm: do_model_average_for_mean_and_var=False is not supported; leave it out")
        if act is not None and not callable(getattr(F, act, None)):
            raise ConfigError(f"BatchNorm: act {act!r} is not a function of polyreme.nn.functional")
        self._statistic_names = (moving_mean_name, moving_variance_name)
        super().__init__(
            num_channels, momentum, epsilon, param_attr, bias_attr, data_layout, use_global_stats or None, None
        )
        self._act, self._trainable_statistics = act, trainable_statistics
        self._param_attr, self._data_layout, self._is_test = param_attr, data_layout, is_test
        if str(dtype) != "float32":
            self.astype(dtype)
        if is_test:
            self.training = False

    def forward(self, input: Any) -> Any:
        out = super().forward(input)
        return out if self._act is None else getattr(F, self._act)(out)
