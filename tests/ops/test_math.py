"""What the contract rows of ops/math.py cannot say: gradients at ties, zeros and jumps, and changes in place."""

import numpy as np
import pytest
from scipy import special

from polyreme.autograd import backward
from polyreme.core.op import OPS
from polyreme.eager.tensor import to_tensor


def gradients(name, *arrays, **kwargs):
    inputs = [to_tensor(np.asarray(a, "float32"), stop_gradient=False) for a in arrays]
    OPS["sum"](OPS[name](*inputs, **kwargs)).backward()
    return [x.grad.tolist() for x in inputs]


@pytest.mark.parametrize(("name", "to_x"), [("maximum", 0.5), ("minimum", 0.5), ("fmax", 1), ("fmin", 1)])
def test_gradients_at_a_tie(name, to_x):
    assert gradients(name, 2.0, 2.0) == [to_x, 1 - to_x]


@pytest.mark.parametrize("name", ["abs", "sign", "floor", "ceil", "round", "trunc", "sinc"])
def test_gradient_at_zero_is_zero(name):
    assert gradients(name, [0.0]) == [[0.0]]


def test_gradient_of_the_angle_of_zero_is_zero():
    x = to_tensor(np.array([0, complex(-0.0, 0.0), 1j], "complex64"), stop_gradient=False)
    OPS["angle"](x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [0, 0, -1])


def test_gradient_of_hypot_at_the_origin_is_zero():
    assert gradients("hypot", [0.0, 3.0], [0.0, 4.0]) == [[0.0, pytest.approx(0.6)], [0.0, pytest.approx(0.8)]]


def test_gradient_of_logit_is_nan_where_the_value_is():
    x = to_tensor([-0.5, 0.25, 1.5], stop_gradient=False)
    backward([OPS["logit"](x)], [to_tensor([1.0, 1.0, 1.0])])
    np.testing.assert_allclose(x.grad.numpy(), [np.nan, 16 / 3, np.nan], rtol=1e-6)


def test_clip_gives_gradient_inside_the_bounds_only():
    assert gradients("clip", [-2.0, 0.5, 3.0], min=-1.0, max=1.0) == [[0.0, 1.0, 0.0]]


def test_nextafter_gives_no_gradient():
    x = to_tensor([1.0], stop_gradient=False)
    assert OPS["nextafter"](x, to_tensor([2.0])).stop_gradient


def test_gradient_of_frexp_flows_through_the_mantissa():
    x = to_tensor([3.0, 0.25], stop_gradient=False)
    OPS["sum"](OPS["frexp"](x)[0]).backward()
    assert x.grad.tolist() == [0.25, 2.0]


def test_increment_changes_its_argument():
    x = to_tensor(np.array([3]))
    assert OPS["increment"](x, 2) is x
    assert x.tolist() == [5]


def test_in_place_form_keeps_the_object():
    x = to_tensor([1.0, 4.0])
    assert x.sqrt_() is x
    assert x.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", ["lgamma", "gammaln", "digamma"])
def test_gradients_of_log_gamma_and_of_digamma_at_zero_are_the_limits_there(name):
    # 1e-30 lies so near 0 that the limit's own gradient is infinite
    x = to_tensor(np.array([0.0, -0.0, 1e-30, 2.0], "float32"), stop_gradient=False)
    y = OPS[name](x)
    backward([y], [to_tensor(np.ones(4, "float32"))])
    at_two = special.digamma(2.0) if name != "digamma" else special.polygamma(1, 2.0)
    want = [-np.inf, np.inf, -1e30, at_two] if name != "digamma" else [np.inf, np.inf, np.inf, at_two]
    np.testing.assert_allclose(x.grad.numpy(), np.array(want, "float32"), rtol=8 * np.finfo("float32").eps)
