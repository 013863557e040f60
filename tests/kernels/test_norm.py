import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme import kernels
from polyreme.errors import ShapeError

from .tolerance import assert_near

PAIRS = {
    "layer": (kernels.layer_norm, kernels.layer_norm_plain, 2),
    "rms": (kernels.rms_norm, kernels.rms_norm_plain, 1),
}
every_norm = pytest.mark.parametrize("name", PAIRS)


def arrays(vectors, shape=(3, 5, 32), dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jax.device_put(rng.standard_normal(s).astype(dtype)) for s in (shape, *[shape[-1:]] * vectors)]


def value_and_grads(f, *args):
    """As one program: run step by step it would be some twelve."""

    def run(*args):
        out, pull = jax.vjp(f, *args)
        return out, pull(jax.tree.map(jnp.cos, out))

    return jax.jit(run)(*args)


@pytest.mark.one_in(6)
@pytest.mark.slow_cases(
    "float32-shape0-layer",
    "float32-shape1-layer",
    "float64-shape0-layer",
    "float64-shape1-layer",
    "float64-shape2-layer",
)
@every_norm
@pytest.mark.parametrize("shape", [(32,), (7, 1), (3, 5, 32)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
def test_equals_twin(name, shape, dtype):
    f, plain, vectors = PAIRS[name]
    args = arrays(vectors, shape, dtype)
    got = value_and_grads(f, *args)
    assert all(x.dtype == dtype for x in jax.tree.leaves(got))
    assert_near(got, value_and_grads(plain, *args), dtype, terms=32)


@pytest.mark.parametrize("plain", [False, True])
def test_equals_numpy(plain):
    x, w, b = arrays(2, dtype=jnp.float64)
    n = np.asarray(x)
    layer = (n - n.mean(-1, keepdims=True)) / np.sqrt(n.var(-1, keepdims=True) + 1e-5) * w + b
    assert_near(PAIRS["layer"][plain](x, w, b), layer, jnp.float64, terms=32)
    rms = n / np.sqrt((n**2).mean(-1, keepdims=True) + 1e-6) * w
    assert_near(PAIRS["rms"][plain](x, w), rms, jnp.float64, terms=32)


@every_norm
def test_second_derivative(name):
    f, plain, vectors = PAIRS[name]
    args = arrays(vectors, dtype=jnp.float64)
    every = tuple(range(len(args)))

    def curvature(g):
        norm2 = lambda *a: sum((d**2).sum() for d in jax.grad(lambda *b: jnp.sin(g(*b)).sum(), every)(*a))
        return jax.jit(jax.grad(norm2, every))(*args)

    assert_near(curvature(f), curvature(plain), jnp.float64, terms=15 * 32, steps=8)


def test_refuses_what_does_not_fit():
    x, w, b = arrays(2)
    with pytest.raises(ShapeError, match="layer_norm: bias"):
        kernels.layer_norm(x, w, b[:3])
    with pytest.raises(ShapeError, match="rms_norm: weight"):
        kernels.rms_norm(x, w[:3])
