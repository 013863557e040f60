"""What a compiled step communicates: HLO read right, and volumes equal to the formulas on every plan."""

import json
import math
import sys

import numpy as np
import pytest

from polyreme.amp import auto_cast
from polyreme.core import rng
from polyreme.distributed.comm_report import Report, examine, find_collectives, workload_of
from polyreme.distributed.comm_report.collectives import origin_of, wire_share
from polyreme.distributed.comm_report.groups import axes_of, axes_of_pairs, parse_groups, parse_pairs
from polyreme.distributed.comm_report.hlo import Module, parse_instruction, parse_shapes
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.mesh import MeshShape, Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.experts.deepseek_v3 import DeepseekV3, DeepseekV3Config
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.nn import Linear
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.optimizer import AdamW
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.planning import communication
from tests.distributed.test_placement import PLANS

CASES = {
    **{f"gpt {name}": ("gpt", plan) for name, plan in PLANS.items()},
    "gpt ulysses": ("gpt", Plan.from_degrees(sharding=2, sep=2, mp=2, sharding_stage=2, sep_attention="ulysses")),
    "gpt ring": ("gpt", Plan.from_degrees(dp=2, sep=4, sep_attention="ring")),
    "gpt gather": ("gpt", Plan.from_degrees(dp=2, sep=4, sep_attention="gather"), {"num_layers": 1}),
    "llama usp": ("llama", Plan.from_degrees(dp=2, sep=4, sep_order="zigzag"), {"num_layers": 1}),
    "gpt that keeps its order": (
        "gpt",
        Plan.from_degrees(dp=2, sep=4, sep_attention="gather", sep_order="zigzag"),
        {"num_layers": 1, "dropout": 0.1},
    ),
    "llama mp": ("llama", PLANS["mp2_dp4"]),
    "llama zero3": ("llama", PLANS["zero3_dp_mp"]),
    "llama zero3 sequence": ("llama", PLANS["zero3_mp_sequence"]),
    "llama ring of parts": (
        "llama",
        Plan.from_degrees(dp=2, mp=4, sequence_parallel=True, overlap={"mp": "ring"}),
        {"num_layers": 1, "num_kv_heads": 4},
    ),
    "llama rings of gradients": (
        "llama",
        Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=3, overlap={"sharding": "ring"}),
        {"num_layers": 1},
    ),
    "deepseek a dense layer": (
        "deepseek_v3",
        Plan.from_degrees(sep=2, mp=2, ep=2),
        # no balance: what counts choices, a few bytes a layer, is in no formula
        {"v_head_dim": 12, "q_lora_rank": 20, "bias_rate": 0.0, "sequence_loss": 0.0},
    ),
    "mixtral gather": ("mixtral", Plan.from_degrees(dp=2, mp=2, ep=2), {"num_layers": 1}),
    "mixtral padded in parts": ("mixtral", Plan.from_degrees(dp=2, ep=4, overlap={"moe": 2}), {"num_layers": 1}),
    "mixtral expert choice": (
        "mixtral",
        Plan.from_degrees(dp=2, ep=4, overlap={"moe": 2}),
        {"num_layers": 1, "routing": "expert_choice"},
    ),
    "mixtral balanced": ("mixtral", Plan.from_degrees(dp=2, ep=4, expert_dispatch="balanced"), {"num_layers": 1}),
    "mixtral two levels": (
        "mixtral",
        Plan.from_degrees(dp=2, mp=2, ep=2, expert_axes=("dp", "ep"), expert_all_to_all="two_level"),
        {"num_layers": 1},
    ),
    "mixtral folded": (
        "mixtral",
        Plan.from_degrees(sharding=2, sep=2, ep=2, sharding_stage=3, expert_axes=("sep", "ep")),
        {"num_layers": 1},
    ),
}


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


