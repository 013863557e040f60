"""ModernBERT: an encoder with rotary positions, norms before its parts, gated feed-forwards, and windows in most of its
blocks.

Source: arXiv:2412.13663. Same functions as transformers' ModernBertModel and those with heads, whose values are the
fixtures of tests/models/test_encoders.py. Logical dims of parameters: embed, heads, ffn, vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from polyreme.autograd.recompute import in_block, run_part
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.mesh.axes import nearest_multiples
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule, rows_of
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.encoder import (
    ACTIVATIONS,
    LABEL_KEYS,
    check_activation,
    check_label_names,
    key_mask,
    linear,
    linear_rules,
    normal,
    read_labels,
    write_labels,
)
from polyreme.models.parts.rotary import rotary_table, rotate
from polyreme.models.pretrained import Pretrained
from polyreme.nn import Embedding, Layer, LayerList, LayerNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import Parameter
from polyreme.ops.creation import arange
from polyreme.ops.layout import constrain

_POOLINGS = ("cls", "mean")


@dataclass(frozen=True)
class ModernBertConfig:
    """Dimensions of a ModernBERT.

    seq_len: longest sequence, tokens. window: a token sees so many, half of them on each side, in all blocks but every
    `interval`th, the first among those, which see all. rope_theta, local_rope_theta: of blocks that see all, and of
    those with windows. activation, head_activation: of the gate and of heads, of models.parts.encoder.ACTIVATIONS.
    dropout, attention_dropout, mlp_dropout, classifier_dropout: probabilities, while training, of embeddings, of
    attention, of feed-forwards and of what the classifier takes. pooling: whether the classifier takes the first place
    ("cls") or the mean of all. num_labels: what it scores; label_names: what they are called. recompute: one of
    mesh.RECOMPUTE, or "" for what the plan in force says.
    """

    vocab_size: int = 50368
    hidden_size: int = 768
    num_layers: int = 22
    num_heads: int = 12
    ffn_size: int = 1152
    seq_len: int = 8192
    window: int = field(default=128, metadata={"least": 2})
    interval: int = 3
    rope_theta: float = 160000.0
    local_rope_theta: float = 10000.0
    activation: str = "gelu"
    head_activation: str = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    classifier_dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    pooling: str = "cls"
    num_labels: int = 2
    label_names: tuple[str, ...] = ()
    recompute: str = ""

    def __post_init__(self) -> None:
        check_dimensions(self)
        check_label_names(self)
        for name in (self.activation, self.head_activation):
            check_activation("ModernBertConfig", name)
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"ModernBertConfig: hidden_size {self.hidden_size} is not a multiple of 2 * num_heads = "
                f"{2 * self.num_heads} (rotary positions turn pairs); make it "
                f"{nearest_multiples(self.hidden_size, 2 * self.num_heads)}"
            )
        if self.pooling not in _POOLINGS:
            raise ConfigError(f"ModernBertConfig: pooling {self.pooling!r}; give {' or '.join(map(repr, _POOLINGS))}")

    def reach(self, number: int) -> int:
        """Places on each side that a token sees in a block with `number` before it; 0 for all."""
        return self.window // 2 if number % self.interval else 0

    @classmethod
    def nano(cls, **changes: Any) -> ModernBertConfig:
        """A ModernBERT that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_size": 48, "seq_len": 16}
        return cls(**{**base, "window": 4, **changes})


def _norm(config: ModernBertConfig) -> LayerNorm:
    """A norm that adds no bias."""
    return LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon, bias_attr=False)


