"""Topology and hybrid communicate group: the answers of PaddlePaddle 3.3.1, and those of a grid walked by hand.

topology.json holds the former.
"""

import itertools
import json
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.core.layout import Layout
from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.job import resolve
from polyreme.distributed.fleet.base.topology import (
    CommunicateTopology,
    HybridCommunicateGroup,
    ParallelMode,
    topology_of,
)
from polyreme.errors import ConfigError, PlacementError

SAVED = json.loads(Path(__file__).with_name("topology.json").read_text())
NAMES = ["data", "pipe", "sharding", "sep", "context", "model"]


@pytest.mark.parametrize("case", SAVED["topologies"], ids=lambda c: str(c["dims"]))
def test_a_topology_answers_as_elsewhere(case):
    grid = CommunicateTopology(case["names"], case["dims"])
    ranks = range(grid.world_size())
    assert grid.get_hybrid_group_names() == case["names"]
    assert [grid.get_dim(n) for n in case["names"]] == case["dims"]
    assert {n: grid.get_comm_list(n) for n in case["names"]} == case["comm"]
    assert {n: grid.get_axis_list(n, grid.get_dim(n) - 1) for n in case["names"]} == case["last"]
    # there the groups come in an order that differs from run to run
    assert sorted(grid.get_fused_ranks([case["names"][0], case["names"][-1]])) == sorted(case["fused"])
    assert [list(grid.get_coord(r)) for r in ranks] == case["coords"]
    assert [grid.get_rank_from_stage(r, pipe=0) for r in ranks] == case["stage"]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_topology_is_a_grid(data):
    names = data.draw(st.permutations(NAMES))[: data.draw(st.integers(1, 5))]
    dims = data.draw(st.lists(st.integers(1, 3), min_size=len(names), max_size=len(names)))
    grid = CommunicateTopology(names, dims)
    # the oracle: coordinates counted up, the last axis fastest
    coords = list(itertools.product(*[range(d) for d in dims]))
    assert grid.world_size() == len(coords)
    for rank, coord in enumerate(coords):
        assert tuple(grid.get_coord(rank)) == coord
        assert grid.get_rank(**dict(zip(names, coord, strict=True))) == rank
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    kept = [i for i, name in enumerate(names) if name not in chosen]
    groups = {}
    for rank, coord in enumerate(coords):
        groups.setdefault(tuple(coord[i] for i in kept), []).append(rank)
    assert grid.get_fused_ranks(chosen) == [groups[key] for key in sorted(groups)]
    index = data.draw(st.integers(-1, 3))
    axis = names.index(chosen[0])
    assert grid.get_axis_list(chosen[0], index) == [r for r, at in enumerate(coords) if at[axis] == index]


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda g: g.get_dim("modle"), "no axis 'modle'; did you mean 'model'"),
        (lambda g: g.get_comm_list("zz"), "no axis 'zz'; the choices are data, model"),
        (lambda g: g.get_rank(data=1), r"one coordinate for each of \['data', 'model'\], got"),
        (lambda g: g.get_rank(data=1, model=2), "off the grid of data 2, model 2"),
        (lambda g: g.get_coord(4), r"rank 4 is not in 0..3"),
        (lambda g: g.get_rank_from_stage(0, pipe=1), "no axis 'pipe'"),
        (lambda g: CommunicateTopology(["data"], [2, 2]), "one degree for each of its different axes"),
        (lambda g: CommunicateTopology(["data"], [0]), r"degrees \[0\] of a topology"),
    ],
)
def test_a_question_off_the_grid_is_refused(ask, match):
    with pytest.raises(PlacementError, match=match):
        ask(CommunicateTopology(["data", "model"], [2, 2]))


@pytest.mark.parametrize("case", SAVED["groups"], ids=lambda c: str(c["dims"]))
def test_groups_answer_as_elsewhere(case):
    hcg = HybridCommunicateGroup(CommunicateTopology(NAMES, case["dims"]))
    for question, want in case["answers"].items():
        name, _, argument = question.removesuffix(")").partition("(")
        answer = getattr(hcg, name)(*([json.loads(argument.lower())] if argument else []))
        assert getattr(answer, "ranks", answer) == want, question


