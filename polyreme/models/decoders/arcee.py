"""Arcee's AFM: a LLaMA with two matrices in a feed-forward and a squared ReLU between them.

Source: Arcee AI, 2025 (AFM-4.5B); squared ReLU arXiv:2109.08668. Same function as transformers' ArceeForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.models.decoders.llama import BIAS_KEYS, DEFAULTS, KEYS, read_biases, write_biases
from polyreme.models.decoders.nemotron import NemotronConfig, two_layer_rules
from polyreme.models.decoders.starcoder2 import Starcoder2
from polyreme.models.families import ARCEE
from polyreme.models.files.published import PublishedFamily
from polyreme.nn import RMSNorm


@dataclass(frozen=True)
class ArceeConfig(NemotronConfig):
    """Dimensions of an AFM: a Nemotron's."""

    norm_class: ClassVar[Any] = RMSNorm

    vocab_size: int = 32000
    rotary_fraction: float = 1.0


class Arcee(Starcoder2, keeps_order_free=True):
    """As Llama."""

    family = ARCEE


PUBLISHED = PublishedFamily(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    keys={**KEYS, "hidden_act": "activation"},
    weights=two_layer_rules,
    defaults={**DEFAULTS, "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    prefix="model.",
    read=read_biases,
    read_keys=BIAS_KEYS,
    write=write_biases,
)
