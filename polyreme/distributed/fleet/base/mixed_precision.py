"""Amp: the mixed precision that a strategy asks for."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from polyreme.amp import GradScaler, auto_cast


@dataclass(frozen=True)
class Amp:
    """level, dtype and lists are auto_cast's, master_weight is decorate's. scaler: GradScaler's settings, or None."""

    level: str
    dtype: str
    white_list: tuple[str, ...]
    black_list: tuple[str, ...]
    master_weight: bool
    scaler: dict[str, Any] | None

    def cast(self) -> contextlib.AbstractContextManager:
        """auto_cast."""
        return auto_cast(
            level=self.level, dtype=self.dtype, custom_white_list=self.white_list, custom_black_list=self.black_list
        )


def autocast(amp: Amp | None) -> contextlib.AbstractContextManager:
    """auto_cast as amp says; nothing for None."""
    return contextlib.nullcontext() if amp is None else amp.cast()


def make_scaler(amp: Amp | None) -> GradScaler:
    """A GradScaler as amp says, disabled if it says none."""
    return GradScaler(enable=False) if amp is None or amp.scaler is None else GradScaler(**amp.scaler)
