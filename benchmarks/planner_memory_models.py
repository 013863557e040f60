"""Models of benchmarks/planner_memory.py that no configuration file describes: a decoder with experts; Graphs of the
vision models, from their dimensions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme.mesh import Strategy
from polyreme.models.gpt import Attention, GPTConfig
from polyreme.nn import Embedding, Layer, LayerList, LayerNorm, Linear
from polyreme.nn import functional as F
from polyreme.ops.layout import constrain
from polyreme.planner.graph import BlockCost, ModelGraph, OperationCost, Value
from polyreme.planner.model_shape import ModelShape


class Experts(Layer):
    """Every expert works on every token, weighted by a softmax router: the dense form of a mixture of experts."""

    def __init__(self, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.router = Linear(hidden, experts, bias_attr=False, dims=("embed", None))
        self.up = self.create_parameter([experts, hidden, ffn])
        self.down = self.create_parameter([experts, ffn, hidden])
        self.up.dims, self.down.dims = ("expert", "embed", "ffn"), ("expert", "ffn", "embed")

    def forward(self, x_bse: Any) -> Any:
        gates_bsx = F.softmax(self.router(x_bse), axis=-1)
        routed = x_bse.unsqueeze(2) * gates_bsx.unsqueeze(3)
        routed = constrain(routed, "batch", "block_seq", "expert", None).transpose([2, 0, 1, 3])
        count, batch, seq, hidden = routed.shape
        inner = F.gelu(routed.reshape([count, batch * seq, hidden]).matmul(self.up), approximate=True)
        out = inner.matmul(self.down).reshape([count, batch, seq, hidden])
        return constrain(out.sum(0), "batch", "seq", "embed")


class SparseDecoder(Layer):
    """GPT's decoder with Experts in the place of its feed-forward; (tokens, labels) -> mean cross-entropy."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        config = GPTConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            num_layers=shape.layers,
            num_heads=shape.heads,
            seq_len=shape.seq,
        )
        self.tokens = Embedding(shape.vocab, shape.hidden, dims=("vocab", "embed"))
        self.positions = Embedding(shape.seq, shape.hidden, dims=(None, "embed"))
        self.attention = LayerList([Attention(config) for _ in range(shape.layers)])
        self.experts = LayerList([Experts(shape.hidden, shape.expert_ffn, shape.experts) for _ in range(shape.layers)])
        self.norms = LayerList([LayerNorm(shape.hidden) for _ in range(2 * shape.layers)])
        self.norm = LayerNorm(shape.hidden)

    def forward(self, tokens: Any, labels: Any) -> Any:
        x = constrain(self.tokens(tokens) + self.positions.weight, "batch", "seq", "embed")
        for at, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            x = x + attention(self.norms[2 * at](x))
            x = constrain(x + experts(self.norms[2 * at + 1](x)), "batch", "seq", "embed")
        return F.fused_linear_cross_entropy(self.norm(x), self.tokens.weight, labels, transpose_weight=True)


def experts_over_ep() -> Strategy:
    """Experts split over ep; outside them the devices of that axis hold the same samples."""
    return Strategy(param={"expert": ("ep",)}, act={"expert": ("ep",)})


def sparse_graph(shape: ModelShape) -> ModelGraph:
    """The Graph of SparseDecoder: the decoder's, every expert taking every token, which is weighted before it."""
    graph = dataclasses.replace(shape, experts_per_token=shape.experts, tied=True).graph()
    return dataclasses.replace(graph, blocks=tuple(map(_weighted_first, graph.blocks)))


def _weighted_first(block: BlockCost) -> BlockCost:
    operations = tuple(dataclasses.replace(op, saved=()) if op.name == "combine" else op for op in block.operations)
    return dataclasses.replace(block, operations=operations)


# vision

_FLOAT = 4


def _act(name: str, *shape: int, itemsize: int = 0) -> Value:
    return Value(name, ("batch", *[None] * len(shape)), (1, *shape), itemsize)


def _weight(name: str, *shape: int) -> Value:
    return Value(name, (None,) * len(shape), shape)


