"""out= of several Tensors, and in-place comparisons."""

import pytest

import polyreme as paddle
from polyreme.errors import ConfigError

X = [[1.0, 5.0], [3.0, 4.0]]


def test_several_results_go_to_as_many_tensors():
    x = paddle.to_tensor(X, stop_gradient=False)
    values, places = paddle.zeros([1]), paddle.zeros([1], "int64")
    given = paddle.topk(x, 1, out=(values, places))
    assert given[0] is values
    assert (values.tolist(), places.tolist()) == ([[5.0], [4.0]], [[1], [1]])
    values.sum().backward()
    assert x.grad.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    with pytest.raises(ConfigError, match="topk: out= of 1 Tensors for 2 results"):
        paddle.topk(x, 1, out=values)


def test_a_comparison_in_place_makes_bools():
    for name, wanted in (("equal_", [True, False]), ("less_than_", [False, True]), ("logical_not_", [False, False])):
        x = paddle.to_tensor([1.0, 2.0])
        other = () if name == "logical_not_" else (paddle.to_tensor([1.0, 3.0]),)
        assert getattr(x, name)(*other) is x
        assert (x.dtype, x.tolist()) == (paddle.bool, wanted)
