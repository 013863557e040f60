"""Recompute: a call of which only the inputs are kept, and which is run again when its gradients are asked for.

Source: arXiv:1604.06174. Two ways, by where the call is made (docs/decisions/0005-recompute.md):

- in eager code the function runs as it stands, and once more in backward, with every Tensor it reads, random keys and
  buffers included, put back for that run to what it was: _Again is the tape node;
- in captured code it is traced once and becomes one kernel, whose backward starts from the inputs behind a barrier that
  keeps the compiler from merging the second computation with the first.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core import amp_policy, layout, state
from polyreme.core import dtype as dtypes
from polyreme.core.kernel import Kernel
from polyreme.core.state import TensorState
from polyreme.eager import tape, walk
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, GradError, did_you_mean
from polyreme.jit.capture import Capture, capture_in_progress
from polyreme.jit.region import Inputs, adopt, adopt_grad, evaluate, returned, separating, trace
from polyreme.jit.structure import flatten, rebuild, tensors_in
from polyreme.mesh import RECOMPUTE


@dataclass(frozen=True)
class Keep:
    """How the inputs are kept between forward and backward.

    offload: in host memory. split_over: a mesh axis whose devices keep a part each, of the last dim that it divides.
    """

    offload: bool = False
    split_over: str | None = None

    @property
    def moves(self) -> bool:
        """Whether anything is done to an input at all."""
        return self.offload or self.split_over is not None

    def pack(self, array: Any) -> Any:
        """An input as it is kept."""
        array = self._laid_out(array, self.split_over)
        if not self.offload:
            return array
        if isinstance(array, state.Tracer):
            return jax.device_put(array, jax.memory.Space.Host)
        return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))

    def unpack(self, array: Any) -> Any:
        """The input again, where it was."""
        if self.offload and isinstance(array, state.Tracer):
            array = jax.device_put(array, jax.memory.Space.Device)
        elif self.offload:
            array = jax.device_put(array, array.sharding.with_memory_kind("device"))
        return self._laid_out(array, None)

    def _laid_out(self, array: Any, axis: str | None) -> Any:
        placed = layout.active.layout
        if self.split_over is None or placed is None:
            return array
        ways = placed.mesh.shape.get(self.split_over, 1)
        fitting = [dim for dim, size in enumerate(array.shape) if size and size % ways == 0]
        if ways == 1 or not fitting:
            return array
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
        spec[fitting[-1]] = axis
        if isinstance(array, state.Tracer):
            return jax.lax.with_sharding_constraint(array, NamedSharding(placed.mesh, PartitionSpec(*spec)))
        have = array.sharding.spec if isinstance(array.sharding, NamedSharding) else ()
        whole = [*have, *[None] * (array.ndim - len(have))]
        whole[fitting[-1]] = axis
        return jax.device_put(array, NamedSharding(placed.mesh, PartitionSpec(*whole)))


AS_IT_IS = Keep()


def run_again(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], keep: Keep = AS_IT_IS
) -> Any:
    """function(*args, **kwargs), of which the tape keeps the inputs only.

    Results and gradients are those of the plain call, random numbers included; what function writes (statistics of
    normalization, random keys) is written once. Raises GradError in backward if function does something else when it
    runs again; CaptureError as any captured code does.
    """
    if not tape.grad_mode.enabled:
        return function(*args, **kwargs)
    if (recorder := state.recorder()) is not None:
        return recorder.recompute(function, args, kwargs)
    active = state.watch.active
    if active is None or isinstance(active, _EagerWatch):
        return _call_eagerly(function, args, kwargs, keep)
    return separating(lambda: _call_captured(function, args, kwargs, keep))


def recompute_forward(forward: Callable[..., Any], keep: Keep = AS_IT_IS) -> Callable[..., Any]:
    """A layer's forward, run again in backward."""

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return run_again(forward, args, kwargs, keep)

    return recomputed


