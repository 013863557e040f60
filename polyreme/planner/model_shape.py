"""A transformer from its dimensions: what a configuration file, or a row of published runs, says of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from polyreme.errors import ConfigError, did_you_mean
from polyreme.mesh import nearest_divisor
from polyreme.planner.graph import BlockCost, Kind, ModelGraph, OperationCost, Part, Value

_Part = Callable[..., Value]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder, or of an encoder that restores words.

    ffn: width of the feed-forward; gated: with three matrices (SwiGLU) instead of two. kv_heads: of grouped-query
    attention, heads if 0; head_dim: hidden / heads if 0. experts: of each layer's feed-forward, of which
    experts_per_token work on a token; 0 for dense. expert_ffn: their width, ffn if 0; shared_experts: that work on
    every token besides; tokens_per_expert: of a sequence, where experts choose as many, else 0; dense_layers: first
    layers that have the dense feed-forward even so. biases, learned_positions, tied: as in GPT-2; rms_norm: as in
    LLaMA; norm_weights: whether norms of the residual stream have any. norm_places: whether attention and feed-forward
    take normed input ("before"), give normed output ("after") or both ("around"), or the sum with either is normed
    ("sum"). qk_norm: queries and keys are normed, head by head, or all heads together if whole_qk_norm. qkv_bias:
    theirs and the values' projections have biases, whatever `biases` says; expert_biases: the router and the experts'
    maps have some; expert_reach: share of the experts' devices that a token's are chosen on, where that is limited;
    sinks: each head has a number that takes part in the softmax. attention_bias: whether attention has those that
    `biases` says; head_bias: the output projection has one. shared_norm: attention and feed-forward read one norm.
    embedding_norm: embeddings are normed. spare_positions: rows of the table of positions beside those of places.
    shared_gate: the shared experts have a gate for each token. dropout: whether masks are drawn. kv_rank: above 0 keys
    and values come from a latent of that width and of rope_head_dim numbers that all heads share, and queries from one
    of width q_rank, if that is above 0; v_head_dim: of a value, head_dim if 0. ahead: modules that predict one token
    further each, of a layer and the output projection. document: tokens of a packed row that attend to each other, on
    the mean; 0: all of the row. sees_all: whether a token attends to those after it too. token_types: rows of a table
    of kinds of tokens. asked: places of a sequence whose words are predicted, by a head that maps, bends and norms them
    first; 0: all are.

    Raises ConfigError for a dimension below 1 and for heads that do not divide.
    """

    hidden: int
    layers: int
    heads: int
    seq: int
    vocab: int
    ffn: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    tokens_per_expert: int = 0
    dense_layers: int = 0
    biases: bool = True
    learned_positions: bool = True
    tied: bool = True
    rms_norm: bool = False
    norm_weights: bool = True
    norm_places: Literal["before", "after", "around", "sum"] = "before"
    qk_norm: bool = False
    whole_qk_norm: bool = False
    qkv_bias: bool = False
    expert_biases: bool = False
    expert_reach: float = 1.0
    sinks: bool = False
    attention_bias: bool = True
    head_bias: bool = False
    shared_norm: bool = False
    embedding_norm: bool = False
    spare_positions: int = 0
    shared_gate: bool = False
    dropout: bool = False
    kv_rank: int = 0
    q_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    ahead: int = 0
    document: int = 0
    sees_all: bool = False
    token_types: int = 0
    asked: int = 0
    name: str = "transformer"

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "heads", "seq", "vocab", "ffn"):
            if getattr(self, field) < 1:
                raise ConfigError(f"model {self.name!r}: {field}={getattr(self, field)}; give at least 1")
        for field in (
            "kv_heads",
            "head_dim",
            "experts",
            "experts_per_token",
            "expert_ffn",
            "shared_experts",
            "tokens_per_expert",
            "dense_layers",
            "kv_rank",
            "q_rank",
            "rope_head_dim",
            "v_head_dim",
            "ahead",
            "document",
            "token_types",
            "asked",
        ):
            if getattr(self, field) < 0:
                raise ConfigError(f"model {self.name!r}: {field}={getattr(self, field)}; give at least 0")
        if not self.head_dim and self.hidden % self.heads:
            raise ConfigError(
                f"model {self.name!r}: hidden={self.hidden} does not divide into heads={self.heads}; give head_dim, or "
                f"heads={nearest_divisor(self.hidden, self.heads)}"
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model {self.name!r}: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; make kv_heads "
                f"{nearest_divisor(self.heads, self.kv_heads)}"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"model {self.name!r}: experts_per_token={self.experts_per_token} of experts={self.experts}; give 1 to "
                f"{self.experts}"
            )
        object.__setattr__(self, "expert_ffn", (self.expert_ffn or self.ffn) if self.experts else 0)

    def graph(self, attention: str = "fused") -> ModelGraph:
        """The model's operations. attention: "fused" never stores the scores, "plain" is products and a softmax.

        >>> shape = ModelShape(hidden=768, layers=12, heads=12, seq=1024, vocab=50257, ffn=3072)
        >>> shape.graph().num_parameters
        124439808
        """
        return _graph(self, attention)

    @property
    def num_parameters(self) -> int:
        """Trained numbers, embeddings included."""
        return self.graph().num_parameters

    @property
    def score_width(self) -> int:
        """Numbers of a query and of a value, all heads together: a token's scores and their sum take 2 FLOP for each of
        them and each key."""
        return self.heads * (self.head_dim + self.v_head_dim)

    @property
    def num_active_parameters(self) -> int:
        """Those of them that work on a token: without the experts that it does not choose."""
        sparse = self.layers - min(self.dense_layers, self.layers) if self.experts else 0
        maps = 3 if self.gated else 2
        biases = (maps - 1) * self.expert_ffn + self.hidden if self.expert_biases else 0
        idle = (self.experts - self.experts_per_token) * (maps * self.hidden * self.expert_ffn + biases)
        return self.num_parameters - idle * (sparse + (self.ahead if self.experts else 0))


