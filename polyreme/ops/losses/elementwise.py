"""Losses.

All compute in at least float32. reduction is "none", "mean" (over elements unless said otherwise) or "sum";
the result has the floating inputs' common dtype.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.call_site import user_line
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import floating, promote
from polyreme.core.op import composite, op
from polyreme.core.sharding_rule import OpCall, Reduce, ShardingRule
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.bounds import preceded
from polyreme.ops.ids import check_range, visible
from polyreme.ops.math import magnitude, minimum
from polyreme.ops.matrices.norms import p_norm
from polyreme.ops.sharding import broadcast_names, dim_names, elementwise


def reduced(loss: Array, reduction: str, what: str) -> Array:
    """loss reduced as asked. Raises ConfigError for an unknown word."""
    match reduction:
        case "mean":
            return jnp.mean(loss)
        case "sum":
            return jnp.sum(loss)
        case "none":
            return loss
    raise ConfigError(f"{what}: reduction={reduction!r}; choose 'none', 'mean' or 'sum'")


def _together(*arrays: Array) -> tuple[Any, list[Array]]:
    """(the dtype of the result, the arrays in at least float32)."""
    common = promote(*(floating(a) for a in arrays))
    return common[0].dtype, [wide(a) for a in common]


def _compared(what: str, input: Array, label: Array) -> tuple[Any, list[Array]]:
    """_together, with a warning where they broadcast to what is neither's shape, as [n, 1] and [n] do."""
    if jnp.broadcast_shapes(input.shape, label.shape) not in (input.shape, label.shape):
        warnings.warn(
            f"{user_line()}: {what}: input {list(input.shape)} and label {list(label.shape)} broadcast to "
            f"{list(jnp.broadcast_shapes(input.shape, label.shape))}, every entry of one with every one of the other; "
            "give them one shape, with reshape or unsqueeze, if that is not meant",
            stacklevel=2,
        )
    return _together(input, label)


def _same_shape(x: Any, y: Any, what: str, names: str = "input and label") -> None:
    if tuple(x.shape) != tuple(y.shape):
        raise ShapeError(
            f"{what}: {names} have shapes {list(x.shape)} and {list(y.shape)}, and need one; reshape or unsqueeze one"
        )


def _xlogy(x: Array, y: Array) -> Array:
    """x * log(y), and 0 with gradient 0 where x is 0."""
    return jnp.where(x == 0, 0, x * jnp.log(jnp.where(x == 0, 1, y)))


def _loss_rule(call: OpCall) -> ShardingRule | None:
    """Element by element, then a sum or mean, Partial where all pieces are equal."""
    shape = max(call.shapes, key=len)
    inputs = tuple(broadcast_names(s, shape) for s in call.shapes)
    if call.attrs["reduction"] == "none":
        return ShardingRule(inputs, (dim_names(shape),)) if call.outs[0] == shape else None
    reduces: dict[str, Reduce] = {"sum": "sum", "mean": "avg"}
    alike = all(s == shape for s in call.shapes)
    return ShardingRule(inputs, ((),), reduce=reduces.get(call.attrs["reduction"]) if alike else None, padding=None)


@op(amp="fp32", method=False, rule=_loss_rule, real=True)
def binary_cross_entropy(input: Array, label: Array, weight: Array | None = None, reduction: str = "mean") -> Array:
    """-(label * log(input) + (1 - label) * log(1 - input)) * weight; the logarithms are held at -100 and above.

    NaN for an input outside of [0, 1], such as scores that never went through sigmoid.

    Raises ShapeError unless input and label have one shape.
    """
    _same_shape(input, label, "binary_cross_entropy")
    own, (x, y) = _together(input, label)
    loss = -(y * _floored_log(x) + (1 - y) * _floored_log(1 - x))
    return reduced(loss if weight is None else loss * wide(weight), reduction, "binary_cross_entropy").astype(own)


def _floored_log(x: Array) -> Array:
    """max(log(x), -100), with gradient 0 where it is held; NaN below 0."""
    floor = math.exp(-100)
    held = (x >= 0) & (x <= floor)
    return jnp.where(held, -100, jnp.log(jnp.where(held, 1, x)))


