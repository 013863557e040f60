"""What layer functions check alike: settings that cannot be honoured, and how many channels there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError, ShapeError


def refuse(what: str, **settings: tuple[Any, str]) -> None:
    """ConfigError for the settings that are on and cannot be honoured: name -> (value, why)."""
    for name, (value, why) in settings.items():
        if value:
            raise ConfigError(f"{what}: {name}={value!r} cannot be honoured: {why}")


def channels(what: str, x: Any, data_format: str, ndims: Sequence[int]) -> int:
    """How many channels x has, the second dim or the last one."""
    if x.ndim not in ndims:
        raise ShapeError(f"{what} takes {' or '.join(map(str, ndims))} dims, got shape {list(x.shape)}")
    if not (
        isinstance(data_format, str) and data_format.startswith("N") and "C" in (data_format[1:2], data_format[-1])
    ):
        raise ConfigError(f"{what}: data format {data_format!r}; give 'NCHW' or the like, or 'NHWC' or the like")
    return x.shape[1 if data_format[1] == "C" else -1]
