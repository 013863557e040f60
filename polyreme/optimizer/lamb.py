"""Lamb: Adam's direction, with a step length for each parameter in proportion to its norm.

Source: arXiv:1904.00962, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polyreme.errors import ConfigError
from polyreme.kernels.adamw import bias_correction
from polyreme.optimizer.groups import flag, fraction, nonnegative
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Check, Optimizer
from polyreme.optimizer.update import ParameterOptions, Slots


class Lamb(Optimizer):
    """r = m^ / (sqrt(v^) + epsilon) + lamb_weight_decay p; p - lr |p| / |r| r, with |p| / |r| = 1 where either is 0.

    exclude_from_weight_decay_fn: Parameter -> True to leave its decay out; then its step length is lr too, unless
    always_adapt.
    """

    slots: Mapping[str, float] = {"moment1": 0.0, "moment2": 0.0}
    by_element: ClassVar[bool] = False
    scalars: ClassVar[Mapping[str, float]] = {"step": 0.0}
    checks: ClassVar[Mapping[str, Check]] = {
        "lamb_weight_decay": nonnegative, "beta1": fraction, "beta2": fraction, "epsilon": nonnegative,
        "always_adapt": flag,
    }  # fmt: skip

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameters: Sequence[Any] | None = None,
        grad_clip: Any = None,
        exclude_from_weight_decay_fn: Callable[[Any], bool] | None = None,
        multi_precision: bool = False,
        always_adapt: bool = False,
        name: str | None = None,
    ) -> None:
        if exclude_from_weight_decay_fn is not None and not callable(exclude_from_weight_decay_fn):
            raise ConfigError(
                f"Lamb: exclude_from_weight_decay_fn is a function or None, got {exclude_from_weight_decay_fn!r}"
            )
        self._excluded = exclude_from_weight_decay_fn
        self._settings = {
            "lamb_weight_decay": lamb_weight_decay, "beta1": beta1, "beta2": beta2, "epsilon": epsilon,
            "always_adapt": always_adapt,
        }  # fmt: skip
        super().__init__(learning_rate, parameters, None, grad_clip, name, multi_precision)

    def options_of(self, param: Any) -> tuple[tuple[str, Any], ...]:
        return (("decays", self._excluded is None or not self._excluded(param)),)

    def numbers(self, scalars: Slots, options: ParameterOptions) -> Slots:
        step = scalars["step"] + 1
        of_mean, of_square = (bias_correction(options[beta], step) for beta in ("beta1", "beta2"))
        return {"of_mean": of_mean, "of_square": of_square}

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        beta1, beta2 = options["beta1"], options["beta2"]
        decay = options["lamb_weight_decay"] if options["decays"] else 0.0
        m = beta1 * slots["moment1"] + (1 - beta1) * g
        v = beta2 * slots["moment2"] + (1 - beta2) * g * g
        m_hat, v_hat = m / scalars["of_mean"].astype(p.dtype), v / scalars["of_square"].astype(p.dtype)
        r = m_hat / (jnp.sqrt(v_hat) + options["epsilon"]) + decay * p
        if decay > 0 or options["always_adapt"]:
            lr = lr * _trust(p, r)
        return p - lr * r, {"moment1": m, "moment2": v}, {"step": scalars["step"] + 1}


def _trust(p: jax.Array, r: jax.Array) -> jax.Array:
    norm_p, norm_r = jnp.sqrt(jnp.sum(p * p)), jnp.sqrt(jnp.sum(r * r))
    usable = (norm_p > 0) & (norm_r > 0)
    return jnp.where(usable, norm_p / jnp.where(usable, norm_r, 1), 1)
