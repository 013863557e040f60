"""BART, and what its kin have in common: an encoder and a decoder with positions, LayerNorms and biases.

Source: arXiv:1910.13461. Same functions as transformers' BartForConditionalGeneration and
BartForSequenceClassification. Logical dims of parameters: embed, heads, ffn, vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.encoder import (
    LABEL_KEYS,
    TwoLayers,
    check_activation,
    check_label_names,
    key_mask,
    linear,
    linear_rules,
    normal,
    read_labels,
    same_rules,
    write_labels,
)
from polyreme.models.parts.encoder_decoder import ContextAttention, EncoderDecoder, LayerTexts, TextsCache
from polyreme.models.pretrained import Pretrained
from polyreme.nn import Dropout, Embedding, Layer, LayerList, LayerNorm
from polyreme.nn import functional as F
from polyreme.nn.layers.linear import Linear
from polyreme.ops.creation import arange, full_like
from polyreme.ops.indices.gather import where
from polyreme.ops.layout import constrain


class SequenceTraits:
    """In what the kin of BART differ beside their dimensions; a family's config class says what it has.

    norm_first: whether parts of a block take normed input, or sums are normed. embedding_norm: of the embeddings,
    last_norm: after the blocks. spare_positions: rows of the table of positions before that of the first place. table:
    (rows, width) -> positions that are not learned, float32; learned ones if None. key_bias: whether keys add one.
    logit_bias: whether logits do, of numbers that are not trained.
    """

    norm_first: ClassVar[bool] = False
    embedding_norm: ClassVar[bool] = True
    last_norm: ClassVar[bool] = False
    spare_positions: ClassVar[int] = 2
    table: ClassVar[Callable[[int, int], np.ndarray] | None] = None
    key_bias: ClassVar[bool] = True
    logit_bias: ClassVar[bool] = True


@dataclass(frozen=True)
class BartConfig(SequenceTraits):
    """Dimensions of a BART.

    num_decoder_layers, num_decoder_heads, decoder_ffn_size: those of the encoder if 0. seq_len: longest text, tokens.
    activation: one of models.parts.encoder.ACTIVATIONS. dropout, attention_dropout, activation_dropout: probabilities,
    while training. scale_embedding: whether embeddings are multiplied by hidden_size ** 0.5. start: the id before the
    decoder's first; pad: what fills up rows; end: of a text. num_labels, label_names: of a classifier.
    """

    vocab_size: int = 50265
    hidden_size: int = 1024
    num_layers: int = 12
    num_decoder_layers: int = 0
    num_heads: int = 16
    num_decoder_heads: int = 0
    ffn_size: int = 4096
    decoder_ffn_size: int = 0
    seq_len: int = 1024
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    classifier_dropout: float = 0.0
    scale_embedding: bool = False
    start: int = field(default=2, metadata={"least": 0})
    pad: int = field(default=1, metadata={"least": 0})
    end: int = field(default=2, metadata={"least": 0})
    num_labels: int = 3
    label_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, other in (("num_decoder_layers", "num_layers"), ("num_decoder_heads", "num_heads")):
            object.__setattr__(self, name, getattr(self, name) or getattr(self, other))
        object.__setattr__(self, "decoder_ffn_size", self.decoder_ffn_size or self.ffn_size)
        object.__setattr__(self, "label_names", tuple(self.label_names))
        check_dimensions(self)
        owner = type(self).__name__
        check_activation(owner, self.activation)
        check_label_names(self)
        for heads in (self.num_heads, self.num_decoder_heads):
            if self.hidden_size % heads:
                raise ConfigError(f"{owner}: hidden_size {self.hidden_size} is not a multiple of {heads} heads")

    @property
    def embedding_scale(self) -> float:
        """What token embeddings are multiplied by."""
        return self.hidden_size**0.5 if self.scale_embedding else 1.0

    @classmethod
    def nano(cls, **changes: Any) -> BartConfig:
        """A BART that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_size": 64, "seq_len": 32}
        return cls(**{**base, **changes})


