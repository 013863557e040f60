"""Optimizer: which parameters, what state they have, and one compiled update over all that lie on the same devices.

A subclass declares its state and a pure rule for one parameter; everything else (groups, clipping,
regularizers, master weights, learning rate, skipping a step on overflow, placement, state_dict) is here, once.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.arguments import keywords_of
from polyreme.core.checked import step_done
from polyreme.core.device_memory import part, raise_explained
from polyreme.core.meshes import HOST, Devices, everywhere, on_one_device
from polyreme.core.state import TensorState
from polyreme.core.transfer import from_host
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import ArgumentTypeError, CaptureError, CheckpointError, ConfigError, DTypeError, GradError
from polyreme.keyword_names import NamesKeywords
from polyreme.nn.clip import ClipGradByGlobalNorm, ClipGradByValue
from polyreme.optimizer.groups import ParameterGroup, check_common, check_known, check_unique, nonnegative, split_groups
from polyreme.optimizer.late_updates import TakenStep
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.on_disk import BUCKET_BYTES, Bucket, StoredArray, StoredEntries, UpdateFile
from polyreme.optimizer.own_update import OwnUpdate
from polyreme.optimizer.shared import MeshGroup, Shared, SharedState
from polyreme.optimizer.update import Leaf, ParameterOptions, Slots, Update, compile_squares, compile_update
from polyreme.optimizer.update_by_kind import Common, KindUpdates, UpdateByKind, is_worthwhile

_COMMON = ("learning_rate", "weight_decay", "grad_clip")
Check = Callable[[str, str, Any], Any]


class Optimizer(NamesKeywords, OwnUpdate):
    """Base of all optimizers.

    learning_rate: a number or an LRScheduler. parameters: a list of Parameters, or of dicts {"params": [...],
    "learning_rate": factor, "weight_decay": ..., "grad_clip": ..., or a setting of the optimizer}. weight_decay: a
    coefficient (L2) or a regularizer. grad_clip: a clip; parameters that share one are clipped together.
    multi_precision: float16 and bfloat16 parameters have a float32 master weight, which is what the update changes.

    Subclasses set `slots` (arrays like the parameter: name -> initial value), `scalars` (numbers per parameter),
    `checks` (settings a group may set too: name -> check), `self._settings` (their values) and `rule`. Those that
    define `_append_optimize_op` in its place, with Tensors, are slower: each operation is a call of its own outside of
    captured code.
    """

    checks: ClassVar[Mapping[str, Check]] = {}
    by_element: ClassVar[bool] = True  # the rule treats each element of a parameter by itself
    decoupled: ClassVar[bool] = False  # weight decay is applied by rule, not added to the gradient
    takes_complex: ClassVar[bool] = False
    _settings: Mapping[str, Any] = {}

    _made_with: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    _bound: Any = ()
    parameters_given: Sequence[Any] | None = None
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
        self._pending = {}
        self._updates: dict[Any, Callable] = {}
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
        for name in ("_position", "_group_of", "_clip_of", "_masters"):
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
        given = self.keywords()
        if self.rate_variable is not None:
            given["learning_rate"] = 0.0
        bound = type(self)(**(given | {"parameters": self._regrouped(parameters)}))
        self.lead(bound)
        return bound

    def keywords(self) -> dict[str, Any]:
        """What this optimizer was made with, by keyword."""
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
        if state.watch.active is not None and any(id(rate) not in state.watch.active.made for rate in rates):
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
            updates = KindUpdates(self.rule, self.numbers, self.prepare, leaves, name, together)
            self._updates[key] = updates  # type: ignore[assignment]  # of another kind than the keys beside it
        return updates

    def _compile_update(self, live: list[Any], together: dict[int, list[int]]) -> Update:
        """The update of these parameters. In a capture it becomes part of that, and needs no programs of its own."""
        leaves, name = self._leaves(live), f"{type(self).__name__.lower()}_update"
        whole = compile_update(self.rule, self.numbers, self.prepare, leaves, name, together)
        arrays = [self._masters.get(id(p), p)._array for p in live]
        if state.watch.active is None and is_worthwhile(leaves, arrays):
            return UpdateByKind(KindUpdates(self.rule, self.numbers, self.prepare, leaves, name, together), whole)
        return whole

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

    def minimize(
        self, loss: Tensor, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """step() from the gradients that loss.backward() left, which is called first if no parameter has one.

        parameters: update only these. no_grad_set: leave these out. Returns ([], [(parameter, gradient), ...]).
        In static mode backward and the step are recorded, and the operations returned in place of [].
        """
        if (recorder := state.recorder()) is not None:
            return recorder.minimize(self, loss, startup_program, parameters, no_grad_set)
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

    def _beta_of(self, param: Any, name: str) -> float | None:
        return float(self.setting(param, name)) if name in self._settings else None

    def _options(self, p: Any) -> ParameterOptions:
        settings = self._group_of[id(p)].settings
        decay = settings.get("weight_decay", self._weight_decay)
        factor = getattr(p, "optimize_attr", {}).get("learning_rate", 1.0) * settings.get("learning_rate", 1.0)
        own = getattr(p, "regularizer", None)
        coefficient = float(decay) if isinstance(decay, (int, float)) else 0.0
        regularizer = own if own is not None or isinstance(decay, (int, float)) else decay
        named = tuple((n, self.setting(p, n)) for n in self._settings)
        need_clip = getattr(p, "need_clip", True)
        options = ParameterOptions(
            factor, coefficient, regularizer, need_clip, self.decoupled, (*named, *self.options_of(p))
        )
        return self._as_prepared(options)


__all__ = ["MeshGroup", "Optimizer", "ParameterGroup", "ParameterOptions"]


def _update_file(bucket: Bucket, live: Container[int]) -> UpdateFile:
    """What the update of a bucket reads and writes; live: ids of the parameters that are updated."""
    parameters = [p for p in bucket.parameters if id(p) in live]
    values = [p._array for p in parameters if isinstance(p._array, StoredArray)]
    gradients = [p._grad._array for p in parameters if isinstance(p._grad._array, StoredArray)]
    return UpdateFile(bucket.file, [*values, *gradients], len(values))


def _common(
    updates: KindUpdates, shared: Shared, skip: Tensor | None, squares: Sequence[Tensor]
) -> tuple[Common, dict[str, jax.Array]]:
    """What the updates of a step have in common, and the numbers kept for all parameters before it."""
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


@part("optimizer state", Optimizer)
def _state_of(optimizer: Any) -> Iterator[Any]:
    for held in (*optimizer._slots.values(), optimizer._masters):
        yield from (tensor._array for tensor in held.values())
