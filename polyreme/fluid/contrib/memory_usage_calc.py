"""fluid.contrib.memory_usage_calc: bytes of a Program's Variables."""

from __future__ import annotations

import math

from polyreme.errors import ConfigError
from polyreme.program.program import Program

_UNITS = ("B", "KB", "MB", "GB")


def memory_usage(program: Program, batch_size: int) -> tuple[float, float, str]:
    """(at least, at most, unit): the bytes of all Variables, with batch_size for unknown sizes, 5% less and 5% more.

    unit is "B", "KB", "MB" or "GB", of 1024 to the next. The compiler keeps less: it reuses what is not needed any
    more. Raises TypeError for what is no Program, ConfigError for a batch below 1.
    """
    if not isinstance(program, Program):
        raise TypeError(f"memory_usage takes a Program, got {type(program).__name__}")
    if batch_size < 1:
        raise ConfigError(f"memory_usage: batch_size={batch_size}; it is 1 or more")
    total = 0.0
    for variable in program.list_vars():
        sizes = [batch_size if size < 0 else int(size) for size in variable.shape]
        total += math.prod(sizes) * variable.dtype.itemsize
    unit = min(int(math.log(total, 1024)), len(_UNITS) - 1) if total >= 1 else 0
    amount = total / 1024**unit
    return amount * 0.95, amount * 1.05, _UNITS[unit]


__all__ = ["memory_usage"]
