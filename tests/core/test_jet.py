"""Taylor mode against Cauchy's integral: NumPy evaluates each function on a circle in the complex plane around x."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from polyreme.core.taylor.jet import JetSpec, propagate

ORDER = 4
RADIUS, POINTS = 0.1, 32  # no singularity within 0.35: what 32 points leave out is below (0.1 / 0.35)^32 = 2^-57
X = np.random.default_rng(0).uniform(0.35, 0.65, (3, 2))
V = np.random.default_rng(1).uniform(0.3, 1.0, (6, 3, 2))
W = np.random.default_rng(2).normal(size=(2, 2))


def softplus(x):
    return np.log(1 + np.exp(x))


PAIRS = {
    "elementwise": [
        (jnp.tanh, np.tanh), (jnp.exp, np.exp), (jnp.exp2, np.exp2), (jnp.expm1, np.expm1), (jnp.log, np.log),
        (jnp.log1p, np.log1p), (jnp.sin, np.sin), (jnp.cos, np.cos), (jnp.sinh, np.sinh), (jnp.cosh, np.cosh),
        (jnp.tan, np.tan), (jnp.sqrt, np.sqrt), (jax.lax.rsqrt, lambda x: x**-0.5), (jax.lax.erf, scipy.special.erf),
        (jax.lax.erfc, lambda x: 1 - scipy.special.erf(x)), (jnp.arctan, np.arctan), (jnp.arcsinh, np.arcsinh),
        (jnp.arctanh, np.arctanh), (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))), (jnp.square, np.square),
    ],
    "powers_and_quotients": [
        (lambda x: x**0, lambda x: x**0), (lambda x: x**3, lambda x: x**3), (lambda x: x**-5, lambda x: x**-5),
        (lambda x: x**2.5, lambda x: x**2.5), (lambda x: jnp.sin(x) / (1 + x * x), lambda x: np.sin(x) / (1 + x * x)),
        (lambda x: x / 3, lambda x: x / 3), (lambda x: 2 / x, lambda x: 2 / x),
    ],
    "linear_and_bilinear": [
        (lambda x: x @ x.T @ x, lambda x: x @ x.T @ x), (lambda x: x @ W, lambda x: x @ W),
        (lambda x: jnp.cumsum(x, 0) ** 2, lambda x: np.cumsum(x, 0) ** 2),
        (lambda x: jnp.linalg.norm(x), lambda x: np.sqrt((x * x).sum())),
        (lambda x: jnp.sort(-x, 0)[::-1] ** 2 * jnp.floor(x + 5),
         lambda x: x[np.argsort(-X, 0)[::-1], [0, 1]] ** 2 * 5),
        (lambda x: jnp.where(x > 0.5, x, x * x), lambda x: np.where(X > 0.5, x, x * x)),
        (lambda x: jnp.zeros((4, 2)).at[jnp.array([0, 2, 2])].add(x**3), lambda x: np.stack(
            [x[0] ** 3, 0 * x[0], x[1] ** 3 + x[2] ** 3, 0 * x[0]])),
    ],
    "without_a_rule_of_their_own": [
        (jax.nn.softplus, softplus), (jax.nn.relu, lambda x: x),
        (lambda x: jnp.linalg.inv(x[:2] + 2 * jnp.eye(2)), lambda x: np.linalg.inv(x[:2] + 2 * np.eye(2))),
        (lambda x: jnp.cumprod(x, 0), lambda x: np.cumprod(x, 0)),
        (lambda x: jax.lax.scan(lambda c, a: (jnp.sin(c + a), c * a), x[0], x)[1],
         lambda x: np.stack([x[0] * x[0], np.sin(2 * x[0]) * x[1], np.sin(np.sin(2 * x[0]) + x[1]) * x[2]])),
    ],
    "inside_calls": [
        (jax.jit(jax.checkpoint(lambda x: jax.nn.gelu(x, approximate=False))),
         lambda x: x / 2 * (1 + scipy.special.erf(x / np.sqrt(2)))),
        (jax.nn.silu, lambda x: x / (1 + np.exp(-x))),
    ],
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", PAIRS)


def cauchy(fn, v):
    """Coefficients 1..ORDER of fn(X + t v): the discrete Fourier transform of its values on a circle."""
    angles = np.exp(2j * np.pi * np.arange(POINTS) / POINTS)
    values = np.stack([fn(X + RADIUS * a * v) for a in angles])
    return np.fft.fft(values, axis=0).real[1 : ORDER + 1] / POINTS / RADIUS ** np.arange(1, ORDER + 1).reshape(
        -1, *[1] * (values.ndim - 1)
    ), np.abs(values).max()


def tolerance(k, size):
    """Some 256 roundings of values of that size, divided by RADIUS^k."""
    return size * 256 * 2.0**-52 / RADIUS**k


def written_out(flat, spec, like):
    found = [None] * (spec.ways * spec.num_coefficients + spec.collapsed) if flat is None else flat
    return [np.zeros_like(like) if c is None else np.asarray(c) for c in found]


@pytest.mark.slow_cases("elementwise", "without_a_rule_of_their_own")
@every_kind
def test_one_direction_to_order_four(kind):
    spec = JetSpec(ORDER)
    run = jax.jit(lambda x, v: propagate(
        lambda x: [fn(x) for fn, _ in PAIRS[kind]], [x], [(v, None, None, None)], spec))  # fmt: skip
    for at, (flat, (_, fn)) in enumerate(zip(run(X, V[0]), PAIRS[kind], strict=True)):
        want, size = cauchy(fn, V[0])
        for k, (got, c) in enumerate(zip(written_out(flat, spec, want[0]), want, strict=True), 1):
            np.testing.assert_allclose(got, c, rtol=0, atol=tolerance(k, size), err_msg=f"{at}, order {k}")


@pytest.mark.parametrize("count", [2, 6], ids=["apart", "stacked"])
@every_kind
def test_the_sum_over_directions_of_the_third_derivative(kind, count):
    spec = JetSpec(3, count, collapsed=True)
    assert spec.stacked == (count == 6)
    vs = V[:count]
    ways = (jnp.asarray(vs), None) if spec.stacked else tuple(c for v in vs for c in (jnp.asarray(v), None))
    run = jax.jit(lambda x, flat: propagate(lambda x: [fn(x) for fn, _ in PAIRS[kind]], [x], [flat], spec))
    for at, (flat, (_, fn)) in enumerate(zip(run(X, (*ways, None)), PAIRS[kind], strict=True)):
        each = [cauchy(fn, v) for v in vs]
        got = written_out(flat, spec, each[0][0][0])[-1]
        want, size = sum(c[2] for c, _ in each), sum(s for _, s in each)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(3, size), err_msg=str(at))


def test_what_does_not_move_has_no_coefficients():
    spec = JetSpec(2)
    outs = propagate(lambda x, y: (y * 2, x.astype(jnp.int32), jnp.sign(x), x + y), [X, X], [(V[0], None), None], spec)
    assert [o is None for o in outs] == [True, True, False]  # the integers carry nothing at all
    np.testing.assert_array_equal(outs[2][0], V[0])
    assert outs[2][1] is None


def test_a_custom_backward_is_walked_inside():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (g * jnp.cos(x),))
    (flat,) = propagate(sine, [X], [(V[0], None)], JetSpec(2))
    np.testing.assert_allclose(flat[0], np.cos(X) * V[0], rtol=8 * 2.0**-52)
    np.testing.assert_allclose(flat[1], -np.sin(X) * V[0] ** 2 / 2, rtol=8 * 2.0**-52)


def test_complex_values():
    z, v = X + 1j * X[::-1], V[0] - 1j * V[1]
    (flat,) = propagate(lambda z: jnp.exp(z) * jnp.conj(z), [z], [(v, None)], JetSpec(2))
    first = np.exp(z) * (v * np.conj(z) + np.conj(v))
    second = np.exp(z) * (v * v * np.conj(z) + 2 * v * np.conj(v)) / 2
    np.testing.assert_allclose(flat[0], first, rtol=0, atol=64 * 2.0**-52 * 10)
    np.testing.assert_allclose(flat[1], second, rtol=0, atol=64 * 2.0**-52 * 10)
