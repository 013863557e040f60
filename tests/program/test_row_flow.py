"""What functions do with the rows of padded arrays, read off their jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyreme.program.row_flow import PLACE, SAME, MixedRows, PaddedDim, RowFlow

N, D = 24, 3
WEIGHT = np.ones((D, 4), np.float32)

BY_ROW = {
    "element by element": (lambda x: jnp.tanh(x) * 2 + 1, 0, True),
    "product": (lambda x: x @ WEIGHT, 0, True),
    "softmax": (lambda x: jax.nn.softmax(x, -1), 0, True),
    "mean of a row": (lambda x: x.mean(-1), 0, True),
    "transpose": (lambda x: x.T * jnp.arange(D)[:, None], 1, True),
    "flat and back": (lambda x: x.reshape(N, D, 1)[:, :, 0], 0, True),
    "new dim in front": (lambda x: x[None], 1, True),
    "sorted": (lambda x: jnp.sort(x, -1), 0, True),
    "top": (lambda x: jax.lax.top_k(x, 2)[0], 0, True),
    "looked up": (lambda x: jnp.asarray(WEIGHT)[x[:, 0].astype(int) % D], 0, True),
    "picked": (lambda x: jnp.take_along_axis(x, x[:, :1].astype(int) % D, 1), 0, True),
    "one hot": (lambda x: jax.nn.one_hot(x[:, 0], 5), 0, True),
    "a step of a loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2, x), 0, True),
    "a scan over columns": (lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[:, 0], x.T)[0], 0, True),
    "a branch": (lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x), 0, True),
    "where it stands": (lambda x: x * jnp.arange(N)[:, None], 0, False),
    "sum up to here": (lambda x: jnp.cumsum(x, 0), 0, False),
    "random": (lambda x: x * jax.random.uniform(jax.random.key(0), (N, D)), 0, False),
}


@pytest.mark.parametrize("case", BY_ROW)
def test_rows_that_stay_by_themselves_are_followed(case):
    function, place, is_copy = BY_ROW[case]
    rows = PaddedDim(N)
    flow = RowFlow(jax.make_jaxpr(function)(jnp.ones((N, D))), [(rows, None)])
    (dims,) = flow.outputs
    assert [i for i, d in enumerate(dims) if d is rows] == [place]
    assert flow.is_copy is is_copy
    # what the answer says holds: other rows change nothing of the first
    x = np.arange(N * D, dtype=np.float32).reshape(N, D)
    other = x.copy()
    other[10:] += 1
    first = [np.take(np.asarray(function(jnp.asarray(v))), range(10), place) for v in (x, other)]
    np.testing.assert_array_equal(*first)


MIXED = {
    "sum": lambda x: x.sum(0),
    "softmax over rows": lambda x: jax.nn.softmax(x, 0),
    "gram": lambda x: x.T @ x,
    "reversed": lambda x: x[::-1],
    "first row": lambda x: x[0],
    "sorted": lambda x: jnp.sort(x, 0),
    "shifted": lambda x: jnp.roll(x, 1, 0),
    "joined with others": lambda x: jnp.concatenate([x, x]),
    "flattened": lambda x: x.reshape(-1),
    "sum from the end": lambda x: jax.lax.cumsum(x, 0, reverse=True),
    "divided by their number": lambda x: x / x.shape[0],
    "beside something else": lambda x: x + np.arange(float(N))[:, None],
    "scanned": lambda x: jax.lax.scan(lambda c, y: (c + y, y), x[0] * 0, x)[1],
    "unknown": lambda x: jnp.fft.fft(x, axis=1).real,
    "random from the other end": lambda x: x.T * jax.random.uniform(jax.random.key(0), (D, N)),
}


@pytest.mark.parametrize("case", MIXED)
def test_what_mixes_rows_is_refused(case):
    with pytest.raises(MixedRows):
        RowFlow(jax.make_jaxpr(MIXED[case])(jnp.ones((N, D))), [(PaddedDim(N), None)])


def test_rows_of_two_kinds_meet_in_a_product_and_nowhere_else():
    one, other = PaddedDim(N), PaddedDim(N)
    x = jnp.ones((N, D))
    (dims,) = RowFlow(jax.make_jaxpr(lambda a, b: a @ b.T)(x, x), [(one, None), (other, None)]).outputs
    assert dims == (one, other)
    with pytest.raises(MixedRows, match="something else"):
        RowFlow(jax.make_jaxpr(jnp.add)(x, x), [(one, None), (other, None)])


def test_what_is_made_in_a_function_is_known_by_where_it_stands():
    made = jax.make_jaxpr(lambda x: (jnp.zeros((N, D)), jnp.arange(N)))(jnp.ones((N, D)))
    zeros, places = RowFlow(made, [(PaddedDim(N), None)]).outputs
    assert zeros == (SAME, SAME)
    assert places == (PLACE,)
