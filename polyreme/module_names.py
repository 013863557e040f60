"""Modules that, asked for a name they do not have, say the nearest one that they have."""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from polyreme.errors import nearest


class _Suggesting(ModuleType):
    def __getattr__(self, name: str) -> NoReturn:
        message = f"module {self.__name__!r} has no attribute {name!r}"
        if not name.startswith("_"):
            message += nearest(name, (known for known in dir(self) if not known.startswith("_")))
        raise AttributeError(message)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        # what pickles functions by value knows plain modules, which it imports by name as this does
        return import_module, (self.__name__,)


def suggest_names(module: str, called: Callable[..., Any] | None = None) -> None:
    """Called at the end of a public module: a name that it does not have is answered with the nearest one.

    called: what calling the module does, as `paddle.device("cpu")` is written beside `paddle.device.set_device`.
    The module gets a class of its own, as the language provides for; type checkers see no __getattr__, and go on
    telling unknown names themselves.
    """
    kind = _Suggesting if called is None else type("module", (_Suggesting,), {"__call__": staticmethod(called)})
    sys.modules[module].__class__ = kind


_Suggesting.__name__ = "module"  # what Python calls it in its own messages
