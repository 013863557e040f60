"""Training state of a run: model, optimizer and schedule under a plan, one step, and what a checkpoint holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from polyreme.core import rng, state
from polyreme.core.engine.backend import Device
from polyreme.core.layout import Layout
from polyreme.data.packing import NO_LABEL
from polyreme.distributed.communication import replicas
from polyreme.distributed.planned_step import PlannedStep, check_offload
from polyreme.distributed.whole_step import WholeStep
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.jit.capture import capture_in_progress
from polyreme.mesh import Plan
from polyreme.nn import Router
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.nn.eval_mode import eval_mode
from polyreme.nn.lazy import LazyGuard
from polyreme.nn.parameter import Parameter
from polyreme.ops.manipulation import stack
from polyreme.optimizer import AdamW
from polyreme.optimizer.lr import CosineAnnealingDecay, LinearWarmup, LRScheduler
from polyreme.optimizer.on_disk import StoredArray
from polyreme.recipes.config import RunConfig, TrainConfig
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.training.staged import first_bad_of_stages
from polyreme.recipes.weights.base import make_model
from polyreme.training import Microbatch, MixedPrecision, Objective, SpikePolicy, StepPolicy, StepResult


class Trainer:
    """Everything that training changes, and the step that changes it.

    step(tokens, labels) takes a global batch on the host, int `[batch, seq]`. From the first step whose loss or
    gradients are not finite on, no step changes a parameter or the optimizer, so that what went wrong can be looked at.
    devices: those of the plan's mesh, all by default.
    """

    layout: Layout

    model: Any
    routers: dict[str, Router]
    schedule: LRScheduler
    planned: PlannedStep

    def __init__(self, config: RunConfig, devices: Sequence[Device] | None = None) -> None:
        check_supported(config)
        self.config = config
        rng.seed(config.train.seed)
        plan = config.parallel_plan
        self.objective = loss = loss_of_config(config)
        check_offload(plan, step_policy(config.train), has_loss=loss is not None)  # told before the model is made
        # parameters that go to a disk are made one after another, when there is a place for them
        with LazyGuard() if "param" in plan.offload else contextlib.nullcontext():
            self.model = make_model(config)
        if _compiles_blocks(config, plan, self.model, loss):
            plan = replace(plan, compile="blocks")
        self.routers = _routers(self.model) if config.log.experts else {}
        for router in self.routers.values():
            router.keep_load()
        self.schedule = learning_rate_schedule(config.train)
        self.planned = PlannedStep(
            self.model,
            plan,
            lambda model: make_optimizer(config.train, model, self.schedule),
            step_policy(config.train),
            devices,
            loss,
            count_of_config(config),
        )
        self.planned.check_rows(config.train.global_batch)
        self.layout, self.optimizer = self.planned.layout, self.planned.optimizer

    def step(self, tokens: Any, labels: Any) -> StepResult:
        """One optimizer step on a global batch."""
        result = self.planned(tokens, labels)
        self.schedule.step()
        return result

    def evaluate(self, tokens: Any, labels: Any) -> float:
        """Mean loss of a batch, nats a token, with dropout off."""
        with eval_mode(self.model):
            return float(self.planned.evaluate(tokens, labels))

    @property
    def logits(self) -> Callable[[Any], np.ndarray] | None:
        """tokens -> logits on the host, for a model over pipeline stages or processes, each of which must call it; None
        where the model can be called itself."""
        is_in_parts = self.planned.is_staged and not self.planned.plan.in_blocks
        is_elsewhere = is_in_parts or replicas.spans_processes(self.layout.mesh)
        return self.planned.outputs if is_elsewhere else None

    def expert_loads(self) -> dict[str, float]:
        """Loads of experts in the last step, for each layer of experts, where the run logs them: load/NAME, the most
        choices that fell on an expert over the mean, and dropped/NAME, how many a capacity left out. Waits for the
        step; if the mesh spans processes, each must call it."""

        def on_host(tensor: Tensor) -> np.ndarray:
            return np.asarray(replicas.whole(tensor._array, self.layout.replicated()))

        loads = {}
        for name, router in self.routers.items():
            load = on_host(router.last_load)
            loads[f"load/{name}"] = float(load.max() / max(load.mean(), 1e-9))
            loads[f"dropped/{name}"] = int(on_host(router.last_dropped))
        return loads

    def share_text(self) -> str:
        """The share of the parameters that train, in words."""
        parameters = self.model.parameters()
        trained, total = sum(p.size for p in parameters if p.trainable), sum(p.size for p in parameters)
        return f"{trained:,} of {total:,} parameters train, {100 * trained / total:.3g}%"

    # what went wrong

    def first_bad_tensor(self, tokens: Any, labels: Any, key: Tensor) -> str | None:
        """The first tensor that is not finite when this batch is computed again from the same random key, by name.

        Parameters come first, then the layers' outputs in the order of the forward, the loss, and gradients in the
        order of the backward; None if all are finite. For use after a failure: it compiles a program of its own.
        """
        state.write(rng.default_generator.key_state(), key._array)
        if self.planned.is_staged:
            return first_bad_of_stages(self.planned, tokens, labels)
        names: list[str] = []
        flags: list[Tensor] = []
        whole: list[Any] = [None]

        def see(name: str, tensor: Any) -> None:
            # what a loop over layers or a branch computes is not there outside of it; what it gives is
            if isinstance(tensor, Tensor) and capture_in_progress() is whole[0]:
                names.append(name)
                flags.append(tensor.detach().astype("float32").isfinite().all())

        step: WholeStep = self.planned.step

        def probe(batch: list[Microbatch]) -> Tensor:
            names.clear()
            flags.clear()
            whole[0] = capture_in_progress()
            for name, p in self.model.named_parameters():
                see(f"parameter {name}", p)
            step.step.gradients(batch)
            for name, p in reversed(list(self.model.named_parameters())):
                see(f"gradient of {name}", p.grad)
            self.optimizer.clear_grad()
            return stack(flags)

        hooks = [
            layer.register_forward_post_hook(lambda _layer, _inputs, out, name=name: see(name, out))
            for name, layer in (
                (f"output of {name}" if name else "loss", layer)
                for name, layer in self.model.named_sublayers(include_self=True)
            )
        ]
        try:
            is_finite = to_static(probe)(step.place(self.planned.cut(tokens, labels))).numpy()
        finally:
            for hook in hooks:
                hook.remove()
        return next((name for name, good in zip(names, is_finite, strict=True) if not good), None)

    def poison(self) -> None:
        """Make one element of the last parameter NaN, as a flipped bit might; for tests of what then happens."""
        *_, last = self.model.parameters()
        array = last._array
        state.write(last, put(array.at[(0,) * array.ndim].set(np.nan), array.sharding))

    def flip(self) -> None:
        """Flip a bit of the last parameter on the last device that holds it; for tests of what then happens."""
        *_, last = self.model.parameters()
        *others, part = last._array.addressable_shards
        bits = np.array(part.data)
        bits.view(np.uint8).reshape(-1)[0] ^= 1
        copies = [other.data for other in others] + [jax.device_put(bits, part.device)]
        state.write(last, jax.make_array_from_single_device_arrays(last._array.shape, last._array.sharding, copies))

    @contextlib.contextmanager
    def disturbed(self, factor: float) -> Iterator[None]:
        """Inside the block the first parameter is factor times itself, after it as before: for tests."""
        first, *_ = self.model.parameters()
        before = state.read(first)
        state.write(first, put(before * np.asarray(factor, before.dtype), before.sharding))
        yield
        state.write(first, before)

    # checkpoints

    @property
    def _spike_statistic(self) -> Tensor | None:
        step = self.planned.step
        return step.spike_statistic if self.planned.is_staged else step.step.spike_statistic

    def host_state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps beside the arrays, as plain JSON: the history that spikes are measured
        against."""
        statistic = self._spike_statistic
        return {} if statistic is None else {"spikes": np.asarray(statistic._array).tolist()}

    def load_host_state(self, saved: dict[str, Any]) -> None:
        """Go on with a host_state; without one, as one of a run without spikes, the statistic starts anew."""
        statistic, rows = self._spike_statistic, saved.get("spikes")
        if statistic is not None and rows is not None:
            state.write(statistic, put(np.asarray(rows, np.float32), statistic._array.sharding))

    def arrays(self) -> dict[str, Any]:
        """Everything a checkpoint holds, by name; state on disk as StoredArrays. If the mesh spans processes, each must
        call it."""
        if self.planned.is_staged:
            self.planned.step.updating().share_numbers()
        found = {name: _saved(tensor) for name, tensor in self._tensors().items()}
        optimizer = self.optimizer.state_arrays(self._names(), as_stored=True)
        return found | {f"{_OPTIMIZER}{name}": array for name, array in optimizer.items()}

    def target(self) -> dict[str, Any]:
        """Shape, dtype and layout each restored array must have; state on disk is restored into its files."""
        return {
            n: a if isinstance(a, StoredArray) else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            for n, a in self.arrays().items()
        }

    def load(self, arrays: dict[str, jax.Array], step: int) -> None:
        """Continue from restored arrays after this many steps.

        The rate is a function of the step and the configuration alone, so the schedule has nothing to restore.
        """
        for name, tensor in self._tensors().items():
            state.write(tensor, arrays[name])
        optimizer = {n.removeprefix(_OPTIMIZER): a for n, a in arrays.items() if n.startswith(_OPTIMIZER)}
        self.optimizer.load_state_arrays(optimizer, self._names())
        self.schedule.step(step)

    def _tensors(self) -> dict[str, state.TensorState]:
        """The model's Tensors and the random key, by name."""
        # what is not trained is that of the weights which the run began with
        tensors: dict[str, state.TensorState] = {
            f"model/{n}": t for n, t in self.model.state_dict().items() if not _is_frozen(t)
        }
        # a tied parameter appears under each of its names but is saved once
        first = {id(tensor): name for name, tensor in reversed(tensors.items())}
        once = {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}
        return once | {"rng": rng.default_generator.key_state()}

    def _names(self) -> dict[int, str]:
        return {id(p): n for n, p in self.model.named_parameters()}


