"""Mixtral: a LLaMA whose feed-forwards are mixtures of experts.

Source: arXiv:2401.04088. Same function as transformers' MixtralForCausalLM, whose values are the fixtures of
tests/models/experts/test_mixtral.py. Logical dims of parameters beside LLaMA's: expert, expert_ffn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from polyreme.autograd.recompute import run_part
from polyreme.errors import ConfigError
from polyreme.models.decoders.llama import (
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
from polyreme.models.families import MIXTRAL, ROUTINGS, Family, default_balance_loss, tokens_per_expert
from polyreme.models.files.published import EXPERTS, PublishedFamily, WeightRule
from polyreme.models.parts.cache import KVCache, LayerCache
from polyreme.models.parts.decoder import BlockPart, InsertedVectors, next_token_loss
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import ExpertChoiceRouter, HashRouter, Layer, MoE, Router
from polyreme.nn.layers.experts import BALANCE_SCOPES
from polyreme.ops import creation
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Dimensions of a Mixtral: a LLaMA's, and those of its experts.

    num_experts of each layer, of which experts_per_token work on a token; expert_ffn_size: their width, ffn_size if 0.
    normalize_gates: a token's gates are divided by their sum. balance_loss: the weight of F.balance_loss in the loss
    of training, the family's if None; balance_scope: whose choices it counts, as of nn.Router. capacity_factor: how
    many times its even share of choices an expert takes; it takes all if 0. routing: one of families.ROUTINGS; with
    expert_choice experts_per_token is a mean, an expert chooses capacity_factor (1 if 0) times its even share, and a
    token is chosen by comparison with later ones too.
    """

    family: ClassVar[Family] = MIXTRAL
    n_shared_experts: ClassVar[int] = 0
    """How many times as wide as an expert is one that every token goes through besides, by a gate of its own."""
    router_bias: ClassVar[bool] = False
    expert_options: ClassVar[Mapping[str, Any]] = {}
    """Of nn.MoE: activation and biases of the experts."""

    num_experts: int = 8
    experts_per_token: int = 2
    expert_ffn_size: int = 0
    normalize_gates: bool = True
    balance_loss: float | None = None
    balance_scope: str = "micro_batch"
    capacity_factor: float = 0.0
    routing: str = "token_choice"

    def __post_init__(self) -> None:
        if not self.expert_ffn_size:
            object.__setattr__(self, "expert_ffn_size", self.ffn_size or MIXTRAL.ffn_size(self.hidden_size))
        if self.routing not in ROUTINGS:
            raise ConfigError(f"{type(self).__name__}: routing {self.routing!r}; one of {', '.join(ROUTINGS)}")
        if self.balance_loss is None:
            object.__setattr__(self, "balance_loss", default_balance_loss(self.family, self.routing))
        super().__post_init__()
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{type(self).__name__}: experts_per_token {self.experts_per_token} of {self.num_experts} experts; "
                f"make it 1 to {self.num_experts}"
            )
        if (self.balance_loss or 0.0) < 0 or self.capacity_factor < 0:
            raise ConfigError(
                f"{type(self).__name__}: balance_loss {self.balance_loss}, capacity_factor {self.capacity_factor}; "
                "give at least 0"
            )
        if self.balance_loss and self.routing != "token_choice":
            raise ConfigError(
                f"{type(self).__name__}: balance_loss {self.balance_loss} with routing {self.routing}, which no loss "
                "balances; leave it out"
            )
        scopes = BALANCE_SCOPES if self.balance_loss else BALANCE_SCOPES[:1]
        if self.balance_scope not in scopes:
            raise ConfigError(
                f"{type(self).__name__}: balance_scope {self.balance_scope!r} with balance_loss {self.balance_loss}, "
                f"which takes {' or '.join(scopes)}"
            )

    @property
    def tokens_per_expert(self) -> int:
        """How many tokens of a sequence each expert chooses; 0 where experts do not choose."""
        return tokens_per_expert(self)

    @classmethod
    def nano(cls, **changes: Any) -> MixtralConfig:
        """A Mixtral that trains in seconds on a CPU."""
        return super().nano(**{"num_experts": 4, "expert_ffn_size": 32, **changes})  # type: ignore[return-value]


