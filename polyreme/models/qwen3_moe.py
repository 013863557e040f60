"""Qwen3-MoE: a Mixtral whose queries and keys are normed head by head, with heads of a width of their own.

Source: arXiv:2505.09388. Same function as transformers' Qwen3MoeForCausalLM where every layer has experts, whose values
are the fixtures of tests/models/test_qwen3_moe.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyreme.models.families import QWEN3_MOE
from polyreme.models.llama import Attention
from polyreme.models.mixtral import Mixtral, MixtralConfig, SparseBlock
from polyreme.nn import Layer


@dataclass(frozen=True)
class Qwen3MoeConfig(MixtralConfig):
    """Dimensions of a Qwen3-MoE: a Mixtral's."""

    rope_theta: float = 1000000.0
    experts_per_token: int = 8
    num_experts: int = 128
    balance_loss: float = 0.001

    @classmethod
    def nano(cls, **changes: Any) -> Qwen3MoeConfig:
        """A Qwen3-MoE that trains in seconds on a CPU."""
        return super().nano(**{"head_dim": 16, "experts_per_token": 2, **changes})  # type: ignore[return-value]


class Qwen3Moe(Mixtral):
    """As Mixtral."""

    family = QWEN3_MOE
    is_order_free = Mixtral.is_order_free

    def make_block(self, config: Any, number: int) -> Layer:
        """A new block; number: how many come before it."""
        return SparseBlock(config, Attention(config, qk_norm=True))
