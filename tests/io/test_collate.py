"""Collation of samples into batches, and its refusals."""

from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest

from polyreme.eager.tensor import to_tensor
from polyreme.errors import DTypeError, ShapeError
from polyreme.io import default_collate_fn, default_convert_fn

Point = namedtuple("Point", "x y")


def test_every_kind_of_sample():
    samples = [
        {
            "a": np.full(2, i, "float32"),
            "n": i,
            "f": 0.5 * i,
            "s": f"s{i}",
            "p": Point(i, [i, to_tensor([i])]),
        }
        for i in range(3)
    ]
    batch = default_collate_fn(samples)
    assert batch["a"].shape == (3, 2)
    assert batch["a"].dtype == np.float32
    assert (batch["n"].dtype, batch["f"].dtype) == (np.int64, np.float64)
    assert default_collate_fn([True, False]).dtype == np.bool_
    assert batch["s"] == ["s0", "s1", "s2"]
    assert isinstance(batch["p"], Point)
    np.testing.assert_array_equal(batch["p"].y[1], [[0], [1], [2]])


def test_tuples_become_lists_and_numbers_promote():
    batch = default_collate_fn([(1, np.float32(2)), (2.5, np.float32(3))])
    assert isinstance(batch, list)
    np.testing.assert_array_equal(batch[0], [1, 2.5])
    assert batch[1].dtype == np.float32
    assert default_collate_fn([np.zeros(2, ml_dtypes.bfloat16)] * 2).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("samples", "error", "match"),
    [
        ([np.ones(2), np.ones(3)], ShapeError, r"shapes differ, \(2,\) in sample 0 but \(3,\) in sample 1"),
        ([(1, np.ones(2)), (1, 2)], ShapeError, r"sample\[1\]: shapes differ"),
        ([(1, 2), (1,)], ShapeError, "lengths differ"),
        ([{"a": 1}, {"b": 1}], ShapeError, "keys differ"),
        ([{"a": 1}, [1]], DTypeError, "sample 0 has a dict there, sample 1 a list"),
        ([1.0, True], ShapeError, "kinds of dtype differ"),
        (["x", 1], DTypeError, "sample 1 a int"),
        (["x", b"x"], ShapeError, "types differ"),
        ([{"a": None}], DTypeError, r"sample\['a'\] of sample 0: it is a NoneType"),
        ([1, "x"], DTypeError, "of sample 1: it is a str"),
        ([np.array([None])], DTypeError, "it is a ndarray"),
    ],
)
def test_samples_that_do_not_fit_are_named(samples, error, match):
    with pytest.raises(error, match=match):
        default_collate_fn(samples)


def test_convert_leaves_a_sample_as_it_is():
    out = default_convert_fn({"t": to_tensor([1, 2]), "s": "x", "n": (1, 2.0)})
    assert isinstance(out["t"], np.ndarray)
    assert (out["s"], out["n"]) == ("x", (1, 2.0))
