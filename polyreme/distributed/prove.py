"""prove: a model's training step under a plan, shown equal to the same step on one device.

Each step both sides begin with the very same weights, optimizer state and random key, so nothing is
amplified from step to step and the bounds stay tight. Compared are: the loss; every gradient; every weight and every
array of optimizer state after an update from the same gradients; and checkpoints saved by each side and restored by the
other, bit for bit.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.engine.backend import Device
from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, NumericsError
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter
from polyreme.optimizer import Optimizer
from polyreme.training import FULL_PRECISION, MixedPrecision, StepPolicy

WHATS = ("loss", "gradient", "weight", "optimizer state", "checkpoint of the plan", "checkpoint of one device")


@dataclass(frozen=True)
class Difference:
    """One tensor compared: the largest absolute error, and the largest the arithmetic explains (0: bit for bit)."""

    what: str
    name: str
    step: int
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """True if the two are equal as far as they must be; an error that is not a number is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Proof:
    """The comparisons of one proof, in the order they were computed."""

    plan: Plan
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """True if the plan equals one device."""
        return all(d.holds for d in self.differences)

    @property
    def first_difference(self) -> Difference | None:
        """The first tensor that differs."""
        return next((d for d in self.differences if not d.holds), None)

    def __str__(self) -> str:
        rows = [("compared", "tensors", "largest error", "of its tolerance", "in")]
        for what in WHATS:
            found = [d for d in self.differences if d.what == what]
            if found:
                rows.append(_row(what, found))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        first = self.first_difference
        if first is None:
            verdict = f"proved: {self.plan.mesh} equals one device"
        else:
            verdict = (
                f"NOT equal: first the {first.what} {first.name} of step {first.step} differs by {first.error:.3g}, "
                f"tolerance {first.tolerance:.3g}"
            )
        return "\n".join([*lines, verdict])


def prove(
    build: Callable[[], Layer],
    plan: Plan,
    batches: Sequence[tuple[Any, Any]],
    *,
    optimizer: Callable[[Layer], Optimizer],
    amp: tuple[str, str] | None = None,
    policy: StepPolicy | None = None,
    devices: Sequence[Device] | None = None,
    folder: str | Path | None = None,
    seed: int = 0,
    loss: Callable[[Any, Any, Any], Tensor] | None = None,
    count: Callable[[Any], float] | None = None,
) -> Proof:
    """Run one training step per batch under plan and on one device, and compare everything.

    build: makes the model, a function of (inputs, labels) that returns its mean loss; under a pipeline it has
    pipeline_items() and pipeline_loss(output, labels), or is a PipelineLayer with a loss_fn. batches: (inputs, labels)
    arrays `[batch, ...]`, cut into the plan's number of microbatches. optimizer: makes the optimizer of a model. amp:
    (level, dtype) of auto_cast, short for a policy of that precision. policy: the step's; what is compared are the two
    halves of the very step that training runs under it. folder: where the checkpoints go, a temporary one by default.
    loss: of (model, inputs, labels), if not what the model returns; count: as of a PlannedStep. The plan in force is
    cleared.

    Raises ConfigError for no batches, for amp beside a policy, or a model a pipeline cannot cut, NumericsError for a
    loss that is not finite on one device, and what placing the model raises.
    """
    if not batches:
        raise ConfigError("prove needs at least one batch; give [(inputs, labels), ...]")
    if policy is None:
        policy = StepPolicy() if amp is None else StepPolicy(MixedPrecision(*amp, master_grad=True))
    elif amp is not None:
        raise ConfigError(
            f"prove: amp={amp!r} beside a policy, which has a precision of its own; set policy.precision instead"
        )
    one = Plan(num_microbatches=plan.num_microbatches)
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(folder if folder is not None else temporary)
        try:
            ours = _Side(build, plan, optimizer, policy, devices, seed, loss, count)
            alone = _Side(build, one, optimizer, policy, jax.local_devices()[:1], seed, loss, count)
            differences = [*_compare("weight", 0, ours.weights(), alone.weights(), {})]
            for step, (inputs, labels) in enumerate(batches, 1):
                differences += _step(ours, alone, step, inputs, labels)
                differences += _restore(ours, alone, where / "plan", step, "checkpoint of the plan")
            differences += _restore(alone, ours, where / "one", len(batches), "checkpoint of one device")
        finally:
            clear_plan()
    return Proof(plan, tuple(differences))


