"""A model as the planner sees it: operations on values whose dims are named, in blocks that repeat.

Made from dimensions (model_shape.py) or from a model's own recorded ops; the cost of time, memory and communication is
read from this one description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polyreme.errors import ConfigError, did_you_mean

Kind = Literal["product", "attention", "convolution", "norm", "elementwise", "lookup", "loss", "route"]
"""What limits an operation: arithmetic on matrix units (product, attention, convolution) or bytes moved (others)."""

Part = Literal["", "core_attn", "full_attn"]

PipelineCut = Literal["items", "layers", "balanced"]
"""How a pipeline cuts a model: "items" counts the embedding and the head as a layer each (PipelineLayer's uniform),
"layers" gives every chunk as many layers, the first the embedding besides, the last the head; "balanced" gives every
chunk as much arithmetic as layers allow, the last fewer of them by what the head takes."""


Besides = Callable[[Any, Any, Any], Any]
"""Of a Plan, a tuple of Memory and a Training that tuple again (planner/prediction.py stands on this file)."""


@dataclass(frozen=True, slots=True)
class Value:
    """An activation or a parameter.

    dims: logical dim of each dim, as in mesh/strategy.py; None for one without a name. shape: whole sizes over all
    devices; an activation's "batch" dim has size 1: one sample. itemsize: bytes of an element, 0 for that of the
    compute dtype. choices: of rows that experts compute, how many of them a token has on the mean, else 0; reach: share
    of the experts' devices that those of a token are chosen on; is_even: whether each expert has equally many of each
    sample. size: elements, of one sample for an activation.
    """

    name: str
    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    itemsize: int = 0
    choices: float = 0
    reach: float = 1.0
    is_even: bool = False
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.shape))

    def room(self, ways: int) -> float:
        """Of rows for experts over so many devices, the most that one can get over those that come on the mean."""
        experts = self.shape[self.dims.index("expert")]
        return 1.0 if self.is_even else ways * min(self.choices, experts / ways) / self.choices


@dataclass(frozen=True, slots=True)
class OperationCost:
    """One op of the forward.

    inputs: activations it reads. weights: parameters it reads, by name (Block.parameters). output: what it makes.
    flops: of the forward, one sample. saved: names of the values (inputs or output) that its backward reads.
    contracted: for a product, the logical dim summed over (for a lookup, the table's dim that is looked up); split over
    an axis it leaves a sum to be reduced there. part: what recompute leaves out of memory: "core_attn" (softmax(q k)
    v), "full_attn" (the rest of the attention block) or "". executed: share of the flops that the kernel carries out;
    causal attention by tiles leaves half of them out. unfused: bytes moved where each elementary operation is a kernel
    of its own, over those of one kernel for all. shared: of an elementwise operation, the itemsizes (as in Value) of
    what it computes on the way and its backward reads too, such as the tanh of a GELU; each as large as its output.
    is_whole: of a loss, whether what it reads lies there whole, made by another operation, and not a chunk at a time.
    drops: of attention, whether dropout goes over its probabilities. trains: which weights get gradients: its
    own, those of an adapter whose part is added to what the frozen weight makes, or none.
    """

    kind: Kind
    name: str
    inputs: tuple[Value, ...]
    output: Value
    weights: tuple[str, ...] = ()
    flops: float = 0.0
    saved: tuple[str, ...] = ()
    contracted: str | None = None
    part: Part = ""
    executed: float = 1.0
    unfused: float = 1.0
    shared: tuple[int, ...] = ()
    is_whole: bool = False
    drops: bool = False
    trains: Literal["weights", "adapter", "none"] = "weights"

    @property
    def is_of_experts(self) -> bool:
        """Whether it works on the rows that experts were chosen for, which one op of the runtime does from end to
        end."""
        return self.output.choices > 0


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Operations in order, the parameters they use, and how often the block stands in the model.

    part: what recompute and pipelines cut by: "embed", "layer" or "head". What goes from a block to the next is the
    output of its last operation. recomputes: whether a plan's recompute is for this block; not for those that its
    recompute_share leaves out.
    """

    name: str
    part: Literal["embed", "layer", "head"]
    operations: tuple[OperationCost, ...]
    parameters: tuple[Value, ...]
    repeats: int = 1
    recomputes: bool = True


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """A whole model: blocks in the order data flows.

    tied: the head's weight is the embedding's: the head's operation names it, and only the embedding's block lists it.
    tokens: of one sample: what throughput is counted in. besides: of (plan, memory of each stage, training), that
    memory with what lies on devices beside the blocks; None for nothing. digest: the hash.
    """

    name: str
    blocks: tuple[BlockCost, ...]
    tied: bool = False
    tokens: int = 1
    besides: Besides | None = None
    digest: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # what is remembered of a graph is looked up for every mesh of a search: not through all operations each time
        object.__setattr__(self, "digest", hash((self.name, self.blocks, self.tied, self.tokens)))

    def __hash__(self) -> int:
        return self.digest

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(block.repeats * sum(p.size for p in block.parameters) for block in self.blocks)

    @property
    def flops_per_sample(self) -> float:
        """FLOP of one forward of one sample."""
        return sum(block.repeats * sum(op.flops for op in block.operations) for block in self.blocks)

    @property
    def flops_per_token(self) -> float:
        """FLOP to train on one token: a backward is two forwards."""
        return 3 * self.flops_per_sample / self.tokens

    def items(self, cut: PipelineCut = "items") -> list[BlockCost]:
        """The blocks whose repeats a pipeline shares out among its chunks."""
        return [block for block in self.blocks if cut == "items" or block.part == "layer"]

    def num_items(self, cut: PipelineCut = "items") -> int:
        """Chunks that a pipeline can cut the model into."""
        return sum(block.repeats for block in self.items(cut))

    def parameter(self, name: str) -> Value:
        """The parameter of that name. Raises ConfigError if no block lists it."""
        for block in self.blocks:
            for each in block.parameters:
                if each.name == name:
                    return each
        names = [each.name for block in self.blocks for each in block.parameters]
        raise ConfigError(f"graph {self.name!r} has no parameter {name!r}{did_you_mean(name, names)}")


def beside_adapters(graph: ModelGraph, maps: Collection[str]) -> ModelGraph:
    """The graph where all weights are frozen, but for adapters beside the products of such names: a frozen product's
    backward does not read what went in, an adapter's does. What is frozen already stays as it is.

    >>> x, y = Value("x", ("embed",), (8,)), Value("y", ("ffn",), (8,))
    >>> up = OperationCost("product", "up", (x,), y, weights=("w",), saved=("x",))
    >>> graph = ModelGraph("one", (BlockCost("layer", "layer", (up,), ()),))
    >>> [beside_adapters(graph, maps).blocks[0].operations[0].saved for maps in (["up"], [])]
    [('x',), ()]
    """

    def frozen(op: OperationCost) -> OperationCost:
        if not op.weights or op.trains != "weights":
            return op
        if op.kind not in ("product", "convolution"):
            return replace(op, trains="none")
        if op.name in maps:
            return replace(op, trains="adapter")
        read = {value.name for value in op.inputs}
        return replace(op, saved=tuple(name for name in op.saved if name not in read), trains="none")

    blocks = tuple(replace(block, operations=tuple(map(frozen, block.operations))) for block in graph.blocks)
    return replace(graph, blocks=blocks)