def make_router(config: Any, **options: Any) -> Router:
    """A router by which tokens choose experts."""
    sizes = (config.hidden_size, config.num_experts, config.experts_per_token)
    return Router(*sizes, weight_attr=normal(), **options)


def make_experts(config: Any, router: Any, shared_hidden: int = 0, shared_gate: bool = False) -> MoE:
    """The experts of a block. router, shared_hidden, shared_gate: as of MoE."""
    sizes = (config.hidden_size, config.expert_ffn_size, config.num_experts)
    shared = {"shared_hidden": shared_hidden, "shared_gate": shared_gate}
    return MoE(*sizes, router=router, **shared, **getattr(config, "expert_options", {}), weight_attr=normal())


def make_routed_experts(config: MixtralConfig, number: int) -> MoE:
    """The experts of a Mixtral's block, before which come `number` others: ids go elsewhere in each."""
    capacity, sizes = config.capacity_factor or None, (config.num_experts, config.experts_per_token)
    router: Any
    if config.routing == "hash":
        router = HashRouter(*sizes, capacity_factor=capacity, seed=number)
    elif config.routing == "expert_choice":
        router = ExpertChoiceRouter(config.hidden_size, *sizes, capacity_factor=capacity or 1.0, weight_attr=normal())
    else:
        router = make_router(
            config,
            capacity_factor=capacity,
            normalize=config.normalize_gates,
            balance_loss=config.balance_loss,
            balance_scope=config.balance_scope,
            bias=config.router_bias,
        )
    shared_hidden = config.n_shared_experts * config.expert_ffn_size
    return make_experts(config, router, shared_hidden, shared_gate=shared_hidden > 0)


class Routed(NamedTuple):
    """A block between its router and its experts: x and its norm [batch, seq, embed], the choices [batch, seq, k] of
    experts for each token with their gates, and the router's loss."""

    x: Any
    normed: Any
    choices: Any
    gates: Any
    loss: Any


class SparseBlock(Block):
    """x + attention(norm(x)), then x + experts(norm(x)) -> that, and the router's loss."""

    ffn: MoE

    def forward(
        self, x_bse: Any, cos_sd: Any, sin_sd: Any, *ids: Any, cache: LayerCache | None = None, ends: Any = None
    ) -> tuple[Any, Any]:
        """ids [batch, seq]: of the tokens, for a HashRouter."""
        return run_part("full", self.recompute, self._compute, x_bse, cos_sd, sin_sd, *ids, cache=cache, ends=ends)

    def _compute(
        self, x_bse: Any, cos_sd: Any, sin_sd: Any, ids: Any = None, cache: LayerCache | None = None, ends: Any = None
    ) -> tuple[Any, Any]:
        routed = self._route(x_bse, cos_sd, sin_sd, ids, cache, ends)
        return self._mix(routed), routed.loss

    def route(self, *inputs: Any) -> Routed:
        """The first part of forward, of the same arguments: up to which experts tokens go to."""
        return run_part("full", self.recompute, self._route, *inputs)

    def mix(self, routed: Routed) -> Any:
        """The second part of forward: what the experts add, [batch, seq, embed]."""
        return run_part("full", self.recompute, self._mix, routed)

    def _route(
        self, x_bse: Any, cos_sd: Any, sin_sd: Any, ids: Any = None, cache: LayerCache | None = None, ends: Any = None
    ) -> Routed:
        x_bse = self.attend(x_bse, cos_sd, sin_sd, cache, ends)
        normed_bse = self.ffn_norm(x_bse)
        routing = self.ffn.route(normed_bse, ids=ids)
        return Routed(x_bse, normed_bse, routing.choices, routing.gates, routing.loss)

    def _mix(self, routed: Routed) -> Any:
        mixed = self.ffn.mix(routed.normed, routed.choices, routed.gates)
        return constrain(routed.x + mixed, "batch", "seq", "embed")


