"""Nemotron-4 and Minitron: LayerNorms that multiply by 1 + w, and feed-forwards of two matrices with a squared ReLU.

Source: arXiv:2402.16819; squared ReLU arXiv:2109.08668. Same function as transformers' NemotronForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.models.decoders.gpt_neox import GPTNeoXConfig
from polyreme.models.decoders.llama import (
    BIAS_KEYS,
    DEFAULTS,
    KEYS,
    NORMS,
    attention_rules,
    linear_rules,
    outer_rules,
    read_biases,
    write_biases,
)
from polyreme.models.decoders.starcoder2 import Starcoder2
from polyreme.models.families import NEMOTRON
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.nn import LayerNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.parameter import ParamAttr


class OffsetLayerNorm(LayerNorm):
    """A LayerNorm times 1 + weight, which begins at 0.

    >>> OffsetLayerNorm(2).weight.numpy().tolist()
    [0.0, 0.0]
    """

    def __init__(self, normalized_shape: int, epsilon: float = 1e-5) -> None:
        super().__init__(normalized_shape, epsilon, ParamAttr(initializer=Constant(0.0)))

    def forward(self, input: Any) -> Any:
        return F.layer_norm(input, self._normalized_shape, self.weight + 1.0, self.bias, self._epsilon)


@dataclass(frozen=True)
class NemotronConfig(GPTNeoXConfig):
    """Dimensions of a Nemotron: a GPT-NeoX's, its parts in turn."""

    norm_class: ClassVar[Any] = OffsetLayerNorm

    vocab_size: int = 256000
    rotary_fraction: float = 0.5
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    is_parallel: bool = False
    activation: str = "relu2"


class Nemotron(Starcoder2, keeps_order_free=True):
    """As Llama."""

    family = NEMOTRON


def two_layer_rules(config: Any) -> list[WeightRule]:
    """All the weights of a LLaMA with two matrices in a feed-forward."""
    maps = ("up", "down")
    ffn = (
        rule
        for name in maps
        for rule in linear_rules(f"model.layers.{{n}}.mlp.{name}_proj", f"blocks.{{n}}.ffn.{name}")
    )
    return [*outer_rules(), *attention_rules(), *ffn]


def _rules(config: Any) -> list[WeightRule]:
    norms = {f"model.layers.{{n}}.{name}": f"blocks.{{n}}.{ours}" for name, ours in NORMS.items()}
    norms["model.norm"] = "norm"
    biases = (WeightRule(f"{name}.bias", f"{ours}.bias", SAME) for name, ours in norms.items())
    return [*two_layer_rules(config), *biases]


PUBLISHED = PublishedFamily(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    keys={
        **{key: ours for key, ours in KEYS.items() if key != "rms_norm_eps"},
        "norm_eps": "rms_norm_epsilon",
        "hidden_act": "activation",
    },
    weights=_rules,
    defaults={
        **DEFAULTS,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    spellings={"rope_percent": "partial_rotary_factor", "rope_percentage": "partial_rotary_factor"},
    prefix="model.",
    read=read_biases,
    read_keys=BIAS_KEYS,
    write=lambda config: write_biases(config) | {"partial_rotary_factor": config.rotary_fraction},
)
