"""The training step of a model over pipeline stages: what training.step does in one program, in a program for each task
of the schedule's table and each stage's update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.amp import GradScaler
from polyreme.core import rng, state
from polyreme.distributed.gradient_merge import MergingOptimizer
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.update import StagedUpdate, frozen_settings
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.training import Microbatch, StepPolicy, StepResult


class PipelineStep:
    """A pipeline's training step under a policy.

    optimizer: updates where a call gives no other: all of a stage's parameters in one program if its step() is the
    plain one. A call may also bring a scaler in place of the policy's.
    """

    pipeline: Pipeline
    policy: StepPolicy
    optimizer: Any
    scaler: GradScaler | None

    def __init__(self, pipeline: Pipeline, policy: StepPolicy, optimizer: Any = None) -> None:
        self.pipeline, self.policy, self.optimizer = pipeline, policy, optimizer
        self.scaler = policy.precision.make_scaler()
        self._halted = put(np.zeros((), np.bool_), pipeline.where_losses_are)
        self.spike_statistic: Tensor | None = None
        if policy.spikes is not None:
            self.spike_statistic = Tensor(put(np.asarray(policy.spikes.start()), pipeline.where_losses_are))
        self._updates: dict[Any, StagedUpdate] = {}

    def __call__(
        self, batch: Sequence[Microbatch], *, optimizer: Any = None, scaler: GradScaler | None = None, loss: int = 0
    ) -> StepResult:
        """One optimizer step on a batch. loss: the place of the loss to train among the pipeline's."""
        key = Tensor(state.read(rng.default_generator.key_state())) if self.policy.guards else None
        mean, parts = self.gradients(batch, scaler=scaler, loss=loss)
        return StepResult(mean, None, key, parts)._replace(**self.update(mean, optimizer=optimizer, scaler=scaler))

    def gradients(
        self, batch: Sequence[Microbatch], *, scaler: GradScaler | None = None, loss: int = 0
    ) -> tuple[Tensor, list[tuple[list[Tensor], Any]]]:
        """The mean of the chosen loss over the batch's rows, and of each microbatch every loss and what losses told, on
        the last stage; gradients of the mean are added to `.grad`, each on its parameter's stage, scaled if there is a
        scaler."""
        scaler = self._scaler(scaler)
        scale = None if scaler is None else scaler.get_loss_scaling()._array
        with self.policy.precision.autocast(), self._keys(len(batch)) as keys:
            losses = self.pipeline.train(batch, keys, scale=scale, loss=loss, every=True)
        mean = Tensor(self.pipeline.mean([each[loss] for each in losses], batch))
        return mean, [self._told(each) for each in losses]

    def evaluate(
        self, batch: Sequence[Microbatch], *, losses: bool = True, outputs: bool = False
    ) -> list[tuple[list[Tensor], Any]]:
        """Forward alone, as the policy computes -> of each microbatch, the losses of all the loss functions and what
        the last chunk gives, or without outputs what losses told; none and None where they are not asked for. Whether
        Layers are in training mode is the caller's to say. In a process without devices of the last stage there are no
        outputs.

        Random numbers come from where gradients takes them; where nothing is drawn the stream stays where it is.
        """
        key = rng.default_generator.key_state()
        before = state.read(key)
        with self.policy.precision.autocast(), self._keys(len(batch)) as keys:
            results = self.pipeline.evaluate(batch, keys, losses=losses, outputs=outputs)
        if self.policy.branches(len(batch)) and not self.pipeline.drew(losses=losses, outputs=outputs):
            # evaluating between two steps then leaves the next one as it would have been
            state.write(key, before)
        told = [self._told(arrays) for arrays, _ in results]
        return [(means, out if outputs else more) for (means, more), (_, out) in zip(told, results, strict=True)]

    def _told(self, arrays: Sequence[jax.Array]) -> tuple[list[Tensor], dict[str, Tensor] | None]:
        """(the losses of a microbatch, what they told by name) of what the last chunk gave."""
        tensors, names = [Tensor(array) for array in arrays], self.pipeline.told
        if not (names and tensors):
            return tensors, None
        return tensors[: -len(names)], dict(zip(names, tensors[-len(names) :], strict=True))

    def update(self, loss: Tensor, *, optimizer: Any = None, scaler: GradScaler | None = None) -> dict[str, Tensor]:
        """Update the parameters from their gradients, as the policy says if loss or gradients are not finite; the
        gradients are then cleared. -> grad_norm, skipped and spike of the StepResult, where the policy looks at them.
        """
        optimizer = self.optimizer if optimizer is None else optimizer
        updating, scaler = self.updating(optimizer), self._scaler(scaler)
        judged: dict[str, Tensor] = {}
        if scaler is not None:
            if isinstance(updating, StagedUpdate):
                updating.unscale(scaler)
            scaler.step(updating)
            scaler.update()
        elif self.policy.guards:
            judged = self._guarded(updating, loss)
        else:
            updating.step()
        optimizer.clear_grad()
        return judged

    def updating(self, optimizer: Any = None) -> Any:
        """The object that updates for an optimizer: a StagedUpdate where its step() is the plain one, else the
        optimizer itself."""
        optimizer = self.optimizer if optimizer is None else optimizer
        is_wrapped = isinstance(optimizer, MergingOptimizer) and not optimizer.merges
        plain: Any = optimizer.inner_opt if is_wrapped else optimizer
        if not StagedUpdate.serves(plain):
            return optimizer
        key = (id(plain), frozen_settings(plain))
        if key not in self._updates:
            self._updates[key] = StagedUpdate(plain)
        return self._updates[key]

    @property
    def fusions(self) -> list[str]:
        """Names of the patterns that calls of a chunk were fused by, chunk after chunk."""
        return self.pipeline.fusions()

    @property
    def halted(self) -> Tensor:
        """0-D bool: whether a step under the policy "halt" was not finite."""
        return Tensor(self._halted)

    def _guarded(self, updating: Any, loss: Tensor) -> dict[str, Tensor]:
        """An update that changes nothing where the policy says -> grad_norm, skipped and spike."""
        if not isinstance(updating, StagedUpdate):
            raise ConfigError(
                f"StepPolicy: non_finite={self.policy.non_finite!r} over pipeline stages needs an optimizer with "
                f"Optimizer's own step(), got {type(updating).__name__}; give 'apply'"
            )
        judged: dict[str, Tensor] = {}
        squares = updating.squares()
        here = [put(s._array, self.pipeline.where_losses_are) for s in squares]
        norm, is_bad = _judge(loss._array, here, self._halted, self.policy.non_finite != "apply")
        factor = None
        if self.policy.spikes is not None and self.spike_statistic is not None:
            new, is_spike, scale = self.policy.spikes.judge(self.spike_statistic._array, loss._array, norm)
            self.spike_statistic = Tensor(new)
            judged["spike"] = Tensor(is_spike)
            if self.policy.spikes.action == "skip":
                is_bad = is_bad | is_spike
            else:
                factor = Tensor(scale)
        if self.policy.non_finite == "halt":
            self._halted = is_bad
        updating.step(squares, Tensor(is_bad), factor)
        return {"grad_norm": Tensor(norm), "skipped": Tensor(is_bad), **judged}

    @contextmanager
    def _keys(self, count: int) -> Iterator[list[Any]]:
        """Inside the block, which runs them, the random key that each microbatch starts from."""
        generator = rng.default_generator
        if self.policy.branches(count):
            yield generator.branches(count)
            return
        key = state.read(generator.key_state())
        yield [key]
        state.write(generator.key_state(), put(self.pipeline.following[0], key.sharding))

    def _scaler(self, scaler: GradScaler | None) -> GradScaler | None:
        """The scaler in force, None where nothing is scaled."""
        scaler = self.scaler if scaler is None else scaler
        return scaler if scaler is not None and scaler.is_enable() else None


@jax.jit
def _judge(loss: jax.Array, squares: list[jax.Array], halted: jax.Array, looks: bool) -> tuple[jax.Array, jax.Array]:
    """(the gradient norm, whether this step must leave the parameters unchanged)."""
    norm = jnp.sqrt(sum(jnp.sum(s) for s in squares)).astype(jnp.float32)
    return norm, halted | (looks & ~jnp.isfinite(loss + norm))
