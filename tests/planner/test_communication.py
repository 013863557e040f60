"""Collectives: seconds by hand over the links a group spans, and which ones a plan makes necessary."""

import math
from dataclasses import replace

import pytest

from polyreme.errors import ConfigError
from polyreme.mesh import MeshShape, Plan
from polyreme.planner import Cluster, Link, ModelShape, cluster_of_kind, collectives, devices
from polyreme.planner.communication import Neighbours, group
from polyreme.planner.sharding import cuts_of, pieces, stage_pieces

FAST = Link("near", 8, 100e9, 1e-6)
SLOW = Link("far", 1 << 20, 10e9, 1e-5)
NODES = Cluster(cluster_of_kind("a100", 1).device, 64, (FAST, SLOW))


def test_rings_inside_a_node():
    """An all-reduce of V over n moves 2 (n - 1) / n V from each device, a gather or scatter half of that."""
    among = group(NODES, MeshShape(mp=8), ("mp",))
    v = 1e9
    once = 7 / 8 * v / 100e9
    assert among.all_gather(v) == pytest.approx(once + 7e-6)
    assert among.reduce_scatter(v) == pytest.approx(once + 7e-6)
    assert among.all_reduce(v) == pytest.approx(2 * once + 2 * 6 * 1e-6)  # a tree of 8 is 2 log2(8) deep
    assert among.all_to_all(v) == pytest.approx(once + 1e-6)
    assert among.send(v) == pytest.approx(v / 100e9 + 1e-6)
    alone = group(NODES, MeshShape(mp=8), ("dp",))
    assert alone.all_reduce(v) == alone.send(v) == alone.all_to_all(v) == alone.all_gather(v) == 0


def test_a_group_of_one_device_a_node_has_one_way_out():
    among = group(NODES, MeshShape(dp=8, mp=8), ("dp",))
    assert [tier.link.name for tier in among.tiers] == ["far"]
    assert among.all_gather(1e9) == pytest.approx(7 / 8 * 1e9 / 10e9 + 7e-5)


def test_switches_that_pass_on_half_take_twice_as_long():
    narrow = replace(NODES, links=(FAST, replace(SLOW, oversubscription=2.0)))
    far, near = (group(narrow, MeshShape(dp=8, mp=8), (axis,)) for axis in ("dp", "mp"))
    assert far.all_gather(1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 10e9 + 7e-5)
    assert near.all_gather(1e9) == pytest.approx(7 / 8 * 1e9 / 100e9 + 7e-6)


def test_a_group_of_whole_nodes_uses_all_their_ways_out():
    """Eight rings, each over another device's way: 1 / 8 of the bytes over each; the near link carries all of them.
    Each ring goes through all devices: 7 hops inside each of 8 nodes, 7 between them."""
    among = group(NODES, MeshShape(dp=64), ("dp",))
    assert [(tier.parties, tier.inside) for tier in among.tiers] == [(8, 1), (8, 8)]
    far = 63 / 64 * 1e9 / 8 / 10e9
    assert among.all_gather(1e9) == pytest.approx(max(far, 63 / 64 * 1e9 / 100e9) + 8 * 7e-6 + 7e-5)


def test_the_order_of_the_mesh_decides_the_link():
    inner = MeshShape(dp=8, mp=8)
    outer = MeshShape(dp=8, mp=8, order=("mp", "dp"))
    assert group(NODES, inner, ("mp",)).all_reduce(1e9) < group(NODES, outer, ("mp",)).all_reduce(1e9) / 5
    assert group(NODES, inner, ("dp", "mp")).size == 64


def test_an_all_to_all_sends_to_far_parties_what_is_theirs():
    among = group(NODES, MeshShape(ep=16), ("ep",))
    near, far = 7 / 16 * 1e9 / 100e9 + 1e-6, 8 / 16 * 1e9 / 10e9 + 1e-5
    assert among.all_to_all(1e9) == pytest.approx(near + far)