@lru_cache(maxsize=4096)
def _graph(shape: ModelShape, attention: str) -> ModelGraph:
    if attention not in ("fused", "plain"):
        raise ConfigError(
            f"attention {attention!r} of model {shape.name!r}{did_you_mean(attention, ('fused', 'plain'))}"
        )
    sparse = shape.layers - min(shape.dense_layers, shape.layers) if shape.experts else 0
    attend = _fuse if attention == "fused" else _plain
    layers = [
        _layer(shape, attend, name, count, feed)
        for name, count, feed in (
            ("layer", shape.layers - sparse, _dense),
            ("sparse_layer", sparse, _sparse),
        )
        if count
    ]
    ahead = [_ahead(shape, attend, number) for number in range(shape.ahead)]
    return ModelGraph(shape.name, (_embedding(shape), *layers, _head(shape, ahead)), shape.tied, shape.seq)


class _BlockBuilder:
    """Collects a block's operations and parameters."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.operations: list[OperationCost] = []
        self.parameters: list[Value] = []

    def value(self, name: str, *dims: str | None, last: int = 0, itemsize: int = 0) -> Value:
        """An activation whose sizes follow from its dims; last: size of a last dim without a name."""
        shape = self.shape
        sizes = {
            "batch": 1,
            "seq": shape.seq,
            "block_seq": shape.seq,
            "embed": shape.hidden,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "ffn": shape.ffn,
            "vocab": shape.vocab,
            None: last,
        }
        return Value(name, dims, tuple(sizes[dim] for dim in dims), itemsize)

    def residual(self, name: str) -> Value:
        """A value of the residual stream."""
        return self.value(name, "batch", "seq", "embed")

    def weight(self, name: str, dims: tuple[str | None, ...], sizes: tuple[int, ...]) -> str:
        """A parameter of the block; -> its name."""
        self.parameters.append(Value(name, dims, sizes))
        return name

    def add(self, kind: Kind, name: str, inputs: Sequence[Value], output: Value, **rest: Any) -> Value:
        """An operation; -> its output. What an elementwise one does to each input is shared with its backward where
        that reads inputs or a mask: the first in float32, others in the compute dtype."""
        saved = rest.get("saved")
        if kind == "elementwise" and saved and output.name not in saved:
            count = sum(value.itemsize != 1 for value in inputs)
            rest["shared"] = (4, *[0] * (count - 1))
        self.operations.append(OperationCost(kind, name, tuple(inputs), output, **rest))
        return output

    def linear(
        self, name: str, x: Value, output: Value, ins: tuple[str, int], outs: tuple[str | None, int], part: Part = ""
    ) -> Value:
        """x times a weight [ins, outs], plus a bias where the model has them."""
        (from_dim, from_size), (to_dim, to_size) = ins, outs
        weights = [self.weight(name, (from_dim, to_dim), (from_size, to_size))]
        has_bias = self.shape.biases and (self.shape.attention_bias or name not in ("q", "k", "v", "qkv", "out"))
        if has_bias or (self.shape.qkv_bias and name in ("q", "k", "v")):
            weights.append(self.weight(f"{name}_bias", (to_dim,), (to_size,)))
        flops = 2.0 * self.shape.seq * from_size * to_size
        return self.add(
            "product",
            name,
            [x],
            output,
            weights=tuple(weights),
            flops=flops,
            saved=(x.name,),
            contracted=from_dim,
            part=part,
        )

    def head_norm(self, x: Value) -> Value:
        """RMSNorm of each head's queries or keys, or of all heads'."""
        heads = {"q": self.shape.heads, "k": self.shape.kv_heads}[x.name] if self.shape.whole_qk_norm else 1
        weight = self.weight(f"{x.name}_norm", ("embed",), (heads * self.shape.head_dim,))
        out = replace(x, name=f"{x.name}_normed")
        return self.add(
            "norm", f"{x.name}_norm", [x], out, weights=(weight,), saved=(x.name,), part="full_attn", unfused=8.0
        )

    def latent(self, name: str, x: Value, ins: int, width: int, rank: int) -> Value:
        """x to `width` numbers a token, of which the first `rank` are normed; -> those."""
        weight = self.weight(name, ("embed", "latent"), (ins, width))
        narrow = self.value(name, "batch", "seq", None, last=width)
        flops = 2.0 * self.shape.seq * ins * width
        rest: dict[str, Any] = {"contracted": "embed", "part": "full_attn"}
        self.add("product", name, [x], narrow, weights=(weight,), flops=flops, saved=(x.name,), **rest)
        gain = self.weight(f"{name}_norm", ("embed",), (rank,))
        out = self.value(f"{name}_normed", "batch", "seq", None, last=rank)
        return self.add(
            "norm", f"{name}_norm", [narrow], out, weights=(gain,), saved=(name,), part="full_attn", unfused=8.0
        )

    def norm(self, name: str, x: Value) -> Value:
        """LayerNorm or RMSNorm of the residual stream."""
        hidden = self.shape.hidden
        weights = [self.weight(name, ("embed",), (hidden,))] if self.shape.norm_weights else []
        if weights and not self.shape.rms_norm:
            weights.append(self.weight(f"{name}_bias", ("embed",), (hidden,)))
        # RMSNorm: to float32, square, mean, scale, back, weigh: 34 bytes an element for 4; LayerNorm is one kernel, in
        # float32 with casts around it under autocast: 20 for 4, if a framework has no better
        more = 8.0 if self.shape.rms_norm else 4.0
        out = self.residual(f"{name}_out")
        return self.add("norm", name, [x], out, weights=tuple(weights), saved=(x.name,), unfused=more)

    def sinks(self) -> tuple[str, ...]:
        """The numbers of the heads that take part in the softmax of attention."""
        return (self.weight("sinks", ("heads",), (self.shape.heads,)),) if self.shape.sinks else ()

    def join(self, name: str, x: Value, branch: Value) -> Value:
        """x + branch, through a dropout mask where the model draws one."""
        masks = [self.value(f"{name}_mask", "batch", "seq", "embed", itemsize=1)] if self.shape.dropout else []
        return self.add(
            "elementwise", name, [x, branch, *masks], self.residual(f"{name}_out"), saved=tuple(m.name for m in masks)
        )

    def block(self, name: str, part: Literal["embed", "layer", "head"], repeats: int = 1) -> BlockCost:
        """What was collected."""
        return BlockCost(name, part, tuple(self.operations), tuple(self.parameters), repeats)


def _embedding(shape: ModelShape) -> BlockCost:
    build = _BlockBuilder(shape)
    ids = build.value("ids", "batch", "block_seq", itemsize=4)
    table = build.weight("tokens", ("vocab", "embed"), (shape.vocab, shape.hidden))
    x = build.add(
        "lookup", "tokens", [ids], build.residual("embedded"), weights=(table,), saved=("ids",), contracted="vocab"
    )
    if shape.learned_positions:
        rows = shape.seq + shape.spare_positions
        positions = build.weight("positions", (None, "embed"), (rows, shape.hidden))
        x = build.add("elementwise", "positions", [x], build.residual("placed"), weights=(positions,))
    if shape.token_types:
        types = build.weight("token_types", (None, "embed"), (shape.token_types, shape.hidden))
        x = build.add("elementwise", "token_types", [x], build.residual("typed"), weights=(types,))
    if shape.embedding_norm:
        x = build.norm("embedding_norm", x)
    if shape.dropout:
        mask = build.value("embedded_mask", "batch", "seq", "embed", itemsize=1)
        build.add("elementwise", "drop", [x, mask], build.residual("dropped"), saved=(mask.name,))
    return build.block("embedding", "embed")


def _head(shape: ModelShape, ahead: Sequence[BlockCost]) -> BlockCost:
    """Norm, logits and loss; ahead: what else the last chunk computes after the norm."""
    build = _BlockBuilder(replace(shape, seq=shape.asked) if shape.asked else shape)
    x = build.residual("hidden")
    if shape.asked:
        wide = ("embed", shape.hidden)
        x = build.linear("transform", x, build.residual("transformed"), wide, (None, shape.hidden))
        x = build.add("elementwise", "activation", [x], build.residual("bent"), saved=(x.name,))
    if shape.asked or shape.norm_places != "sum":
        x = build.norm("norm", x)
    for block in ahead:
        build.operations += block.operations
        build.parameters += block.parameters
    if not shape.tied:
        build.weight("head", ("embed", "vocab"), (shape.hidden, shape.vocab))
    _predict(build, x)
    return build.block("head", "head")


def _predict(build: _BlockBuilder, x: Value) -> Value:
    """Loss of the logits of x, by the weight of the embedding where it is tied."""
    shape = build.shape
    weights = ["tokens" if shape.tied else "head"]
    if shape.head_bias:
        weights.append(build.weight("head_bias", ("vocab",), (shape.vocab,)))
    logits = build.add(
        "product",
        "logits",
        [x],
        build.value("logits", "batch", "block_seq", "vocab"),
        weights=tuple(weights),
        flops=2.0 * shape.seq * shape.hidden * shape.vocab,
        saved=(x.name,),
        contracted="embed",
    )
    out = build.value("loss", "batch", "block_seq", itemsize=4)
    # unfused: to float32, largest, shifted, exponentials, their sum; backward: scaled, shifted, back: 60 bytes for 8
    return build.add("loss", "loss", [logits], out, saved=("logits",), unfused=7.5)


def _ahead(shape: ModelShape, attend: _Part, number: int) -> BlockCost:
    """What predicts one token further: tokens and places joined, a layer, logits. Source: arXiv:2412.19437, 2.2."""
    build = _BlockBuilder(shape)
    hidden, token = (
        build.norm("hidden_norm", build.residual("hidden")),
        build.norm("token_norm", build.residual("token")),
    )
    weight = build.weight("join", ("latent", "embed"), (2 * shape.hidden, shape.hidden))
    x = build.add(
        "product",
        "join",
        [hidden, token],
        build.residual("joined"),
        weights=(weight,),
        flops=4.0 * shape.seq * shape.hidden**2,
        saved=(hidden.name, token.name),
        contracted="latent",
    )
    x = _add_layer(build, x, attend, _sparse if shape.experts else _dense)
    _predict(build, build.norm("norm", x))
    return _rename(build.block("ahead", "head"), f"ahead{number}_", keep=("tokens", "head"))


def _rename(block: BlockCost, prefix: str, keep: tuple[str, ...]) -> BlockCost:
    """The block with the prefix before each name of an operation, a value and a weight, but those of other blocks."""

    def new(value: Value) -> Value:
        return replace(value, name=prefix + value.name)

    operations = tuple(
        replace(
            op,
            name=prefix + op.name,
            inputs=tuple(new(value) for value in op.inputs),
            output=new(op.output),
            weights=tuple(name if name in keep else prefix + name for name in op.weights),
            saved=tuple(prefix + name for name in op.saved),
        )
        for op in block.operations
    )
    return replace(block, operations=operations, parameters=tuple(new(value) for value in block.parameters))


def _layer(shape: ModelShape, attend: _Part, name: str, repeats: int, feed: _Part) -> BlockCost:
    build = _BlockBuilder(shape)
    _add_layer(build, build.residual("x"), attend, feed)
    return build.block(name, "layer", repeats)


def _add_layer(build: _BlockBuilder, x: Value, attend: _Part, feed: _Part) -> Value:
    places = build.shape.norm_places
    if build.shape.shared_norm:
        normed = build.norm("attention_norm", x)
        x = build.join("attention_add", x, _attention(build, normed, attend))
        return build.join("ffn_add", x, feed(build, normed))

    def add(name: str, x: Value, part: Callable[[_BlockBuilder, Value], Value]) -> Value:
        out = part(build, x if places in ("after", "sum") else build.norm(f"{name}_norm", x))
        out = out if places in ("before", "sum") else build.norm(f"{name}_out_norm", out)
        total = build.join(f"{name}_add", x, out)
        return build.norm(f"{name}_norm", total) if places == "sum" else total

    return add("ffn", add("attention", x, lambda build, x: _attention(build, x, attend)), feed)


def _attention(build: _BlockBuilder, x: Value, attend: _Part) -> Value:
    shape = build.shape
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wide = ("embed", shape.hidden)
    if shape.kv_rank:
        return _latent_attention(build, x, attend)
    if shape.learned_positions and shape.kv_heads == shape.heads:
        qkv = build.value("qkv", "batch", "block_seq", "heads", None, last=3 * shape.head_dim)
        mixed = attend(build, build.linear("qkv", x, qkv, wide, ("heads", 3 * width), "full_attn"))
    else:
        head = {"last": shape.head_dim}
        q = build.linear(
            "q", x, build.value("q", "batch", "block_seq", "heads", None, **head), wide, ("heads", width), "full_attn"
        )
        k, v = (
            build.linear(
                n,
                x,
                build.value(n, "batch", "block_seq", "kv_heads", None, **head),
                wide,
                ("kv_heads", kv_width),
                "full_attn",
            )
            for n in ("k", "v")
        )
        if shape.qk_norm:
            q, k = (build.head_norm(y) for y in (q, k))
        if not shape.learned_positions:
            q, k = (
                build.add(
                    "elementwise",
                    f"rotate_{y.name}",
                    [y],
                    replace(y, name=f"{y.name}_turned"),
                    part="full_attn",
                    unfused=5.0,
                )
                for y in (q, k)
            )
        mixed = attend(build, q, k, v)
    return build.linear("out", mixed, build.residual("attention_out"), ("heads", width), wide, "full_attn")


def _latent_attention(build: _BlockBuilder, x: Value, attend: _Part) -> Value:
    """Queries, keys and values out of latents. Source: arXiv:2405.04434, section 2.1."""
    shape = build.shape
    heads, ranks = shape.heads, (("latent", shape.kv_rank), ("latent", shape.q_rank))
    nope_dim = shape.head_dim - shape.rope_head_dim

    def by_heads(name: str, width: int) -> Value:
        return build.value(name, "batch", "block_seq", "heads", None, last=width)

    q_width = ("heads", heads * shape.head_dim)
    if shape.q_rank:
        latent = build.latent("q_a", x, shape.hidden, shape.q_rank, shape.q_rank)
        q = build.linear("q_b", latent, by_heads("q", shape.head_dim), ranks[1], q_width, "full_attn")
    else:
        q = build.linear("q", x, by_heads("q", shape.head_dim), ("embed", shape.hidden), q_width, "full_attn")
    latent = build.latent("kv_a", x, shape.hidden, shape.kv_rank + shape.rope_head_dim, shape.kv_rank)
    both = by_heads("kv", nope_dim + shape.v_head_dim)
    kv = build.linear("kv_b", latent, both, ranks[0], ("heads", heads * (nope_dim + shape.v_head_dim)), "full_attn")
    turned: dict[str, Any] = {"part": "full_attn", "unfused": 5.0}
    q = build.add("elementwise", "rotate_q", [q], by_heads("q_turned", shape.head_dim), **turned)
    k = build.add("elementwise", "rotate_k", [kv], by_heads("k_turned", shape.head_dim), **turned)
    v = build.add("elementwise", "v", [kv], by_heads("v", shape.v_head_dim), part="full_attn")
    out = ("heads", heads * shape.v_head_dim)
    wide = ("embed", shape.hidden)
    return build.linear("out", attend(build, q, k, v), build.residual("attention_out"), out, wide, "full_attn")


def _fuse(build: _BlockBuilder, *qkv: Value) -> Value:
    """Attention by tiles: only a log-sum a row is kept of the scores. Source: arXiv:2205.14135, 2307.08691."""
    shape = build.shape
    out = build.value("mixed", "batch", "block_seq", "heads", None, last=shape.v_head_dim)
    sums = build.value("log_sums", "batch", "heads", "block_seq", itemsize=4)
    return build.add(
        "attention",
        "attention",
        [*qkv, sums],
        out,
        weights=build.sinks(),
        flops=2.0 * shape.seq**2 * shape.score_width,
        saved=(*(each.name for each in qkv), out.name, sums.name),
        part="core_attn",
        executed=(1.0 if shape.sees_all else 0.5) * min(1.0, (shape.document or shape.seq) / shape.seq),
        drops=shape.dropout,
    )


_SOFTMAX = 5.0
"""Bytes of a softmax of scores by elementary kernels over those of one kernel: scores are scaled, masked, widened,
normalised in float32 and made narrow again, 20 bytes an element for 4; its backward likewise, 28 for 6."""


def _plain(build: _BlockBuilder, *qkv: Value) -> Value:
    """Scores, softmax and context as operations of their own, with the whole [seq, seq] matrix of every head."""
    shape = build.shape
    flops = 2.0 * shape.seq**2 * shape.heads
    scores = build.value("scores", "batch", "heads", "block_seq", None, last=shape.seq)
    weights = replace(scores, name="weights")
    rest: dict[str, Any] = {"part": "core_attn"}
    queries, values = (qkv[:1], qkv[:1]) if len(qkv) == 1 else (qkv[:2], qkv[2:])
    read = tuple(y.name for y in queries)
    build.add("product", "scores", queries, scores, flops=flops * shape.head_dim, saved=read, **rest)
    build.add(
        "elementwise",
        "softmax",
        [scores],
        weights,
        weights=build.sinks(),
        saved=(weights.name,),
        unfused=_SOFTMAX,
        **rest,
    )
    if shape.dropout:
        mask, kept = replace(scores, name="weights_mask", itemsize=1), replace(scores, name="weights_kept")
        weights = build.add("elementwise", "weights_drop", [weights, mask], kept, saved=(mask.name,), **rest)
    out = build.value("mixed", "batch", "block_seq", "heads", None, last=shape.v_head_dim)
    saved = (weights.name, *(y.name for y in values))
    return build.add("product", "context", [weights, *values], out, flops=flops * shape.v_head_dim, saved=saved, **rest)


def _dense(build: _BlockBuilder, x: Value) -> Value:
    shape = build.shape
    wide, inner = ("embed", shape.hidden), ("ffn", shape.ffn)
    up = build.linear("up", x, build.value("up", "batch", "block_seq", "ffn"), wide, inner)
    gate = (
        [build.linear("gate", x, build.value("gate", "batch", "block_seq", "ffn"), wide, inner)] if shape.gated else []
    )
    bent = build.value("bent", "batch", "block_seq", "ffn")
    more = 5 / 3 if shape.gated else 1.0  # the bent gate is written and read again
    build.add("elementwise", "activation", [*gate, up], bent, saved=tuple(y.name for y in (*gate, up)), unfused=more)
    return build.linear("down", bent, build.residual("ffn_out"), inner, wide)


def _sparse(build: _BlockBuilder, x: Value) -> Value:
    """Experts: each token goes to experts_per_token of them, by a router. Source: arXiv:2006.16668, 2101.03961."""
    shape = build.shape
    per_expert = shape.tokens_per_expert or -(-shape.seq * shape.experts_per_token // shape.experts)
    rows = shape.tokens_per_expert * shape.experts or shape.seq * shape.experts_per_token
    routed = Value(
        "routed",
        ("batch", "block_seq", "expert", "embed"),
        (1, per_expert, shape.experts, shape.hidden),
        choices=rows / shape.seq,
        reach=shape.expert_reach,
        is_even=shape.tokens_per_expert > 0,
    )
    scores = build.value("router", "batch", "seq", None, last=shape.experts, itemsize=4)
    weights = [build.weight("router", ("embed", None), (shape.hidden, shape.experts))]
    if shape.expert_biases:
        weights.append(build.weight("router_bias", (None,), (shape.experts,)))
    flops = 2.0 * shape.seq * shape.hidden * shape.experts
    build.add(
        "product", "router", [x], scores, weights=tuple(weights), flops=flops, saved=(x.name,), contracted="embed"
    )
    build.add("route", "dispatch", [x, scores], routed, saved=(scores.name,))
    names = ("gate", "up") if shape.gated else ("up",)
    inner = [_expert(build, name, routed, f"expert_{name}", rows) for name in names]
    bent = replace(inner[0], name="expert_bent")
    build.add("elementwise", "activation", inner, bent, saved=tuple(y.name for y in inner))
    out = _expert(build, "down", bent, "expert_out", rows)
    mixed = build.add("route", "combine", [out, scores], build.residual("ffn_out"), saved=(out.name, scores.name))
    if not shape.shared_experts:
        return mixed
    ffn = shape.shared_experts * shape.expert_ffn
    wide, width = ("embed", shape.hidden), ("ffn", ffn)
    shared = [
        build.linear(
            f"shared_{n}", x, Value(f"shared_{n}", ("batch", "block_seq", "ffn"), (1, shape.seq, ffn)), wide, width
        )
        for n in names
    ]
    bent = build.add(
        "elementwise",
        "shared_activation",
        shared,
        replace(shared[0], name="shared_bent"),
        saved=tuple(y.name for y in shared),
    )
    down = build.linear("shared_down", bent, build.residual("shared_out"), width, wide)
    if shape.shared_gate:
        weight = build.weight("token_gate", ("embed", None), (shape.hidden, 1))
        scale = build.value("token_gate", "batch", "seq", None, last=1)
        flops = 2.0 * shape.seq * shape.hidden
        build.add(
            "product", "token_gate", [x], scale, weights=(weight,), flops=flops, saved=(x.name,), contracted="embed"
        )
        out = build.residual("shared_gated")
        down = build.add("elementwise", "shared_gate", [down, scale], out, saved=(down.name, scale.name))
    return build.add("elementwise", "shared_add", [mixed, down], build.residual("mixed_out"))


def _expert(build: _BlockBuilder, name: str, x: Value, output: str, rows: int) -> Value:
    """One of the experts' matrices, [expert, embed, expert_ffn] or its transpose, on the rows of each expert."""
    shape = build.shape
    dims = ("expert", "expert_ffn", "embed") if name == "down" else ("expert", "embed", "expert_ffn")
    sizes = {"expert": shape.experts, "embed": shape.hidden, "expert_ffn": shape.expert_ffn}
    weights = [build.weight(f"expert_{name}", dims, tuple(sizes[dim] for dim in dims))]
    if shape.expert_biases:
        weights.append(build.weight(f"expert_{name}_bias", dims[::2], (shape.experts, sizes[dims[2]])))
    made = replace(x, name=output, dims=(*x.dims[:3], dims[-1]), shape=(*x.shape[:3], sizes[dims[-1]]))
    flops = 2.0 * rows * shape.hidden * shape.expert_ffn
    return build.add(
        "product", f"expert_{name}", [x], made, weights=tuple(weights), flops=flops, saved=(x.name,), contracted=dims[1]
    )
