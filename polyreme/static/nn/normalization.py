"""Layer functions that normalize, and prelu."""

from __future__ import annotations

import math
from typing import Any

from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layers.spectral_norm import SpectralNorm
from polyreme.ops.indices.gather import where
from polyreme.ops.manipulation import reshape
from polyreme.program.activations import activation
from polyreme.program.parameters import LayerParameters, check_recording
from polyreme.static.nn.checks import channels, refuse


def batch_norm(
    input: Any,
    act: str | None = None,
    is_test: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-05,
    param_attr: Any = None,
    bias_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    use_global_stats: bool = False,
) -> Any:
    """act(batch normalization of each channel), as nn.BatchNorm; a test clone uses the running statistics.

    The running mean and variance are parameters that are not trained, named `.w_1` and `.w_2` or as given. in_place:
    values have no place of their own in a compiled program, so it changes nothing.
    """
    refuse(
        "batch_norm",
        do_model_average_for_mean_and_var=(
            "" if do_model_average_for_mean_and_var else "False", "an average of models holds what is trained",
        ),
    )  # fmt: skip
    after = activation(act)
    size = channels("batch_norm", input, data_layout, (2, 3, 4, 5))
    parameters = LayerParameters("batch_norm", name)
    weight = parameters.parameter(param_attr, [size], "float32", Constant(1.0))
    bias = parameters.bias(bias_attr, [size], "float32")
    mean = parameters.statistic(moving_mean_name, [size], "float32", Constant(0.0))
    variance = parameters.statistic(moving_variance_name, [size], "float32", Constant(1.0))
    out = F.batch_norm(
        input, mean, variance, weight, bias, training=not is_test, momentum=momentum, epsilon=epsilon,
        data_format=data_layout, use_global_stats=True if use_global_stats else None,
    )  # fmt: skip
    return after(out)


def layer_norm(
    input: Any,
    scale: bool = True,
    shift: bool = True,
    begin_norm_axis: int = 1,
    epsilon: float = 1e-05,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """act(normalization over the dims from begin_norm_axis on), as nn.LayerNorm.

    scale, shift: learn a weight, a bias.
    """
    after = activation(act)
    if not 0 < begin_norm_axis < input.ndim:
        raise ShapeError(
            f"layer_norm: begin_norm_axis={begin_norm_axis} for shape {list(input.shape)}; give 1 to {input.ndim - 1}"
        )
    sizes = input.shape[begin_norm_axis:]
    parameters = LayerParameters("layer_norm", name)
    count = [-1 if -1 in sizes else math.prod(sizes)]
    weight = parameters.parameter(param_attr if scale else False, count, input.dtype, Constant(1.0))
    bias = parameters.bias(bias_attr if shift else False, count, input.dtype)
    return after(F.layer_norm(input, sizes, weight, bias, epsilon))


def group_norm(
    input: Any,
    groups: int,
    epsilon: float = 1e-05,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    data_layout: str = "NCHW",
    name: str | None = None,
) -> Any:
    """act(normalization of groups of channels of each sample), as nn.GroupNorm."""
    after = activation(act)
    size = channels("group_norm", input, data_layout, (2, 3, 4, 5))
    parameters = LayerParameters("group_norm", name)
    weight = parameters.parameter(param_attr, [size], input.dtype, Constant(1.0))
    bias = parameters.bias(bias_attr, [size], input.dtype)
    return after(F.group_norm(input, groups, epsilon, weight, bias, data_format=data_layout))


def instance_norm(
    input: Any, epsilon: float = 1e-05, param_attr: Any = None, bias_attr: Any = None, name: str | None = None
) -> Any:
    """Normalization of each channel of each sample of [n, c, ...], as nn.InstanceNorm.

    Raises ConfigError if one of param_attr and bias_attr is False and the other is not.
    """
    if (param_attr is False) != (bias_attr is False):
        raise ConfigError("instance_norm: leave out both scale and bias (False for both attributes) or neither")
    size = channels("instance_norm", input, "NCHW", (2, 3, 4, 5))
    parameters = LayerParameters("instance_norm", name)
    weight = parameters.parameter(param_attr, [size], input.dtype, Constant(1.0))
    bias = parameters.bias(bias_attr, [size], input.dtype)
    return F.instance_norm(input, weight=weight, bias=bias, eps=epsilon)


def spectral_norm(weight: Any, dim: int = 0, power_iters: int = 1, eps: float = 1e-12, name: str | None = None) -> Any:
    """weight over its largest singular value, as nn.SpectralNorm: every run moves its two vectors on.

    name changes nothing: the vectors are named after the layer, `spectralnorm_<n>.weight_u` and `.weight_v`.
    """
    check_recording("spectral_norm")
    return SpectralNorm(weight.shape, dim, power_iters, eps, weight.dtype)(weight)


def prelu(x: Any, mode: str, param_attr: Any = None, data_format: str = "NCHW", name: str | None = None) -> Any:
    """x where x > 0, else a learned slope times x; mode: one slope for "all", each "channel", or each "element".

    Slopes are [1], [1, c, 1, 1] (or as data_format says) or [1, *x.shape[1:]], at first 0.25.
    """
    parameters = LayerParameters("prelu", name)
    start = Constant(0.25)
    if mode == "all":
        return F.prelu(x, parameters.parameter(param_attr, [1], x.dtype, start))
    if mode == "channel":
        size = channels("prelu", x, data_format, range(2, 6))
        at = 1 if data_format[1] == "C" else x.ndim - 1
        slope = parameters.parameter(param_attr, [size if d == at else 1 for d in range(x.ndim)], x.dtype, start)
        return F.prelu(x, reshape(slope, [size]), data_format)
    if mode == "element":
        slope = parameters.parameter(param_attr, [1, *x.shape[1:]], x.dtype, start)
        return where(x > 0, x, slope * x)
    raise ConfigError(f"prelu: mode={mode!r}; it is 'all', 'channel' or 'element'")
