"""What pretraining over pipeline stages does beside its step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.planned_step import PlannedStep
from polyreme.training import cut


class StagedRuns:
    """What a run over pipeline stages does beside its step: evaluation, logits, and the search for a bad tensor."""

    def __init__(self, planned: PlannedStep) -> None:
        self.planned, self.optimizer = planned, planned.optimizer
        self._step: PipelineStep = planned.step
        self._pipeline = self._step.pipeline

    def evaluate(self, tokens: Any, labels: Any) -> float:
        """Mean loss of a batch, nats a token."""
        batch = self.planned.cut(tokens, labels)
        return float(self._pipeline.mean([loss for (loss,) in self._step.evaluate(batch)], batch))

    def logits(self, tokens: Any) -> np.ndarray:
        """[batch, seq, vocab] of tokens, on the host."""
        batch = cut([tokens, None], 1, None)
        (out,) = self._step.evaluate(batch, loss=None)
        return self._pipeline.in_every_process(out)

    def first_bad_tensor(self, tokens: Any, labels: Any, parameters: list[tuple[str, Any]]) -> str | None:
        """Name of the first tensor that is not finite when the batch is computed again: parameters, the loss of each
        microbatch, then gradients from the last to the first; None if all are finite."""
        for name, p in parameters:
            if not _is_finite(p._array):
                return f"parameter {name}"
        self.optimizer.clear_grad()
        _, parts = self._step.gradients(self.planned.cut(tokens, labels))
        bad = next((i for i, ([loss], _) in enumerate(parts) if not _is_finite(loss._array)), None)
        name_of_first = None if bad is None else f"loss of microbatch {bad}"
        for name, p in reversed(parameters):
            if name_of_first is None and p._grad is not None and not _is_finite(p._grad._array):
                name_of_first = f"gradient of {name}"
        self.optimizer.clear_grad()
        return name_of_first


def _is_finite(array: jax.Array) -> bool:
    return bool(jnp.isfinite(array.astype(jnp.promote_types(array.dtype, jnp.float32))).all())