@op(amp="fp32", method=False, rule=_loss_rule, real=True)
def binary_cross_entropy_with_logits(
    logit: Array,
    label: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    pos_weight: Array | None = None,
) -> Array:
    """binary_cross_entropy(sigmoid(logit), label) without overflow; pos_weight multiplies the label's own term.

    weight and pos_weight broadcast. Raises ShapeError unless logit and label have one shape.
    """
    _same_shape(logit, label, "binary_cross_entropy_with_logits")
    own, (x, y) = _together(logit, label)
    positive = y if pos_weight is None else y * wide(pos_weight)
    loss = -(positive * jax.nn.log_sigmoid(x) + (1 - y) * jax.nn.log_sigmoid(-x))
    loss = loss if weight is None else loss * wide(weight)
    return reduced(loss, reduction, "binary_cross_entropy_with_logits").astype(own)


@op(amp="fp32", method=False, real=True)
def sigmoid_focal_loss(
    logit: Array,
    label: Array,
    normalizer: Array | None = None,
    alpha: float = 0.25,
    gamma: float = 2.0,
    reduction: str = "sum",
) -> Array:
    """-a (1 - q)^gamma log(q), q the probability given to the label and a = alpha for label 1, 1 - alpha for 0.

    Divided by normalizer. Source: arXiv:1708.02002, equation 5. Raises ShapeError unless the shapes are equal.
    """
    _same_shape(logit, label, "sigmoid_focal_loss")
    dtype, (x, y) = _together(logit, label)
    entropy = -(y * jax.nn.log_sigmoid(x) + (1 - y) * jax.nn.log_sigmoid(-x))
    p = jax.nn.sigmoid(x)
    miss = p * (1 - y) + (1 - p) * y
    loss = (alpha * y + (1 - alpha) * (1 - y)) * jnp.power(miss, gamma) * entropy
    loss = loss if normalizer is None else loss / wide(normalizer)
    return reduced(loss, reduction, "sigmoid_focal_loss").astype(dtype)


@op(amp="fp32", method=False, rule=elementwise, real=True)
def log_loss(input: Array, label: Array, epsilon: float = 0.0001) -> Array:
    """-label * log(input + epsilon) - (1 - label) * log(1 - input + epsilon), elementwise."""
    _same_shape(input, label, "log_loss")
    own, (x, y) = _together(input, label)
    return (-y * jnp.log(x + epsilon) - (1 - y) * jnp.log(1 - x + epsilon)).astype(own)


@op(amp="fp32", method=False)
def label_smooth(label: Array, prior_dist: Array | None = None, epsilon: float = 0.1) -> Array:
    """(1 - epsilon) * label + epsilon * prior_dist, the prior being uniform over the last dim unless given.

    Raises ConfigError for an epsilon outside of [0, 1].
    """
    y = floating(label)
    if not 0 <= epsilon <= 1:
        raise ConfigError(f"label_smooth: epsilon={epsilon}; it must lie in [0, 1]")
    if prior_dist is None:
        return (1 - epsilon) * y + epsilon / max(y.shape[-1], 1)
    if prior_dist.size != y.shape[-1]:
        raise ShapeError(f"label_smooth: prior_dist {list(prior_dist.shape)}; needs [{y.shape[-1]}], one a class")
    return (1 - epsilon) * y + epsilon * prior_dist.reshape(-1).astype(y.dtype)


def _check_dice(input: Any, label: Any, epsilon: Any = None, **_: Any) -> None:
    check_range(label, input.shape[-1], "dice_loss: label")


@preceded(_check_dice)
@op(amp="fp32", method=False, real=True)
def dice_loss(input: Array, label: Array, epsilon: float = 1e-05) -> Array:
    """Mean over the batch of 1 - 2 |input . label| / (|input| + |label| + epsilon), label made one-hot.

    [N, ..., C], [N, ..., 1] -> []. Source: arXiv:1606.04797. Raises ShapeError for a label of another shape, IndexError
    for one out of range (in captured code: no class).
    """
    if input.ndim < 2 or label.shape != (*input.shape[:-1], 1):
        raise ShapeError(
            f"dice_loss: label {list(label.shape)} does not fit input {list(input.shape)}; needs a last dim of 1"
        )
    x = wide(input)
    y = jax.nn.one_hot(label[..., 0], x.shape[-1], dtype=x.dtype)
    dims = tuple(range(1, x.ndim))
    shared, total = jnp.sum(x * y, dims), jnp.sum(x, dims) + jnp.sum(y, dims)
    return jnp.mean(1 - 2 * shared / (total + epsilon)).astype(floating(input).dtype)


