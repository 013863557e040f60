"""T5: an encoder and a decoder that attends to it, with learned biases of distances in place of positions.

Source: arXiv:1910.10683; gated feed-forwards arXiv:2002.05202. Same function as transformers'
T5ForConditionalGeneration, whose values are the fixtures of tests/models/test_encoders.py. Logical dims of parameters:
embed, heads (num_heads * head_dim), ffn, vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.distance_buckets import buckets
from polyreme.models.parts.encoder import ACTIVATIONS, check_activation, linear, normal
from polyreme.models.parts.encoder_decoder import ContextAttention, EncoderDecoder, LayerTexts, TextsCache
from polyreme.nn import Dropout, Embedding, Layer, LayerList, RMSNorm
from polyreme.nn.layers.linear import Linear
from polyreme.ops.creation import arange, full_like
from polyreme.ops.indices.gather import where
from polyreme.ops.layout import constrain

_UNSEEN = -1e9  # added to a score, leaves nothing of it in any dtype


@dataclass(frozen=True)
class T5Config:
    """Dimensions of a T5.

    num_decoder_layers: num_layers if 0. head_dim: width of a head. activation: one of models.parts.encoder.ACTIVATIONS;
    gated: whether it is of one linear map that a second is multiplied with. num_buckets: distances that have a bias of
    their own, the far ones together, from max_distance on all. dropout: a probability, while training. tie_embeddings:
    whether the output projection is the embedding. scale_outputs: whether what it takes is scaled by hidden_size **
    -0.5; where the embeddings are tied if None. start: the id before the
    decoder's first.
    """

    vocab_size: int = 32128
    hidden_size: int = 512
    num_layers: int = 6
    num_decoder_layers: int = 0
    num_heads: int = 8
    head_dim: int = 64
    ffn_size: int = 2048
    activation: str = "relu"
    gated: bool = False
    num_buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.1
    rms_norm_epsilon: float = 1e-6
    tie_embeddings: bool = True
    scale_outputs: bool | None = None
    start: int = field(default=0, metadata={"least": 0})

    @property
    def pad(self) -> int:
        """What fills up rows: the same id."""
        return self.start

    def __post_init__(self) -> None:
        if self.scale_outputs is None:
            object.__setattr__(self, "scale_outputs", self.tie_embeddings)
        if not self.num_decoder_layers:
            object.__setattr__(self, "num_decoder_layers", self.num_layers)
        check_dimensions(self)
        check_activation("T5Config", self.activation)
        if self.num_buckets % 4 or self.max_distance <= self.num_buckets // 2:
            raise ConfigError(
                f"T5Config: num_buckets {self.num_buckets} and max_distance {self.max_distance}; the first must be a "
                "multiple of 4 and less than twice the second"
            )

    @classmethod
    def nano(cls, **changes: Any) -> T5Config:
        """A T5 that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "head_dim": 8, "ffn_size": 64}
        return cls(**{**base, **changes})


class T5Attention(ContextAttention):
    """Attention without a scale and without biases of its maps."""

    def __init__(self, config: T5Config) -> None:
        inner = config.num_heads * config.head_dim
        options = {"biases": (False,) * 4, "scale": 1.0, "dropout": config.dropout}
        super().__init__(config.hidden_size, inner, config.num_heads, **options)


class T5FeedForward(Layer):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    gate: Linear | None
    up: Linear
    down: Linear

    activation: Callable[..., Any]

    drop: Dropout

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        width, ffn = config.hidden_size, config.ffn_size
        self.gate = linear(width, ffn, ("embed", "ffn"), bias=False) if config.gated else None
        self.up = linear(width, ffn, ("embed", "ffn"), bias=False)
        self.down = linear(ffn, width, ("ffn", "embed"), bias=False)
        self.activation, self.drop = ACTIVATIONS[config.activation], Dropout(config.dropout)

    def forward(self, x_bse: Any) -> Any:
        up = self.up(x_bse)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x_bse)) * up
        return self.down(self.drop(constrain(hidden, "batch", "block_seq", "ffn")))


