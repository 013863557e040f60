"""Dtypes: names, promotion, the default."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.core import amp_policy
from polyreme.core import dtype as dtypes
from polyreme.errors import DTypeError


def dtype_of(x):
    return x.dtype.name


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ("int64", "float32", "float32"),
        ("int32", "int64", "int64"),
        ("bool", "int32", "int32"),
        ("float32", "float64", "float64"),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float64", "complex64", "complex128"),
        ("int64", "bfloat16", "bfloat16"),
    ],
)
def test_two_tensors_promote(left, right, result):
    a, b = paddle.ones([2], left), paddle.ones([2], right)
    assert dtype_of(a + b) == dtype_of(b + a) == result


@pytest.mark.parametrize(
    ("tensor", "number", "result"),
    [
        ("float32", 2.5, "float32"),
        ("bfloat16", 2.5, "bfloat16"),
        ("int64", 2, "int64"),
        ("int32", 2, "int32"),
        ("int64", 2.5, "float32"),
        ("float32", 2, "float32"),
        ("float32", 1j, "complex64"),
    ],
)
def test_a_python_number_never_widens_its_own_kind(tensor, number, result):
    assert dtype_of(paddle.ones([2], tensor) + number) == result


def test_the_default_dtype_is_part_of_every_kernel():
    assert dtype_of(paddle.zeros([1])) == dtype_of(paddle.exp(paddle.ones([1], "int64"))) == "float32"
    paddle.set_default_dtype("float64")
    try:
        assert dtype_of(paddle.zeros([1])) == dtype_of(paddle.exp(paddle.ones([1], "int64"))) == "float64"
    finally:
        paddle.set_default_dtype("float32")


def test_under_autocast_a_python_number_does_not_hide_the_tensor():
    amp_policy.active.policy = amp_policy.Policy(low=dtypes.bfloat16)
    try:
        assert dtype_of(paddle.pow(paddle.ones([2], "bfloat16"), 2.0)) == "float32"
    finally:
        amp_policy.active.policy = None


def test_names_and_refusals():
    assert dtypes.as_dtype("paddle.float32") == dtypes.as_dtype(np.float32) == paddle.float32 == "float32"
    with pytest.raises(DTypeError, match="'float31' is not a dtype here"):
        paddle.zeros([1], "float31")
    with pytest.raises(DTypeError, match="takes a floating dtype, got int32"):
        paddle.set_default_dtype("int32")
    with pytest.raises(DTypeError, match="give numbers"):
        paddle.to_tensor(["a"])


def test_float64_data_for_a_layer_of_float32_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr("polyreme.core.op._told_to_widen", set())
    layer = paddle.nn.Linear(3, 5)
    layer(paddle.ones([7, 3]))
    paddle.ones([7, 3], "float64") @ paddle.ones([3, 5], "float64")
    assert not caplog.records
    for rows in (7, 11):
        assert dtype_of(layer(paddle.ones([rows, 3], "float64"))) == "float64"
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.startswith("linear(float64[7, 3], float32[3, 5], float32[5]) is computed in float64")
    assert "astype('float32')" in told
