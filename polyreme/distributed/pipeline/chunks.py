"""A model as the chunks that pipeline stages run."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.errors import ConfigError
from polyreme.mesh import Plan


def in_chunks(model: Any, plan: Plan) -> PipelineLayer:
    """A model as the chunks that the plan's stages run: itself, or a PipelineLayer of its pipeline_items().

    Raises ConfigError for a model that has none, and for chunk_items that are not as many.
    """
    if isinstance(model, PipelineLayer):
        if plan.chunk_items:
            raise ConfigError("plan: chunk_items for a PipelineLayer, which is cut by its seg_method; leave them out")
        return model
    if not hasattr(model, "pipeline_items"):
        raise ConfigError(
            f"mesh {plan.mesh} needs a model in chunks; make {type(model).__name__} a PipelineLayer, give it "
            "pipeline_items() and pipeline_loss(output, labels), or cut it as it is with "
            "distributed.auto_parallel.stages.cut_into_stages"
        )
    is_v, items = plan.schedule_kind.is_v, model.pipeline_items()
    if plan.chunk_items and sum(plan.chunk_items) != len(items):
        raise ConfigError(
            f"plan: chunk_items={list(plan.chunk_items)} are {sum(plan.chunk_items)} items, {type(model).__name__} has "
            f"{len(items)}; make them {len(items)}"
        )
    return PipelineLayer(
        items,
        num_stages=plan.mesh.pp,
        seg_method=list(accumulate(plan.chunk_items, initial=0)) if plan.chunk_items else "uniform",
        num_virtual_pipeline_stages=None if is_v else plan.virtual_stages,
        use_dualpipev=is_v,
    )


def in_small_chunks(model: Any, plan: Plan) -> PipelineLayer:
    """A model as chunks of one item each, on one stage: a PipelineLayer by_items(), or one of its pipeline_items(),
    some of which end at routers where the plan brings experts one by one.

    Raises ConfigError for a model that has none, or no block that a router parts.
    """
    at_routers = "expert" in plan.offload
    if isinstance(model, PipelineLayer) and not at_routers:
        return model.by_items()
    if at_routers and not hasattr(model, "block_parts"):
        raise ConfigError(
            "plan: offload of expert needs a model in chunks that end at routers, as families with experts have; "
            f"{type(model).__name__} has none: offload 'param' and 'state', which moves all experts of a block"
        )
    if not hasattr(model, "pipeline_items"):
        raise ConfigError(
            f"plan: {'compile=blocks' if plan.in_blocks else 'offload of param'} needs a model in chunks; make "
            f"{type(model).__name__} a PipelineLayer of one stage, or give it pipeline_items() and "
            "pipeline_loss(output, labels)"
        )
    items = model.pipeline_items(at_routers=True) if at_routers else model.pipeline_items()
    return PipelineLayer(items, num_stages=1, num_virtual_pipeline_stages=len(items))
