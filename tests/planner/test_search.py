"""The search: against every plan of a small space, what divides, what fits, ties, and what helps if nothing does."""

import itertools
from dataclasses import replace

import pytest

from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import Plan
from polyreme.planner import ModelShape, Training, explain, search, space
from polyreme.planner.cluster import Cluster
from polyreme.planner.devices import cluster_of_kind
from polyreme.planner.explain import changes
from polyreme.planner.predict import predict
from polyreme.planner.space import Refused, Shape, Space, cuts, divisors, shapes

GPT = ModelShape(hidden=1024, layers=6, heads=16, seq=512, vocab=4096, ffn=4096)
BIG = ModelShape(hidden=8192, layers=48, heads=64, seq=2048, vocab=51200, ffn=4 * 8192, kv_heads=8)
TRAINING = Training()
NODE = cluster_of_kind("a100-40g", 8)


def test_a_search_chooses_dispatch_and_folding_of_experts():
    moe = ModelShape(64, 2, 8, 32, 128, 256, experts=8, experts_per_token=2)
    space = Space(axes=("mp", "ep"), recompute=("none",), offload=((),), microbatches=(1,), sequence_parallel=(False,))
    plans = [ranked.plan for ranked in search.search(moe, NODE, 32, TRAINING, space, top=40).plans]
    assert {plan.expert_axes for plan in plans} >= {("ep",), ("mp",), ("mp", "ep")}
    assert {plan.expert_dispatch for plan in plans if plan.expert_axes} <= set(space.expert_dispatch)
    dispatch = {(plan.mesh.mp, plan.mesh.ep, plan.expert_axes): plan.expert_dispatch for plan in plans}
    assert dispatch[1, 8, ("ep",)] == "ragged"
    # of two choices both devices get most tokens: all of them once are fewer than rows for each choice
    assert dispatch[4, 2, ("ep",)] == "gather"
    # experts that choose tokens compute equally many by themselves
    even = replace(moe, tokens_per_expert=8).graph()
    assert {way["expert_dispatch"] for way in cuts(Shape(ep=8), even, 32, space)} == {"gather", "padded", "ragged"}


def test_experts_are_split_over_sequence_parts_too_and_balanced_where_room_for_all_rows_is_not_there():
    moe = ModelShape(1024, 8, 16, 2048, 32000, 4096, experts=64, experts_per_token=2, expert_ffn=512)
    space = Space(axes=("sep", "ep"), recompute=("none",), offload=((),), microbatches=(1,))
    plans = search.search(moe, NODE, 64, TRAINING, space, top=6).plans
    # at most as many rows as come on the mean need no levelling, if there is room for all that may come
    assert (plans[0].plan.mesh.ep, plans[0].plan.expert_dispatch) == (8, "ragged")
    assert {each.plan.expert_axes for each in plans} == {("ep",), ("sep", "ep"), ("sep",)}
    tight = search.search(moe, with_memory(NODE, 12e9), 64, TRAINING, space, top=6).plans
    assert (tight[0].plan.mesh.ep, tight[0].plan.expert_dispatch) == (8, "balanced")
    by_dispatch = {how: predict(moe, replace(plans[0].plan, expert_dispatch=how), NODE, 64, TRAINING).memory.total
                   for how in ("ragged", "balanced")}  # fmt: skip
    assert by_dispatch["ragged"] > 12e9 > by_dispatch["balanced"]


def with_memory(cluster: Cluster, nbytes: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory=nbytes))