@op(amp="fp32", method=False, rule=_loss_rule)
def mse_loss(input: Array, label: Array, reduction: str = "mean") -> Array:
    """(input - label)^2; the two broadcast, with a warning if to a shape that neither has."""
    own, (x, y) = _compared("mse_loss", input, label)
    return reduced(jnp.square(x - y), reduction, "mse_loss").astype(own)


@op(amp="fp32", method=False, rule=elementwise)
def square_error_cost(input: Array, label: Array) -> Array:
    """(input - label)^2, elementwise; the two broadcast as in mse_loss."""
    own, (x, y) = _compared("square_error_cost", input, label)
    return jnp.square(x - y).astype(own)


@op(amp="fp32", method=False, rule=_loss_rule)
def l1_loss(input: Array, label: Array, reduction: str = "mean") -> Array:
    """|input - label|, real; the two broadcast as in mse_loss, and the gradient where they are equal is 0."""
    own, (x, y) = _compared("l1_loss", input, label)
    return reduced(magnitude(x - y), reduction, "l1_loss").astype(jnp.finfo(own).dtype)


@op(amp="fp32", method=False, rule=_loss_rule, real=True)
def smooth_l1_loss(
    input: Array, label: Array, reduction: str = "mean", delta: float = 1.0, is_huber: bool = True
) -> Array:
    """e^2 / 2 where |e| < delta, else delta * (|e| - delta / 2), e = input - label; divided by delta unless is_huber.

    Raises ConfigError unless delta > 0, ShapeError unless the two have one shape.
    """
    if delta <= 0:
        raise ConfigError(f"smooth_l1_loss: delta={delta}; it must be positive")
    _same_shape(input, label, "smooth_l1_loss")
    own, (x, y) = _together(input, label)
    error = x - y
    size = jnp.abs(error)
    loss = jnp.where(size < delta, 0.5 * jnp.square(error), delta * (size - 0.5 * delta))
    return reduced(loss if is_huber else loss / delta, reduction, "smooth_l1_loss").astype(own)


@op(amp="fp32", method=False, rule=_loss_rule, real=True)
def kl_div(input: Array, label: Array, reduction: str = "mean", log_target: bool = False) -> Array:
    """label * (log(label) - input), input being log-probabilities; log_target: label holds logarithms too.

    reduction "batchmean" divides the sum by the first size. A label of 0 adds 0. Raises ShapeError unless the two have
    one shape.
    """
    _same_shape(input, label, "kl_div")
    own, (x, y) = _together(input, label)
    loss = jnp.exp(y) * (y - x) if log_target else jnp.where(y > 0, _xlogy(jnp.maximum(y, 0), y) - y * x, 0)
    if reduction == "batchmean":
        return (jnp.sum(loss) / (loss.shape[0] if loss.ndim else 1)).astype(own)
    return reduced(loss, reduction, "kl_div").astype(own)


@op(amp="fp32", method=False, rule=_loss_rule, real=True)
def poisson_nll_loss(
    input: Array,
    label: Array,
    log_input: bool = True,
    full: bool = False,
    epsilon: float = 1e-08,
    reduction: str = "mean",
) -> Array:
    """e^input - label * input, or input - label * log(input + epsilon) with log_input=False.

    full adds Stirling's label * log(label) - label + log(2 pi label) / 2 where label > 1. Raises ConfigError unless
    epsilon > 0, ShapeError unless the two have one shape.
    """
    if epsilon <= 0:
        raise ConfigError(f"poisson_nll_loss: epsilon={epsilon}; it must be positive")
    _same_shape(input, label, "poisson_nll_loss")
    dtype, (x, y) = _together(input, label)
    loss = jnp.exp(x) - y * x if log_input else x - y * jnp.log(x + epsilon)
    if full:
        large = y > 1
        safe = jnp.where(large, y, 1)
        loss = loss + jnp.where(large, safe * jnp.log(safe) - safe + 0.5 * jnp.log(2 * jnp.pi * safe), 0)
    return reduced(loss, reduction, "poisson_nll_loss").astype(dtype)


