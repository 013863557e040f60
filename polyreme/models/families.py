"""Model families as records: what configuration, planner and estimates ask of one without loading its code (or jax).

A new family is a file in one of the packages beside this one and a record in FAMILIES. See docs/adding_a_model.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from polyreme.errors import ConfigError
from polyreme.models.files.published import PublishedFamily
from polyreme.planner import ModelShape, PipelineCut
from polyreme.registry import Reference, Registry, Result


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

NEXT_TOKEN: Reference[Loss] = Reference("polyreme.models.parts.decoder", "next_token_loss")
BYTE_LEVEL: Reference[TokenizerTrainer] = Reference("polyreme.models.tokenizer", "train_byte_level_bpe")


DECODER_DIMENSIONS = (
    *("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "seq_len", "dropout"),
    *("tie_embeddings", "num_experts"),
)
"""Keys of model: that decoders have, beside num_layers, which every family has."""

DECODER_SPLITS = {
    "mp": ("num_heads", "num_kv_heads", "ffn_size", "vocab_size"),
    "sharding": ("hidden_size",),
    "sep": ("seq_len",),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model costs that the planner has no view of: trained numbers, and FLOP to train on a token."""

    parameters: int
    flops_per_token: int


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One family of models: all that the rest of the library asks of it.

    model: its class, a function of (inputs, labels) that gives the mean loss; a Decoder, but where the record says
    otherwise. config: its config class, a dataclass with fields named as in Dimensions. shape: the planner's view of a
    configured model, which also says how many parameters it has, None for one that the planner does not know, whose
    cost is then given. ffn_size: width of the feed-forward where none is given, of hidden_size. samples: what it is
    trained on, a name in recipes.samples.SAMPLES. dimensions: keys of model: it has beside num_layers and settings.
    splits: keys whose sizes a mesh axis divides (sharding: at stage 3). branches: how many branches its blocks have,
    given the configured model, which a plan's branch_axis gives devices of their own; branched_by: the setting that
    gives them some. refuses: keys of plan: that mean nothing to it, or are not there yet. recompute: what it can
    compute again, everything there is if None. loss: what training makes small, evaluation reports and a pipeline's
    last stage computes. tokenizer: what trains one on the text of a run. cut: where a pipeline cuts a model
    of it, as planner.Training.cut says. grouped_heads: whether it takes num_kv_heads below num_heads. head_dim: whether
    its heads may have another width than hidden_size / num_heads. dropout: whether it drops anything. experts: whether
    its feed-forward is a mixture of experts. documents: whether several may share a row, none seeing another (models.
    decoder.Documents). settings: keys of model: that only some families have, of which it has
    these. balance_loss: weight of the loss that balances experts where none is given, as default_balance_loss says.
    published: what its published weights are called and how they lie; none are read or written if left out.
    aliases: other spellings of the name.
    """

    name: str
    model: Reference[Any]
    config: Reference[Any]
    shape: Callable[..., ModelShape] | None
    ffn_size: Callable[[int], int] = lambda hidden: 4 * hidden
    cost: Callable[[Any], Cost] | None = None
    samples: str = "tokens"
    dimensions: tuple[str, ...] = DECODER_DIMENSIONS
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DECODER_SPLITS)
    branches: Callable[[Any], int] = lambda dims: 1
    branched_by: str = ""
    refuses: tuple[str, ...] = ()
    recompute: tuple[str, ...] | None = None
    loss: Reference[Loss] = NEXT_TOKEN
    tokenizer: Reference[TokenizerTrainer] = BYTE_LEVEL
    cut: PipelineCut = "items"
    grouped_heads: bool = False
    head_dim: bool = False
    dropout: bool = False
    experts: bool = False
    documents: bool = False
    settings: tuple[str, ...] = ()
    balance_loss: float = 0.0
    published: Reference[PublishedFamily] | None = None
    aliases: tuple[str, ...] = ()
    task: str = "causal_lm"


@dataclass(frozen=True, slots=True, eq=False)
class Architecture:
    """A published model that is no decoder: what loading asks of it.

    name: of its family. task: what the model does with the family's body, one of TASKS. model, config, published: as of
    a Family.
    """

    name: str
    task: str
    model: Reference[Any]
    config: Reference[Any]
    published: Reference[PublishedFamily]


TASKS = {
    "base": "AutoModel",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "image_classification": "AutoModelForImageClassification",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "speech_seq2seq": "AutoModelForSpeechSeq2Seq",
    "image_text_to_text": "AutoModelForImageTextToText",
}
"""What models do, and the class of models.auto that loads them."""


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
    model=Reference("polyreme.models.decoders.gpt", "GPT"),
    config=Reference("polyreme.models.decoders.gpt", "GPTConfig"),
    published=Reference("polyreme.models.decoders.gpt", "PUBLISHED"),
    shape=decoder_shape,
    ffn_size=lambda hidden: 4 * hidden,
    dropout=True,
    documents=True,
)

_LLAMA_SHAPE = partial(decoder_shape, gated=True, biases=False, learned_positions=False, rms_norm=True)

LLAMA = Family(
    name="llama",
    model=Reference("polyreme.models.decoders.llama", "Llama"),
    config=Reference("polyreme.models.decoders.llama", "LlamaConfig"),
    published=Reference("polyreme.models.decoders.llama", "PUBLISHED"),
    shape=_LLAMA_SHAPE,
    # three matrices with the parameters of a 4x block's two: 8/3, rounded up to 64
    ffn_size=lambda hidden: -(-hidden * 8 // (3 * 64)) * 64,
    grouped_heads=True,
    head_dim=True,
    documents=True,
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
    return _LLAMA_SHAPE(dims, **experts, expert_ffn=dims.expert_ffn_size, **blocks)


def routed_shape(dims: Any, **blocks: Any) -> ModelShape:
    """sparse_shape of a decoder whose routing is one of ROUTINGS."""
    return sparse_shape(dims, tokens_per_expert=tokens_per_expert(dims), **blocks)


MIXTRAL = Family(
    name="mixtral",
    model=Reference("polyreme.models.experts.mixtral", "Mixtral"),
    config=Reference("polyreme.models.experts.mixtral", "MixtralConfig"),
    published=Reference("polyreme.models.experts.mixtral", "PUBLISHED"),
    shape=routed_shape,
    ffn_size=LLAMA.ffn_size,
    loss=Reference("polyreme.models.experts.mixtral", "balanced_loss"),
    grouped_heads=True,
    head_dim=True,
    experts=True,
    documents=True,
    settings=("experts_per_token", "expert_ffn_size", "balance_loss", "balance_scope", "capacity_factor", "routing"),
    balance_loss=0.01,
)

QWEN3_MOE = replace(
    MIXTRAL,
    name="qwen3_moe",
    model=Reference("polyreme.models.experts.qwen3_moe", "Qwen3Moe"),
    config=Reference("polyreme.models.experts.qwen3_moe", "Qwen3MoeConfig"),
    published=Reference("polyreme.models.experts.qwen3_moe", "PUBLISHED"),
    shape=partial(routed_shape, qk_norm=True),
    balance_loss=0.001,
)


QWEN2_MOE = replace(
    MIXTRAL,
    name="qwen2_moe",
    model=Reference("polyreme.models.experts.qwen2_moe", "Qwen2Moe"),
    config=Reference("polyreme.models.experts.qwen2_moe", "Qwen2MoeConfig"),
    published=Reference("polyreme.models.experts.qwen2_moe", "PUBLISHED"),
    shape=lambda dims: routed_shape(dims, qkv_bias=True, shared_experts=dims.n_shared_experts, shared_gate=True),
    settings=(*MIXTRAL.settings, "n_shared_experts"),
    balance_loss=0.001,
)


OLMOE = replace(
    MIXTRAL,
    name="olmoe",
    model=Reference("polyreme.models.experts.olmoe", "Olmoe"),
    config=Reference("polyreme.models.experts.olmoe", "OlmoeConfig"),
    published=Reference("polyreme.models.experts.olmoe", "PUBLISHED"),
    shape=partial(routed_shape, qk_norm=True, whole_qk_norm=True),
)

GPT_OSS = replace(
    MIXTRAL,
    name="gpt_oss",
    model=Reference("polyreme.models.experts.gpt_oss", "GptOss"),
    config=Reference("polyreme.models.experts.gpt_oss", "GptOssConfig"),
    published=Reference("polyreme.models.experts.gpt_oss", "PUBLISHED"),
    shape=partial(routed_shape, biases=True, sinks=True, expert_biases=True),
    settings=tuple(name for name in MIXTRAL.settings if name != "routing"),
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


def shared_experts_shape(dims: Any) -> ModelShape:
    """The planner's view of a LLaMA with shared and routed experts."""
    return sparse_shape(
        dims,
        shared_experts=dims.n_shared_experts,
        dense_layers=dims.first_k_dense_replace,
        ahead=dims.num_nextn_predict_layers,
    )


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model=Reference("polyreme.models.experts.deepseek_v3", "DeepseekV3"),
    config=Reference("polyreme.models.experts.deepseek_v3", "DeepseekV3Config"),
    published=Reference("polyreme.models.experts.deepseek_v3", "PUBLISHED"),
    shape=latent_shape,
    ffn_size=LLAMA.ffn_size,
    loss=Reference("polyreme.models.experts.deepseek_v3", "loss_with_tokens_ahead"),
    experts=True,
    settings=(
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_scaling"),
        *("experts_per_token", "expert_ffn_size", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob"),
        *("routed_scaling_factor", "first_k_dense_replace", "bias_rate", "sequence_loss"),
        *("num_nextn_predict_layers", "mtp_loss_weight"),
    ),
)


DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    name="deepseek_v2",
    model=Reference("polyreme.models.experts.deepseek_v2", "DeepseekV2"),
    config=Reference("polyreme.models.experts.deepseek_v2", "DeepseekV2Config"),
    published=Reference("polyreme.models.experts.deepseek_v2", "PUBLISHED"),
    settings=tuple(name for name in DEEPSEEK_V3.settings if name not in ("bias_rate", "norm_topk_prob")),
)

GLM4_MOE = replace(
    DEEPSEEK_V3,
    name="glm4_moe",
    model=Reference("polyreme.models.experts.glm4_moe", "Glm4Moe"),
    config=Reference("polyreme.models.experts.glm4_moe", "Glm4MoeConfig"),
    published=Reference("polyreme.models.experts.glm4_moe", "PUBLISHED"),
    shape=shared_experts_shape,
    grouped_heads=True,
    head_dim=True,
    settings=tuple(name for name in DEEPSEEK_V3.settings if "head_dim" not in name and "lora" not in name),
)


def _like_llama(name: str, title: str, **differences: Any) -> Family:
    """The record of a family that is LLaMA's but for its file, in which config and class have this title."""
    file = f"polyreme.models.decoders.{name}"
    return replace(
        LLAMA,
        name=name,
        model=Reference(file, title),
        config=Reference(file, f"{title}Config"),
        published=Reference(file, "PUBLISHED"),
        **differences,
    )


