"""Model: a network with its loss, optimizer and metrics, trained, evaluated and used by one call each."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError, DataError, ProgramError
from polyreme.export.save import save as save_for_inference
from polyreme.hapi.callback import Callback, CallbackList
from polyreme.hapi.data import (
    as_loader,
    as_specs,
    as_tensors,
    check_count,
    length_of,
    needed_arguments,
    samples_in,
    two_sizes,
)
from polyreme.hapi.health import TrainingWatch, non_finite_of
from polyreme.hapi.input_spec import InputSpec
from polyreme.hapi.progress_bar import ProgBarLogger
from polyreme.hapi.results import Results, metric_names, update_metrics
from polyreme.hapi.schedule_callbacks import LRScheduler, ModelCheckpoint
from polyreme.hapi.step import Steps, as_list, precision_of
from polyreme.io.serialization import load, save
from polyreme.metric.metrics import Metric
from polyreme.nn import Layer
from polyreme.nn.summary import summary
from polyreme.training import FULL_PRECISION, Microbatch


class Model:
    """A network ready for fit, evaluate and predict.

    inputs, labels: InputSpec, or a list of them. A batch of data is split into inputs and labels by their number;
    without inputs, by the number of arguments forward needs. Each batch runs as one captured program; a network that
    cannot be captured runs eagerly, and the reason is logged.

    >>> from polyreme.nn import CrossEntropyLoss, Linear
    >>> from polyreme.optimizer import Adam
    >>> network = Linear(2, 2)
    >>> model = Model(network)
    >>> model.prepare(Adam(0.1, parameters=network.parameters()), CrossEntropyLoss())
    >>> points = np.array([[0, 1], [1, 0]], "float32")
    >>> losses = [model.train_batch([points], [np.array([0, 1])])[0] for _ in range(30)]
    >>> bool(losses[-1] < losses[0])
    True
    """

    stop_training: bool

    def __init__(self, network: Layer, inputs: Any = None, labels: Any = None) -> None:
        if not isinstance(network, Layer):
            raise ConfigError(f"Model: network is a {type(network).__name__}; give a Layer")
        self.network = network
        self._inputs, self._labels = as_specs("inputs", inputs), as_specs("labels", labels)
        self._seen: list[InputSpec] = []
        self.optimizer: Any = None
        self.stop_training = False
        self._metrics: list[Metric] = []
        self._steps = Steps(network, None, None, FULL_PRECISION)

    def prepare(
        self,
        optimizer: Any = None,
        loss: Callable[..., Any] | None = None,
        metrics: Any = None,
        amp_configs: Any = None,
        non_finite: str | None = None,
    ) -> None:
        """Sets what training and evaluation need.

        loss: called as loss(*outputs, *labels), gives one number, or several to be added. amp_configs: "O1", "O2", or a
        dict with "level" and settings of auto_cast and GradScaler. non_finite: what training does with a batch whose
        loss or gradients are not finite: "halt" (the default) changes nothing and raises NumericsError, or DataError
        where an id or label is out of range; "skip" leaves the update out, and raises after more than 10 in a row;
        "apply" updates, as does a loss scaler, which looks by itself, and an optimizer without step(skip=). Raises
        ConfigError for anything of another kind.
        """
        for name, value in (("optimizer", optimizer), ("loss", loss)):
            if isinstance(value, type):
                raise ConfigError(f"Model.prepare: {name} is the class {value.__name__}; write {value.__name__}(...)")
        if loss is not None and not callable(loss):
            raise ConfigError(f"Model.prepare: loss is a {type(loss).__name__}; give a Layer or a function")
        self._metrics = as_list(metrics)
        for metric in self._metrics:
            if not isinstance(metric, Metric):
                raise ConfigError(f"Model.prepare: metrics holds a {type(metric).__name__}; give instances of Metric")
        precision = precision_of(amp_configs)
        precision.decorate(self.network, optimizer)
        self.optimizer = optimizer
        scales = precision.is_on and precision.scaler is not None
        self._steps = Steps(self.network, loss, optimizer, precision, non_finite_of(non_finite, optimizer, scales))

    @property
    def is_captured(self) -> dict[str, bool]:
        """For "train", "evaluate" and "predict", whether that step runs as a captured program."""
        return self._steps.is_captured

    def parameters(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The network's parameters."""
        return self.network.parameters(*args, **kwargs)

    # one batch

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:
        """Trains on one batch; -> [losses], or with metrics ([losses], [metrics of this batch]).

        update=False only adds up gradients. Losses are float32 ndarrays.
        """
        self._need("train_batch", optimizer=True)
        _need_values("train_batch")
        self.network.train()
        given, wanted = self._check_batch(inputs, labels)
        [part] = self._steps.train(_as_microbatches(given, wanted), update, bool(self._metrics))
        watch = TrainingWatch("Model.train_batch", self._steps, lambda _: None)
        watch.note(0, 0, given, wanted)
        watch.check()
        return self._batch_result(part, wanted)

    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """Evaluates one batch; returns as train_batch does."""
        _need_values("eval_batch")
        self.network.eval()
        given, wanted = self._check_batch(inputs, labels)
        [part] = self._steps.evaluate(_as_microbatches(given, wanted), bool(self._metrics))
        return self._batch_result(part, wanted)

    def predict_batch(self, inputs: Any) -> list[np.ndarray]:
        """The outputs for one batch, as ndarrays."""
        _need_values("predict_batch")
        self.network.eval()
        given, _ = self._check_batch(inputs, None)
        return self._predict(given)

    def _predict(self, inputs: list[Tensor]) -> list[np.ndarray]:
        [(_, outputs)] = self._steps.predict(_as_microbatches(inputs, []))
        return [out.numpy() for out in outputs]

    def _batch_result(self, part: tuple[list, list], labels: list) -> Any:
        losses, outputs = part
        values = [loss.numpy() for loss in losses]
        return (values, update_metrics(self._metrics, outputs, labels)) if self._metrics else values

    # whole data sets

    def fit(
        self,
        train_data: Any = None,
        eval_data: Any = None,
        batch_size: int | Sequence[int] = 1,
        epochs: int = 1,
        eval_freq: int = 1,
        log_freq: int = 10,
        save_dir: str | None = None,
        save_freq: int = 1,
        verbose: int = 2,
        drop_last: bool = False,
        shuffle: bool = True,
        num_workers: int = 0,
        callbacks: Any = None,
        accumulate_grad_batches: int = 1,
        num_iters: int | None = None,
    ) -> None:
        """Trains for epochs, or for num_iters batches if given, evaluating and saving after epochs 0, freq, 2 freq, ...

        train_data, eval_data: a Dataset or a DataLoader; of a Dataset batch_size samples a batch (or [train, eval]).
        accumulate_grad_batches: the optimizer steps once in so many batches, on the sum of their gradients.
        """
        self._need("fit", optimizer=True)
        if train_data is None:
            raise ConfigError("Model.fit: train_data is None; give a Dataset or a DataLoader")
        counts = {"epochs": epochs, "eval_freq": eval_freq, "accumulate_grad_batches": accumulate_grad_batches}
        for name, value in (counts | {"num_iters": 1 if num_iters is None else num_iters}).items():
            check_count("fit", name, value)
        train_size, eval_size = two_sizes(batch_size)
        loader = as_loader(train_data, train_size, shuffle, drop_last, num_workers)
        steps = length_of(loader)
        if num_iters is not None:
            epochs = math.ceil(num_iters / steps) if steps else num_iters
        params = {"epochs": epochs, "steps": steps, "verbose": verbose, "metrics": self._names(), "save_dir": save_dir,
                  "log_freq": log_freq, "save_freq": save_freq, "batch_size": train_size}  # fmt: skip
        every = self._callbacks(callbacks, params, ModelCheckpoint(save_freq, save_dir))
        self.stop_training = False
        watch = TrainingWatch("Model.fit", self._steps, getattr(loader, "samples_of", lambda _: None))
        left = math.inf if num_iters is None else num_iters
        with closing(every):
            every.on_begin("train")
            logs: dict[str, Any] = {}
            for epoch in range(epochs):
                every.on_epoch_begin(epoch)
                logs, done = self._train_epoch(epoch, loader, every, watch, accumulate_grad_batches, left)
                left -= done
                every.on_epoch_end(epoch, logs)
                if eval_data is not None and epoch % eval_freq == 0:
                    self._evaluate(as_loader(eval_data, eval_size, False, False, num_workers), every, None)
                if self.stop_training or left <= 0:
                    break
            every.on_end("train", logs)

    def evaluate(
        self,
        eval_data: Any,
        batch_size: int = 1,
        log_freq: int = 10,
        verbose: int = 2,
        num_workers: int = 0,
        callbacks: Any = None,
        num_iters: int | None = None,
    ) -> dict[str, Any]:
        """-> {"loss": [mean over all samples], metric name: value}; num_iters: use only so many batches."""
        check_count("evaluate", "num_iters", 1 if num_iters is None else num_iters)
        loader = as_loader(eval_data, batch_size, False, False, num_workers)
        params = {"verbose": verbose, "metrics": self._names(), "log_freq": log_freq, "steps": length_of(loader)}
        every = self._callbacks(callbacks, params)
        with closing(every):
            return self._evaluate(loader, every, num_iters)

    def predict(
        self,
        test_data: Any,
        batch_size: int = 1,
        num_workers: int = 0,
        stack_outputs: bool = False,
        verbose: int = 1,
        callbacks: Any = None,
    ) -> list[Any]:
        """For each output a list of ndarrays, one a batch; with stack_outputs one ndarray over all samples."""
        loader = as_loader(test_data, batch_size, False, False, num_workers)
        steps = length_of(loader)
        every = self._callbacks(callbacks, {"verbose": verbose, "log_freq": 1, "steps": steps, "metrics": []})
        self.network.eval()
        batches = []
        with closing(every):
            every.on_begin("predict", {"steps": steps})
            logs: dict[str, Any] = {}
            for step, batch in enumerate(loader):
                every.on_batch_begin("predict", step, logs)
                inputs, _ = self._check_batch(self._split(batch)[0], None)
                batches.append(self._predict(inputs))
                logs = {"step": step, "batch_size": samples_in(inputs)}
                every.on_batch_end("predict", step, logs)
            every.on_end("predict", logs)
        outputs = [list(out) for out in zip(*batches, strict=True)]
        return [np.concatenate(out) for out in outputs] if stack_outputs else outputs

    def _train_epoch(
        self, epoch: int, loader: Any, every: CallbackList, watch: TrainingWatch, accumulate: int, left: float
    ) -> tuple[dict, int]:
        results, steps, logs, done = Results(self._metrics, averages=False), length_of(loader), {}, 0
        for step, batch in enumerate(loader):
            every.on_batch_begin("train", step, logs)
            # an evaluation inside a callback may have left eval mode on
            self.network.train()
            inputs, labels = self._check_batch(*self._split(batch))
            done += 1
            update = done % accumulate == 0 or done in (steps, left)
            [(losses, outputs)] = self._steps.train(_as_microbatches(inputs, labels), update, bool(self._metrics))
            watch.note(epoch, step, inputs, labels)
            results.add(outputs, labels, losses, samples_in(inputs))
            # the last step's results are those of the epoch
            if every.needs_logs("train", step) or done in (steps, left):
                watch.check()
                logs = results.logs()
            logs = {**logs, "step": step, "batch_size": samples_in(inputs)}
            every.on_batch_end("train", step, logs)
            if self.stop_training or done == left:
                break
        watch.check()
        if not done:
            raise DataError("Model.fit: train_data gave no batch; check its length, batch_size and drop_last")
        return {**logs, **results.logs()}, done

    def _evaluate(self, loader: Any, every: CallbackList, num_iters: int | None) -> dict[str, Any]:
        self.network.eval()
        results, steps, logs = Results(self._metrics, averages=True), length_of(loader), {}
        steps = steps if num_iters is None else min(num_iters, steps or num_iters)
        every.on_begin("eval", {"steps": steps, "metrics": self._names()})
        for step, batch in enumerate(loader):
            if step == num_iters:
                break
            every.on_batch_begin("eval", step, logs)
            inputs, labels = self._check_batch(*self._split(batch))
            [(losses, outputs)] = self._steps.evaluate(_as_microbatches(inputs, labels), bool(self._metrics))
            results.add(outputs, labels, losses, samples_in(inputs))
            if every.needs_logs("eval", step):
                logs = results.logs()
            logs = {**logs, "step": step, "batch_size": samples_in(inputs)}
            every.on_batch_end("eval", step, logs)
        found = results.logs()
        if not results.samples:
            raise DataError("Model: the evaluation data gave no batch; check its length and batch_size")
        every.on_end("eval", {**logs, **found})
        return found

    # saving

    def save(self, path: str | os.PathLike[str], training: bool = True) -> None:
        """Writes PATH.pdparams, and PATH.pdopt with the optimizer's state if there is one; with training=False an
        artefact for inference instead, as jit.save does.

        It takes the inputs that Model was given; without them, what the first batch seen had, in any number of rows.
        Raises ConfigError for training=False if there is neither: the shapes to export for.
        """
        target = Path(path)
        if not target.name or str(path).endswith(("/", os.sep)):
            raise ConfigError(f"Model.save: path={str(path)!r} names a folder; give FOLDER/NAME")
        if not training:
            specs = self._inputs or self._seen
            if not specs:
                raise ConfigError(
                    "Model.save: training=False exports for inference, which needs the inputs' shapes; give them to "
                    "Model(network, inputs=[InputSpec([None, 4], 'float32')]), or train, evaluate or predict first"
                )
            save_for_inference(self.network, path, specs)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        save(self.network.state_dict(), f"{target}.pdparams")
        if self.optimizer is not None:
            save(self.optimizer.state_dict(), f"{target}.pdopt")

    def load(self, path: str | os.PathLike[str], skip_mismatch: bool = False, reset_optimizer: bool = False) -> None:
        """Reads PATH.pdparams, and PATH.pdopt unless reset_optimizer is True or there is none.

        Raises CheckpointError, loading nothing, for names that are missing or shapes that do not fit; with
        skip_mismatch these are left as they are, with a warning.
        """
        base = str(path).removesuffix(".pdparams")
        loaded = load(f"{base}.pdparams")
        mine = self.network.state_dict()
        wrong = [_mismatch(name, tensor, loaded.get(name)) for name, tensor in mine.items()]
        wrong = [w for w in wrong if w]
        if wrong and not skip_mismatch:
            raise CheckpointError(
                f"Model.load: {base}.pdparams does not fit the network: {'; '.join(wrong[:10])}; "
                "load the right file, or give skip_mismatch=True to keep these as they are"
            )
        for reason in wrong:
            warnings.warn(f"Model.load skips {reason}", stacklevel=2)
        self.network.set_state_dict({n: v for n, v in loaded.items() if n in mine and not _mismatch(n, mine[n], v)})
        if self.optimizer is not None and not reset_optimizer and Path(f"{base}.pdopt").exists():
            self.optimizer.set_state_dict(load(f"{base}.pdopt"))

    def summary(self, input_size: Any = None, dtype: Any = None) -> dict[str, int]:
        """Prints the network's layers; input_size defaults to the inputs given to Model. See polyreme.summary."""
        return summary(self.network, input_size if input_size is not None else self._inputs or None, dtype)

    # data

    def _split(self, batch: Any) -> tuple[list, list]:
        parts = as_list(batch)
        count = min(len(self._inputs) or needed_arguments(self.network), len(parts))
        return parts[:count], parts[count:]

    def _check_batch(self, inputs: Any, labels: Any) -> tuple[list[Tensor], list[Tensor]]:
        given = as_tensors("input", inputs, self._inputs)
        self._seen = self._seen or [InputSpec([None, *t.shape[1:]][: len(t.shape)], t.dtype) for t in given]
        return given, as_tensors("label", labels, self._labels)

    def _names(self) -> list[str]:
        return [*(["loss"] if self._steps.loss is not None else []), *metric_names(self._metrics)]

    def _callbacks(self, given: Any, params: dict[str, Any], *more: Callback) -> CallbackList:
        return callbacks_of(self, given, params, *more)

    def _need(self, what: str, optimizer: bool) -> None:
        if self._steps.loss is None or (optimizer and self.optimizer is None):
            raise ConfigError(f"Model.{what}: no loss or no optimizer is set; call prepare(optimizer, loss) first")


