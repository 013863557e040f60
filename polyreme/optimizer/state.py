"""The state that an optimizer keeps from one step to the next, in checkpoints too."""

from __future__ import annotations

import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices import abstract
from polyreme.core.state import TensorState, Tracer
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CaptureError, CheckpointError, ShapeError
from polyreme.optimizer.late_updates import LateUpdates
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.on_disk import FileTier, StateEntry, StateFiles, StoredArray, StoredEntries, stored
from polyreme.optimizer.shared import MeshGroup, SharedState, by_devices

_log = logging.getLogger("polyreme.optimizer")
_LOW = (dtypes.float16, dtypes.bfloat16)


class OptimizerState:
    """Slots (arrays like the parameter), master weights, and numbers per parameter.

    Made at a parameter's first step, laid out as the plan says. slots, scalars: name -> initial value. paddle_slots:
    how PaddlePaddle names a slot -> its name here, None for one that follows from the others.
    """

    slots: Mapping[str, float] = {}
    scalars: ClassVar[Mapping[str, float]] = {}
    paddle_slots: ClassVar[Mapping[str, str | None]] = {}
    _parameters: list[Any]
    _position: dict[int, int]
    _slots: dict[str, dict[int, Tensor]]
    _masters: dict[int, Tensor]
    _rounded: dict[int, Callable[[], jax.Array | None]]
    _shared: SharedState
    _pending: dict[str, Any]  # what set_state_dict left for state that is not made yet
    _files: StateFiles | None = None  # where state on disk is
    _late: LateUpdates | None = None  # of parameters whose entries move by themselves
    _multi_precision: bool
    _scheduler: LRScheduler | None

    def check_by_entry(self) -> None:
        """Raises ConfigError where entries of a parameter cannot be updated by themselves."""

    def _is_own_entry(self, key: str) -> bool:
        """True for an entry of a state_dict that a subclass may make room for later."""
        return False

    def slot_start(self, name: str, param: Any) -> float:
        """Initial value of a slot."""
        return self.slots[name]

    def slot_dtype(self, param: Any) -> np.dtype:
        """dtype of a parameter's slots: its own, or float32 beside a master weight."""
        return dtypes.float32 if self._has_master(param) else param.dtype

    def create_state(self) -> None:
        """Make the state of every parameter now instead of at its first step, as a checkpoint to be restored needs."""
        self._ensure_state([p for p in self._parameters if not p.stop_gradient])

    def updated(self, p: Any) -> Any:
        """The Tensor that a step updates: a parameter's master weight, where it has none the parameter."""
        return self._masters.get(id(p), p)

    def keep_masters(self, values: Mapping[int, jax.Array]) -> None:
        """Keep float32 master weights from now on, starting from these values: id(parameter) -> array.

        What amp.decorate calls before it rounds the parameters.
        """
        self._multi_precision = True
        self._store([p for p in self._parameters if id(p) in values], values)
        for p in self._parameters:
            if id(p) in values and id(p) not in self._masters:
                copied = abstract.copied(values[id(p)], jnp.float32)
                self._add_master(p, Tensor(self._place(p, copied, _concrete(p))))

    def _add_master(self, p: Any, master: Tensor) -> None:
        self._masters[id(p)] = master
        p.__dict__["_optimizer"] = weakref.ref(self)

    def value_set(self, p: Any) -> None:
        """The value of a parameter was set: its master weight follows before the next step, captured or not."""
        if id(p) in self._masters and state.watch.active is None:
            self._rounded[id(p)] = _nothing
            of_state, of_parameter = weakref.ref(self), weakref.ref(p)
            state.due[id(self._masters[id(p)])] = lambda: _follow(of_state(), of_parameter())

    def watch_masters(self, parameters: Iterable[Any]) -> None:
        """Let the master weights of these parameters, as they are now rounded, follow a value that the parameter gets
        before the next step: a model may be decorated before its weights are loaded, or go back to a checkpoint."""
        for p in parameters:
            if id(p) in self._masters and isinstance(p._array, jax.Array) and not isinstance(p._array, Tracer):
                self._rounded[id(p)] = weakref.ref(p._array)

    def check_masters(self, parameters: Iterable[Any]) -> None:
        """Compare the master weights of these parameters with their values before the next step, whoever wrote them."""
        self._rounded |= {id(p): _nothing for p in parameters if id(p) in self._masters}

    def _follow_loaded(self, live: list[Any]) -> None:
        """Give master weights whose parameters were written from outside since they were rounded those values."""
        for p in live:
            rounded = self._rounded.pop(id(p), None)
            array = _concrete(p)
            if rounded is None or rounded() is array:
                continue
            with state.outside_capture():
                master = self._masters[id(p)]
                # another array may be the same values on other devices
                if not bool(jnp.array_equal(_concrete(master).astype(array.dtype), array, equal_nan=True)):
                    master.set_value(array.astype(jnp.float32))

    def _ensure_state(self, live: list[Any]) -> list[MeshGroup]:
        """Make what is missing of these parameters' state; -> them by the devices that hold them."""
        if self._rounded:
            self._follow_loaded(live)
        if self.scalars and not self._shared.first.scalars:
            with state.outside_capture():
                # in here: a capture's second run would find the values that were given already taken
                self._shared.start({n: self._initial_numbers(n, v) for n, v in self.scalars.items()})
        groups = by_devices(live, _concrete)
        self._shared.settle(groups, self._position, _concrete)
        self._store(live, {})
        for p in live:
            missing = [n for n in self.slots if id(p) not in self._slots[n]]
            if missing or (self._has_master(p) and id(p) not in self._masters):
                self._make_state(p, missing)
        return groups

    def _make_state(self, p: Any, missing: list[str]) -> None:
        value = _concrete(p)
        with state.outside_capture():
            if self._has_master(p) and id(p) not in self._masters:
                master = Tensor(self._place(p, value.astype(jnp.float32), value))
                self._add_master(p, self._restored(p, "master", master))
            for name in missing:
                fresh = abstract.full(p.shape, self.slot_start(name, p), self.slot_dtype(p))
                self._slots[name][id(p)] = self._restored(p, name, Tensor(self._place(p, fresh, value)))

    @property
    def is_streamed(self) -> bool:
        """True if state goes to a disk, or parameters lie outside of the devices' memory, so that updates run bucket by
        bucket and not in a captured program."""
        return any(
            isinstance(p._array, state.Elsewhere) or (_tier_of(p) is not None and self._keeps_arrays(p))
            for p in self._parameters
        )

    @property
    def keeps_arrays(self) -> bool:
        """True if a parameter has state of its own size: moments, say, or master weights."""
        return any(map(self._keeps_arrays, self._parameters))

    @property
    def files(self) -> StateFiles | None:
        """The files of the state on disk, None if there are none; str() of it tells their size, place and speed."""
        return self._files

    def _keeps_arrays(self, p: Any) -> bool:
        return bool(self.slots) or self._has_master(p)

    def _store(self, parameters: list[Any], masters: Mapping[int, jax.Array]) -> None:
        """Put the state of those parameters that belong on a disk there, where it is not yet. masters: the values that
        their master weights start from, which else are the parameters' own."""
        waiting = [
            p
            for p in parameters
            if _tier_of(p) is not None
            and (self._keeps_arrays(p) or id(p) in masters)
            and not (self._files is not None and self._files.has(p))
        ]
        if not waiting:
            return
        if state.watch.active is not None:
            raise CaptureError(
                f"{type(self).__name__}: state on disk is made outside of captured functions; call create_state() "
                "before the first call of this one"
            )
        if any(isinstance(p._array, StoredEntries) for p in waiting):
            self.check_by_entry()
        if self._files is None:
            tier = _tier_of(waiting[0])
            assert tier is not None  # those without one do not wait
            self._files = StateFiles(tier)
        for group in by_devices(waiting, _concrete):
            # apart: a bucket is read whole
            for by_entry in (False, True):
                own = [p for p in group.parameters if isinstance(p._array, StoredEntries) is by_entry]
                if own:
                    self._files.add([(p, self._entries(p, masters)) for p in own])
        for p in waiting:
            if self._has_master(p) or id(p) in masters:
                self._masters[id(p)] = self._restored(p, "master", self._files.tensor(p, "master"))
            for name in self.slots:
                self._slots[name][id(p)] = self._restored(p, name, self._files.tensor(p, name))
            if isinstance(p._array, StoredEntries):
                if self._late is None:
                    self._late = LateUpdates(self._files)
                self._late.add(p, self.slots)

    def _entries(self, p: Any, masters: Mapping[int, jax.Array]) -> dict[str, StateEntry]:
        """The state of a parameter as it is now, or as it starts: made only when it is written."""
        value = _concrete(p)
        where = p.sharding_of("state") or value.sharding
        tier = _tier_of(p)
        by_entry = tier is not None and tier.by_entry
        has_master = self._has_master(p) or id(p) in masters
        slot_dtype = dtypes.float32 if has_master else self.slot_dtype(p)

        def entry(name: str, dtype: Any, make: Callable[[], jax.Array] | None) -> StateEntry:
            like = jax.ShapeDtypeStruct(tuple(value.shape), dtype, sharding=where)
            return StateEntry(
                f"{p.name}_{name}_0", like, None if make is None else lambda: self._place(p, make(), value), by_entry
            )

        def starting(name: str) -> Callable[[], jax.Array] | None:
            start = self.slot_start(name, p)
            return None if start == 0 else lambda: abstract.full(p.shape, start, slot_dtype)

        entries = {
            name: entry(name, slot[id(p)].dtype, functools.partial(state.read, slot[id(p)]))
            for name, slot in self._slots.items()
            if id(p) in slot
        }
        if has_master:
            known = self._masters.get(id(p))
            entries["master"] = entry(
                "master",
                dtypes.float32,
                (lambda: masters.get(id(p), value).astype(jnp.float32))
                if known is None
                else functools.partial(state.read, known),
            )
        return entries | {n: entry(n, slot_dtype, starting(n)) for n in self.slots if n not in entries}

    def _has_master(self, p: Any) -> bool:
        return self._multi_precision and p.dtype in _LOW

    def map_state(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        """Put change(parameter, Tensor) in the place of every slot and master weight; call create_state before."""
        for held in (*self._slots.values(), self._masters):
            for p in self._parameters:
                if id(p) in held:
                    held[id(p)] = change(p, held[id(p)])

    @staticmethod
    def _place(param: Any, array: jax.Array, value: jax.Array) -> jax.Array:
        """array laid out as the strategy wants the state of param, else as param's value if that was put somewhere."""
        layout = param.sharding_of("state") if hasattr(param, "sharding_of") else None
        if layout is None and value.committed:
            layout = value.sharding
        return array if layout is None else put(array, layout)

    def state_arrays(self, names: Mapping[int, str], *, as_stored: bool = False) -> dict[str, Any]:
        """The optimizer's whole state by name: `<slot>/<parameter>`, `master/<parameter>`, and one array over all
        parameters for each number kept per parameter. names: id(parameter) -> its name in the model. as_stored: what
        lies on disk is not read, and stands there as a StoredArray, which checkpoints take and restore.

        The same whatever devices hold the parameters.
        """
        arrays: dict[str, Any] = {
            name: (stored(tensor) if as_stored else None) or tensor._array
            for name, tensor in self._per_parameter(names).items()
        }
        for name, tensor in self._shared.first.scalars.items():
            one = len(self._shared.copies) == 1
            arrays[name] = tensor._array if one else put(self._shared.values(name), tensor._array.sharding)
        return arrays

    def load_state_arrays(self, arrays: Mapping[str, jax.Array | StoredArray], names: Mapping[int, str]) -> None:
        """Continue from what state_arrays gave, laid out as its arrays are now; call create_state before it."""
        for name, tensor in self._per_parameter(names).items():
            state.write(tensor, arrays[name])
        for name, tensor in self._shared.first.scalars.items():
            if len(self._shared.copies) == 1:
                state.write(tensor, arrays[name])
            else:
                self._shared.set_values(name, np.asarray(arrays[name]))

    def state_tensors(self, key: str) -> dict[str, Tensor]:
        """The Tensors of its state by the names they have in a scope: `<parameter>_<slot>_0`, `<parameter>_master_0`,
        `<key>_<number>` for the numbers kept per parameter, `<key>_learning_rate`. Call create_state before.
        """
        found = {f"{p.name}_{n}_0": self._slots[n][id(p)] for n in self.slots for p in self._parameters
                 if id(p) in self._slots[n]}  # fmt: skip
        found |= {f"{p.name}_master_0": self._masters[id(p)] for p in self._parameters if id(p) in self._masters}
        found |= {f"{key}_{name}": tensor for name, tensor in self._shared.first.scalars.items()}
        return found | {f"{key}_learning_rate": self._shared.first.rate}

    def _per_parameter(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        tensors = {
            f"{slot}/{names[id(p)]}": held[id(p)]
            for slot, held in self._slots.items()
            for p in self._parameters
            if id(p) in held
        }
        return tensors | {f"master/{names[key]}": t for key, t in self._masters.items()}

    def _restored(self, p: Any, name: str, tensor: Tensor) -> Tensor:
        """tensor with the value that set_state_dict left for it, if any."""
        value = self._pending.pop(f"{p.name}_{name}_0", None)
        if value is not None:
            tensor.set_value(value)
        return tensor

    def _initial_numbers(self, name: str, start: float) -> np.ndarray:
        """A number per parameter as set_state_dict left it, else where it starts."""
        values = np.full((len(self._parameters),), start, np.float32)
        for at, p in enumerate(self._parameters):
            given = self._pending.pop(f"{p.name}_{name}_0", None)
            if given is not None:
                values[at] = float(np.asarray(given).reshape(()))
        return values

    def state_dict(self) -> dict[str, Any]:
        """Name -> Tensor: `<parameter>_<slot>_0` for every slot, `<parameter>_master_0`, and "LR_Scheduler".

        Slots and master weights are the Tensors themselves: later steps change them. State not made yet is left out.
        """
        result: dict[str, Any] = dict(self._pending)
        scalars = {n: self._shared.values(n, "Optimizer.state_dict()") for n in self._shared.first.scalars}
        for index, p in enumerate(self._parameters):
            for name, held in self._slots.items():
                if id(p) in held:
                    result[f"{p.name}_{name}_0"] = held[id(p)]
            for name, values in scalars.items():
                result[f"{p.name}_{name}_0"] = to_tensor(values[index])
            if id(p) in self._masters:
                result[f"{p.name}_master_0"] = self._masters[id(p)]
        if self._scheduler is not None:
            result["LR_Scheduler"] = self._scheduler.state_dict()
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """set_state_dict by its other name."""
        self.set_state_dict(state_dict)

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict; a parameter that has no entries in it starts again.

        PaddlePaddle's names of slots are taken, and its powers of beta1 and beta2 stand for the number of steps. Raises
        CheckpointError, changing nothing, for a name or shape that does not fit, and for powers of another beta.
        """
        values = self._renamed({k: v for k, v in state_dict.items() if k != "LR_Scheduler"})
        for p in self._parameters:
            for theirs, own in self.paddle_slots.items():
                entry = None if theirs in self.slots else values.pop(f"{p.name}_{theirs}_0", None)
                if entry is not None and own is not None:
                    values[f"{p.name}_{own}_0"] = entry
        if "step" in self.scalars and not any(self._is_own_entry(k) for k in values):
            values = self._counted(values)
        scheduler = state_dict.get("LR_Scheduler")
        self._check_state(values, scheduler)
        self._rounded.clear()
        if scheduler is not None:
            self._scheduler.set_state_dict(scheduler)  # type: ignore[union-attr]
        self._pending = {k: np.array(v.numpy()) if isinstance(v, Tensor) else np.array(v) for k, v in values.items()}
        for p in self._parameters:
            for name, held in self._slots.items():
                if id(p) in held:
                    tensor = held[id(p)]
                    tensor.set_value(np.full(tensor.shape, self.slot_start(name, p), tensor.dtype))
                    self._restored(p, name, tensor)
            if id(p) in self._masters:
                self._masters[id(p)].set_value(np.asarray(p._array, np.float32))
                self._restored(p, "master", self._masters[id(p)])
        for name in self._shared.first.scalars:
            self._shared.set_values(name, self._initial_numbers(name, self.scalars[name]))

    set_dict = set_state_dict

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """values under the names that parameters have here: what is "layer_norm_0.w_0" was "layernorm_0.w_0" once."""
        known = {p.name for p in self._parameters}
        earlier = {re.sub(r"_(?=.*_\d+\.)", "", name): name for name in known}
        keys = {key: re.fullmatch(r"(.+\.[wb]_\d+)(_.+)", key) for key in values}
        moved = {key: parts for key, parts in keys.items() if parts and parts[1] not in known and parts[1] in earlier}
        return {earlier[moved[k][1]] + moved[k][2] if k in moved else k: v for k, v in values.items()}

    def _beta_of(self, param: Any, name: str) -> float | None:
        """The value of beta1 or beta2 for a parameter; None if the optimizer has none."""
        return None

    def _counted(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """values with the number of steps in place of PaddlePaddle's beta ** (steps + 1), or beta ** steps."""
        result, powers = dict(values), {}
        for p in self._parameters:
            for name in ("beta1", "beta2"):
                for suffix, ahead in (("pow_acc", 1), ("pow", 0)):
                    power = result.pop(f"{p.name}_{name}_{suffix}_0", None)
                    beta = self._beta_of(p, name)
                    if power is not None and beta is not None:
                        powers[p.name, name] = float(np.asarray(power).reshape(-1)[0]), beta, ahead
        for (parameter, name), (power, beta, ahead) in powers.items():
            # beta1's counts exactly until float32 has no number so small; after beta2's, bias is corrected no more
            if not 0 < power < 1 or not 0 < beta < 1 or (power < 1e-30 and (parameter, "beta2") in powers):
                result.setdefault(f"{parameter}_step_0", np.float32(1e6))
                continue
            count = round(np.log(power) / np.log(beta)) - ahead
            if count < 0 or abs(beta ** (count + ahead) / power - 1) > 1e-2:
                raise CheckpointError(
                    f"{type(self).__name__}.set_state_dict: {parameter} has {name} to the power of its steps as "
                    f"{power:g}, which is no power of {name}={beta}; give the optimizer the {name} it was saved with"
                )
            if result.get(f"{parameter}_step_0", 1e6) == 1e6:
                result[f"{parameter}_step_0"] = np.float32(count)
        return result

    def _check_state(self, values: Mapping[str, Any], scheduler: Any) -> None:
        owner = type(self).__name__
        known = {f"{p.name}_{n}_0": (p, n) for p in self._parameters for n in (*self.slots, *self.scalars, "master")}
        unknown = [k for k in values if k not in known and not self._is_own_entry(k)]
        if unknown:
            raise CheckpointError(
                f"{owner}.set_state_dict: unknown entries {unknown[:10]}; this optimizer has slots "
                f"{[*self.slots, *self.scalars]} and parameters {[p.name for p in self._parameters][:10]}. A second "
                "copy of a model gets the first one's names when it is built under utils.unique_name.guard()"
            )
        for key, value in values.items():
            if self._is_own_entry(key):
                continue
            p, name = known[key]
            shape = tuple(value.shape if hasattr(value, "shape") else np.shape(value))
            fits = shape in ((), (1,)) if name in self.scalars else shape == tuple(p.shape)
            if not fits:
                raise CheckpointError(
                    f"{owner}.set_state_dict: {key} has shape {list(shape)}, its parameter {list(p.shape)}"
                )
            if name == "master" and not self._has_master(p):
                raise CheckpointError(
                    f"{owner}.set_state_dict: {key} is a master weight, but {p.name} ({p.dtype.name}) has none here; "
                    "make the optimizer with multi_precision=True and the parameter float16 or bfloat16"
                )
        without = [p.name for p in self._parameters if not any(k.startswith(f"{p.name}_") for k in values)]
        if values and self.slots and without and len(without) < len(self._parameters):
            _log.warning(
                "%s.set_state_dict: of %d parameters, %d have no entries and start again: %s%s", owner,
                len(self._parameters), len(without), ", ".join(without[:10]), ", ..." if len(without) > 10 else "",
            )  # fmt: skip
        for p in self._parameters:
            lacking = [n for n in self.slots if f"{p.name}_{n}_0" not in values]
            if lacking and len(lacking) < len(self.slots):
                raise CheckpointError(
                    f"{owner}.set_state_dict: {p.name} lacks {lacking}; give the state_dict of a {owner} made with the "
                    "same arguments"
                )
        if scheduler is not None and self._scheduler is None:
            raise CheckpointError(
                f"{owner}.set_state_dict: the state has an LR_Scheduler, this optimizer a fixed rate; give it a "
                "scheduler"
            )


def _tier_of(p: Any) -> FileTier | None:
    """The FileTier of a parameter's state if that lies in files of this process; None where arrays have no memory."""
    tier = None if abstract.mode.is_on else getattr(p, "state_tier", None)
    return tier if tier is not None and p.sharding_of("state").addressable_devices else None


def _follow(optimizer: OptimizerState | None, p: Any) -> None:
    if optimizer is not None and p is not None:
        optimizer._follow_loaded([p])


def _nothing() -> None:
    """The array of a parameter that nobody looked at."""


def _concrete(tensor: TensorState) -> jax.Array:
    """The tensor's array as it stood before the capture in progress, and those around it, if there are any."""
    array, capture = tensor._array, state.code_watcher()
    while isinstance(array, Tracer) and capture is not None:
        if id(tensor) in capture.before:
            array = capture.before[id(tensor)].array
        capture = capture.outer
    if isinstance(array, Tracer):
        raise ShapeError("optimizer state must be made for a parameter that exists outside the captured function")
    return array
