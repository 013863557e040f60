"""polyreme: imperative deep learning with the Paddle API, compiled to whole-step programs by JAX/XLA.

    import polyreme as paddle

Importing this package is nearly free; the first name used loads jax and the ops behind it.
"""

import importlib
import pkgutil
from typing import Any

from polyreme import jax_import

__version__ = "0.1.0"
jax_import.keep_random_state()

_SUBMODULES = frozenset(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


# names whose modules would make the first use of any other name slower
_LATE = {"Model": "polyreme.hapi", "DataParallel": "polyreme.distributed", "batch": "polyreme.reader"}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _SUBMODULES:
        return importlib.import_module(f"polyreme.{name}")
    api = importlib.import_module(_LATE.get(name, "polyreme.api"))
    if not hasattr(api, name):
        missing = importlib.import_module("polyreme.module_names").MissingName
        raise missing(f"polyreme has no name {name!r}", __name__, name, __dir__)
    value = getattr(api, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_LATE, *importlib.import_module("polyreme.api").__all__})
