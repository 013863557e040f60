"""Configuration of a training run: typed sections, their defaults, the checks between them, and the digest.

Files and command-line overrides are read in config_file.py.
"""

import json
import math
import re
from typing import Annotated, Any, ClassVar, Literal, Self

import xxhash
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from polyreme.data.documents import DocumentForm
from polyreme.errors import ConfigError
from polyreme.mesh import SCHEDULES, Offload, Plan
from polyreme.mesh.offload import BUFFERS
from polyreme.models.families import (
    DECODER_DIMENSIONS,
    DEFAULT_FAMILY,
    FAMILIES,
    ROUTINGS,
    Family,
    default_balance_loss,
    shape_of,
)
from polyreme.recipes.samples import SAMPLES, SampleKind
from polyreme.registry import Registry

MAX_SYNTHETIC = 10**9
"""Made-up tokens are made in memory, in about 25 bytes each."""
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _as_float(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as a string; a string that is a number is meant as one."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _as_int(value: Any) -> Any:
    """1e3 and "1000" count as whole numbers; 1.5 is left for the strict check to refuse."""
    value = _as_float(value)
    is_whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
    return int(value) if is_whole else value


def as_list(value: Any) -> Any:
    """A list; a single text becomes a list of one."""
    return [value] if isinstance(value, str) else value


def as_source(value: Any) -> Any:
    """A source; a text is taken as the path of one."""
    return {"path": value} if isinstance(value, str) else value


def _as_offload(value: Any) -> Any:
    """A list of what goes to the host, or a mapping of that to a tier, as the plan writes it."""
    return Offload(as_list(value)).plain()


def _as_pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _without_control(text: str) -> str:
    """Files and folders have names of characters that can be shown; NUL no system takes."""
    if not text.isprintable():
        raise ValueError(f"{text!r} has a character that cannot be shown, which no file's name should have")
    return text


def _division(text: str) -> str:
    return DocumentForm(text).division


def _is_derived(key: str, value: Any) -> bool:
    return key in ("num_kv_heads", "ffn_size") and value is None


def _divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        nearest = max(1, round(value / divisor)) * divisor
        raise ValueError(f"{name}={value} is not a multiple of {divisor_name}={divisor}; nearest is {nearest}")


Count = Annotated[int, BeforeValidator(_as_int), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_as_int), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_as_float), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(_as_float), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_as_float), Field(ge=0, lt=1, allow_inf_nan=False)]
Pair = Annotated[tuple[Fraction, Fraction], BeforeValidator(_as_pair)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_control)]
Paths = Annotated[list[Text], BeforeValidator(as_list), Field(min_length=1)]


def name_in(registry: Registry[Any]) -> AfterValidator:
    """A name of a record, or one of its aliases."""
    return AfterValidator(lambda name: registry.named(name).name)


class Section(BaseModel):
    """Base of every section: strict types, unknown keys refused, values fixed once read."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", frozen=True, validate_default=True)


DEFAULT_EXPERTS = 8
"""Experts of a layer, in families that have some, where a configuration gives no number."""


class RopeScaling(Section):
    """Rotary positions for texts longer than original_max_position_embeddings, as models.parts.rotary.Yarn says."""

    type: Literal["yarn"] = "yarn"
    factor: Annotated[float, BeforeValidator(_as_float), Field(ge=1, allow_inf_nan=False)]
    original_max_position_embeddings: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: NotNegative = 0.0
    mscale_all_dim: NotNegative = 0.0


class DeepseekSettings(Section):
    """Settings of deepseek_v3 that other families do not have, under the names of its public configuration; see
    models.experts.deepseek_v3.DeepseekV3Config."""

    q_lora_rank: Whole = 0
    kv_lora_rank: Whole = 0
    qk_nope_head_dim: Whole = 0
    qk_rope_head_dim: Whole = 0
    v_head_dim: Whole = 0
    rope_scaling: RopeScaling | None = None
    n_shared_experts: Whole = 1
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0
    first_k_dense_replace: Whole = 1
    bias_rate: NotNegative = 0.001
    sequence_loss: NotNegative = 0.0001
    num_nextn_predict_layers: Whole = 0
    mtp_loss_weight: NotNegative = 0.3


class StateSpaceSettings(Section):
    """Settings of mamba and mamba2; see models.decoders.mamba.MambaConfig. state_size: the family's if 0."""

    state_size: Whole = 0


