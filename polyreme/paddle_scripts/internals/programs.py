"""Attributes of PaddlePaddle's Programs that scripts use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyreme.core import rng
from polyreme.program.current import of_training


class ProgramNames:
    """Attributes of Program."""

    def global_seed(self: Any, seed: int = 0) -> None:
        """paddle.seed, and the seed of this Program's random operations."""
        rng.seed(seed)
        self.random_seed = seed

    def _sync_with_cpp(self) -> None:
        """Nothing: a Program is of Python alone."""

    @contextmanager
    def _optimized_guard(self, param_and_grads: Any) -> Iterator[None]:
        with of_training():
            yield

    @contextmanager
    def _lr_schedule_guard(self, is_with_opt: bool = False) -> Iterator[None]:
        yield