def step_of(family, plan, **sizes):
    """(captured training step, its arguments, model)."""
    rng.seed(3)
    families = {"gpt": (GPTConfig, GPT), "llama": (LlamaConfig, Llama), "mixtral": (MixtralConfig, Mixtral)}
    config, make = (families | {"deepseek_v3": (DeepseekV3Config, DeepseekV3)})[family]
    model = make(config.nano(**sizes))
    bound = apply_plan(plan, model)
    optimizer = AdamW(1e-2, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(1.0))

    @to_static
    def step(tokens, labels):
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    rows = np.zeros((16, model.config.seq_len), np.int64)
    return step, [shard_batch(bound, rows, "batch", None) for _ in range(2)], model


# reading HLO


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("channel_id=3", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4], use_global_device_ids=true", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['x'=2,'y'=2] {'y'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['x'=2,'y'=2] {'x','y'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['x'=4] {'x':(2)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['x'=4] {'x':(1)2}", ((0, 2), (1, 3))),
    ],
)
def test_every_notation_of_groups(text, want):
    assert parse_groups(text, 4) == want


def test_an_unknown_notation_is_refused():
    with pytest.raises(ConfigError, match=r"replica_groups=<new>.*report"):
        parse_groups("replica_groups=<new>", 4)


def test_axes_of_groups():
    mesh = MeshShape(dp=2, sharding=2, mp=2)
    for axes in [("dp",), ("mp",), ("dp", "mp"), ("dp", "sharding", "mp")]:
        assert axes_of(tuple(mesh.groups(*axes)), mesh) == axes
    assert axes_of(((0,), (1,)), mesh) == ()
    assert axes_of(((0, 3), (1, 2), (4, 7), (5, 6)), mesh) is None
    assert axes_of_pairs(parse_pairs("source_target_pairs={{0,0},{0,2},{2,0}}"), mesh) == ("sharding",)


def test_instructions_and_shapes():
    line = "ROOT %a = (f32[4,2]{1,0:T(8,128)S(1)}, /*index=1*/bf16[3]) all-reduce(f32[4,2] %b, %c), channel_id=1"
    found = parse_instruction(line)
    assert found is not None
    assert (found.name, found.opcode, found.operands) == ("a", "all-reduce", ("b", "c"))
    assert [s.nbytes for s in found.shapes] == [32, 6]
    assert [s.nbytes for s in parse_shapes("(pred[5], s4[3], f8e4m3fn[2], c128[1], token[])")] == [5, 2, 2, 16, 0]
    assert parse_instruction("}") is None


HLO = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%body (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t = (s32[], f32[8,8]) parameter(0)
  %x = f32[8,8] get-tuple-element(%t), index=1
  %r = f32[8,8] all-reduce(%x), channel_id=1, replica_groups=[2,2]<=[4], use_global_device_ids=true, to_apply=%add
}

