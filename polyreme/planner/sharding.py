"""How many parts a plan cuts a value into, and what part of the model a pipeline stage holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from polyreme.errors import ConfigError
from polyreme.mesh import ANY, MeshShape, Plan, Rule, Strategy
from polyreme.planner.graph import BlockCost, ModelGraph, PipelineCut, Value

Dims = tuple[str | None, ...]

Piece = tuple[tuple[BlockCost, int], ...]
"""Blocks of a part of the model, each with how often it stands there."""


class Cuts:
    """Which mesh axes cut which values under a plan's strategy on its mesh, and into how many parts.

    Each axis counts once for a value: one that cuts both batch and experts (ep) moves samples to their experts. A dim
    that its axes do not divide stays whole, except batch, of which Plan.rows_per_device makes sure.

    kind: "act", "use" (a parameter while an op reads it), "param", "grad" or "state".
    """

    degrees: dict[str, int]
    batch: frozenset[str]
    batch_ways: int

    def __init__(self, strategy: Strategy, mesh: MeshShape) -> None:
        self.degrees = {axis: degree for axis, degree in mesh.degrees.items() if degree > 1}
        self._axes: dict[tuple[str, Dims, tuple[int, ...]], frozenset[str]] = {}
        self._ways: dict[tuple[str, Dims, tuple[int, ...]], int] = {}
        self._rules = {kind: self._live(strategy.rule(kind)) for kind in ("act", "param", "grad", "state")}
        self._movable = {kind: frozenset(rule.get(ANY, ())) for kind, rule in self._rules.items()}
        moving = self._movable["param"]
        self._rules["use"] = {
            dim: tuple(axis for axis in axes if axis not in moving) for dim, axes in self._rules["param"].items()
        }
        self._movable["use"] = frozenset()
        self.batch = self.axes("act", ("batch",), (1,))
        self.batch_ways = self.degree(self.batch)

    def _live(self, rule: Rule) -> dict[str, tuple[str, ...]]:
        return {dim: tuple(axis for axis in axes if axis in self.degrees) for dim, axes in rule.items()}

    def degree(self, axes: Iterable[str]) -> int:
        """Devices that a group over these axes has."""
        return math.prod(self.degrees.get(axis, 1) for axis in axes)

    def axes(self, kind: str, dims: Dims, shape: tuple[int, ...]) -> frozenset[str]:
        """The mesh axes that cut a tensor.

        >>> plan = Plan.from_degrees(dp=2, mp=4)
        >>> sorted(cuts_of(plan).axes("act", ("batch", "heads"), (1, 8)))
        ['dp', 'mp']
        """
        key = (kind, dims, shape)
        found = self._axes.get(key)
        if found is None:
            found = self._axes[key] = self._cut(kind, dims, shape)
        return found

    def _cut(self, kind: str, dims: Dims, shape: tuple[int, ...]) -> frozenset[str]:
        rule, movable, left = self._rules[kind], self._movable[kind], list(shape)
        result: set[str] = set()
        for at, dim in enumerate(dims):
            axes = [axis for axis in rule.get(dim or "", ()) if axis not in movable]
            if dim == "batch" or shape[at] % self.degree(axes) == 0:
                result.update(axes)
                left[at] //= self.degree(axes) if dim != "batch" else 1
        for axis in movable:  # goes to any dim that it divides
            if any(size % self.degrees[axis] == 0 for size in left):
                result.add(axis)
        return frozenset(result)

    def ways(self, kind: str, value: Value) -> int:
        """Equal parts that a value is cut into."""
        key = (kind, value.dims, value.shape)
        found = self._ways.get(key)
        if found is None:
            found = self._ways[key] = self.degree(self.axes(*key))
        return found

    def local(self, value: Value, samples: float) -> float:
        """Elements of an activation on one device; samples: of one microbatch over the whole job."""
        return value.size * (samples if "batch" in value.dims else 1) / self.ways("act", value)

    def returned(self, value: Value, samples: float) -> float:
        """Elements on one device of what experts gave, as it lies by token and choice."""
        return self.local(value, samples)

    def joined(self, weight: Value) -> float:
        """Elements on one device of the array that an operation reads a parameter from, if that is no parameter."""
        return 0.0


ROUND = 3
"""Times a device's rows that the balanced dispatch has room for: its rows, those of a further round, and gradients."""


class Buffers(Cuts):
    """Cuts of the buffers that values lie in: those of rows for experts, whose sizes are the same whatever the router
    chooses, have room for as many as a device can get; where all devices compute equally many, for these and, while a
    further round's backward runs, for its rows and their gradients. gathers_from: choices of a token from which on
    experts gather all tokens."""

    def __init__(self, strategy: Strategy, mesh: MeshShape, is_balanced: bool, gathers_from: int) -> None:
        super().__init__(strategy, mesh)
        self.is_balanced, self.gathers_from = is_balanced, gathers_from

    def local(self, value: Value, samples: float) -> float:
        """Elements on one device, room for rows that do not come among them."""
        elements = super().local(value, samples)
        if not value.choices:
            return elements
        experts = value.shape[value.dims.index("expert")]
        ways = self.degree(self.axes("act", ("expert",), (experts,)))
        room = value.room(ways)
        return elements * (min(room, ROUND) if self.is_balanced else room)

    def returned(self, value: Value, samples: float) -> float:
        """Those of a device's tokens, or, where experts gather them, of all tokens that devices share experts for."""
        ways = self.degree(self.axes("act", ("expert",), (value.shape[value.dims.index("expert")],)))
        return super().local(value, samples) * (ways if value.choices >= self.gathers_from else 1)

    def joined(self, weight: Value) -> float:
        """Where all devices compute equally many: a device's own experts, and as many hot ones."""
        return 2 * weight.size / self.ways("use", weight) if self.is_balanced and "expert" in weight.dims else 0.0


