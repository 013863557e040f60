"""Plans verified by compiling: nothing is allocated, state is exact, and the planner's memory is near what is found."""

import gc
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core import layout, rng
from polyreme.core.devices.abstract import Abstract, abstractly, copied, full
from polyreme.core.meshes import beside
from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import Plan
from polyreme.planner import ModelShape, Training
from polyreme.planner.devices import cluster_of_kind
from polyreme.planner.memory import memory
from polyreme.recipes.config import ModelConfig, PlanConfig, PretrainConfig, TrainConfig
from polyreme.recipes.planning import communication
from polyreme.recipes.planning.job import AbstractJob, job_of
from polyreme.recipes.planning.plan import memory_of, space_of
from polyreme.recipes.planning.verify import Verified, verify, verify_apart

# the bound that benchmarks/planner_memory.py holds the planner to, for its worst configuration
BOUND = 0.12


def config(layers: int = 2, amp: Any = "O0", batch: int = 32) -> PretrainConfig:
    dims = {"hidden_size": 64, "num_layers": layers, "num_heads": 4, "seq_len": 128, "vocab_size": 512}
    return PretrainConfig(model=ModelConfig.model_validate(dims), train=TrainConfig(global_batch=batch, amp_level=amp))


def predicted(given: PretrainConfig, plan: Plan):
    dims = given.model
    shape = ModelShape(
        hidden=dims.hidden_size,
        layers=dims.num_layers,
        heads=dims.num_heads,
        seq=dims.seq_len,
        vocab=dims.vocab_size,
        ffn=dims.ffn_size,
    )
    low = given.train.amp_level != "O0"
    training = Training(dtype="bfloat16" if low else "float32", master=given.train.amp_level == "O2")
    return memory(shape.graph(), plan, given.train.global_batch, training, "cpu")


def test_parameters_away_take_the_room_of_a_chunk_however_many_there_are():
    plan = Plan.from_degrees(offload=["param", "state", "act"], recompute="full")
    most = []
    for layers in (2, 3):
        job = AbstractJob(job_of(config(layers, batch=2)), plan, jax.devices()[:1])
        found = [program.memory_analysis() for program in job.chunk_programs().values()]
        weights = [sum(4 * p.size for p in chunk.parameters()) for chunk in job.planned.layers.get_model_chunks()]
        job.close()
        most.append(max(m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes for m in found))
    assert most[0] == most[1]
    inputs = 4 * 2 * 128 * 64  # of a block, and their gradient
    assert most[0] < 2 * max(weights) + 4 * inputs


def test_a_step_over_three_axes_is_as_the_planner_says():
    plan, run_config = Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=3), config(amp="O2")
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    verification = verify(run_config, plan)
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 4096
    assert layout.active.layout is None
    (stage,), (ours,) = verification.stages, predicted(run_config, plan)
    assert stage.parameters == ours.parameters
    assert stage.optimizer == ours.optimizer
    assert abs(ours.total / stage.total - 1) < BOUND
    kinds = {(e.kind, e.axes) for e in stage.exchanges}
    assert ("all-reduce", ("mp",)) in kinds
    assert ("all-gather", ("sharding",)) in kinds
    assert all(e.count > 0 and e.wire_bytes > 0 for e in stage.exchanges)
    assert Verified.from_dict(verification.to_dict()) == verification


def test_a_plan_for_virtual_devices_has_no_ragged_exchange():
    run_config = PretrainConfig.model_validate({"device": "cpu"})
    cluster = cluster_of_kind("a100", 8)
    assert "ragged" not in space_of(run_config, cluster).expert_dispatch
    anywhere = run_config.model_copy(update={"device": None})
    assert "ragged" in space_of(anywhere, cluster).expert_dispatch
    assert "ragged" not in space_of(anywhere, replace(cluster, shared=8)).expert_dispatch


