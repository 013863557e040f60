"""Gradient merge: one update from the gradients of several steps.

Everything that changes is a persistent Tensor and nothing is read on the host, so a captured step may hold
it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.core.meshes import beside
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError
from polyreme.optimizer import Optimizer
from polyreme.optimizer.shared import MeshGroup, by_devices

COUNT = "gradient_merge_count"
"""The entry of a state_dict that says how many steps the sums hold; `<parameter>_gradient_merge_0` is a sum."""


class GradientMerge:
    """Adds up what `step` finds on the parameters; every `steps` calls the optimizer updates from the sum, or the mean.

    Sums are in at least float32 and lie where the gradients do. A step that overflowed (skip) adds nothing and does not
    count. The optimizer computes its update at every call and keeps that of the last: all calls are one program.
    """

    optimizer: Any
    steps: int
    average: bool

    def __init__(self, optimizer: Any, steps: int, average: bool) -> None:
        self.optimizer, self.steps, self.average = optimizer, steps, average
        with state.outside_capture():
            self._count = Tensor(jnp.zeros((), jnp.int32))
        self._sums: dict[int, Tensor] = {}

    def step(self, skip: Tensor | None = None) -> None:
        """Add the gradients; update if that was the last of `steps`."""
        live = self._live()
        for p in live:
            self._ensure(p)
        if not live:
            return
        overflowed = None if skip is None else state.read(skip)
        now = state.read(self._count)
        count, waits = _count(now if overflowed is None else beside(now, overflowed), overflowed, self.steps)
        own = [p._grad for p in live]
        for group in self._groups(live):
            self._add(group, overflowed)
        self.optimizer.step(skip=Tensor(waits))
        for p, grad in zip(live, own, strict=True):
            p._grad = grad
        for group in self._groups(live):
            self._empty(group, waits)
        state.write(self._count, count)

    def _live(self) -> list[Any]:
        for p in self.optimizer._parameters:
            state.touch(p)
        return [p for p in self.optimizer._parameters if not p.stop_gradient and (p._grad is not None or self._has(p))]

    @staticmethod
    def _groups(live: Sequence[Any]) -> list[MeshGroup]:
        # one captured program runs on one mesh, where arrays are not yet anywhere
        return [MeshGroup((), tuple(live))] if state.watch.active else by_devices(live, lambda p: p._array)

    def _add(self, group: MeshGroup, overflowed: Any) -> None:
        """Gradients into sums, and onto the parameters what the optimizer is to take."""
        sums = [self._sums[id(p)] for p in group.parameters]
        totals, used = _add(
            [state.read(s) for s in sums],
            [None if p._grad is None else state.read(p._grad) for p in group.parameters],
            None if overflowed is None else beside(overflowed, group.parameters[0]._array),
            self.steps if self.average else 1,
        )
        for p, held, total, array in zip(group.parameters, sums, totals, used, strict=True):
            state.write(held, total)
            p._grad = Tensor(array)

    def _empty(self, group: MeshGroup, waits: Any) -> None:
        """Begin again where there was an update."""
        sums = [self._sums[id(p)] for p in group.parameters]
        kept = _keep([state.read(s) for s in sums], beside(waits, group.parameters[0]._array))
        for held, array in zip(sums, kept, strict=True):
            state.write(held, array)

    def _has(self, p: Any) -> bool:
        return id(p) in self._sums

    def _ensure(self, p: Any) -> None:
        if self._has(p):
            return
        layout = p.sharding_of("grad") if hasattr(p, "sharding_of") else None
        with state.outside_capture():
            zeros = jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))
            self._sums[id(p)] = Tensor(zeros if layout is None else jax.device_put(zeros, layout))

    # saved

    def state_dict(self) -> dict[str, Any]:
        """The sums so far and how many steps they hold: name -> Tensor."""
        sums = {_name(p): self._sums[id(p)] for p in self.optimizer._parameters if self._has(p)}
        return {**sums, COUNT: self._count}

    def set_state_dict(self, values: Mapping[str, Any]) -> None:
        """Go on from entries of a state_dict; a parameter without one begins at zero.

        Raises CheckpointError, changing nothing, for a sum of another shape than its parameter's.
        """
        parameters = {_name(p): p for p in self.optimizer._parameters}
        for name, value in values.items():
            if name != COUNT and tuple(np.shape(value)) != tuple(parameters[name].shape):
                raise CheckpointError(
                    f"gradient merge: {name} has shape {list(np.shape(value))}, its parameter "
                    f"{list(parameters[name].shape)}"
                )
        self._count.set_value(np.asarray(values.get(COUNT, 0), np.int32).reshape(()) % self.steps)
        for name, p in parameters.items():
            if name in values or self._has(p):
                self._ensure(p)
                value = np.asarray(values[name]) if name in values else np.zeros(p.shape)
                self._sums[id(p)].set_value(value.astype(self._sums[id(p)].dtype))


def _split_state(optimizer: Any, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the entries of a state_dict that gradient merge made, the others)."""
    names = {COUNT, *(_name(p) for p in optimizer._parameters)}
    return {k: v for k, v in values.items() if k in names}, {k: v for k, v in values.items() if k not in names}


