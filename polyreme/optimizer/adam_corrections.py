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

from polyreme.optimizer.groups import fraction, nonnegative
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Optimizer
from polyreme.optimizer.update import ParameterOptions, Slots, bias_correction

_WARM_UP = 0.96
_TERMS = np.arange(1, 57)  # 0.5^56 is below the rounding of float64


class _TwoMoments(Optimizer):
    slots: Mapping[str, float] = {"moment1": 0.0, "moment2": 0.0}
    scalars: ClassVar = {"step": 0.0}
    checks: ClassVar = {"beta1": fraction, "beta2": fraction, "epsilon": nonnegative}

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        beta1, beta2 = options["beta1"], options["beta2"]
        step = scalars["step"] + 1
        m = beta1 * slots["moment1"] + (1 - beta1) * g
        v = beta2 * slots["moment2"] + (1 - beta2) * g * g
        return p - lr * self.move(g, m, v, step, options), {"moment1": m, "moment2": v}, {"step": step}

    def move(self, g: jax.Array, m: jax.Array, v: jax.Array, step: jax.Array, options: ParameterOptions) -> jax.Array:
        """The step at rate 1."""
        raise NotImplementedError


class NAdam(_TwoMoments):
    """Adam with Nesterov momentum: looks ahead by the next step's momentum.

    mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2); p - lr (mu_(t+1) m / (1 - mu_1 ... mu_(t+1)) +
    (1 - mu_t) g / (1 - mu_1 ... mu_t)) / (sqrt(v / (1 - beta2^t)) + epsilon).
    """

    checks: ClassVar = {**_TwoMoments.checks, "momentum_decay": nonnegative}

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

    def move(self, g: jax.Array, m: jax.Array, v: jax.Array, step: jax.Array, options: ParameterOptions) -> jax.Array:
        beta1, decay = options["beta1"], options["momentum_decay"]
        t = step.astype(v.dtype)
        now, following = _momentum(beta1, decay, t), _momentum(beta1, decay, t + 1)
        product = _momentum_product(beta1, decay, t)
        ahead = following * m / (1 - product * following) + (1 - now) * g / (1 - product)
        return ahead / (jnp.sqrt(v / bias_correction(options["beta2"], step, v.dtype)) + options["epsilon"])


def _momentum(beta: float, decay: float, t: jax.Array) -> jax.Array:
    return beta * (1 - 0.5 * jnp.exp(t * (decay * np.log(_WARM_UP))))


def _momentum_product(beta: float, decay: float, t: jax.Array) -> jax.Array:
    """mu_1 ... mu_t from t alone, so that nothing rounded is kept between steps.

    log(1 - q^i / 2) is -sum over k of (q^i / 2)^k / k; the sum over i = 1..t of q^(k i) is geometric.
    """
    if beta == 0:
        return jnp.zeros((), t.dtype)
    rates = _TERMS * decay * np.log(_WARM_UP)  # log q^k
    if decay == 0:
        sums: Any = t
    else:
        sums = jnp.expm1(jnp.asarray(rates, t.dtype) * t) * jnp.asarray(np.exp(rates) / np.expm1(rates), t.dtype)
    logs = -jnp.sum(jnp.asarray(0.5**_TERMS / _TERMS, t.dtype) * sums)
    return jnp.exp(t * np.log(beta) + logs)


class RAdam(_TwoMoments):
    """Adam whose step is scaled by how far the variance of its second moment can be trusted, and is m alone at first.

    rho = rho_inf - 2 t beta2^t / (1 - beta2^t), rho_inf = 2 / (1 - beta2) - 1. Above rho = 5: p - lr r m^
    sqrt(1 - beta2^t) / (sqrt(v) + epsilon), r^2 = (rho - 4)(rho - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho); else
    p - lr m^.
    """

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

    def move(self, g: jax.Array, m: jax.Array, v: jax.Array, step: jax.Array, options: ParameterOptions) -> jax.Array:
        beta2 = options["beta2"]
        m_hat = m / bias_correction(options["beta1"], step, m.dtype)
        longest = 2 / (1 - beta2) - 1
        # two numbers near rho_inf are subtracted: as wide as there is
        t = step.astype(jnp.result_type(float))
        remaining = bias_correction(beta2, t, t.dtype)
        rho = longest - 2 * t * (1 - remaining) / remaining
        ratio = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * jnp.maximum(rho, 1))
        trust = jnp.sqrt(jnp.where(rho > 5, ratio * remaining, 0)).astype(v.dtype)
        return m_hat * jnp.where(rho > 5, trust / (jnp.sqrt(v) + options["epsilon"]), 1)
