"""Methods of Tensor made from the op tables: each op declared as a method, and each in-place form."""

from collections.abc import Callable
from typing import Any

from polyreme import ops
from polyreme.core.op import Op
from polyreme.eager.dispatch import inplace
from polyreme.ops import OPS


def _op(fn: Callable[..., Any]) -> Op | None:
    declared = getattr(fn, "op", None)
    return declared if isinstance(declared, Op) else None


def _is_method(fn: Callable[..., Any]) -> bool:
    declared = _op(fn)
    return getattr(fn, "method", False) if declared is None else declared.method


INPLACE: dict[str, Callable[..., Any]] = {
    f"{name}_": inplace(fn) for name, fn in OPS.items() if (declared := _op(fn)) is not None and declared.inplace
}
"""Public in-place functions by name, such as add_."""

ALIASES: dict[str, str] = {
    alias: name for module in vars(ops).values() for alias, name in getattr(module, "ALIASES", {}).items()
}
"""Second names of ops, from every table."""

_METHODS = {name: fn for name, fn in OPS.items() if _is_method(fn)}
_METHODS |= {name: fn for name, fn in INPLACE.items() if name[:-1] in _METHODS}

OpMethods = type(
    "OpMethods",
    (),
    {
        "__doc__": "Every op that is also a Tensor method.",
        "__slots__": (),
        **{alias: _METHODS[name] for alias, name in ALIASES.items() if name in _METHODS},
        **{f"{alias}_": _METHODS[f"{name}_"] for alias, name in ALIASES.items() if f"{name}_" in _METHODS},
        **_METHODS,
    },
)
