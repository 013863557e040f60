"""Reading and writing parts of a Tensor: slices of any step, Python bools, complex values, seeds and spreads beside."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.errors import ConfigError, DTypeError, GradError, ShapeError

X = np.arange(24, dtype="float32").reshape(2, 3, 4)


@pytest.mark.parametrize(
    "index",
    [
        np.s_[::-1],
        np.s_[:, ::-2],
        np.s_[-1:-4:-1, 1],
        np.s_[5:1:-1],
        np.s_[..., 3:0:-2],
        np.s_[1, ::-1, ::-1],
        np.s_[None, -1],
        np.s_[[1, 0], ::-1],
        np.s_[2:2],
        True,
        False,
        np.True_,
        np.array(False),
        np.s_[True, 0],
        np.s_[:, False],
        np.s_[..., np.array(True)],
        np.s_[[1, 0], None, :, [2, 0]],
    ],
    ids=str,
)
def test_reading_is_numpy_indexing(index):
    got = paddle.to_tensor(X)[index]
    assert got.shape == list(X[index].shape)
    np.testing.assert_array_equal(got, X[index])
    empty = paddle.zeros([0, 3, 4])[::-1]
    assert empty.shape == [0, 3, 4]


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[:, ::-2], np.s_[..., 3:0:-2], True, False], ids=str)
def test_writing_is_numpy_indexing(index):
    x, want = paddle.to_tensor(X), X.copy()
    value = -np.arange(want[index].size, dtype="float32").reshape(want[index].shape)
    x[index], want[index] = value, value
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize(
    ("index", "first", "then"),
    [
        (np.s_[0, :, [0, 1]], 0, np.s_[:, [0, 1]]),
        (np.s_[np.array(1), ..., [[2, 0], [1, 3]]], 1, np.s_[:, [[2, 0], [1, 3]]]),
        (np.s_[1, None, [2, 0]], 1, np.s_[None, [2, 0]]),
    ],
    ids=str,
)
def test_ints_are_taken_before_arrays(index, first, then):
    # NumPy counts an int as an array, and has the dims of arrays that stand apart first
    x, want = paddle.to_tensor(X), X.copy()
    np.testing.assert_array_equal(x[index], X[first][then])
    x[index] = want[first][then] = -np.arange(X[first][then].size, dtype="float32").reshape(X[first][then].shape)
    np.testing.assert_array_equal(x, want)


def test_a_bool_tensor_without_dims_is_a_new_dim():
    x = paddle.to_tensor(X, stop_gradient=False)
    (x[paddle.to_tensor(True)] * 2).sum().backward()
    np.testing.assert_array_equal(x.grad, np.full_like(X, 2))
    y = paddle.to_tensor(X)
    y[paddle.to_tensor(False)] = 5.0
    y[paddle.to_tensor(True), 0] = 7.0
    np.testing.assert_array_equal(y, np.stack([np.full_like(X[0], 7), X[1]]))


def test_a_value_that_a_mask_has_no_room_for_is_refused():
    x = paddle.to_tensor(X[:, :1])  # the dim of 1 does not grow to the value's
    with pytest.raises(ShapeError, match=r"each place of the mask is \[1, 4\] of x \[2, 1, 4\].* \[3, 4\] does not"):
        x[paddle.to_tensor([True, False])] = X[0]


def test_backward_through_a_negative_step():
    x = paddle.to_tensor(X, stop_gradient=False)
    (x[::-1, 0] * paddle.to_tensor(X[:, 0])).sum().backward()
    want = np.zeros_like(X)
    want[::-1, 0] = X[:, 0]
    np.testing.assert_array_equal(x.grad, want)


def test_imaginary_parts_are_not_dropped():
    x = paddle.zeros([3])
    for index, value in ((0, 1j), (slice(None), paddle.to_tensor(1j)), (paddle.to_tensor([True, False, True]), 2j)):
        with pytest.raises(DTypeError, match=r"the value is complex\d+, x float32"):
            x[index] = value
    z = paddle.zeros([3], "complex64")
    z[1:] = 1j
    assert z.tolist() == [0, 1j, 1j]
    z[0] = 2.0
    assert z.tolist() == [2, 1j, 1j]


def test_a_leaf_that_wants_a_gradient_is_not_written_to():
    leaf = paddle.ones([3], requires_grad=True)
    with pytest.raises(GradError, match=r"x\[index\] = value: in-place change of a leaf"):
        leaf[0] = 0.0
    for name in ("exp_", "sqrt_", "clip_", "scale_", "add_", "multiply_", "floor_", "sub_", "div_", "mod_", "less_"):
        args = (leaf,) if name in ("add_", "multiply_", "sub_", "div_", "mod_", "less_") else ()
        with pytest.raises((GradError, DTypeError), match=r"in-place change of a leaf|is bool"):
            getattr(leaf, name)(*args)
    with paddle.no_grad():
        leaf.exp_()
    assert leaf.is_leaf
    assert not leaf.stop_gradient


def test_in_place_is_taped():
    leaf = paddle.to_tensor([1.0, 4.0], stop_gradient=False)
    y = leaf * 1
    y.sqrt_().multiply_(paddle.to_tensor([2.0, 2.0])).sub_(paddle.ones([2]), alpha=3)
    y.sum().backward()
    np.testing.assert_allclose(leaf.grad, [1.0, 0.5], rtol=4 * np.finfo("float32").eps)


def test_seeds_and_spreads_out_of_range_are_refused():
    for seed in (-1, 2**64, 1.5):
        with pytest.raises(ConfigError, match="give an integer of at least 0"):
            paddle.seed(seed)
    x = paddle.zeros([2])
    for draw in (
        lambda: paddle.normal(0.0, -1.0, [2]),
        lambda: paddle.normal(std=-1.0, shape=[2]),
        lambda: paddle.log_normal(0.0, -1.0, [2]),
        lambda: x.normal_(0.0, -1.0),
        lambda: x.log_normal_(std=-1.0),
        lambda: paddle.normal(x, paddle.to_tensor(-1.0)),
        lambda: paddle.gaussian([2], 0.0, -1.0) if hasattr(paddle, "gaussian") else x.normal_(std=-1.0),
    ):
        with pytest.raises(ConfigError, match=r"std=-1\.0; a standard deviation is at least 0"):
            draw()


def test_a_dtype_that_an_op_does_not_take_is_a_dtype_error():
    with pytest.raises(DTypeError, match=r"floor\(x complex64\[1\]\)"):
        paddle.floor(paddle.to_tensor([1j]))
    with pytest.raises(ShapeError, match="reshape"):
        paddle.zeros([3]).reshape([2])
