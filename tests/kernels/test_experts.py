from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme.errors import ConfigError, ShapeError
from polyreme.kernels import select
from polyreme.kernels.balanced_experts import expert_slots, sum_of_rounds
from polyreme.kernels.experts import ExpertSplit, ExpertWeights, exchanged_experts, exchanged_row_experts, experts
from tests.expert_workloads import WORKLOADS, choose, rows_per_rank

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


ROUTINGS = {"few choices": inputs()[1], **{name: choose(name, experts=E, top_k=K, ranks=8) for name in WORKLOADS}}


def value_and_gradients(compute):
    """By routing: one program for all of them."""
    x, _, gates, weights = inputs()

    @jax.jit
    def run(x, choices, gates, weights):
        out, pull = jax.vjp(lambda *a: compute(a[0], choices, *a[1:], "silu"), x, gates, weights)
        return out, pull(jnp.cos(out))

    return {name: jax.tree.leaves(run(x, choices, gates, weights)) for name, choices in ROUTINGS.items()}


WANT = {}


def want():
    if not WANT:
        WANT.update(value_and_gradients(masked))
    return WANT


def compare(got):
    assert got.keys() == want().keys()
    for name, values in got.items():
        assert_near(values, want()[name], np.float64, terms=B * S * E)


def over(*names):
    return Mesh(np.array(jax.devices()[:8]).reshape((2,) * len(names)), names)


MESH = ("dp", "mp", "ep")
SPLITS = {
    "ep, width over mp": (((("dp", "ep"), ()), ("ep",), ("mp",)), ("padded", "balanced")),
    "ep and mp": (((("dp", "ep"), ("mp",)), ("ep", "mp"), ()), ("padded",)),
    "two levels": (((("dp", "ep"), ("mp",)), ("dp", "mp", "ep"), (), ("dp",)), ("padded", "balanced")),
    "dp, mp and ep": (((("dp", "mp", "ep"), ()), ("dp", "mp", "ep"), ()), ("gather", "padded", "ragged", "balanced")),
    "in parts": (((("dp", "mp", "ep"), ()), ("dp", "mp", "ep"), (), (), 3), ("gather", "padded", "balanced")),
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
    compare(value_and_gradients(experts))


@pytest.mark.one_in(4)
@pytest.mark.slow_cases(
    "two levels-balanced", "ep, width over mp-balanced", "ep and mp-padded", "in parts-gather", "in parts-balanced"
)
@pytest.mark.parametrize(("name", "how"), [(name, how) for name, (_, hows) in SPLITS.items() for how in hows])
def test_equals_one_device_over_a_mesh(name, how, monkeypatch):
    split = ExpertSplit(over(*MESH), *SPLITS[name][0])
    if how == "ragged":
        monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
        monkeypatch.setattr(select, "backend", lambda: "other")
    got = value_and_gradients(lambda *args: exchanged_experts(*args, split=split, how=how))
    compare(got)


@pytest.mark.slow_cases("gather", "ragged", "padded")
@pytest.mark.parametrize("how", ["gather", "padded", "ragged", "balanced"])
def test_room_is_made_for_the_tokens_that_experts_choose(how, monkeypatch):
    x, _, _, weights = inputs()
    scores, most = np.random.default_rng(1).random((B, S, E)), 2
    chosen = scores >= np.sort(scores, 1)[:, -most][:, None]
    choices, gates = np.where(chosen, np.arange(E), -1).astype(np.int32), np.where(chosen, scores, 0)
    if how == "ragged":
        monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
        monkeypatch.setattr(select, "backend", lambda: "other")
    split = ExpertSplit(over(*MESH), (MESH, ()), ("mp", "ep"))

    @partial(jax.jit, static_argnums=0)
    def run(compute):
        out, pull = jax.vjp(lambda *a: compute(a[0], choices, *a[1:], "silu"), x, gates, weights)
        return jax.tree.leaves((out, pull(jnp.cos(out))))

    compute = partial(exchanged_experts, split=split, how=how, row_capacity=most)
    if how == "balanced":
        with pytest.raises(ConfigError, match=r"experts choose their tokens.* use 'padded' or 'auto'"):
            run(compute)
        return
    assert_near(run(compute), run(masked), np.float64, terms=B * S * E)
    # to each of 4 devices 2 rows for each of its 2 experts, of the 4 tokens of a sequence
    assert ("f64[4,4,3]" in str(run.lower(compute).compile().as_text())) == (how == "padded")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("how", "parts"), [("gather", 1), ("padded", 2)])
def test_sends_what_its_dispatcher_says(how, parts):
    x, choices, gates, weights = inputs()
    split = ExpertSplit(over(*MESH), (("dp", "mp", "ep"), ()), ("dp", "mp", "ep"), parts=parts)
    call = jax.jit(lambda *a: exchanged_experts(a[0], choices, *a[1:], "silu", split=split, how=how))
    program = call.lower(x, gates, weights).compile().as_text()
    counts = {kind: program.count(f" {kind}(") for kind in ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")}
    # rows there and back, and how many they are; or tokens, choices and gates there and sums back
    wanted = {"all-to-all": 3 * parts} if how == "padded" else {"all-gather": 3, "reduce-scatter": 1}
    assert {kind: n for kind, n in counts.items() if n} == wanted


def rows_computed(choices, count, ways):
    """Rows that each of `ways` devices computes for `count` experts, which answer with the device they are on."""
    split = ExpertSplit(Mesh(np.array(jax.devices()[:ways]), ("ep",)), (("ep",),), ("ep",))

    def ffn(rows, sizes, weights):
        answer = jax.nn.one_hot(lax.axis_index("ep"), ways, dtype=rows.dtype)
        return jnp.where((jnp.arange(len(rows)) < sizes.sum())[:, None], answer, 0)

    @jax.jit
    def run(x, choices, gates, weights):
        return exchanged_row_experts(
            x, choices, gates, weights, count, ffn, specs=[jax.P("ep")], split=split, how="balanced"
        )

    x = np.zeros((*choices.shape[1:-1], ways), np.float32)
    arguments = x, np.ones(choices.shape[1:], np.float32), [np.zeros((count, 1), np.float32)]
    return [np.asarray(run(x, routing, *arguments[1:])).sum(0).round().astype(int) for routing in choices]


def test_balanced_gives_every_device_its_share():
    routings = np.stack([choose(name, tokens=32, experts=16, top_k=2).reshape(-1, 2) for name in WORKLOADS])
    for routing, rows in zip(routings, rows_computed(routings, 16, 4), strict=True):
        assert rows.sum() == (routing >= 0).sum()
        assert rows.max() / rows.mean() <= 1.05
    # what there was to level out
    at_home = [rows_per_rank(routing, 16, 4) for routing in routings]
    assert all(rows.max() / rows.mean() >= 1.25 for rows in at_home[1:])


def test_balanced_takes_more_hot_experts_than_slots_in_rounds():
    # on 8 devices of one expert each there is one slot, and more experts than one have rows away
    loads = np.array([np.bincount(c[c >= 0], minlength=E) for c in ROUTINGS.values()])
    assert expert_slots(1, 8) == 1
    assert (loads > -(-loads.sum(1, keepdims=True) // 8)).sum(1).max() >= 3


def test_sums_of_rounds_have_derivatives_of_any_order():
    def total(x):
        return sum_of_rounds(lambda i, x, n: x ** (i + n), jnp.int32(1), jnp.int32(3), x, jnp.float64(1))

    for order in range(3):
        assert total(2.0) == [2**2 + 2**3, 2 * 2 + 3 * 2**2, 2 + 6 * 2][order]
        total = jax.grad(total)


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
