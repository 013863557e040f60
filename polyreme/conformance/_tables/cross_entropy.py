"""Contract rows of ops/losses/cross_entropy.py."""

import numpy as np
import scipy.special as sp

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError

LABEL = np.array([0, 2, -100, 1])
WEIGHT = np.float32([0.5, 2.0, 1.5])
PLAIN = np.ones((4, 3), "float32")


def logits(*args, shape=(4, 3)):
    return lambda rng: (rng.standard_normal(shape).astype("float32"), *args)


def probabilities(*args, shape=(4, 3)):
    return lambda rng: (sp.softmax(rng.standard_normal(shape), -1).astype("float32"), *args)


def soft(*args, shape=(4, 3)):
    """Logits, then probabilities as labels."""
    return lambda rng: (*logits(shape=shape)(rng), *probabilities(shape=shape)(rng), *args)


def reduce(loss, by, reduction):
    return {"none": lambda: loss, "sum": loss.sum, "mean": lambda: loss.sum() / by.sum()}[reduction]()


def hard(
    x, label, weight=None, ignore_index=-100, reduction="mean", soft_label=False, axis=-1, use_softmax=True,
    label_smoothing=0.0,
):  # fmt: skip
    """Every element's loss in a loop; classes are moved to the end first."""
    x = np.moveaxis(x.astype("float64"), axis, -1)
    keep = label.ndim == x.ndim
    plain = np.squeeze(label, axis) if keep else label
    log_p = sp.log_softmax(x, -1) if use_softmax else np.log(x)
    weight = np.ones(x.shape[-1]) if weight is None else weight
    loss, by = np.zeros(plain.shape), np.zeros(plain.shape)
    for index in np.ndindex(*plain.shape):
        if plain[index] == ignore_index:
            continue
        target = np.full(x.shape[-1], label_smoothing / x.shape[-1])
        target[plain[index]] += 1 - label_smoothing
        by[index] = target @ weight
        loss[index] = -(target @ log_p[index]) * by[index]
    value = reduce(loss, by, reduction)
    return np.expand_dims(value, axis) if reduction == "none" and keep else value


def with_probabilities(x, label, weight=None, reduction="mean", axis=-1, label_smoothing=0.0, **_):
    label = (1 - label_smoothing) * label.astype("float64") + label_smoothing / label.shape[axis]
    loss = -(label * sp.log_softmax(x.astype("float64"), axis)).sum(axis, keepdims=True)
    if weight is None:
        return {"none": lambda: loss, "sum": loss.sum, "mean": loss.mean}[reduction]()
    by = np.moveaxis(np.expand_dims(np.moveaxis(label, axis, -1) @ weight, -1), -1, axis)
    return reduce(loss * by, by, reduction)


def nll(x, label, weight=None, ignore_index=-100, reduction="mean"):
    live = label != ignore_index
    by = np.where(live, np.ones(3)[label * live] if weight is None else weight[label * live], 0)
    return reduce(-np.take_along_axis(x, (label * live)[:, None], 1)[:, 0] * by, by, reduction)


def both(x, label, soft_label=False, ignore_index=-100, axis=-1, **_):
    loss = (
        with_probabilities(x, label, reduction="none", axis=axis)
        if soft_label
        else hard(x, label, None, ignore_index, "none", axis=axis)
    )
    loss = loss if loss.ndim == x.ndim else np.expand_dims(loss, axis)
    return loss, sp.softmax(x, axis)


def fused(
    h,
    w,
    label,
    transpose_weight=False,
    ignore_index=-100,
    label_smoothing=0.0,
    reduction="mean",
    bias=0.0,
    class_weight=None,
    softcap=0,
):
    scores = h.astype("float64") @ (w.T if transpose_weight else w) + bias
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    label = label[..., 0] if label.ndim == h.ndim else label
    return hard(scores, label, class_weight, ignore_index, reduction, label_smoothing=label_smoothing)