def chosen(setting: str) -> tuple[str, Keep]:
    """(one of RECOMPUTE, how to keep inputs): what a model recomputes, by its own setting or the plan in force.

    setting: "" leaves it to the plan; without a plan that is "none". Raises ConfigError for an unknown choice, and for
    a plan that moves activations to the host while nothing is recomputed.
    """
    plan = layout.active.layout.plan if layout.active.layout is not None else None
    what = setting or (_of_plan(plan) if plan is not None else "none")
    if what not in RECOMPUTE:
        raise ConfigError(f"unknown recompute {what!r}{did_you_mean(what, RECOMPUTE)}")
    offload = plan is not None and "act" in plan.offload
    if plan is not None and offload and (setting or plan.recompute) == "none":
        raise ConfigError(
            "plan: offload 'act' with recompute 'none': what goes to host memory is the inputs of recomputed parts; "
            "set recompute to full, full_attn or core_attn, or drop 'act'"
        )
    return what, Keep(offload=offload)


class _Place(threading.local):
    """Of the block that runs, among the model's blocks."""

    block: int | None = None


_place = _Place()


@contextmanager
def in_block(number: int) -> Iterator[None]:
    """Inside the block of code the model's block of that place runs, which a plan's recompute_share chooses by."""
    before, _place.block = _place.block, number
    try:
        yield
    finally:
        _place.block = before


def _of_plan(plan: Any) -> str:
    if plan.recompute_share == 1:
        return plan.recompute
    if _place.block is None:
        raise ConfigError(
            f"plan: recompute_share={plan.recompute_share:g}, but this model does not say which of its blocks runs (in "
            "one loop over all of them they are alike); leave recompute_share out"
        )
    return plan.recompute if plan.recomputes(_place.block) else "none"


def run_part(part: str, setting: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), run again in backward if part is what `chosen(setting)` says.

    part: "full" for a whole block, "full_attn" for its attention, "core_attn" for softmax(q k) v.
    """
    what, keep = chosen(setting)
    if what != part:
        return function(*args, **kwargs)
    if _place.block is not None:  # run again, it is still that block
        function = functools.wraps(function)(functools.partial(_run_in_block, _place.block, function))
    return run_again(function, args, kwargs, keep)


def _run_in_block(number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with in_block(number):
        return function(*args, **kwargs)


# ---- in eager code ----


class _EagerWatch(Capture):
    """Watches eager code: what it reads and writes is noted, and nothing else is different."""

    stages: ClassVar[bool] = False

    def created(self, tensor: TensorState) -> None:
        super().created(tensor)
        if self.outer is not None:
            self.outer.created(tensor)

    def touch(self, tensor: TensorState) -> None:
        if id(tensor) in self.created_ids or id(tensor) in self.before:
            return
        if tensor.holder is not tensor:
            super().touch(tensor)
            return
        node = tensor._node
        super().touch(tensor)
        tensor._node = node  # history goes on through eager code

    def entered(self, layer: Any) -> Callable[..., Any]:
        return layer.forward

    def left(self) -> None:
        """Nothing was noted of the layer."""

    def has_value(self, tensor: TensorState) -> bool:
        return True

    def host_read(self, tensor: TensorState, what: str) -> None:
        self.touch(tensor)


@contextmanager
def _noting() -> Iterator[_EagerWatch]:
    """Notes on what the block reads and writes; what it tapes is packed by no hook, for it is not kept."""
    outer, pair = state.watch.active, tape.saved_hooks.pair
    state.watch.active = notes = _EagerWatch(capture_in_progress())
    tape.saved_hooks.pair = None
    try:
        yield notes
    finally:
        state.watch.active, tape.saved_hooks.pair = outer, pair


class _Entrance(tape.PassNode):
    """Where the second run's history meets what came before it."""

    __slots__ = ()


