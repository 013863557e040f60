"""predict: arithmetic by hand, published profiles, and that more of anything is never worse."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import Durations, Plan, make_schedule
from polyreme.planner import Cluster, DeviceKind, Link, ModelShape, Training, cluster, cluster_of_kind, predict
from polyreme.planner.block_time import Setting, block_time
from polyreme.planner.cluster import slowness
from polyreme.planner.communication import group
from polyreme.planner.compute import Arithmetic, operation_seconds
from polyreme.planner.devices import device_kind
from polyreme.planner.graph import OperationCost, Value
from polyreme.planner.pipeline import closed_form, pipeline_seconds
from polyreme.planner.sharding import cuts_of

FLAT = ((0.0, 0.5),)
KIND = DeviceKind("made up", {"bfloat16": 1e12}, 1e12, 1e11, FLAT, FLAT, FLAT, launch=0.0)
EIGHT = Cluster(KIND, 8, (Link("near", 8, 1e10, 0.0),))
ONE = Cluster(KIND, 1, ())
GPT = ModelShape(hidden=512, layers=8, heads=8, seq=128, vocab=1024, ffn=2048)


# operations


def seconds(op, plan=None, samples=4.0, training=None, weights=()):
    on = Arithmetic(KIND, training or Training())
    return operation_seconds(op, {w.name: w for w in weights}, cuts_of(plan or Plan()), samples, on)


def test_a_product_is_limited_by_arithmetic_or_by_bytes():
    """Peak 1e12 at a share of 0.5; memory 1e11 at 0.5."""
    x, y = (
        Value("x", ("batch", "block_seq", "embed"), (1, 8, 64)),
        Value("y", ("batch", "block_seq", "ffn"), (1, 8, 256)),
    )
    w = Value("w", ("embed", "ffn"), (64, 256))
    op = OperationCost("product", "up", (x,), y, ("w",), flops=2.0 * 8 * 64 * 256, saved=("x",), contracted="embed")
    moved = 2 * (4 * 8 * 64 + 4 * 8 * 256 + 64 * 256)  # 16 bits
    cheap = replace(op, flops=op.flops / 100)
    assert seconds(cheap, weights=[w]).forward == pytest.approx(moved / 5e10)
    dear = replace(op, flops=1e6 * op.flops)
    got = seconds(dear, weights=[w])
    assert got.forward == got.inputs == got.weights == pytest.approx(4 * dear.flops / 5e11)
    cut = seconds(dear, Plan.from_degrees(mp=2, dp=2), weights=[w])
    assert cut.forward == pytest.approx(got.forward / 4)
    fast = Training(products="float8")
    kind = replace(KIND, flops={**KIND.flops, "float8": 2e12})
    device = Arithmetic(kind, fast)
    low = operation_seconds(dear, {"w": w}, cuts_of(Plan()), 4.0, device)
    # x is read in 16 bits and written in 8, twice; so are the weight, and the gradient of y
    casts = [2 * 4 * value.size * 2 / 5e10 for value in (x, y)]
    assert low.forward == pytest.approx(got.forward / 2 / 0.9 + casts[0] + 2 * w.size * 2 / 5e10, rel=1e-9)
    assert low.inputs == pytest.approx(got.forward / 2 / 0.9 + casts[1])
    attention = OperationCost("attention", "attention", (x, x, x), y, flops=1e12)
    assert seconds(attention) == operation_seconds(attention, {}, cuts_of(Plan()), 4.0, device)  # stays in 16 bits
    head = (replace(w, dims=("embed", "vocab")), replace(y, dims=("batch", "block_seq", "vocab")))
    logits = replace(dear, output=head[1])
    assert operation_seconds(logits, {"w": head[0]}, cuts_of(Plan()), 4.0, device).forward == got.forward


def test_attention_leaves_half_out_and_its_backward_has_five_products_for_two():
    q = Value("q", ("batch", "block_seq", "heads", None), (1, 64, 4, 16))
    op = OperationCost("attention", "attention", (q, q, q), q, flops=1e12, executed=0.5)
    got = seconds(op)
    assert got.forward == pytest.approx(4 * 0.5e12 / 5e11)
    assert got.inputs == pytest.approx(2.5 * got.forward / 0.85)


def test_what_is_not_fused_moves_more():
    x = Value("x", ("batch", "seq", "embed"), (1, 8, 64))
    op = OperationCost("norm", "norm", (x,), replace(x, name="y"), saved=("x",), unfused=8.0)
    moved = 2 * 4 * 8 * 64 * 2.0
    assert seconds(op).forward == pytest.approx(moved / 5e10)
    assert seconds(op).inputs == pytest.approx(1.5 * moved / 5e10)  # reads its gradient and x, writes x's gradient
    assert seconds(op, training=Training(fusion="none")).forward == pytest.approx(8 * moved / 5e10)
    assert seconds(op, training=Training(fusion="layers")).forward == pytest.approx(moved / 5e10)
    loss = OperationCost("loss", "loss", (x,), replace(x, name="z"), unfused=7.5)
    assert seconds(loss, training=Training(fusion="layers")).forward == pytest.approx(7.5 * seconds(loss).forward)


def test_no_operation_is_shorter_than_a_launch():
    x = Value("x", ("batch", "seq", "embed"), (1, 1, 1))
    op = OperationCost("elementwise", "add", (x,), replace(x, name="y"))
    on = Arithmetic(replace(KIND, launch=1e-5), Training())
    assert operation_seconds(op, {}, cuts_of(Plan()), 1.0, on).forward == 1e-5


def test_a_curve_is_read_between_its_points():
    curve = ((1e3, 0.2), (1e6, 0.8))
    assert [cluster.at(curve, x) for x in (1.0, 1e3, 10**4.5, 1e6, 1e9)] == pytest.approx([0.2, 0.2, 0.5, 0.8, 0.8])


@pytest.mark.parametrize(
    ("is_cut", "recompute", "forward", "backward"),
    [(False, "none", 7.7, 11.9), (True, "none", 7.2, 11.8), (True, "core_attn", 7.2, 13.1), (False, "full", 7.7, 19.5)],
)
def test_a_layer_of_the_22b_model_takes_as_long_as_was_published(is_cut, recompute, forward, backward):
    """Milliseconds a layer, forward and backward: arXiv:2205.05198, table 4; A100, tensor parallelism over 8.

    15% is the worst of a published row of that system.
    """
    model = ModelShape(6144, 48, 64, 2048, 51200, 24576, dropout=True)
    training = Training("float16", attention="plain", gradients=2, overlap=("mp_grad",), fusion="layers", prunes=False)
    device = cluster_of_kind("a100", 8)
    plan = Plan.from_degrees(mp=8, sequence_parallel=is_cut, recompute=recompute)
    graph = model.graph("plain")
    got = block_time(graph.blocks[1], Setting(graph, plan, device, training, 4, Arithmetic(device.device, training)))
    assert 1e3 * (got.forward + sum(got.exposed_forward.values())) == pytest.approx(forward, rel=0.15)
    again = got.backward + got.again + sum(got.exposed_backward.values())
    assert 1e3 * again == pytest.approx(backward, rel=0.15)


# pipelines


@pytest.mark.parametrize(
    ("name", "v"), [("FThenB", 1), ("1F1B", 1), ("Eager1F1B", 1), ("VPP", 2), ("VPP", 3), ("ZBH1", 1), ("ZBVPP", 2)]
)
@pytest.mark.parametrize("p", [2, 4])
def test_the_closed_form_is_the_timeline_of_even_chunks(name, v, p):
    for m in (2 * p, 4 * p):
        plan = Plan.from_degrees(pp=p, schedule=name, virtual_stages=v, num_microbatches=m)
        chunks = [Durations(1.0, 1.25, 0.75)] * (p * v)
        assert closed_form(plan, chunks) == pytest.approx(make_schedule(name, p, m, v).makespan(chunks), rel=1e-9)


def test_the_bubble_is_the_published_one():
    """(p - 1) / m of the work for 1F1B, (p - 1) / (v m) interleaved. Source: arXiv:2104.04473, 2.2."""
    p, m, v = 8, 64, 4
    work = m * 3.0
    plain = Plan.from_degrees(pp=p, num_microbatches=m)
    assert pipeline_seconds(plain, [Durations()] * p) == pytest.approx(work * (1 + (p - 1) / m))
    looped = Plan.from_degrees(pp=p, num_microbatches=m, schedule="VPP", virtual_stages=v)
    quarter = [Durations(0.25, 0.25, 0.25)] * (p * v)
    assert pipeline_seconds(looped, quarter) == pytest.approx(work * (1 + (p - 1) / (v * m)))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_closed_form_is_near_the_timeline_of_uneven_chunks(data):
    """Within 8% for chunks that differ by up to 30% and a send of a tenth of a task."""
    name, v = data.draw(st.sampled_from([("FThenB", 1), ("1F1B", 1), ("VPP", 2), ("ZBH1", 1), ("ZBVPP", 2)]))
    p, times = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 5))
    size = st.floats(1.0, 1.3)
    send = data.draw(st.sampled_from([0.0, 0.1]))
    chunks = [Durations(*data.draw(st.tuples(size, size, size)), send) for _ in range(p * v)]
    plan = Plan.from_degrees(pp=p, schedule=name, virtual_stages=v, num_microbatches=times * p)
    real = make_schedule(name, p, times * p, v).makespan(chunks)
    assert closed_form(plan, chunks) == pytest.approx(real, rel=0.08)


# the step


def test_a_step_on_one_device_is_its_flops_and_its_update():
    """With memory that costs nothing: 3 x forward FLOP, attention's backward 2.5 of a half-executed forward."""
    kind = replace(KIND, bandwidth=1e30)
    got = predict(GPT, Plan(), Cluster(kind, 1, ()), 16)
    graph = GPT.graph()
    attention = 4.0 * GPT.seq**2 * GPT.hidden * GPT.layers
    flops = 3 * (graph.flops_per_sample - attention) + attention / 2 * (1 + 2.5 / 0.85)
    assert got.step_seconds == pytest.approx(16 * flops / 5e11)
    assert got.mfu == pytest.approx(3 * graph.flops_per_sample * 16 / (got.step_seconds * 1e12))
    assert got.tokens_per_second == pytest.approx(16 * 128 / got.step_seconds)
    assert got.times.total == got.step_seconds
    assert got.binds.startswith("matrix products: 100%")


