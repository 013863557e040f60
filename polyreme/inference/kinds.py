"""Kinds of data, places and precision by the names of paddle.inference, and what this build has of other engines."""

from __future__ import annotations

import enum

import numpy as np

from polyreme import version
from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError, DTypeError


class DataType(enum.IntEnum):
    """Dtype of a predictor's Tensor."""

    FLOAT32 = 0
    INT64 = 1
    INT32 = 2
    UINT8 = 3
    INT8 = 4
    FLOAT16 = 5
    BOOL = 6
    FLOAT64 = 7
    BFLOAT16 = 8

    @property
    def dtype(self) -> np.dtype:
        """The dtype it stands for."""
        return dtypes.as_dtype(self.name.lower())

    @classmethod
    def of(cls, dtype: np.dtype) -> DataType:
        """The kind of a dtype; raises DTypeError for one that paddle.inference has no name for."""
        found = cls.__members__.get(dtype.name.upper())
        if found is None:
            raise DTypeError(f"{dtype.name} has no DataType; these have: {', '.join(k.name.lower() for k in cls)}")
        return found


class PlaceType(enum.IntEnum):
    """Kind of device."""

    UNK = -1
    CPU = 0
    GPU = 1
    XPU = 2
    CUSTOM = 3


class PrecisionType(enum.IntEnum):
    """What a program computes in. It is fixed when a model is saved, so a Config takes Float32 alone: as saved."""

    Float32 = 0
    Int8 = 1
    Half = 2
    Bfloat16 = 3


def get_num_bytes_of_data_type(dtype: DataType) -> int:
    """Bytes of one element.

    >>> get_num_bytes_of_data_type(DataType.BFLOAT16)
    2
    """
    return DataType(dtype).dtype.itemsize


def get_version() -> str:
    """This build in words."""
    return f"version: {version.full_version}"


def get_trt_compile_version() -> tuple[int, int, int]:
    """(0, 0, 0): there is no TensorRT in this build."""
    return (0, 0, 0)


def get_trt_runtime_version() -> tuple[int, int, int]:
    """(0, 0, 0): there is no TensorRT at run time."""
    return (0, 0, 0)


def _get_phi_kernel_name(op_name: str) -> str:
    """The name itself: an op has one name here."""
    return op_name


def convert_to_mixed_precision(
    model_file: str,
    params_file: str,
    mixed_model_file: str,
    mixed_params_file: str,
    mixed_precision: PrecisionType,
    backend: PlaceType,
    keep_io_types: bool = True,
    black_list: set[str] | None = None,
    **kwargs: object,
) -> None:
    """Refused with ConfigError: an exported program has its dtypes; cast the model before it is saved."""
    raise ConfigError(
        f"convert_to_mixed_precision({model_file!r}): an exported program keeps its dtypes; cast the Layer with "
        ".bfloat16() or .float16(), or save it under amp.auto_cast, and save again"
    )
