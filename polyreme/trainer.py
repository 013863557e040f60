"""Fine-tuning from Python, by PaddleNLP's names: TrainingArguments and Trainer over the run of `polyreme finetune`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from pydantic import ValidationError

from polyreme.errors import ConfigError
from polyreme.nn.layers.lora import LoRA
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.training import run
from polyreme.recipes.training.logs import read_jsonl
from polyreme.recipes.weights.base import load_trained
from polyreme.recipes.weights.merge import merge


@dataclass
class TrainingArguments:
    """How a model is trained, as PaddleNLP's names have it; each is a setting of `polyreme finetune --settings`.

    A device's batch of per_device_train_batch_size rows is taken gradient_accumulation_steps times by each of the
    data-parallel and sharding groups; data_parallel_degree -1 takes all devices that the others leave. sharding:
    "stage1", "stage2" or "stage3" over sharding_parallel_degree devices. logging_steps, eval_steps, save_steps: so
    often; 0 turns the last two off.
    """

    output_dir: str
    max_steps: int = 200
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-4
    min_learning_rate: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    seed: int = 0
    bf16: bool = False
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
    logging_steps: int = 10
    eval_steps: int = 50
    save_steps: int = 100
    save_total_limit: int = 2
    dataloader_num_workers: int = 0
    device: str | None = None

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

    def settings(self) -> dict[str, Any]:
        """The same as sections of a configuration. Raises ConfigError for a sharding that is no stage."""
        stages = {"": 0, "stage1": 1, "stage2": 2, "stage3": 3}
        if self.sharding not in stages:
            raise ConfigError(f"TrainingArguments: sharding={self.sharding!r}; give stage1, stage2 or stage3")
        return {
            "train": {
                "steps": self.max_steps,
                "global_batch": self.train_batch_size,
                "accumulation": self.gradient_accumulation_steps,
                "learning_rate": self.learning_rate,
                "min_lr": self.min_learning_rate,
                "warmup_steps": self.warmup_steps,
                "weight_decay": self.weight_decay,
                "betas": [self.adam_beta1, self.adam_beta2],
                "clip_norm": self.max_grad_norm or None,
                "seed": self.seed,
                "amp_level": self.fp16_opt_level if self.bf16 else "O0",
            },
            "plan": {
                "dp": self._data_parallel,
                "mp": self.tensor_parallel_degree,
                "pp": self.pipeline_parallel_degree,
                "sharding": self.sharding_parallel_degree,
                "sharding_stage": stages[self.sharding],
                "sep": self.sep_parallel_degree,
                "sequence_parallel": self.sequence_parallel,
                "recompute": self.recompute_granularity if self.recompute else "none",
            },
            "log": {"interval": self.logging_steps, "validation_interval": self.eval_steps},
            "checkpoint": {"interval": self.save_steps, "keep": self.save_total_limit},
            "output": self.output_dir,
            "device": self.device,
        }


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
        sections = self.args.settings() | {"data": data}
        for key, value in self.settings.items():
            sections[key] = {**sections[key], **value} if isinstance(value, dict) and key in sections else value
        try:
            self.config = FinetuneConfig.model_validate(values | sections)
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
