"""The state of every Tensor: an array, its place in the tape, and the capture that may be watching it.

Eager Tensors and random generators are made of this; capture sees all of a program's state through it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, Protocol

import jax
import numpy as np
from jax.core import Tracer

from polyreme.core.devices.device_memory import raise_explained
from polyreme.core.engine import forks
from polyreme.errors import CaptureError, PlacementError, ProgramError


class TensorState:
    """An array that persists, and its tape slots.

    array: the value, a jax array (a tracer while captured). grad: Tensor or None. node, index: the tape entry that made
    it and which of its outputs it is; None for a leaf. views: the Tensors that share elements with it, as x and x[0]
    do, unset where none do (eager.views). own_form: what is kept is not the value, which reading `_array` makes of it:
    addends that several devices hold, or uneven pieces.
    """

    own_form: ClassVar[bool] = False
    __slots__ = ("__weakref__", "_array", "_grad", "_index", "_node", "_views", "stop_gradient")
    _views: Any

    def __init__(self, array: Any, stop_gradient: bool = True) -> None:
        self._array = array
        self.stop_gradient: bool = stop_gradient
        self._node: Any = None
        self._index = 0
        self._grad: Any = None
        if watch.active is not None:
            watch.active.created(self)

    def __getstate__(self) -> Any:
        """What a pickle holds: the value alone, not those that share its elements."""
        attributes, slots = object.__getstate__(self)  # type: ignore[misc]
        return attributes, {name: value for name, value in slots.items() if name != "_views"}

    @property
    def holder(self) -> TensorState | None:
        """The Tensor whose state its value is: itself, one that it is a part of, or None while it is lent a value."""
        return self

    def lend(self, array: Any) -> Any:
        """Be this array, of which no capture is told, until the one that this returns is lent in its place."""
        before, self._array = self._array, array
        return before


class Elsewhere:
    """Stands as the array of a Tensor whose value is not in the devices' memory, such as a parameter on a disk.

    It tells shape, dtype and layout on the devices; `read` gives the value there. state.read and the modes that run ops
    call it, and state.write replaces the value with `fill`. Anything else that is asked of it is asked of the value;
    an aval, by which the eager mode knows jax's arrays, it has none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any

    committed = True

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Any) -> None:
        self.shape, self.dtype, self.sharding = tuple(shape), np.dtype(dtype), sharding

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_fully_addressable(self) -> bool:
        return self.sharding.is_fully_addressable

    @property
    def saved(self) -> Any:
        """The value that a checkpoint saves in its place."""
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)

    def __jax_array__(self) -> Any:
        return self.read()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "aval" or "sharding" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.read(), name)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        return self.read()

    def read(self) -> Any:
        """The value as an array, in the devices' memory."""
        raise NotImplementedError

    def fill(self, array: Any) -> None:
        """Replace the value."""
        raise NotImplementedError


