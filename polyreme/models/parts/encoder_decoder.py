"""What models share that read a text or a sound once and write another text: attention to both, the cache of a decoder
that writes token by token, a call and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.models.parts.encoder import key_mask, linear
from polyreme.models.pretrained import Pretrained
from polyreme.nn import Layer
from polyreme.nn import functional as F
from polyreme.nn.layers.linear import Linear
from polyreme.ops.attention.caches import tokens_cached
from polyreme.ops.creation import full_like, zeros
from polyreme.ops.indices.gather import where
from polyreme.ops.layout import constrain
from polyreme.ops.manipulation import concat
from polyreme.registry import Reference

_GENERATE: Reference[Any] = Reference("polyreme.generation.strategies", "generate")
"""Which stands above models, and is loaded when it is asked for."""


class ContextAttention(Layer):
    """Attention from x [batch, seq, embed] to itself, or to a context [batch, t, embed].

    inner: width of all heads. biases: whether the four maps, queries, keys, values and what comes out, add one each.
    scale: of scores, head_dim ** -0.5 if None.
    """

    q: Linear
    k: Linear
    v: Linear
    out: Linear

    num_heads: int
    dropout: float

    def __init__(
        self,
        width: int,
        inner: int,
        num_heads: int,
        *,
        biases: Sequence[bool] = (True, True, True, True),
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.scale = num_heads, dropout, scale
        self.q, self.k, self.v = (linear(width, inner, ("embed", "heads"), bias) for bias in biases[:3])
        self.out = linear(inner, width, ("heads", "embed"), biases[3])

    def forward(self, x_bse: Any, mask: Any = None, context: Any = None, is_causal: bool = False) -> Any:
        """mask: as attn_mask of scaled_dot_product_attention."""
        keys, values = self.keys_values(x_bse if context is None else context)
        return self.attend(x_bse, keys, values, mask, is_causal)

    def keys_values(self, context: Any) -> tuple[Any, Any]:
        """Keys and values of context [batch, t, embed], [batch, t, heads, head_dim] each."""
        return self._by_heads(self.k, context), self._by_heads(self.v, context)

    def attend(self, x_bse: Any, keys: Any, values: Any, mask: Any, is_causal: bool = False) -> Any:
        """What x gives of these."""
        options = {"dropout_p": self.dropout, "is_causal": is_causal, "training": self.training, "scale": self.scale}
        query = self._by_heads(self.q, x_bse)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **options)
        return self.out(mixed.reshape([*x_bse.shape[:2], -1]))

    def extend(self, x_bse: Any, layer: LayerTexts, start: Any, mask: Any) -> Any:
        """forward of tokens that come at the places start [batch] on, which the layer takes in."""
        for held, new in zip(layer.past, self.keys_values(x_bse), strict=True):
            tokens_cached(held, new, start, out=held)
        keys, values = (held.transpose([0, 2, 1, 3]) for held in layer.past)
        return self.attend(x_bse, keys, values, mask)

    def _by_heads(self, part: Layer, x_bse: Any) -> Any:
        return constrain(
            part(x_bse).reshape([*x_bse.shape[:2], self.num_heads, -1]), "batch", "block_seq", "heads", None
        )


class LayerTexts(NamedTuple):
    """What a decoder's block has of tokens before: keys and values of its own, [batch, heads, places, head_dim], and of
    the context, [batch, t, heads, head_dim]."""

    past: tuple[Any, Any]
    cross: tuple[Any, Any]


class TextsCache:
    """Of `batch` texts of at most `places` tokens, each after a context of t places: what a decoder's blocks have of
    both.

    heads: so many, of this width. length: int32 [batch], tokens that are in. mask: bool [batch, 1, 1, t], which of the
    t there are.
    """

    length: Tensor
    mask: Tensor
    places: int
    layers: list[LayerTexts]

    def __init__(self, num_layers: int, batch: int, t: int, places: int, heads: tuple[int, int], dtype: Any) -> None:
        count, width = heads
        self.places = places
        self.length, self.mask = zeros([batch], "int32"), zeros([batch, 1, 1, t], "bool")
        own, cross = [batch, count, places, width], [batch, t, count, width]
        self.layers = [
            LayerTexts((zeros(own, dtype), zeros(own, dtype)), (zeros(cross, dtype), zeros(cross, dtype)))
            for _ in range(num_layers)
        ]


class EncoderDecoder(Pretrained, Layer):
    """A model that reads an input once and writes tokens.

    A class sets `config` (with vocab_size, start, the id before the decoder's first, and pad, what fills up rows) and
    `decoder`, whose blocks have `cross`, a ContextAttention, and writes encode, decode, decode_next and project.
    """

    config: Any
    decoder: Any
    reads_ids: bool = True
    """Whether inputs are token ids."""
    most_tokens: int | None = None
    """Tokens that a text may have; None for no end."""
    most_inputs: int | None = None
    """Places that an input may have; None for no end."""

    def encode(self, inputs: Any, mask: Any) -> Any:
        """What is read of an input, [batch, t, embed]; mask: as of key_mask."""
        raise NotImplementedError

    def decode(self, ids: Any, mask: Any, context: Any, context_mask: Any) -> Any:
        """The decoder's output of ids [batch, s], after what was read."""
        raise NotImplementedError

    def decode_next(self, ids: Any, cache: Any) -> Any:
        """The decoder's output of one token of each text, [batch, 1], after those in the cache, which takes it in."""
        raise NotImplementedError

    def project(self, hidden: Any) -> Any:
        """Logits of the decoder's output."""
        raise NotImplementedError

    def new_cache(self, batch: int, t: int, places: int) -> TextsCache:
        """A cache of so many texts of at most `places` tokens, after inputs of t places."""
        raise NotImplementedError

    def shifted(self, labels: Any) -> Any:
        """What the decoder takes to write labels [batch, s]: they after config.start, config.pad where they are
        -100."""
        written = where(labels == -100, full_like(labels, self.config.pad), labels)
        return concat([full_like(labels[:, :1], self.config.start), written[:, :-1]], axis=1)

    def decoder_ids(self, input_ids: Any, decoder_input_ids: Any, labels: Any) -> Any:
        """decoder_input_ids, or what they are if None. Raises ConfigError where nothing says it, ShapeError for ids
        that are not [batch, s]."""
        owner = type(self).__name__
        if decoder_input_ids is None:
            if labels is None:
                raise ConfigError(
                    f"{owner}: neither decoder_input_ids nor labels; give what is written, or its beginning"
                )
            decoder_input_ids = self.shifted(labels)
        for ids in (input_ids, decoder_input_ids):
            if len(ids.shape) != 2:
                raise ShapeError(f"{owner}: ids have shape {list(ids.shape)}; give [batch, seq]")
        return decoder_input_ids

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        labels: Any = None,
    ) -> Any:
        decoder_input_ids = self.decoder_ids(input_ids, decoder_input_ids, labels)
        owner = type(self).__name__
        mask = key_mask(owner, attention_mask, input_ids.shape)
        written_mask = key_mask(owner, decoder_attention_mask, decoder_input_ids.shape)
        hidden = self.decode(decoder_input_ids, written_mask, self.encode(input_ids, mask), mask)
        logits = self.project(hidden)
        return logits if labels is None else F.cross_entropy(logits, labels, ignore_index=-100)

    # token by token

    def num_places(self, one: Any) -> int:
        """Places of one input: here tokens of a text."""
        return len(one)

    def check_input(self, one: Any, whose: str) -> None:
        """Raises ConfigError, said of `whose`, for an input that is not the model's."""
        most, vocab = self.most_inputs, self.config.vocab_size
        if not len(one):
            raise ConfigError(f"{whose} has no tokens; give at least one")
        if most is not None and len(one) > most:
            raise ConfigError(f"{whose} has {len(one)} tokens, and the model positions for {most}; shorten it")
        outside = next((token for token in one if not 0 <= token < vocab), None)
        if outside is not None:
            raise ConfigError(f"{whose}: token {outside} is not of the vocabulary, 0 to {vocab - 1}")

    def packed(self, inputs: Sequence[Any], t: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs as one array, here ids int64 [batch, t], and which of their places there are, [batch, t]."""
        ids = np.full((len(inputs), t), self.config.pad, np.int64)
        mask = np.zeros_like(ids)
        for row, one in enumerate(inputs):
            ids[row, : len(one)], mask[row, : len(one)] = one, 1
        return ids, mask

    def begin(self, inputs: Any, attention_mask: Any, cache: Any) -> None:
        """Read inputs into a cache, whose texts are empty then. attention_mask: [batch, t], 0 where there is
        nothing."""
        mask = key_mask(type(self).__name__, attention_mask, attention_mask.shape)
        context = self.encode(inputs, mask)
        cache.length.zero_()
        cache.mask.set_value(mask)
        for block, layer in zip(self.decoder.blocks, cache.layers, strict=True):
            for held, new in zip(layer.cross, block.cross.keys_values(context), strict=True):
                held.set_value(new)

    def extend(self, tokens: Any, cache: Any) -> Any:
        """Logits [batch, vocab], float32, after a token of each text, [batch, 1], which the cache takes in."""
        hidden = self.decode_next(tokens, cache)
        cache.length.add_(1)
        return self.project(hidden)[:, 0].astype("float32")

    def generate(self, input_ids: Any, attention_mask: Any = None, **settings: Any) -> tuple[Any, Any]:
        """Write after texts [batch, seq], by decode_strategy "greedy_search" or "sampling" -> ids of the new tokens,
        config.start left out, int64 [batch * num_return_sequences, longest], and their scores, [.., 1].

        settings: as of generation.strategies.generate.
        """
        return _GENERATE.load()(self, input_ids, attention_mask, **settings)

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray | None, ...]:
        """What a call takes, made up: token ids, all of them seen, and what is written."""
        ids = rng.integers(0, self.config.vocab_size, (2, 1, length))
        return ids[0], np.ones((1, length), np.int64), ids[1]