def test_a_torus_gives_each_dim_its_links():
    """TPU v5p: 90 GB/s a link and way, so a ring over one dim of three has 180 GB/s, over two of them 360."""
    chips = cluster_of_kind("v5p", 64)
    mesh = MeshShape(sharding=16, mp=4)
    v, share = 1e9, 0.95  # the curve's share at a gigabyte
    assert group(chips, mesh, ("mp",)).all_gather(v) == pytest.approx(3 / 4 * v / (180e9 * share) + 3e-6)
    assert group(chips, mesh, ("sharding",)).all_gather(v) == pytest.approx(15 / 16 * v / (360e9 * share) + 15e-6)
    assert group(chips, MeshShape(dp=64), ("dp",)).all_gather(v) == pytest.approx(63 / 64 * v / (540e9 * share) + 63e-6)
    line = group(chips, MeshShape(dp=32, mp=2), ("mp",))  # half a dim is a line, not a ring
    assert line.all_gather(v) == pytest.approx(1 / 2 * v / (90e9 * share) + 1e-6)
    ring = group(chips, mesh, ("mp",))
    assert ring.all_to_all(v) == pytest.approx(v * 4 / 8 / (90e9 * share) + 1e-6)
    assert ring.send(v) == pytest.approx(v / (90e9 * share) + 1e-6)


def test_slices_meet_over_the_network():
    two = cluster_of_kind("v5p", 128, slices=2)
    among = group(two, MeshShape(dp=2, sharding=64), ("dp",))
    assert [tier.link.name for tier in among.tiers] == ["DCN"]
    assert among.all_reduce(1e9) > 0.1


def test_processors_have_no_reduce_scatter():
    shared = Cluster(NODES.device, 8, (FAST,), shared=8)
    among = group(shared, MeshShape(dp=8), ("dp",))
    assert among.reduce_scatter(1e6) == among.all_reduce(1e6) > among.all_gather(1e6)


def test_efficiency_grows_with_the_message():
    link = Link("near", 8, 100e9, 0.0, ((1e3, 0.1), (1e9, 0.9)))
    among = group(Cluster(NODES.device, 8, (link,)), MeshShape(dp=8), ("dp",))
    assert among.all_gather(1e6) == pytest.approx(7 / 8 * 1e6 / (100e9 * 0.5))  # halfway between on a log axis
    assert among.all_gather(1.0) == pytest.approx(7 / 8 / (100e9 * 0.1))


def test_links_must_reach():
    with pytest.raises(
        ConfigError, match=r"mesh dp16 has 16 devices, but the links of the cluster .* join 8; use fewer"
    ):
        group(Cluster(NODES.device, 16, (FAST,)), MeshShape(dp=16), ("dp",))


GPT = ModelShape(hidden=64, layers=4, heads=8, seq=32, vocab=128, ffn=256)
LAYER = GPT.graph().blocks[1]
BSH = 2 * 32 * 64 * 2  # bytes of a residual stream of 2 samples in 16 bits


def made(plan, block=LAYER, samples=2.0):
    """(what, axes, bytes, is_forward) of a block's collectives."""
    weights = {value.name: value for b in (*GPT.graph().blocks, block) for value in b.parameters}
    found = collectives.collectives(block, weights, cuts_of(plan), samples, 2, plan)
    return sorted((c.what, *sorted(c.axes), c.nbytes, c.is_forward) for c in found)


def test_tensor_parallelism_sums_twice_each_way():
    """arXiv:1909.08053, figure 3: two all-reduces forward and two backward, of batch x seq x hidden."""
    assert made(Plan.from_degrees(mp=4)) == [
        *[("all_reduce", "mp", BSH, False)] * 2,
        *[("all_reduce", "mp", BSH, True)] * 2,
    ]


def test_sequence_parallelism_gathers_and_scatters():
    """arXiv:2205.05198, figure 5: each all-reduce becomes a gather and a scatter of the same bytes."""
    assert made(Plan.from_degrees(mp=4, sequence_parallel=True)) == [
        *[("all_gather", "mp", BSH, False)] * 2,
        *[("all_gather", "mp", BSH, True)] * 2,
        *[("reduce_scatter", "mp", BSH, False)] * 2,
        *[("reduce_scatter", "mp", BSH, True)] * 2,
    ]


def test_cut_sequences_exchange_heads_or_pass_keys():
    ulysses = made(Plan.from_degrees(sep=4))
    local = BSH / 4
    assert ulysses == [
        *[("all_to_all", "sep", way * local, forward) for way, forward in ((1, False), (1, True))],
        *[("all_to_all", "sep", way * local, forward) for way, forward in ((3, False), (3, True))],
    ]
    ring = made(Plan.from_degrees(sep=4, sep_attention="ring"))
    assert ring == [("send", "sep", 6.0 * local, True), ("send", "sep", 12.0 * local, False)]
    assert made(Plan.from_degrees(sep=4, sep_attention="ring", sep_order="zigzag")) == ring
    # all keys and values twice, and their gradients in 32 bits
    gather = made(Plan.from_degrees(sep=4, sep_attention="gather"))
    kinds = [("all_gather", 2.0, False), ("all_gather", 2.0, True), ("reduce_scatter", 4.0, False)]
    assert gather == [(what, "sep", times * BSH, forward) for what, times, forward in kinds]
    # 2 heads left for 4 devices: dealt out to pairs, and a ring of two
    both = [c for c in made(Plan.from_degrees(sep=4, mp=4, sep_attention="auto")) if c[1] == "sep"]
    assert both[:4] == [(what, axis, nbytes / 4, forward) for what, axis, nbytes, forward in ulysses]
    assert both[4:] == [("send", "sep", 2.0 * local / 4, True), ("send", "sep", 4.0 * local / 4, False)]


