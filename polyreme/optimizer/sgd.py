"""SGD and Momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polyreme.optimizer.groups import flag, nonnegative
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Check, Optimizer
from polyreme.optimizer.update import ParameterOptions, Slots


class SGD(Optimizer):
    """p - lr g."""

    takes_complex: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        multi_precision: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, multi_precision)

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        return p - lr * g, {}, {}


class Momentum(Optimizer):
    """v = momentum v + g; p - lr v, or with use_nesterov p - lr (g + momentum v).

    rescale_grad: factor of every gradient, applied before weight decay. use_multi_tensor: it always is one call.
    """

    slots: Mapping[str, float] = {"velocity": 0.0}
    checks: ClassVar[Mapping[str, Check]] = {"momentum": nonnegative, "use_nesterov": flag, "rescale_grad": nonnegative}
    takes_complex: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        momentum: float = 0.9,
        parameters: Sequence[Any] | None = None,
        use_nesterov: bool = False,
        weight_decay: Any = None,
        grad_clip: Any = None,
        multi_precision: bool = False,
        rescale_grad: float = 1.0,
        use_multi_tensor: bool = False,
        name: str | None = None,
    ) -> None:
        self._settings = {"momentum": momentum, "use_nesterov": use_nesterov, "rescale_grad": rescale_grad}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, multi_precision)

    def prepare(self, g: jax.Array, options: ParameterOptions) -> jax.Array:
        factor = options["rescale_grad"]
        return g if factor == 1.0 else g * jnp.asarray(factor, g.dtype)

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        momentum = options["momentum"]
        v = momentum * slots["velocity"] + g
        move = g + momentum * v if options["use_nesterov"] else v
        return p - lr * move, {"velocity": v}, {}