def test_parts_that_go_round_hide_behind_their_products():
    ring, whole = (Plan.from_degrees(mp=8, sequence_parallel=True, overlap={"mp": how}) for how in ("ring", "none"))
    assert predict(GPT, ring, EIGHT, 16).step_seconds < predict(GPT, whole, EIGHT, 16).step_seconds
    shared = replace(EIGHT, shared=8)
    assert predict(GPT, ring, shared, 16).step_seconds == predict(GPT, whole, shared, 16).step_seconds


def test_recompute_runs_forwards_again_but_not_what_a_compiler_prunes():
    kind = replace(KIND, bandwidth=1e30)
    alone = Cluster(kind, 1, ())
    times = {
        (mode, prunes): predict(GPT, Plan.from_degrees(recompute=mode), alone, 16, Training(prunes=prunes)).times
        for mode in ("none", "core_attn", "full_attn", "full")
        for prunes in (True, False)
    }
    layer = GPT.graph().blocks[1]
    down = next(op for op in layer.operations if op.name == "down").flops
    out = next(op for op in layer.operations if op.name == "out").flops
    core = next(op for op in layer.operations if op.kind == "attention").flops / 2
    whole = sum(op.flops * op.executed for op in layer.operations)
    per = 8 * 16 / 5e11
    assert times["none", False].recompute == 0
    assert times["core_attn", False].recompute == pytest.approx(per * core)
    assert times["full", False].recompute == pytest.approx(per * whole)
    assert times["full", True].recompute == pytest.approx(per * (whole - down))
    assert times["full_attn", False].recompute - times["full_attn", True].recompute == pytest.approx(per * out)


