"""DeepSeek-V3: a decoder whose keys and values come out of a narrow latent, with shared and routed experts.

Source: arXiv:2412.19437; latent attention and shared experts arXiv:2405.04434, balance without a loss arXiv:2408.15664,
yarn arXiv:2309.00071. Same function as transformers' DeepseekV3ForCausalLM, whose values are the fixtures of
tests/models/experts/test_deepseek_v3.py; the reference leaves out that modules predict further tokens
(arXiv:2412.19437, section 2.2). Logical dims of parameters beside Mixtral's: latent, which no plan splits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyreme.autograd.recompute import run_part
from polyreme.errors import ConfigError
from polyreme.mesh.axes import nearest_multiples
from polyreme.models.decoders.llama import (
    DEFAULTS,
    FIXED,
    KEYS,
    NORMS,
    Block,
    BlockTraits,
    Llama,
    ffn_rules,
    linear,
    outer_rules,
)
from polyreme.models.experts.mixtral import Mixtral, SparseBlock, balanced_loss, expert_rules, make_experts, make_router
from polyreme.models.families import DEEPSEEK_V3, latent_widths
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.cache import LayerCache
from polyreme.models.parts.decoder import check_dimensions, next_token_loss
from polyreme.models.parts.rotary import ROPE_KEYS, Yarn, read_rope, read_scaling, rotate, write_rope
from polyreme.nn import Layer, LayerList, RMSNorm
from polyreme.nn import functional as F
from polyreme.nn.layers.linear import Linear
from polyreme.ops import creation
from polyreme.ops.layout import constrain
from polyreme.ops.manipulation import concat
from polyreme.ops.repetition import expand

LATENT_EPSILON = 1e-6
"""Of the norms inside attention, whatever the model's other norms have."""