def by_hand(cluster, batch):
    """Every plan of three axes, all recompute modes and microbatches, by trying them."""
    degrees = [n for n in divisors(8)]
    for dp, mp, pp in itertools.product(degrees, repeat=3):
        if dp * mp * pp != 8:
            continue
        for m, mode in itertools.product(divisors(batch // dp), ("none", "full_attn", "full")):
            plan = Plan.from_degrees(dp=dp, mp=mp, pp=pp, num_microbatches=m, recompute=mode)
            found = predict(GPT, plan, cluster, batch, TRAINING)
            if found.fits:
                yield found.step_seconds


@pytest.mark.one_in(2)
@pytest.mark.parametrize("memory", [42e9, 2.5e9])
def test_nothing_by_hand_is_faster(memory):
    cluster = with_memory(NODE, memory)
    asked = Space(axes=("dp", "mp", "pp"), schedules=("1F1B",), offload=((),), sequence_parallel=(False,))
    found = search.search(GPT, cluster, 32, TRAINING, asked)
    best = found.plans[0].prediction.step_seconds
    assert best <= min(by_hand(cluster, 32)) * (1 + search.TIE)
    assert all(each.prediction.fits for each in found.plans)
    assert not any(each.prediction.fits for each in found.too_big)


def test_what_is_not_looked_at_is_in_no_list():
    asked = Space(axes=("dp", "mp", "pp"), offload=((),), sequence_parallel=(False,))
    everything = search.search(GPT, NODE, 32, TRAINING, asked, top=1000)
    for top in (1, 3):
        best = search.search(GPT, NODE, 32, TRAINING, asked, top=top)
        assert best.plans == everything.plans[:top]
        assert best.looked_at < everything.looked_at


def test_one_more_schedule_is_looked_at_beside_the_others(monkeypatch):
    names = ("1F1B", "VPP", "ZBH1", "ZBVPP", "Eager1F1B")
    asked = [
        Space(axes=("dp", "pp"), schedules=names[:count], recompute=("none",), offload=((),)) for count in (3, 4, 5)
    ]
    results = [search.search(GPT, NODE, 32, TRAINING, space, top=1000) for space in asked]
    for fewer, more in itertools.pairwise(results):
        assert more.looked_at > fewer.looked_at
        assert {each.plan.mesh for each in fewer.plans} == {each.plan.mesh for each in more.plans}
        assert fewer.plans[0].prediction.step_seconds >= more.plans[0].prediction.step_seconds
    # of a large space only the meshes that promise most
    monkeypatch.setattr(search, "ENOUGH", 1)
    short = search.search(GPT, NODE, 32, TRAINING, asked[-1], top=1000)
    assert short.looked_at < results[-1].looked_at
    assert short.plans[0] == results[-1].plans[0]


def test_long_sends_are_hidden_by_the_schedule_that_hides_them():
    slow = replace(NODE, links=tuple(replace(link, latency=2e-3) for link in NODE.links))
    asked = Space(axes=("pp",), schedules=("1F1B", "Eager1F1B"), recompute=("none",), offload=((),))
    assert search.search(GPT, slow, 64, TRAINING, asked).plans[0].plan.schedule == "Eager1F1B"


@pytest.mark.slow
def test_the_same_question_has_the_same_answer_and_simpler_plans_win_ties():
    asked = Space(axes=("dp", "mp", "pp", "sharding"), schedules=("1F1B",))
    first, second = (search.search(GPT, NODE, 16, TRAINING, asked) for _ in range(2))
    assert first == second
    times = [each.prediction.step_seconds for each in first.plans]
    assert all(b >= a * (1 - search.TIE) for a, b in itertools.pairwise(times))
    chosen = first.plans[0]
    limit = min(times) * (1 + search.TIE)
    near = [each for each in first.plans if each.prediction.step_seconds <= limit]
    assert all(space.simplicity(chosen.plan) <= space.simplicity(each.plan) for each in near)
    as_simple = [each for each in near if space.simplicity(each.plan) == space.simplicity(chosen.plan)]
    assert chosen.prediction.step_seconds == min(each.prediction.step_seconds for each in as_simple)


def test_a_sharded_state_is_no_less_simple():
    whole, cut = Plan.from_degrees(dp=8), Plan.from_degrees(dp=2, sharding=4, sharding_stage=2)
    assert space.simplicity(whole) == space.simplicity(cut) < space.simplicity(Plan.from_degrees(dp=4, mp=2))


def test_divisors_of_large_numbers_are_found_at_once():
    assert [divisors(n) for n in (1, 4, 12, 13)] == [(1,), (1, 2, 4), (1, 2, 3, 4, 6, 12), (1, 13)]
    assert len(divisors(1_000_000_007)) == 2
    with pytest.raises(ConfigError, match="a global batch of 8589934592; give at most 4,294,967,296"):
        search.search(GPT, NODE, 1 << 33)


def test_meshes_divide_the_model_and_the_batch():
    refused = Refused()
    meshes = list(shapes(BIG.graph(), cluster_of_kind("a100", 64), 128, Space(), refused))
    assert meshes
    for shape in meshes:
        plan = shape.plan()
        assert plan.mesh.size == 64
        assert BIG.kv_heads % shape.mp == 0
        plan.rows_per_device(128)
    assert {shape.mp for shape in meshes} == {1, 2, 4, 8}  # inside a node
    odd = ModelShape(hidden=96, layers=6, heads=6, seq=64, vocab=384, ffn=384)
    refused = Refused()
    assert all(s.mp in (1, 2) for s in shapes(odd.graph(), NODE, 12, Space(), refused))
    # one line for all meshes that it rules out, without advice that names degrees which the cluster has not
    assert "dim 'heads' of size 6 does not divide into 4 equal parts over mp (mp has degree 4)" in refused.reasons
    assert not [reason for reason in refused.reasons if "make it" in reason or "shape" in reason]
    assert any("batch 12 does not divide over 8 replicas" in reason for reason in refused.reasons)
    with pytest.raises(PlacementError):
        Plan.from_degrees(mp=4).strategy.act_spec((None, "heads"), (1, 6), Plan.from_degrees(mp=4).mesh)


def test_a_space_leaves_out_what_it_is_told_to():
    asked = Space(axes=("sharding", "mp"), sharding_stages=(3,), sequence_parallel=(True,))
    found = list(shapes(GPT.graph(), NODE, 32, asked, Refused()))
    assert {(s.dp, s.pp, s.sep) for s in found} == {(1, 1, 1)}
    assert all(s.sequence_parallel for s in found if s.mp > 1)
    assert all(s.sharding_stage == 3 for s in found if s.sharding > 1)
    moe = replace(GPT, experts=8, experts_per_token=2)
    assert {s.ep for s in shapes(moe.graph(), NODE, 32, Space(), Refused())} == {1, 2, 4, 8}


def test_cuts_of_a_pipeline_are_schedules_that_exist():
    shape = Shape(dp=2, pp=4)
    found = cuts(shape, GPT.graph(), 32, Space())
    assert {way["schedule"] for way in found} == {"1F1B", "Eager1F1B", "VPP", "ZBH1", "ZBVPP"}
    for way in found:
        plan = shape.plan(**way)
        assert len(plan.stage_of_chunk) <= GPT.layers + 2
        plan.rows_per_device(32)
    assert [way["num_microbatches"] for way in cuts(Shape(dp=8), GPT.graph(), 32, Space())] == [1, 2, 4]
    assert cuts(Shape(dp=8), GPT.graph(), 32, Space(microbatches=(2,))) == [{"num_microbatches": 2}]


def test_what_does_not_fit_says_by_how_much_and_which_part():
    asked = Space(axes=("dp", "mp", "sharding"))
    fastest = search.search(GPT, NODE, 32, TRAINING, asked).plans[0].prediction
    found = search.search(GPT, with_memory(NODE, 0.8 * fastest.memory.total), 32, TRAINING, asked)
    faster = [e for e in found.too_big if e.prediction.step_seconds < found.plans[0].prediction.step_seconds]
    assert faster
    lack, part = search.shortfall(faster[0].prediction)
    assert lack == faster[0].prediction.memory.total - faster[0].prediction.capacity > 0
    assert part in ("activations", "optimizer", "gradients", "parameters", "workspace")
    reason = "not here"
    none = search.search(GPT, NODE, 32, TRAINING, asked, refuse=lambda plan: reason)
    assert none.plans == ()
    assert reason in none.refused
    with pytest.raises(ConfigError, match="a global batch of 0"):
        search.search(GPT, NODE, 0)


@pytest.mark.slow
def test_when_nothing_fits_the_changes_do():
    bare = Space(axes=("dp", "mp"), recompute=("none",), offload=((),), microbatches=(1,))
    held = [each.prediction.memory.total for each in search.search(GPT, NODE, 32, TRAINING, bare).plans]
    small = with_memory(NODE, 0.9 * min(held))
    assert not search.fits_at_all(GPT, small, 32, TRAINING, bare)
    found = changes(GPT, small, 32, TRAINING, bare)
    assert len(found) == 3
    assert all(each.best.prediction.fits and each.devices == 8 for each in found)
    assert all(each.what.startswith("allow") for each in found)
    few = Space(axes=("mp", "sharding"), sharding_stages=(3,), recompute=("full",), offload=((),), microbatches=(1, 2))
    more = changes(BIG, with_memory(NODE, 30e9), 64, TRAINING, few)
    devices = [each for each in more if "instead of 8" in each.what]
    assert devices
    assert all(each.devices > 8 and each.devices == each.best.plan.mesh.size for each in devices)


@pytest.mark.slow
def test_gpt_175b_on_1024_devices_is_planned_in_seconds():
    shape = ModelShape(hidden=12288, layers=96, heads=96, seq=2048, vocab=51200, ffn=4 * 12288)
    asked = Space(axes=("sharding", "mp", "pp"), sharding_stages=(1,), offload=((),), schedules=("1F1B",))
    result = search.search(shape, cluster_of_kind("a100", 1024), 1536, TRAINING, asked)
    best = result.plans[0]
    assert best.prediction.fits
    assert best.plan.mesh.size == 1024
    assert 0.4 < best.prediction.mfu < 0.7
    assert result.looked_at < 2500


def test_a_part_of_the_blocks_recomputes_where_that_is_enough():
    node, space = with_memory(NODE, 6.8e9), Space(axes=("dp",), offload=((),), microbatches=(1,))
    shared = replace(space, recompute_shares=(0.25, 0.5, 0.75))
    whole, part = (search.search(GPT, node, 512, TRAINING, each, 1).plans[0] for each in (space, shared))
    assert whole.plan.recompute_share == 1
    assert part.plan.recompute != "none"
    assert part.plan.recompute_share < 1
    assert part.prediction.step_seconds < whole.prediction.step_seconds


def test_near_misses_come_first():
    space = Space(axes=("dp", "sharding", "mp"), offload=((),))
    misses = search.search(GPT, with_memory(NODE, 3e9), 512, TRAINING, space, 5)
    lacks = [search.shortfall(each.prediction)[0] for each in misses.too_big]
    assert lacks
    assert lacks == sorted(lacks)
    best = misses.plans[0].prediction.step_seconds
    assert all(each.prediction.step_seconds < best for each in misses.too_big)


def test_the_nearest_numbers_of_devices_that_divide_are_told():
    odd = cluster_of_kind("a100", 1000)
    fewer, more = explain.nearest_counts(BIG, odd, 1536, TRAINING, Space())
    assert fewer is not None
    assert more is not None
    assert 900 < fewer < 1000 < more < 1100
    for count in (fewer, more):
        assert list(shapes(BIG.graph(), explain.of_size(odd, count), 1536, Space(), Refused()))


def test_other_numbers_of_devices_are_slices_that_there_are():
    """More than the largest slice has are several of it, joined by the network, and no larger torus."""
    pod = cluster_of_kind("v5e", 256)
    sizes = {n: explain.of_size(pod, n).links for n in (8, 128, 1024)}
    assert {n: (links[0].torus, links[0].devices) for n, links in sizes.items()} == {
        8: ((2, 4), 8),
        128: ((8, 16), 128),
        1024: ((16, 16), 256),
    }
    assert explain.of_size(cluster_of_kind("v5p", 64), 8192).links[0].torus == (16, 16, 16)
    with pytest.raises(ConfigError, match="no slice of 'TPU-v5e' has 96 devices"):
        explain.of_size(pod, 96)
    alone = replace(pod, links=pod.links[:1])
    with pytest.raises(ConfigError, match="512 devices are 2 slices, which no link joins"):
        explain.of_size(alone, 512)
    unknown = replace(pod, device=replace(pod.device, name="chip of our own"))
    assert explain.of_size(unknown, 512).links[0].torus == (32, 16)


def test_a_prediction_says_how_sure_it_is():
    spreads = {}
    for kind in ("h100", "b200"):
        for training in (TRAINING, Training(products="float8")):
            found = predict(GPT, Plan.from_degrees(dp=8), cluster_of_kind(kind, 8), 64, training)
            low, high = found.interval
            assert low < found.step_seconds < high
            spreads[kind, training.products] = found.spread
    assert spreads["h100", ""] < spreads["h100", "float8"] < spreads["b200", "float8"]
    assert spreads["h100", ""] < spreads["b200", ""]


@pytest.mark.slow
def test_a_large_mixture_of_experts_is_planned_from_its_best_degrees():
    """As DeepSeek-V3 on 2,048 H800 (arXiv:2412.19437): 15,000 meshes, of which the promising are looked at."""
    latents = {"kv_rank": 512, "q_rank": 1536, "rope_head_dim": 64, "v_head_dim": 128, "head_dim": 192}
    wide = {"biases": False, "learned_positions": False, "tied": False, "rms_norm": True, "gated": True}
    experts = {"experts": 256, "experts_per_token": 8, "expert_ffn": 2048, "shared_experts": 1, "dense_layers": 3}
    shape = ModelShape(7168, 61, 128, 4096, 129280, 18432, ahead=1, **latents, **wide, **experts)
    training = Training(products="float8", sums="program", cut="layers")
    found = search.search(shape, cluster_of_kind("h800", 2048), 15360, training, top=3)
    assert found.looked_at < 12_000
    assert found.plans[0].prediction.step_seconds < 60
    assert all(each.plan.mesh.ep >= 16 for each in found.plans)
