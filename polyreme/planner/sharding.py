"""How many parts a plan cuts a value into, and what part of the model a pipeline stage holds.

Floor: 1.  Never imports: jax.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from polyreme.errors import ConfigError
from polyreme.mesh import MeshShape, Plan, Rule
from polyreme.planner.graph import Block, Graph, Value

Piece = tuple[tuple[Block, int], ...]
"""Blocks of a part of the model, each with how often it stands there."""


@lru_cache(maxsize=65536)
def axes_of(dims: tuple[str | None, ...], shape: tuple[int, ...], rule: Rule, mesh: MeshShape) -> frozenset[str]:
    """Mesh axes that cut a tensor with these dims; each once: an axis that cuts both batch and experts (ep) moves
    samples to their experts. A dim that its axes do not divide stays whole; "batch" always divides.

    >>> plan = Plan.from_degrees(dp=2, mp=4)
    >>> sorted(axes_of(("batch", "heads"), (1, 8), plan.strategy.rule("act"), plan.mesh))
    ['dp', 'mp']
    """
    found: set[str] = set()
    for dim, size in zip(dims, shape, strict=True):
        axes = [axis for axis in rule.get(dim or "", ()) if mesh.degree(axis) > 1]
        if dim == "batch" or size % math.prod(mesh.degree(axis) for axis in axes) == 0:
            found.update(axes)
    return frozenset(found)


def ways(value: Value, rule: Rule, mesh: MeshShape) -> int:
    """Equal parts that a value is cut into under one rule of the plan's strategy."""
    return math.prod(mesh.degree(axis) for axis in axes_of(value.dims, value.shape, rule, mesh))


def local_size(value: Value, plan: Plan, samples: float) -> float:
    """Elements of an activation on one device, `samples` being those of one microbatch over the whole job."""
    whole = value.size * (samples if "batch" in value.dims else 1)
    return whole / ways(value, plan.strategy.rule("act"), plan.mesh)


def pieces(graph: Graph, plan: Plan, cut: str = "items") -> tuple[Piece, ...]:
    """The chunks of the model in the order that data flows, each as blocks with a count; one chunk without a pipeline.

    cut: as Training.cut. Raises ConfigError for more chunks than there are layers to fill them with.
    """
    num_chunks = len(plan.stage_of_chunk) if plan.schedule else 1
    if num_chunks == 1:
        return (tuple((block, block.repeats) for block in graph.blocks),)
    counted = [block for block in graph.blocks if cut == "items" or block.part == "layer"]
    total = sum(block.repeats for block in counted)
    if total < num_chunks:
        raise ConfigError(
            f"model {graph.name!r} has {total} layers to cut, which cannot fill {num_chunks} chunks "
            f"(pp={plan.mesh.pp}, virtual_stages={plan.virtual_stages}); lower pp or virtual_stages"
        )
    size, left = divmod(total, num_chunks)
    # what is left over goes one each to the last chunks, as PipelineLayer does
    bounds = [k * size + max(0, k - (num_chunks - left)) for k in range(num_chunks + 1)]
    found, start = [], 0
    spans = []
    for block in counted:
        spans.append((block, start, start + block.repeats))
        start += block.repeats
    for low, high in pairwise(bounds):
        parts = [(block, min(high, end) - max(low, begin)) for block, begin, end in spans]
        found.append(tuple((block, count) for block, count in parts if count > 0))
    if cut == "layers":
        found[0] = (*[(b, b.repeats) for b in graph.blocks if b.part == "embed"], *found[0])
        found[-1] = (*found[-1], *[(b, b.repeats) for b in graph.blocks if b.part == "head"])
    return tuple(found)


def stage_pieces(graph: Graph, plan: Plan, cut: str = "items") -> tuple[tuple[Piece, ...], ...]:
    """The chunks of each pipeline stage, in the order that data flows through them."""
    chunks = pieces(graph, plan, cut)
    if not plan.schedule:
        return (chunks,)
    owners = plan.stage_of_chunk
    return tuple(tuple(c for c, s in zip(chunks, owners, strict=True) if s == stage) for stage in range(plan.mesh.pp))
