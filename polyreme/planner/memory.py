"""Bytes on a device of each pipeline stage under a plan: what is kept, what is gathered, and the largest transient.

Parameters, gradients and optimizer state follow from the strategy alone. Activations are counted value by value from
what each operation's backward reads, and the peak is looked for where it can be: at the loss, where every activation
is there; where the backward of the last block begins; at the end, where every gradient is.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Literal, NamedTuple

from polyreme.mesh import Plan
from polyreme.planner.graph import BlockCost, ModelGraph, beside_adapters
from polyreme.planner.memory_cpu import OnProcessor
from polyreme.planner.memory_live import standings
from polyreme.planner.memory_stage import AHEAD, WIDE, Held, Stage, total
from polyreme.planner.prediction import Memory, Training
from polyreme.planner.sharding import Piece, stage_pieces

Compiler = Literal["accelerator", "cpu"]


class Moment(NamedTuple):
    """What a device holds at one time of the step beside parameters and optimizer state."""

    gradients: float
    activations: float
    workspace: float


def memory(
    graph: ModelGraph, plan: Plan, batch: int, training: Training, compiler: Compiler = "accelerator"
) -> tuple[Memory, ...]:
    """Bytes on a device of each pipeline stage, at the time of the step when that stage holds most.

    batch: samples of a step over the whole job. compiler: whose programs they are: "accelerator" keeps what each
    backward reads and no more; "cpu" is XLA's compiler for the processor (memory_cpu.py), with which any plan can be
    verified.

    >>> from polyreme.planner.model_shape import ModelShape
    >>> gpt = ModelShape(hidden=768, layers=12, heads=12, seq=1024, vocab=50304, ffn=3072).graph()
    >>> [stage] = memory(gpt, Plan.from_degrees(sharding=4, sharding_stage=2), 16, Training())
    >>> stage.parameters == 2 * gpt.num_parameters, stage.optimizer == 12 * gpt.num_parameters / 4
    (True, True)
    """
    if training.trains == "adapters":
        graph = _adapted(graph, training.adapted)
    alike: dict[object, Stage] = {}  # most stages of a long pipeline have as many of the same blocks
    result = []
    for at, chunks in enumerate(stage_pieces(graph, plan, training.cut)):
        content = tuple(tuple((block.name, count) for block, count in chunk) for chunk in chunks)
        if content not in alike:
            alike[content] = Stage(graph, plan, batch, training, chunks)
        result.append(_of(alike[content], at, compiler))
    stages = tuple(result)
    return stages if graph.besides is None else graph.besides(plan, stages, training)


@lru_cache(maxsize=64)
def _adapted(graph: ModelGraph, which: Literal["attention", "all"]) -> ModelGraph:
    maps = {
        op.name
        for block in graph.blocks
        for op in block.operations
        if block.part == "layer" and (which == "all" or op.part == "full_attn")
    }
    return beside_adapters(graph, maps)


def _of(stage: Stage, index: int, compiler: Compiler) -> Memory:
    """The parts at the worst moment of a stage in its place of the pipeline."""
    plan = stage.plan
    processor = OnProcessor(stage) if compiler == "cpu" else None
    if plan.schedule is not None:
        moments = _in_pipeline(stage, index, processor)
    else:
        moments = [Moment(*each) for each in processor.moments()] if processor else _on_accelerator(stage)
    if stage.in_flight:
        moments.append(Moment(stage.gradients, 0.0, stage.in_flight + total(stage.near_slots)))
    peak = max(moments, key=sum)
    away: Collection[str] = () if processor else plan.offload
    near = total(stage.slots) * (1 - plan.offload_ratio) if "state" in away else total(stage.near_slots)
    return Memory(
        0.0 if "param" in away else stage.parameters,
        0.0 if "grad" in away else peak.gradients,
        near,
        peak.activations,
        peak.workspace,
    )


def _on_accelerator(stage: Stage) -> list[Moment]:
    """Without a pipeline; several microbatches run one after another and add up their gradients."""
    saved = sum(count * _staying(stage, total(stage.residuals(block).values()), count) for block, count in stage.blocks)
    again = max(stage.again(block) for block, _ in stage.blocks)
    loss, working = stage.loss(), _gather(stage) + _low_copies(stage)
    before = stage.gradients if stage.plan.num_microbatches > 1 else loss.weight
    inside = again + stage.transient() + working
    return [
        Moment(before, saved, loss.logits + loss.hidden + working),
        Moment(before, saved, inside),
        Moment(stage.gradients, 0.0, inside),
    ]


def _staying(stage: Stage, nbytes: float, count: int) -> float:
    """Of what each of count blocks keeps, the part that stays on the device."""
    is_away = stage.training.away or ("act" in stage.plan.offload and stage.plan.recompute == "full")
    return nbytes * min(1.0, AHEAD / count) if is_away else nbytes


def _gather(stage: Stage) -> float:
    """Bytes of parameters that are whole while their block is at work, beyond the pieces that are always there."""
    ways = stage.cuts.ways
    blocks = (
        sum(v.size * (1 / ways("use", v) - 1 / ways("param", v)) for v in block.parameters) for block, _ in stage.blocks
    )
    return AHEAD * max(blocks) * stage.itemsize


def _low_copies(stage: Stage) -> float:
    """Bytes of the matrices as products read them where float32 ones are kept: from forward to backward."""
    if stage.kept_itemsize == stage.itemsize:
        return 0.0
    return sum(n * v.size / stage.cuts.ways("param", v) for v, n in stage.weights if len(v.shape) > 1) * stage.itemsize


def _in_pipeline(stage: Stage, place: int, processor: OnProcessor | None) -> list[Moment]:
    """What forwards leave waits for its backward outside of any program; each program works in scratch of its own."""
    chunks = _of_chunks(stage, processor)
    beside = chunks.beside
    moments = []
    for standing in standings(stage.plan, place):
        activations = sum(n * each for n, each in zip(standing.live, chunks.leaves, strict=True))
        activations += sum(n * each for n, each in zip(standing.waiting, chunks.stash, strict=True))
        if not processor and (stage.training.away or "act" in stage.plan.offload):
            activations = min(activations, AHEAD * max(chunks.leaves))  # others lie in the host's
        work = chunks.forward if standing.kind == "F" else _work(stage, standing.kind, chunks, standing.chunk)
        moments.append(Moment(stage.gradients, activations, work + beside))
    copies = total(stage.near_slots) if processor else 0.0
    return [*moments, Moment(stage.gradients, 0.0, copies)]


class _Chunks(NamedTuple):
    """Bytes that each chunk of a stage leaves, puts off and works in, and works in for gradients of weights that were
    put off; those beside every task; a forward's scratch."""

    leaves: list[float]
    stash: list[float]
    scratch: list[float]
    weights: list[float]
    beside: float
    forward: float


