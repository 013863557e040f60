"""What fit does with a batch whose loss or gradients are not finite, and how it finds the sample at fault."""

from __future__ import annotations

import inspect
import logging
from typing import Any, NamedTuple

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DataError, NumericsError
from polyreme.hapi.step import Steps
from polyreme.nn.eval_mode import eval_mode

_log = logging.getLogger("polyreme.hapi")
NON_FINITE = ("halt", "skip", "apply")
MAX_SKIPPED = 10
"""Batches left out in a row, after one more of which training ends."""


def non_finite_of(wanted: str | None, optimizer: Any, has_scaler: bool) -> str:
    """The policy asked for; for None "halt", or "apply" where a loss scaler looks by itself or the optimizer cannot
    leave a step out. Raises ConfigError for one that is not known or cannot be.
    """
    if wanted is not None and wanted not in NON_FINITE:
        raise ConfigError(f"Model.prepare: non_finite={wanted!r}; give one of {', '.join(NON_FINITE)}")
    can_skip = optimizer is None or "skip" in inspect.signature(optimizer.step).parameters
    if has_scaler or not can_skip:
        if wanted not in (None, "apply"):
            why = "a loss scaler leaves out what overflows by itself" if has_scaler else (
                f"{type(optimizer).__name__}.step() cannot leave a step out"
            )  # fmt: skip
            raise ConfigError(f"Model.prepare: non_finite={wanted!r}, but {why}; leave it out")
        return "apply"
    return wanted or "halt"


class _Batch(NamedTuple):
    epoch: int
    number: int
    inputs: list[Tensor]
    labels: list[Tensor]
    skipped: Tensor


class TrainingWatch:
    """Looks at each batch's outcome one batch late, so that the device need not wait for the host.

    ids: sample indices of a batch by its number, None where they are not known. Raises NumericsError, or DataError
    where an id or a label is out of range, naming batch and sample; the parameters are as before that batch.
    """

    def __init__(self, what: str, steps: Steps, ids: Any) -> None:
        self._what, self._steps, self._ids = what, steps, ids
        self._waiting: _Batch | None = None
        self._in_a_row = 0

    def note(self, epoch: int, number: int, inputs: list[Tensor], labels: list[Tensor]) -> None:
        """A batch was trained on; looks at the one before."""
        self.check()
        if self._steps.skipped is not None:
            self._waiting = _Batch(epoch, number, inputs, labels, self._steps.skipped)

    def check(self) -> None:
        """Look at the batch that was noted."""
        batch, self._waiting = self._waiting, None
        if batch is None:
            return
        self._in_a_row = self._in_a_row + 1 if bool(batch.skipped) else 0
        if not self._in_a_row:
            return
        if self._steps.non_finite == "halt" or self._in_a_row > MAX_SKIPPED:
            raise self._failure(batch)
        _log.warning(
            "%s: %s: the loss or its gradients are not finite; the update was left out, %d in a row",
            *(self._what, self._place(batch), self._in_a_row),
        )

    def _failure(self, batch: _Batch) -> Exception:
        self._steps.step.resume()
        place = self._place(batch)
        problem = self._out_of_range(batch.inputs, batch.labels)
        if problem is not None:
            row = next((r for r in range(_rows(batch)) if self._out_of_range(*_row(batch, r)) is not None), None)
            ids = self._ids(batch.number)
            sample = "" if row is None else f", row {row}" if ids is None else f", sample {ids[row]}"
            return DataError(f"{self._what}: {place}{sample}: {problem}; nothing was changed by it: mend that sample")
        return NumericsError(
            f"{self._what}: {place}: the loss or its gradients are not finite; the update was left out, the parameters "
            "are as before it. Lower the learning rate, clip gradients, look at it with FLAGS_check_nan_inf=1, or "
            'give Model.prepare(non_finite="skip"), which leaves such batches out'
        )

    def _place(self, batch: _Batch) -> str:
        return f"epoch {batch.epoch}, batch {batch.number}"

    def _out_of_range(self, inputs: list[Tensor], labels: list[Tensor]) -> IndexError | None:
        """The error that eager code, which checks indices, raises for a batch that a program has computed with."""
        try:
            with eval_mode(self._steps.network), no_grad(), self._steps.step.policy.precision.autocast():
                self._steps.step.forward(inputs, labels)
        except IndexError as error:
            return error
        return None


def _rows(batch: _Batch) -> int:
    return min((t.shape[0] for t in [*batch.inputs, *batch.labels] if t.shape), default=0)


def _row(batch: _Batch, row: int) -> tuple[list[Tensor], list[Tensor]]:
    return [t[row : row + 1] for t in batch.inputs], [t[row : row + 1] for t in batch.labels]
