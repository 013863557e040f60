"""What callbacks of scripts ask of a Model besides its public names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModelNames:
    """Attributes of Model."""

    @property
    def _optimizer(self: Any) -> Any:
        """The optimizer of prepare, None before."""
        return self.optimizer

    @property
    def _loss(self: Any) -> Callable | None:
        """The loss of prepare, None before."""
        return self._steps.loss
