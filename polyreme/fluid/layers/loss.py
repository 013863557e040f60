"""Losses, one value for each row unless said otherwise."""

from __future__ import annotations

from typing import Any

from polyreme.fluid.layer import layer, one
from polyreme.nn import functional as F
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops import reduce as rd
from polyreme.ops.indices.gather import where

IGNORE = -100


@layer
def cross_entropy(input: Any, label: Any, soft_label: bool = False, ignore_index: int = IGNORE) -> Any:
    """-log input[label]: probabilities [*b, classes], label [*b, 1], or probabilities if soft_label -> [*b, 1]."""
    return F.cross_entropy(input, label, None, ignore_index, "none", soft_label, use_softmax=False)


@layer
def softmax_with_cross_entropy(
    logits: Any, label: Any, soft_label: bool = False, ignore_index: int = IGNORE, numeric_stable_mode: bool = True,
    return_softmax: bool = False, axis: int = -1,
) -> Any:  # fmt: skip
    """-log softmax(logits)[label]: [*b, classes], label [*b, 1] -> [*b, 1]; with return_softmax the softmax too.

    numeric_stable_mode: the stable form is what is always computed.
    """
    return F.softmax_with_cross_entropy(logits, label, soft_label, ignore_index, True, return_softmax, axis)


@layer
def square_error_cost(input: Any, label: Any) -> Any:
    """(input - label)^2, element by element."""
    return F.square_error_cost(input, label)


@layer
def mse_loss(input: Any, label: Any) -> Any:
    """The mean of (input - label)^2, of shape [1]."""
    return one(F.mse_loss(input, label))


@layer
def sigmoid_cross_entropy_with_logits(
    x: Any, label: Any, ignore_index: int = IGNORE, name: str | None = None, normalize: bool = False
) -> Any:
    """Cross entropy of each element with sigmoid(x); 0 where label is ignore_index.

    normalize: divided by how many are not ignored.
    """
    live = ar.not_equal(label, float(ignore_index))
    loss = where(live, F.binary_cross_entropy_with_logits(x, label, reduction="none"), 0.0)
    if not normalize:
        return loss
    return ar.divide(loss, mt.maximum(ar.cast(rd.sum(ar.cast(live, "int64")), x.dtype), 1.0))


@layer
def huber_loss(input: Any, label: Any, delta: float) -> Any:
    """r^2 / 2 where |r| <= delta, else delta * (|r| - delta / 2), for r = label - input."""
    return F.smooth_l1_loss(input, label, "none", delta)


@layer
def smooth_l1(x: Any, y: Any, inside_weight: Any = None, outside_weight: Any = None, sigma: float | None = None) -> Any:
    """Sum over each row of (s d)^2 / 2 where |d| < 1 / s^2, else |d| - 1 / (2 s^2), for s = sigma: -> [n, 1].

    d = inside_weight * (x - y); terms are multiplied by outside_weight. Source: arXiv:1504.08083, equation 3.
    """
    squared = (1.0 if sigma is None else float(sigma)) ** 2
    d = ar.subtract(x, y)
    d = d if inside_weight is None else ar.multiply(d, inside_weight)
    terms = F.smooth_l1_loss(d, mt.scale(d, 0.0), "none", 1.0 / squared)
    terms = mt.scale(terms, squared)  # Huber's loss of delta = 1 / s^2 is 1 / s^2 times it
    terms = terms if outside_weight is None else ar.multiply(terms, outside_weight)
    return rd.sum(terms, list(range(1, x.ndim)), keepdim=True).reshape([x.shape[0], 1])


@layer
def log_loss(input: Any, label: Any, epsilon: float = 1e-4, name: str | None = None) -> Any:
    """-label log(input + epsilon) - (1 - label) log(1 - input + epsilon), element by element."""
    return F.log_loss(input, label, epsilon)


@layer
def rank_loss(label: Any, left: Any, right: Any, name: str | None = None) -> Any:
    """log(1 + e^o) - label * o for o = left - right. Source: Burges et al., 2005, equation 3."""
    o = ar.subtract(left, right)
    return ar.subtract(F.softplus(o), ar.multiply(label, o))


@layer
def margin_rank_loss(label: Any, left: Any, right: Any, margin: float = 0.1, name: str | None = None) -> Any:
    """max(0, margin - label * (left - right)), label 1 or -1."""
    return F.margin_ranking_loss(left, right, label, margin, "none")


@layer
def dice_loss(input: Any, label: Any, epsilon: float = 1e-5, name: str | None = None) -> Any:
    """1 - 2 |input and label| / (|input| + |label|), the mean over images, of shape [1]."""
    return one(F.dice_loss(input, label, epsilon))


@layer
def kldiv_loss(x: Any, target: Any, reduction: str = "mean", name: str | None = None) -> Any:
    """target * (log target - x), reduced by "mean", "sum", "batchmean" or "none"; x is log-probabilities."""
    return one(F.kl_div(x, target, reduction))


@layer
def npair_loss(anchor: Any, positive: Any, labels: Any, l2_reg: float = 0.002) -> Any:
    """Softmax cross entropy over all pairs of a batch, with an L2 penalty, [1]. Source: Sohn, 2016, equation 3."""
    return one(F.npair_loss(anchor, positive, labels, l2_reg))


@layer
def bpr_loss(input: Any, label: Any, name: str | None = None) -> Any:
    """Mean over other classes j of -log sigmoid(x[label] - x[j]): [n, classes], label [n, 1] -> [n, 1].

    Source: arXiv:1511.06939, section 3.1.3.
    """
    classes = input.shape[-1]
    own = ar.cast(F.one_hot(label.reshape([-1]), classes), input.dtype)
    picked = rd.sum(ar.multiply(input, own), 1, keepdim=True)
    terms = ar.multiply(F.softplus(ar.subtract(input, picked)), ar.subtract(1.0, own))
    return mt.scale(rd.sum(terms, 1, keepdim=True), 1.0 / (classes - 1))


@layer
def label_smooth(
    label: Any, prior_dist: Any = None, epsilon: float = 0.1, dtype: Any = "float32", name: str | None = None
) -> Any:
    """(1 - epsilon) * label + epsilon * prior_dist, which is 1 / classes unless given."""
    return ar.cast(F.label_smooth(label, prior_dist, epsilon), dtype)


@layer
def cos_sim(X: Any, Y: Any) -> Any:
    """Cosine of the angle between rows of X [n, k] and of Y [n, k] or [1, k]: -> [n, 1]."""
    return F.cosine_similarity(X, Y, 1, 0.0).reshape([-1, 1])


__all__ = [
    "bpr_loss", "cos_sim", "cross_entropy", "dice_loss", "huber_loss", "kldiv_loss", "label_smooth", "log_loss",
    "margin_rank_loss", "mse_loss", "npair_loss", "rank_loss", "sigmoid_cross_entropy_with_logits", "smooth_l1",
    "softmax_with_cross_entropy", "square_error_cost",
]  # fmt: skip
