"""A training run of any stage: a configuration in, a trained model out, with logs, checkpoints and a sample."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from polyreme import faults, flags
from polyreme.core import layout as layouts
from polyreme.core.devices import place
from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.distributed.checkpoint.parts import everyone_says
from polyreme.distributed.job import watchdog
from polyreme.distributed.parallel import init_parallel_env
from polyreme.errors import ConfigError, DataError, NumericsError
from polyreme.kernels import select
from polyreme.models.files.adapters import write_adapter
from polyreme.recipes import estimate
from polyreme.recipes.config import LogConfig, RunConfig, flatten
from polyreme.recipes.data.batches import Batch, Numbered, gather, ids_text
from polyreme.recipes.data.loading import training_batches, training_loader
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.training import resume
from polyreme.recipes.training.logs import RunLog
from polyreme.recipes.training.output_folder import claim, set_aside
from polyreme.recipes.training.peak import Peak, bytes_in_use, find_peak
from polyreme.recipes.training.progress import Meter, ProgressDisplay, told_if_slow
from polyreme.recipes.training.replica_check import check_replicas
from polyreme.recipes.training.signals import StopRequest
from polyreme.recipes.training.traces import StepRecorder, write_trace
from polyreme.recipes.training.trainer import StepResult, Trainer, learning_rate_schedule, told
from polyreme.recipes.weights.base import base_digest, check_base_digest, keep_config

_DATA_IS_READ = "preparing the data; a text's tokenizer is trained and its tokens are kept for later runs"
_IS_COMPILED = "compiling the first step, which takes minutes for many layers on a processor; kept for later runs"


def run(config: RunConfig, *, resume: str, overrides_source: dict[str, Any]) -> None:
    """Train by config; resume is "auto", "never" or a step number as text.

    Raises ConfigError, DataError, CheckpointError or NumericsError (a loss or gradient that is not finite; where steps
    are left out, more than train.max_skipped in a row; no parameter was changed by it and nothing was saved after it).
    SIGTERM and SIGINT finish the step, save and exit 75. "never" keeps the checkpoints of an earlier run as
    checkpoints.1; a step number discards the checkpoints after it.

    In one of several processes (polyreme launch, SLURM, Open MPI, Kubernetes) it joins the others first. Each reads the
    same data and gives its devices their part of every batch; the first writes and prints all that is not a shard of a
    checkpoint. A signal to one stops all after the same step. The output folder is on a disk that all of them share.
    """
    join_processes()
    if config.device is not None and config.device != "cpu":
        place.set_device(config.device)
    config.check_platform(config.device or select.backend())
    layouts.check_devices(config.parallel_plan)  # before the data is read and anything is written
    say = ProgressDisplay(config.train.steps, is_silent=not _is_first()).note
    with _claim(Path(config.output)) as folder, StopRequest() as stop:
        with told_if_slow(_DATA_IS_READ, say):
            corpus = load_data(config, overrides_source["folder"])
        is_anew = resume == "never" and _is_first()
        renamed = set_aside(folder, ("checkpoints", "tensorboard")) if is_anew else {}
        with CheckpointStore(folder / "checkpoints", max_to_keep=config.checkpoint.keep) as store:
            with told_if_slow("placing the model", say):
                job = _TrainingRun(config, folder, corpus, store, say)
            job.notes += [f"{old}/ of an earlier run is kept as {new}/" for old, new in renamed.items()]
            first = job.restore(resume)
            job.train(first, stop, overrides_source["resume_command"])


def _is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return jax.process_index() == 0


def join_processes() -> None:
    """Join the other processes of the job, if there are any; once more does nothing."""
    if flags.trainers_num() > 1 or (not flags.trainers_given() and flags.cluster() is not None):
        init_parallel_env()
    elif flags.store() is not None:  # alone under a launcher, which asks where a run was when it failed
        watchdog.start(0, 1)


def _claim(folder: Path) -> contextlib.AbstractContextManager[Path]:
    return claim(folder) if _is_first() else contextlib.nullcontext(folder)


def load_data(config: RunConfig, base: Path) -> Any:
    """The data, prepared by the first process, then read by the others; raises if they are not at the same run."""
    if not _is_first():
        everyone_says(None)
    data = config.samples.load.load()(config, base)
    if _is_first():
        everyone_says(None)
    answers = everyone_says([json.dumps(flatten(config), sort_keys=True), data.digest])
    for rank, (settings, digest) in enumerate(answers):
        if settings != answers[0][0]:
            raise ConfigError(f"rank {rank} has other settings than rank 0; give every process the same command line")
        if digest != answers[0][1]:
            raise DataError(
                f"rank {rank} reads other data (digest {digest[:12]}) than rank 0 ({answers[0][1][:12]}); give "
                "the configuration the same files on every machine"
            )
    return data


class _Waiting(NamedTuple):
    """A step that was started and not looked at yet."""

    step: int
    batch: Batch
    result: StepResult


class _TrainingRun:
    def __init__(
        self, config: RunConfig, folder: Path, corpus: Any, store: CheckpointStore, say: Callable[[str], None]
    ) -> None:
        self.config, self.folder, self.corpus, self.store = config, folder, corpus, store
        self.notes: list[str] = []
        self.check = config.samples.check.load()
        self.skipped = 0  # steps left out, one after the other
        self.recorder: StepRecorder | None = None
        # of the weights that it begins with, None where it begins with none
        self.base_digest = base_digest(config.model) if isinstance(config, FinetuneConfig) else None
        latest = store.latest_step()
        if latest is not None:  # told before minutes go into a model that does not fit
            self._check_saved(store.manifest(latest).meta)
        self.trainer = Trainer(config)
        if isinstance(config, FinetuneConfig) and config.record.prepare is not None:
            config.record.prepare.load()(config, self.trainer, corpus, folder, say)
        self.roll_out = None
        if isinstance(config, FinetuneConfig) and config.record.roll_out is not None:
            self.roll_out = config.record.roll_out.load()(config, self.trainer, corpus)
        self.notes += map(str, self.trainer.planned.files)
        idle = config.parallel_plan.overlap.idle_text(config.device or select.backend())
        self.notes += [idle] if idle else []
        self.validation = Numbered(corpus.validation)
        self.loader = training_loader(config, corpus)

    # going on

    def restore(self, wanted: str) -> int:
        """Continue from a checkpoint if there is one to continue from; returns the number of steps done."""
        if wanted == "never" or (wanted == "auto" and self.store.latest_step() is None):
            return 0
        step = None if wanted == "auto" else int(wanted)
        arrays, meta = self.store.restore(self.trainer.target(), step, strict=self.config.checkpoint.strict)
        step, total = int(meta["step"]), self.config.train.steps
        changed = self._check_saved(meta)
        if step > total:
            raise ConfigError(
                f"train.steps={total}, but the checkpoint in {self.folder} is of step {step}; raise train.steps, or go "
                "back with --resume and the number of a step"
            )
        self.trainer.load(arrays, step)
        self.trainer.load_host_state(meta["host"])
        self.skipped = meta["host"].get("skipped", 0)
        self.loader.set_state_dict(meta["data"])
        saved_steps = meta["config"]["train.steps"]
        before = learning_rate_schedule(self.config.train.model_copy(update={"steps": saved_steps}))
        before.step(step)
        self.notes += resume.describe(changed, step + 1, before.last_lr, self.trainer.schedule.last_lr)
        self._discard_after(step)
        return step

    def _check_saved(self, meta: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        changed = resume.check_config(meta["config"], self.config)
        resume.check_data(meta["host"]["data_digest"], self.corpus.digest)
        if isinstance(self.config, FinetuneConfig):
            check_base_digest(self.config.model, meta["host"]["base_digest"], f"cannot resume {self.folder}")
        return changed

    def _discard_after(self, step: int) -> None:
        """Saving the step again replaces every later one at once, so that a kill cannot bring one back."""
        later = [found for found in self.store.steps() if found > step]
        if later:
            self._save(step, blocking=True)
            self.notes.append(f"went back to step {step}; checkpoints after it are discarded: {later}")

    # training

    def train(self, first: int, stop: StopRequest, resume_command: list[str]) -> None:
        """From the step after first to the last one, then a sample."""
        config, total = self.config, self.config.train.steps
        dtype = "float32" if config.train.amp_level == "O0" else config.train.amp_dtype
        peak = find_peak(jax.devices(), dtype) if _is_first() else Peak(math.inf, "")
        title = f"{config.dimensions.family}, {estimate.num_parameters(config.dimensions) / 1e6:.1f} M parameters"
        with ProgressDisplay(total, label=peak.label, is_silent=not _is_first()) as progress:
            progress.note(f"{title}; {config.parallel_plan.mesh}; {self.corpus.summary}")
            if isinstance(config, FinetuneConfig):
                progress.note(self.trainer.share_text())
            for note in self.notes:
                progress.note(note)
            if first == total:
                progress.note(
                    f"this run is complete: {total} of {total} steps are done. Raise train.steps to go on, or train "
                    "anew with --resume never"
                )
                self._finish(None, progress)
                return
            if first:
                progress.note(f"resumed after step {first}")
            if _is_first():
                self._keep_beside()
            meter = Meter(total, config.tokens_per_step, estimate.run_flops_per_token(config), peak.flops_per_second)
            tokens = config.tokens_per_step
            asked = config.log if _is_first() else LogConfig(jsonl=False, tensorboard=False, plot=False)
            with RunLog(self.folder, asked, title=title, tokens_per_step=tokens, resume_step=first or None) as log:
                if config.samples.is_shown_before and not first:
                    self._show_sample(0, log, progress)
                self._loop(first, stop, resume_command, meter, log, progress)
                self._finish(log, progress)

    def _loop(
        self,
        first: int,
        stop: StopRequest,
        resume_command: list[str],
        meter: Meter,
        log: RunLog,
        progress: ProgressDisplay,
    ) -> None:
        config, total = self.config, self.config.train.steps
        waiting: _Waiting | None = None
        batches = training_batches(self.loader)
        for step in range(first + 1, total + 1):
            watchdog.step(step)
            with watchdog.phase("data"):
                batch = next(batches)
            watchdog.step(step, batch=f"of samples {ids_text(batch.ids)}")
            faults.point("train.step", step)
            _inject_nan(step, self.trainer)
            _inject_flip(step, self.trainer)
            self.store.check()
            learning_rate = self.trainer.schedule.last_lr
            if step == first + config.profile.start and config.profile.steps:
                self._begin_recording(progress)
            self.check(batch, config.dimensions, f"step {step}")
            if self.roll_out is not None:
                batch = self.roll_out(batch, step)
            is_anew = step == first + 1
            slow = told_if_slow(_IS_COMPILED, progress.note) if is_anew else contextlib.nullcontext()
            with slow, _disturbed(step, self.trainer):
                result = self.trainer.step(batch.inputs, batch.labels)
            # one step behind, so that the host reads a result while the devices work on the next
            self._check_result(waiting, log, progress)
            waiting = _Waiting(step, batch, result)
            if self.recorder is not None:
                self.recorder.end_step()
                if step == min(first + config.profile.start + config.profile.steps - 1, total):
                    with meter.paused(), watchdog.phase("trace"):
                        self._write_recording(progress)
            # asked once: a signal may come between any two lines
            is_stopping = watchdog.stop_requested_anywhere(step, here=stop.requested)
            is_logged = step % config.log.interval == 0 or step in (1, total)
            is_validated = config.log.validation_interval and step % config.log.validation_interval == 0
            is_saved = step == total or (config.checkpoint.interval and step % config.checkpoint.interval == 0)
            if is_logged or is_validated or is_saved or is_stopping or is_anew:
                self._check_result(waiting, log, progress)
                waiting = None
            if is_logged or is_anew:
                assert result.grad_norm is not None  # this run halts, so its step looks at the norm
                reading = meter.read(
                    step,
                    loss=float(result.loss),
                    learning_rate=learning_rate,
                    grad_norm=float(result.grad_norm),
                    memory_bytes=bytes_in_use(jax.local_devices()),
                )
                progress.show(reading)
                if is_logged:  # the log of a resumed run has the same steps as that of one that never stopped
                    log.train(step, reading.as_dict() | self.trainer.expert_loads() | told(result))
            if is_validated:
                with meter.paused(), watchdog.phase("validation"):
                    value = self._validate()
                log.validation(step, {"loss": value})
                progress.note(f"step {step}: validation loss {value:.4f}")
            interval = config.train.replica_interval
            if interval and (step % interval == 0 or step == total):  # before what differs is saved
                with meter.paused(), watchdog.phase("replicas"):
                    check_replicas(self.trainer.arrays(), step)
            if is_saved or is_stopping:
                with meter.paused(), watchdog.phase("checkpoint"):
                    self._save(step)
            if is_stopping:
                self.store.wait()
                watchdog.idle()
                stop.leave(step, resume_command if jax.process_count() == 1 else [])
        self.store.wait()
        watchdog.idle()

    def _check_result(self, waiting: _Waiting | None, log: RunLog, progress: ProgressDisplay) -> None:
        """Raise NumericsError for a step that ends the run; say which were left out or scaled down."""
        if waiting is None:
            return
        step, batch, result = waiting
        assert result.grad_norm is not None  # this run's policy looks at the norm
        loss, norm = float(result.loss), float(result.grad_norm)
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if not is_finite and self.config.train.non_finite == "halt":
            self._halt(waiting, loss, norm)
        is_skipped = bool(result.skipped)
        self.skipped = self.skipped + 1 if is_skipped else 0
        if not is_skipped and (result.spike is None or not bool(result.spike)):
            return
        what = f"loss {loss:.4g}, gradient norm {norm:.4g}: {'a spike' if is_finite else 'not finite'}"
        done = f"the update was left out, {self.skipped} in a row" if is_skipped else "its gradients were scaled down"
        progress.note(f"step {step}: {what}; {done}; samples {ids_text(batch.ids)}")
        event = {"loss": loss, "grad_norm": norm, "skipped_in_a_row": self.skipped, "samples": ids_text(batch.ids)}
        log.event("spike" if is_finite else "not_finite", step, event)
        if self.skipped > self.config.train.max_skipped:
            self._halt(waiting, loss, norm)

    def _halt(self, waiting: _Waiting, loss: float, norm: float) -> NoReturn:
        step, batch, result = waiting
        assert result.key is not None
        found = self.trainer.first_bad_tensor(batch.inputs, batch.labels, result.key)
        first = f"the first tensor that is not finite is the {found}" if found else "computed again it is finite"
        self.store.wait()  # a save under way renames and deletes steps; look when it is done
        saved = self.store.latest_step()
        if self.skipped:
            first += (
                f"; {self.skipped} steps in a row were left out (train.max_skipped={self.config.train.max_skipped})"
            )
        kept = "nothing was saved yet" if saved is None else f"the checkpoint of step {saved} is the last one"
        raise NumericsError(
            f"step {step}: loss {loss}, gradient norm {norm}; {first}; samples {ids_text(batch.ids)}. The update was "
            f"left out; {kept}. Lower train.learning_rate, set train.clip_norm, or look at those samples"
        )

    def _begin_recording(self, progress: ProgressDisplay) -> None:
        steps = self.config.profile.steps
        progress.note(f"recording {steps} steps, which take longer by it")
        self.recorder = StepRecorder(steps)
        self.recorder.begin()

    def _write_recording(self, progress: ProgressDisplay) -> None:
        assert self.recorder is not None
        trace, note, self.recorder = self.recorder.finish(), self.recorder.note, None
        if trace is not None:
            for line in write_trace(trace, self.folder / "profile"):
                progress.note(line)
            progress.note(f"recorded: {self.folder / 'profile'}{f' ({note})' if note else ''}")

    def _validate(self) -> float:
        size = self.config.train.global_batch
        count = min(self.config.log.validation_batches, len(self.validation) // size)
        losses = []
        for i in range(count):
            batch = gather(self.validation, range(i * size, (i + 1) * size))
            self.check(batch, self.config.dimensions, f"validation batch {i}")
            losses.append(self.trainer.evaluate(batch.inputs, batch.labels))
        return float(np.mean(losses))

    def _save(self, step: int, *, blocking: bool = False) -> None:
        meta: dict[str, Any] = {
            "config": flatten(self.config),
            "data": self.loader.state_dict(),
            "host": {"data_digest": self.corpus.digest, "skipped": self.skipped, **self.trainer.host_state()},
        }
        if self.base_digest is not None:
            meta["host"]["base_digest"] = self.base_digest
        self.store.wait()  # a save under way renames and deletes steps; look when it is done
        known = self.store.latest_step()
        self.store.save(
            step,
            self.trainer.arrays(),
            meta,
            blocking=blocking or not self.config.checkpoint.async_save,
            overwrite=known is not None and known >= step,
        )

    def _keep_beside(self) -> None:
        """Beside the checkpoints what generate needs of the data, and the model's config."""
        if self.corpus.tokenizer is not None:
            self.corpus.keep_tokenizer(self.folder)
        if isinstance(self.config, FinetuneConfig):
            keep_config(self.trainer.model, self.folder)

    def _show_sample(self, step: int, log: RunLog | None, progress: ProgressDisplay) -> None:
        """Show the text that the model writes after the prompt."""
        config, sample = self.config, self.config.samples.sample
        if config.log.sample_tokens and self.corpus.tokenizer is not None and sample is not None:
            text = sample.load()(self.corpus, self.trainer.model, config, self.trainer.logits)
            if log is not None:
                log.event("sample", step, {"text": text})
            progress.note(f"sample: {text}")

    def _finish(self, log: RunLog | None, progress: ProgressDisplay) -> None:
        config = self.config
        self._show_sample(config.train.steps, log, progress)
        names = []
        if isinstance(config, FinetuneConfig) and config.fine_tuning == "lora" and jax.process_count() == 1:
            write_adapter(self.trainer.model, self.folder / "adapter", base=config.model, digest=self.base_digest)
            if self.corpus.tokenizer is not None:
                self.corpus.keep_tokenizer(self.folder / "adapter")
            names = ["adapter/"]
        written = {
            "metrics.jsonl": config.log.jsonl,
            "tensorboard/": config.log.tensorboard,
            "loss.png": config.log.plot,
        }
        names = [*(name for name, is_on in written.items() if is_on), "checkpoints/", *names]
        progress.note(f"run saved in {self.folder}: {', '.join(names)}")


@contextlib.contextmanager
def _disturbed(step: int, trainer: Trainer) -> Iterator[None]:
    """FAULTS="train.nan_once:raise@7" makes a parameter NaN in step 7, train.spike a thousand times as large."""
    for name, factor in (("train.nan_once", math.nan), ("train.spike", 1000.0)):
        try:
            faults.point(name, step)
        except faults.FaultInjected:
            with trainer.disturbed(factor):
                yield
            return
    yield


def _inject_nan(step: int, trainer: Trainer) -> None:
    """FAULTS="train.nan:raise@7" makes a parameter NaN before step 7."""
    try:
        faults.point("train.nan", step)
    except faults.FaultInjected:
        trainer.poison()


def _inject_flip(step: int, trainer: Trainer) -> None:
    """FAULTS="train.flip:raise@7" flips a bit of one device's copy of a parameter before step 7."""
    try:
        faults.point("train.flip", step)
    except faults.FaultInjected:
        trainer.flip()