_OPTIMIZER = "optimizer/"
_MANY_BLOCKS, _FEW_STEPS = 8, 200
"""A run of so many blocks or more ends sooner when a block is compiled in place of the step: if few parameters train,
where a step takes no longer; else if it has at most so many steps."""


def _compiles_blocks(config: RunConfig, plan: Plan, model: Any, loss: Any) -> bool:
    """Whether `plan.compile: auto` compiles each block once: on the one CPU device of a fine-tuning run."""
    if config.plan.compile != "auto" or not isinstance(config, FinetuneConfig):
        return False
    if plan.mesh.size > 1 or plan.streams or plan.recompute_share != 1:
        return False
    takes_parts = hasattr(model, "pipeline_items") and (loss is None or isinstance(loss, Objective))
    is_worthwhile = config.fine_tuning != "full" or config.train.steps <= _FEW_STEPS
    has_many = config.dimensions.num_layers >= _MANY_BLOCKS
    return takes_parts and has_many and is_worthwhile and jax.default_backend() == "cpu"


def told(result: StepResult) -> dict[str, float]:
    """The figures that a stage's loss reports beside the loss, each the mean over a step's microbatches, by name."""
    parts = [told for _, told in result.parts if told]
    return {name: float(np.mean([float(part[name]) for part in parts])) for name in parts[0]} if parts else {}