@lru_cache(maxsize=1024)
def _buffers(strategy: Strategy, mesh: MeshShape, is_balanced: bool, gathers_from: int) -> Buffers:
    return Buffers(strategy, mesh, is_balanced, gathers_from)


def buffers_of(plan: Plan) -> Buffers:
    """The plan's Buffers; plans that differ in other things share them."""
    ways = math.prod(map(plan.mesh.degree, plan.expert_axes))
    gathers_from = next((n for n in range(1, ways + 1) if plan.expert_dispatcher(ways, n) == "gather"), ways + 1)
    return _buffers(plan.strategy, plan.mesh, plan.expert_dispatch == "balanced", gathers_from)


@lru_cache(maxsize=1024)
def _cuts(strategy: Strategy, mesh: MeshShape) -> Cuts:
    return Cuts(strategy, mesh)


def cuts_of(plan: Plan) -> Cuts:
    """The plan's Cuts; plans that differ in other things share them."""
    return _cuts(plan.strategy, plan.mesh)


def pieces(graph: ModelGraph, plan: Plan, cut: PipelineCut = "items") -> tuple[Piece, ...]:
    """The chunks of the model in the order that data flows, each as blocks with a count; one chunk without a pipeline.

    Raises ConfigError for more chunks than there are layers to fill them with.
    """
    num_chunks = len(plan.stage_of_chunk) if plan.schedule else 1
    if num_chunks == 1:
        return tuple(_shared_out([tuple((block, block.repeats) for block in graph.blocks)], plan))
    total = graph.num_items(cut)
    if total < num_chunks:
        raise ConfigError(
            f"model {graph.name!r} has {total} layers to cut, which cannot fill {num_chunks} chunks "
            f"(pp={plan.mesh.pp}, virtual_stages={plan.virtual_stages}); lower pp or virtual_stages"
        )
    size, left = divmod(total, num_chunks)
    # what is left over goes one each to the last chunks, as PipelineLayer does
    bounds = [k * size + max(0, k - (num_chunks - left)) for k in range(num_chunks + 1)]
    if plan.chunk_items:
        if sum(plan.chunk_items) != total:
            raise ConfigError(
                f"chunk_items={list(plan.chunk_items)} are {sum(plan.chunk_items)} of model {graph.name!r}, which has "
                f"{total} to cut; make them {total}"
            )
        bounds = list(accumulate(plan.chunk_items, initial=0))
    elif cut == "balanced":
        bounds = _even_bounds(graph, num_chunks)
    result, start = [], 0
    spans = []
    for block in graph.items(cut):
        spans.append((block, start, start + block.repeats))
        start += block.repeats
    for low, high in pairwise(bounds):
        parts = [(block, min(high, end) - max(low, begin)) for block, begin, end in spans]
        result.append(tuple((block, count) for block, count in parts if count > 0))
    if cut != "items":
        result[0] = (*[(b, b.repeats) for b in graph.blocks if b.part == "embed"], *result[0])
        result[-1] = (*result[-1], *[(b, b.repeats) for b in graph.blocks if b.part == "head"])
    return tuple(_shared_out(result, plan))


def _even_bounds(graph: ModelGraph, num_chunks: int) -> list[int]:
    """First layer of each chunk, and their number: as much arithmetic in each as there are whole layers of it."""
    flops = {part: 0.0 for part in ("embed", "layer", "head")}
    for block in graph.blocks:
        flops[block.part] += block.repeats * sum(op.flops for op in block.operations)
    layers = graph.num_items("layers")
    head = flops["head"] / (flops["layer"] / layers)
    each = (layers + head) / num_chunks
    return [*(min(layers, round(k * each)) for k in range(num_chunks)), layers]


def variants(graph: ModelGraph, plan: Plan) -> tuple[BlockCost, ...]:
    """The graph's blocks, and of its layers those that a plan's recompute_share leaves out."""
    if plan.recompute_share == 1:
        return graph.blocks
    return (*graph.blocks, *(_left_out(block) for block in graph.blocks if block.part == "layer"))


@lru_cache(maxsize=1024)
def _left_out(block: BlockCost) -> BlockCost:
    return replace(block, name=f"{block.name}, kept", recomputes=False)


def _shared_out(cut: Iterable[Piece], plan: Plan) -> Iterator[Piece]:
    """Pieces whose layers are told apart by whether they recompute."""
    place = 0
    for piece in cut:
        if plan.recompute_share == 1:
            yield piece
            continue
        parts: list[tuple[BlockCost, int]] = []
        for block, count in piece:
            if block.part != "layer":
                parts.append((block, count))
                continue
            again = plan.num_recomputed(place + count) - plan.num_recomputed(place)
            place += count
            # those after the last that recomputes stand after it, the others before
            after = next((n for n in range(count) if plan.recomputes(place - 1 - n)), count)
            counts = ((_left_out(block), count - again - after), (block, again), (_left_out(block), after))
            parts += [(each, n) for each, n in counts if n]
        yield tuple(parts)


def stage_pieces(graph: ModelGraph, plan: Plan, cut: PipelineCut = "items") -> tuple[tuple[Piece, ...], ...]:
    """The chunks of each pipeline stage, in the order that data flows through them."""
    chunks = pieces(graph, plan, cut)
    if not plan.schedule:
        return (chunks,)
    owners = plan.stage_of_chunk
    return tuple(tuple(c for c, s in zip(chunks, owners, strict=True) if s == stage) for stage in range(plan.mesh.pp))
