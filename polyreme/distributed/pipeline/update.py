"""An optimizer's step over the stages of a pipeline: one captured program a stage, so that the state it writes is
donated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.amp import GradScaler
from polyreme.core import state
from polyreme.core.checked import step_done, wait_for_programs
from polyreme.core.meshes import everywhere
from polyreme.distributed.pipeline.processes import from_all
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.jit import to_static
from polyreme.optimizer import Optimizer
from polyreme.optimizer.shared import MeshGroup

_NOTHING = np.zeros(())


class StagedUpdate:
    """Updates all parameters from their gradients, which are then cleared.

    The gradients' norms come from every stage before any stage updates: `squares` first, then `step` with what it gave.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # whose gradients a GradScaler unscales before it calls step(skip=...)
        self._parameters = optimizer._parameters
        self._groups = optimizer.groups_by_mesh()
        # which groups this process has devices of; all of them unless stages lie in several processes
        self._are_here = [bool(g.parameters[0]._array.sharding.addressable_devices) for g in self._groups]
        self._is_spread = any(not g.parameters[0]._array.is_fully_addressable for g in self._groups)
        norms = [_squares_of(optimizer, group) for group in self._groups]
        # gradients on disk are looked at one by one, which no program does
        has_stored = any(isinstance(p._array, state.Elsewhere) for p in self._parameters)
        self._squares: list[Any] = norms if has_stored else [to_static(norm) for norm in norms]
        is_mixed = len({kind for group in self._groups for kind, _ in group.devices}) > 1
        # a program is traced and compiled for its own kind of devices
        self._tracing = [group.tracing if is_mixed else nullcontext for group in self._groups]
        updates = [_update_of(optimizer, group) for group in self._groups]
        # state on disk is updated bucket by bucket, which no program holds
        self._updates: list[Any] = updates if optimizer.is_streamed else [to_static(update) for update in updates]
        # the gradients as Tensors of ours, which a captured program may hold on to without keeping arrays alive
        self._gradients: dict[int, Tensor] = {}

    @staticmethod
    def serves(optimizer: Any) -> bool:
        """True for an optimizer whose step() is what this does."""
        return (
            isinstance(optimizer, Optimizer)
            and type(optimizer).step is Optimizer.step
            and type(optimizer)._step is Optimizer._step
        )

    def squares(self) -> list[Tensor]:
        """From each stage, the sum of squares of the gradient of every parameter of the optimizer; 0 for other
        stages'."""
        self._take()
        if not self._is_spread:
            return [_within(tracing, run) for run, tracing in zip(self._squares, self._tracing, strict=True)]
        ours = [
            np.asarray(run()._array) if has else None for run, has in zip(self._squares, self._are_here, strict=True)
        ]
        theirs = from_all(ours)
        return [Tensor(jnp.asarray(theirs[_leader(group)][i])) for i, group in enumerate(self._groups)]

    def step(
        self, squares: Sequence[Tensor] | None = None, skip: Tensor | None = None, factor: Tensor | None = None
    ) -> None:
        """Clip, update, clear. squares: what squares() gave, computed here if left out and needed. skip: a 0-d bool
        Tensor; where it is True nothing changes but the gradients are cleared. factor: a number that the gradients are
        multiplied by before all else; squares are those of before."""
        wait_for_programs()
        step_done(self.optimizer)
        if squares is None:
            squares = self.squares() if self.optimizer.clips_together else ()
        self._take()
        for group, update, has, tracing in zip(self._groups, self._updates, self._are_here, self._tracing, strict=True):
            if has:
                _within(tracing, update, *self._arguments(group, squares, skip, factor))
        for tensor in self._gradients.values():
            tensor._array = _NOTHING
        self._gradients.clear()

    def compiled(self, squares: Sequence[Tensor], skip: Tensor | None = None) -> list[tuple[MeshGroup, list[Any]]]:
        """The programs of squares() and step(squares, skip) of each stage for the present gradients, compiled and not
        run: jax.stages.Compiled."""
        self._take()
        return [
            (
                group,
                [
                    _within(tracing, norms.compiled),
                    _within(tracing, update.compiled, *self._arguments(group, squares, skip)),
                ],
            )
            for group, norms, update, tracing in zip(
                self._groups, self._squares, self._updates, self._tracing, strict=True
            )
        ]

    def unscale(self, scaler: GradScaler) -> None:
        """scaler.unscale_ over stages that lie in several processes; scaler.step then takes this object."""
        if not self._is_spread or not scaler.is_enable():
            return
        self._take()
        scale = scaler.get_loss_scaling()
        ours = [
            bool(scaler.unscale_group(group.parameters, self._placed(group, scale)).numpy())
            for group, has in zip(self._groups, self._are_here, strict=True)
            if has
        ]
        scaler.note(self, [Tensor(jnp.asarray(any(map(any, from_all(ours)))))])

    def share_numbers(self) -> None:
        """Tell every process the numbers that the optimizer keeps per parameter of stages that others hold, as a
        checkpoint needs; all processes must call it."""
        if not self._is_spread:
            return
        copies = self.optimizer._shared.copies
        ours = [
            {n: np.asarray(t._array) for n, t in copies[group.devices].scalars.items()} if has else None
            for group, has in zip(self._groups, self._are_here, strict=True)
        ]
        theirs = from_all(ours)
        for i, (group, has) in enumerate(zip(self._groups, self._are_here, strict=True)):
            for name, tensor in copies[group.devices].scalars.items():
                if not has:
                    state.write(tensor, jnp.asarray(theirs[_leader(group)][i][name]))

    def _arguments(
        self, group: MeshGroup, squares: Sequence[Tensor], skip: Tensor | None, factor: Tensor | None = None
    ) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
        """The arguments of a group's update."""
        ours = [self._placed(group, s) for s in squares] if self.optimizer.clips_together else []
        skip, factor = (None if number is None else self._placed(group, number) for number in (skip, factor))
        return skip, ours, factor

    def _placed(self, group: MeshGroup, tensor: Tensor) -> Tensor:
        """A small Tensor on a group's devices."""
        if not self._is_spread:
            return group.here(tensor)
        return Tensor(put(np.asarray(tensor._array), everywhere(group.parameters[0]._array.sharding)))

    def _take(self) -> None:
        for p in self._parameters:
            if p._grad is not None and self._gradients.get(id(p)) is not p._grad:
                p._grad = self._gradients[id(p)] = Tensor(p._grad._array)


