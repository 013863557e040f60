"""Gradient clipping, parameters as a vector, regularizers: against NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import polyreme.nn as nn
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, NumericsError, ShapeError
from polyreme.nn.parameter import Parameter
from polyreme.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from polyreme.regularizer import L1Decay, L2Decay

A, B = np.array([[3.0, -4.0]], np.float32), np.array([12.0], np.float32)
# a handful of float32 roundings: squares, sum, root, division, product
RTOL = 8 * float(np.finfo(np.float32).eps)


def pairs():
    return [(Parameter(np.zeros_like(g)), to_tensor(g)) for g in (A, B)]


def values(done):
    return [g.numpy() for _, g in done]


def test_by_global_norm_scales_all_by_one_factor():
    got = values(nn.ClipGradByGlobalNorm(6.5)(pairs()))
    for g, w in zip(got, (A / 2, B / 2), strict=True):  # sqrt(9 + 16 + 144) = 13
        np.testing.assert_allclose(g, w, rtol=RTOL)


def test_by_global_norm_leaves_small_gradients_bit_for_bit():
    for g, w in zip(values(nn.ClipGradByGlobalNorm(13.5)(pairs())), (A, B), strict=True):
        np.testing.assert_array_equal(g, w)


def test_only_the_global_norm_writes_into_the_gradients():
    params_grads = pairs()
    nn.ClipGradByNorm(5.0)(params_grads)
    nn.ClipGradByValue(3.5)(params_grads)
    for g, w in zip(values(params_grads), (A, B), strict=True):
        np.testing.assert_array_equal(g, w)
    done = nn.ClipGradByGlobalNorm(6.5)(params_grads)
    assert all(new is old for (_, new), (_, old) in zip(done, params_grads, strict=True))
    for g, w in zip(values(params_grads), (A / 2, B / 2), strict=True):
        np.testing.assert_allclose(g, w, rtol=RTOL)


def test_by_norm_scales_each():
    got = values(nn.ClipGradByNorm(5.0)(pairs()))
    for g, w in zip(got, (A, B * 5 / 12), strict=True):
        np.testing.assert_allclose(g, w, rtol=RTOL)


def test_clip_by_value_equals_numpy():
    for g, w in zip(values(nn.ClipGradByValue(3.5)(pairs())), (np.clip(A, -3.5, 3.5), [3.5]), strict=True):
        np.testing.assert_array_equal(g, w)
    (_, low), _ = nn.ClipGradByValue(2.0, min=-1.0)(pairs())
    np.testing.assert_array_equal(low.numpy(), [[2.0, -1.0]])


def test_need_clip_and_missing_gradients_are_passed_on():
    pairs_in = [*pairs(), (Parameter(np.zeros(1, np.float32)), None)]
    pairs_in[1][0].need_clip = False
    done = nn.ClipGradByGlobalNorm(2.5)(pairs_in)
    np.testing.assert_allclose(done[0][1].numpy(), A / 2, rtol=RTOL)
    assert done[1] is pairs_in[1]
    assert done[2] is pairs_in[2]


@pytest.mark.parametrize("bad", [0.0, -1.0, True, "1"])
def test_a_clip_norm_must_be_above_0(bad):
    with pytest.raises(ConfigError, match="clip_norm is a number above 0, got"):
        nn.ClipGradByGlobalNorm(bad)
    with pytest.raises(ConfigError, match="clip_norm is a number above 0, got"):
        nn.ClipGradByNorm(bad)


def test_a_value_range_must_not_be_empty():
    with pytest.raises(ConfigError, match=r"min 2.0 is above max 1.0"):
        nn.ClipGradByValue(1.0, min=2.0)


def with_gradients():
    params = [Parameter(np.ones_like(g)) for g in (A, B)]
    for p, g in zip(params, (A, B), strict=True):
        p.grad = to_tensor(g)
    return [*params, Parameter(np.ones(2, np.float32))]


@pytest.mark.parametrize(
    ("p", "norm"), [(2.0, 13.0), (1.0, 19.0), (math.inf, 12.0), (3.0, (27 + 64 + 1728) ** (1 / 3))]
)
def test_clip_grad_norm_in_place(p, norm):
    params = with_gradients()
    total = clip_grad_norm_(params, 2.0, norm_type=p)
    np.testing.assert_allclose(float(total), norm, rtol=RTOL)
    for param, g in zip(params, (A, B), strict=False):
        np.testing.assert_allclose(param.grad.numpy(), g * 2.0 / (norm + 1e-6), rtol=2 * RTOL)


def test_clip_grad_norm_leaves_small_ones_and_takes_one_parameter():
    params = with_gradients()
    clip_grad_norm_(params, 100.0)
    np.testing.assert_array_equal(params[0].grad.numpy(), A)
    assert float(clip_grad_norm_(params[1], 100.0)) == 12.0
    assert float(clip_grad_norm_([params[2]], 1.0)) == 0.0


def test_clip_grad_norm_refuses_nan_when_asked():
    params = with_gradients()
    params[0].grad = to_tensor(np.array([[np.nan, 1.0]], np.float32))
    with pytest.raises(NumericsError, match="norm of the gradients is nan"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    with pytest.raises(ConfigError, match=r"norm_type is a number above 0 or inf, got 0\.0"):
        clip_grad_norm_(params, 1.0, norm_type=0)


def test_clip_grad_value_in_place():
    params = with_gradients()
    clip_grad_value_(params, 3.5)
    np.testing.assert_array_equal(params[0].grad.numpy(), [[3.0, -3.5]])
    assert params[2].grad is None
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        clip_grad_value_(params, -1)


def test_parameters_to_vector_and_back():
    layer = nn.Linear(2, 2)
    vec = parameters_to_vector(layer.parameters())
    np.testing.assert_array_equal(vec.numpy(), np.concatenate([layer.weight.numpy().ravel(), layer.bias.numpy()]))
    vec.sum().backward()
    np.testing.assert_array_equal(layer.weight.grad.numpy(), np.ones((2, 2)))
    vector_to_parameters(to_tensor(np.arange(6, dtype=np.float32)), layer.parameters())
    np.testing.assert_array_equal(layer.weight.numpy(), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(layer.bias.numpy(), [4, 5])
    with pytest.raises(ShapeError, match=r"parameters have 6 elements, vec has shape \[5\]"):
        vector_to_parameters(to_tensor(np.zeros(5, np.float32)), layer.parameters())


def test_regularizers_are_the_gradients_of_their_penalties():
    p = jnp.asarray([1.5, -2.0, 0.0], jnp.float32)
    np.testing.assert_array_equal(L1Decay(0.5).gradient(p), [0.5, -0.5, 0.0])
    np.testing.assert_array_equal(L2Decay(0.5).gradient(p), [0.75, -1.0, 0.0])
    assert L2Decay(0.5).gradient(p.astype("bfloat16")).dtype == "bfloat16"


def test_regularizers_are_equal_by_class_and_coefficient():
    assert L2Decay(0.1) == L2Decay(0.1)
    assert hash(L2Decay(0.1)) == hash(L2Decay(0.1))
    assert L2Decay(0.1) != L2Decay(0.2)
    assert L2Decay(0.1) != L1Decay(0.1)
    with pytest.raises(ConfigError, match="L1Decay: coeff is a number of at least 0, got -1"):
        L1Decay(-1)
