"""One training step on one mesh: forward, backward and update of a batch, written once as imperative code, and its
forward alone.

It runs as it stands, captured as one program (to_static), or abstractly. A model over pipeline stages has many
programs: distributed.pipeline.step does the same with those.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyreme.core import rng, state
from polyreme.core.devices.transfer import from_host
from polyreme.eager.host import put
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.nn.clip import global_norm
from polyreme.training.microbatches import Microbatch, shares
from polyreme.training.policy import StepPolicy


class StepResult(NamedTuple):
    """The result of a step, 0-D Tensors that nothing has waited for.

    loss: the mean over the batch. grad_norm: of all gradients together, before clipping; key: the random key that the
    step began with; both None under a policy that does not look at whether they are finite. parts: of each microbatch,
    its losses, and what else the model gave. skipped, spike: bool, whether the policy left the
    update out, and found a spike; None as above.
    """

    loss: Tensor
    grad_norm: Tensor | None
    key: Tensor | None
    parts: list[tuple[list[Tensor], Any]]
    skipped: Tensor | None = None
    spike: Tensor | None = None


def _no_output(inputs: Any) -> Any:
    raise ConfigError("TrainingStep: outputs without losses were asked for; make it with output, a function of inputs")


class TrainingStep:
    """A model's training step under a policy.

    forward(inputs, labels) -> (losses, outputs) of a microbatch: losses are means over its rows, added up; outputs are
    for the caller. output: inputs -> outputs, where no loss is asked for. where: the sharding of the step's flag, which
    must be as a captured step leaves it; the default device if None. Gradients and updates are two methods, so that a
    caller may look at what lies between.
    """

    output: Callable[..., Any]

    optimizer: Any
    policy: StepPolicy
    spike_statistic: Tensor | None

    def __init__(
        self,
        forward: Callable[[Any, Any], tuple[list[Tensor], Any]],
        optimizer: Any,
        policy: StepPolicy,
        where: Any = None,
        output: Callable[[Any], Any] = _no_output,
    ) -> None:
        self.forward, self.output, self.optimizer, self.policy = forward, output, optimizer, policy
        self.scaler = policy.precision.make_scaler()

        def place(array: Any) -> Tensor:
            return Tensor(from_host(np.asarray(array)) if where is None else put(np.asarray(array), where))

        self._halted = place(np.zeros((), np.bool_))
        self.spike_statistic = None if policy.spikes is None else place(policy.spikes.start())

    def __call__(self, batch: Sequence[Microbatch]) -> StepResult:
        """One optimizer step on a batch."""
        key = Tensor(state.read(rng.default_generator.key_state())) if self.policy.guards else None
        loss, parts = self.gradients(batch)
        return StepResult(loss, None, key, parts)._replace(**self.update(loss))

    def gradients(self, batch: Sequence[Microbatch]) -> tuple[Tensor, list[tuple[list[Tensor], Any]]]:
        """The batch's loss, the sum of its microbatches' by their shares, and each microbatch's losses and outputs;
        gradients of it are added to `.grad` of the parameters, scaled if there is a scaler."""
        means, parts = [], []
        for microbatch, share, stream in zip(batch, shares(batch), self._streams(len(batch)), strict=True):
            with stream, self.policy.precision.autocast():
                losses, outputs = self.forward(microbatch.inputs, microbatch.labels)
            loss = functools.reduce(operator.add, losses)
            if isinstance(share, Tensor):  # what counts differs from batch to batch: an input of the program
                loss = loss * share.astype(loss.dtype)
            elif share != 1:
                loss = loss * share
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            means.append(loss.detach())
            parts.append(([each.detach() for each in losses], outputs))
        return functools.reduce(operator.add, means), parts

    def resume(self) -> None:
        """Let steps change the parameters again after one that was not finite under the policy "halt"."""
        halted = state.read(self._halted)
        state.write(self._halted, put(np.zeros((), np.bool_), halted.sharding))

    def evaluate(
        self, batch: Sequence[Microbatch], *, losses: bool = True, outputs: bool = False
    ) -> list[tuple[list[Tensor], Any]]:
        """Forward alone, as the policy computes -> of each microbatch, its losses and outputs; none and None where they
        are not asked for. Whether Layers are in training mode is the caller's to say.

        Random numbers come from where gradients takes them; where nothing is drawn the stream stays where it is.
        """
        generator, parts, stays = rng.default_generator, [], self.policy.branches(len(batch))
        before = state.read(generator.key_state()) if stays else None
        with no_grad():
            for microbatch, stream in zip(batch, self._streams(len(batch)), strict=True):
                with stream, self.policy.precision.autocast():
                    key = state.read(generator.key_state()) if stays else None
                    if losses:
                        means, out = self.forward(microbatch.inputs, microbatch.labels)
                    else:
                        means, out = [], self.output(microbatch.inputs)
                    stays = stays and state.read(generator.key_state()) is key
                parts.append((means, out if outputs else None))
        if stays:
            # evaluating between two steps then leaves the next one as it would have been
            state.write(generator.key_state(), before)
        return parts

    def update(self, loss: Tensor) -> dict[str, Tensor]:
        """Update the parameters from their gradients, as the policy says if loss or gradients are not finite; the
        gradients are then cleared. -> grad_norm, skipped and spike of the StepResult, where the policy looks at them.
        """
        judged = self.judge(loss)
        self.apply(judged.get("skipped"))
        return judged

    def judge(self, loss: Tensor) -> dict[str, Tensor]:
        """The first part of update: what it gives, of the gradients there are, which a spike may scale down."""
        if self.scaler is not None or not self.policy.guards:
            return {}
        norm = global_norm([p.grad.detach() for p in self.optimizer._parameters if p.grad is not None])
        return {"grad_norm": norm, **self._judge(loss, norm)}

    def apply(self, skipped: Tensor | None) -> None:
        """The second part of update: the parameters change but where judge said that they must not."""
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif skipped is not None:
            self.optimizer.step(skip=skipped)
        else:
            self.optimizer.step()
        self.optimizer.clear_grad()

    def _judge(self, loss: Tensor, norm: Tensor) -> dict[str, Tensor]:
        """skipped: 0-D bool, whether this step must change nothing; spike: whether it is one."""
        judged: dict[str, Tensor] = {}
        # under "apply" False, made where the gradients are
        is_bad = norm < norm if self.policy.non_finite == "apply" else (loss + norm).isfinite().logical_not()
        if self.policy.spikes is not None and self.spike_statistic is not None:
            now = state.read(self.spike_statistic)
            new, is_spike, factor = self.policy.spikes.judge(now, state.read(loss), state.read(norm))
            state.write(self.spike_statistic, new)
            judged["spike"] = Tensor(is_spike)
            if self.policy.spikes.action == "skip":
                is_bad = is_bad.logical_or(Tensor(is_spike))
            else:
                self._scale_gradients(factor)
        if self.policy.non_finite == "halt":
            is_bad = is_bad.logical_or(self._halted)
            state.write(self._halted, state.read(is_bad))
        judged["skipped"] = is_bad
        return judged

    def _scale_gradients(self, factor: Any) -> None:
        for p in self.optimizer._parameters:
            if p.grad is not None:
                array = state.read(p.grad)
                state.write(p.grad, (array * factor).astype(array.dtype))

    def _streams(self, count: int) -> list[contextlib.AbstractContextManager]:
        """A context for each microbatch, in which it draws random numbers."""
        if not self.policy.branches(count):
            return [contextlib.nullcontext()] * count
        generator = rng.default_generator
        return [generator.starting_at(key) for key in generator.branches(count)]