def vit_graph(image: int, patch: int, width: int, depth: int, heads: int, classes: int) -> ModelGraph:
    """The Graph of polyreme.vision.models.VisionTransformer."""
    tokens = (image // patch) ** 2 + 1
    blocks = (
        _vit_embed(image, patch, width, tokens),
        _vit_block(width, tokens, heads, depth),
        _vit_head(width, tokens, classes),
    )
    return ModelGraph("vit", blocks)


def _vit_embed(image: int, patch: int, width: int, tokens: int) -> BlockCost:
    pixels, cut = _act("pixels", 3, image, image), _act("patches", tokens - 1, width)
    weights = (_weight("patch", width, 3, patch, patch), _weight("patch_bias", width))
    rest = (_weight("class", 1, 1, width), _weight("positions", 1, tokens, width))
    flops = 2.0 * (tokens - 1) * width * 3 * patch * patch
    return BlockCost(
        "embedding",
        "embed",
        (
            OperationCost("convolution", "patch", (pixels,), cut, ("patch", "patch_bias"), flops, ("pixels",)),
            OperationCost("elementwise", "place", (cut,), _act("placed", tokens, width), ("class", "positions")),
        ),
        (*weights, *rest),
    )


def _linear(name: str, x: Value, out: Value, ins: int, outs: int) -> tuple[OperationCost, tuple[Value, ...]]:
    flops = 2.0 * x.size * outs
    names = (name, f"{name}_bias")
    return (
        OperationCost("product", name, (x,), out, names, flops, (x.name,)),
        (_weight(name, ins, outs), _weight(names[1], outs)),
    )


def _norm(name: str, x: Value, width: int) -> tuple[OperationCost, tuple[Value, ...]]:
    names = (name, f"{name}_bias")
    op = OperationCost("norm", name, (x,), dataclasses.replace(x, name=f"{name}_out"), names, saved=(x.name,))
    return op, (_weight(name, width), _weight(names[1], width))


def _vit_block(width: int, tokens: int, heads: int, depth: int) -> BlockCost:
    x, mixed = _act("x", tokens, width), Value("mixed", ("batch", None, None, None), (1, tokens, heads, width // heads))
    sums = _act("log_sums", heads, tokens, itemsize=_FLOAT)
    norm1, own1 = _norm("norm1", x, width)
    qkv, own2 = _linear("qkv", norm1.output, _act("qkv", tokens, 3 * width), width, 3 * width)
    flops = 4.0 * tokens**2 * width
    attend = OperationCost(
        "attention", "attention", (qkv.output, sums), mixed, (), flops, ("qkv", "mixed", "log_sums"), part="core_attn"
    )
    proj, own3 = _linear("proj", mixed, _act("proj_out", tokens, width), width, width)
    join = OperationCost("elementwise", "join", (x, proj.output), _act("joined", tokens, width))
    norm2, own4 = _norm("norm2", join.output, width)
    up, own5 = _linear("fc1", norm2.output, _act("up", tokens, 4 * width), width, 4 * width)
    bend = OperationCost("elementwise", "gelu", (up.output,), _act("bent", tokens, 4 * width), saved=("up",))
    down, own6 = _linear("fc2", bend.output, _act("fc2_out", tokens, width), 4 * width, width)
    last = OperationCost("elementwise", "join2", (join.output, down.output), _act("left", tokens, width))
    operations = (norm1, qkv, attend, proj, join, norm2, up, bend, down, last)
    return BlockCost("layer", "layer", operations, (*own1, *own2, *own3, *own4, *own5, *own6), depth)


def _vit_head(width: int, tokens: int, classes: int) -> BlockCost:
    norm, embedding_parameters = _norm("norm", _act("hidden", tokens, width), width)
    first = dataclasses.replace(norm.output, name="first", shape=(1, 1, width))
    take = OperationCost("elementwise", "take", (norm.output,), first)
    head, more = _linear("head", first, _act("logits", 1, classes), width, classes)
    loss = OperationCost("loss", "loss", (head.output,), _act("loss", 1, itemsize=_FLOAT), saved=("logits",))
    return BlockCost("head", "head", (norm, take, head, loss), (*embedding_parameters, *more))


def resnet_graph(stages: tuple[int, ...], image: int, classes: int, bottleneck: bool) -> ModelGraph:
    """The Graph of polyreme.vision.models.ResNet; every residual block is a Block of its own."""
    side, made = image // 2, _Convolutions()
    stem = made.conv("stem", _act("pixels", 3, image, image), 64, 7, side, "stem_")
    pooled = _act("pooled", 64, side // 2, side // 2)
    made.operations.append(OperationCost("elementwise", "pool", (stem,), pooled, saved=(stem.name,)))
    blocks, x, side = [made.block("stem", "embed")], pooled, side // 2
    for stage, count in enumerate(stages):
        planes, stride = 64 * 2**stage, 1 if stage == 0 else 2
        side = -(-side // stride)
        first = _residual(f"stage{stage}", x, planes, side, bottleneck)
        blocks.append(first)
        x = dataclasses.replace(first.operations[-1].output, name="x")
        if count > 1:
            blocks.append(
                dataclasses.replace(_residual(f"rest{stage}", x, planes, side, bottleneck), repeats=count - 1)
            )
    mean = _act("mean", 1, x.shape[1])
    head, own = _linear("fc", mean, _act("logits", 1, classes), x.shape[1], classes)
    loss = OperationCost("loss", "loss", (head.output,), _act("loss", 1, itemsize=_FLOAT), saved=("logits",))
    pool = OperationCost("elementwise", "mean", (x,), mean)
    return ModelGraph("resnet", (*blocks, BlockCost("head", "head", (pool, head, loss), own)))


class _Convolutions:
    """Convolutions with their batch norms and ReLUs, collected."""

    def __init__(self) -> None:
        self.operations: list[OperationCost] = []
        self.parameters: list[Value] = []

    def conv(self, name: str, x: Value, planes: int, size: int, side: int, after: str, bend: bool = True) -> Value:
        """-> what the ReLU (or, without, the norm) gives."""
        out = _act(f"{after}conv", planes, side, side)
        weight = _weight(f"{name}_weight", planes, x.shape[1], size, size)
        flops = 2.0 * planes * side * side * x.shape[1] * size * size
        self.operations.append(OperationCost("convolution", name, (x,), out, (weight.name,), flops, (x.name,)))
        gains = (_weight(f"{name}_scale", planes), _weight(f"{name}_shift", planes))
        normed = dataclasses.replace(out, name=f"{after}norm")
        self.operations.append(
            OperationCost("norm", f"{name}_norm", (out,), normed, tuple(g.name for g in gains), saved=(out.name,))
        )
        self.parameters += [weight, *gains]
        if not bend:
            return normed
        bent = dataclasses.replace(out, name=f"{after}bent")
        self.operations.append(OperationCost("elementwise", f"{name}_relu", (normed,), bent))
        return bent

    def block(self, name: str, part: Any, repeats: int = 1) -> BlockCost:
        return BlockCost(name, part, tuple(self.operations), tuple(self.parameters), repeats)


def _residual(name: str, x: Value, planes: int, side: int, bottleneck: bool) -> BlockCost:
    convolutions, outputs = _Convolutions(), planes * (4 if bottleneck else 1)
    x = dataclasses.replace(x, name="x")
    if bottleneck:
        inner = convolutions.conv(f"{name}_a", x, planes, 1, x.shape[2], "a_")
        inner = convolutions.conv(f"{name}_b", inner, planes, 3, side, "b_")
        out = convolutions.conv(f"{name}_c", inner, outputs, 1, side, "c_", bend=False)
    else:
        inner = convolutions.conv(f"{name}_a", x, planes, 3, side, "a_")
        out = convolutions.conv(f"{name}_b", inner, outputs, 3, side, "b_", bend=False)
    way = x
    if x.shape[1] != outputs or x.shape[2] != side:
        way = convolutions.conv(f"{name}_way", x, outputs, 1, side, "way_", bend=False)
    left = dataclasses.replace(out, name="left")
    convolutions.operations.append(OperationCost("elementwise", f"{name}_join", (way, out), left))
    return convolutions.block(name, "layer")
