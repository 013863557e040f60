"""What scripts ask of functions that to_static has made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_inference_mode(func: Any) -> bool:
    """Whether incubate.jit.inference made func: False, as that is not here."""
    return False


class StaticFunctionNames:
    """Attributes that jit.to_static's functions have for scripts."""

    _replaces = ("falls_back",)
    falls_back = True
    fn: Any

    def rollback(self) -> Callable[..., Any]:
        """The function as it was before to_static; a Layer's method is that again from now on."""
        owner = getattr(self.fn, "__self__", None)
        if owner is not None and vars(owner).get(self.fn.__name__) is self:
            vars(owner)[self.fn.__name__] = self.fn
        return self.fn