def test_neighbours_have_the_links_between_them():
    mesh = MeshShape(sep=16)
    near, far = (group(NODES, mesh, ("sep",), among) for among in (Neighbours(8), Neighbours(2, 8)))
    assert [t.link for t in near.tiers] == [FAST]
    assert (near.size, far.size) == (8, 2)
    assert far.tiers[-1].link == NODES.links[-1]


MOE = ModelShape(64, 2, 8, 32, 128, 256, experts=8, experts_per_token=2)
T = BSH / 4  # bytes of a device's tokens, of 2 samples over 4 devices
SENT = [("all_to_all", "ep", 2 * T)] * 4
BY_DISPATCH = {
    # there and back, forward and backward: two rows a token, or room for all of each device's choices to come
    "ragged": SENT,
    "padded": [("all_to_all", "ep", 4 * 2 * T)] * 4,
    # tokens in 16 bits, sums in 32
    "gather": [("all_gather", "ep", 4 * T), ("all_gather", "ep", 8 * T), ("reduce_scatter", "ep", 4 * T),
               ("reduce_scatter", "ep", 8 * T)],
    # by way of all devices, and the weights of as many experts as a device has
    "balanced": [("all_reduce", "ep", 2 * 2 * 64 * 256 * 2)] * 2 + 2 * SENT,
}  # fmt: skip


@pytest.mark.parametrize("how", BY_DISPATCH)
def test_experts_exchange_tokens(how):
    found = made(Plan.from_degrees(ep=4, expert_dispatch=how), MOE.graph().blocks[1])
    assert sorted((what, axis, nbytes) for what, axis, nbytes, _ in found) == BY_DISPATCH[how]


def test_experts_in_two_levels_send_the_same_along_both():
    levels = {"expert_axes": ("sep", "ep"), "expert_all_to_all": "two_level", "expert_dispatch": "padded"}
    found = made(Plan.from_degrees(sep=2, ep=2, **levels), MOE.graph().blocks[1])
    sent = [c for c in found if c[2] == 4 * 2 * T]
    assert [axis for _, axis, _, _ in sent] == ["ep"] * 4 + ["sep"] * 4


def test_the_head_compares_logits_that_are_cut():
    head = GPT.graph().blocks[-1]
    assert made(Plan.from_degrees(mp=4), head) == [
        ("all_reduce", "mp", 12.0 * 2 * 32, True),
        ("all_reduce", "mp", BSH, False),
    ]


def test_one_device_says_nothing():
    assert made(Plan()) == []


def test_pieces_are_those_that_the_pipeline_layer_makes():
    """Six items over four chunks: what is left over goes to the last; or four layers, one each."""
    plan = Plan.from_degrees(pp=4, num_microbatches=4)
    graph = GPT.graph()
    assert [sum(n for _, n in piece) for piece in pieces(graph, plan)] == [1, 1, 2, 2]
    assert [[(b.part, n) for b, n in piece] for piece in pieces(graph, plan, "layers")] == [
        [("embed", 1), ("layer", 1)],
        [("layer", 1)],
        [("layer", 1)],
        [("layer", 1), ("head", 1)],
    ]
    v = Plan.from_degrees(pp=2, num_microbatches=4, schedule="ZBVPP")
    assert [len(stage) for stage in stage_pieces(graph, v)] == [2, 2]
    assert [b.part for piece in stage_pieces(graph, v)[0] for b, _ in piece][-1] == "head"  # the V comes back up
    with pytest.raises(ConfigError, match="has 4 layers to cut, which cannot fill 8 chunks"):
        pieces(graph, Plan.from_degrees(pp=8, num_microbatches=8), "layers")