MISTRAL = _like_llama("mistral", "Mistral")

QWEN2 = _like_llama("qwen2", "Qwen2", shape=partial(_LLAMA_SHAPE, qkv_bias=True))

QWEN3 = _like_llama("qwen3", "Qwen3", shape=partial(_LLAMA_SHAPE, qk_norm=True))

GEMMA = _like_llama("gemma", "Gemma")

GEMMA2 = _like_llama("gemma2", "Gemma2", shape=partial(_LLAMA_SHAPE, norm_places="around"))

GEMMA3 = _like_llama("gemma3", "Gemma3", shape=partial(_LLAMA_SHAPE, norm_places="around", qk_norm=True))

GRANITE = _like_llama("granite", "Granite")

OLMO = _like_llama("olmo", "Olmo", shape=partial(_LLAMA_SHAPE, rms_norm=False, norm_weights=False))

OLMO2 = _like_llama(
    "olmo2", "Olmo2", shape=partial(_LLAMA_SHAPE, norm_places="after", qk_norm=True, whole_qk_norm=True)
)

OLMO3 = _like_llama("olmo3", "Olmo3", shape=OLMO2.shape)

EXAONE4 = _like_llama("exaone4", "Exaone4", shape=partial(_LLAMA_SHAPE, norm_places="after", qk_norm=True))

SEED_OSS = _like_llama("seed_oss", "SeedOss", shape=QWEN2.shape)

PHI3 = _like_llama("phi3", "Phi3")

_CLASSIC = partial(decoder_shape, learned_positions=False)
"""Of decoders with two matrices in a feed-forward, LayerNorms and biases."""

GPT_NEOX = _like_llama("gpt_neox", "GPTNeoX", shape=_CLASSIC, ffn_size=lambda hidden: 4 * hidden)

