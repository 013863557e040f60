"""Attributes of PaddlePaddle's optimizers and scalers that trainers read and set."""

from __future__ import annotations

from typing import Any

from polyreme.eager.tensor import Tensor
from polyreme.optimizer.lr import LRScheduler
from polyreme.paddle_scripts.lookup import fetch


def _setting(name: str) -> property:
    """A number that an optimizer was made with, or that a subclass set; AttributeError where there is none.

    Setting one that its rule reads changes the steps to come.
    """

    def read(self: Any) -> Any:
        if name in self._settings:
            return self._settings[name]
        if f"_{name}" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute '_{name}'")
        return vars(self)[f"_{name}"]

    def write(self: Any, value: Any) -> None:
        if name in self._settings:
            self._settings = {**self._settings, name: self.checks[name](type(self).__name__, name, value)}
        else:
            vars(self)[f"_{name}"] = value

    return property(read, write)


class OptimizerNames:
    """Attributes of Optimizer."""

    helper = None
    fused_buffer_version = 0
    _moment1_acc_str, _moment2_acc_str = "moment1", "moment2"
    _beta1_pow_acc_str, _beta2_pow_acc_str = "beta1_pow_acc", "beta2_pow_acc"
    _beta1, _beta2, _epsilon, _momentum = map(_setting, ("beta1", "beta2", "epsilon", "momentum"))
    _rho, _momentum_decay, _lamb_weight_decay = map(_setting, ("rho", "momentum_decay", "lamb_weight_decay"))
    _use_nesterov, _rescale_grad = map(_setting, ("use_nesterov", "rescale_grad"))

    @property
    def type(self: Any) -> str:
        """Its kind, such as "adamw"."""
        return type(self).__name__.lower()

    @property
    def _parameter_list(self: Any) -> list[Any] | None:
        return self._parameters or None

    @property
    def _param_groups(self: Any) -> list[Any]:
        if not any(group.settings for group in self._groups):
            return self._parameters
        return [{"params": group.params, **group.settings} for group in self._groups]

    def _add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        self.add_param_group(param_group)

    @property
    def _learning_rate(self: Any) -> float | LRScheduler:
        return self._scheduler if self._scheduler is not None else self.get_lr()

    @_learning_rate.setter
    def _learning_rate(self: Any, value: float | LRScheduler) -> None:
        if isinstance(value, LRScheduler):
            self.set_lr_scheduler(value)
        else:
            self.set_lr(value)

    def _global_learning_rate(self: Any, program: Any = None) -> Tensor:
        return self._shared.first.rate

    def _create_global_learning_rate(self) -> None:
        """Nothing: the learning rate is a Tensor from the start."""

    @property
    def _learning_rate_map(self: Any) -> dict[Any, Tensor]:
        return {None: self._shared.first.rate}

    @property
    def _grad_clip(self: Any) -> Any:
        return next(iter(self._clip_of.values()), None)

    @_grad_clip.setter
    def _grad_clip(self: Any, clip: Any) -> None:
        for group in self._groups:
            for p in group.params:
                self._clip_of[id(p)] = group.settings.get("grad_clip", clip)
        self._updates.clear()

    @property
    def _dtype(self: Any) -> Any:
        return self._parameters[0].dtype if self._parameters else None

    @property
    def regularization(self: Any) -> Any:
        """The weight decay that is added to gradients; None where it is not."""
        return None if self.decoupled else self._weight_decay

    @property
    def _accumulators(self: Any) -> dict[str, dict[str, Tensor]]:
        names = {id(p): p.name for p in self._parameters}
        return {slot: {names[key]: tensor for key, tensor in held.items()} for slot, held in self._slots.items()}

    @property
    def _master_weights(self: Any) -> dict[str, Tensor]:
        names = {id(p): p.name for p in self._parameters}
        return {names[key]: tensor for key, tensor in self._masters.items()}

    def _apply_optimize(self: Any, loss: Any, startup_program: Any, params_grads: Any) -> Any:
        return self.apply_gradients(params_grads)

    @property
    def _apply_decay_param_fun(self: Any) -> Any:
        return getattr(self, "_decays", None)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Take what state_dict() gave."""
        self.set_state_dict(state_dict)

    def sharded_state_dict(self: Any, model_sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Key -> ShardedWeight of what it keeps for the weights of a model."""
        return fetch("paddle_scripts.internals.checkpoints.optimizer_state")(self, model_sharded_state_dict)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Forget every parameter's gradient, or set it to zeros."""
        self.clear_grad(set_to_zero=not set_to_none)


class GradScalerNames:
    """Attributes of GradScaler."""

    @property
    def _scale(self: Any) -> Tensor:
        return self._state["scale"]

    def _unscale(self: Any, optimizer: Any) -> None:
        self.unscale_(optimizer)
