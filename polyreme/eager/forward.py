"""Forward over the tape: Taylor coefficients pushed from some Tensors, through the nodes that used them, to others.

What was taped for backward also says how to go forward: a node's kernel and its input arrays. The kernel's
jet (core.taylor.jet) is a kernel itself and is taped like one, so that the results can be differentiated in turn,
backward or forward; nothing is traced or compiled anew for a function whose ops were met before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.core.taylor.jet import JetSpec
from polyreme.eager import tape, walk
from polyreme.errors import GradError

Jet = tuple[TensorState | None, ...]
"""A Tensor's coefficients in the order of core.taylor.jet.Flat, None for zeros."""


def push(
    ends: Sequence[TensorState], starts: Sequence[tuple[TensorState, Jet]], spec: JetSpec, constants: bool = False
) -> list[Jet | None]:
    """The coefficients of each end, given those of the starts; None for an end that does not depend on them.

    constants: gradients of the results need not reach the starts through the values computed on the way (they reach
    everything else). Raises GradError where the tape was freed, and for an order above 1 through a node with a backward
    of its own.
    """
    if state.recording():
        raise GradError(
            "forward mode runs now, and in static mode there are no values yet: record it with "
            "incubate.autograd.forward_grad"
        )
    known = {tape.edge_key(tape.edge_of(t)): jet for t, jet in starts}
    cut = set(known) if constants else set()
    for end in ends:
        state.touch(end)
    for node in _between(ends, set(known)):
        jets = [None if edge is None else known.get(tape.edge_key(edge)) for edge in node.edges]
        if isinstance(node, tape.KernelNode):
            made = _through_kernel(node, jets, spec, cut)
        else:
            made = _through_backward(node, jets, spec)
        known.update({(node, i): jet for i, jet in enumerate(made) if jet is not None})
    edges = [tape.edge_of(end) for end in ends]
    return [None if edge is None else known.get(tape.edge_key(edge)) for edge in edges]


def goes_forward(ends: Sequence[TensorState], starts: Sequence[TensorState]) -> bool:
    """True if every node between knows how to go forward, to any order and along any number of directions."""
    keys = {tape.edge_key(tape.edge_of(t)) for t in starts}
    return all(isinstance(node, tape.KernelNode) for node in _between(ends, keys))


def _between(ends: Sequence[TensorState], starts: set[Any]) -> list[tape.Node]:
    """The nodes on some way from a start to an end, in the order in which they ran."""
    every: dict[tape.Node, None] = {}
    stack = [t._node for t in ends if t._node is not None and not t.stop_gradient]
    while stack:
        node = stack.pop()
        if node in every:
            continue
        every[node] = None
        stack.extend(e[0] for e in node.edges if isinstance(e, tuple))
    reached: dict[tape.Node, None] = {}
    for node in sorted(every, key=lambda n: n.seq):
        for edge in node.edges:
            if edge is None:
                continue
            if tape.edge_key(edge) in starts or (isinstance(edge, tuple) and edge[0] in reached):
                reached[node] = None
                break
    return list(reached)


def _through_kernel(
    node: tape.KernelNode, jets: Sequence[Jet | None], spec: JetSpec, cut: set[Any]
) -> Sequence[Jet | None]:
    primals = node.primals
    if primals is None:
        raise _free(node)
    if primals.__class__ is tape.Packed:
        primals = primals.arrays()
    given = [None if jet is None else tuple(c is not None for c in jet) for jet in jets]
    kernel, pattern = node.kernel.jet_kernel(primals, given, spec)
    if not any(pattern):
        return [None] * len(pattern)
    carried = [c for jet in jets for c in jet or () if c is not None]
    own = [None if e is None or tape.edge_key(e) in cut else e for e in node.edges]
    arrays = (*primals, *(c._array for c in carried))
    outs = iter(tape.apply(kernel, arrays, (*own, *(tape.edge_of(c) for c in carried))))
    return [None if mask is None else tuple(next(outs) if present else None for present in mask) for mask in pattern]


def _through_backward(node: tape.Node, jets: Sequence[Jet | None], spec: JetSpec) -> Sequence[Jet | None]:
    """A node that only knows its backward, which is linear in the cotangents: forward mode is backward through that."""
    if node.freed:
        raise _free(node)
    if spec.order > 1 or spec.stacked:
        raise GradError(
            f"{node.name} defines its own backward, so only a first derivative along one direction goes forward "
            "through it; nest grad(create_graph=True) for higher ones"
        )
    metas = node.metas or ()
    starts = [tape.factory.tensor(jnp.zeros(shape, dtype)) for shape, dtype in metas]
    for start in starts:
        start.stop_gradient = False
    with tape.GradEnabled(True):
        back = node.gradients(list(starts), create_graph=True)
    tangents: list[list[TensorState | None]] = [[] for _ in starts]
    for way in range(spec.ways):
        pairs = [(g, jet[way]) for g, jet in zip(back, jets, strict=True) if jet is not None and g is not None]
        used = [(g, c) for g, c in pairs if c is not None and not g.stop_gradient]
        results: Sequence[TensorState | None] = [None] * len(starts)
        if used:
            results = walk.grad(
                [g for g, _ in used], starts, [c for _, c in used], retain_graph=True,
                create_graph=tape.grad_mode.enabled, allow_unused=True, no_grad_vars=[],
            )  # fmt: skip
        for at, tangent in enumerate(results):
            tangents[at].append(tangent)
    return [tuple(way) if any(c is not None for c in way) else None for way in tangents]


def _free(node: tape.Node) -> GradError:
    return GradError(
        f"forward through {node.name!r}, whose saved values a backward has freed; call that with retain_graph=True"
    )
