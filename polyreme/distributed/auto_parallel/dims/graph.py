"""A traced model as the planner sees it: a Graph of operations with kinds, FLOP, saved values and named dims.

The same description as ModelShape.graph() makes from dimensions, made from a model's own ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp

from polyreme.core.op import KEY
from polyreme.distributed.auto_parallel.dims.blocks import Repeated, repeated_blocks
from polyreme.distributed.auto_parallel.dims.derivative import CallFacts
from polyreme.distributed.auto_parallel.dims.factors import Factor, leaves
from polyreme.distributed.auto_parallel.dims.facts import Lookup, Product
from polyreme.distributed.auto_parallel.dims.infer import Inferred, Row
from polyreme.distributed.auto_parallel.dims.roles import is_split_by_mp
from polyreme.distributed.auto_parallel.dims.trace import TracedOp, TracedValue
from polyreme.errors import ConfigError
from polyreme.planner.graph import BlockCost, Kind, ModelGraph, OperationCost, Part, Value

BlockPart = Literal["embed", "layer", "head"]


def graph_of(inferred: Inferred, name: str = "") -> ModelGraph:
    """The Graph of a model whose dims were inferred: blocks that repeat are one, with a count; all of one sample.

    What stands before the first repeated block is the embedding, what stands after the last the head. A model without
    repeated blocks is one layer. Raises ConfigError for a model that computes nothing.
    """
    return _GraphBuilder(inferred).graph(name or type(inferred.traced.model).__name__)


class _GraphBuilder:
    """Values, parameters and operations made so far."""

    def __init__(self, inferred: Inferred) -> None:
        self.inferred, self.traced, self.roles = inferred, inferred.traced, inferred.roles
        self.products: dict[int, list[Product]] = {}
        for product in inferred.facts.products:
            self.products.setdefault(product.where, []).append(product)
        self.lookups: dict[int, Lookup] = {x.where: x for x in inferred.facts.lookups if x.table is not None}
        self.convolutions: dict[int, float] = {}
        for where, flops in inferred.facts.convolutions:
            self.convolutions[where] = self.convolutions.get(where, 0.0) + flops
        self.values: dict[TracedValue, Value] = {}
        self.numbers = {id(op): at for at, op in enumerate(self.traced.ops)}
        self.parts = self._parts()
        self.listed: set[str] = set()
        # by what tells functions of calls apart
        self.calls: dict[Any, CallFacts] = {}
        # values that are made of parameters and constants alone, such as a slice of a table: the parameters
        self.weight_names: dict[TracedValue, tuple[str, ...]] = {}

    def graph(self, name: str) -> ModelGraph:
        runs = repeated_blocks(self.traced)
        blocks: list[BlockCost] = []
        position = 0
        for number, run in enumerate(runs):
            start, end = run.calls[0].first, run.calls[-1].last
            if start > position:
                blocks.append(
                    self.block(f"before_{run.paths[0]}", "layer" if number else "embed", range(position, start))
                )
            blocks.append(self.repeated(run))
            position = end
        rest = range(position, len(self.traced.ops))
        blocks.append(self.block("head" if runs else "model", "head" if runs else "layer", rest))
        blocks = fused([block for block in blocks if block.operations])
        if not blocks:
            raise ConfigError(
                f"{name}: its forward computes nothing, it only views its inputs; there is nothing to plan or to cost"
            )
        return ModelGraph(name, tuple(blocks), self._is_tied(blocks), self._tokens())

    def repeated(self, run: Repeated) -> BlockCost:
        """The first block, which stands for all; what is called between it and the next belongs to it."""
        first, *others = run.calls
        end = others[0].first if others else first.last
        block = self.block(first.path, "layer", range(first.first, end))
        for call in others:
            self.listed.update(v.name for op in self.traced.ops_in(call) for v in op.inputs if v.source == "parameter")
            for ours, theirs in zip(first.outputs, call.outputs, strict=True):
                if ours in self.values:  # what comes out of each is like what comes out of the first
                    self.values[theirs] = self.values[ours]
        return replace(block, repeats=len(run.calls))

    def block(self, name: str, part: BlockPart, ops: Iterable[int]) -> BlockCost:
        operations = [made for at in ops for made in self.operations(at)]
        names = dict.fromkeys(w for op in operations for w in op.weights if w not in self.listed)
        self.listed.update(names)
        return BlockCost(name, part, tuple(operations), tuple(self.parameter(self.inferred.rows[n]) for n in names))

    # operations

    def operations(self, index: int) -> list[OperationCost]:
        """The planner's operations for one op; none for an op that only changes a shape."""
        op = self.traced.ops[index]
        if not op.outputs:
            return []
        activations = [v for v in op.inputs if self.is_activation(v)]
        if op.outputs[0].size <= 1 and not self.products.get(index):
            read = [v for v in activations if self.is_trained(v)]
            return [self.loss(op, self.value(read[0]), is_whole=True)] if read else []
        if not activations:
            self.weight_names.update(dict.fromkeys(op.outputs, self.weights(op)))
            return []
        if index in self.inferred.facts.attentions:
            return [self.attention(op)]
        if index in self.convolutions:
            return [self.weighted(op, "convolution", self.convolutions[index])]
        if self.products.get(index):
            return self.product(index, op)
        if index in self.lookups:
            return [self.lookup(op, self.lookups[index])]
        if index in self.inferred.facts.losses:
            return [self.loss(op, self.value(op.inputs[0]), is_whole=True)]
        if len(activations) == 1 and self.facts(op).only_moves:
            source = self.value(activations[0])
            for out in op.outputs:
                self.values[out] = source
            return []
        return [self.elementwise(index, op)]

    def attention(self, op: TracedOp) -> OperationCost:
        q, k, v = (self.traced_given(op, n) for n in ("query", "key", "value"))
        inputs = list(dict.fromkeys(self.value(x) for x in (q, k, v)))
        heads, seq = q.shape[-2], q.shape[-3]
        flops = 2.0 * q.size * k.shape[-3] + 2.0 * q.size // q.shape[-1] * k.shape[-3] * v.shape[-1]
        output = self.value(op.outputs[0])
        dims = [output.dims[i] if i < len(output.dims) else None for i in (0, 2, 1)]
        sums = Value(f"{output.name}_log_sums", tuple(dims), (1, heads, seq), 4)
        saved = [x.name for x in (*inputs, output, sums)]
        return OperationCost(
            "attention", self.title(op), (*inputs, sums), output, (), flops / self.traced.batch, tuple(saved),
            None, "core_attn", 0.5 if op.attributes.get("is_causal") else 1.0,
            drops=op.attributes.get("dropout_p", 0.0) > 0,
        )  # fmt: skip

    def product(self, at: int, op: TracedOp) -> list[OperationCost]:
        found = self.products[at]
        flops = sum(p.flops for p in found)
        if at not in self.inferred.facts.losses:
            return [self.weighted(op, "product", flops, self.parts.get(at, ""))]
        hidden, (product, *_) = self.value(op.inputs[0]), found
        name = self.title(op)
        classes = product.right[0]
        tokens = [(d, n) for d, n in zip(hidden.dims, hidden.shape, strict=True)][:-1]
        dims = [*("block_seq" if d == "seq" else d for d, _ in tokens), self.roles.name(classes)]
        logits = Value(f"{name}_logits", tuple(dims), (*(n for _, n in tokens), classes.size))
        made = OperationCost(
            "product", f"{name}_logits", (hidden,), logits, self.weights(op), flops / self.traced.batch,
            (hidden.name,), self.roles.name(product.contracted[1][0]),
        )  # fmt: skip
        return [made, self.loss(op, logits)]

    def weighted(self, op: TracedOp, kind: Kind, flops: float, part: Part = "") -> OperationCost:
        """A product or convolution: what its backward reads is every input that is no parameter."""
        inputs = self.inputs(op)
        uses = [u for u in self.roles.uses if self.traced.ops[u.product.where] is op]
        summed = [self.roles.name(dim) for use in uses for dim in use.summed]
        contracted = next((n for n in summed if is_split_by_mp(n)), summed[0] if summed else None)
        saved = tuple(v.name for v in inputs)
        weights = self.weights(op)
        output = self.value(op.outputs[0])
        return OperationCost(
            kind, self.title(op), inputs, output, weights, flops / self.traced.batch, saved, contracted, part
        )

    def lookup(self, op: TracedOp, lookup: Lookup) -> OperationCost:
        inputs = tuple(replace(v, itemsize=4) for v in self.inputs(op))
        rows = self.roles.name(lookup.rows)
        saved = tuple(v.name for v in inputs)
        output = self.value(op.outputs[0])
        return OperationCost("lookup", self.title(op), inputs, output, self.weights(op), saved=saved, contracted=rows)

    def loss(self, op: TracedOp, logits: Value, *, is_whole: bool = False) -> OperationCost:
        """The operation that computes a loss from logits; is_whole: another operation computed the logits."""
        output = Value(self.title(op), logits.dims[:-1], logits.shape[:-1])
        return OperationCost("loss", self.title(op), (logits,), output, saved=(logits.name,), is_whole=is_whole)

    def elementwise(self, index: int, op: TracedOp) -> OperationCost:
        inputs, output, facts = self.inputs(op), self.value(op.outputs[0]), self.facts(op)
        reads = facts.read_by_derivative([i for i, v in enumerate(op.inputs) if self.is_trained(v)])
        read = [v for i, v in enumerate(op.inputs) if i in reads.inputs]
        saved = dict.fromkeys(self.value(v).name for v in read if self.is_activation(v))
        is_norm = bool(saved) and facts.reduces and output.shape == inputs[0].shape
        if (reads.outputs or reads.dear) and not saved:
            saved = {output.name: None}
        if any(op.op.kinds[op.op.index[name]] is KEY for i, name in enumerate(op.names) if i in reads.inputs):
            mask = replace(output, name=f"{output.name}_mask", itemsize=1)
            inputs, saved = (*inputs, mask), saved | {mask.name: None}
        return OperationCost(
            "norm" if is_norm else "elementwise", self.title(op), inputs, output, self.weights(op), saved=tuple(saved),
            part=self.parts.get(index, ""), shared=(4,) * reads.dear,
        )  # fmt: skip

    def facts(self, op: TracedOp) -> CallFacts:
        """The facts about an op's function, collected once for each kind of call."""
        return self.calls.setdefault(op.key, CallFacts(op))

    def is_trained(self, value: TracedValue) -> bool:
        """Whether a gradient may be wanted of a value."""
        is_learned = value.source == "parameter" or value in self.weight_names
        return jnp.issubdtype(value.dtype, jnp.inexact) and (is_learned or self.is_activation(value))

    # values

    def inputs(self, op: TracedOp) -> tuple[Value, ...]:
        """Activations that an op reads, each once."""
        return tuple(dict.fromkeys(self.value(v) for v in op.inputs if self.is_activation(v)))

    def is_activation(self, value: TracedValue) -> bool:
        return value.source in ("op", "input", "label") and value.size > 1 and value not in self.weight_names

    def weights(self, op: TracedOp) -> tuple[str, ...]:
        """Parameters that an op reads, as they are or rearranged."""
        found = [(v.name,) if v.source == "parameter" else self.weight_names.get(v, ()) for v in op.inputs]
        return tuple(dict.fromkeys(name for names in found for name in names))

    @staticmethod
    def traced_given(op: TracedOp, name: str) -> TracedValue:
        found = op.input_of(name)
        assert found is not None  # attention has all three
        return found

    def value(self, traced: TracedValue) -> Value:
        """The Value of a traced one, its dims taken apart into factors where one of them has a name."""
        if traced not in self.values:
            factors: list[tuple[str | None, int]] = []
            for dim in self.inferred.values[traced].dims:
                factors += self._named_factors(dim)
            names = [name if _can_be_cut(name, size) else None for name, size in factors]
            if any(is_split_by_mp(n) for n in names) or traced.source in ("input", "label"):
                names = ["block_seq" if n == "seq" else n for n in names]
            names = [n if n is None or names.index(n) == i else None for i, n in enumerate(names)]
            itemsize = 0 if traced.dtype.kind == "f" else min(traced.dtype.itemsize, 4)
            label = traced.name or f"v{len(self.values)}"
            self.values[traced] = Value(label, tuple(names), tuple(n for _, n in factors), itemsize)
        return self.values[traced]

    def _named_factors(self, dim: Factor) -> list[tuple[str | None, int]]:
        named = [f for f in leaves(dim) if f in self.roles.names]
        if not named:
            return [(self.roles.name(dim), dim.size)]
        factors: list[tuple[str | None, int]] = []
        for leaf in leaves(dim):
            name = self.roles.name(dim) if leaf is named[0] else self.roles.names.get(leaf)
            if self.roles.names.get(leaf) == "batch":
                if ("batch", 1) not in factors:
                    factors.append(("batch", 1))
            elif factors and factors[-1][0] is None and name is None:
                factors[-1] = (None, factors[-1][1] * leaf.size)
            elif factors and self.roles.names.get(named[0]) == "heads" and leaf in self.roles.heads and factors[-1][0]:
                factors[-1] = (factors[-1][0], factors[-1][1] * leaf.size)  # groups of heads count as heads
            else:
                factors.append((name, leaf.size))
        return factors

    def parameter(self, row: Row) -> Value:
        """A parameter, heads taken apart from what each of them holds."""
        dims: list[str | None] = []
        shape: list[int] = []
        for dim, size, parts in zip(row.dims, row.shape, row.parts, strict=True):
            cut = dim is not None and 0 < parts < size
            name = dim if _can_be_cut(dim, parts or size) else None
            dims += [name, None] if cut else [name]
            shape += [parts, size // parts] if cut else [size]
        return Value(row.name, tuple(dims), tuple(shape))

    # the model

    def title(self, op: TracedOp) -> str:
        """A name for an op, of which there is one in the model."""
        return f"{op.path or self.traced.model.__class__.__name__}:{op.name}:{self.numbers[id(op)]}"

    def _parts(self) -> dict[int, Part]:
        """The parts that recompute may cover: softmax(q k) v, from the first product of activations in a Layer's call
        to the last, and the other ops of that Layer if it is not a whole block."""
        parts: dict[int, Part] = {}
        spans: dict[int, list[int]] = {}
        for index, op in enumerate(self.traced.ops):
            if index in self.inferred.facts.attentions or any(
                p.of_activations and p.batch for p in self.products.get(index, [])
            ):
                spans.setdefault(op.call, []).append(index)
        blocks = {id(call) for run in repeated_blocks(self.traced) for call in run.calls}
        for index, ends in spans.items():
            call = self.traced.calls[index]
            if index >= 0 and call.outer >= 0 and id(call) not in blocks:
                parts.update(dict.fromkeys(range(call.first, call.last), "full_attn"))
            inside = [i for i in range(min(ends), max(ends) + 1) if self.traced.ops[i].call == index]
            parts.update(dict.fromkeys(inside, "core_attn"))
        return parts

    def _is_tied(self, blocks: Sequence[BlockCost]) -> bool:
        """Whether the head reads a weight that another block lists."""
        own = {p.name for p in blocks[-1].parameters}
        return any(w not in own for op in blocks[-1].operations for w in op.weights)

    def _tokens(self) -> int:
        """Tokens of a sample: the size of its seq dim, 1 without one."""
        sizes = [n for v in self.values.values() for d, n in zip(v.dims, v.shape, strict=True) if d == "seq"]
        return max(sizes, default=1)


def _can_be_cut(name: str | None, size: int) -> bool:
    """Whether a dim of this size keeps its name: an odd one stays whole under any mesh of two, whatever it is."""
    return name in ("batch", "embed") or size % 2 == 0


def fused(blocks: Sequence[BlockCost]) -> list[BlockCost]:
    """The blocks with elementwise operations joined to the elementwise ones that read them, as compilers do: what is
    made in between is never stored, and the backward makes it again from what the first of them read."""
    readers: dict[str, list[tuple[int, OperationCost]]] = {}
    for index, block in enumerate(blocks):
        for op in block.operations:
            for value in op.inputs:
                readers.setdefault(value.name, []).append((index, op))
    result = []
    for index, block in enumerate(blocks):
        gone: dict[str, OperationCost] = {}
        operations: list[OperationCost] = []
        for op in block.operations:
            joined = op
            for value in op.inputs:
                if value.name in gone:
                    joined = _join(gone[value.name], joined, value)
            reading = readers.get(op.output.name, [])
            inside = reading and all(where == index and reader.kind == "elementwise" for where, reader in reading)
            if joined.kind == "elementwise" and inside and op is not block.operations[-1]:
                gone[op.output.name] = joined
            else:
                operations.append(joined)
        result.append(replace(block, operations=tuple(operations)))
    return result


def _join(first: OperationCost, second: OperationCost, between: Value) -> OperationCost:
    inputs = [v for v in (*first.inputs, *second.inputs) if v.name != between.name]
    again = [v.name for v in first.inputs] if between.name in second.saved or between.name in first.saved else []
    saved = [n for n in (*first.saved, *again, *second.saved) if n != between.name]
    return replace(
        second,
        inputs=tuple(dict.fromkeys(inputs)),
        weights=tuple(dict.fromkeys((*first.weights, *second.weights))),
        shared=(*first.shared, *second.shared),
        saved=tuple(dict.fromkeys(saved)),
    )
