"""Every layer of the layer table, recorded with an unknown batch size: its run gives what its eager run gives."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn as nn
from polyreme import static
from polyreme.eager.tensor import Tensor, to_tensor
from tests.nn.table import ROWS, build, state_value, wave

EPS = float(np.finfo(np.float32).eps)
FIXED = "SpectralNorm"  # it takes a weight, which has no batch
# rows of one Program, so that it is compiled once
# the first dim of every input is left open: not that of states (layers), nor of both scores (time) and labels (batch)
OPEN = [row for row in ROWS if row.name not in ("CTCLoss", "SimpleRNN", "LSTM", "GRU")]
LONG = [row for row in OPEN if row.terms >= 256]
SHORT = [row for row in OPEN if row.terms < 256]
GROUPS = [SHORT[at : at + 30] for at in range(0, len(SHORT), 30)]


def outputs(value):
    return [value] if isinstance(value, Tensor) else [t for v in value for t in outputs(v)]


def weighted(made, factors):
    terms = [(t * f).sum() for t, f in zip(made, factors, strict=True) if f is not None]
    return sum(terms[1:], terms[0])


def start(layer, row):
    layer.eval() if row.random else layer.train()
    return {t.name: state_value(n, tuple(t.shape), at) for at, (n, t) in enumerate(layer.state_dict().items())}


def eagerly(row):
    """(outputs, gradients, state afterwards, factors of the outputs in the loss)."""
    layer = build(row, nn)
    values = start(layer, row)
    for tensor in layer.state_dict().values():
        tensor.set_value(values[tensor.name])
    results = outputs(layer(*map(to_tensor, row.arrays())))
    factors = [wave(tuple(t.shape), 9) if t.dtype.kind == "f" else None for t in results]
    trained = [p for p in layer.parameters() if p.trainable]
    if trained:
        weighted(results, [None if f is None else to_tensor(f) for f in factors]).backward()
    grads = [p.grad.numpy() for p in trained]
    return [t.numpy() for t in results], grads, [t.numpy() for t in layer.state_dict().values()], factors


def declared(row, name, array):
    """A Variable for the array; the first size is not known if it is the batch's."""
    batch = array.ndim > 0 and array.dtype != bool and row.name != FIXED
    return static.data(name, [None, *array.shape[1:]] if batch else array.shape, array.dtype)


def record(row, at, factors):
    """(layer, its initial state, its feed, what to fetch)."""
    feed = {f"x{at}_{i}": a for i, a in enumerate(row.arrays())}
    layer = build(row, nn)
    values = start(layer, row)
    results = outputs(layer(*[declared(row, n, a) for n, a in feed.items()]))
    pairs = []
    trained = [p for p in layer.parameters() if p.trainable]
    if trained:
        given = {f"f{at}_{i}": f for i, f in enumerate(factors) if f is not None}
        feed |= given
        named = iter([declared(row, n, f) for n, f in given.items()])
        pairs = static.append_backward(weighted(results, [None if f is None else next(named) for f in factors]))
    assert {id(p) for p, _ in pairs} == {id(p) for p in trained}
    by_id = {id(p): g for p, g in pairs}
    return values, feed, [*results, *(by_id[id(p)] for p in trained), *layer.state_dict().values()]


def close(got, want, row, scale):
    bound = 4 * row.terms * EPS  # as in tests/nn/test_layers.py
    np.testing.assert_allclose(got, want, rtol=bound, atol=bound * max(scale, 1e-3), err_msg=row.id)


@pytest.mark.parametrize("rows", [*GROUPS, pytest.param(LONG, marks=pytest.mark.slow)], ids=lambda rows: rows[0].id)
def test_recorded_layers_equal_eager_ones(static_mode, rows):
    paddle.disable_static()
    wants = [eagerly(row) for row in rows]
    paddle.enable_static()
    values, feed, fetched = {}, {}, []
    for at, (row, want) in enumerate(zip(rows, wants, strict=True)):
        more, given, fetch = record(row, at, want[3])
        values |= more
        feed |= given
        fetched.append(fetch)
    exe = static.Executor()
    exe.run(static.default_startup_program())
    for name, value in values.items():
        static.global_scope().find_var(name).get_tensor().set(value)
    fetched_values = iter(exe.run(feed=feed, fetch_list=fetched))
    for row, (made, grads, state, _) in zip(rows, wants, strict=True):
        # the gradient of a key's bias is 0: what softmax does not see cancels, terms of the other gradients' size
        scale = max((float(np.abs(g).max()) for g in grads), default=0.0)
        for want in (*made, *grads, *state):
            got = next(fetched_values)
            assert got.shape == want.shape, row.id
            close(got, want, row, max(scale, float(np.abs(want).max(initial=0))))
