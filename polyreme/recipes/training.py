"""Training state of a run: model, optimizer and schedule under a plan, one step, and what a checkpoint holds."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from polyreme.amp import auto_cast, decorate
from polyreme.core import rng, state
from polyreme.core.backend import Device
from polyreme.distributed.communication import replicas
from polyreme.distributed.pipeline.chunks import in_chunks
from polyreme.distributed.placement import apply_plan, shard_batch
from polyreme.eager.host import put
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.nn.clip import ClipGradByGlobalNorm, global_norm
from polyreme.ops.layout import sharding_constraint
from polyreme.ops.manipulation import stack
from polyreme.optimizer import AdamW
from polyreme.optimizer.lr import CosineAnnealingDecay, LinearWarmup, LRScheduler
from polyreme.recipes.build import build_model
from polyreme.recipes.config import PretrainConfig, TrainConfig
from polyreme.recipes.staged import Ran, StagedStep


class StepResult(NamedTuple):
    """What a step gives without waiting for it, 0-D Tensors but for key: the random key the step began with."""

    loss: Tensor
    grad_norm: Tensor
    key: Tensor


class Trainer:
    """Everything that training changes, and the step that changes it.

    step(tokens, labels) takes a global batch on the host, int `[batch, seq]`. From the first step whose loss or
    gradients are not finite on, no step changes a parameter or the optimizer, so that what went wrong can be looked at.
    devices: those of the plan's mesh, all by default.
    """

    def __init__(self, config: PretrainConfig, devices: Sequence[Device] | None = None) -> None:
        check_supported(config)
        self.config = config
        rng.seed(config.train.seed)
        self.model = build_model(config.model)
        plan = config.parallel_plan
        layers = in_chunks(self.model, plan) if plan.mesh.pp > 1 else None
        self.layout = apply_plan(plan, self.model, devices, layers and layers.get_model_chunks())
        self.schedule = learning_rate_schedule(config.train)
        self.optimizer = make_optimizer(config.train, self.model, self.schedule)
        train = config.train
        if train.amp_level == "O2":
            decorate(self.model, self.optimizer, level="O2", dtype=train.amp_dtype, master_grad=True)
        self.optimizer.create_state()
        self._staged = layers and StagedStep(self.model, layers, self.layout, self.optimizer, self._autocast)
        # laid out as the step returns it: another layout would compile the step a second time
        self._halted = Tensor(put(np.zeros((), np.bool_), self.layout.replicated()))
        self._step = to_static(self._train)
        self._loss = to_static(self._evaluate)
        self._forward = to_static(self._whole_logits)

    def step(self, tokens: Any, labels: Any) -> StepResult:
        """One optimizer step on a global batch."""
        if self._staged:
            results = self._staged.step(tokens, labels)
        else:
            results = self._step(self._cut(tokens), self._cut(labels))
        self.schedule.step()
        return StepResult(*results)

    def compiled(self, tokens: Any, labels: Any) -> Any:
        """The program of step for a batch of this shape, compiled and not run: a jax.stages.Compiled.

        Not for a model over pipeline stages, whose step is many programs.
        """
        return self._step.compiled(self._cut(tokens), self._cut(labels))

    def ran(self, tokens: Any, labels: Any) -> Ran:
        """What compiled is for a model over pipeline stages: forward and backward run, nothing changes but the random
        key."""
        if not self._staged:
            raise ConfigError("this run has no pipeline stages: its step is one program; ask for compiled()")
        return self._staged.ran(tokens, labels)

    def evaluate(self, tokens: Any, labels: Any) -> float:
        """Mean loss of a batch, nats a token, with dropout off."""
        self.model.eval()
        try:
            with no_grad():
                if self._staged:
                    return self._staged.evaluate(tokens, labels)
                return float(self._loss(self._place(tokens), self._place(labels)))
        finally:
            self.model.train()

    @property
    def logits(self) -> Callable[[Any], np.ndarray] | None:
        """tokens -> logits on the host, for a model over pipeline stages or processes, each of which must call it; None
        where the model can be called itself."""
        if self._staged:
            return self._staged.logits
        if not replicas.spans_processes(self.layout.mesh):
            return None
        return lambda tokens: self._forward(shard_batch(self.layout, tokens, None, None)).numpy()

    def _cut(self, batch: Any) -> Tensor:
        """A global batch as [microbatch, row, seq], each microbatch spread over all devices: cut on them, rows would
        have to move.
        """
        parts = np.asarray(batch)
        parts = parts.reshape(self.config.train.accumulation, -1, *parts.shape[1:])
        return shard_batch(self.layout, parts, None, "batch", None)

    def _place(self, batch: Any) -> Tensor:
        return shard_batch(self.layout, batch, "batch", None)

    def _train(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key = Tensor(state.read(rng.default_generator.key_state()))
        loss = self._accumulate(tokens, labels)
        norm = global_norm([p.grad.detach() for p in self.model.parameters() if p.grad is not None])
        is_bad = (loss + norm).isfinite().logical_not().logical_or(self._halted)
        self.optimizer.step(skip=is_bad)
        self.optimizer.clear_grad()
        state.write(self._halted, state.read(is_bad))
        return loss, norm, key

    def _accumulate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss of [microbatch, row, seq], a microbatch at a time, its gradients left on the parameters."""
        parts = tokens.shape[0]
        losses: list[Tensor] = []
        generator = rng.default_generator
        for i, start in enumerate(generator.branches(parts)):
            with self._autocast(), generator.starting_at(start):
                loss = self.model(tokens[i], labels[i]) / parts
            loss.backward()
            losses.append(loss.detach())
        return functools.reduce(operator.add, losses)

    def _evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            return self.model(tokens, labels)

    def _whole_logits(self, tokens: Tensor) -> Tensor:
        with self._autocast():
            return sharding_constraint(self.model(tokens), self.layout.replicated())

    def _autocast(self) -> contextlib.AbstractContextManager:
        level = self.config.train.amp_level
        if level == "O0":
            return contextlib.nullcontext()
        return auto_cast(level=level, dtype=self.config.train.amp_dtype)

    # what went wrong

    def first_bad_tensor(self, tokens: Any, labels: Any, key: Tensor) -> str | None:
        """Name of the first tensor that is not finite when this batch is computed again from the same random key.

        Parameters come first, then the layers' outputs in the order of the forward, the loss, and gradients in the
        order of the backward; None if all are finite. For use after a failure: it compiles a program of its own.
        """
        state.write(rng.default_generator.key_state(), key._array)
        if self._staged:
            return self._staged.first_bad_tensor(tokens, labels, list(self.model.named_parameters()))
        names: list[str] = []
        flags: list[Tensor] = []

        def see(name: str, tensor: Any) -> None:
            if isinstance(tensor, Tensor):
                names.append(name)
                flags.append(tensor.detach().astype("float32").isfinite().all())

        def probe(tokens: Tensor, labels: Tensor) -> Tensor:
            names.clear()
            flags.clear()
            for name, p in self.model.named_parameters():
                see(f"parameter {name}", p)
            self._accumulate(tokens, labels)
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
            is_finite = to_static(probe)(self._cut(tokens), self._cut(labels)).numpy()
        finally:
            for hook in hooks:
                hook.remove()
        return next((name for name, good in zip(names, is_finite, strict=True) if not good), None)

    def poison(self) -> None:
        """Make one element of the last parameter NaN, as a flipped bit might; for tests of what then happens."""
        *_, last = self.model.parameters()
        array = last._array
        state.write(last, put(array.at[(0,) * array.ndim].set(np.nan), array.sharding))

    # checkpoints

    def arrays(self) -> dict[str, jax.Array]:
        """Everything a checkpoint holds, by name. If the mesh spans processes, each must call it."""
        if self._staged:
            self._staged.share_numbers()
        found = {name: tensor._array for name, tensor in self._tensors().items()}
        optimizer = self.optimizer.state_arrays(self._names())
        return found | {f"{_OPTIMIZER}{name}": array for name, array in optimizer.items()}

    def target(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and layout each restored array must have."""
        return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in self.arrays().items()}

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
        found: dict[str, state.TensorState] = {f"model/{n}": t for n, t in self.model.state_dict().items()}
        # a tied parameter appears under each of its names but is saved once
        found = {n: t for i, (n, t) in enumerate(found.items()) if all(t is not o for o in list(found.values())[:i])}
        return found | {"rng": rng.default_generator.key_state()}

    def _names(self) -> dict[int, str]:
        return {id(p): n for n, p in self.model.named_parameters()}


_OPTIMIZER = "optimizer/"


def check_supported(config: PretrainConfig) -> None:
    """Raises ConfigError for a setting that training does not do yet."""
    if config.train.amp_level != "O0" and config.train.amp_dtype == "float16":
        raise ConfigError(
            f"train.amp_level={config.train.amp_level} with train.amp_dtype=float16 needs loss scaling, which pretrain "
            "does not have yet; set train.amp_dtype=bfloat16"
        )


def make_optimizer(train: TrainConfig, model: Any, learning_rate: LRScheduler) -> AdamW:
    """The optimizer that a configuration trains a model with."""
    return AdamW(
        learning_rate,
        beta1=train.betas[0],
        beta2=train.betas[1],
        parameters=model.parameters(),
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
