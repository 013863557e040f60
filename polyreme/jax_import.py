"""jax's import draws from numpy's global generator; loaded for polyreme, it leaves the program's random numbers alone.

jax is loaded at the first use of polyreme, whichever module of it that is: between a program's seed and its numbers.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _RestoringLoader(Loader):
    """The loader of a package, run once with the global generators put back after it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        numbers: Any = sys.modules.get("numpy.random")  # what is not loaded yet has no state of the program's
        state, numpy_state = random.getstate(), numbers and numbers.get_state()
        try:
            self._loader.exec_module(module)
        finally:
            random.setstate(state)
            if numbers:
                numbers.set_state(numpy_state)


class _JaxFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            spec.loader = _RestoringLoader(spec.loader)
        return spec


def keep_random_state() -> None:
    """Let the import of jax that is to come put Python's and numpy's global generators back."""
    if "jax" not in sys.modules:
        sys.meta_path.insert(0, _JaxFinder())