class TurnedAttention(Layer):
    """Attention among places of [batch, seq, embed] with rotary positions; reach: as of ModernBertConfig.reach."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear

    def __init__(self, config: ModernBertConfig, reach: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads, self.dropout, self.reach = config.num_heads, config.attention_dropout, reach
        self.q, self.k, self.v = (linear(width, width, ("embed", "heads"), bias=False) for _ in range(3))
        self.out = linear(width, width, ("heads", "embed"), bias=False)

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any, mask: Any = None) -> Any:
        batch, seq, width = x_bse.shape
        q, k, v = (
            constrain(part(x_bse).reshape([batch, seq, self.num_heads, -1]), "batch", "block_seq", "heads", None)
            for part in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos_sd, sin_sd), rotate(k, cos_sd, sin_sd)
        is_local = 0 < self.reach < seq - 1
        if is_local and mask is None:
            window = (self.reach, self.reach)
            mixed = F.flashmask_attention(q, k, v, window_size=window, dropout=self.dropout, training=self.training)
        else:
            seen = _seen_near(mask, seq, self.reach) if is_local else mask
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, dropout_p=self.dropout, training=self.training
            )
        mixed = self.out(mixed.reshape([batch, seq, width]))
        return F.dropout(mixed, self.dropout, training=self.training) if self.dropout else mixed


def _seen_near(mask: Any, seq: int, reach: int) -> Any:
    """Which places see which, at most `reach` apart, of keys that a mask [batch, 1, 1, seq] shows: bool [batch, 1, seq,
    seq]. Padding that is too far from the text sees itself: of what sees nothing no number comes."""
    places = arange(seq, dtype="int32")
    distance = (places.unsqueeze(1) - places).abs()
    seen = mask & (distance <= reach)
    return seen | ((distance == 0) & ~seen.any(-1, keepdim=True))


class GatedFeedForward(Layer):
    """down(activation(gate(x)) * up(x)), without biases. Source: arXiv:2002.05202."""

    activation: Callable[..., Any]

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.dropout = config.mlp_dropout
        self.gate, self.up = (
            linear(config.hidden_size, config.ffn_size, ("embed", "ffn"), bias=False) for _ in range(2)
        )
        self.down = linear(config.ffn_size, config.hidden_size, ("ffn", "embed"), bias=False)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_bse: Any) -> Any:
        hidden = constrain(self.activation(self.gate(x_bse)) * self.up(x_bse), "batch", "block_seq", "ffn")
        return self.down(F.dropout(hidden, self.dropout, training=self.training) if self.dropout else hidden)


class ModernBertBlock(Layer):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); the first block's attention takes x as it is."""

    attention_norm: LayerNorm | None
    attention: TurnedAttention
    ffn_norm: LayerNorm
    ffn: GatedFeedForward

    def __init__(self, config: ModernBertConfig, number: int) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.attention_norm = _norm(config) if number else None
        self.attention = TurnedAttention(config, config.reach(number))
        self.ffn_norm = _norm(config)
        self.ffn = GatedFeedForward(config)

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any, mask: Any = None) -> Any:
        return run_part("full", self.recompute, self._compute, x_bse, cos_sd, sin_sd, mask)

    def _compute(self, x_bse: Any, cos_sd: Any, sin_sd: Any, mask: Any) -> Any:
        normed = x_bse if self.attention_norm is None else self.attention_norm(x_bse)
        x_bse = x_bse + run_part("full_attn", self.recompute, self.attention, normed, cos_sd, sin_sd, mask)
        return constrain(x_bse + self.ffn(self.ffn_norm(x_bse)), "batch", "seq", "embed")


