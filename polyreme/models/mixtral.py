"""Mixtral: a LLaMA whose feed-forwards are mixtures of experts.

Source: arXiv:2401.04088. Same function as transformers' MixtralForCausalLM, whose values are the fixtures of
tests/models/test_mixtral.py. Logical dims of parameters beside LLaMA's: expert, expert_ffn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.autograd.recompute import run_part
from polyreme.errors import ConfigError
from polyreme.models.decoder import next_token_loss
from polyreme.models.families import MIXTRAL
from polyreme.models.llama import (
    DEFAULTS,
    FIXED,
    KEYS,
    Attention,
    Block,
    Llama,
    LlamaConfig,
    attention_rules,
    normal,
    outer_rules,
)
from polyreme.models.published import EXPERTS, PublishedFamily, WeightRule
from polyreme.models.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import Layer, MoE, Router
from polyreme.ops import creation
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Dimensions of a Mixtral: a LLaMA's, and those of its experts.

    num_experts of each layer, of which experts_per_token work on a token; expert_ffn_size: their width, ffn_size if 0.
    normalize_gates: a token's gates are divided by their sum. balance_loss: the weight of F.balance_loss in the loss
    of training. capacity_factor: how many times its even share of choices an expert takes; it takes all if 0.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    expert_ffn_size: int = 0
    normalize_gates: bool = True
    balance_loss: float = 0.01
    capacity_factor: float = 0.0

    def __post_init__(self) -> None:
        if not self.expert_ffn_size:
            object.__setattr__(self, "expert_ffn_size", self.ffn_size or MIXTRAL.ffn_size(self.hidden_size))
        super().__post_init__()
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{type(self).__name__}: experts_per_token {self.experts_per_token} of {self.num_experts} experts; "
                f"make it 1 to {self.num_experts}"
            )
        if self.balance_loss < 0 or self.capacity_factor < 0:
            raise ConfigError(
                f"{type(self).__name__}: balance_loss {self.balance_loss}, capacity_factor {self.capacity_factor}; "
                "give at least 0"
            )

    @classmethod
    def nano(cls, **changes: Any) -> MixtralConfig:
        """A Mixtral that trains in seconds on a CPU."""
        return super().nano(**{"num_experts": 4, "expert_ffn_size": 32, **changes})  # type: ignore[return-value]


def make_experts(config: Any, shared_hidden: int = 0, **routing: Any) -> MoE:
    """The experts of a block. shared_hidden: as of MoE; routing: options of its Router."""
    router = Router(config.hidden_size, config.num_experts, config.experts_per_token, weight_attr=normal(), **routing)
    sizes = (config.hidden_size, config.expert_ffn_size, config.num_experts)
    return MoE(*sizes, router=router, shared_hidden=shared_hidden, weight_attr=normal())


class SparseBlock(Block):
    """x + attention(norm(x)), then x + experts(norm(x)) -> that, and the router's loss; a Mixtral's experts if not
    given."""

    def __init__(self, config: Any, attention: Layer | None = None, ffn: MoE | None = None) -> None:
        super().__init__(config, attention, ffn or _make_mixtral_experts(config))

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any) -> tuple[Any, Any]:
        return run_part("full", self.recompute, self._compute, x_bse, cos_sd, sin_sd)

    def _compute(self, x_bse: Any, cos_sd: Any, sin_sd: Any) -> tuple[Any, Any]:
        x_bse = self.attend(x_bse, cos_sd, sin_sd)
        mixed, loss = self.ffn(self.ffn_norm(x_bse))
        return constrain(x_bse + mixed, "batch", "seq", "embed"), loss


def _make_mixtral_experts(config: MixtralConfig) -> MoE:
    capacity = config.capacity_factor or None
    return make_experts(
        config, normalize=config.normalize_gates, capacity_factor=capacity, balance_loss=config.balance_loss
    )


class Mixtral(Llama):
    """As Llama. From block to block goes beside the activations the sum of the routers' losses, which training adds."""

    family = MIXTRAL

    @property
    def is_order_free(self) -> bool:  # type: ignore[override]
        """Without windows, and without a capacity, which later tokens meet first."""
        return self.config.capacity_factor == 0 and not self.config.sliding_window

    def make_block(self, config: Any, number: int) -> Layer:
        """A new block; number: how many come before it."""
        return SparseBlock(config, Attention(config, config.window(number)))

    def embed(self, tokens: Any) -> tuple[Any, Any]:
        """What the first block takes: embeddings [batch, seq, embed], and no loss yet."""
        return super().embed(tokens), creation.zeros([], "float32")

    def run_block(self, block: Layer, x_bse: Any) -> tuple[Any, Any]:
        """A block's output, and the routers' losses so far."""
        x_bse, so_far = x_bse
        x_bse, loss = super().run_block(block, x_bse)
        return x_bse, so_far + loss

    def normed(self, x_bse: Any) -> tuple[Any, Any]:
        """The last block's normed output, and the routers' losses."""
        return self.norm(x_bse[0]), x_bse[1]

    def in_own_order(self, stream: tuple[Any, Any]) -> tuple[Any, Any]:
        """What stream(tokens) gives, the tokens in their own order."""
        return super().in_own_order(stream[0]), stream[1]

    def logits(self, hidden: Any) -> Any:
        """[batch, seq, vocab] given hidden(tokens)."""
        return super().logits(hidden[0])


def balanced_loss(model: Mixtral, hidden: tuple[Any, Any], labels: Any) -> Any:
    """next_token_loss, and while training the routers' losses."""
    loss = next_token_loss(model, hidden[0], labels)
    return loss + hidden[1] if model.training else loss


def expert_rules(
    there: str, here: str, names: Mapping[str, str], router: str = "gate", number: str = "experts.{e}"
) -> list[WeightRule]:
    """The weights of a mixture of experts. names: their matrices and ours; router, number: the names of these there."""
    matrices = [
        WeightRule(f"{there}.{number}.{name}.weight", f"{here}.{ours}", EXPERTS) for name, ours in names.items()
    ]
    return [WeightRule(f"{there}.{router}.weight", f"{here}.router.weight"), *matrices]


def _rules(config: Any) -> list[WeightRule]:
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    experts = expert_rules("model.layers.{n}.block_sparse_moe", "blocks.{n}.ffn", names)
    return [*outer_rules(), *attention_rules(), *experts]


PUBLISHED = PublishedFamily(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys={**KEYS, "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
    weights=_rules,
    defaults={**DEFAULTS, "num_key_value_heads": 8},
    fixed={**FIXED, "router_jitter_noise": (0.0, 0)},
    prefix="model.",
    read=lambda config: {"sliding_window": config.get("sliding_window") or 0} | read_rope(config),
    read_keys=("sliding_window", *ROPE_KEYS),
    write=lambda config: {"sliding_window": config.sliding_window or None} | write_rope(config),
)
