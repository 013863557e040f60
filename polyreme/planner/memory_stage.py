"""A pipeline stage under a plan (without one, the model): bytes of its parameters, what its blocks keep, its loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from polyreme.mesh import Plan
from polyreme.planner.compute import ITEMSIZE
from polyreme.planner.graph import BlockCost, ModelGraph, OperationCost, Value
from polyreme.planner.prediction import Training
from polyreme.planner.sharding import Cuts, Piece, buffers_of, cuts_of

WIDE = 4
"""Bytes of an element of what is kept in float32."""

MOMENTS = 2
"""Arrays like the parameter that the optimizer keeps."""

PARTS = {"core_attn": frozenset({"core_attn"}), "full_attn": frozenset({"core_attn", "full_attn"})}
"""Parts of a block that a recompute mode leaves out of memory; "full" leaves out the whole block but its input."""

CHUNK = 8 << 20
"""Bytes of logits that the loss makes at a time (kernels.linear_cross_entropy.CHUNK_BYTES; on a GPU GPU_CHUNK_BYTES,
which is 0.3% of 80 GB and not counted)."""


AHEAD = 2
"""Blocks whose gathered parameters, experts from a disk, or inputs brought back from the host, are there at once: the
one at work and the next."""

BUCKET = 32 << 20
"""Bytes of state that are joined into one file on disk (optimizer.on_disk.BUCKET_BYTES)."""


class Held(NamedTuple):
    """number buffers of so many bytes each."""

    nbytes: float
    number: float = 1.0


def total(held: Iterable[Held]) -> float:
    """Bytes of all of them."""
    return sum(each.nbytes * each.number for each in held)


class Loss(NamedTuple):
    """Bytes of the logits that are there at once, of the gradient of the head's weight, of that of what it reads;
    is_looped: whether the logits are made a chunk at a time."""

    logits: float = 0.0
    weight: float = 0.0
    hidden: float = 0.0
    is_looped: bool = False


class Stage:
    """What one stage's devices hold; chunks: the parts of the model it has, in the order that data flows."""

    graph: ModelGraph
    plan: Plan
    training: Training
    chunks: tuple[Piece, ...]
    samples: float
    itemsize: int
    blocks: list[tuple[BlockCost, int]]
    weights: list[tuple[Value, int]]

    def __init__(
        self, graph: ModelGraph, plan: Plan, batch: int, training: Training, chunks: tuple[Piece, ...]
    ) -> None:
        self.graph, self.plan, self.training, self.chunks = graph, plan, training, chunks
        # what memory.py finds of the chunks, once for all the stages that have such chunks
        self.of_chunks: Any = None
        # rows for experts lie in buffers of fixed sizes, or in just as much as comes
        self.cuts: Cuts = buffers_of(plan) if training.keeps.rows == "room" else cuts_of(plan)
        self.samples = batch / plan.num_microbatches
        self.itemsize = ITEMSIZE[training.dtype]
        self.blocks = [pair for chunk in chunks for pair in chunk]
        self.weights = [(value, count) for block, count in self.blocks for value in block.parameters]
        self._read_later: dict[tuple[str, frozenset[str]], dict[str, Held]] = {}

    # what parameters bring

    def bytes_of(self, kind: str, itemsize: float) -> float:
        """Of the stage's parameters that are there at once, kept as kind says: of experts on disk those of one block,
        and those that come or go."""
        counts = ((v, min(n, AHEAD) if self.is_by_expert(v) else n) for v, n in self.weights)
        return sum(count * value.size / self.cuts.ways(kind, value) for value, count in counts) * itemsize

    def is_by_expert(self, value: Value) -> bool:
        """Whether a parameter's experts lie on disk, and are brought one by one."""
        return "expert" in self.plan.offload and value.dims[:1] == ("expert",)

    @property
    def kept_itemsize(self) -> int:
        """Bytes of an element of a parameter."""
        return self.itemsize if self.training.master else WIDE

    @property
    def stream_itemsize(self) -> int:
        """Bytes of an element of what goes from layer to layer; norms may keep wider copies of it."""
        return min(self.training.keeps.stream, self.kept_itemsize)

    @cached_property
    def parameters(self) -> float:
        """Bytes of the parameters as they are kept."""
        return self.bytes_of("param", self.kept_itemsize)

    @cached_property
    def gradients(self) -> float:
        """Bytes of all gradients, those of another stage's weights that are read here too.

        Between microbatches that do not sum them over devices they are as whole as their parameters.
        """
        if self.training.trains == "adapters":
            return 0.0
        is_unreduced = self.training.sums == "program" and self.plan.schedule and self.plan.num_microbatches > 1
        kind = "param" if is_unreduced else "grad"
        return self.bytes_of(kind, self.training.gradients) + self.foreign(self.training.gradients)

    @cached_property
    def slots(self) -> list[Held]:
        """The optimizer's buffers: its moments and, beside parameters of fewer bits, float32 masters."""
        arrays, itemsize = self.training.state_arrays
        if self.training.trains == "adapters":
            return []
        return [Held(v.size / self.cuts.ways("state", v) * itemsize, arrays * count) for v, count in self.weights]

    @cached_property
    def near_slots(self) -> list[Held]:
        """Those of the optimizer's buffers that are in a processor's memory: what is on disk is not."""
        ratio = self.plan.offload_ratio if self.plan.offload.get("state") == "disk" else 0
        return [
            Held(held.nbytes, 0 if self.is_by_expert(value) else held.number * (1 - ratio))
            for held, (value, _) in zip(self.slots, self.weights, strict=False)
        ]

    @cached_property
    def in_flight(self) -> float:
        """Bytes of the state on disk that is in memory at once: each bucket as it was and as it becomes."""
        if self.plan.offload.get("state") != "disk":
            return 0.0
        arrays, _ = self.training.state_arrays
        largest = max(held.nbytes for held in self.slots) * arrays
        bucket = min(max(largest, BUCKET), total(self.slots) * self.plan.offload_ratio)
        return min(2 * bucket * self.plan.offload_buffers, 2 * total(self.slots))

    def foreign(self, itemsize: float) -> float:
        """Bytes of weights that this stage reads and another keeps: the embedding's, of a head that is tied to it."""
        own = {value.name for value, _ in self.weights}
        names = {name for op in self.operations() for name in op.weights if name not in own}
        return sum(v.size / self.cuts.ways("param", v) for v in map(self.graph.parameter, names)) * itemsize

    def operations(self) -> Iterator[OperationCost]:
        """Every operation, of each kind of block once."""
        for block, _ in self.blocks:
            yield from block.operations

    # what is kept for backward

    def local(self, value: Value, itemsize: float) -> float:
        """Bytes of an activation on one device, of one microbatch."""
        return self.cuts.local(value, self.samples) * itemsize

    def mode(self, block: BlockCost) -> str:
        """How a block is computed again."""
        return self.plan.recompute if block.part == "layer" and block.recomputes else "none"

    def residuals(self, block: BlockCost) -> dict[str, Held]:
        """What one microbatch leaves of a block under the plan's recompute mode, by name."""
        mode = self.mode(block)
        if mode == "full":
            return {"x": Held(self.local(block.operations[0].inputs[0], self.stream_itemsize))}
        return self.read_later(block, PARTS.get(mode, frozenset()))

    def read_later(self, block: BlockCost, again: frozenset[str] = frozenset()) -> dict[str, Held]:
        """The values that backward reads. again: parts computed again, of which what goes in is kept."""
        key = (block.name, again)
        if key not in self._read_later:
            self._read_later[key] = self._reads(block, again)
        return self._read_later[key]

    def _reads(self, block: BlockCost, again: frozenset[str]) -> dict[str, Held]:
        inputs: dict[str, Held] = {}
        cheap = self._cheap(block)
        made = {op.output.name for op in block.operations if op.part in again}
        for op in block.operations:
            values = {v.name: v for v in (*op.inputs, op.output)}
            if op.part and op.part in again:
                outer = (v.name for v in op.inputs if v.name not in made)
                names: Iterable[str] = (name for name in outer if not name.endswith("log_sums"))
            else:
                names = () if op.kind == "loss" else op.saved
            for name in names:
                if name in cheap:
                    for value in cheap[name]:
                        inputs[value.name] = Held(self.local(value, value.itemsize or self.itemsize))
                    continue
                is_norm = op.kind == "norm"
                width = max(self.itemsize, self.training.keeps.stream) if is_norm else values[name].itemsize
                width = width or self.itemsize
                inputs[name] = max(inputs.get(name, Held(0.0)), Held(self.local(values[name], width)))
            if (
                op.kind == "norm" and self.training.keeps.norms and op.unfused > 4 and not cheap
            ):  # RMSNorm of elementary kernels
                more = self.local(op.inputs[0], self.training.keeps.norms)
                inputs[f"{op.name} inside"] = Held(more)
        return inputs | {v.name: Held(n * self.itemsize) for v in block.parameters if (n := self.cuts.joined(v))}

    def _cheap(self, block: BlockCost) -> dict[str, tuple[Value, ...]]:
        """Values of a layer that norms and elementwise operations make, with what they are made from, if they are
        computed again."""
        if not self.training.cheap or block.part != "layer":
            return {}
        origins: dict[str, tuple[Value, ...]] = {}
        for op in block.operations:
            if op.kind in ("norm", "elementwise"):
                read = (origins.get(value.name, (value,)) for value in op.inputs if value.itemsize != 1)
                origins[op.output.name] = tuple(value for values in read for value in values)
        return origins

    def again(self, block: BlockCost) -> float:
        """Bytes of a block that was left out and is there again while its backward runs."""
        kept = self.residuals(block)
        return total(held for name, held in self.read_later(block).items() if name not in kept)

    def transient(self) -> float:
        """Bytes of the largest gradient inside a block: that of what an activation function gave comes when all that
        the block kept is still there; those of attention come when the feed-forward's share is gone."""
        bent = (op.output for op in self.operations() if op.kind == "elementwise" and op.saved)
        return max((self.local(value, self.training.keeps.stream) for value in bent), default=0.0)

    # the loss

    def loss(self) -> Loss:
        """Of the stage that has the loss; zeros for others."""
        for before, op in pairwise(self.operations()):
            if op.kind == "loss":
                heads = [self.graph.parameter(name) for name in before.weights]
                weight = sum(w.size / self.cuts.ways("use", w) for w in heads) * WIDE
                weight *= self.training.trains == "all"
                logits, is_looped = self._logits(op)
                return Loss(logits, weight, self.local(before.inputs[0], WIDE), is_looped)
        return Loss()

    def _logits(self, op: OperationCost) -> tuple[float, bool]:
        """All of them, or, over a vocabulary, a chunk of them; with their gradient. And whether they are cut so."""
        value = op.inputs[0]
        local = self.local(value, WIDE)
        if op.is_whole:
            return 2 * local, False
        if "vocab" not in value.dims:
            return local, False
        if self.training.keeps.logits:
            return self.local(value, self.training.keeps.logits), False
        axes = self.cuts.axes("act", value.dims[:-1], value.shape[:-1])
        vocab = value.shape[-1]
        chunks = chunks_of_tokens(int(value.size / vocab * self.samples / self.cuts.degree(axes)), vocab)
        # a loop makes the gradient where the logits were
        return (local / chunks, True) if chunks > 1 else (2 * local, False)

    def table(self) -> float:
        """Bytes of the gradient of the embedding's table."""
        tables = [self.graph.parameter(op.weights[0]) for op in self.operations() if op.kind == "lookup"]
        return sum(value.size / self.cuts.ways("use", value) * WIDE for value in tables)


def chunks_of_tokens(rows: int, vocab: int) -> int:
    """As kernels.linear_cross_entropy cuts the tokens of a device (chunk_count)."""
    most = max(1, rows // 64)
    least = min(max(1, -(-rows * vocab * WIDE // CHUNK)), most)
    return next((n for n in range(least, min(2 * least, most) + 1) if rows % n == 0), least)
