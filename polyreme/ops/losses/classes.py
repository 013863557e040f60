"""Losses over classes: margins between scores, trees and clusters of classes, angular margins.

All compute in at least float32; reduction as in ops/losses/elementwise.py. A label out of range raises IndexError in
eager code; in captured code it gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import floating
from polyreme.core.op import composite, op
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.activation import log_softmax, wide
from polyreme.ops.bounds import preceded
from polyreme.ops.by_index import bounded, read
from polyreme.ops.creation import assign
from polyreme.ops.ids import check_range
from polyreme.ops.losses.elementwise import reduced
from polyreme.ops.random import randperm


def _label_of(label: Array, rows: int, what: str) -> Array:
    """Labels as [rows]; they come as [rows] or [rows, 1]."""
    if not dtypes.is_integer(label.dtype):
        raise DTypeError(f"{what}: label is {label.dtype.name}; class labels are integers")
    if label.shape not in ((rows,), (rows, 1)):
        raise ShapeError(f"{what}: label {list(label.shape)}; needs [{rows}] or [{rows}, 1], one a row of the input")
    return label.reshape(rows)


def _matrix(x: Array, what: str) -> Array:
    if x.ndim != 2:
        raise ShapeError(f"{what}: input {list(x.shape)}; needs [N, classes]")
    return wide(floating(x))


def _nan_where_unknown(label: Array, classes: int, value: Array) -> Array:
    """value, and NaN in the rows whose label is no class."""
    good = (label >= 0) & (label < classes)
    return jnp.where(good.reshape(-1, *[1] * (value.ndim - 1)), value, jnp.nan)


def _checks(what: str, classes: Callable[..., int], allowed: int | None = None) -> Callable[..., Any]:
    """A step before an op that checks its labels' values: (input, label, ...)."""

    def check(input: Any, label: Any, *args: Any, **kwargs: Any) -> None:
        check_range(label, classes(input, *args, **kwargs), f"{what}: label", allowed)

    return preceded(check)


def _last_dim(input: Any, *args: Any, **kwargs: Any) -> int:
    return input.shape[-1] if len(input.shape) else 1


@_checks("multi_margin_loss", _last_dim)
@op(amp="fp32", method=False, real=True)
def multi_margin_loss(
    input: Array, label: Array, p: int = 1, margin: float = 1.0, weight: Array | None = None, reduction: str = "mean"
) -> Array:
    """Mean over the classes j other than the label y of w[y] max(0, margin - x[y] + x[j])^p; [N, C], [N] -> [N].

    weight [C] is 1 by default. Raises ConfigError unless p is 1 or 2.
    """
    what = "multi_margin_loss"
    if p not in (1, 2):
        raise ConfigError(f"{what}: p={p}; choose 1 or 2")
    x = _matrix(input, what)
    classes = x.shape[1]
    y = _label_of(label, x.shape[0], what)
    safe = jnp.clip(y, 0, classes - 1)
    apart = margin - jnp.take_along_axis(x, safe[:, None], 1) + x
    other = jnp.arange(classes) != safe[:, None]
    loss = jnp.sum(jnp.where(other, jax.nn.relu(apart) ** p, 0), 1) / classes
    if weight is not None:
        if weight.shape != (classes,):
            raise ShapeError(f"{what}: weight {list(weight.shape)}; needs [{classes}], one a class")
        loss = loss * wide(weight)[safe]
    return reduced(_nan_where_unknown(y, classes, loss), reduction, what).astype(floating(input).dtype)


