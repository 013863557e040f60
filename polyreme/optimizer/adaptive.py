"""Adagrad, Adadelta and RMSProp.

Source: Duchi et al., JMLR 12 (2011), section 1.1; arXiv:1212.5701, algorithm 1; Tieleman and Hinton,
lecture 6.5 (2012), with centering from arXiv:1308.0850, equations 38 to 45.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polyreme.optimizer.groups import fraction, nonnegative
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Check, Optimizer
from polyreme.optimizer.update import ParameterOptions, Slots


class Adagrad(Optimizer):
    """s = s + g^2 from s = initial_accumulator_value; p - lr g / (sqrt(s) + epsilon)."""

    slots: Mapping[str, float] = {"moment": 0.0}
    checks: ClassVar[Mapping[str, Check]] = {"epsilon": nonnegative, "initial_accumulator_value": nonnegative}

    def __init__(
        self,
        learning_rate: float | LRScheduler,
        epsilon: float = 1e-6,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        self._settings = {"epsilon": epsilon, "initial_accumulator_value": initial_accumulator_value}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)

    def slot_start(self, name: str, param: Any) -> float:
        return self.setting(param, "initial_accumulator_value")

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        s = slots["moment"] + g * g
        return p - lr * g / (jnp.sqrt(s) + options["epsilon"]), {"moment": s}, {}


class Adadelta(Optimizer):
    """Steps of size lr RMS(past steps) / RMS(past gradients); both means decay by rho, epsilon is inside both roots."""

    slots: Mapping[str, float] = {"avg_squared_grad": 0.0, "avg_squared_update": 0.0}
    paddle_slots: ClassVar[Mapping[str, str | None]] = {f"_{name}": name for name in slots}
    checks: ClassVar[Mapping[str, Check]] = {"epsilon": nonnegative, "rho": fraction}

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        epsilon: float = 1e-6,
        rho: float = 0.95,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        self._settings = {"epsilon": epsilon, "rho": rho}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        rho, epsilon = options["rho"], options["epsilon"]
        squares = rho * slots["avg_squared_grad"] + (1 - rho) * g * g
        move = jnp.sqrt((slots["avg_squared_update"] + epsilon) / (squares + epsilon)) * g
        moves = rho * slots["avg_squared_update"] + (1 - rho) * move * move
        return p - lr * move, {"avg_squared_grad": squares, "avg_squared_update": moves}, {}


class RMSProp(Optimizer):
    """v = momentum v + lr g / sqrt(E[g^2] + epsilon); p - v. Means decay by rho. centered: minus E[g]^2 in the root."""

    slots: Mapping[str, float] = {"mean_square": 0.0, "momentum": 0.0}  # centered adds one in an instance
    paddle_slots: ClassVar[Mapping[str, str | None]] = {"mean_grad": None}
    checks: ClassVar[Mapping[str, Check]] = {"rho": fraction, "epsilon": nonnegative, "momentum": nonnegative}

    def __init__(
        self,
        learning_rate: float | LRScheduler,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        self._settings = {"rho": rho, "epsilon": epsilon, "momentum": momentum}
        if centered:
            self.slots = {**self.slots, "mean_grad": 0.0}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        rho = options["rho"]
        new = {"mean_square": rho * slots["mean_square"] + (1 - rho) * g * g}
        spread = new["mean_square"]
        if "mean_grad" in slots:
            new["mean_grad"] = rho * slots["mean_grad"] + (1 - rho) * g
            # the difference is a variance: rounding must not take it below 0
            spread = jnp.maximum(spread - new["mean_grad"] ** 2, 0)
        new["momentum"] = options["momentum"] * slots["momentum"] + lr * g / jnp.sqrt(spread + options["epsilon"])
        return p - new["momentum"], new, {}
