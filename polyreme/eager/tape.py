"""The tape: which results were computed from which Tensors. walk.py walks back over it.

A node keeps its kernel, its input arrays and where each input came from. With create_graph the node's
gradient runs as a kernel like any other, so it is taped again; nothing else is needed for third order and up.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices.device_memory import part, raise_explained
from polyreme.core.engine.turns import turns
from polyreme.core.kernel import Kernel, Mask
from polyreme.core.state import TensorState
from polyreme.errors import GradError

next_number: Callable[[], int] = itertools.count().__next__
"""A number above those of all nodes made so far and below those of all made later."""


# where an input came from: (node, output index), a leaf, or None when no gradient flows there
Edge = Any


class GradMode(threading.local):
    """Whether ops are taped, in each thread by itself."""

    def __init__(self) -> None:
        self.enabled = True


grad_mode: GradMode = GradMode()


class Factory:
    """Makes the Tensor class's values; set once by eager.tensor, which stands above. add: the op of that name."""

    __slots__ = ("add", "cls", "tensor")
    cls: type[TensorState]
    tensor: Callable[[Any], TensorState]
    add: Callable[[TensorState, TensorState], TensorState]


factory: Factory = Factory()


class SavedHooks:
    """The pair (pack, unpack) that saved values go through, or None."""

    __slots__ = ("pair",)

    def __init__(self) -> None:
        self.pair: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None


saved_hooks: SavedHooks = SavedHooks()


class Packed:
    """Saved arrays as the pack hook in force turned them into something else."""

    unpack: Callable[..., Any]

    items: list[Any]

    __slots__ = ("items", "unpack")

    def __init__(self, arrays: Sequence[Any]) -> None:
        assert saved_hooks.pair is not None
        pack, self.unpack = saved_hooks.pair
        # what the hooks compute is neither taped nor packed
        with _plainly():
            self.items = [pack(factory.tensor(a)) for a in arrays]

    def arrays(self) -> tuple[Any, ...]:
        """The arrays again; GradError if the unpack hook gives no Tensor."""
        with _plainly():
            found = [self.unpack(item) for item in self.items]
        for tensor in found:
            if not isinstance(tensor, TensorState):
                raise GradError(f"saved_tensors_hooks: unpack_hook must return a Tensor, got {type(tensor).__name__}")
        return tuple(t._array for t in found)


@contextmanager
def _plainly() -> Iterator[None]:
    outer, saved_hooks.pair = saved_hooks.pair, None
    try:
        with GradEnabled(False):
            yield
    finally:
        saved_hooks.pair = outer


class GradEnabled:
    """Turns the tape on or off inside the block."""

    enabled: bool
    outer: bool

    __slots__ = ("enabled", "outer")

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __enter__(self) -> None:
        self.outer = grad_mode.enabled
        grad_mode.enabled = self.enabled

    def __exit__(self, *_: object) -> None:
        grad_mode.enabled = self.outer


class Node:
    """One taped call. Subclasses differ in how they turn cotangents into gradients.

    edges: per input, where it came from. metas: (shape, dtype) of each output that carries a gradient. known_to_jax:
    differentiating the arrays with jax gives the same gradients, so a captured function may hold it.
    """

    edges: tuple[Edge, ...]
    metas: tuple[tuple[Any, ...], ...] | None
    name: str
    seq: int

    __slots__ = ("__weakref__", "edges", "hooks", "metas", "name", "seq")
    known_to_jax: ClassVar[bool] = False

    def __init__(self, name: str, edges: tuple[Edge, ...], metas: tuple[tuple[Any, ...], ...] | None = None) -> None:
        self.name = name
        self.edges = edges
        self.metas = metas
        self.seq = next_number()
        self.hooks: dict[int, list] | None = None

    def gradients(self, cotangents: list[TensorState | None], create_graph: bool) -> Sequence[TensorState | None]:
        """Gradients for the edges, in order."""
        raise NotImplementedError

    def release(self) -> None:
        """Release saved values."""
        raise NotImplementedError

    def saved(self) -> list[Any]:
        """The arrays kept for backward, in a fixed order: what a backward in a program of its own must be given."""
        raise NotImplementedError

    def reload(self, arrays: Sequence[Any]) -> None:
        """Take these arrays in the place of those that saved() listed."""
        raise NotImplementedError

    @property
    def freed(self) -> bool:
        raise NotImplementedError