def test_gradients_are_summed_once_and_sharded_states_gathered():
    """4-byte gradients over a ring of 8: 2 x 7/8; ZeRO-1 scatters them and gathers 2-byte parameters."""
    training = Training(overlap=())
    count = GPT.num_parameters
    dp = predict(GPT, Plan.from_degrees(dp=8, num_microbatches=2), EIGHT, 16, training)
    assert dp.times.exposed == pytest.approx({"dp": 2 * 7 / 8 * 4 * count / 1e10})
    one = predict(GPT, Plan.from_degrees(sharding=8, num_microbatches=2), EIGHT, 16, training)
    assert one.times.exposed == pytest.approx({"sharding": 7 / 8 * (4 + 2) * count / 1e10})
    two = predict(GPT, Plan.from_degrees(sharding=8, sharding_stage=2, num_microbatches=2), EIGHT, 16, training)
    assert two.times.exposed == pytest.approx({"sharding": 7 / 8 * (2 * 4 + 2) * count / 1e10})
    three = predict(GPT, Plan.from_degrees(sharding=8, sharding_stage=3, num_microbatches=2), EIGHT, 16, training)
    assert three.times.exposed == pytest.approx({"sharding": 2 * 7 / 8 * (2 + 2 + 4) * count / 1e10})
    both = predict(GPT, Plan.from_degrees(dp=2, sharding=4, num_microbatches=2), EIGHT, 16, training)
    expected = (3 / 4 * (4 + 2) * count + 2 * 1 / 2 * 4 * count / 4) / 1e10
    assert sum(both.times.exposed.values()) == pytest.approx(expected)