class _RecomputeInput(NamedTuple):
    """An input: where it came from, and its array (for an argument, as it is packed).

    tensor: the Tensor itself, or None for an argument that is kept by value; find: gives that argument's Tensor as
    long as somebody holds it.
    """

    tensor: TensorState | None
    find: Callable[[], TensorState | None]
    array: Any
    edge: tape.Edge

    def open(self, array: Any) -> TensorState:
        """A Tensor with this value, whose history begins here: the very Tensor unless nobody holds it any more."""
        tensor = self.tensor if self.tensor is not None else self.find()
        if tensor is None:
            tensor = Tensor(array)
        tensor._array, tensor._index, tensor.stop_gradient = array, 0, self.edge is None
        tensor._node = None if self.edge is None else _Entrance("recompute", self.edge)
        return tensor


class _Present:
    """Some Tensors as they are now, to be put back."""

    def __init__(self, tensors: Sequence[TensorState]) -> None:
        self.slots = [(t, t._array, t._node, t._index, t.stop_gradient) for t in tensors]

    def restore(self) -> None:
        for t, array, node, index, stop_gradient in self.slots:
            t._array, t._node, t._index, t.stop_gradient = array, node, index, stop_gradient


class _RecomputedCall:
    """A function and its arguments with the Tensors taken out, and the modes it ran in."""

    def __init__(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        self.function = function
        self.leaves: list[Any] = []
        self.spec = flatten((args, kwargs), self.leaves)
        self.places: dict[int, int] = {}
        self.modes = (amp_policy.active.policy, dtypes.default_dtype(), layout.active.layout)

    def take_tensors(self) -> list[TensorState]:
        """The Tensors among the arguments, each once; this holds them no longer."""
        tensors: dict[int, TensorState] = {}
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, TensorState):
                self.places[i] = list(tensors).index(id(leaf)) if id(leaf) in tensors else len(tensors)
                tensors[id(leaf)] = leaf
                self.leaves[i] = None
        return list(tensors.values())

    def __call__(self, tensors: Sequence[TensorState]) -> Any:
        leaves = list(self.leaves)
        for i, which in self.places.items():
            leaves[i] = tensors[which]
        args, kwargs = rebuild(self.spec, iter(leaves))
        return self.function(*args, **kwargs)

    @contextmanager
    def modes_in_force(self) -> Iterator[None]:
        now = (amp_policy.active.policy, dtypes.default_dtype(), layout.active.layout)
        self._set(self.modes)
        try:
            with tape.GradEnabled(True):
                yield
        finally:
            self._set(now)

    @staticmethod
    def _set(modes: tuple) -> None:
        amp_policy.active.policy, layout.active.layout = modes[0], modes[2]
        dtypes.set_default_dtype(modes[1])


def _ends(since: int, result: Any, args: Sequence[TensorState], state_tensors: Sequence[TensorState]) -> list:
    """The Tensors a run left with a history of its own: among its results, its arguments, and the state it wrote."""
    found: dict[int, TensorState] = {}
    for tensor in (*tensors_in(result), *args, *state_tensors):
        if not tensor.stop_gradient and tensor._node is not None and tensor._node.seq >= since:
            found.setdefault(id(tensor), tensor)
    return list(found.values())


def _call_eagerly(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], keep: Keep) -> Any:
    call = _RecomputedCall(function, args, kwargs)
    arguments = call.take_tensors()
    for tensor in arguments:
        state.read(tensor)
    inputs = [_hold_argument(t) for t in arguments]
    since = tape.Node("start", ()).seq
    with _noting() as notes:
        result = call(arguments)
    ours = {id(t) for t in arguments}
    met = [_RecomputeInput(b.tensor, _nobody, b.array, b.edge) for key, b in notes.before.items() if key not in ours]
    ends = _ends(since, result, arguments, [b.tensor for b in notes.before.values()])
    if ends:
        node = _Again(call, [*inputs, *met], len(arguments), [(t._array.shape, t._array.dtype) for t in ends], keep)
        for index, tensor in enumerate(ends):
            tensor._node, tensor._index = node, index
    return result