def test_a_group_lies_on_the_mesh_that_tensors_lie_on():
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2, "sep_degree": 2, "order": ["mp", "dp", "pp", "sharding", "sep", "cp"]}
    plan = resolve(strategy, 8).plan
    hcg = HybridCommunicateGroup(topology_of(plan.mesh, strategy.hybrid_parallel_order))
    assert hcg.mesh == Layout(plan).mesh
    assert hcg.topology().get_hybrid_group_names() == ["model", "data", "pipe", "sharding", "sep", "context"]
    assert hcg.get_model_parallel_group().ranks == [0, 4]
    assert hcg.get_model_parallel_group() is hcg.get_model_parallel_group()
    assert (hcg.get_model_parallel_group().mesh, hcg.get_model_parallel_group().axes) == (hcg.mesh, ("mp",))


@pytest.mark.parametrize(
    ("degrees", "mode"),
    [
        ({}, ParallelMode.DATA_PARALLEL),
        ({"sharding_degree": 2}, ParallelMode.SHARDING_PARALLEL),
        ({"sharding_degree": 2, "sep_degree": 2}, ParallelMode.SEGMENT_PARALLEL),
        ({"sep_degree": 2, "mp_degree": 2}, ParallelMode.TENSOR_PARALLEL),
        ({"pp_degree": 2, "mp_degree": 2}, ParallelMode.PIPELINE_PARALLEL),
    ],
)
def test_parallel_mode_of_degrees(degrees, mode):
    strategy = DistributedStrategy()
    strategy.hybrid_configs = degrees
    assert HybridCommunicateGroup(topology_of(resolve(strategy, 8).plan.mesh)).get_parallel_mode() == mode


def test_experts_have_an_axis_of_their_own():
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"ep_degree": 4}
    hcg = HybridCommunicateGroup(topology_of(resolve(strategy, 8).plan.mesh))
    assert hcg.get_expert_parallel_group().ranks == [0, 1, 2, 3]
    assert (hcg.get_expert_parallel_world_size(), hcg.get_expert_parallel_rank()) == (4, 0)
    assert hcg.get_expert_parallel_group_src_rank() == 0
    assert (hcg.get_moe_sharding_parallel_world_size(), hcg.get_moe_sharding_parallel_rank()) == (1, 0)
    strategy.hybrid_configs = {"ep_degree": 2, "sharding_degree": 4}
    hcg = HybridCommunicateGroup(topology_of(resolve(strategy, 8).plan.mesh))
    assert hcg.get_moe_sharding_parallel_group().ranks == hcg.get_sharding_parallel_group().ranks == [0, 2, 4, 6]
    assert hcg.get_moe_sharding_parallel_group_src_rank() == 0


def test_an_axis_that_is_not_there_has_one_rank():
    hcg = HybridCommunicateGroup(CommunicateTopology(["model"], [8]))
    assert (hcg.get_sep_parallel_world_size(), hcg.get_sep_parallel_rank()) == (1, 0)
    assert (hcg.get_sep_parallel_group().ranks, hcg.get_sep_parallel_group_src_rank()) == ([0], 0)
    assert hcg.create_fuse_group(["model", "data"])[0] == list(range(8))
    assert (hcg.is_first_stage, hcg.is_last_stage) == (True, True)


def test_what_a_mesh_cannot_be_is_refused():
    with pytest.raises(PlacementError, match="dp4 needs 4 devices, 8 given"):
        HybridCommunicateGroup(CommunicateTopology(["data"], [4]))
    with pytest.raises(PlacementError, match="axis 'tensor' is none of a mesh"):
        HybridCommunicateGroup(CommunicateTopology(["tensor"], [8]))
    with pytest.raises(PlacementError, match="splits 'context'; split the sequence along 'sep'"):
        HybridCommunicateGroup(CommunicateTopology(["context"], [8]))
    hcg = HybridCommunicateGroup(CommunicateTopology(["data"], [len(jax.devices())]))
    with pytest.raises(PlacementError, match="no group along axis 'modle'; did you mean 'model'"):
        hcg.create_fuse_group(["modle"])
    with pytest.raises(ConfigError, match="get_pipe_parallel_group"):
        hcg.get_p2p_groups()