class EvoformerSettings(Section):
    """Settings of evoformer, in place of a decoder's dimensions; see models.encoders.evoformer.EvoformerModelConfig.
    The defaults train in minutes on a CPU."""

    msa_width: Count = 32
    pair_width: Count = 16
    msa_heads: Count = 4
    pair_heads: Count = 2
    outer_width: Count = 8
    triangle_width: Count = 16
    transition_factor: Count = 2
    msa_dropout: Fraction = 0.0
    pair_dropout: Fraction = 0.0
    outer_product_mean: Literal["origin", "middle", "first", "end"] = "end"
    num_sequences: Count = 16
    num_residues: Count = 32


class ModelConfig(DeepseekSettings, StateSpaceSettings, EvoformerSettings):
    """Dimensions of the model. Left out, ffn_size, num_kv_heads and head_dim (0) follow from the others.

    Of a family with experts: num_experts of each layer, experts_per_token of which work on a token, their width
    expert_ffn_size (ffn_size if 0), the weight of the loss that balances them (the family's if left out) and whose
    choices it counts, and the times its even share of tokens that one takes (all if 0). routing: who chooses experts,
    as models.families.ROUTINGS says.
    What a family has not is refused if it differs from its default. Families other than decoders have num_layers, and
    settings of their own.
    """

    family: Annotated[str, name_in(FAMILIES)] = DEFAULT_FAMILY
    vocab_size: Count = 4096
    hidden_size: Count = 256
    num_layers: Count = 4
    num_heads: Count = 8
    num_kv_heads: Count
    head_dim: Whole = 0
    ffn_size: Count
    seq_len: Count = 128
    dropout: Fraction = 0.0
    tie_embeddings: bool = True
    num_experts: Whole = 0
    experts_per_token: Count = 2
    expert_ffn_size: Whole = 0
    balance_loss: NotNegative = 0.0
    balance_scope: Literal["micro_batch", "global_batch"] = "micro_batch"
    capacity_factor: NotNegative = 0.0
    routing: Literal["token_choice", "expert_choice", "hash"] = "token_choice"

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        heads = values.get("num_heads", cls.model_fields["num_heads"].default)
        hidden = _as_int(values.get("hidden_size", cls.model_fields["hidden_size"].default))
        known_hidden = hidden if isinstance(hidden, int) else 1  # a wrong type is reported under its own key
        name = values.get("family")
        family = FAMILIES.get(name if isinstance(name, str) else "", FAMILIES[DEFAULT_FAMILY])
        ffn = family.ffn_size(known_hidden)
        derived = {"num_kv_heads": heads, "ffn_size": ffn, "num_experts": DEFAULT_EXPERTS if family.experts else 0}
        derived["balance_loss"] = default_balance_loss(family, values.get("routing", ROUTINGS[0]))
        return derived | {k: v for k, v in values.items() if not _is_derived(k, v)}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.head_dim and not self.qk_nope_head_dim:
            _divides("hidden_size", self.hidden_size, "num_heads", self.num_heads)
        _divides("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        family = FAMILIES[self.family]
        self._check_dimensions(family)
        if self.num_kv_heads != self.num_heads and not family.grouped_heads:
            others = " or ".join(name for name, other in FAMILIES.items() if other.grouped_heads)
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} with num_heads={self.num_heads}: {self.family} has no grouped "
                f"heads; leave num_kv_heads out or set family: {others}"
            )
        if self.head_dim and not family.head_dim:
            others = " or ".join(name for name, other in FAMILIES.items() if other.head_dim)
            raise ValueError(f"head_dim={self.head_dim}: {self.family} has none; leave it out or set family: {others}")
        if self.dropout > 0 and not family.dropout:
            others = " or ".join(name for name, other in FAMILIES.items() if other.dropout)
            raise ValueError(f"dropout={self.dropout}: {self.family} has no dropout; set it to 0 or family: {others}")
        if bool(self.num_experts) != family.experts:
            others = " or ".join(name for name, other in FAMILIES.items() if other.experts != family.experts)
            raise ValueError(
                f"num_experts={self.num_experts}: {self.family} has {'' if family.experts else 'no '}experts; "
                f"{'give at least 1' if family.experts else 'leave it out'}, or set family: {others}"
            )
        for name in sorted({name for other in FAMILIES.values() for name in other.settings} - {*family.settings}):
            default = ModelConfig.model_fields[name].default
            if getattr(self, name) != default:
                others = " or ".join(key for key, other in FAMILIES.items() if name in other.settings)
                raise ValueError(
                    f"{name}={getattr(self, name)}: {self.family} has none; leave it out or set family: {others}"
                )
        if family.experts and self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} of num_experts={self.num_experts}; give fewer"
            )
        if self.balance_loss and self.routing != ROUTINGS[0]:
            raise ValueError(
                f"balance_loss={self.balance_loss} with routing={self.routing}, which no loss balances; leave it out"
            )
        if self.balance_scope != "micro_batch" and not self.balance_loss:
            raise ValueError(
                f"balance_scope={self.balance_scope} without a balance_loss; give its weight, or leave the scope out"
            )
        return self

    def _check_dimensions(self, family: Family) -> None:
        has = {name: getattr(self, name) for name in ("num_heads", "hidden_size") if name in family.dimensions}
        usual = self._derive({"family": self.family, **has})
        for name in DECODER_DIMENSIONS:
            default = usual.get(name, ModelConfig.model_fields[name].default)
            if name not in family.dimensions and getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)}: {self.family} has none; its dimensions are num_layers, "
                    f"{', '.join((*family.dimensions, *family.settings))}"
                )