def _hold_argument(tensor: TensorState) -> _RecomputeInput:
    """An argument. One that was computed, or wants no gradient, is kept by value: the Tensor itself may go."""
    edge = tape.edge_of(tensor)
    by_value = type(tensor) is Tensor and not isinstance(edge, TensorState)
    return _RecomputeInput(
        None if by_value else tensor, weakref.ref(tensor) if by_value else _nobody, tensor._array, edge
    )


def _nobody() -> None:
    return None


class _Again(tape.Node):
    """A call that is run again, with the tape on, when its gradients are asked for."""

    __slots__ = ("call", "inputs", "keep", "num_args", "num_outputs", "packed")

    def __init__(
        self, call: _RecomputedCall, inputs: list[_RecomputeInput], num_args: int, metas: list[tuple], keep: Keep
    ) -> None:
        name = f"recompute({getattr(call.function, '__name__', type(call.function).__name__)})"
        super().__init__(name, tuple(h.edge for h in inputs), tuple(metas))
        self.call = call
        self.keep = keep
        self.num_args = num_args
        self.num_outputs = len(metas)
        self.inputs: list[_RecomputeInput] | None = inputs
        self.packed: tape.Packed | None = None
        self._pack()

    def _pack(self) -> None:
        """Arguments kept by value go where `keep` says and through the saved-tensor hooks in force."""
        assert self.inputs is not None
        at = self._by_value()
        arrays = [self.keep.pack(self.inputs[i].array) if self.keep.moves else self.inputs[i].array for i in at]
        if tape.saved_hooks.pair is not None:
            self.packed, arrays = tape.Packed(arrays), [None] * len(at)
        for i, array in zip(at, arrays, strict=True):
            self.inputs[i] = self.inputs[i]._replace(array=array)

    def _by_value(self) -> list[int]:
        return [i for i, h in enumerate(self.inputs or ()) if h.tensor is None]

    def _arrays(self) -> list[Any]:
        """Every input's array, in order, as it was."""
        assert self.inputs is not None
        arrays, at = [h.array for h in self.inputs], self._by_value()
        kept = [arrays[i] for i in at] if self.packed is None else self.packed.arrays()
        for i, array in zip(at, kept, strict=True):
            arrays[i] = self.keep.unpack(array) if self.keep.moves else array
        return arrays

    def gradients(self, cotangents: list, create_graph: bool) -> list:
        """Run the call again and pull the cotangents back through it."""
        if self.inputs is None:
            raise tape.freed_error(self.name)
        entrances, ends = self._run()
        wanted = [t for t in entrances if not t.stop_gradient]
        roots = [(end, c) for end, c in zip(ends, cotangents, strict=True) if c is not None]
        gradients = iter(
            walk.grad(
                [end for end, _ in roots], wanted, [c for _, c in roots], retain_graph=create_graph,
                create_graph=create_graph, allow_unused=True, no_grad_vars=(),
            )
        )  # fmt: skip
        return [None if t.stop_gradient else next(gradients) for t in entrances]

    def _run(self) -> tuple[list[TensorState], list[TensorState]]:
        """The second run: (a Tensor at each input's entrance, one at each end)."""
        assert self.inputs is not None
        now = [h.tensor if h.tensor is not None else h.find() for h in self.inputs]
        present = _Present([t for t in now if t is not None])
        opened = [h.open(array) for h, array in zip(self.inputs, self._arrays(), strict=True)]
        entrances = [_at_node(t) for t in opened]
        since = tape.Node("start", ()).seq
        try:
            with self.call.modes_in_force(), _noting() as notes:
                result = self.call(opened[: self.num_args])
            written = [b.tensor for b in notes.before.values()]
            ends = [_at_node(t) for t in _ends(since, result, opened[: self.num_args], written)]
            notes.restore()
        finally:
            present.restore()
        self._check_entered(ends, since)
        again = tuple((t._array.shape, t._array.dtype) for t in ends)
        if again != self.metas:
            raise GradError(
                f"{self.name}: run again for its backward it gave other results than the first time: "
                f"{_show(again)} instead of {_show(self.metas or ())}; a recomputed function must do the same each "
                "time (no counters, no caches, no random numbers of Python or NumPy)"
            )
        return entrances, ends

    def _check_entered(self, ends: Sequence[TensorState], since: int) -> None:
        """Refuse a second run that goes back to Tensors of the first: their gradients would be lost."""
        stack, seen = [t._node for t in ends], set()
        while stack:
            node = stack.pop()
            if id(node) in seen or isinstance(node, _Entrance):
                continue
            seen.add(id(node))
            if node.seq < since:
                raise GradError(
                    f"{self.name}: run again for its backward it used a Tensor computed earlier (by {node.name!r}) "
                    "that it did not read the first time; a recomputed function may not read Tensors from attributes "
                    "or caches that it fills itself"
                )
            stack += [edge[0] for edge in node.edges if isinstance(edge, tuple)]

    def release(self) -> None:
        """Let go of the inputs."""
        self.inputs = self.packed = None

    def saved(self) -> list[Any]:
        """Every input's array."""
        return self._arrays()

    def reload(self, arrays: Sequence[Any]) -> None:
        """Other values for the same inputs."""
        assert self.inputs is not None
        self.inputs = [h._replace(array=a) for h, a in zip(self.inputs, arrays, strict=True)]
        self.packed = None
        self._pack()

    @property
    def freed(self) -> bool:
        return self.inputs is None


