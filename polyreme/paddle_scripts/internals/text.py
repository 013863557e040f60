"""paddle.compat of 1.x and 2.x: texts, bytes and numbers as Python 3 has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

long_type: type[int] = int


def to_text(obj: Any, encoding: str = "utf-8", inplace: bool = False) -> Any:
    """obj, or the bytes in a list, set or dict, as str; with inplace that very list, set or dict."""
    return _converted(obj, lambda v: v.decode(encoding) if isinstance(v, bytes) else v, inplace)


def to_bytes(obj: Any, encoding: str = "utf-8", inplace: bool = False) -> Any:
    """obj, or the texts in a list or set, as bytes; with inplace that very list or set."""
    return _converted(obj, lambda v: v.encode(encoding) if isinstance(v, str) else v, inplace)


def _converted(obj: Any, one: Callable[[Any], Any], inplace: bool) -> Any:
    if isinstance(obj, (list, set)):
        items = [one(item) for item in obj]
        if not inplace:
            return type(obj)(items)
        obj.clear()
        (obj.extend if isinstance(obj, list) else obj.update)(items)
        return obj
    if isinstance(obj, dict):
        pairs = {one(key): one(value) for key, value in obj.items()}
        if not inplace:
            return pairs
        obj.clear()
        obj.update(pairs)
        return obj
    return one(obj)


def round(x: float, d: int = 0) -> float:
    """x to d decimals, halves away from 0; NaN and infinities as they are."""
    if not math.isfinite(x):
        return x
    scale = 10**d
    return math.copysign(math.floor(abs(x) * scale + 0.5) / scale, x)


def floor_division(x: float, y: float) -> float:
    """x // y."""
    return x // y


def get_exception_message(exc: BaseException) -> str:
    """What an exception says."""
    return str(exc)
