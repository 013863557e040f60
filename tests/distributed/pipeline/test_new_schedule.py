"""A schedule that only this file knows works everywhere: adding one takes its record and nothing else.

It is 1F1B with twice the warm-up ("eager 1F1B", arXiv:2211.05322): one microbatch more waits beside each
that 1F1B has under way, so that a send is hidden behind another microbatch's work.
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
from polyreme.mesh import SCHEDULES, Durations, Plan, ScheduleKind, make_schedule
from polyreme.mesh.schedules import BubbleFormula, count_microbatches
from polyreme.optimizer import SGD
from polyreme.planner import ModelShape, Training, cluster_of_kind
from polyreme.planner.memory import memory
from polyreme.planner.memory_live import standings
from polyreme.planner.pipeline import closed_form, pipeline_seconds
from polyreme.planner.search import search
from polyreme.planner.space import Space
from polyreme.recipes.config import PlanConfig
from polyreme.recipes.schedule_drawing import live_text

GPT = ModelShape(hidden=2048, layers=8, heads=16, seq=1024, vocab=50304, ffn=8192)
X, Y = np.random.default_rng(0).standard_normal((2, 6, 4)).astype("float32")


def eager(p, m, v):
    def stage(s):
        f, b, warm = ("F", s), ("B", s), min(2 * (p - s - 1), m)
        return count_microbatches([f] * warm + [f, b] * (m - warm) + [b] * warm)

    return [stage(s) for s in range(p)]


EAGER = ScheduleKind(
    name="Eager",
    aliases=("eager-1f1b",),
    summary="1F1B with twice the warm-up",
    source="arXiv:2211.05322",
    tables=eager,
    steady_rounds=3,
    bubble=BubbleFormula("(p-1)/(m+p-1)", lambda p, m, v: (p - 1) / (m + p - 1), "as 1F1B"),
)


@pytest.fixture(autouse=True)
def _known_here_only():
    with SCHEDULES.registered(EAGER):
        yield
    clear_plan()
    fleet.reset()
    assert "Eager" not in SCHEDULES


def plan_of(**degrees):
    return Plan.from_degrees(**{"pp": 2, "num_microbatches": 3, "schedule": "Eager", **degrees})


def test_a_plan_says_it():
    plan = plan_of()
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.make_schedule().stage_text(0) == "f0;f1;f2;b0;b1;b2;"
    with pytest.raises(ConfigError, match="Eager with num_virtual=2; give 1"):
        plan_of(virtual_stages=2)


def test_settings_say_it():
    assert PlanConfig(pp=2, schedule="Eager").schedule == "Eager"
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 4, "pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 3, "schedule_mode": "eager-1f1b"}
    fleet.init(strategy=strategy)
    assert fleet.fleet.plan.schedule == "Eager"
    settings = Strategy({"pipeline": {"enable": True, "pp_degree": 2, "schedule_mode": "Eager"}})
    assert settle(settings).stages.schedule == "Eager"


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
    plan, plain = plan_of(pp=4, num_microbatches=40), plan_of(pp=4, num_microbatches=40, schedule="1F1B")
    chunks = [Durations(1.0, 1.25, 0.75)] * 4
    makespan = plan.make_schedule().makespan(chunks)
    assert closed_form(plan, chunks) == pytest.approx(makespan, rel=1e-9)
    assert pipeline_seconds(plan_of(), chunks[:2]) == plan_of().make_schedule().makespan(chunks[:2])
    # what it is for: a send of half a microbatch's work is hidden, which 1F1B waits for
    slow = [Durations(1.0, 1.0, 1.0, 1.5)] * 4
    assert plan.make_schedule().makespan(slow) < plain.make_schedule().makespan(slow)


def test_the_memory_model_counts_what_it_keeps():
    plan = plan_of(pp=4, num_microbatches=40)
    for stage in range(4):
        live = make_schedule("Eager", 4, 40).peak_live(stage)
        assert live == 2 * (4 - stage) - 1
        assert max(sum(each.live) for each in standings(plan, stage)) == live
    half = Training("bfloat16")
    first, plain = (
        memory(GPT.graph(), plan_of(pp=4, num_microbatches=40, schedule=name), 40, half)[0].activations
        for name in ("Eager", "1F1B")
    )
    assert first / plain == 7 / 4  # 7 microbatches for 4


def test_the_search_finds_it():
    cluster = cluster_of_kind("a100", 8)
    found = search(GPT, cluster, 64, space=Space(axes=("pp",), schedules=("Eager",)), top=3)
    assert {ranked.plan.schedule for ranked in found.plans} == {"Eager"}
    assert "Eager" in Space().schedules


def test_the_command_shows_it():
    shown = CliRunner().invoke(app, ["schedule", "Eager", "--stages", "3", "--microbatches", "9"]).output
    assert "Eager: 3 stages, 9 microbatches" in shown
    assert "(formula (p-1)/(m+p-1) = 18.2%)" in shown
    assert live_text(make_schedule("Eager", 3, 9)) == "5 3 1"
    rows = CliRunner().invoke(app, ["schedule", "--all"]).output.splitlines()
    assert [row.split()[0] for row in rows[3:]] == list(SCHEDULES)
    assert list(SCHEDULES)[-1] == "Eager"
