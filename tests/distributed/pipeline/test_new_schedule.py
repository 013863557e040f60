"""A schedule that only this file knows works everywhere: adding one takes its record and nothing else.

It is FThenB with the backwards in reverse: the microbatch whose forward ran last is the first to come back.
"""

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from polyreme import nn
from polyreme.cli.main import app
from polyreme.distributed import fleet
from polyreme.distributed.auto_parallel.engine.strategy import Strategy, settle
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.prove import prove
from polyreme.errors import ConfigError
from polyreme.mesh import SCHEDULES, Durations, Plan, ScheduleKind, Task, make_schedule
from polyreme.mesh.schedules import BubbleFormula
from polyreme.optimizer import SGD
from polyreme.planner import ModelShape, Training, cluster_of_kind
from polyreme.planner.memory import memory
from polyreme.planner.memory_live import standings
from polyreme.planner.pipeline import closed_form, pipeline_seconds
from polyreme.planner.search import search
from polyreme.planner.space import Space
from polyreme.recipes.config import PlanConfig
from polyreme.recipes.planning.schedule_drawing import live_text

GPT = ModelShape(hidden=2048, layers=8, heads=16, seq=1024, vocab=50304, ffn=8192)
X, Y = np.random.default_rng(0).standard_normal((2, 6, 4)).astype("float32")


def stack(p, m, v):
    forwards = [[Task("F", i, s) for i in range(m)] for s in range(p)]
    return [[*tasks, *(Task("B", task.microbatch, s) for task in reversed(tasks))] for s, tasks in enumerate(forwards)]


STACK = ScheduleKind(
    name="Stack",
    aliases=("last-first",),
    summary="all forwards, then the backwards of the last first",
    source="this test",
    tables=stack,
    bubble=BubbleFormula("(p-1)/(m+p-1)", lambda p, m, v: (p - 1) / (m + p - 1), "as FThenB"),
)


@pytest.fixture(autouse=True)
def _known_here_only():
    with SCHEDULES.registered(STACK):
        yield
    clear_plan()
    fleet.reset()
    assert "Stack" not in SCHEDULES


def plan_of(**degrees):
    return Plan.from_degrees(**{"pp": 2, "num_microbatches": 3, "schedule": "Stack", **degrees})


def test_a_plan_says_it():
    plan = plan_of()
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.make_schedule().stage_text(0) == "f0;f1;f2;b2;b1;b0;"
    with pytest.raises(ConfigError, match="Stack with num_virtual=2; give 1"):
        plan_of(virtual_stages=2)


def test_settings_say_it():
    assert PlanConfig(pp=2, schedule="Stack").schedule == "Stack"
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 4, "pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 3, "schedule_mode": "last-first"}
    fleet.init(strategy=strategy)
    assert fleet.fleet.plan.schedule == "Stack"
    settings = Strategy({"pipeline": {"enable": True, "pp_degree": 2, "schedule_mode": "Stack"}})
    assert settle(settings).stages.schedule == "Stack"


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x, y):
        return self.pipeline_loss(self.layers(x), y)

    def pipeline_items(self):
        return list(self.layers)

    def pipeline_loss(self, out, y):
        return nn.functional.mse_loss(out, y)


@pytest.mark.slow
def test_it_is_proved_to_train_as_one_device_does():
    proof = prove(
        Net,
        plan_of(dp=2, num_microbatches=3),
        [(X, Y)],
        optimizer=lambda net: SGD(0.1, parameters=net.parameters()),
        devices=jax.devices()[:4],
    )
    assert proof.holds, proof


def test_the_planner_prices_it():
    plan = plan_of(pp=4, num_microbatches=40)
    chunks = [Durations(1.0, 1.25, 0.75)] * 4
    makespan = plan.make_schedule().makespan(chunks)
    assert closed_form(plan, chunks) == pytest.approx(makespan, rel=1e-9)
    assert pipeline_seconds(plan_of(), chunks[:2]) == plan_of().make_schedule().makespan(chunks[:2])


def test_the_memory_model_counts_what_it_keeps():
    plan = plan_of(pp=4, num_microbatches=40)
    for stage in range(4):
        assert make_schedule("Stack", 4, 40).peak_live(stage) == 40
        assert max(sum(standing.live) for standing in standings(plan, stage)) == 40
    half = Training("bfloat16")
    first, plain = (
        memory(GPT.graph(), plan_of(pp=4, num_microbatches=40, schedule=name), 40, half)[0].activations
        for name in ("Stack", "1F1B")
    )
    assert first / plain == 40 / 4  # all microbatches for 4


def test_the_search_finds_it():
    cluster = cluster_of_kind("a100", 8)
    found = search(GPT, cluster, 64, space=Space(axes=("pp",), schedules=("Stack",)), top=3)
    assert {ranked.plan.schedule for ranked in found.plans} == {"Stack"}
    assert "Stack" in Space().schedules


def test_the_command_shows_it():
    shown = CliRunner().invoke(app, ["schedule", "Stack", "--stages", "3", "--microbatches", "9"]).output
    assert "Stack: 3 stages, 9 microbatches" in shown
    assert "(formula (p-1)/(m+p-1) = 18.2%)" in shown
    assert live_text(make_schedule("Stack", 3, 9)) == "9 9 9"
    rows = CliRunner().invoke(app, ["schedule", "--all"]).output.splitlines()
    assert [row.split()[0] for row in rows[3:]] == list(SCHEDULES)
    assert list(SCHEDULES)[-1] == "Stack"
