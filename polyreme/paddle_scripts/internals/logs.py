"""Loggers and log lines of paddle.distributed.fleet.utils.log_util and paddle.framework.recall_error."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from polyreme.device.memory import memory_allocated, memory_reserved

AADIFF_ERROR = "two runs of one step differ"
LOSS_NAN_ERROR = "the loss is NaN"
LOSS_INF_ERROR = "the loss is infinite"
SHARDING_PAD_NON_ZERO_ERROR = "padding of a sharded parameter is not zero"

logger = logging.getLogger("polyreme.fleet")


def get_logger(name: Any = None, level: Any = logging.INFO, fmt: str | None = None, **_: Any) -> logging.Logger:
    """A logger that writes to stderr from this level on; (level, name) is taken as well."""
    if isinstance(name, int) or str(name).upper() in logging.getLevelNamesMapping():
        name, level = level if isinstance(level, str) else "polyreme", name
    log = logging.getLogger(name or "polyreme")
    log.setLevel(level.upper() if isinstance(level, str) else level)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(fmt or "%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    return log


def set_log_level(level: int | str) -> None:
    """What fleet logs from now on: a level of logging, or its name."""
    logger.setLevel(level.upper() if isinstance(level, str) else level)


def get_log_level_code() -> int:
    """The level of logging in force, as a number."""
    return logger.getEffectiveLevel()


def get_log_level_name() -> str:
    """The level of logging in force, by name."""
    return logging.getLevelName(get_log_level_code())


def layer_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as text: name(arguments)."""
    return f"{base}({', '.join([*map(str, args), *(f'{k}={v}' for k, v in kwargs.items())])})"


def check_memory_usage(msg: str = "") -> None:
    """Log how much memory of the device is in use."""
    logger.info("%s: %d bytes allocated, %d reserved", msg, memory_allocated(), memory_reserved())


def check_naninf(tensor: Any) -> str | None:
    """LOSS_NAN_ERROR or LOSS_INF_ERROR for a Tensor that has such a value, else None."""
    values = np.asarray(tensor, np.float64)
    if np.isnan(values).any():
        return LOSS_NAN_ERROR
    return LOSS_INF_ERROR if np.isinf(values).any() else None
