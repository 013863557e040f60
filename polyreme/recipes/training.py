"""Training state of a run: model, optimizer and schedule under a plan, one captured step, and what a checkpoint holds.

Floor: 7.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from polyreme.core import rng, state
from polyreme.distributed.placement import apply_plan, shard_batch
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.nn.clip import ClipGradByGlobalNorm, global_norm
from polyreme.optimizer import AdamW
from polyreme.optimizer.lr import CosineAnnealingDecay, LinearWarmup, LRScheduler
from polyreme.recipes.build import build_model
from polyreme.recipes.config import PretrainConfig, TrainConfig


class Trainer:
    """Everything that training changes, and the step that changes it.

    step(tokens, labels) takes a global batch on the host, int [batch, seq], and returns (loss, gradient norm) as 0-D Tensors
    without waiting for them. A step whose gradients are not finite changes no parameter.
    """

    def __init__(self, config: PretrainConfig) -> None:
        if config.plan.recompute != "none":
            raise ConfigError(f"plan.recompute={config.plan.recompute!r} is not available yet; set it to none")
        self.config = config
        rng.seed(config.train.seed)
        self.model = build_model(config.model)
        self.layout = apply_plan(config.parallel_plan, self.model)
        self.schedule = learning_rate_schedule(config.train)
        train = config.train
        self.optimizer = AdamW(
            self.schedule,
            beta1=train.betas[0],
            beta2=train.betas[1],
            parameters=self.model.parameters(),
            weight_decay=train.weight_decay,
            apply_decay_param_fun=_matrices_only(self.model),
            grad_clip=None if train.clip_norm is None else ClipGradByGlobalNorm(train.clip_norm),
        )
        self.optimizer.create_state()
        self._step = to_static(self._train)
        self._loss = to_static(self._evaluate)

    def step(self, tokens: Any, labels: Any) -> tuple[Tensor, Tensor]:
        """One optimizer step on a global batch."""
        results = self._step(self._place(tokens), self._place(labels))
        self.schedule.step()
        return results

    def evaluate(self, tokens: Any, labels: Any) -> float:
        """Mean loss of a batch, nats a token, with dropout off."""
        self.model.eval()
        try:
            with no_grad():
                return float(self._loss(self._place(tokens), self._place(labels)))
        finally:
            self.model.train()

    def _place(self, batch: Any) -> Tensor:
        return shard_batch(self.layout, batch, "batch", None)

    def _train(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.config.train.accumulation
        size = tokens.shape[0] // parts
        total = None
        for i in range(parts):
            rows = slice(i * size, (i + 1) * size)
            with self._autocast():
                loss = self.model(tokens[rows], labels[rows]) / parts
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        norm = global_norm([p.grad.detach() for p in self.model.parameters()])
        self.optimizer.step(skip=norm.isfinite().logical_not())
        self.optimizer.clear_grad()
        return total, norm

    def _evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            return self.model(tokens, labels)

    def _autocast(self) -> contextlib.AbstractContextManager:
        level = self.config.train.amp_level
        if level == "O0":
            return contextlib.nullcontext()
        return auto_cast(level=level, dtype=self.config.train.amp_dtype)

    # checkpoints

    def tensors(self) -> dict[str, state.TensorState]:
        """Every Tensor a checkpoint holds, by name."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        found: dict[str, state.TensorState] = {f"model/{n}": t for n, t in self.model.state_dict().items()}
        # a tied parameter appears under each of its names but is saved once
        found = {n: t for i, (n, t) in enumerate(found.items()) if all(t is not o for o in list(found.values())[:i])}
        found.update({f"optimizer/{n}": t for n, t in self.optimizer.state_tensors(names).items()})
        return found | {"rng": rng.default_generator.key_state()}

    def arrays(self) -> dict[str, jax.Array]:
        """Values of tensors()."""
        return {n: t._array for n, t in self.tensors().items()}

    def target(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and layout each restored array must have."""
        return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in self.arrays().items()}

    def load(self, arrays: dict[str, jax.Array], schedule: dict[str, Any]) -> None:
        """Continue from restored arrays and the schedule's state."""
        for name, tensor in self.tensors().items():
            state.write(tensor, arrays[name])
        self.schedule.set_state_dict(schedule)


def learning_rate_schedule(train: TrainConfig) -> LRScheduler:
    """Linear warm-up from 0, then a cosine down to min_lr at the last step."""
    steps = max(1, train.steps - train.warmup_steps)
    cosine = CosineAnnealingDecay(train.learning_rate, T_max=steps, eta_min=train.min_lr)
    if not train.warmup_steps:
        return cosine
    return LinearWarmup(cosine, train.warmup_steps, start_lr=train.learning_rate / train.warmup_steps, end_lr=train.learning_rate)


def _matrices_only(model: Any) -> Any:
    """Weight decay pulls on matrices, not on biases and norm gains."""
    decayed = {p.name for p in model.parameters() if p.ndim > 1}
    return decayed.__contains__
