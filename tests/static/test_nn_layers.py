"""Every layer of the layer table, recorded with an unknown batch size: its run gives what PaddlePaddle's gives."""

import json
from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn as nn
from polyreme import static
from polyreme.eager.tensor import Tensor, to_tensor
from tests.nn.table import ROWS, build, state_value, wave

RECORDED = json.loads((Path(__file__).parents[1] / "nn" / "fixtures" / "layers.json").read_text())
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


def wanted(row):
    """(outputs, gradients by parameter, state afterwards): PaddlePaddle's recorded ones, or those of an eager run."""
    if row.paddle or row.name == FIXED:  # the vectors that SpectralNorm moves are not recorded
        return eagerly(row)
    recorded = RECORDED[row.id]
    layer = build(row, nn)
    state = {n: state_value(n, tuple(t.shape), at) for at, (n, t) in enumerate(layer.state_dict().items())}
    shapes = {n: v.shape for n, v in state.items()}
    grads = {n: np.reshape(v, shapes[n]) for n, v in recorded["grads"].items()}
    after = state | {n: np.reshape(v, shapes[n]) for n, v in recorded["after"].items()}
    return [np.reshape(w["values"], w["shape"]) for w in recorded["outputs"]], grads, after


def eagerly(row):
    layer = build(row, nn)
    values = start(layer, row)
    for tensor in layer.state_dict().values():
        tensor.set_value(values[tensor.name])
    results = outputs(layer(*map(to_tensor, row.arrays())))
    trained = {n: p for n, p in layer.named_parameters() if p.trainable}
    if trained:
        weighted(
            results, [to_tensor(wave(tuple(t.shape), 9)) if t.dtype.kind == "f" else None for t in results]
        ).backward()
    grads = {n: p.grad.numpy() for n, p in trained.items()}
    return [t.numpy() for t in results], grads, {n: t.numpy() for n, t in layer.state_dict().items()}


def declared(row, name, array):
    """A Variable for the array; the first size is not known if it is the batch's."""
    batch = array.ndim > 0 and array.dtype != bool and row.name != FIXED
    return static.data(name, [None, *array.shape[1:]] if batch else array.shape, array.dtype)


def record(row, at, shapes):
    """(its initial state, its feed, what to fetch: outputs, of these shapes, and gradients and state by name)."""
    feed = {f"x{at}_{i}": a for i, a in enumerate(row.arrays())}
    layer = build(row, nn)
    values = start(layer, row)
    results = outputs(layer(*[declared(row, n, a) for n, a in feed.items()]))
    pairs = []
    trained = {n: p for n, p in layer.named_parameters() if p.trainable}
    if trained:
        factors = [wave(s, 9) if t.dtype.kind == "f" else None for t, s in zip(results, shapes, strict=True)]
        fed = {f"f{at}_{i}": f for i, f in enumerate(factors) if f is not None}
        feed |= fed
        named = iter([declared(row, n, f) for n, f in fed.items()])
        pairs = static.append_backward(weighted(results, [None if f is None else next(named) for f in factors]))
    assert {id(p) for p, _ in pairs} == {id(p) for p in trained.values()}
    by_id = {id(p): g for p, g in pairs}
    return values, feed, (results, {n: by_id[id(p)] for n, p in trained.items()}, layer.state_dict())


def close(got, want, row, scale):
    bound = 4 * row.terms * EPS  # as in tests/nn/test_layers.py
    np.testing.assert_allclose(got, want, rtol=bound, atol=bound * max(scale, 1e-3), err_msg=row.id)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("rows", [*GROUPS, pytest.param(LONG, marks=pytest.mark.slow)], ids=lambda rows: rows[0].id)
def test_recorded_layers_give_what_paddles_give(static_mode, rows):
    paddle.disable_static()
    wants = [wanted(row) for row in rows]
    paddle.enable_static()
    values, feed, fetched = {}, {}, []
    for at, (row, (results, grads, state)) in enumerate(zip(rows, wants, strict=True)):
        more, fed, (outs, pairs, tensors) = record(row, at, [r.shape for r in results])
        values |= more
        feed |= fed
        assert pairs.keys() == grads.keys()
        fetched.append([*outs, *(pairs[n] for n in grads), *(tensors[n] for n in state)])
    exe = static.Executor()
    exe.run(static.default_startup_program())
    for name, value in values.items():
        static.global_scope().find_var(name).get_tensor().set(value)
    fetched_values = iter(exe.run(feed=feed, fetch_list=fetched))
    for row, (results, grads, state) in zip(rows, wants, strict=True):
        # the gradient of a key's bias is 0: what softmax does not see cancels, terms of the other gradients' size
        scale = max((float(np.abs(g).max()) for g in grads.values()), default=0.0)
        for want in (*results, *grads.values(), *state.values()):
            got = next(fetched_values)
            assert got.shape == want.shape, row.id
            close(got, want, row, max(scale, float(np.abs(want).max(initial=0))))