@dataclass(frozen=True)
class LatentConfig(BlockTraits):
    """Dimensions of a decoder with latent attention.

    kv_lora_rank: width of the latent that keys and values come from; q_lora_rank: of the one that queries come from,
    which come from the input if 0. A query and a key have qk_nope_head_dim numbers of their own a head and
    qk_rope_head_dim that are turned by their position, those of a key shared by all heads; v_head_dim: width of a
    value. What is 0 follows from d = hidden_size / num_heads: 4 d, d, d / 2 and d (arXiv:2405.04434, section 2.1.4).
    rope_scaling: the fields of a Yarn. The others as in LlamaConfig.
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    num_layers: int = 61
    num_heads: int = 128
    ffn_size: int = 0
    seq_len: int = 4096
    rope_theta: float = 10000.0
    rms_norm_epsilon: float = 1e-6
    tie_embeddings: bool = False
    recompute: str = ""
    q_lora_rank: int = field(default=0, metadata={"least": 0})
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_scaling: Yarn | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not self.qk_nope_head_dim and self.num_heads > 0 and self.hidden_size % self.num_heads:
            raise ConfigError(
                f"{name}: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}, and no "
                f"qk_nope_head_dim is given; give it, or make hidden_size "
                f"{nearest_multiples(self.hidden_size, self.num_heads)}"
            )
        derived: dict[str, Any] = latent_widths(self) | {
            "ffn_size": self.ffn_size or DEEPSEEK_V3.ffn_size(self.hidden_size)
        }
        derived["rope_scaling"] = read_scaling(self.rope_scaling, ("yarn",))
        for key, value in derived.items():
            object.__setattr__(self, key, value)
        check_dimensions(self)
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"{name}: qk_rope_head_dim {self.qk_rope_head_dim} is odd, and rotary positions turn pairs; make it "
                f"{nearest_multiples(self.qk_rope_head_dim, 2)}"
            )

    @property
    def rotary_width(self) -> int:
        """Dims of a query and of a key that positions turn."""
        return self.qk_rope_head_dim

    @property
    def head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class SharedExpertsConfig:
    """What a decoder with shared and routed experts says of them, before the class that has the other dimensions.

    The first first_k_dense_replace layers have a feed-forward of width ffn_size. In the others each token goes to
    n_shared_experts and to experts_per_token of num_experts others, of width expert_ffn_size (ffn_size if 0), chosen
    within the topk_group best of n_group groups. norm_topk_prob, routed_scaling_factor: gates are divided by their sum,
    and multiplied. sequence_loss: weight of the loss that balances each sequence, in training.
    num_nextn_predict_layers: modules that predict in training one token further ahead each; mtp_loss_weight: of the
    mean of their losses. score, bias_rate: as of nn.Router; has_selection_bias: whether the choice adds a bias to it.
    """

    score: ClassVar[str] = "softmax"
    has_selection_bias: ClassVar[bool] = False
    bias_rate: ClassVar[float] = 0.0

    num_experts: int = 256
    experts_per_token: int = 8
    expert_ffn_size: int = 0
    n_shared_experts: int = field(default=1, metadata={"least": 0})
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = field(default=1, metadata={"least": 0})
    sequence_loss: float = 0.0001
    num_nextn_predict_layers: int = field(default=0, metadata={"least": 0})
    mtp_loss_weight: float = 0.3

    def __post_init__(self) -> None:
        if not self.expert_ffn_size:
            object.__setattr__(self, "expert_ffn_size", self.ffn_size or DEEPSEEK_V3.ffn_size(self.hidden_size))
        super().__post_init__()  # type: ignore[misc]  # of the class that has the other dimensions
        name = type(self).__name__
        if self.first_k_dense_replace >= self.num_layers:
            raise ConfigError(
                f"{name}: first_k_dense_replace {self.first_k_dense_replace} of {self.num_layers} layers "
                f"leaves none for experts; make it at most {self.num_layers - 1}"
            )
        groups, per_group = self.n_group, self.num_experts // self.n_group
        if self.num_experts % groups or not self.experts_per_token <= self.topk_group * per_group <= self.num_experts:
            raise ConfigError(
                f"{name}: experts_per_token {self.experts_per_token} from topk_group {self.topk_group} of "
                f"n_group {groups} groups of {self.num_experts} experts; n_group must divide the experts, and "
                "topk_group, at most n_group, of them hold experts_per_token"
            )
        if self.routed_scaling_factor <= 0 or min(self.bias_rate, self.sequence_loss, self.mtp_loss_weight) < 0:
            raise ConfigError(
                f"{name}: routed_scaling_factor {self.routed_scaling_factor}, bias_rate {self.bias_rate}, "
                f"sequence_loss {self.sequence_loss}, mtp_loss_weight {self.mtp_loss_weight}; give a factor above 0, "
                "and the others at least 0"
            )
        if self.num_nextn_predict_layers >= self.seq_len:
            raise ConfigError(
                f"{name}: num_nextn_predict_layers {self.num_nextn_predict_layers} looks past the end of "
                f"seq_len {self.seq_len} tokens; make it at most {self.seq_len - 1}"
            )


@dataclass(frozen=True)
class BiasedExpertsConfig(SharedExpertsConfig):
    """As SharedExpertsConfig, of experts whose choice adds a bias to their scores."""

    score: ClassVar[str] = "sigmoid"
    has_selection_bias: ClassVar[bool] = True

    bias_rate: float = 0.001  # type: ignore[misc]  # which where there is no bias is nothing to choose


@dataclass(frozen=True)
class DeepseekV3Config(BiasedExpertsConfig, LatentConfig):
    """Dimensions of a DeepSeek-V3: those of latent attention, and those of its experts."""

    @classmethod
    def nano(cls, **changes: Any) -> DeepseekV3Config:
        """A DeepSeek-V3 that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_len": 16, "num_experts": 4}
        return cls(**{**base, "experts_per_token": 2, "expert_ffn_size": 32, **changes})  # type: ignore[arg-type]


