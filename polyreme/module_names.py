"""Modules that, asked for a name they do not have, say what to write, or the nearest one that they have."""

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from polyreme.errors import nearest

# what other libraries call it -> what to write; of a module and name where the name alone has another meaning here
_ELSEWHERE = {
    "backends": "set_flags, set_device",
    "checkpoint": "distributed.fleet.utils.recompute",
    "compile": "jit.to_static",
    "custom_jvp": "utils.register_op",
    "custom_vjp": "autograd.PyLayer, utils.register_op",
    "func": "autograd",
    "inference_mode": "no_grad",
    "jacfwd": "autograd.jacobian",
    "jacrev": "autograd.jacobian",
    "lr_scheduler": "optimizer.lr",
    "onnx": "jit.save",
    "optim": "optimizer",
    "polyreme.tensor": "to_tensor",
    "polyreme.utils.data": "io",
    "value_and_grad": "grad",
}


# where names stand that people ask the root for, the likeliest first; the root has loaded all of them
_BELOW = ("nn", "nn.functional", "optimizer", "io", "jit", "autograd", "amp", "optimizer.lr")


def instead(module: str, name: str, choices: Iterable[str]) -> str:
    """The end of a message about a name that a public module does not have: what to write, or the nearest, or nothing.

    >>> instead("polyreme", "compile", ["complex"])
    '; write paddle.jit.to_static'
    >>> instead("polyreme.nn", "Linea", ["Linear"])
    "; did you mean 'Linear'?"
    """
    words = _ELSEWHERE.get(f"{module}.{name}") or _ELSEWHERE.get(name)
    if words is None and module == "polyreme":
        below = ((part, sys.modules.get(f"polyreme.{part}")) for part in _BELOW)
        words = next((f"{part}.{name}" for part, there in below if name in getattr(there, "__all__", ())), None)
    return f"; write paddle.{words.replace(', ', ', paddle.')}" if words else nearest(name, choices)


class MissingName(AttributeError):
    """An AttributeError whose message ends with `instead`, looked for when it is read: hasattr() reads none."""

    def __init__(self, message: str, module: str, name: str, choices: Callable[[], Iterable[str]]) -> None:
        super().__init__(message)
        self._asked = module, name, choices

    def __str__(self) -> str:
        module, name, choices = self._asked
        return super().__str__() + instead(module, name, choices())

    def __reduce__(self) -> tuple[type[AttributeError], tuple[str]]:
        return AttributeError, (str(self),)


# tracebacks name the class as Python does
MissingName.__name__ = MissingName.__qualname__ = "AttributeError"
MissingName.__module__ = "builtins"


class _Suggesting(ModuleType):
    def __getattr__(self, name: str) -> NoReturn:
        message = f"module {self.__name__!r} has no attribute {name!r}"
        if name.startswith("_"):
            raise AttributeError(message)
        raise MissingName(message, self.__name__, name, lambda: [n for n in dir(self) if not n.startswith("_")])

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
