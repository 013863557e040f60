"""Cross-entropy against class labels and class probabilities.

Computed in at least float32; the result has the input's dtype. Where the values of labels can be seen (not
inside a captured function) a label out of range raises IndexError; in a captured function it gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme import kernels
from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor, DTypeLike
from polyreme.core.dtype import floating, promote_floating
from polyreme.core.op import composite, op
from polyreme.core.sharding_rule import OpCall, Reduce, ShardingRule
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.activation import positive_dim, wide
from polyreme.ops.attention import over_devices
from polyreme.ops.ids import check_range, visible
from polyreme.ops.losses.elementwise import reduced
from polyreme.ops.sharding import dim_names, unnamed, without


def _log_probs(input: Array, dim: int, use_softmax: bool) -> Array:
    return jax.nn.log_softmax(wide(input), dim) if use_softmax else jnp.log(wide(input))


def _class_weight(weight: Array | None, classes: int, what: str) -> Array | None:
    if weight is not None and weight.shape != (classes,):
        raise ShapeError(f"{what}: weight {list(weight.shape)}; needs [{classes}], one a class")
    return None if weight is None else wide(weight)


def _squeezed_label(label: Array, shape: tuple, dim: int, what: str) -> tuple[Array, bool]:
    """label without the class dim, and whether it had one of size 1. Raises for what is neither."""
    rest = shape[:dim] + shape[dim + 1 :]
    if dtypes.is_floating(label.dtype):
        # a fraction is no class
        label = jnp.where(label == jnp.floor(label), dtypes.convert(label, dtypes.int64), jnp.iinfo(dtypes.int64).max)
    elif not dtypes.is_integer(label.dtype):
        raise DTypeError(f"{what}: label is {label.dtype.name}; class labels are integers")
    # compared with the number of classes and with ignore_index, which fewer bits may not hold
    label = label.astype(jnp.promote_types(label.dtype, dtypes.int32))
    if label.shape == (*shape[:dim], 1, *shape[dim + 1 :]):
        return jnp.squeeze(label, dim), True
    if label.shape == rest:
        return label, False
    instead = "; for one-hot labels and probabilities say soft_label=True" if label.shape == shape else ""
    raise ShapeError(
        f"{what}: label {list(label.shape)} does not fit input {list(shape)} with classes along dim {dim}; "
        f"needs {list(rest)} or a size 1 there{instead}"
    )


def _pick(values: Array, label: Array, dim: int) -> Array:
    """values at label along dim; NaN for a label out of range, whose gradient goes nowhere."""
    classes = values.shape[dim]
    at = jnp.expand_dims(jnp.clip(label, 0, classes - 1), dim)
    found = jnp.squeeze(jnp.take_along_axis(values, at, dim), dim)
    return jnp.where((label >= 0) & (label < classes), found, jnp.nan)


def _mean_by(loss: Array, weight: Array, reduction: str, what: str) -> Array:
    """reduced, where the mean divides by the sum of weight; 0 when that is 0."""
    if reduction != "mean":
        return reduced(loss, reduction, what)
    total = jnp.sum(weight)
    return jnp.sum(loss) / jnp.where(total == 0, 1, total)


def _label_weight(weight: Array, label: Array, smoothing: float) -> Array:
    """The factor of each label's loss."""
    by = weight[jnp.clip(label, 0, weight.size - 1)]
    return (1 - smoothing) * by + smoothing * jnp.mean(weight) if smoothing else by


def _hard_losses(
    log_probs: Array, label: Array, weight: Array | None, ignore_index: int, smoothing: float, dim: int
) -> tuple[Array, Array]:
    """(loss of each element, its weight in the mean)."""
    live = label != ignore_index
    label = jnp.where(live, label, 0)
    loss = -_pick(log_probs, label, dim)
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * jnp.mean(log_probs, dim)
    by = jnp.ones_like(loss)
    if weight is not None:
        by = _label_weight(weight, label, smoothing)
    by = jnp.where(live, by, 0)
    return jnp.where(live, loss * by, 0), by


def _soft_losses(log_probs: Array, label: Array, weight: Array | None, smoothing: float, dim: int) -> tuple:
    if label.shape != log_probs.shape:
        raise ShapeError(
            f"cross_entropy: soft label {list(label.shape)} and input {list(log_probs.shape)} need the same shape"
        )
    label = wide(label)
    if smoothing:
        label = (1 - smoothing) * label + smoothing / label.shape[dim]
    # a class of probability 0 with no share of the label adds 0, not 0 * -inf
    loss = -jnp.sum(jnp.where(label == 0, 0, label * log_probs), dim)
    if weight is None:
        return loss, jnp.ones_like(loss)
    by = jnp.tensordot(label, weight, ((dim,), (0,)))
    return loss * by, by


