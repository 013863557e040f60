"""Compiled for a TPU slice that is not here: kernels, options and overlap are the TPU's. Takes libtpu."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from polyreme.core.devices import absent
from polyreme.core.engine import backend
from polyreme.distributed.comm_report import examine
from polyreme.errors import ConfigError
from polyreme.kernels import gather_linears, scatter_linear, select
from polyreme.kernels.ring_linear import RingSplit
from polyreme.mesh import Plan
from polyreme.recipes import config_file
from polyreme.recipes.planning import communication
from polyreme.recipes.planning import job as plan_job

CONFIG = Path(__file__).parent.parent.parent / "configs" / "moe_kjv.yaml"
SMALL = [
    f"{key}={value}"
    for key, value in {
        "model.hidden_size": 256,
        "model.ffn_size": 512,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "model.seq_len": 256,
        "train.accumulation": 1,
        "train.amp_level": "O2",
        "plan.dp": 1,
        "plan.pp": 1,
        "plan.sharding": 1,
        "plan.sharding_stage": 0,
        "plan.ep": 8,
    }.items()
]


@pytest.fixture
def libtpu():
    return pytest.importorskip("libtpu", reason="needs libtpu: install polyreme[tpu-check]")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind"), [("padded", "all-to-all"), ("auto", "ragged-all-to-all")])
def test_rows_for_experts_travel_while_others_compute(libtpu, how, kind):
    hidden = {}
    for parts in (1, 2):
        words = [*SMALL, f"plan.expert_dispatch={how}", f"plan.overlap={{moe: {parts}}}"]
        # products of this size are too short to hide a byte for each 1000 FLOP
        report = communication.report(config_file.load(CONFIG, words).config, 100.0, "v5e:2x4")
        rows = [c for c in report.collectives if c.kind == kind and c.payload > 10_000]
        assert all(c.is_async for c in rows)
        hidden[parts] = sum(c.total_wire for c in rows if c.overlap == "overlapped") / sum(c.total_wire for c in rows)
    assert hidden[2] >= 0.45
    assert hidden[2] > hidden[1]


@pytest.mark.slow
def test_every_permute_of_a_ring_of_parts_has_work_to_hide_behind(libtpu):
    devices = plan_job.devices_for(Plan.from_degrees(mp=8), "v5e:2x4")
    split = RingSplit(Mesh(np.array(devices), "mp"), (), (), "mp")

    def loss(x, up, down):
        return (scatter_linear(*gather_linears(x, [up], split), down, split).astype(jnp.float32) ** 2).sum()

    shapes = {(1, 1024, 1024): split.whole, (1024, 8192): P(None, "mp"), (8192, 1024): P("mp", None)}
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(split.mesh, spec))
            for shape, spec in shapes.items()]  # fmt: skip
    with select.compiling_for(devices[0]):
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), compiler_options=backend.step_options())
        text = step.lower(*args).compile().as_text()
    plan = Plan.from_degrees(mp=8, sequence_parallel=True, overlap={"mp": "ring"})
    permutes = [c for c in examine([(text, 1)], plan, None, "tpu").collectives if c.kind == "collective-permute"]
    # parts into the map up, sums out of the map down, and back: gradients of both, and the first's input again
    assert len(permutes) == 5 * 7
    assert all(c.is_async for c in permutes)
    assert not [c for c in permutes if c.overlap == "critical"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_stages_are_compiled_and_send_what_the_formula_says(libtpu, schedule):
    words = [*SMALL, "model.family=gpt", "model.num_layers=2", "train.accumulation=2", "train.amp_level=O0"]
    words += ["plan.ep=1", "plan.mp=1", "plan.dp=2", "plan.pp=2", f"plan.schedule={schedule}"]
    config = config_file.load(CONFIG.with_name("gpt_kjv.yaml"), words).config
    stages = communication.report(config, None, "v5e:2x2").stages
    totals = [total for stage in stages for total in stage.totals if total.expected]
    assert len(stages) == 2
    assert [total.ratio for total in totals] == pytest.approx([1] * len(totals), abs=0.02)


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(absent.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"compiling for v5e:2x4 needs libtpu; install polyreme\[tpu-check\]"):
        plan_job.devices_for(Plan.from_degrees(mp=8), "v5e:2x4")


def test_a_stage_has_chips_that_follow_each_other(monkeypatch):
    monkeypatch.setattr(plan_job, "slice_devices", lambda topology: list(range(16)))
    plan = Plan.from_degrees(dp=2, pp=2, sharding=2, mp=2)
    chips = np.array(plan_job.devices_for(plan, "v5e:4x4")).reshape(2, 2, 4)
    assert chips[:, 0].ravel().tolist() == list(range(8))
    assert chips[:, 1].ravel().tolist() == list(range(8, 16))
    with pytest.raises(ConfigError, match="a stage takes 6 chips, which do not divide the 16 of v5e:4x4; nearest is 4"):
        plan_job.devices_for(Plan.from_degrees(dp=3, pp=2, mp=2), "v5e:4x4")


def test_kernels_are_chosen_for_the_device_compiled_for():
    class Chip:
        platform = "tpu"

    assert select.backend() == "cpu"
    with select.compiling_for(Chip()):
        assert (select.backend(), select.platform()) == ("tpu", "tpu")
    assert select.backend() == "cpu"
