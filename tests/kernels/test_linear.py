import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme.errors import ShapeError
from polyreme.kernels import linear, linear_plain, select
from polyreme.kernels.linear import rows_product

from .tolerance import assert_near


def normal(seed, *shape, dtype=jnp.float32):
    return jax.device_put(np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype))


def value_and_grads(f, *args):
    """As one program: run step by step it would be some twelve."""

    def run(*args):
        out, pull = jax.vjp(f, *args)
        return out, pull(jnp.cos(out))

    return jax.jit(run)(*args)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (2, 3, 4), (0, 4)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_twin_and_numpy(leading, dtype, bias):
    args = [normal(0, *leading, 6, dtype=dtype), normal(1, 6, 4, dtype=dtype)]
    args += [normal(2, 4, dtype=dtype)] if bias else []
    got = value_and_grads(linear, *args)
    assert all(x.dtype == dtype for x in jax.tree.leaves(got))
    assert_near(got, value_and_grads(linear_plain, *args), dtype, terms=24)
    x, w, *b = (np.asarray(a, np.float64) for a in args)
    assert_near(got[0], x @ w + (b[0] if b else 0), dtype, terms=6)


def test_gradient_of_the_weight_is_made_as_the_weight_lies():
    x, w = normal(0, 2, 5, 6), normal(1, 6, 4)
    step = jax.make_jaxpr(jax.grad(lambda w: linear(x, w).sum()))(w)
    (made,) = (eqn for eqn in step.eqns if eqn.outvars == step.jaxpr.outvars)
    assert made.primitive.name == "dot_general"


@pytest.mark.parametrize(("shape", "inner"), [((2, 3, 0), 0), ((0, 3, 2), 2), ((0, 2), 2)])
def test_empty_inputs_give_zeros(shape, inner):
    x, w = jnp.zeros(shape), jnp.ones((inner, 4))
    out, (dx, dw) = value_and_grads(linear, x, w)
    assert (out.shape, dx.shape, dw.shape) == ((*shape[:-1], 4), shape, (inner, 4))
    assert not out.any()
    assert not dw.any()


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (8,)])
def test_a_gpu_multiplies_a_tile_of_rows_at_least(monkeypatch, leading):
    monkeypatch.setattr(select, "backend", lambda: "gpu")
    args = [normal(0, *leading, 6), normal(1, 6, 4), normal(2, 4)]
    assert_near(value_and_grads(linear, *args), value_and_grads(linear_plain, *args), jnp.float32, terms=24)
    products = [eqn for eqn in jax.make_jaxpr(linear)(*args).eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.shape for eqn in products] == [(8, 4)]


@pytest.mark.parametrize(("leading", "inner", "outs", "parts"), [((1, 1), 256, 256, 4), ((), 256, 256, 4),
    ((2,), 256, 256, 0), ((1,), 258, 256, 0), ((1,), 256, 32, 0), ((1,), 2048, 4096, 0)])  # fmt: skip
def test_sums_of_one_row_are_divided_where_threads_gain_by_it(leading, inner, outs, parts):
    args = normal(0, *leading, inner), normal(1, inner, outs)
    products = [eqn for eqn in jax.make_jaxpr(linear)(*args).jaxpr.eqns if eqn.primitive.name == "dot_general"]
    batches = [eqn.params["dimension_numbers"][1][0] for eqn in products]
    sizes = [eqn.invars[1].aval.shape[0] for eqn, batch in zip(products, batches, strict=True) if batch]
    assert sizes == ([parts] if parts else [])
    if parts:
        assert_near(value_and_grads(linear, *args), value_and_grads(linear_plain, *args), jnp.float32, terms=2 * inner)


def test_batch_stays_sharded():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("dp", "mp"))
    x = jax.device_put(normal(0, 8, 5, 6), NamedSharding(mesh, P("dp", None, None)))
    w = jax.device_put(normal(1, 6, 4), NamedSharding(mesh, P(None, "mp")))
    call = jax.jit(lambda x, w: value_and_grads(linear, x, w))
    out, (dx, _) = call(x, w)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", None, "mp")), 3)
    assert dx.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", None, None)), 3)
    assert "all-gather" not in call.lower(x, w).compile().as_text()
    assert_near(call(x, w), value_and_grads(linear_plain, normal(0, 8, 5, 6), normal(1, 6, 4)), jnp.float32, terms=40)


def test_refuses_what_does_not_fit():
    x, w = normal(0, 2, 6), normal(1, 6, 4)
    with pytest.raises(ShapeError, match=r"x \[2, 6\] and weight \[4, 6\] do not fit"):
        linear(x, w.T)
    with pytest.raises(ShapeError, match=r"bias \[6\] must be \[4\]"):
        linear(x, w, normal(2, 6))


def test_the_transpose_of_a_large_weight_gradient_is_made_first():
    x, dy = normal(0, 1024, 128) / 32, normal(1, 1024, 64)
    compiled = jax.jit(rows_product).lower(x, dy).compile()
    assert "lhs_contracting_dims={1}" in compiled.as_text()
    assert "lhs_contracting_dims={0}" not in compiled.as_text()
    assert_near(compiled(x, dy), x.T @ dy, jnp.float32, terms=1024)
    # a second derivative, through the barrier: of sum((x^T y)^2) / 2 it is x x^T y
    again = jax.grad(lambda y: (jax.grad(lambda y: (rows_product(x, y) ** 2).sum() / 2)(y) * dy).sum())(dy)
    assert_near(again, x @ (x.T @ dy), jnp.float32, terms=1024 + 128)


def test_small_products_are_left_to_the_compiler():
    step = jax.make_jaxpr(rows_product)(normal(0, 64, 16), normal(1, 64, 16))
    assert "optimization_barrier" not in str(step)
