"""Names of layers in compiled programs: the Layer that each operation, forward or backward, belongs to.

While a function is captured, every Layer call opens a jax.named_scope with the layer's name within its
parent, so the op_name of each XLA instruction reads Model/blocks.0/attention/... The tape numbers its nodes in order,
so a list of (number, scope) at each change tells a node's scope in the backward pass at no cost to the nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

# changes of scope remembered: a pipeline's backward is captured after its forward, several captures later
_KEPT = 100_000


class Scopes:
    """The layers being called, innermost last, and where each past scope began and ended in the tape's numbering."""

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._open: list[tuple[Any, str, AbstractContextManager]] = []
        self._starts: list[int] = []
        self._paths: list[str] = []
        self._names: dict[int, dict[int, str]] = {}

    def enter(self, layer: Any) -> None:
        """A Layer's call begins."""
        name = self._name(layer)
        path = f"{self._open[-1][1]}/{name}" if self._open else name
        scope = jax.named_scope(name)
        scope.__enter__()
        self._open.append((layer, path, scope))
        self._note(path)

    def leave(self) -> None:
        """The innermost Layer's call ends, by return or by error."""
        _, _, scope = self._open.pop()
        scope.__exit__(None, None, None)
        self._note(self._open[-1][1] if self._open else "")
        if not self._open:
            self._names.clear()  # by id, which is only good while the layers are alive

    def of(self, node: Any) -> AbstractContextManager[Any]:
        """A context in which the gradients of this tape node are named after the layer that made it."""
        at = bisect_right(self._starts, node.seq) - 1
        path = self._paths[at] if at >= 0 else ""
        return jax.named_scope(path) if path and not self._open else nullcontext()

    def _note(self, path: str) -> None:
        if len(self._starts) >= _KEPT:
            del self._starts[: _KEPT // 2], self._paths[: _KEPT // 2]
        self._starts.append(self._number())
        self._paths.append(path)

    def _name(self, layer: Any) -> str:
        """The layer's dotted name within the layer that calls it; its class where that one does not hold it."""
        if self._open:
            parent = self._open[-1][0]
            names = self._names.get(id(parent))
            if names is None:
                names = self._names[id(parent)] = {id(found): name for name, found in parent.named_sublayers()}
            if id(layer) in names:
                return names[id(layer)]
        return type(layer).__name__