%condition (t: (s32[], f32[8,8])) -> pred[] {
  %t.1 = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%t.1), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8,8], q: f32[4,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %q = f32[4,8] parameter(1)
  %start = (f32[4,8], f32[8,8]) all-gather-start(%q), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), GLOBAL
  %d = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[8,8] all-gather-done(%start)
  %sum = f32[8,8] all-reduce(%done), channel_id=3, replica_groups={{0,1,2,3}}, GLOBAL, to_apply=%add
  %i0 = s32[] constant(0)
  %tuple = (s32[], f32[8,8]) tuple(%i0, %sum)
  %loop = (s32[], f32[8,8]) while(%tuple), condition=%condition, body=%body
  %known = (s32[], f32[8,8]) while(%tuple), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %half = (f32[2,8], f32[2,8]) all-to-all(%q, %q), channel_id=4, replica_groups={{0,1},{2,3}}
  %move = f32[4,8] collective-permute(%q), channel_id=5, source_target_pairs={{0,1},{1,0},{2,2},{3,3}}
  %own = f32[8,8] all-reduce(%p), replica_groups={{0}}, to_apply=%add
  ROOT %out = f32[8,8] get-tuple-element(%loop), index=1
}
""".replace("GLOBAL", "use_global_device_ids=true")


def test_a_program_by_hand():
    found = {c.name: c for c in find_collectives(HLO, MeshShape(dp=2, mp=2), balance=1.0)}
    facts = {n: (c.kind, c.axes, c.payload, c.times, round(c.total_wire)) for n, c in found.items() if n != "r"}
    assert facts == {
        "start": ("all-gather", ("dp",), 256, 1, 128),
        "sum": ("all-reduce", ("dp", "mp"), 256, 1, 384),
        "half": ("all-to-all", ("mp",), 256, 1, 128),
        "move": ("collective-permute", ("mp",), 128, 1, 64),
    }
    loops = [c for c in find_collectives(HLO, MeshShape(dp=2, mp=2)) if c.name == "r"]
    assert [(c.times, c.counted, c.total_wire) for c in loops] == [(5, True, 5 * 256), (3, True, 3 * 256)]


def test_overlap_depends_on_the_balance():
    # the product is 2 * 8^3 = 1024 FLOP; the gather moves 128 bytes beside it, the sum that follows 384
    by_balance = {
        balance: {c.name: c.overlap for c in find_collectives(HLO, MeshShape(dp=2, mp=2), balance)}
        for balance in (1.0, 4.0, 100.0)
    }
    assert by_balance[1.0]["start"] == by_balance[4.0]["start"] == "overlapped"
    assert by_balance[100.0]["start"] == "critical"
    # the sum is synchronous, but the product neither feeds it nor waits for it
    assert [by_balance[b]["sum"] for b in (1.0, 4.0)] == ["free", "critical"]


def test_an_unknown_loop_counts_once_and_says_so():
    text = HLO.replace("%n = s32[] constant(5)", "%n = s32[] get-tuple-element(%t.1), index=0")
    (first, _) = [c for c in find_collectives(text, MeshShape(dp=2, mp=2)) if c.name == "r"]
    assert (first.times, first.counted) == (1, False)


def test_a_loop_of_a_tpu_whose_counter_is_two_words():
    text = """HloModule m
%body (s: (u32[], u32[], f32[8,8])) -> (u32[], u32[], f32[8,8]) {
  %s = (u32[], u32[], f32[8,8]) parameter(0)
  %x = f32[8,8] get-tuple-element(%s), index=2
  %d = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (u32[], u32[], f32[8,8]) tuple(%s, %s, %d)
}
%condition (c: (u32[], u32[], f32[8,8])) -> pred[] {
  %c = (u32[], u32[], f32[8,8]) parameter(0)
  %zero = u32[] constant(0)
  %n = u32[] constant(16)
  %none = s32[] constant(0)
  %low = u32[] get-tuple-element(%c), index=0
  %high = u32[] get-tuple-element(%c), index=1
  %same = pred[] compare(%high, %zero), direction=EQ
  %below = pred[] compare(%low, %n), direction=LT
  %both = pred[] and(%same, %below)
  %signed = s32[] bitcast-convert(%high)
  %negative = pred[] compare(%signed, %none), direction=LT
  ROOT %r = pred[] or(%negative, %both)
}
ENTRY %main (p: (u32[], u32[], f32[8,8])) -> (u32[], u32[], f32[8,8]) {
  %p = (u32[], u32[], f32[8,8]) parameter(0)
  ROOT %w = (u32[], u32[], f32[8,8]) while(%p), condition=%condition, body=%body
}
"""
    module = Module(text)
    loop = module.entry.instructions["w"]
    assert (module.trips(loop), module.flop(loop, module.entry)) == (16, 16 * 2 * 8**3)
    # of two bounds neither is taken
    twice = Module(text.replace("%none = s32[] constant(0)", "%none = s32[] constant(4)"))
    assert twice.trips(twice.entry.instructions["w"]) is None


def test_a_tpu_reduce_scatter_is_a_fusion():
    text = """HloModule m, num_partitions=4