def _is_frozen(tensor: Any) -> bool:
    return isinstance(tensor, Parameter) and tensor.stop_gradient and not tensor.is_statistic


def loss_of_config(config: RunConfig) -> Callable[[Any, Any, Any], Any] | None:
    """The loss (model, inputs, labels) that a run makes small; None for a model's own."""
    if isinstance(config, FinetuneConfig) and config.record.loss is not None:
        return config.record.loss.load()(config)
    return None


def count_of_config(config: RunConfig) -> Callable[[Any], int] | None:
    """The count of labels in a microbatch that its mean loss is over; None where that is all of them."""
    return num_counted if config.samples.is_counted(config) else None


def num_counted(labels: Any) -> int:
    """The number of labels that a loss does not ignore."""
    return int(np.count_nonzero(np.asarray(labels) != NO_LABEL))


def _saved(tensor: state.TensorState) -> Any:
    """The array of a Tensor that goes into a checkpoint."""
    return tensor._array.saved if isinstance(tensor._array, state.Elsewhere) else tensor._array


def check_supported(config: RunConfig) -> None:
    """Raises ConfigError for a setting that training does not do yet."""
    if config.train.amp_level != "O0" and config.train.amp_dtype == "float16":
        raise ConfigError(
            f"train.amp_level={config.train.amp_level} with train.amp_dtype=float16 needs loss scaling, which runs "
            "do not have yet; set train.amp_dtype=bfloat16"
        )
    if config.plan.pp > 1 and config.log.experts and jax.process_count() > 1:
        raise ConfigError(
            "log.experts with plan.pp above 1 in several processes is not supported; set log.experts=false"
        )
    if config.plan.pp > 1 and jax.process_count() > 1 and isinstance(config, FinetuneConfig) and config.record.loss:
        raise ConfigError(
            f"plan.pp={config.plan.pp} with stage {config.stage} in several processes is not supported; set plan.pp=1, "
            "or run it in one process"
        )
    if config.plan.pp > 1 and config.train.spike != "none" and jax.process_count() > 1:
        raise ConfigError(
            "train.spike with plan.pp above 1 in several processes is not supported; set train.spike=none"
        )


