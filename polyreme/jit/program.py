"""One captured program: a function's Python, run twice on tracers, becomes one compiled call over its state.

Floor: 3.  The first run (abstract) finds the state; the second, under jax.jit, makes the program. State that the function
writes is donated. A function whose result wants gradients is one tape node instead, so it trains like any op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from polyreme.core.kernel import Kernel
from polyreme.core.state import TensorState, Tracer
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError
from polyreme.jit.capture import Capture, watching, where_defined

# getrefcount of an array held by its Tensor's slot only, by a local name and by the call itself
_SOLE_OWNER = 3


def is_tensor(x: Any) -> bool:
    """Leaf test for trees of arguments and results."""
    return isinstance(x, TensorState)


@dataclass(frozen=True)
class Found:
    """What the discovery run found: state in order, which of it is written, and which leaves get or lose a gradient."""

    tensors: tuple[TensorState, ...]
    written: tuple[bool, ...]
    new_grads: tuple[TensorState, ...]
    lost_grads: tuple[TensorState, ...]
    guards: tuple[tuple[TensorState, bool, bool], ...]
    layers: tuple[tuple[Any, bool], ...]
    differentiable: bool


class Program:
    """A function captured for one structure of arguments.

    call: rebuilds the arguments from Tensors and calls the function. Guards (stop_gradient and presence of a gradient
    of every state Tensor, training flag of every Layer called) say whether it may serve a call.
    """

    def __init__(
        self, fn: Callable[..., Any], call: Callable[[list[TensorState]], Any], arguments: list[TensorState]
    ) -> None:
        self.fn = fn
        self.call = call
        self.flags = [a.stop_gradient for a in arguments]
        self.found = self._discover(arguments)
        self._outs: Any = None
        written = self.found.written
        self._kept = [t for t, w in zip(self.found.tensors, written, strict=True) if not w]
        self._written = [t for t, w in zip(self.found.tensors, written, strict=True) if w]
        if self.found.differentiable:
            self._kernel = Kernel(lambda *arrays: self._flat(*arrays), getattr(fn, "__name__", "captured"), saves=True)
        else:
            self._jitted = jax.jit(self._pure, donate_argnums=0, out_shardings=self._out_shardings())

    def serves(self) -> bool:
        """True if the state looks as it did when this was captured."""
        for tensor, stop_gradient, has_grad in self.found.guards:
            if tensor.stop_gradient is not stop_gradient or (tensor._grad is not None) is not has_grad:
                return False
        return all(layer.training is training for layer, training in self.found.layers)

    def run(self, arguments: list[TensorState]) -> Any:
        """Execute on these arguments: update the state, return what the function returns."""
        if self.found.differentiable:
            return self._run_taped(arguments)
        donated = []
        for tensor in self._written:
            array = tensor._array
            # something else looks at this buffer (a detach(), a tape, a state_dict): give the program a copy
            donated.append(jnp.copy(array) if sys.getrefcount(array) > _SOLE_OWNER else array)
        array = None
        kept = [t._array for t in self._kept]
        outs, written, grads = self._jitted(donated, kept, [a._array for a in arguments])
        del donated
        self._store(written, grads)
        return self._result(outs)

    def _run_taped(self, arguments: list[TensorState]) -> Any:
        every = [*self._written, *self._kept, *arguments]
        results = tape.apply(self._kernel, tuple(t._array for t in every), tuple(tape.edge_of(t) for t in every))
        count = len(self._written)
        split = len(results) - count - len(self.found.new_grads)
        outs, written, grads = results[:split], results[split : split + count], results[split + count :]
        self._store([w._array for w in written], [g._array for g in grads])
        return self._result(outs)

    def _store(self, written: list, grads: list) -> None:
        for tensor, array in zip(self._written, written, strict=True):
            tensor._array = array
        for leaf, array in zip(self.found.new_grads, grads, strict=True):
            leaf._grad = Tensor(array)
        for leaf in self.found.lost_grads:
            leaf._grad = None

    def _result(self, outs: Any) -> Any:
        tree, leaves = self._outs
        given = iter(outs)
        built: list[Any] = []
        for leaf in leaves:
            if leaf[0] == "value":
                built.append(leaf[1])
            elif leaf[0] == "state":
                built.append(leaf[1])
            else:
                out = next(given)
                out = out if isinstance(out, TensorState) else Tensor(out)
                if leaf[1] and not out.stop_gradient:
                    out.stop_gradient, out._node = True, None
                built.append(out)
        return jax.tree.unflatten(tree, built)

    # tracing

    def _discover(self, arguments: list[TensorState]) -> Found:
        capture = Capture()
        result: dict[str, Any] = {}

        def abstract(arrays: list) -> None:
            with watching(capture):
                outs = self.call(self._wrap(arrays))
                result["differentiable"] = any(
                    not t.stop_gradient and not _history_freed(t)
                    for t in jax.tree.leaves(outs, is_leaf=is_tensor)
                    if is_tensor(t) and id(t) not in capture.before
                )
                result["found"] = self._summary(capture)

        jax.eval_shape(abstract, [jax.ShapeDtypeStruct(a._array.shape, a._array.dtype) for a in arguments])
        tensors, written, new, lost, guards = result["found"]
        layers = tuple(capture.layers.values())
        return Found(tensors, written, new, lost, guards, layers, result["differentiable"])

    def _summary(self, capture: Capture) -> tuple:
        met = list(capture.before.values())
        stale = next((b.tensor for b in met if isinstance(b.array, Tracer)), None)
        if stale is not None:
            raise CaptureError(
                f"{where_defined(self.fn)} uses a Tensor that belongs to another captured function (shape {list(stale._array.shape)}); "
                "return it from that function instead of keeping it in a variable outside"
            )
        return (
            tuple(b.tensor for b in met),
            tuple(b.written for b in met),
            tuple(b.tensor for b in met if b.regraded and b.tensor._grad is not None),
            tuple(b.tensor for b in met if b.regraded and b.tensor._grad is None),
            tuple((b.tensor, b.stop_gradient, b.grad is not None) for b in met),
        )

    def _wrap(self, arrays: list) -> list[TensorState]:
        return [Tensor(a, stop_gradient=flag) for a, flag in zip(arrays, self.flags, strict=True)]

    def _pure(self, written: list, kept: list, arguments: list) -> tuple[list, list, list]:
        capture = Capture()
        known = [*self._written, *self._kept]
        for tensor in known:
            capture.touch(tensor)
        with watching(capture):
            for tensor, array in zip(known, [*written, *kept], strict=True):
                tensor._array = array
                # the tape before the capture is not part of the program
                tensor._node = None
            outs = self.call(self._wrap(arguments))
            unknown = [b for k, b in capture.before.items() if not any(k == id(t) for t in known) and b.written]
            if unknown:
                raise CaptureError(
                    f"{where_defined(self.fn)} wrote a Tensor on its second run that it had not met on its first; "
                    "a captured function must do the same each time it runs"
                )
            arrays = self._outputs(outs, known)
            grads = [leaf._grad._array for leaf in self.found.new_grads]
            return arrays, [t._array for t in self._written], grads

    def _outputs(self, outs: Any, known: list[TensorState]) -> list:
        leaves, tree = jax.tree.flatten(outs, is_leaf=is_tensor)
        ours = {id(t) for t in known}
        kinds: list[tuple] = []
        arrays = []
        for leaf in leaves:
            if not is_tensor(leaf):
                kinds.append(("value", leaf))
            elif id(leaf) in ours:
                kinds.append(("state", leaf))
            else:
                kinds.append(("array", leaf.stop_gradient or _history_freed(leaf)))
                arrays.append(leaf._array)
        self._outs = (tree, kinds)
        return arrays

    def _flat(self, *arrays: Any) -> tuple:
        a, b = len(self._written), len(self._written) + len(self._kept)
        outs, written, grads = self._pure(list(arrays[:a]), list(arrays[a:b]), list(arrays[b:]))
        return (*outs, *written, *grads)

    def _out_shardings(self) -> Any:
        """State keeps its layout over devices; the compiler chooses for the rest."""
        if not any(len(t._array.sharding.device_set) > 1 for t in self._written):
            return None
        return (None, [t._array.sharding if t._array.committed else None for t in self._written], None)


def _history_freed(tensor: TensorState) -> bool:
    """True if some backward has already freed what this Tensor was computed from."""
    stack, seen = [tensor._node] if tensor._node is not None else [], set()
    while stack:
        node = stack.pop()
        if node.freed:
            return True
        if id(node) in seen:
            continue
        seen.add(id(node))
        stack.extend(e[0] for e in node.edges if isinstance(e, tuple))
    return False
