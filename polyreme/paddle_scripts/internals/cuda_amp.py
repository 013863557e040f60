"""paddle.cuda.amp: autocast by the arguments that it has there."""

from __future__ import annotations

from typing import Any

from polyreme.amp import auto_cast


def autocast(enabled: bool = True, dtype: Any = "float16", cache_enabled: bool = True) -> Any:
    """amp.auto_cast of level O1; casts are not cached, so cache_enabled changes nothing."""
    return auto_cast(enable=enabled, dtype=dtype)
