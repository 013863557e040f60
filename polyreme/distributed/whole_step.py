"""The training step of a model over all devices of a layout, as one captured program; two where state is on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import rng, state
from polyreme.core.layout import Layout
from polyreme.distributed.pipeline.transfer import place
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.jit import to_static
from polyreme.training import Microbatch, StepResult, TrainingStep


class WholeStep:
    """A TrainingStep captured, for microbatches on the host, which it lays out over the layout's devices.

    Each microbatch is spread over all devices, or whole on each where its rows do not divide. Where optimizer state
    lies on disk the program ends with the gradients, and the optimizer updates bucket by bucket.
    """

    step: TrainingStep
    layout: Layout

    def __init__(self, step: TrainingStep, layout: Layout) -> None:
        self.step, self.layout = step, layout
        self._train = to_static(self._without_parts)
        self._judged = to_static(self._judged_gradients)
        self._judge = to_static(step.judge)
        self._gradients = to_static(self._mean_loss)
        self._update = to_static(step.update)
        self._evaluate = to_static(step.evaluate)

    def __call__(self, batch: Sequence[Microbatch]) -> StepResult:
        """One optimizer step; of its parts only what the forward gives beside the losses."""
        if not self._is_streamed:
            return self._train(self.place(batch))
        result = self._judged(self.place(batch))
        self.step.apply(result.skipped)
        return result

    def gradients(self, batch: Sequence[Microbatch]) -> tuple[Tensor, list[tuple[list[Tensor], Any]]]:
        """The first half of a step, as TrainingStep.gradients says, without outputs."""
        return self._gradients(self.place(batch))

    def update(self, loss: Tensor) -> dict[str, Tensor]:
        """The second half of a step, from the gradients there are, as TrainingStep.update says."""
        if not self._is_streamed:
            return self._update(loss)
        judged = self._judge(loss)
        self.step.apply(judged.get("skipped"))
        return judged

    def evaluate(
        self, batch: Sequence[Microbatch], *, losses: bool = True, outputs: bool = False
    ) -> list[tuple[list[Tensor], Any]]:
        """Forward alone, as TrainingStep.evaluate says."""
        return self._evaluate(self.place(batch), losses=losses, outputs=outputs)

    def compiled(self, batch: Sequence[Microbatch]) -> Any:
        """The program of a step on a batch of these shapes, compiled and not run: a jax.stages.Compiled."""
        return self._program.compiled(self.place(batch))

    @property
    def fusions(self) -> list[str]:
        """Names of the patterns that calls were fused by in the last step."""
        return self._program.fusions

    @property
    def _is_streamed(self) -> bool:
        return getattr(self.step.optimizer, "is_streamed", False)

    @property
    def _program(self) -> Any:
        return self._judged if self._is_streamed else self._train

    def place(self, batch: Sequence[Microbatch]) -> list[Microbatch]:
        """The microbatches laid out over the devices."""
        return [
            Microbatch(
                place(part.inputs, self.layout).tensors(),
                place(part.labels, self.layout).tensors(),
                part.rows,
                None if part.share is None else Tensor(put(np.asarray(part.share), self.layout.replicated())),
            )
            for part in batch
        ]

    def _judged_gradients(self, batch: list[Microbatch]) -> StepResult:
        key = Tensor(state.read(rng.default_generator.key_state())) if self.step.policy.guards else None
        loss, parts = self.step.gradients(batch)
        told = [] if _is_silent(parts) else [([], told) for _, told in parts]
        return StepResult(loss, None, key, told)._replace(**self.step.judge(loss))

    def _without_parts(self, batch: list[Microbatch]) -> StepResult:
        result = self.step(batch)
        return result._replace(parts=[] if _is_silent(result.parts) else [([], told) for _, told in result.parts])

    def _mean_loss(self, batch: list[Microbatch]) -> tuple[Tensor, list[tuple[list[Tensor], Any]]]:
        mean, parts = self.step.gradients(batch)
        return mean, [(losses, None) for losses, _ in parts]


def _is_silent(parts: Sequence[tuple[list[Tensor], Any]]) -> bool:
    return all(told is None for _, told in parts)
