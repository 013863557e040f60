"""The collectives that cutting an operation over devices makes necessary, forward and backward.

Sources: tensor and sequence parallelism arXiv:1909.08053, 2205.05198; sequences cut over devices arXiv:2309.14509
(all-to-all), 2310.01889 (ring); experts arXiv:2006.16668.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from polyreme.mesh import Plan
from polyreme.planner.communication import Neighbours
from polyreme.planner.graph import BlockCost, OperationCost, Part, Value
from polyreme.planner.sharding import Cuts

What = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class Collective(NamedTuple):
    """One collective of one run of a block on one microbatch.

    nbytes: as Group's methods take them: the whole of what a gather makes or a scatter cuts; what each device holds of
    a reduce or an all-to-all. beside: name of the operation that it runs next to. among: those of the axis's devices
    that take part; None for all of them. choices, reach: of rows for experts, as in Value; else 0.
    """

    what: What
    axes: frozenset[str]
    nbytes: float
    is_forward: bool
    part: Part
    beside: str
    among: Neighbours | None = None
    choices: float = 0.0
    reach: float = 1.0


def collectives(
    block: BlockCost, weights: Mapping[str, Value], cuts: Cuts, samples: float, itemsize: int, plan: Plan
) -> Iterator[Collective]:
    """Of one run of the block on one microbatch of `samples` samples over the whole job."""
    if cuts.degree(cuts.degrees) == 1:
        return
    seen: set[str] = set()  # an input that several products read is gathered once, and its gradient summed once
    has_exchanged = False
    for op in block.operations:
        maker = Maker(op, cuts, samples, itemsize)
        if op.weights and op.kind in ("product", "convolution", "lookup"):
            yield from maker.summed(weights[op.weights[0]])
        if op.weights or op.kind == "route":
            yield from maker.gathered(weights[op.weights[0]] if op.weights else None, seen)
        if op.kind == "route":
            yield from maker.routed(plan, weights)
        if op.kind == "loss":
            yield from maker.compared()
        if op.part == "core_attn" and not has_exchanged:
            has_exchanged = True
            yield from maker.exchanged(plan)


class Maker(NamedTuple):
    """Makes the collectives of one operation."""

    op: OperationCost
    cuts: Cuts
    samples: float
    itemsize: int

    def axes(self, dim: str | None, size: int, kind: str = "act") -> frozenset[str]:
        """Axes that cut one dim."""
        return self.cuts.axes(kind, (dim,), (size,))

    def nbytes(self, value: Value) -> float:
        """Bytes of an activation on one device."""
        return self.cuts.local(value, self.samples) * (value.itemsize or self.itemsize)

    def both(self, forward: What, backward: What, axes: frozenset[str], nbytes: float) -> Iterator[Collective]:
        """A collective and the one that its backward is."""
        yield Collective(forward, axes, nbytes, True, self.op.part, self.op.name)
        yield Collective(backward, axes, nbytes, False, self.op.part, self.op.name)

    def summed(self, weight: Value) -> Iterator[Collective]:
        """The sum over a dim that is cut: reduce-scattered where the output is cut over the same axes, by its seq."""
        op = self.op
        at = weight.dims.index(op.contracted) if op.contracted in weight.dims else -1
        axes = self.axes(op.contracted, weight.shape[at], "use") if at >= 0 else frozenset()
        if not axes:
            return
        nbytes = self.nbytes(op.output)
        scattered = axes & self.cuts.axes("act", op.output.dims, op.output.shape)
        if scattered:
            yield from self.both("reduce_scatter", "all_gather", scattered, nbytes * self.cuts.degree(scattered))
        if axes - scattered:
            yield Collective("all_reduce", axes - scattered, nbytes, True, op.part, op.name)

    def gathered(self, weight: Value | None, seen: set[str]) -> Iterator[Collective]:
        """The input made whole in seq, where the residual stream is cut in seq and the block is not; else the sum of
        its gradient, which each device has of its own columns."""
        op, x = self.op, self.op.inputs[0]
        if x.itemsize or x.name in seen:
            return
        axes: frozenset[str] = frozenset()
        if "seq" in x.dims and "block_seq" in op.output.dims:
            size = x.shape[x.dims.index("seq")]
            axes = self.axes("seq", size) - self.axes("block_seq", size)
            if axes:
                yield from self.both("all_gather", "reduce_scatter", axes, self.nbytes(x) * self.cuts.degree(axes))
        if weight is not None and op.kind != "lookup":
            axis_sets = [
                self.axes(dim, size, "use")
                for dim, size in zip(weight.dims, weight.shape, strict=True)
                if dim != op.contracted and dim not in x.dims
            ]
            partial = frozenset().union(*axis_sets) - axes
            if partial:
                yield Collective("all_reduce", partial, self.nbytes(x), False, op.part, op.name)
            if axes or partial:
                seen.add(x.name)

    def routed(self, plan: Plan, weights: Mapping[str, Value]) -> Iterator[Collective]:
        """Tokens to the devices that hold their experts, and back, as the plan's dispatcher moves them.

        Of w devices, each with t tokens of k choices: all of w t tokens gathered, and sums of 4 bytes scattered; or
        rows, t k of them, or as many as there is room for in equal parts. Balanced, rows go by way of all devices, and
        hot experts' weights, as many as a device has, are summed.
        """
        value = next((v for v in (self.op.output, *self.op.inputs) if "expert" in v.dims), None)
        if value is None:
            return
        experts = value.shape[value.dims.index("expert")]
        axes = self.axes("expert", experts)
        if not axes:
            return
        nbytes = self.nbytes(value)
        if not value.choices:  # of a model that was not declared with routing: what there is goes once
            yield from self.both("all_to_all", "all_to_all", axes, nbytes)
            return
        ways, k = self.cuts.degree(axes), value.choices
        how, is_there = plan.expert_dispatcher(ways, math.ceil(k)), value is self.op.output
        if how == "gather":
            tokens = nbytes / k * ways
            summed = tokens * 4 / (value.itemsize or self.itemsize)
            pair: tuple[What, What] = ("all_gather", "reduce_scatter") if is_there else ("reduce_scatter", "all_gather")
            yield Collective(pair[0], axes, tokens if is_there else summed, True, self.op.part, self.op.name)
            yield Collective(pair[1], axes, tokens if is_there else summed, False, self.op.part, self.op.name)
            return
        if how == "padded":
            nbytes *= value.room(ways)
        levels = [axes]
        if plan.expert_all_to_all == "two_level":
            levels = [frozenset(plan.expert_axes[1:]), frozenset(plan.expert_axes[:1])]
        for level in levels * (2 if how == "balanced" else 1):
            for each in self.both("all_to_all", "all_to_all", level, nbytes):
                yield each._replace(choices=k, reach=value.reach)
        if how == "balanced" and is_there:
            hot = sum(w.size / self.cuts.ways("use", w) for w in weights.values() if "expert" in w.dims) * self.itemsize
            yield from self.both("all_reduce", "all_reduce", axes, hot)

    def compared(self) -> Iterator[Collective]:
        """Largest logit, sum of exponentials and the label's logit of each token, 4 bytes each, where vocab is cut."""
        logits = self.op.inputs[0]
        axes = self.axes("vocab", logits.shape[logits.dims.index("vocab")]) if "vocab" in logits.dims else frozenset()
        if axes:
            rows = self.cuts.local(logits, self.samples) * self.cuts.degree(axes) / logits.shape[-1]
            yield Collective("all_reduce", axes, 12.0 * rows, True, self.op.part, self.op.name)

    def exchanged(self, plan: Plan) -> Iterator[Collective]:
        """What attention needs of a sequence that is cut: heads for seq and back, or others' keys and values."""
        op = self.op
        dim = next((d for d in ("block_seq", "seq") if d in op.output.dims), None)
        length = op.output.shape[op.output.dims.index(dim)] if dim else 0
        axes = self.axes(dim, length) if dim else frozenset()
        if not axes:
            return
        streams = [value for value in op.inputs if not value.itemsize]
        nbytes, ways = sum(self.nbytes(value) for value in streams), self.cuts.degree(axes)
        queries, keys = streams[0], streams[min(1, len(streams) - 1)]
        heads, kv_heads = self._heads(queries), self._heads(keys)
        way = plan.segment.way(ways, length // ways, heads, kv_heads, ways)
        passed = nbytes * 2 / 3 if len(streams) == 1 else nbytes - self.nbytes(queries)
        if way.how == "gather":
            summed = passed * ways * 4 / self.itemsize
            yield Collective("all_gather", axes, passed * ways, True, op.part, op.name)
            yield Collective("all_gather", axes, passed * ways, False, op.part, op.name)
            yield Collective("reduce_scatter", axes, summed, False, op.part, op.name)
        if way.how in ("ulysses", "usp"):
            near = Neighbours(way.inner) if way.inner < ways else None
            for moved in (nbytes, nbytes / 3 if len(streams) == 1 else self.nbytes(queries)):
                for is_forward in (True, False):
                    yield Collective("all_to_all", axes, moved, is_forward, op.part, op.name, near)
        if way.how in ("ring", "usp"):
            rounds = ways // way.inner
            far = Neighbours(rounds, way.inner) if way.inner > 1 else None
            yield Collective("send", axes, passed * (rounds - 1), True, op.part, op.name, far)
            yield Collective("send", axes, 2 * passed * (rounds - 1), False, op.part, op.name, far)

    def _heads(self, value: Value) -> int:
        """Of a device; 1 where the value's are not told apart."""
        dim = next((d for d in ("heads", "kv_heads") if d in value.dims), None)
        if dim is None:
            return 1
        heads = value.shape[value.dims.index(dim)]
        return heads // self.cuts.degree(self.axes(dim, heads))