def test_communication_hides_beside_arithmetic():
    apart, beside = (
        predict(GPT, Plan.from_degrees(dp=8), EIGHT, 64, Training(overlap=overlap)) for overlap in ((), ("dp",))
    )
    assert sum(beside.times.exposed.values()) < sum(apart.times.exposed.values())
    blocks = GPT.layers + 2
    assert sum(beside.times.exposed.values()) >= sum(apart.times.exposed.values()) / blocks * 0.99


def test_experts_are_summed_over_the_devices_that_share_them():
    moe = ModelShape(256, 4, 8, 64, 512, 1024, experts=4, experts_per_token=1)
    graph = moe.graph()
    expert = sum(4 * v.size for b in graph.blocks for v in b.parameters if "expert" in v.dims)
    rest = moe.num_parameters - expert
    got = predict(moe, Plan.from_degrees(dp=2, ep=4), EIGHT, 16, Training(overlap=()))
    expected = (2 * 7 / 8 * 4 * rest + 2 * 1 / 2 * 4 * expert / 4) / 1e10
    assert got.times.exposed["dp"] == pytest.approx(expected)
    assert got.times.exposed["ep"] > 0


def test_uneven_stages_wait_for_the_slowest():
    """A head with a large vocabulary makes the last stage the slowest."""
    wide = replace(GPT, vocab=65536)
    plan = Plan.from_degrees(pp=4, num_microbatches=32)
    even = predict(GPT, plan, Cluster(KIND, 4, EIGHT.links), 32, Training(cut="layers"))
    skewed = predict(wide, plan, Cluster(KIND, 4, EIGHT.links), 32, Training(cut="layers"))
    assert skewed.step_seconds > 1.5 * even.step_seconds
    assert skewed.times.bubble > even.times.bubble


