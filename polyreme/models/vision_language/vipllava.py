"""ViP-LLaVA: a LLaVA whose vectors of an image are made of several of the encoder's blocks, normed together.

Source: arXiv:2312.00784. Same function as transformers' VipLlavaForConditionalGeneration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme.models.families import architecture
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.encoder import same_rules
from polyreme.models.vision_language.llava import (
    PART_KEYS,
    Llava,
    LlavaConfig,
    Projector,
    as_layers,
    llava_rules,
    read_parts,
    rename,
    write_parts,
)
from polyreme.nn import LayerNorm


@dataclass(frozen=True)
class VipLlavaConfig(LlavaConfig):
    """Dimensions of a ViP-LLaVA: a LLaVA's. projector_norm_epsilon: of the norm of what several blocks make."""

    feature_layers: Sequence[int] = (-2, -5, -8, -11, 6)
    projector_norm_epsilon: float = 1e-5

    @classmethod
    def nano(cls, **changes: Any) -> VipLlavaConfig:
        """A ViP-LLaVA that trains in seconds on a CPU."""
        return super().nano(**{"feature_layers": (-2, 1), **changes})  # type: ignore[return-value]  # of this class


class NormedProjector(Projector):
    """A Projector of what is normed."""

    norm: LayerNorm

    def __init__(self, ins: int, outs: int, activation: str, bias: bool, epsilon: float) -> None:
        super().__init__(ins, outs, activation, bias)
        self.norm = LayerNorm(ins, epsilon=epsilon)

    def forward(self, x_bse: Any) -> Any:
        return super().forward(self.norm(x_bse))


class VipLlava(Llava):
    """As Llava."""

    family: Any = architecture("vipllava", "image_text_to_text")

    def make_projector(self, config: VipLlavaConfig, width: int) -> Projector:
        """A new map from what is seen, of this width."""
        sizes = (width, config.text.hidden_size, config.activation, config.projector_bias)
        return NormedProjector(*sizes, config.projector_norm_epsilon)


# as published


def _rules(config: VipLlavaConfig) -> list[WeightRule]:
    return [*llava_rules(config), *same_rules("multi_modal_projector.projector_layernorm", "projector.norm")]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = as_layers(config.get("vision_feature_layers", (-2, -5, -8, -11, 6)))
    return read_parts(config) | {"feature_layers": layers}


def _write(config: VipLlavaConfig) -> dict[str, Any]:
    return write_parts(config) | {"vision_feature_layers": [*config.feature_layers]}


PUBLISHED_IMAGE_TEXT_TO_TEXT = PublishedFamily(
    architecture="VipLlavaForConditionalGeneration",
    model_type="vipllava",
    keys={"projector_hidden_act": "activation", "projector_layernorm_eps": "projector_norm_epsilon"},
    weights=_rules,
    defaults={"projector_hidden_act": "gelu"},
    heads=("language_model.lm_head.",),
    rename=rename,
    read=_read,
    read_keys=(*PART_KEYS, "vision_feature_layers"),
    write=_write,
)