def test_an_axis_counts_once_and_a_dim_that_does_not_divide_stays_whole():
    cuts = cuts_of(Plan.from_degrees(dp=2, ep=4, mp=8, sharding=2, sharding_stage=3))
    assert cuts.axes("act", ("batch", "expert"), (1, 4)) == {"dp", "ep", "sharding"}
    assert cuts.axes("act", ("batch", "kv_heads"), (1, 4)) == {"dp", "ep", "sharding"}  # 4 heads, 8 devices
    assert cuts.axes("param", ("embed", "ffn"), (64, 256)) == {"sharding", "mp"}
    assert cuts.axes("use", ("embed", "ffn"), (64, 256)) == {"mp"}
    assert cuts.axes("param", ("embed",), (63,)) == frozenset()
    assert cuts.batch_ways == 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: devices.device_kind("h10"), "unknown device kind 'h10'; did you mean"),
        (lambda: cluster_of_kind("h100", 8, node="dgx-h10"), "unknown node type 'dgx-h10'.*did you mean 'dgx-h100'"),
        (lambda: cluster_of_kind("h100", 0), "num_devices=0 of device kind 'h100'; give a whole number"),
        (lambda: cluster_of_kind("v5p", 9, slices=2), "9 devices of 'v5p' do not make 2 equal slices"),
        (
            lambda: cluster_of_kind("v5p", 64, torus=(4, 4)),
            r"a torus \(4, 4\) of 'v5p' has 16 devices, the slice has 64",
        ),
        (
            lambda: cluster_of_kind("h100", 1 << 25),
            "num_devices=33554432 of device kind 'h100'; give at most 16,777,216",
        ),
        (lambda: cluster_of_kind("h100", 16, torus=(4, 4)), "joined by switches; leave torus"),
        (lambda: cluster_of_kind("v5e", 512), "256 devices at most, not 512; give more slices: two are v5e:2x16x16"),
    ],
)
def test_refusals_of_devices(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_names_that_were_taken_for_others():
    assert cluster_of_kind("gb200", 144).links[0].devices == 72
    assert devices.device_kind("v100-16g").memory == 17e9
    odd = devices.device_kind("H100-96G")
    assert (odd.bandwidth, odd.borrowed) == (2.4e12, "h100")
    assert devices.unknown_kind("H100-64G", 8, 989e12, 64e9).device.matmul == devices.device_kind("h100").matmul
    assert devices.device_kind("Ascend 910B").flops["bfloat16"] == 376e12


def test_a_row_that_goes_to_a_node_once():
    """Of 8 choices among 8 nodes 5.25 differ, and of those among 8 devices of a node; among 64 devices 7.58."""
    mesh = Plan.from_degrees(ep=64).mesh
    among = group(cluster_of_kind("h800", 64), mesh, ("ep",))
    inside = group(cluster_of_kind("h800", 8), Plan.from_degrees(ep=8).mesh, ("ep",))
    assert inside.all_to_all(1e8, 8) == pytest.approx(inside.all_to_all(1e8) * 5.25 / 8, rel=0.02)
    near = inside.all_to_all(1e8) * 8 / 64  # an eighth of the rows stay in the node
    far = among.all_to_all(1e8) - near
    assert among.all_to_all(1e8, 8) - near * 7.58 / 8 == pytest.approx(far * 5.25 / 8, rel=0.02)
    # where a row goes to 4 of the 8 nodes, 3.6 of 8 choices differ
    assert among.all_to_all(1e9, 8, 0.5) / among.all_to_all(1e9, 8) == pytest.approx(3.6 / 5.25, rel=0.03)


def test_every_kind_has_a_sheet_with_a_source():
    assert {"a100-40g", "a100-80g", "h100-80g", "h100-pcie", "h200", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"} <= set(
        devices.device_kinds()
    )
    for name in devices.device_kinds():
        kind, cluster = devices.device_kind(name), cluster_of_kind(name, 8)
        assert kind.source
        assert max(kind.flops.values()) > 6e13
        assert kind.memory > 1e10
        for curve in (kind.matmul, kind.attention, kind.streaming, *(link.efficiency for link in cluster.links)):
            assert all(0 < y <= 1 for _, y in curve)
            assert [x for x, _ in curve] == sorted(x for x, _ in curve)
            assert [y for _, y in curve] == sorted(y for _, y in curve)
        assert cluster.links[0].devices in (4, 8, 16, 72, 384)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 12, 16, 32, 64, 100, 256, 512, 1024, 4096])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_torus_has_all_devices(count, dims):
    assert math.prod(devices.torus_of(count, dims)) == count