class T5Block(Layer):
    """x + attention(norm(x)), in a decoder x + cross(norm(x), context), then x + feed_forward(norm(x))."""

    attention_norm: RMSNorm
    attention: T5Attention
    cross_norm: RMSNorm
    cross: T5Attention
    ffn_norm: RMSNorm
    ffn: T5FeedForward
    drop: Dropout

    def __init__(self, config: T5Config, is_decoder: bool) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, config.rms_norm_epsilon
        self.is_decoder = is_decoder
        self.attention_norm, self.attention = RMSNorm(width, epsilon=epsilon), T5Attention(config)
        if is_decoder:
            self.cross_norm, self.cross = RMSNorm(width, epsilon=epsilon), T5Attention(config)
        self.ffn_norm, self.ffn = RMSNorm(width, epsilon=epsilon), T5FeedForward(config)
        self.drop = Dropout(config.dropout)

    def forward(self, x_bse: Any, bias: Any, context: Any = None, context_bias: Any = None) -> Any:
        mixed = self.attention(self.attention_norm(x_bse), bias, is_causal=self.is_decoder)
        x_bse = x_bse + self.drop(mixed)
        if self.is_decoder:
            x_bse = x_bse + self.drop(self.cross(self.cross_norm(x_bse), context_bias, context))
        return constrain(x_bse + self.drop(self.ffn(self.ffn_norm(x_bse))), "batch", "seq", "embed")

    def extend(self, x_bse: Any, bias: Any, layer: LayerTexts, start: Any, context_bias: Any) -> Any:
        """forward of tokens that come at the places start [batch] on, which the layer takes in."""
        x_bse = x_bse + self.attention.extend(self.attention_norm(x_bse), layer, start, bias)
        x_bse = x_bse + self.cross.attend(self.cross_norm(x_bse), *layer.cross, context_bias)
        return x_bse + self.ffn(self.ffn_norm(x_bse))


class T5Cache(TextsCache):
    """A TextsCache with the bucket of every distance of two places."""

    buckets: Tensor

    def __init__(self, model: T5ForConditionalGeneration, batch: int, t: int, places: int) -> None:
        config, dtype = model.config, model.tokens.weight.dtype
        heads = (config.num_heads, config.head_dim)
        super().__init__(len(model.decoder.blocks), batch, t, places, heads, dtype)
        self.buckets = to_tensor(buckets(places, places, config.num_buckets, config.max_distance, True))


class T5Stack(Layer):
    """Blocks that share one table of biases, and the norm after them."""

    config: T5Config
    is_decoder: bool
    distances: Embedding
    blocks: LayerList
    norm: RMSNorm
    drop: Dropout

    def __init__(self, config: T5Config, num_layers: int, is_decoder: bool) -> None:
        super().__init__()
        self.config, self.is_decoder = config, is_decoder
        self.distances = Embedding(config.num_buckets, config.num_heads, weight_attr=normal())
        self.blocks = LayerList([T5Block(config, is_decoder) for _ in range(num_layers)])
        self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_epsilon)
        self.drop = Dropout(config.dropout)

    def forward(self, x_bse: Any, mask: Any = None, context: Any = None, context_mask: Any = None) -> Any:
        seq, config = x_bse.shape[1], self.config
        places = buckets(seq, seq, config.num_buckets, config.max_distance, self.is_decoder)
        bias = self.distances(to_tensor(places)).transpose([2, 0, 1]).unsqueeze(0)
        if mask is not None:
            bias = where(mask, bias, full_like(bias, _UNSEEN))
        x_bse = self.drop(x_bse)
        for block in self.blocks:
            x_bse = block(x_bse, bias, context, context_mask)
        return self.drop(self.norm(x_bse))

    def extend(self, x_bse: Any, cache: T5Cache) -> Any:
        """forward of one token of each text, [batch, 1, embed], after those in the cache, which takes it in."""
        place = cache.length[:1]
        bias = self.distances(cache.buckets[place]).transpose([2, 0, 1]).unsqueeze(0)
        bias = where(arange(cache.places, dtype="int32") <= place, bias, full_like(bias, _UNSEEN))
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x_bse = block.extend(x_bse, bias, layer, cache.length, cache.mask)
        return self.norm(x_bse)


class T5ForConditionalGeneration(EncoderDecoder):
    """Token ids [batch, seq], and those that are written [batch, s] -> logits [batch, s, vocab].

    decoder_input_ids begin with config.start. attention_mask [batch, seq], decoder_attention_mask [batch, s]: 0 where a
    place is padding, which no other sees. With labels [batch, s], and without decoder_input_ids, which are then the
    labels after config.start: the mean cross-entropy (0-D, nats a token); -100 leaves a place out.

    >>> from polyreme.eager.tensor import to_tensor
    >>> T5ForConditionalGeneration(T5Config.nano())(to_tensor([[5, 6, 7]]), decoder_input_ids=to_tensor([[0, 8]])).shape
    paddle.Size([1, 2, 128])
    """

    head: Linear

    tokens: Embedding
    encoder: T5Stack
    decoder: T5Stack

    family: Any = architecture("t5", "seq2seq_lm")

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab_size, config.hidden_size, weight_attr=normal(), dims=("vocab", "embed"))
        self.encoder = T5Stack(config, config.num_layers, is_decoder=False)
        self.decoder = T5Stack(config, config.num_decoder_layers, is_decoder=True)
        if not config.tie_embeddings:
            self.head = linear(config.hidden_size, config.vocab_size, ("embed", "vocab"), bias=False)

    def encode(self, inputs: Any, mask: Any) -> Any:
        """What is read of ids [batch, t]."""
        return self.encoder(self._embed(inputs), mask)

    def decode(self, ids: Any, mask: Any, context: Any, context_mask: Any) -> Any:
        """The decoder's output of ids [batch, s]."""
        return self.decoder(self._embed(ids), mask, context, context_mask)

    def decode_next(self, ids: Any, cache: T5Cache) -> Any:
        """The decoder's output of one token of each text."""
        return self.decoder.extend(self._embed(ids), cache)

    def new_cache(self, batch: int, t: int, places: int) -> T5Cache:
        """A cache of so many texts."""
        return T5Cache(self, batch, t, places)

    def project(self, hidden: Any) -> Any:
        """Logits of the decoder's output."""
        if self.config.scale_outputs:
            hidden = hidden * self.config.hidden_size**-0.5
        if self.config.tie_embeddings:
            return hidden.matmul(self.tokens.weight, transpose_y=True)
        return self.head(hidden)

    def _embed(self, ids: Any) -> Any:
        return constrain(self.tokens(ids), "batch", "seq", "embed")


