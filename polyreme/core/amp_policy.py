"""The dtype that an op's inputs are cast to under autocast: each op declares its class, the policy maps classes to
dtypes.

A policy is hashable and part of every kernel's cache key; the cast happens inside the kernel, where it
fuses.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from polyreme.core import dtype as dtypes

AmpClass = Literal["low", "fp32", "widest"]


@dataclass(frozen=True)
class Policy:
    """Autocast in force: "low" ops run in dtype low, "fp32" ops in float32, and the level says what the others do.

    O1: the widest dtype among their floating inputs. OD: float32. O2: as O1 with promote, else low (parameters are low
    at O2, so promote matters only where a float32 value meets them). white and black name ops moved to "low" and to
    "fp32" by the user.
    """

    low: np.dtype
    level: Literal["OD", "O1", "O2"] = "O1"
    white: frozenset[str] = frozenset()
    black: frozenset[str] = frozenset()
    promote: bool = True

    def target(self, op_name: str, amp: AmpClass, arrays: Sequence[Any]) -> np.dtype | None:
        """The dtype floating inputs are cast to, or None to leave them alone."""
        # a Python number is weakly typed and follows the tensors
        floats = [a.dtype for a in arrays if _follows(a) and not a.weak_type]
        if not floats or any(d == dtypes.float64 for d in floats):
            return None
        if op_name in self.black or (amp == "fp32" and op_name not in self.white):
            return dtypes.float32
        if op_name in self.white or amp == "low" or (self.level == "O2" and not self.promote):
            return self.low
        if self.level == "OD":
            return dtypes.float32
        return jax.numpy.result_type(*floats)


class _PolicyInForce(threading.local):
    """The policy in force in this thread, None when autocast is off."""

    def __init__(self) -> None:
        self.policy: Policy | None = None


active: _PolicyInForce = _PolicyInForce()


def cast(policy: Policy | None, op_name: str, amp: AmpClass, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Arrays as the policy wants them for this op; integer, bool, complex and float8 arrays are left alone."""
    if policy is None:
        return arrays
    to = policy.target(op_name, amp, arrays)
    if to is None:
        return arrays
    return tuple(a.astype(to) if _follows(a) and a.dtype != to else a for a in arrays)


def _follows(array: jax.Array) -> bool:
    """Whether autocast chooses this array's dtype; float8 has a scale that only its user knows."""
    return dtypes.is_floating(array.dtype) and array.dtype.itemsize > 1
