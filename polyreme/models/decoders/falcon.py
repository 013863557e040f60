"""Falcon: a GPT-NeoX whose queries share keys and values, by rotary positions or by scores that fall with distance.

Source: arXiv:2311.16867. Same function as transformers' FalconForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from polyreme.errors import ConfigError
from polyreme.models.decoders.bloom import body_rules
from polyreme.models.decoders.gpt_neox import Attention, GPTNeoX, GPTNeoXConfig
from polyreme.models.families import FALCON
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.alibi import slopes
from polyreme.models.parts.encoder import same_rules
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import Layer


@dataclass(frozen=True)
class FalconConfig(GPTNeoXConfig):
    """Dimensions of a Falcon: a GPT-NeoX's, without biases. rotary_fraction: 0 where scores fall with distance instead.
    shared_norm: as of BlockTraits."""

    vocab_size: int = 65024
    seq_len: int = 2048
    tie_embeddings: bool = True
    rotary_fraction: float = 1.0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    shared_norm: bool = True  # type: ignore[misc]  # a trait that here is said of each model

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_norm and not self.is_parallel:
            raise ConfigError("FalconConfig: shared_norm=True with is_parallel=False; parts in turn have a norm each")


class Falcon(GPTNeoX):
    """As Llama."""

    family = FALCON

    def make_attention(self, config: FalconConfig) -> Layer:
        """A block's attention."""
        return Attention(config, None if config.rotary_width else _place_biases(config))


def _place_biases(config: FalconConfig) -> np.ndarray:
    """As alibi.place_biases, rounded to bfloat16 as these models were trained, and scaled with the scores."""
    rounded = slopes(config.num_heads).astype(ml_dtypes.bfloat16)[:, None]
    biases = rounded * np.arange(config.seq_len).astype(ml_dtypes.bfloat16)
    return biases.astype(np.float32) * np.float32(config.head_dim**-0.5)


def _norms(config: FalconConfig) -> tuple[str, ...]:
    """What the norms of a block are called, that of attention first."""
    if not config.is_parallel:
        return "input_layernorm", "post_attention_layernorm"
    return ("input_layernorm",) if config.shared_norm else ("ln_attn", "ln_mlp")


def _rules(config: FalconConfig) -> list[WeightRule]:
    norms = zip(_norms(config), ("attention_norm", "ffn_norm"), strict=False)
    return [
        *body_rules(),
        *(rule for name, ours in norms for rule in same_rules(f"transformer.h.{{n}}.{name}", f"blocks.{{n}}.{ours}")),
    ]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    is_new, is_parallel = bool(config.get("new_decoder_architecture")), bool(config.get("parallel_attn", True))
    heads, norms = config["num_attention_heads"], config.get("num_ln_in_parallel_attn")
    if (is_new and not is_parallel) or (norms == 2 and not is_new):
        raise ConfigError(
            f"config.json of a falcon: new_decoder_architecture={is_new}, parallel_attn={is_parallel} and "
            f"num_ln_in_parallel_attn={norms} do not go together; the newer architecture is parallel, and has two norms"
        )
    kv_heads = config.get("num_kv_heads") or heads
    if not is_new:
        kv_heads = 1 if config.get("multi_query", True) else heads
    bias = bool(config.get("bias"))
    fields = {
        "num_kv_heads": kv_heads,
        "ffn_size": config.get("ffn_hidden_size") or 4 * config["hidden_size"],
        "is_parallel": is_parallel,
        "shared_norm": is_parallel and not (is_new and norms in (None, 2)),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias),
    }
    return fields | ({"rotary_fraction": 0.0} if config.get("alibi") else read_rope(config))


def _write(config: FalconConfig) -> dict[str, Any]:
    has_two_norms = config.is_parallel and not config.shared_norm
    is_new = has_two_norms or config.num_kv_heads not in (1, config.num_heads)
    if is_new and not config.is_parallel:
        raise ConfigError("FalconConfig: grouped heads with is_parallel=False have no published form; make it True")
    return {
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": (1 + has_two_norms) if is_new else None,
        "multi_query": config.num_kv_heads == 1,
        "num_kv_heads": config.num_kv_heads,
        "parallel_attn": config.is_parallel,
        "ffn_hidden_size": config.ffn_size,
        "bias": config.mlp_bias,
        "alibi": not config.rotary_width,
    } | (write_rope(config) if config.rotary_width else {})


PUBLISHED = PublishedFamily(
    architecture="FalconForCausalLM",
    model_type="falcon",
    token_head="classifier",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "seq_len",
        "layer_norm_epsilon": "rms_norm_epsilon",
        "tie_word_embeddings": "tie_embeddings",
        "activation": "activation",
    },
    spellings={"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    weights=_rules,
    defaults={
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "activation": "gelu",
    },
    prefix="transformer.",
    read=_read,
    read_keys=(
        *("new_decoder_architecture", "num_ln_in_parallel_attn", "multi_query", "num_kv_heads", "parallel_attn"),
        *("ffn_hidden_size", "bias", "alibi", "hidden_dropout", "apply_residual_connection_post_layernorm"),
        *ROPE_KEYS,
    ),
    write=_write,
)
