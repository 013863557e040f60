"""Transformer encoder and decoder stacks.

Shapes are [batch, seq, embed]. Source: arXiv:1706.03762; normalize_before: arXiv:2002.04745.
Logical dims: embed, heads (heads * head_dim), ffn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer
from polyreme.nn.layers.attention import MultiHeadAttention, StaticCache
from polyreme.nn.layers.container import LayerList
from polyreme.nn.layers.dropout import Dropout
from polyreme.nn.layers.linear import Linear
from polyreme.nn.layers.norm import LayerNorm
from polyreme.nn.parameter import ParamAttrLike


class _TransformerLayer(Layer):
    """What encoder and decoder layers share: the feed-forward, and x + dropout(f(x)) with the norm before or after."""

    def _build(
        self,
        d_model: int,
        dim_feedforward: int,
        dropout: float,
        activation: str,
        act_dropout: float | None,
        normalize_before: bool,
        attrs: tuple[Any, Any],
        layer_norm_eps: float,
        num_norms: int,
    ) -> None:
        if not callable(getattr(F, activation, None)):
            raise ConfigError(f"{type(self).__name__}: activation {activation!r} is not in polyreme.nn.functional")
        self.normalize_before = normalize_before
        self.activation = getattr(F, activation)
        self.linear1 = Linear(d_model, dim_feedforward, *attrs, dims=("embed", "ffn"))
        self.dropout = Dropout(dropout if act_dropout is None else act_dropout)
        self.linear2 = Linear(dim_feedforward, d_model, *attrs, dims=("ffn", "embed"))
        for at in range(1, num_norms + 1):
            self.add_sublayer(f"norm{at}", LayerNorm(d_model, layer_norm_eps))
        for at in range(1, num_norms + 1):
            self.add_sublayer(f"dropout{at}", Dropout(dropout))

    def _before(self, x: Any, norm: Layer) -> Any:
        return norm(x) if self.normalize_before else x

    def _after(self, x: Any, made: Any, drop: Layer, norm: Layer) -> Any:
        x = x + drop(made)
        return x if self.normalize_before else norm(x)

    def _feed_forward(self, x: Any, drop: Layer, norm: Layer) -> Any:
        made = self.linear2(self.dropout(self.activation(self.linear1(self._before(x, norm)))))
        return self._after(x, made, drop, norm)


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention and a feed-forward, each with dropout, a residual sum and a LayerNorm.

    weight_attr, bias_attr: one for all, or [attention, feed-forward]. attn_dropout, act_dropout: dropout if None.
    """

    self_attn: MultiHeadAttention

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float = 0.1,
        activation: str = "relu",
        attn_dropout: float | None = None,
        act_dropout: float | None = None,
        normalize_before: bool = False,
        weight_attr: ParamAttrLike | Sequence[ParamAttrLike] = None,
        bias_attr: ParamAttrLike | Sequence[ParamAttrLike] = None,
        layer_norm_eps: float = 1e-5,
    ) -> None:
        weights, biases = _attrs(weight_attr, 2), _attrs(bias_attr, 2)
        super().__init__()
        self._config = {
            "d_model": d_model, "nhead": nhead, "dim_feedforward": dim_feedforward, "dropout": dropout,
            "activation": activation, "attn_dropout": attn_dropout, "act_dropout": act_dropout,
            "normalize_before": normalize_before, "weight_attr": weight_attr, "bias_attr": bias_attr,
            "layer_norm_eps": layer_norm_eps,
        }  # fmt: skip
        attn = dropout if attn_dropout is None else attn_dropout
        self.self_attn = MultiHeadAttention(d_model, nhead, attn, weight_attr=weights[0], bias_attr=biases[0])
        self._build(
            d_model, dim_feedforward, dropout, activation, act_dropout, normalize_before,
            (weights[1], biases[1]), layer_norm_eps, num_norms=2,
        )  # fmt: skip

    def forward(self, src: Any, src_mask: Any = None, cache: Any = None) -> Any:
        """-> [batch, seq, embed]; with a cache (that, the cache moved on)."""
        x = self._before(src, self.norm1)
        made = self.self_attn(x, x, x, src_mask, cache)
        made, cache = (made, None) if cache is None else made
        src = self._after(src, made, self.dropout1, self.norm1)
        src = self._feed_forward(src, self.dropout2, self.norm2)
        return src if cache is None else (src, cache)

    def gen_cache(self, src: Any) -> Any:
        """An empty cache for src's batch."""
        return self.self_attn.gen_cache(src)


