"""Linear, dropout, attention and feed-forward layers over incubate.nn.functional.

Logical dims of the weights: embed, heads, ffn.
"""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError
from polyreme.incubate.nn import functional as I
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter


class FusedLinear(Layer):
    """x W + b with W [in, out], or x W^T + b with W [out, in] if transpose_weight. bias_attr=False leaves b out."""

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        bias_attr: Any = None,
        transpose_weight: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.transpose_weight = transpose_weight
        shape = [out_features, in_features] if transpose_weight else [in_features, out_features]
        self.weight = self.create_parameter(shape, weight_attr)
        self.bias = self.create_parameter([out_features], bias_attr, is_bias=True)

    def forward(self, input: Any) -> Any:
        return I.fused_linear(input, self.weight, self.bias, self.transpose_weight)


class FusedDropoutAdd(Layer):
    """dropout(x) + y."""

    p: float
    mode: str

    def __init__(self, p: float = 0.5, mode: str = "upscale_in_train", name: str | None = None) -> None:
        super().__init__(name)
        self.p, self.mode = p, mode

    def forward(self, x: Any, y: Any) -> Any:
        return I.fused_dropout_add(x, y, self.p, self.training, self.mode)

    def extra_repr(self) -> str:
        return f"p={self.p}, mode={self.mode}"


class _Normed(Layer):
    """What layers with a LayerNorm before or after share."""

    def _norm(self, prefix: str, size: int, scale_attr: Any = None, bias_attr: Any = None) -> None:
        scale = self.create_parameter([size], scale_attr, default_initializer=Constant(1.0), dims=("embed",))
        setattr(self, f"{prefix}_scale", scale)
        setattr(self, f"{prefix}_bias", self.create_parameter([size], bias_attr, is_bias=True, dims=("embed",)))