%all-reduce-scatter.1 (i: f32[8]) -> f32[2] {
  %i = f32[8] parameter(0)
  %r = f32[8] all-reduce(%i), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true, to_apply=%add
  ROOT %s = f32[2] dynamic-slice(%r), dynamic_slice_sizes={2}
}
ENTRY %main (p: f32[8]) -> f32[2] {
  %p = f32[8] parameter(0)
  ROOT %f = f32[2] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    (found,) = find_collectives(text, MeshShape(dp=4))
    assert (found.kind, found.axes, found.payload, found.wire) == ("reduce-scatter", ("dp",), 32, 24)


def test_rows_of_a_ragged_exchange_hide_behind_a_kernel():
    text = """HloModule m, is_scheduled=true, num_partitions=2
ENTRY %main (p: f32[8], q: s32[2]) -> f32[8] {
  %p = f32[8] parameter(0)
  %q = s32[2] parameter(1)
  %room = f32[64] broadcast(%p), dimensions={0}
  %s = (f32[8], f32[64]) ragged-all-to-all-start(%p, %room, %q, %q, %q, %q), channel_id=1, replica_groups={{0,1}}
  %k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"FLOPS"}}
  %d = f32[64] ragged-all-to-all-done(%s)
  ROOT %r = f32[8] add(%k, %d)
}
"""
    for flop, overlap in ((15, "critical"), (16, "overlapped")):
        (found,) = find_collectives(text.replace("FLOPS", str(flop)), MeshShape(ep=2), balance=1)
        assert (found.kind, found.payload, found.wire, found.overlap) == ("ragged-all-to-all", 32, 16, overlap)


@pytest.mark.parametrize(
    ("left", "kernel", "out", "attributes", "flop"),
    [
        # a product, a batch of 8 x 4 of them, and one summed over a batch of 8: as the TPU compiler writes them
        ((64, 96), (96, 32), (64, 32), "dim_labels=bf_io->bf", 2 * 64 * 96 * 32),
        ((8, 4, 16, 32), (8, 4, 64, 32), (8, 4, 16, 64),
         "window={size=8x4 stride=7x3 lhs_dilate=8x4}, dim_labels=01bf_01oi->01bf", 2 * 8 * 4 * 16 * 32 * 64),
        ((8, 16, 32), (8, 16, 64), (32, 64, 1), "window={size=8}, dim_labels=0fb_0io->bf0", 2 * 8 * 16 * 32 * 64),
        # images: 3 x 3 with padding, of which each border loses a row; two groups have half the channels each
        ((2, 8, 8, 6), (3, 3, 6, 5), (2, 8, 8, 5), "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
         2 * 2 * 22 * 22 * 6 * 5),
        ((2, 8, 6), (3, 3, 4), (2, 3, 4), "window={size=3 stride=2}, dim_labels=b0f_0io->b0f, feature_group_count=2",
         2 * 2 * 9 * 3 * 4),
    ],
)  # fmt: skip
def test_work_of_convolutions(left, kernel, out, attributes, flop):
    shapes = [f"f32[{','.join(map(str, dims))}]" for dims in (left, kernel, out)]
    module = Module(
        f"HloModule m\nENTRY %main (p: {shapes[0]}, q: {shapes[1]}) -> {shapes[2]} {{\n"
        f"  %p = {shapes[0]} parameter(0)\n  %q = {shapes[1]} parameter(1)\n"
        f"  ROOT %c = {shapes[2]} convolution(%p, %q), {attributes}\n}}\n"
    )
    assert module.flop(module.entry.instructions["c"], module.entry) == flop


def test_a_tpu_gather_that_fusions_drive_is_one_collective():
    text = """HloModule m, is_scheduled=true, num_partitions=2
%begin (i: f32[8]) -> (f32[16], u32[]) {
  %i = f32[8] parameter(0)
  %g = f32[16] all-gather(%i), channel_id=3, replica_groups=[1,2]<=[2], use_global_device_ids=true, dimensions={0}
  ROOT %c = (f32[16], u32[]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}
%beside (i.1: f32[8], a: f32[4,5], b: f32[5,2]) -> (f32[4,2], u32[]) {
  %i.1 = f32[8] parameter(0)
  %a = f32[4,5] parameter(1)
  %b = f32[5,2] parameter(2)
  %d = f32[4,2] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %g.1 = f32[16] all-gather(%i.1), channel_id=3, replica_groups=[1,2]<=[2], use_global_device_ids=true, dimensions={0}
  ROOT %t = (f32[4,2], u32[]) tuple(%d, %g.1)
}
%end (i.2: f32[8]) -> f32[16] {
  %i.2 = f32[8] parameter(0)
  %g.2 = f32[16] all-gather(%i.2), channel_id=3, replica_groups=[1,2]<=[2], use_global_device_ids=true, dimensions={0}
  ROOT %c.2 = f32[16] custom-call(%g.2), custom_call_target="AsyncCollectiveDone"
}
ENTRY %main (p: f32[8], x: f32[4,5], y: f32[5,2]) -> f32[16] {
  %p = f32[8] parameter(0)
  %x = f32[4,5] parameter(1)
  %y = f32[5,2] parameter(2)
  %f = (f32[16], u32[]) fusion(%p), kind=kCustom, calls=%begin
  %f.1 = (f32[4,2], u32[]) fusion(%p, %x, %y), kind=kCustom, calls=%beside
  ROOT %f.2 = f32[16] fusion(%p), kind=kCustom, calls=%end
}
"""
    # 64 bytes gathered, of which a device sends 32, beside a product of 80 FLOP
    for balance, overlap in ((2.5, "overlapped"), (6, "critical")):
        (gather,) = find_collectives(text, MeshShape(sharding=2), balance)
        assert (gather.kind, gather.payload, gather.wire, gather.overlap) == ("all-gather", 64, 32, overlap)
        assert gather.is_async
    # or beside what a loop computes
    loop = """%body (s: (f32[8], f32[4,5], f32[5,2])) -> (f32[8], f32[4,5], f32[5,2]) {
  %s = (f32[8], f32[4,5], f32[5,2]) parameter(0)
  %i.3 = f32[8] get-tuple-element(%s), index=0
  %a.3 = f32[4,5] get-tuple-element(%s), index=1
  %b.3 = f32[5,2] get-tuple-element(%s), index=2
  %f.3 = (f32[4,2], u32[]) fusion(%i.3, %a.3, %b.3), kind=kCustom, calls=%beside
  ROOT %r.3 = (f32[8], f32[4,5], f32[5,2]) tuple(%i.3, %a.3, %b.3)
}
%until (s.1: (f32[8], f32[4,5], f32[5,2])) -> pred[] {
  %s.1 = (f32[8], f32[4,5], f32[5,2]) parameter(0)
  ROOT %c.3 = pred[] constant(true)
}
ENTRY"""
    inside = text.replace("ENTRY", loop).replace(
        "%f.1 = (f32[4,2], u32[]) fusion(%p, %x, %y), kind=kCustom, calls=%beside",
        "%w = (f32[8], f32[4,5], f32[5,2]) tuple(%p, %x, %y)\n"
        "  %f.1 = (f32[8], f32[4,5], f32[5,2]) while(%w), condition=%until, body=%body",
    )
    (gather,) = find_collectives(inside, MeshShape(sharding=2), 2.5)
    assert (gather.payload, gather.times, gather.overlap) == (64, 1, "overlapped")


def test_combined_parts_are_told_apart_by_what_computed_them():
    text = """HloModule m, num_partitions=2
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  %x = f32[8] negate(%p), metadata={op_name="jit(f)/Net/a/jit(linear_grad)/transpose(jvp())/dot_general"}
  %y = f32[8] negate(%p), metadata={op_name="jit(f)/jit(adamw_update)/reduce_sum"}
  ROOT %r = (f32[8], f32[8]) all-reduce(%x, %y), channel_id=1, replica_groups=[1,2]<=[2], use_global_device_ids=true
}
"""
    (found,) = find_collectives(text, MeshShape(dp=2))
    assert [(p.origin.phase, p.origin.layer) for p in found.parts] == [("backward", "Net.a"), ("update", "")]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("jit(step)/GPT/blocks.0/jit(linear)/dot_general", ("forward", "GPT.blocks.0", "linear", "dot_general")),
        ("jit(step)/GPT/jit(linear_grad)/transpose(jvp())/add", ("backward", "GPT", "linear_grad", "add")),
        ("jit(step)/jit(adamw_update)/sub", ("update", "", "adamw_update", "sub")),
        ("jit(step)/GPT/jit(loss)/jvp()/while/body/closed_call/add", ("forward", "GPT", "loss", "add")),
        ("", ("forward", "", "", "")),
    ],
)
def test_where_an_instruction_comes_from(name, want):
    origin = origin_of(name)
    assert (origin.phase, origin.layer, origin.kernel, origin.primitive) == want


