import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme.errors import ConfigError, ShapeError
from polyreme.kernels import select
from polyreme.kernels.experts import ExpertSplit, ExpertWeights, exchanged_experts, experts

from .tolerance import assert_near

B, S, D, F, E, K = 8, 4, 3, 4, 8, 3


def inputs():
    rng = np.random.default_rng(0)
    x, gates = rng.standard_normal((B, S, D)), rng.random((B, S, K))
    # some tokens choose fewer experts, one none at all; nobody chooses expert 3, and everybody expert 6
    choices = np.argsort(rng.random((B, S, E)), -1)[..., :K].astype(np.int32)
    choices[choices == 3] = -1
    choices[..., 0] = 6
    choices[..., 1:][choices[..., 1:] == 6] = -1
    choices[0, 0] = -1
    shapes = [(E, D, F), (E, F, D), (E, D, F), (E, F), (E, D), (E, F)]
    return x, choices, gates, ExpertWeights(*(rng.standard_normal(s) / 2 for s in shapes))


def masked(x, choices, gates, weights, activation):
    """Every token through every expert."""
    out = 0
    for e in range(E):
        hidden = jax.nn.silu(x @ weights.gate[e] + weights.gate_bias[e]) * (x @ weights.up[e] + weights.up_bias[e])
        y = hidden @ weights.down[e] + weights.down_bias[e]
        out = out + y * (gates * (choices == e)).sum(-1, keepdims=True)
    return out


def value_and_gradients(compute):
    x, choices, gates, weights = inputs()

    def run(x, gates, weights):
        out, pull = jax.vjp(lambda *a: compute(a[0], choices, *a[1:], "silu"), x, gates, weights)
        return out, pull(jnp.cos(out))

    return jax.tree.leaves(jax.jit(run)(x, gates, weights))


WANT = []


def want():
    if not WANT:
        WANT.extend(value_and_gradients(masked))
    return WANT


def over(*names):
    return Mesh(np.array(jax.devices()[:8]).reshape((2,) * len(names)), names)


MESH = ("dp", "mp", "ep")
SPLITS = {
    "ep, width over mp": (((("dp", "ep"), ()), ("ep",), ("mp",)), ("padded",)),
    "ep and mp": (((("dp", "ep"), ("mp",)), ("ep", "mp"), ()), ("padded",)),
    "dp, mp and ep": (((("dp", "mp", "ep"), ()), ("dp", "mp", "ep"), ()), ("gather", "padded", "ragged")),
    "tokens alone": (((("dp",), ("mp", "ep")), (), ()), ("padded",)),
    "experts alone": (((("dp",), ()), ("ep",), ()), ("padded",)),
}


def ragged_all_to_all(rows, room, begins, sizes, arrives, incoming, *, axis_name):
    """What XLA's does, which CPU has not: each device looks for its rows among all."""
    rows, begins, sizes, arrives = (lax.all_gather(a, axis_name) for a in (rows, begins, sizes, arrives))
    me, row = lax.axis_index(axis_name), jnp.arange(len(room))
    for device in range(len(rows)):
        first, size = arrives[device, me], sizes[device, me]
        source = jnp.where((row >= first) & (row < first + size), begins[device, me] + row - first, rows.shape[1])
        room += rows[device].at[source].get(mode="fill", fill_value=0)
    return room


def test_equals_every_token_through_every_expert():
    assert_near(value_and_gradients(experts), want(), np.float64, terms=B * S * E)


@pytest.mark.parametrize(("name", "how"), [(name, how) for name, (_, hows) in SPLITS.items() for how in hows])
def test_equals_one_device_over_a_mesh(name, how, monkeypatch):
    tokens, by_experts, inner = SPLITS[name][0]
    split = ExpertSplit(over(*MESH), tokens, by_experts, inner)
    if how == "ragged":
        monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
        monkeypatch.setattr(select, "backend", lambda: "other")
    got = value_and_gradients(lambda *args: exchanged_experts(*args, split=split, how=how))
    assert_near(got, want(), np.float64, terms=B * S * E)


@pytest.mark.parametrize("how", ["gather", "padded"])
def test_sends_what_its_dispatcher_says(how):
    x, choices, gates, weights = inputs()
    split = ExpertSplit(over(*MESH), (("dp", "mp", "ep"), ()), ("dp", "mp", "ep"))
    call = jax.jit(lambda *a: exchanged_experts(a[0], choices, *a[1:], "silu", split=split, how=how))
    program = call.lower(x, gates, weights).compile().as_text()
    counts = {kind: program.count(f" {kind}(") for kind in ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")}
    # rows there and back, and how many they are; or tokens, choices and gates there and sums back
    wanted = {"all-to-all": 3} if how == "padded" else {"all-gather": 3, "reduce-scatter": 1}
    assert {kind: n for kind, n in counts.items() if n} == wanted


def test_refuses_what_does_not_fit():
    x, choices, gates, weights = inputs()
    split = ExpertSplit(over(*MESH), (("dp", "ep"), ()), ("ep",))
    with pytest.raises(ConfigError, match="'ragged' needs XLA's ragged all-to-all, which CPU has not; use 'padded'"):
        exchanged_experts(x, choices, gates, weights, "silu", split=split, how="ragged")
    odd = ExpertWeights(*(w[:7] for w in weights))
    with pytest.raises(ShapeError, match="experts of size 7 does not divide into 2 equal parts over mesh axis ep"):
        exchanged_experts(x, choices, gates, odd, "silu", split=split, how="padded")
    with pytest.raises(ShapeError, match="dim 0 of x of size 6 does not divide into 4 equal parts over mesh axis dp"):
        exchanged_experts(x[:6], choices[:6], gates[:6], weights, "silu", split=split, how="padded")