class UnsavedNode(Node):
    """A call that keeps no values for its backward."""

    __slots__ = ()

    def release(self) -> None:
        """Does nothing: no values are saved."""

    def saved(self) -> list[Any]:
        return []

    def reload(self, arrays: Sequence[Any]) -> None:
        """Does nothing: no values are saved."""

    @property
    def freed(self) -> bool:
        return False


class PassNode(UnsavedNode):
    """Passes the gradient on unchanged: ties a Tensor that stands for another to where that one came from."""

    __slots__ = ()
    known_to_jax: ClassVar[bool] = True

    def __init__(self, name: str, edge: Edge) -> None:
        super().__init__(name, (edge,))

    def gradients(self, cotangents: list[TensorState | None], create_graph: bool) -> list[TensorState | None]:
        return cotangents


def freed_error(name: str) -> GradError:
    """The error for a second walk through a node."""
    return GradError(
        f"backward through {name!r} a second time: its saved values were freed by the first backward; "
        "call the first one with retain_graph=True"
    )


class KernelNode(Node):
    """A kernel's call. primals are the input arrays, None once freed; metas are known where a pullback is kept."""

    kernel: Kernel
    num_outputs: int
    pullback: None
    name: str
    edges: tuple[Any, ...]
    metas: Any
    seq: int

    __slots__ = ("kernel", "num_outputs", "primals", "pullback")

    def __init__(
        self,
        kernel: Kernel,
        primals: tuple[Any, ...],
        edges: tuple[Any, ...],
        num_outputs: int,
        pullback: Any = None,
        metas: Any = None,
    ) -> None:
        # every slot set here, without super().__init__: this runs for each op call
        self.name = kernel.name
        self.edges = edges
        self.metas = metas
        self.seq = next_number()
        self.hooks = None
        self.kernel = kernel
        self.primals: Any = primals if saved_hooks.pair is None else Packed(primals)
        self.num_outputs = num_outputs
        self.pullback = pullback

    def gradients(self, cotangents: list[TensorState | None], create_graph: bool) -> list[TensorState | None]:
        primals = self.primals
        if primals is None:
            raise freed_error(self.name)
        if primals.__class__ is Packed:
            primals = primals.arrays()
        mask = _mask(self.edges)
        if create_graph:
            present = tuple(c is not None for c in cotangents)
            given = [c for c in cotangents if c is not None]
            kernel = self.kernel.grad_kernel(mask, present)
            edges = (*self.edges, *(edge_of(c) for c in given))
            grads = apply(kernel, (*primals, *(c._array for c in given)), edges)
        else:
            try:
                arrays = self._pulled(primals, mask, cotangents)
            except jax.errors.JaxRuntimeError as error:
                raise_explained(error, f"the backward of {self.name}")
            grads = [factory.tensor(a) for a in turns.end(arrays)]
        found = iter(grads)
        return [next(found) if m else None for m in mask]

    def _pulled(self, primals: Any, mask: Any, cotangents: list[TensorState | None]) -> tuple:
        """Arrays of the gradients that the mask asks for."""
        if self.pullback is None:
            return self.kernel.backward(mask)(primals, tuple(None if c is None else c._array for c in cotangents))
        filled = tuple(
            jnp.zeros(meta[0], meta[1]) if c is None else c._array.astype(meta[1])
            for c, meta in zip(cotangents, self.metas or (), strict=True)
        )
        return self.kernel.pull_saved(self.pullback, filled)

    def release(self) -> None:
        self.primals = None
        self.pullback = None

    def saved(self) -> list[Any]:
        """The residuals of a kernel that saves, else its inputs."""
        if self.pullback is not None:
            return jax.tree.leaves(self.pullback)
        return list(self.primals.arrays() if self.primals.__class__ is Packed else self.primals)

    def reload(self, arrays: Sequence[Any]) -> None:
        """Replace the saved values by others, for the same call."""
        if self.pullback is not None:
            self.pullback = jax.tree.unflatten(jax.tree.structure(self.pullback), arrays)
        else:
            self.primals = tuple(arrays)

    def become(self, other: KernelNode) -> None:
        """Be the other call, under this node's number and with its hooks: both give what is one value."""
        self.name, self.kernel, self.num_outputs = other.name, other.kernel, other.num_outputs
        self.edges, self.metas, self.primals, self.pullback = other.edges, other.metas, other.primals, other.pullback

    @property
    def freed(self) -> bool:
        return self.primals is None