def test_ring_bytes_by_hand():
    # by the definition of the ring: each of n devices sends a piece of 1/n in each of 2 (n - 1) steps
    assert [wire_share("all-reduce", n) for n in (1, 2, 8)] == [0, 1, 1.75]
    assert [wire_share("reduce-scatter", n) for n in (1, 2, 8)] == [0, 0.5, 0.875]
    assert wire_share("collective-permute", 2) == 1


# names of layers in programs


def test_layers_are_named_in_both_directions_and_cost_no_retrace():
    step, arguments, _ = step_of("gpt", PLANS["mp2_dp4"])
    text = step.compiled(*arguments).as_text()
    step(*arguments)
    step(*arguments)
    assert step.retraces == ["first call"]
    names = {(o.phase, o.layer) for o in map(origin_of, {i.op_name for c in _all(text) for i in c})}
    for layer in ("GPT.tokens", "GPT.blocks.0.attention.qkv", "GPT.blocks.1.ffn.down", "GPT.norm"):
        assert {("forward", layer), ("backward", layer)} <= names


def test_autocast_gathers_a_sequence_once_for_all_maps_of_it():
    clear_plan()
    model = Llama(LlamaConfig.nano(num_layers=1, num_kv_heads=4))
    layout = apply_plan(Plan.from_degrees(dp=2, mp=4, sequence_parallel=True), model)

    @to_static
    def step(tokens, labels):
        with auto_cast(dtype="bfloat16"):
            loss = model(tokens, labels)
        loss.backward()
        return loss, [p.grad for p in model.parameters()]

    rows = shard_batch(layout, np.zeros((4, model.config.seq_len), np.int64), "batch", None)
    text = step.compiled(rows, rows).as_text()
    gathers = [i.op_name for c in _all(text) for i in c if i.opcode.startswith("all-gather")]
    layers = {(o.phase, o.layer.removeprefix("Llama.blocks.0.")) for o in map(origin_of, gathers)}
    assert {("forward", "attention.q"), ("forward", "ffn.gate")} <= layers
    assert not {layer for _, layer in layers} & {"attention.k", "attention.v", "ffn.up"}


