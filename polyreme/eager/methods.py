"""Methods of Tensor made from the op tables: each op declared as a method, and each in-place form.

Floor: 3.
"""

from collections.abc import Callable
from typing import Any

from polyreme.core.op import Op
from polyreme.eager.dispatch import inplace
from polyreme.ops import OPS


def _is_method(fn: Callable[..., Any]) -> bool:
    declared = getattr(fn, "op", None)
    return declared.method if isinstance(declared, Op) else getattr(fn, "method", False)


INPLACE: dict[str, Callable[..., Any]] = {
    f"{name}_": inplace(fn) for name, fn in OPS.items() if isinstance(getattr(fn, "op", None), Op) and fn.op.inplace
}
"""Public in-place functions by name, such as add_."""

OpMethods = type(
    "OpMethods",
    (),
    {
        "__doc__": "Every op that is also a Tensor method.",
        "__slots__": (),
        **{name: fn for name, fn in OPS.items() if _is_method(fn)},
        **{name: fn for name, fn in INPLACE.items() if _is_method(OPS[name[:-1]])},
    },
)
