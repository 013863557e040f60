"""Gemma: a LLaMA whose norms multiply by 1 + w, with a gate of GELU and embeddings that are scaled up.

Source: arXiv:2403.08295. Same function as transformers' GemmaForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.models.decoders.llama import KEYS, Llama, LlamaConfig, block_rules
from polyreme.models.families import GEMMA
from polyreme.models.files.published import PublishedFamily
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import RMSNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.parameter import ParamAttr


class OffsetRMSNorm(RMSNorm):
    """RMSNorm times 1 + weight, which begins at 0; computed in at least float32 and rounded once.

    >>> from polyreme.eager.tensor import to_tensor
    >>> OffsetRMSNorm(2)(to_tensor([[3.0, 3.0]])).numpy().round(3).tolist()
    [[1.0, 1.0]]
    """

    offset = 1.0

    def __init__(self, normalized_shape: int, epsilon: float = 1e-6) -> None:
        super().__init__(normalized_shape, epsilon, ParamAttr(initializer=Constant(0.0)))

    def forward(self, input: Any) -> Any:
        wide = "float64" if input.dtype.name == "float64" else "float32"
        gain = self.weight.astype(wide) + self.offset
        return F.rms_norm(input.astype(wide), self._normalized_shape, gain, self._epsilon).astype(input.dtype)


@dataclass(frozen=True)
class GemmaConfig(LlamaConfig):
    """Dimensions of a Gemma: a LLaMA's."""

    norm_class: ClassVar[type[RMSNorm]] = OffsetRMSNorm
    activation: ClassVar[str] = "gelu_tanh"

    vocab_size: int = 256000
    tie_embeddings: bool = True

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        """What embeddings are multiplied by: the square root of their width."""
        return self.hidden_size**0.5


class Gemma(Llama, keeps_order_free=True):
    """As Llama."""

    family = GEMMA


GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
}
"""What config.json of a Gemma means by leaving a key out."""
GEMMA_FIXED = {"hidden_activation": ("gelu_pytorch_tanh", "gelu_new")}


def read_attention_bias(config: Mapping[str, Any]) -> dict[str, Any]:
    """qkv_bias and out_bias."""
    bias = bool(config.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias}


PUBLISHED = PublishedFamily(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    keys=KEYS,
    weights=block_rules,
    defaults=GEMMA_DEFAULTS,
    # "gelu" stands in the first files, whose weights are of the tanh form; the reference takes what hidden_activation
    # says, and the tanh form where that is null
    fixed={"hidden_activation": (*GEMMA_FIXED["hidden_activation"], None)},
    prefix="model.",
    read=lambda config: read_attention_bias(config) | read_rope(config),
    read_keys=("hidden_act", "attention_bias", *ROPE_KEYS),
    write=lambda config: {"hidden_act": "gelu_pytorch_tanh", "attention_bias": config.out_bias} | write_rope(config),
)
