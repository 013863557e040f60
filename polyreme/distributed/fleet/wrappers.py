"""Models of a hybrid-parallel job, with the names and arguments that the public API has for what the job mainly is.

Each resolves the strategy and is one of two classes: PlannedModel, or over pipeline stages StagedModel.
"""

from __future__ import annotations

from typing import Any

import jax

from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.job import Job, resolve
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.pipeline.staged_model import StagedModel
from polyreme.distributed.planned_model import PlannedModel
from polyreme.nn.layer import Layer


class MetaParallelBase(PlannedModel):
    """A PlannedModel of a strategy. hcg, strategy: as fleet.init made and took them."""

    def __init__(self, layers: Layer, hcg: Any = None, strategy: Any = None, *, job: Job | None = None) -> None:
        job = job or _job_of(strategy)
        super().__init__(layers, job.plan, job.amp)
        self._hcg = hcg


class DataParallelModel(MetaParallelBase):
    """The batch is split over dp."""


class TensorParallel(MetaParallelBase):
    """Weights are split over mp, by the dims that the model's layers name."""


class ShardingParallel(MetaParallelBase):
    """Optimizer state, gradients or parameters are split over sharding."""


class SegmentParallel(MetaParallelBase):
    """The sequence is split over sep."""


class PipelineParallel(StagedModel):
    """A StagedModel of a strategy. hcg, strategy: as fleet.init made and took them; train_batch takes the global batch,
    of micro_batch_size x accumulate_steps x the degrees of dp and sharding rows."""

    def __init__(self, layers: PipelineLayer, hcg: Any = None, strategy: Any = None) -> None:
        job = _job_of(strategy)
        super().__init__(layers, job.plan, job.amp, job.microbatch_rows)
        self._hcg = hcg


class NoPipelineParallel(PipelineParallel):
    """A PipelineParallel of one stage."""

    def __init__(self, layers: PipelineLayer, strategy: Any = None, hcg: Any = None) -> None:
        super().__init__(layers, hcg, strategy)


def _job_of(strategy: Any) -> Job:
    return resolve(strategy or DistributedStrategy(), jax.device_count())