def _step(ours: _Side, alone: _Side, step: int, inputs: Any, labels: Any) -> list[Difference]:
    key = np.asarray(rng.default_generator.get_state())
    loss, grads = ours.gradients(inputs, labels)
    rng.default_generator.set_state(key)
    want, want_grads = alone.gradients(inputs, labels)
    if not np.isfinite(want).all():
        raise NumericsError(
            f"prove: the loss of step {step} on one device is {want}, which nothing can be compared with; give a batch "
            "and a model whose loss is finite (token ids inside the vocabulary, say)"
        )
    bound = Bound.of(alone.weights(), inputs, alone.precision)
    differences = _compare("loss", step, {"loss": loss}, {"loss": want}, {"loss": bound.loss(want)})
    largest = max(bound.largest(g) for g in want_grads.values()) if want_grads else 0.0
    gradients = {n: bound.gradient(g, largest) for n, g in want_grads.items()}
    differences += _compare("gradient", step, grads, want_grads, gradients)
    before = alone.weights()
    # from the same gradients on: what one device's rounding would make of them is no matter of the plan
    alone.set_gradients(grads)
    ours.update()
    alone.update()
    want_weights, want_state = alone.weights(), alone.optimizer_state()
    moved = {n: bound.largest(np.asarray(w, np.float64) - before[n]) for n, w in want_weights.items()}
    weights = {n: bound.update(w, moved[n]) for n, w in want_weights.items()}
    # the forward wrote the buffers, from sums over the batch
    buffers = {n: w for n, w in want_weights.items() if n not in alone.parameter_names}
    largest = max(map(bound.largest, buffers.values()), default=0.0)
    weights |= {n: bound.gradient(b, largest) for n, b in buffers.items() if dtypes.is_inexact(b.dtype)}
    differences += _compare("weight", step, ours.weights(), want_weights, weights)
    states = {n: bound.update(s, bound.largest(s)) for n, s in want_state.items()}
    differences += _compare("optimizer state", step, ours.optimizer_state(), want_state, states)
    return differences


@dataclass(frozen=True)
class Bound:
    """Bounds on the change of a result by rounding alone when sums are taken in another order.

    eps: of the arithmetic. terms: summands of the longest sum, rows of the batch times the longest dim. depth: how many
    such sums follow one another. An error of a sum of n terms grows like eps sqrt(n) (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2, for rounding errors that are independent), and those of a chain add up likewise.
    """

    eps: float
    terms: int
    depth: int

    @classmethod
    def of(cls, weights: Mapping[str, np.ndarray], inputs: Any, precision: MixedPrecision = FULL_PRECISION) -> Bound:
        """The bounds for a model with these weights on a batch."""
        leaves = [np.asarray(a) for a in jax.tree.leaves(inputs) if np.ndim(a)]
        positions = max((math.prod(a.shape[:2]) for a in leaves), default=1)
        longest = max(max(w.shape, default=1) for w in weights.values())
        low = [np.dtype(dtypes.as_dtype(precision.dtype))] if precision.is_on else []
        kinds = [*low, *(w.dtype for w in weights.values() if dtypes.is_inexact(w.dtype))]
        eps = max((float(jax.numpy.finfo(d).eps) for d in kinds), default=0.0)
        return cls(eps, positions * longest, len(weights))

    def loss(self, value: np.ndarray) -> float:
        """The bound for the mean loss: its last sum runs over the batch; earlier sums only perturb its terms."""
        return self._relative * self.largest(value)

    def gradient(self, value: np.ndarray, largest: float) -> float:
        """The bound for a gradient, from its largest element: small elements are differences of large terms. A gradient
        that is nothing but rounding, as that of a bias that cancels, is bounded by the largest element of all
        gradients."""
        return self._relative * self.largest(value) + self.eps * math.sqrt(self.depth) * largest

    @staticmethod
    def largest(value: np.ndarray) -> float:
        """The largest absolute value of an array."""
        wide = np.complex128 if dtypes.is_complex(value.dtype) else np.float64
        return float(np.abs(np.asarray(value, wide)).max(initial=0))

    def update(self, value: np.ndarray, moved: float) -> float:
        """The bound for parameters that an update moves by at most `moved`: the gradients' common norm is summed in
        another order, the rest is the same few roundings element by element, at most 8."""
        own = float(jax.numpy.finfo(value.dtype).eps) if dtypes.is_inexact(value.dtype) else 0.0
        single = max(own, 2.0**-23)
        return 8 * single * moved * (1 + math.sqrt(self.depth)) + own * self.largest(value)

    @property
    def _relative(self) -> float:
        return self.eps * math.sqrt(self.depth) * (math.sqrt(self.terms) if self.eps < 2.0**-20 else 1.0)


