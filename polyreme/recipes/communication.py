"""What a pretraining step communicates, beside the formula: from its compiled programs and what stages send."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from polyreme.distributed.comm_report import (
    PipelineReport,
    Report,
    Workload,
    examine,
    sends_of,
    stage_workloads,
    workload_of,
)
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.training import Trainer


def report(config: PretrainConfig, balance: float | None = None) -> Report | PipelineReport:
    """The report of one training step of a configuration.

    The step is compiled and not run; under pipeline stages, where it is many programs, one forward and backward of
    zeros run, and every program is counted as often as it was called. balance: FLOP that hide one byte on the wire; the
    backend's own if None.
    """
    plan = config.parallel_plan
    plan.mesh.check_devices(min(plan.mesh.size, len(jax.devices())))
    trainer = Trainer(config, jax.devices()[: plan.mesh.size])
    batch, seq = config.train.global_batch, config.model.seq_len
    rows = np.zeros((batch, seq), np.int64)
    itemsize = 4 if config.train.amp_level == "O0" else 2
    work = workload_of(trainer.model, batch, seq, itemsize=itemsize)
    if plan.mesh.pp > 1:
        # under O1 products are in 16 bits and the sums between blocks, begun by the embeddings, in 32
        work = dataclasses.replace(work, sent_itemsize=2 if config.train.amp_level == "O2" else 4)
        return _of_stages(trainer, rows, work, balance)
    # the step takes the global norm once itself, to see that it is finite, and once to clip
    work = dataclasses.replace(work, norms=1 if config.train.clip_norm is None else 2)
    program = trainer.compiled(rows, rows)
    return examine([(program.as_text(), 1)], plan, work, jax.default_backend(), balance)


def _of_stages(trainer: Trainer, rows: np.ndarray, work: Workload, balance: float | None) -> PipelineReport:
    layout, backend = trainer.layout, jax.default_backend()
    ran = trainer.ran(rows, rows)
    sent: list[list[Any]] = [[] for _ in layout.stages]
    for stage, s in ran.sent:
        sent[stage].append((s.what, str(s.dtype), s.shape, s.nbytes))
    homes = {name: ran.homes[id(p)] for name, p in trainer.model.named_parameters()}
    stages = []
    for at, part in enumerate(stage_workloads(work, layout.plan, homes)):
        programs = [(p.text, p.calls) for p in ran.programs if p.stage == at]
        stages.append(examine(programs, layout.plan, part, backend, balance, sends_of(sent[at])))
    return PipelineReport(layout.plan, backend, tuple(stages))
