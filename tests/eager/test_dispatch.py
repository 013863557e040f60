"""Repeated eager calls, which find their kernel by their form, give what first calls give."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme.eager import dispatch
from polyreme.errors import ShapeError


def test_attributes_that_are_equal_in_python_keep_kernels_of_their_own():
    x = paddle.to_tensor([[1.5, 2.5], [3.5, 4.5]])
    for _ in range(2):
        assert paddle.full_like(x, 1).dtype == paddle.full_like(x, 1.0).dtype == x.dtype
        assert paddle.sum(x, axis=0).shape == [2]
        assert paddle.sum(x, axis=None).shape == []
        assert paddle.sum(x, 0, keepdim=True).shape == [1, 2]
        assert paddle.sum(x, 0, keepdim=False).shape == [2]
        assert paddle.sum(x, [0, 1]).shape == []
        assert paddle.sum(x, (0,)).shape == [2]
        assert paddle.cumsum(x, axis=0).tolist() != paddle.cumsum(x, axis=1).tolist()


def test_numbers_follow_the_dtype_of_the_tensor_on_each_call():
    x = paddle.to_tensor([1, 2], dtype="int32")
    for _ in range(2):
        for number, dtype in ((2, "int32"), (2.0, "float32"), (True, "int32"), (2j, "complex64")):
            assert (x * number).dtype.name == dtype
            np.testing.assert_allclose((x * number).numpy(), np.asarray([1, 2]) * number)


def test_a_repeated_call_is_taped_as_the_first_and_says_what_is_wrong():
    x = paddle.to_tensor(np.ones((2, 3), "float32"), stop_gradient=False)
    for _ in range(3):
        y = paddle.multiply(x, x)
        assert not y.stop_gradient
        (grad,) = paddle.grad([y.sum()], [x])
        np.testing.assert_array_equal(grad.numpy(), np.full((2, 3), 2.0))
        with paddle.no_grad():
            assert paddle.multiply(x, x).stop_gradient
        assert paddle.multiply(x.detach(), x.detach()).stop_gradient
        first, second = paddle.topk(x, 2)
        assert not first.stop_gradient
        assert second.stop_gradient
        with pytest.raises(ShapeError, match="multiply"):
            paddle.multiply(x, paddle.ones([2, 2]))


def test_results_without_a_derivative_want_no_gradient():
    x = paddle.to_tensor([1.5, 2.0], stop_gradient=False)
    constant = {
        "ones_like": lambda: paddle.ones_like(x),
        "full_like": lambda: paddle.full_like(x, 3.0),
        "randn_like": lambda: paddle.randn_like(x),
        "bernoulli": lambda: paddle.bernoulli(x * 0),
        "nextafter": lambda: paddle.nextafter(x, x + 1),
        "floor_divide": lambda: x // 2.0,
    }
    for name, call in constant.items():
        assert all(call().stop_gradient for _ in range(2)), name
        assert paddle.jit.to_static(call)().stop_gradient, name
    y = x * (x // 1.0)
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 2.0]


def test_autocast_and_default_dtype_choose_the_kernel_of_a_repeated_call():
    x = paddle.ones([4, 4])
    for _ in range(2):
        assert paddle.matmul(x, x).dtype.name == "float32"
        with paddle.amp.auto_cast(dtype="bfloat16"):
            assert paddle.matmul(x, x).dtype.name == "bfloat16"
        n = paddle.ones([4], "int64")
        assert paddle.exp(n).dtype.name == "float32"
        paddle.set_default_dtype("float64")
        try:
            assert paddle.exp(n).dtype.name == "float64"
        finally:
            paddle.set_default_dtype("float32")


def test_zeros_of_either_sign_and_nan_keep_kernels_of_their_own():
    x = paddle.ones([1, 1, 2])
    nan = [float("nan") for _ in range(3)]
    for _ in range(2):
        for value in (0.0, -0.0):
            for padded in (
                F.pad(x, [1, 1], value=value, data_format="NCL"),
                F.pad(x, [1, 1], "constant", value, "NCL"),
            ):
                assert np.signbit(padded.numpy()[0, 0, [0, 3]]).tolist() == [np.signbit(value)] * 2
        for value in nan:
            F.leaky_relu(x, value)
    kernels = F.leaky_relu.op.kernels
    assert sum(any(slot[0] != slot[0] for slot in key[1:] if isinstance(slot, tuple)) for key in kernels) == 1


def test_kernels_of_a_number_that_changes_each_call_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(dispatch, "_MOST_KERNELS", 4)
    op, x = F.leaky_relu.op, paddle.to_tensor([-1.0, 1.0])
    for number in range(12):
        assert F.leaky_relu(x, number / 64).tolist() == [-number / 64, 1.0]
        assert F.leaky_relu(x, negative_slope=0.25).tolist() == [-0.25, 1.0]
    assert len(op.kernels) <= 4
    assert set(op.calls.values()) <= set(op.kernels.values())


def test_a_numpy_float64_is_a_python_number():
    """np.sqrt(2) beside float32 made float64 of all that followed."""
    x, half = paddle.arange(3, dtype="float32"), paddle.zeros([3], "bfloat16")
    numbers = np.sqrt(2), np.float64(0.0), np.complex128(1j)
    dtypes = [[(x * n).dtype.name, (n + x).dtype.name, (half - n).dtype.name] for n in numbers]
    assert dtypes == [["float32", "float32", "bfloat16"]] * 2 + [["complex64"] * 3]
    assert paddle.jit.to_static(lambda x, n: x * n)(x, numbers[0]).dtype == "float32"
    assert (paddle.scale(x, numbers[0]).dtype, (x ** numbers[0]).dtype) == ("float32", "float32")
    assert (x * np.float32(2)).dtype == "float32"
    assert (paddle.arange(3) * np.float32(2.5)).tolist() == [0.0, 2.5, 5.0]  # others keep their dtype
    whole = paddle.arange(3)
    assert (paddle.scale(whole, 2.0).dtype, paddle.scale(whole, 1e30).dtype) == ("int64", "float32")  # not in 64 bits