class TransformerEncoder(Layer):
    """num_layers layers like encoder_layer, which is the first; the others have initial values of their own."""

    layers: LayerList

    def __init__(self, encoder_layer: Layer, num_layers: int, norm: Layer | None = None) -> None:
        super().__init__()
        self.layers = _stack(encoder_layer, num_layers)
        self.num_layers = num_layers
        self.norm = norm

    def forward(self, src: Any, src_mask: Any = None, cache: Any = None) -> Any:
        """-> [batch, seq, embed]; with caches (that, a list of the caches moved on)."""
        moved = []
        for at, layer in enumerate(self.layers):
            if cache is None:
                src = layer(src, src_mask)
            else:
                src, one = layer(src, src_mask, cache[at])
                moved.append(one)
        src = src if self.norm is None else self.norm(src)
        return src if cache is None else (src, moved)

    def gen_cache(self, src: Any) -> list[Any]:
        """An empty cache for each layer."""
        return [layer.gen_cache(src) for layer in self.layers]


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention to memory and a feed-forward, each with dropout, a residual sum and a LayerNorm.

    weight_attr, bias_attr: one for all, or [self-attention, attention to memory, feed-forward].
    """

    self_attn: MultiHeadAttention
    cross_attn: MultiHeadAttention

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float = 0.1,
        activation: str = "relu",
        attn_dropout: float | None = None,
        act_dropout: float | None = None,
        normalize_before: bool = False,
        weight_attr: ParamAttrLike | Sequence[ParamAttrLike] = None,
        bias_attr: ParamAttrLike | Sequence[ParamAttrLike] = None,
        layer_norm_eps: float = 1e-5,
    ) -> None:
        weights, biases = _attrs(weight_attr, 3), _attrs(bias_attr, 3)
        super().__init__()
        self._config = {
            "d_model": d_model, "nhead": nhead, "dim_feedforward": dim_feedforward, "dropout": dropout,
            "activation": activation, "attn_dropout": attn_dropout, "act_dropout": act_dropout,
            "normalize_before": normalize_before, "weight_attr": weight_attr, "bias_attr": bias_attr,
            "layer_norm_eps": layer_norm_eps,
        }  # fmt: skip
        attn = dropout if attn_dropout is None else attn_dropout
        self.self_attn = MultiHeadAttention(d_model, nhead, attn, weight_attr=weights[0], bias_attr=biases[0])
        self.cross_attn = MultiHeadAttention(d_model, nhead, attn, weight_attr=weights[1], bias_attr=biases[1])
        self._build(
            d_model, dim_feedforward, dropout, activation, act_dropout, normalize_before,
            (weights[2], biases[2]), layer_norm_eps, num_norms=3,
        )  # fmt: skip

    def forward(self, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None, cache: Any = None) -> Any:
        """-> [batch, seq, embed]; with a cache (that, (Cache moved on, StaticCache))."""
        self_cache, static = (None, None) if cache is None else cache
        x = self._before(tgt, self.norm1)
        h = self.self_attn(x, x, x, tgt_mask, self_cache)
        h, self_cache = (h, None) if cache is None else h
        tgt = self._after(tgt, h, self.dropout1, self.norm1)
        h = self.cross_attn(self._before(tgt, self.norm2), memory, memory, memory_mask, static)
        h, static = (h, None) if cache is None else h
        tgt = self._after(tgt, h, self.dropout2, self.norm2)
        tgt = self._feed_forward(tgt, self.dropout3, self.norm3)
        return tgt if cache is None else (tgt, (self_cache, static))

    def gen_cache(self, memory: Any) -> tuple[Any, Any]:
        """(an empty cache for memory's batch, memory's keys and values)."""
        return self.self_attn.gen_cache(memory), self.cross_attn.gen_cache(memory, memory, StaticCache)


class TransformerDecoder(Layer):
    """num_layers layers like decoder_layer, which is the first; the others have initial values of their own."""

    layers: LayerList

    def __init__(self, decoder_layer: Layer, num_layers: int, norm: Layer | None = None) -> None:
        super().__init__()
        self.layers = _stack(decoder_layer, num_layers)
        self.num_layers = num_layers
        self.norm = norm

    def forward(self, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None, cache: Any = None) -> Any:
        """-> [batch, seq, embed]; with caches (that, a list of the caches moved on)."""
        moved = []
        for at, layer in enumerate(self.layers):
            if cache is None:
                tgt = layer(tgt, memory, tgt_mask, memory_mask)
            else:
                tgt, one = layer(tgt, memory, tgt_mask, memory_mask, cache[at])
                moved.append(one)
        tgt = tgt if self.norm is None else self.norm(tgt)
        return tgt if cache is None else (tgt, moved)

    def gen_cache(self, memory: Any, do_zip: bool = False) -> list[Any]:
        """A cache for each layer; with do_zip [all the Caches, all the StaticCaches]."""
        caches = [layer.gen_cache(memory) for layer in self.layers]
        return list(zip(*caches, strict=True)) if do_zip else caches


class Transformer(Layer):
    """An encoder and a decoder with a LayerNorm after each: src, tgt [batch, seq, d_model] -> like tgt.

    weight_attr, bias_attr: one for all, [attention, feed-forward], or [self-attention, attention to memory,
    feed-forward].
    """

    d_model: int
    nhead: int
    encoder: TransformerEncoder | Layer
    decoder: TransformerDecoder | Layer

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        attn_dropout: float | None = None,
        act_dropout: float | None = None,
        normalize_before: bool = False,
        weight_attr: ParamAttrLike | Sequence[ParamAttrLike] = None,
        bias_attr: ParamAttrLike | Sequence[ParamAttrLike] = None,
        custom_encoder: Layer | None = None,
        custom_decoder: Layer | None = None,
    ) -> None:
        super().__init__()
        weights, biases = _attrs(weight_attr, 3), _attrs(bias_attr, 3)
        common = (d_model, nhead, dim_feedforward, dropout, activation, attn_dropout, act_dropout, normalize_before)
        self.d_model, self.nhead = d_model, nhead
        if custom_encoder is None:
            layer = TransformerEncoderLayer(*common, [weights[0], weights[2]], [biases[0], biases[2]])
            custom_encoder = TransformerEncoder(layer, num_encoder_layers, LayerNorm(d_model))
        if custom_decoder is None:
            layer = TransformerDecoderLayer(*common, weights, biases)
            custom_decoder = TransformerDecoder(layer, num_decoder_layers, LayerNorm(d_model))
        self.encoder, self.decoder = custom_encoder, custom_decoder

    def forward(self, src: Any, tgt: Any, src_mask: Any = None, tgt_mask: Any = None, memory_mask: Any = None) -> Any:
        return self.decoder(tgt, self.encoder(src, src_mask), tgt_mask, memory_mask)

    def generate_square_subsequent_mask(self, length: int) -> Tensor:
        """[length, length] of 0 where a position may look (itself and before) and -inf elsewhere."""
        return Tensor(jnp.triu(jnp.full((length, length), -jnp.inf, self._dtype), 1))


def _attrs(attr: Any, count: int) -> list[Any]:
    """An attribute for each of [attention, feed-forward] or [self, memory, feed-forward]."""
    if not isinstance(attr, (list, tuple)):
        return [attr] * count
    if len(attr) == 2 and count == 3:
        return [attr[0], attr[0], attr[1]]
    if len(attr) != count:
        raise ConfigError(f"a list of parameter attributes has {count} entries here, got {len(attr)}")
    return list(attr)


def _stack(first: Layer, num_layers: int) -> LayerList:
    if num_layers < 1:
        raise ConfigError(f"num_layers is at least 1, got {num_layers}")
    config = getattr(first, "_config", None)
    if config is None and num_layers > 1:
        raise ConfigError(
            f"{type(first).__name__} does not say how it was made, so more of it cannot be; keep its arguments in "
            "_config"
        )
    others: Sequence[Layer] = [type(first)(**config) for _ in range(num_layers - 1)] if config is not None else []
    return LayerList([first, *others])
