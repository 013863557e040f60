"""What XLA's CPU compiler keeps of a training step beyond what the arithmetic needs.

Read off buffer assignments (jaxlib 0.10, --xla_dump_to): each rule names the buffers it stands for. Products and
attention run in float32 whatever the compute dtype; no value is computed twice to spare memory, so that what a
backward shares with its forward stays; what waits for nothing is made at once; and the microbatches of a step without
a pipeline are all there together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from polyreme.planner.graph import BlockCost, OperationCost, Value
from polyreme.planner.memory_stage import PARTS, WIDE, Held, Stage, total
from polyreme.planner.sharding import Cuts, Piece

QUERIES = 64
"""Rows of a block of attention (kernels.attention_blocked.BLOCK_QUERIES)."""

MAX_SPANS = 8
"""Most spans of blocks (kernels.attention_blocked.MAX_SPANS)."""

CONVOLUTION = 4
"""Dims of a convolution's weight (of images)."""

PACKING = 1.03
"""Bytes of scratch over the bytes in it at the peak: buffers of unlike lifetimes leave gaps."""

ROWS = 512
"""Rows of a block of the gradient of experts' weights (kernels.grouped.WIDE)."""

COPIED = 1 << 23
"""Multiplications of a product from which on its weight's gradient reads a transposed copy (kernels.linear)."""

PIECES = 16
"""Buffers that a block's recomputed values are about."""

_START = ": start of the "
"""Within the names of buffers that loops start from."""


class QuerySpan(NamedTuple):
    """Queries walked in `blocks` blocks, over `rows` rows together, against the first `keys` keys."""

    rows: int
    blocks: int
    keys: int


