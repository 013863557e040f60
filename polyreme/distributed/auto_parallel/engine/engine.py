"""Engine: single-card code trained, evaluated and used over all devices by one call each."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from polyreme.distributed.auto_parallel.engine import data as data_of
from polyreme.distributed.auto_parallel.engine.cost import cost_of
from polyreme.distributed.auto_parallel.engine.data import EngineLoader, History
from polyreme.distributed.auto_parallel.engine.dist_model import (
    DistModel,
    as_spec,
    check_arguments,
    check_metrics,
    check_mode,
    inner_optimizer,
)
from polyreme.distributed.auto_parallel.engine.files import load_training, save_training
from polyreme.distributed.auto_parallel.engine.placement import TrainingBatch, plan_of
from polyreme.distributed.auto_parallel.engine.strategy import Strategy, settle
from polyreme.distributed.auto_parallel.layers.annotate import fetched
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DataError, ProgramError
from polyreme.export.save import save as save_for_inference
from polyreme.hapi.callback import CallbackList
from polyreme.hapi.data import as_tensors, samples_in
from polyreme.hapi.input_spec import InputSpec
from polyreme.hapi.model import callbacks_of, closing
from polyreme.hapi.results import Results, metric_names, metric_values, update_metrics
from polyreme.hapi.schedule_callbacks import ModelCheckpoint
from polyreme.hapi.step import as_list
from polyreme.io import DataLoader
from polyreme.jit.structure import flatten, rebuild
from polyreme.mesh import Plan
from polyreme.metric.metrics import Metric
from polyreme.planner import Cluster, Prediction

Logs = dict[str, Any]


class Engine:
    """A model with its loss, optimizer and metrics over all devices: fit, evaluate, predict, or run a batch at a time.

    model: an ordinary Layer; what of it is marked (shard_tensor, shard_layer, parallelize) stays as it is marked, an
    unmarked one is data parallel over the devices of the global mesh, or all. loss: called as loss(*outputs, *labels);
    gives one number, or several to be added. metrics: of polyreme.metric, one or a list. cluster: a planner.Cluster,
    for cost() and strategy="auto" (by default this machine's). strategy: an auto_parallel.Strategy, or "auto": the
    planner chooses. Batches are global, and every sample counts: one whose rows the devices do not divide is computed
    whole by each of them. The model is moved to the devices by prepare(), or with the first batch.

    Raises TypeError and ConfigError for arguments of other kinds, ConfigError for settings that cannot be honoured.

    >>> from polyreme.io import TensorDataset
    >>> from polyreme.nn import Linear, MSELoss
    >>> from polyreme.optimizer import SGD
    >>> layer, x = Linear(2, 1), Tensor([[0.0, 1.0], [1.0, 0.0]] * 8)
    >>> engine = Engine(layer, MSELoss(), SGD(0.1, parameters=layer.parameters()))
    >>> history = engine.fit(TensorDataset([x, x.sum(1, keepdim=True)]), batch_size=8, epochs=3, verbose=0)
    >>> history.history["loss"][-1] < history.history["loss"][0]
    True
    """

    stop_training: bool

    def __init__(
        self,
        model: Any = None,
        loss: Callable[..., Any] | None = None,
        optimizer: Any = None,
        metrics: Any = None,
        cluster: Any = None,
        strategy: Strategy | str | None = None,
    ) -> None:
        check_arguments("Engine", model, loss, optimizer)
        if cluster is not None and not isinstance(cluster, Cluster):
            raise TypeError(f"Engine: cluster is a planner.Cluster, got {type(cluster).__name__}")
        self._settled = settle(strategy)
        self._strategy = copy.deepcopy(strategy)
        self._network, self._loss, self._optimizer = model, loss, optimizer
        self._metrics: list[Metric] = check_metrics(metrics)
        self._cluster = cluster
        self._job: DistModel | None = None
        self._specs: tuple[list[InputSpec], list[InputSpec]] = ([], [])
        self._argument_specs = self._specs
        self._split: int | None = None
        self._mode = "predict" if loss is None else "eval" if optimizer is None else "train"
        self.stop_training = False
        self.history: History | None = None

    # what there is

    @property
    def model(self) -> DistModel:
        """The model in its place; it is placed now if it was not yet."""
        return self._placed()

    @property
    def plan(self) -> Plan:
        """The Plan in force. Raises ConfigError where the first batch decides it and there was none yet."""
        return self._placed().plan

    @property
    def chosen(self) -> Any:
        """The planner's choice; str() of it is the report. None if the planner was not asked, or not yet."""
        return self._placed().chosen

    @property
    def optimizer(self) -> Any:
        """The optimizer, None without one."""
        return self._optimizer if self._job is None else self._job.optimizer

    @property
    def metrics(self) -> list[Metric]:
        """The metrics."""
        return self._metrics

    @property
    def strategy(self) -> Any:
        """A copy of the strategy that was given."""
        return self._strategy

    @property
    def mode(self) -> str:
        """The mode of run(): "train", "eval" or "predict"."""
        return self._mode

    @property
    def inputs(self) -> list[InputSpec]:
        """Specs of the inputs, as prepare() was given them or the first batch had them."""
        return self._specs[0]

    @property
    def labels(self) -> list[InputSpec]:
        """Specs of the labels."""
        return self._specs[1]

    @property
    def main_program(self) -> Any:
        """The compiled program of the mode's step; as_text() is its HLO."""
        return self.get_dist_main_program(self._mode)

    @property
    def startup_program(self) -> Any:
        """Raises ProgramError: parameters have values as soon as the model is made."""
        return self._placed().dist_startup_program()

    def get_dist_main_program(self, mode: str) -> Any:
        """The compiled program of a mode's step, for batches as last seen."""
        return self._placed().compiled(mode)

    def to_mode(self, mode: str) -> None:
        """Set the mode of run(): "train", "eval" or "predict"."""
        self._mode = check_mode(mode, self._loss, self._optimizer)

    # getting ready

    def prepare(
        self,
        inputs_spec: Any = None,
        labels_spec: Any = None,
        inputs: Any = None,
        labels: Any = None,
        main_program: Any = None,
        startup_program: Any = None,
        mode: str | None = None,
        init_parameters: bool = True,
    ) -> None:
        """Move the model to the devices; with specs of whole shapes, compile the mode's step for them (that of a
        pipeline with the first batch).

        inputs_spec, labels_spec: InputSpec or a list of them, of global batches; those with a name let run() take a
        batch by names. init_parameters changes nothing: parameters have values already. Raises ProgramError for inputs,
        labels and programs of static mode, which an Engine does not take.
        """
        static = {"inputs": inputs, "labels": labels, "main_program": main_program, "startup_program": startup_program}
        given = [name for name, value in static.items() if value is not None]
        if given:
            raise ProgramError(
                f"Engine.prepare: {', '.join(given)} belong to static Programs, which static.Executor runs; give the "
                "model itself, and inputs_spec and labels_spec"
            )
        if inputs_spec is not None:
            self._specs = self._argument_specs = (_as_specs(inputs_spec), _as_specs(labels_spec))
        job = self._placed()
        if mode is not None:
            self.to_mode(mode)
        whole = all(None not in spec.shape for group in self._specs for spec in group)
        if inputs_spec is not None and whole:
            job.prepare(self._mode, self._shapes(self._mode))

    def _shapes(self, mode: str) -> Any:
        inputs, labels = ([(spec.shape, spec.dtype) for spec in group] for group in self._specs)
        return (inputs, [] if mode == "predict" else labels)

    def _placed(self) -> DistModel:
        if self._job is None:
            self._job = DistModel(self._network, None, self._loss, self._optimizer, self._strategy, self._metrics)
            self._job.cluster = self._cluster
        return self._job

    # whole data sets

    def fit(
        self,
        train_data: Any,
        train_sample_split: int | None = None,
        batch_size: int = 1,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        log_freq: int = 10,
        save_dir: str | None = None,
        save_freq: int = 1,
        valid_data: Any = None,
        valid_sample_split: int | None = None,
        valid_freq: int = 1,
        valid_steps: int | None = None,
        collate_fn: Callable[..., Any] | None = None,
        callbacks: Any = None,
        verbose: int = 2,
        nvprof_range: Sequence[int] = (-1, -1),
    ) -> History:
        """Train for epochs; -> History, whose `history` has a list with a value an epoch for "loss", each metric, "lr",
        and, with valid_data, "val_loss" and so on (of epochs in which it was evaluated).

        train_data, valid_data: a Dataset, read in its order, or a DataLoader. batch_size: samples of a global batch.
        train_sample_split: how many of a sample's items are inputs, the others being labels; by default as many as the
        model's forward needs. steps_per_epoch, valid_steps: use only so many batches. The model is evaluated after
        epochs valid_freq - 1, 2 valid_freq - 1, ..., and saved to save_dir/EPOCH after epochs 0, save_freq, ... The
        loss of an epoch is that of its last batch. Raises ConfigError for nvprof_range: profile with polyreme.profiler.
        """
        if list(nvprof_range) != [-1, -1]:
            raise ConfigError(
                f"Engine.fit: nvprof_range={list(nvprof_range)}; nothing is profiled here, use polyreme.profiler"
            )
        data_of.check_counts(
            "fit", epochs=epochs, steps_per_epoch=steps_per_epoch, valid_freq=valid_freq, valid_steps=valid_steps,
            batch_size=batch_size, train_sample_split=train_sample_split, valid_sample_split=valid_sample_split,
        )  # fmt: skip
        self.to_mode("train")
        loader = data_of.as_loader("fit", train_data, batch_size, collate_fn)
        valid = (
            None
            if valid_data is None
            else data_of.as_loader("fit", valid_data, batch_size, _collate_for(collate_fn, valid_data))
        )
        steps = data_of.steps_in(loader, steps_per_epoch)
        params = {"epochs": epochs, "steps": steps, "verbose": verbose, "metrics": self._names(), "save_dir": save_dir,
                  "log_freq": log_freq, "save_freq": save_freq, "batch_size": batch_size}  # fmt: skip
        self.history = History()
        every = callbacks_of(self, callbacks, params, ModelCheckpoint(save_freq, save_dir), self.history)
        self.stop_training = False
        with closing(every):
            every.on_begin("train")
            logs: Logs = {}
            for epoch in range(epochs):
                every.on_epoch_begin(epoch)
                logs = self._train_epoch(loader, steps, train_sample_split, every)
                if valid is not None and (epoch + 1) % valid_freq == 0:
                    found = self._evaluate(valid, data_of.steps_in(valid, valid_steps), valid_sample_split, every)
                    logs |= {f"val_{name}": value for name, value in found.items()}
                every.on_epoch_end(epoch, logs)
                if self.stop_training:
                    break
            every.on_end("train", logs)
        return self.history

    def evaluate(
        self,
        valid_data: Any,
        valid_sample_split: int | None = None,
        batch_size: int = 1,
        steps: int | None = None,
        log_freq: int = 10,
        collate_fn: Callable[..., Any] | None = None,
        callbacks: Any = None,
        verbose: int = 2,
    ) -> Logs:
        """Evaluate a dataset: {"loss": the mean over all samples, metric name: value}; arguments as for fit."""
        data_of.check_counts("evaluate", batch_size=batch_size, steps=steps, valid_sample_split=valid_sample_split)
        self.to_mode("eval")
        loader = data_of.as_loader("evaluate", valid_data, batch_size, collate_fn)
        steps = data_of.steps_in(loader, steps)
        params = {"verbose": verbose, "metrics": self._names(), "log_freq": log_freq, "steps": steps}
        every = callbacks_of(self, callbacks, params)
        with closing(every):
            return self._evaluate(loader, steps, valid_sample_split, every)

    def predict(
        self,
        test_data: Any,
        test_sample_split: int | None = None,
        batch_size: int = 1,
        steps: int | None = None,
        collate_fn: Callable[..., Any] | None = None,
        callbacks: Any = None,
        verbose: int = 2,
    ) -> list[list[Any]]:
        """Outputs for a dataset: for each batch the list of its outputs, as ndarrays (as Tensors with
        strategy.return_numpy off)."""
        data_of.check_counts("predict", batch_size=batch_size, steps=steps, test_sample_split=test_sample_split)
        self.to_mode("predict")
        loader = data_of.as_loader("predict", test_data, batch_size, collate_fn)
        steps = data_of.steps_in(loader, steps)
        every = callbacks_of(self, callbacks, {"verbose": verbose, "log_freq": 1, "steps": steps, "metrics": []})
        results: list[list[Any]] = []
        with closing(every):
            every.on_begin("predict", {"steps": steps})
            logs: Logs = {}
            for step, batch in _number(loader, steps):
                every.on_batch_begin("predict", step, logs)
                inputs, _ = self._batch(batch, test_sample_split)
                outputs, _ = self._placed().step("predict", inputs, [], True)
                results.append([self._value(out) for out in outputs])
                logs = {"step": step, "batch_size": samples_in(inputs)}
                every.on_batch_end("predict", step, logs)
            every.on_end("predict", logs)
        return results

    def _train_epoch(self, loader: Any, steps: int | None, split: int | None, every: CallbackList) -> Logs:
        results, logs, done = Results([], averages=False), {}, 0
        for step, batch in _number(loader, steps):
            every.on_batch_begin("train", step, logs)
            inputs, labels = self._batch(batch, split)
            outputs, losses = self._placed().step("train", inputs, labels, bool(self._metrics))
            if step == 0 and outputs:  # a pipeline gives none while it trains
                results = Results(self._metrics, averages=False)
            results.add(outputs, labels, losses, samples_in(inputs))
            done += 1
            if every.needs_logs("train", step) or done == steps:
                logs = data_of.single_loss(results.logs())
            logs = {**logs, "step": step, "batch_size": samples_in(inputs)}
            every.on_batch_end("train", step, logs)
            if self.stop_training:
                break
        if not done:
            raise DataError("Engine.fit: train_data gave no batch; check its length, batch_size and drop_last")
        return {**logs, **data_of.single_loss(results.logs()), "lr": inner_optimizer(self.optimizer).get_lr()}

    def _evaluate(self, loader: Any, steps: int | None, split: int | None, every: CallbackList) -> Logs:
        results, logs = Results(self._metrics, averages=True), {}
        every.on_begin("eval", {"steps": steps, "metrics": self._names()})
        for step, batch in _number(loader, steps):
            every.on_batch_begin("eval", step, logs)
            inputs, labels = self._batch(batch, split)
            outputs, losses = self._placed().step("eval", inputs, labels, bool(self._metrics))
            results.add(outputs, labels, losses, samples_in(inputs))
            if every.needs_logs("eval", step):
                logs = data_of.single_loss(results.logs())
            logs = {**logs, "step": step, "batch_size": samples_in(inputs)}
            every.on_batch_end("eval", step, logs)
        if not results.samples and not results.logs().get("loss"):
            raise DataError("Engine: the evaluation data gave no batch; check its length and batch_size")
        found = data_of.single_loss(results.logs())
        every.on_end("eval", {**logs, **found})
        return found

    # a batch at a time

    def run(self, data: Any = None, feed: Any = None, fetch_list: Any = None, mode: str | None = None) -> Logs:
        """One batch in a mode, that of to_mode() by default: -> {"loss", metric names} of this batch when training or
        evaluating, {"outputs": list} when predicting; "fetches" besides, if the model calls auto_parallel.fetch.

        data: inputs and labels as a list, as dataloader() gives them; or by name, in data or feed, where prepare() was
        given named specs. fetch_list: ["outputs"] adds the outputs when training or evaluating. Values are ndarrays
        (Tensors with strategy.return_numpy off).
        """
        if (data is None) == (feed is None):
            raise ConfigError("Engine.run: give one batch, as data=[inputs and labels] or feed={name: value}")
        if mode is not None:
            self.to_mode(mode)
        known = ("outputs", "loss", *metric_names(self._metrics))
        unknown = [name for name in as_list(fetch_list) if name not in known]
        if unknown:
            raise ConfigError(f"Engine.run: fetch_list has {unknown[0]!r}; give any of {', '.join(map(repr, known))}")
        inputs, labels = self._batch(data if feed is None else feed, self._split)
        wants = "outputs" in as_list(fetch_list)
        outputs, losses = self._placed().step(self._mode, inputs, labels, wants or bool(self._metrics))
        logs: Logs = {"outputs": [self._value(out) for out in outputs]} if wants or self._mode == "predict" else {}
        if losses:
            logs["loss"] = [self._value(loss) for loss in losses]
        jax.effects_barrier()  # what fetch was given comes by a call from the devices
        if fetches := fetched.take():
            logs["fetches"] = dict(fetches)
        if outputs and self._mode != "predict":
            for metric in self._metrics:
                metric.reset()
            update_metrics(self._metrics, outputs, labels)
            logs |= metric_values(self._metrics)
        return data_of.single_loss(logs)

    def dataloader(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        num_workers: int = 0,
        use_buffer_reader: bool = True,
        use_shared_memory: bool = True,
        timeout: int = 0,
        worker_init_fn: Callable[..., Any] | None = None,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        sample_split: int = 1,
        mode: str | None = None,
        places: Any = None,
    ) -> EngineLoader:
        """Global batches of a Dataset for run(), epochs times over.

        sample_split: how many of a sample's items are inputs. mode: what run() then does. Raises ConfigError for
        places: a batch goes to the devices of the model.
        """
        if places is not None:
            raise ConfigError("Engine.dataloader: places; a batch goes to the devices of the model, leave it out")
        loader = DataLoader(
            dataset, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, collate_fn=collate_fn,
            num_workers=num_workers, use_buffer_reader=use_buffer_reader, use_shared_memory=use_shared_memory,
            timeout=timeout, worker_init_fn=worker_init_fn,
        )  # fmt: skip
        return self._loading(EngineLoader(loader, epochs, steps_per_epoch, sample_split), mode)

    def dataloader_from_generator(
        self,
        dataset: Any,
        capacity: int = 70,
        use_double_buffer: bool = True,
        iterable: bool = True,
        use_multiprocess: bool = False,
        drop_last: bool = True,
        batch_size: int = 1,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        collate_fn: Callable[..., Any] | None = None,
        sample_split: int = 1,
        mode: str | None = None,
    ) -> EngineLoader:
        """The same as dataloader(), which reads streams too; settings of buffers have no effect.

        Raises ConfigError for iterable=False: batches are handed to run().
        """
        if not iterable:
            raise ConfigError("Engine.dataloader_from_generator: iterable=False; iterate, and hand each batch to run()")
        loader = DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=collate_fn)
        return self._loading(EngineLoader(loader, epochs, steps_per_epoch, sample_split), mode)

    def _loading(self, loader: EngineLoader, mode: str | None) -> EngineLoader:
        self._split = loader.sample_split
        if mode is not None:
            self.to_mode(mode)
        return loader

    def cost(self, inputs_spec: Any = None, labels_spec: Any = None, mode: str | None = None) -> Prediction:
        """The predicted cost of a training step on the cluster: step_seconds, mfu, memory of a device by what holds it,
        and what binds; by the planner's model, read off the network's own ops and the plan.

        inputs_spec, labels_spec: of a global batch; by default what prepare() was given. Raises ConfigError for specs
        that leave its rows open, and for another mode than "train", which the planner has no model of.
        """
        if mode not in (None, "train"):
            raise ConfigError(f"Engine.cost: mode={mode!r}; the planner predicts training steps: give 'train'")
        given = (_as_specs(inputs_spec), _as_specs(labels_spec)) if inputs_spec is not None else self._specs
        batch = TrainingBatch(*given, self._loss, self._optimizer and inner_optimizer(self._optimizer))
        is_known = self._job is not None and self._job.is_placed
        if self._settled.is_planned and not is_known:
            raise ConfigError("Engine.cost: the plan is chosen with the first batch; call prepare() with whole specs")
        plan = self.plan if is_known else plan_of(self._network, self._settled)
        return cost_of(self._network, self._settled, batch, plan, self._cluster)

    # files

    def save(self, path: str | os.PathLike[str], training: bool = True) -> None:
        """Write the training state to the folder PATH.train, to be loaded on any mesh; with training=False an artefact
        for inference instead, as jit.save does: PATH.stablehlo, PATH.safetensors, PATH.json.

        The latter takes the specs that prepare() was given, else what the first batch had, in any number of rows;
        raises ConfigError where there is neither.
        """
        if training:
            save_training(self._placed(), path)
            return
        if not self.inputs:
            raise ConfigError(
                "Engine.save: training=False exports for inference, which needs the inputs' shapes; call "
                "prepare(inputs_spec=...), or train, evaluate or predict first"
            )
        save_for_inference(self._network, path, self.inputs)

    def load(
        self, path: str | os.PathLike[str], strict: bool = True, load_optimizer: bool = True
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Go on from what save(path) wrote, on whatever mesh; -> (the model's, the optimizer's) Tensors by name.

        Raises CheckpointError, changing nothing, for shapes that differ, and if strict for names that only one side
        has.
        """
        return load_training(self._placed(), path, strict, load_optimizer)

    # batches

    def _batch(self, values: Any, split: int | None) -> tuple[list[Tensor], list[Tensor]]:
        if isinstance(values, Mapping):
            values = data_of.in_order(values, [*self.inputs, *([] if self._mode == "predict" else self.labels)])
            split = len(self.inputs)
        job = self._placed()
        inputs, labels = job.split(values, split or (len(self.inputs) or None))
        given = as_tensors("input", inputs, self._argument_specs[0])
        wanted = as_tensors("label", labels, self._argument_specs[1])
        if not self.inputs or (wanted and not self.labels):
            self._specs = (_specs_of(given), _specs_of(wanted))
        return given, wanted

    def _value(self, out: Any) -> Any:
        """An output as results have it: a Tensor, or a structure of them, as ndarrays unless Tensors are asked for."""
        if not self._settled.return_numpy:
            return out
        leaves: list[Any] = []
        spec = flatten(out, leaves)
        return rebuild(spec, iter([leaf.numpy() if isinstance(leaf, Tensor) else leaf for leaf in leaves]))

    def _names(self) -> list[str]:
        return [*(["loss"] if self._loss is not None else []), *metric_names(self._metrics)]


def _specs_of(tensors: Sequence[Tensor]) -> list[InputSpec]:
    """Specs of a batch's Tensors, in any number of rows."""
    return [InputSpec([None, *t.shape[1:]][: len(t.shape)], t.dtype) for t in tensors]


def _as_specs(given: Any) -> list[InputSpec]:
    return [as_spec("Engine.prepare", spec) for spec in as_list(given)]


def _collate_for(collate_fn: Callable | None, data: Any) -> Callable | None:
    """collate_fn for a Dataset; a loader has one of its own."""
    return collate_fn if hasattr(data, "__getitem__") else None


def _number(loader: Any, steps: int | None) -> Iterator[tuple[int, Any]]:
    return enumerate(itertools.islice(loader, steps))