def _of_chunks(stage: Stage, processor: OnProcessor | None) -> _Chunks:
    if stage.of_chunks is None:
        stage.of_chunks = _made_of_chunks(stage, processor)
    return stage.of_chunks


def _made_of_chunks(stage: Stage, processor: OnProcessor | None) -> _Chunks:
    leaves, stash, scratch, weights = [], [], [], []
    for at, chunk in enumerate(stage.chunks):
        is_last = at == len(stage.chunks) - 1
        loss = stage.loss() if is_last else None
        # a loss made by chunks has made its gradients too; one made whole is gone when its backward is
        made = loss.weight + loss.hidden if loss and not stage.training.keeps.logits else 0.0
        leaves.append(_left(stage, chunk) + made)
        stash.append(_put_off(stage, chunk))
        scratch.append(processor.scratch(chunk) if processor else _scratch(stage, chunk))
        weights.append(processor.of_weights(chunk) if processor else 0.0)
    beside = stage.foreign(stage.kept_itemsize) + _gather(stage)
    # of logits that a loop makes, a chunk and its gradient; those made whole are counted with theirs
    copies = 2 if stage.loss().is_looped else 1
    forward = copies * stage.loss().logits + (stage.transient() if processor else 0.0)
    return _Chunks(leaves, stash, scratch, weights, beside, forward)


