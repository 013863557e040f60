"""Operations of training: gradients by the tape, updates by the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from polyreme.core import state
from polyreme.eager import walk
from polyreme.eager.tensor import Tensor
from polyreme.program.operation import Operation, OperationFrame


@dataclass(kw_only=True)
class Backward(Operation):
    """Gradients of the sum of targets with respect to inputs; zeros where there is none.

    starts: what each target's gradient starts from, None for ones. again: the gradients are differentiated later.
    """

    targets: list[str]
    inputs: list[str]
    starts: list[str | None] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    again: bool = False

    def reads(self) -> list[str]:
        return [*self.targets, *self.inputs, *(s for s in self.starts if s is not None)]

    def run(self, frame: OperationFrame) -> None:
        inputs = [frame.get(name) for name in self.inputs]
        starts = [None if s is None else frame.get(s) for s in self.starts] or [None] * len(self.targets)
        gradients = walk.grad(
            [frame.get(name) for name in self.targets],
            inputs,
            starts,
            retain_graph=True,
            create_graph=self.again,
            allow_unused=True,
            no_grad_vars=[frame.get(name) for name in self.blocked],
        )
        for of, name, x, gradient in zip(self.inputs, self.outputs, inputs, gradients, strict=True):
            tensor: Any = Tensor(jnp.zeros(x._array.shape, x._array.dtype)) if gradient is None else gradient
            frame.define(name, frame.reduced(of, tensor))


@dataclass(kw_only=True)
class Optimize(Operation):
    """One step of an optimizer. key: its name in the scope, where its state is; pairs: (parameter, gradient); rate:
    a value that is the learning rate, if the Program computes it; skip: a 0-D bool that leaves the step out if true."""

    key: str
    optimizer: Any
    pairs: list[tuple[str, str]]
    rate: str | None = None
    skip: str | None = None

    def reads(self) -> list[str]:
        return [*(name for pair in self.pairs for name in pair), *(n for n in (self.rate, self.skip) if n is not None)]

    def writes(self) -> list[str]:
        return [p for p, _ in self.pairs]

    def run(self, frame: OperationFrame) -> None:
        bound = frame.scope.optimizer(self)
        for p, g in self.pairs:
            frame.persistable(p).grad = Tensor(state.read(frame.get(g)))
        if self.rate is not None:
            bound.take_rate(frame.get(self.rate))
        bound.step(skip=None if self.skip is None else frame.get(self.skip))
        for p, _ in self.pairs:
            frame.persistable(p).grad = None


@dataclass(kw_only=True)
class StartOptimizer(Operation):
    """Make an optimizer's state in the scope, as it is before the first step."""

    of: Optimize

    def reads(self) -> list[str]:
        return [p for p, _ in self.of.pairs]

    def writes(self) -> list[str]:
        return []

    def run(self, frame: OperationFrame) -> None:
        # parameters of Layers built before static mode come into the scope with the Program that holds them
        if all(frame.scope.find(p) is not None for p, _ in self.of.pairs):
            frame.scope.start_optimizer(self.of)
