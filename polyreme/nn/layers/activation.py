"""Activation layers.

Each is one function of polyreme.nn.functional with its settings; formulas are there.
"""

from __future__ import annotations

from typing import Any

from polyreme.core.alias import Alias
from polyreme.core.spelling import takes_second_names
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.layers.functional_layer import FunctionalLayer
from polyreme.nn.parameter import ParamAttrLike


class _Activation(FunctionalLayer):
    _attribute_prefix = "_"


class _PlainActivation(_Activation):
    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)


class ReLU(_PlainActivation):
    """max(x, 0)."""

    _function = staticmethod(F.relu)


class ReLU6(_PlainActivation):
    """min(max(x, 0), 6)."""

    _function = staticmethod(F.relu6)


class Sigmoid(_PlainActivation):
    """1 / (1 + exp(-x))."""

    _function = staticmethod(F.sigmoid)
    _attribute_prefix = ""


class LogSigmoid(_PlainActivation):
    """log(sigmoid(x))."""

    _function = staticmethod(F.log_sigmoid)


class Tanh(_PlainActivation):
    """Hyperbolic tangent."""

    _function = staticmethod(F.tanh)


class Tanhshrink(_PlainActivation):
    """x - tanh(x)."""

    _function = staticmethod(F.tanhshrink)


class Softsign(_PlainActivation):
    """x / (1 + |x|)."""

    _function = staticmethod(F.softsign)


class Swish(_PlainActivation):
    """x * sigmoid(x)."""

    _function = staticmethod(F.swish)


class Mish(_PlainActivation):
    """x * tanh(softplus(x)). Source: arXiv:1908.08681."""

    _function = staticmethod(F.mish)


class Hardswish(_PlainActivation):
    """x * min(max(x + 3, 0), 6) / 6. Source: arXiv:1905.02244, section 5.2."""

    _function = staticmethod(F.hardswish)


class Hardsigmoid(_PlainActivation):
    """min(max(x / 6 + 1/2, 0), 1)."""

    _function = staticmethod(F.hardsigmoid)
    _attribute_prefix = ""


class Silu(Layer):
    """x * sigmoid(x). inplace: write the result into x."""

    def __init__(self, inplace: bool = False, name: str | None = None) -> None:
        super().__init__()
        self._inplace, self._name = inplace, name

    def forward(self, x: Any) -> Any:
        return F.silu(x, inplace=self._inplace)


class GELU(_Activation):
    """x * Phi(x), Phi the normal distribution function; its tanh form if approximate. Source: arXiv:1606.08415."""

    _function = staticmethod(F.gelu)

    def __init__(self, approximate: bool = False, name: str | None = None) -> None:
        super().__init__(name, approximate=approximate)


class ELU(_Activation):
    """x above 0, alpha * (exp(x) - 1) below. Source: arXiv:1511.07289."""

    _function = staticmethod(F.elu)

    def __init__(self, alpha: float = 1.0, name: str | None = None) -> None:
        super().__init__(name, alpha=alpha)


class CELU(_Activation):
    """max(x, 0) + min(alpha * (exp(x / alpha) - 1), 0). Source: arXiv:1704.07483."""

    _function = staticmethod(F.celu)

    def __init__(self, alpha: float = 1.0, name: str | None = None) -> None:
        super().__init__(name, alpha=alpha)


class SELU(_Activation):
    """scale * x above 0, scale * alpha * (exp(x) - 1) below. Source: arXiv:1706.02515."""

    _function = staticmethod(F.selu)

    def __init__(
        self, scale: float = 1.0507009873554805, alpha: float = 1.6732632423543772, name: str | None = None
    ) -> None:
        super().__init__(name, scale=scale, alpha=alpha)


class LeakyReLU(_Activation):
    """x above 0, negative_slope * x below."""

    _function = staticmethod(F.leaky_relu)

    def __init__(self, negative_slope: float = 0.01, name: str | None = None) -> None:
        super().__init__(name, negative_slope=negative_slope)


class Hardtanh(_Activation):
    """x clipped into [min, max]."""

    _function = staticmethod(F.hardtanh)

    def __init__(self, min: float = -1.0, max: float = 1.0, name: str | None = None) -> None:
        super().__init__(name, min=min, max=max)