def _name(p: Any) -> str:
    return f"{p.name}_gradient_merge_0"


@functools.partial(jax.jit, static_argnums=2)
def _count(count: Any, overflowed: Any, steps: int) -> tuple[Any, Any]:
    """(steps counted so far, True unless this step updates the parameters)."""
    bad = jnp.zeros((), bool) if overflowed is None else overflowed
    count = (count + jnp.where(bad, 0, 1)) % steps
    return count, (count != 0) | bad


@functools.partial(jax.jit, static_argnums=3)
def _add(sums: list[Any], grads: list[Any], overflowed: Any, divisor: int) -> tuple[list[Any], list[Any]]:
    """(the sums with the gradients added, these sums over the divisor)."""
    bad = jnp.zeros((), bool) if overflowed is None else overflowed
    totals = [s if g is None else jnp.where(bad, s, s + g.astype(s.dtype)) for s, g in zip(sums, grads, strict=True)]
    return totals, [t / divisor for t in totals]


@jax.jit
def _keep(totals: list[Any], waits: Any) -> list[Any]:
    """The sums, zero where there was an update."""
    return [jnp.where(waits, t, jnp.zeros_like(t)) for t in totals]


class MergingOptimizer:
    """An optimizer, and `step` merges the gradients of several calls into one update if steps is above 1.

    average: the update takes the mean of the gradients, not their sum. clear_grad between the calls of step() is the
    caller's, as without merge; sums are kept apart from `.grad`. Everything else is the optimizer's. Raises TypeError
    for what is no Optimizer.
    """

    def __init__(self, optimizer: Optimizer, steps: int = 1, average: bool = True) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(self).__name__} takes an Optimizer, got {type(optimizer).__name__}")
        self._inner_opt = optimizer
        self._merge = GradientMerge(optimizer, steps, average) if steps > 1 else None

    def __getattr__(self, name: str) -> Any:
        # __dict__: copying asks for attributes before there are any
        inner = self.__dict__.get("_inner_opt")
        if inner is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(inner, name)

    @property
    def inner_opt(self) -> Optimizer:
        """The optimizer itself."""
        return self._inner_opt

    @property
    def merges(self) -> bool:
        """True if several calls of step() make one update."""
        return self._merge is not None

    def step(self, *, skip: Tensor | None = None) -> None:
        """Update the parameters, or add up their gradients until it is time to.

        skip: a 0-D bool Tensor; where it is True nothing changes.
        """
        if self._merge is None:
            self._inner_opt.step(skip=skip)
        else:
            self._merge.step(skip)

    def minimize(
        self, loss: Tensor, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """The optimizer's minimize; with gradient merge for all parameters only."""
        if self._merge is None:
            return self._inner_opt.minimize(loss, startup_program, parameters, no_grad_set)
        if startup_program is not None or parameters is not None or no_grad_set is not None:
            raise ConfigError("minimize: gradient merge updates all parameters; give the loss alone")
        if all(p._grad is None for p in self._inner_opt._parameters):
            loss.backward()
        self.step()
        return [], [(p, p.grad) for p in self._inner_opt._parameters if p._grad is not None]

    def apply_gradients(self, params_grads: Any) -> None:
        """The optimizer's apply_gradients; ConfigError with gradient merge, which takes its gradients from
        backward()."""
        if self._merge is not None:
            raise ConfigError("apply_gradients passes gradient merge by; set .grad and call step()")
        self._inner_opt.apply_gradients(params_grads)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and the gradients merged so far."""
        return {**self._inner_opt.state_dict(), **(self._merge.state_dict() if self._merge else {})}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict, of a job with or without gradient merge.

        Raises CheckpointError for gradients merged half way where nothing is merged.
        """
        merged, others = _split_state(self._inner_opt, state_dict)
        count = int(np.asarray(merged.get(COUNT, 0)))
        if self._merge is None and count:
            raise CheckpointError(
                f"the state_dict holds gradients merged over {count} steps, and this optimizer merges none; set "
                "strategy.gradient_merge, or save right after an update"
            )
        self._inner_opt.set_state_dict(others)
        if self._merge is not None:
            self._merge.set_state_dict(merged)

    set_dict = set_state_dict
