"""One captured program: a function's Python, run twice on tracers, becomes one compiled call over its state.

The first run (abstract) finds the state; the second, under jax.jit, makes the program. State that the
function writes is donated. A function whose result wants gradients is one tape node instead, so it trains like any op.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.call_site import where_defined
from polyreme.core import amp_policy, state
from polyreme.core import dtype as dtypes
from polyreme.core.devices.abstract import described
from polyreme.core.devices.device_memory import raise_explained, running
from polyreme.core.engine import backend, host_memory
from polyreme.core.engine.turns import turns
from polyreme.core.kernel import Kernel
from polyreme.core.state import TensorState, Tracer
from polyreme.eager import tape
from polyreme.eager.dist_members import forms_of, say_form
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError
from polyreme.jit import host_calls
from polyreme.jit.called import names_in_cache_key
from polyreme.jit.capture import (
    Border,
    Capture,
    check_known_to_jax,
    history_freed,
    is_live,
    nodes_behind,
    parts_of,
    same_parts,
    stale,
    watching,
)
from polyreme.jit.convert import converted
from polyreme.jit.fusing import fusing
from polyreme.jit.kept import KeptPlace, ResultWithPlaces, as_before, holding_made
from polyreme.jit.region import name_of
from polyreme.jit.structure import LEAF, flatten, rebuild, tensors_in
from polyreme.jit.surroundings import Guards, NumbersDrawn, with_sublayers

_log = logging.getLogger("polyreme.jit")


def is_tensor(x: Any) -> bool:
    """Leaf test for trees of arguments and results."""
    return isinstance(x, TensorState)


def shapes_of(arrays: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The shape and dtype of each array."""
    return [(array.shape, array.dtype) for array in arrays]


class OtherShapes(Exception):
    """A program was called with arrays of other shapes or dtypes than it was captured for; nothing has run."""


@dataclass(frozen=True)
class Discovery:
    """The findings of the discovery run.

    tensors: the state in order; leaf_of: for each, the Tensor whose gradient it is, or None; written: which of it is
    written, live: which of it ends with a history that gradients flow through. args_written, args_graded: positions of
    arguments changed in place, and of those given a gradient. fused: names of the patterns applied. talks: it prints or
    checks on the host as it runs. kept_places: places around the code where it leaves Tensors that it makes. cut_off:
    ids of state with a history that no result depends on but through detach(). without_gradient: why gradients that
    results want do not flow.
    """

    tensors: tuple[TensorState, ...]
    leaf_of: tuple[TensorState | None, ...]
    written: tuple[bool, ...]
    live: tuple[bool, ...]
    new_grads: tuple[TensorState, ...]
    lost_grads: tuple[TensorState, ...]
    guards: tuple[tuple[TensorState, bool, bool], ...]
    layers: tuple[tuple[Any, bool, tuple[Any, ...]], ...]
    args_written: tuple[int, ...]
    args_graded: tuple[int, ...]
    args_met: tuple[int, ...]
    differentiable: bool
    fused: tuple[str, ...] = ()
    surroundings: Guards = field(default_factory=Guards)
    talks: bool = False
    kept_places: tuple[KeptPlace, ...] = ()
    cut_off: frozenset[int] = frozenset()
    without_gradient: str | None = None


def _changes(capture: Capture, known: tuple[KeptPlace, ...] | None) -> list[KeptPlace]:
    """The places around the code that its run changed, of those known if any are."""
    changes = capture.surroundings.changes()
    return changes if known is None else [p for p in changes if any(map(p.is_same, known))]


def _containers(capture: Capture) -> Iterator[tuple[Any, bool, tuple]]:
    """LayerLists and their like inside the Layers that were called: nobody calls them, but code walks over them."""
    called = capture.layers
    for layer in with_sublayers([layer for layer, _, _ in called.values()]):
        if id(layer) not in called and hasattr(layer, "__len__"):
            yield layer, layer.training, parts_of(layer)


