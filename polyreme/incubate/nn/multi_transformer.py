"""A stack of transformer layers that decodes with caches."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError
from polyreme.incubate.nn.functional.transformer import fused_multi_transformer
from polyreme.incubate.nn.layers import one_device
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.layers.container import ParameterList

_GATED = ("swiglu", "geglu")


class FusedMultiTransformer(Layer):
    """num_layers transformer layers as one: [batch, seq, embed_dim] -> the same.

    What it computes: functional.fused_multi_transformer. The attrs are one for all layers or a list
    with one each; without num_layers the list qkv_weight_attrs counts them.
    A bias is made only where its attr is given. gqa_group_size: number of key heads. Raises ConfigError for sizes that
    do not fit, a missing number of layers, nranks and ring_id.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dim_feedforward: int,
        dropout_rate: float = 0.0,
        activation: str = "gelu",
        normalize_before: bool = True,
        ln_scale_attrs: Any = None,
        ln_bias_attrs: Any = None,
        qkv_weight_attrs: Any = None,
        qkv_bias_attrs: Any = None,
        linear_weight_attrs: Any = None,
        linear_bias_attrs: Any = None,
        ffn_ln_scale_attrs: Any = None,
        ffn_ln_bias_attrs: Any = None,
        ffn1_weight_attrs: Any = None,
        ffn1_bias_attrs: Any = None,
        ffn2_weight_attrs: Any = None,
        ffn2_bias_attrs: Any = None,
        epsilon: float = 1e-5,
        residual_alpha: float = 1.0,
        num_layers: int = -1,
        nranks: int = 1,
        trans_qkvw: bool = True,
        ring_id: int = -1,
        norm_type: str = "layernorm",
        use_neox_rotary_style: bool = False,
        gqa_group_size: int = -1,
        name: str | None = None,
    ) -> None:
        what = "FusedMultiTransformer"
        one_device(what, nranks, ring_id)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(f"{what}: embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if num_layers < 0:
            if not isinstance(qkv_weight_attrs, (list, tuple)):
                raise ConfigError(f"{what}: num_layers={num_layers}; give it, or a list of qkv_weight_attrs")
            num_layers = len(qkv_weight_attrs)
        super().__init__(name)
        self.num_layers = num_layers
        self._options = {
            "pre_layer_norm": normalize_before, "epsilon": epsilon, "residual_alpha": residual_alpha,
            "dropout_rate": dropout_rate, "activation": activation, "trans_qkvw": trans_qkvw, "norm_type": norm_type,
            "use_neox_rotary_style": use_neox_rotary_style, "gqa_group_size": gqa_group_size,
        }  # fmt: skip
        d = embed_dim // num_heads
        heads = [3, num_heads] if gqa_group_size < 1 else [num_heads + 2 * gqa_group_size]
        qkv = [*heads, d, embed_dim] if trans_qkvw else [embed_dim, *heads, d]
        wide = dim_feedforward * (2 if activation in _GATED else 1)
        # name: (shape, attrs, is it a bias, is it the scale of a norm)
        kinds = {
            "ln_scales": ([embed_dim], ln_scale_attrs, False, True),
            "ln_biases": ([embed_dim], ln_bias_attrs, True, True),
            "qkv_weights": (qkv, qkv_weight_attrs, False, False),
            "qkv_biases": ([*heads, d], qkv_bias_attrs, True, False),
            "linear_weights": ([embed_dim, embed_dim], linear_weight_attrs, False, False),
            "linear_biases": ([embed_dim], linear_bias_attrs, True, False),
            "ffn_ln_scales": ([embed_dim], ffn_ln_scale_attrs, False, True),
            "ffn_ln_biases": ([embed_dim], ffn_ln_bias_attrs, True, True),
            "ffn1_weights": ([embed_dim, wide], ffn1_weight_attrs, False, False),
            "ffn1_biases": ([wide], ffn1_bias_attrs, True, False),
            "ffn2_weights": ([dim_feedforward, embed_dim], ffn2_weight_attrs, False, False),
            "ffn2_biases": ([embed_dim], ffn2_bias_attrs, True, False),
        }
        self._kinds = tuple(kinds)
        for kind, (shape, attrs, is_bias, of_norm) in kinds.items():
            if is_bias and attrs is None:
                setattr(self, kind, None)
                continue
            start = Constant(1.0) if of_norm and not is_bias else None
            made = [
                self.create_parameter(shape, self._attr(attrs, at), is_bias=is_bias, default_initializer=start)
                for at in range(num_layers)
            ]
            setattr(self, kind, None if made and made[0] is None else ParameterList(made))

    def _attr(self, attrs: Any, index: int) -> Any:
        if not isinstance(attrs, (list, tuple)):
            return attrs
        if len(attrs) != self.num_layers:
            raise ConfigError(f"FusedMultiTransformer: {len(attrs)} attrs for {self.num_layers} layers; give one each")
        return attrs[index]

    def forward(
        self,
        src: Any,
        attn_mask: Any = None,
        caches: Any = None,
        pre_caches: Any = None,
        rotary_embs: Any = None,
        rotary_emb_dims: int = 0,
        beam_offset: Any = None,
        seq_lens: Any = None,
        time_step: Any = None,
    ) -> Any:
        """-> [batch, seq, embed_dim]; with caches (that, the caches, written in place)."""
        held: dict[str, Any] = {kind: getattr(self, kind) for kind in self._kinds}
        weights = {kind: None if made is None else list(made) for kind, made in held.items()}
        return fused_multi_transformer(
            src, **weights, cache_kvs=caches, beam_offset=beam_offset, pre_caches=pre_caches, seq_lens=seq_lens,
            rotary_embs=rotary_embs, time_step=time_step, attn_mask=attn_mask, rotary_emb_dims=rotary_emb_dims,
            training=self.training, **self._options,
        )  # fmt: skip