class Hardshrink(_Activation):
    """x where |x| > threshold, else 0."""

    _function = staticmethod(F.hardshrink)
    lambd: Alias[float] = Alias("_threshold")

    @takes_second_names
    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(name, threshold=threshold)


class Softshrink(_Activation):
    """x moved towards 0 by threshold, 0 within it."""

    _function = staticmethod(F.softshrink)
    lambd: Alias[float] = Alias("_threshold")

    @takes_second_names
    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(name, threshold=threshold)


class Softplus(_Activation):
    """log(1 + exp(beta * x)) / beta, and x itself where beta * x > threshold."""

    _function = staticmethod(F.softplus)

    def __init__(self, beta: float = 1, threshold: float = 20, name: str | None = None) -> None:
        super().__init__(name, beta=beta, threshold=threshold)


class ThresholdedReLU(_Activation):
    """x above threshold, else value."""

    _function = staticmethod(F.thresholded_relu)

    def __init__(self, threshold: float = 1.0, value: float = 0.0, name: str | None = None) -> None:
        super().__init__(name, threshold=threshold, value=value)


class Softmax(_Activation):
    """exp(x) over its sum along axis."""

    _function = staticmethod(F.softmax)

    def __init__(self, axis: int = -1, name: str | None = None) -> None:
        super().__init__(name, axis=axis)


class LogSoftmax(_Activation):
    """log of the softmax along axis."""

    _function = staticmethod(F.log_softmax)

    def __init__(self, axis: int = -1, name: str | None = None) -> None:
        super().__init__(name, axis=axis)


class Softmax2D(Layer):
    """Softmax over the channels of [batch, channel, height, width] or [channel, height, width]."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self._name = name

    def forward(self, x: Any) -> Any:
        if x.ndim not in (3, 4):
            raise ShapeError(
                f"Softmax2D takes [batch, channel, height, width] or [channel, height, width], got {list(x.shape)}"
            )
        return F.softmax(x, axis=-3)


class Maxout(_Activation):
    """Largest of each `groups` neighbouring channels along axis. Source: arXiv:1302.4389."""

    _function = staticmethod(F.maxout)

    def __init__(self, groups: int, axis: int = 1, name: str | None = None) -> None:
        super().__init__(name, groups=groups, axis=axis)


class GLU(_Activation):
    """a * sigmoid(b), a and b the halves of x along axis. Source: arXiv:1612.08083."""

    _function = staticmethod(F.glu)
    dim: Alias[int] = Alias("_axis")

    def __init__(self, axis: int = -1, name: str | None = None) -> None:
        super().__init__(name, axis=axis)


class PReLU(Layer):
    """x above 0, a learned slope times x below: one slope, or one a channel. Source: arXiv:1502.01852.

    num_parameters: 1 or the number of channels. init: initial slope.
    """

    def __init__(
        self,
        num_parameters: int = 1,
        init: float = 0.25,
        weight_attr: ParamAttrLike = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._num_parameters, self._init, self._weight_attr, self._name = num_parameters, init, weight_attr, name
        if weight_attr is False:
            raise ConfigError("PReLU: weight_attr=False leaves no slope to learn; use LeakyReLU")
        self._data_format = data_format
        self._weight = self.create_parameter([num_parameters], weight_attr, default_initializer=Constant(init))

    def forward(self, x: Any) -> Any:
        return F.prelu(x, self._weight, data_format=self._data_format)

    def extra_repr(self) -> str:
        shown = f"num_parameters={self._num_parameters}, data_format={self._data_format}"
        return f"{shown}, init={self._init}, dtype={self._dtype.name}"


class RReLU(Layer):
    """x above 0, a slope times x below: drawn from [lower, upper] an element while training, their mean after.

    Source: arXiv:1505.00853.
    """

    def __init__(self, lower: float = 1.0 / 8.0, upper: float = 1.0 / 3.0, name: str | None = None) -> None:
        super().__init__()
        self._lower, self._upper, self._name = lower, upper, name

    def forward(self, x: Any) -> Any:
        return F.rrelu(x, self._lower, self._upper, training=self.training)

    def extra_repr(self) -> str:
        return f"lower={self._lower}, upper={self._upper}"