# as published

_PROJECTIONS = {"gelu": "gelu_new"}
"""What the name of a gated activation means."""


def _attention_rules(there: str, here: str) -> list[WeightRule]:
    names = {"q": "q", "k": "k", "v": "v", "o": "out"}
    return [WeightRule(f"{there}.{name}.weight", f"{here}.{ours}.weight") for name, ours in names.items()]


def _stack_rules(name: str, config: T5Config) -> list[WeightRule]:
    there, here = f"{name}.block.{{n}}.layer", f"{name}.blocks.{{n}}"
    last = 2 if name == "decoder" else 1
    parts = {"wi_0": "gate", "wi_1": "up", "wo": "down"} if config.gated else {"wi": "up", "wo": "down"}
    rules = [
        WeightRule(
            f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{name}.distances.weight", SAME
        ),
        WeightRule(f"{name}.final_layer_norm.weight", f"{name}.norm.weight", SAME),
        WeightRule(f"{there}.0.layer_norm.weight", f"{here}.attention_norm.weight", SAME),
        *_attention_rules(f"{there}.0.SelfAttention", f"{here}.attention"),
        WeightRule(f"{there}.{last}.layer_norm.weight", f"{here}.ffn_norm.weight", SAME),
    ]
    if name == "decoder":
        rules.append(WeightRule(f"{there}.1.layer_norm.weight", f"{here}.cross_norm.weight", SAME))
        rules += _attention_rules(f"{there}.1.EncDecAttention", f"{here}.cross")
    for part, ours in parts.items():
        rules.append(WeightRule(f"{there}.{last}.DenseReluDense.{part}.weight", f"{here}.ffn.{ours}.weight"))
    return rules


def _rules(config: T5Config) -> list[WeightRule]:
    outer = [WeightRule("shared.weight", "tokens.weight", SAME), WeightRule("lm_head.weight", "head.weight")]
    return [*outer, *_stack_rules("encoder", config), *_stack_rules("decoder", config)]


def _is_spare(name: str, config: T5Config) -> bool:
    # copies of the embedding; biases that old versions stored and nothing used
    return name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight") or name.endswith(
        "EncDecAttention.relative_attention_bias.weight"
    )


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    *gate, name = str(config.get("feed_forward_proj", "relu")).split("-", 1)
    if gate not in ([], ["gated"]):
        raise ConfigError(f"config.json of a t5: feed_forward_proj is {config['feed_forward_proj']!r}; gated- or plain")
    return {"gated": bool(gate), "activation": _PROJECTIONS.get(name, name) if gate else name}


def _fit(fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """With a head of its own where the files have one whose input is not scaled: transformers 5 says of every T5 that
    its embeddings are tied."""
    is_own = fields.get("scale_outputs") is False and "lm_head.weight" in names
    return fields | {"tie_embeddings": False} if is_own else fields


def _write(config: T5Config) -> dict[str, Any]:
    names = {ours: name for name, ours in _PROJECTIONS.items()} if config.gated else {}
    name = names.get(config.activation, config.activation)
    return {"feed_forward_proj": f"gated-{name}" if config.gated else name}


PUBLISHED_SEQ2SEQ_LM = PublishedFamily(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    keys={
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "num_layers": "num_layers",
        "num_decoder_layers": "num_decoder_layers",
        "num_heads": "num_heads",
        "d_kv": "head_dim",
        "d_ff": "ffn_size",
        "relative_attention_num_buckets": "num_buckets",
        "relative_attention_max_distance": "max_distance",
        "dropout_rate": "dropout",
        "layer_norm_epsilon": "rms_norm_epsilon",
        "tie_word_embeddings": "tie_embeddings",
        "scale_decoder_outputs": "scale_outputs",
        "decoder_start_token_id": "start",
    },
    weights=_rules,
    fixed={"is_encoder_decoder": (True,)},
    spare=_is_spare,
    fit=_fit,
    read=_read,
    # said by feed_forward_proj; of other heads; nothing
    read_keys=("feed_forward_proj", "dense_act_fn", "is_gated_act", "classifier_dropout", "n_positions", "output_past"),
    write=_write,
)