def _all(text):
    return Module(text).computations.values()


def test_a_layer_its_caller_does_not_hold_has_its_class_as_name():
    inner = Linear(2, 2)
    text = to_static(lambda x: inner(x)).compiled(to_tensor(np.ones((1, 2), "float32"))).as_text()
    assert "/Linear/" in text


@pytest.mark.slow
def test_compiled_leaves_the_state_alone():
    step, arguments, model = step_of("gpt", PLANS["mp2_dp4"])
    before = model.norm.weight.numpy()
    program = step.compiled(*arguments)
    assert program.memory_analysis().argument_size_in_bytes > 0
    np.testing.assert_array_equal(model.norm.weight.numpy(), before)


# volumes


SLOW = {
    "gpt dp8",
    "gpt zero1",
    "gpt ring",
    "gpt gather",
    "gpt that keeps its order",
    "llama mp",
    "llama zero3",
}  # others have each of their collectives


@pytest.mark.slow_cases(
    "deepseek a dense layer",
    "mixtral expert choice",
    "gpt ulysses",
    "gpt zero2_mp",
    "gpt zero3_dp_mp",
    "gpt zero3_mp_sequence",
    "llama zero3 sequence",
    "mixtral padded in parts",
    "gpt mp2_dp4",
    "mixtral folded",
    "llama rings of gradients",
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_volume_equals_the_formula(name):
    family, plan, *sizes = CASES[name]
    step, arguments, model = step_of(family, plan, **(sizes[0] if sizes else {}))
    work = workload_of(model, 16, model.config.seq_len)
    report = examine([(step.compiled(*arguments).as_text(), 1)], plan, work, "cpu")
    assert not report.unnamed
    for total in report.totals:
        if total.measured or total.expected:
            assert total.ratio == pytest.approx(1, abs=0.02), total
    if name == "mixtral two levels":
        # 3 exchanges forward and 2 backward; in one level each has messages to the 2 devices of the other node
        assert (report.messages("dp"), report.messages()) == (5 * 1, 5 * (1 + 1))
        assert "messages a device sends in a step: 10, of which 5 along dp" in report.as_text()
    # every pass at work never needs more than what a compiler without them does
    assert report.whole.bound <= report.whole.expected


def test_the_output_heads_gradient_is_summed_once_not_in_every_chunk(monkeypatch):
    # the package's function of the same name hides the module
    monkeypatch.setattr(sys.modules["polyreme.kernels.linear_cross_entropy"], "CHUNK_BYTES", 64 * 128 * 4)
    plan = PLANS["mp2_dp4"]
    step, arguments, model = step_of("gpt", plan, num_layers=1, seq_len=64)
    found = find_collectives(step.compiled(*arguments).as_text(), plan.mesh)
    assert any(c.times > 1 for c in found)  # it does run in chunks
    table = model.tokens.weight.size // 2 * 4
    parts = [(p, c.times) for c in found if c.axes == ("dp",) for p in c.parts if p.nbytes == table]
    summed = {p.origin.layer: times for p, times in parts if p.origin.layer in ("GPT", "GPT.tokens")}
    assert summed == {"GPT": 1, "GPT.tokens": 1}  # once as the head, once as the table


@pytest.mark.slow
def test_a_split_parameter_is_gathered_again_for_the_backward():
    plan = Plan.from_degrees(sharding=8, sharding_stage=3)
    step, arguments, _ = step_of("llama", plan, num_layers=1)
    found = find_collectives(step.compiled(*arguments).as_text(), plan.mesh)
    origins = [c.parts[0].origin for c in found if c.kind == "all-gather"]
    assert [o.phase for o in origins if o.layer == "Llama.blocks.0.ffn.up"] == ["forward", "backward"]


# the report


def config(**plan):
    return PretrainConfig.model_validate(
        {
            "model": {"family": "gpt", "vocab_size": 128, "hidden_size": 32, "num_layers": 1, "num_heads": 4,
                      "seq_len": 16},
            "train": {"global_batch": 16, "accumulation": 2},
            "plan": plan,
        }
    )  # fmt: skip


def test_the_report_of_a_configuration():
    report = communication.report(config(dp=2, sharding=2, mp=2, sharding_stage=2))
    assert isinstance(report, Report)
    assert not report.unnamed
    assert report.whole.ratio == pytest.approx(1, abs=0.02)
    text = report.as_text()
    for word in ("GPT.blocks.0.ffn.up", "dp+sharding", "lower bound", "block halves", "overlap: overlapped 0 B"):
        assert word in text
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["totals"][-1]["kind"] == "all"
    measured = math.fsum(c["wire_bytes"] for c in plain["collectives"])
    assert measured == pytest.approx(plain["totals"][-1]["measured"])