class SequenceBlock(Layer):
    """Attention, in a decoder attention to the context, and a feed-forward, each around its sum and its norm."""

    attention: ContextAttention
    attention_norm: LayerNorm
    cross: ContextAttention
    cross_norm: LayerNorm
    ffn: TwoLayers
    ffn_norm: LayerNorm
    drop: Dropout

    def __init__(self, config: Any, is_decoder: bool) -> None:
        super().__init__()
        width = config.hidden_size
        heads = config.num_decoder_heads if is_decoder else config.num_heads
        ffn_size = config.decoder_ffn_size if is_decoder else config.ffn_size
        options = {"biases": (True, config.key_bias, True, True), "dropout": config.attention_dropout}
        self.is_decoder, self.norm_first = is_decoder, config.norm_first
        self.attention, self.attention_norm = ContextAttention(width, width, heads, **options), LayerNorm(width)
        if is_decoder:
            self.cross, self.cross_norm = ContextAttention(width, width, heads, **options), LayerNorm(width)
        self.ffn = TwoLayers(width, ffn_size, config.activation, dropout=config.activation_dropout)
        self.ffn_norm, self.drop = LayerNorm(width), Dropout(config.dropout)

    def forward(self, x_bse: Any, mask: Any = None, context: Any = None, context_mask: Any = None) -> Any:
        def attend(x_bse: Any) -> Any:
            return self.attention(x_bse, mask, is_causal=self.is_decoder)

        x_bse = self._around(self.attention_norm, x_bse, attend)
        if self.is_decoder:
            x_bse = self._around(self.cross_norm, x_bse, lambda x: self.cross(x, context_mask, context))
        return constrain(self._around(self.ffn_norm, x_bse, self.ffn), "batch", "seq", "embed")

    def extend(self, x_bse: Any, mask: Any, layer: LayerTexts, start: Any, context_mask: Any) -> Any:
        """forward of tokens that come at the places start [batch] on, which the layer takes in."""
        x_bse = self._around(self.attention_norm, x_bse, lambda x: self.attention.extend(x, layer, start, mask))
        x_bse = self._around(self.cross_norm, x_bse, lambda x: self.cross.attend(x, *layer.cross, context_mask))
        return self._around(self.ffn_norm, x_bse, self.ffn)

    def _around(self, norm: LayerNorm, x_bse: Any, part: Callable[[Any], Any]) -> Any:
        if self.norm_first:
            return x_bse + self.drop(part(norm(x_bse)))
        return norm(x_bse + self.drop(part(x_bse)))


class Places(Layer):
    """What is added to embeddings by their place: rows of a table, learned, or made once by the family's function."""

    weight: Any

    def __init__(self, config: Any, seq_len: int) -> None:
        super().__init__()
        rows, self.spare = seq_len + config.spare_positions, config.spare_positions
        make = type(config).table
        if make is None:
            self.weight = self.create_parameter([rows, config.hidden_size], attr=normal(), dims=(None, "embed"))
        else:
            self.register_buffer("weight", to_tensor(make(rows, config.hidden_size)), persistable=False)

    def forward(self, places: Any) -> Any:
        """Rows of places, counted from 0, int [..]."""
        return F.embedding(places + self.spare, self.weight)