class Watcher(Protocol):
    """The watcher of a thread's Tensors and Layers while its code is captured or recorded.

    stages: Tensors may have no values. created_ids: of the Tensors made inside. converted: fn -> fn with its control
    flow converted.
    """

    stages: ClassVar[bool]

    @property
    def converted(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
    @property
    def created_ids(self) -> Container[int]: ...
    def created(self, tensor: TensorState) -> None: ...
    def touch(self, tensor: TensorState) -> None: ...
    def read(self, tensor: TensorState) -> Any: ...
    def write(self, tensor: TensorState, array: Any) -> None: ...
    def has_value(self, tensor: TensorState) -> bool: ...
    def host_read(self, tensor: TensorState, what: str) -> None: ...
    def sizes_of(self, tensor: TensorState) -> np.ndarray | None: ...
    def entered(self, layer: Any) -> Callable[..., Any]: ...
    def left(self) -> None: ...


class CodeWatcher(Watcher, Protocol):
    """Watches code that runs op by op, on tracers or on values. Its members: jit.capture.Capture."""

    records: ClassVar[Literal[False]]
    detach: bool

    @property
    def outer(self) -> CodeWatcher | None: ...
    @property
    def before(self) -> Mapping[int, Any]: ...
    def called(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None: ...
    def copied(self, tensor: TensorState, made: TensorState) -> None: ...
    def replaces(self, buffers: dict[str, Any], name: str) -> None: ...
    def scope_of(self, node: Any) -> AbstractContextManager[Any]: ...


class ProgramRecorder(Watcher, Protocol):
    """Records calls into a static Program. Its members: program.recorder.Recorder."""

    records: ClassVar[Literal[True]]
    as_in_1x: bool

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def carrying(self) -> AbstractContextManager[dict[int, Any]]: ...
    def in_front(self, variable: Any) -> Any: ...
    def name_of(self, tensor: TensorState) -> str: ...
    def changes(self, what: str) -> None: ...
    def size_of(self, size: Any) -> Any: ...
    def defined(self, op: Any, results: Sequence[Any], prefix: str) -> Any: ...
    def declare(self, name: str, template: Any, initializer: Any) -> Any: ...
    def declare_buffer(self, name: str, tensor: Any) -> Any: ...
    def initialize(self, variable: TensorState, initializer: Any) -> None: ...
    def cond(self, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any: ...
    def while_loop(
        self, test: Callable[..., Any], body: Callable[..., Any], init: Sequence[Any], maximum: int | None
    ) -> list[Any]: ...
    def over_rows(self, step: Callable[..., Any], x: Any, states: Any, reverse: bool) -> tuple[Any, Any]: ...
    def until_finished(
        self, advance: Callable[..., Any], idle: Callable[[Any], Any], start: Any, last: int | None, is_test: bool
    ) -> tuple[Any, Any]: ...
    def recompute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def derive(
        self, rule: str, function: Callable[..., Any], xs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...
    def backward(self, loss: Any, parameters: Any, no_grad_set: Any) -> list[tuple[Any, Any]]: ...
    def apply_gradients(self, optimizer: Any, pairs: Any, startup_program: Any) -> list[Any]: ...
    def minimize(
        self, optimizer: Any, loss: Any, startup_program: Any, parameters: Any, no_grad_set: Any
    ) -> tuple[list[Any], list[tuple[Any, Any]]]: ...


class _Watch(threading.local):
    """The watcher of this thread, or None: what other threads do meanwhile is none of its business."""

    def __init__(self) -> None:
        self.active: CodeWatcher | ProgramRecorder | None = forks.fork.refusal

    def start_again(self) -> None:
        """Set the watcher of a process that has just been forked."""
        self.active = self.active if forks.fork.refusal is None else forks.fork.refusal


watch: _Watch = _Watch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=watch.start_again)


def capturing() -> bool:
    """Whether code of this thread is being captured, so that Tensors may have no values; not if it is only watched."""
    return watch.active is not None and watch.active.stages


def recording() -> bool:
    """Whether ops called in this thread are recorded into a static Program."""
    return watch.active is not None and watch.active.records


def code_watcher() -> CodeWatcher | None:
    """The watcher of this thread's code; None where nothing is captured, and where a Program is recorded."""
    active = watch.active
    return None if active is None or active.records is True else active


def recorder() -> ProgramRecorder | None:
    """The Recorder of this thread's calls into a static Program; None if there is none."""
    active = watch.active
    return active if active is not None and active.records is True else None


def require_recorder(what: str) -> ProgramRecorder:
    """The recorder of this thread. Raises ProgramError, naming what needs it, outside static mode."""
    found = recorder()
    if found is None:
        raise ProgramError(f"{what} belongs to a static Program, and none is recorded; call enable_static() first")
    return found


class _Changes:
    """A counter of changes anywhere: a captured program checks its guards again when it has moved."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version: int = 0


leaf_hooks: _Changes = _Changes()
"""Of a leaf's gradient hooks."""
attributes: _Changes = _Changes()
"""Of plain attributes of Layers."""
layer_parts: _Changes = _Changes()
"""Of the parameters, buffers, sublayers and hooks that a Layer has; not of their values."""
due: dict[int, Callable[[], None]] = {}
"""By id of a Tensor that follows another: what brings it up to date before a captured program reads it."""


def read(tensor: TensorState) -> Any:
    """The tensor's array, telling the capture in progress that it is read."""
    if watch.active is not None:
        return watch.active.read(tensor)
    array = tensor._array
    return array.read() if isinstance(array, Elsewhere) else array


def write(tensor: TensorState, array: Any) -> None:
    """Replace the tensor's array, telling the capture in progress."""
    if watch.active is not None:
        watch.active.write(tensor, array)
    elif isinstance(tensor._array, Elsewhere) and array is not tensor._array:
        tensor._array.fill(array)
    else:
        tensor._array = array


def write_value(tensor: TensorState, array: Any) -> None:
    """Replace the tensor's array and nothing else: its gradients go on to what it was computed from before.

    The tape keeps that history by itself; where jax differentiates captured code, the new array is tied to it here.
    """
    watcher = code_watcher()
    if watcher is not None and watcher.detach and not tensor.stop_gradient and isinstance(array, (Tracer, jax.Array)):
        before = watcher.read(tensor)
        if (before.shape, before.dtype) == (array.shape, array.dtype) and jax.numpy.issubdtype(array.dtype, np.inexact):
            array = _with_gradient_of(before, array)
    write(tensor, array)


@jax.custom_jvp
def _with_gradient_of(before: jax.Array, array: jax.Array) -> jax.Array:
    """array, whose derivative is that of before."""
    return array


_with_gradient_of.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def touch(tensor: TensorState) -> None:
    """Tell the capture in progress that the tensor is about to be read or changed."""
    if watch.active is not None:
        watch.active.touch(tensor)


def sizes_of(tensor: TensorState) -> np.ndarray | None:
    """The numbers of a Tensor in captured code where they follow from shapes: an array of ints and of sizes that an
    export leaves open. None for any other."""
    return None if watch.active is None else watch.active.sizes_of(tensor)


def host(tensor: TensorState, what: str) -> np.ndarray:
    """The tensor's value as a NumPy array on the host.

    what: the expression that needs it, for the message. Raises CaptureError inside a capture, where there is no value
    yet.
    """
    if watch.active is not None:
        sizes = sizes_of(tensor)
        if sizes is not None and all(type(size) is int for size in sizes.flat):
            return sizes.astype(tensor._array.dtype)
        watch.active.host_read(tensor, what)
    if isinstance(tensor._array, Tracer):
        raise CaptureError(
            f"{what}: this Tensor belongs to a captured function that has ended and has no value; return it from that "
            "function instead of keeping it in a variable outside"
        )
    array = tensor._array.read() if isinstance(tensor._array, Elsewhere) else tensor._array
    try:
        return np.asarray(array)
    except RuntimeError as error:
        if array.is_fully_addressable:
            raise_explained(error, f"what {what} waited for", waited=True)
        return _over_processes(array, what, error)


class _Gathering:
    """The function that reads an array in pieces over processes; polyreme.distributed, on a higher floor, sets it."""

    def __init__(self) -> None:
        self.gather: Callable[[Any, str], np.ndarray] | None = None


gathering: _Gathering = _Gathering()


def _over_processes(array: Any, what: str, error: RuntimeError) -> np.ndarray:
    """The value of an array that spans processes: from the devices here if each process holds all of it, else gathered.

    Which of the two is the same in every process, as gathering takes all of them.
    """
    pieces: dict[int, set[tuple]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        pieces.setdefault(device.process_index, set()).add(tuple((part.start, part.stop) for part in index))
    here = jax.process_index()
    if here not in pieces:
        raise PlacementError(
            f"{what}: this Tensor of shape {list(array.shape)} lies on devices of processes {sorted(pieces)} alone, "
            f"and this is process {here}; reshard it to a mesh with a device of every process that reads it"
        ) from error
    if any(len(part) < len(set().union(*pieces.values())) for part in pieces.values()):
        if gathering.gather is None:
            raise PlacementError(
                f"{what}: this Tensor of shape {list(array.shape)} lies in pieces over several processes; import "
                "polyreme.distributed, which gathers it"
            ) from error
        return gathering.gather(array, what)
    value = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        value[shard.index] = np.asarray(shard.data)
    return value


@contextmanager
def outside_capture() -> Iterator[None]:
    """Make state that outlives the capture in progress: values are computed now, the capture meets them as inputs."""
    watcher, watch.active = watch.active, None
    try:
        forks.check("making a Tensor")
        with jax.ensure_compile_time_eval():
            yield
    finally:
        watch.active = watcher
