"""One MLIR context for many lowerings: jax makes one for each program, which takes longer than lowering a small one.

Loading MLIR's dialects into a context costs 2 to 5 ms; lowering one op costs as much again. Only the main thread's live
on, each for so many programs that what it has interned stays small. XLA calls back from threads of its own, to
partition a call that it cannot look into; a context that such a thread keeps is freed in a way that ends the process.
jax 0.11 has come to keep contexts itself.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir

LOWERINGS = 64  # by one context

_log = logging.getLogger("polyreme.core")


class _ContextInUse:
    """The main thread's context, and how many programs it may still lower."""

    def __init__(self) -> None:
        self.context: Any = None
        self.left = 0


def reusing(init: Callable[..., None]) -> Callable[..., None]:
    """mlir.ModuleContext.__init__, taking a module's context from an earlier module of the main thread."""
    current = _ContextInUse()

    @functools.wraps(init)
    def reuse(self: Any, *args: Any, context: Any = None, **kwargs: Any) -> None:
        # lowering one program may lower another, whose module would be put into the first's in the same context
        is_inner = ir.Context.current is not None
        if context is not None or is_inner or threading.get_ident() != threading.main_thread().ident:
            init(self, *args, context=context, **kwargs)
            return
        if not current.left:
            current.context, current.left = None, LOWERINGS
        init(self, *args, context=current.context, **kwargs)
        current.context = self.context
        current.left -= 1

    return reuse


def reuse_contexts() -> None:
    """Make jax lower with contexts that live on; a jax that keeps contexts itself, or takes none, is left as it is."""
    if jax.__version_info__ >= (0, 11):
        return
    module = mlir.ModuleContext
    if "context" not in inspect.signature(module.__init__).parameters:
        _log.info("this jax gives no context to a module: each program is lowered in an MLIR context of its own")
        return
    module.__init__ = reusing(module.__init__)  # type: ignore[method-assign]