def _cross_entropy_rule(call: OpCall) -> ShardingRule:
    """Classes are whole, batches go through; a sum over split ones is Partial, a mean is joined at once."""
    shape, label = call.shapes[0], call.shapes[1]
    dim = call.dim(call.attrs.get("axis", 1 if call.name == "nll_of_classes" else -1))
    batch = dim_names(shape)
    scores = (*batch[:dim], "classes", *batch[dim + 1 :])
    rest, room = (*batch[:dim], *batch[dim + 1 :]), without(batch, dim)
    labels = scores if label == shape else rest if len(label) == len(rest) else room
    if call.attrs.get("reduction", "none") == "none":
        outputs = tuple(rest if len(out) == len(rest) else room for out in call.outs)
        reduce: Reduce | None = None
    else:
        outputs, reduce = ((),), "sum" if call.attrs["reduction"] == "sum" else None
    return ShardingRule(
        (scores, labels, *unnamed(call.shapes[2:])),
        outputs,
        whole=frozenset({"classes"}),
        reduce=reduce,
        padding=None,
        roles=(("classes", "classes"),),
    )


def _linear_cross_entropy_rule(call: OpCall) -> ShardingRule | None:
    """[*b, hidden] x [hidden, classes] + [classes] against [*b]; the loss of each token has the tokens' dims."""
    tokens, label = call.shapes[0][:-1], call.shapes[2]
    if len(call.outs[0]) not in (0, len(tokens)) or len(label) not in (len(tokens), len(tokens) + 1):
        return None
    sliced = {i for i, bounds in enumerate(call.attrs.get("rows", ())) if bounds != (None, None, None)}
    batch = without(dim_names(tokens, "b"), *sliced)
    weight = ("classes", "hidden") if call.attrs["transpose_weight"] else ("hidden", "classes")
    labels = batch if len(label) == len(batch) else (*batch, None)
    return ShardingRule(
        call.inputs(hidden=(*batch, "hidden"), weight=weight, label=labels, bias=("classes",)),
        (batch if len(call.outs[0]) == len(batch) else (),),
        whole=frozenset({"hidden", "classes"}),
        roles=(("hidden", "contracted"), ("classes", "classes")),
    )


@op(amp="fp32", method=False, rule=_cross_entropy_rule, real=True)
def cross_entropy_of_classes(
    input: Array,
    label: Array,
    weight: Array | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    soft_label: bool = False,
    axis: int = -1,
    use_softmax: bool = True,
    label_smoothing: float = 0.0,
) -> Array:
    """cross_entropy without the check of the labels' values; a label out of range gives NaN."""
    dim = positive_dim(axis, input.ndim, "cross_entropy")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"cross_entropy: label_smoothing={label_smoothing}; it must lie in [0, 1]")
    dtype = floating(input).dtype
    weight = _class_weight(weight, input.shape[dim], "cross_entropy")
    log_probs = _log_probs(input, dim, use_softmax)
    if soft_label:
        loss, by = _soft_losses(log_probs, label, weight, label_smoothing, dim)
        keep = True
    else:
        label, keep = _squeezed_label(label, input.shape, dim, "cross_entropy")
        loss, by = _hard_losses(log_probs, label, weight, ignore_index, label_smoothing, dim)
    if reduction == "none" and keep:
        loss = jnp.expand_dims(loss, dim)
    return _mean_by(loss, by, reduction, "cross_entropy").astype(dtype)


def _check_labels(label: Any, classes: int, ignore_index: int, what: str) -> None:
    values = visible(label)
    if values is not None and dtypes.is_floating(values.dtype):
        fraction = ~np.isfinite(values) | (values != np.floor(values))
        if fraction.any():
            at = [int(i[0]) for i in np.nonzero(fraction)]
            raise DTypeError(f"{what}: label {values[tuple(at)]} at {at} is no whole number; class labels are integers")
        label = values.astype("int64")
    check_range(label, classes, f"{what}: label", ignore_index)


def _classes(input: Any, axis: int) -> int:
    return input.shape[axis] if -len(input.shape) <= axis < len(input.shape) else 1 << 62


