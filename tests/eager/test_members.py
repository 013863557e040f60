"""Members of Tensor that are no ops: casts by name, memory, other values in place, x.data, shifts."""

import copy
import pickle

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import polyreme as paddle
from polyreme.eager.casts import CASTS
from polyreme.eager.memory import ElementCount, Size
from polyreme.errors import ConfigError, DTypeError, GradError, ShapeError

X = np.array([[1.5, 2.0, 3.0], [4.0, 5.0, 6.0]], "float32")


@pytest.fixture
def x():
    return paddle.to_tensor(X)


def wanting(value=X):
    return paddle.to_tensor(value, stop_gradient=False)


@pytest.mark.parametrize("name", CASTS)
def test_casts_by_name(name, x):
    got = getattr(x, name)()
    assert got.dtype == CASTS[name]
    np.testing.assert_array_equal(got.astype("float64"), X.astype(CASTS[name]).real.astype("float64"))
    assert getattr(got, name)() is got


def test_a_cast_carries_gradients():
    w = wanting()
    (w.double() * 2).sum().backward()
    assert w.grad.dtype == paddle.float32
    assert w.type_as(paddle.ones([1], "int64")).dtype == paddle.int64


def test_strides_address_and_device(x):
    assert x.stride() == x.strides == x.get_strides() == [3, 1]
    assert x.stride(-1) == 1
    assert paddle.zeros([4, 2, 3]).strides == [6, 3, 1]
    assert paddle.to_tensor(1.0).strides == []
    assert (x.offset, x.layout, x.type, x.is_cuda, x.get_device(), x.device) == (
        0,
        "NCHW",
        "lod_tensor",
        False,
        -1,
        "cpu",
    )
    assert not x.is_dist()
    assert x.num_shard is None
    assert x.data_ptr() == x._array.unsafe_buffer_pointer()
    assert not hasattr(x, "__cuda_array_interface__")


def test_size_is_a_number_and_gives_sizes(x):
    assert x.size == 6
    assert type(x.size) is ElementCount
    assert x.size() == [2, 3]
    assert x.size(-1) == 3
    assert type(pickle.loads(pickle.dumps(x.size))) is int
    assert (x.sum() / x.size).item() == pytest.approx(X.mean())
    assert paddle.zeros([x.size]).shape == [6]


def test_size_is_a_list_of_integers():
    size = Size((2, 3))
    assert repr(size[:1] + Size([4]) + size) == "paddle.Size([2, 4, 2, 3])"
    assert repr([1] + size * 2) == "paddle.Size([1, 2, 3, 2, 3])"
    assert size.numel() == 6
    with pytest.raises(TypeError, match=r"item 1 is 2\.5"):
        Size([1, 2.5])


def test_shift_operators():
    i = paddle.to_tensor([1, 2, 3])
    assert (i << 2).tolist() == [4, 8, 12]
    assert (2 << i).tolist() == [4, 8, 16]
    assert (i >> 1).tolist() == [0, 1, 1]
    assert (16 >> i).tolist() == [8, 4, 2]
    assert i.__div__(2).tolist() == [0.5, 1.0, 1.5]
    assert i[0].__long__() == 1
    assert i[0].__nonzero__()


def test_numpy_leaves_operators_to_tensors(x):
    assert isinstance(np.ones(3, "float32") + x, paddle.Tensor)
    assert isinstance(np.float32(2) * x, paddle.Tensor)
    with pytest.raises(TypeError, match="does not support ufuncs"):
        np.exp(x)


def test_others_like_it(x):
    assert x.new_zeros(2, 3).shape == x.new_ones([2, 3]).shape == x.new_empty(size=[2, 3]).shape == [2, 3]
    assert x.double().new_zeros(2).dtype == paddle.float64
    made = x.new_full([2], 7, "int32", requires_grad=False)
    assert made.dtype == paddle.int32
    assert made.tolist() == [7, 7]
    assert not x.new_ones(2, requires_grad=True).stop_gradient


def test_repeat_and_split(x):
    np.testing.assert_array_equal(x.repeat(2, 2), np.tile(X, (2, 2)))
    np.testing.assert_array_equal(x.repeat([2, 1, 1]), np.tile(X, (2, 1, 1)))
    assert [p.shape for p in x.split_with_sizes([1, 2], dim=1)] == [[2, 1], [2, 2]]
    with pytest.raises(ShapeError, match=r"sizes \[1, 1\] do not fill"):
        x.split_with_sizes([1, 1], dim=1)
    with pytest.raises(ShapeError, match="must be >= 0"):
        x.split_with_sizes([-1, 4], dim=1)