class DataSource(Section):
    """A pair of token files, path.bin and path.idx, and the share of the samples that are of it."""

    path: Text
    weight: Positive | None = None


Sources = Annotated[list[Annotated[DataSource, BeforeValidator(as_source)]], BeforeValidator(as_list)]


class DataConfig(Section):
    """The source of the samples. text is one path or several (.txt, .gz), or the word synthetic. alignments: how many
    are made up for a family that is trained on those. A setting that the family's samples have no use for is refused if
    it differs from its default.

    train: instead of text, pairs of token files (polyreme data prepare) as [{path: a, weight: 0.7}, {path: b, weight:
    0.3}]; without weights each has as many samples as it holds. validation: pairs as well; if left out, the last
    validation_fraction of each of train. packing: how documents become samples of model.seq_len tokens; concat: windows
    over all of them, one after another; best_fit: whole documents share a sample, none of which sees another; none: a
    document a sample, padded. Documents too long for a sample are cut. documents: what is one of a text: file,
    paragraph, line, or a regular expression, which matches the lines that one begins with.

    mask_rate: the part of the tokens that a family which is trained on masked words is asked for; mask_copies: how
    often a row comes in a pass over the data, with other words masked.

    worker_timeout: seconds that one of num_workers may take for a batch before the run ends, naming the worker and the
    sample; 0 waits for ever. skip_bad: lines of text that may be left out, each with a line in the log, because they
    are not UTF-8 or longer than 16 MiB; with more of them the run ends.
    """

    text: Paths = ["synthetic"]
    train: Sources = []
    validation: Sources = []
    packing: Literal["concat", "best_fit", "none"] = "concat"
    documents: Annotated[Text, AfterValidator(_division)] = "file"
    mask_rate: Annotated[Fraction, Field(gt=0)] = 0.15
    mask_copies: Count = 10
    tokenizer_vocab_size: Count | None = None
    validation_fraction: Annotated[Fraction, Field(gt=0)] = 0.02
    num_workers: Whole = 0
    seed: Whole = 0
    synthetic_tokens: Annotated[Count, Field(le=MAX_SYNTHETIC)] = 1_000_000
    worker_timeout: NotNegative = 300.0
    skip_bad: Whole = 0
    cache: Text | None = None
    alignments: Annotated[Count, Field(le=MAX_SYNTHETIC)] = 4096

    @property
    def is_synthetic(self) -> bool:
        """Whether the tokens are made up rather than read."""
        return self.text == ["synthetic"]

    @model_validator(mode="after")
    def _check(self) -> Self:
        unused = ("text", "tokenizer_vocab_size", "synthetic_tokens", "skip_bad", "cache", "documents")
        if not self.train:
            unused = ("validation", "packing") if self.documents == "file" else ("validation",)
        unused += ("validation_fraction",) if self.validation else ()
        for name in unused:
            if getattr(self, name) != DataConfig.model_fields[name].default:
                other = "data.train" if self.train and name != "validation_fraction" else "data.validation"
                why = f"with {other}, which says the data" if self.train else "without data.train"
                why += " or data.documents" if name == "packing" else ""
                raise ValueError(f"{name}={getattr(self, name)} has no use {why}; leave one out")
        if self.documents != "file" and self.is_synthetic:
            raise ValueError(f"documents={self.documents} with text=synthetic, which has none; leave one out")
        for name in ("train", "validation"):
            weights = [source.weight for source in getattr(self, name)]
            if None in weights and any(weights):
                raise ValueError(f"{name}: weights are {weights}; give each source one, or none")
        return self


