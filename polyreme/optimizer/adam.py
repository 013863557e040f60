"""Adam and AdamW.

Floor: 4.  Source: arXiv:1412.6980, algorithm 1; arXiv:1711.05101, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax

from polyreme.errors import ConfigError
from polyreme.kernels.adamw import adamw
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Optimizer, ParameterOptions, Slots


class Adam(Optimizer):
    """Steps scaled by running means of the gradient and of its square; weight_decay is an L2 penalty on the gradient.

    lazy_mode is for sparse gradients, which do not exist here; use_multi_tensor is always so.
    """

    slots: ClassVar = {"moment1": 0.0, "moment2": 0.0}
    scalars: ClassVar = {"step": 0.0}

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        lazy_mode: bool = False,
        multi_precision: bool = False,
        use_multi_tensor: bool = False,
        amsgrad: bool = False,
        name: str | None = None,
    ) -> None:
        if lazy_mode:
            raise ConfigError(
                f"{type(self).__name__}: lazy_mode is for sparse gradients, which are dense here; leave it out"
            )
        self._betas = (_fraction("beta1", beta1), _fraction("beta2", beta2))
        self._epsilon = float(epsilon)
        if amsgrad:
            self.slots = {**self.slots, "moment2_max": 0.0}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, multi_precision)

    def _group_settings(self) -> tuple[str, ...]:
        return ("beta1", "beta2", "epsilon")

    def options_of(self, param: Any) -> tuple[tuple[str, Any], ...]:
        return (
            ("beta1", self.setting(param, "beta1", self._betas[0])),
            ("beta2", self.setting(param, "beta2", self._betas[1])),
            ("epsilon", self.setting(param, "epsilon", self._epsilon)),
        )

    def decay_of(self, options: ParameterOptions) -> float:
        """The decoupled weight decay of one parameter."""
        return 0.0

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        settings = dict(options.extra)
        step = scalars["step"] + 1
        new_p, m, v, *top = adamw(
            [p], [g], [slots["moment1"]], [slots["moment2"]],
            step=step, learning_rate=lr, beta1=settings["beta1"], beta2=settings["beta2"],
            epsilon=settings["epsilon"], weight_decay=self.decay_of(options),
            **({"v_maxes": [slots["moment2_max"]]} if "moment2_max" in slots else {}),
        )  # fmt: skip
        new_slots = {"moment1": m[0], "moment2": v[0]}
        if top:
            new_slots["moment2_max"] = top[0][0]
        return new_p[0], new_slots, {"step": step}


class AdamW(Adam):
    """Adam with weight decay applied to the parameter itself, not to the gradient.

    apply_decay_param_fun: parameter name -> whether it is decayed. lr_ratio: parameter -> factor of the learning rate.
    """

    decoupled: ClassVar = True

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Sequence[Any] | None = None,
        weight_decay: float = 0.01,
        lr_ratio: Callable[[Any], float] | None = None,
        apply_decay_param_fun: Callable[[str], bool] | None = None,
        grad_clip: Any = None,
        lazy_mode: bool = False,
        multi_precision: bool = False,
        amsgrad: bool = False,
        name: str | None = None,
    ) -> None:
        if isinstance(weight_decay, bool) or not isinstance(weight_decay, (int, float)):
            raise ConfigError(f"AdamW: weight_decay is a number, got {weight_decay!r}; regularizers go with Adam")
        self._lr_ratio = lr_ratio
        self._decays = apply_decay_param_fun
        super().__init__(
            learning_rate, beta1, beta2, epsilon, parameters, weight_decay, grad_clip, lazy_mode, multi_precision,
            amsgrad=amsgrad, name=name,
        )  # fmt: skip

    def options_of(self, param: Any) -> tuple[tuple[str, Any], ...]:
        decays = self._decays is None or bool(self._decays(param.name))
        ratio = 1.0 if self._lr_ratio is None else float(self._lr_ratio(param))
        return (*super().options_of(param), ("decays", decays), ("lr_ratio", ratio))

    def decay_of(self, options: ParameterOptions) -> float:
        return options.weight_decay if dict(options.extra)["decays"] else 0.0

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        ratio = dict(options.extra)["lr_ratio"]
        return super().rule(p, g, lr if ratio == 1.0 else lr * ratio, slots, scalars, options)


def _fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"{name} is a number in [0, 1), got {value!r}")
    return float(value)