def test_offload_costs_what_the_host_moves():
    plain, state, act = (
        predict(GPT, Plan.from_degrees(offload=offload), ONE, 8) for offload in ((), ("state",), ("act",))
    )
    assert plain.times.offload == 0
    assert state.times.offload == pytest.approx(2 * 12 * GPT.num_parameters / KIND.host)
    # activations move beside arithmetic, of devices that share their units one after the other
    slow = replace(ONE, device=replace(KIND, host=KIND.host / 1e4))
    assert 0 == act.times.offload < predict(GPT, Plan.from_degrees(offload=("act",)), slow, 8).times.offload
    # gradients go where parameters go
    param = predict(GPT, Plan.from_degrees(offload=("param",)), ONE, 8)
    assert param.times.offload == pytest.approx(2 * (4 + 2) * GPT.num_parameters / KIND.host)


def test_matrix_units_are_filled_up_and_narrow_heads_are_slow():
    def compute(**kind):
        return predict(GPT, Plan(), replace(ONE, device=replace(KIND, **kind)), 8).times.compute

    assert compute(tile=128) == compute()  # 512, 1,536 and 2,048 are whole tiles
    assert compute(tile=96) > compute()
    assert compute(narrow_heads=0.5) > compute()  # its heads have 64 numbers


def test_adapters_cost_bytes_beside_frozen_products():
    plain, attention, every = (
        predict(GPT, Plan(), ONE, 8, Training(trains=trains, adapted=adapted)).times.compute
        for trains, adapted in (("all", "all"), ("adapters", "attention"), ("adapters", "all"))
    )
    assert attention < every < plain


def test_casts_are_fused_into_what_makes_their_operands():
    kind = replace(ONE, device=replace(KIND, flops={**KIND.flops, "float8": 1e13}))
    apart, fused = (
        predict(GPT, Plan(), kind, 8, Training(products="float8", casts=casts)).times.compute
        for casts in ("apart", "fused")
    )
    assert fused < apart


def test_work_on_a_processor():
    """Bytes come on top of arithmetic; few devices reach a part of attention's rate; each gather is a message."""
    alone, shared = Arithmetic(KIND, Training()), Arithmetic(KIND, Training(), 1, True)
    flops, moved = 1e9, 1e8  # 2 ms at half of 1e12, 2 ms at half of 1e11
    assert (alone.product(flops, moved, 0.5), shared.product(flops, moved, 0.5)) == pytest.approx((2e-3, 4e-3))
    block = next(block for block in GPT.graph().blocks if block.part == "layer")
    op = next(op for op in block.operations if op.kind == "attention")
    kind = replace(KIND, few=((1.0, 0.5), (8.0, 1.0)))
    one, all_of_them = (
        operation_seconds(op, {}, cuts_of(Plan()), 1e6, Arithmetic(kind, Training(), crowd)) for crowd in (1, 8)
    )
    assert all_of_them.forward == pytest.approx(4 * one.forward)  # eight times the work at twice the rate
    link = (Link("near", 8, 1e10, 1e-5),)
    far, near = (group(Cluster(KIND, 8, link, shared=n), Plan.from_degrees(dp=8).mesh, ("dp",)) for n in (1, 8))
    assert near.all_gather(1e6, 10) - near.all_gather(1e6) == pytest.approx(9 * 7e-5)
    assert far.all_gather(1e6, 10) == far.all_gather(1e6)
    assert (near.all_gather(8e6), far.all_gather(8e6)) == pytest.approx((8e-4 + 7e-5, 7e-4 + 7e-5))


def test_devices_that_share_their_units_are_together_as_fast_as_one():
    """Work is never below all of it over the units; a bubble costs nothing; what all repeat costs as often."""
    alone = predict(GPT, Plan(), ONE, 16)
    shared = Cluster(KIND, 8, (Link("near", 8, 1e30, 0.0),), shared=8)
    spread = predict(GPT, Plan.from_degrees(dp=8), shared, 16)
    assert spread.times.compute == pytest.approx(alone.times.compute, rel=0.2)  # weights are read by each
    assert spread.times.compute >= alone.times.compute
    assert spread.times.optimizer == pytest.approx(8 * alone.times.optimizer)
    piped = predict(GPT, Plan.from_degrees(pp=8, num_microbatches=8), shared, 16)
    assert piped.times.bubble == pytest.approx(0.0)
    assert piped.times.optimizer == pytest.approx(alone.times.optimizer)
    tasks = predict(GPT, Plan.from_degrees(pp=8, num_microbatches=8), replace(shared, task=1e-3), 16)
    assert tasks.times.bubble == pytest.approx(1e-3 * 8 * 16)
    assert spread.mfu == pytest.approx(alone.mfu * alone.step_seconds / spread.step_seconds)


