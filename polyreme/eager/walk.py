"""The walk back over the tape: backward() and grad(), in one pass or cut into two parts."""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polyreme.core import state
from polyreme.core.checked import check_gradients, checked
from polyreme.core.engine import backend
from polyreme.core.kernel import Kernel, hold_back
from polyreme.core.state import TensorState
from polyreme.eager.tape import (
    Edge,
    GradEnabled,
    KernelNode,
    Node,
    apply,
    edge_key,
    edge_of,
    factory,
    shortcuts,
)
from polyreme.errors import GradError


class Listeners:
    """Objects told of the leaves of each backward() once their gradients are stored, in the order they were added."""

    __slots__ = ("refs",)

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Any]] = []

    def add(self, listener: Any) -> None:
        """Call listener.backward_ended(leaves) from now on, for as long as it lives."""
        self.refs.append(weakref.ref(listener, self.refs.remove))

    def tell(self, leaves: Sequence[TensorState]) -> None:
        for ref in list(self.refs):
            listener = ref()
            if listener is not None:
                listener.backward_ended(leaves)


after_backward: Listeners = Listeners()


_ADD = Kernel(lambda a, b: a + b, "accumulate")
_GATHERS_AHEAD = 3
"""Nodes that gather parameters before whose gradients a gather may begin: of a GPT's the compiler for TPU hides 42%
with one, 83% with two and all with three, in the same scratch memory (docs/overlap.md)."""


def _sum(a: TensorState | None, b: TensorState) -> TensorState:
    if a is not None and (a.own_form or b.own_form):
        return factory.add(a, b)
    return b if a is None else apply(_ADD, (a._array, b._array), (edge_of(a), edge_of(b)))


class _Walk:
    """One backward pass: cotangents waiting at nodes, gradients gathered at leaves and at the tensors asked for.

    shortens: whether it takes shortcuts.
    """

    shortens: ClassVar[bool] = True

    def __init__(self, create_graph: bool, retain_graph: bool, blocked: set, wanted: dict | None) -> None:
        self.create_graph = create_graph
        self.retain_graph = retain_graph
        self.blocked = blocked
        self.wanted = wanted
        self.waiting: dict[Node, dict[int, TensorState]] = {}
        self.heap: list[tuple[int, Node]] = []
        self.leaves: dict[int, list] = {}
        self.gradients: dict[Any, TensorState] = {}
        self.bypassed: list[Node] = []
        # the cotangents of the last nodes that gathered parameters
        self._gathering: deque[tuple[Any, ...]] = deque(maxlen=_GATHERS_AHEAD)

    def give(self, edge: Edge, gradient: TensorState | None) -> None:
        if edge is None or gradient is None or edge_key(edge) in self.blocked:
            return
        if isinstance(edge, tuple):
            node, index = edge
            slots = self.waiting.get(node)
            if slots is None:
                slots = self.waiting[node] = {}
                heapq.heappush(self.heap, (-node.seq, node))
            slots[index] = _sum(slots.get(index), gradient)
            return
        entry = self.leaves.setdefault(id(edge), [edge, None])
        entry[1] = _sum(entry[1], gradient)

    def run(self) -> None:
        while self.heap:
            _, node = heapq.heappop(self.heap)
            slots = self.waiting.pop(node)
            self.visit(node, slots)
        for node in self.bypassed:
            node.release()

    def visit(self, node: Node, slots: dict[int, TensorState]) -> None:
        """Turn the cotangents waiting at a node into gradients for its inputs."""
        self._hook(node, slots)
        if self.wanted is not None:
            for index in slots:
                if (node, index) in self.wanted:
                    self.gradients[(node, index)] = slots[index]
            if not self._leads_to_wanted(node):
                return
        way = self._way(node) if shortcuts else node
        if isinstance(way, KernelNode) and way.kernel.gathered:
            self._hold_back(way, slots)
        gradients = _gradients(way, slots, self.create_graph)
        edges = way.edges
        if not self.retain_graph:
            node.release()
            way.release()
        for edge, gradient in zip(edges, gradients, strict=True):
            self.give(edge, gradient)

    def _hold_back(self, node: KernelNode, slots: dict[int, TensorState]) -> None:
        """In a captured backward, gather the parameters of a node while those before it that gathered some compute.

        XLA may neither take the forward's gather for the backward's, nor gather for all layers at once, nor wait with a
        gather for the very cotangents that are to be multiplied by what it gives.
        """
        cotangents = tuple(t._array for t in slots.values())
        if not any(isinstance(array, state.Tracer) for array in cotangents):
            return
        if node.pullback is None and node.primals.__class__ is tuple:
            node.primals = hold_back(node.kernel.gathered, node.primals, next(iter(self._gathering), cotangents))
        self._gathering.append(cotangents)

    def _way(self, node: Node) -> Node:
        """The node that gives the gradients: its shortcut's where that may be taken, else itself."""
        shortcut = shortcuts.get(node)
        if shortcut is None or self.create_graph or not self.shortens or node.freed:
            return node
        asked = {key[0] for key in (*(self.wanted or ()), *self.blocked) if isinstance(key, tuple)}
        if shortcut.is_hooked or not asked.isdisjoint(shortcut.between):
            return node
        if not self.retain_graph:
            self.bypassed += shortcut.between
        return shortcut.node

    def _leads_to_wanted(self, node: Node) -> bool:
        return node in self._reaching

    def prepare(self, roots: list[Edge]) -> None:
        """Find the nodes from which some wanted tensor is reached, so that nothing else is computed."""
        order: list[Node] = []
        seen: set[Node] = set()
        stack = [e[0] for e in roots if isinstance(e, tuple)]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            order.append(node)
            stack.extend(e[0] for e in node.edges if isinstance(e, tuple))
        self._reaching: set[Node] = set()
        wanted = self.wanted or {}
        for node in sorted(order, key=lambda n: n.seq):
            for edge in node.edges:
                if edge is None or edge_key(edge) in self.blocked:
                    continue
                if edge_key(edge) in wanted or (isinstance(edge, tuple) and edge[0] in self._reaching):
                    self._reaching.add(node)
                    break

    @staticmethod
    def _hook(node: Node, slots: dict) -> None:
        if node.hooks is None:
            return
        for index, hooks in node.hooks.items():
            if index in slots:
                slots[index] = _run_hooks(hooks, slots[index])