@_checks("multi_label_margin_loss", _last_dim, allowed=-1)
@op(amp="fp32", method=False, real=True)
def multi_label_margin_loss(input: Array, label: Array, reduction: str = "mean") -> Array:
    """Sum over labels y and other classes j of max(0, 1 - x[y] + x[j]), over the number of classes: [N, C] -> [N].

    A row's labels are those before its first -1.
    """
    what = "multi_label_margin_loss"
    x = _matrix(input, what)
    if label.shape != x.shape or not dtypes.is_integer(label.dtype):
        raise ShapeError(f"{what}: label {label.dtype.name}{list(label.shape)}; needs integers {list(x.shape)}")
    named = jnp.cumsum(label == -1, 1) == 0
    at = bounded(jnp.where(named, label, 0), x.shape[1], negative=False)
    is_label = jnp.zeros(x.shape, bool).at[jnp.arange(x.shape[0])[:, None], at].max(named)
    apart = 1 - jnp.take_along_axis(x, at, 1)[:, :, None] + x[:, None, :]
    counted = named[:, :, None] & ~is_label[:, None, :]
    loss = jnp.sum(jnp.where(counted, jax.nn.relu(apart), 0), (1, 2)) / x.shape[1]
    return reduced(loss, reduction, what).astype(floating(input).dtype)


@op(amp="fp32", method=False, real=True)
def npair_loss(anchor: Array, positive: Array, labels: Array, l2_reg: float = 0.002) -> Array:
    """Softmax cross-entropy of anchor . positive over all pairs of a batch, with an L2 penalty -> [].

    anchor and positive [N, d], labels [N]; rows of one label count as equally right. Source: Sohn, Improved deep metric
    learning, 2016, equation 3.
    """
    a, b = _matrix(anchor, "npair_loss"), _matrix(positive, "npair_loss")
    if a.shape != b.shape or labels.size != a.shape[0]:
        raise ShapeError(
            f"npair_loss: anchor {list(a.shape)}, positive {list(b.shape)}, labels {list(labels.shape)}; needs [N, d] "
            "twice and [N]"
        )
    same = (labels.reshape(-1, 1) == labels.reshape(1, -1)).astype(a.dtype)
    target = same / jnp.sum(same, 1, keepdims=True)
    loss = -jnp.mean(jnp.sum(target * jax.nn.log_softmax(a @ b.T, -1), -1))
    penalty = jnp.mean(jnp.sum(a * a, 1)) + jnp.mean(jnp.sum(b * b, 1))
    return (loss + 0.25 * l2_reg * penalty).astype(floating(anchor).dtype)


def _tree_classes(input: Any, num_classes: int, *args: Any, path_table: Any = None, **kwargs: Any) -> int:
    return num_classes if path_table is None and (len(args) < 3 or args[2] is None) else 1 << 62


@_checks("hsigmoid_loss", _tree_classes)
@op(amp="fp32", method=False, real=True)
def hsigmoid_loss(
    input: Array,
    label: Array,
    num_classes: int,
    weight: Array,
    bias: Array | None = None,
    path_table: Array | None = None,
    path_code: Array | None = None,
    is_sparse: bool = False,
) -> Array:
    """-log p(label), p a product of binary choices down a tree of classes: [N, D], [N] -> [N, 1].

    weight [nodes, D] and bias [nodes, 1] or [nodes] are those of the inner nodes, num_classes - 1 of a complete binary
    tree. A tree of one's own is given by each row's path_table [N, L], its nodes from the root on (-1 ends a path), and
    path_code [N, L], 0 or 1 at each. Scores are held in [-40, 40]. Gradients are dense whatever is_sparse says.
    Source: Morin and Bengio, Hierarchical probabilistic neural network language model, 2005.
    """
    what = "hsigmoid_loss"
    x = _matrix(input, what)
    if (path_table is None) != (path_code is None):
        raise ConfigError(f"{what}: path_table and path_code go together; give both or none")
    y = _label_of(label, x.shape[0], what)
    if path_table is not None and path_code is not None:
        nodes, codes = path_table, path_code
    else:
        if num_classes < 2:
            raise ConfigError(f"{what}: num_classes={num_classes}; a tree has at least 2")
        # node k of a complete tree has the children 2k and 2k + 1, class c is node num_classes + c, the root node 1
        steps = jnp.arange((2 * num_classes - 1).bit_length() - 1)
        place = jnp.clip(y, 0, num_classes - 1)[:, None] + num_classes
        nodes, codes = (place >> (steps + 1)) - 1, (place >> steps) & 1
    live = nodes >= 0
    at = jnp.where(live, nodes, 0)
    score = jnp.einsum("nd,nld->nl", x, read(wide(weight), (at,)))
    if bias is not None:
        score = score + read(wide(bias).reshape(-1), (at,))
    score = jnp.clip(score, -40, 40)
    loss = jnp.sum(jnp.where(live, jax.nn.softplus(score) - codes * score, 0), 1, keepdims=True)
    return (loss if path_table is not None else _nan_where_unknown(y, num_classes, loss)).astype(floating(input).dtype)


