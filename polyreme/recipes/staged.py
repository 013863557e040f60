"""The training step of a model over pipeline stages: what recipes.training does in one program, in one a stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import rng, state
from polyreme.core.layout import Layout
from polyreme.distributed.pipeline.batch import cut
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.transfer import Sent, recorded
from polyreme.distributed.pipeline.update import StagedUpdate
from polyreme.eager.tensor import Tensor
from polyreme.optimizer import Optimizer


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


class StagedStep:
    """One optimizer step, evaluation and the search for a bad tensor, over pipeline stages.

    step(tokens, labels) takes a global batch on the host, int `[batch, seq]`; -> mean loss, gradient norm, and the
    random key it began with. From the first step whose loss or gradients are not finite on, no step changes anything.
    """

    def __init__(
        self,
        model: Any,
        layers: PipelineLayer,
        layout: Layout,
        optimizer: Optimizer,
        autocast: Callable[[], contextlib.AbstractContextManager],
    ) -> None:
        self.layers = layers
        self.optimizer = optimizer
        self._parts = layout.plan.num_microbatches
        self._autocast = autocast
        self._pipeline = Pipeline(layers.get_model_chunks(), [model.pipeline_loss], layout, model.logits)
        self._update = StagedUpdate(optimizer)
        self._halted = jax.device_put(np.zeros((), np.bool_), self._pipeline.where_losses_are)

    def step(self, tokens: Any, labels: Any) -> tuple[Tensor, Tensor, Tensor]:
        """One optimizer step on a global batch."""
        key = Tensor(state.read(rng.default_generator.key_state()))
        loss, _ = self._gradients(tokens, labels)
        squares = self._update.squares()
        here = jax.device_put([s._array for s in squares], [self._pipeline.where_losses_are] * len(squares))
        norm, self._halted = _judged(loss, here, self._halted)
        # a copy: the flag is donated nowhere, but a Tensor may be asked for its value after the next step
        self._update.step(squares, Tensor(self._halted))
        return Tensor(loss), Tensor(norm), key

    def ran(self, tokens: Any, labels: Any) -> Ran:
        """The forward and backward of two steps run for this batch, of which the second counts; the update is compiled
        and not run, the gradients are thrown away."""
        stage_of = {frozenset(at.mesh.devices.flat): s for s, at in enumerate(self._pipeline.layout.stages)}
        self._gradients(tokens, labels)  # on its first batch a chunk does not know yet whether it draws random numbers
        self.optimizer.clear_grad(set_to_zero=False)
        before = {id(call): call.calls for _, _, call in self._pipeline.programs()}
        with recorded() as sent:
            self._gradients(tokens, labels)
        programs = [
            Program(stage, name, call.compiled().as_text(), call.calls - before[id(call)])
            for stage, name, call in self._pipeline.programs()
        ]
        for group, found in self._update.compiled(self._update.squares(), Tensor(self._halted)):
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
        batch = cut([tokens, labels], self._parts, None)
        with self._autocast():
            losses = self._pipeline.evaluate(batch, _no_keys(self._parts))
        return float(self._pipeline.mean(losses, batch))

    def logits(self, tokens: Any) -> np.ndarray:
        """[batch, seq, vocab] of tokens, on the host."""
        batch = cut([tokens, None], 1, None)
        with self._autocast():
            (out,) = self._pipeline.evaluate(batch, _no_keys(1), loss=None)
        return self._pipeline.in_every_process(out)

    def share_numbers(self) -> None:
        """Before the optimizer's arrays are asked for; all processes must call it."""
        self._update.share_numbers()

    def first_bad_tensor(self, tokens: Any, labels: Any, parameters: list[tuple[str, Any]]) -> str | None:
        """Name of the first tensor that is not finite when the batch is computed again: parameters, the loss of each
        microbatch, then gradients from the last to the first; None if all are finite."""
        for name, p in parameters:
            if not _is_finite(p._array):
                return f"parameter {name}"
        self.optimizer.clear_grad()
        _, losses = self._gradients(tokens, labels)
        bad = next((i for i, loss in enumerate(losses) if not _is_finite(loss)), None)
        found = None if bad is None else f"loss of microbatch {bad}"
        for name, p in reversed(parameters):
            if found is None and p._grad is not None and not _is_finite(p._grad._array):
                found = f"gradient of {name}"
        self.optimizer.clear_grad()
        return found

    def _gradients(self, tokens: Any, labels: Any) -> tuple[jax.Array, list[jax.Array]]:
        """Mean loss and the microbatches' losses; the gradients are left on the parameters."""
        batch = cut([tokens, labels], self._parts, None)
        with self._autocast():
            losses = self._pipeline.train(batch, rng.default_generator.branches(self._parts))
        return self._pipeline.mean(losses, batch), losses


def _no_keys(count: int) -> list[jax.Array]:
    """Keys for code that draws nothing; the generator stays where it is."""
    return [jax.device_put(np.zeros(2, np.uint32))] * count


@jax.jit
def _judged(loss: jax.Array, squares: list[jax.Array], halted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> (gradient norm, whether this step and those after it are left out)."""
    norm = jnp.sqrt(sum(jnp.sum(s) for s in squares)).astype(jnp.float32)
    return norm, halted | ~jnp.isfinite(loss + norm)


def _is_finite(array: jax.Array) -> bool:
    return bool(jnp.isfinite(array.astype(jnp.promote_types(array.dtype, jnp.float32))).all())