class ModernBert(Pretrained, Layer):
    """Token ids [batch, seq] -> hidden [batch, seq, embed].

    attention_mask [batch, seq]: 0 where a place is padding, which no other sees. position_ids [batch, seq]: the places
    of tokens, which count from 0 if left out; windows go by the places in the row.

    >>> from polyreme.eager.tensor import to_tensor
    >>> ModernBert(ModernBertConfig.nano())(to_tensor([[1, 2, 3]])).shape
    paddle.Size([1, 3, 32])
    """

    tokens: Embedding
    embedding_norm: LayerNorm
    blocks: LayerList
    norm: LayerNorm

    family: Any = architecture("modernbert", "base")

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.tokens = Embedding(config.vocab_size, width, weight_attr=normal(), dims=("vocab", "embed"))
        self.embedding_norm = _norm(config)
        self.blocks = LayerList([ModernBertBlock(config, number) for number in range(config.num_layers)])
        self.norm = _norm(config)
        for kind, theta in (("", config.rope_theta), ("local_", config.local_rope_theta)):
            table = rotary_table(config.seq_len, width // config.num_heads, theta)
            for name, array in zip(("cos", "sin"), table, strict=True):
                self.register_buffer(f"{kind}{name}", to_tensor(array), persistable=False)

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        owner, shape = type(self).__name__, list(input_ids.shape)
        if len(shape) != 2 or shape[1] > self.config.seq_len:
            raise ShapeError(
                f"{owner}: input_ids have shape {shape}; give [batch, seq], seq at most {self.config.seq_len}"
            )
        x_bse = self.embedding_norm(constrain(self.tokens(input_ids), "batch", "block_seq", "embed"))
        x_bse = constrain(F.dropout(x_bse, self.config.dropout, training=self.training), "batch", "seq", "embed")
        mask = key_mask(owner, attention_mask, shape)
        tables = [(self.cos, self.sin), (self.local_cos, self.local_sin)]
        if position_ids is None:
            tables = [(cos[: shape[1]], sin[: shape[1]]) for cos, sin in tables]
        else:
            tables = [(cos[position_ids], sin[position_ids]) for cos, sin in tables]
        for number, block in enumerate(self.blocks):
            with in_block(number):
                x_bse = block(x_bse, *tables[self.config.reach(number) > 0], mask)
        return self.norm(x_bse)

    encode = forward

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: token ids [1, length], fewer if there are fewer positions."""
        return (rng.integers(0, self.config.vocab_size, (1, min(length, self.config.seq_len))),)


class _WithHead(Pretrained, Layer):
    """A ModernBERT, and what its heads have in common: norm(activation(dense(hidden)))."""

    encoder: ModernBert
    dense: Linear
    head_norm: LayerNorm

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = ModernBert(config)
        self.dense = linear(config.hidden_size, config.hidden_size, ("embed", None), bias=False)
        self.head_norm = _norm(config)

    def bent(self, hidden: Any) -> Any:
        """What the head's last map takes, given hidden [..., embed]."""
        return self.head_norm(ACTIVATIONS[self.config.head_activation](self.dense(hidden)))

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """As the encoder's."""
        return self.encoder.example_inputs(rng, length)


class ModernBertForMaskedLM(_WithHead):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]; with labels, the mean cross-entropy (0-D, nats a token).

    labels [batch, seq]: the id that a masked token was; -100 leaves a place out. The others: as of ModernBert.
    """

    bias: Parameter

    family: Any = architecture("modernbert", "masked_lm")

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__(config)
        self.bias = self.create_parameter([config.vocab_size], is_bias=True, default_initializer=Constant(0.0))

    def forward(self, input_ids: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        hidden, weight = self.bent(self.encoder(input_ids, *args, **kwargs)), self.encoder.tokens.weight
        if labels is None:
            return hidden.matmul(weight, transpose_y=True) + self.bias
        return F.fused_linear_cross_entropy(hidden, weight, labels, transpose_weight=True, bias=self.bias)


class _Scorer(_WithHead):
    """A head that scores labels."""

    classifier: Linear

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__(config)
        self.classifier = linear(config.hidden_size, config.num_labels, ("embed", None))

    def score(self, hidden: Any) -> Any:
        """[..., num_labels] given [..., embed]."""
        dropped = F.dropout(self.bent(hidden), self.config.classifier_dropout, training=self.training)
        return self.classifier(dropped)


class ModernBertForSequenceClassification(_Scorer):
    """Token ids [batch, seq] -> scores [batch, num_labels]; with labels, their mean loss (0-D).

    labels [batch]: which one each is, and the loss is the cross-entropy; with num_labels=1 numbers, and the loss is the
    mean square. The others: as of ModernBert.
    """

    family: Any = architecture("modernbert", "classification")

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None) -> Any:
        hidden = self.encoder(input_ids, attention_mask, position_ids)
        scores = self.score(self._pooled(hidden, attention_mask))
        if labels is None:
            return scores
        if self.config.num_labels == 1:
            return F.mse_loss(scores[:, 0], labels)
        return F.cross_entropy(scores, labels)

    def _pooled(self, hidden: Any, attention_mask: Any) -> Any:
        if self.config.pooling == "cls":
            return hidden[:, 0]
        if attention_mask is None:
            return hidden.mean(1)
        weight = (attention_mask != 0).astype(hidden.dtype).unsqueeze(-1)
        return (hidden * weight).sum(1) / weight.sum(1)


class ModernBertForTokenClassification(_Scorer):
    """Token ids [batch, seq] -> scores of each token, [batch, seq, num_labels]; with labels, the mean cross-entropy
    (0-D).

    labels [batch, seq]: which one each token's is; -100 leaves a place out. The others: as of ModernBert.
    """

    family: Any = architecture("modernbert", "token_classification")

    def forward(self, input_ids: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        scores = self.score(self.encoder(input_ids, *args, **kwargs))
        return scores if labels is None else F.cross_entropy(scores, labels, ignore_index=-100)


# as published


def _thirds(config: ModernBertConfig) -> list[int]:
    return [config.hidden_size] * 3


def _halves(config: ModernBertConfig) -> list[int]:
    return [config.ffn_size] * 2


def _body(ours: str, config: Any) -> list[WeightRule]:
    there, here = "model.layers.{n}", f"{ours}blocks.{{n}}"
    return [
        WeightRule("model.embeddings.tok_embeddings.weight", f"{ours}tokens.weight", SAME),
        WeightRule("model.embeddings.norm.weight", f"{ours}embedding_norm.weight", SAME),
        WeightRule("model.final_norm.weight", f"{ours}norm.weight", SAME),
        WeightRule(f"{there}.attn_norm.weight", f"{here}.attention_norm.weight", SAME),
        WeightRule(f"{there}.mlp_norm.weight", f"{here}.ffn_norm.weight", SAME),
        *(
            WeightRule(f"{there}.attn.Wqkv.weight", f"{here}.attention.{part}.weight", rows_of(_thirds, number))
            for number, part in enumerate("qkv")
        ),
        WeightRule(f"{there}.attn.Wo.weight", f"{here}.attention.out.weight"),
        *(
            WeightRule(f"{there}.mlp.Wi.weight", f"{here}.ffn.{part}.weight", rows_of(_halves, number))
            for number, part in enumerate(("gate", "up"))
        ),
        WeightRule(f"{there}.mlp.Wo.weight", f"{here}.ffn.down.weight"),
    ]


def _headed(last: Sequence[WeightRule], config: Any) -> list[WeightRule]:
    head = [WeightRule("head.dense.weight", "dense.weight"), WeightRule("head.norm.weight", "head_norm.weight", SAME)]
    return [*_body("encoder.", config), *head, *last]


PUBLISHED_BASE = PublishedFamily(
    architecture="ModernBertModel",
    model_type="modernbert",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ffn_size",
        "max_position_embeddings": "seq_len",
        "local_attention": "window",
        "global_attn_every_n_layers": "interval",
        "global_rope_theta": "rope_theta",
        "local_rope_theta": "local_rope_theta",
        "hidden_activation": "activation",
        "classifier_activation": "head_activation",
        "embedding_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "mlp_dropout": "mlp_dropout",
        "classifier_dropout": "classifier_dropout",
        "norm_eps": "layer_norm_epsilon",
        "classifier_pooling": "pooling",
    },
    weights=partial(_body, ""),
    fixed={
        "norm_bias": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "classifier_bias": (False,),
        "decoder_bias": (True,),
        "tie_word_embeddings": (True,),
        "position_embedding_type": ("absolute", "sans_pos"),  # of older files, which say it of a table there is not
    },
    spare=lambda name, config: name == "decoder.weight",  # a copy of the embedding
    prefix="model.",
    bare=True,
    heads=("head.", "decoder.", "classifier."),
    read=read_labels,
    # ids, how a first model's values are drawn, and what programs that train it do
    read_keys=(
        *(*LABEL_KEYS, "cls_token_id", "sep_token_id", "initializer_cutoff_factor", "reference_compile"),
        *("deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index", "repad_logits_with_grad"),
        *("layer_norm_eps", "gradient_checkpointing"),
    ),
    write=write_labels,
)
_HEADED = replace(PUBLISHED_BASE, bare=False)
PUBLISHED_MASKED_LM = replace(
    _HEADED,
    architecture="ModernBertForMaskedLM",
    weights=partial(_headed, [WeightRule("decoder.bias", "bias", SAME)]),
)
PUBLISHED_CLASSIFICATION = replace(
    _HEADED,
    architecture="ModernBertForSequenceClassification",
    weights=partial(_headed, linear_rules("classifier", "classifier")),
)
PUBLISHED_TOKEN_CLASSIFICATION = replace(PUBLISHED_CLASSIFICATION, architecture="ModernBertForTokenClassification")