class _Probe:
    """Measures what getrefcount says of an array that only one Tensor holds, on this interpreter."""

    @staticmethod
    def sole_owner() -> int:
        return _counts([TensorState(object())])[0]


def _hooks_of(tensors: list[TensorState]) -> list[tuple]:
    """The gradient hooks of each Tensor, which the captured backward calls."""
    return [tuple(getattr(t, "_hooks", {}).values()) for t in tensors]


def _counts(tensors: list[TensorState]) -> list[int]:
    found = []
    for tensor in tensors:
        array = tensor._array
        found.append(sys.getrefcount(array))
    return found


# Seconds from which on what a compilation leaves is worth the milliseconds that handing it back takes.
_LONG_COMPILATION = 1.0
_SOLE_OWNER = _Probe.sole_owner()
_new: Any = object.__new__


def _bring_up_to_date(tensors: Sequence[TensorState]) -> None:
    """Do what is due before a program reads these Tensors."""
    for tensor in tensors:
        bring = state.due.pop(id(tensor), None)
        if bring is not None:
            bring()


def _rename(pure: Callable[..., Any], fn: Any) -> Callable[..., Any]:
    """pure under the name of the function that was captured, which traces and listings of the program show."""

    def call(*arrays: Any) -> Any:
        return pure(*arrays)

    call.__name__ = call.__qualname__ = getattr(fn, "__name__", type(fn).__name__)
    return call


@dataclass
class _Results:
    """The form of what a program gives, known once it is traced. one_array: its whole result is one array."""

    form: Any = None
    one_array: bool = False


