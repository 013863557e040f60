"""Steps by a pure rule: the compiled updates of an optimizer's parameters, wherever these and their state lie.

On one set of devices all parameters are updated by one call. Those in host memory are brought one by one, those whose
state is on disk bucket by bucket, and those that lie on disk by entry are updated an entry at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.core.devices.device_memory import raise_explained
from polyreme.core.meshes import HOST, Devices, everywhere, on_one_device
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError
from polyreme.nn.clip import ClipGradByGlobalNorm, ClipGradByValue
from polyreme.optimizer.late_updates import TakenStep
from polyreme.optimizer.on_disk import BUCKET_BYTES, Bucket, StoredArray, StoredEntries, UpdateFile
from polyreme.optimizer.own_update import OwnUpdate
from polyreme.optimizer.shared import MeshGroup, Shared
from polyreme.optimizer.update import (
    Leaf,
    ParameterOptions,
    Rule,
    RuleOfClass,
    Update,
    called_weakly,
    compile_squares,
    compile_update,
)
from polyreme.optimizer.update_by_kind import Common, KindUpdates, UpdateByKind, is_worthwhile


class RuleUpdate(OwnUpdate):
    """The part of an Optimizer that applies its rule, numbers and prepare to parameters that have a gradient."""

    by_element: ClassVar[bool] = True  # the rule treats each element of a parameter by itself
    rule: Any
    numbers: Any
    prepare: Any
    _updates: dict[Any, Callable]
    _rate_dtype: np.dtype

    reads_options_alone: ClassVar[bool] = False
    """Said by a class of its own rule, not of a subclass's: it reads its arguments and nothing of the optimizer, so
    that all optimizers of the class are traced once."""

    @property
    def _shared_rule(self) -> Rule:
        """The rule, equal for all optimizers of a class that says so."""
        return RuleOfClass(type(self)) if vars(type(self)).get("reads_options_alone", False) else self.rule

    def _options(self, p: Any) -> ParameterOptions:
        raise NotImplementedError

    def _step_by_rule(self, live: list[Any], skip: Tensor | None) -> None:
        groups = self._ensure_state(live)
        if len(groups) == 1:
            self._update(groups[0].devices, live, skip, ())
            return
        if state.watch.active is not None:
            raise CaptureError(
                f"{type(self).__name__}.step() in a captured function: its parameters lie on {len(groups)} meshes, as "
                "under a pipeline, and one program runs on one mesh; call step() outside, or train_batch"
            )
        squares = [self.squared_norms(group) for group in groups] if self.clips_together else []
        for group in groups:
            self.update_group(group, None if skip is None else group.here(skip), [group.here(v) for v in squares])

    @staticmethod
    def _live(parameters: Sequence[Any]) -> list[Any]:
        if (watcher := state.watch.active) is not None:
            # which parameters have a gradient decides what is captured, so the capture must know of all of them
            for p in parameters:
                watcher.touch(p)
        return [p for p in parameters if p._grad is not None and not p.stop_gradient]

    def _update(self, devices: Devices, live: list[Any], skip: Tensor | None, squares: Sequence[Tensor]) -> None:
        """One compiled update, then one bucket after another of what lies on disk; squares as in update_group."""
        away = [p for p in live if self._files is not None and self._files.has(p)]
        if away:
            if self.clips_together and not squares:
                squares = [self.squared_norms(MeshGroup(devices, tuple(live)))]
            self._check_clips(live, squares)
            near = [p for p in live if not self._files.has(p)]  # type: ignore[union-attr]
            if any(isinstance(p._array, state.Elsewhere) for p in near):
                self._update_one_by_one(devices, near, skip, squares)
            elif near:
                self._update_in_memory(devices, near, skip, squares)
            by_entry = [p for p in away if isinstance(p._array, StoredEntries)]
            whole = [p for p in away if not isinstance(p._array, StoredEntries)]
            if whole:
                self._update_in_buckets(devices, whole, skip, squares)
            if by_entry:
                self._update_by_entry(devices, by_entry, skip, squares)
        elif any(isinstance(p._array, state.Elsewhere) for p in live):
            if self.clips_together and not squares:
                squares = [self.squared_norms(MeshGroup(devices, tuple(live)))]
            self._check_clips(live, squares)
            self._update_one_by_one(devices, live, skip, squares)
        else:
            self._update_in_memory(devices, live, skip, squares)
        if self._masters:
            self.watch_masters(live)
        for p in live:
            if getattr(p, "after_update", None) is not None:
                p.after_update(skip)

    def _update_in_memory(
        self, devices: Devices, live: list[Any], skip: Tensor | None, squares: Sequence[Tensor]
    ) -> None:
        together = self._clipped_together() if squares else {}
        # whose norms count is a matter of parameters on other devices too
        norms = tuple((clip, *places) for clip, places in together.items())
        kinds = tuple((self._position[id(p)], self._options(p), p.dtype, id(p) in self._masters) for p in live)
        key = (state.watch.active is None, kinds, len(squares), norms)
        update = self._updates.get(key)
        if update is None:
            update = self._updates[key] = self._compile_update(live, together)
        shared = self._shared.copies[devices]
        inputs = self._inputs(live, shared, skip)
        try:
            new = update(inputs | {"squares": [state.read(v) for v in squares]})
        except jax.errors.JaxRuntimeError as error:
            raise_explained(error, f"the update of {type(self).__name__}")
        self._write(live, shared, new)

    def _update_one_by_one(
        self, devices: Devices, live: list[Any], skip: Tensor | None, squares: Sequence[Tensor]
    ) -> None:
        """The update of parameters in host memory: each is brought with what belongs to it, updated and sent back."""
        if state.watch.active is not None:
            raise CaptureError(
                f"{type(self).__name__}.step() in a captured function: its parameters lie in host memory, and are "
                "updated one by one; call step() after the captured function"
            )
        updates, shared = self._updates_by_kind(live, squares), self._shared.copies[devices]
        inputs = {
            "lr": shared.rate._array,
            "skip": None if skip is None else skip._array,
            "scalars": {n: t._array for n, t in shared.scalars.items()},
            "squares": [v._array for v in squares],
        }
        common, scalars, nbytes = updates.common(inputs), inputs["scalars"], 0
        for place, p in enumerate(live):
            master = self._masters.get(id(p))
            now = state.read(p)
            slots = {n: self._slots[n][id(p)]._array for n in self.slots}
            wide, rounded, slots, scalars = updates.one(
                place,
                common,
                now if master is None else master._array,
                now if master is not None and skip is not None else None,
                state.read(p._grad),
                slots,
                scalars,
            )
            state.write(p, wide if master is None else rounded)
            if master is not None:
                state.write(master, wide)
            for name, array in slots.items():
                state.write(self._slots[name][id(p)], array)
            nbytes += p._array.nbytes
            if nbytes > BUCKET_BYTES:  # else the calls would run ahead, and all values be on the devices at once
                jax.block_until_ready(wide)
                nbytes = 0
        _keep_scalars(shared, scalars)

    def _update_in_buckets(
        self, devices: Devices, live: list[Any], skip: Tensor | None, squares: Sequence[Tensor]
    ) -> None:
        """The update of parameters whose state is on disk: while a bucket is updated, another is read and one written.

        One that fails half way leaves nothing that a step could go on from.
        """
        files = self._files
        assert files is not None  # who calls has found state there
        if state.watch.active is not None:
            raise CaptureError(
                f"{type(self).__name__}.step() in a captured function: its state lies on disk, and is updated bucket "
                "by bucket; call step() after the captured function"
            )
        if files.failure is not None:
            raise CheckpointError(
                f"{type(self).__name__}.step(): an update of the state on disk failed half way ({files.failure}); go "
                "on from the last checkpoint"
            )
        updates = self._updates_by_kind(live, squares)
        shared, place = self._shared.copies[devices], {id(p): at for at, p in enumerate(live)}
        common, scalars = _common(updates, shared, skip, squares)
        buckets = files.buckets_of(live)
        reading = [_update_file(bucket, place) for bucket in buckets]

        def update(at: int, arrays: list[np.ndarray]) -> Callable[[], list[np.ndarray]]:
            nonlocal scalars
            bucket, old = buckets[at], buckets[at].assemble(arrays)
            others = dict(zip(map(id, reading[at].others), reading[at].assemble_others(arrays), strict=True))
            new: dict[tuple[int, str], jax.Array] = {}
            changed: list[tuple[StoredArray, jax.Array]] = []
            for p in (p for p in bucket.parameters if id(p) in place):
                now, gradient = (_value(t, others) for t in (p, p._grad))
                master = old.get((id(p), "master"))
                slots = {n: old[id(p), n] for n in self.slots}
                low = now if master is not None and skip is not None else None
                param = now if master is None else master
                wide, rounded, slots, scalars = updates.one(place[id(p)], common, param, low, gradient, slots, scalars)
                updated = wide if master is None else rounded
                if isinstance(p._array, StoredArray):
                    changed.append((p._array, updated))
                else:
                    state.write(p, updated)
                new |= {(id(p), n): array for n, array in slots.items()}
                if master is not None:
                    new[id(p), "master"] = wide
            # the next bucket is read meanwhile; what the stream waits for after this keeps the devices idle
            jax.block_until_ready((new, [array for _, array in changed]))
            return functools.partial(bucket.result, arrays[: len(bucket.file.parts)], new, changed)

        try:
            files.stream.run(reading, update)
        except BaseException as error:
            files.failure = error
            raise
        _keep_scalars(shared, scalars)

    def _update_by_entry(
        self, devices: Devices, live: list[Any], skip: Tensor | None, squares: Sequence[Tensor]
    ) -> None:
        """The update of parameters whose entries lie on disk by themselves: of those with a gradient; others are told
        of it."""
        assert self._late is not None  # who calls has found such state
        updates, shared = self._updates_by_kind(live, squares, by_entry=True), self._shared.copies[devices]
        # an entry is whole on one device, whatever devices share the parameter: the rule takes each element by itself
        common, scalars = _common(updates, shared, skip, squares)
        common, scalars = common.on_one_device(), {n: on_one_device(v) for n, v in scalars.items()}
        places = {id(p): at for at, p in enumerate(live)}
        _keep_scalars(shared, self._late.step(live, TakenStep(updates, common, scalars, places)))

    def check_by_entry(self) -> None:
        """Raises ConfigError for a rule or a clip that looks at more of a parameter than one element: the entries of
        one that lies on disk by entry are updated by themselves."""
        apart = (ClipGradByGlobalNorm, ClipGradByValue)
        clip = next((c for c in self._clip_of.values() if c is not None and not isinstance(c, apart)), None)
        if clip is not None or not self.by_element:
            name = type(self if clip is None else clip).__name__
            raise ConfigError(
                f"plan: offload of expert, whose experts are updated one by one, with {name}, which takes the norm of "
                "a whole parameter; use AdamW and ClipGradByGlobalNorm, or offload 'param' and 'state' in place of it"
            )

    def _updates_by_kind(self, live: list[Any], squares: Sequence[Tensor], *, by_entry: bool = False) -> KindUpdates:
        """The updates of these parameters one by one; by_entry: of entries of them, which lie on one device."""
        kinds = tuple((self._position[id(p)], self._options(p), p.dtype) for p in live)
        key = ("entries" if by_entry else "buckets", kinds, len(squares))
        updates: Any = self._updates.get(key)
        if updates is None:
            name = f"{type(self).__name__.lower()}_bucket"
            together = self._clipped_together() if squares else {}
            leaves = self._leaves(live)
            if by_entry:
                leaves = [replace(leaf, param_layout=None, state_layout=None) for leaf in leaves]
            # entries that wait for their updates may outlive the optimizer
            rules = (self._shared_rule, self.numbers, self.prepare) if by_entry else self._rules()
            updates = KindUpdates(*rules, leaves, name, together)
            self._updates[key] = updates  # type: ignore[assignment]  # of another kind than the keys beside it
        return updates

    def _compile_update(self, live: list[Any], together: dict[int, list[int]]) -> Update:
        """The update of these parameters. In a capture it becomes part of that, and needs no programs of its own."""
        leaves, name = self._leaves(live), f"{type(self).__name__.lower()}_update"
        whole = compile_update(*self._rules(), leaves, name, together)
        arrays = [self.updated(p)._array for p in live]
        if state.watch.active is None and is_worthwhile(leaves, arrays):
            return UpdateByKind(KindUpdates(*self._rules(), leaves, name, together), whole)
        return whole

    def _rules(self) -> tuple[Any, Any, Any]:
        """What updates are compiled from: the optimizer keeps them, and they call it only while it steps."""
        return called_weakly(self._shared_rule), called_weakly(self.numbers), called_weakly(self.prepare)

    # one mesh at a time

    def groups_by_mesh(self) -> list[MeshGroup]:
        """The parameters that are trained, by the devices that hold them; makes their state if there is none yet.

        What step() does, piece by piece, for a caller that compiles each piece for itself: squared_norms of every group
        if clips_together, then update_group of each with all of those, every Tensor moved by `group.here`.
        """
        self.refuse_own_update("pipelines and steps compiled in pieces")
        return self._ensure_state([p for p in self._parameters if not p.stop_gradient])

    @property
    def clips_together(self) -> bool:
        """True if some gradients are scaled by the norm of gradients that may lie on other devices."""
        return any(isinstance(clip, ClipGradByGlobalNorm) for clip in self._clip_of.values())

    def squared_norms(self, group: MeshGroup) -> Tensor:
        """Sum of squares of each gradient of the group, on its devices: a number for each parameter of the optimizer,
        0 for those of other groups and those without a gradient. Before clipping.
        """
        live, count = self._live(group.parameters), len(self._parameters)
        if not live:
            return Tensor(jnp.zeros((count,), self._rate_dtype))
        if any(isinstance(p._grad._array, state.Elsewhere) for p in live):
            by_kind = self._updates_by_kind(live, ())
            zeros = put(np.zeros((count,), self._rate_dtype), everywhere(live[0]._grad._array.sharding))
            return Tensor(by_kind.squares((state.read(p._grad) for p in live), zeros))
        key = ("squares", tuple((self._position[id(p)], p.dtype) for p in live))
        compiled = self._updates.get(key)
        if compiled is None:
            leaves = self._leaves(live)
            compiled = self._updates[key] = compile_squares(leaves, count, self._rate_dtype)
        return Tensor(compiled([state.read(p._grad) for p in live]))

    def update_group(self, group: MeshGroup, skip: Tensor | None = None, squares: Sequence[Tensor] = ()) -> None:
        """Update the parameters of one group that have a gradient.

        squares: squared_norms of all groups, copied to this group's devices; needed if clips_together. skip: as in
        step, on this group's devices. Raises ConfigError for a clip that looks at gradients of several groups in its
        own way.
        """
        live = self._live(group.parameters)
        if not live:
            return
        if len(group.parameters) < sum(not p.stop_gradient for p in self._parameters):
            self._check_clips(live, squares)
        self._update(group.devices, live, skip, squares)

    def _check_clips(self, live: list[Any], squares: Sequence[Tensor]) -> None:
        for clip in {id(c): c for c in map(self._clip_of.get, map(id, live)) if c is not None}.values():
            if isinstance(clip, ClipGradByGlobalNorm):
                if not squares:
                    raise ConfigError(
                        f"{type(self).__name__}.update_group: {type(clip).__name__} needs the norm of the gradients of "
                        "all groups; give squares=[squared_norms(g) of every group g]"
                    )
            elif not clip.one_by_one:
                raise ConfigError(
                    f"{type(self).__name__}: the parameters lie on several meshes, as under a pipeline, and "
                    f"{type(clip).__name__} clips all gradients together in its own way; use ClipGradByGlobalNorm, or "
                    "set one_by_one = True in its class if it looks at each gradient by itself"
                )

    def _clipped_together(self) -> dict[int, list[int]]:
        """id of each clip by global norm -> places of the parameters whose gradients it looks at."""
        groups: dict[int, list[int]] = {}
        for at, p in enumerate(self._parameters):
            clip = self._clip_of[id(p)]
            if isinstance(clip, ClipGradByGlobalNorm) and getattr(p, "need_clip", True):
                groups.setdefault(id(clip), []).append(at)
        return groups

    def _leaves(self, live: list[Any]) -> list[Leaf]:
        return [self._leaf(p, self._options(p)) for p in live]

    def _leaf(self, p: Any, options: ParameterOptions) -> Leaf:
        layout = getattr(p, "sharding_of", lambda kind: None)
        low = p.dtype if id(p) in self._masters else None
        wide = jnp.promote_types(p.dtype, jnp.float32)
        near, home = layout("state"), None
        if near is not None and near.memory_kind == HOST:
            near, home = near.with_memory_kind("device"), near
        return Leaf(
            options,
            self._position[id(p)],
            self._clip_of[id(p)],
            layout("param"),
            near,
            low,
            wide,
            home,
            getattr(p, "has_entries", False),
        )

    def _inputs(self, live: list[Any], shared: Shared, skip: Tensor | None) -> dict[str, Any]:
        masters: dict[int, Any] = self._masters
        return {
            "lr": state.read(shared.rate),
            "params": [state.read(masters.get(id(p), p)) for p in live],
            "low": [state.read(p) if skip is not None and id(p) in masters else None for p in live],
            "grads": [state.read(p._grad) for p in live],
            "slots": [{n: state.read(self._slots[n][id(p)]) for n in self.slots} for p in live],
            "scalars": {n: state.read(t) for n, t in shared.scalars.items()},
            "skip": None if skip is None else state.read(skip),
        }

    def _write(self, live: list[Any], shared: Shared, new: dict[str, Any]) -> None:
        for p, array, low, slots in zip(live, new["params"], new["low"], new["slots"], strict=True):
            master = self._masters.get(id(p))
            if master is not None:
                state.write(master, array)
            state.write(p, array if master is None else low)
            for name in self.slots:
                state.write(self._slots[name][id(p)], slots[name])
        for name, tensor in shared.scalars.items():
            state.write(tensor, new["scalars"][name])


def _update_file(bucket: Bucket, live: Container[int]) -> UpdateFile:
    """The file that the update of a bucket reads and writes; live: ids of the parameters that are updated."""
    parameters = [p for p in bucket.parameters if id(p) in live]
    values = [p._array for p in parameters if isinstance(p._array, StoredArray)]
    gradients = [p._grad._array for p in parameters if isinstance(p._grad._array, StoredArray)]
    return UpdateFile(bucket.file, [*values, *gradients], len(values))


def _common(
    updates: KindUpdates, shared: Shared, skip: Tensor | None, squares: Sequence[Tensor]
) -> tuple[Common, dict[str, jax.Array]]:
    """The common inputs of a step's updates, and the numbers kept for all parameters before it."""
    scalars = {n: t._array for n, t in shared.scalars.items()}
    inputs = {
        "lr": shared.rate._array,
        "skip": None if skip is None else skip._array,
        "scalars": scalars,
        "squares": [v._array for v in squares],
    }
    return updates.common(inputs), scalars


def _keep_scalars(shared: Shared, scalars: Mapping[str, jax.Array]) -> None:
    for name, tensor in shared.scalars.items():
        # laid out as before: numbers made of them in another layout would round otherwise, as after a restore
        where, array = tensor._array.sharding, scalars[name]
        state.write(tensor, array if array.sharding == where else put(array, where))


def _value(tensor: Any, known: Mapping[int, jax.Array]) -> jax.Array:
    """The value of a Tensor: the known one of what stands for its array, else read."""
    array = known.get(id(tensor._array))
    return state.read(tensor) if array is None else array