def callbacks_of(owner: Any, given: Any, params: dict[str, Any], *more: Callback) -> CallbackList:
    """The callbacks of a run: those given, and each default one (a progress bar, the schedule's steps, and more) of
    whose class none is given; bound to their owner, with the settings params of its run."""
    mine = as_list(given)
    kinds = tuple(type(c) for c in mine)
    every = [] if any(issubclass(k, ProgBarLogger) for k in kinds) else [
        ProgBarLogger(params["log_freq"], params["verbose"])
    ]  # fmt: skip
    every += mine
    every += [c for c in (LRScheduler(), *more) if not any(issubclass(k, type(c)) for k in kinds)]
    for callback in every:
        if isinstance(callback, ModelCheckpoint) and callback.save_dir is None:
            callback.save_dir = params.get("save_dir")
    return CallbackList(every).bind(owner, params)


@contextmanager
def closing(callbacks: CallbackList) -> Iterator[None]:
    """Leaves no live bar on the terminal when a run ends, by an error or by ctrl-C too."""
    try:
        yield
    finally:
        for callback in callbacks:
            if isinstance(callback, ProgBarLogger):
                callback.close()


def _as_microbatches(inputs: list[Tensor], labels: list[Tensor]) -> list[Microbatch]:
    """A batch in one piece."""
    return [Microbatch(inputs, labels, samples_in(inputs))]


def _mismatch(name: str, mine: Tensor, given: Any) -> str:
    if given is None:
        return f"{name}: not in the file"
    if list(given.shape) != list(mine.shape):
        return f"{name}: shape {list(given.shape)} in the file, {list(mine.shape)} in the network"
    return ""


def _need_values(what: str) -> None:
    """Raise ProgramError in static mode, where nothing has a value."""
    if state.recording():
        raise ProgramError(
            f"Model.{what} runs imperative code, and static mode only records it; call disable_static() before the "
            "network is made, or use static.Executor"
        )
