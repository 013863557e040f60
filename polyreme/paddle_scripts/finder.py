"""Makes `import paddle.x.y` give the module polyreme.x.y itself, one and the same object, not a copy."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import polyreme
from polyreme import module_alias
from polyreme.errors import ConfigError
from polyreme.module_alias import AliasLoader, ModuleLoader
from polyreme.paddle_scripts import hints, lookup
from polyreme.paddle_scripts.lookup import own_name
from polyreme.paddle_scripts.names import CALLED, CLASSES, NAMES, RELEASE
from polyreme.stand_ins import Absent

FOLDER = Path(__file__).resolve().parent / "path"
"""Put first on the module path of a process, `import paddle` in it gives polyreme."""
_CALLED_TOO = {
    "nn.functional.flash_attention": "nn.functional.flash_attention",
    "tensor": "paddle_scripts.internals.framework.tensor",
}
"""Modules of PaddlePaddle that can be called -> the function of polyreme that a call is."""


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
        self._undo: list[Callable[[], None]] = []
        self._seen = 0
        self._registered: set[str] = set()
        self._extended: set[str] = set()
        self._named: set[str] = set()
        finder = module_alias.install("paddle", self._spec)
        if finder is not None:
            self._undo += [lambda: sys.meta_path.remove(finder), _forget_modules]
            sys.modules["paddle"] = polyreme
            self._register_loaded()
        if str(FOLDER) not in sys.path:
            sys.path.insert(0, str(FOLDER))
            self._undo.append(lambda: sys.path.remove(str(FOLDER)))

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    # modules

    def _spec(self, fullname: str, inner: str) -> ModuleSpec:
        if own_name(inner) is not None:
            name = f"polyreme.{inner}" if inner else "polyreme"
            source: Any = importlib.util.find_spec(name)
            spec = ModuleSpec(fullname, _AliasLoader(name, self._register_loaded), origin=source.origin)
            spec.submodule_search_locations = source.submodule_search_locations
            return spec
        if lookup.is_module(inner):
            loader = ModuleLoader(lambda name: self._stand_in(name, inner))
            return ModuleSpec(fullname, loader, is_package=True)
        raise ModuleNotFoundError(hints.missing_module(fullname), name=fullname)

    def _stand_in(self, fullname: str, inner: str) -> ModuleType:
        """A module of PaddlePaddle whose names are elsewhere in polyreme, or nowhere."""
        module: Any = _StandIn(fullname, inner)
        module.__path__ = []
        self._add_names(inner, module)
        self._keep_attributes(inner, module)
        return module

    def _register_loaded(self) -> None:
        """Give every loaded polyreme module its name under paddle, and the names that PaddlePaddle's has.

        The import system sets a module as an attribute of its parent when it loads it, over a function of the same name
        (paddle.amp.auto_cast): what is known already is not loaded.
        """
        while len(sys.modules) != self._seen:  # classes are extended by modules that load others
            self._seen = len(sys.modules)
            self._extend("", polyreme)
            known = self._registered
            modules = {n: m for n, m in sys.modules.items() if n.startswith("polyreme.") and n not in known}
            # one that is being loaded has not all of its names yet
            loaded = {n: m for n, m in modules.items() if not getattr(m.__spec__, "_initializing", False)}
            known.update(loaded)
            for name, module in loaded.items():
                inner = name.removeprefix("polyreme.")
                if sys.modules.setdefault(f"paddle.{inner}", module) is module:
                    self._extend(inner, module)
            if len(loaded) < len(modules):
                # what extends classes imports modules, which may wait for the one that is being loaded
                self._seen = 0
                return
            self._extend_classes()

    def _extend(self, inner: str, module: ModuleType) -> None:
        if inner in self._extended or not (inner in lookup.modules() or inner == ""):
            return
        self._extended.add(inner)
        if not hasattr(module, "__path__"):  # a package in PaddlePaddle
            self._set(module, "__path__", [])
        for table, value in ((RELEASE, lookup.fetch), (CALLED, self._fetch_later)):
            for path, source in table.items():
                if path.rpartition(".")[0] == inner:
                    self._set(module, path.rpartition(".")[2], value(source))
        self._add_names(inner, module)
        self._keep_attributes(inner, module)

    def _add_names(self, inner: str, module: ModuleType) -> None:
        """Let the module answer for the names that it has not itself."""
        get_missing: Any = _attributes(module).get("__getattr__")
        label = f"paddle.{inner}" if inner else "paddle"

        def find(name: str) -> Any:
            missing: AttributeError
            try:
                if get_missing is not None:
                    value = get_missing(name)
                    self._register_loaded()
                    return value
                missing = AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            except AttributeError as error:
                missing = error
            if name == "__all__" and not lookup.own_name(inner):
                return lookup.names_below(inner)
            path = f"{inner}.{name}" if inner else name
            if own_name(path) is not None and path not in NAMES:
                # asked by the import system too, which loads it then
                if not lookup.is_module(path) and name not in hints.paddle_names().get(label, ()):
                    raise missing
                value = importlib.import_module(f"polyreme.{path}")
            else:
                try:
                    value = lookup.find(inner, name)
                except AttributeError:
                    raise missing from None
            self._register_loaded()
            return value

        find.__doc__ = f"Names of {label} that the tables have."
        self._set(module, "__getattr__", find)

    def _keep_attributes(self, inner: str, module: ModuleType) -> None:
        """Load modules whose name is another thing's before anybody asks for them: loading them sets the attribute."""
        for path in lookup.children(inner):
            name = path.rpartition(".")[2]
            value = _attributes(module).get(name)
            is_attribute = path in _CALLED_TOO or value is not None or lookup.is_name(inner, name)
            if not is_attribute or own_name(path) is not None:
                continue
            child = sys.modules.setdefault(f"paddle.{path}", self._stand_in(f"paddle.{path}", path))
            if path in _CALLED_TOO:
                self._set(module, name, _CalledModule(child, value or self._fetch_later(_CALLED_TOO[path])))

    def _fetch_later(self, source: str) -> Callable[..., Any]:
        """The function at a path, fetched when it is called: it may need jax, which importing paddle does not load."""

        def call(*args: Any, **kwargs: Any) -> Any:
            function = lookup.fetch(source)
            self._register_loaded()
            return function(*args, **kwargs)

        return call

    def _extend_classes(self) -> None:
        """Give classes that are loaded the attributes that scripts ask of PaddlePaddle's."""
        for path, source in CLASSES.items():
            home, _, name = path.rpartition(".")
            cls = getattr(sys.modules.get(f"polyreme.{home}"), name, None)
            if cls is None or path in self._named:
                continue
            self._named.add(path)
            names = lookup.fetch(source)
            replaced = getattr(names, "_replaces", ())
            if hasattr(names, "_home"):
                self._set(cls, "__module__", names._home)
            for attribute, value in vars(names).items():
                if not attribute.startswith("__") and (attribute in replaced or not hasattr(cls, attribute)):
                    self._set(cls, attribute, value)

    def _set(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute until the end."""
        if name in _attributes(holder):
            before = _attributes(holder)[name]
            self._undo.append(lambda: setattr(holder, name, before))
        else:
            self._undo.append(lambda: delattr(holder, name))
        setattr(holder, name, value)


def _is_ours(module: ModuleType) -> bool:
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(FOLDER)


def _forget_modules() -> None:
    gone = {n: m for n, m in sys.modules.items() if n == "paddle" or n.startswith("paddle.")}
    for name, module in gone.items():
        del sys.modules[name]
        parent, child = name.rpartition(".")[::2]
        # the import system has made a stand-in an attribute of polyreme's own package
        if module.__name__ == name and _attributes(gone.get(parent, module)).get(child) is module:
            delattr(gone[parent], child)


class _StandIn(ModuleType):
    """A module whose names are fetched when they are asked for.

    vars, dir and `__dict__` have all of them, but for what polyreme does not have: scripts look classes up by name
    there.
    """

    def __init__(self, name: str, inner: str) -> None:
        super().__init__(name, f"Names of {name} that polyreme has.")
        self._inner, self._is_full = inner, False

    @property
    def __dict__(self) -> dict[str, Any]:
        attributes = _attributes(self)
        if not attributes["_is_full"]:
            attributes["_is_full"] = True
            for name in lookup.names_below(attributes["_inner"]):
                value = getattr(self, name, None)
                if value is not None and not isinstance(value, Absent):
                    attributes.setdefault(name, value)
        return attributes


def _attributes(holder: Any) -> dict[str, Any]:
    """vars, of a stand-in only what it has already."""
    return _DICT.__get__(holder) if isinstance(holder, ModuleType) else vars(holder)


_DICT: Any = vars(ModuleType)["__dict__"]


class _CalledModule(ModuleType):
    """A module that can be called as the function of its name."""

    def __init__(self, module: ModuleType, function: Callable[..., Any]) -> None:
        super().__init__(module.__name__, function.__doc__)
        self._module, self._function = module, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _AliasLoader(AliasLoader):
    """Gives polyreme's own module."""

    def __init__(self, name: str, loaded: Callable[[], None]) -> None:
        super().__init__(name)
        self._loaded = loaded

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._loaded()

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        source: Any = importlib.util.find_spec(self.name)
        return source.loader.get_code(self.name)
