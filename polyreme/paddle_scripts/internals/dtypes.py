"""dtypes as scripts print and cut them: str(x.dtype) is "paddle.float32". They are NumPy's in all else."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes  # registers bfloat16 and float8 with NumPy
import numpy as np


class _AnyDType(type):
    """isinstance of NumPy's dtypes too, which functions here give."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, np.dtype) or type.__instancecheck__(cls, instance)


class DType(metaclass=_AnyDType):
    """A dtype under PaddlePaddle's name. It equals NumPy's, hashes as that does, and NumPy and jax take it for that."""

    __slots__ = ("dtype",)

    def __new__(cls, dtype: Any) -> DType:
        name = dtype.removeprefix("paddle.") if isinstance(dtype, str) else dtype
        return _shared(np.dtype(getattr(ml_dtypes, name, name) if isinstance(name, str) else name))

    @staticmethod
    def of(dtype: np.dtype) -> DType:
        """The one of a dtype that is known to be allowed."""
        return _shared(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dtype, name)

    def __eq__(self, other: object) -> bool:
        return self.dtype == (other.dtype if type(other) is DType else other)

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __reduce__(self) -> Any:
        return DType, (self.dtype.name,)

    def __repr__(self) -> str:
        return f"paddle.{self.dtype.name}"


@functools.cache
def _shared(dtype: np.dtype) -> DType:
    made = object.__new__(DType)
    object.__setattr__(made, "dtype", dtype)
    return made