class SequenceStack(Layer):
    """Positions, blocks and the norms around them, of an encoder or of a decoder. seq_len: that of config if 0."""

    positions: Places
    embedding_norm: LayerNorm | None
    blocks: LayerList
    norm: LayerNorm | None
    drop: Dropout

    def __init__(self, config: Any, is_decoder: bool, seq_len: int = 0) -> None:
        super().__init__()
        count = config.num_decoder_layers if is_decoder else config.num_layers
        self.positions = Places(config, seq_len or config.seq_len)
        self.embedding_norm = LayerNorm(config.hidden_size) if config.embedding_norm else None
        self.blocks = LayerList([SequenceBlock(config, is_decoder) for _ in range(count)])
        self.norm = LayerNorm(config.hidden_size) if config.last_norm else None
        self.drop = Dropout(config.dropout)

    def forward(self, x_bse: Any, places: Any, mask: Any = None, context: Any = None, context_mask: Any = None) -> Any:
        x_bse = self.drop(self.placed(x_bse, places))
        for block in self.blocks:
            x_bse = block(x_bse, mask, context, context_mask)
        return x_bse if self.norm is None else self.norm(x_bse)

    def placed(self, x_bse: Any, places: Any) -> Any:
        """Embeddings with their places, normed where the family norms them."""
        x_bse = x_bse + self.positions(places)
        return x_bse if self.embedding_norm is None else self.embedding_norm(x_bse)

    def extend(self, x_bse: Any, cache: TextsCache) -> Any:
        """forward of one token of each text, [batch, 1, embed], after those in the cache, which takes it in."""
        place = cache.length[:1]
        x_bse = self.placed(x_bse, place)
        mask = (arange(cache.places, dtype="int32") <= place).reshape([1, 1, 1, -1])
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x_bse = block.extend(x_bse, mask, layer, cache.length, cache.mask)
        return x_bse if self.norm is None else self.norm(x_bse)


