"""Names of the root that are no ops."""

import math

import numpy as np
import pytest

import polyreme as paddle
from polyreme.errors import ConfigError, DeviceError, DTypeError


def test_constants_and_dtypes():
    assert (paddle.e, paddle.pi, paddle.inf, paddle.newaxis) == (math.e, math.pi, math.inf, None)
    assert math.isnan(paddle.nan)
    assert (paddle.float, paddle.double, paddle.half) == (paddle.float32, paddle.float64, paddle.float16)
    assert (paddle.cfloat, paddle.cdouble) == (paddle.complex64, paddle.complex128)
    for dtype in (paddle.uint16, paddle.uint32, paddle.uint64):
        x = paddle.to_tensor([1, 2], dtype)
        assert (x + x).dtype == dtype
        assert x.sum().item() == 3


def test_asarray_copies_and_may_want_a_gradient():
    x = paddle.asarray([1.0], requires_grad=True)
    assert not x.stop_gradient
    assert paddle.asarray(x) is not x
    assert paddle.asarray(x).stop_gradient
    assert paddle.asarray(x, "int64", "cpu").dtype == paddle.int64
    assert paddle.asarray(x, copy=False).tolist() == [1.0]
    with pytest.raises(ConfigError, match="copy=False of ndarray"):
        paddle.asarray(np.ones(2), copy=False)


def test_autocast():
    with paddle.autocast("cpu", dtype="bfloat16"):
        assert (paddle.ones([2, 2]) @ paddle.ones([2, 2])).dtype == paddle.bfloat16
        assert paddle.get_autocast_cpu_dtype() == paddle.get_autocast_gpu_dtype() == "bfloat16"
    with paddle.autocast("cuda", enabled=False):
        assert (paddle.ones([2, 2]) @ paddle.ones([2, 2])).dtype == paddle.float32


def test_check_shape():
    for shape in ([1, 2], (1, paddle.to_tensor(2)), paddle.to_tensor([1, 2])):
        paddle.check_shape(shape, "zeros")
    with pytest.raises(TypeError, match="zeros: a shape is a list or tuple of sizes, or a Tensor, got str"):
        paddle.check_shape("12", "zeros")
    with pytest.raises(TypeError, match=r"zeros: 1\.5 in a shape is a float"):
        paddle.check_shape([1.5], "zeros")
    with pytest.raises(DTypeError, match="zeros: a shape in float32; needs int32 or int64"):
        paddle.check_shape(paddle.to_tensor([1.5]), "zeros")


def test_generators_by_other_names():
    paddle.manual_seed(7)
    state = paddle.get_rng_state()
    first = paddle.rand([2]).numpy()
    assert paddle.get_cuda_rng_state() == []  # no GPU
    with pytest.raises(ConfigError, match="set_cuda_rng_state: 1 states for 0 GPUs"):
        paddle.set_cuda_rng_state(state)
    paddle.set_cuda_rng_state([])
    paddle.set_rng_state(state)
    np.testing.assert_array_equal(paddle.rand([2]), first)
    assert paddle.disable_signal_handler() is None


def test_limits_of_dtypes_are_python_s_numbers():
    limits = paddle.finfo("float32")
    assert (type(limits.eps), limits.eps, limits.bits, limits.dtype) == (float, 2.0**-23, 32, "float32")
    assert paddle.finfo(paddle.bfloat16).max == (2 - 2.0**-7) * 2.0**127
    assert paddle.iinfo("uint8")[1:] == (0, 255, "uint8")


def test_in_place_by_second_names():
    x = paddle.to_tensor([6, 7])
    assert paddle.sub_(x, paddle.to_tensor([1, 1])) is x
    assert paddle.floor_mod_(x, paddle.to_tensor([4, 4])).tolist() == [1, 2]
    assert paddle.bitwise_invert_(x).tolist() == [-2, -3]
    assert paddle.cast_(x, "float32").div_(paddle.to_tensor([2.0, 2.0])).tolist() == [-1.0, -1.5]


def test_page_locked_memory_needs_a_gpu():
    assert paddle.CUDAPinnedPlace() == paddle.core.devices.place.as_place("gpu_pinned")
    with pytest.raises(DeviceError, match="no gpu is available"):
        paddle.to_tensor([1], place=paddle.CUDAPinnedPlace())