def _routers(model: Any) -> dict[str, Router]:
    """Routers by the names of the layers whose experts they choose."""
    layers = model.named_sublayers()
    return {name.removesuffix(".router"): layer for name, layer in layers if isinstance(layer, Router)}


def step_policy(train: TrainConfig) -> StepPolicy:
    """The StepPolicy of a configuration."""
    precision = MixedPrecision(train.amp_level, train.amp_dtype, master_grad=True)
    spikes = None if train.spike == "none" else SpikePolicy(train.spike, train.spike_sigmas)
    return StepPolicy(precision, non_finite=train.non_finite, spikes=spikes)


def make_optimizer(train: TrainConfig, model: Any, learning_rate: LRScheduler) -> AdamW:
    """The optimizer that a configuration trains a model with."""
    return AdamW(
        learning_rate,
        beta1=train.betas[0],
        beta2=train.betas[1],
        parameters=[p for p in model.parameters() if not p.stop_gradient],
        weight_decay=train.weight_decay,
        apply_decay_param_fun=_matrices_only(model),
        grad_clip=None if train.clip_norm is None else ClipGradByGlobalNorm(train.clip_norm),
    )


def learning_rate_schedule(train: TrainConfig) -> LRScheduler:
    """Linear warm-up from 0, then a cosine down to min_lr at the last step."""
    steps = max(1, train.steps - train.warmup_steps)
    cosine = CosineAnnealingDecay(train.learning_rate, T_max=steps, eta_min=train.min_lr)
    if train.warmup_steps <= 1:  # one step of warm-up is at the full rate
        return cosine
    top = train.learning_rate
    return LinearWarmup(cosine, train.warmup_steps, start_lr=top / train.warmup_steps, end_lr=top)


def _matrices_only(model: Any) -> Any:
    """Weight decay pulls on matrices, not on biases and norm gains."""
    decayed = {p.name for p in model.parameters() if p.ndim > 1}
    return decayed.__contains__
