"""Optimizers that remember gradients: ASGD (one for each batch of an epoch) and Rprop (the signs of the last).

Source: Schmidt, Le Roux and Bach, Minimizing finite sums with the stochastic average gradient (2017),
algorithm 1; Riedmiller and Braun, A direct adaptive method for faster backpropagation learning (1993).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.errors import ConfigError
from polyreme.optimizer.groups import nonnegative
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Optimizer
from polyreme.optimizer.update import ParameterOptions, Slots


class ASGD(Optimizer):
    """Steps along the mean of the last gradients of all batches of an epoch.

    batch_num: how many there are; step m belongs to batch m modulo batch_num, and its gradient takes the place of that
    batch's last one. Keeps batch_num + 1 arrays the size of the parameter. A penalty is part of each gradient that is
    remembered.
    """

    slots: Mapping[str, float] = {"d": 0.0, "y_0": 0.0}
    scalars: ClassVar[Mapping[str, float]] = {"step": 0.0}
    paddle_slots: ClassVar[Mapping[str, str | None]] = {"m": "step"}

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        batch_num: int = 1,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        multi_precision: bool = False,
        name: str | None = None,
    ) -> None:
        if isinstance(batch_num, bool) or not isinstance(batch_num, int) or batch_num < 1:
            raise ConfigError(f"ASGD: batch_num is a whole number of at least 1, got {batch_num!r}")
        self._num_batches = batch_num
        self.slots = {"d": 0.0, **{f"y_{i}": 0.0 for i in range(batch_num)}}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, multi_precision)

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As every optimizer's; PaddlePaddle's y, the gradients of all batches in one array, is taken apart."""
        values = dict(state_dict)
        for p in self._parameters:
            gradients = values.pop(f"{p.name}_y_0", None)
            if gradients is not None:
                values |= {f"{p.name}_y_{i}_0": g for i, g in enumerate(np.asarray(gradients))}
        super().set_state_dict(values)

    set_dict = set_state_dict

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        count, m = self._num_batches, scalars["step"]
        at = jnp.mod(m, count)
        last = sum(jnp.where(at == i, slots[f"y_{i}"], 0) for i in range(count))
        d = slots["d"] - last + g
        new = {f"y_{i}": jnp.where(at == i, g, slots[f"y_{i}"]) for i in range(count)}
        seen = jnp.minimum(m + 1, count).astype(d.dtype)
        return p - lr * d / seen, {"d": d, **new}, {"step": m + 1}


class Rprop(Optimizer):
    """Each element has a rate of its own, which grows while the sign of its gradient stays and shrinks when it turns.

    p - sign(g) rate. etas: (shrinks by, grows by); learning_rate_range: bounds of the rates. An element whose sign has
    turned is left where it is for that step. For gradients of all data only. learning_rate: where the rates start; what
    is set after a parameter's first step, by a scheduler too, changes nothing.
    """

    slots: Mapping[str, float] = {"prevs": 0.0, "learning_rates": 0.0}

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        learning_rate_range: tuple[float, float] = (1e-5, 50),
        parameters: Sequence[Any] | None = None,
        etas: tuple[float, float] = (0.5, 1.2),
        grad_clip: Any = None,
        multi_precision: bool = False,
        name: str | None = None,
    ) -> None:
        self._least, self._most = _pair("learning_rate_range", learning_rate_range)
        self._shrink, self._grow = _pair("etas", etas)
        if not 0 < self._shrink < 1 < self._grow:
            raise ConfigError(f"Rprop: etas={etas!r}; give (a factor below 1, a factor above 1), both positive")
        super().__init__(learning_rate, parameters, None, grad_clip, name, multi_precision)
        if not 0 < self._least <= self.get_lr() <= self._most:
            raise ConfigError(
                f"Rprop: learning_rate {self.get_lr()} is not within learning_rate_range={learning_rate_range!r}, of "
                "positive numbers"
            )

    def slot_start(self, name: str, param: Any) -> float:
        return self.get_lr() * self._options(param).lr_factor if name == "learning_rates" else 0.0

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        agreement, rates = slots["prevs"] * g, slots["learning_rates"]
        grown, shrunk = jnp.minimum(rates * self._grow, self._most), jnp.maximum(rates * self._shrink, self._least)
        rates = jnp.where(agreement > 0, grown, jnp.where(agreement < 0, shrunk, rates))
        g = jnp.where(agreement < 0, 0, g)
        return p - jnp.sign(g) * rates, {"prevs": g, "learning_rates": rates}, {}


def _pair(name: str, given: Any) -> tuple[float, float]:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ConfigError(f"Rprop: {name} is a pair of numbers, got {given!r}")
    return nonnegative("Rprop", name, given[0]), nonnegative("Rprop", name, given[1])
