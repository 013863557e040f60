"""Losses over many classes, and over alignments of sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.core.rng import fixed_key
from polyreme.errors import ConfigError, ShapeError
from polyreme.fluid.layer import layer
from polyreme.fluid.layers.elementwise import put
from polyreme.nn import functional as F
from polyreme.ops import OPS
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops import reduce as rd
from polyreme.ops.creation import full, ones_like, zeros_like
from polyreme.ops.indices.gather import gather, index_sample, where
from polyreme.ops.indices.scatter import scatter_nd_add
from polyreme.ops.manipulation import concat, reshape, transpose
from polyreme.ops.random import rand
from polyreme.ops.search import topk
from polyreme.program.parameters import LayerParameters
from polyreme.sequences import lod as lods

_EXCLUDED = -1e20
"""Added to a logit that is to have no chance, as 1.7 does."""


@layer
def hsigmoid(
    input: Any, label: Any, num_classes: int, param_attr: Any = None, bias_attr: Any = None, name: str | None = None,
    path_table: Any = None, path_code: Any = None, is_custom: bool = False, is_sparse: bool = False,
) -> Any:  # fmt: skip
    """Hierarchical sigmoid loss of each row: [n, width], label [n, 1] -> [n, 1]; see nn.functional.hsigmoid_loss.

    With is_custom the tree is path_table and path_code [n, depth], and num_classes its number of inner nodes. Raises
    ConfigError where only some of the three are given. is_sparse: gradients are the same, and dense here.
    """
    given = [path_table is not None, path_code is not None, bool(is_custom)]
    if len(set(given)) != 1:
        raise ConfigError("fluid.layers.hsigmoid: give path_table, path_code and is_custom=True, or none of them")
    parts = LayerParameters("hierarchical_sigmoid", name)
    nodes = num_classes if is_custom else num_classes - 1
    weight = parts.parameter(param_attr, [nodes, input.shape[1]], input.dtype)
    bias = parts.bias(bias_attr, [nodes, 1], input.dtype)
    return F.hsigmoid_loss(input, label, num_classes, weight, bias, path_table, path_code)


@layer
def center_loss(
    input: Any, label: Any, num_classes: int, alpha: Any, param_attr: Any, update_center: bool = True
) -> Any:
    """Half the squared distance of each row to its class's centre: [n, d], label [n, 1] -> [n, 1].

    The centres [num_classes, d] are no trained parameter: with update_center, each run moves centre c by alpha * sum of
    (row - c) over its rows / (1 + their number). Source: Wen et al., 2016, A discriminative feature learning approach
    for deep face recognition, equation 4.
    """
    centers = LayerParameters("center_loss").parameter(param_attr, [num_classes, input.shape[1]], input.dtype)
    centers.stop_gradient = True
    index = reshape(label, [-1])
    apart = ar.subtract(input, gather(centers, index))
    if update_center:
        place, away = reshape(index, [-1, 1]), apart.detach()
        total = scatter_nd_add(zeros_like(centers), place, away)
        count = scatter_nd_add(full([num_classes, 1], 1.0, input.dtype), place, ones_like(away[:, :1]))
        rate = alpha if hasattr(alpha, "dtype") else float(alpha)
        put(centers, ar.add(centers, ar.multiply(ar.divide(total, count), rate)), "center_loss")
    return mt.scale(rd.sum(mt.square(apart), 1, keepdim=True), 0.5)


@layer
def sampled_softmax_with_cross_entropy(
    logits: Any, label: Any, num_samples: int, num_true: int = 1, remove_accidental_hits: bool = True,
    use_customized_samples: bool = False, customized_samples: Any = None, customized_probabilities: Any = None,
    seed: int = 0,
) -> Any:  # fmt: skip
    """Cross entropy over the true classes and num_samples drawn ones: [n, classes], label [n, num_true] -> [n, 1].

    Classes are drawn for the whole batch, all distinct, by chances log((c + 2) / (c + 1)) / log(classes + 1), and every
    logit is lessened by the log of its class's chance to be among them. With use_customized_samples the
    columns are customized_samples [n, num_true + num_samples], true classes first, and their chances
    customized_probabilities. remove_accidental_hits: a drawn class that is a true one has no chance. Source: Jean et
    al., 2014, arXiv:1412.2007, section 3. With a seed the same classes are drawn in each run.
    """
    if label.shape[-1] != num_true:
        raise ShapeError(f"sampled_softmax_with_cross_entropy: label {list(label.shape)} for num_true={num_true}")
    if use_customized_samples:
        if customized_samples is None or customized_probabilities is None:
            raise ConfigError(
                "sampled_softmax_with_cross_entropy: use_customized_samples needs customized_samples and "
                "customized_probabilities"
            )
        classes, expected = ar.cast(customized_samples, "int64"), customized_probabilities
    else:
        classes, expected = _log_uniform(logits, label, num_samples, seed)
    scores = ar.subtract(index_sample(logits, classes), mt.log(expected))
    if remove_accidental_hits:
        drawn = classes[:, num_true:]
        hit = rd.any(ar.equal(reshape(drawn, [0, -1, 1]), reshape(ar.cast(label, "int64"), [0, 1, -1])), 2)
        rest = ar.add(scores[:, num_true:], mt.scale(ar.cast(hit, scores.dtype), _EXCLUDED))
        scores = concat([scores[:, :num_true], rest], 1)
    log_p = F.log_softmax(scores, -1)
    return mt.scale(rd.mean(log_p[:, :num_true], 1, keepdim=True), -1.0)


def _log_uniform(logits: Any, label: Any, draws: int, seed: int) -> tuple[Any, Any]:
    """(classes [n, true + draws], the chance of each to be among the drawn ones)."""
    size = logits.shape[1]
    if not 0 < draws <= size:
        raise ConfigError(f"sampled_softmax_with_cross_entropy: num_samples={draws} distinct ones of {size} classes")
    each = np.arange(size)
    chance = np.log((each + 2) / (each + 1)) / np.log(size + 1)
    # the largest of log p + Gumbel noise are draws by p without replacement
    chances = mt.clip(rand([size], "float32", **fixed_key(seed)), 1e-30, 1.0 - 2**-24)
    noise = mt.scale(mt.log(mt.scale(mt.log(chances), -1.0)), -1.0)
    drawn = topk(ar.add(noise, OPS["cast"](np.log(chance), "float32")), draws)[1]
    own = ar.cast(label, "int64")
    classes = concat([own, ar.add(ar.multiply(own[:, :1], 0), reshape(drawn, [1, -1]))], 1)
    among = OPS["cast"](_inclusion(chance, draws), logits.dtype)
    return classes, reshape(gather(among, reshape(classes, [-1])), [-1, label.shape[1] + draws])


def _inclusion(chance: np.ndarray, draws: int) -> np.ndarray:
    """The chance of each class to be among `draws` distinct ones: 1 - (1 - p)^t for the t tries that give as many."""
    if draws == len(chance):
        return np.ones_like(chance)
    low, high = 0.0, 1.0
    while (1 - (1 - chance) ** high).sum() < draws:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - (1 - chance) ** middle).sum() < draws else (low, middle)
    return 1 - (1 - chance) ** high


@layer
def teacher_student_sigmoid_loss(
    input: Any, label: Any, soft_max_up_bound: float = 15.0, soft_max_lower_bound: float = -15.0
) -> Any:
    """Click loss and a teacher's, of each row: logits [n, 1], label [n, 1] -> [n, 1].

    label says both: -2 no click and no teacher, -1 a click and no teacher, 0 to 1 no click and the teacher's score, 1
    to 2 a click and 1 + the score. No gradient flows where a logit is outside of the bounds.
    """
    inside = ar.logical_and(
        ar.less_than(input, float(soft_max_up_bound)), ar.greater_than(input, float(soft_max_lower_bound))
    )
    x = where(inside, input, input.detach())
    clicked = ar.logical_or(
        ar.logical_and(ar.greater_equal(label, -1.0), ar.less_than(label, 0.0)), ar.greater_equal(label, 1.0)
    )
    click = ar.cast(clicked, input.dtype)
    taught = ar.cast(ar.greater_equal(label, 0.0), input.dtype)
    score = where(ar.greater_equal(label, 1.0), mt.scale(label, 1.0, -1.0), label)
    common = F.softplus(x)
    click_loss = ar.subtract(common, ar.multiply(x, click))
    return ar.add(click_loss, ar.multiply(taught, ar.subtract(common, ar.multiply(x, score))))


@layer
def warpctc(
    input: Any, label: Any, blank: int = 0, norm_by_times: bool = False, input_length: Any = None,
    label_length: Any = None,
) -> Any:  # fmt: skip
    """Connectionist temporal classification loss of each sequence, [n, 1]; see nn.functional.ctc_loss.

    input: logits [rows, classes + 1] and label ids [rows, 1] with sequences; or padded, [steps, n, classes + 1] and
    [n, longest], with input_length and label_length [n]. Raises ConfigError where only one length is given.
    """
    if (input_length is None) != (label_length is None):
        raise ConfigError("fluid.layers.warpctc: give both input_length and label_length, or neither")
    if input_length is None or label_length is None:
        (x, of), (y, by) = (lods.sequences("warpctc", v) for v in (input, label))
        padded, input_length = OPS["sequence_pad"](x, lods.inner(of), 0.0, lods.room(x, of))
        input = transpose(padded, [1, 0, 2])
        ids, label_length = OPS["sequence_pad"](y, lods.inner(by), 0, lods.room(y, by))
        label = reshape(ids, [0, -1])
    input_lengths, label_lengths = (reshape(v, [-1]) for v in (input_length, label_length))
    loss = F.ctc_loss(input, label, input_lengths, label_lengths, blank, "none", norm_by_times)
    return lods.divided(reshape(loss, [-1, 1]), ())


__all__ = [
    "center_loss", "hsigmoid", "sampled_softmax_with_cross_entropy", "teacher_student_sigmoid_loss", "warpctc",
]  # fmt: skip
