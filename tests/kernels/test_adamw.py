import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme.errors import ShapeError
from polyreme.kernels import adamw, adamw_plain, select

from .tolerance import assert_near

SHAPES = [(3, 4), (5,), (), (2, 3, 2)]


def state(dtype=jnp.float32, grads_dtype=None):
    rng = np.random.default_rng(0)
    draw = lambda dtype: [jnp.asarray(rng.standard_normal(s), dtype) for s in SHAPES]
    return draw(dtype), draw(grads_dtype or dtype), [jnp.zeros(s, jnp.float32) for s in SHAPES]


@pytest.mark.parametrize("f", [adamw, adamw_plain])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_optax(f, decay):
    params, grads, zeros = state()
    rule = optax.adamw(1e-2, weight_decay=decay)
    want, opt = params, rule.init(params)
    ms = vs = zeros
    call = jax.jit(lambda p, g, m, v, t: f(p, g, m, v, step=t, learning_rate=1e-2, weight_decay=decay))
    for t in range(1, 6):
        updates, opt = rule.update(grads, opt, want)
        want = optax.apply_updates(want, updates)
        params, ms, vs = call(params, grads, ms, vs, t)
    # optax makes 1 - 0.999 ** t in float32: eps / 0.001 relative on v, half of it on a move of 1e-2, five times
    eps = float(jnp.finfo(jnp.float32).eps)
    for a, b in zip(params, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=8 * eps, atol=5 * 1e-2 * eps / 1e-3)


@pytest.mark.parametrize("step", [1, 1000])
def test_equals_twin_with_a_decay_for_each(step):
    params, grads, zeros = state()
    options = {"step": step, "learning_rate": 0.1, "weight_decay": [0.0, 0.1, 0.2, 0.3]}
    got, want = (f(params, grads, zeros, zeros, **options) for f in (adamw, adamw_plain))
    assert_near(tuple(got), tuple(want), jnp.float32, terms=4)


def test_dtypes_are_kept_and_low_precision_is_computed_wide():
    params, grads, zeros = state(jnp.bfloat16)
    new, ms, vs = adamw(params, grads, zeros, zeros, step=jnp.int32(1), learning_rate=jnp.float32(0.1))
    assert {x.dtype for x in new} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in ms + vs} == {jnp.dtype(jnp.float32)}
    # the first step moves every element by the learning rate, whatever its gradient
    for p, q, g in zip(params, new, grads, strict=True):
        want = np.asarray(p, np.float32) - 0.1 * np.sign(np.asarray(g, np.float32))
        np.testing.assert_allclose(np.asarray(q, np.float32), want, atol=2.0**-8 * 4)


def test_new_scalars_do_not_recompile():
    params, grads, zeros = state()
    call = jax.jit(lambda p, g, m, v, t, lr, b: adamw(p, g, m, v, step=t, learning_rate=lr, beta1=b))
    for t in (1, 2, 3):
        call(params, grads, zeros, zeros, t, 0.1 / t, 0.9)
    assert call._cache_size() == 1


@pytest.mark.parametrize("f", [adamw, adamw_plain])
def test_refuses_what_does_not_fit(f):
    params, grads, zeros = state()
    options = {"step": 1, "learning_rate": 0.1}
    with pytest.raises(ShapeError, match="lists differ in length"):
        f(params, grads[1:], zeros, zeros, **options)
    with pytest.raises(ShapeError, match=r"parameter 0 is \[3, 4\]"):
        f(params, [grads[1], *grads[1:]], zeros, zeros, **options)
    with pytest.raises(ShapeError, match="1 weight decays for 4 parameters"):
        f(params, grads, zeros, zeros, weight_decay=[0.1], **options)


@pytest.mark.parametrize(
    ("platform", "want"), [("cpu", "cpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("tpu", "tpu"), ("npu", "other")]
)
def test_backend_is_named(monkeypatch, platform, want):
    monkeypatch.setattr(select, "platform", lambda: platform)
    assert select.backend() == want
