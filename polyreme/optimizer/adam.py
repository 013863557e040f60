"""Adam, AdamW and Adamax.

Source: arXiv:1412.6980, algorithms 1 and 2; arXiv:1711.05101, algorithm 2; amsgrad: arXiv:1904.09237.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.errors import ConfigError
from polyreme.kernels.adamw import adam_corrections, adamw, bias_correction
from polyreme.optimizer.groups import fraction, nonnegative
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Check, Optimizer
from polyreme.optimizer.update import ParameterOptions, Slots


class Adam(Optimizer):
    """Steps scaled by running means of the gradient and of its square; weight_decay is an L2 penalty on the gradient.

    amsgrad: divide by the largest mean square so far. use_multi_tensor: one compiled call is always so. lazy_mode: of
    a table of embedding(sparse=True), rows whose gradient is zero, looked up or not, keep their value and their means;
    such a table takes no penalty, which would give every row a gradient (ConfigError).
    """

    slots: Mapping[str, float] = {"moment1": 0.0, "moment2": 0.0}  # amsgrad adds one in an instance
    scalars: ClassVar[Mapping[str, float]] = {"step": 0.0}
    checks: ClassVar[Mapping[str, Check]] = {"beta1": fraction, "beta2": fraction, "epsilon": nonnegative}
    reads_options_alone: ClassVar[bool] = True

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
        self._lazy = bool(lazy_mode)
        self._settings = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon}
        if amsgrad:
            self.slots = {**self.slots, "moment2_max": 0.0}
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, multi_precision)

    def numbers(self, scalars: Slots, options: ParameterOptions) -> Slots:
        beta1, beta2, step = options["beta1"], options["beta2"], scalars["step"] + 1
        if "moment2_max" in self.slots:
            return {"of_mean": bias_correction(beta1, step), "of_square": bias_correction(beta2, step)}
        of_rate, of_epsilon = adam_corrections(beta1, beta2, step)
        return {"of_rate": of_rate, "of_epsilon": of_epsilon}

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        step = scalars["step"] + 1
        if "moment2_max" in slots:
            new = self._amsgrad(p, g, lr, slots, scalars, options)
        else:
            new = self._adam(p, g, lr, slots, scalars, options)
        if options["rows_alone"]:
            in_batch = jnp.any(g != 0, axis=tuple(range(1, g.ndim)), keepdims=True)
            new = jax.tree.map(lambda after, before: jnp.where(in_batch, after, before), new, (p, slots))
        new_p, new_slots = new
        return new_p, new_slots, {"step": step}

    def _adam(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots]:
        new_p, m, v = adamw(
            [p], [g], [slots["moment1"]], [slots["moment2"]],
            step=scalars["step"] + 1, learning_rate=lr, beta1=options["beta1"], beta2=options["beta2"],
            epsilon=options["epsilon"], weight_decay=self.decay_of(options),
            corrections=(scalars["of_rate"], scalars["of_epsilon"]),
        )  # fmt: skip
        return new_p[0], {"moment1": m[0], "moment2": v[0]}

    def _amsgrad(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots]:
        """The maximum is of the second moment before its bias is corrected; the correction is of that maximum."""
        beta1, beta2 = options["beta1"], options["beta2"]
        m = beta1 * slots["moment1"] + (1 - beta1) * g
        v = beta2 * slots["moment2"] + (1 - beta2) * g * g
        top = jnp.maximum(slots["moment2_max"], v)
        m_hat, v_hat = m / scalars["of_mean"].astype(p.dtype), top / scalars["of_square"].astype(p.dtype)
        new_p = p * (1 - lr * self.decay_of(options)) - lr * m_hat / (jnp.sqrt(v_hat) + options["epsilon"])
        return new_p, {"moment1": m, "moment2": v, "moment2_max": top}

    def decay_of(self, options: ParameterOptions) -> float:
        """The decoupled weight decay of one parameter."""
        return 0.0

    def options_of(self, param: Any) -> tuple[tuple[str, Any], ...]:
        alone = self._lazy and getattr(param, "has_sparse_rows", False)
        decay = self._group_of[id(param)].settings.get("weight_decay", self._weight_decay)
        if alone and (getattr(param, "regularizer", None) or (decay and not self.decoupled)):
            raise ConfigError(
                f"{type(self).__name__}(lazy_mode=True): a penalty on {param.name} gives all of its rows a gradient; "
                "leave out weight_decay and regularizer, or sparse=True of its embedding"
            )
        return (("rows_alone", alone),)


class AdamW(Adam):
    """Adam with weight decay applied to the parameter itself, not to the gradient.

    apply_decay_param_fun: parameter name -> whether it is decayed. lr_ratio: parameter -> factor of the learning rate.
    use_lowprecision_moment: moments in the parameter's dtype also where multi_precision keeps a float32 master weight.
    """

    decoupled: ClassVar[bool] = True
    reads_options_alone: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Sequence[Any] | None = None,
        weight_decay: float = 0.01,
        use_lowprecision_moment: bool = False,
        lr_ratio: Callable[[Any], float] | None = None,
        apply_decay_param_fun: Callable[[str], bool] | None = None,
        grad_clip: Any = None,
        lazy_mode: bool = False,
        multi_precision: bool = False,
        amsgrad: bool = False,
        name: str | None = None,
    ) -> None:
        for what, given in (("lr_ratio", lr_ratio), ("apply_decay_param_fun", apply_decay_param_fun)):
            if given is not None and not callable(given):
                raise ConfigError(f"AdamW: {what} is a function or None, got {given!r}")
        self._low_moments = use_lowprecision_moment
        self._lr_ratio = lr_ratio
        self._decays = apply_decay_param_fun
        super().__init__(
            learning_rate, beta1, beta2, epsilon, parameters, weight_decay, grad_clip, lazy_mode, multi_precision,
            amsgrad=amsgrad, name=name,
        )  # fmt: skip

    def slot_dtype(self, param: Any) -> np.dtype:
        return param.dtype if self._low_moments else super().slot_dtype(param)

    def options_of(self, param: Any) -> tuple[tuple[str, Any], ...]:
        decays = self._decays is None or bool(self._decays(param.name))
        ratio = 1.0 if self._lr_ratio is None else float(self._lr_ratio(param))
        return (*super().options_of(param), ("decays", decays), ("lr_ratio", ratio))

    def decay_of(self, options: ParameterOptions) -> float:
        return options.weight_decay if options["decays"] else 0.0

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        ratio = options["lr_ratio"]
        return super().rule(p, g, lr if ratio == 1.0 else lr * ratio, slots, scalars, options)


class Adamax(Optimizer):
    """Adam with a running maximum of |gradient| in place of the root of the second moment.

    u = max(|g|, beta2 u + epsilon); p - lr / (1 - beta1^t) m / u. The paper has no epsilon there; it keeps u above 0.
    """

    slots: Mapping[str, float] = {"moment": 0.0, "inf_norm": 0.0}
    scalars: ClassVar[Mapping[str, float]] = {"step": 0.0}
    checks: ClassVar[Mapping[str, Check]] = {"beta1": fraction, "beta2": fraction, "epsilon": nonnegative}

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
        return {"of_mean": bias_correction(options["beta1"], scalars["step"] + 1)}

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        beta1, beta2 = options["beta1"], options["beta2"]
        m = beta1 * slots["moment"] + (1 - beta1) * g
        u = jnp.maximum(jnp.abs(g), beta2 * slots["inf_norm"] + options["epsilon"])
        new_p = p - lr / scalars["of_mean"].astype(p.dtype) * m / u
        return new_p, {"moment": m, "inf_norm": u}, {"step": scalars["step"] + 1}
