"""What pretraining over pipeline stages does beside its step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.pipeline.transfer import Sent, recorded
from polyreme.distributed.planned_step import PlannedStep
from polyreme.training import cut


class Program(NamedTuple):
    """One of a step's compiled programs: its stage, its optimized HLO, and how often the step calls it."""

    stage: int
    name: str
    text: str
    calls: int


class Ran(NamedTuple):
    """What a step runs, and what its stages send each other, each with the stage that sends it.

    homes: the chunk that each parameter is at home in, by id.
    """

    programs: list[Program]
    sent: list[tuple[int, Sent]]
    homes: dict[int, int]


class StagedRuns:
    """What a run over pipeline stages does beside its step: evaluation, logits, what a step runs, and the search for a
    bad tensor."""

    def __init__(self, planned: PlannedStep) -> None:
        assert planned.layers is not None
        self.layers: PipelineLayer = planned.layers
        self.planned, self.optimizer = planned, planned.optimizer
        self._step: PipelineStep = planned.step
        self._pipeline = self._step.pipeline
        self._autocast = planned.policy.precision.autocast

    def ran(self, tokens: Any, labels: Any) -> Ran:
        """The forward and backward of two steps run for this batch, of which the second counts; the update is compiled
        and not run, the gradients are thrown away."""
        stage_of = {frozenset(at.mesh.devices.flat): s for s, at in enumerate(self._pipeline.layout.stages)}
        batch = self.planned.cut(tokens, labels)
        self._step.gradients(batch)  # on its first batch a chunk does not know yet whether it draws random numbers
        self.optimizer.clear_grad(set_to_zero=False)
        before = {id(call): call.calls for _, _, call in self._pipeline.programs()}
        with recorded() as sent:
            self._step.gradients(batch)
        programs = [
            Program(stage, name, call.compiled().as_text(), call.calls - before[id(call)])
            for stage, name, call in self._pipeline.programs()
        ]
        update = self._step.updating()
        for group, found in update.compiled(update.squares(), self._step.halted):
            stage = stage_of[frozenset(group.parameters[0]._array.sharding.device_set)]
            programs += [Program(stage, "update", program.as_text(), 1) for program in found]
        self.optimizer.clear_grad(set_to_zero=False)
        homes: dict[int, int] = {}
        for k, chunk in enumerate(self.layers.get_model_chunks()):
            for p in chunk.parameters():
                homes.setdefault(id(p), k)
        return Ran(programs, [(stage_of[s.source], s) for s in sent if s.source in stage_of], homes)

    def evaluate(self, tokens: Any, labels: Any) -> float:
        """Mean loss of a batch, nats a token."""
        batch = self.planned.cut(tokens, labels)
        with self._autocast():
            losses = self._pipeline.evaluate(batch, _no_keys(len(batch)))
        return float(self._pipeline.mean(losses, batch))

    def logits(self, tokens: Any) -> np.ndarray:
        """[batch, seq, vocab] of tokens, on the host."""
        batch = cut([tokens, None], 1, None)
        with self._autocast():
            (out,) = self._pipeline.evaluate(batch, _no_keys(1), loss=None)
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
        found = None if bad is None else f"loss of microbatch {bad}"
        for name, p in reversed(parameters):
            if found is None and p._grad is not None and not _is_finite(p._grad._array):
                found = f"gradient of {name}"
        self.optimizer.clear_grad()
        return found


def _no_keys(count: int) -> list[jax.Array]:
    """Keys for code that draws nothing; the generator stays where it is."""
    return [jax.device_put(np.zeros(2, np.uint32))] * count


def _is_finite(array: jax.Array) -> bool:
    return bool(jnp.isfinite(array.astype(jnp.promote_types(array.dtype, jnp.float32))).all())