def _gradients(node: Node, slots: dict[int, TensorState], create_graph: bool) -> Sequence[TensorState | None]:
    cotangents = [slots.get(i) for i in range(getattr(node, "num_outputs", 1))]
    watcher = state.code_watcher()
    if watcher is None:
        gradients = node.gradients(cotangents, create_graph)
    else:
        with watcher.scope_of(node):
            gradients = node.gradients(cotangents, create_graph)
        if isinstance(node, KernelNode) and not create_graph:
            gradients = _end_together(node.edges, gradients)
    if checked.is_on:
        check_gradients(node, cotangents, gradients)
    return gradients


def _end_together(edges: Sequence[Edge], gradients: Sequence[TensorState | None]) -> Sequence[TensorState | None]:
    """The gradients of a captured call, none used before all are there if one is a weight's and code runs depth first.

    That order follows the gradients of activations back through the whole model before it computes those of weights,
    for which cotangents, logits and all that was computed again then wait (core.engine.xla_flags.DEPTH_FIRST). Of
    vectors, as a norm's, no gradient is worth the fusions that end at a barrier.
    """
    present = [i for i, g in enumerate(gradients) if g is not None and isinstance(g._array, state.Tracer)]
    if len(present) < 2 or not any(_is_of_weight(edges[i]) for i in present) or not backend.is_depth_first():
        return gradients
    tied = jax.lax.optimization_barrier([gradients[i]._array for i in present])  # type: ignore[union-attr]
    together = dict(zip(present, map(factory.tensor, tied), strict=True))
    return [together.get(i, g) for i, g in enumerate(gradients)]


def _is_of_weight(edge: Edge) -> bool:
    """Whether an edge leads to a leaf of two dims or more by nothing but calls of one input, such as casts."""
    while isinstance(edge, tuple):
        edges = edge[0].edges
        edge = edges[0] if len(edges) == 1 else None
    return edge is not None and len(edge._array.shape) > 1