def frozen_settings(optimizer: Optimizer) -> tuple[Any, ...]:
    """The settings of the parameters that a StagedUpdate is made for; once one changes another StagedUpdate is
    needed."""
    return tuple(
        (
            p.stop_gradient,
            getattr(p, "optimize_attr", {}).get("learning_rate", 1.0),
            getattr(p, "regularizer", None),
            getattr(p, "need_clip", True),
        )
        for p in optimizer._parameters
    )


def _within(context: Callable[[], Any], run: Callable[..., Any], *args: Any) -> Any:
    with context():
        return run(*args)


def _leader(group: MeshGroup) -> int:
    """The rank that speaks for a group: the lowest that has devices of it."""
    return min(device.process_index for device in group.parameters[0]._array.sharding.device_set)


def _squares_of(optimizer: Optimizer, group: MeshGroup) -> Callable[[], Tensor]:
    def squared_norms() -> Tensor:
        return optimizer.squared_norms(group)

    return squared_norms


def _update_of(optimizer: Optimizer, group: MeshGroup) -> Callable[[Any, list[Tensor], Any], None]:
    def update(skip: Any, squares: list[Tensor], factor: Any) -> None:
        if factor is not None:
            squares = [s * factor * factor for s in squares]
            for p in group.parameters:
                if p.grad is not None:
                    p.grad = (p.grad * factor).astype(p.grad.dtype)
        optimizer.update_group(group, skip, squares)
        for p in group.parameters:
            p.clear_grad(set_to_zero=False)

    return update
