"""Generators of the lines that fluid.dataset reads, as a command of set_pipe_command runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from polyreme.errors import DataError

Slots = Iterable[tuple[str, list[Any]]]


class DataGenerator:
    """Writes a line for each sample of each line read. A subclass defines generate_sample(line)."""

    def __init__(self) -> None:
        self.batch_size_ = 32

    def set_batch(self, batch_size: int) -> None:
        """How many samples generate_batch is given at a time."""
        self.batch_size_ = batch_size

    def generate_sample(self, line: str | None) -> Callable[[], Iterable[Slots]]:
        """A function that gives the samples of a line, each [(slot, values), ...]."""
        raise NotImplementedError(f"{type(self).__name__} has no generate_sample(line); write one")

    def generate_batch(self, samples: list[Slots]) -> Callable[[], Iterable[Slots]]:
        """A function that gives the samples of a batch, as they are unless a subclass says otherwise."""
        return lambda: iter(samples)

    def run_from_stdin(self) -> None:
        """Write the samples of the lines on the standard input to the standard output."""
        self._write(s for line in sys.stdin for s in self.generate_sample(line)())

    def run_from_memory(self) -> None:
        """Write the samples that generate_sample(None) gives to the standard output."""
        self._write(iter(self.generate_sample(None)()))

    def _write(self, samples: Iterator[Slots | None]) -> None:
        batch: list[Slots] = []
        for sample in samples:
            if sample is None:
                continue
            batch.append(sample)
            if len(batch) == self.batch_size_:
                self._write_batch(batch)
                batch = []
        self._write_batch(batch)

    def _write_batch(self, batch: list[Slots]) -> None:
        if batch:
            sys.stdout.writelines(self._gen_str(sample) for sample in self.generate_batch(batch)())

    def _gen_str(self, line: Slots) -> str:
        raise NotImplementedError(f"{type(self).__name__} has no _gen_str(line); use MultiSlotDataGenerator")


class MultiSlotDataGenerator(DataGenerator):
    """Samples [(slot, numbers), ...] as lines: how many numbers, and these, slot after slot."""

    def _gen_str(self, line: Slots) -> str:
        words: list[str] = []
        for name, values in line:
            if not values:
                raise DataError(f"slot {name} has no values; give it one that stands for none, such as 0")
            words += [str(len(values)), *map(str, values)]
        return " ".join(words) + "\n"


class MultiSlotStringDataGenerator(MultiSlotDataGenerator):
    """MultiSlotDataGenerator of values that are strings already."""


__all__ = ["DataGenerator", "MultiSlotDataGenerator", "MultiSlotStringDataGenerator"]
