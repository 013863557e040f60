"""nn.quant.QuantizedLinear: what it stores, computes, learns through and takes of memory; over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyreme as paddle
from polyreme import kernels, nn
from polyreme.distributed.placement import apply_plan
from polyreme.errors import ConfigError
from polyreme.kernels import low_bit
from polyreme.mesh import Plan
from polyreme.nn.quant import QuantizedLinear, RoundedLinear, weight_dequantize


def error_of(linear, kind, group):
    layer = QuantizedLinear.of(linear, kind, group)
    back = weight_dequantize(layer.weight, layer.weight_scale, kind, "float32", group)
    return float((back - linear.weight).norm() / linear.weight.norm())


def test_error_falls_with_the_group_and_with_bits():
    paddle.seed(0)
    linear = nn.Linear(128, 32, weight_attr=nn.initializer.Normal())
    errors = [error_of(linear, "int4", group) for group in (-1, 64, 32, 8)]
    assert errors == sorted(errors, reverse=True)
    # a step of 2 / 254 of the range against one of 2 / 14
    assert error_of(linear, "int8", -1) < errors[0] / 12
    assert error_of(linear, "nf4", 64) < error_of(linear, "int4", 64)


@pytest.mark.parametrize(("kind", "group"), [("int8", -1), ("nf4", 4)])
def test_gradients_reach_the_input_and_the_bias_alone(kind, group):
    linear = nn.Linear(8, 6)
    layer = QuantizedLinear.of(linear, kind, group)
    assert layer.bias is linear.bias
    x = paddle.randn([2, 3, 8])
    x.stop_gradient = False
    layer(x).sum().backward()
    weight = weight_dequantize(layer.weight, layer.weight_scale, kind, "float32", group)
    np.testing.assert_allclose(x.grad[0, 0], weight.sum(1), rtol=1e-5, atol=1e-6)
    assert linear.bias.grad.tolist() == [6.0] * 6
    assert [p.name for p in layer.parameters() if p.trainable] == [linear.bias.name]
    assert layer.weight.grad is None
    assert layer.weight_scale.grad is None


@pytest.mark.parametrize(("kind", "group"), [("int8", -1), ("int4", 4)])
def test_what_is_trained_rounded_is_what_is_stored_then(kind, group):
    paddle.seed(0)
    linear = nn.Linear(8, 6)
    rounded = RoundedLinear(linear, kind, group)
    assert rounded.weight is linear.weight
    x = paddle.randn([3, 8])
    y = rounded(x)
    np.testing.assert_allclose(y, QuantizedLinear.of(linear, kind, group)(x), rtol=1e-5, atol=1e-6)
    y.sum().backward()
    passing = linear.weight.grad.numpy().copy()
    linear.clear_gradients()
    linear(x).sum().backward()
    np.testing.assert_allclose(passing, linear.weight.grad, rtol=1e-6)
    with pytest.raises(ConfigError, match="groups of 3 of 8 inputs"):
        RoundedLinear(linear, kind, 3)
    with pytest.raises(ConfigError, match="weight_dtype='nf4'; give int8 or int4"):
        RoundedLinear(linear, "nf4")


def test_blocks_of_channels_are_the_whole_product(monkeypatch):
    x, w = (np.random.default_rng(0).standard_normal(s).astype("float32") for s in ((3, 16), (16, 24)))
    codes, scale = low_bit.encode(jnp.asarray(w), "int4", 8)
    whole = jax.vjp(lambda x: kernels.low_bit_linear(x, codes, scale, "int4", 8), jnp.asarray(x))
    monkeypatch.setattr(low_bit, "_BLOCK", 16 * 6)
    parts = jax.vjp(lambda x: kernels.low_bit_linear(x, codes, scale, "int4", 8), jnp.asarray(x))
    # sums of 16 and of 24 products in another order
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5, atol=16 * 1e-6)
    np.testing.assert_allclose(parts[1](whole[0])[0], whole[1](whole[0])[0], rtol=1e-5, atol=24 * 1e-5)


def test_no_float_copy_of_the_weight_outlives_a_product():
    """Forward and backward through four of them need less than one of their weights in float32, and they take
    0.25 of its memory."""
    size, layers = 2048, 4
    codes = jax.ShapeDtypeStruct((layers, size, size), jnp.int8)
    scale = jax.ShapeDtypeStruct((layers, size), jnp.float32)

    def loss(x, codes, scale):
        for number in range(layers):
            x = kernels.low_bit_linear(x, codes[number], scale[number], "int8", -1)
        return (x * x).sum()

    x = jax.ShapeDtypeStruct((4, size), jnp.float32)
    memory = jax.jit(jax.grad(loss)).lower(x, codes, scale).compile().memory_analysis()
    weight = 4 * size * size
    assert memory.argument_size_in_bytes < 0.26 * layers * weight
    # codes of a layer in int8 and blocks of them in float32
    assert memory.temp_size_in_bytes < 2.6 * weight


@pytest.mark.slow
def test_codes_and_scales_lie_over_a_mesh_as_the_weight_would():
    paddle.seed(0)
    model = nn.Sequential(
        QuantizedLinear.of(nn.Linear(16, 32, dims=("embed", "ffn")), "int4", 8),
        QuantizedLinear.of(nn.Linear(32, 16, dims=("ffn", "embed")), "int4", 8),
    )
    x = paddle.randn([4, 16])
    alone = model(x).numpy()
    apply_plan(Plan.from_degrees(mp=2), model, jax.devices()[:2])
    shards = [t._array.addressable_shards[0].data.shape for l in model for t in (l.weight, l.weight_scale)]
    assert shards == [(8, 16), (2, 16), (8, 16), (2, 16)]
    np.testing.assert_allclose(model(x).numpy(), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_dtype": "int3"}, "unknown weight_dtype 'int3'"),
        ({"group_size": 3}, "groups of 3 of 8 inputs"),
        ({"out_features": 5, "weight_dtype": "nf4"}, "5 outputs; nf4 stores two in a byte"),
        ({"group_size": 4, "low_bit_input": True}, "low_bit_input with int8 in groups of 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        QuantizedLinear(**{"in_features": 8, "out_features": 6, **options})