@composite(method=False)
def cross_entropy(
    input: AnyTensor,
    label: AnyTensor,
    weight: AnyTensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    soft_label: bool = False,
    axis: int = -1,
    use_softmax: bool = True,
    label_smoothing: float = 0.0,
    name: str | None = None,
) -> AnyTensor:
    """-log softmax(input)[label] along axis (-log input[label] with use_softmax=False); probabilities as labels with
    soft_label=True: -sum of label * log softmax(input).

    input [*b, C] (C at axis), label [*b] or [*b, 1], or [*b, C] when soft; unreduced the result is [*b], or [*b, 1] for
    a label with a class dim. Labels equal to ignore_index give 0 and do not count in the mean. weight [C]: each loss is
    multiplied by its label's weight, and the mean divides by their sum. label_smoothing e takes (1 - e) * label + e
    / C, and labels of input's shape are then probabilities. Raises ShapeError, DTypeError for labels that do not fit
    and IndexError for a label out of range.
    """
    if label_smoothing and _classes(input, axis) > 1:
        soft_label = soft_label or tuple(label.shape) == tuple(input.shape)
    if not soft_label:
        _check_labels(label, _classes(input, axis), ignore_index, "cross_entropy")
    return cross_entropy_of_classes(
        input, label, weight, ignore_index, reduction, soft_label, axis, use_softmax, label_smoothing
    )


@op(amp="fp32", method=False, rule=_cross_entropy_rule, real=True)
def softmax_and_cross_entropy(
    logits: Array, label: Array, soft_label: bool = False, ignore_index: int = -100, axis: int = -1
) -> tuple[Array, Array]:
    """softmax_with_cross_entropy -> (loss, softmax), without the check of the labels' values."""
    dim = positive_dim(axis, logits.ndim, "softmax_with_cross_entropy")
    log_probs = _log_probs(logits, dim, True)
    if soft_label:
        loss, _ = _soft_losses(log_probs, label, None, 0.0, dim)
    else:
        label, _ = _squeezed_label(label, logits.shape, dim, "softmax_with_cross_entropy")
        loss, _ = _hard_losses(log_probs, label, None, ignore_index, 0.0, dim)
    own = floating(logits).dtype
    return jnp.expand_dims(loss, dim).astype(own), jnp.exp(log_probs).astype(own)


