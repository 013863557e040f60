"""Optimizer: its parameters, settings and learning rate; state.py keeps its state, rule_update.py updates parameters.

A subclass declares its state and a pure rule for one parameter. These files do everything else, once: groups, clipping,
regularizers, master weights, learning rate, skipping a step on overflow, placement, state_dict.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.arguments import keywords_of
from polyreme.core.checked import step_done
from polyreme.core.devices.device_memory import part
from polyreme.core.devices.transfer import from_host
from polyreme.core.state import TensorState
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import ArgumentTypeError, CaptureError, ConfigError, DTypeError, GradError
from polyreme.keyword_names import NamesKeywords
from polyreme.optimizer.groups import ParameterGroup, check_common, check_known, check_unique, nonnegative, split_groups
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.rule_update import RuleUpdate
from polyreme.optimizer.shared import MeshGroup, SharedState
from polyreme.optimizer.update import ParameterOptions, Slots

_COMMON = ("learning_rate", "weight_decay", "grad_clip")
Check = Callable[[str, str, Any], Any]


class Optimizer(NamesKeywords, RuleUpdate):
    """Base of all optimizers.

    learning_rate: a number or an LRScheduler. parameters: a list of Parameters, or of dicts {"params": [...],
    "learning_rate": factor, "weight_decay": ..., "grad_clip": ..., or a setting of the optimizer}, which replace what
    ParamAttr said. weight_decay: a coefficient (L2) or a regularizer. grad_clip: a clip; parameters that share one are
    clipped together.
    multi_precision: float16 and bfloat16 parameters have a float32 master weight, which is what the update changes.

    Subclasses set `slots` (arrays like the parameter: name -> initial value), `scalars` (numbers per parameter),
    `checks` (settings a group may set too: name -> check), `self._settings` (their values) and `rule`. Those that
    define `_append_optimize_op` in its place, with Tensors, are slower: each operation is a call of its own outside of
    captured code.
    """

    checks: ClassVar[Mapping[str, Check]] = {}
    decoupled: ClassVar[bool] = False  # weight decay is applied by rule, not added to the gradient
    takes_complex: ClassVar[bool] = False
    _settings: Mapping[str, Any] = {}

    _made_with: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    _bound: Any = ()
    parameters_given: list[Any] | None = None
    rate_variable: Any = None
    gradient_accumulation_steps: int = 1
    """Backward passes that make one step, for who runs the steps: set by distributed.shard_optimizer."""

    if not TYPE_CHECKING:  # type checkers read what __init__ takes

        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            made = super().__new__(cls, *args, **kwargs)
            made._made_with = (args, kwargs)
            return made

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        multi_precision: bool = False,
    ) -> None:
        owner = type(self).__name__
        self._name = name
        is_given = parameters is not None
        if parameters is None and state.recording():
            parameters = []  # minimize finds them in the Program
        self._multi_precision = multi_precision
        self._weight_decay = weight_decay
        check_common(owner, "weight_decay", weight_decay)
        check_common(owner, "grad_clip", grad_clip)
        self._settings = {n: self.checks[n](owner, n, v) for n, v in self._settings.items()}
        self._groups: list[ParameterGroup] = []
        self._parameters: list[Any] = []
        self._default_clip = grad_clip
        self._take_groups(split_groups(owner, parameters))
        self.parameters_given = list(self._parameters) if is_given else None
        self._slots = {n: {} for n in self.slots}
        self._masters = {}
        self._rounded = {}
        self._pending = {}
        self._updates = {}
        self._scheduler = learning_rate if isinstance(learning_rate, LRScheduler) else None
        # float64 parameters get a float64 rate; any other arithmetic is in float32
        self._rate_dtype = (
            dtypes.float64 if any(p.dtype == dtypes.float64 for p in self._parameters) else dtypes.float32
        )
        start = self._rate_number = self._initial_rate(learning_rate)
        with state.outside_capture():
            rate = Tensor(from_host(np.asarray(start, self._rate_dtype)))
        self._shared = SharedState(rate, len(self._parameters))
        if self._scheduler is not None:
            self.set_lr_scheduler(self._scheduler)

    def _take_groups(self, groups: Sequence[ParameterGroup]) -> None:
        checked = [*self._groups, *map(self._check_group, groups)]
        parameters = [p for group in checked for p in group.params]
        check_unique(type(self).__name__, parameters)
        self._groups, self._parameters = checked, parameters
        self._position = {id(p): i for i, p in enumerate(parameters)}
        self._group_of = {id(p): g for g in checked for p in g.params}
        clip = self._default_clip
        self._clip_of = {id(p): g.settings.get("grad_clip", clip) for g in checked for p in g.params}

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Take more parameters: {"params": a Parameter or a list of them, and settings of their own as in a group}.

        Their state begins at the next step, that of the others goes on. Raises ConfigError for a parameter that is
        there, another of its name, a setting that is not known, and for float64 parameters beside others; CaptureError
        in a captured function, and after one that steps this optimizer ran.

        >>> from polyreme import nn
        >>> first, second = nn.Linear(2, 2), nn.Linear(2, 1)
        >>> optimizer = Optimizer(0.1, first.parameters())
        >>> optimizer.add_param_group({"params": second.parameters(), "learning_rate": 0.5})
        """
        owner = type(self).__name__
        is_captured = any(key[0] is False for key in self._updates)
        if state.watch.active is not None or is_captured:
            raise CaptureError(
                f"{owner}.add_param_group {'after' if is_captured else 'in'} a captured function that steps the "
                "optimizer, which would not update what is added; add all groups before the first captured step"
            )
        if not isinstance(param_group, Mapping):
            raise ConfigError(
                f"{owner}.add_param_group takes a dict with 'params', got one {type(param_group).__name__}"
            )
        groups = split_groups(owner, [dict(param_group)])
        if self._rate_dtype == dtypes.float32 and any(p.dtype == dtypes.float64 for g in groups for p in g.params):
            raise ConfigError(
                f"{owner}.add_param_group: float64 parameters need a float64 rate, which this optimizer of others does "
                "not have; give all groups when it is made"
            )
        count = len(self._parameters)
        self._take_groups(groups)
        added = self._parameters[count:]
        if self.parameters_given is not None:
            self.parameters_given += added
        self._shared.extend(len(added), self.scalars)
        self._updates.clear()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Optimizer:
        """One over copies of the parameters: those of the model, if deepcopy is given (model, optimizer)."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        kept = {n: v for n, v in self.__dict__.items() if n not in ("_updates", "_made_with", "_bound")}
        copied.__dict__.update({n: copy.deepcopy(v, memo) for n, v in kept.items()})
        copied._made_with = self._made_with
        # programs that hold the optimizer know nothing of the copy
        copied._updates, copied._bound = {}, ()
        key = {id(p): id(q) for p, q in zip(self._parameters, copied._parameters, strict=True)}
        for name in ("_position", "_group_of", "_clip_of", "_masters", "_rounded"):
            setattr(copied, name, {key[k]: v for k, v in getattr(copied, name).items()})
        copied._slots = {n: {key[k]: v for k, v in held.items()} for n, held in copied._slots.items()}
        return copied

    # what a subclass writes

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        """One parameter's update on arrays: -> new p, slots, scalars. Pure; all arrays are at least float32."""
        raise NotImplementedError

    def numbers(self, scalars: Slots, options: ParameterOptions) -> Slots:
        """What rule is given beside the scalars kept, made of those of all parameters of these settings at once."""
        return {}

    def prepare(self, g: jax.Array, options: ParameterOptions) -> jax.Array:
        """The gradient after clipping, before penalties are added."""
        return g

    def options_of(self, param: Any) -> tuple[tuple[str, Any], ...]:
        """Settings of one parameter that are not a group's, hashable."""
        return ()

    def over(self, parameters: Sequence[Any]) -> Optimizer:
        """Another optimizer of these settings over other parameters, whose rate follows this one's; a parameter has
        the settings of the group that one of its name is in here.

        What a static Program's optimizer is in each scope.
        """
        self.refuse_own_update("static Programs")
        given: dict[str, Any] = self.keywords()
        if self.rate_variable is not None:
            given["learning_rate"] = 0.0
        given["parameters"] = self._regrouped(parameters)
        bound = type(self)(**given)
        self.lead(bound)
        return bound

    def keywords(self) -> dict[str, Any]:
        """The arguments that this optimizer was made with, by keyword."""
        args, kwargs = self._made_with
        return keywords_of(self.__init__, args, kwargs)  # type: ignore[misc]

    def _regrouped(self, parameters: Sequence[Any]) -> list[Any]:
        if not any(g.settings for g in self._groups):
            return list(parameters)
        at = {p.name: i for i, g in enumerate(self._groups) for p in g.params}
        groups = [{"params": [p for p in parameters if at.get(p.name) == i], **g.settings}
                  for i, g in enumerate(self._groups)]  # fmt: skip
        return [*groups, {"params": [p for p in parameters if p.name not in at]}]

    def lead(self, bound: Optimizer) -> None:
        """Make the rate of an optimizer that `over` made follow this one's, if it does not yet.

        A Program read from a file has optimizers of its own, and the startup Program read beside it made the state.
        """
        if any(b() is bound for b in self._bound):
            return
        if self.rate_variable is None:
            # not the array's value: float64 parameters, which this optimizer may not know, take more of it
            with state.outside_capture():
                bound._set_rate(self.get_lr())
        self._bound = [*(b for b in self._bound if b() is not None), weakref.ref(bound)]

    def take_rate(self, value: Tensor) -> None:
        """Set the learning rate to a one-element Tensor's value, without asking the host."""
        for rate in self._shared.rates():
            state.write(rate, state.read(value).reshape(()).astype(self._rate_dtype))

    # learning rate

    def get_lr(self) -> float:
        """The learning rate in force, as it was given: 0.1, not the nearest float32."""
        if self._scheduler is not None:
            return float(self._scheduler())
        now = np.asarray(self._shared.first.rate._array)
        return float(self._rate_number if self._rate_dtype.type(self._rate_number) == now else now)

    def set_lr(self, value: float) -> None:
        """Change the learning rate; ConfigError if a scheduler sets it or it is no number of at least 0."""
        if self._scheduler is not None:
            raise ConfigError("set_lr: this optimizer's rate comes from a scheduler; change that, or set_lr_scheduler")
        self._set_rate(self._initial_rate(value))

    def set_lr_scheduler(self, scheduler: LRScheduler) -> None:
        """Take the rate from this scheduler from now on."""
        if not isinstance(scheduler, LRScheduler):
            raise ArgumentTypeError(f"set_lr_scheduler takes an LRScheduler, got {type(scheduler).__name__}")
        if self._scheduler is not None and hasattr(self, "_observer"):
            self._scheduler.unsubscribe(self._observer)
        self._scheduler = scheduler
        self._observer = self._set_rate
        scheduler.subscribe(self._observer)
        self._set_rate(scheduler())

    def _set_rate(self, value: float) -> None:
        rates = self._shared.rates()
        if state.watch.active is not None and any(id(rate) not in state.watch.active.created_ids for rate in rates):
            raise CaptureError(
                f"{type(self).__name__}: the learning rate was set to {value} inside a captured function, where it "
                "would be the same at every call; step the scheduler, or call set_lr, after the captured call"
            )
        for bound in (ref() for ref in self._bound):
            if bound is not None:
                bound._set_rate(value)
        self._rate_number = value
        new = np.asarray(value, self._rate_dtype)
        for rate in rates:
            now = rate._array
            state.write(rate, put(new, now.sharding) if now.committed else from_host(new))

    def _initial_rate(self, learning_rate: Any) -> float:
        if isinstance(learning_rate, LRScheduler):
            return learning_rate()
        if (
            (recorder := state.recorder()) is not None
            and isinstance(learning_rate, TensorState)
            and not recorder.has_value(learning_rate)
        ):
            self.rate_variable = learning_rate
            return 0.0
        if isinstance(learning_rate, TensorState):
            learning_rate = state.host(learning_rate, "learning_rate").item()
        return nonnegative("learning_rate", "a learning rate that is not an LRScheduler", learning_rate)

    # the step

    def step(self, *, skip: Tensor | None = None) -> None:
        """Update every parameter that has a gradient, in one compiled call for each set of devices that holds some.

        skip: a 0-D bool Tensor; where it is True nothing changes, which is how a step with overflowed gradients is left
        out without asking the host. Raises GradError in static mode, where minimize() records the step. Warns where it
        has no parameters at all, as of a model whose Layers stand in a plain list.
        """
        if state.recording():
            raise GradError("step() runs now, and in static mode there are no gradients yet; call minimize(loss)")
        if not self._parameters:
            warnings.warn(
                f"{type(self).__name__}.step: parameters= was empty, so that nothing is trained; a model does not see "
                "Layers in a plain list: keep them in an nn.LayerList",
                stacklevel=2,
            )
        self._step(self._parameters, skip)

    def _step(self, parameters: Sequence[Any], skip: Tensor | None) -> None:
        live = self._live(parameters)
        if not live:
            return
        step_done(self)
        if self.is_written:
            self._step_as_written(live, skip)
        else:
            self._step_by_rule(live, skip)

    def minimize(
        self, loss: Tensor, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """step() from the gradients that loss.backward() left, which is called first if no parameter has one.

        parameters: update only these. no_grad_set: leave these out. Returns ([], [(parameter, gradient), ...]).
        In static mode backward and the step are recorded, and the operations returned in place of [].
        """
        if (recorder := state.recorder()) is not None:
            return recorder.minimize(self, loss, startup_program, parameters, no_grad_set)
        if not isinstance(loss, TensorState):
            raise ArgumentTypeError(f"minimize: loss is a {type(loss).__name__}; give the Tensor to minimize")
        chosen = self._chosen("minimize", startup_program, parameters, no_grad_set)
        if all(p._grad is None for p in self._parameters):
            loss.backward()
        self._step(chosen, None)
        return [], [(p, p.grad) for p in chosen if p._grad is not None]

    def backward(
        self,
        loss: Tensor,
        startup_program: Any = None,
        parameters: Any = None,
        no_grad_set: Any = None,
        callbacks: Any = None,
    ) -> list[tuple[Any, Any]]:
        """The gradients that loss.backward() left, which is called first if no parameter has one, or recorded in static
        mode; returns [(parameter, gradient), ...]."""
        if (recorder := state.recorder()) is not None and callbacks is None:
            chosen = parameters if parameters is not None else (self.parameters_given or None)
            return recorder.backward(loss, chosen, no_grad_set)
        if callbacks is not None:
            raise ConfigError("backward: callbacks belong to static programs; use Tensor.register_hook")
        chosen = self._chosen("backward", startup_program, parameters, no_grad_set)
        if all(p._grad is None for p in self._parameters):
            loss.backward()
        return [(p, p.grad) for p in chosen if p._grad is not None]

    def _chosen(self, what: str, startup_program: Any, parameters: Any, no_grad_set: Any) -> list[Any]:
        if startup_program is not None:
            raise ConfigError(f"{what}: startup_program belongs to static programs; leave it out here")
        without = {id(p) for p in no_grad_set or ()}
        given = self._parameters if parameters is None else list(parameters)
        for p in given:
            if id(p) not in self._position:
                raise ConfigError(f"{what}: {getattr(p, 'name', p)!r} is not a parameter of this {type(self).__name__}")
        return [p for p in given if id(p) not in without]

    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> Any:
        """Update from the (parameter, gradient) pairs given, and those parameters only."""
        pairs = list(params_grads)
        if (recorder := state.recorder()) is not None:
            return recorder.apply_gradients(self, pairs, None)
        chosen = self._chosen("apply_gradients", None, [p for p, _ in pairs], None)
        for p, g in pairs:
            p.grad = g
        self._step(chosen, None)
        return None

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget every parameter's gradient; with set_to_zero, `.grad` then reads as zeros."""
        for p in self._parameters:
            p.clear_grad(set_to_zero)

    clear_gradients = clear_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """clear_grad, by PyTorch's name and with its default: `.grad` is None until the next backward."""
        self.clear_grad(set_to_zero=not set_to_none)

    # settings

    def _check_group(self, group: ParameterGroup) -> ParameterGroup:
        owner = type(self).__name__
        check_known(owner, group, (*_COMMON, *self.checks))
        for name, value in group.settings.items():
            if name in _COMMON:
                check_common(owner, name, value)
            else:
                group.settings[name] = self.checks[name](owner, name, value)
        decay = group.settings.get("weight_decay", self._weight_decay)
        if self.decoupled and not isinstance(decay, (int, float)):
            raise ConfigError(f"{owner}: weight_decay is a number, got {decay!r}; regularizers go with Adam")
        for p in group.params:
            if dtypes.is_complex(p.dtype) and not self.takes_complex:
                raise DTypeError(
                    f"{owner}: parameter {p.name} is {p.dtype.name}; only SGD and Momentum take complex ones"
                )
        return group

    def setting(self, param: Any, name: str) -> Any:
        """A group's own value of a setting, or the optimizer's."""
        own = self._group_of[id(param)].settings
        return own[name] if name in own else self._settings[name]

    def paddle_entries(self) -> set[str]:
        """What PaddlePaddle keeps of a parameter: slots by its names, and powers of betas in the place of steps."""
        theirs = {own: name for name, own in self.paddle_slots.items() if own is not None}
        names = {theirs.get(slot, slot) for slot in self.slots}
        names |= {name for name, own in self.paddle_slots.items() if own is None}
        if "step" in self.scalars and "beta1" in self._settings:
            names |= {"beta1_pow_acc"} | ({"beta2_pow_acc"} if "moment2" in names else set())
        return names

    def _beta_of(self, param: Any, name: str) -> float | None:
        return float(self.setting(param, name)) if name in self._settings else None

    def _options(self, p: Any) -> ParameterOptions:
        settings = self._group_of[id(p)].settings
        decay = settings.get("weight_decay", self._weight_decay)
        # what a group says replaces what ParamAttr said
        factor = settings.get("learning_rate", getattr(p, "optimize_attr", {}).get("learning_rate", 1.0))
        in_group = settings.get("weight_decay") is not None and not self.decoupled
        own = None if in_group else getattr(p, "regularizer", None)
        coefficient = float(decay) if isinstance(decay, (int, float)) else 0.0
        regularizer = own if own is not None or isinstance(decay, (int, float)) else decay
        named = tuple((n, self.setting(p, n)) for n in self._settings)
        need_clip = getattr(p, "need_clip", True)
        options = ParameterOptions(
            factor, coefficient, regularizer, need_clip, self.decoupled, (*named, *self.options_of(p))
        )
        return self._as_prepared(options)


__all__ = ["MeshGroup", "Optimizer", "ParameterGroup", "ParameterOptions"]


@part("optimizer state", Optimizer)
def _state_of(optimizer: Any) -> Iterator[Any]:
    for held in (*optimizer._slots.values(), optimizer._masters):
        yield from (tensor._array for tensor in held.values())