def _at_node(tensor: TensorState) -> TensorState:
    """A Tensor of its own at the same place of the tape."""
    made = Tensor(tensor._array)
    made._node, made._index, made.stop_gradient = tensor._node, tensor._index, tensor.stop_gradient
    return made


def _show(metas: Sequence[tuple]) -> str:
    return ", ".join(f"{list(shape)} {dtype.name}" for shape, dtype in metas) or "nothing that wants a gradient"


# ---- in captured code ----


def _call_captured(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], keep: Keep) -> Any:
    watcher = state.code_watcher()
    converted = function if watcher is None else watcher.converted(function)
    region = trace(lambda: [converted(*args, **kwargs)])
    inputs = Inputs([region])
    consts = inputs.consts(region)
    moved = _arguments(args, kwargs) if keep.moves else set()
    mask = tuple(id(a) in moved for a in inputs.arrays)

    def fn(*arrays: Any) -> tuple:
        return tuple(evaluate(region, [arrays[c] for c in consts]))

    again = jax.checkpoint(fn) if not any(mask) else _moving(fn, keep, mask)
    kernel = Kernel(lambda *arrays: again(*arrays), "recompute", saves=any(mask))
    results = tape.apply(kernel, tuple(inputs.arrays), tuple(inputs.edges))
    for ended in region.written.values():
        adopt([ended], results[ended.out])
    for tensor, out in region.grads.values():
        adopt_grad(tensor, None if out is None else results[out])
    return returned(region, results)


def _arguments(args: tuple, kwargs: dict[str, Any]) -> set[int]:
    """Ids of the arrays of arguments that were computed: what is worth moving."""
    return {id(state.read(t)) for t in tensors_in((args, kwargs)) if isinstance(tape.edge_of(t), tuple)}


def _moving(fn: Callable[..., tuple], keep: Keep, mask: tuple[bool, ...]) -> Callable[..., tuple]:
    """fn, whose inputs under mask are kept elsewhere between forward and backward."""

    def plain(*arrays: Any) -> tuple:
        return fn(*arrays)

    def forward(*arrays: Any) -> tuple:
        return fn(*arrays), tuple(keep.pack(a) if m else a for a, m in zip(arrays, mask, strict=True))

    def backward(kept: tuple, cotangents: tuple) -> tuple:
        # the barrier ties the way back to the arrival of the cotangents: nothing comes back before it is needed
        kept, cotangents = jax.lax.optimization_barrier((kept, cotangents))
        arrays = tuple(keep.unpack(a) if m else a for a, m in zip(kept, mask, strict=True))
        return jax.vjp(fn, *arrays)[1](cotangents)

    call = jax.custom_vjp(plain)
    call.defvjp(forward, backward)
    return call
