"""Calls in other spellings: second names of parameters, sizes one by one, the second forms of gather and scatter."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.core import spelling

X = np.arange(6, dtype="float32").reshape(2, 3)


@pytest.fixture
def x():
    return paddle.to_tensor(X)


def test_second_names_of_parameters(x):
    np.testing.assert_array_equal(paddle.sum(input=x, dim=0), X.sum(0))
    np.testing.assert_array_equal(paddle.add(input=x, other=x), X + X)
    np.testing.assert_array_equal(x.argmax(dim=1), X.argmax(1))
    np.testing.assert_array_equal(paddle.cat(tensors=[x, x], dim=1), np.concatenate([X, X], 1))
    np.testing.assert_array_equal(x.unsqueeze(dim=0), X[None])
    np.testing.assert_array_equal(x.flatten(start_dim=0, end_dim=1), X.reshape(-1))
    np.testing.assert_array_equal(paddle.zeros(size=[2]), np.zeros(2))
    np.testing.assert_array_equal(paddle.expand_as(input=x[0], other=x), np.stack([X[0], X[0]]))  # a composite
    np.testing.assert_array_equal(F.relu(input=x), X)  # an op that takes its arguments another way
    assert F.unfold(paddle.ones([1, 1, 4, 4]), kernel_size=3, padding=1, stride=2).shape == [1, 9, 4]
    assert paddle.is_tensor(obj=x)


def test_a_second_name_beside_the_first_or_unknown_is_an_error(x):
    with pytest.raises(TypeError, match=r"sum\(\) got 'dim' twice"):
        paddle.sum(x, 0, dim=1)
    with pytest.raises(TypeError, match="no parameter 'dim'; it has x"):
        paddle.log(x, dim=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'color'"):
        paddle.expand_as(x, x, color=1)
    assert spelling.renamed({"dim": 0, "axis": 1}, ("x", "axis")) == {"dim": 0, "axis": 1}


def test_sizes_one_by_one(x):
    assert x.reshape(3, 2).shape == [3, 2]
    assert x.view(3, 2).shape == [3, 2]
    assert x.expand(4, 2, 3).shape == [4, 2, 3]
    assert x.tile(2, 2).shape == [4, 6]
    assert paddle.zeros(2, 3).shape == paddle.randn(2, 3).shape == paddle.ones(2, 3, dtype="int64").shape == [2, 3]
    np.testing.assert_array_equal(x.permute(1, 0), X.T)
    np.testing.assert_array_equal(x.flip(0, 1), X[::-1, ::-1])
    np.testing.assert_array_equal(x.transpose(0, 1), X.T)
    assert paddle.zeros([2, 3, 4]).transpose(0, -1).shape == [4, 3, 2]
    with pytest.raises(TypeError, match=r"sum\(\) takes 4 arguments"):
        paddle.sum(x, 0, None, False, 1)
    with pytest.raises(paddle.errors.ShapeError, match="transpose"):
        x.transpose(0, 5)


def test_gather_and_scatter_by_dim(x):
    index = paddle.to_tensor([[0, 1, 0]])
    want = np.take_along_axis(X, index.numpy(), 0)
    np.testing.assert_array_equal(paddle.gather(x, 0, index), want)
    np.testing.assert_array_equal(x.gather(dim=0, index=index), want)
    np.testing.assert_array_equal(paddle.gather(x, paddle.to_tensor([1]), axis=1), X[:, [1]])
    put = X.copy()
    np.put_along_axis(put, index.numpy(), 9 * np.ones((1, 3), "float32"), 0)
    src = paddle.full([1, 3], 9.0)
    np.testing.assert_array_equal(paddle.scatter(x, 0, index, src), put)
    np.testing.assert_array_equal(x.clone().scatter_(dim=0, index=index, src=src), put)
    np.testing.assert_array_equal(x.scatter(0, index, src, reduce="add"), X + np.where(put == 9, 9, 0))


def test_a_static_program_takes_them(x):
    paddle.enable_static()
    try:
        main = static.Program()
        with static.program_guard(main):
            given = static.data("given", [2, 3], "float32")
            outs = [paddle.sum(input=given, dim=0), paddle.expand_as(input=given[0], other=given), given.reshape(3, 2)]
        got = static.Executor().run(main, feed={"given": X}, fetch_list=outs)
    finally:
        paddle.disable_static()
    for value, want in zip(got, [X.sum(0), np.stack([X[0], X[0]]), X.reshape(3, 2)], strict=True):
        np.testing.assert_array_equal(value, want)
