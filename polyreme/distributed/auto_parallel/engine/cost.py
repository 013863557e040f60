"""The cost of an Engine's training step, predicted before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.core import layout as layouts
from polyreme.distributed.auto_parallel.dims.graph import graph_of
from polyreme.distributed.auto_parallel.dims.infer import infer_dims
from polyreme.distributed.auto_parallel.engine.choose import cluster_of, training_of
from polyreme.distributed.auto_parallel.engine.placement import TrainingBatch, devices_of
from polyreme.distributed.auto_parallel.engine.strategy import Settled
from polyreme.distributed.auto_parallel.tensors.process_mesh import get_mesh
from polyreme.errors import ConfigError
from polyreme.hapi.input_spec import InputSpec
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.planner import Cluster, Prediction, predict


def cost_of(layer: Layer, settled: Settled, batch: TrainingBatch, plan: Plan, cluster: Cluster | None) -> Prediction:
    """The prediction of a training step: seconds, share of the peak, memory of a device and what it waits for.

    batch: specs of a global batch. cluster: what the devices are like, this machine's if None. Raises ConfigError for
    specs that leave the number of rows open.
    """
    rows = _rows(batch.inputs)
    with layouts.using(None), settled.precision.autocast():
        graph = graph_of(infer_dims(layer, batch.inputs, batch.labels, batch.loss))
        training = training_of(layer, batch.optimizer)
    found = cluster or cluster_of(devices_of(get_mesh())[: plan.mesh.size])
    return predict(graph, plan, found, rows, training)


def _rows(specs: Sequence[Any]) -> int:
    shape = specs[0].shape if specs and isinstance(specs[0], InputSpec) else ()
    if not shape or shape[0] is None:
        raise ConfigError(
            f"Engine.cost: the inputs ({list(specs)}) leave the rows of a batch open; give inputs_spec=[InputSpec([32, "
            "...], dtype)] with a global batch's"
        )
    return shape[0]
