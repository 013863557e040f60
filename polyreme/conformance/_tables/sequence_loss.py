"""Contract rows of ops/losses/alignment.py; the references go through every path there is, one after the other."""

import itertools

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError

LOGITS, LABELS = np.zeros((4, 2, 3), "float32"), np.array([[1, 2], [2, 2]])
FULL, SHORT = np.array([4, 4]), np.array([2, 2])


def reduced(losses, lengths, reduction):
    if reduction == "mean" and lengths is not None:
        losses = losses / np.maximum(lengths, 1)
    return {"none": losses, "sum": losses.sum(), "mean": losses.mean()}[reduction]


def log(p):
    return np.log(p) if p > 0 else -np.inf


def ctc(scores, labels, steps, lengths, blank=0, reduction="mean", norm_by_times=False, zero_infinity=False):
    p = np.exp(scores.astype("float64"))
    p /= p.sum(-1, keepdims=True)
    losses = []
    for n, (t, count) in enumerate(zip(steps, lengths, strict=True)):
        total = 0.0
        for path in itertools.product(range(scores.shape[2]), repeat=int(t)):
            read = [k for k, _ in itertools.groupby(path) if k != blank]
            if read == labels[n, :count].tolist():
                total += np.prod([p[at, n, k] for at, k in enumerate(path)])
        losses.append(-log(total))
    losses = np.array(losses)
    if zero_infinity:
        losses[np.isinf(losses)] = 0
    return reduced(losses, lengths, reduction).astype(scores.dtype)


def rnnt(log_p, labels, steps, lengths, blank=0, fastemit_lambda=0.001, reduction="mean"):
    losses = []
    for n, (t, count) in enumerate(zip(steps, lengths, strict=True)):
        total = 0.0
        # where among the emissions the labels stand; the last emission is a blank
        for places in itertools.combinations(range(t + count - 1), int(count)):
            row = column = score = 0
            for k in range(t + count):
                if k in places:
                    score, column = score + log_p[n, row, column, labels[n, column]], column + 1
                else:
                    score, row = score + log_p[n, row, column, blank], row + 1
            total += np.exp(score)
        losses.append(-log(total))
    return reduced(np.array(losses), None, reduction).astype(log_p.dtype)


def scores(*shape):
    return lambda rng: rng.standard_normal(shape).astype("float32")


def alignments(x, *rest):
    return lambda rng: (x(rng), *rest)


X = scores(4, 4, 3)
GRID = scores(2, 3, 3, 3)
# a repeated label (needs a blank between), an empty one, one that fills its steps, padding that is no class
IDS, STEPS, LENGTHS = np.array([[1, 1], [-1, -1], [2, 1], [2, 9]]), np.array([4, 3, 2, 1]), np.array([2, 0, 2, 1])
TIGHT = np.array([2, 3, 1, 1])

CASES = [
    Case("ctc_loss", alignments(X, IDS, STEPS, LENGTHS, 0, "none"), ctc, terms=64, bad=((LOGITS, LABELS, FULL, SHORT, 3), ConfigError, "blank=3 of 3 classes")),
    Case("ctc_loss", alignments(X, IDS, STEPS, LENGTHS), ctc, terms=64, tag="mean", bad=((LOGITS, LABELS, FULL, SHORT, 2), IndexError, r"label 2 at \[0, 1\]; labels are classes from 0 to 2 other than blank=2")),
    Case("ctc_loss", alignments(X, IDS - (IDS > 0), STEPS, LENGTHS, 2, "sum"), ctc, terms=64, tag="blank", bad=((LOGITS, LABELS, FULL, SHORT * 1.0), DTypeError, "label_lengths are float64")),
    Case("ctc_loss", alignments(X, IDS, TIGHT, LENGTHS, 0, "none"), ctc, terms=64, tag="infinite", no_grad="infinite losses have gradient 0; tests/ops/test_sequence_loss.py", bad=((LOGITS, LABELS, FULL + 1, SHORT), ShapeError, "input_lengths: length 5 of a sequence padded to 4")),
    Case("ctc_loss", alignments(X, IDS, TIGHT, LENGTHS, 0, "sum", False, True), ctc, terms=64, tag="zero infinity", bad=((LOGITS[0], LABELS, FULL, SHORT), ShapeError, r"log_probs \[2, 3\]; needs \[steps, batch, classes\]")),
    Case("ctc_loss", alignments(scores(1, 4, 3), IDS[:, :0], np.ones(4, "int32"), np.zeros(4, "int32"), 0, "none"), ctc, terms=16, tag="no labels", bad=((LOGITS, LABELS[:1], FULL, SHORT), ShapeError, r"labels \[1, 2\] for a batch of 2")),
    Case("rnnt_loss", alignments(GRID, LABELS, np.array([3, 2]), np.array([2, 1]), 0, 0.0, "none"), rnnt, terms=64, bad=((np.zeros((2, 3, 3, 3)), LABELS, FULL, SHORT), ShapeError, "input_lengths: length 4")),
    Case("rnnt_loss", alignments(GRID, LABELS - 1, np.array([1, 3]), np.array([0, 2]), 2, 0.0), rnnt, terms=64, tag="mean", bad=((np.zeros((2, 3, 2, 3)), LABELS, SHORT, SHORT), ShapeError, r"input \[2, 3, 2, 3\], label \[2, 2\]; needs \[batch, steps, u \+ 1")),
    Case("rnnt_loss", alignments(scores(2, 2, 1, 3), LABELS[:, :0], SHORT, SHORT * 0, 1, 0.0, "sum"), rnnt, terms=16, tag="no labels", bad=((np.zeros((2, 3, 3, 3)), LABELS, SHORT, SHORT[:1]), ShapeError, r"label_lengths \[1\]; needs \[2\]")),
]  # fmt: skip
