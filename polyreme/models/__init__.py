"""Families of models, and published weights of any of them.

Names load when one of them is first used: records of families need no jax.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from polyreme.errors import nearest

if TYPE_CHECKING:
    from polyreme.models.auto import *

__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
]

_SUBMODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"polyreme.models.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'polyreme.models' has no attribute {name!r}{nearest(name, __all__)}")
    value = globals()[name] = getattr(importlib.import_module("polyreme.models.auto"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *__all__})
