"""Timing of steps without a trace: the time for a batch, of which that waiting for data, and items a second."""

from __future__ import annotations

import time

from polyreme.io.epoch import waiting


class StepTimer:
    """Seconds of steps, from `begin` on; averages are over the steps since they were last told."""

    def __init__(self) -> None:
        self._total = _Sums()
        self._since = _Sums()
        self._last = self._waited = 0.0

    def begin(self) -> None:
        """The first step begins."""
        self._last, self._waited = time.perf_counter(), waiting.seconds

    def step(self, num_samples: int | None) -> None:
        """A step is over, of so many samples."""
        now, waited = time.perf_counter(), waiting.seconds
        for sums in (self._total, self._since):
            sums.add(now - self._last, waited - self._waited, num_samples)
        self._last, self._waited = now, waited

    def told(self, unit: str | None) -> str:
        """The steps since this was last asked, in words; "" if there was none."""
        text = self._since.text(unit)
        self._since = _Sums()
        return text

    def summary(self) -> str:
        """All steps, in words."""
        return self._total.text(None)


class _Sums:
    def __init__(self) -> None:
        self.steps, self.seconds, self.reader_seconds, self.samples = 0, 0.0, 0.0, 0

    def add(self, seconds: float, reader_seconds: float, samples: int | None) -> None:
        self.steps += 1
        self.seconds += seconds
        self.reader_seconds += reader_seconds
        self.samples += samples or 0

    def text(self, unit: str | None) -> str:
        if not self.steps:
            return ""
        words = []
        if self.reader_seconds:
            words.append(f"reader_cost: {self.reader_seconds / self.steps:.5f} s")
        words.append(f"batch_cost: {self.seconds / self.steps:.5f} s")
        if self.samples:
            words.append(f"ips: {self.samples / self.seconds:.3f} {unit or 'samples'}/s")
        else:
            words.append(f"ips: {self.steps / self.seconds:.3f} steps/s")
        return " ".join(words)
