"""Linear maps, activations, norms and dropout that Paddle fuses by hand; XLA fuses them here."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.ops.arithmetic import matmul
from polyreme.ops.manipulation import chunk
from polyreme.ops.moments import layer_norm_moments, rms_norm_moments

_GATED = {"swiglu": F.silu, "geglu": F.gelu}
_PLAIN = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "swish": F.silu, "sigmoid": F.sigmoid, "tanh": F.tanh}
_PLAIN |= {"none": lambda x: x, "identity": lambda x: x}


def activated(x: Any, name: str, what: str) -> Any:
    """The activation of that name; "swiglu" and "geglu" multiply the activated first half by the second."""
    if name in _GATED:
        gate, value = chunk(x, 2, axis=-1)
        return _GATED[name](gate) * value
    if name not in _PLAIN:
        raise ConfigError(f"{what}: activation {name!r}; choose one of {', '.join([*_PLAIN, *_GATED])}")
    return _PLAIN[name](x)


def refuse(what: str, **settings: tuple[Any, Any]) -> None:
    """Raise ConfigError for settings (given, off) that are not off: they ask for what is not done here."""
    on = [f"{n}={given!r}" for n, (given, off) in settings.items() if given is not off and given != off]
    if on:
        raise ConfigError(
            f"{what}: {', '.join(on)} cannot be honoured; quantize the result yourself, and let a plan split work "
            "over devices"
        )


def fused_matmul_bias(
    x: Any, y: Any, bias: Any = None, transpose_x: bool = False, transpose_y: bool = False, name: str | None = None
) -> Any:
    """x @ y + bias, with the last two dims of x or y swapped first: [*b, m, k], [k, n], [n] -> [*b, m, n]."""
    if not transpose_x and not transpose_y and len(y.shape) == 2:
        return F.linear(x, y, bias)
    out = matmul(x, y, transpose_x, transpose_y)
    return out if bias is None else out + bias


def fused_linear(x: Any, weight: Any, bias: Any = None, transpose_weight: bool = False, name: str | None = None) -> Any:
    """x @ weight + bias: [*b, in], [in, out] ([out, in] with transpose_weight), [out] -> [*b, out]."""
    return fused_matmul_bias(x, weight, bias, False, transpose_weight)


def fused_linear_activation(
    x: Any, y: Any, bias: Any, trans_x: bool = False, trans_y: bool = False, activation: str | None = None
) -> Any:
    """fused_matmul_bias, then "gelu", "relu" or nothing. Raises ConfigError for another activation."""
    if activation not in (None, "none", "gelu", "relu"):
        raise ConfigError(f"fused_linear_activation: activation={activation!r}; choose 'gelu', 'relu' or None")
    return activated(fused_matmul_bias(x, y, bias, trans_x, trans_y), activation or "none", "fused_linear_activation")


def fused_bias_act(
    x: Any,
    bias: Any = None,
    dequant_scales: Any = None,
    shift: Any = None,
    smooth: Any = None,
    act_method: str = "gelu",
    compute_dtype: str = "default",
    quant_scale: float = -1,
    quant_round_type: int = 0,
    quant_max_bound: float = 0,
    quant_min_bound: float = 0,
) -> Any:
    """act(x + bias); act_method may be "swiglu" or "geglu", which halve the last dim.

    Raises ConfigError for another act_method and for the settings of integer inputs and outputs.
    """
    refuse(
        "fused_bias_act", dequant_scales=(dequant_scales, None), shift=(shift, None), smooth=(smooth, None),
        compute_dtype=(compute_dtype, "default"), quant_scale=(quant_scale, -1), quant_round_type=(quant_round_type, 0),
        quant_max_bound=(quant_max_bound, 0), quant_min_bound=(quant_min_bound, 0),
    )  # fmt: skip
    return activated(x if bias is None else x + bias, act_method, "fused_bias_act")


def fused_dropout_add(
    x: Any,
    y: Any,
    p: float = 0.5,
    training: bool = True,
    mode: str = "upscale_in_train",
    name: str | None = None,
) -> Any:
    """dropout(x) + y; p, training and mode as in nn.functional.dropout."""
    return F.dropout(x, p, training=training, mode=mode) + y


def fused_bias_dropout_residual_layer_norm(
    x: Any,
    residual: Any,
    bias: Any = None,
    ln_scale: Any = None,
    ln_bias: Any = None,
    dropout_rate: float = 0.5,
    ln_epsilon: float = 1e-5,
    training: bool = True,
    mode: str = "upscale_in_train",
    name: str | None = None,
) -> Any:
    """layer_norm(residual + dropout(x + bias)) over the last dim: [*, embed] -> the same."""
    x = x if bias is None else x + bias
    summed = fused_dropout_add(x, residual, dropout_rate, training, mode)
    return F.layer_norm(summed, summed.shape[-1:], ln_scale, ln_bias, ln_epsilon)


def fused_feedforward(
    x: Any,
    linear1_weight: Any,
    linear2_weight: Any,
    linear1_bias: Any = None,
    linear2_bias: Any = None,
    ln1_scale: Any = None,
    ln1_bias: Any = None,
    ln2_scale: Any = None,
    ln2_bias: Any = None,
    dropout1_rate: float = 0.5,
    dropout2_rate: float = 0.5,
    activation: str = "relu",
    ln1_epsilon: float = 1e-5,
    ln2_epsilon: float = 1e-5,
    pre_layer_norm: bool = False,
    training: bool = True,
    mode: str = "upscale_in_train",
    ring_id: int = -1,
    add_residual: bool = True,
    name: str | None = None,
) -> Any:
    """x + dropout2(linear2(dropout1(activation(linear1(x))))): [*, d_model] -> the same.

    pre_layer_norm normalizes (ln1) before the first map, else the sum is normalized (ln2). Without add_residual x is
    not added. Raises ConfigError for ring_id.
    """
    refuse("fused_feedforward", ring_id=(ring_id, -1))
    h = F.layer_norm(x, x.shape[-1:], ln1_scale, ln1_bias, ln1_epsilon) if pre_layer_norm else x
    h = activated(F.linear(h, linear1_weight, linear1_bias), activation, "fused_feedforward")
    h = F.linear(F.dropout(h, dropout1_rate, training=training, mode=mode), linear2_weight, linear2_bias)
    h = F.dropout(h, dropout2_rate, training=training, mode=mode)
    h = x + h if add_residual else h
    return h if pre_layer_norm else F.layer_norm(h, h.shape[-1:], ln2_scale, ln2_bias, ln2_epsilon)


# ---- norms ----


def _sum(x: Any, bias: Any, residual: Any, alpha: float) -> Any:
    x = x if bias is None else x + bias
    return x if residual is None else x + residual * alpha


def _sizes(x: Any, begin_norm_axis: int, what: str) -> list[int]:
    ndim = len(x.shape)
    if not -ndim <= begin_norm_axis < ndim:
        raise ShapeError(f"{what}: begin_norm_axis={begin_norm_axis} for x {list(x.shape)}; needs less than {ndim}")
    return list(x.shape[begin_norm_axis:])


def fused_layer_norm(
    x: Any,
    norm_weight: Any,
    norm_bias: Any,
    epsilon: float,
    residual_alpha: float = 1.0,
    begin_norm_axis: int = 1,
    bias: Any = None,
    residual: Any = None,
    quant_scale: float = -1,
    quant_round_type: float = 0,
    quant_max_bound: float = 0,
    quant_min_bound: float = 0,
) -> tuple[Any, Any, Any, Any]:
    """layer_norm(x + bias + residual_alpha * residual) over the dims from begin_norm_axis on.

    Returns (out, the sum if there is a residual else None, the rows' means, the rows' 1 / deviation). With neither
    norm_weight nor norm_bias out is the sum itself and the others are None. Raises ShapeError for an axis out of range,
    ConfigError for the settings of integer outputs.
    """
    refuse(
        "fused_layer_norm", quant_scale=(quant_scale, -1), quant_round_type=(quant_round_type, 0),
        quant_max_bound=(quant_max_bound, 0), quant_min_bound=(quant_min_bound, 0),
    )  # fmt: skip
    sizes = _sizes(x, begin_norm_axis, "fused_layer_norm")
    summed = _sum(x, bias, residual, residual_alpha)
    if norm_weight is None and norm_bias is None:
        return summed, None, None, None
    out = F.layer_norm(summed, sizes, norm_weight, norm_bias, epsilon)
    mean, inverse = layer_norm_moments(summed, len(sizes), epsilon)
    return out, None if residual is None else summed, mean, inverse


def fused_rms_norm(
    x: Any,
    norm_weight: Any,
    norm_bias: Any,
    epsilon: float,
    begin_norm_axis: int = 1,
    bias: Any = None,
    residual: Any = None,
    quant_scale: float = -1,
    quant_round_type: float = 0,
    quant_max_bound: float = 0,
    quant_min_bound: float = 0,
) -> tuple[Any, Any]:
    """rms_norm(x + bias + residual) * norm_weight + norm_bias over the dims from begin_norm_axis on.

    Returns (out, the sum if there is a residual else None). Raises as fused_layer_norm does.
    """
    refuse(
        "fused_rms_norm", quant_scale=(quant_scale, -1), quant_round_type=(quant_round_type, 0),
        quant_max_bound=(quant_max_bound, 0), quant_min_bound=(quant_min_bound, 0),
    )  # fmt: skip
    sizes = _sizes(x, begin_norm_axis, "fused_rms_norm")
    summed = _sum(x, bias, residual, 1.0)
    out = F.rms_norm(summed, sizes, norm_weight, epsilon)
    out = out if norm_bias is None else out + norm_bias.reshape(sizes)
    return out, None if residual is None else summed


def fast_ln(x: Any, scale: Any, bias: Any, epsilon: float = 1e-5) -> tuple[Any, Any, Any]:
    """layer_norm over the last dim -> (y, the rows' means, the rows' 1 / deviation)."""
    return (F.layer_norm(x, x.shape[-1:], scale, bias, epsilon), *layer_norm_moments(x, 1, epsilon))


def fast_rms_norm(x: Any, scale: Any, epsilon: float = 1e-5) -> tuple[Any, Any]:
    """rms_norm over the last dim -> (y, the rows' 1 / sqrt(mean(x^2) + epsilon))."""
    return F.rms_norm(x, x.shape[-1:], scale, epsilon), rms_norm_moments(x, 1, epsilon)


def fused_rms_norm_ext(x: Any, scale: Any, epsilon: float = 1e-5, name: str | None = None) -> tuple[Any, Any]:
    """fast_rms_norm by another name."""
    return fast_rms_norm(x, scale, epsilon)