class LatentAttention(Layer):
    """Causal self-attention whose keys and values are linear in a narrow latent. Source: arXiv:2405.04434, 2.1."""

    q_a: Linear
    q_b: Linear
    kv_a: Linear
    kv_b: Linear
    out: Linear

    q_norm: RMSNorm
    kv_norm: RMSNorm
    scale: Any

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        self.config = config
        width, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
        q_width, kv_width = heads * config.head_dim, heads * (config.qk_nope_head_dim + config.v_head_dim)
        if config.q_lora_rank:
            self.q_a = linear(width, config.q_lora_rank, ("embed", "latent"))
            self.q_norm = RMSNorm(config.q_lora_rank, epsilon=LATENT_EPSILON)
            self.q_b = linear(config.q_lora_rank, q_width, ("latent", "heads"))
        else:
            self.q = linear(width, q_width, ("embed", "heads"))
        self.kv_a = linear(width, rank + config.qk_rope_head_dim, ("embed", "latent"))
        self.kv_norm = RMSNorm(rank, epsilon=LATENT_EPSILON)
        self.kv_b = linear(rank, kv_width, ("latent", "heads"))
        self.out = linear(heads * config.v_head_dim, width, ("heads", "embed"))
        scaling = config.rope_scaling
        self.scale = config.head_dim**-0.5 * (scaling.score_scale if isinstance(scaling, Yarn) else 1.0)

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None) -> Any:
        config, (batch, seq, _) = self.config, x_bse.shape
        heads, nope_dim, rank = config.num_heads, config.qk_nope_head_dim, config.kv_lora_rank

        def by_heads(x: Any, width: int) -> Any:
            return constrain(x.reshape([batch, seq, heads, width]), "batch", "block_seq", "heads", None)

        q = by_heads(self.q_b(self.q_norm(self.q_a(x_bse))) if config.q_lora_rank else self.q(x_bse), config.head_dim)
        latent = self.kv_a(x_bse)
        kv = by_heads(self.kv_b(self.kv_norm(latent[..., :rank])), nope_dim + config.v_head_dim)
        shared = rotate(_by_halves(latent[..., rank:].unsqueeze(2)), cos_sd, sin_sd)
        q = concat([q[..., :nope_dim], rotate(_by_halves(q[..., nope_dim:]), cos_sd, sin_sd)], axis=-1)
        k = concat([kv[..., :nope_dim], expand(shared, [batch, seq, heads, config.qk_rope_head_dim])], axis=-1)
        q, k, v = (by_heads(x, x.shape[-1]) for x in (q, k, kv[..., nope_dim:]))
        if cache is not None:
            mixed = cache.attend(q, k, v, scale=self.scale)
            return self.out(mixed.reshape([batch, seq, heads * config.v_head_dim]))
        options = {"is_causal": True, "training": self.training, "scale": self.scale}
        mixed = run_part("core_attn", config.recompute, F.scaled_dot_product_attention, q, k, v, **options)
        return self.out(mixed.reshape([batch, seq, heads * config.v_head_dim]))


class NextToken(Layer):
    """What predicts one token further ahead: a block over what is known of each place and the token that follows it.

    Source: arXiv:2412.19437, equation 21; as in the public checkpoint the token's embedding comes first.
    """

    join: Linear

    token_norm: RMSNorm
    hidden_norm: RMSNorm
    norm: RMSNorm

    def __init__(self, config: DeepseekV3Config, block: SparseBlock) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm, self.norm = (
            RMSNorm(config.hidden_size, epsilon=config.rms_norm_epsilon) for _ in range(3)
        )
        self.join = linear(2 * config.hidden_size, config.hidden_size, ("latent", "embed"))
        self.block = block

    def forward(self, x_bse: Any, tokens_bse: Any) -> Any:
        """Input of the block."""
        joined = self.join(concat([self.token_norm(tokens_bse), self.hidden_norm(x_bse)], axis=-1))
        return constrain(joined, "batch", "seq", "embed")


