"""Updates of experts that lie on disk, each made when the expert is next needed.

The gradient of an expert that no token chose is 0; an update then depends on the expert's own values and on numbers of
the step alone. The numbers of each step are kept, and the steps that an expert missed are replayed by the program of
the update itself: when it is read next, for a checkpoint, and after MOST_LATE steps. The bits are those of an expert
that missed none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import Any, NamedTuple

import jax
import numpy as np

from polyreme.core.devices.transfer import from_host
from polyreme.errors import CheckpointError, ConfigError
from polyreme.optimizer.on_disk import StateFiles, StoredEntries
from polyreme.optimizer.update_by_kind import Common, KindUpdates

MOST_LATE = 64
"""Steps that an expert may miss before all are brought up to date: what is kept of each step is a few KB."""
_ELSEWHERE = np.iinfo(np.int64).max


class TakenStep(NamedTuple):
    """What the updates of a step take beside each parameter's own values. places: id of a parameter -> its place among
    the updates; those without a gradient have none, and are left alone."""

    updates: KindUpdates
    common: Common
    scalars: Mapping[str, jax.Array]
    places: Mapping[int, int]

    def apply(self, p: Any, values: _ExpertValues, gradient: jax.Array) -> tuple[_ExpertValues, Any]:
        """Apply the step: (the new values, the numbers that are kept for all parameters)."""
        param, _, slots, scalars = self.updates.one(
            self.places[id(p)], self.common, values.param, None, gradient, values.slots, self.scalars
        )
        return _ExpertValues(param, slots), scalars


class _ExpertValues(NamedTuple):
    """An expert's part of a parameter, [1, ...], and of its slots."""

    param: jax.Array
    slots: dict[str, jax.Array]


class LateUpdates:
    """The parameters whose entries move by themselves, and the updates that each entry has missed.

    files: where their optimizer state lies.
    """

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self._slots: dict[int, tuple[str, ...]] = {}
        self._parameters: list[Any] = []
        # by parameter, how many steps each of its entries has seen, of all that were taken
        self._seen: dict[int, np.ndarray] = {}
        self._taken = 0
        self._steps: list[TakenStep] = []  # the last ones of those
        # the thread that reads ahead brings entries up to date too
        self._lock = RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> LateUpdates:
        return LateUpdates(copy.deepcopy(self._files, memo))  # what a copy of an optimizer updates lies in memory

    def add(self, p: Any, slots: Iterable[str]) -> None:
        """Take a parameter whose state lies in the files now."""
        self._parameters.append(p)
        self._slots[id(p)] = tuple(slots)
        # of entries that lie in other processes alone, more than will ever be taken
        self._seen[id(p)] = np.full(p._array.shape[0], _ELSEWHERE)
        self._seen[id(p)][sorted(p._array.local_entries)] = self._taken
        for stored in (p._array, *(self._stored(p, name) for name in slots)):
            stored.late = self
            check_same_parts(p, stored)

    def step(self, live: Sequence[Any], step: TakenStep) -> Mapping[str, jax.Array]:
        """Take a step of parameters with gradients: entries with one are updated. -> the numbers kept for all."""
        with self._lock:
            self._steps.append(step)
            self._taken += 1
            scalars = step.scalars
            for p in live:
                gradient: StoredEntries = p._grad._array
                local_entries: frozenset[int] = p._array.local_entries
                has = sorted(local_entries if gradient.holds is None else local_entries & gradient.holds)
                # the numbers of all parameters after this one's, which are the same whichever entry moves
                last = step._replace(scalars=scalars)
                for entry in has:
                    scalars = self._bring(p, entry, last, from_host(gradient.read_entry(entry)))
                if not has:
                    values = self._values(p, min(local_entries))
                    scalars = last.apply(p, values, _zeros_like(values))[1]
            if self._taken - min(int(seen.min()) for seen in self._seen.values()) > MOST_LATE:
                self.settle()
            self._forget()
            return scalars

    def bring(self, p: Any, entries: Iterable[int]) -> None:
        """Make the updates that these entries have missed."""
        with self._lock:
            for entry in entries:
                self._bring(p, entry)

    def settle(self) -> None:
        """Make all updates that any entry has missed."""
        with self._lock:
            for p in self._parameters:
                self.bring(p, np.flatnonzero(self._seen[id(p)] < self._taken).tolist())
            self._forget()

    def _bring(self, p: Any, entry: int, last: TakenStep | None = None, gradient: jax.Array | None = None) -> Any:
        """Make the updates that an entry has missed. last, gradient: the last of them, if it has a gradient in that;
        -> the numbers kept for all after it."""
        seen, scalars = self._seen[id(p)], None
        missed = self._steps[len(self._steps) - (self._taken - int(seen[entry])) :] if seen[entry] < self._taken else []
        if last is not None:
            missed = missed[:-1]
        updates: list[tuple[TakenStep, Any]] = [(step, None) for step in missed if id(p) in step.places]
        if last is not None and gradient is not None:
            updates.append((last, gradient))
        if updates:
            if self._files.failure is not None:
                raise CheckpointError(
                    f"an update of the state on disk failed half way ({self._files.failure}); go on from the last "
                    "checkpoint"
                )
            values = self._values(p, entry)
            for step, of in updates:
                values, scalars = step.apply(p, values, _zeros_like(values) if of is None else of)
            try:
                p._array.write_entry(entry, values.param)
                for name, array in values.slots.items():
                    self._stored(p, name).write_entry(entry, array)
            except BaseException as error:
                self._files.failure = error
                raise
        seen[entry] = max(int(seen[entry]), self._taken)
        return scalars

    def _values(self, p: Any, entry: int) -> _ExpertValues:
        names = self._slots[id(p)]
        slots = {name: from_host(self._stored(p, name).read_entry(entry)) for name in names}
        return _ExpertValues(from_host(p._array.read_entry(entry)), slots)

    def _stored(self, p: Any, name: str) -> StoredEntries:
        stored = self._files.tensor(p, name).stored
        assert isinstance(stored, StoredEntries)  # as its tier says
        return stored

    def _forget(self) -> None:
        """Drop the steps that all entries have seen."""
        oldest = min(int(seen.min()) for seen in self._seen.values())
        del self._steps[: len(self._steps) - (self._taken - oldest)]


def check_same_parts(p: Any, stored: StoredEntries) -> None:
    """Raises ConfigError where this process holds other parts of a parameter's experts than of another array of them,
    their gradient or state: an expert is updated where it lies."""
    own: StoredEntries = p._array
    entries = own.local_entries
    if entries != stored.local_entries or any(own.extent(entry) != stored.extent(entry) for entry in entries):
        raise ConfigError(
            f"plan: offload of expert in several processes, which hold other parts of the experts of {p.name} than of "
            "their gradients or optimizer state; set sharding_stage to 3, or put the devices along 'sharding' in one "
            "process (the last axes of the mesh are within one)"
        )


def _zeros_like(values: _ExpertValues) -> jax.Array:
    return from_host(np.zeros(values.param.shape, values.param.dtype))


__all__ = ["MOST_LATE", "LateUpdates", "TakenStep"]