class FusedBiasDropoutResidualLayerNorm(_Normed):
    """layer_norm(residual + dropout(x + linear_bias)): [*, embed_dim] twice -> the same. weight_attr: of the scale."""

    linear_bias: Parameter | None

    embed_dim: int
    dropout_rate: float
    epsilon: float

    def __init__(
        self,
        embed_dim: int,
        dropout_rate: float = 0.5,
        weight_attr: Any = None,
        bias_attr: Any = None,
        epsilon: float = 1e-5,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.embed_dim, self.dropout_rate, self.epsilon = embed_dim, dropout_rate, epsilon
        self.linear_bias = self.create_parameter([embed_dim], bias_attr, is_bias=True)
        self._norm("ln", embed_dim, weight_attr, bias_attr)

    def forward(self, x: Any, residual: Any) -> Any:
        return I.fused_bias_dropout_residual_layer_norm(
            x, residual, self.linear_bias, self.ln_scale, self.ln_bias, self.dropout_rate, self.epsilon, self.training
        )

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, dropout_rate={self.dropout_rate}, epsilon={self.epsilon}"


class FusedFeedForward(_Normed):
    """x + dropout(linear2(dropout(activation(linear1(x))))) with a LayerNorm before or after: [*, d_model] -> the same.

    act_dropout_rate is dropout_rate if None. Raises ConfigError for nranks and ring_id: a plan splits the weights here.
    """

    normalize_before: bool
    activation: str
    epsilon: float
    act_dropout_rate: float

    def __init__(
        self,
        d_model: int,
        dim_feedforward: int,
        dropout_rate: float = 0.1,
        epsilon: float = 1e-5,
        activation: str = "relu",
        act_dropout_rate: float | None = None,
        normalize_before: bool = False,
        linear1_weight_attr: Any = None,
        linear1_bias_attr: Any = None,
        linear2_weight_attr: Any = None,
        linear2_bias_attr: Any = None,
        ln1_scale_attr: Any = None,
        ln1_bias_attr: Any = None,
        ln2_scale_attr: Any = None,
        ln2_bias_attr: Any = None,
        nranks: int = 1,
        ring_id: int = -1,
        name: str | None = None,
    ) -> None:
        one_device("FusedFeedForward", nranks, ring_id)
        super().__init__(name)
        self.normalize_before, self.activation, self.epsilon = normalize_before, activation, epsilon
        self.dropout_rate = dropout_rate
        self.act_dropout_rate = dropout_rate if act_dropout_rate is None else act_dropout_rate
        self._linear1_weight = self.create_parameter(
            [d_model, dim_feedforward], linear1_weight_attr, dims=("embed", "ffn")
        )
        self._linear1_bias = self.create_parameter([dim_feedforward], linear1_bias_attr, is_bias=True, dims=("ffn",))
        self._linear2_weight = self.create_parameter(
            [dim_feedforward, d_model], linear2_weight_attr, dims=("ffn", "embed")
        )
        self._linear2_bias = self.create_parameter([d_model], linear2_bias_attr, is_bias=True, dims=("embed",))
        if normalize_before:
            self._norm("_ln1", d_model, ln1_scale_attr, ln1_bias_attr)
        else:
            self._norm("_ln2", d_model, ln2_scale_attr, ln2_bias_attr)

    def forward(self, src: Any, cache: Any = None) -> Any:
        """-> [*, d_model]. Raises ConfigError for a cache: a feed-forward has nothing to keep."""
        if cache is not None:
            raise ConfigError("FusedFeedForward: cache given; a feed-forward keeps nothing, leave it out")
        before = self.normalize_before
        norm = (
            (self._ln1_scale, self._ln1_bias, None, None) if before else (None, None, self._ln2_scale, self._ln2_bias)
        )
        return I.fused_feedforward(
            src, self._linear1_weight, self._linear2_weight, self._linear1_bias, self._linear2_bias, *norm,
            self.act_dropout_rate, self.dropout_rate, self.activation, self.epsilon, self.epsilon, before,
            self.training,
        )  # fmt: skip


class FusedMultiHeadAttention(_Normed):
    """x + dropout(attention(x)) with a LayerNorm before or after: [batch, seq, embed_dim] -> the same.

    Self-attention alone: kdim and vdim must be embed_dim, and need_weights False. transpose_qkv_wb keeps qkv_weight as
    [embed, 3 embed] rather than [3, heads, head_dim, embed]. Raises ConfigError for these, nranks and ring_id.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout_rate: float
    attn_dropout_rate: float
    epsilon: float
    normalize_before: bool
    transpose_qkv_wb: bool

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout_rate: float = 0.5,
        attn_dropout_rate: float = 0.5,
        kdim: int | None = None,
        vdim: int | None = None,
        normalize_before: bool = False,
        need_weights: bool = False,
        qkv_weight_attr: Any = None,
        qkv_bias_attr: Any = None,
        linear_weight_attr: Any = None,
        linear_bias_attr: Any = None,
        pre_ln_scale_attr: Any = None,
        pre_ln_bias_attr: Any = None,
        ln_scale_attr: Any = None,
        ln_bias_attr: Any = None,
        epsilon: float = 1e-5,
        nranks: int = 1,
        ring_id: int = -1,
        transpose_qkv_wb: bool = False,
        name: str | None = None,
    ) -> None:
        what = "FusedMultiHeadAttention"
        one_device(what, nranks, ring_id)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(f"{what}: embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if need_weights or kdim not in (None, embed_dim) or vdim not in (None, embed_dim):
            raise ConfigError(
                f"{what}: need_weights={need_weights}, kdim={kdim}, vdim={vdim}; it attends to itself and stores no "
                "weights, use nn.MultiHeadAttention"
            )
        super().__init__(name)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout_rate, self.attn_dropout_rate, self.epsilon = dropout_rate, attn_dropout_rate, epsilon
        self.normalize_before, self.transpose_qkv_wb = normalize_before, transpose_qkv_wb
        parts = [3, num_heads, self.head_dim]
        names = (None, "heads", None)
        if transpose_qkv_wb:
            parts, names = [3 * embed_dim], (None,)
        shape, dims = (
            ([embed_dim, *parts], ("embed", *names)) if transpose_qkv_wb else ([*parts, embed_dim], (*names, "embed"))
        )
        self.qkv_weight = self.create_parameter(shape, qkv_weight_attr, dims=dims)
        self.qkv_bias = self.create_parameter(parts, qkv_bias_attr, is_bias=True, dims=names)
        self.linear_weight = self.create_parameter([embed_dim, embed_dim], linear_weight_attr, dims=("heads", "embed"))
        self.linear_bias = self.create_parameter([embed_dim], linear_bias_attr, is_bias=True, dims=("embed",))
        if normalize_before:
            self._norm("pre_ln", embed_dim, pre_ln_scale_attr, pre_ln_bias_attr)
        else:
            self._norm("ln", embed_dim, ln_scale_attr, ln_bias_attr)

    def forward(self, query: Any, key: Any = None, value: Any = None, attn_mask: Any = None, cache: Any = None) -> Any:
        """-> [batch, seq, embed]; with a cache [2, batch, heads, places, head_dim] (that, the cache grown)."""
        if any(x is not None and x is not query for x in (key, value)):
            raise ConfigError("FusedMultiHeadAttention: key or value differs from query; use nn.MultiHeadAttention")
        before = self.normalize_before
        norm = (
            (self.pre_ln_scale, self.pre_ln_bias, None, None) if before else (None, None, self.ln_scale, self.ln_bias)
        )
        return I.fused_multi_head_attention(
            query, self.qkv_weight, self.linear_weight, before, *norm, self.epsilon, self.qkv_bias, self.linear_bias,
            cache, attn_mask, self.dropout_rate, self.attn_dropout_rate, self.epsilon, self.training,
            num_heads=self.num_heads, transpose_qkv_wb=self.transpose_qkv_wb,
        )  # fmt: skip


class FusedTransformerEncoderLayer(Layer):
    """FusedMultiHeadAttention, then FusedFeedForward: [batch, seq, d_model] -> the same.

    weight_attr, bias_attr: one for all, or [attention, feed-forward]. attn_dropout_rate and act_dropout_rate are
    dropout_rate if None.
    """

    fused_attn: FusedMultiHeadAttention
    ffn: FusedFeedForward

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout_rate: float = 0.1,
        activation: str = "relu",
        attn_dropout_rate: float | None = None,
        act_dropout_rate: float | None = None,
        normalize_before: bool = False,
        weight_attr: Any = None,
        bias_attr: Any = None,
    ) -> None:
        super().__init__()
        weights, biases = (list(a) if isinstance(a, (list, tuple)) else [a, a] for a in (weight_attr, bias_attr))
        self.fused_attn = FusedMultiHeadAttention(
            d_model, nhead, dropout_rate, dropout_rate if attn_dropout_rate is None else attn_dropout_rate,
            normalize_before=normalize_before, qkv_weight_attr=weights[0], qkv_bias_attr=biases[0],
            linear_weight_attr=weights[0], linear_bias_attr=biases[0],
        )  # fmt: skip
        self.ffn = FusedFeedForward(
            d_model, dim_feedforward, dropout_rate, activation=activation, act_dropout_rate=act_dropout_rate,
            normalize_before=normalize_before, linear1_weight_attr=weights[1], linear1_bias_attr=biases[1],
            linear2_weight_attr=weights[1], linear2_bias_attr=biases[1],
        )  # fmt: skip

    def forward(self, src: Any, src_mask: Any = None, cache: Any = None) -> Any:
        """-> [batch, seq, d_model]; with a cache of the attention (that, the cache grown)."""
        made = self.fused_attn(src, attn_mask=src_mask, cache=cache)
        return self.ffn(made) if cache is None else (self.ffn(made[0]), made[1])


def one_device(what: str, nranks: int, ring_id: int) -> None:
    """Raise ConfigError for a layer told to split itself over devices."""
    if nranks != 1 or ring_id != -1:
        raise ConfigError(
            f"{what}: nranks={nranks}, ring_id={ring_id}; a plan splits layers over devices, leave them out"
        )


class FusedEcMoe(Layer):
    """fused_ec_moe with weights of its own: x [batch, seq, hidden_size], gate [batch, seq, num_experts] -> x's shape.

    act_type: gelu or relu. Logical dims: expert, embed, expert_ffn. Raises ConfigError for another act_type.
    """

    bmm_weight0: Parameter
    bmm_bias0: Parameter
    bmm_weight1: Parameter
    bmm_bias1: Parameter

    def __init__(
        self,
        hidden_size: int,
        inter_size: int,
        num_experts: int,
        act_type: str,
        weight_attr: Any = None,
        bias_attr: Any = None,
    ) -> None:
        super().__init__()
        if act_type not in ("gelu", "relu"):
            raise ConfigError(f"FusedEcMoe: act_type={act_type!r}; give 'gelu' or 'relu'")
        if bias_attr is False:
            raise ConfigError("FusedEcMoe: bias_attr=False; its experts have biases, leave it out")
        self.act_type = act_type
        across, back = ("expert", "embed", "expert_ffn"), ("expert", "expert_ffn", "embed")
        inside, outside = ("expert", None, "expert_ffn"), ("expert", None, "embed")
        self.bmm_weight0 = self.create_parameter([num_experts, hidden_size, inter_size], weight_attr, dims=across)
        self.bmm_bias0 = self.create_parameter([num_experts, 1, inter_size], bias_attr, is_bias=True, dims=inside)
        self.bmm_weight1 = self.create_parameter([num_experts, inter_size, hidden_size], weight_attr, dims=back)
        self.bmm_bias1 = self.create_parameter([num_experts, 1, hidden_size], bias_attr, is_bias=True, dims=outside)

    def forward(self, x: Any, gate: Any) -> Any:
        weights = (self.bmm_weight0, self.bmm_bias0, self.bmm_weight1, self.bmm_bias1)
        return I.fused_ec_moe(x, gate, *weights, self.act_type)

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.bmm_weight0.shape))}, act_type={self.act_type}"