def test_another_shape_in_place(x):
    assert x.resize_([2, 2]).tolist() == [[1.5, 2.0], [3.0, 4.0]]
    assert x.resize_([5]).tolist() == [1.5, 2.0, 3.0, 4.0, 0.0]
    assert x.set_(paddle.to_tensor(X), shape=[2], stride=[2], offset=4).tolist() == [2.0, 4.0]
    assert x.set_(paddle.to_tensor(X)).shape == [2, 3]
    assert x.set_().shape == [0]
    with pytest.raises(DTypeError, match="source is int64"):
        x.set_(paddle.to_tensor([1]))
    with pytest.raises(GradError, match="cast_: in-place change of a leaf"):
        wanting().cast_("float64")


def test_resize_and_cast_are_taped():
    w = wanting()
    y = w * 2
    y.resize_([2]).cast_("float64")
    assert y.dtype == paddle.float64
    y.sum().backward()
    np.testing.assert_array_equal(w.grad, [[2, 2, 0], [0, 0, 0]])


def test_apply_maps_values(x):
    np.testing.assert_array_equal(x.apply(lambda v: 3 * v + 2), 3 * X + 2)
    np.testing.assert_array_equal(x.apply_(lambda v: v * 2), 2 * X)
    with pytest.raises(GradError, match="apply_: this Tensor wants a gradient"):
        wanting().apply_(lambda v: v)


def test_becoming_another(x):
    w = wanting()
    w.reconstruct_from_(paddle.to_tensor([1, 2]))
    assert (w.tolist(), w.dtype, w.stop_gradient, w.is_leaf) == ([1, 2], paddle.int64, True, True)
    x.set_tensor(paddle.ones([1]))
    assert x.tolist() == [1.0]


def test_data_writes_through():
    w = paddle.create_parameter([2], "float32")
    w.data.fill_(3.0)
    w.data *= 2
    w.data[0] = 1.0
    assert w.tolist() == [1.0, 6.0]
    assert (w.data.stop_gradient, w.stop_gradient, w.is_leaf) == (True, False, True)
    assert w.inplace_version == 3
    w.data = paddle.ones([3], "float64")
    assert (w.shape, w.dtype) == ([3], paddle.float64)
    assert copy.deepcopy(w.data).tolist() == [1.0, 1.0, 1.0]


def test_data_in_a_captured_function_can_be_read_but_not_written_to():
    w = wanting()

    @paddle.jit.to_static
    def double(v):
        return v.data * 2

    np.testing.assert_array_equal(double(w), 2 * X)

    @paddle.jit.to_static
    def fill(v):
        v.data.fill_(0.0)

    with pytest.raises(GradError, match=r"x\.data is a copy inside a captured function"):
        fill(w)


def test_names_for_gradients(x):
    assert not x.requires_grad
    x.requires_grad = True
    assert not x.stop_gradient
    y = x * 2
    assert (y.grad_fn.name, x.grad_fn) == ("multiply", None)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad_, x.grad)
    x.grad_ = None
    assert x.grad is None
    assert x.requires_grad_(False).stop_gradient
    assert paddle.ones([2]).add_(paddle.ones([2])).inplace_version == 1
    with pytest.raises(ConfigError, match="dump_backward_graph_path is not supported"):
        y.backward(dump_backward_graph_path="graph")


def test_a_tensor_over_devices_says_so():
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    spread = paddle.Tensor(jax.device_put(np.ones(4), NamedSharding(mesh, PartitionSpec("dp"))))
    assert spread.is_dist()
    assert spread.num_shard == 2
    with pytest.raises(paddle.errors.PlacementError, match="lies on 2 devices"):
        spread.data_ptr()


def test_a_0_d_tensor_is_formatted_as_its_number():
    assert (
        f"{paddle.to_tensor(3.0)} {paddle.to_tensor(3)} {paddle.to_tensor(2.5):.2f} {paddle.to_tensor([2.5]):.1f}"
        == "3.0 3 2.50 2.5"
    )
    assert f"{paddle.to_tensor([2.5])}" == repr(paddle.to_tensor([2.5]))


def test_a_shift_takes_the_kind():
    x, one = paddle.to_tensor(np.array([-8], "int32")), paddle.to_tensor(np.array([1], "int32"))
    assert x.__rshift__(one, False).tolist() == [2**31 - 4]
    assert (x.__lshift__(one, False).tolist(), (x >> one).tolist()) == ([-16], [-4])


def test_a_fill_gives_gradient_zero():
    x = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    y = x * 3
    y.fill_(2.0)
    (y * x).sum().backward()
    assert (y.tolist(), x.grad.tolist()) == ([2, 2], [2, 2])


def test_integers_have_no_gradient():
    x = paddle.to_tensor([1, 2], stop_gradient=False)
    with pytest.raises(GradError, match="an integer Tensor has no gradient"):
        (x * 2).sum().backward()