class DeepseekV3(Mixtral):
    """As Mixtral, with latent attention; the first blocks have no experts. In training the modules of `mtp` predict
    further tokens, with the embedding and the head of the model."""

    config: DeepseekV3Config

    mtp: LayerList

    family = DEEPSEEK_V3

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        ahead = range(config.num_layers, config.num_layers + config.num_nextn_predict_layers)
        self.mtp = LayerList([NextToken(config, self.make_block(config, number)) for number in ahead])

    def make_block(self, config: Any, number: int) -> Layer:
        """A new block; number: how many come before it."""
        attention = self.make_attention(config, number)
        if number < config.first_k_dense_replace:
            return Block(config, attention)
        router = make_router(
            config,
            score=config.score,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            groups=config.n_group,
            top_groups=config.topk_group,
            selection_bias=config.has_selection_bias,
            bias_rate=config.bias_rate,
            sequence_loss=config.sequence_loss,
        )
        shared = config.n_shared_experts * config.expert_ffn_size
        return SparseBlock(config, attention, make_experts(config, router, shared))

    def make_attention(self, config: Any, number: int) -> Layer:
        """A new attention of a block; number: how many come before it."""
        return LatentAttention(config)

    @property
    def cache_dims(self) -> tuple[int, int, int]:
        """Keys and values of all heads, as they come out of the latent."""
        return self.config.num_heads, self.config.head_dim, self.config.v_head_dim

    def run_block(self, block: Layer, x_bse: Any, cache: LayerCache | None = None) -> tuple[Any, Any]:
        """A block's output, and the routers' losses so far."""
        if isinstance(block, SparseBlock):
            return super().run_block(block, x_bse, cache)
        x_bse, so_far = x_bse
        return Llama.run_block(self, block, x_bse, cache), so_far

    def output_layers(self) -> dict[str, Layer]:
        """The Layers that normed, logits and the loss call, those of embed apart."""
        return super().output_layers() | {"mtp": self.mtp}

    def losses_ahead(self, x_bse: Any, labels: Any) -> tuple[Any, Any]:
        """The mean loss of the tokens after the next, one further for each module, and the losses of their routers."""
        routers, losses = creation.zeros([], "float32"), []
        for module in self.mtp:
            tokens_bse, _ = self.embed(labels.clip(min=0))  # -100 stands for no label
            x_bse, routers = self.run_block(module.block, (module(x_bse, tokens_bse), routers))
            x_bse = module.norm(x_bse)
            labels = concat([labels[:, 1:], creation.full_like(labels[:, :1], -100)], axis=1)
            losses.append(next_token_loss(self, x_bse, labels))
        return sum(losses[1:], losses[0]) / len(losses), routers


def loss_with_tokens_ahead(model: DeepseekV3, hidden: tuple[Any, Any], labels: Any) -> Any:
    """next_token_loss, and while training the routers' losses and those of further tokens."""
    loss = balanced_loss(model, hidden, labels)
    if not (model.training and len(model.mtp)):
        return loss
    ahead, routers = model.losses_ahead(hidden[0], labels)
    return loss + model.config.mtp_loss_weight * ahead + routers