def spans(seq: int, causal: bool) -> list[QuerySpan]:
    """How attention of seq queries is cut, as kernels.attention_blocked.spans does it."""
    whole, tail = divmod(seq, QUERIES)
    count = min(MAX_SPANS, max(1, math.isqrt(whole))) if causal else 1
    step = QUERIES * -(-whole // count) or QUERIES
    edges = [*range(0, whole * QUERIES, step), whole * QUERIES]
    found = [QuerySpan(b - a, (b - a) // QUERIES, b if causal else seq) for a, b in pairwise(edges) if b > a]
    return [*found, QuerySpan(tail, 1, seq)] if tail else found


def kept_by_attention(
    op: OperationCost, cuts: Cuts, samples: float, itemsize: int = WIDE
) -> Iterator[tuple[str, Held]]:
    """(what, buffers) of one attention from its forward to its backward."""
    out = cuts.local(op.output, samples) * WIDE
    keys = out if len(op.inputs) < 3 else cuts.local(op.inputs[1], samples) * WIDE
    seq = op.output.shape[1]
    sums = next((v for v in op.inputs if v.name.endswith("log_sums")), None)
    rows = cuts.local(sums, samples) / seq * WIDE if sums else 0.0  # bytes of one number for each head and sample
    cut = spans(seq, op.executed < 1)
    looped = [s for s in cut if s.blocks > 1]
    yield "out by head", Held(out)
    yield "log sums", Held(rows * seq)
    yield "queries by head", Held(out)
    yield "keys and values by head", Held(keys, 2)
    for span in cut:
        if span.keys < seq:
            yield "keys and values a span sees", Held(keys * span.keys / seq, 2)
    for span in looped:
        yield "start of the gradient of keys and values", Held(keys * span.keys / seq, 2)
        yield "start of the gradient of queries", Held(out * span.rows / seq)
    for span in cut:
        if span.blocks == 1:
            # those that dropout went over, which the values' gradient reads, and those before
            yield "probabilities", Held(rows * span.rows * span.keys, 2 if op.drops else 1)
    if len(looped) < len(cut) and len(op.inputs) < 3 and itemsize == WIDE:
        yield "queries, keys and values", Held(3 * out)


def kept_by_elementwise(op: OperationCost, cuts: Cuts, samples: float, itemsize: int) -> Iterator[tuple[str, Held]]:
    """The parts of an activation function that its derivative shares: tanh of a GELU, sigmoid and product of a SiLU."""
    size = cuts.local(op.output, samples)
    for at, width in enumerate(op.shared):
        # experts' op rounds what it makes on the way, as it ends in rows of the compute dtype
        yield f"shared with the derivative {at}", Held(size * (itemsize if op.is_of_experts else width or itemsize))


def kept_by_block(
    block: BlockCost, cuts: Cuts, samples: float, itemsize: int, parts: frozenset[str] = frozenset()
) -> dict[str, Held]:
    """What one microbatch leaves of a block for its backward, by name. parts: of operations computed again."""
    saved: dict[str, Held] = {}
    makers = {op.output.name: op for op in block.operations}
    for op in block.operations:
        if op.part and op.part in parts:
            continue
        values = {v.name: v for v in (*op.inputs, op.output)}
        if op.kind == "attention":
            saved |= {
                f"{op.name}: {what} {at}": held
                for at, (what, held) in enumerate(kept_by_attention(op, cuts, samples, itemsize))
            }
            continue
        if op.kind == "loss":
            continue
        for name in op.saved:
            value = values[name]
            if value.choices and op.kind != "elementwise":
                # loops read rows in float32, which is the same in every turn and made before them, whole; what comes
                # back to the tokens is weighed in float32
                came_back = cuts.returned(value, samples) * WIDE
                nbytes = cuts.local(value, samples) * WIDE if op.kind == "product" else came_back
            else:
                width = value.itemsize or (WIDE if op.kind in ("product", "norm", "convolution") else itemsize)
                nbytes = cuts.local(_read(value, op), samples) * width
            if name not in saved or saved[name].nbytes < nbytes:
                saved[name] = Held(nbytes)
        if op.kind == "norm" and op.trains == "weights":
            # what the weight's gradient reads; of a batch norm, which is made by channels, the centred and the scaled
            maker = makers.get(op.inputs[0].name)
            parts_kept = 2 if maker and maker.kind == "convolution" else 1
            saved[f"{op.name}: normalised"] = Held(cuts.local(op.inputs[0], samples) * WIDE, parts_kept)
        elif op.kind == "product" and op.is_of_experts:
            starts = _starts_of_experts(block, op, cuts, samples, itemsize)
            saved |= {f"{op.name}: {what}": held for what, held in starts if not what.endswith("output")}
        elif op.kind == "elementwise":
            saved |= {f"{op.name}: {what}": h for what, h in kept_by_elementwise(op, cuts, samples, itemsize)}
            read = (values[name] for name in op.saved if name in makers and not op.is_of_experts)
            for value in read if itemsize == WIDE else ():
                if makers[value.name].trains == "adapter":
                    # the sum is made again inside what reads it in the forward, of the frozen weight's part and the
                    # adapter's, and once more for the backward; in 16 bits what is rounded is read by both
                    saved[f"{value.name}: of the frozen weight"] = Held(cuts.local(value, samples) * WIDE)
    return saved | {v.name: Held(n * itemsize) for v in block.parameters if (n := cuts.joined(v))}


def _starts_of_experts(
    block: BlockCost, op: OperationCost, cuts: Cuts, samples: float, itemsize: int
) -> Iterator[tuple[str, Held]]:
    """Where the loops over blocks of rows start from: those of the backward of experts' products, and of a second
    forward."""
    for what, rows in (("gradient of rows", op.inputs[0]), ("output", op.output)):
        yield f"start of the {what}", Held(cuts.local(rows, samples) * itemsize)
    weights = sum(value.size / cuts.ways("use", value) for value in block.parameters if value.name in op.weights)
    yield "start of the gradient of weights", Held(weights * itemsize)


def _read(value: Value, op: OperationCost) -> Value:
    """A value as an operation reads it: gathered along seq where the operation works on block_seq."""
    if "block_seq" not in op.output.dims or "seq" not in value.dims:
        return value
    return replace(value, dims=tuple("block_seq" if dim == "seq" else dim for dim in value.dims))


def reused(values: Iterable[Held], buffers: Iterable[Held]) -> float:
    """Bytes of values that lie in buffers that hold nothing meanwhile: each takes one value that is no larger.

    XLA places the largest values first. The optimizer's moments are such buffers, once they are copied.

    >>> reused([Held(8, 2), Held(3, 2)], [Held(4, 3), Held(8, 1)])
    14.0
    """
    free = [[b.nbytes, b.number] for b in sorted(buffers)]
    placed = 0.0
    for value in sorted(values, reverse=True):
        left = value.number
        for buffer in free:
            if buffer[0] >= value.nbytes and left > 0:
                taken = min(left, buffer[1])
                placed += taken * value.nbytes
                buffer[1] -= taken
                left -= taken
    return placed


def kept_by_recompute(
    block: BlockCost, cuts: Cuts, samples: float, itemsize: int, stream_itemsize: int
) -> dict[str, Held]:
    """What a block leaves that is computed again as a whole: its input, of elements of stream_itemsize bytes, and where
    its loops start from: those are copies of zeros, which wait for nothing and are made at once."""
    buffers = {"x": Held(cuts.local(_first(block), samples) * stream_itemsize)}
    for op in block.operations:
        if op.kind == "attention":
            buffers |= {f"{op.name}: {what} {at}": h for at, (what, h) in enumerate(_starts(op, cuts, samples))}
        elif op.kind == "product" and op.is_of_experts:
            buffers |= {f"{op.name}: {what}": h for what, h in _starts_of_experts(block, op, cuts, samples, itemsize)}
    return buffers


def _first(block: BlockCost) -> Value:
    return block.operations[0].inputs[0]


def _starts(op: OperationCost, cuts: Cuts, samples: float) -> Iterator[tuple[str, Held]]:
    """Of loops that a recomputed attention runs: those of its backward, and of its second forward."""
    for what, held in kept_by_attention(op, cuts, samples):
        if what.startswith("start"):
            yield what, held
            if what.endswith("queries"):
                yield "start of the output", held


def attention_again(block: BlockCost, cuts: Cuts, samples: float) -> float:
    """Bytes of one block of probabilities while a forward is computed again."""
    return sum(_probabilities(op, cuts, samples) for op in block.operations if op.kind == "attention")


def _probabilities(op: OperationCost, cuts: Cuts, samples: float) -> float:
    """Bytes of the probabilities of one block of queries."""
    sums = next((v for v in op.inputs if v.name.endswith("log_sums")), None)
    seq = op.output.shape[1]
    return cuts.local(sums, samples) * WIDE * min(QUERIES, seq) if sums else 0.0


class OnProcessor:
    """What a stage's programs hold when XLA's CPU compiler makes them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def moments(self) -> list[tuple[float, float, float]]:
        """(gradients, activations, workspace) at each time that may be the worst, of the one program of a step without
        a pipeline."""
        return self._depth_first() if self.stage.plan.mesh.size == 1 else self._as_early_as_can_be()

    def _depth_first(self) -> list[tuple[float, float, float]]:
        """Of a program for one device (core.engine.xla_flags.DEPTH_FIRST): a microbatch ends before the next begins,
        and what is made of what stays at little cost is made where it is read."""
        stage = self.stage
        count, loss = stage.plan.num_microbatches, stage.loss()
        buffers = [Held(self.inputs(), count), *self.weights(stage.blocks)]
        zeros: dict[str, Held] = {}
        again = 0.0
        for block, number in stage.blocks:
            by_name, missing = self.residuals(block)
            # each loop starts just before it runs, from a copy of zeros that all blocks share
            zeros |= {name: Held(h.nbytes) for name, h in by_name.items() if _START in name}
            cheap = self._made_where_read(block) if stage.mode(block) != "full" else {}
            by_name = {name: h for name, h in by_name.items() if name not in zeros} | self._of_spans(block, by_name)
            staying = [cheap.get(name, h) for name, h in by_name.items()]
            buffers += [Held(h.nbytes, h.number * number) for h in staying]
            again = max(again, missing + total(by_name.values()) - total(staying))
        activations = total([*buffers, *zeros.values()])
        # a microbatch's cost is computed where the step's results are, from logits that are there until then
        logits = 0.0 if loss.is_looped else loss.logits / 2
        waiting = (logits + self._of_norms()) * (count - 1)
        before = stage.gradients if count > 1 else 0.0
        return [
            _pack(before, activations, waiting + loss.logits + loss.weight + loss.hidden),
            _pack(before, activations, waiting + logits + loss.weight + self.transient() + again),
            _pack(stage.gradients, 0.0, waiting + logits + self.copies()),
        ]

    def _of_norms(self) -> float:
        """Bytes that a microbatch leaves for the gradients of its norms' weights, which wait for the end of the step:
        of each the normalised values and the gradient of what it gave."""
        stage = self.stage
        return sum(
            2 * number * stage.local(op.output, WIDE)
            for block, number in stage.blocks
            for op in block.operations
            if op.kind == "norm" and op.trains == "weights" and stage.mode(block) != "full"
        )

    def _made_where_read(self, block: BlockCost) -> dict[str, Held]:
        """What of a block's values is not kept as it is in the other order, by name.

        What a norm, an activation function or attention's join of its heads gives to products whose transposed inputs
        are copies (kernels.linear) is made again by those copies in float32; in 16 bits it is kept as it was rounded.
        Of other products it stays in float32. Normalised values are made again for the gradient of a norm's weight.
        """
        stage = self.stage
        cheap = {f"{op.name}: normalised": Held(0.0) for op in block.operations if op.kind == "norm"}
        makers = {op.output.name for op in block.operations if op.kind in ("attention", "elementwise", "norm")}
        for op in block.operations:
            for value in op.inputs if op.kind == "product" and not op.is_of_experts else ():
                if value.name not in makers:
                    continue
                copied = op.trains == "weights" and stage.local(value, 1) * op.output.shape[-1] >= COPIED
                width = WIDE if not copied else stage.itemsize if stage.itemsize < WIDE else 0
                cheap[value.name] = max(cheap.get(value.name, Held(0.0)), Held(stage.local(value, width)))
        return cheap

    def _as_early_as_can_be(self) -> list[tuple[float, float, float]]:
        """Of a program for several devices, whose operations begin as soon as they can."""
        stage = self.stage
        live, copies = stage.plan.num_microbatches, self.copies()
        buffers = [*self.weights(stage.blocks), Held(self.inputs(), live)]
        inner = [*buffers]  # when the first microbatch's last block begins its backward, the head's is done
        again = 0.0
        for block, count in stage.blocks:
            by_name, missing = self.residuals(block)
            buffers += [Held(h.nbytes, h.number * count * live) for h in by_name.values()]
            there = live - (block.part == "head")
            inner += [Held(h.nbytes, h.number * count * there) for h in by_name.values()]
            again = max(again, missing)
        loss, table = stage.loss(), Held(stage.table())
        # every microbatch's loss adds up a gradient of the head's weight of its own; loops over chunks take turns
        logits = Held(loss.logits, 1 if loss.is_looped else live)
        at_loss = [logits, Held(loss.weight, live), Held(loss.hidden, live), table]
        starting = [Held(self.transient()), table, Held(again / PIECES, PIECES)]
        slots = stage.near_slots
        # the gradient of logits made whole takes the logits' place before the head's gradients are there
        later = [Held(logits.nbytes / 2, logits.number), *at_loss[1:]]
        least = [at_loss] if loss.is_looped else [[logits, table], later]
        return [
            *(_pack(0.0, total(buffers), copies + total(each) - reused([*buffers, *each], slots)) for each in least),
            _pack(loss.weight * live, total(inner), copies + total(starting) - reused([*inner, *starting], slots)),
            _pack(self.before_first(), 0.0, copies + self.transient() + again),
            _pack(stage.gradients + self.reduced(), 0.0, copies),
        ]

    def _of_spans(self, block: BlockCost, held: dict[str, Held]) -> dict[str, Held]:
        """What the loops over an attention's spans gave, beside all of it joined; of one span that is the same."""
        return {
            f"{op.name}: out of spans": Held(self.stage.local(op.output, WIDE))
            for op in block.operations
            if f"{op.name}: out by head 0" in held and len(spans(op.output.shape[1], op.executed < 1)) > 1
        }

    def copies(self) -> float:
        """Bytes of copies of the optimizer's arrays: the fusion that makes the new parameter reads the old moments too,
        so the new ones may not take their places. The copies are made at once; the places are free until the update."""
        return total(self.stage.near_slots)

    def before_first(self) -> float:
        """Bytes of gradients as the backward of the first layer begins: without its own, unless those of other
        microbatches are there."""
        stage = self.stage
        first = next((block for block, _ in stage.blocks if block.part == "layer"), None)
        if first is None or stage.plan.num_microbatches > 1:
            return stage.gradients
        own = sum(value.size / stage.cuts.ways("grad", value) for value in first.parameters)
        return stage.gradients - own * stage.training.gradients

    def transient(self) -> float:
        """Bytes of the largest gradients inside a block, when all that it kept is still there.

        In experts the gradient of what their activation function gave lies where its loop began; those of what it took
        come while the rows that it gave are gone. Each product's loop has, of one expert, the gradient of its weights
        three times: where it starts, the sum, and what is added to it.
        """
        stage = self.stage
        dense = (op.output for op in stage.operations() if op.kind == "elementwise" and op.saved)
        most = max((stage.local(out, stage.training.keeps.stream) for out in dense if not out.choices), default=0.0)
        for block, _ in stage.blocks:
            # what an earlier program left stays to the end of this one
            stays = stage.plan.schedule is not None and stage.itemsize == WIDE and stage.mode(block) == "none"
            bent = set()
            for op in block.operations:
                if not op.is_of_experts:
                    continue
                if op.kind == "elementwise":
                    bent.add(op.output.name)
                    most = max(most, (len(op.inputs) - (not stays)) * stage.local(op.output, WIDE))
                elif op.kind == "product" and op.inputs[0].name in bent:
                    width, inner = op.output.shape[-1], op.inputs[0].shape[-1]
                    rows = min(ROWS, stage.local(op.output, 1) / width)
                    loop = (3 * width * inner + rows * inner) * WIDE
                    most = max(most, stage.local(op.output, WIDE) + loop)
        return most

    def reduced(self) -> float:
        """Bytes of gradients summed over devices, as the update takes them: one collective sums all of them, so that
        none of its operands can be let go before."""
        stage = self.stage
        return stage.bytes_of("state", stage.training.gradients) if stage.cuts.batch_ways > 1 else 0.0

    def residuals(self, block: BlockCost) -> tuple[dict[str, Held], float]:
        """(what a block leaves for its backward, bytes of it that are computed again)."""
        stage, mode = self.stage, self.stage.mode(block)
        whole = kept_by_block(block, stage.cuts, stage.samples, stage.itemsize)
        if mode == "none":
            return whole, 0.0
        starts = kept_by_recompute(block, stage.cuts, stage.samples, stage.itemsize, stage.stream_itemsize)
        if mode == "full":
            saved = starts
        else:
            part = kept_by_block(block, stage.cuts, stage.samples, stage.itemsize, PARTS[mode])
            inputs = {name: h for name, h in stage.residuals(block).items() if name not in part}
            again = {f"{op.name}: " for op in block.operations if op.part in PARTS[mode]}
            saved = {**part, **inputs, **{n: h for n, h in starts.items() if n.startswith(tuple(again))}}
        missing = total(h for name, h in whole.items() if name not in saved and _START not in name)
        missing += total(self._weights_of(block, again=True))
        return saved, missing + attention_again(block, stage.cuts, stage.samples)

    def inputs(self) -> float:
        """Bytes of a microbatch as the model takes it."""
        stage = self.stage
        first = next((block.operations[0].inputs[0] for block, _ in stage.blocks if block.part == "embed"), None)
        return stage.local(first, first.itemsize or WIDE) if first else 0.0

    def weights(self, blocks: Iterable[tuple[BlockCost, int]]) -> list[Held]:
        """Weights as products read them, from forward to backward: not of what is computed again."""
        return [Held(h.nbytes, h.number * count) for block, count in blocks for h in self._weights_of(block)]

    def _weights_of(self, block: BlockCost, again: bool = False) -> Iterator[Held]:
        """A block's weights as the products read them that are computed again, or that are not: in float32 where they
        are kept in fewer bits, in other layouts for convolutions. Of weights that are kept in pieces those that the
        backward does not gather again: what the head reads, and the first product."""
        stage, mode = self.stage, self.stage.mode(block)
        products = [op for op in block.operations if op.kind in ("convolution", "product")]
        first = products[0].weights if products else ()
        read = {
            name
            for op in products
            if (mode == "full" or op.part in PARTS.get(mode, ())) is again
            for name in op.weights
        }
        for value in block.parameters:
            if value.name not in read:
                continue
            whole, pieces = stage.cuts.ways("use", value), stage.cuts.ways("param", value)
            nbytes = value.size / whole * WIDE
            if len(value.shape) == CONVOLUTION:
                # that of the forward, and turned round for the input's gradient, if there is anything to turn
                yield Held(nbytes, 2 if math.prod(value.shape[2:]) > 1 else 1)
            elif len(value.shape) > 1 and whole < pieces:
                if value.name in first or block.part != "layer":
                    yield Held(nbytes)
            elif len(value.shape) > 1 and stage.itemsize < WIDE:
                yield Held(nbytes)

    def scratch(self, chunk: Piece) -> float:
        """Bytes that the backward of a pipeline's chunk works in, at the block where that is most: what is made of what
        blocks left waits for nothing, and goes as their backwards end, the last block's first."""
        stage = self.stage
        extra = sum(count * self._extra(block) for block, count in chunk) + total(self.weights(chunk))
        table = stage.table() if any(stage.mode(block) != "none" for block, _ in chunk) else 0.0
        most, transient = 0.0, self.transient()
        for block, count in reversed(chunk):
            after = self._after_again(block)
            if after is None:
                most = max(most, extra + self.residuals(block)[1] + transient)
            else:  # what lies behind the part that is computed again has had its backward
                gone = self._extra(after) + total(self._weights_of(after))
                most = max(most, extra + transient, extra - gone + self.residuals(block)[1])
            extra -= count * self._extra(block) + total(self.weights([(block, count)]))
        return most + table

    def _after_again(self, block: BlockCost) -> BlockCost | None:
        """What of a block comes behind its last operation that is computed again, if only parts of it are."""
        parts = PARTS.get(self.stage.mode(block))
        places = [at for at, op in enumerate(block.operations) if op.part in (parts or ())]
        behind = block.operations[places[-1] + 1 :] if places else ()
        return replace(block, name=f"{block.name} behind", operations=behind) if places else None

    def of_weights(self, chunk: Piece) -> float:
        """Bytes that the second part of a chunk's backward works in: what went into products, turned round; gradients
        of what norms gave in float32, and of what products gave, for the weights and again for their bias."""
        stage, nbytes = self.stage, 0.0
        for block, count in chunk:
            vectors = {value.name for value in block.parameters if len(value.shape) == 1}
            for op in block.operations:
                if op.kind == "norm":
                    nbytes += count * stage.local(op.output, WIDE)
                if op.kind != "product" or "vocab" in op.output.dims:
                    continue
                nbytes += count * sum(stage.local(value, stage.itemsize) for value in op.inputs)
                if stage.itemsize < WIDE:
                    nbytes += count * stage.local(op.output, WIDE) * (2 if vectors.intersection(op.weights) else 1)
        return nbytes

    def _extra(self, block: BlockCost) -> float:
        """Bytes that a chunk's backward makes of what its forward left: other layouts, wider elements, parts of
        derivatives. They wait for nothing, so they are there for all blocks at once."""
        left, nbytes = self.stage.residuals(block), 0.0
        # what the activation functions of experts share with their derivatives is left by the forward
        experts = tuple(f"{op.name}: shared" for op in block.operations if op.is_of_experts)
        for name, buffer in self.residuals(block)[0].items():
            if experts and name.startswith(experts):
                continue
            have = left[name].nbytes if name in left else 0.0
            # attention's output is left by heads too
            nbytes += buffer.nbytes * buffer.number if have < buffer.nbytes and "out by head" not in name else 0.0
        return nbytes


def _pack(*moment: float) -> tuple[float, float, float]:
    gradients, activations, workspace = (nbytes * PACKING for nbytes in moment)
    return gradients, activations, workspace
