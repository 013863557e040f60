"""What a pipelined step communicates: every stage's programs and sends equal the formula of that stage."""

import json
import math

import jax
import numpy as np
import pytest

from polyreme.core.layout import Layout
from polyreme.distributed.comm_report import PipelineReport, Workload, stage_workloads, terms, workload_of
from polyreme.distributed.comm_report.volume import COMPILERS
from polyreme.distributed.comm_report.workload import ParameterShape
from polyreme.distributed.pipeline.transfer import recorded, send
from polyreme.distributed.placement import clear_plan
from polyreme.errors import ConfigError
from polyreme.jit.called import Called
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.planning import communication
from polyreme.recipes.planning.job import AbstractJob, job_of
from polyreme.recipes.training.trainer import Trainer

CASES = {
    "gpt 1F1B": ("gpt", 2, {"dp": 2, "mp": 2}),
    "gpt ZeRO 3, ZBH1": ("gpt", 2, {"sharding": 2, "sharding_stage": 3, "mp": 2, "schedule": "ZBH1"}),
    "gpt ZBH1, sequence parallel": ("gpt", 2, {"dp": 2, "mp": 2, "sequence_parallel": True, "schedule": "ZBH1"}),
    "llama ZeRO 1": ("llama", 2, {"sharding": 2, "sharding_stage": 1, "mp": 2}),
    "llama ZeRO 2, VPP": (
        "llama", 4, {"sharding": 2, "sharding_stage": 2, "mp": 2, "schedule": "VPP", "virtual_stages": 2},
    ),
    "gpt ZBVPP, ZeRO 1": ("gpt", 4, {"dp": 2, "sharding": 2, "sharding_stage": 1, "schedule": "ZBVPP"}),
    "gpt over segments": ("gpt", 2, {"dp": 2, "sep": 2}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


def config(family, num_layers, plan):
    model = {"family": family, "vocab_size": 128, "hidden_size": 32, "num_layers": num_layers, "num_heads": 4}
    return PretrainConfig.model_validate(
        {
            "model": {**model, "seq_len": 16, **({"num_kv_heads": 2} if family == "llama" else {})},
            "train": {"global_batch": 16, "accumulation": 2},
            "plan": {"pp": 2, **plan},
        }
    )


# the others have their collectives
SLOW = {
    "gpt 1F1B",
    "gpt ZBH1, sequence parallel",
    "gpt ZBVPP, ZeRO 1",
    "gpt over segments",
    "llama ZeRO 1",
}


@pytest.mark.slow_cases("gpt ZeRO 3, ZBH1")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_every_stage_equals_its_formula(name):
    report = communication.report(config(*CASES[name]))
    assert isinstance(report, PipelineReport)
    assert not report.unnamed
    assert len(report.stages) == 2
    for stage in report.stages:
        kinds = {total.kind for total in stage.totals}
        assert {"all-reduce", "send"} <= kinds
        for total in stage.totals:
            if total.measured or total.expected:
                assert total.ratio == pytest.approx(1, abs=0.02), total
        assert stage.whole.bound <= stage.whole.expected
    assert report.whole.measured == pytest.approx(math.fsum(s.whole.measured for s in report.stages) / 2)


@pytest.mark.slow
def test_rows_by_hand():
    report = communication.report(config("gpt", 2, {"dp": 2, "mp": 2}))
    assert isinstance(report, PipelineReport)
    # 4 rows of 16 tokens, 32 wide, fp32; two microbatches; the tied table is 128 x 32, split in two by mp
    act, table = 4 * 16 * 32 * 4, 128 * 32 * 4 // 2
    sent = [
        {(c.parts[0].origin.layer, c.payload, c.times) for c in stage.collectives if c.kind == "send"}
        for stage in report.stages
    ]
    assert sent == [
        {("activations", act, 2), ("parameters", table, 1)},
        {("gradients", act, 2), ("parameter gradients", table, 1)},
    ]
    sums = [c for c in report.stages[0].collectives if c.axes == ("dp",)]
    # gradients are summed by the last microbatch's backward alone
    assert sums
    assert {(c.times, c.parts[0].origin.phase) for c in sums} == {(1, "backward")}
    text = report.as_text()
    for word in ("stage 0", "stage 1", "attention.qkv", "gradients of shared parameters", "between programs", "mean"):
        assert word in text
    plain = json.loads(json.dumps(report.to_dict()))
    measured = [math.fsum(c["wire_bytes"] for c in stage["collectives"]) for stage in plain["stages"]]
    assert sum(measured) / 2 == pytest.approx(plain["whole"]["measured"])


@pytest.mark.slow
def test_a_dry_run_calls_and_sends_what_a_step_does():
    """Of what a real step does on its second batch: on the first a chunk does not know yet whether it draws numbers."""
    job = config("gpt", 2, {"dp": 2})
    abstract_job = AbstractJob(job_of(job), job.parallel_plan, jax.devices()[:4])
    arrays = sum(array.nbytes for array in jax.live_arrays())
    try:
        dry = abstract_job.dry_run()
    finally:
        abstract_job.close()
    assert sum(array.nbytes for array in jax.live_arrays()) - arrays < 4096
    planned = Trainer(job, jax.devices()[:4]).planned
    batch = planned.cut(*np.zeros((2, 16, 16), np.int64))
    planned.step.gradients(batch)
    programs = planned.step.pipeline.programs()
    before = [call.calls for _, _, call in programs]
    with recorded() as sent:
        planned.step.gradients(batch)
    calls = {(stage, name): call.calls - n for (stage, name, call), n in zip(programs, before, strict=True)}
    assert calls[0, "chunk 0, forward"] == calls[1, "chunk 1, forward"] == 2
    updates = {(stage, name): 1 for stage in (0, 1) for name in ("norms", "update")}
    assert {(p.stage, p.name): p.calls for p in dry.programs} == calls | updates
    assert [each for _, each in dry.sent] == sent


def test_the_formula_of_a_pipeline_is_one_stages():
    model = GPT(GPTConfig.nano())
    whole = workload_of(model, 16, 16)
    plan = Plan.from_degrees(dp=2, pp=2)
    with pytest.raises(ConfigError, match=r"stage None.*stage_workloads"):
        terms(plan, whole)
    homes = {p.name: int(p.name.startswith(("blocks.1", "norm"))) for p in whole.parameters}
    stages: list[Workload] = stage_workloads(whole, plan, homes)
    assert [(s.num_layers, s.sharers) for s in stages] == [(1, ("tokens.weight",)), (1, ())]
    tables = [next(p for p in s.parameters if p.name == "tokens.weight") for s in stages]
    assert [(p.uses, p.is_home) for p in tables] == [(("lookup",), True), (("head",), False)]
    with pytest.raises(ConfigError, match=r"work of stage 0"):
        terms(Plan.from_degrees(dp=2), stages[0])


def test_a_call_remembers_its_first_arguments():
    add = Called(lambda a, b: a + b, donate_argnums=0)
    add(jax.numpy.ones(3), 2.0)
    add(jax.numpy.ones(3), 2.0)
    assert add.calls == 2
    assert "[3]{0} parameter(0)" in add.compiled().as_text()


def test_sends_are_told_to_listeners_only_while_they_listen():
    stage, following = Layout(Plan.from_degrees(pp=2, dp=2), jax.devices()[:4]).stages
    array = jax.device_put(np.zeros((4, 2), np.float32), stage.activation(("batch", None), (4, 2)))
    with recorded() as outer:
        with recorded() as inner:
            send([array, None], following, "gradients")
        send([array], following)
    assert [(s.what, s.shape, s.nbytes) for s in inner] == [("gradients", (2, 2), 16)]
    assert [s.what for s in outer] == ["gradients", "activations"]
    assert outer[0].source == frozenset(stage.mesh.devices.flat)


@pytest.mark.parametrize("stage", [2, 3])
def test_sums_of_gradients_are_as_wide_as_programs_make_them(stage):
    """Of 16-bit parameters, as a TPU's programs have it: what microbatches were added up to has 32 bits, and of what
    each microbatch sums (stage 3) the gradients of gains and tables; those of products have 16."""
    shapes = {"norm.weight": ("gain", (8,)), "blocks.0.ffn.up.weight": ("product", (8, 32))}
    parameters = tuple(
        ParameterShape(name, ("embed", "ffn")[: len(shape)], shape, 2, 2, (use,))
        for name, (use, shape) in shapes.items()
    )
    work = Workload(parameters, 16, 16, 8, 1, 8, itemsize=2, norms=0, stage=0)
    plan = Plan.from_degrees(pp=2, sharding=2, sharding_stage=stage, num_microbatches=2)
    found = [(t.kind, t.payload, t.times) for t in terms(plan, work, COMPILERS["tpu"]) if t.name == "gradients"]
    widths = (4, 4) if stage == 2 else (4, 2)
    runs = 1 if stage == 2 else 2
    assert found == [("reduce-scatter", 8 * widths[0], runs), ("reduce-scatter", 8 * 32 * widths[1], runs)]
