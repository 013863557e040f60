"""Communication of a pretraining step beside the formula: from its compiled programs and the sends between stages."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme.distributed.comm_report import (
    PipelineReport,
    Report,
    Workload,
    examine,
    sends_of,
    stage_workloads,
    workload_of,
)
from polyreme.errors import ConfigError
from polyreme.models.families import FAMILIES
from polyreme.recipes.config import RunConfig
from polyreme.recipes.planning.job import AbstractJob, devices_for, job_of


def report(config: RunConfig, balance: float | None = None, topology: str = "") -> Report | PipelineReport:
    """The report of one training step of a configuration.

    The step is compiled and not run, nor does it take memory; under pipeline stages, where it is many programs, every
    program is counted as often as a step calls it. balance: FLOP that hide one byte on the wire; the backend's own if
    None. topology: a TPU slice to compile for, such as "v5e:2x4", by libtpu; this process's devices by default.
    """
    plan = config.parallel_plan
    devices = devices_for(plan, topology)
    plan.mesh.check_devices(len(devices))
    if plan.streams:
        raise ConfigError(
            "plan: offload of param or expert is not seen by comm, which reads the programs of one step or of pipeline "
            "stages; leave param and expert out of plan.offload: each chunk has the collectives of its part of the step"
        )
    job = AbstractJob(job_of(config), plan, devices)
    try:
        return _report(config, job, devices[0].platform, balance)
    finally:
        job.close()


def _report(config: RunConfig, job: AbstractJob, backend: str, balance: float | None) -> Report | PipelineReport:
    if FAMILIES[config.dimensions.family].shape is None:
        return examine([(job.compiled().as_text(), 1)], job.plan, None, backend, balance)
    batch, seq = config.train.global_batch, config.dimensions.seq_len
    itemsize = 4 if config.train.amp_level == "O0" else 2
    work = workload_of(job.model, batch, seq, itemsize=itemsize)
    if job.planned.is_staged:
        # under O1 products are in 16 bits and the sums between blocks, begun by the embeddings, in 32
        work = dataclasses.replace(work, sent_itemsize=2 if config.train.amp_level == "O2" else 4)
        return _of_stages(job, work, backend, balance)
    # the step takes the global norm once itself, to see that it is finite, and once to clip
    work = dataclasses.replace(work, norms=1 if config.train.clip_norm is None else 2)
    program = job.compiled()
    return examine([(program.as_text(), 1)], job.plan, work, backend, balance)


def _of_stages(job: AbstractJob, work: Workload, backend: str, balance: float | None) -> PipelineReport:
    plan, layers = job.plan, job.planned.layers
    assert layers is not None
    step = job.dry_run()
    sent: list[list[Any]] = [[] for _ in job.layout.stages]
    for stage, s in step.sent:
        sent[stage].append((s.what, str(s.dtype), s.shape, s.nbytes))
    homes: dict[int, int] = {}
    for k, chunk in enumerate(layers.get_model_chunks()):
        for p in chunk.parameters():
            homes.setdefault(id(p), k)
    named = {name: homes[id(p)] for name, p in job.model.named_parameters()}
    stages = []
    for at, part in enumerate(stage_workloads(work, plan, named)):
        programs = [(c.program.as_text(), c.calls) for c in step.programs if c.stage == at]
        stages.append(examine(programs, plan, part, backend, balance, sends_of(sent[at])))
    return PipelineReport(plan, backend, tuple(stages))
