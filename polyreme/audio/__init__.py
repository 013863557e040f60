"""Sound: features of it, files, data sets. Names load when first used, so that worker processes never import jax."""

import importlib
from typing import Any

from polyreme.errors import nearest

_HOME = {"info": "backends", "load": "backends", "save": "backends"}
_MODULES = ("backends", "datasets", "features", "functional")
__all__ = [*_HOME, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]  (names load late)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"polyreme.audio.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'polyreme.audio' has no attribute {name!r}{nearest(name, __all__)}")
    return getattr(importlib.import_module(f"polyreme.audio.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