STABLELM = _like_llama(
    "stablelm", "StableLM", shape=partial(decoder_shape, gated=True, biases=False, learned_positions=False)
)

SMOLLM3 = _like_llama("smollm3", "SmolLM3")

BLOOM = _like_llama(
    "bloom",
    "Bloom",
    shape=partial(_CLASSIC, embedding_norm=True),
    ffn_size=GPT_NEOX.ffn_size,
    documents=False,
)

FALCON = _like_llama(
    "falcon",
    "Falcon",
    shape=partial(_CLASSIC, biases=False, shared_norm=True),
    ffn_size=GPT_NEOX.ffn_size,
    documents=False,
)

PHI = _like_llama(
    "phi",
    "Phi",
    shape=partial(_CLASSIC, shared_norm=True, head_bias=True),
    ffn_size=GPT_NEOX.ffn_size,
)

GPTJ = _like_llama(
    "gptj",
    "GPTJ",
    shape=partial(_CLASSIC, shared_norm=True, head_bias=True, attention_bias=False),
    ffn_size=GPT_NEOX.ffn_size,
)

ERNIE4_5 = _like_llama("ernie4_5", "Ernie4_5")

GLM = _like_llama("glm", "Glm", shape=partial(_LLAMA_SHAPE, qkv_bias=True))

GLM4 = _like_llama("glm4", "Glm4", shape=partial(_LLAMA_SHAPE, norm_places="around", qkv_bias=True))

COHERE = _like_llama("cohere", "Cohere", shape=partial(_LLAMA_SHAPE, shared_norm=True))

COHERE2 = _like_llama("cohere2", "Cohere2", shape=COHERE.shape)

NEMOTRON = _like_llama("nemotron", "Nemotron", shape=partial(_CLASSIC, biases=False), ffn_size=GPT_NEOX.ffn_size)

ARCEE = _like_llama("arcee", "Arcee", shape=partial(_CLASSIC, biases=False, rms_norm=True), ffn_size=GPT_NEOX.ffn_size)

STARCODER2 = _like_llama("starcoder2", "Starcoder2", shape=_CLASSIC, ffn_size=GPT_NEOX.ffn_size)

SPARE_POSITIONS = 2
"""Rows of an OPT's table of positions before that of the first place."""

OPT = _like_llama(
    "opt", "OPT", shape=partial(decoder_shape, spare_positions=SPARE_POSITIONS), ffn_size=GPT_NEOX.ffn_size
)

_STATE_SPACE_REFUSES = ("pp", "sep", "sequence_parallel", "sep_attention", "sep_order")
_STATE_SPACE_DIMENSIONS = ("vocab_size", "hidden_size", "seq_len", "tie_embeddings")