@op(amp="fp32", method=False, rule=_loss_rule, real=True)
def gaussian_nll(
    input: Array, label: Array, variance: Array, full: bool = False, epsilon: float = 1e-06, reduction: str = "mean"
) -> Array:
    """gaussian_nll_loss without the check of the variance's values; below 0 it gives NaN."""
    if variance.shape not in (input.shape, (*input.shape[:-1], 1), input.shape[:-1]):
        raise ShapeError(
            f"gaussian_nll_loss: variance {list(variance.shape)} does not fit input {list(input.shape)}; needs its "
            "shape, or that with the last dim 1 or left out"
        )
    dtype, (x, y, v) = _together(input, label, variance)
    v = v if v.ndim == x.ndim else v[..., None]
    # held up by a constant, so that the gradient goes through
    v = jnp.where(v < 0, jnp.nan, v + jax.lax.stop_gradient(jnp.maximum(v, epsilon) - v))
    loss = 0.5 * (jnp.log(v) + jnp.square(x - y) / v)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return reduced(loss, reduction, "gaussian_nll_loss").astype(dtype)


@composite(method=False)
def gaussian_nll_loss(
    input: AnyTensor,
    label: AnyTensor,
    variance: AnyTensor,
    full: bool = False,
    epsilon: float = 1e-06,
    reduction: str = "mean",
    name: str | None = None,
) -> AnyTensor:
    """(log(v) + (input - label)^2 / v) / 2, v = max(variance, epsilon); full adds log(2 pi) / 2.

    variance: input's shape, or that with the last dim 1 or left out. Raises ConfigError for a visible negative variance
    (a captured function gives NaN), ShapeError for shapes that do not fit.
    """
    seen = visible(variance)
    if seen is not None and (seen < 0).any():
        raise ConfigError(f"gaussian_nll_loss: variance has the negative entry {seen.min()}; variances are >= 0")
    return gaussian_nll(input, label, variance, full, epsilon, reduction)


@op(amp="fp32", method=False, rule=_loss_rule, real=True)
def margin_ranking_loss(
    input: Array, other: Array, label: Array, margin: float = 0.0, reduction: str = "mean"
) -> Array:
    """max(0, -label * (input - other) + margin), label 1 or -1."""
    own, (x, y, t) = _together(input, other, label)
    return reduced(jax.nn.relu(-t * (x - y) + margin), reduction, "margin_ranking_loss").astype(own)


@op(amp="fp32", method=False, rule=_loss_rule, real=True)
def hinge_embedding_loss(input: Array, label: Array, margin: float = 1.0, reduction: str = "mean") -> Array:
    """input where label is 1, max(0, margin - input) where it is -1, 0 elsewhere; the two broadcast as in mse_loss."""
    own, (x, t) = _compared("hinge_embedding_loss", input, label)
    loss = jnp.where(t == 1, x, jnp.where(t == -1, jax.nn.relu(margin - x), 0))
    return reduced(loss, reduction, "hinge_embedding_loss").astype(own)


@op(amp="fp32", method=False, rule=_loss_rule, real=True)
def soft_margin_loss(input: Array, label: Array, reduction: str = "mean") -> Array:
    """log(1 + e^(-label * input)), label 1 or -1. Raises ShapeError unless the two have one shape."""
    _same_shape(input, label, "soft_margin_loss")
    own, (x, t) = _together(input, label)
    return reduced(jax.nn.softplus(-t * x), reduction, "soft_margin_loss").astype(own)


@op(amp="fp32", method=False, real=True)
def multi_label_soft_margin_loss(
    input: Array, label: Array, weight: Array | None = None, reduction: str = "mean"
) -> Array:
    """Mean over the last dim of binary_cross_entropy_with_logits(input, label) * weight: [*b, C] -> [*b] unreduced."""
    _same_shape(input, label, "multi_label_soft_margin_loss")
    own, (x, y) = _together(input, label)
    loss = -(y * jax.nn.log_sigmoid(x) + (1 - y) * jax.nn.log_sigmoid(-x))
    loss = jnp.mean(loss if weight is None else loss * wide(weight), -1)
    return reduced(loss, reduction, "multi_label_soft_margin_loss").astype(own)


