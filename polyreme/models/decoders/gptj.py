"""GPT-J: attention and feed-forward side by side on one norm, rotary positions that turn neighbouring dims.

Source: Wang and Komatsuzaki, 2021 (GPT-J-6B); rotary positions arXiv:2104.09864. Same function as transformers'
GPTJForCausalLM, whose pairs of neighbours lie half the turned dims apart here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.models.decoders.gpt_neox import GPTNeoX, GPTNeoXConfig
from polyreme.models.decoders.llama import Attention, linear_rules
from polyreme.models.families import GPTJ as FAMILY
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.encoder import same_rules
from polyreme.models.parts.rotary import neighbour_rules
from polyreme.nn import Layer


@dataclass(frozen=True)
class GPTJConfig(GPTNeoXConfig):
    """Dimensions of a GPT-J: a GPT-NeoX's, without biases in attention."""

    shared_norm: ClassVar[bool] = True
    head_bias: ClassVar[bool] = True

    vocab_size: int = 50400
    seq_len: int = 2048
    qkv_bias: bool = False
    out_bias: bool = False
    activation: str = "gelu_new"


class GPTJ(GPTNeoX, keeps_order_free=True):
    """As Llama."""

    family = FAMILY

    def make_attention(self, config: GPTJConfig) -> Layer:
        """A block's attention."""
        return Attention(config)


def _turned(theirs: str, ours: str) -> Sequence[WeightRule]:
    return neighbour_rules(theirs, ours, "num_heads")[:1]  # which have no biases


def _rules(config: Any) -> list[WeightRule]:
    there, here = "transformer.h.{n}", "blocks.{n}"
    maps = {"mlp.fc_in": "ffn.up", "mlp.fc_out": "ffn.down"}
    return [
        WeightRule("transformer.wte.weight", "tokens.weight", SAME),
        WeightRule("lm_head.weight", "head.weight"),
        WeightRule("lm_head.bias", "head_bias", SAME),
        *same_rules("transformer.ln_f", "norm"),
        *same_rules(f"{there}.ln_1", f"{here}.attention_norm"),
        *(
            r
            for n in ("q", "k")
            for r in neighbour_rules(f"{there}.attn.{n}_proj", f"{here}.attention.{n}", "num_heads")
        ),
        *(WeightRule(f"{there}.attn.{n}_proj.weight", f"{here}.attention.{n}.weight") for n in ("v", "out")),
        *(rule for name, ours in maps.items() for rule in linear_rules(f"{there}.{name}", f"{here}.{ours}")),
    ]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    width, turned = config["n_embd"] // config["n_head"], config.get("rotary_dim", 64)
    if not isinstance(turned, int) or not 2 <= turned <= width or turned % 2:
        raise ConfigError(f"config.json of a gptj: rotary_dim is {turned!r}; give an even number of at most {width}")
    return {"rotary_fraction": turned / width}


PUBLISHED = PublishedFamily(
    architecture="GPTJForCausalLM",
    model_type="gptj",
    keys={
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_positions": "seq_len",
        "n_inner": "ffn_size",
        "layer_norm_epsilon": "rms_norm_epsilon",
        "activation_function": "activation",
        "tie_word_embeddings": "tie_embeddings",
    },
    weights=_rules,
    defaults={
        "tie_word_embeddings": False,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_positions": 2048,
    },
    fixed={"rotary": (True,), "scale_attn_weights": (True,)},
    prefix="transformer.",
    heads=("lm_head.",),
    spare=lambda name, config: name.endswith((".attn.bias", ".attn.masked_bias")),
    read=_read,
    read_keys=("rotary_dim", "n_ctx", "embd_pdrop", "attn_pdrop", "resid_pdrop", "gradient_checkpointing"),
    write=lambda config: {"rotary_dim": config.rotary_width},
)
