"""Model families as records: what configuration, planner and estimates ask of one without loading its code (or jax).

A new family is a file beside this one and a record in FAMILIES. See docs/adding_a_model.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from polyreme.models.published import PublishedFamily
from polyreme.planner import ModelShape, PipelineCut
from polyreme.registry import Reference, Registry


class Dimensions(Protocol):
    """What a configuration says of a model, whatever its family."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def expert_ffn_size(self) -> int: ...


Loss = Callable[[Any, Any, Any], Any]
"""(model, its hidden(tokens) [batch, seq, embed], labels [batch, seq]) -> the mean loss, 0-D."""

TokenizerTrainer = Callable[[Iterator[str], int], Any]
"""(pieces of text, most tokens) -> a tokenizers.Tokenizer trained on them, with models.tokenizer.END_OF_TEXT among its
tokens. A piece ends where a letter is followed by white space, the next begins with that white space."""

NEXT_TOKEN: Reference[Loss] = Reference("polyreme.models.decoder", "next_token_loss")
BYTE_LEVEL: Reference[TokenizerTrainer] = Reference("polyreme.models.tokenizer", "train_byte_level_bpe")


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One family of decoders: all that the rest of the library asks of it.

    model: its class, a Decoder. config: its config class, a dataclass with fields named as in Dimensions. shape: the
    planner's view of a configured model, which also says how many parameters it has. ffn_size: width of the
    feed-forward where none is given, of hidden_size. loss: what training makes small, evaluation reports and a
    pipeline's last stage computes. tokenizer: what trains one on the text of a run. cut: where a pipeline cuts a model
    of it, as planner.Training.cut says. grouped_heads: whether it takes num_kv_heads below num_heads. head_dim: whether
    its heads may have another width than hidden_size / num_heads. dropout: whether it drops anything. experts: whether
    its feed-forward is a mixture of experts. settings: keys of model: that only some families have, of which it has
    these. balance_loss: weight of the loss that balances experts where none is given, as default_balance_loss says.
    published: what its published weights are called and how they lie; none are read or written if left out.
    aliases: other spellings of the name.
    """

    name: str
    model: Reference[Any]
    config: Reference[Any]
    shape: Callable[..., ModelShape]
    ffn_size: Callable[[int], int]
    loss: Reference[Loss] = NEXT_TOKEN
    tokenizer: Reference[TokenizerTrainer] = BYTE_LEVEL
    cut: PipelineCut = "items"
    grouped_heads: bool = False
    head_dim: bool = False
    dropout: bool = False
    experts: bool = False
    settings: tuple[str, ...] = ()
    balance_loss: float = 0.0
    published: Reference[PublishedFamily] | None = None
    aliases: tuple[str, ...] = ()


def decoder_shape(dims: Dimensions, **blocks: Any) -> ModelShape:
    """The planner's view of a decoder. blocks: fields of ModelShape that say what its blocks are made of."""
    fields: dict[str, Any] = {
        "hidden": dims.hidden_size,
        "layers": dims.num_layers,
        "heads": dims.num_heads,
        "seq": dims.seq_len,
        "vocab": dims.vocab_size,
        "ffn": dims.ffn_size,
        "kv_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "tied": dims.tie_embeddings,
        "dropout": dims.dropout > 0,
    }
    return ModelShape(**fields | blocks)


GPT = Family(
    name="gpt",
    model=Reference("polyreme.models.gpt", "GPT"),
    config=Reference("polyreme.models.gpt", "GPTConfig"),
    published=Reference("polyreme.models.gpt", "PUBLISHED"),
    shape=decoder_shape,
    ffn_size=lambda hidden: 4 * hidden,
    dropout=True,
)