class CutWalk(_Walk):
    """A backward pass in two parts: along some edges now, along the others later.

    along: which edges the first part follows. put_off: after the first part, the nodes that have other edges too, each
    with its cotangents. Computing a node's gradients once in each part costs nothing when each part is compiled: what
    a part does not use is dropped.
    """

    shortens: ClassVar[bool] = False  # the parts must meet at the same nodes: settle() comes before them

    def __init__(self, along: Callable[[Edge], bool]) -> None:
        super().__init__(create_graph=False, retain_graph=True, blocked=set(), wanted=None)
        self.along = along
        self.put_off: list[tuple[Node, dict[int, TensorState]]] = []
        self._later = False

    def seed(self, edge: Edge, cotangent: TensorState) -> None:
        """The cotangent of an end, whichever part it belongs to."""
        super().give(edge, cotangent)

    def give(self, edge: Edge, gradient: TensorState | None) -> None:
        if self._later or edge is None or self.along(edge):
            super().give(edge, gradient)

    def visit(self, node: Node, slots: dict[int, TensorState]) -> None:
        super().visit(node, slots)
        if not self._later and any(e is not None and not self.along(e) for e in node.edges):
            self.put_off.append((node, slots))

    def resume(self, put_off: Iterable[tuple[Node, dict[int, TensorState]]]) -> None:
        """The second part, from what the first put off."""
        self._later = True
        for node, slots in put_off:
            for edge, gradient in zip(node.edges, _gradients(node, slots, False), strict=True):
                if edge is not None and not self.along(edge):
                    self.give(edge, gradient)
        self.run()


def leaf_gradients(walk: _Walk) -> list[tuple[TensorState, Any]]:
    """(leaf, gradient array) of every leaf a walk reached: hooks run, laid out as the leaf wants its gradient."""
    return [(leaf, _laid_out(leaf, _hooked(leaf, gradient)._array)) for leaf, gradient in walk.leaves.values()]


def _run_hooks(hooks: Iterable, gradient: TensorState) -> TensorState:
    for hook in list(hooks):
        changed = hook(gradient)
        if changed is None:
            continue
        if not isinstance(changed, TensorState) or changed._array.shape != gradient._array.shape:
            got = list(changed._array.shape) if isinstance(changed, TensorState) else type(changed).__name__
            raise GradError(
                f"a gradient hook must return None or a Tensor of the gradient's shape {list(gradient._array.shape)}, "
                f"got {got}"
            )
        gradient = changed
    return gradient


def _hooked(leaf: TensorState, gradient: TensorState) -> TensorState:
    hooks = getattr(leaf, "_hooks", None)
    return _run_hooks(hooks.values(), gradient) if hooks else gradient


class StartsFromOnes:
    """Base of what may be given to backward() in place of a gradient of ones, as None may."""


def _seed_cotangent(root: TensorState, cotangent: TensorState | None, what: str) -> TensorState:
    if cotangent is not None and not isinstance(cotangent, StartsFromOnes):
        if tuple(cotangent._array.shape) != tuple(root._array.shape):
            raise GradError(
                f"{what}: the gradient given has shape {list(cotangent._array.shape)}, the Tensor "
                f"{list(root._array.shape)}; give one of the Tensor's shape, or call it on a sum or mean"
            )
        return cotangent
    return factory.tensor(jnp.ones(root._array.shape, root._array.dtype))


def _start(walk: _Walk, roots: Sequence[TensorState], cotangents: Sequence[TensorState | None], what: str) -> None:
    for root in roots:
        state.touch(root)
    if walk.wanted is not None:
        walk.prepare([edge_of(r) for r in roots])
    for root, cotangent in zip(roots, cotangents, strict=True):
        if root.stop_gradient:
            raise GradError(
                f"{what}: this Tensor (shape {list(root._array.shape)}) has stop_gradient=True, nothing it was "
                "computed from wants a gradient; set stop_gradient=False on an input before computing it (an integer "
                "Tensor has no gradient: cast it first)"
            )
        walk.give(edge_of(root), _seed_cotangent(root, cotangent, what))


