"""Families of models, and published weights of any of them.

Every family's configuration and models have their names here, and a module of the packages below its own: GPTConfig is
polyreme.models.decoders.gpt.GPTConfig, and polyreme.models.gpt that module. Names load when one of them is first used:
records of families need no jax.

>>> from polyreme.models import GPT, GPTConfig
>>> GPT.__module__
'polyreme.models.decoders.gpt'
"""

import importlib
import pkgutil
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from polyreme.errors import nearest
from polyreme.module_alias import AliasLoader, module_exists
from polyreme.registry import Reference

__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
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
_PACKAGES = ("decoders", "experts", "encoders", "encoder_decoders", "vision", "vision_language", "parts", "files")
"""Where a module is looked for whose package is not said."""


class _ShortPaths(MetaPathFinder):
    """Finds polyreme.models.gpt, which is polyreme.models.decoders.gpt."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if parent != __name__ or name in _SUBMODULES:
            return None
        places = (f"{__name__}.{package}.{name}" for package in _PACKAGES)
        place = next(filter(module_exists, places), None)
        return None if place is None else ModuleSpec(fullname, AliasLoader(place))


sys.meta_path.append(_ShortPaths())


def _homes() -> dict[str, str]:
    """Modules of the configurations and models of all families by their names."""
    families = importlib.import_module(f"{__name__}.families")
    records = [*families.FAMILIES.values(), *families.ARCHITECTURES]
    references: list[Reference[Any]] = [r for record in records for r in (record.config, record.model)]
    return {reference.name: reference.module for reference in references}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        home = _ABOVE.get(name, "polyreme.models.auto")
    else:
        home = _homes().get(name, "") if not name.startswith("_") else ""
    if not home:
        choices = () if name.startswith("_") else (*__all__, *_homes())
        raise AttributeError(f"module 'polyreme.models' has no attribute {name!r}{nearest(name, choices)}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *__all__, *_homes()})