SHAPES = st.sampled_from(
    [
        {"dp": 8},
        {"mp": 8},
        {"sharding": 8, "sharding_stage": 3},
        {"pp": 4, "dp": 2, "num_microbatches": 8},
        {"mp": 2, "sep": 2, "dp": 2},
        {"mp": 4, "sequence_parallel": True, "sharding": 2},
        {"pp": 2, "mp": 4, "num_microbatches": 16, "schedule": "VPP", "virtual_stages": 2},
    ]
)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(["none", "core_attn", "full_attn", "full"]), st.floats(1.0, 8.0))
def test_more_is_never_slower(degrees, recompute, factor):
    plan = Plan.from_degrees(recompute=recompute, **degrees)
    machine = cluster_of_kind("a100", 8)
    base = predict(GPT, plan, machine, 64).step_seconds * (1 + 1e-12)  # sums in another order
    device = machine.device
    for changed in (
        replace(device, bandwidth=device.bandwidth * factor),
        replace(device, flops={dtype: rate * factor for dtype, rate in device.flops.items()}),
        replace(device, launch=device.launch / factor),
    ):
        assert predict(GPT, plan, replace(machine, device=changed), 64).step_seconds <= base
    links = tuple(replace(link, bandwidth=link.bandwidth * factor) for link in machine.links)
    assert predict(GPT, plan, replace(machine, links=links), 64).step_seconds <= base
    links = tuple(replace(link, latency=link.latency / factor) for link in machine.links)
    assert predict(GPT, plan, replace(machine, links=links), 64).step_seconds <= base


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.integers(1, 4))
def test_more_work_is_never_faster(degrees, more):
    plan = Plan.from_degrees(**degrees)
    machine = cluster_of_kind("h100", 8)
    base = predict(GPT, plan, machine, 64).step_seconds
    assert predict(GPT, plan, machine, 64 * more).step_seconds >= base
    assert predict(replace(GPT, layers=8 * more), plan, machine, 64).step_seconds >= base
    again = predict(GPT, replace(plan, recompute="full"), machine, 64)
    assert again.step_seconds >= base
    assert again.mfu <= predict(GPT, plan, machine, 64).mfu < 1


def test_a_stage_of_little_work_is_the_last_if_it_sums_most():
    """The head's stage has most work but, tied, nothing to sum."""
    shape = ModelShape(
        4096, 6, 32, 4096, 50257, 16384, gated=True, biases=False, learned_positions=False, rms_norm=True
    )
    plan = Plan.from_degrees(dp=4, pp=8, sep=4, num_microbatches=64, schedule="FThenB", recompute="full_attn")
    each = Training(dtype="float16", fusion="none", sums="program")
    machine = cluster_of_kind("a100-40g", 128)
    found = predict(shape, plan, machine, 256, each)
    assert predict(replace(shape, vocab=2 * 50257), plan, machine, 256, each).step_seconds >= found.step_seconds
    assert found.times.bubble >= 0


