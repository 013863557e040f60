"""Optimizers and clips of users that say with Tensors what they do, as subclasses of PaddlePaddle's define it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices import abstract
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.nn.clip import is_written_on_pairs
from polyreme.optimizer.state import OptimizerState
from polyreme.optimizer.update import ParameterOptions


class _Blocks:
    """The function that returns the block for `_append_optimize_op`; the floor of Programs sets it."""

    def __init__(self) -> None:
        self.current: Callable[[], Any] = lambda: None


blocks = _Blocks()


class OwnUpdate(OptimizerState):
    """A subclass that defines `_append_optimize_op(block, (parameter, gradient))` is stepped by calls of it, one for
    each parameter, after `_create_accumulators(block, parameters)`; gradients are clipped, with penalties.

    `_add_accumulator` makes what it keeps for a parameter, which state_dict has too. The method of a class with a rule,
    such as Adam, updates one parameter by that rule.
    """

    _is_prepared = False  # gradients are clipped, and have their penalties if the subclass says the update
    _group_of: dict[int, Any]
    _clip_of: dict[int, Any]
    _weight_decay: Any
    _options: Callable[[Any], ParameterOptions]
    _step_by_rule: Callable[[list[Any], Tensor | None], None]
    decoupled: ClassVar[bool]

    @property
    def has_own_update(self) -> bool:
        """True if a subclass defines the update of one parameter with Tensors."""
        return type(self)._append_optimize_op is not OwnUpdate._append_optimize_op

    @property
    def is_written(self) -> bool:
        """True if a subclass defines the update or a clip with Tensors, so that a step is not one compiled update."""
        return self.has_own_update or any(map(is_written_on_pairs, self._clip_of.values()))

    def refuse_own_update(self, where: str) -> None:
        """Raises ConfigError where an update must be a pure rule."""
        if self.is_written:
            raise ConfigError(
                f"{type(self).__name__}: an update or a clip that is written with Tensors does not run in {where}; "
                "write the update as rule(), and the clip as arrays()"
            )

    # what a subclass defines

    def _create_accumulators(self, block: Any = None, parameters: Any = None) -> None:
        """Make what is kept for these parameters: by `_add_moments_pows`, which subclasses of Adam define, or the
        slots of its class."""
        chosen = [p for p in parameters or self._parameters if not p.stop_gradient]
        add = getattr(self, "_add_moments_pows", None)
        if add is None:
            self._ensure_state(chosen)
            return
        for p in chosen:
            if p.name not in self._already_create_accumulator:
                add(self._create_master_weight(p) if self._has_master(p) else p)
                self._already_create_accumulator.add(p.name)

    def _append_optimize_op(self, block: Any, param_and_grad: tuple[Any, Any]) -> Any:
        """Update a parameter by the rule of its class."""
        p, g = param_and_grad
        before, p._grad = p._grad, g
        try:
            self._step_by_rule([p], None)
        finally:
            p._grad = before

    def _finish_update(self, block: Any, parameters_and_grads: Any) -> None:
        """What is to be done after all parameters."""

    # what it calls

    def _add_accumulator(
        self, name: str, param: Any, dtype: Any = None, fill_value: float = 0.0, shape: Any = None, type: Any = None,
        device: Any = None,
    ) -> Tensor:  # fmt: skip
        """A Tensor that is kept for a parameter, made at the first call; of its shape and dtype unless given."""
        p = self._owner_of(param)
        accumulators = self._slots.setdefault(name, {})
        if id(p) not in accumulators:
            chosen = dtypes.as_dtype(dtype) if dtype is not None else param.dtype
            size = tuple(param.shape if shape is None else shape)
            self._starts[name, id(p)] = fill_value
            with state.outside_capture():
                fresh = abstract.full(size, fill_value, chosen)
                accumulators[id(p)] = self._restored(p, name, Tensor(fresh))
        return accumulators[id(p)]

    def _get_accumulator(self, name: str, param: Any) -> Tensor:
        return self._slots[name][id(self._owner_of(param))]

    _get_accumulator_master = _get_accumulator

    def _create_param_lr(self, param_and_grad: Any) -> Tensor:
        """The rate of a parameter, 0-D: the optimizer's times its own factors."""
        p = param_and_grad[0]
        factor = self._options(self._owner_of(p)).lr_factor
        return Tensor(state.read(self._shared.first.rate) * jnp.asarray(factor, self._shared.first.rate.dtype))

    def _create_master_weight(self, param: Any) -> Tensor:
        """The float32 master weight of a parameter, made at the first call."""
        if id(param) not in self._masters:
            with state.outside_capture():
                master = Tensor(state.read(param).astype(jnp.float32))
                self._add_master(param, self._restored(param, "master", master))
        return self._masters[id(param)]

    @staticmethod
    def _is_dtype_fp16_or_bf16(dtype: Any) -> bool:
        return dtypes.as_dtype(dtype) in (dtypes.float16, dtypes.bfloat16)

    @property
    def _already_create_accumulator(self) -> set[str]:
        return self.__dict__.setdefault("_named_accumulators", set())

    def _update_param_group(self, parameters: Any) -> Any:
        return parameters["params"] if isinstance(parameters, dict) else parameters

    def _owner_of(self, param: Any) -> Any:
        """The parameter whose master weight this is, else itself."""
        owners = {id(master): key for key, master in self._masters.items()}
        key = owners.get(id(param))
        return param if key is None else next(p for p in self._parameters if id(p) == key)

    # the step

    def _step_as_written(self, live: Sequence[Any], skip: Tensor | None) -> None:
        """A step of an optimizer that is_written, over parameters that have a gradient."""
        if skip is not None and bool(skip):
            return
        with no_grad():
            pairs = self._clipped([(p, p._grad) for p in live])
            self._is_prepared = True
            try:
                if self.has_own_update:
                    self._update_as_written(pairs)
                else:
                    self._with_gradients(pairs, lambda: self._step_by_rule(list(live), None))
            finally:
                self._is_prepared = False

    def _update_as_written(self, pairs: list[tuple[Any, Any]]) -> None:
        block = blocks.current()
        pairs = [(p, self._penalized(p, g)) for p, g in pairs]
        self._create_accumulators(block, [p for p, _ in pairs])
        for pair in pairs:
            self._append_optimize_op(block, pair)
        self._finish_update(block, pairs)

    @staticmethod
    def _with_gradients(pairs: Sequence[tuple[Any, Any]], run: Callable[[], None]) -> None:
        before = [p._grad for p, _ in pairs]
        for p, g in pairs:
            p._grad = g
        try:
            run()
        finally:
            for (p, _), g in zip(pairs, before, strict=True):
                p._grad = g

    def _clipped(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The pairs, those of each clip clipped together."""
        done = dict(zip((id(p) for p, _ in pairs), pairs, strict=True))
        for clip in {id(c): c for p, _ in pairs if (c := self._clip_of[id(p)]) is not None}.values():
            for p, g in clip([(p, g) for p, g in pairs if self._clip_of[id(p)] is clip]):
                done[id(p)] = (p, g)
        return list(done.values())

    def _penalized(self, p: Any, g: Tensor) -> Tensor:
        decay = self._group_of[id(p)].settings.get("weight_decay", self._weight_decay)
        own = getattr(p, "regularizer", None)
        regularizer = own if own is not None else decay
        if isinstance(regularizer, (int, float)) or regularizer is None:
            return g if self.decoupled or not regularizer else g + p * regularizer
        return g + Tensor(regularizer.gradient(state.read(p)))

    def _as_prepared(self, options: ParameterOptions) -> ParameterOptions:
        """Options of a parameter whose gradient needs no more clipping, and no penalty that it has."""
        if not self._is_prepared:
            return options
        options = dataclasses.replace(options, need_clip=False)
        if not self.has_own_update:
            return options
        decay = options.weight_decay if self.decoupled else 0.0
        return dataclasses.replace(options, regularizer=None, weight_decay=decay)

    # in files

    @property
    def _starts(self) -> dict[tuple[str, int], float]:
        return self.__dict__.setdefault("_accumulator_starts", {})

    def slot_start(self, name: str, param: Any) -> float:
        """Initial value of a slot, or of what _add_accumulator made."""
        start = self._starts.get((name, id(param)))
        return super().slot_start(name, param) if start is None else start

    def _is_own_entry(self, key: str) -> bool:
        """True for an entry of a state_dict that the subclass may make an accumulator for."""
        return self.has_own_update and any(key.startswith(f"{p.name}_") for p in self._parameters)
