"""NAdam and RAdam: Adam's two running means, corrected in other ways.

Source: Dozat, Incorporating Nesterov momentum into Adam (2016), algorithm 8, with the schedule of momentum
of its section 3; arXiv:1908.03265, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.kernels.adamw import bias_correction
from polyreme.optimizer.groups import fraction, nonnegative
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Check, Optimizer
from polyreme.optimizer.update import ParameterOptions, Slots

_WARM_UP = 0.96
_TERMS = np.arange(1, 57)  # 0.5^56 is below the rounding of float64


class _TwoMoments(Optimizer):
    slots: Mapping[str, float] = {"moment1": 0.0, "moment2": 0.0}
    scalars: ClassVar[Mapping[str, float]] = {"step": 0.0}
    checks: ClassVar[Mapping[str, Check]] = {"beta1": fraction, "beta2": fraction, "epsilon": nonnegative}

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        beta1, beta2 = options["beta1"], options["beta2"]
        m = beta1 * slots["moment1"] + (1 - beta1) * g
        v = beta2 * slots["moment2"] + (1 - beta2) * g * g
        numbers = {name: value.astype(v.dtype) for name, value in scalars.items() if name != "step"}
        move = self.move(g, m, v, numbers, options["epsilon"])
        return p - lr * move, {"moment1": m, "moment2": v}, {"step": scalars["step"] + 1}

    def move(self, g: jax.Array, m: jax.Array, v: jax.Array, numbers: Slots, epsilon: float) -> jax.Array:
        """The step at rate 1. numbers: those of the parameter, in its dtype."""
        raise NotImplementedError


class NAdam(_TwoMoments):
    """Adam with Nesterov momentum: looks ahead by the next step's momentum.

    mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2); p - lr (mu_(t+1) m / (1 - mu_1 ... mu_(t+1)) +
    (1 - mu_t) g / (1 - mu_1 ... mu_t)) / (sqrt(v / (1 - beta2^t)) + epsilon).
    """

    checks: ClassVar[Mapping[str, Check]] = {**_TwoMoments.checks, "momentum_decay": nonnegative}
    paddle_slots: ClassVar[Mapping[str, str | None]] = {"momentum_decay_pow": None, "mu_product": None}

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.002,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        momentum_decay: float = 0.004,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        self._settings = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "momentum_decay": momentum_decay}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)

    def numbers(self, scalars: Slots, options: ParameterOptions) -> Slots:
        beta1, decay = options["beta1"], options["momentum_decay"]
        t = _wide(scalars["step"] + 1)
        now, following = _momentum(beta1, decay, t), _momentum(beta1, decay, t + 1)
        product = _momentum_product(beta1, decay, t)
        return {
            "of_mean": following / (1 - product * following),
            "of_gradient": (1 - now) / (1 - product),
            "of_square": bias_correction(options["beta2"], t),
        }

    def move(self, g: jax.Array, m: jax.Array, v: jax.Array, numbers: Slots, epsilon: float) -> jax.Array:
        ahead = numbers["of_mean"] * m + numbers["of_gradient"] * g
        return ahead / (jnp.sqrt(v / numbers["of_square"]) + epsilon)


def _wide(step: jax.Array) -> jax.Array:
    """Steps as wide as floats are: numbers that are nearly equal are subtracted."""
    return step.astype(jnp.result_type(float))


def _momentum(beta: float, decay: float, t: jax.Array) -> jax.Array:
    return beta * (1 - 0.5 * jnp.exp(t * (decay * np.log(_WARM_UP))))


def _momentum_product(beta: float, decay: float, t: jax.Array) -> jax.Array:
    """mu_1 ... mu_t from t alone, an array, so that nothing rounded is kept between steps.

    log(1 - q^i / 2) is -sum over k of (q^i / 2)^k / k; the sum over i = 1..t of q^(k i) is geometric.
    """
    if beta == 0:
        return jnp.zeros_like(t)
    rates = _TERMS * decay * np.log(_WARM_UP)  # log q^k
    if decay == 0:
        sums: Any = t[..., None]
    else:
        sums = jnp.expm1(jnp.asarray(rates, t.dtype) * t[..., None]) * jnp.asarray(
            np.exp(rates) / np.expm1(rates), t.dtype
        )
    logs = -jnp.sum(jnp.asarray(0.5**_TERMS / _TERMS, t.dtype) * sums, -1)
    return jnp.exp(t * np.log(beta) + logs)


class RAdam(_TwoMoments):
    """Adam whose step is scaled by how far the variance of its second moment can be trusted, and is m alone at first.

    rho = rho_inf - 2 t beta2^t / (1 - beta2^t), rho_inf = 2 / (1 - beta2) - 1. Above rho = 5: p - lr r m^
    sqrt(1 - beta2^t) / (sqrt(v) + epsilon), r^2 = (rho - 4)(rho - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho); else
    p - lr m^.
    """

    paddle_slots: ClassVar[Mapping[str, str | None]] = {"rho": None}

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        self._settings = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)

    def numbers(self, scalars: Slots, options: ParameterOptions) -> Slots:
        t, longest = _wide(scalars["step"] + 1), 2 / (1 - options["beta2"]) - 1
        remaining = bias_correction(options["beta2"], t)
        rho = longest - 2 * t * (1 - remaining) / remaining
        ratio = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * jnp.maximum(rho, 1))
        # 0 where the variance cannot be trusted yet, and there alone
        trust = jnp.sqrt(jnp.where(rho > 5, ratio * remaining, 0))
        return {"of_mean": bias_correction(options["beta1"], t), "trust": trust}

    def move(self, g: jax.Array, m: jax.Array, v: jax.Array, numbers: Slots, epsilon: float) -> jax.Array:
        trust = numbers["trust"]
        return m / numbers["of_mean"] * jnp.where(trust > 0, trust / (jnp.sqrt(v) + epsilon), 1)
