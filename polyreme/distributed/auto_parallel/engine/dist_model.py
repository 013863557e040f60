"""DistModel: a model with its loss and optimizer over all devices, a batch at a time; dist.to_static makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyreme.core import rng, state
from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.engine.choose import Chosen
from polyreme.distributed.auto_parallel.engine.placement import Placed, TrainingBatch, needs_batch, place
from polyreme.distributed.auto_parallel.engine.steps import StagedSteps, WholeSteps
from polyreme.distributed.auto_parallel.engine.strategy import Settled, Strategy, settle
from polyreme.distributed.auto_parallel.layers.shard_optimizer import laid_out
from polyreme.distributed.gradient_merge import MergingOptimizer
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError, ProgramError
from polyreme.hapi.data import as_tensors, needed_arguments
from polyreme.hapi.input_spec import InputSpec
from polyreme.hapi.step import as_list
from polyreme.mesh import Plan
from polyreme.metric.metrics import Metric
from polyreme.nn import Layer
from polyreme.optimizer import Optimizer
from polyreme.planner import Cluster

MODES = ("train", "eval", "predict")
_NEEDS = {"train": ("loss", "optimizer"), "eval": ("loss",), "predict": ()}


class DistModel:
    """layer, trained, evaluated and used a batch at a time, each as one captured program over all devices.

    Parameters stay as they are marked (shard_tensor, shard_layer, parallelize); an unmarked model is data parallel over
    the devices of the global mesh, or all. A batch is global: its rows are split over the devices, whole on each where
    they do not divide. Called with a batch's inputs, then its labels, as Tensors or ndarrays: in train mode it updates
    and returns the loss, in eval mode it returns the loss, in predict mode (inputs alone) what the layer returns.
    The mode at first is train with a loss and an optimizer, eval with a loss alone, else predict.

    loader: not read; shapes are those of the batches. input_spec: [specs of the inputs, specs of the labels], which
    each batch is checked against. metrics: for an Engine. Raises ConfigError for a strategy that cannot be honoured,
    TypeError for arguments of other kinds, PlacementError for meshes and degrees that do not fit.

    >>> from polyreme.eager.tensor import to_tensor
    >>> from polyreme.nn import Linear, MSELoss
    >>> from polyreme.optimizer import SGD
    >>> layer = Linear(2, 1)
    >>> model = DistModel(layer, None, MSELoss(), SGD(0.1, parameters=layer.parameters()))
    >>> x, y = to_tensor([[0.0, 1.0]] * 8), to_tensor([[1.0]] * 8)
    >>> losses = [float(model(x, y)) for _ in range(20)]
    >>> losses[-1] < losses[0]
    True
    """

    loss: Callable[..., Any] | None

    network: Layer

    def __init__(
        self,
        layer: Layer,
        loader: Any,
        loss: Callable[..., Any] | None = None,
        optimizer: Any = None,
        strategy: Strategy | str | None = None,
        metrics: Any = None,
        input_spec: Any = None,
    ) -> None:
        check_arguments("a DistModel", layer, loss, optimizer)
        _check_trained(layer, loss, optimizer)
        self.network, self.loss = layer, loss
        self.settled: Settled = settle(strategy)
        self.metrics: list[Metric] = check_metrics(metrics)
        self._specs: list[list[InputSpec]] = _check_specs(input_spec)
        if self.settled.seed is not None:
            rng.seed(self.settled.seed)
        self._cast(optimizer)
        self._optimizer = self._merging(optimizer)
        self._placed: Placed | None = None
        self._built_steps: WholeSteps | StagedSteps | None = None
        self.cluster: Cluster | None = None
        if not needs_batch(layer, self.settled):
            self._begin([], [])
        elif self._specs:
            inputs, labels = ([_example(spec) for spec in group] for group in self._specs)
            self._begin(inputs, labels)
        self._mode = "predict" if loss is None else "eval" if optimizer is None else "train"

    def _cast(self, optimizer: Any) -> None:
        self.settled.precision.decorate(self.network, None if optimizer is None else inner_optimizer(optimizer))

    def _merging(self, optimizer: Any) -> Any:
        """The optimizer, updating once in several batches if the strategy says so, or shard_optimizer was told so."""
        if optimizer is None:
            return None
        inner, settled = inner_optimizer(optimizer), self.settled
        told = inner.gradient_accumulation_steps
        if settled.merge_steps > 1 and told not in (1, settled.merge_steps):
            raise ConfigError(
                f"Strategy.gradient_merge.k_steps={settled.merge_steps}, and shard_optimizer was told "
                f"gradient_accumulation_steps={told}; say it in one place"
            )
        steps, average = settled.merge_steps, settled.merge_average
        if steps == 1:
            steps, average = told, False
        return optimizer if steps == 1 else MergingOptimizer(inner, steps, average)

    def _begin(self, inputs: Sequence[Tensor], labels: Sequence[Tensor], mode: str | None = None) -> None:
        """Put the model in its place, for batches like this one where that counts; one to predict has no loss."""
        optimizer = None if self._optimizer is None else inner_optimizer(self._optimizer)
        batch = TrainingBatch(inputs, labels, None if mode == "predict" else self.loss, optimizer)
        self._placed = placed = place(self.network, self.settled, batch, self.cluster)
        if optimizer is not None:
            optimizer.map_state(laid_out)  # master weights were made of parameters that lay nowhere yet
        if placed.layout.plan.mesh.pp > 1:
            self._built_steps = StagedSteps(placed, self.loss, self._optimizer, self.settled)
        else:
            self._built_steps = WholeSteps(self.network, self.loss, self._optimizer, placed.layout, self.settled)

    @property
    def _steps(self) -> Any:
        if self._built_steps is None:
            raise ConfigError(
                "the model is not in its place yet: cutting it into stages, and planning, need the shapes of a batch; "
                "call engine.prepare(inputs_spec, labels_spec), give dist.to_static an input_spec, or run a batch first"
            )
        return self._built_steps

    @property
    def layout(self) -> Layout:
        """The plan bound to devices. Raises ConfigError where the first batch decides it and there was none yet."""
        return self._steps.layout

    @property
    def plan(self) -> Plan:
        """The Plan in force: marked by the user or chosen by the planner."""
        return self.layout.plan

    @property
    def is_placed(self) -> bool:
        """Whether the model is in its place: at once, or with the first batch where that decides it."""
        return self._placed is not None

    @property
    def chosen(self) -> Chosen | None:
        """The planner's choice; str() of it is the report. None if the planner was not asked, or not yet."""
        return None if self._placed is None else self._placed.chosen

    @property
    def optimizer(self) -> Any:
        """The optimizer, None without one."""
        return self._optimizer

    @property
    def scaler(self) -> Any:
        """The loss scaler, None where the loss is not scaled."""
        return self._steps.scaler

    # modes

    @property
    def mode(self) -> str:
        """ "train", "eval" or "predict"."""
        return self._mode

    def train(self) -> None:
        """Calls update the parameters from now on. Raises ConfigError without a loss and an optimizer."""
        self.to_mode("train")

    def eval(self) -> None:
        """Calls give the loss from now on. Raises ConfigError without a loss."""
        self.to_mode("eval")

    def predict(self) -> None:
        """Calls give the outputs from now on."""
        self.to_mode("predict")

    def to_mode(self, mode: str) -> None:
        """train(), eval() or predict() by name."""
        self._mode = check_mode(mode, self.loss, self._optimizer)

    # batches

    def __call__(self, *args: Any) -> Any:
        """One batch: inputs, then labels; or [inputs], [labels]."""
        inputs, labels = self.split(args)
        outputs, losses = self.step(self._mode, inputs, labels, False)
        if self._mode == "predict":
            return outputs if len(outputs) > 1 else outputs[0]
        return losses if len(losses) > 1 else losses[0]

    def split(self, values: Sequence[Any], sample_split: int | None = None) -> tuple[list[Any], list[Any]]:
        """(inputs, labels) of a batch: the first sample_split values are inputs; by default as many as the input_spec
        has, else as forward needs."""
        values = as_list(values)
        if len(values) == 2 and all(isinstance(v, (list, tuple)) for v in values):
            return list(values[0]), list(values[1])
        count = sample_split or (len(self._specs[0]) if self._specs else needed_arguments(self.network))
        return values[:count], values[count:]

    def step(self, mode: str, inputs: Any, labels: Any, wants_outputs: bool) -> tuple[list[Tensor], list[Tensor]]:
        """One batch in a mode -> (outputs, none unless wanted or predicted; losses)."""
        (self.network.train if mode == "train" else self.network.eval)()
        given = as_tensors("input", inputs, self._specs[0] if self._specs else [])
        wanted = [] if mode == "predict" else as_tensors("label", labels, self._specs[1] if self._specs else [])
        if self._built_steps is None:
            self._begin(given, wanted, mode)
        return self._steps.run(mode, given, wanted, wants_outputs)

    def compiled(self, mode: str | None = None, shapes: Any = None) -> jax.stages.Compiled:
        """The compiled program of a mode's step: as_text() is its HLO, memory_analysis() bytes per device.

        For batches of the shapes last seen, or shapes: ([(shape, dtype) of each input], [... of each label]). Raises
        ConfigError before the first batch, and for a pipeline, whose step is many programs.
        """
        mode = check_mode(mode or self._mode, self.loss, self._optimizer)
        if shapes is not None:
            self._begin_for(mode, shapes)
        return self._steps.compiled(mode, shapes)

    def prepare(self, mode: str, shapes: Any) -> None:
        """Put the model in its place for batches of these shapes, as compiled() takes them, and compile the mode's step
        if it is one program; those of a pipeline are compiled by the first batch."""
        self._begin_for(mode, shapes)
        if isinstance(self._built_steps, WholeSteps):
            self._built_steps.compiled(mode, shapes)

    def _begin_for(self, mode: str, shapes: Any) -> None:
        if self._built_steps is None:
            inputs, labels = ([Tensor(jnp.zeros(*each)) for each in group] for group in shapes)
            self._begin(inputs, labels, mode)

    # state

    def state_dict(self, mode: str = "all", split_fusion: bool = True) -> dict[str, Tensor]:
        """The layer's parameters and buffers ("param"), the optimizer's state ("opt"), or both ("all"), where they lie.

        split_fusion changes nothing: no parameters are joined here.
        """
        if mode not in ("all", "param", "opt"):
            raise ConfigError(f"state_dict: mode={mode!r}; give 'all', 'param' or 'opt'")
        found: dict[str, Tensor] = {} if mode == "opt" else dict(self.network.state_dict())
        if mode != "param" and self._optimizer is not None:
            inner_optimizer(self._optimizer).create_state()
            found |= self._optimizer.state_dict()
        return found

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take on what a state_dict of any mode holds, each value laid out as it is here.

        Raises CheckpointError, changing nothing, for a name that neither the layer nor the optimizer has.
        """
        mine = self.network.state_dict()
        params = {name: value for name, value in state_dict.items() if name in mine}
        rest = {name: value for name, value in state_dict.items() if name not in mine}
        known = set() if self._optimizer is None else set(self.state_dict("opt"))
        unknown = [name for name in rest if name not in known and name not in ("LR_Scheduler", "master_weights")]
        if unknown:
            raise CheckpointError(f"set_state_dict: neither the layer nor the optimizer has {unknown[:10]}")
        if params:
            self.network.set_state_dict(params)
        if rest and self._optimizer is not None:
            self._optimizer.set_state_dict(rest)

    # programs

    def dist_main_program(self, mode: str | None = None) -> jax.stages.Compiled:
        """compiled(mode): the program as the devices run it; its as_text() can be read and searched."""
        return self.compiled(mode)

    def serial_main_program(self, mode: str | None = None) -> Any:
        """Raises ProgramError: the step is captured and partitioned in one; there is no program before it."""
        raise ProgramError(
            "serial_main_program: the step is captured from the layer itself, and XLA partitions it while it compiles; "
            "read dist_main_program(mode)"
        )

    def dist_startup_program(self, mode: str | None = None) -> Any:
        """Raises ProgramError: parameters have values as soon as the layer is made."""
        raise ProgramError("parameters have values as soon as the layer is made; there is no startup program")

    serial_startup_program = dist_startup_program


def to_static(
    layer: Layer,
    loader: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    strategy: Strategy | None = None,
    input_spec: Any = None,
) -> DistModel:
    """The layer as a DistModel, which runs each batch as one captured program over all devices."""
    return DistModel(layer, loader, loss, optimizer, strategy, input_spec=input_spec)


def check_arguments(what: str, layer: Any, loss: Any, optimizer: Any) -> None:
    """Raises TypeError for what is no Layer, no function and no Optimizer, ProgramError in static mode."""
    if state.recording():
        raise ProgramError(f"{what} runs imperative code, and static mode only records it; call disable_static() first")
    if not isinstance(layer, Layer):
        raise TypeError(f"{what} takes a Layer, got {type(layer).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"{what}: loss is a Layer or a function of (*outputs, *labels), got {type(loss).__name__}")
    if optimizer is not None and not isinstance(inner_optimizer(optimizer), Optimizer):
        raise TypeError(f"{what}: optimizer is an Optimizer, got {type(optimizer).__name__}")


def _check_trained(layer: Layer, loss: Any, optimizer: Any) -> None:
    """Raises ConfigError for an optimizer that would leave the layer as it is."""
    trained = [] if optimizer is None else inner_optimizer(optimizer)._parameters
    ours = {id(p): p.name for part in (layer, loss) if isinstance(part, Layer) for p in part.parameters()}
    others = [p.name for p in trained if id(p) not in ours]
    left = {name for key, name in ours.items() if key not in {id(p) for p in trained}}
    if stale := sorted(left.intersection(others)):
        raise ConfigError(
            f"the optimizer has other Tensors than {type(layer).__name__} under the names {stale[:5]}: marking a "
            "Parameter (shard_tensor) makes a new one; make the optimizer after the marks"
        )
    if ours and trained and len(others) == len(trained):
        raise ConfigError(
            f"the optimizer has none of the parameters of {type(layer).__name__} (it has {sorted(others)[:5]}); make "
            "it with parameters=model.parameters()"
        )


def check_mode(mode: Any, loss: Any, optimizer: Any) -> str:
    """mode; ConfigError for an unknown one, and for one that needs what there is not."""
    if mode not in MODES:
        raise ConfigError(f"mode {mode!r}; give one of {', '.join(map(repr, MODES))}")
    there = {"loss": loss, "optimizer": optimizer}
    missing = [name for name in _NEEDS[mode] if there[name] is None]
    if missing:
        raise ConfigError(f"mode {mode!r} needs {' and '.join(missing)}, which were not given; make it with them")
    return mode


def inner_optimizer(optimizer: Any) -> Any:
    """The Optimizer that a wrapper of it holds; itself if it is none."""
    return getattr(optimizer, "inner_opt", optimizer)


def check_metrics(metrics: Any) -> list[Metric]:
    """The metrics as a list; ConfigError for what is none."""
    found = as_list(metrics)
    for metric in found:
        if not isinstance(metric, Metric):
            raise ConfigError(f"metrics holds a {type(metric).__name__}; give instances of metric.Metric")
    return found


def _check_specs(value: Any) -> list[list[InputSpec]]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigError(f"input_spec={value!r}; give [specs of the inputs, specs of the labels]")
    return [[as_spec("input_spec", spec) for spec in as_list(group)] for group in value]


def _example(spec: InputSpec) -> Tensor:
    """A batch's input of these sizes, of as many rows as there are devices where the spec leaves them open."""
    return Tensor(jnp.zeros([jax.device_count() if size is None else size for size in spec.shape], spec.dtype))


def as_spec(what: str, spec: Any) -> InputSpec:
    """An InputSpec from anything that has shape and dtype; ConfigError for anything else."""
    if isinstance(spec, InputSpec):
        return spec
    if not hasattr(spec, "shape") or not hasattr(spec, "dtype"):
        raise ConfigError(f"{what} holds a {type(spec).__name__}; give InputSpec(shape, dtype)")
    return InputSpec(spec.shape, spec.dtype, getattr(spec, "name", None))