def backward(
    roots: Sequence[TensorState], cotangents: Sequence[TensorState | None], retain_graph: bool = False
) -> None:
    """Add the gradient of roots to `.grad` of every leaf that wants one."""
    _not_recorded("backward()")
    walk = _Walk(create_graph=False, retain_graph=retain_graph, blocked=set(), wanted=None)
    with GradEnabled(False):
        _start(walk, roots, cotangents, "backward()")
        walk.run()
        for leaf, gradient in [(leaf, _hooked(leaf, gradient)) for leaf, gradient in walk.leaves.values()]:
            _store(leaf, gradient)
        if after_backward.refs:
            after_backward.tell([leaf for leaf, _ in walk.leaves.values()])


def _not_recorded(what: str) -> None:
    if state.recording():
        raise GradError(
            f"{what} runs now, and in static mode there are no values yet: record gradients with static.gradients, "
            "static.append_backward or optimizer.minimize"
        )


def _store(leaf: TensorState, gradient: TensorState) -> None:
    have = leaf._grad
    # addends stay addends until something reads the value, unless each device is to have a part of the sum
    if gradient.own_form and state.watch.active is None and not _splits_gradient(leaf):
        leaf._grad = gradient.detach() if have is None else factory.add(have, gradient)  # type: ignore[attr-defined]
        return
    array = _laid_out(leaf, gradient._array)
    if have is None:
        state.touch(leaf)
        # a Tensor of its own: later backward passes add into it, and the gradient may be another leaf's or the user's
        leaf._grad = factory.tensor(array)
        return
    state.write(have, _ADD.forward(state.read(have), array))


def _nowhere(kind: str) -> None:
    return None


def _splits_gradient(leaf: TensorState) -> bool:
    """Whether the strategy keeps the gradient in other pieces than the leaf is used in."""
    sharding_of = getattr(leaf, "sharding_of", _nowhere)
    used = sharding_of("use") or sharding_of("param")
    return used is not None and sharding_of("grad") != used


def _laid_out(leaf: TensorState, array: Any) -> Any:
    """The gradient where the strategy wants it: parameter sharding from stage 2 on splits gradients too."""
    sharding_of = getattr(leaf, "sharding_of", _nowhere)
    layout = sharding_of("grad")
    if layout is None or (not isinstance(array, state.Tracer) and array.sharding == layout):
        return array
    used = sharding_of("sum") or sharding_of("use") or sharding_of("param")
    if isinstance(array, state.Tracer) and used is not None and used != layout:
        # summed where the parameter was used, then cut: told of the cut alone, the partitioner carries it into the op
        # and moves that op's other inputs instead (an embedding's: all-to-alls of activations)
        array = jax.lax.with_sharding_constraint(array, used)
    return jax.lax.with_sharding_constraint(array, layout)


def grad(
    outputs: Sequence[TensorState],
    inputs: Sequence[TensorState],
    cotangents: Sequence[TensorState | None],
    *,
    retain_graph: bool,
    create_graph: bool,
    allow_unused: bool,
    no_grad_vars: Sequence[TensorState],
) -> list[TensorState | None]:
    """Gradients of outputs with respect to inputs; `.grad` is left alone. Taped themselves with create_graph."""
    _not_recorded("grad()")
    for x in inputs:
        if x.stop_gradient:
            raise GradError(
                f"grad(): an input (shape {list(x._array.shape)}) has stop_gradient=True; set it to False before "
                "computing with it"
            )
    wanted = {edge_key(edge_of(x)): None for x in inputs}
    blocked = {edge_key(edge_of(v)) for v in no_grad_vars if not v.stop_gradient}
    walk = _Walk(create_graph, retain_graph, blocked, wanted)
    with GradEnabled(create_graph):
        _start(walk, outputs, cotangents, "grad()")
        walk.run()
        hooked = {key: _hooked(leaf, gradient) for key, (leaf, gradient) in walk.leaves.items() if key in wanted}
    results: list[TensorState | None] = []
    for i, x in enumerate(inputs):
        edge = edge_of(x)
        result = walk.gradients.get(edge) if isinstance(edge, tuple) else hooked.get(id(edge))
        if result is None and not allow_unused and edge_key(edge) not in blocked:
            raise GradError(
                f"grad(): input {i} (shape {list(x._array.shape)}) was not used to compute the outputs; "
                "pass allow_unused=True to get None for it"
            )
        results.append(result if result is None or create_graph else factory.tensor(result._array))
    return results