class _Side:
    """A model under a plan with its optimizer: the two halves of its training step, checkpoints."""

    def __init__(
        self,
        build: Callable[[], Layer],
        plan: Plan,
        optimizer: Callable[[Layer], Optimizer],
        policy: StepPolicy,
        devices: Sequence[Device] | None,
        seed: int,
        loss: Callable[[Any, Any, Any], Tensor] | None,
        count: Callable[[Any], float] | None,
    ) -> None:
        clear_plan()
        rng.seed(seed)
        self.plan, self.precision = plan, policy.precision
        self.model = build()
        self.planned = PlannedStep(self.model, plan, optimizer, policy, devices, loss, count)
        self.layout, self.optimizer = self.planned.layout, self.planned.optimizer
        self._mean: Any = None
        self._names = {id(p): n for n, p in self.model.named_parameters()}

    def gradients(self, inputs: Any, labels: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The mean loss, and the gradient of every parameter that has one."""
        self._here()
        self._mean, _ = self.planned.step.gradients(self.planned.cut(inputs, labels))
        gradients = {n: np.asarray(p._grad._array) for n, p in self._parameters() if p._grad is not None}
        return np.asarray(self._mean._array), gradients

    def set_gradients(self, values: Mapping[str, np.ndarray]) -> None:
        """Take these as the gradients."""
        for name, p in self._parameters():
            if p._grad is not None and name in values:  # one that is missing has been told as a difference
                state.write(p._grad, put(values[name].astype(p._grad.dtype), p._grad._array.sharding))

    def update(self) -> None:
        """The step's second half from the gradients there are, which are then cleared."""
        self._here()
        self.planned.step.update(self._mean)

    def weights(self) -> dict[str, np.ndarray]:
        """Every parameter and buffer."""
        return {n: np.asarray(t._array) for n, t in self.model.state_dict().items()}

    def optimizer_state(self) -> dict[str, np.ndarray]:
        """Every array of the optimizer."""
        return {n: np.asarray(a) for n, a in self.optimizer.state_arrays(self._names).items()}

    def arrays(self) -> dict[str, jax.Array]:
        """The arrays of a checkpoint."""
        found = {f"model/{n}": state.read(t) for n, t in self.model.state_dict().items()}
        return found | {f"optimizer/{n}": a for n, a in self.optimizer.state_arrays(self._names).items()}

    def load(self, arrays: Mapping[str, jax.Array]) -> None:
        """Continue from a checkpoint."""
        for name, tensor in self.model.state_dict().items():
            state.write(tensor, arrays[f"model/{name}"])
        own = {n.removeprefix("optimizer/"): a for n, a in arrays.items() if n.startswith("optimizer/")}
        self.optimizer.load_state_arrays(own, self._names)

    @property
    def parameter_names(self) -> set[str]:
        """Names among those of weights() that the optimizer, not the forward, changes."""
        return {n for n, t in self.model.state_dict().items() if isinstance(t, Parameter) and not t.is_statistic}

    def _parameters(self) -> list[tuple[str, Any]]:
        return list(self.model.named_parameters())

    def _here(self) -> None:
        """Put this side's layout in force, the random key with it."""
        layouts.active.layout = self.layout
        holder = rng.default_generator.key_state()
        state.write(holder, put(np.asarray(holder._array), self.layout.stageless()))


def _restore(saver: _Side, loader: _Side, folder: Path, step: int, what: str) -> list[Difference]:
    """saver's state in a checkpoint, restored by loader, which continues from it."""
    with CheckpointStore(folder) as store:
        store.save(step, saver.arrays(), {}, blocking=True)
        target = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in loader.arrays().items()}
        arrays, _ = store.restore(target, step)
    saved = {n: np.asarray(a) for n, a in saver.arrays().items()}
    loader.load(arrays)
    return _compare(what, step, {n: np.asarray(a) for n, a in loader.arrays().items()}, saved, {})


def _compare(
    what: str, step: int, ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerances: Mapping[str, float]
) -> list[Difference]:
    """One Difference a tensor; a tensor that one side lacks differs by infinity."""
    differences = []
    for name in dict.fromkeys([*theirs, *ours]):
        a, b = ours.get(name), theirs.get(name)
        error = math.inf
        if a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype:
            wide = np.complex128 if dtypes.is_complex(a.dtype) else np.float64
            error = float(np.abs(np.asarray(a, wide) - np.asarray(b, wide)).max(initial=0))
            error = math.inf if math.isnan(error) else error
        differences.append(Difference(what, name, step, error, tolerances.get(name, 0.0)))
    return differences


def _row(what: str, differences: Sequence[Difference]) -> tuple[str, str, str, str, str]:
    def part(d: Difference) -> float:
        return d.error / d.tolerance if d.tolerance else (0.0 if d.error == 0 else math.inf)

    worst = max(differences, key=part)
    number = len({d.name for d in differences})
    if not any(d.tolerance for d in differences):
        return (what, str(number), f"{max(d.error for d in differences):.2g}", "bit for bit", worst.name)
    return (what, str(number), f"{worst.error:.2g}", f"{part(worst):.3f}", worst.name)