def _cluster_log_probs(x: Array, head: Array, tails: Sequence[Array], edges: Sequence[int]) -> list[Array]:
    """log p of the classes of each cluster, from the head's log-probabilities; its tails are down and out."""
    first = edges[0]
    pairs = zip(tails[::2], tails[1::2], strict=True)
    return [
        head[:, first + i, None] + jax.nn.log_softmax((x @ wide(down)) @ wide(out), -1)
        for i, (down, out) in enumerate(pairs)
    ]


@op(amp="fp32", method=False, real=True)
def adaptive_log_softmax(
    input: Array, head_weight: Array, tails: list[Array], cutoffs: Any, head_bias: Array | None = None
) -> Array:
    """log p of every class under adaptive_log_softmax_with_loss's model: [N, D] -> [N, cutoffs[-1]].

    tails: the two weights of each cluster, one after the other.
    """
    x = _matrix(input, "adaptive_log_softmax")
    scores = x @ wide(head_weight) + (0 if head_bias is None else wide(head_bias))
    head = jax.nn.log_softmax(scores, -1)
    every = [head[:, : cutoffs[0]], *_cluster_log_probs(x, head, tails, cutoffs)]
    return jnp.concatenate(every, 1).astype(floating(input).dtype)


@op(amp="fp32", method=False)
def pick_classes(log_probs: Array, label: Array) -> Array:
    """log_probs [N, C] at label [N]; NaN for a label that is no class."""
    y = _label_of(label, log_probs.shape[0], "pick_classes")
    safe = jnp.clip(y, 0, log_probs.shape[1] - 1)
    return _nan_where_unknown(y, log_probs.shape[1], jnp.take_along_axis(log_probs, safe[:, None], 1)[:, 0])


@composite(method=False)
def adaptive_log_softmax_with_loss(
    input: AnyTensor,
    label: AnyTensor,
    head_weight: AnyTensor,
    tail_weights: Any,
    cutoffs: Any,
    head_bias: AnyTensor | None = None,
    name: str | None = None,
) -> Any:
    """log softmax over many classes, rare ones in clusters with narrower weights -> (log p(label) [N], mean -log p []).

    input [N, D] or [D], label [N] or []; cutoffs: the first class of each cluster, and at last the number of classes,
    which may be left out.
    head_weight [D, cutoffs[0] + clusters] scores the frequent classes and the clusters; tail_weights has [D, d] and [d,
    size] for each cluster. Source: arXiv:1609.04309.
    """
    single = len(input.shape) == 1
    rows, labels = (input.reshape([1, -1]), label.reshape([1])) if single else (input, label)
    edges = [int(c) for c in cutoffs]
    if not edges or sorted(set(edges)) != edges or edges[0] < 1:
        raise ConfigError(f"adaptive_log_softmax_with_loss: cutoffs={list(cutoffs)}; give rising numbers of classes")
    if len(tail_weights) == len(edges):
        edges.append(edges[-1] + tail_weights[-1][1].shape[-1])
    if len(tail_weights) != len(edges) - 1:
        raise ShapeError(
            f"adaptive_log_softmax_with_loss: {len(tail_weights)} tail weights for {len(edges) - 1} clusters; needs "
            "two weights for each"
        )
    check_range(labels, edges[-1], "adaptive_log_softmax_with_loss: label")
    flat = [w for pair in tail_weights for w in pair]
    found = pick_classes(adaptive_log_softmax(rows, head_weight, flat, edges, head_bias), labels)
    loss = -found.mean()
    return (found.reshape([]) if single else found), loss


