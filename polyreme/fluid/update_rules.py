"""Update rules of 1.7 that polyreme.optimizer has not, or otherwise: Adadelta, LAMB, LARS, decayed
Adagrad, FTRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polyreme.errors import ConfigError
from polyreme.optimizer import adaptive, lamb
from polyreme.optimizer.groups import fraction, nonnegative
from polyreme.optimizer.optimizer import Check, Optimizer, ParameterOptions
from polyreme.optimizer.update import Slots


class Adadelta(adaptive.Adadelta):
    """Steps of size RMS(past steps) / RMS(past gradients): the method, and 1.x's update, has no learning rate.

    Source: arXiv:1212.5701, algorithm 1.
    """

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        return super().rule(p, g, jnp.ones_like(lr), slots, scalars, options)


class Lamb(lamb.Lamb):
    """LAMB with means as they are, not corrected for their start, and lr |p| / |r| whatever the decay is.

    Source: arXiv:1904.00962v3, algorithm 2, without its lines on corrected means.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(always_adapt=True, **settings)

    def numbers(self, scalars: Slots, options: ParameterOptions) -> Slots:
        return {"of_mean": jnp.ones_like(scalars["step"]), "of_square": jnp.ones_like(scalars["step"])}


class LarsMomentum(Optimizer):
    """v = momentum v + r lr (g + d p), p - v, with d = lars_weight_decay and

        r = lars_coeff ||p|| / (||g|| + d ||p|| + epsilon).

    r is 1 where ||p||, ||g|| or d is 0. d is 0 for parameters in whose name one of exclude_from_weight_decay stands; g
    is rescale_grad times the gradient. Source: arXiv:1708.03888, algorithm 1.
    """

    slots: Mapping[str, float] = {"velocity": 0.0}
    checks: ClassVar[Mapping[str, Check]] = {
        "momentum": nonnegative,
        "lars_coeff": nonnegative,
        "lars_weight_decay": nonnegative,
        "epsilon": nonnegative,
        "rescale_grad": nonnegative,
    }

    def __init__(
        self, learning_rate: Any = 0.001, momentum: float = 0.9, lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005, parameters: Sequence[Any] | None = None, weight_decay: Any = None,
        grad_clip: Any = None, name: str | None = None, exclude_from_weight_decay: Sequence[str] | None = None,
        epsilon: float = 0.0, multi_precision: bool = False, rescale_grad: float = 1.0,
    ) -> None:  # fmt: skip
        if isinstance(exclude_from_weight_decay, str):
            raise ConfigError(
                f"LarsMomentum: exclude_from_weight_decay={exclude_from_weight_decay!r}; give a list of parts of names"
            )
        self._excluded = tuple(exclude_from_weight_decay or ())
        self._settings = {
            "momentum": momentum, "lars_coeff": lars_coeff, "lars_weight_decay": lars_weight_decay, "epsilon": epsilon,
            "rescale_grad": rescale_grad,
        }  # fmt: skip
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, multi_precision)

    def options_of(self, param: Any) -> tuple[tuple[str, Any], ...]:
        return (("decays", not any(part in param.name for part in self._excluded)),)

    def prepare(self, g: jax.Array, options: ParameterOptions) -> jax.Array:
        factor = options["rescale_grad"]
        return g if factor == 1 else g * factor

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        decay = options["lars_weight_decay"] if options["decays"] else 0.0
        size, slope = (jnp.sqrt(jnp.sum(jnp.square(v))) for v in (p, g))
        moves = (size > 0) & (slope > 0) & (decay > 0)
        scale = jnp.where(moves, slope + decay * size + options["epsilon"], 1.0)
        ratio = jnp.where(moves, options["lars_coeff"] * size / scale, 1.0)
        velocity = options["momentum"] * slots["velocity"] + ratio * lr * (g + decay * p)
        return p - velocity, {"velocity": velocity}, {}


class DecayedAdagrad(Optimizer):
    """p - lr g / (sqrt(s) + epsilon) with s = decay s + (1 - decay) g^2."""

    slots: Mapping[str, float] = {"moment": 0.0}
    checks: ClassVar[Mapping[str, Check]] = {"decay": fraction, "epsilon": nonnegative}

    def __init__(
        self, learning_rate: Any = 0.001, decay: float = 0.95, epsilon: float = 1e-6,
        parameters: Sequence[Any] | None = None, weight_decay: Any = None, grad_clip: Any = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self._settings = {"decay": decay, "epsilon": epsilon}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        s = options["decay"] * slots["moment"] + (1 - options["decay"]) * g * g
        return p - lr * g / (jnp.sqrt(s) + options["epsilon"]), {"moment": s}, {}


class Ftrl(Optimizer):
    """Follow the regularized leader: with n the sum of g^2, z adds up g - (n^-lr_power - before^-lr_power) / lr p, and

        p = 0 where |z| <= l1, else (l1 sign(z) - z) / (n^-lr_power / lr + 2 l2).

    Source: McMahan et al., 2013, algorithm 1, with beta = 0 and 2 l2 for its lambda2.
    """

    slots: Mapping[str, float] = {"squared": 0.0, "linear": 0.0}
    checks: ClassVar[Mapping[str, Check]] = {"l1": nonnegative, "l2": nonnegative, "power": nonnegative}

    def __init__(
        self, learning_rate: Any = 0.001, l1: float = 0.0, l2: float = 0.0, lr_power: float = -0.5,
        parameters: Sequence[Any] | None = None, weight_decay: Any = None, grad_clip: Any = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self._settings = {"l1": l1, "l2": l2, "power": -lr_power}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        l1, power = options["l1"], options["power"]
        n = slots["squared"] + g * g
        slope = n**power / lr
        z = slots["linear"] + g - (slope - slots["squared"] ** power / lr) * p
        # where n is 0 so is z, and p becomes 0
        moved = (l1 * jnp.sign(z) - z) / jnp.where(n > 0, slope + 2 * options["l2"], 1.0)
        return jnp.where(jnp.abs(z) > l1, moved, 0.0), {"squared": n, "linear": z}, {}