LLAMA = Family(
    name="llama",
    model=Reference("polyreme.models.llama", "Llama"),
    config=Reference("polyreme.models.llama", "LlamaConfig"),
    published=Reference("polyreme.models.llama", "PUBLISHED"),
    shape=partial(decoder_shape, gated=True, biases=False, learned_positions=False, rms_norm=True),
    # three matrices with the parameters of a 4x block's two: 8/3, rounded up to 64
    ffn_size=lambda hidden: -(-hidden * 8 // (3 * 64)) * 64,
    grouped_heads=True,
    head_dim=True,
)


ROUTINGS = ("token_choice", "expert_choice", "hash")
"""Who chooses experts: tokens, by nn.Router; experts, by nn.ExpertChoiceRouter; the tokens' ids, by nn.HashRouter."""


def default_balance_loss(family: Family, routing: str) -> float:
    """The weight of the loss that balances experts where a configuration gives none: 0 where nothing is to balance."""
    return family.balance_loss if routing == "token_choice" else 0.0


def tokens_per_expert(dims: Any) -> int:
    """How many tokens of a sequence each expert chooses; 0 where experts do not choose."""
    if dims.routing != "expert_choice":
        return 0
    share = (dims.capacity_factor or 1.0) * dims.seq_len * dims.experts_per_token / max(1, dims.num_experts)
    return min(dims.seq_len, max(1, math.ceil(share)))


def sparse_shape(dims: Dimensions, **blocks: Any) -> ModelShape:
    """The planner's view of a LLaMA whose feed-forwards are mixtures of experts. blocks: as in decoder_shape."""
    experts = {"experts": dims.num_experts, "experts_per_token": dims.experts_per_token}
    return LLAMA.shape(dims, **experts, expert_ffn=dims.expert_ffn_size, **blocks)


def routed_shape(dims: Any, **blocks: Any) -> ModelShape:
    """sparse_shape of a decoder whose routing is one of ROUTINGS."""
    return sparse_shape(dims, tokens_per_expert=tokens_per_expert(dims), **blocks)


MIXTRAL = Family(
    name="mixtral",
    model=Reference("polyreme.models.mixtral", "Mixtral"),
    config=Reference("polyreme.models.mixtral", "MixtralConfig"),
    published=Reference("polyreme.models.mixtral", "PUBLISHED"),
    shape=routed_shape,
    ffn_size=LLAMA.ffn_size,
    loss=Reference("polyreme.models.mixtral", "balanced_loss"),
    grouped_heads=True,
    head_dim=True,
    experts=True,
    settings=("experts_per_token", "expert_ffn_size", "balance_loss", "capacity_factor", "routing"),
    balance_loss=0.01,
)

QWEN3_MOE = replace(
    MIXTRAL,
    name="qwen3_moe",
    model=Reference("polyreme.models.qwen3_moe", "Qwen3Moe"),
    config=Reference("polyreme.models.qwen3_moe", "Qwen3MoeConfig"),
    published=Reference("polyreme.models.qwen3_moe", "PUBLISHED"),
    shape=partial(routed_shape, qk_norm=True),
    balance_loss=0.001,
)


def latent_widths(dims: Any) -> dict[str, int]:
    """kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim of latent attention, those that are 0 derived.
    Source: arXiv:2405.04434, section 2.1.4."""
    head = max(1, dims.hidden_size // max(1, dims.num_heads))
    derived = {
        "kv_lora_rank": 4 * head,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": 2 * max(1, head // 4),
        "v_head_dim": head,
    }
    return {name: getattr(dims, name) or width for name, width in derived.items()}


def latent_shape(dims: Any) -> ModelShape:
    """The planner's view of a sparse decoder with latent attention."""
    widths = latent_widths(dims)
    return sparse_shape(
        dims,
        shared_experts=dims.n_shared_experts,
        dense_layers=dims.first_k_dense_replace,
        kv_heads=dims.num_heads,
        head_dim=widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"],
        v_head_dim=widths["v_head_dim"],
        rope_head_dim=widths["qk_rope_head_dim"],
        q_rank=dims.q_lora_rank,
        kv_rank=widths["kv_lora_rank"],
        ahead=dims.num_nextn_predict_layers,
    )


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model=Reference("polyreme.models.deepseek_v3", "DeepseekV3"),
    config=Reference("polyreme.models.deepseek_v3", "DeepseekV3Config"),
    published=Reference("polyreme.models.deepseek_v3", "PUBLISHED"),
    shape=latent_shape,
    ffn_size=LLAMA.ffn_size,
    loss=Reference("polyreme.models.deepseek_v3", "loss_with_tokens_ahead"),
    experts=True,
    settings=(
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_scaling"),
        *("experts_per_token", "expert_ffn_size", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob"),
        *("routed_scaling_factor", "first_k_dense_replace", "bias_rate", "sequence_loss"),
        *("num_nextn_predict_layers", "mtp_loss_weight"),
    ),
)

MISTRAL = replace(
    LLAMA,
    name="mistral",
    model=Reference("polyreme.models.mistral", "Mistral"),
    config=Reference("polyreme.models.mistral", "MistralConfig"),
    published=Reference("polyreme.models.mistral", "PUBLISHED"),
)

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    model=Reference("polyreme.models.qwen2", "Qwen2"),
    config=Reference("polyreme.models.qwen2", "Qwen2Config"),
    published=Reference("polyreme.models.qwen2", "PUBLISHED"),
    shape=partial(LLAMA.shape, qkv_bias=True),
)

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    model=Reference("polyreme.models.qwen3", "Qwen3"),
    config=Reference("polyreme.models.qwen3", "Qwen3Config"),
    published=Reference("polyreme.models.qwen3", "PUBLISHED"),
    shape=partial(LLAMA.shape, qk_norm=True),
)

FAMILIES: Registry[Family] = Registry(
    "model family", [GPT, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3]
)
"""Families by the name that a configuration has, in the order that lists show them."""

DEFAULT_FAMILY = GPT.name
"""The family of a configuration that names none."""


def shape_of(family: str, dims: Dimensions) -> ModelShape:
    """The planner's view of a configured model, under its family's name."""
    return replace(FAMILIES.named(family).shape(dims), name=family)
