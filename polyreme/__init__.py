"""polyreme: imperative deep learning with the Paddle API, compiled to whole-step programs by JAX/XLA.

    import polyreme as paddle

Importing this package is nearly free; the first name used loads jax and the ops behind it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyreme.api import *

__version__ = "0.1.0"

_PACKAGES = frozenset(
    {
        "amp", "autograd", "callbacks", "device", "distributed", "framework", "hapi", "io", "jit", "linalg", "metric",
        "models", "nn", "optimizer", "random", "regularizer", "static", "tensor", "utils", "version", "vision",
    }
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _PACKAGES:
        return importlib.import_module(f"polyreme.{name}")
    api = importlib.import_module("polyreme.api")
    if not hasattr(api, name):
        raise AttributeError(f"polyreme has no name {name!r}{api.nearest(name)}")
    value = getattr(api, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *importlib.import_module("polyreme.api").__all__})
