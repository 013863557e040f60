"""What creation and random functions take besides the op's own arguments: device, requires_grad, output, seed."""

import numpy as np
import pytest

from polyreme.core import rng
from polyreme.core.op import OPS
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, ConfigError, GradError
from polyreme.jit import to_static


def test_requires_grad_makes_a_leaf_that_wants_a_gradient():
    x = OPS["ones"]([2], requires_grad=True)
    assert not x.stop_gradient
    (x * x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_device_says_where_the_result_is():
    assert OPS["zeros"]([2], device="cpu:3").place.index == 3
    assert OPS["rand"]([2], device="cpu:1").place.index == 1


def test_pin_memory_is_refused():
    with pytest.raises(ConfigError, match="zeros: pin_memory=True"):
        OPS["zeros"]([2], pin_memory=True)


def test_device_in_a_captured_function_is_refused():
    with pytest.raises(CaptureError, match="zeros: device='cpu:1' in a captured function"):
        to_static(lambda x: x + OPS["zeros"]([1], device="cpu:1"))(to_tensor([1.0]))


def test_assign_writes_into_output():
    target = to_tensor([0.0, 0.0])
    assert OPS["assign"](to_tensor([1.0, 2.0]), target) is target
    assert target.tolist() == [1.0, 2.0]


def test_output_that_is_a_leaf_keeps_its_gradient():
    leaf, source = to_tensor([1.0, 2.0], stop_gradient=False), to_tensor([5.0, 6.0], stop_gradient=False)
    OPS["assign"](np.float32([3, 4]), leaf)
    assert (leaf.tolist(), leaf.is_leaf, leaf.stop_gradient) == ([3, 4], True, False)
    (leaf * leaf).sum().backward()
    assert leaf.grad.tolist() == [6, 8]
    with pytest.raises(GradError, match="assign: in-place change of a leaf"):
        OPS["assign"](source * 2, leaf)


def test_output_takes_shape_and_dtype_of_the_result():
    target, other = to_tensor([0.0, 0.0]), to_tensor([0.0, 0.0])
    OPS["assign"](np.int64([[1], [2], [3]]), target)
    OPS["abs"](to_tensor([[-1], [2], [3]]), out=other)
    for x in (target, other):
        assert (x.tolist(), x.dtype) == ([[1], [2], [3]], "int64")


@pytest.mark.parametrize("name", ["uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "bernoulli_"])
def test_filling_changes_the_tensor_and_returns_it(name):
    x = to_tensor(np.full(8, 99.0, "float32"))
    assert OPS[name](x) is x
    assert np.all(x.numpy() != 99.0)


def test_numbers_follow_from_the_seed():
    def draw():
        rng.seed(11)
        return [OPS[n]([3]).tolist() for n in ("rand", "randn", "uniform")]

    first = draw()
    assert draw() == first
    assert OPS["rand"]([3]).tolist() != first[0]


def test_a_seed_of_its_own_fixes_one_call():
    assert OPS["uniform"]([3], seed=5).tolist() == OPS["uniform"]([3], seed=5).tolist()
    assert OPS["uniform"]([3], seed=5).tolist() != OPS["uniform"]([3], seed=6).tolist()


def test_gradients_flow_to_the_mean_and_deviation_of_a_normal():
    mean, std = (to_tensor([v, v], stop_gradient=False) for v in (0.0, 1.0))
    drawn = OPS["normal"](mean, std)
    drawn.sum().backward()
    assert mean.grad.tolist() == [1.0, 1.0]
    np.testing.assert_array_equal(std.grad.numpy(), drawn.numpy())