class TrainConfig(Section):
    """The optimisation: AdamW with linear warm-up and cosine decay to min_lr at the last step.

    non_finite: what ends or leaves out a step whose loss or gradients are not finite; after more than max_skipped left
    out in a row the run ends. spike: what is done with a step whose loss or gradient norm is spike_sigmas standard
    deviations above the mean of the last hundred steps: left out, or its gradients scaled down to that.
    replica_interval: steps between two comparisons of what several devices hold of the same values, bit by bit; 0 for
    none.
    """

    steps: Count = 400
    global_batch: Count = 16
    accumulation: Count = 1
    learning_rate: Positive = 1e-3
    min_lr: NotNegative = 0.0
    warmup_steps: Whole = 0
    weight_decay: NotNegative = 0.1
    betas: Pair = (0.9, 0.95)
    clip_norm: Positive | None = 1.0
    seed: Whole = 0
    amp_level: Literal["O0", "O1", "O2"] = "O0"
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    non_finite: Literal["halt", "skip"] = "halt"
    max_skipped: Whole = 10
    spike: Literal["none", "skip", "clip"] = "none"
    spike_sigmas: Positive = 10.0
    replica_interval: Whole = 100

    @model_validator(mode="after")
    def _check(self) -> Self:
        _divides("global_batch", self.global_batch, "accumulation", self.accumulation)
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is more than steps={self.steps}; lower warmup_steps")
        if self.min_lr > self.learning_rate:
            raise ValueError(f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}; lower min_lr")
        return self


class OverlapConfig(Section):
    """Overlap of communication and computation; see mesh.overlap.Overlap."""

    moe: Count = 1
    mp: Literal["none", "ring"] = "none"
    sharding: Literal["none", "ring"] = "none"


