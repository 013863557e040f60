"""Makes `import paddle.x.y` give the module polyreme.x.y itself, one and the same object, not a copy."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import AbstractContextManager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import polyreme
from polyreme import module_alias
from polyreme.errors import ConfigError
from polyreme.module_alias import ModuleLoader, module_exists
from polyreme.paddle_scripts import hints
from polyreme.paddle_scripts.paths import PATHS

FOLDER = Path(__file__).resolve().parent / "path"
"""Put first on the module path of a process, `import paddle` in it gives polyreme."""


def as_paddle() -> AsPaddle:
    """From now on `import paddle`, and any module below it, gives polyreme, whether PaddlePaddle is installed or not.

    It holds in this process and in those that multiprocessing starts from it, DataLoader workers for one. In a `with`
    statement it ends with the block. Raises ConfigError if PaddlePaddle has been imported before.

    >>> with as_paddle():
    ...     import paddle.nn.functional as F
    ...     import polyreme
    ...     F is polyreme.nn.functional
    True
    """
    before = sys.modules.get("paddle")
    if before is not None and before is not polyreme and not _is_ours(before):
        raise ConfigError(
            f"as_paddle: PaddlePaddle ({getattr(before, '__file__', 'paddle')}) is imported already; call as_paddle "
            "before anything imports paddle"
        )
    return AsPaddle()


class AsPaddle(AbstractContextManager):
    """What as_paddle returns."""

    def __init__(self) -> None:
        self._added = [*_install_finder(), *_put_on_path()]

    def __exit__(self, *_: object) -> None:
        for holder, entry in self._added:
            holder.remove(entry)
        if self._added:
            gone = {n: m for n, m in sys.modules.items() if n == "paddle" or n.startswith("paddle.")}
            for name, module in gone.items():
                del sys.modules[name]
                parent, child = name.rpartition(".")[::2]
                # the import system has made a stand-in an attribute of polyreme's own package
                if module.__name__ == name and vars(gone.get(parent, module)).get(child) is module:
                    delattr(gone[parent], child)


def _is_ours(module: ModuleType) -> bool:
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(FOLDER)


def _install_finder() -> list[tuple[list, Any]]:
    finder = module_alias.install("paddle", _find)
    if finder is None:
        return []
    sys.modules["paddle"] = polyreme
    _register_loaded()
    return [(sys.meta_path, finder)]


def _put_on_path() -> list[tuple[list, Any]]:
    if str(FOLDER) in sys.path:
        return []
    sys.path.insert(0, str(FOLDER))
    return [(sys.path, str(FOLDER))]


def _find(fullname: str, inner: str) -> ModuleSpec:
    if own_name(inner) is not None:
        return _spec_of(fullname, inner)
    if inner in PATHS:
        loader = ModuleLoader(lambda name: _stand_in(name, inner))
        return ModuleSpec(fullname, loader, is_package=inner in _CHILDREN)
    raise ModuleNotFoundError(hints.missing_module(fullname), name=fullname)


def own_name(inner: str) -> str | None:
    """The polyreme module of the same path as paddle.<inner>, if there is one.

    >>> own_name("nn.functional"), own_name("tensor.math")
    ('polyreme.nn.functional', None)
    """
    name = f"polyreme.{inner}" if inner else "polyreme"
    return name if module_exists(name) else None


def _spec_of(fullname: str, inner: str) -> ModuleSpec:
    name = f"polyreme.{inner}" if inner else "polyreme"
    found: Any = importlib.util.find_spec(name)
    spec = ModuleSpec(fullname, _AliasLoader(inner, name), origin=found.origin)
    spec.submodule_search_locations = found.submodule_search_locations
    return spec


class _AliasLoader(Loader):
    """Gives polyreme's own module."""

    def __init__(self, inner: str, name: str) -> None:
        self.inner, self.name = inner, name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.name)
        self._own = (module.__spec__, getattr(module, "__loader__", None))
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has written the alias's spec into the module, which has been executed before
        module.__spec__, module.__loader__ = self._own
        _extend(self.inner, module)
        _register_loaded()

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        found: Any = importlib.util.find_spec(self.name)
        return found.loader.get_code(self.name)


def _stand_in(fullname: str, inner: str) -> ModuleType:
    """A module whose names are those of another: a path of the table."""
    module: Any = ModuleType(fullname, f"Names of {_target(inner)}.")
    if inner in _CHILDREN:
        module.__path__ = []
    module.__getattr__ = _names_of(fullname, _target(inner))
    return module


def _register_loaded() -> None:
    """Give every loaded polyreme module its name under paddle too.

    The import system sets a module as an attribute of its parent when it loads it, over a function of the same name
    (paddle.amp.auto_cast): what is known already is not loaded.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("polyreme."):
            inner = name.removeprefix("polyreme.")
            if sys.modules.setdefault(f"paddle.{inner}", module) is module:
                _extend(inner, module)


def _extend(inner: str, module: ModuleType) -> None:
    """A module that is a package in PaddlePaddle: names and modules it lacks are those of others, by the table."""
    children = _CHILDREN.get(inner, ())
    if children and not hasattr(module, "__path__"):
        module.__path__ = []
    for path in children:
        # a function of the child's name keeps it, as in PaddlePaddle, where the module was loaded before the function
        if path.rpartition(".")[2] in vars(module) and own_name(path) is None:
            sys.modules.setdefault(f"paddle.{path}", _stand_in(f"paddle.{path}", path))
    if inner in PATHS and module.__name__ == f"polyreme.{inner}" and not hasattr(module, "__getattr__"):
        module.__getattr__ = _names_of(module.__name__, _target(inner))  # type: ignore[method-assign]


def _names_of(name: str, other: str) -> Any:
    def find(attribute: str) -> Any:
        missing = AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if attribute.startswith("__") and attribute != "__all__":
            raise missing
        try:
            return getattr(importlib.import_module(other), attribute)
        except AttributeError:
            raise missing from None

    return find


def _target(path: str) -> str:
    return f"polyreme.{PATHS[path]}" if PATHS[path] else "polyreme"


def _by_parent() -> dict[str, list[str]]:
    children: dict[str, list[str]] = {}
    for path in PATHS:
        children.setdefault(path.rpartition(".")[0], []).append(path)
    return children


_CHILDREN = _by_parent()
