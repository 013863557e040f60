"""Optimizer: which parameters, what state they have, and one compiled update over all of them.

Floor: 4.  A subclass declares its state and a pure rule for one parameter; everything else (groups, clipping, regularizers,
master weights, learning rate, skipping a step on overflow, placement, state_dict) is here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import TensorState, Tracer
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CheckpointError, ConfigError, ShapeError
from polyreme.optimizer.lr import LRScheduler

Slots = dict[str, jax.Array]


@dataclass(frozen=True)
class ParameterOptions:
    """What the update of one parameter depends on besides arrays; part of the compiled update's identity."""

    name: str
    lr_factor: float = 1.0
    weight_decay: float = 0.0
    regularizer: Any = None
    need_clip: bool = True
    extra: tuple[tuple[str, Any], ...] = ()


@dataclass
class Group:
    """Parameters that share settings; settings missing here are the optimizer's own."""

    params: list[Any]
    settings: dict[str, Any] = field(default_factory=dict)


class Optimizer:
    """Base of all optimizers.

    learning_rate: a number or an LRScheduler. parameters: a list of Parameters, or of dicts {"params": [...],
    "learning_rate": factor, "weight_decay": ..., "grad_clip": ...}. weight_decay: a coefficient (L2) or a regularizer.
    Subclasses set `slots` (arrays like the parameter: name -> initial value), `scalars` (numbers per parameter) and `rule`.
    """

    slots: ClassVar[Mapping[str, float]] = {}
    scalars: ClassVar[Mapping[str, float]] = {}
    decoupled: ClassVar[bool] = False  # weight decay is applied by rule, not added to the gradient

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        multi_precision: bool = False,
    ) -> None:
        if parameters is None:
            raise ConfigError(f"{type(self).__name__} needs parameters=, a list such as model.parameters()")
        if isinstance(parameters, TensorState):
            raise ConfigError("parameters= is one Tensor; give a list of them")
        self._name = name
        self._grad_clip = grad_clip
        self._multi_precision = multi_precision
        self._weight_decay = weight_decay
        self._groups = [self._as_group(g) for g in _split_groups(list(parameters))]
        self._parameters = [p for g in self._groups for p in g.params]
        self._check_unique()
        self._slots: dict[str, dict[int, Tensor]] = {name: {} for name in self.slots}
        self._masters: dict[int, Tensor] = {}
        self._scalars: dict[str, Tensor] = {}
        self._pending: dict[str, Any] = {}
        self._updates: dict[Any, Callable] = {}
        self._scheduler = learning_rate if isinstance(learning_rate, LRScheduler) else None
        with state.outside_capture():
            self._lr = Tensor(jnp.asarray(self._initial_rate(learning_rate), jnp.float32))
        if self._scheduler is not None:
            self._observer = self._set_rate
            self._scheduler.subscribe(self._observer)

    # what a subclass writes

    def rule(
        self, p: jax.Array, g: jax.Array, lr: jax.Array, slots: Slots, scalars: Slots, options: ParameterOptions
    ) -> tuple[jax.Array, Slots, Slots]:
        """One parameter's update on arrays: -> new p, slots, scalars. Pure; p and g are in the dtype of the arithmetic."""
        raise NotImplementedError

    def options_of(self, param: Any) -> tuple[tuple[str, Any], ...]:
        """Per-parameter settings of a subclass, hashable."""
        return ()

    # learning rate

    def get_lr(self) -> float:
        """The learning rate in force."""
        return float(self._scheduler()) if self._scheduler is not None else float(np.asarray(self._lr._array))

    def set_lr(self, value: float) -> None:
        """Change the learning rate; ConfigError if a scheduler sets it."""
        if self._scheduler is not None:
            raise ConfigError("set_lr: this optimizer's rate comes from a scheduler; change that, or set_lr_scheduler")
        self._set_rate(value)

    def set_lr_scheduler(self, scheduler: LRScheduler) -> None:
        """Take the rate from this scheduler from now on."""
        self._scheduler = scheduler
        self._observer = self._set_rate
        scheduler.subscribe(self._observer)
        self._set_rate(scheduler())

    def _set_rate(self, value: float) -> None:
        current = self._lr._array
        state.write(
            self._lr, jnp.asarray(value, jnp.float32) if isinstance(current, Tracer) else _rate_like(value, current)
        )

    @staticmethod
    def _initial_rate(learning_rate: Any) -> float:
        if isinstance(learning_rate, LRScheduler):
            return learning_rate()
        if isinstance(learning_rate, TensorState):
            return float(np.asarray(learning_rate._array))
        if isinstance(learning_rate, bool) or not isinstance(learning_rate, (int, float)) or not learning_rate >= 0:
            raise ConfigError(f"learning_rate is a number of at least 0 or an LRScheduler, got {learning_rate!r}")
        return float(learning_rate)

    # the step

    def step(self, *, skip: Tensor | None = None) -> None:
        """Update every parameter that has a gradient, in one compiled call.

        skip: a 0-D bool Tensor; where it is True nothing changes, which is how a step with overflowed gradients is left
        out without asking the host.
        """
        live = [p for p in self._parameters if p._grad is not None and not p.stop_gradient]
        if not live:
            return
        self._ensure_state(live)
        key = tuple(self._options(p) for p in live)
        masters = tuple(id(p) in self._masters for p in live)
        found_key = (key, masters)
        update = self._updates.get(found_key)
        if update is None:
            update = self._updates[found_key] = self._compile(live, key, masters)
        inputs = {
            "lr": state.read(self._lr),
            "params": [state.read(self._masters.get(id(p), p)) for p in live],
            "grads": [state.read(p._grad) for p in live],
            "slots": [{n: state.read(self._slots[n][id(p)]) for n in self.slots} for p in live],
            "scalars": {n: state.read(t) for n, t in self._scalars.items()},
            "skip": None if skip is None else state.read(skip),
        }
        new = update(inputs)
        for i, p in enumerate(live):
            master = self._masters.get(id(p))
            if master is not None:
                state.write(master, new["params"][i])
                state.write(p, new["low"][i])
            else:
                state.write(p, new["params"][i])
            for name in self.slots:
                state.write(self._slots[name][id(p)], new["slots"][i][name])
        for name, tensor in self._scalars.items():
            state.write(tensor, new["scalars"][name])

    def _compile(self, live: list[Any], options: tuple[ParameterOptions, ...], masters: tuple[bool, ...]) -> Callable:
        positions = [self._position[id(p)] for p in live]
        clips = [self._clip_of[id(p)] for p in live]
        low = [p.dtype for p in live]
        layouts = [
            (p.sharding_of("param"), p.sharding_of("state")) if hasattr(p, "sharding_of") else (None, None)
            for p in live
        ]

        def update(inputs: dict[str, Any]) -> dict[str, Any]:
            params, slots, scalars = inputs["params"], inputs["slots"], dict(inputs["scalars"])
            grads = [
                _constrain(g.astype(p.dtype), layout[1])
                for g, p, layout in zip(inputs["grads"], params, layouts, strict=True)
            ]
            grads = _clip(grads, clips, options)
            grads = [_regularize(g, p, o) for g, p, o in zip(grads, params, options, strict=True)]
            out: dict[str, Any] = {"params": [], "low": [], "slots": []}
            for i, (p, g, o) in enumerate(zip(params, grads, options, strict=True)):
                at = positions[i]
                mine = {n: s[at] for n, s in scalars.items()}
                new_p, new_slots, new_mine = self.rule(
                    _constrain(p, layouts[i][1]), g, inputs["lr"] * o.lr_factor, slots[i], mine, o
                )
                skip = inputs["skip"]
                if skip is not None:
                    new_p = jnp.where(skip, p, new_p)
                    new_slots = {n: jnp.where(skip, slots[i][n], s) for n, s in new_slots.items()}
                    new_mine = {n: jnp.where(skip, mine[n], s) for n, s in new_mine.items()}
                new_p = new_p.astype(p.dtype)
                out["params"].append(_constrain(new_p, layouts[i][1 if masters[i] else 0]))
                out["low"].append(_constrain(new_p.astype(low[i]), layouts[i][0]) if masters[i] else None)
                out["slots"].append(
                    {n: _constrain(s.astype(slots[i][n].dtype), layouts[i][1]) for n, s in new_slots.items()}
                )
                scalars = {n: s.at[at].set(new_mine[n]) for n, s in scalars.items()}
            out["scalars"] = scalars
            return out

        update.__name__ = f"{type(self).__name__.lower()}_update"
        return jax.jit(update)

    def minimize(
        self, loss: Tensor, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[None, list[tuple[Any, Any]]]:
        """loss.backward() and step(); returns (None, [(parameter, gradient), ...])."""
        if startup_program is not None or parameters is not None or no_grad_set is not None:
            raise ConfigError(
                "minimize: startup_program, parameters and no_grad_set belong to static programs; leave them out here"
            )
        loss.backward()
        self.step()
        return None, [(p, p.grad) for p in self._parameters if p.grad is not None]

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> list[tuple[Any, Any]]:
        """loss.backward(); returns [(parameter, gradient), ...]."""
        loss.backward()
        return [(p, p.grad) for p in self._parameters if p.grad is not None]

    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> None:
        """Update from the (parameter, gradient) pairs given."""
        for p, g in params_grads:
            p.grad = g
        self.step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget every parameter's gradient; with set_to_zero, `.grad` then reads as zeros."""
        for p in self._parameters:
            p.clear_grad(set_to_zero)

    clear_gradients = clear_grad

    # state

    def _ensure_state(self, live: list[Any]) -> None:
        if self.scalars and not self._scalars:
            with state.outside_capture():
                self._scalars = {
                    n: Tensor(jnp.full((len(self._parameters),), v, jnp.float32)) for n, v in self.scalars.items()
                }
            self._restore_scalars()
        for p in live:
            needs_master = self._multi_precision and p.dtype in (dtypes.float16, dtypes.bfloat16)
            missing = [n for n in self.slots if id(p) not in self._slots[n]]
            if not missing and (not needs_master or id(p) in self._masters):
                continue
            with state.outside_capture():
                if needs_master and id(p) not in self._masters:
                    self._masters[id(p)] = self._restored(
                        p, "master", Tensor(self._place(p, jnp.asarray(_concrete(p), jnp.float32)))
                    )
                wide = dtypes.float32 if needs_master else p.dtype
                for name in missing:
                    fresh = self._place(p, jnp.full(p.shape, self.slot_start(name, p), wide))
                    self._slots[name][id(p)] = self._restored(p, name, Tensor(fresh))

    def create_state(self) -> None:
        """Make the state of every parameter now instead of at its first step, as a checkpoint to be restored needs."""
        self._ensure_state([p for p in self._parameters if not p.stop_gradient])

    def state_tensors(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Every persistent Tensor of the optimizer under a name: `<slot>/<parameter>`, `master/<parameter>`, and one array
        over all parameters for each number kept per parameter. names: id(parameter) -> its name in the model.
        """
        found = {
            f"{slot}/{names[id(p)]}": held[id(p)]
            for slot, held in self._slots.items()
            for p in self._parameters
            if id(p) in held
        }
        found.update({f"master/{names[key]}": t for key, t in self._masters.items()})
        return found | self._scalars

    def slot_start(self, name: str, param: Any) -> float:
        """Initial value of a slot."""
        return self.slots[name]

    @staticmethod
    def _place(param: Any, array: jax.Array) -> jax.Array:
        layout = param.sharding_of("state") if hasattr(param, "sharding_of") else None
        if layout is None:
            sharding = _concrete(param).sharding
            layout = sharding if len(sharding.device_set) > 1 else None
        return array if layout is None else jax.device_put(array, layout)

    def _restored(self, p: Any, name: str, tensor: Tensor) -> Tensor:
        """tensor with the value that set_state_dict left for it, if any."""
        value = self._pending.pop(f"{p.name}_{name}_0", None)
        if value is not None:
            tensor.set_value(value)
        return tensor

    def _restore_scalars(self) -> None:
        for name, tensor in self._scalars.items():
            values = np.array(tensor._array)
            for at, p in enumerate(self._parameters):
                given = self._pending.pop(f"{p.name}_{name}_0", None)
                if given is not None:
                    values[at] = float(np.asarray(given).reshape(()))
            tensor.set_value(values)

    def state_dict(self) -> dict[str, Any]:
        """Name -> Tensor: `<parameter>_<slot>_0` for every slot, `<parameter>_master_0`, and "LR_Scheduler"."""
        found: dict[str, Any] = dict(self._pending)
        for at, p in enumerate(self._parameters):
            for name in self.slots:
                if id(p) in self._slots[name]:
                    found[f"{p.name}_{name}_0"] = self._slots[name][id(p)]
            for name, tensor in self._scalars.items():
                found[f"{p.name}_{name}_0"] = to_tensor(np.asarray(tensor._array)[at])
            if id(p) in self._masters:
                found[f"{p.name}_master_0"] = self._masters[id(p)]
        if self._scheduler is not None:
            found["LR_Scheduler"] = self._scheduler.state_dict()
        return found

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict. Raises CheckpointError, changing nothing, for a name or shape that does not fit."""
        state_dict = dict(state_dict)
        scheduler = state_dict.pop("LR_Scheduler", None)
        known = {f"{p.name}_{n}_0": p for p in self._parameters for n in (*self.slots, *self.scalars, "master")}
        unknown = [k for k in state_dict if k not in known]
        if unknown:
            raise CheckpointError(
                f"{type(self).__name__}.set_state_dict: unknown entries {unknown[:10]}; this optimizer has slots "
                f"{[*self.slots, *self.scalars]} and parameters {[p.name for p in self._parameters][:10]}"
            )
        for key, value in state_dict.items():
            have, want = tuple(np.shape(value) if not hasattr(value, "shape") else value.shape), tuple(known[key].shape)
            if have not in (want, (), (1,)):
                raise CheckpointError(f"set_state_dict: {key} has shape {list(have)}, its parameter {list(want)}")
        self._pending = {k: np.array(v.numpy()) if isinstance(v, Tensor) else v for k, v in state_dict.items()}
        for p in self._parameters:
            for name in self.slots:
                if id(p) in self._slots[name]:
                    self._restored(p, name, self._slots[name][id(p)])
            if id(p) in self._masters:
                self._restored(p, "master", self._masters[id(p)])
        if self._scalars:
            self._restore_scalars()
        if scheduler is not None:
            if self._scheduler is None:
                raise CheckpointError("set_state_dict: the state has an LR_Scheduler, this optimizer has a fixed rate")
            self._scheduler.set_state_dict(scheduler)

    set_dict = set_state_dict

    # settings

    def _as_group(self, group: Group) -> Group:
        known = {"learning_rate", "weight_decay", "grad_clip", *self._group_settings()}
        for name in group.settings:
            if name not in known:
                raise ConfigError(
                    f"parameter group setting {name!r} is not known; a group may set {', '.join(sorted(known))}"
                )
        for p in group.params:
            if not isinstance(p, TensorState):
                raise ConfigError(f"parameters= must hold Parameters, got {type(p).__name__}")
        return group

    def _group_settings(self) -> tuple[str, ...]:
        return ()

    def _check_unique(self) -> None:
        names: dict[str, Any] = {}
        self._position = {id(p): i for i, p in enumerate(self._parameters)}
        if len(self._position) != len(self._parameters):
            raise ConfigError("a parameter appears twice in parameters=")
        for p in self._parameters:
            if names.setdefault(p.name, p) is not p:
                raise ConfigError(
                    f"two parameters are named {p.name!r} (shapes {names[p.name].shape} and {p.shape}); rename one"
                )
        self._group_of = {id(p): g for g in self._groups for p in g.params}
        self._clip_of = {id(p): g.settings.get("grad_clip", self._grad_clip) for g in self._groups for p in g.params}

    def setting(self, param: Any, name: str, default: Any) -> Any:
        """A group's own value of a setting, or the optimizer's."""
        return self._group_of[id(param)].settings.get(name, default)

    def _options(self, p: Any) -> ParameterOptions:
        settings = self._group_of[id(p)].settings
        decay = settings.get("weight_decay", self._weight_decay)
        factor = getattr(p, "optimize_attr", {}).get("learning_rate", 1.0) * settings.get("learning_rate", 1.0)
        own = getattr(p, "regularizer", None)
        coefficient, regularizer = 0.0, own
        if isinstance(decay, (int, float)) and not isinstance(decay, bool):
            coefficient = float(decay)
        elif own is None:
            regularizer = decay
        return ParameterOptions(
            p.name, factor, coefficient if own is None or self.decoupled else 0.0,
            regularizer, getattr(p, "need_clip", True), (("decoupled", self.decoupled), *self.options_of(p)),
        )  # fmt: skip


def _split_groups(parameters: list[Any]) -> list[Group]:
    if parameters and isinstance(parameters[0], dict):
        groups = []
        for entry in parameters:
            if not isinstance(entry, dict) or "params" not in entry:
                raise ConfigError(
                    "parameter groups are dicts with 'params'; groups and plain Parameters cannot be mixed"
                )
            params = entry["params"]
            listed = [params] if isinstance(params, TensorState) else list(params)
            groups.append(Group(listed, {k: v for k, v in entry.items() if k != "params"}))
        return groups
    return [Group(parameters)]


def _clip(grads: list[jax.Array], clips: list[Any], options: tuple[ParameterOptions, ...]) -> list[jax.Array]:
    """Each gradient clipped by its group's clip, parameters with need_clip=False left alone."""
    done = list(grads)
    for clip in {id(c): c for c in clips if c is not None}.values():
        chosen = [i for i, c in enumerate(clips) if c is clip and options[i].need_clip]
        if chosen:
            for i, g in zip(chosen, clip.arrays([grads[i] for i in chosen]), strict=True):
                done[i] = g.astype(grads[i].dtype)
    return done


def _regularize(g: jax.Array, p: jax.Array, options: ParameterOptions) -> jax.Array:
    """The gradient with the penalty's gradient added: L2 of a plain coefficient, or a regularizer's own."""
    if options.regularizer is not None:
        return g + options.regularizer.gradient(p).astype(g.dtype)
    decoupled = dict(options.extra).get("decoupled")
    return (
        g
        if decoupled or not options.weight_decay
        else g + jnp.asarray(options.weight_decay, g.dtype) * p.astype(g.dtype)
    )


def _constrain(x: jax.Array, sharding: Any) -> jax.Array:
    return x if sharding is None or x.ndim == 0 else jax.lax.with_sharding_constraint(x, sharding)


def _concrete(tensor: TensorState) -> jax.Array:
    """The tensor's array as it stood before the capture in progress, if there is one."""
    array = tensor._array
    if isinstance(array, Tracer) and state.watch.active is not None:
        array = state.watch.active.before[id(tensor)].array
    if isinstance(array, Tracer):
        raise ShapeError("optimizer state must be made for a parameter that exists outside the captured function")
    return array


def _rate_like(value: float, current: jax.Array) -> jax.Array:
    new = np.asarray(value, np.float32)
    return jax.device_put(new, current.sharding) if current.committed else jnp.asarray(new)


__all__ = ["Group", "Optimizer", "ParameterOptions"]
