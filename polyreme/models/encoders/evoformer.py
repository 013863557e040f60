"""Evoformer: blocks that turn an alignment of sequences (MSA) and what is known of pairs of residues into better ones.

Source: Jumper et al., 2021 (AlphaFold 2), supplement, algorithms 6 to 16 and 19, of which a version in NumPy is in
tests/models/encoders/evoformer_reference.py. Branches that can run beside each other ("end"): arXiv:2211.00235.

Shape legend: b batch, s sequences (rows of the MSA), r residues (its columns), i and j residues of a pair, m MSA width,
z pair width, h heads. MSA [b, s, r, m], pairs [b, r, r, z].

Layers that look along columns take arrays turned, columns before rows: MSA [b, r, s, m], pairs [b, j, i, z]. What a
layer looks along is always the third dim, and the second may be split over devices: dynamic axial parallelism
(arXiv:2203.00854). Logical dims of activations are msa_rows, msa_cols, pair_rows and pair_cols, of which `constrain`
names the one that is second. A turn is then an all-to-all, what a layer needs of other devices' rows an all-gather. A
block's forward has six of each, but with "first", where it has two all-to-alls more. With "end" the layers of the MSA
and those of the pairs are branches, which a plan may give devices of their own (distributed.branches).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyreme.autograd.recompute import run_part
from polyreme.distributed import branches
from polyreme.errors import ConfigError, ShapeError, did_you_mean
from polyreme.incubate.nn.functional import fused_gate_attention
from polyreme.models.families import DISTANCE_BINS, FARTHEST_OFFSET, HEAD_DIM, LETTERS, Family
from polyreme.models.parts.decoder import check_dimensions
from polyreme.nn import Embedding, Layer, LayerNorm, Linear, Stacked
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant, KaimingNormal, XavierUniform
from polyreme.nn.parameter import ParamAttr, Parameter
from polyreme.ops.creation import arange
from polyreme.ops.layout import constrain
from polyreme.ops.matrices.products import einsum

OUTER_PRODUCT_MEAN = ("origin", "middle", "first", "end")
"""Where a block adds what the MSA says of pairs: after the MSA's layers and before the pairs' (AlphaFold 2, under both
names), before all others (AlphaFold-Multimer), or after all others, so that they wait for each other once a block."""

# adds to the scores of keys that a mask leaves out
_MASKED = 1e9
# dims of dropout's numbers: one for all of the second dim, one for all of the third
_OVER_SECOND, _OVER_THIRD = [0, 2, 3], [0, 1, 3]


@dataclass(frozen=True)
class EvoformerConfig:
    """Dimensions of a stack of Evoformer blocks; the defaults are AlphaFold 2's.

    msa_dropout and pair_dropout: probabilities, used while training. outer_product_mean: one of OUTER_PRODUCT_MEAN.
    global_columns: column attention with one query for all rows, as for the extra MSA. recompute: one of
    mesh.RECOMPUTE, or "" for what the plan in force says; a block has "full" alone.
    """

    msa_width: int = 256
    pair_width: int = 128
    num_layers: int = 48
    msa_heads: int = 8
    pair_heads: int = 4
    head_dim: int = 32
    outer_width: int = 32
    triangle_width: int = 128
    transition_factor: int = 4
    msa_dropout: float = 0.15
    pair_dropout: float = 0.25
    outer_product_mean: str = "origin"
    global_columns: bool = False
    recompute: str = ""

    def __post_init__(self) -> None:
        check_dimensions(self)
        if self.outer_product_mean not in OUTER_PRODUCT_MEAN:
            raise ConfigError(
                f"EvoformerConfig: unknown outer_product_mean {self.outer_product_mean!r}"
                f"{did_you_mean(self.outer_product_mean, OUTER_PRODUCT_MEAN)}"
            )

    @classmethod
    def nano(cls, **changes: Any) -> EvoformerConfig:
        """A stack that trains in seconds on a CPU."""
        widths = {"msa_width": 16, "pair_width": 8, "head_dim": 4, "outer_width": 4, "triangle_width": 8}
        return cls(**{**widths, "num_layers": 2, "msa_heads": 2, "pair_heads": 2, "transition_factor": 2, **changes})


class GateAttention(Layer):
    """Gated attention within each row: [b, m, r, width] -> the same, heads of width head_dim. Source: algorithm 7.

    bias [b, 1, h, r, r] and mask [b, m, r], 1 for places that are there, else 0; either may be None.
    """

    query_weight: Parameter
    key_weight: Parameter
    value_weight: Parameter
    gate_weight: Parameter
    gate_bias: Parameter
    out_weight: Parameter
    out_bias: Parameter

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        shape, dims = [width, heads, head_dim], ("embed", "heads", "head_dim")
        fans = ParamAttr(initializer=XavierUniform(fan_in=width, fan_out=heads * head_dim))
        self.query_weight = self.create_parameter(shape, fans, dims=dims)
        self.key_weight = self.create_parameter(shape, fans, dims=dims)
        self.value_weight = self.create_parameter(shape, fans, dims=dims)
        # gates begin open, and the output at nothing: a block begins as the identity
        self.gate_weight = self.create_parameter(shape, _constant(0.0), dims=dims)
        self.gate_bias = self.create_parameter(shape[1:], _constant(1.0), dims=dims[1:])
        self.out_weight = self.create_parameter([heads, head_dim, width], _constant(0.0), dims=(*dims[1:], "embed"))
        self.out_bias = self.create_parameter([width], _constant(0.0), dims=("embed",))

    def forward(self, x: Any, bias: Any = None, mask: Any = None) -> Any:
        added = None if mask is None else ((mask - 1.0) * _MASKED).unsqueeze([2, 3])
        return fused_gate_attention(
            x, None, self.query_weight, self.key_weight, self.value_weight, None, self.gate_weight, self.gate_bias,
            self.out_weight, self.out_bias, bias, added, merge_qkv=False,
        )  # fmt: skip


class PairBias(Layer):
    """What pairs [b, i, j, z] add to the scores of residue i for residue j, the same for all rows: [b, 1, h, i, j].

    dim: the logical dim of i.
    """

    proj: Linear

    def __init__(self, config: EvoformerConfig, heads: int, dim: str) -> None:
        super().__init__()
        self.dim = dim
        self.proj = Linear(config.pair_width, heads, _lecun(config.pair_width), bias_attr=False, dims=("embed", None))

    def forward(self, pair: Any) -> Any:
        return _gathered(self.proj(pair), self.dim).transpose([0, 3, 1, 2]).unsqueeze(1)


class MSARowAttentionWithPairBias(Layer):
    """Residues of a sequence attend to each other, biased by their pairs. Source: algorithm 7."""

    norm: LayerNorm
    pair_norm: LayerNorm
    bias: PairBias
    attention: GateAttention

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm, self.pair_norm = LayerNorm(config.msa_width), LayerNorm(config.pair_width)
        self.bias = PairBias(config, config.msa_heads, "pair_rows")
        self.attention = GateAttention(config.msa_width, config.msa_heads, config.head_dim)

    def forward(self, msa: Any, pair: Any, mask: Any = None) -> Any:
        return self.attention(self.norm(msa), self.bias(self.pair_norm(pair)), mask)


class MSAColumnAttention(Layer):
    """Sequences attend to each other at each residue: MSA turned, [b, r, s, m]. Source: algorithm 8."""

    norm: LayerNorm
    attention: GateAttention

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.msa_width)
        self.attention = GateAttention(config.msa_width, config.msa_heads, config.head_dim)

    def forward(self, msa: Any, mask: Any = None) -> Any:
        return self.attention(self.norm(msa), mask=mask)


class MSAColumnGlobalAttention(Layer):
    """At each residue, the mean of all sequences' queries attends to them, with one head of keys and values.

    MSA turned, [b, r, s, m] -> the same. Source: algorithm 19.
    """

    heads: int
    head_dim: int
    norm: LayerNorm
    query: Linear
    key: Linear
    value: Linear
    gate: Linear
    out: Linear

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        width, heads, head_dim = config.msa_width, config.msa_heads, config.head_dim
        inner, dims = heads * head_dim, ("embed", "heads")
        self.heads, self.head_dim = heads, head_dim
        self.norm = LayerNorm(width)
        self.query = Linear(width, inner, _xavier(), bias_attr=False, dims=dims)
        self.key = Linear(width, head_dim, _xavier(), bias_attr=False, dims=("embed", None))
        self.value = Linear(width, head_dim, _xavier(), bias_attr=False, dims=("embed", None))
        self.gate = Linear(width, inner, _constant(0.0), bias_attr=_constant(1.0), dims=dims)
        self.out = Linear(inner, width, _constant(0.0), dims=("heads", "embed"))

    def forward(self, msa: Any, mask: Any = None) -> Any:
        x = self.norm(msa)
        b, r = x.shape[:2]
        if mask is None:
            mean, added = x.mean(2), None
        else:
            there = mask.unsqueeze(-1)
            mean = (x * there).sum(2) / (there.sum(2) + 1e-10)
            added = ((there - 1.0) * _MASKED).transpose([0, 1, 3, 2])
        q = self.query(mean).reshape([b, r, self.heads, self.head_dim]) * self.head_dim**-0.5
        scores = einsum("brhd,brsd->brhs", q, self.key(x))
        weights = F.softmax(scores if added is None else scores + added, -1)
        mixed = einsum("brhs,brsd->brhd", weights, self.value(x)).reshape([b, r, 1, -1])
        return self.out(F.sigmoid(self.gate(x)) * mixed)


class Transition(Layer):
    """Two Linears around a ReLU, at each place by itself. Source: algorithms 9 and 15."""

    norm: LayerNorm
    up: Linear
    down: Linear

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        relu = ParamAttr(initializer=KaimingNormal(fan_in=width))
        self.up = Linear(width, factor * width, relu, dims=("embed", "ffn"))
        self.down = Linear(factor * width, width, _constant(0.0), dims=("ffn", "embed"))

    def forward(self, x: Any) -> Any:
        return self.down(F.relu(self.up(self.norm(x))))


class OuterProductMean(Layer):
    """What the MSA says of pairs: the mean over its rows of outer products of residues i and j. Source: algorithm 10.

    MSA turned, [b, r, s, m] -> [b, i, j, z].
    """

    norm: LayerNorm
    left: Linear
    right: Linear
    weight: Parameter
    bias: Parameter

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        width, inner = config.msa_width, config.outer_width
        self.norm = LayerNorm(width)
        self.left = Linear(width, inner, _lecun(width), dims=("embed", None))
        self.right = Linear(width, inner, _lecun(width), dims=("embed", None))
        self.weight = self.create_parameter(
            [inner, inner, config.pair_width], _constant(0.0), dims=(None, None, "embed")
        )
        self.bias = self.create_parameter([config.pair_width], _constant(0.0), dims=("embed",))

    def forward(self, msa: Any, mask: Any = None) -> Any:
        x = self.norm(msa)
        left, right = self.left(x), self.right(x)
        if mask is None:
            rows: Any = float(msa.shape[2])
        else:
            left, right = left * mask.unsqueeze(-1), right * mask.unsqueeze(-1)
            rows = einsum("bis,bjs->bij", mask, mask).unsqueeze(-1)
        products = einsum("bisc,bjsd->bijcd", left, _gathered(right, "msa_cols"))
        out = einsum("bijcd,cdz->bijz", products, self.weight) + self.bias
        return _split(out / (rows + 1e-3), "pair_rows")


class TriangleMultiplication(Layer):
    """Each edge from the other two edges of all triangles it is in. Source: algorithms 11 (outgoing) and 12 (incoming).

    Pairs [b, i, j, z], turned for incoming edges -> the same.
    """

    norm: LayerNorm
    out_norm: LayerNorm
    left: Linear
    right: Linear
    left_gate: Linear
    right_gate: Linear
    out: Linear
    gate: Linear

    def __init__(self, config: EvoformerConfig, outgoing: bool) -> None:
        super().__init__()
        width, inner = config.pair_width, config.triangle_width
        self.outgoing = outgoing
        self.norm, self.out_norm = LayerNorm(width), LayerNorm(inner)
        self.left, self.right = (Linear(width, inner, _lecun(width), dims=("embed", None)) for _ in range(2))
        self.left_gate, self.right_gate = (_gate(width, inner) for _ in range(2))
        self.out = Linear(inner, width, _constant(0.0), dims=(None, "embed"))
        self.gate = _gate(width, width)

    def forward(self, pair: Any, mask: Any = None) -> Any:
        x = self.norm(pair)
        left = F.sigmoid(self.left_gate(x)) * self.left(x)
        right = F.sigmoid(self.right_gate(x)) * self.right(x)
        if mask is not None:
            left, right = left * mask.unsqueeze(-1), right * mask.unsqueeze(-1)
        # of turned pairs, sum over k of left[k, i] right[k, j] at [j, i]: right is the one whose rows stay
        first, second = (left, right) if self.outgoing else (right, left)
        second = _gathered(second, "pair_rows" if self.outgoing else "pair_cols")
        return F.sigmoid(self.gate(x)) * self.out(self.out_norm(einsum("bikc,bjkc->bijc", first, second)))


class TriangleAttention(Layer):
    """Edges that leave the same residue (starting) or come to the same one (ending) attend to each other, biased by the
    third edge of their triangle. Source: algorithms 13 and 14.

    Pairs [b, i, j, z], turned for ending edges -> the same. dim: the logical dim that is second.
    """

    norm: LayerNorm
    bias: PairBias
    attention: GateAttention

    def __init__(self, config: EvoformerConfig, dim: str) -> None:
        super().__init__()
        self.norm = LayerNorm(config.pair_width)
        self.bias = PairBias(config, config.pair_heads, dim)
        self.attention = GateAttention(config.pair_width, config.pair_heads, config.head_dim)

    def forward(self, pair: Any, mask: Any = None) -> Any:
        x = self.norm(pair)
        return self.attention(x, self.bias(x), mask)


class EvoformerBlock(Layer):
    """(MSA [b, s, r, m], pairs [b, r, r, z]) -> the same. Source: algorithm 6.

    msa_mask [b, s, r] and pair_mask [b, r, r]: 1 for what is there, 0 for padding, of the arrays' dtype; None: all is.

    >>> from polyreme.ops.creation import zeros
    >>> block = EvoformerBlock(EvoformerConfig.nano())
    >>> [x.shape for x in block(zeros([1, 3, 5, 16]), zeros([1, 5, 5, 8]))]
    [paddle.Size([1, 3, 5, 16]), paddle.Size([1, 5, 5, 8])]
    """

    recompute: str
    row_attention: MSARowAttentionWithPairBias
    column_attention: MSAColumnAttention | MSAColumnGlobalAttention
    msa_transition: Transition
    outer_product_mean: OuterProductMean
    triangle_outgoing: TriangleMultiplication
    triangle_incoming: TriangleMultiplication
    triangle_starting: TriangleAttention
    triangle_ending: TriangleAttention
    pair_transition: Transition

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = config.recompute
        self.row_attention = MSARowAttentionWithPairBias(config)
        self.column_attention = (MSAColumnGlobalAttention if config.global_columns else MSAColumnAttention)(config)
        self.msa_transition = Transition(config.msa_width, config.transition_factor)
        self.outer_product_mean = OuterProductMean(config)
        self.triangle_outgoing = TriangleMultiplication(config, outgoing=True)
        self.triangle_incoming = TriangleMultiplication(config, outgoing=False)
        self.triangle_starting = TriangleAttention(config, "pair_rows")
        self.triangle_ending = TriangleAttention(config, "pair_cols")
        self.pair_transition = Transition(config.pair_width, config.transition_factor)

    def forward(self, msa: Any, pair: Any, msa_mask: Any = None, pair_mask: Any = None) -> Any:
        return run_part("full", self.recompute, self._compute, msa, pair, msa_mask, pair_mask)

    def _compute(self, msa: Any, pair: Any, msa_mask: Any, pair_mask: Any) -> Any:
        msa, pair = _split(msa, "msa_rows"), _split(pair, "pair_rows")
        where = self.config.outer_product_mean
        if where == "first":
            turned = _turned(msa, "msa_rows", "msa_cols")
            pair = pair + self.outer_product_mean(turned, _turned_mask(msa_mask))
            msa = self._msa_layers(_turned(turned, "msa_cols", "msa_rows"), pair, msa_mask)
            return _turned(msa, "msa_cols", "msa_rows"), self._pair_layers(pair, pair_mask)
        if where == "end":
            (msa, outer), refined = branches(
                [lambda: self._msa_branch(msa, pair, msa_mask), lambda: self._pair_layers(pair, pair_mask)]
            )
            return msa, refined + outer
        msa, outer = self._msa_branch(msa, pair, msa_mask)
        return msa, self._pair_layers(pair + outer, pair_mask)

    def _msa_branch(self, msa: Any, pair: Any, mask: Any) -> tuple[Any, Any]:
        """The MSA after its layers, and what it then says of pairs."""
        turned = self._msa_layers(msa, pair, mask)
        outer = self.outer_product_mean(turned, _turned_mask(mask))
        return _turned(turned, "msa_cols", "msa_rows"), outer

    def _msa_layers(self, msa: Any, pair: Any, mask: Any) -> Any:
        """The MSA after its layers, turned."""
        msa = msa + self._dropped(self.row_attention(msa, pair, mask), self.config.msa_dropout, _OVER_SECOND)
        msa = _turned(msa, "msa_rows", "msa_cols")
        msa = msa + self.column_attention(msa, _turned_mask(mask))
        return msa + self.msa_transition(msa)

    def _pair_layers(self, pair: Any, mask: Any) -> Any:
        """Pairs after their layers. Dropout is the same for all rows, in triangle_ending for all columns."""
        rate, turned_mask = self.config.pair_dropout, _turned_mask(mask)
        pair = pair + self._dropped(self.triangle_outgoing(pair, mask), rate, _OVER_SECOND)
        pair = _turned(pair, "pair_rows", "pair_cols")
        pair = pair + self._dropped(self.triangle_incoming(pair, turned_mask), rate, _OVER_THIRD)
        pair = _turned(pair, "pair_cols", "pair_rows")
        pair = pair + self._dropped(self.triangle_starting(pair, mask), rate, _OVER_SECOND)
        pair = _turned(pair, "pair_rows", "pair_cols")
        pair = pair + self._dropped(self.triangle_ending(pair, turned_mask), rate, _OVER_SECOND)
        pair = pair + self.pair_transition(pair)
        return _turned(pair, "pair_cols", "pair_rows")

    def _dropped(self, x: Any, rate: float, axes: list[int]) -> Any:
        return F.dropout(x, rate, axis=axes, training=self.training) if rate else x


class EvoformerStack(Stacked):
    """config.num_layers Evoformer blocks as one loop, whose program does not grow with their number.

    (MSA [b, s, r, m], pairs [b, r, r, z]) -> the same; msa_mask and pair_mask by keyword, as of EvoformerBlock.
    """

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__(lambda: EvoformerBlock(config), config.num_layers)
        self.config = config


@dataclass(frozen=True)
class EvoformerModelConfig(EvoformerConfig):
    """Dimensions of an Evoformer: those of its blocks, of which a head_dim of 0 is HEAD_DIM, and of the alignments it
    takes.

    masked_weight and distogram_weight: of the two losses; AlphaFold 2's, supplement, equation 7.
    """

    num_sequences: int = 128
    num_residues: int = 256
    masked_weight: float = 2.0
    distogram_weight: float = 0.3

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.head_dim or HEAD_DIM)
        super().__post_init__()


class Evoformer(Layer):
    """Alignment of letters [b, s, r], 0 to LETTERS for the masked -> logits of letters [b, s, r, LETTERS] and of
    distances [b, r, r, DISTANCE_BINS]; with labels, the mean loss, 0-D.

    The alignment's first row is the sequence itself. labels: (letters [b, s, r], -100 where none is asked for; classes
    of distances [b, r, r]). Embeddings: algorithms 3 and 4; heads and losses: supplement, 1.9.8 to 1.9.10.

    >>> from polyreme.ops.creation import zeros
    >>> config = EvoformerModelConfig(num_layers=1, msa_width=8, pair_width=8, num_sequences=2, num_residues=3)
    >>> [x.shape for x in Evoformer(config)(zeros([1, 2, 3], "int64"))]
    [paddle.Size([1, 2, 3, 21]), paddle.Size([1, 3, 3, 16])]
    """

    letters: Embedding
    target: Embedding
    left: Embedding
    right: Embedding
    offsets: Embedding
    blocks: EvoformerStack
    msa_norm: LayerNorm
    pair_norm: LayerNorm
    letter_head: Linear
    distance_head: Linear

    family: Family

    def __init__(self, config: EvoformerModelConfig) -> None:
        super().__init__()
        m, z = config.msa_width, config.pair_width
        self.config = config
        self.letters, self.target = (Embedding(LETTERS + 1, m, dims=(None, "embed")) for _ in range(2))
        self.left, self.right = (Embedding(LETTERS + 1, z, dims=(None, "embed")) for _ in range(2))
        self.offsets = Embedding(2 * FARTHEST_OFFSET + 1, z, dims=(None, "embed"))
        self.blocks = EvoformerStack(config)
        self.msa_norm, self.pair_norm = LayerNorm(m), LayerNorm(z)
        self.letter_head = Linear(m, LETTERS, _constant(0.0), dims=("embed", None))
        self.distance_head = Linear(z, DISTANCE_BINS, _constant(0.0), dims=("embed", None))

    def forward(self, letters: Any, labels: Any = None) -> Any:
        if len(letters.shape) != 3:
            raise ShapeError(f"Evoformer: letters have shape {list(letters.shape)}; give an alignment as [b, s, r]")
        target = letters[:, 0]
        msa = self.letters(_split_letters(letters)) + self.target(target).unsqueeze(1)
        pair = self.left(target).unsqueeze(2) + self.right(target).unsqueeze(1) + self._places(letters.shape[2])
        msa, pair = self.blocks(msa, pair)
        pair = self.pair_norm(pair)
        pair = _split(pair + _turned(pair, "pair_rows", "pair_rows"), "pair_rows")
        of_letters, of_distances = self.letter_head(self.msa_norm(msa)), self.distance_head(pair)
        if labels is None:
            return of_letters, of_distances
        masked = F.cross_entropy(of_letters, labels[0], ignore_index=-100)
        distogram = F.cross_entropy(of_distances, labels[1])
        return self.config.masked_weight * masked + self.config.distogram_weight * distogram

    def _places(self, residues: int) -> Any:
        """What pairs [1, i, j, z] know of their distance along the chain."""
        at = arange(residues)
        offsets = (at.unsqueeze(0) - at.unsqueeze(1)).clip(-FARTHEST_OFFSET, FARTHEST_OFFSET) + FARTHEST_OFFSET
        return self.offsets(offsets).unsqueeze(0)


def _split_letters(letters: Any) -> Any:
    return constrain(letters, "batch", "msa_rows", None)


def _split(x: Any, dim: str) -> Any:
    """x, its second dim split as the plan splits dim."""
    return constrain(x, "batch", dim, None, None)


def _gathered(x: Any, dim: str) -> Any:
    """x, its second dim split as dim is, whole on every device."""
    return constrain(_split(x, dim), "batch", None, None, None)


def _turned(x: Any, dim: str, other: str) -> Any:
    """x with its second dim, split as dim is, and its third, which is then split as other is, exchanged."""
    return _split(_split(x, dim).transpose([0, 2, 1, 3]), other)


def _turned_mask(mask: Any) -> Any:
    return None if mask is None else constrain(mask.transpose([0, 2, 1]), "batch", None, None)


def _gate(width: int, out: int) -> Linear:
    """A Linear whose sigmoid begins the same everywhere."""
    return Linear(width, out, _constant(0.0), bias_attr=_constant(1.0), dims=("embed", None))


def _constant(value: float) -> ParamAttr:
    return ParamAttr(initializer=Constant(value))


def _xavier() -> ParamAttr:
    return ParamAttr(initializer=XavierUniform())


def _lecun(width: int) -> ParamAttr:
    return ParamAttr(initializer=KaimingNormal(fan_in=width, nonlinearity="linear"))