def _mask(edges: tuple[Edge, ...]) -> Mask:
    """Marks the inputs that carry gradients."""
    return tuple([e is not None for e in edges])


def edge_of(tensor: TensorState) -> Edge:
    """The edge for gradients of this tensor: its node and output, itself if it is a leaf, None if it wants or has
    none."""
    if tensor.stop_gradient:
        return None
    if tensor._node is not None:
        return (tensor._node, tensor._index)
    return tensor if tensor._array.dtype in dtypes.INEXACT else None


def edge_key(edge: Edge) -> Any:
    """A hashable identity for an edge."""
    return edge if isinstance(edge, tuple) else id(edge)


def apply(kernel: Kernel, arrays: tuple[Any, ...], edges: tuple[Edge, ...]) -> Any:
    """Run a kernel; tape it if some edge wants a gradient. Returns Tensors in the structure the kernel returns."""
    if not grad_mode.enabled or kernel.constant or not any(mask := _mask(edges)):
        return untaped(turns.end(kernel.forward(*arrays)))
    if kernel.saves and saved_hooks.pair is None:
        watcher = state.code_watcher()
        # where jax differentiates the captured code as a whole, a pullback here would hide a kernel's own backward
        if watcher is None or not watcher.detach:
            outs, pullback = turns.end(kernel.forward_saving(mask)(*arrays))
            return results(kernel, arrays, edges, outs, pullback)
    return results(kernel, arrays, edges, turns.end(kernel.forward(*arrays)))


def untaped(outs: Any) -> Any:
    """Tensors of a kernel's outputs, without history."""
    kind = type(outs)
    return kind([factory.tensor(o) for o in outs]) if kind is tuple or kind is list else factory.tensor(outs)


def results(kernel: Kernel, arrays: tuple[Any, ...], edges: tuple[Any, ...], outs: Any, pullback: Any = None) -> Any:
    """Tensors of a kernel's outputs, those that carry a gradient with the call as their history."""
    kind = type(outs)
    many = kind is tuple or kind is list
    every = outs if many else (outs,)
    inexact = [dtypes.is_inexact(o.dtype) for o in every]
    if True not in inexact:
        tensors = [factory.tensor(o) for o in every]
        return kind(tensors) if many else tensors[0]
    metas = None
    if pullback is not None:
        metas = tuple((o.shape, o.dtype) for o, i in zip(every, inexact, strict=True) if i)
    node = KernelNode(kernel, arrays, edges, sum(inexact), pullback, metas)
    tensors, index = [], 0
    for out, carries in zip(every, inexact, strict=True):
        tensor = factory.tensor(out)
        if carries:
            tensor.stop_gradient = False
            tensor._node = node
            tensor._index = index
            index += 1
        tensors.append(tensor)
    return kind(tensors) if many else tensors[0]


@dataclass(frozen=True)
class Shortcut:
    """Another way from a node's cotangents to the gradients of what lies behind `between`: those of `node`.

    It is taken where nothing asks for what happens between: no hook, no gradient wanted or blocked there, and no
    create_graph, whose derivatives are of the calls as they were written.
    """

    node: KernelNode
    between: tuple[Node, ...]

    @property
    def is_hooked(self) -> bool:
        """Whether a hook asks for what happens between."""
        return any(node.hooks for node in self.between)


shortcuts: weakref.WeakKeyDictionary[Node, Shortcut] = weakref.WeakKeyDictionary()


def settle(starts: Iterable[Node]) -> None:
    """Make each shortcut behind these nodes the only way, where no hook asks for what happens between.

    For a tape that is walked in parts, which must meet at the same nodes, and whose hooks are all there.
    """
    stack, seen = list(starts), set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        shortcut = shortcuts.get(node)
        if shortcut is not None and not shortcut.is_hooked and isinstance(node, KernelNode):
            del shortcuts[node]
            node.become(shortcut.node)
        stack += [e[0] for e in node.edges if isinstance(e, tuple)]


@part("activations", KernelNode)
def _kept_by_node(node: Any) -> Iterable[Any]:
    return node.saved() if node.primals is not None and node.primals.__class__ is not Packed else ()