def _by_halves(x_bshd: Any) -> Any:
    """Pairs of neighbours as pairs (i, i + width / 2), which rotate turns: queries' and keys' scores stay the same."""
    *rest, width = x_bshd.shape
    return x_bshd.reshape([*rest, width // 2, 2]).transpose([0, 1, 2, 4, 3]).reshape([*rest, width])


# as published


def _attention_rules(there: str, here: str) -> list[WeightRule]:
    norms = {**NORMS, "self_attn.q_a_layernorm": "attention.q_norm", "self_attn.kv_a_layernorm": "attention.kv_norm"}
    maps = {"q_proj": "q", "q_a_proj": "q_a", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a", "kv_b_proj": "kv_b"}
    maps["o_proj"] = "out"
    return [
        *(WeightRule(f"{there}.{name}.weight", f"{here}.{ours}.weight", SAME) for name, ours in norms.items()),
        *(WeightRule(f"{there}.self_attn.{n}.weight", f"{here}.attention.{ours}.weight") for n, ours in maps.items()),
    ]


def _experts_rules(there: str, here: str) -> list[WeightRule]:
    experts = {f"{name}_proj": name for name in ("gate", "up", "down")}
    return [
        *ffn_rules(f"{there}.mlp", f"{here}.ffn"),
        *ffn_rules(f"{there}.mlp.shared_experts", f"{here}.ffn.shared"),
        *expert_rules(f"{there}.mlp", f"{here}.ffn", experts),
        WeightRule(f"{there}.mlp.gate.e_score_correction_bias", f"{here}.ffn.router.selection_bias", SAME),
    ]


def shared_experts_rules(
    config: Any, attention: Callable[[str, str], list[WeightRule]] = _attention_rules
) -> list[WeightRule]:
    """All the weights; attention: (the name of a block there, and here) -> those of its attention and norms."""

    def block_rules(there: str, here: str) -> list[WeightRule]:
        return [*attention(there, here), *_experts_rules(there, here)]

    rules = [*outer_rules(), *block_rules("model.layers.{n}", "blocks.{n}")]
    for number in range(config.num_nextn_predict_layers):
        there, here = f"model.layers.{config.num_layers + number}", f"mtp.{number}"
        norms = {"enorm": "token_norm", "hnorm": "hidden_norm", "shared_head.norm": "norm"}
        rules += [WeightRule(f"{there}.{name}.weight", f"{here}.{ours}.weight", SAME) for name, ours in norms.items()]
        rules += [WeightRule(f"{there}.eh_proj.weight", f"{here}.join.weight"), *block_rules(there, f"{here}.block")]
    return rules


def _is_spare(name: str, config: Any) -> bool:
    """Whether a weight is one of a module that predicts further and is not wanted, or its copy of what it shares."""
    number = re.match(r"model\.layers\.(\d+)\.", name)
    ahead = int(number[1]) - config.num_layers if number else -1
    shared = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    return ahead >= 0 and (shared or ahead >= config.num_nextn_predict_layers)


def _fit(fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Without the modules that predict further where the files have none: transformers leaves them out, and says in
    config.json that they are there."""
    first = f"model.layers.{fields['num_layers']}."
    return fields if any(name.startswith(first) for name in names) else fields | {"num_nextn_predict_layers": 0}


EXPERTS_KEYS = {
    **{name: name for name in ("n_shared_experts", "n_group", "topk_group", "norm_topk_prob")},
    **{name: name for name in ("routed_scaling_factor", "first_k_dense_replace")},
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_ffn_size",
}
"""What config.json says of shared and routed experts."""
LATENT_KEYS = {
    **{key: ours for key, ours in KEYS.items() if key not in ("num_key_value_heads", "head_dim")},
    **{name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
}
"""What it says of a decoder with latent attention."""
AHEAD = {"num_nextn_predict_layers": "num_nextn_predict_layers"}


PUBLISHED = PublishedFamily(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    keys={**LATENT_KEYS, **EXPERTS_KEYS, **AHEAD},
    weights=shared_experts_rules,
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 4096,
        "num_hidden_layers": 61,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    fixed={
        **FIXED,
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "partial_rotary_factor": (1.0, None),
    },
    spare=_is_spare,
    fit=_fit,
    prefix="model.",
    read=read_rope,
    # widths that follow from others
    read_keys=("num_key_value_heads", "head_dim", "qk_head_dim", *ROPE_KEYS),
    write=lambda config: {"num_key_value_heads": config.num_heads} | write_rope(config),
)
