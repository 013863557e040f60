"""One MLIR context for many lowerings: jax makes one for each program, which takes longer than lowering a small one.

Loading MLIR's dialects into a context costs 2 to 5 ms; lowering one op costs as much again. Contexts stay in the thread
of Python that made them, and each is let go after so many programs that what it has interned stays small.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from jax.interpreters import mlir

LOWERINGS = 64  # by one context

_log = logging.getLogger("polyreme.core")


class _ContextInUse(threading.local):
    """A thread's context, and how many programs it may still lower."""

    def __init__(self) -> None:
        self.context: Any = None
        self.left = 0


def reusing(init: Callable[..., None]) -> Callable[..., None]:
    """mlir.ModuleContext.__init__, taking a module's context from an earlier module of the thread."""
    current = _ContextInUse()

    @functools.wraps(init)
    def reuse(self: Any, *args: Any, context: Any = None, **kwargs: Any) -> None:
        if context is None and current.left:
            context = current.context
            current.left -= 1
            init(self, *args, context=context, **kwargs)
            return
        init(self, *args, context=context, **kwargs)
        if context is None and _is_of_python():
            current.context, current.left = self.context, LOWERINGS - 1

    return reuse


def _is_of_python() -> bool:
    """Whether Python started this thread. XLA calls back from threads of its own, to partition a call that it cannot
    look into, and what such a thread keeps is freed when its state is: that ends the process.
    """
    return any(thread.ident == threading.get_ident() for thread in threading.enumerate())


def reuse_contexts() -> None:
    """Let jax lower with contexts that live on; a jax that takes none is left as it is."""
    module = mlir.ModuleContext
    if "context" not in inspect.signature(module.__init__).parameters:
        _log.info("this jax gives no context to a module: each program is lowered in an MLIR context of its own")
        return
    module.__init__ = reusing(module.__init__)  # type: ignore[method-assign]