def cosine(x: Array, y: Array, dim: int, eps: float) -> Array:
    """x . y / max(|x| |y|, eps) along dim."""
    return jnp.sum(x * y, dim) / jnp.maximum(p_norm(x, 2.0, dim) * p_norm(y, 2.0, dim), eps)


@op(amp="fp32", method=False, real=True)
def cosine_embedding_loss(
    input1: Array, input2: Array, label: Array, margin: float = 0, reduction: str = "mean"
) -> Array:
    """1 - cos(input1, input2) where label is 1, max(0, cos - margin) where it is -1.

    [N, M], [N, M], [N] -> [N] unreduced; also [M], [M], [] -> []. Raises ShapeError for other shapes, ConfigError
    for a margin outside [-1, 1].
    """
    if not -1 <= margin <= 1:
        raise ConfigError(f"cosine_embedding_loss: margin={margin}; it must lie in [-1, 1]")
    if input1.shape != input2.shape or input1.ndim not in (1, 2) or label.shape != input1.shape[:-1]:
        raise ShapeError(
            f"cosine_embedding_loss: inputs {list(input1.shape)}, {list(input2.shape)} and label {list(label.shape)}; "
            "needs [N, M], [N, M], [N] or [M], [M], []"
        )
    own, (x, y) = _together(input1, input2)
    similarity = cosine(x, y, -1, 1e-12)
    loss = jnp.where(label == 1, 1 - similarity, jax.nn.relu(similarity - margin))
    loss = jnp.where((label == 1) | (label == -1), loss, 0)
    return reduced(loss, reduction, "cosine_embedding_loss").astype(own)


@op(amp="fp32", method=False, real=True)
def triplet_margin_loss(
    input: Array,
    positive: Array,
    negative: Array,
    margin: float = 1.0,
    p: float = 2,
    epsilon: float = 1e-06,
    swap: bool = False,
    reduction: str = "mean",
) -> Array:
    """max(0, d(input, positive) - d(input, negative) + margin), d(a, b) = ||a - b + epsilon||_p.

    [*b, M] -> [*b] unreduced. swap takes the smaller of d(input, negative) and d(positive, negative). Raises
    ConfigError unless margin > 0, ShapeError unless the three have one shape.
    """
    _same_shape(input, positive, "triplet_margin_loss", "input and positive")
    _same_shape(input, negative, "triplet_margin_loss", "input and negative")
    if margin <= 0:
        raise ConfigError(f"triplet_margin_loss: margin={margin}; it must be positive")
    dtype, (x, near, far) = _together(input, positive, negative)
    apart = p_norm(x - far + epsilon, float(p), -1)
    if swap:
        apart = jnp.minimum(apart, p_norm(near - far + epsilon, float(p), -1))
    loss = jax.nn.relu(p_norm(x - near + epsilon, float(p), -1) - apart + margin)
    return reduced(loss, reduction, "triplet_margin_loss").astype(dtype)


@composite(method=False)
def triplet_margin_with_distance_loss(
    input: AnyTensor,
    positive: AnyTensor,
    negative: AnyTensor,
    distance_function: Any = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
    name: str | None = None,
) -> AnyTensor:
    """triplet_margin_loss with a distance of one's own, a function of two Tensors; the Euclidean one unless given.

    Raises ShapeError unless the three have one shape.
    """
    _same_shape(input, positive, "triplet_margin_with_distance_loss", "input and positive")
    _same_shape(input, negative, "triplet_margin_with_distance_loss", "input and negative")
    if distance_function is None:
        return triplet_margin_loss(input, positive, negative, margin=margin, swap=swap, reduction=reduction)
    near, far = distance_function(input, positive), distance_function(input, negative)
    if swap:
        far = minimum(far, distance_function(positive, negative))
    return margin_ranking_loss(far, near, 1.0, margin, reduction)


ALIASES: dict[str, str] = {}
