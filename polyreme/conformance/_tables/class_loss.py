"""Contract rows of ops/losses/classes.py: loops over rows, written from the definitions."""

import numpy as np
import scipy.special as sp

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError

LABEL = np.array([1, 0, 3])
MANY = np.array([[3, 0, -1, 1], [1, 2, 3, -1], [-1, 0, 0, 0]])
WEIGHT = np.float32([1, 2, 0.5, 3])
X = np.ones((3, 4), "float32")
WRONG = (X, np.array([0, 4, 1]))
CUTOFFS = [3, 5, 8]
INTS = "labels"


def scores(*args, shape=(3, 4)):
    return lambda rng: (rng.standard_normal(shape).astype("float32"), *args)


def reduce(loss, reduction):
    return {"none": lambda v: v, "mean": np.mean, "sum": np.sum}[reduction](np.array(loss))


def multi_margin(x, label, p=1, margin=1.0, weight=None, reduction="mean"):
    weight = np.ones(x.shape[1]) if weight is None else weight
    rows = [
        sum(weight[y] * max(0, margin - row[y] + row[j]) ** p for j in range(len(row)) if j != y) / len(row)
        for row, y in zip(x, label.ravel(), strict=True)
    ]
    return reduce(rows, reduction)


def multi_label(x, label, reduction="mean"):
    rows = []
    for row, y in zip(x, label, strict=True):
        named = list(y[: np.argmax(y < 0)] if (y < 0).any() else y)
        pairs = ((i, j) for i in named for j in range(len(row)) if j not in named)
        rows.append(sum(max(0, 1 - row[i] + row[j]) for i, j in pairs) / len(row))
    return reduce(rows, reduction)


def npair(a, b, labels, l2=0.002):
    same = (labels[:, None] == labels[None]).astype("float64")
    loss = -(same / same.sum(1, keepdims=True) * sp.log_softmax(a @ b.T, 1)).sum(1).mean()
    return loss + l2 / 4 * ((a * a).sum(1).mean() + (b * b).sum(1).mean())


def softplus(z):
    return np.log1p(np.exp(z))


def complete_tree(x, label, classes, weight, bias=None):
    """Down a complete binary tree: the path of a class is its number's binary digits."""
    losses = []
    for row, y in zip(x, label.ravel(), strict=True):
        node, loss = classes + int(y), 0.0
        while node > 1:
            node, bit = node >> 1, node & 1
            z = row @ weight[node - 1] + (0 if bias is None else bias.ravel()[node - 1])
            loss += softplus(z) - bit * z
        losses.append([loss])
    return np.array(losses)


def own_tree(x, label, classes, weight, bias, table, code):
    losses = []
    for row, nodes, codes in zip(x, table, code, strict=True):
        z = [(row @ weight[n] + bias[n], c) for n, c in zip(nodes, codes, strict=True) if n >= 0]
        losses.append([sum(softplus(v) - c * v for v, c in z)])
    return np.array(losses)


def tree(*args, nodes=4):
    return lambda rng: (
        rng.standard_normal((4, 3)).astype("float32"),
        np.array([0, 1, 4, 3]),
        5,
        rng.standard_normal((nodes, 3)).astype("float32"),
        *args,
    )


def clusters(rng):
    x, head = (rng.standard_normal(s).astype("float32") for s in ((5, 4), (4, 5)))
    return x, head, [rng.standard_normal(s).astype("float32") for s in ((4, 2), (2, 2), (4, 1), (1, 3))]