class BartForConditionalGeneration(EncoderDecoder):
    """Token ids [batch, seq], and those that are written [batch, s] -> logits [batch, s, vocab].

    decoder_input_ids begin with config.start. attention_mask [batch, seq], decoder_attention_mask [batch, s]: 0 where a
    place is padding, which no other sees. With labels [batch, s], and without decoder_input_ids, which are then the
    labels after config.start: the mean cross-entropy (0-D, nats a token); -100 leaves a place out. Without both the
    input_ids are what is written, one place later.

    >>> from polyreme.eager.tensor import to_tensor
    >>> BartForConditionalGeneration(BartConfig.nano())(to_tensor([[0, 6, 2]]), labels=to_tensor([[0, 8, 2]])).shape
    paddle.Size([])
    """

    tokens: Embedding
    encoder: SequenceStack
    decoder: SequenceStack

    family: Any = architecture("bart", "seq2seq_lm")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.most_tokens, self.most_inputs = config, config.seq_len, config.seq_len
        self.tokens = Embedding(config.vocab_size, config.hidden_size, weight_attr=normal(), dims=("vocab", "embed"))
        self.encoder = self.make_encoder(config)
        self.decoder = SequenceStack(config, is_decoder=True)
        if config.logit_bias:
            self.register_buffer("logit_bias", to_tensor(np.zeros((1, config.vocab_size), np.float32)))

    def make_encoder(self, config: Any) -> SequenceStack:
        """A new encoder."""
        return SequenceStack(config, is_decoder=False)

    def decoder_ids(self, input_ids: Any, decoder_input_ids: Any, labels: Any) -> Any:
        """As of EncoderDecoder; the input one place later where nothing says what is written."""
        if decoder_input_ids is None and labels is None:
            decoder_input_ids = self.shifted(input_ids)
        return super().decoder_ids(input_ids, decoder_input_ids, labels)

    def encode(self, inputs: Any, mask: Any) -> Any:
        """What is read of ids [batch, t]."""
        return self.encoder(self._embed(inputs), self.places(inputs), mask)

    def decode(self, ids: Any, mask: Any, context: Any, context_mask: Any) -> Any:
        """The decoder's output of ids [batch, s]."""
        return self.decoder(self._embed(ids), self.places(ids), mask, context, context_mask)

    def decode_next(self, ids: Any, cache: TextsCache) -> Any:
        """The decoder's output of one token of each text."""
        return self.decoder.extend(self._embed(ids), cache)

    def new_cache(self, batch: int, t: int, places: int) -> TextsCache:
        """A cache of so many texts."""
        heads = (self.config.num_decoder_heads, self.config.hidden_size // self.config.num_decoder_heads)
        return TextsCache(len(self.decoder.blocks), batch, t, places, heads, self.tokens.weight.dtype)

    def project(self, hidden: Any) -> Any:
        """Logits of the decoder's output."""
        logits = hidden.matmul(self.tokens.weight, transpose_y=True)
        return logits + self.logit_bias.astype(logits.dtype) if self.config.logit_bias else logits

    def places(self, ids: Any) -> Any:
        """The place of each of ids [batch, s]. Raises ShapeError for rows that are too long."""
        seq = ids.shape[1]
        if seq > self.config.seq_len:
            raise ShapeError(
                f"{type(self).__name__}: {seq} tokens a row, but there are positions for {self.config.seq_len}; "
                "shorten the rows"
            )
        return arange(seq, dtype="int32")

    def _embed(self, ids: Any) -> Any:
        scale = self.config.embedding_scale
        x_bse = constrain(self.tokens(ids), "batch", "seq", "embed")
        return x_bse if scale == 1 else x_bse * scale


class BartForSequenceClassification(Pretrained, Layer):
    """Token ids [batch, seq] -> scores [batch, num_labels], of the decoder's output at the last config.end of each row.

    attention_mask: as of BartForConditionalGeneration. With labels [batch]: the mean cross-entropy (0-D).

    >>> from polyreme.eager.tensor import to_tensor
    >>> BartForSequenceClassification(BartConfig.nano())(to_tensor([[0, 6, 2]])).shape
    paddle.Size([1, 3])
    """

    model: BartForConditionalGeneration
    dense: Linear
    classifier: Linear
    drop: Dropout

    family: Any = architecture("bart", "classification")

    def __init__(self, config: BartConfig) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.model = BartForConditionalGeneration(config)
        del self.model.logit_bias  # of its logits, which nobody asks for
        self.dense = linear(width, width, ("embed", None))
        self.classifier = linear(width, config.num_labels, ("embed", None))
        self.drop = Dropout(config.classifier_dropout)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        model = self.model
        ids = model.decoder_ids(input_ids, None, None)
        mask = key_mask(type(self).__name__, attention_mask, input_ids.shape)
        hidden = model.decode(ids, None, model.encode(input_ids, mask), mask)
        numbers = arange(input_ids.shape[1], dtype="int32").expand(list(input_ids.shape))
        last = where(input_ids == self.config.end, numbers, full_like(numbers, 0)).max(1, keepdim=True)
        pooled = (hidden * (numbers == last).astype(hidden.dtype).unsqueeze(-1)).sum(1)
        scores = self.classifier(self.drop(self.dense(self.drop(pooled)).tanh()))
        return scores if labels is None else F.cross_entropy(scores, labels)

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray | None, ...]:
        """What a call takes, made up: token ids."""
        return (rng.integers(0, self.config.vocab_size, (1, min(length, self.config.seq_len))),)


# as published

_OUTER = {"layernorm_embedding": "embedding_norm", "layer_norm": "norm"}
_PARTS = {"self_attn": "attention", "encoder_attn": "cross"}
_MAPS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}
_NORMS = {
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn_layer_norm": "cross_norm",
    "final_layer_norm": "ffn_norm",
}


def stack_rules(name: str, ours: str = "") -> list[WeightRule]:
    """The weights of the encoder or the decoder, by this name; ours: what comes before it here."""
    there, here = f"model.{name}", f"{ours}{name}"
    block, own = f"{there}.layers.{{n}}", f"{here}.blocks.{{n}}"
    maps = {f"{block}.{part}.{a}": f"{own}.{to}.{b}" for part, to in _PARTS.items() for a, b in _MAPS.items()}
    maps |= {f"{block}.fc1": f"{own}.ffn.up", f"{block}.fc2": f"{own}.ffn.down"}
    norms = {f"{there}.{a}": f"{here}.{b}" for a, b in _OUTER.items()}
    norms |= {f"{block}.{a}": f"{own}.{b}" for a, b in _NORMS.items()}
    return [
        WeightRule(f"{there}.embed_positions.weight", f"{here}.positions.weight", SAME),
        *(rule for a, b in maps.items() for rule in linear_rules(a, b)),
        *(rule for a, b in norms.items() for rule in same_rules(a, b)),
    ]


