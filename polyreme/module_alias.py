"""Imports of one root package, such as paddle or torch, answered with modules of polyreme."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def module_exists(name: str) -> bool:
    """Whether a module of this name is loaded or can be."""
    try:
        return name in sys.modules or find_spec(name) is not None
    except ModuleNotFoundError:  # its parent does not exist, or is no package
        return False


class AliasFinder(MetaPathFinder):
    """Finds the modules of a root package, and no others.

    spec_of: (full name, name below the root, "" for the root itself) -> the spec; raises ModuleNotFoundError.
    """

    root: str

    def __init__(self, root: str, spec_of: Callable[[str, str], ModuleSpec]) -> None:
        self.root, self._spec_of = root, spec_of

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        root, _, inner = fullname.partition(".")
        return self._spec_of(fullname, inner) if root == self.root else None


def install(root: str, spec_of: Callable[[str, str], ModuleSpec]) -> AliasFinder | None:
    """Put a finder for root before all others; None if there is one already."""
    if installed(root):
        return None
    finder = AliasFinder(root, spec_of)
    sys.meta_path.insert(0, finder)
    return finder


def installed(root: str) -> list[AliasFinder]:
    """The finders in force for root."""
    return [finder for finder in sys.meta_path if isinstance(finder, AliasFinder) and finder.root == root]


class AliasLoader(Loader):
    """Gives a module that has another name, which it keeps."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.name)
        self._identity = (module.__spec__, getattr(module, "__loader__", None))
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has written the alias's spec into the module, which has been executed before
        module.__spec__, module.__loader__ = self._identity


class ModuleLoader(Loader):
    """Gives the module that make(name) returns, which has no code to run."""

    def __init__(self, make: Callable[[str], ModuleType]) -> None:
        self._make = make

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._make(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It has no code."""