def every_log_prob(x, head, tails, cutoffs, bias=None):
    top = sp.log_softmax(x @ head + (0 if bias is None else bias), 1)
    parts = [top[:, : cutoffs[0]]]
    for i in range(len(tails) // 2):
        own = sp.log_softmax(x @ tails[2 * i] @ tails[2 * i + 1], 1)
        parts.append(top[:, cutoffs[0] + i, None] + own)
    return np.concatenate(parts, 1)


def with_adaptive_loss(rng):
    x, head, tails = clusters(rng)
    return x, np.array([0, 3, 6, 7, 2]), head, [tails[:2], tails[2:]], CUTOFFS


def without_number_of_classes(rng):
    return *with_adaptive_loss(rng)[:4], CUTOFFS[:-1]


def adaptive_loss(x, label, head, tails, cutoffs, bias=None):
    found = every_log_prob(x, head, [w for pair in tails for w in pair], cutoffs, bias)[np.arange(len(label)), label]
    return found, -found.mean()


def cosines(*args):
    return lambda rng: (rng.uniform(-0.9, 0.9, (3, 4)).astype("float32"), LABEL, *args)


def turned(x, label, m1=1.0, m2=0.5, m3=0.0, scale=64.0):
    z = x.astype("float64")
    at = np.arange(len(label)), label.ravel()
    z[at] = np.cos(m1 * np.arccos(z[at]) + m2) - m3
    return scale * z


def margin_loss(x, label, m1=1.0, m2=0.5, m3=0.0, scale=64.0, group=None, softmax=False, reduction="mean"):
    log_probs = sp.log_softmax(turned(x, label, m1, m2, m3, scale), 1)
    loss = -log_probs[np.arange(len(label)), label.ravel()][:, None]
    loss = loss if reduction is None else reduce(loss, reduction)
    return (loss, np.exp(log_probs)) if softmax else loss


def check_sample(places, classes):
    label = np.array([11, 5, 1, 3, 5])
    np.testing.assert_array_equal(classes[places], label)
    np.testing.assert_array_equal(classes[:4], [1, 3, 5, 11])
    assert len(set(classes.tolist())) == 6
    assert classes.max() < 20


SAMPLE = (np.array([11, 5, 1, 3, 5]), 20)
CASES = [
    Case("multi_margin_loss", scores(LABEL), multi_margin, bad=(WRONG, IndexError, "label: 4")),
    Case("multi_margin_loss", scores(LABEL[:, None], 2, 0.7, WEIGHT, "none"), multi_margin, tag="weight", bad=((X, LABEL, 3), ConfigError, "p=3; choose 1 or 2")),
    Case("multi_margin_loss", scores(LABEL, 1, 1.0, None, "sum"), multi_margin, tag="sum", bad=((X, LABEL, 1, 1.0, WEIGHT[:2]), ShapeError, r"weight \[2\]; needs \[4\]")),
    Case("multi_label_margin_loss", scores(MANY), multi_label, bad=((X, LABEL), ShapeError, r"label int64\[3\]; needs integers \[3, 4\]")),
    Case("multi_label_margin_loss", scores(MANY, "none"), multi_label, tag="none", bad=((X, MANY + 1), IndexError, "label: 4")),
    Case("npair_loss", lambda rng: (*rng.standard_normal((2, 3, 4)).astype("float32"), np.float32([0, 1, 0]), 0.1), npair, bad=((X, X[:2], LABEL), ShapeError, r"positive \[2, 4\]")),
    Case("hsigmoid_loss", tree(), complete_tree, terms=16, bad=((X, LABEL, 3, X), IndexError, "label: 3")),
    Case("hsigmoid_loss", tree(np.float32([[0.1], [0.2], [-0.3], [0.4]])), complete_tree, terms=16, tag="bias", bad=((X, LABEL * 0, 1, X), ConfigError, "num_classes=1")),
    Case("hsigmoid_loss", tree(np.float32([0.1, 0.2, -0.3, 0.4]), np.array([[0, 2], [0, 3], [1, -1], [2, 1]]), np.array([[0, 1], [1, 1], [0, 0], [1, 0]])), own_tree, terms=16, tag="own", bad=((X, LABEL, 5, X, None, MANY), ConfigError, "go together")),
    Case("adaptive_log_softmax", lambda rng: (*clusters(rng), CUTOFFS), every_log_prob, terms=24),
    Case("adaptive_log_softmax", lambda rng: (*clusters(rng), CUTOFFS, np.float32([0.1, 0.2, 0.3, 0.4, 0.5])), every_log_prob, terms=24, tag="bias"),
    Case("adaptive_log_softmax_with_loss", with_adaptive_loss, adaptive_loss, terms=24, bad=((X, LABEL, X, [], [2, 2]), ConfigError, r"cutoffs=\[2, 2\]")),
    Case("adaptive_log_softmax_with_loss", without_number_of_classes, adaptive_loss, terms=24, tag="clusters"),
    Case("pick_classes", scores(LABEL), lambda x, y: x[np.arange(3), y], bad=((X, LABEL.astype("float32")), DTypeError, "label is float32")),
    Case("angular_margin", cosines(1.1, 0.3, 0.1, 8.0), turned, terms=24, bad=((X, LABEL[:2], 1.0, 0.5, 0.0, 64.0), ShapeError, r"label \[2\]; needs \[3\]")),
    Case("margin_cross_entropy", cosines(1.1, 0.3, 0.1, 8.0, None, True, None), margin_loss, terms=64, bad=(WRONG, IndexError, "label: 4")),
    Case("margin_cross_entropy", cosines(1.0, 0.5, 0.0, 4.0), margin_loss, terms=64, tag="mean", bad=((X, LABEL, 1.0, 0.5, 0.0, 64.0, None, False, "avg"), ConfigError, "reduction='avg'")),
    Case("class_center_sample", lambda rng: (*SAMPLE, 6), check=check_sample, no_grad=INTS, host="which classes there are", bad=((LABEL, 4, 5), ConfigError, "num_samples=5, num_classes=4")),
    Case("class_center_sample", lambda rng: (*SAMPLE, 2), lambda *_: (np.array([3, 2, 0, 1, 2]), np.array([1, 3, 5, 11])), no_grad=INTS, host="which classes there are", tag="few"),
]  # fmt: skip