def model_rules(ours: str = "") -> list[WeightRule]:
    """The weights of both stacks and the embedding; ours: as of stack_rules."""
    tokens = WeightRule("model.shared.weight", f"{ours}tokens.weight", SAME)
    return [tokens, *stack_rules("encoder", ours), *stack_rules("decoder", ours)]


def _rules(config: Any) -> list[WeightRule]:
    return [*model_rules(), WeightRule("final_logits_bias", "logit_bias", SAME)]


def _label_rules(config: Any) -> list[WeightRule]:
    head = {"classification_head.dense": "dense", "classification_head.out_proj": "classifier"}
    return [*model_rules("model."), *(rule for a, b in head.items() for rule in linear_rules(a, b))]


def is_copy(name: str, config: Any) -> bool:
    """Whether a weight is a copy of the embedding, or positions that are not learned."""
    copies = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    is_table = type(config).table is not None and name.endswith(".embed_positions.weight")
    return name in copies or is_table


KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_attention_heads": "num_heads",
    "decoder_attention_heads": "num_decoder_heads",
    "encoder_ffn_dim": "ffn_size",
    "decoder_ffn_dim": "decoder_ffn_size",
    "max_position_embeddings": "seq_len",
    "activation_function": "activation",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "scale_embedding": "scale_embedding",
    "decoder_start_token_id": "start",
    "pad_token_id": "pad",
    "eos_token_id": "end",
}
"""What config.json says of a BART and its kin."""
READ_KEYS = (
    *("init_std", "encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers", "classif_dropout"),
    *("forced_bos_token_id", "forced_eos_token_id", "force_bos_token_to_be_generated", "output_past", "prefix"),
    *("_num_labels", "save_step", "extra_pos_embeddings", "bad_words_ids", "classifier_dropout", *LABEL_KEYS),
)
"""Of config.json what a model that writes does not compute with: how weights began, what is left out while training,
how texts are chosen, labels."""
FIXED = {
    "is_encoder_decoder": (True,),
    "add_bias_logits": (False,),
    "tie_word_embeddings": (True,),
}


def published_writer(config_keys: Mapping[str, str] = KEYS, **differences: Any) -> PublishedFamily:
    """The record of a model that writes, of BART or of one of its kin. differences: fields of PublishedFamily."""
    fields: dict[str, Any] = {
        "keys": config_keys,
        "weights": _rules,
        "fixed": FIXED,
        "prefix": "model.",
        "heads": ("final_logits_bias", "lm_head.", "classification_head."),
        "spare": is_copy,
        "read_keys": READ_KEYS,
    }
    return PublishedFamily(**{**fields, **differences})


_OLD = {
    "normalize_before": (False,),
    "normalize_embedding": (True,),
    "add_final_layer_norm": (False,),
    "static_position_embeddings": (False,),
}
_BART: dict[str, Any] = {
    "model_type": "bart",
    "fixed": {**FIXED, **_OLD},
    "defaults": {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 2},
}
PUBLISHED_SEQ2SEQ_LM = published_writer(architecture="BartForConditionalGeneration", **_BART)
PUBLISHED_CLASSIFICATION = published_writer(
    {**KEYS, "classifier_dropout": "classifier_dropout"},
    architecture="BartForSequenceClassification",
    weights=_label_rules,
    read=read_labels,
    write=write_labels,
    **_BART,
)
