"""Families of models, and published weights of any of them.

Names load when one of them is first used: records of families need no jax.
"""

import importlib
import pkgutil
from typing import Any

from polyreme.errors import nearest

__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForMaskedLM",
    "AutoModelForQuestionAnswering",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForTokenClassification",
    "AutoTokenizer",
]

_ABOVE = {"AutoTokenizer": "polyreme.generation.tokenizer"}
"""Public names that stand on a higher floor."""

_SUBMODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"polyreme.models.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'polyreme.models' has no attribute {name!r}{nearest(name, __all__)}")
    value = globals()[name] = getattr(importlib.import_module(_ABOVE.get(name, "polyreme.models.auto")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *__all__})