def test_a_sum_for_each_microbatch_hides_beside_that_one_alone():
    """Of many microbatches under VPP a sum once a step has the room; one for each of them does not."""
    shape = replace(GPT, hidden=2048, layers=30, heads=16, seq=512, vocab=32000, ffn=8192, head_dim=0, kv_heads=0)
    plan = Plan.from_degrees(sharding=4, sharding_stage=2, pp=4, num_microbatches=8, schedule="VPP", virtual_stages=4)
    machine = cluster_of_kind("v100", 16)
    for sums in ("program", "once"):
        training = Training(dtype="float16", sums=sums)
        found = [predict(shape, plan, machine, 32 * rows, training).step_seconds for rows in (1, 2, 4, 8)]
        assert found == sorted(found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_pipeline_sums_over_dp_once_a_step(stage):
    """Twice as many microbatches, no more seconds of sums; ZeRO 2 as ZeRO 1."""
    machine, training = cluster_of_kind("a100", 64), Training(sums="program")

    def exposed(microbatches, *, stage=stage, training=training):
        sharded = {"sharding": 2, "sharding_stage": stage} if stage else {}
        plan = Plan.from_degrees(dp=4 if stage else 8, pp=8, num_microbatches=microbatches, **sharded)
        return predict(GPT, plan, machine, 64 * microbatches, training).times.exposed

    assert exposed(16)["dp"] == pytest.approx(exposed(32)["dp"])
    if stage == 2:
        assert exposed(16) == pytest.approx(exposed(16, stage=1))
    else:
        assert exposed(16) == pytest.approx(exposed(16, training=Training(sums="once")))


def test_a_faster_device_is_never_slower():
    """Sums over dp and over sharding share what hides them."""
    plan, machine = Plan.from_degrees(dp=4, sharding=4, sharding_stage=1), cluster_of_kind("a100-40g", 16)
    shape = ModelShape(4096, 16, 32, 1024, 50257, 16384)
    seconds = []
    for factor in (0.25, 0.5, 1, 2, 4):
        flops = {dtype: rate * factor for dtype, rate in machine.device.flops.items()}
        faster = replace(machine, device=replace(machine.device, flops=flops))
        seconds.append(predict(shape, plan, faster, 16, Training()).step_seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_a_step_waits_for_the_slowest_of_its_devices():
    """As many draws say: the largest of n normal numbers, over that of the 8 devices that curves are of."""
    draws = np.random.default_rng(0).normal(1.0, 0.02, (4000, 64))
    for count in (4, 8, 16, 64):
        machine = replace(cluster_of_kind("h100", count), device=replace(device_kind("h100"), variation=0.02))
        want = max(1.0, draws[:, :count].max(1).mean() / draws[:, :8].max(1).mean())
        # 0.02 / sqrt(4000) is the deviation of either mean
        assert slowness(machine) == pytest.approx(want, abs=4 * 0.02 / 4000**0.5)
        plan = Plan.from_degrees(dp=count)
        times = predict(GPT, plan, machine, count).times
        assert times.slowest == pytest.approx((slowness(machine) - 1) * (times.compute + times.recompute))
        alike = predict(GPT, plan, replace(machine, device=replace(machine.device, variation=0.0)), count).times
        assert times.total == pytest.approx(alike.total + times.slowest)


def test_a_deeper_model_takes_no_more_calls():
    """Thousands of plans are searched, so the blocks of a kind are counted, not walked over."""

    def calls(layers: int) -> int:
        model = ModelShape(12288, layers, 96, 2048, 51200, 49152)
        plan = Plan.from_degrees(pp=8, mp=8, dp=16, num_microbatches=96, schedule="VPP", virtual_stages=3)
        predict(model, plan, machine, 1536)  # what is cached is no part of it
        count = 0

        def counts(frame: object, event: str, _: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(counts)
        try:
            predict(model, plan, machine, 1536)
        finally:
            sys.setprofile(None)
        return count

    machine = cluster_of_kind("a100", 1024)
    assert calls(96) <= calls(24)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: predict(GPT, Plan.from_degrees(dp=4), EIGHT, 16), PlacementError, "mesh dp4 needs 4 devices, 8 given"),
        (lambda: predict(GPT, Plan.from_degrees(dp=8), EIGHT, 12), PlacementError, "batch of 12 does not divide"),
        (
            lambda: predict(GPT, Plan(), ONE, 8, Training("float16")),
            ConfigError,
            "device kind 'made up' has no FLOP/s of dtype 'float16'; it multiplies .*: choose by train.amp_dtype",
        ),
    ],
)
def test_refuses_what_it_cannot_do(call, error, message):
    with pytest.raises(error, match=message):
        call()
