"""distributed_model and distributed_optimizer: a model and its optimizer made part of the job.

They may be called in either order.
"""

from __future__ import annotations

from typing import Any

import jax

from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.job import Job, resolve
from polyreme.distributed.fleet.base.topology import ParallelMode
from polyreme.distributed.fleet.fleet import fleet
from polyreme.distributed.fleet.optimizer import HybridParallelOptimizer
from polyreme.distributed.fleet.wrappers import (
    DataParallelModel,
    MetaParallelBase,
    NoPipelineParallel,
    PipelineParallel,
    SegmentParallel,
    ShardingParallel,
    TensorParallel,
)
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.recompute_calls import follows_plan, recompute_sublayers
from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer
from polyreme.optimizer import Optimizer

_WRAPPERS: dict[int, type[MetaParallelBase]] = {
    ParallelMode.TENSOR_PARALLEL: TensorParallel,
    ParallelMode.SEGMENT_PARALLEL: SegmentParallel,
    ParallelMode.SHARDING_PARALLEL: ShardingParallel,
    ParallelMode.DATA_PARALLEL: DataParallelModel,
}


def distributed_model(model: Layer) -> Layer:
    """The model on the mesh of the job: its parameters are moved as the plan says, and it is returned in a wrapper.

    A PipelineLayer becomes a PipelineParallel (NoPipelineParallel with one stage), to be trained with train_batch; any
    other Layer keeps its way of being called, with global batches. amp and recompute of the strategy are applied.

    Raises ConfigError before fleet.init, for a pipeline of another model than a PipelineLayer, and for recompute of a
    model that does not follow the plan and no names of sublayers; PlacementError, naming the parameter, for a dim that
    does not divide.
    """
    job, hcg = fleet.job, fleet.get_hybrid_communicate_group()
    if not isinstance(model, Layer):
        raise TypeError(f"distributed_model takes a Layer, got {type(model).__name__}")
    if job.plan.mesh.pp > 1 and not isinstance(model, PipelineLayer):
        raise ConfigError(
            f"distributed_model: pp_degree is {job.plan.mesh.pp} and {type(model).__name__} is no PipelineLayer; "
            "describe the model as a PipelineLayer, train it by dist.to_static or Engine, which cut any model into "
            "stages, or set pp_degree to 1"
        )
    _recompute(model, job)
    masters = job.amp.cast(model)
    wrapped: Any
    if isinstance(model, PipelineLayer):
        kind = PipelineParallel if job.plan.mesh.pp > 1 else NoPipelineParallel
        wrapped = kind(model, hcg=hcg, strategy=fleet.init_strategy)
    else:
        wrapped = _WRAPPERS[hcg.get_parallel_mode()](model, hcg, job=job)
    wrapped.__dict__["_masters"] = masters
    fleet.models.add(wrapped)
    for optimizer in fleet.optimizers:
        _hand_over(wrapped, optimizer.inner_opt)
    return wrapped


def distributed_optimizer(optimizer: Optimizer, strategy: DistributedStrategy | None = None) -> HybridParallelOptimizer:
    """The optimizer under the job's strategy: state laid out by the plan, gradients merged if the strategy says so.

    strategy: another one than fleet.init took, of the same mesh and plan; its gradient_merge then counts. Raises
    ConfigError for one of another plan, and before fleet.init.
    """
    job = fleet.job
    if strategy is not None:
        other = resolve(strategy, jax.device_count())
        if (other.plan, other.amp) != (job.plan, job.amp):
            raise ConfigError(
                "distributed_optimizer: its strategy makes another plan than fleet.init's; give fleet.init the one "
                f"that is meant.\nfleet.init: {job.plan}, {job.amp}\nhere: {other.plan}, {other.amp}"
            )
        job = other
    made = HybridParallelOptimizer(optimizer, fleet.get_hybrid_communicate_group(), job=job)
    fleet.optimizers.add(made)
    for model in fleet.models:
        _hand_over(model, optimizer)
    return made


def _hand_over(model: Any, optimizer: Optimizer) -> None:
    """Hand the master weights of its parameters to the optimizer; the model keeps none of them."""
    masters = model.__dict__["_masters"]
    chosen = {id(p): masters.pop(id(p)) for p in optimizer._parameters if id(p) in masters}
    if chosen:
        optimizer.keep_masters(chosen)
        # the model may have been loaded since they were taken
        optimizer.check_masters(p for p in optimizer._parameters if id(p) in chosen)


def _recompute(model: Layer, job: Job) -> None:
    names, setting = job.recompute_layers, "recompute_configs.checkpoints"
    recompute_sublayers(model, names, setting, offload=job.recompute_offloads)
    if not names and job.plan.recompute != "none" and not follows_plan(model):
        raise ConfigError(
            f"strategy.recompute: {type(model).__name__} does not say which of its parts to recompute in backward; "
            'name them, recompute_configs = {"checkpoints": ["blocks.0", ...]}, or call recompute in its forward'
        )
