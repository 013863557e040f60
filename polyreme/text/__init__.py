"""Text data sets and Viterbi decoding. Names load when first used, so that worker processes never import jax."""

import importlib
from typing import Any

from polyreme.errors import nearest

_HOME = {
    "Conll05st": "datasets",
    "Imdb": "datasets",
    "Imikolov": "datasets",
    "Movielens": "datasets",
    "UCIHousing": "datasets",
    "WMT14": "datasets",
    "WMT16": "datasets",
    "ViterbiDecoder": "viterbi_decoder",
    "viterbi_decode": "viterbi_decoder",
}
__all__ = [*_HOME, "datasets"]  # pyright: ignore[reportUnsupportedDunderAll]  (names load late)


def __getattr__(name: str) -> Any:
    if name == "datasets":
        return importlib.import_module("polyreme.text.datasets")
    if name not in _HOME:
        raise AttributeError(f"module 'polyreme.text' has no attribute {name!r}{nearest(name, __all__)}")
    return getattr(importlib.import_module(f"polyreme.text.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