def shifted(h, w, label, *, bias, rows, **options):
    return fused(h[rows], w, label, bias=bias, **options)


def head(label, *args, rows=(3, 5)):
    return lambda rng: (
        rng.standard_normal((4, 5)).astype("float32"),
        rng.standard_normal(rows).astype("float32"),
        label,
        *args,
    )


RANGE = (PLAIN, np.array([0, 1, 3, 0]))
BELOW = (PLAIN, np.array([0, 1, -1, 0]))
SHORT = (PLAIN, np.array([0, 1]))
BOOL = (PLAIN, np.ones(4, bool))
FUSED = (np.ones((4, 5), "float32"), np.ones((5, 3), "float32"))
COLUMN = np.array([[0], [2], [-100], [1]])

CASES = [
    *(
        Case(name, logits(LABEL), hard, tag=tag, bad=bad)
        for name in ("cross_entropy", "cross_entropy_of_classes")
        for tag, bad in (("", (SHORT, ShapeError, r"label \[2\]")), ("dtype", (BOOL, DTypeError, "label is bool")))
    ),
    Case("cross_entropy", logits(COLUMN, WEIGHT, -100, "none"), hard, tag="column", bad=(RANGE, IndexError, r"label: 3 at \[2\]")),
    Case("cross_entropy", logits(LABEL.astype("int32"), WEIGHT), hard, tag="weight", bad=(BELOW, IndexError, r"label: -1 at \[2\]")),
    Case("cross_entropy", logits(np.array([0, 2, 1, 1]), WEIGHT, 1, "sum"), hard, tag="ignore-sum", bad=((PLAIN, LABEL, WEIGHT[:2]), ShapeError, r"weight \[2\]")),
    Case("cross_entropy", logits(LABEL, WEIGHT), hard, kwargs={"label_smoothing": 0.2}, tag="smoothing", bad=((PLAIN, LABEL, None, -100, "mean", False, 2), ShapeError, "axis=2")),
    Case("cross_entropy", logits(LABEL), hard, kwargs={"label_smoothing": 0.2, "reduction": "none"}, tag="smoothing-none"),
    Case("cross_entropy", lambda rng: (*logits(LABEL, WEIGHT)(rng)[:1], LABEL.astype("float32"), WEIGHT), lambda x, y, w: hard(x, y.astype(int), w), tag="float-label", bad=((PLAIN, np.float32([0.5, 0, 1, 2])), DTypeError, r"0.5 at \[0\] is no whole number"), no_grad="labels are floating"),
    Case("cross_entropy", logits(np.full(4, -100)), lambda x, y: np.float32(0), tag="all-ignored", bad=((PLAIN, LABEL, None, -100, "avg"), ConfigError, "reduction='avg'")),
    Case("cross_entropy", logits(np.array([[0, 2], [1, 0]]), shape=(2, 3, 2)), hard, kwargs={"axis": 1, "reduction": "none"}, tag="axis"),
    Case("cross_entropy", logits(np.array([[[0, 2]], [[1, 0]]]), shape=(2, 3, 2)), hard, kwargs={"axis": 1, "reduction": "none"}, tag="axis-column"),
    Case("cross_entropy", probabilities(LABEL), hard, kwargs={"use_softmax": False}, tag="no-softmax"),
    Case("cross_entropy", soft(), with_probabilities, kwargs={"soft_label": True}, tag="soft", bad=((PLAIN, PLAIN[:, :2]), ShapeError, r"soft label \[4, 2\]")),
    Case("cross_entropy", soft(WEIGHT), with_probabilities, kwargs={"soft_label": True, "label_smoothing": 0.1}, tag="soft-weight"),
    Case("cross_entropy", soft(shape=(2, 3, 2)), with_probabilities, kwargs={"soft_label": True, "axis": 1, "reduction": "none"}, tag="soft-axis"),
    Case("cross_entropy_of_classes", lambda rng: (PLAIN, np.array([0, 7, 1, -100]), None, -100, "none"), lambda x, y, *_: np.array([np.log(3), np.nan, np.log(3), 0]), no_grad="NaN is not differentiable", tag="range", bad=((PLAIN, LABEL, None, -100, "mean", False, -1, True, 1.5), ConfigError, "label_smoothing=1.5")),
    Case("softmax_and_cross_entropy", logits(COLUMN), both, bad=(SHORT, ShapeError, r"label \[2\]")),
    Case("softmax_with_cross_entropy", logits(COLUMN), lambda x, y: both(x, y)[0], bad=(RANGE, IndexError, "label: 3")),
    Case("softmax_with_cross_entropy", soft(True), both, kwargs={"return_softmax": True}, tag="soft", bad=((PLAIN, PLAIN[:2], True), ShapeError, "soft label")),
    Case("softmax_with_cross_entropy", logits(np.array([[[0, 2]], [[1, 5]]]), shape=(2, 3, 2)), both, kwargs={"axis": 1, "ignore_index": 5, "return_softmax": True}, tag="axis"),
    Case("softmax_with_cross_entropy", logits(LABEL), lambda x, y, **_: both(x, y)[0], kwargs={"numeric_stable_mode": False}, tag="flat"),
    Case("nll_of_classes", logits(LABEL, WEIGHT), nll, bad=(SHORT, ShapeError, r"label \[2\]")),
    Case("nll_loss", logits(LABEL, WEIGHT), nll, bad=(RANGE, IndexError, "label: 3")),
    Case("nll_loss", logits(np.array([0, 2, 1, 1]), None, 1, "none"), nll, tag="none", bad=((PLAIN[0], LABEL[0]), ShapeError, "at least 2 dims")),
    Case("nll_loss", logits(LABEL[:, None], WEIGHT), lambda x, y, w: nll(x, y[:, 0], w), tag="column"),
    Case("nll_loss", logits(np.array([[0, 2], [1, -100]]), shape=(2, 3, 2)), lambda x, y: -np.mean([x[0, 0, 0], x[0, 2, 1], x[1, 1, 0]]), tag="dims"),
    Case("linear_cross_entropy_of_classes", head(LABEL, rows=(5, 3)), fused, amp_out="float32", bad=((*FUSED, np.array([0, 1])), ShapeError, "label")),
    Case("fused_linear_cross_entropy", head(COLUMN, rows=(5, 3)), fused, terms=24, bad=((*FUSED, np.array([0, 1, 3, 0])), IndexError, "label: 3")),
    Case("fused_linear_cross_entropy", head(LABEL, True), lambda h, w, y, t, **k: fused(h, w, y, True, **k), kwargs={"label_smoothing": 0.1, "reduction": "none"}, terms=24, tag="none", bad=((FUSED[0], FUSED[1].T[:, :4], LABEL, True), ShapeError, "do not fit")),
    Case("fused_linear_cross_entropy", lambda rng: (rng.standard_normal((2, 6, 5)).astype("float32"), rng.standard_normal((5, 3)).astype("float32"), LABEL.reshape(2, 2)), shifted, kwargs={"bias": WEIGHT, "class_weight": WEIGHT, "rows": (slice(None), slice(1, -1, 3))}, terms=24, tag="rows", bad=((*FUSED, LABEL), ConfigError, "rows .* needs slices with steps above 0")),
    Case("fused_linear_cross_entropy", head(LABEL, rows=(5, 3)), fused, kwargs={"softcap": 0.7}, terms=24, tag="softcap"),
    Case("fused_linear_cross_entropy", lambda rng: (rng.standard_normal((2, 2, 5)).astype("float32"), rng.standard_normal((5, 3)).astype("float32"), LABEL.reshape(2, 2), False, -100, 0.0, "sum", WEIGHT), fused, terms=24, tag="batched", bad=((*FUSED, LABEL, False, -100, 0.0, "avg"), ConfigError, "reduction")),
]  # fmt: skip
