"""Pretraining: a configuration in, a trained model out, with logs, checkpoints and a sample.

Floor: 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from polyreme import faults
from polyreme.core import place
from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.errors import CheckpointError, NumericsError
from polyreme.io import BatchSampler, DataLoader, RandomSampler
from polyreme.recipes import estimate, resume
from polyreme.recipes.config import PretrainConfig, flatten
from polyreme.recipes.logs import RunLog
from polyreme.recipes.output_folder import claim
from polyreme.recipes.peak import bytes_in_use, find_peak
from polyreme.recipes.progress import Meter, Progress
from polyreme.recipes.sampling import sample_text
from polyreme.recipes.signals import StopRequest
from polyreme.recipes.text_data import Corpus, load_corpus
from polyreme.recipes.training import Trainer


def run(config: PretrainConfig, *, resume: str, overrides_source: dict[str, Any]) -> None:
    """Train by config; resume is "auto", "never" or a step number as text.

    Raises ConfigError, DataError, CheckpointError or NumericsError (a gradient that is not finite; no parameter was
    changed by it). SIGTERM and SIGINT finish the step, save and exit 75.
    """
    if config.device is not None and config.device != "cpu":
        place.set_device(config.device)
    with claim(Path(config.output)) as folder, StopRequest() as stop:
        corpus = load_corpus(config, overrides_source["folder"])
        trainer = Trainer(config)
        with CheckpointStore(folder / "checkpoints", max_to_keep=config.checkpoint.keep) as store:
            job = _Run(config, folder, corpus, trainer, store)
            first = job.restore(resume)
            job.train(first, stop, overrides_source["resume_command"])


class _Run:
    def __init__(
        self, config: PretrainConfig, folder: Path, corpus: Corpus, trainer: Trainer, store: CheckpointStore
    ) -> None:
        self.config, self.folder, self.corpus, self.trainer, self.store = config, folder, corpus, trainer, store
        sampler = RandomSampler(corpus.train, generator=config.data.seed)
        batches = BatchSampler(sampler=sampler, batch_size=config.train.global_batch, drop_last=True)
        workers = config.data.num_workers
        self.loader = DataLoader(corpus.train, batch_sampler=batches, num_workers=workers, persistent_workers=workers > 0)

    def restore(self, wanted: str) -> int:
        """Continue from a checkpoint if there is one to continue from; returns the number of steps done."""
        if wanted == "never" or (wanted == "auto" and self.store.latest_step() is None):
            return 0
        step = None if wanted == "auto" else int(wanted)
        arrays, meta = self.store.restore(self.trainer.target(), step)
        resume.check_config(meta["config"], self.config)
        resume.check_data(meta["host"]["data_digest"], self.corpus.digest)
        self.trainer.load(arrays, meta["host"]["schedule"])
        self.loader.set_state_dict(meta["data"])
        return int(meta["step"])

    def train(self, first: int, stop: StopRequest, resume_command: list[str]) -> None:
        config, total = self.config, self.config.train.steps
        peak = find_peak(jax.devices(), "float32" if config.train.amp_level == "O0" else config.train.amp_dtype)
        meter = Meter(total, config.tokens_per_step, estimate.flops_per_token(config.model), peak.flops_per_second)
        title = f"{config.model.family}, {estimate.num_parameters(config.model) / 1e6:.1f} M parameters"
        with (
            RunLog(
                self.folder, config.log, title=title, tokens_per_step=config.tokens_per_step, resume_step=first or None
            ) as log,
            Progress(total, label=peak.label) as progress,
        ):
            progress.note(f"{title}; {config.parallel_plan.mesh}; {self.corpus.num_tokens:,} tokens of text")
            if first:
                progress.note(f"resumed after step {first}")
            self._loop(first, stop, resume_command, meter, log, progress)
            with meter.paused():
                self._finish(log, progress)

    def _loop(
        self, first: int, stop: StopRequest, resume_command: list[str], meter: Meter, log: RunLog, progress: Progress
    ) -> None:
        config, trainer = self.config, self.trainer
        waiting: tuple[int, Any, Any] | None = None
        saved = first
        batches = self._batches()
        for step in range(first + 1, config.train.steps + 1):
            faults.point("train.step", step)
            learning_rate = trainer.schedule.last_lr
            tokens, labels = next(batches)
            loss, norm = trainer.step(tokens, labels)
            # one step behind, so that the host reads a result while the devices work on the next
            if waiting is not None:
                _check_finite(*waiting)
            waiting = (step, loss, norm)
            if step % config.log.interval == 0 or step in (first + 1, config.train.steps):
                _check_finite(*waiting)
                reading = meter.read(
                    step,
                    loss=float(loss),
                    learning_rate=learning_rate,
                    grad_norm=float(norm),
                    memory_bytes=bytes_in_use(jax.devices()),
                )
                log.train(step, reading.as_dict())
                progress.show(reading)
            if config.log.validation_interval and step % config.log.validation_interval == 0:
                with meter.paused():
                    value = self._validate()
                log.validation(step, {"loss": value})
                progress.note(f"step {step}: validation loss {value:.4f}")
            if config.checkpoint.interval and step % config.checkpoint.interval == 0:
                _check_finite(*waiting)
                with meter.paused():
                    self._save(step)
                saved = step
            if stop.requested:
                _check_finite(*waiting)
                if saved != step:
                    self._save(step)
                self.store.wait()
                stop.leave(step, resume_command)
        if waiting is not None:
            _check_finite(*waiting)
            if saved != config.train.steps:
                self._save(config.train.steps)
        self.store.wait()

    def _batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            for tokens, labels in self.loader:
                yield np.asarray(tokens), np.asarray(labels)

    def _validate(self) -> float:
        size, data = self.config.train.global_batch, self.corpus.validation
        count = min(self.config.log.validation_batches, len(data) // size)
        losses = []
        for i in range(count):
            rows = [data[j] for j in range(i * size, (i + 1) * size)]
            tokens, labels = (np.stack(column) for column in zip(*rows, strict=True))
            losses.append(self.trainer.evaluate(tokens, labels))
        return float(np.mean(losses))

    def _save(self, step: int) -> None:
        meta = {
            "config": flatten(self.config),
            "data": self.loader.state_dict(),
            "host": {"schedule": self.trainer.schedule.state_dict(), "data_digest": self.corpus.digest},
        }
        known = self.store.latest_step()
        self.store.save(
            step,
            self.trainer.arrays(),
            meta,
            blocking=not self.config.checkpoint.async_save,
            overwrite=known is not None and known >= step,
        )

    def _finish(self, log: RunLog, progress: Progress) -> None:
        config = self.config
        if config.log.sample_tokens and self.corpus.tokenizer is not None:
            text = sample_text(
                self.trainer.model,
                self.corpus.tokenizer,
                config.log.prompt,
                max_new_tokens=config.log.sample_tokens,
                temperature=0.8,
                top_k=50,
                seed=config.train.seed,
            )
            log.event("sample", config.train.steps, {"text": text})
            progress.note(f"sample: {text}")
        progress.note(f"run saved in {self.folder}: metrics.jsonl, tensorboard/, loss.png, checkpoints/")


def _check_finite(step: int, loss: Any, norm: Any) -> None:
    if not math.isfinite(float(norm)):
        raise NumericsError(
            f"step {step}: the gradient norm is {float(norm)} (loss {float(loss)}); the update was left out and the last "
            "checkpoint is finite. Lower train.learning_rate, set train.clip_norm, or look at that batch"
        )


def check_checkpoint_folder(folder: Path) -> Path:
    """The checkpoints of a run's output folder. Raises CheckpointError if there are none."""
    found = folder / "checkpoints"
    if not found.is_dir():
        raise CheckpointError(f"{folder}: no checkpoints/ in it; give the output folder of a run, such as runs/gpt_kjv")
    return found