class PlanConfig(Section):
    """The number of devices along each mesh axis, the ZeRO stage (1, 2 or 3) of the sharding axis, and the pipeline.
    schedule: with pp > 1, DEFAULT_SCHEDULE if left out. train.accumulation is the number of microbatches. chunk_items:
    blocks of each chunk of the model, where they are not as even as may be; of a family cut at "items" the embedding
    and the last norm count too. stage_devices: [gpu, gpu, cpu], kinds of the stages' devices. ulysses_degree: of
    sep_attention: usp, the neighbours along sep that heads are dealt out to. overlap: moe: parts that tokens for
    experts are sent in, so that experts compute meanwhile; mp: ring: parts of a sequence that mp splits
    (sequence_parallel) go round while others are multiplied; sharding: ring: pieces of gradients go round while others
    are computed. expert_axes: the axes that split experts; beside ep they may be others, which split something else
    elsewhere. branch_axis: mp, whose devices then run the branches of a block and split nothing. offload: [state, act],
    or {state: disk, expert: disk} with offload_path, a folder that is as relative as output. compile: blocks: each
    block of the model is a program, compiled once for all that are alike, in place of one for the step; auto: so on the
    one CPU device of a fine-tuning run of many blocks. elastic: where there are
    more or fewer devices than that, follow the planner's best plan for those there (pretrain).
    """

    dp: Count = 1
    pp: Count = 1
    sharding: Count = 1
    sep: Count = 1
    mp: Count = 1
    ep: Count = 1
    sharding_stage: Annotated[Whole, Field(le=3)] = 0
    sequence_parallel: bool = False
    schedule: Annotated[str, name_in(SCHEDULES)] | None = None
    virtual_stages: Count | None = None
    chunk_items: list[Count] = []
    stage_devices: list[Text] = []
    sep_attention: Literal["auto", "ulysses", "ring", "gather", "usp"] = "auto"
    sep_order: Literal["auto", "contiguous", "zigzag"] = "auto"
    ulysses_degree: Count | None = None
    expert_dispatch: Literal["auto", "gather", "padded", "ragged", "balanced"] = "auto"
    expert_all_to_all: Literal["auto", "flat", "two_level"] = "auto"
    overlap: OverlapConfig = OverlapConfig()
    expert_axes: Annotated[list[Literal["dp", "sharding", "sep", "mp", "ep"]], BeforeValidator(as_list)] = ["ep"]
    branch_axis: Literal["", "mp"] = ""
    recompute: Literal["none", "core_attn", "full_attn", "full"] = "none"
    recompute_share: Annotated[Positive, Field(le=1)] = 1.0
    offload: Annotated[list[str] | dict[str, str], BeforeValidator(_as_offload)] = []
    offload_path: Text | None = None
    offload_ratio: Annotated[Positive, Field(le=1)] = 1.0
    offload_buffers: Count = BUFFERS
    compile: Literal["auto", "step", "blocks"] = "auto"
    elastic: bool = False

    @property
    def num_devices(self) -> int:
        """Devices the mesh needs: the product of its axes."""
        return self.dp * self.pp * self.sharding * self.sep * self.mp * self.ep

    @property
    def expert_ways(self) -> int:
        """Devices that the experts of a layer are split over."""
        return math.prod(getattr(self, axis) for axis in self.expert_axes)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pp == 1 and (self.schedule is not None or self.virtual_stages is not None):
            raise ValueError(
                f"schedule={self.schedule}, virtual_stages={self.virtual_stages} with pp=1: there is no pipeline; set "
                "pp of at least 2, or leave them out"
            )
        for name in ("sep_attention", "sep_order"):
            if self.sep == 1 and getattr(self, name) != "auto":
                raise ValueError(f"{name}={getattr(self, name)} with sep=1: the sequence is not split; set sep too")
        if self.ep > 1 and "ep" not in self.expert_axes:
            raise ValueError(f"ep={self.ep} with expert_axes={self.expert_axes}: name ep there too")
        for name in ("expert_dispatch", "expert_all_to_all"):
            if self.expert_ways == 1 and getattr(self, name) != "auto":
                raise ValueError(
                    f"{name}={getattr(self, name)} with expert_axes={self.expert_axes}, none of which has several "
                    "devices: experts are not split; set ep too"
                )
        if self.expert_ways == 1 and self.overlap.moe > 1:
            raise ValueError(
                f"overlap.moe={self.overlap.moe} with expert_axes={self.expert_axes}, none of which has several "
                "devices: nothing is sent to experts; set ep too"
            )
        if self.overlap.mp == "ring" and (self.mp == 1 or not self.sequence_parallel):
            raise ValueError(
                f"overlap.mp=ring with mp={self.mp}, sequence_parallel={self.sequence_parallel}: sums over mp are of "
                "whole sequences there, which go round in no parts; set both"
            )
        if self.overlap.sharding == "ring" and (self.sharding == 1 or self.sharding_stage < 2):
            raise ValueError(
                f"overlap.sharding=ring with sharding={self.sharding}, sharding_stage={self.sharding_stage}: gradients "
                "are kept in no pieces there; set sharding of at least 2 and stage 2 or 3"
            )
        if (self.sharding > 1) != (self.sharding_stage > 0):
            raise ValueError(
                f"sharding={self.sharding} with sharding_stage={self.sharding_stage}: "
                "set both (sharding of at least 2, stage 1, 2 or 3) or neither (sharding 1, stage 0)"
            )
        return self