class CapturedProgram:
    """A function captured for one structure of arguments.

    call: rebuilds the arguments from Tensors and calls the function. static: arguments that are no Tensors. Guards
    (stop_gradient and presence of a gradient of every state Tensor, training flag of every Layer called, Python values
    read from around the function) say whether it may serve a call. shapes: of the arguments, with their dtypes.
    guards: of Python values. is_function: it only computes results from arguments, so that it serves any call of its
    form and shapes while the guards hold.
    """

    flags: list[tuple[bool, bool]]
    shapes: list[tuple[Any, ...]]
    discovery: Discovery
    is_function: bool
    guards: Guards

    def __init__(
        self,
        fn: Callable[..., Any],
        call: Callable[[list[TensorState]], Any],
        arguments: list[TensorState],
        static: Sequence[Any] = (),
    ) -> None:
        self.fn = fn
        self._reference = weakref.ref(self)
        self._static = static
        self.call = call
        self.flags = [(a.stop_gradient, a._node is not None) for a in arguments]
        self.shapes = shapes_of([a._array for a in arguments])
        self._forms = forms_of(arguments)
        # arguments that are also met as state are not copied: the program is for these very Tensors
        self.pinned: dict[int, TensorState] = {}
        self._fuses = fusing.is_on
        self._modes = (amp_policy.active.policy, tape.grad_mode.enabled, dtypes.default_dtype())
        self.discovery = self._discover(arguments)
        self.pinned = {i: arguments[i] for i in self.discovery.args_met}
        if (
            self.pinned or self.discovery.kept_places
        ):  # in a second run other objects are made inside, and those before stay
            self.discovery = self._discover(arguments, self.discovery.kept_places)
        self._results = _Results()
        self._free = [i for i in range(len(arguments)) if i not in self.pinned]
        order = sorted(range(len(self.discovery.tensors)), key=lambda i: not self.discovery.written[i])
        self._slots = [(self.discovery.tensors[i], self.discovery.leaf_of[i]) for i in order]
        self._through_leaf = [(at, leaf) for at, (_, leaf) in enumerate(self._slots) if leaf is not None]
        self._num_written = sum(self.discovery.written)
        slot_of = {id(t): at for at, (t, _) in enumerate(self._slots)}
        self._in_places = [(slot_of[id(p.before)], p) for p in self.discovery.kept_places if p.is_state]
        self._cut_off = frozenset(slot_of[key] for key in self.discovery.cut_off)
        self._live = [self.discovery.live[i] for i in order[: self._num_written]]
        self._fixed = [t for t, _ in self._slots]
        self._state_ids = frozenset(id(t) for t in self._fixed)
        discovery = self.discovery
        self.is_function = not (
            discovery.tensors
            or discovery.args_written
            or discovery.args_graded
            or discovery.layers
            or discovery.differentiable
            or discovery.talks
            or discovery.kept_places
            or self._forms
        )
        self.guards = discovery.surroundings
        self._hooks, self._hooks_seen = _hooks_of(self._fixed), state.leaf_hooks.version
        self._settle_placement()
        self._on_one_device = not any(_over_mesh(t._array) for t in (*self._fixed, *arguments))
        # traced without what is compiled: a program that kept itself would keep its state until the collector comes by
        traced = copy.copy(self)
        if self.discovery.differentiable:
            name = getattr(fn, "__name__", "captured")
            self._kernel = Kernel(lambda *arrays: traced._flat(*arrays), name, saves=True)
        else:
            self._compiled = False
            self._scratch: host_memory.Scratch | None = None
            # without empty lists of state, and of what _pure returns besides results, a small call costs a tenth less
            self._jitted = jax.jit(
                _rename(traced._pure_results if self.is_function else traced._pure, fn),
                donate_argnums=() if self.is_function else 0,
                out_shardings=None if self.is_function else self._out_shardings(),
                compiler_options=backend.step_options(),
            )

    # choosing

    def serves(self, arguments: list[TensorState]) -> bool:
        """True if arguments and state look as they did when this was captured."""
        facts = self.discovery
        for tensor, stop_gradient, has_grad in facts.guards:
            if tensor.stop_gradient is not stop_gradient or (tensor._grad is not None) is not has_grad:
                return False
        for layer, training, parts in facts.layers:
            if layer.training is not training or not same_parts(layer, parts):
                return False
        if state.leaf_hooks.version != self._hooks_seen and not self._same_hooks():
            return False
        if self.guards.change() is not None:
            return False
        if forms_of(arguments) != self._forms:
            return False
        if self._state_ids:
            for i, argument in enumerate(arguments):
                if id(argument) in self._state_ids and self.pinned.get(i) is not argument:
                    return False
            for i, tensor in self.pinned.items():
                if arguments[i] is not tensor:
                    return False
            if any(argument is place.get() for _, place in self._in_places for argument in arguments):
                return False
        return True

    def _same_hooks(self) -> bool:
        """True if the leaves have the gradient hooks they were captured with."""
        if _hooks_of(self._fixed) != self._hooks:
            return False
        self._hooks_seen = state.leaf_hooks.version
        return True

    def mismatch(self, arguments: list[TensorState]) -> str:
        """Why serves said no."""
        for layer, training, parts in self.discovery.layers:
            if layer.training is not training:
                return f"training of {type(layer).__name__}: {training} -> {layer.training}"
            if not same_parts(layer, parts):
                return f"a parameter, buffer, sublayer or hook of {type(layer).__name__} was replaced, added or removed"
        for tensor, stop_gradient, has_grad in self.discovery.guards:
            if tensor.stop_gradient is not stop_gradient:
                return f"stop_gradient of {name_of(tensor)}: {stop_gradient} -> {tensor.stop_gradient}"
            if (tensor._grad is not None) is not has_grad:
                return f"the gradient of {name_of(tensor)} was {'present' if has_grad else 'absent'}, now it is not"
        if not self._same_hooks():
            return "the gradient hooks of a leaf changed"
        change = self.guards.change()
        if change is not None:
            return change
        if forms_of(arguments) != self._forms:
            return "an argument lies on a mesh in another way"
        return "a Tensor is both an argument and state of the function, or no longer is"

    # the same code with other state

    def over(self, substitute: Callable[[TensorState], TensorState]) -> CapturedProgram:
        """This program, which has run, over other state: in place of each Tensor of it the one that substitute gives.

        Both share what is compiled. Whoever calls it vouches that the function would do the same with that state, and
        that the guards hold. Raises CaptureError for a function that gradients flow through or that changes some, and
        for a Tensor of another shape or dtype.
        """
        facts = self.discovery
        if facts.differentiable or facts.new_grads or facts.lost_grads or facts.kept_places or self._through_leaf:
            raise CaptureError(
                f"{where_defined(self.fn)} takes part in gradients, or leaves Tensors around it, so its program is of "
                "its own Tensors alone; call it under no_grad()"
            )
        twin = copy.copy(self)
        twin._fixed = [substitute(tensor) for tensor in self._fixed]
        for mine, other in zip(self._fixed, twin._fixed, strict=True):
            if (mine._array.shape, mine._array.dtype) != (other._array.shape, other._array.dtype):
                raise CaptureError(
                    f"{where_defined(self.fn)} over {name_of(other)}, {other._array.dtype.name}, in place of "
                    f"{name_of(mine)}, {mine._array.dtype.name}; give one of the same shape and dtype"
                )
        twin._slots = [(tensor, None) for tensor in twin._fixed]
        twin._state_ids = frozenset(id(t) for t in twin._fixed)
        return twin

    # running

    def run(self, arguments: Sequence[TensorState]) -> Any:
        """Execute on these arguments: update the state, return what the function returns.

        Raises what an assert or raise of the function raises, once the program has run: its state is then updated.
        """
        try:
            if not self.discovery.talks:
                return self._run(arguments)
            with host_calls.awaited():
                return self._run(arguments)
        except jax.errors.JaxRuntimeError as error:
            written = [t._array for t in self._current()[: self._num_written]]
            donated = [a for a in written if isinstance(a, jax.Array) and a.is_deleted()]
            raise_explained(error, f"captured {where_defined(self.fn)}", donated=donated)

    def _run(self, arguments: Sequence[TensorState]) -> Any:
        if self.discovery.differentiable:
            return self._run_taped(arguments)
        if self.is_function:
            arrays = [a._array for a in arguments]
            if not self._compiled:
                self._compile(*arrays)
            return self.run_function(arrays, arguments)
        running.program = self._reference
        tensors = self._current()
        if state.due:
            _bring_up_to_date(tensors)
        count = self._num_written
        donated = []
        for tensor in tensors[:count] if count < len(tensors) else tensors:
            array = tensor._array
            # something else looks at this buffer (a detach(), a tape, a state_dict): give the program a copy
            donated.append(array if sys.getrefcount(array) <= _SOLE_OWNER else jnp.copy(array))
        array = None
        read = [state.read(t) for t in tensors[count:]]
        free = [arguments[i]._array for i in self._free]
        if not self._compiled:
            self._compile(donated, read, *free)
        in_use = host_memory.await_last() if self._scratch else None
        outs, written, extra = turns.end(self._jitted(donated, read, *free))
        if self._scratch:
            host_memory.note_last((written, outs), self._scratch, in_use)
        del donated
        for tensor, array in zip(tensors, written, strict=False):
            tensor._array = array
        if extra or self.discovery.lost_grads:
            self._store_extra(extra, arguments)
        return self._result(outs, arguments)

    def run_function(self, arrays: Sequence[Any], arguments: Sequence[TensorState]) -> Any:
        """run, for a program that is_function: without state, guards or history. arrays: those of the arguments.

        Raises OtherShapes: that arrays have the program's shapes is what jax compares anyhow, so nothing else does.
        """
        if self._scratch:
            in_use = host_memory.await_last()
            outs = turns.end(self._jitted(*arrays))
            host_memory.note_last(outs, self._scratch, in_use)
        else:
            outs = self._jitted(*arrays)
            if turns.are_taken:
                turns.end(outs)
        if not self._results.one_array:
            return self._result(outs, arguments)
        tensor = _new(Tensor)  # as eager.dispatch makes one: a constructor costs more than the rest of this function
        tensor._array = outs
        tensor.stop_gradient = True
        tensor._node = None
        tensor._index = 0
        tensor._grad = None
        return tensor

    def _compile(self, *arrays: Any) -> None:
        """Compile ahead of the first call, which finds the program in jax's cache, so that memory can be handed back
        before the program takes its own."""
        start = time.perf_counter()
        compiled = self._jitted.lower(*arrays).compile()
        if time.perf_counter() - start > _LONG_COMPILATION:
            host_memory.hand_back_freed()
        self._scratch = host_memory.scratch_of(compiled)
        if self._scratch:
            host_memory.leave_room(self._scratch)
        self._compiled = True

    def compiled(self, arguments: list[TensorState]) -> Any:
        """The jax.stages.Compiled of this program for these arguments."""
        tensors, inputs = self._current(), [described(arguments[i]._array) for i in self._free]
        arrays = [described(t._array) for t in tensors]
        with names_in_cache_key():
            if self.discovery.differentiable:
                forward: Any = self._kernel.forward
                return forward.lower(*arrays, *inputs).compile()
            if self.is_function:
                return self._jitted.lower(*inputs).compile()
            return self._jitted.lower(arrays[: self._num_written], arrays[self._num_written :], *inputs).compile()

    def _current(self) -> list[TensorState]:
        """The state Tensors now: a gradient is found through its leaf, which may hold another one by now, and so may a
        place that each run changes."""
        if not self._through_leaf and not self._in_places:
            return self._fixed
        tensors: list[Any] = list(self._fixed)
        for at, place in self._in_places:
            tensors[at] = place.get()
        for at, leaf in self._through_leaf:
            tensors[at] = leaf._grad
        return tensors

    def _run_taped(self, arguments: Sequence[TensorState]) -> Any:
        tensors = self._current()
        every = [*tensors, *(arguments[i] for i in self._free)]
        edges = tuple(None if at in self._cut_off else tape.edge_of(t) for at, t in enumerate(every))
        results = tape.apply(self._kernel, tuple(map(state.read, every)), edges)
        extra = len(self.discovery.new_grads) + len(self.discovery.args_graded) + len(self.discovery.args_written)
        split = len(results) - self._num_written - extra
        outs, written, rest = (
            results[:split],
            results[split : split + self._num_written],
            results[len(results) - extra :],
        )
        for tensor, result, live in zip(tensors, written, self._live, strict=False):
            tensor._array = result._array
            if live:
                tensor._node, tensor._index, tensor.stop_gradient = result._node, result._index, result.stop_gradient
        self._store_extra(rest, arguments)
        return self._result(outs, arguments)

    def _store_extra(self, extra: Any, arguments: Sequence[TensorState]) -> None:
        rest = iter(extra)
        for leaf in self.discovery.new_grads:
            leaf._grad = _plain(next(rest))
        for leaf in self.discovery.lost_grads:
            leaf._grad = None
        for i in self.discovery.args_graded:
            fresh, argument = _plain(next(rest)), arguments[i]
            have = argument._grad
            argument._grad = fresh if have is None else Tensor(have._array + fresh._array)
        for i in self.discovery.args_written:
            result, argument = next(rest), arguments[i]
            argument._array = result._array if is_tensor(result) else result
            if is_tensor(result) and not result.stop_gradient:
                argument._node, argument._index, argument.stop_gradient = result._node, result._index, False

    def _result(self, outs: Any, arguments: Sequence[TensorState]) -> Any:
        spec, kinds = self._results.form
        given = iter(outs)
        built: list[Any] = []
        for kind, value in kinds:
            if kind == "array":
                out = next(given)
                if not is_tensor(out):
                    out = Tensor(out)
                elif value and not out.stop_gradient:
                    out.stop_gradient, out._node = True, None
                built.append(out)
            elif kind == "again":
                built.append(built[value])
            else:
                built.append(arguments[value] if kind == "argument" else value)
        result = rebuild(spec, iter(built))
        return result.put(self.discovery.kept_places) if self.discovery.kept_places else result

    # tracing

    def _discover(self, arguments: list[TensorState], known: tuple[KeptPlace, ...] | None = None) -> Discovery:
        """known: the places that an earlier run left Tensors in."""
        capture = Capture(fuses=self._fuses, converted=converted)
        result: list[Discovery] = []

        def abstract(arrays: list) -> None:
            with watching(capture):
                self._enter(capture)
                wrapped = self._wrap(iter(arrays))
                try:
                    outs = self.call(wrapped)
                    capture.settle_buffers()
                finally:
                    places = holding_made(_changes(capture, known), lambda t: id(t) in capture.created_ids)
                    left = ResultWithPlaces.of(None, places)
                    for place in places:
                        place.put(place.before)
                summary = self._summary(capture, arguments, wrapped, tensors_in((outs, left)))
                result.append(replace(summary, kept_places=tuple(places)))

        free = [a._array for i, a in enumerate(arguments) if i not in self.pinned]
        calls = host_calls.calls.count
        try:
            jax.eval_shape(abstract, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in free])
        except jax.errors.UnexpectedTracerError as error:
            raise self._leak() from error
        self._entry_arrays = {}
        self._restore_numbers = capture.surroundings.restore_numbers
        # now that state holds its values again: a Tensor that still holds a traced one was made inside
        used = frozenset(capture.before)
        guards = capture.surroundings.guards(used, result[0].kept_places)
        alone = {id(t) for t, written in zip(result[0].tensors, result[0].written, strict=True) if not written}
        alone -= {id(a) for a in arguments} | {id(t) for t in result[0].leaf_of}
        places = tuple(
            replace(p, is_state=id(p.before) in alone and guards.places_of(p.before) == 1)
            for p in result[0].kept_places
        )
        if any(place.is_state for place in places):
            guards = capture.surroundings.guards(used, places)
        return replace(result[0], talks=host_calls.calls.count > calls, surroundings=guards, kept_places=places)

    def _enter(self, capture: Capture) -> None:
        owner: Any = getattr(self.fn, "__self__", None)
        if hasattr(owner, "training"):
            capture.layers[id(owner)] = (owner, owner.training, parts_of(owner))
        capture.surroundings.met("self", owner)
        for value in self._static:
            capture.surroundings.met(type(value).__name__, value)

    def _leak(self) -> CaptureError:
        return CaptureError(
            f"{where_defined(self.fn)} uses a Tensor that belongs to another captured function, which has ended; "
            "return it "
            "from that function instead of keeping it in a variable outside"
        )

    def _summary(
        self, capture: Capture, arguments: list[TensorState], wrapped: list[TensorState], outs: list[TensorState]
    ) -> Discovery:
        met = list(capture.before.values())
        own = {i: w for i, w in enumerate(wrapped) if i not in self.pinned}
        changed = tuple(i for i, w in own.items() if w._array is not self._entry_arrays[i])
        graded = tuple(i for i, w in own.items() if w._grad is not None)
        ends = [*(t for t in outs if id(t) in capture.created_ids), *(wrapped[i] for i in changed)]
        ends += [b.tensor for b in met if b.written and is_live(b.tensor)]
        differentiable = any(not t.stop_gradient and not history_freed(t) for t in ends)
        cut_off: set[int] = set()
        if differentiable:
            self._check_history([t for t in ends if not t.stop_gradient], met)
            reached = {id(node) for node in nodes_behind([t._node for t in ends if t._node is not None])}
            at_border = (b.tensor for b in met if isinstance(b.tensor._node, Border))
            cut_off = {id(t) for t in at_border if id(t._node) not in reached}
        leaf_of = {id(b.grad): b.tensor for b in met if b.grad is not None}
        ids = {id(a): i for i, a in enumerate(arguments)}
        return Discovery(
            tuple(b.tensor for b in met),
            tuple(leaf_of.get(id(b.tensor)) for b in met),
            tuple(b.written for b in met),
            tuple(is_live(b.tensor) for b in met),
            tuple(b.tensor for b in met if b.regraded and b.tensor._grad is not None),
            tuple(b.tensor for b in met if b.regraded and b.tensor._grad is None),
            tuple((b.tensor, b.stop_gradient, b.grad is not None) for b in met),
            (*capture.layers.values(), *_containers(capture)),
            changed,
            graded,
            tuple(ids[id(b.tensor)] for b in met if id(b.tensor) in ids),
            differentiable,
            tuple(capture.calls.fused),
            cut_off=frozenset(cut_off),
            without_gradient=capture.without_gradient if differentiable else None,
        )

    def _check_history(self, ends: list[TensorState], met: list) -> None:
        """Refuse what the derivative of one compiled function cannot express."""
        changed = {id(b.tensor): b.tensor for b in met if b.written and b.tensor._node is None and not b.stop_gradient}
        check_known_to_jax(ends, where_defined(self.fn))
        for node in nodes_behind([t._node for t in ends if t._node is not None]):
            for edge in node.edges:
                if edge is not None and not isinstance(edge, tuple) and id(edge) in changed:
                    raise CaptureError(
                        f"{where_defined(self.fn)} returns a Tensor that wants gradients of {name_of(edge)}, "
                        "which it also "
                        "changes; detach() the result, or change the parameter in another function"
                    )

    def _wrap(self, arrays: Iterator[Any]) -> list[TensorState]:
        wrapped, self._entry_arrays = [], {}
        for i, (stop_gradient, has_history) in enumerate(self.flags):
            if i in self.pinned:
                wrapped.append(self.pinned[i])
                continue
            array = next(arrays)
            tensor = Tensor(array, stop_gradient=stop_gradient)
            if self._forms:
                say_form(tensor, self._forms[i])
            if has_history and not stop_gradient:
                tensor._node = Border(array.shape)
            self._entry_arrays[i] = array
            wrapped.append(tensor)
        return wrapped

    def _pure(self, written: Sequence, unwritten: Sequence, *arguments: Any) -> tuple[list, list, list]:
        capture = Capture(detach=self.discovery.differentiable, fuses=self._fuses, converted=converted)
        known = self._current()
        for tensor in known:
            capture.touch(tensor)
        places = self.discovery.kept_places
        with (
            self._as_captured(),
            watching(capture),
            host_calls.in_order(self._on_one_device),
            as_before(places),
        ):
            for tensor, array in zip(known, [*written, *unwritten], strict=True):
                tensor._array = array
            wrapped = self._wrap(iter(arguments))
            guards = self.guards
            before, drawn = guards.forms(), NumbersDrawn()
            outs = self.call(wrapped)
            capture.settle_buffers()
            if places:
                outs = ResultWithPlaces.of(outs, places)
            if generators := drawn.since():
                _log.warning(
                    "%s draws numbers of %s, which the program keeps: they are the same at each call; draw with "
                    "paddle.rand, or pass the numbers in as Tensors",
                    where_defined(self.fn),
                    " and ".join(generators),
                )
            try:
                if resized := guards.leave_out_changed(before, where_defined(self.fn)):
                    _log.warning(
                        "%s changes the length of %s, which happens when a program is made and not at each call; what "
                        "the program computes with is as it was then: change it outside",
                        where_defined(self.fn),
                        " and ".join(resized),
                    )
            except CaptureError:
                self._restore_numbers()
                raise
            ours = {id(t) for t in known}
            if any(b.written or b.regraded for k, b in capture.before.items() if k not in ours):
                raise CaptureError(
                    f"{where_defined(self.fn)} changed a Tensor on its second run that it had not met on its first; "
                    "a captured function must do the same each time it runs"
                )
            arrays = self._outputs(outs, capture, wrapped)
            extra = [self._grad_of(leaf) for leaf in self.discovery.new_grads]
            extra += [self._grad_of(wrapped[i]) for i in self.discovery.args_graded]
            extra += [wrapped[i]._array for i in self.discovery.args_written]
            self._entry_arrays = {}
            return arrays, [t._array for t in known[: self._num_written]], extra

    def _pure_results(self, *arguments: Any) -> Any:
        """The arrays that a program without state gives: a list of them, or the one that is its whole result.

        Raises OtherShapes where jax traces it for arrays that it was not captured for.
        """
        if shapes_of(arguments) != self.shapes:
            raise OtherShapes
        arrays = self._pure([], [], *arguments)[0]
        return arrays[0] if self._results.one_array else arrays

    def _grad_of(self, leaf: TensorState) -> Any:
        if leaf._grad is None:
            raise CaptureError(
                f"{where_defined(self.fn)} left a gradient on {name_of(leaf)} on its first run and none on its "
                "second; a "
                "captured function must do the same each time it runs"
            )
        return leaf._grad._array

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """The modes of the capture: jax may trace again later, say during a backward, when others are in force."""
        now = (amp_policy.active.policy, tape.grad_mode.enabled, dtypes.default_dtype())
        amp_policy.active.policy, tape.grad_mode.enabled = self._modes[:2]
        dtypes.set_default_dtype(self._modes[2])
        try:
            yield
        finally:
            amp_policy.active.policy, tape.grad_mode.enabled = now[:2]
            dtypes.set_default_dtype(now[2])

    def _outputs(self, outs: Any, capture: Capture, wrapped: list[TensorState]) -> list:
        leaves: list[Any] = []
        spec = flatten(outs, leaves)
        arguments: dict[int, int] = {id(w): i for i, w in enumerate(wrapped)}
        positions: dict[int, int] = {}
        kinds: list[tuple] = []
        arrays = []
        for leaf in leaves:
            if not is_tensor(leaf):
                kinds.append(("value", leaf))
            elif id(leaf) in arguments:
                kinds.append(("argument", arguments[id(leaf)]))
            elif id(leaf) in positions:
                kinds.append(("again", positions[id(leaf)]))
            elif id(leaf) not in capture.created_ids:
                if isinstance(leaf._array, Tracer) and id(leaf) not in capture.before:
                    raise stale(leaf)
                kinds.append(("value", leaf))
            else:
                positions[id(leaf)] = len(kinds)
                kinds.append(("array", leaf.stop_gradient or history_freed(leaf)))
                arrays.append(leaf._array)
        self._results.form = (spec, kinds)
        self._results.one_array = spec is LEAF and kinds[0][0] == "array"
        return arrays

    def _flat(self, *arrays: Any) -> tuple:
        a, b = self._num_written, len(self._slots)
        outs, written, extra = self._pure(arrays[:a], arrays[a:b], *arrays[b:])
        return (*outs, *written, *extra)

    # placement

    def _settle_placement(self) -> None:
        """Over a mesh, of one device too, place written state that has no place yet (keys, rates), so that call two is
        like call one."""
        tensors = self._current()
        mesh = next((t._array.sharding.mesh for t in tensors if isinstance(t._array.sharding, NamedSharding)), None)
        if mesh is None:
            return
        everywhere = NamedSharding(mesh, PartitionSpec())
        for tensor in tensors[: self._num_written]:
            if not tensor._array.committed:
                tensor._array = put(tensor._array, everywhere)

    def _out_shardings(self) -> Any:
        """State keeps its layout over devices; the compiler chooses for the rest."""
        written = self._current()[: self._num_written]
        if not any(isinstance(t._array.sharding, NamedSharding) for t in written):
            return None
        return (None, [t._array.sharding if t._array.committed else None for t in written], None)


def _over_mesh(array: Any) -> bool:
    return isinstance(array.sharding, NamedSharding) and len(array.sharding.device_set) > 1


def _plain(gradient: Any) -> Tensor:
    """A gradient as a Tensor without history."""
    return Tensor(gradient._array if is_tensor(gradient) else gradient)


__all__ = ["CapturedProgram", "Discovery", "Tracer", "is_tensor"]