class Mixtral(Llama):
    """As Llama. From block to block goes beside the activations the sum of the routers' losses, which training adds,
    and with routing by hash the tokens' ids."""

    config: MixtralConfig

    family = MIXTRAL

    @property
    def is_order_free(self) -> bool:  # type: ignore[override]
        """Without windows, where tokens choose experts, and without a capacity, which later tokens meet first."""
        config = self.config
        return config.capacity_factor == 0 and config.routing == "token_choice" and not config.sliding_window

    def make_block(self, config: Any, number: int) -> Layer:
        """A new block; number: how many come before it."""
        return SparseBlock(config, Attention(config, config.window(number)), make_routed_experts(config, number))

    def embed(
        self, tokens: Any, cache: KVCache | None = None, inserted: InsertedVectors | None = None
    ) -> tuple[Any, ...]:
        """What the first block takes: embeddings [batch, seq, embed], no loss yet, and ids if they say experts."""
        ids = (tokens,) if getattr(self.config, "routing", None) == "hash" else ()
        return super().embed(tokens, cache, inserted), creation.zeros([], "float32"), *ids

    def run_block(self, block: Layer, x_bse: Any, cache: LayerCache | None = None) -> tuple[Any, ...]:
        """A block's output, the routers' losses so far, and ids if they say experts."""
        x_bse, so_far, *ids = x_bse
        x_bse, loss = super().run_block(block, x_bse, cache, *ids)
        return x_bse, so_far + loss, *ids

    def block_parts(self, block: Layer, place: int, *, at_routers: bool) -> list[Layer]:
        """A block's item of pipeline_items, or the two that a router parts."""
        if not (at_routers and isinstance(block, SparseBlock)):
            return super().block_parts(block, place, at_routers=at_routers)
        return [BlockPart(self._route_block, block, place), ExpertsPart(self._mix_block, block, place)]

    def _route_block(self, block: SparseBlock, x_bse: Any) -> tuple[Any, ...]:
        x_bse, so_far, *ids = x_bse
        routed = Llama.run_block(self, block.route, x_bse, None, *ids)  # type: ignore[arg-type]  # called as a block
        return routed, so_far + routed.loss, *ids

    def _mix_block(self, block: SparseBlock, stream: tuple[Any, ...]) -> tuple[Any, ...]:
        routed, *rest = stream
        return block.mix(routed), *rest

    def normed(self, x_bse: Any) -> tuple[Any, Any]:
        """The last block's normed output, and the routers' losses."""
        return self.norm(x_bse[0]), x_bse[1]

    def in_own_order(self, stream: tuple[Any, Any]) -> tuple[Any, Any]:
        """What stream(tokens) gives, the tokens in their own order."""
        return super().in_own_order(stream[0]), stream[1]

    def logits(self, hidden: Any) -> Any:
        """[batch, seq, vocab] given hidden(tokens)."""
        return self.project(hidden[0])


class ExpertsPart(BlockPart):
    """The second part of a block, whose input begins with a Routed: the experts, of which it takes those chosen."""

    mixes_experts = True


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


def check_published_routing(config: MixtralConfig) -> None:
    """Raise ConfigError for a routing that published configurations have no word for."""
    if config.routing != "token_choice":
        raise ConfigError(
            f"{type(config).__name__}: routing {config.routing} has no published form, in which tokens choose experts; "
            "save the weights with paddle.save"
        )


def _rules(config: Any) -> list[WeightRule]:
    check_published_routing(config)
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    experts = expert_rules("model.layers.{n}.block_sparse_moe", "blocks.{n}.ffn", names)
    return [*outer_rules(), *attention_rules(), *experts]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    # every feed-forward is of experts: one width is both
    widths = {"ffn_size": config["intermediate_size"]} if "intermediate_size" in config else {}
    return widths | {"sliding_window": config.get("sliding_window") or 0} | read_rope(config)


PUBLISHED = PublishedFamily(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys={
        **KEYS,
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_ffn_size",
    },
    weights=_rules,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
    },
    fixed={**FIXED, "router_jitter_noise": (0.0, 0)},
    prefix="model.",
    read=_read,
    read_keys=("sliding_window", *ROPE_KEYS),
    write=lambda config: {"sliding_window": config.sliding_window or None} | write_rope(config),
)