@pytest.mark.slow
@pytest.mark.slow_cases("gather", "balanced")
@pytest.mark.parametrize("how", ["gather", "padded", "balanced"])
def test_experts_take_the_room_that_the_planner_says(how):
    dims = {"family": "mixtral", "hidden_size": 64, "num_layers": 1, "num_heads": 4, "seq_len": 128, "ffn_size": 128,
            "vocab_size": 128, "num_experts": 8}  # fmt: skip
    plan = {"ep": 4, "expert_dispatch": how}
    run_config = PretrainConfig.model_validate(
        {"model": dims, "train": {"global_batch": 32}, "plan": plan, "device": "cpu"}
    )
    (stage,), ours = verify(run_config, run_config.parallel_plan).stages, memory_of(run_config)
    assert stage.parameters == ours.parameters
    assert abs(ours.total / stage.total - 1) < BOUND
    # rows for all choices that may come, not for the mean
    whole = memory_of(run_config.model_copy(update={"plan": PlanConfig(dp=4)}))
    assert ours.activations > whole.activations * (1.2 if how != "balanced" else 1)


def test_each_stage_of_a_pipeline_is_as_the_planner_says():
    plan, given = Plan.from_degrees(pp=2, num_microbatches=4), config(layers=3, batch=16)
    verification = verify(given, plan)
    assert len(verification.stages) == 2
    for stage, ours in zip(verification.stages, predicted(given, plan), strict=True):
        assert stage.parameters == ours.parameters
        assert stage.optimizer == ours.optimizer
        assert stage.gradients == ours.gradients
        assert abs(ours.total / stage.total - 1) < BOUND
    assert verification.total == max(stage.total for stage in verification.stages)
    assert verification.seconds > 0


def test_too_few_devices_are_refused():
    with pytest.raises(PlacementError, match=r"needs 16 devices .* has 8; set CPU_NUM=16"):
        verify(config(), Plan.from_degrees(dp=16))


def test_what_is_moved_outside_of_programs_is_refused():
    plan = Plan.from_degrees(offload=["param", "state"])
    with pytest.raises(ConfigError, match=r"offload \['param', 'state'\] cannot be verified.*verify the plan without"):
        verify(config(), plan)
    run_config = config()
    streamed = run_config.model_copy(update={"plan": run_config.plan.model_copy(update={"offload": ["param"]})})
    with pytest.raises(
        ConfigError, match=r"offload of param or expert is not seen by comm.*leave param and expert out"
    ):
        communication.report(streamed)


@pytest.mark.slow
def test_a_process_of_its_own_has_as_many_devices_as_the_plan_needs():
    given, plan = config(layers=1), Plan.from_degrees(dp=32)
    found = verify_apart(given, plan)
    assert abs(predicted(given, plan)[0].total / found.total - 1) < 2 * BOUND  # so little on a device: odds and ends
    with pytest.raises(PlacementError, match=r"(?s)failed: .*batch"):
        verify_apart(given, Plan.from_degrees(dp=64))


def test_arrays_without_memory_behave_as_arrays_in_shape_and_dtype():
    wide = Abstract.of((1 << 20, 1 << 20), np.float32, None)
    assert wide.strides == (0, 0)
    assert wide.astype(np.int8).dtype == np.int8
    with abstractly():
        made = full((3, 5), 2.0, np.float32)
        assert isinstance(made, Abstract)
        assert isinstance(copied(made, np.float64), Abstract)
    assert full((3, 5), 2.0, np.float32).sum() == 30


def test_keys_and_copies_of_arrays_without_memory_run_no_program(monkeypatch):
    one, other = (
        NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())
        for devices in (jax.devices()[:2], jax.devices()[2:4])
    )
    stream = rng.Generator().manual_seed(0)
    stream.key_state()._array = key = Abstract.of((2,), np.uint32, one)
    for name in ("_split_key", "_branches"):
        monkeypatch.setattr(rng, name, None)  # a program would not run over devices that are not here
    assert stream.branches(3) == [key] * 3
    assert beside(key, Abstract.of((4,), np.float32, other)).sharding == other