def _alone(group: Any, what: str) -> None:
    if getattr(group, "nranks", 1) > 1:
        raise ConfigError(
            f"{what}: a group of {group.nranks} ranks; Tensors are whole here, whatever device holds which classes, so "
            "leave group out"
        )


@op(amp="fp32", method=False, real=True)
def angular_margin(logits: Array, label: Array, margin1: float, margin2: float, margin3: float, scale: float) -> Array:
    """scale * logits [N, C], the label's entry cos(t) first made cos(margin1 * t + margin2) - margin3."""
    x = _matrix(logits, "margin_cross_entropy")
    y = _label_of(label, x.shape[0], "margin_cross_entropy")
    # at 1 and -1 the angle has no derivative
    edge = 1 - jnp.finfo(x.dtype).eps
    turned = jnp.cos(margin1 * jnp.arccos(jnp.clip(x, -edge, edge)) + margin2) - margin3
    return (scale * jnp.where(jnp.arange(x.shape[1]) == y[:, None], turned, x)).astype(floating(logits).dtype)


@composite(method=False)
def margin_cross_entropy(
    logits: AnyTensor,
    label: AnyTensor,
    margin1: float = 1.0,
    margin2: float = 0.5,
    margin3: float = 0.0,
    scale: float = 64.0,
    group: Any = None,
    return_softmax: bool = False,
    reduction: str | None = "mean",
) -> Any:
    """Cross-entropy of scaled cosines with margins at the label: -log softmax(scale * z)[label] -> [N, 1] unreduced.

    logits [N, C] are cosines; z is logits with cos(t) at the label made cos(margin1 t + margin2) - margin3. margin1 > 1
    is SphereFace, margin2 > 0 ArcFace (arXiv:1801.07698), margin3 > 0 CosFace. Classes may be split over devices: the
    Tensor is whole, so group is None, False or a group of one. Also gives the softmax with return_softmax.
    """
    _alone(group, "margin_cross_entropy")
    check_range(label, logits.shape[-1], "margin_cross_entropy: label")
    log_probs = log_softmax(angular_margin(logits, label, margin1, margin2, margin3, scale))
    losses = -pick_classes(log_probs, label).reshape([-1, 1])
    if reduction not in ("mean", "sum", "none", None):
        raise ConfigError(f"margin_cross_entropy: reduction={reduction!r}; choose 'mean', 'sum', 'none' or None")
    loss = losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses
    return (loss, log_probs.exp()) if return_softmax else loss


@composite(method=False)
def class_center_sample(label: AnyTensor, num_classes: int, num_samples: int, group: Any = None) -> Any:
    """Every class in label and, up to num_samples, others drawn without replacement -> (places of label, classes).

    For a partial softmax over very many classes (arXiv:2203.15565): the places [N] are in the classes [S], which are
    sorted, but that those drawn come last. Looks at the values, so it cannot be captured. Raises IndexError for a label
    out of range.
    """
    _alone(group, "class_center_sample")
    if not 0 < num_samples <= num_classes:
        raise ConfigError(f"class_center_sample: {num_samples=}, {num_classes=}; needs 0 < num_samples <= num_classes")
    value = state.host(label, "class_center_sample(label), which looks at the values")
    check_range(label, num_classes, "class_center_sample: label")
    present = np.unique(value)
    others = np.setdiff1d(np.arange(num_classes), present)
    wanted = max(num_samples - present.size, 0)
    drawn = np.sort(others[np.asarray(randperm(others.size).numpy())[:wanted]]) if wanted else others[:0]
    classes = np.concatenate([present, drawn]).astype(value.dtype)
    return assign(np.searchsorted(present, value).astype(value.dtype)), assign(classes)
