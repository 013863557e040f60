"""Attributes of another type than an op declares are refused, by a class that is a ValueError and a TypeError."""

import pytest

import polyreme as paddle
from polyreme.errors import ArgumentTypeError
from polyreme.nn import functional as F

X = [[1.0, 2.0], [3.0, 4.0]]
REFUSED = [
    (lambda x: F.elu(x, alpha="1"), "elu: alpha='1'; give a number"),
    (lambda x: F.elu(x, alpha=[1.0]), r"elu: alpha=\(1.0,\); give a number"),
    (lambda x: paddle.sum(x, keepdim="no"), "sum: keepdim='no'; give True or False"),
    (lambda x: F.max_pool1d(x[None], 2, ceil_mode=2), "ceil_mode=2; give True or False"),
    (lambda x: paddle.tril(x, 0.5), "tril: diagonal=0.5; give an integer"),
    (
        lambda x: F.cross_entropy(x, paddle.to_tensor([0, 1]), ignore_index="none"),
        "ignore_index='none'; give an integer",
    ),
    (lambda x: paddle.shard_index(paddle.to_tensor([[1]]), 20.5, 2, 0), "index_num=20.5; give an integer"),
    (lambda x: paddle.pow(x, None), "pow: y is None; it needs a Tensor"),
    (lambda x: F.dropout(x, "0.1"), "dropout: p='0.1'; give a number"),
    (lambda x: F.dropout(x, training=2), "dropout: training=2; give True or False"),
    (lambda x: paddle.signal.stft(x, 2, onesided=2), "stft: onesided=2; give True or False or None"),
    (lambda x: paddle.geometric.send_u_recv(x, [0], [1], out_size=2.5), "out_size=2.5; give an integer or None"),
    (lambda x: paddle.roll(x, 1.5), "roll: shifts=1.5; give integers"),
    (lambda x: paddle.roll(x, [1, 0.5], [0, 1]), r"roll: shifts=\(1, 0.5\); give integers"),
    (lambda x: paddle.nonzero(x, as_tuple="yes"), "nonzero: as_tuple='yes'; give True or False"),
    (lambda x: paddle.repeat_interleave(x, 2, axis=[0]), r"repeat_interleave: axis=\[0\]; give an integer or None"),
    (lambda x: paddle.exp("x"), "cannot make a Tensor of str"),
    (lambda x: paddle.roll(x, "x"), "roll"),
]


@pytest.mark.parametrize(("call", "match"), REFUSED)
def test_another_type_is_refused(call, match):
    with pytest.raises(ArgumentTypeError, match=match) as raised:
        call(paddle.to_tensor(X))
    assert isinstance(raised.value, (ValueError, TypeError))


def test_where_takes_no_other_names():
    with pytest.raises(TypeError, match="has no parameter 'axis'"):
        paddle.where(paddle.to_tensor([True]), axis=0)


def test_numbers_that_are_equal_to_one_of_the_type_are_taken():
    x = paddle.to_tensor(X)
    assert paddle.sum(x, 0, keepdim=1).shape == [1, 2]
    assert F.elu(x, alpha=1).tolist() == X
