"""What `paddle.<module>.<name>` is where polyreme's module of that path has no such name.

In this order: the tables of names.py and paths.py, a module below it, and for what PaddlePaddle has and polyreme does
not a stand-in that says so when it is used.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from polyreme.module_alias import module_exists
from polyreme.paddle_scripts.hints import paddle_names
from polyreme.paddle_scripts.names import NAMES, REASONS
from polyreme.paddle_scripts.paths import PATHS, SAME
from polyreme.stand_ins import absent

_INTERNALS = [Path(__file__).resolve().parent / name for name in ("paddle_internals.txt", "fluid_internals.txt")]
_PUBLIC = "docs/api_coverage.md says why"
_PRIVATE = "it is private to PaddlePaddle: use the public API"


def find(module: str, name: str) -> Any:
    """The value of a name of paddle.<module>, "" for paddle itself; AttributeError for one that PaddlePaddle lacks too.

    >>> find("nn.layer.norm", "LayerNorm").__name__, find("onnx", "export")
    ('LayerNorm', <absent: export>)
    """
    path = f"{module}.{name}" if module else name
    if path in NAMES:
        return fetch(NAMES[path])
    if name.startswith("__"):
        raise AttributeError(path)
    if module in PATHS:
        try:
            value = getattr(_load(PATHS[module]), name)
        except AttributeError:
            pass
        else:
            # paddle.framework.io is not paddle.io
            if not (isinstance(value, ModuleType) and path in modules()):
                return value
    if path in modules():
        return importlib.import_module(f"paddle.{path}")
    return _listed(module, name, path)


def names_below(module: str) -> list[str]:
    """Names without an underscore that scripts may import from paddle.<module>: what `import *` gives."""
    names = {*internal_names().get(module, {}), *paddle_names().get(f"paddle.{module}", ())}
    names.update(path.rpartition(".")[2] for path in NAMES if path.rpartition(".")[0] == module)
    if module in PATHS:
        names.update(getattr(_load(PATHS[module]), "__all__", ()))
    return sorted(n for n in names if not n.startswith("_"))


def is_name(module: str, name: str) -> bool:
    """Whether PaddlePaddle has a function or class of this name in a module, and not a module."""
    return name in internal_names().get(module, ()) or name in paddle_names().get(f"paddle.{module}", ())


def fetch(path: str) -> Any:
    """The value at a path below polyreme, or at a path of PaddlePaddle that begins with `paddle.`."""
    first, *rest = path.split(".") if path.startswith("paddle.") else ("polyreme", *path.split("."))
    value = importlib.import_module(first)
    module_path = first
    for part in rest:
        module_path = f"{module_path}.{part}"
        # a module that is not loaded yet is no attribute of its package, and one may have a function of its name
        if isinstance(value, ModuleType) and not hasattr(value, part):
            value = importlib.import_module(module_path)
        else:
            value = getattr(value, part)
    return value


def is_module(path: str) -> bool:
    """Whether paddle.<path> is a module of PaddlePaddle that scripts may import."""
    known = modules()
    if path in known:
        return True
    # what is below a module that is not here is not looked up one by one
    return any(p in REASONS and p in known for p in _above(path))


@functools.cache
def modules() -> frozenset[str]:
    """Paths of the modules that the tables name, and of the packages that they are in."""
    named = {*PATHS, *internal_names(), *(path.rpartition(".")[0] for path in NAMES)}
    named.update(m.removeprefix("paddle.") for m in paddle_names() if m.startswith("paddle.") and ".fluid" not in m)
    return frozenset({p for path in named for p in (path, *_above(path))} - {""})


@functools.cache
def _children() -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for path in sorted(modules()):
        table.setdefault(path.rpartition(".")[0], []).append(path)
    return table


def children(module: str) -> list[str]:
    """Paths of the modules right below paddle.<module>."""
    return _children().get(module, [])


@functools.cache
def internal_names() -> dict[str, dict[str, str]]:
    """Module -> its names that are not public -> the path that has the same thing, public or of the module that it is
    imported from; "" for what is defined there."""
    table: dict[str, dict[str, str]] = {}
    for line in (line for file in _INTERNALS for line in file.read_text().splitlines()):
        if not line.startswith("#"):
            module, _, words = line.partition(":")
            own, *imported = words.split(" from ")
            paths = {name: path for name, _, path in (word.partition("=") for word in own.split())}
            for home, *names in map(str.split, imported):
                paths.update((name, f"{home}.{name}") for name in names)
            table[module.removeprefix("paddle.")] = paths
    return table | {path: table[same] for path, same in SAME.items() if same in table}


def _listed(module: str, name: str, path: str) -> Any:
    """What is public under another path, or a stand-in for what PaddlePaddle has; AttributeError for the rest."""
    names = internal_names().get(module, {})
    if names.get(name):
        owner, _, name_there = names[name].rpartition(".")
        if names[name] in NAMES:
            return fetch(NAMES[names[name]])
        if PATHS.get(owner) != module:  # else it is the owner that asks
            try:
                return getattr(importlib.import_module(f"paddle.{owner}" if owner else "paddle"), name_there)
            except (ImportError, AttributeError):
                pass
    paths = (path, f"{SAME.get(module, module)}.{name}", *_above(path))
    why = next((REASONS[p] for p in paths if p in REASONS), None)
    if why is None and name in names:
        why = _PRIVATE
    if why is None and name in paddle_names().get(f"paddle.{module}" if module else "paddle", ()):
        why = _PUBLIC
    if why is None:
        raise AttributeError(path)
    return absent(path, why)


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


def _load(path: str) -> ModuleType:
    return importlib.import_module(f"polyreme.{path}" if path else "polyreme")


def own_name(inner: str) -> str | None:
    """The polyreme module of the same path as paddle.<inner>, if there is one.

    >>> own_name("nn.functional"), own_name("tensor.math")
    ('polyreme.nn.functional', None)
    """
    name = f"polyreme.{inner}" if inner else "polyreme"
    return name if name in sys.modules or _can_be_loaded(name) else None


# each `as_paddle` asks of some hundred names, and to look for a file takes 50 us
_can_be_loaded = functools.cache(module_exists)
