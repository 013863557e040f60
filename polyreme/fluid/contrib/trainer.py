"""Trainer: a network trained on a reader, with what happens at events said by a function."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.core import unique_name
from polyreme.errors import ConfigError
from polyreme.fluid import io
from polyreme.fluid.data_feeder import DataFeeder
from polyreme.fluid.executor import Executor
from polyreme.program.current import program_guard
from polyreme.program.program import Program
from polyreme.program.scope import Scope, scope_guard
from polyreme.static.compiled import CompiledProgram

_STATE = "trainer.json"


@dataclass
class BeginEpochEvent:
    """An epoch, counted from 0, begins."""

    epoch: int


@dataclass
class EndEpochEvent:
    """An epoch ends."""

    epoch: int


@dataclass
class BeginStepEvent:
    """A minibatch is about to be run. fetch_metrics: whether EndStepEvent is to have the values of the network."""

    epoch: int
    step: int
    fetch_metrics: bool = True


@dataclass
class EndStepEvent:
    """A minibatch was run. metrics: the values of what the network returned."""

    epoch: int
    step: int
    metrics: list[Any]


@dataclass
class CheckpointConfig:
    """When and where Trainer.train saves what it needs to go on: after so many steps, in one of so many epochs.

    Once training has ended the checkpoints are removed, and the folder if nothing else is in it. A Trainer made with a
    folder that has checkpoints goes on from the last one.
    """

    checkpoint_dir: str = "checkpoints"
    max_num_checkpoints: int = 3
    epoch_interval: int = 1
    step_interval: int = 10
    epoch_id: int = field(default=0, init=False)
    step_id: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        counts = (self.max_num_checkpoints, self.epoch_interval, self.step_interval)
        if any(type(n) is not int or n < 1 for n in counts):
            raise ConfigError(
                f"CheckpointConfig: max_num_checkpoints, epoch_interval, step_interval={counts}; give ints above 0"
            )

    def serials(self) -> list[Path]:
        """The checkpoints there are, the latest last."""
        folders = Path(self.checkpoint_dir).glob("checkpoint_*")
        return sorted((f for f in folders if (f / _STATE).exists()), key=lambda f: int(f.name.rpartition("_")[2]))

    def remove(self) -> None:
        """Delete the checkpoints, and their folder if that leaves it empty."""
        for folder in self.serials():
            shutil.rmtree(folder)
        directory = Path(self.checkpoint_dir)
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


class Trainer:
    """Trains what train_func builds; it returns the loss, or a list of it and what else is to be measured.

    optimizer_func makes the optimizer. param_path: where parameters to begin with were saved. parallel: split
    minibatches over all devices. checkpoint_config: see CheckpointConfig.
    """

    def __init__(
        self, train_func: Callable[[], Any], optimizer_func: Callable[[], Any], param_path: str | None = None,
        place: Any = None, parallel: bool = False, checkpoint_config: CheckpointConfig | None = None,
    ) -> None:  # fmt: skip
        if checkpoint_config is not None and not isinstance(checkpoint_config, CheckpointConfig):
            raise TypeError(f"Trainer: checkpoint_config is a CheckpointConfig, got {checkpoint_config!r}")
        self.checkpoint_cfg = checkpoint_config
        self.scope, self.exe = Scope(), Executor(place)
        self.train_program, self.startup_program = Program(), Program()
        self._stopped = False
        with program_guard(self.train_program, self.startup_program), unique_name.guard():
            outputs = train_func()
            self.train_func_outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
            self.test_program = self.train_program.clone(for_test=True)
            loss = self.train_func_outputs[0]
            optimizer_func().minimize(loss)
        compiled = CompiledProgram(self.train_program)
        self._runs: Any = compiled.with_data_parallel(loss_name=loss.name) if parallel else self.train_program
        with self._in_scope():
            self.exe.run(self.startup_program)
            if param_path is not None:
                io.load_persistables(self.exe, param_path, self.train_program)
            self._load_checkpoint()

    @contextmanager
    def _in_scope(self) -> Iterator[None]:
        with program_guard(self.train_program, self.startup_program), scope_guard(self.scope):
            yield

    def stop(self) -> None:
        """End train() after this step."""
        self._stopped = True

    def train(
        self, num_epochs: int, event_handler: Callable[[Any], None], reader: Any = None,
        feed_order: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Run every minibatch of reader() in num_epochs epochs, and tell event_handler.

        feed_order: the names of the data, as the parts of a sample stand in; the order of their making if None. Raises
        ConfigError without a reader.
        """
        if not callable(reader):
            raise ConfigError(
                f"Trainer.train: reader={reader!r}; give a function that returns an iterable of minibatches"
            )
        first = (0, 0) if self.checkpoint_cfg is None else (self.checkpoint_cfg.epoch_id, self.checkpoint_cfg.step_id)
        self._stopped = False
        with self._in_scope():
            feeder = DataFeeder(_names(self.train_program, feed_order), self.exe.place or "cpu", self.train_program)
            for epoch in range(first[0], num_epochs):
                event_handler(BeginEpochEvent(epoch))
                for step, samples in enumerate(reader()):
                    if (epoch, step) < first:
                        continue
                    if self._stopped:
                        return
                    begin = BeginStepEvent(epoch, step)
                    event_handler(begin)
                    asked = self.train_func_outputs if begin.fetch_metrics else []
                    metrics = self.exe.run(self._runs, feed=feeder.feed(samples), fetch_list=asked, return_numpy=False)
                    self._save_checkpoint(epoch, step)
                    event_handler(EndStepEvent(epoch, step, [np.asarray(m) for m in metrics]))
                event_handler(EndEpochEvent(epoch))
        if self.checkpoint_cfg is not None and not self._stopped:
            self.checkpoint_cfg.remove()

    def test(self, reader: Any, feed_order: Sequence[str] | None = None) -> list[float]:
        """The mean over minibatches of each value that the network returned, in evaluation."""
        with self._in_scope():
            feeder = DataFeeder(_names(self.test_program, feed_order), self.exe.place or "cpu", self.test_program)
            values = [[np.mean(value) for value in self._measured(feeder.feed(samples))] for samples in reader()]
        return [float(mean) for mean in np.mean(values, 0)]

    def _measured(self, feed: dict[str, Any]) -> list[Any]:
        return self.exe.run(self.test_program, feed=feed, fetch_list=self.train_func_outputs, return_numpy=False)

    def save_params(self, param_path: str) -> None:
        """Save all that outlives a run."""
        with self._in_scope():
            io.save_persistables(self.exe, param_path, self.train_program)

    def save_inference_model(
        self, param_path: str, feeded_var_names: Sequence[str], target_var_indexes: Sequence[int]
    ) -> None:
        """Save a model of these data and of the returned values with these indices."""
        with self._in_scope():
            targets = [self.train_func_outputs[i] for i in target_var_indexes]
            io.save_inference_model(param_path, list(feeded_var_names), targets, self.exe, self.train_program)

    def _save_checkpoint(self, epoch: int, step: int) -> None:
        config = self.checkpoint_cfg
        if config is None or epoch % config.epoch_interval or step % config.step_interval:
            return
        before = config.serials()
        number = int(before[-1].name.rpartition("_")[2]) + 1 if before else 0
        folder = Path(config.checkpoint_dir) / f"checkpoint_{number}"
        io.save_persistables(self.exe, str(folder), self.train_program)
        (folder / _STATE).write_text(json.dumps({"epoch": epoch, "step": step + 1}))  # last: it says that all is there
        for old in config.serials()[: -config.max_num_checkpoints]:
            shutil.rmtree(old)

    def _load_checkpoint(self) -> None:
        config = self.checkpoint_cfg
        if config is None or not (serials := config.serials()):
            return
        io.load_persistables(self.exe, str(serials[-1]), self.train_program)
        place = json.loads((serials[-1] / _STATE).read_text())
        config.epoch_id, config.step_id = int(place["epoch"]), int(place["step"])


def _names(program: Program, feed_order: Sequence[str] | None) -> list[Any]:
    """The data of a Program, in this order."""
    block = program.global_block()
    if feed_order is None:
        return [v for v in block.vars.values() if getattr(v, "is_data", False) and "@" not in v.name]
    return [block.var(name) for name in feed_order]


__all__ = [
    "BeginEpochEvent", "BeginStepEvent", "CheckpointConfig", "EndEpochEvent", "EndStepEvent", "Trainer",
]  # fmt: skip
