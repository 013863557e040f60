"""Parallel training: processes, collectives, placement and checkpoints.

Names load when one of them is first used: the launcher and what watches over a job need no jax.
"""

import importlib
import pkgutil
from typing import Any

from polyreme.errors import nearest

_SUBMODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"polyreme.distributed.{name}")
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    api = importlib.import_module("polyreme.distributed.api")
    if name != "__all__" and name not in api.__all__:
        raise AttributeError(f"module 'polyreme.distributed' has no attribute {name!r}{nearest(name, __dir__())}")
    value = globals()[name] = getattr(api, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *importlib.import_module("polyreme.distributed.api").__all__})