@composite(method=False)
def softmax_with_cross_entropy(
    logits: AnyTensor,
    label: AnyTensor,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Any:
    """cross_entropy of each element, unreduced, [*b, C] -> [*b, 1]; with return_softmax also softmax(logits).

    numeric_stable_mode: it is computed in the stable form in any case.
    """
    if not soft_label:
        _check_labels(label, _classes(logits, axis), ignore_index, "softmax_with_cross_entropy")
    loss, softmax = softmax_and_cross_entropy(logits, label, soft_label, ignore_index, axis)
    return (loss, softmax) if return_softmax else loss


@op(amp="fp32", method=False, rule=_cross_entropy_rule, real=True)
def nll_of_classes(
    input: Array, label: Array, weight: Array | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Array:
    """nll_loss without the check of the labels' values; a label out of range gives NaN."""
    if input.ndim < 2:
        raise ShapeError(f"nll_loss: input {list(input.shape)} needs at least 2 dims, [N, C, ...]")
    label, _ = _squeezed_label(label, input.shape, 1, "nll_loss")
    weight = _class_weight(weight, input.shape[1], "nll_loss")
    loss, by = _hard_losses(wide(input), label, weight, ignore_index, 0.0, 1)
    return _mean_by(loss, by, reduction, "nll_loss").astype(floating(input).dtype)


@composite(method=False)
def nll_loss(
    input: AnyTensor,
    label: AnyTensor,
    weight: AnyTensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    name: str | None = None,
) -> AnyTensor:
    """-input[label] * weight[label], input being log-probabilities: [N, C, ...], [N, ...] -> [N, ...] unreduced.

    Labels equal to ignore_index give 0; the mean divides by the sum of the weights. Raises ShapeError for shapes that
    do not fit, IndexError for a label out of range.
    """
    _check_labels(label, _classes(input, 1), ignore_index, "nll_loss")
    return nll_of_classes(input, label, weight, ignore_index, reduction)


def _gap(size: int, start: int | None, stop: int | None, step: int | None) -> tuple[int, int, int]:
    """(before, after, between) the entries of a slice of so many: what lax.pad puts back."""
    if (start, stop, step) == (None, None, None):
        return 0, 0, 0
    taken = range(*slice(start, stop, step).indices(size))
    return (taken[0], size - 1 - taken[-1], taken.step - 1) if taken else (0, size, 0)


@op(amp="low", method=False, saves=True, rule=_linear_cross_entropy_rule, uncast=("bias", "class_weight"), real=True)
def linear_cross_entropy_of_classes(
    hidden: Array,
    weight: Array,
    label: Array,
    transpose_weight: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    ways: tuple[int, int] = over_devices.WHOLE,
    bias: Array | None = None,
    rows: tuple[tuple[int | None, ...], ...] = (),
    class_weight: Array | None = None,
    dtype: DTypeLike | None = None,
    softcap: float = 0.0,
) -> Array:
    """fused_linear_cross_entropy without the check of the labels' values; a label out of range gives NaN.

    ways: parts of the batch and of the sequence that lie on devices of their own. rows: (start, stop, step) of slices.
    """
    hidden, weight = promote_floating(hidden, weight)
    shape, index = label.shape, tuple(slice(*bounds) for bounds in rows)
    part = jax.eval_shape(lambda x: x[index], jax.ShapeDtypeStruct(hidden.shape[:-1], jnp.bool_)).shape
    if label.shape in ((label.size,), (label.size, 1)) and label.size == math.prod(part):
        label = label.reshape(part)
    label, _ = _squeezed_label(label, (*part, 1), hidden.ndim - 1, "fused_linear_cross_entropy")
    # int32 holds every class, -1 for what is ignored, and one class too many for what is out of range
    classes = weight.shape[0 if transpose_weight else -1]
    class_weight = _class_weight(class_weight, classes, "fused_linear_cross_entropy")
    known = jnp.where((label >= 0) & (label < classes), label, classes)
    label = jnp.where(label == ignore_index, -1, known).astype(dtypes.int32)
    if rows:  # the others are ignored: the number of tokens, which is walked in chunks and over devices, stays round
        gaps = [_gap(n, *item) for n, item in zip(hidden.shape, rows, strict=False)]
        label = jax.lax.pad(label, np.int32(-1), [*gaps, *[(0, 0, 0)] * (label.ndim - len(gaps))])
    by = None if class_weight is None else _label_weight(class_weight, label, label_smoothing)
    loss = kernels.linear_cross_entropy(
        over_devices.join_tokens(hidden, ways),
        weight,
        over_devices.join_tokens(label, ways, kept=0),
        None if bias is None else floating(bias),
        None if by is None else over_devices.join_tokens(by, ways, kept=0),
        ignore_index=-1,
        label_smoothing=label_smoothing,
        vocab_first=transpose_weight,
        reduction=reduction,  # type: ignore[arg-type]
        ways=ways[0] * ways[1],
        softcap=softcap,
    )
    if reduction == "none":
        loss = over_devices.part_tokens(loss, label.shape, ways)[index].reshape(shape)
    return loss if dtype is None else loss.astype(dtypes.as_dtype(dtype))


@composite(method=False)
def fused_linear_cross_entropy(
    hidden: AnyTensor,
    weight: AnyTensor,
    label: AnyTensor,
    transpose_weight: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    bias: AnyTensor | None = None,
    rows: Sequence[slice] = (),
    class_weight: AnyTensor | None = None,
    dtype: DTypeLike | None = None,
    softcap: float = 0.0,
) -> AnyTensor:
    """cross_entropy(hidden @ weight + bias, label) without the logits ever being whole in memory.

    hidden [*b, m], weight [m, classes] (transpose_weight: [classes, m], as an embedding has it), bias [classes], label
    [*b], or in the same order [tokens], each also with a last dim of 1 -> [], or unreduced the label's shape. rows:
    slices of the leading dims of hidden, steps above 0; label is for hidden[rows], and the other rows are passed over
    (each costs as much as one with a label). class_weight [classes] is cross_entropy's weight. softcap: above 0, a
    logit x is softcap * tanh(x / softcap). The loss is float32 or wider, under autocast too, unless dtype says
    otherwise. Raises ShapeError, DTypeError and IndexError as cross_entropy does, ConfigError for rows that are no such
    slices.
    """
    if len(weight.shape) == 2:
        classes = weight.shape[0 if transpose_weight else 1]
        _check_labels(label, classes, ignore_index, "fused_linear_cross_entropy")
    if len(rows) >= len(hidden.shape) or any(not isinstance(item, slice) or (item.step or 1) < 0 for item in rows):
        raise ConfigError(
            f"fused_linear_cross_entropy: rows {rows}; needs slices with steps above 0 for some of the "
            f"{len(hidden.shape) - 1} leading dims of hidden {list(hidden.shape)}"
        )
    bounds = tuple((item.start, item.stop, item.step) for item in rows)
    ways = over_devices.token_ways(hidden.shape)
    options = (transpose_weight, ignore_index, label_smoothing, reduction, ways)
    return linear_cross_entropy_of_classes(hidden, weight, label, *options, bias, bounds, class_weight, dtype, softcap)


ALIASES: dict[str, str] = {}