def mamba_cost(dims: Any) -> Cost:
    """Of a Mamba. FLOP: 6 for each weight, and 24 for each number of the states, which decays, is taken in and is
    shown."""
    width, inner, size = dims.hidden_size, 2 * dims.hidden_size, dims.state_size or MAMBA_STATE
    rank, convolution = -(-width // 16), 4
    maps = 2 * width * inner + inner * (rank + 2 * size) + rank * inner + inner * convolution + inner * width
    vectors = 3 * inner + inner * size + width  # biases of steps and convolution, what skips, decays, the norm
    return _state_space_cost(dims, maps + vectors, inner * size)


def mamba2_cost(dims: Any) -> Cost:
    """Of a Mamba-2, likewise."""
    width, heads, size = dims.hidden_size, dims.num_heads, dims.state_size or MAMBA2_STATE
    inner = heads * (dims.head_dim or max(1, 2 * width // heads))
    mixed, convolution = inner + 2 * size, 4
    maps = width * (inner + mixed + heads) + mixed * convolution + inner * width
    return _state_space_cost(dims, maps + mixed + 3 * heads + inner + width, inner * size)


def _state_space_cost(dims: Any, weights: int, numbers: int) -> Cost:
    """Of blocks with so many weights, and numbers of a state."""
    table, layers = dims.vocab_size * dims.hidden_size, dims.num_layers
    used = layers * weights + table + dims.hidden_size
    return Cost(used if dims.tie_embeddings else used + table, 6 * used + 24 * layers * numbers)


MAMBA_STATE, MAMBA2_STATE = 16, 128
"""Numbers of a channel's state where a configuration gives none."""

MAMBA = Family(
    name="mamba",
    model=Reference("polyreme.models.decoders.mamba", "Mamba"),
    config=Reference("polyreme.models.decoders.mamba", "MambaConfig"),
    published=Reference("polyreme.models.decoders.mamba", "PUBLISHED"),
    shape=None,
    cost=mamba_cost,
    dimensions=_STATE_SPACE_DIMENSIONS,
    splits={"mp": ("hidden_size", "vocab_size"), "sharding": ("hidden_size",)},
    refuses=_STATE_SPACE_REFUSES,
    recompute=("none", "full_attn", "full"),
    settings=("state_size",),
)

MAMBA2 = replace(
    MAMBA,
    name="mamba2",
    model=Reference("polyreme.models.decoders.mamba2", "Mamba2"),
    config=Reference("polyreme.models.decoders.mamba2", "Mamba2Config"),
    published=Reference("polyreme.models.decoders.mamba2", "PUBLISHED"),
    cost=mamba2_cost,
    dimensions=(*_STATE_SPACE_DIMENSIONS, "num_heads", "head_dim"),
    splits={"mp": ("num_heads", "vocab_size"), "sharding": ("hidden_size",)},
    head_dim=True,
)

LETTERS = 21
"""Letters of an alignment: twenty amino acids and the gap. One more stands for what is masked."""
DISTANCE_BINS = 16
"""Classes of a distance between residues."""
HEAD_DIM = 32
"""Width of an Evoformer's heads where none is given."""
FARTHEST_OFFSET = 32
"""Residues farther apart in the chain than this are all alike. Source: AlphaFold 2's supplement, algorithm 4."""


def evoformer_cost(dims: Any) -> Cost:
    """Of an Evoformer with its embeddings and heads, whose tokens are the letters of an alignment.

    FLOP: 6 for each product of a weight and of attention, the outer product mean and the triangles; norms, gates and
    softmax do few beside.
    """
    m, z, d = dims.msa_width, dims.pair_width, dims.head_dim or HEAD_DIM
    o, t, factor = dims.outer_width, dims.triangle_width, dims.transition_factor
    s, r = dims.num_sequences, dims.num_residues

    def attention(width: int, heads: int) -> int:
        return 5 * width * heads * d

    def transition(width: int) -> int:
        return 2 * factor * width * width

    of_msa = 2 * attention(m, dims.msa_heads) + transition(m) + 2 * m * o
    of_pairs = z * dims.msa_heads + o * o * z + 2 * (4 * z * t + t * z + z * z)
    of_pairs += 2 * (attention(z, dims.pair_heads) + z * dims.pair_heads) + transition(z)
    msa_vectors = 2 * (dims.msa_heads * d + m) + (factor + 1) * m + 2 * o + 4 * 2 * m + 2 * z
    pair_vectors = z + 2 * (4 * t + 2 * z + 2 * z + 2 * t) + 2 * (dims.pair_heads * d + z + 2 * z) + (factor + 3) * z
    heads = (m * LETTERS, z * DISTANCE_BINS)
    tables = (LETTERS + 1) * (2 * m + 2 * z) + (2 * FARTHEST_OFFSET + 1) * z
    vectors = 2 * m + LETTERS + 2 * z + DISTANCE_BINS
    parameters = dims.num_layers * (of_msa + of_pairs + msa_vectors + pair_vectors) + sum(heads) + tables + vectors
    # scores and what they weigh, of rows, columns and the two triangle attentions; outer products; triangle products
    mixing = 2 * s * r * (r + s) * dims.msa_heads * d + 4 * r**3 * dims.pair_heads * d
    mixing += s * r * r * o * o + 2 * r**3 * t
    products = dims.num_layers * (s * r * of_msa + r * r * of_pairs + mixing) + s * r * heads[0] + r * r * heads[1]
    return Cost(parameters, 6 * products // (s * r))


EVOFORMER = Family(
    name="evoformer",
    model=Reference("polyreme.models.encoders.evoformer", "Evoformer"),
    config=Reference("polyreme.models.encoders.evoformer", "EvoformerModelConfig"),
    shape=None,
    cost=evoformer_cost,
    samples="alignments",
    dimensions=("head_dim",),
    head_dim=True,
    splits={
        "mp": ("msa_heads", "pair_heads"),
        "sharding": ("msa_width", "pair_width"),
        "sep": ("num_sequences", "num_residues"),
    },
    branches=lambda dims: 2 if dims.outer_product_mean == "end" else 1,
    branched_by="outer_product_mean: end",
    refuses=("pp", "sequence_parallel", "sep_attention", "sep_order"),
    recompute=("none", "full"),
    settings=(
        *("msa_width", "pair_width", "msa_heads", "pair_heads", "outer_width", "triangle_width"),
        *("transition_factor", "msa_dropout", "pair_dropout", "outer_product_mean", "num_sequences", "num_residues"),
    ),
)


def bert_cost(dims: Any) -> Cost:
    """Of a BERT that is asked for some of its words: the output projection works on those alone, here one in seven."""
    width, ffn, layers = dims.hidden_size, dims.ffn_size, dims.num_layers
    block = 4 * width * width + 2 * width * ffn
    vectors = layers * (9 * width + ffn) + 5 * width + dims.vocab_size
    tables = (dims.vocab_size + dims.seq_len + 2) * width
    head = width * width + dims.vocab_size * width
    flops = 6 * (layers * block + head // 7) + 12 * layers * width * dims.seq_len
    return Cost(layers * block + width * width + tables + vectors, flops)


def bert_shape(dims: Any) -> ModelShape:
    """The planner's view of a BERT that is asked for three words of twenty."""
    asked = max(1, round(0.15 * dims.seq_len))
    blocks = {"norm_places": "sum", "embedding_norm": True, "head_bias": True, "sees_all": True, "token_types": 2}
    return decoder_shape(dims, tied=True, asked=asked, **blocks)


BERT = Family(
    name="bert",
    model=Reference("polyreme.models.encoders.bert", "BertForPretraining"),
    config=Reference("polyreme.models.encoders.bert", "BertConfig"),
    published=Reference("polyreme.models.encoders.bert", "PUBLISHED_MASKED_LM"),
    shape=bert_shape,
    cost=bert_cost,
    samples="masked_words",
    dimensions=("vocab_size", "hidden_size", "num_heads", "ffn_size", "seq_len", "dropout"),
    splits={"mp": ("num_heads", "ffn_size", "vocab_size"), "sharding": ("hidden_size",)},
    refuses=("pp", "sep", "sequence_parallel", "sep_attention", "sep_order"),
    recompute=("none", "full_attn", "full"),
    tokenizer=Reference("polyreme.models.tokenizer", "train_masked_byte_level_bpe"),
    dropout=True,
    documents=True,
    task="masked_lm",
)

FAMILIES: Registry[Family] = Registry(
    "model family",
    [
        *(GPT, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, GRANITE, OLMO, OLMO2, GPT_NEOX, STABLELM),
        *(SMOLLM3, ERNIE4_5, GLM, GLM4, COHERE, COHERE2, STARCODER2, OLMO3, EXAONE4, SEED_OSS, NEMOTRON, ARCEE),
        *(MAMBA, MAMBA2),
        *(
            OPT,
            BLOOM,
            FALCON,
            PHI,
            GPTJ,
            MIXTRAL,
            QWEN2_MOE,
            QWEN3_MOE,
            OLMOE,
            GPT_OSS,
            DEEPSEEK_V3,
            DEEPSEEK_V2,
            GLM4_MOE,
            BERT,
            EVOFORMER,
        ),
    ],
)
"""Families by the name that a configuration has, in the order that lists show them."""


def _architectures(package: str, family: str, config: str, models: Mapping[str, str]) -> tuple[Architecture, ...]:
    """A family's, of task -> class, in its file of a package, where PUBLISHED_ and the task say how it is published."""
    module = f"polyreme.models.{package}.{family}"
    return tuple(
        Architecture(
            name=family,
            task=task,
            model=Reference(module, model),
            config=Reference(module, config),
            published=Reference(module, f"PUBLISHED_{task.upper()}"),
        )
        for task, model in models.items()
    )


def _encoders(family: str, title: str) -> tuple[Architecture, ...]:
    """Those of a BERT's kin, whose classes begin with this."""
    models = {
        "base": title,
        "masked_lm": f"{title}ForMaskedLM",
        "classification": f"{title}ForSequenceClassification",
        "token_classification": f"{title}ForTokenClassification",
        "question_answering": f"{title}ForQuestionAnswering",
    }
    return _architectures("encoders", family, f"{title}Config", models)


def _of_pictures(family: str, title: str) -> tuple[Architecture, ...]:
    """Those of a family that sees pictures alone, whose classes begin with this."""
    models = {"base": title, "image_classification": f"{title}ForImageClassification"}
    return _architectures("vision", family, f"{title}Config", models)


def _encoder_decoders(family: str, title: str, writer: str = "", **models: str) -> tuple[Architecture, ...]:
    """Those of a family that writes texts about texts, whose names begin with this, by a class of this name."""
    writer = writer or f"{title}ForConditionalGeneration"
    return _architectures("encoder_decoders", family, f"{title}Config", {"seq2seq_lm": writer, **models})


ARCHITECTURES: tuple[Architecture, ...] = (
    *_encoders("bert", "Bert"),
    *_encoders("ernie", "Ernie"),
    *_encoders("roberta", "Roberta"),
    *_encoders("xlm_roberta", "XLMRoberta"),
    *_encoders("camembert", "Camembert"),
    *_encoders("mpnet", "MPNet"),
    *_encoders("distilbert", "DistilBert"),
    *_encoders("electra", "Electra"),
    *_encoders("albert", "Albert"),
    *_encoders("deberta", "Deberta"),
    *_encoders("deberta_v2", "DebertaV2"),
    *_architectures(
        "encoders",
        "modernbert",
        "ModernBertConfig",
        {
            "base": "ModernBert",
            "masked_lm": "ModernBertForMaskedLM",
            "classification": "ModernBertForSequenceClassification",
            "token_classification": "ModernBertForTokenClassification",
        },
    ),
    *_of_pictures("vit", "ViT"),
    *_of_pictures("dinov2", "Dinov2"),
    *_of_pictures("convnext", "ConvNext"),
    *_of_pictures("swin", "Swin"),
    *_architectures("vision", "clip", "CLIPConfig", {"base": "CLIP"}),
    *_architectures("vision", "siglip", "SiglipConfig", {"base": "Siglip"}),
    *_encoder_decoders("t5", "T5"),
    *_encoder_decoders("mt5", "MT5"),
    *_encoder_decoders("bart", "Bart", classification="BartForSequenceClassification"),
    *_encoder_decoders("mbart", "MBart"),
    *_encoder_decoders("marian", "Marian", "MarianMTModel"),
    *_encoder_decoders("pegasus", "Pegasus"),
    *_encoder_decoders("m2m_100", "M2M100"),
    *_architectures(
        "encoder_decoders", "whisper", "WhisperConfig", {"speech_seq2seq": "WhisperForConditionalGeneration"}
    ),
    *_architectures("vision_language", "llava", "LlavaConfig", {"image_text_to_text": "Llava"}),
    *_architectures("vision_language", "vipllava", "VipLlavaConfig", {"image_text_to_text": "VipLlava"}),
)
"""Published models that are no decoders, the body of a family first."""


def architecture(name: str, task: str) -> Architecture:
    """The one of ARCHITECTURES of a family and a task."""
    return next(record for record in ARCHITECTURES if (record.name, record.task) == (name, task))


_HEADS = "polyreme.models.parts.decoder_heads"


def _of_decoder(family: Family) -> Iterator[Architecture]:
    """The body of a decoder, and those that score its texts and its tokens."""
    for task in ("base", "classification", "token_classification"):
        yield Architecture(
            name=family.name,
            task=task,
            model=Result(_HEADS, f"{task}_model", family),
            config=Result(_HEADS, "scoring_config", family),
            published=Result(_HEADS, f"published_{task}", family),
        )


DECODER_HEADS: tuple[Architecture, ...] = tuple(
    record
    for family in FAMILIES.values()
    if family.published and family.task == "causal_lm"
    for record in _of_decoder(family)
)
"""Of each published decoder what does not write: its body, and with heads that score."""

DEFAULT_FAMILY = GPT.name
"""The family of a configuration that names none."""


def shape_of(family: str, dims: Dimensions) -> ModelShape:
    """The planner's view of a configured model, under its family's name. ConfigError where there is none."""
    record = FAMILIES.named(family)
    if record.shape is None:
        others = ", ".join(name for name, other in FAMILIES.items() if other.shape is not None)
        raise ConfigError(f"the planner knows no {family}; plan one of {others}, or try plans with prove and comm")
    return replace(record.shape(dims), name=family)
