"""Plans: building from degrees, YAML and dict round trips, printing, and refusal of settings that mean nothing."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import OFFLOAD, RECOMPUTE, SCHEDULES, MeshShape, Plan, Strategy, zero

degrees = st.sampled_from((1, 2, 4))


@st.composite
def offloads(draw, pp):
    # stages hold their parameters; experts move one by one on one device
    apart = {"expert"} if pp == 1 else {"expert", "param"}
    kinds = draw(st.lists(st.sampled_from([k for k in OFFLOAD if k not in apart]), unique=True))
    ratio = {"offload_ratio": draw(st.sampled_from([0.25, 1.0]))} if {"state", "param"} & {*kinds} == {"state"} else {}
    if "state" in kinds and draw(st.booleans()):
        tiers = {kind: "disk" if kind == "state" else "host" for kind in kinds}
        return {"offload": tiers, "offload_path": "/ssd", "offload_buffers": draw(st.integers(1, 4)), **ratio}
    return {"offload": kinds, **ratio}


@st.composite
def plans(draw):
    pp = draw(degrees)
    plan = Plan.from_degrees(
        dp=draw(degrees),
        pp=pp,
        sharding=draw(degrees),
        sep=draw(degrees),
        mp=draw(degrees),
        ep=(ep := draw(degrees)),
        overlap={"moe": draw(st.integers(1, 3))} if ep > 1 else None,
        order=draw(st.permutations(("dp", "pp", "sharding", "sep", "mp", "ep"))),
        sharding_stage=draw(st.integers(1, 3)),
        sequence_parallel=draw(st.booleans()),
        schedule=draw(st.sampled_from([*SCHEDULES])) if pp > 1 else None,
        num_microbatches=draw(st.integers(1, 16)),
        recompute=(again := draw(st.sampled_from(RECOMPUTE))),
        **draw(offloads(pp)),
    )
    if pp > 1:
        items = draw(st.sampled_from([(), tuple(range(1, len(plan.stage_of_chunk) + 1))]))
        kinds = draw(st.sampled_from([(), ("gpu",) * pp]))
        plan = replace(plan, chunk_items=items, stage_devices=kinds)
    shares = again != "none" and "param" not in plan.offload
    return replace(plan, recompute_share=draw(st.sampled_from((1.0, 0.3)))) if shares else plan


@given(plans())
def test_yaml_and_dict_round_trip(p):
    assert Plan.from_yaml(p.to_yaml()) == p
    assert Plan.from_dict(json.loads(json.dumps(p.to_dict()))) == p
    assert hash(Plan.from_yaml(p.to_yaml())) == hash(p)


@given(plans(), plans())
def test_equal_plans_are_those_with_equal_text(a, b):
    assert (a == b) == (a.to_yaml() == b.to_yaml())


@given(plans())
def test_every_preset_can_place_a_transformer_block(p):
    # mp, sep and the batch divide every size here; the degrees are at most 4 x 4 x 4.
    block = {
        ("embed", "ffn"): (64, 64),
        ("vocab", "embed"): (64, 64),
        ("ffn",): (64,),
        ("expert", "embed", "ffn"): (4, 64, 64),
    }
    for dims, shape in block.items():
        for kind in ("param", "grad", "state"):
            assert len(getattr(p.strategy, f"{kind}_spec")(dims, shape, p.mesh)) == len(dims)
    p.strategy.act_spec(("batch", "seq", "embed"), (64, 64, 64), p.mesh)
    p.strategy.act_spec(("batch", "block_seq", "heads", "head_dim"), (64, 64, 64, 64), p.mesh)


def test_from_degrees():
    p = Plan.from_degrees(dp=2, sharding=2, mp=2, pp=2, sharding_stage=3, num_microbatches=4)
    assert p.mesh == MeshShape(dp=2, sharding=2, mp=2, pp=2)
    assert p.schedule == "1F1B"
    assert p.strategy.param_spec(("vocab", "embed")) == ("mp", "sharding")
    assert p.strategy.act_spec(("batch", "seq", "embed")) == (("dp", "sharding"), None, None)
    assert p.batch_ways == 4
    assert p.rows_per_device(32) == 2
    assert Plan.from_degrees(mp=2, sequence_parallel=True).strategy.act_spec(("batch", "seq")) == (
        ("dp", "sharding"),
        "mp",
    )


def test_sharding_stage_is_one_by_default():
    s = Plan.from_degrees(sharding=2).strategy
    assert s.param_spec(("embed",)) == s.grad_spec(("embed",)) == (None,)
    assert s.state_spec(("embed",)) == ("sharding",)


def test_default_plan_is_one_device():
    p = Plan()
    assert p.mesh.size == p.batch_ways == 1
    assert Plan.from_yaml("") == p == Plan.from_degrees()


def test_hand_written_yaml():
    p = Plan.from_yaml(
        "mesh: dp2 mp2\nstrategy:\n  param: {ffn: [mp]}\n  act: {batch: [dp], ffn: [mp]}\noffload: [state]\n"
    )
    assert p.mesh == MeshShape(dp=2, mp=2)
    assert p.strategy.state_spec(("embed", "ffn")) == (None, "mp")
    assert p.offload == {"state": "host"}


@given(st.integers(1, 40), st.integers(0, 40), st.sampled_from((1 / 3, 0.25, 0.5, 0.9, 1.0)))
def test_blocks_that_recompute_are_spread_evenly(size, start, share):
    plan = Plan(recompute="full", recompute_share=share)
    again = [plan.recomputes(block) for block in range(start, start + size)]
    assert sum(again) == plan.num_recomputed(start + size) - plan.num_recomputed(start)
    assert abs(sum(again) - share * size) < 1 + 1e-6
    assert not any(Plan().recomputes(block) for block in range(4))


def test_prints_one_readable_block():
    text = str(Plan.from_degrees(dp=2, pp=2, num_microbatches=4, recompute="full", offload=("state",)))
    assert text == (
        "Plan\n"
        "  mesh       dp2 pp2  (4 devices)\n"
        "  strategy   param replicated\n"
        "             act   batch:dp+sharding\n"
        "             grad  replicated\n"
        "             state replicated\n"
        "  schedule   1F1B, 4 microbatches\n"
        "  recompute  full\n"
        "  offload    state"
    )
    away = Plan(offload={"act": "host", "state": "disk"}, offload_path="/ssd", offload_ratio=0.5)
    assert str(away).endswith("offload    state to disk, act (/ssd, 3 buffers), 0.5 of the state")
    by_expert = Plan(offload={"expert": "disk", "param": "disk", "state": "disk"}, offload_path="/ssd")
    assert Plan.from_dict(by_expert.to_dict()) == by_expert


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: Plan.from_degrees(shardin=2),
            ConfigError,
            "unknown setting 'shardin' of a plan; did you mean 'sharding'",
        ),
        (lambda: Plan.from_degrees(sharding_stag=2), ConfigError, "did you mean 'sharding_stage'"),
        (lambda: Plan.from_degrees(sharding_stage=5), ConfigError, "sharding stage 5"),
        (lambda: Plan.from_dict({"num_microbatch": 2}), ConfigError, "did you mean 'num_microbatches'"),
        (lambda: Plan.from_dict([1]), ConfigError, r"a plan cannot be made from \[1\]"),
        (lambda: Plan.from_yaml("mesh: {dp: 2"), ConfigError, "not valid YAML"),
        (lambda: Plan.from_yaml("- 1"), ConfigError, "a plan cannot be made from"),
        (lambda: Plan(num_microbatches=0), ConfigError, "num_microbatches=0"),
        (lambda: Plan(num_microbatches=2.0), ConfigError, "num_microbatches=2.0"),
        (lambda: Plan(recompute="ful"), ConfigError, "unknown recompute 'ful' in plan; did you mean 'full'"),
        (lambda: Plan(recompute="full", recompute_share=0), ConfigError, "recompute_share=0 in plan; give the part"),
        (
            lambda: Plan(mesh="pp3", schedule="1F1B", stage_devices="gpu"),
            ConfigError,
            "stage_devices='gpu' in plan; give a list",
        ),
        (lambda: Plan(mesh="pp2", schedule="1F1B", chunk_items=4), ConfigError, "chunk_items=4 in plan; give a list"),
        (lambda: Plan(recompute_share=0.5), ConfigError, "recompute is none: no block recomputes"),
        (
            lambda: Plan(recompute="full", recompute_share=0.5, offload=["param"]),
            ConfigError,
            "recompute_share in plan with offload 'param'",
        ),
        (lambda: Plan(offload="state"), ConfigError, "offload='state' in plan; give a list"),
        (lambda: Plan(offload=("stat",)), ConfigError, "did you mean 'state'"),
        (
            lambda: Plan(offload={"state": "disc"}, offload_path="x"),
            ConfigError,
            "'disc' of offload 'state'.*'disk'",
        ),
        (
            lambda: Plan(offload={"act": "disk"}, offload_path="x"),
            ConfigError,
            "only param, state, expert .*nearest is 'act' to host",
        ),
        (lambda: Plan(offload=["grad"]), ConfigError, "'grad' in plan is not available by itself: .* offload 'param'"),
        (
            lambda: Plan.from_degrees(pp=2, offload=["param"]),
            ConfigError,
            "'param' in plan on mesh .*pp2.*: stages of a pipeline hold their parameters; set pp to 1",
        ),
        (
            lambda: Plan.from_degrees(pp=2, offload=["param", "expert"]),
            ConfigError,
            "'param' and 'expert' in plan on mesh .*set pp to 1, or leave 'param' and 'expert' out",
        ),
        (
            lambda: Plan(offload={"param": "disk", "state": "host"}, offload_path="x"),
            ConfigError,
            "param to disk with .* in memory; set offload to {param: disk, state: disk}",
        ),
        (
            lambda: Plan(offload=["param", "state"], offload_ratio=0.5),
            ConfigError,
            "offload_ratio=0.5 in plan, and param is offloaded whole",
        ),
        (lambda: Plan(offload={"state": "disk"}), ConfigError, "needs a folder of the disk, offload_path is None"),
        (lambda: Plan(offload=["state"], offload_path="x"), ConfigError, "offload_path='x' in plan, and nothing goes"),
        (lambda: Plan(offload=["state"], offload_ratio=1.5), ConfigError, "offload_ratio=1.5.*the nearest is 1.0"),
        (lambda: Plan(offload=["state"], offload_ratio=0), ConfigError, "offload_ratio=0 .*above 0"),
        (lambda: Plan(offload_ratio=0.5), ConfigError, "offload_ratio=0.5 in plan, and offload has no state"),
        (
            lambda: Plan(offload=["state"], offload_buffers=2),
            ConfigError,
            "offload_buffers=2 in plan, and nothing",
        ),
        (
            lambda: Plan(offload={"state": "disk"}, offload_path="x", offload_buffers=0),
            ConfigError,
            "offload_buffers=0 in plan; give a whole number",
        ),
        (lambda: Plan(schedule="1F1B"), ConfigError, "with pp=1: there is no pipeline"),
        (lambda: Plan(mesh="pp2"), ConfigError, "unknown schedule None in plan; the choices are FThenB, 1F1B"),
        (lambda: Plan(mesh="pp2", schedule="1f1B"), ConfigError, "did you mean '1F1B'"),
        (lambda: Plan.from_degrees(chunk_items=[2]), ConfigError, r"chunk_items=\[2\] .* whose pipeline has 0 chunks"),
        (
            lambda: Plan.from_degrees(pp=2, num_microbatches=2, schedule="VPP", chunk_items=[1, 2]),
            ConfigError,
            r"chunk_items=\[1, 2\] in plan on mesh pp2, whose pipeline has 4 chunks; give one for each chunk",
        ),
        (lambda: Plan.from_degrees(pp=2, num_microbatches=2, chunk_items=[0, 2]), ConfigError, "at least 1"),
        (
            lambda: Plan.from_degrees(pp=2, num_microbatches=2, stage_devices=["gpu"]),
            ConfigError,
            r"stage_devices=\['gpu'\] .* has 2 stages; give one for each stage",
        ),
        (lambda: Plan.from_degrees(pp=2, num_microbatches=2, stage_devices=["", 1]), ConfigError, "names of kinds"),
        (lambda: Plan(mesh="mp2"), ConfigError, "'mp' has degree 2, but the strategy splits nothing over it"),
        (lambda: Plan(mesh="dp2", strategy=Strategy()), ConfigError, "set dp to 1"),
        (lambda: Plan.from_degrees(dp=2, num_microbatches=3).rows_per_device(8), PlacementError, "make it 6 or 12"),
        (lambda: Plan.from_degrees(mp=2, sequence_parallel="no"), ConfigError, "sequence_parallel='no' in plan"),
        (lambda: Plan.from_degrees(pp=2, schedule=["1F1B"]), ConfigError, r"unknown schedule \['1F1B'\]"),
        (lambda: Plan.from_degrees(order=3), ConfigError, "unknown mesh axis '3' in order 3"),
        (lambda: Plan.from_degrees(offload="state"), ConfigError, "offload='state' in plan; give a list"),
        (lambda: Plan.from_degrees(offload=None), ConfigError, "offload=None in plan; give a list"),
        (lambda: Plan.from_yaml(None), ConfigError, "the plan's YAML is text, got NoneType"),
        (lambda: Plan.from_yaml("mesh: {dp: 2, dp: 4}"), ConfigError, "gives 'dp' twice, in line 1"),
        (lambda: Plan.from_yaml("mesh: dp2\nmesh: dp4"), ConfigError, "gives 'mesh' twice"),
        (lambda: Plan().rows_per_device(0), PlacementError, "batch of 0 does not divide"),
    ],
)
def test_bad_input_says_what_to_change(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_plans_with_different_stages_differ():
    assert Plan(mesh="sharding2", strategy=zero(1)) != Plan(mesh="sharding2", strategy=zero(2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp": 4, "expert_dispatch": "padded"}, "expert_dispatch='padded' in a plan that splits no experts; set ep"),
        ({"dp": 4, "overlap": {"moe": 2}}, "overlap.moe=2 in a plan that splits no experts"),
        ({"ep": 2, "overlap": {"moe": 0}}, "overlap.moe=0 in plan; give a whole number of parts"),
        ({"ep": 2, "overlap": {"tp": 2}}, "unknown key 'tp' in overlap of a plan; the choices are moe, mp, sharding"),
        (
            {"mp": 2, "overlap": {"mp": "ring"}},
            "mp splits no sequence between blocks, .* set mp above 1 and sequence_p",
        ),
        ({"mp": 2, "overlap": {"mp": 2}}, "overlap.mp=2 in plan; one of none, ring"),
        (
            {"sharding": 2, "sharding_stage": 1, "overlap": {"sharding": "ring"}},
            "overlap.sharding='ring' in a plan whose sharding keeps no pieces of gradients; set sharding above 1 and",
        ),
        ({"sharding": 2, "overlap": {"sharding": "on"}}, "overlap.sharding='on' in plan; one of none, ring"),
        ({"ep": 2, "overlap": "moe"}, "overlap='moe' in plan; give a mapping such as {moe: 2}"),
        ({"ep": 2, "expert_dispatch": "scatter"}, "unknown expert_dispatch 'scatter'"),
        ({"ep": 4, "expert_all_to_all": "two_level"}, r"experts split over \('ep',\): .*give expert_axes two axes"),
        (
            {
                "dp": 2,
                "ep": 2,
                "expert_axes": ("dp", "ep"),
                "expert_all_to_all": "two_level",
                "expert_dispatch": "ragged",
            },
            "expert_dispatch='ragged', which has no all-to-all of equal parts; set expert_dispatch to 'padded'",
        ),
        ({"ep": 2, "expert_axes": ("mp",)}, "leaves out ep, of degree 2"),
        ({"ep": 2, "expert_axes": "ep"}, "give a list of mesh axes"),
        ({"ep": 2, "expert_axes": ("ep", "pp")}, "give axes that split tensors, not pp"),
        ({"ep": 2, "expert_axes": ("ep", "ep")}, "each of them once"),
        ({"ep": 2, "expert_axes": ("ep", "tp")}, "unknown mesh axis 'tp'"),
    ],
)
def test_experts_that_cannot_be_split_so_are_refused(settings, message):
    with pytest.raises((ConfigError, PlacementError), match=message):
        Plan.from_degrees(**settings)
