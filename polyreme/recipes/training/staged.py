"""The search for a tensor that is not finite over pipeline stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyreme.distributed.planned_step import PlannedStep


def first_bad_of_stages(planned: PlannedStep, tokens: Any, labels: Any) -> str | None:
    """The first tensor that is not finite when the batch is computed again over stages, by name: parameters, the loss
    of each microbatch, then gradients from the last to the first; None if all are finite."""
    parameters = list(planned.model.named_parameters())
    for name, p in parameters:
        if not _is_finite(p._array):
            return f"parameter {name}"
    planned.optimizer.clear_grad()
    _, parts = planned.step.gradients(planned.cut(tokens, labels))
    bad = next((i for i, ([loss], _) in enumerate(parts) if not _is_finite(loss._array)), None)
    name_of_first = None if bad is None else f"loss of microbatch {bad}"
    for name, p in reversed(parameters):
        if name_of_first is None and p._grad is not None and not _is_finite(p._grad._array):
            name_of_first = f"gradient of {name}"
    planned.optimizer.clear_grad()
    return name_of_first


def _is_finite(array: jax.Array) -> bool:
    return bool(jnp.isfinite(array.astype(jnp.promote_types(array.dtype, jnp.float32))).all())
