"""enable_compat: `import torch` in a process gives polyreme's functions and layers under torch's paths."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from polyreme import module_alias
from polyreme.errors import ConfigError
from polyreme.module_alias import ModuleLoader, module_exists

_ROOT = "torch"
_RENAMED = {"tensor": "asarray"}
"""Names of the root that polyreme spells another way."""
_INSTEAD = {
    "optim": "polyreme.optimizer, whose classes take learning_rate= and parameters=",
    "optim.lr_scheduler": "polyreme.optimizer.lr; a schedule goes to the optimizer as its learning_rate=",
    "utils.data": "polyreme.io",
    "distributions": "polyreme.distribution",
    "func": "polyreme.autograd",
    "onnx": "polyreme.jit.save, which writes StableHLO",
}
"""Modules that have another path and other arguments here, so that a script has to be written anew there."""


def enable_compat(scope: Any = None, blocked_modules: Any = None, backend: str = "torch", silent: bool = False) -> None:
    """From now on `import torch`, and any module below it that polyreme has, gives polyreme: what polyreme.compat has
    from there, the rest from polyreme itself. disable_compat ends it. silent is for warnings that do not arise here.

    Raises ConfigError if torch has been imported before, for another backend, and for scope or blocked_modules: Python
    keeps one module of a name for all who import it.

    >>> enable_compat()
    >>> import torch
    >>> import polyreme
    >>> torch.sin is polyreme.sin, torch.split is polyreme.compat.split
    (True, True)
    >>> disable_compat()
    """
    if backend != _ROOT:
        raise ConfigError(f"enable_compat: backend={backend!r}; only 'torch' is known")
    if scope is not None or blocked_modules is not None:
        raise ConfigError(
            "enable_compat: scope and blocked_modules are not supported, as all who import torch get one module; "
            "call it without them, and disable_compat() before importing what needs the real one"
        )
    if module_alias.installed(_ROOT):
        return
    if _ROOT in sys.modules:
        raise ConfigError("enable_compat: torch is imported already; call enable_compat before anything imports it")
    module_alias.install(_ROOT, _spec_of)


def disable_compat() -> None:
    """`import torch` is what it was before enable_compat; modules that were imported meanwhile keep what they have."""
    for finder in module_alias.installed(_ROOT):
        sys.meta_path.remove(finder)
    for name in [n for n, m in sys.modules.items() if isinstance(m, _Proxy)]:
        del sys.modules[name]


@contextmanager
def compat_guard(*, enable: bool = True, **options: Any) -> Iterator[None]:
    """enable_compat, or disable_compat, inside the block; options are enable_compat's."""
    before = bool(module_alias.installed(_ROOT))
    _switch(enable, options)
    try:
        yield
    finally:
        _switch(before, {})


def _switch(on: bool, options: dict[str, Any]) -> None:
    if on:
        enable_compat(**options)
    else:
        disable_compat()


class _Proxy(ModuleType):
    """Names of polyreme.compat's module of the same path, else of polyreme's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = self.__name__.removeprefix(_ROOT)
        wanted = _RENAMED.get(name, name) if not path else name
        for module in (_module(f"polyreme.compat{path}"), _module(f"polyreme{path}")):
            value = getattr(module, wanted, None)
            if value is not None and not (isinstance(value, ModuleType) and value.__name__.startswith("polyreme")):
                return value
        try:
            return importlib.import_module(f"{self.__name__}.{name}")
        except ModuleNotFoundError:
            raise AttributeError(f"polyreme has nothing for {self.__name__}.{name}") from None


def _module(name: str) -> ModuleType | None:
    return importlib.import_module(name) if module_exists(name) else None


def _spec_of(fullname: str, inner: str) -> ModuleSpec:
    if inner and not (module_exists(f"polyreme.compat.{inner}") or module_exists(f"polyreme.{inner}")):
        instead = _INSTEAD.get(inner)
        raise ModuleNotFoundError(
            f"polyreme has no module for {fullname}{f'; use {instead}' if instead else ''}", name=fullname
        )
    return ModuleSpec(fullname, ModuleLoader(_Proxy), is_package=True)
