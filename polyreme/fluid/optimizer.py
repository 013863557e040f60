"""Optimizers under 1.7's names and parameters, each over the one of polyreme.optimizer."""

from __future__ import annotations

import functools
import gc
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from polyreme import optimizer as ours
from polyreme.core import state
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, NotReadyError
from polyreme.fluid import update_rules
from polyreme.fluid.absent import refusing
from polyreme.fluid.clip import clip_recorded
from polyreme.fluid.dygraph.layers import parameters_with_gradients
from polyreme.fluid.dygraph.learning_rate_scheduler import LearningRateDecay
from polyreme.fluid.mode import begin
from polyreme.fluid.wrapping_optimizers import LookaheadOptimizer, ModelAverage, RecomputeOptimizer
from polyreme.program import gradient
from polyreme.program.block import Variable
from polyreme.program.current import defaults, program_guard
from polyreme.program.program import Program
from polyreme.static.average import ExponentialMovingAverage

_log = logging.getLogger("polyreme.fluid")


class Optimizer:
    """Base of them: minimize(), or backward() and apply_gradients().

    learning_rate: a number; in a Program a Variable, such as a decay of fluid.layers gives; in dygraph a decay of
    fluid.dygraph, which every minimize() moves on. regularization: a penalty for parameters that have none of their
    own. grad_clip, which 1.8 added: a clip of fluid.clip for all gradients, in place of those that parameters have.
    parameter_list: in dygraph what is trained; without it the parameters of Layers that have gradients at the first
    minimize().
    """

    optimizer: Any

    of: ClassVar[Any]

    def __init__(
        self, learning_rate: Any, parameter_list: Any, regularization: Any, name: str | None, grad_clip: Any = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        if not _are_dynamic(parameter_list):
            begin()
        if isinstance(regularization, (int, float)):
            raise TypeError(
                f"{type(self).__name__}: regularization is a penalty such as L2Decay(1e-4), got {regularization!r}"
            )
        self.regularization = regularization
        self._chosen = parameter_list
        self._decay = learning_rate if isinstance(learning_rate, LearningRateDecay) else None
        self._has_stepped = False
        self._grad_clip = grad_clip
        extra: dict[str, Any] = {"grad_clip": grad_clip}
        if regularization is not None:
            extra["weight_decay"] = regularization
        is_late = parameter_list is None and not state.recording()
        if parameter_list is not None and not state.recording():
            extra["parameters"] = list(parameter_list)
        if self._decay is not None:
            if state.recording():
                raise ConfigError(
                    f"{type(self).__name__}: {type(learning_rate).__name__} belongs to dygraph; in a Program give a "
                    "decay of fluid.layers"
                )
            learning_rate = float(self._decay.step())
        self._make = functools.partial(self.of, learning_rate=learning_rate, name=name, **extra, **settings)
        if not is_late:
            self.optimizer = self._make()

    @property
    def parameters_given(self) -> list[Any]:
        """The parameters that it was made with; empty where minimize takes the Program's."""
        return list(self._chosen or ())

    @property
    def type(self) -> str:
        """What a listing calls it, such as "lars_momentum"."""
        return re.sub("(?<=[a-z])(?=[A-Z])", "_", self.of.__name__).lower()

    def minimize(
        self, loss: Any, startup_program: Program | None = None, parameter_list: Any = None, no_grad_set: Any = None,
        grad_clip: Any = None,
    ) -> tuple[Any, list[tuple[Any, Any]]]:  # fmt: skip
        """Record backward and one step in the Program of loss; -> (operations, [(parameter, gradient), ...]).

        parameter_list, no_grad_set: Variables or names. Inside dygraph.guard(): a step with the gradients that
        loss.backward() left, clipped by grad_clip.
        """
        if not state.recording():
            return self._step(loss, parameter_list, no_grad_set, grad_clip)
        if grad_clip is not None:
            raise ConfigError("minimize: grad_clip belongs to dygraph; in a Program call fluid.clip.set_gradient_clip")
        pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
        return self.apply_optimize(loss, startup_program, pairs), pairs

    def backward(
        self, loss: Any, startup_program: Program | None = None, parameter_list: Any = None, no_grad_set: Any = None,
        callbacks: Any = None,
    ) -> list[tuple[Any, Any]]:  # fmt: skip
        """Record backward alone; -> [(parameter, gradient), ...]. Names that the Program does not have are left out."""
        chosen = parameter_list if parameter_list is not None else self._chosen
        program = _program_of(loss)
        absent = [n for n in chosen or () if isinstance(n, str) and program.global_block().find_var(n) is None]
        if absent:
            _log.warning("%s: the Program of the loss has no parameters %s", type(self).__name__, absent)
            chosen = [p for p in chosen if p not in absent]
        with program_guard(program, startup_program):
            return gradient.append_backward(loss, chosen, no_grad_set, callbacks)

    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Record one step with these gradients, clipped by grad_clip, else as their parameters say; -> operations."""
        pairs = params_grads if self._grad_clip is not None else clip_recorded(params_grads)
        return gradient.apply_gradients(self.optimizer, pairs)

    def apply_optimize(
        self, loss: Any, startup_program: Program | None, params_grads: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """apply_gradients in the Program of loss."""
        with program_guard(_program_of(loss), startup_program):
            return self.apply_gradients(params_grads)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise NotReadyError(
                f"{type(self).__name__}: made without parameter_list it has its parameters from the first minimize() "
                "on; give parameter_list=model.parameters()"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)

    def _take_parameters(self, given: Any) -> None:
        """Train the parameters that have gradients now, as code up to 1.6 does, whose optimizers are given none."""
        if self._chosen is not None:
            return
        known = {id(p) for p in self.optimizer._parameters} if "optimizer" in self.__dict__ else set()
        if given is None and any(id(p) not in known for p in parameters_with_gradients()):
            # a model that nothing refers to any more is not trained, whenever Python would come to see that
            gc.collect()
        trained = parameters_with_gradients() if given is None else list(given)
        if "optimizer" not in self.__dict__:
            if not trained:
                raise ConfigError(
                    f"{type(self).__name__}.minimize: no parameter has a gradient; call loss.backward(), or give "
                    "parameter_list=model.parameters()"
                )
            self.optimizer = self._make(parameters=trained)
            return
        new = [p.name for p in trained if id(p) not in known]
        if new:
            raise ConfigError(
                f"{type(self).__name__}.minimize: {new} had no gradients at the first step; give "
                "parameter_list=model.parameters()"
            )

    def _step(self, loss: Any, parameters: Any, no_grad_set: Any, grad_clip: Any) -> tuple[Any, list[tuple[Any, Any]]]:
        self._take_parameters(parameters)
        if grad_clip is not None:
            held = [p for p in self.optimizer._parameters if p.grad is not None]
            for p, g in grad_clip([(p, p.grad) for p in held]):
                p.grad = g
        if self._decay is not None:
            self.optimizer.set_lr(float(self._decay()))
            self._has_stepped = True
        return self.optimizer.minimize(loss, None, parameters, no_grad_set)

    def clear_gradients(self) -> None:
        """Forget the gradients of its parameters."""
        self.optimizer.clear_grad()

    def current_step_lr(self) -> float:
        """The learning rate of the last step; before the first one, that of the first."""
        begins = self._decay is not None and not self._has_stepped
        return float(self._decay.step()) if begins else self.optimizer.get_lr()

    def set_lr(self, value: Any) -> None:
        """Change the learning rate to a number. Raises ConfigError where a decay sets it."""
        if self._decay is not None:
            raise ConfigError(f"set_lr: the rate comes from a {type(self._decay).__name__}; change that")
        self.optimizer.set_lr(float(value))

    def state_dict(self) -> dict[str, Any]:
        """Its state by name; where a decay is, too: as "global_step", or what a class of its own says."""
        decay = {} if self._decay is None else self._decay.state_dict()
        return {**self.optimizer.state_dict(), **decay}

    def set_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state that state_dict() gave."""
        names = () if self._decay is None else self._decay.state_dict()
        if self._decay is not None:
            self._decay.set_dict(state_dict)
        self.optimizer.set_state_dict({n: v for n, v in state_dict.items() if n not in names})

    set_state_dict = set_dict


def _program_of(loss: Any) -> Program:
    """The Program that a Variable was recorded in."""
    block = getattr(loss, "block", None)
    return defaults.main if block is None else block.program


class SGDOptimizer(Optimizer):
    """p - lr * g."""

    of = ours.SGD

    def __init__(
        self, learning_rate: Any, parameter_list: Any = None, regularization: Any = None, name: str | None = None,
        grad_clip: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(learning_rate, parameter_list, regularization, name, grad_clip)


class MomentumOptimizer(Optimizer):
    """v = momentum * v + g; p - lr * v, or p - lr * (g + momentum * v) with use_nesterov."""

    of = ours.Momentum

    def __init__(
        self, learning_rate: Any, momentum: float, parameter_list: Any = None, use_nesterov: bool = False,
        regularization: Any = None, name: str | None = None, grad_clip: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            learning_rate, parameter_list, regularization, name, grad_clip, momentum=momentum, use_nesterov=use_nesterov
        )


class AdagradOptimizer(Optimizer):
    """Steps divided by the root of the sum of squared gradients."""

    of = ours.Adagrad

    def __init__(
        self, learning_rate: Any, epsilon: float = 1e-6, parameter_list: Any = None, regularization: Any = None,
        name: str | None = None, initial_accumulator_value: float = 0.0, grad_clip: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            learning_rate, parameter_list, regularization, name, grad_clip, epsilon=epsilon,
            initial_accumulator_value=initial_accumulator_value,
        )  # fmt: skip


class AdamOptimizer(Optimizer):
    """Adam. Source: arXiv:1412.6980. lazy_mode: of a sparse embedding, the rows that were looked up alone."""

    of = ours.Adam

    def __init__(
        self, learning_rate: Any = 0.001, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
        parameter_list: Any = None, regularization: Any = None, name: str | None = None, lazy_mode: bool = False,
        grad_clip: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            learning_rate, parameter_list, regularization, name, grad_clip, beta1=beta1, beta2=beta2, epsilon=epsilon,
            lazy_mode=lazy_mode,
        )  # fmt: skip


class AdamaxOptimizer(Optimizer):
    """Adamax. Source: arXiv:1412.6980, section 7.1."""

    of = ours.Adamax

    def __init__(
        self, learning_rate: Any = 0.001, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
        parameter_list: Any = None, regularization: Any = None, name: str | None = None, grad_clip: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            learning_rate, parameter_list, regularization, name, grad_clip, beta1=beta1, beta2=beta2, epsilon=epsilon
        )


class AdadeltaOptimizer(Optimizer):
    """Adadelta. learning_rate has no effect, as in 1.7. Source: arXiv:1212.5701."""

    of = update_rules.Adadelta

    def __init__(
        self, learning_rate: Any, epsilon: float = 1e-6, rho: float = 0.95, parameter_list: Any = None,
        regularization: Any = None, name: str | None = None, grad_clip: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(learning_rate, parameter_list, regularization, name, grad_clip, epsilon=epsilon, rho=rho)


class RMSPropOptimizer(Optimizer):
    """RMSProp, with momentum, and with the variance in place of the mean square if centered."""

    of = ours.RMSProp

    def __init__(
        self, learning_rate: Any, rho: float = 0.95, epsilon: float = 1e-6, momentum: float = 0.0,
        centered: bool = False, parameter_list: Any = None, regularization: Any = None, name: str | None = None,
        grad_clip: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            learning_rate, parameter_list, regularization, name, grad_clip, rho=rho, epsilon=epsilon, momentum=momentum,
            centered=centered,
        )  # fmt: skip


class LambOptimizer(Optimizer):
    """LAMB, without corrected means, as in 1.7. exclude_from_weight_decay_fn: parameter -> True to leave its decay out.

    Source: arXiv:1904.00962.
    """

    of = update_rules.Lamb

    def __init__(
        self, learning_rate: Any = 0.001, lamb_weight_decay: float = 0.01, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-6, parameter_list: Any = None, regularization: Any = None,
        exclude_from_weight_decay_fn: Callable[[Any], bool] | None = None, name: str | None = None,
        grad_clip: Any = None,
    ) -> None:  # fmt: skip
        if regularization is not None:
            raise ConfigError("LambOptimizer: regularization cannot be honoured; lamb_weight_decay is its decay")
        super().__init__(
            learning_rate, parameter_list, None, name, grad_clip, lamb_weight_decay=lamb_weight_decay, beta1=beta1,
            beta2=beta2, epsilon=epsilon, exclude_from_weight_decay_fn=exclude_from_weight_decay_fn,
        )  # fmt: skip


class LarsMomentumOptimizer(Optimizer):
    """LARS. exclude_from_weight_decay: parts of the names of parameters that it leaves to Momentum without decay, which
    2.0 added. Source: arXiv:1708.03888."""

    of = update_rules.LarsMomentum

    def __init__(
        self, learning_rate: Any, momentum: float, lars_coeff: float = 0.001, lars_weight_decay: float = 0.0005,
        parameter_list: Any = None, regularization: Any = None, name: str | None = None, grad_clip: Any = None,
        exclude_from_weight_decay: Sequence[str] | None = None, epsilon: float = 0.0, multi_precision: bool = False,
        rescale_grad: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(
            learning_rate, parameter_list, regularization, name, grad_clip, momentum=momentum, lars_coeff=lars_coeff,
            lars_weight_decay=lars_weight_decay, exclude_from_weight_decay=exclude_from_weight_decay, epsilon=epsilon,
            multi_precision=multi_precision, rescale_grad=rescale_grad,
        )  # fmt: skip


class DecayedAdagradOptimizer(Optimizer):
    """Adagrad whose sum of squared gradients decays."""

    of = update_rules.DecayedAdagrad

    def __init__(
        self, learning_rate: Any, decay: float = 0.95, epsilon: float = 1e-6, parameter_list: Any = None,
        regularization: Any = None, name: str | None = None, grad_clip: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(learning_rate, parameter_list, regularization, name, grad_clip, decay=decay, epsilon=epsilon)


class FtrlOptimizer(Optimizer):
    """Follow the regularized leader. Source: McMahan et al., 2013."""

    of = update_rules.Ftrl

    def __init__(
        self, learning_rate: Any, l1: float = 0.0, l2: float = 0.0, lr_power: float = -0.5,
        parameter_list: Any = None, regularization: Any = None, name: str | None = None, grad_clip: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            learning_rate, parameter_list, regularization, name, grad_clip, l1=l1, l2=l2, lr_power=lr_power
        )


def _are_dynamic(parameters: Any) -> bool:
    """Whether an optimizer is made over Parameters with values, as 2.0 does in dynamic mode beside paddle.nn."""
    first = parameters[0] if isinstance(parameters, (list, tuple)) and parameters else None
    return isinstance(first, Tensor) and not isinstance(first, Variable)


SGD = SGDOptimizer
LarsMomentum = LarsMomentumOptimizer
DecayedAdagrad = DecayedAdagradOptimizer
Ftrl = FtrlOptimizer
Momentum = MomentumOptimizer
Adagrad = AdagradOptimizer
Adam = AdamOptimizer
Adamax = AdamaxOptimizer
Adadelta = AdadeltaOptimizer
RMSProp = RMSPropOptimizer
Lamb = LambOptimizer

__all__ = [
    "SGD",
    "Adadelta",
    "AdadeltaOptimizer",
    "Adagrad",
    "AdagradOptimizer",
    "Adam",
    "AdamOptimizer",
    "Adamax",
    "AdamaxOptimizer",
    "DecayedAdagrad",
    "DecayedAdagradOptimizer",
    "ExponentialMovingAverage",
    "Ftrl",
    "FtrlOptimizer",
    "LambOptimizer",
    "LarsMomentum",
    "LarsMomentumOptimizer",
    "LookaheadOptimizer",
    "ModelAverage",
    "Momentum",
    "MomentumOptimizer",
    "RMSPropOptimizer",
    "RecomputeOptimizer",
    "SGDOptimizer",
]

__getattr__ = refusing("fluid.optimizer", __name__)
