import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme import kernels
from polyreme.errors import ConfigError, ShapeError
from polyreme.kernels.recurrent import CELLS, Weights

from .tolerance import assert_near

LENGTHS = [2, 4, 0]


def arrays(mode, dtype=jnp.float64, projection=0):
    rng = np.random.default_rng(0)
    rows, p = CELLS[mode].gates * 6, projection or 6
    a = lambda *s: jnp.asarray(rng.uniform(-1, 1, s), dtype)
    weights = Weights(a(rows, 5), a(rows, p), a(rows), a(rows), a(6, p) if projection else None)
    return a(4, 3, 5), weights, (a(3, p), a(3, 6)) if mode == "LSTM" else (a(3, p),)


def value_and_grads(kernel, mode, given, *settings):
    """As one program: run step by step it would be some forty."""

    def run(*given):
        out, pull = jax.vjp(lambda *a: kernel(mode, *a, *settings), *given)
        return out, pull(jax.tree.map(jnp.cos, out))

    return jax.jit(run)(*given)


@pytest.mark.one_in(2)
@pytest.mark.slow_cases("LSTM-0", "LSTM-2", "RNN_TANH-0")
@pytest.mark.parametrize(("mode", "projection"), [*((m, 0) for m in CELLS), ("LSTM", 2)])
def test_equals_twin(mode, projection):
    given, lengths = arrays(mode, projection=projection), jnp.asarray(LENGTHS)
    settings = (None, False, True) if mode == "RNN_TANH" else (lengths, True, mode != "GRU")
    got = value_and_grads(kernels.recurrent, mode, given, *settings)
    assert_near(got, value_and_grads(kernels.recurrent_plain, mode, given, *settings), jnp.float64, terms=256)


def test_half_precision_keeps_its_dtype_and_the_cell_is_wide():
    given = arrays("LSTM", jnp.bfloat16)
    got = value_and_grads(kernels.recurrent, "LSTM", given)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    assert_near(got, value_and_grads(kernels.recurrent_plain, "LSTM", given), jnp.bfloat16, terms=32)


def test_second_derivative():
    given = arrays("GRU")

    def curvature(kernel):
        norm2 = lambda w: (jax.grad(lambda v: kernel("GRU", given[0], v, given[2])[0].sum())(w).hh ** 2).sum()
        return jax.jit(jax.grad(norm2))(given[1])

    assert_near(curvature(kernels.recurrent), curvature(kernels.recurrent_plain), jnp.float64, terms=1024)


def test_bad_input_raises():
    x, weights, state = arrays("GRU")
    with pytest.raises(ConfigError, match="mode='LSTN'; choose one of RNN_TANH, RNN_RELU, LSTM, GRU"):
        kernels.recurrent("LSTN", x, weights, state)
    with pytest.raises(ShapeError, match=r"h \[2, 6\]; needs \[3, 6\] for x \[4, 3, 5\]"):
        kernels.recurrent("GRU", x, weights, (state[0][:2],))
    with pytest.raises(ShapeError, match=r"lengths \[2\]; needs \[3\]"):
        kernels.recurrent_plain("GRU", x, weights, state, jnp.zeros(2, int))
    with pytest.raises(ShapeError, match=r"weight_ih \[18\].*needs \[steps, batch, input\]"):
        kernels.recurrent("GRU", x, weights._replace(ih=weights.bias_ih), state)
