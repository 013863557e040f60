"""Metrics against plain counting and SciPy, on arrays and on Tensors, and the errors they raise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, DataError, DTypeError, ShapeError
from polyreme.metric import Accuracy, Auc, Metric, Precision, Recall, accuracy

EPS = np.finfo(np.float64).eps
both = pytest.mark.parametrize("make", [np.asarray, to_tensor], ids=["array", "Tensor"])


@st.composite
def scored(draw):
    """Scores with many ties, and a class for each row."""
    rows, classes = draw(st.integers(1, 8)), draw(st.integers(2, 6))
    seed = draw(st.integers(0, 10_000))
    rng = np.random.default_rng(seed)
    return rng.integers(0, 4, (rows, classes)) / 4, rng.integers(0, classes, rows)


def hits(scores, labels, k):
    """A stable sort, highest first: the label is among the first k."""
    return sum(label in np.argsort(-row, kind="stable")[:k] for row, label in zip(scores, labels, strict=True))


@given(scored(), st.integers(1, 2))
def test_accuracy_counts_what_a_stable_sort_finds(data, k):
    scores, labels = data
    want = hits(scores, labels, k) / len(labels)
    m = Accuracy(topk=(1, k))
    got = m.update(m.compute(scores, labels))
    # one division on each side, so equal to the bit
    assert got == m.accumulate() == [hits(scores, labels, 1) / len(labels), want]
    assert float(accuracy(scores, labels[:, None], k=k)) == np.float32(want)


@given(st.lists(scored().filter(lambda d: d[0].shape[1] > 2), min_size=1, max_size=4))
def test_accuracy_over_batches_is_that_of_all_samples(batches):
    m = Accuracy()
    for scores, labels in batches:
        m.update(m.compute(scores, labels))
    total = sum(len(labels) for _, labels in batches)
    assert m.accumulate() == sum(hits(s, y, 1) for s, y in batches) / total
    m.reset()
    assert m.accumulate() == 0.0


@both
def test_accuracy_takes_every_form_of_label(make):
    scores = np.array([[0.1, 0.5, 0.4], [0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], np.float32)
    labels = np.array([2, 2, 2])
    m = Accuracy(topk=(1, 3))
    forms = (labels, labels[:, None], np.eye(3, dtype=np.float32)[labels])
    for form in forms:
        got = m.compute(make(scores), make(form))
        assert isinstance(got, Tensor) == (make is to_tensor)
        np.testing.assert_array_equal(np.asarray(got), [[0, 1, 0], [1, 0, 0], [0, 0, 1]])
        assert m.update(got) == [1 / 3, 1.0]
    assert m.compute(make(scores[None]), make(labels[None])).shape in ((1, 3, 3), [1, 3, 3])


def test_a_metric_is_named_by_its_class_or_the_user():
    assert Accuracy().name() == ["acc"]
    assert Accuracy(topk=(1, 5), name="val").name() == ["val_top1", "val_top5"]
    assert Accuracy(topk=[2]).name() == ["acc_top2"]
    assert (Precision().name(), Recall("r").name(), Auc().name()) == ("precision", "r", "auc")


@both
def test_precision_and_recall_are_counts(make):
    rng = np.random.default_rng(0)
    p, r, seen = Precision(), Recall(), []
    for n in (7, 20, 1):
        score, truth = rng.random(n).astype(np.float32), rng.integers(0, 2, n)
        score[0] = 0.5
        p.update(make(score), make(truth))
        r.update(make(score[:, None]), make(truth[:, None]))
        seen += list(zip(score, truth, strict=True))
    tp = sum(s >= 0.5 and t == 1 for s, t in seen)
    assert p.accumulate() == tp / sum(s >= 0.5 for s, _ in seen)
    assert r.accumulate() == tp / sum(t == 1 for _, t in seen)
    assert (p.tp, r.tp) == (tp, tp)
    p.reset()
    r.reset()
    assert p.accumulate() == r.accumulate() == 0.0


def two_columns(score):
    return np.stack([1 - score, score], 1)


@given(st.integers(0, 10_000), st.integers(2, 60))
def test_roc_area_is_the_rank_statistic(seed, n):
    rng = np.random.default_rng(seed)
    truth = np.r_[0, 1, rng.integers(0, 2, n - 2)]
    score = rng.integers(0, 17, n) / 16  # exact in binary: 16 thresholds give each score its own bin
    m = Auc(num_thresholds=16)
    m.update(two_columns(score)[: n // 2], truth[: n // 2])
    m.update(two_columns(score)[n // 2 :], truth[n // 2 :, None])
    pos, neg = score[truth == 1], score[truth == 0]
    area = stats.mannwhitneyu(pos, neg).statistic / len(pos) / len(neg)
    # sums of integers are exact in float64; each side divides twice
    assert m.accumulate() == pytest.approx(area, rel=4 * EPS)


def test_many_thresholds_come_close_to_the_exact_area():
    rng = np.random.default_rng(1)
    truth, score = rng.integers(0, 2, 400), rng.random(400)
    m = Auc()
    m.update(to_tensor(two_columns(score)), to_tensor(truth))
    pos, neg = score[truth == 1], score[truth == 0]
    area = stats.mannwhitneyu(pos, neg).statistic / len(pos) / len(neg)
    # only pairs that share one of 4096 bins are counted as ties: half a pair each
    ties = sum((int(a * 4095) == int(b * 4095)) for a in pos for b in neg)
    assert abs(m.accumulate() - area) <= 0.5 * ties / len(pos) / len(neg) + 4 * EPS


def test_pr_area_is_average_precision():
    score = np.array([0.875, 0.75, 0.5, 0.25, 0.125])
    truth = np.array([1, 0, 1, 1, 0])
    m = Auc(curve="PR", num_thresholds=8)
    m.update(two_columns(score), truth)
    assert m.accumulate() == pytest.approx((1 / 1 + 2 / 3 + 3 / 4) / 3, rel=8 * EPS)


def test_area_is_zero_while_a_class_is_missing():
    m = Auc()
    assert m.accumulate() == 0.0
    m.update(two_columns(np.array([0.3, 1.0])), np.array([1, 1]))
    assert m.accumulate() == 0.0


def test_accuracy_function_fills_its_counts():
    scores = to_tensor(np.array([[0.1, 0.5, 0.4], [0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], np.float32))
    correct, total = to_tensor(np.zeros(1, np.int32)), to_tensor(np.zeros((), np.int64))
    got = accuracy(scores, to_tensor(np.array([[2], [2], [2]])), k=2, correct=correct, total=total)
    assert isinstance(got, Tensor)
    assert (got.shape, got.dtype, got.item()) == ([], np.float32, np.float32(2 / 3))
    assert (correct.tolist(), total.item()) == ([2], 3)


def test_a_metric_must_define_its_four_methods():
    with pytest.raises(TypeError, match=r"abstract methods? .*accumulate"):
        Metric()


P3 = np.full((2, 3), 0.2)
ERRORS = [
    (lambda: Accuracy(topk=5), ConfigError, "topk=5; give a tuple"),
    (lambda: Accuracy(topk=(0,)), ConfigError, r"topk=\(0,\)"),
    (lambda: Accuracy((1,), None, 3), ConfigError, "does not take int; leave it out"),
    (lambda: Auc(bins=3), ConfigError, "Auc does not take"),
    (lambda: Auc().compute(P3, weight=P3), ConfigError, "Auc does not take weight=; leave it out"),
    (lambda: Accuracy(topk=(5,)).compute(P3, np.zeros(2, int)), ShapeError, "best 5 of 3 classes"),
    (
        lambda: Accuracy().compute(P3, np.zeros((3, 1), int)),
        ShapeError,
        r"scores have shape \[2, 3\] and labels \[3, 1\]",
    ),
    (lambda: Accuracy().compute(P3, np.array([0, 3])), DataError, r"labels lie in 0 .. 3; give classes in 0 .. 2"),
    (lambda: Accuracy().compute(P3, np.array([0, -1])), DataError, "labels lie in -1 .. 0"),
    (lambda: Accuracy().compute(P3 * np.nan, np.array([0, 1])), DataError, "hold NaN"),
    (lambda: Accuracy().compute([[0.1]], np.array([0])), DTypeError, "pred is a list; give a numpy array"),
    (lambda: Accuracy(topk=(2,)).update(np.ones((3, 1))), ShapeError, r"shape \[3, 1\]; give \[..., 2\]"),
    (lambda: Precision().update(np.ones(2), np.ones(3)), ShapeError, "2 predictions and 3 labels"),
    (lambda: Precision().update(np.array([2.0]), np.ones(1)), DataError, "apply sigmoid or softmax first"),
    (lambda: Recall().update(np.array([np.nan]), np.ones(1)), DataError, "probabilities in 0 .. 1"),
    (lambda: Recall().update(np.ones(1), np.array([2])), DataError, "labels lie in 2 .. 2; give 0 or 1"),
    (lambda: Auc(curve="roc"), ConfigError, "curve='roc'; give 'ROC' or 'PR'"),
    (lambda: Auc(num_thresholds=0), ConfigError, "num_thresholds=0"),
    (lambda: Auc().update(np.ones(2), np.ones(2)), ShapeError, r"shape \[2\]; give \[batch, 2\]"),
    (lambda: accuracy(P3, np.zeros(2, int)), ShapeError, r"label \[2\]; give \[batch, classes\] and \[batch, 1\]"),
    (lambda: accuracy(P3, np.zeros((2, 1), int), k=0), ConfigError, "k=0"),
    (lambda: accuracy(P3, np.zeros((2, 1), int), k=4), ShapeError, "best 4 of 3"),
    (lambda: accuracy(P3[:0], np.zeros((0, 1), int)), DataError, "batch of 0 samples"),
    (
        lambda: accuracy(P3, np.zeros((2, 1), int), correct=to_tensor(np.zeros(2))),
        ShapeError,
        r"correct has shape \[2\]; give a Tensor of one element",
    ),
]


@pytest.mark.parametrize(("make", "error", "match"), ERRORS, ids=[m[:30] for *_, m in ERRORS])
def test_bad_input_says_what_to_change(make, error, match):
    with pytest.raises(error, match=match):
        make()
