"""Fine-tuning from Python, by PaddleNLP's names: TrainingArguments and Trainer over the run of `polyreme finetune`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import jax
from pydantic import ValidationError

from polyreme.errors import ConfigError, did_you_mean
from polyreme.mesh import RECOMPUTE
from polyreme.nn.layers.lora import LoRA
from polyreme.recipes.finetune_config import OTHER_WORDS, FinetuneConfig
from polyreme.recipes.training import run
from polyreme.recipes.training.logs import read_jsonl
from polyreme.recipes.weights.base import load_trained
from polyreme.recipes.weights.merge import merge

_UNREAD = {
    "per_device_eval_batch_size": "validation takes batches of train_batch_size rows",
    "eval_accumulation_steps": "validation takes batches of train_batch_size rows",
    "load_best_model_at_end": "every save_steps a checkpoint is kept, save_total_limit of them; resume_from_checkpoint "
    "takes the number of a step",
    "gradient_checkpointing_kwargs": "give recompute_granularity: full, full_attn or core_attn",
    "deepspeed": "give sharding='stage1', 'stage2' or 'stage3' and sharding_parallel_degree",
    "fsdp": "give sharding='stage3' and sharding_parallel_degree",
    "push_to_hub": "save_model writes a folder of published weights",
    "dpo_beta": "give stage and beta among Trainer's settings",
}
"""Names of other trainers that nothing here is, and what to give instead."""
_ALIASES = {
    "eval_strategy": "evaluation_strategy",
    "gradient_checkpointing": "recompute",
    "data_seed": "seed",
    "use_cpu": "device",
}


@dataclass
class TrainingArguments:
    """How a model is trained, as PaddleNLP's and transformers' names have it; each is a setting of `polyreme finetune
    --settings`.

    max_steps: optimizer steps; -1 for num_train_epochs passes over the samples, or for 200 without those. A device's
    batch of per_device_train_batch_size rows is taken gradient_accumulation_steps times by each of the data-parallel
    and sharding groups; data_parallel_degree -1 takes all devices that the others leave. warmup_ratio: of the steps,
    where warmup_steps is 0. bf16, fp16: by fp16_opt_level. sharding: "stage1", "stage2" or "stage3" over
    sharding_parallel_degree devices. logging_steps, eval_steps, save_steps: so often; 0 turns the last two off, as "no"
    of evaluation_strategy and save_strategy does. report_to: "none", "tensorboard" or "all".

    A name that is no field is a ConfigError, which says what this is here.
    """

    output_dir: str
    max_steps: int = -1
    num_train_epochs: float = 0.0
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-4
    min_learning_rate: float = 0.0
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    optim: str = "adamw"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    seed: int = 0
    bf16: bool = False
    fp16: bool = False
    fp16_opt_level: str = "O1"
    data_parallel_degree: int = -1
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    sharding_parallel_degree: int = 1
    sharding: str = ""
    sep_parallel_degree: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    recompute_granularity: str = "full"
    logging_strategy: str = "steps"
    logging_steps: int = 10
    evaluation_strategy: str = "steps"
    eval_steps: int = 50
    save_strategy: str = "steps"
    save_steps: int = 100
    save_total_limit: int = 2
    report_to: str | Sequence[str] = "tensorboard"
    dataloader_num_workers: int = 0
    device: str | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        for name in sorted(kwargs.keys() - {f.name for f in fields(cls)}):
            raise ConfigError(f"TrainingArguments: {name} is no argument here{_advice(name, cls)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.report_to, Sequence) and not isinstance(self.report_to, str):
            self.report_to = ",".join(self.report_to) or "none"
        for name, accepted in _ACCEPTED.items():
            value = getattr(self, name)
            if value not in accepted:
                raise ConfigError(f"TrainingArguments: {name}={value!r}; here it is {' or '.join(map(repr, accepted))}")
        self._check_counts()
        if self.bf16 and self.fp16:
            raise ConfigError("TrainingArguments: bf16 and fp16; give one of them")
        if not 0 <= self.warmup_ratio <= 1 or (self.warmup_ratio and self.warmup_steps):
            raise ConfigError(
                f"TrainingArguments: warmup_ratio={self.warmup_ratio}, warmup_steps={self.warmup_steps}; give a share "
                "of the steps, or a number of them"
            )
        if not 0 <= self.num_train_epochs < math.inf or (
            self.max_steps != -1 and (self.max_steps < 1 or self.num_train_epochs)
        ):
            raise ConfigError(
                f"TrainingArguments: max_steps={self.max_steps}, num_train_epochs={self.num_train_epochs}; give a "
                "number of steps, or of passes over the samples"
            )

    def _check_counts(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "int" and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise ConfigError(f"TrainingArguments: {one.name}={value!r}; give a whole number")
            if one.name.endswith("_degree") and value < 1 and (one.name, value) != ("data_parallel_degree", -1):
                raise ConfigError(f"TrainingArguments: {one.name}={value}; give the number of devices, at least 1")
        if self.sharding and self.sharding_parallel_degree == 1:
            raise ConfigError(
                f"TrainingArguments: sharding={self.sharding!r} over one device, which would split nothing; give "
                "sharding_parallel_degree above 1, or leave sharding out"
            )

    @property
    def train_batch_size(self) -> int:
        """Rows of an optimizer step, over all devices."""
        groups = self._data_parallel * self.sharding_parallel_degree
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * groups

    @property
    def _data_parallel(self) -> int:
        others = self.tensor_parallel_degree * self.pipeline_parallel_degree * self.sharding_parallel_degree
        left = max(1, len(jax.devices()) // (others * self.sep_parallel_degree))
        return left if self.data_parallel_degree == -1 else self.data_parallel_degree

    def settings(self, steps_an_epoch: int = 0) -> dict[str, Any]:
        """The same as sections of a configuration. steps_an_epoch: what num_train_epochs counts."""
        steps = 200 if self.max_steps == -1 else self.max_steps
        if self.num_train_epochs and steps_an_epoch:
            steps = math.ceil(self.num_train_epochs * steps_an_epoch)
        return {
            "train": {
                "steps": steps,
                "global_batch": self.train_batch_size,
                "accumulation": self.gradient_accumulation_steps,
                "learning_rate": self.learning_rate,
                "min_lr": self.min_learning_rate,
                "warmup_steps": self.warmup_steps or math.ceil(self.warmup_ratio * steps),
                "weight_decay": self.weight_decay,
                "betas": [self.adam_beta1, self.adam_beta2],
                "clip_norm": self.max_grad_norm or None,
                "seed": self.seed,
                "amp_level": self.fp16_opt_level if self.bf16 or self.fp16 else "O0",
                "amp_dtype": "float16" if self.fp16 else "bfloat16",
            },
            "plan": {
                "dp": self._data_parallel,
                "mp": self.tensor_parallel_degree,
                "pp": self.pipeline_parallel_degree,
                "sharding": self.sharding_parallel_degree,
                "sharding_stage": _STAGES[self.sharding],
                "sep": self.sep_parallel_degree,
                "sequence_parallel": self.sequence_parallel,
                "recompute": self.recompute_granularity if self.recompute else "none",
            },
            "log": {
                "interval": self.logging_steps,
                "validation_interval": 0 if self.evaluation_strategy == "no" else self.eval_steps,
                "tensorboard": self.report_to != "none",
            },
            "checkpoint": {
                "interval": 0 if self.save_strategy == "no" else self.save_steps,
                "keep": self.save_total_limit,
            },
            "output": self.output_dir,
            "device": self.device,
        }


_STAGES = {"": 0, "stage1": 1, "stage2": 2, "stage3": 3}
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "lr_scheduler_type": ("cosine", "cosine_with_min_lr"),
    "optim": ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf"),
    "adam_epsilon": (1e-8,),
    "logging_strategy": ("steps",),
    "evaluation_strategy": ("steps", "no"),
    "save_strategy": ("steps", "no"),
    "report_to": ("tensorboard", "all", "none"),
    "sharding": tuple(_STAGES),
    "recompute_granularity": RECOMPUTE[1:],
    "fp16_opt_level": ("O0", "O1", "O2"),
}
"""Values that arguments may have of which other trainers have more."""


def _advice(name: str, owner: type) -> str:
    """What to give in the place of an argument of another trainer."""
    if name in _ALIASES:
        return f"; give {_ALIASES[name]}"
    if name in _UNREAD:
        return f": {_UNREAD[name]}"
    if name in OTHER_WORDS:
        return f"; it is {OTHER_WORDS[name]} of a configuration: Trainer(..., settings={{...}})"
    if name in FinetuneConfig.model_fields:
        return "; it is one of Trainer's settings: Trainer(..., settings={...})"
    return did_you_mean(name, [f.name for f in fields(owner)])


@dataclass
class Trainer:
    """A fine-tuning run: train() is `polyreme finetune`, with its logs, checkpoints, exact resume and plans.

    model: published weights or a run, as `model` of a configuration. args: how it is trained. train_dataset,
    eval_dataset: files of conversations, or their rows as dicts, which are written into the output folder.
    lora_config: how linear maps are adapted; None trains every parameter. settings: others of a configuration, as
    max_seq_len, packing or template. Raises ConfigError for settings that cannot be.
    """

    model: str | Path
    args: TrainingArguments
    train_dataset: str | Path | Sequence[Any]
    eval_dataset: str | Path | Sequence[Any] | None = None
    lora_config: LoRA | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = {"model": str(self.model), "stage": "sft", **_lora_settings(self.lora_config)}
        data: dict[str, Any] = {"num_workers": self.args.dataloader_num_workers}
        data["train"] = self._files("train", self.train_dataset)
        if self.eval_dataset is not None:
            data["validation"] = self._files("validation", self.eval_dataset)
        self.config = self._configured(values | {"data": data}, self.args.settings())
        if self.args.num_train_epochs:
            samples = len(self.config.samples.load.load()(self.config, Path()).train)
            steps = samples // self.config.train.global_batch
            self.config: FinetuneConfig = self._configured(values | {"data": data}, self.args.settings(steps))

    def _configured(self, values: dict[str, Any], sections: dict[str, Any]) -> FinetuneConfig:
        sections = values | sections
        for key, value in self.settings.items():
            sections[key] = {**sections[key], **value} if isinstance(value, dict) and key in sections else value
        try:
            return FinetuneConfig.model_validate(sections)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"Trainer: {where}{': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
            ) from None

    def _files(self, name: str, data: str | Path | Sequence[Any]) -> list[str]:
        if isinstance(data, (str, Path)):
            return [str(data)]
        if data and all(isinstance(entry, (str, Path)) for entry in data):
            return [str(entry) for entry in data]
        file = Path(self.args.output_dir) / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in data), encoding="utf-8")
        return [str(file.resolve())]

    def train(self, resume_from_checkpoint: bool | int = True) -> list[dict[str, Any]]:
        """Train, or go on from the newest checkpoint, that of a step, or none (False); what was logged of each step."""
        named = {id(True): "auto", id(False): "never"}  # 1 and 0 are steps
        resume = named.get(id(resume_from_checkpoint), str(resume_from_checkpoint))
        source = {"folder": Path(), "resume_command": [sys.executable, *sys.argv]}
        run.run(self.config, resume=resume, overrides_source=source)
        return self.log_history

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """What was logged so far: of steps, validations and samples."""
        return list(read_jsonl(Path(self.config.output) / "metrics.jsonl"))

    @property
    def trained_model(self) -> Any:
        """The model of the newest checkpoint, on one device."""
        return load_trained(Path(self.config.output))[0]

    def save_model(self, output_dir: str | Path, say: Callable[[str], None] = lambda text: None) -> None:
        """Write it as a folder of published weights, adapters merged."""
        merge(Path(self.config.output), Path(output_dir), say=say)


def _lora_settings(lora: LoRA | None) -> dict[str, Any]:
    if lora is None:
        return {"fine_tuning": "full"}
    return {
        "fine_tuning": "lora",
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "rslora": lora.rslora,
        "use_dora": lora.use_dora,
        "pissa_init": lora.pissa_init,
        "loraplus_lr_ratio": lora.loraplus_lr_ratio,
    }


__all__ = ["Trainer", "TrainingArguments"]
