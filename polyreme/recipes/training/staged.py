"""The search for a tensor that is not finite over pipeline stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyreme.core import state
from polyreme.distributed.pipeline.run import Run
from polyreme.distributed.planned_step import PlannedStep
from polyreme.mesh.schedule import Task


def first_bad_of_stages(planned: PlannedStep, tokens: Any, labels: Any) -> str | None:
    """The first tensor that is not finite when the batch is computed again over stages or in blocks, by name:
    parameters, what a chunk gives of a microbatch, the loss of each, then gradients from the last to the first; None if
    all are finite."""
    parameters = list(planned.model.named_parameters())
    for name, p in parameters:
        if not _is_finite(state.read(p)):
            return f"parameter {name}"
    planned.optimizer.clear_grad()
    bad: list[str] = []

    def look(stage: int, task: Task, run: Run) -> None:
        if task.kind == "F" and not bad and not all(map(_is_finite, run.output(task.chunk, task.microbatch))):
            bad.append(_output_name(planned, task.chunk, task.microbatch))

    with planned.step.pipeline.observed(look):
        planned.step.gradients(planned.cut(tokens, labels))
    for name, p in reversed(parameters):
        if not bad and p._grad is not None and not _is_finite(state.read(p._grad)):
            bad.append(f"gradient of {name}")
    planned.optimizer.clear_grad()
    return bad[0] if bad else None


def _output_name(planned: PlannedStep, k: int, microbatch: int) -> str:
    """The output of a chunk in words: that of its last Layer, by its name in the model."""
    assert planned.layers is not None
    chunks = planned.layers.get_model_chunks()
    if k == len(chunks) - 1:
        return f"loss of microbatch {microbatch}"
    names = {id(layer): name for name, layer in planned.model.named_sublayers(include_self=True)}
    known = [names[id(layer)] for layer in chunks[k].sublayers() if id(layer) in names]
    tops = [name for name in known if not any(name.startswith(f"{other}.") for other in known)]
    return f"output of {tops[-1] if tops else f'chunk {k}'} of microbatch {microbatch}"


def _is_finite(array: jax.Array) -> bool:
    if not array.sharding.addressable_devices:  # of other processes, which look at it
        return True
    return bool(jnp.isfinite(array.astype(jnp.promote_types(array.dtype, jnp.float32))).all())
