"""A step of fine-tuning as the planner sees it: what trains, rows of a sample, logits, adapters, a teacher beside."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from polyreme.mesh import Plan
from polyreme.planner import Memory, ModelGraph, Training
from polyreme.planner.graph import Value, beside_adapters
from polyreme.planner.memory_stage import MOMENTS, WIDE, Stage
from polyreme.planner.sharding import cuts_of, stage_pieces
from polyreme.recipes.estimate import shape_of
from polyreme.recipes.finetune_config import FinetuneConfig

CODE_BYTES = {"nf4": 0.5 + 4 / 64, "int4": 0.5, "int8": 1.0}
"""Bytes of a weight stored in few bits; nf4 has a float32 scale for every 64 (arXiv:2305.14314, section 3)."""

_MAPS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
         "down_proj": "down"}  # fmt: skip
"""Operations of the planner's graph by the names at the end of published linear maps."""

LABELS = 5
"""Arrays of float32 as large as a teacher's logits that a loss of soft labels makes beside the student's logits: the
teacher's, their softened logarithms and probabilities, the student's logarithms, and those of the tokens' own cost."""


def tuning_graph(config: FinetuneConfig, attention: str = "fused") -> ModelGraph:
    """The model that trains: of one whose first blocks are frozen those above; of adapters, products as frozen ones.
    Over pipeline stages, whose chunks all run backwards, all blocks. With what lies beside it: with_besides."""
    shape = shape_of(config.dimensions)
    if config.fine_tuning == "freeze" and config.plan.pp == 1:
        shape = replace(shape, layers=min(config.freeze_trainable_layers, shape.layers))
    graph = replace(_scored(config, shape.graph(attention)), besides=functools.partial(with_besides, config))
    if config.fine_tuning != "lora" or config.lora_target == ["all"]:
        return graph
    return beside_adapters(graph, [_MAPS.get(name, name) for name in config.lora_target])


def _scored(config: FinetuneConfig, graph: ModelGraph) -> ModelGraph:
    """The graph, whose last block gives a score of each row and no logits where the stage's loss reads hidden values;
    the head's weight lies there even so."""
    loss = config.record.loss
    if loss is None or getattr(loss.load(), "reads", "logits") != "hidden":
        return graph
    *blocks, head = graph.blocks
    score = Value("score", ("batch", None), (1, 1), itemsize=WIDE)
    operations = tuple(
        replace(op, inputs=(score,), is_whole=True)
        if op.kind == "loss"
        else replace(op, name="score", output=score, weights=(), flops=2.0 * op.inputs[0].shape[-1])
        if op.output.name == "logits"
        else op
        for op in head.operations
    )
    return replace(graph, blocks=(*blocks, replace(head, operations=operations)))


def rows_of(config: FinetuneConfig) -> int:
    """Rows of tokens of a step: a sample of preferences has two."""
    model = config.dimensions
    return config.train.global_batch * config.samples.tokens(model) // model.seq_len


def training_of_tuning(config: FinetuneConfig, training: Training) -> Training:
    """The Training of a fine-tuning step, given that of pretraining with the same settings: a loss of the stage's own
    has all logits at once, in float32."""
    if config.record.loss is not None:
        training = replace(training, keeps=replace(training.keeps, logits=WIDE))
    if config.fine_tuning != "lora":
        return training
    maps = set(config.lora_target)
    of_attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    return replace(training, trains="adapters", adapted="attention" if maps <= of_attention else "all")


def with_besides(
    config: FinetuneConfig, plan: Plan, stages: tuple[Memory, ...], training: Training
) -> tuple[Memory, ...]:
    """Memory of each stage with what a graph does not hold: adapters and their state, weights in few bits, frozen
    blocks, and, where the loss is computed, a teacher with its soft labels."""
    shape = shape_of(config.dimensions)
    graph = shape.graph()
    result = []
    for stage, chunks in zip(stages, stage_pieces(graph, plan, training.cut), strict=True):
        whole = Stage(graph, plan, rows_of(config), training, chunks)
        parameters, gradients, optimizer = whole.parameters, stage.gradients, stage.optimizer
        if config.fine_tuning == "lora":
            count = sum(n * _adapter_size(config, value) for value, n in _maps(whole, config.lora_target))
            parameters += count * whole.kept_itemsize
            gradients += count * training.gradients
            optimizer += count * WIDE * (MOMENTS + training.master)
        if config.weight_dtype:
            saved = whole.kept_itemsize - CODE_BYTES[config.weight_dtype]
            parameters -= saved * sum(n * v.size / whole.cuts.ways("param", v) for v, n in _maps(whole, ["all"]))
        if config.fine_tuning == "freeze":  # the embedding and the head's norm are frozen too
            trained = replace(shape, layers=min(config.freeze_trainable_layers, shape.layers)).graph()
            part = sum(b.repeats * p.size for b in trained.blocks if b.part == "layer" for p in b.parameters)
            gradients, optimizer = (each * part / trained.num_parameters for each in (gradients, optimizer))
        result.append(replace(stage, parameters=parameters, gradients=gradients, optimizer=optimizer))
    teacher = config.teacher_dimensions
    if teacher is not None:
        last = plan.stage_of_chunk[-1] if plan.schedule else 0
        weights, labels = _teacher(shape_of(teacher).graph(), rows_of(config), plan)
        stage = result[last]
        result[last] = replace(stage, parameters=stage.parameters + weights, workspace=stage.workspace + labels)
    return tuple(result)


def _maps(stage: Stage, names: list[str]) -> Iterator[tuple[Value, int]]:
    """The weights of a stage's linear maps with such names, and how often each is there."""
    wanted = None if names == ["all"] else {_MAPS.get(name, name) for name in names}
    for block, count in stage.blocks:
        if block.part != "layer":
            continue
        products = {w for op in block.operations if op.kind == "product" for w in op.weights}
        for value in block.parameters:
            if value.name in products and len(value.shape) == 2 and (wanted is None or value.name in wanted):
                yield value, count


def _adapter_size(config: FinetuneConfig, value: Value) -> int:
    """Numbers of a map's adapter; DoRA has one more for each output."""
    ins, outs = value.shape
    return config.lora_rank * (ins + outs) + config.use_dora * outs


def _teacher(graph: ModelGraph, rows: int, plan: Plan) -> tuple[float, float]:
    """Bytes of a teacher's weights, in float32, and of its soft labels of a microbatch, on a device."""
    cuts = cuts_of(plan)
    weights = sum(b.repeats * p.size / cuts.ways("param", p) for b in graph.blocks for p in b.parameters)
    logits = next(op.inputs[0] for op in graph.blocks[-1].operations if op.kind == "loss")
    return weights * WIDE, LABELS * cuts.local(logits, rows / plan.num_microbatches) * WIDE
