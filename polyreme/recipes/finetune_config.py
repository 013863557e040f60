"""Configuration of a fine-tuning run: the weights to start from, a stage, the parameters that train, conversations."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from polyreme.models.families import FAMILIES
from polyreme.recipes.config import (
    Count,
    DataSource,
    Fraction,
    LogConfig,
    ModelConfig,
    NotNegative,
    Pair,
    Paths,
    Positive,
    RunConfig,
    Section,
    Text,
    TrainConfig,
    Whole,
    as_list,
    as_source,
    name_in,
)
from polyreme.recipes.preference_losses import LOSSES
from polyreme.recipes.samples import SampleKind
from polyreme.recipes.stages import STAGES, TuningStage
from polyreme.registry import Reference

_DIMENSIONS: Reference[Any] = Reference("polyreme.recipes.weights.base", "dimensions")

OTHER_WORDS = {
    # LLaMA-Factory
    "model_name_or_path": "model", "finetuning_type": "fine_tuning", "cutoff_len": "max_seq_len",
    "additional_target": "lora_target", "pissa_iter": "pissa_init", "quantization_bit": "weight_quantize_algo",
    "freeze_trainable_layer": "freeze_trainable_layers", "neat_packing": "packing", "dataset": "data.train",
    "eval_dataset": "data.validation", "val_size": "data.validation_fraction", "output_dir": "output",
    "max_steps": "train.steps", "num_train_epochs": "train.steps", "max_grad_norm": "train.clip_norm",
    "per_device_train_batch_size": "train.global_batch", "gradient_accumulation_steps": "train.accumulation",
    "warmup_ratio": "train.warmup_steps", "lr_scheduler_type": "train.min_lr", "bf16": "train.amp_level",
    "logging_steps": "log.interval", "eval_steps": "log.validation_interval", "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep", "gradient_checkpointing": "plan.recompute", "recompute": "plan.recompute",
    # TRL and peft
    "assistant_only_loss": "train_on_prompt", "completion_only_loss": "train_on_prompt", "max_length": "max_seq_len",
    "packing_strategy": "packing", "r": "lora_rank", "lora_r": "lora_rank", "target_modules": "lora_target",
    "use_rslora": "rslora", "load_in_4bit": "weight_quantize_algo", "load_in_8bit": "weight_quantize_algo",
    "chat_template": "template", "chat_template_path": "template", "dataset_text_field": "data.train",
    # nanoGPT, Hugging Face's configurations, and scripts
    "lr": "train.learning_rate", "max_lr": "train.learning_rate", "max_iters": "train.steps", "epochs": "train.steps",
    "batch_size": "train.global_batch", "grad_clip": "train.clip_norm", "warmup_iters": "train.warmup_steps",
    "block_size": "model.seq_len", "n_layer": "model.num_layers", "n_head": "model.num_heads",
    "n_embd": "model.hidden_size", "max_position_embeddings": "model.seq_len", "max_seq_len": "model.seq_len",
    "num_hidden_layers": "model.num_layers", "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads", "intermediate_size": "model.ffn_size", "tp": "plan.mp",
    "eval_interval": "log.validation_interval", "out_dir": "output",
    # PaddleFormers
    "lora_plus_scale": "loraplus_lr_ratio", "pissa": "pissa_init", "lora": "fine_tuning",
    "train_dataset_path": "data.train", "train_dataset_type": "data.train", "eval_dataset_path": "data.validation",
    "tensor_model_parallel_size": "plan.mp", "pipeline_model_parallel_size": "plan.pp", "sharding": "plan.sharding",
    "sequence_parallel": "plan.sequence_parallel", "fp16_opt_level": "train.amp_level",
}  # fmt: skip
"""What other programs call a setting, and its key here."""


class ConversationSource(DataSource):
    """A file of conversations: .jsonl, .json or .parquet, each but the last also .gz or .zst. type: the format of its
    rows (messages, prompt_completion, alpaca, sharegpt, ...); each row's own keys tell if left out. weight: the share
    of the samples that are of it."""

    type: Text | None = None


ConversationSources = Annotated[
    list[Annotated[ConversationSource, BeforeValidator(as_source)]], BeforeValidator(as_list)
]


class ChatData(Section):
    """Conversations: train, one file or several as [{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}];
    without weights each has as many samples as it holds. validation: files as well; if left out, the last
    validation_fraction of each of train. truncation: what becomes of conversations of more than max_seq_len tokens:
    turns (those at the end are left out), drop, cut, refuse. worker_timeout, skip_bad: as of pretraining."""

    train: Annotated[ConversationSources, Field(min_length=1)]
    validation: ConversationSources = Field(default_factory=list)
    validation_fraction: Annotated[Fraction, Field(gt=0)] = 0.05
    truncation: Literal["turns", "drop", "cut", "refuse"] = "turns"
    num_workers: Whole = 0
    seed: Whole = 0
    worker_timeout: NotNegative = 300.0
    skip_bad: Whole = 0


class FinetuneTraining(TrainConfig):
    """The optimisation, as of pretraining, with other defaults."""

    steps: Count = 200
    learning_rate: Positive = 1e-4
    weight_decay: NotNegative = 0.0
    betas: Pair = (0.9, 0.999)


class FinetuneLog(LogConfig):
    """Reports, as in pretraining. prompt: a question that the model answers before training and after it."""

    validation_interval: Whole = 50


class FinetuneConfig(RunConfig):
    """One fine-tuning run.

    model: a folder of published weights, a GGUF file, a name of polyreme models list, or the output folder of a run.
    stage: what is trained for. fine_tuning: full trains every parameter, lora adapters beside the linear maps, freeze
    the last freeze_trainable_layers blocks. lora_alpha: twice the rank if 0. lora_target: all, or names at the end of
    those of linear maps, as [q_proj, v_proj]; lm_head, the projection to the vocabulary, is not among all. rslora,
    use_dora, pissa_init, loraplus_lr_ratio: as of nn.LoRA.
    weight_quantize_algo: how the weights that adapters stand beside are stored, if in few bits (QLoRA).
    qat: every parameter trains while linear maps compute with weights rounded to so many bits, of which groups of
    qat_group_size inputs share a scale, all if -1: what polyreme quantize --method rtn then makes of the run.
    max_seq_len: tokens of a sample. packing: conversations share samples, none of which sees another. template: of
    conversations, by name or a .jinja file; the model's own if left out. train_on_prompt: questions are learnt too;
    mask_history: the last answer of a conversation alone is. neftune_noise_alpha: noise on embeddings while training
    (arXiv:2310.05914), 0 for none.

    Stage dpo: loss_type, one of recipes.preference_losses.LOSSES, with its beta, label_smoothing, simpo_gamma and
    dpop_lambda; pref_loss_ratio times that loss and sft_loss_ratio times the cost of the better answer. The reference
    is the model as it begins; reference_free: there is none. kto: beta, and the weights of answers that were judged
    desirable or not. distill: teacher, weights as of model; distill_temperature softens both, distill_weight is the
    part of the loss that the teacher's labels have. grpo: group_size texts of at most max_new_tokens, drawn at this
    temperature after each question, judged by reward (recipes.training.rewards.REWARDS, or module:function of (text,
    known answer)); clip_ratio, and kl_weight times the divergence from the model as it began.
    """

    model: Text
    stage: Annotated[str, name_in(STAGES)] = "sft"
    fine_tuning: Literal["full", "lora", "freeze"] = "lora"
    lora_rank: Count = 8
    lora_alpha: NotNegative = 0.0
    lora_dropout: Fraction = 0.0
    lora_target: Paths = Field(default_factory=lambda: ["all"])
    rslora: bool = False
    use_dora: bool = False
    pissa_init: bool = False
    loraplus_lr_ratio: Positive = 1.0
    weight_quantize_algo: Literal["nf4", "weight_only_int4", "weight_only_int8"] | None = None
    qat: Literal["wint4", "wint8"] | None = None
    qat_group_size: Annotated[int, Field(ge=-1)] = -1
    freeze_trainable_layers: Count = 2
    max_seq_len: Annotated[Count, Field(ge=2)] = 1024
    packing: bool = True
    template: Text | None = None
    train_on_prompt: bool = False
    mask_history: bool = False
    neftune_noise_alpha: NotNegative = 0.0
    loss_type: Annotated[str, name_in(LOSSES)] = "sigmoid"
    beta: Positive = 0.1
    label_smoothing: Annotated[Fraction, Field(lt=0.5)] = 0.0
    simpo_gamma: NotNegative = 0.5
    dpop_lambda: NotNegative = 50.0
    pref_loss_ratio: NotNegative = 1.0
    sft_loss_ratio: NotNegative = 0.0
    reference_free: bool = False
    desirable_weight: Positive = 1.0
    undesirable_weight: Positive = 1.0
    teacher: Text | None = None
    distill_temperature: Positive = 2.0
    distill_weight: Annotated[NotNegative, Field(le=1)] = 0.5
    group_size: Annotated[Count, Field(ge=2)] = 4
    max_new_tokens: Count = 32
    temperature: Positive = 1.0
    reward: Text = "exact_match"
    clip_ratio: Annotated[Positive, Field(lt=1)] = 0.2
    kl_weight: NotNegative = 0.0
    data: ChatData
    train: FinetuneTraining = FinetuneTraining()
    log: FinetuneLog = FinetuneLog()
    output: Text = "runs/finetune"

    @property
    def dimensions(self) -> ModelConfig:
        return _DIMENSIONS.load()(self.model, self.max_seq_len)

    @property
    def teacher_dimensions(self) -> ModelConfig | None:
        """The dimensions of the teacher, if there is one."""
        return None if self.teacher is None else _DIMENSIONS.load()(self.teacher, self.max_seq_len)

    @property
    def weight_dtype(self) -> str:
        """The dtype of the codes that weights are stored in, "" for none."""
        return (self.weight_quantize_algo or "").removeprefix("weight_only_")

    @property
    def record(self) -> TuningStage:
        """The record of the stage."""
        return STAGES[self.stage]

    @property
    def samples(self) -> SampleKind:
        return self.record.samples

    @property
    def is_packed(self) -> bool:
        return self.packing and "packing" in self.record.settings

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = {"lora": "lora_rank lora_alpha lora_dropout lora_target rslora use_dora pissa_init loraplus_lr_ratio "
                 "weight_quantize_algo",
                 "freeze": "freeze_trainable_layers",
                 "full": "qat qat_group_size"}  # fmt: skip
        for kind, names in kinds.items():
            for name in names.split():
                default = type(self).model_fields[name].get_default(call_default_factory=True)
                if self.fine_tuning != kind and getattr(self, name) != default:
                    raise ValueError(
                        f"{name}={getattr(self, name)} with fine_tuning={self.fine_tuning}, which has no use for it; "
                        f"leave it out, or set fine_tuning={kind}"
                    )
        self._check_stage()
        if self.qat_group_size == 0 or (self.qat_group_size != -1 and not self.qat):
            raise ValueError(f"qat_group_size={self.qat_group_size} with qat={self.qat}; give qat, and inputs or -1")
        if self.use_dora and self.pissa_init:
            raise ValueError("use_dora with pissa_init: both change what the weight itself does; leave one of them out")
        if self.pissa_init and self.weight_quantize_algo:
            raise ValueError(
                f"pissa_init with weight_quantize_algo={self.weight_quantize_algo}: what adapters begin with would be "
                "of the rounded weight; leave one of them out"
            )
        family = FAMILIES[self.dimensions.family]
        if self.is_packed and not family.documents:
            raise ValueError(f"packing: {family.name} takes one conversation a row; set packing=false")
        if self.plan.elastic:
            raise ValueError("plan.elastic: plans are found for pretraining alone; leave it out")
        return self

    def _check_stage(self) -> None:
        fields, used = type(self).model_fields, {*self.record.settings}
        for name in sorted({name for stage in STAGES.values() for name in stage.settings} - used):
            if getattr(self, name) != fields[name].get_default(call_default_factory=True) and name != "packing":
                others = " or ".join(key for key, stage in STAGES.items() if name in stage.settings)
                raise ValueError(
                    f"{name}={getattr(self, name)} with stage={self.stage}, which has no use for it; leave it out, or "
                    f"set stage={others}"
                )
        loss = LOSSES[self.loss_type]
        for name in ("label_smoothing", "simpo_gamma", "dpop_lambda"):
            if name in used and name not in loss.settings and getattr(self, name) != fields[name].default:
                others = " or ".join(key for key, other in LOSSES.items() if name in other.settings)
                raise ValueError(
                    f"{name}={getattr(self, name)} with loss_type={self.loss_type}, which has no use for it; leave it "
                    f"out, or set loss_type={others}"
                )
        if self.record.roll_out is not None:
            if self.plan.num_devices > 1:
                raise ValueError(f"plan: stage {self.stage} writes texts with the model, on one device; leave plan out")
            if self.log.validation_interval:
                raise ValueError(f"log.validation_interval: stage {self.stage} has nothing held out; set it to 0")
        if self.stage == "distill" and self.teacher is None:
            raise ValueError("stage=distill: teacher is missing; give weights of the same tokenizer, as for model")