class LogConfig(Section):
    """Reports: which, how often (in steps; 0 turns one off), and the sample written at the end.

    experts: with each record of a step, of each layer of experts the load/NAME of its busiest expert over the mean, and
    how many choices a capacity left out (dropped/NAME).
    """

    interval: Count = 10
    experts: bool = False
    validation_interval: Whole = 100
    validation_batches: Count = 8
    jsonl: bool = True
    tensorboard: bool = True
    plot: bool = True
    prompt: str = ""
    sample_tokens: Whole = 64


class CheckpointConfig(Section):
    """Saved every `interval` steps (0: only at the end); the newest `keep` stay.

    strict: where the newest is damaged a run that resumes ends, instead of going on from the one before it.
    """

    interval: Whole = 100
    keep: Count = 2
    strict: bool = False
    async_save: bool = True


class ProfileConfig(Section):
    """steps: so many steps of a run are recorded (0: none), from the start-th that it takes on, after a resume too.

    output/profile/trace.json.gz then holds them, of all ranks, for Perfetto.
    """

    steps: Whole = 0
    start: Count = 10


class RunConfig(Section):
    """The configuration of every run: a model, data of its kind, and the training."""

    model: Any
    data: Any
    train: TrainConfig = TrainConfig()
    plan: PlanConfig = PlanConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    profile: ProfileConfig = ProfileConfig()
    output: Text = "runs"
    device: Text | None = None

    @property
    def dimensions(self) -> ModelConfig:
        """The dimensions of the trained model; seq_len is the number of tokens of a sample."""
        raise NotImplementedError

    @property
    def samples(self) -> SampleKind:
        """The kind of samples that the model is trained on."""
        raise NotImplementedError

    @property
    def is_packed(self) -> bool:
        """Whether documents share samples, none of which sees another."""
        raise NotImplementedError

    @property
    def parallel_plan(self) -> Plan:
        """The plan the run follows; accumulation is its number of microbatches."""
        plan = self.plan
        return Plan.from_degrees(
            dp=plan.dp,
            pp=plan.pp,
            sharding=plan.sharding,
            sep=plan.sep,
            mp=plan.mp,
            ep=plan.ep,
            sharding_stage=plan.sharding_stage or 1,  # without a sharding axis the stage has nothing to split
            sequence_parallel=plan.sequence_parallel,
            schedule=plan.schedule,
            virtual_stages=plan.virtual_stages,
            chunk_items=plan.chunk_items,
            stage_devices=plan.stage_devices,
            num_microbatches=self.train.accumulation,
            recompute=plan.recompute,
            recompute_share=plan.recompute_share,
            offload=plan.offload,
            offload_path=plan.offload_path,
            offload_ratio=plan.offload_ratio,
            offload_buffers=plan.offload_buffers,
            compile="step" if plan.compile == "auto" else plan.compile,
            sep_attention=plan.sep_attention,
            sep_order=plan.sep_order,
            ulysses_degree=plan.ulysses_degree,
            expert_dispatch=plan.expert_dispatch,
            expert_all_to_all=plan.expert_all_to_all,
            overlap=plan.overlap.model_dump(),
            expert_axes=plan.expert_axes,
            branch_axis=plan.branch_axis,
        )

    def check_platform(self, platform: str) -> None:
        """Raises ConfigError for a plan that devices of this platform, as `device` names it, cannot run."""
        if self.plan.expert_dispatch == "ragged" and platform == "cpu":
            raise ConfigError(
                "plan.expert_dispatch=ragged on device cpu: XLA has no ragged all-to-all on CPU; set "
                "plan.expert_dispatch to padded, gather or balanced, whose results are the same"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens one optimizer step reads."""
        return self.train.global_batch * self.samples.tokens(self.dimensions)

    @model_validator(mode="after")
    def _check_plan(self) -> Self:
        model, train, plan = self.dimensions, self.train, self.plan
        family = FAMILIES[model.family]
        self._check_plan_of_family(family)
        splits = family.splits
        for name in () if plan.branch_axis == "mp" else splits.get("mp", ()):
            _divides(f"model.{name}", getattr(model, name), "plan.mp", plan.mp)
        for name in splits.get("sharding", ()) if plan.sharding_stage == 3 else ():
            _divides(f"model.{name}", getattr(model, name), "plan.sharding", plan.sharding)
        ways = plan.sep * (plan.mp if plan.sequence_parallel else 1)
        for name in splits.get("sep", ()):
            _divides(f"model.{name}", getattr(model, name), "plan.sep (x plan.mp with sequence_parallel)", ways)
        chunks, cut = len(self.parallel_plan.stage_of_chunk), family.cut
        if plan.pp > 1 and chunks > shape_of(model.family, model).graph().num_items(cut):
            parts = " layers, embedding and norm" if cut == "items" else " layers to cut between"
            raise ValueError(
                f"plan.pp={plan.pp} with {chunks // plan.pp} chunks a stage cuts the model in {chunks}, but it has "
                f"{model.num_layers}{parts}; lower plan.pp or plan.virtual_stages"
            )
        if self.log.experts and not model.num_experts:
            raise ValueError(f"log.experts: {model.family} has no experts; leave it out")
        if "expert" in self.parallel_plan.offload and not model.num_experts:
            raise ValueError(f"plan.offload of expert: {model.family} has no experts; leave expert out")
        if plan.expert_ways > 1 and not model.num_experts:
            raise ValueError(
                f"plan.ep={plan.ep}, plan.expert_axes={plan.expert_axes}: {model.family} has no experts; leave them out"
            )
        _divides("model.num_experts", model.num_experts, "the degrees of plan.expert_axes", plan.expert_ways)
        if model.num_experts and "mp" not in plan.expert_axes:
            _divides("model.expert_ffn_size", model.expert_ffn_size or model.ffn_size, "plan.mp", plan.mp)
        replicas = plan.dp * plan.sharding * plan.ep * train.accumulation
        degrees = {"dp": plan.dp, "sharding": plan.sharding, **({"ep": plan.ep} if plan.ep > 1 else {})}
        names, sizes = " x ".join(f"plan.{axis}" for axis in degrees), " x ".join(map(str, degrees.values()))
        factors = f"{names} x train.accumulation = {sizes} x {train.accumulation}"
        _divides("train.global_batch", train.global_batch, factors, replicas)
        self._check_capacity()
        return self

    def _check_capacity(self) -> None:
        """Refuse a capacity of experts that rounding alone would make one choice, with all others dropped."""
        model = self.dimensions
        if not model.num_experts or not model.capacity_factor:
            return
        rows = 1 if model.routing == "expert_choice" else self.train.global_batch // self.train.accumulation
        tokens = rows * self.samples.tokens(model)
        even = tokens * model.experts_per_token / model.num_experts
        capacity = model.capacity_factor * even
        if capacity < 1:
            raise ValueError(
                f"model.capacity_factor={model.capacity_factor:g} leaves an expert {capacity:.2g} of a "
                f"choice, of the {even:g} that it gets on the mean of {tokens:,} tokens; give at least "
                f"{math.ceil(1000 / even) / 1000}, 1.25 as usual, or 0 to drop none"
            )

    def _check_plan_of_family(self, family: Family) -> None:
        plan = self.plan
        for name in family.refuses:
            if getattr(plan, name) != PlanConfig.model_fields[name].default:
                raise ValueError(f"plan.{name}={getattr(plan, name)}: {family.name} has no use for it; leave it out")
        if family.recompute is not None and plan.recompute not in family.recompute:
            raise ValueError(
                f"plan.recompute={plan.recompute}: {family.name} can compute again {' or '.join(family.recompute)}"
            )
        if family.recompute is not None and plan.recompute_share != 1:
            raise ValueError(
                f"plan.recompute_share: {family.name} runs its blocks in one loop, where they are alike; leave it out"
            )
        blocks = self.dimensions.num_layers
        if plan.recompute != "none" and not self.parallel_plan.num_recomputed(blocks):
            raise ValueError(
                f"plan.recompute_share={plan.recompute_share:g} of model.num_layers={blocks} is no block, so that none "
                f"recomputes; give at least {1 / blocks:.3g}, or set plan.recompute to none"
            )
        count = family.branches(self.dimensions)
        branched = " or ".join(name for name, other in FAMILIES.items() if other.branched_by)
        others = f"model.{family.branched_by}" if family.branched_by else f"model.family: {branched}"
        if plan.branch_axis and count == 1:
            raise ValueError(
                f"plan.branch_axis={plan.branch_axis}: {family.name} has no branches to run beside each other, as the "
                f"model is configured; leave it out, or set {others}"
            )
        if plan.branch_axis and getattr(plan, plan.branch_axis) != count:
            raise ValueError(
                f"plan.{plan.branch_axis}={getattr(plan, plan.branch_axis)} with plan.branch_axis={plan.branch_axis}: "
                f"{family.name} has {count} branches; set plan.{plan.branch_axis}={count}"
            )


class PretrainConfig(RunConfig):
    """One pretraining run.

    >>> config = PretrainConfig(train=TrainConfig(steps=20))
    >>> config.train.steps, config.model.ffn_size
    (20, 1024)
    """

    model: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}))
    data: DataConfig = DataConfig()
    output: Text = "runs/pretrain"

    @property
    def dimensions(self) -> ModelConfig:
        return self.model

    @property
    def samples(self) -> SampleKind:
        return SAMPLES[FAMILIES[self.model.family].samples]

    @property
    def is_packed(self) -> bool:
        return self.data.packing == "best_fit"

    @property
    def tokenizer_vocab_size(self) -> int:
        """Size the tokenizer is trained to: its own setting, else the model's."""
        return self.data.tokenizer_vocab_size or self.model.vocab_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_data()
        if self.tokenizer_vocab_size > self.model.vocab_size:
            raise ValueError(
                f"data.tokenizer_vocab_size={self.tokenizer_vocab_size} is more than "
                f"model.vocab_size={self.model.vocab_size}; raise model.vocab_size"
            )
        return self

    def _check_data(self) -> None:
        family, data = FAMILIES[self.model.family], self.data
        if data.packing == "best_fit" and not family.documents:
            others = " or ".join(name for name, other in FAMILIES.items() if other.documents)
            raise ValueError(
                f"data.packing=best_fit: {family.name} takes one document a row; set data.packing=none, or "
                f"model.family: {others}"
            )
        used = self.samples.settings
        for name in sorted({name for kind in SAMPLES.values() for name in kind.settings} - {*used}):
            field = DataConfig.model_fields[name]
            if getattr(data, name) != field.default:
                raise ValueError(
                    f"data.{name}={getattr(data, name)}: {family.name} is trained on {self.samples.name}, which have "
                    f"none; leave it out"
                )


def digest(config: RunConfig) -> str:
    """The digest of a configuration: 16 hex digits, equal for equal values wherever they came from."""
    return xxhash.xxh3_64_hexdigest(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode())


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every setting under its dotted key, in the order of declaration.

    >>> flatten(PretrainConfig())["train.global_batch"]
    16
    """
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        flat |= {f"{name}.{key}": leaf for key, leaf in value.items()} if isinstance(value, dict) else {name: value}
    return flat
