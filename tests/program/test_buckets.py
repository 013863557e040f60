"""Executor buckets: feeds of any size run in a few compiled sizes, with the results of the size they have."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.errors import ConfigError, ProgramError

X = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")


def test_one_compilation_serves_every_size_of_a_bucket(static_mode):
    x = static.data("x", [None, 4])
    out = F.softmax(paddle.nn.Linear(4, 3)(x))
    other = paddle.ones([2])
    plain, bucketed = static.Executor(), static.Executor(buckets={"x": {0: (8, 4)}})
    plain.run(static.default_startup_program())
    for size in (1, 3, 4, 2, 5, 8, 7):
        want = plain.run(feed={"x": X[:size]}, fetch_list=[out, other, x])
        found = bucketed.run(feed={"x": X[:size]}, fetch_list=[out, other, x])
        assert [f.shape for f in found] == [(size, 3), (2,), (size, 4)]
        for a, b in zip(found, want, strict=True):
            # float32, another shape of product: sums of 4 terms and of 3
            np.testing.assert_allclose(a, b, rtol=8 * 2**-23, atol=8 * 2**-23)
    assert (len(bucketed._compiled), len(plain._compiled)) == (2, 8)
    assert bucketed.run(feed={"x": X[:3]}, fetch_list=[out], return_numpy=False)[0].shape == [3, 3]


def test_two_dims_and_masked_rows(static_mode):
    ids, mask = static.data("ids", [None, None], "int64"), static.data("mask", [None, None])
    table = paddle.nn.Embedding(10, 4)
    pooled = (table(ids) * mask.unsqueeze(-1)).sum(1)
    exe = static.Executor(buckets={"ids": {0: (4,), 1: (6,)}, "mask": {0: (4,), 1: (6,)}})
    exe.run(static.default_startup_program())
    feed = {"ids": np.array([[1, 2, 3], [4, 5, 0]]), "mask": np.array([[1, 1, 1], [1, 1, 0]], "float32")}
    (found,) = exe.run(feed=feed, fetch_list=[pooled])
    (want,) = static.Executor().run(feed=feed, fetch_list=[pooled])
    np.testing.assert_allclose(found, want, rtol=6 * 2**-23)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda x: x.mean(), r"fetch 'mean.*' of shape \[\] depends on the padded \['x'\], but its size does not"),
        (lambda x: x - x.mean(0), r"fetch 'subtract.*' has another value when the feeds are padded"),
        (lambda x: x / x.min(), r"has another value when the feeds are padded"),
        (lambda x: x * paddle.ones_like(x).sum(), "has another value when the feeds are padded"),
        (lambda x: x + paddle.rand([4]), "changes persistable values or draws random numbers"),
        (lambda x: paddle.nn.BatchNorm1D(4)(x), "changes persistable values or draws random numbers"),
    ],
)
def test_what_padding_would_change_is_refused(static_mode, build, match):
    out = build(static.data("x", [None, 4]))
    exe = static.Executor(buckets={"x": {0: (4,)}})
    exe.run(static.default_startup_program())
    with pytest.raises(ProgramError, match=match):
        exe.run(feed={"x": np.abs(X[:3])}, fetch_list=[out])


def test_training_is_refused(static_mode):
    loss = paddle.nn.Linear(4, 1)(static.data("x", [None, 4])).mean()
    paddle.optimizer.SGD(0.1).minimize(loss)
    exe = static.Executor(buckets={"x": {0: (4,)}})
    exe.run(static.default_startup_program())
    with pytest.raises(ProgramError, match="padding would count in its loss"):
        exe.run(feed={"x": X[:3]}, fetch_list=[loss])


def test_buckets_that_do_not_fit_are_refused(static_mode):
    out = static.data("x", [None, 4]) * 2
    feed = {"x": X[:3]}
    with pytest.raises(ProgramError, match=r"'x' has 3 in dim 0, its buckets end at 2"):
        static.Executor(buckets={"x": {0: (1, 2)}}).run(feed=feed, fetch_list=[out])
    with pytest.raises(ProgramError, match=r"dim 1 of 'x' is no size that may differ, it has shape \[-1, 4\]"):
        static.Executor(buckets={"x": {1: (8,)}}).run(feed=feed, fetch_list=[out])
    with pytest.raises(ProgramError, match="dim 0 of 'y' is no size that may differ, the Program has no such"):
        static.Executor(buckets={"y": {0: (8,)}}).run(feed=feed, fetch_list=[out])
    for sizes in ({0: ()}, {0: (0,)}, {-1: (2,)}, {0: "12"}, {0: (2.0,)}):
        with pytest.raises(ConfigError, match="give dims counted from 0 and for each a list of sizes"):
            static.Executor(buckets={"x": sizes})