def _work(stage: Stage, kind: str, chunks: _Chunks, at: int) -> float:
    """Bytes that a task works in. A backward that is cut makes its stash with the attention's part of the scratch; the
    rest is the weights'. A chunk that begins with the embedding has no input gradients: all of it is the weights'."""
    stash, scratch = chunks.stash[at], chunks.scratch[at]
    if not stage.plan.schedule_kind.split_backward:
        return scratch
    if kind == "W":
        return chunks.weights[at] if stash else scratch
    return stash + (scratch * _OF_ATTENTION if stash else 0.0)


_OF_ATTENTION = 0.55
"""Share of a backward's scratch that the first part of one cut in two works in: 18 of 32 units of a GPT, 11.5 of 24 of
a LLaMA with grouped heads, read off their programs."""


def _scratch(stage: Stage, chunk: Piece) -> float:
    return stage.transient() + max((stage.again(block) for block, _ in chunk), default=0.0) + _low_copies(stage)


def _left(stage: Stage, chunk: Piece) -> float:
    """Bytes that a forward of a chunk leaves for its backward."""
    nbytes = 0.0
    for block, count in chunk:
        saved = stage.residuals(block)
        if block.part == "head":
            # the loss makes its gradients at once, and the normed hidden values are not read again
            saved = {name: held for name, held in saved.items() if not name.endswith("norm_out")}
        more = 0.0
        if stage.training.keeps.shapes and stage.mode(block) != "full":
            more = _twice(block, saved) + _of_experts(stage, block)
        nbytes += count * (total(saved.values()) + more)
    return nbytes


def _of_experts(stage: Stage, block: BlockCost) -> float:
    """Bytes that the one operation of a block's experts leaves besides: what their activation functions share with
    their derivatives; weights that a map over their devices hands on; what comes back to tokens, in float32."""
    experts = (op for op in block.operations if op.is_of_experts and op.kind == "elementwise")
    parts = sum(len(op.shared) * stage.local(op.output, stage.itemsize) for op in experts)
    split = (v.size / stage.cuts.ways("use", v) for v in block.parameters if "expert" in v.dims)
    ways = stage.cuts.degree(stage.plan.expert_axes)
    came_back = (
        stage.cuts.returned(value, stage.samples) * WIDE - stage.local(value, stage.itemsize)
        for op in block.operations
        if op.kind == "route"
        for value in op.inputs
        if value.choices
    )
    return parts + sum(came_back) + (sum(split) * stage.itemsize if ways > 1 else 0.0)


def _twice(block: BlockCost, saved: dict[str, Held]) -> float:
    """Bytes of values that two operations keep in shapes of their own: attention's output, by heads and joined; a
    gate's activation, which the graph has in one operation with the product."""
    nbytes = 0.0
    for op in block.operations:
        if op.output.name not in saved:
            continue
        if op.kind == "attention":
            nbytes += saved[op.output.name].nbytes
        elif op.kind == "elementwise" and op.saved and set(op.saved) <= set(saved):
            nbytes += (sum(value.itemsize != 1 for value in op.inputs) - 1) * saved[op.output.name].nbytes
    return nbytes


def _put_off(stage: Stage, chunk: Piece) -> float:
    """Bytes that a backward cut in two leaves for the weights: gradients of what each operation with weights gives."""
    if not stage.plan.schedule_kind.split_backward or any(block.part == "embed" for block, _ in chunk):
        return 0.0
    wide = max(stage.itemsize, stage.training.keeps.stream)
    return sum(
        n * stage.local(op.output, wide if op.kind == "norm" else stage.itemsize)
        for block, n in chunk
        for op in block.operations
        if op.weights and op.kind != "loss" and "vocab" not in op.output.dims
    )
