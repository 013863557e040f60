"""DataParallel: one model on many devices or processes, each with a part of the batch.

Inside a process the batch is split over its devices by a dp plan, and gradients are those of the whole
batch. Between processes, each with a batch of its own, gradients are averaged after backward(), so with equal batches
they too are those of the whole. Under a plan that spans the processes, the processes' batches become one global batch.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import layout as layouts
from polyreme.core import state
from polyreme.core.layout import Layout
from polyreme.core.state import Tracer
from polyreme.distributed.communication import process_run, replicas
from polyreme.distributed.communication.group import Group, ReduceOp, default_group
from polyreme.distributed.placement import apply_plan
from polyreme.eager import walk
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, GradError, PlacementError, ShapeError
from polyreme.jit.structure import flatten, rebuild
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter
from polyreme.ops.layout import constrain

_MB = 1 << 20


class DataParallel(Layer):
    """layers, trained on every device and process at once.

    comm_buffer_size, last_comm_buffer_size: MB of gradients reduced at a time, and in the last reduction.
    find_unused_parameters: needed if a backward() reaches only some of the parameters; the others then count as zero
    where another process reached them. group: the processes that share the model, all by default.

    Within a process the batch is dim 0 of every Tensor given to forward; a batch that the devices do not divide is
    worked on whole by each. Parameters and buffers start as the group's first rank has them. Raises ConfigError for a
    strategy (give fleet.init one), or a group that the plan in force does not go with.
    """

    group: Group

    def __init__(
        self,
        layers: Layer,
        strategy: Any = None,
        comm_buffer_size: int = 25,
        last_comm_buffer_size: int = 1,
        find_unused_parameters: bool = False,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layers, Layer):
            raise TypeError(f"DataParallel wraps a Layer, got {type(layers).__name__}")
        if strategy is not None:
            raise ConfigError("DataParallel(strategy=...): takes none; hand a DistributedStrategy to fleet.init")
        for name, size in (("comm_buffer_size", comm_buffer_size), ("last_comm_buffer_size", last_comm_buffer_size)):
            if isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0:
                raise ConfigError(f"DataParallel({name}={size!r}): needs a number of MB above 0")
        self._layers = layers
        self.find_unused_parameters = find_unused_parameters
        self.group = group if group is not None else default_group("DataParallel")
        self._reducer: GradientReducer | None = None
        self._layout = self._placed()
        if self._layout is not None and replicas.spans_processes(self._layout.mesh):
            return
        if not self.group.axes and self.group.nranks > 1:
            replicas.agree([*layers.parameters(), *layers.buffers()], self.group)
            sizes = (int(comm_buffer_size * _MB), int(last_comm_buffer_size * _MB))
            self._reducer = GradientReducer(layers, self.group, sizes, find_unused_parameters)
            walk.after_backward.add(self._reducer)

    def _placed(self) -> Layout | None:
        """The layout the model lies in: of the plan in force, else of a dp plan over this process's devices if it has
        several. Moves the model there if it lies nowhere yet."""
        layout = layouts.active.layout
        if layout is None and self.group.axes:
            raise ConfigError(
                f"DataParallel(group={self.group.name}): a group of mesh axes needs a plan in force; call "
                "fleet.init, or give a group of processes"
            )
        if layout is None and jax.local_device_count() == 1:
            return None
        if layout is not None and all(p.layouts for p in self._layers.parameters()):
            return layout
        plan = Plan.from_degrees(dp=jax.local_device_count()) if layout is None else layout.plan
        devices = jax.local_devices() if layout is None else list(layout.mesh.devices.flat)
        return apply_plan(plan, self._layers, devices)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped model's forward, with the Tensors given split over devices by their dim 0."""
        layout = self._layout
        if layout is None:
            return self._layers(*inputs, **kwargs)
        inputs, kwargs = split_batch((inputs, kwargs), layout)
        return self._layers(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block gradients add up in each process by itself; the first backward() after it averages them."""
        if self._reducer is None:
            yield
            return
        outer, self._reducer.paused = self._reducer.paused, True
        try:
            yield
        finally:
            self._reducer.paused = outer

    def scale_loss(self, loss: Tensor) -> Tensor:
        """loss itself: gradients are averaged, so it needs no scaling."""
        return loss

    def apply_collective_grads(self) -> None:
        """Does nothing: backward() has averaged the gradients already."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The wrapped model's state_dict, under its own names."""
        return self._layers.state_dict(*args, **kwargs)

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> tuple[list[str], list[str]]:
        """Load the wrapped model's state."""
        return self._layers.set_state_dict(state_dict, use_structured_name)

    set_dict = set_state_dict
    load_dict = set_state_dict


def split_batch(values: Any, layout: Layout) -> Any:
    """values, in any structure, with every Tensor of at least one dim in it spread as spread_batch says."""
    leaves: list[Any] = []
    spec = flatten(values, leaves)
    return rebuild(spec, iter([spread_batch(v, layout) if isinstance(v, Tensor) and v.ndim else v for v in leaves]))


def spread_batch(tensor: Tensor, layout: Layout) -> Tensor:
    """A batch laid out over a layout's devices by dim 0.

    With a mesh that spans processes, a Tensor that this process holds for itself is its share of the rows, and the
    result is the global batch. Raises PlacementError if such a Tensor wants a gradient, or if the processes' rows make
    no batch.
    """
    dims = ("batch", *[None] * (tensor.ndim - 1))
    array = state.read(tensor)
    local = not isinstance(array, Tracer) and array.is_fully_addressable
    if not local or not replicas.spans_processes(layout.mesh):
        return constrain(tensor, *dims) if layouts.active.layout is layout else _constrain(tensor, layout, dims)
    if not tensor.stop_gradient:
        raise PlacementError(
            f"an input of shape {list(tensor.shape)} wants a gradient but is one process's share of the batch; a "
            "gradient does not reach it through the global batch: detach() it, or make it a global Tensor first"
        )
    sharding = layout.sharding("act", dims, _global_shape(tensor.shape, layout))
    try:
        return Tensor(jax.make_array_from_process_local_data(sharding, np.asarray(array)))
    except ValueError as error:
        raise ShapeError(
            f"the processes' shares of shape {list(tensor.shape)} make no global batch: {error}"
        ) from error


def _constrain(tensor: Tensor, layout: Layout, dims: Sequence[str | None]) -> Tensor:
    with layouts.using(layout):
        return constrain(tensor, *dims)


def _global_shape(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The shape of the global batch whose share in this process has this shape: rows are in proportion to the pieces of
    dim 0 here."""
    whole = (layout.mesh.devices.size, *shape[1:])
    pieces = layout.sharding("act", ("batch", *[None] * (len(shape) - 1)), whole).devices_indices_map(whole)
    every = {index[0].indices(whole[0])[:2] for index in pieces.values()}
    mine = {i[0].indices(whole[0])[:2] for d, i in pieces.items() if d.process_index == jax.process_index()}
    return (shape[0] * len(every) // len(mine), *shape[1:])


class GradientReducer:
    """Averages a model's gradients over processes at the end of each backward() that reaches it."""

    def __init__(self, layers: Layer, group: Group, sizes: tuple[int, int], find_unused: bool) -> None:
        self.layers = weakref.ref(layers)
        self.group = group
        self.sizes = sizes
        self.find_unused = find_unused
        self.paused = False

    def backward_ended(self, leaves: Sequence[Any]) -> None:
        """Average the gradients if this backward reached the model.

        Raises GradError naming parameters that it did not reach, unless they are to be looked for; CaptureError inside
        a captured function.
        """
        layers = self.layers()
        reached = {id(leaf) for leaf in leaves}
        if self.paused or layers is None or not any(id(p) in reached for p in layers.parameters()):
            return
        if state.watch.active is not None:
            raise CaptureError(
                "DataParallel over processes: backward() inside a captured function cannot reach the other processes; "
                "capture the model's forward only (to_static(model)), or train under a plan that spans the processes"
            )
        wanting = {name: p for name, p in layers.named_parameters() if not p.stop_gradient}
        self._check_reached(wanting, reached)
        chosen = self._reached_anywhere(wanting) if self.find_unused else list(wanting.values())
        for bucket in _buckets(chosen, *self.sizes):
            self._average(bucket)

    def _check_reached(self, wanting: dict[str, Parameter], reached: set[int]) -> None:
        missing = [name for name, p in wanting.items() if id(p) not in reached]
        if missing and not self.find_unused:
            named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise GradError(
                f"DataParallel: backward() did not reach {len(missing)} of {len(wanting)} parameters ({named}); pass "
                "find_unused_parameters=True, or set their stop_gradient"
            )

    def _reached_anywhere(self, wanting: dict[str, Parameter]) -> list[Parameter]:
        mine = jnp.asarray([p._grad is not None for p in wanting.values()], jnp.int32)
        anywhere = np.asarray(process_run.run("all_reduce", [mine], self.group, op=ReduceOp.MAX)[0])
        chosen = [p for p, used in zip(wanting.values(), anywhere, strict=True) if used]
        for p in chosen:
            if p._grad is None:
                p._grad = Tensor(jnp.zeros_like(p._array))
        return chosen

    def _average(self, bucket: list[Parameter]) -> None:
        """One collective for all of a bucket: one flat array there, the pieces back."""
        gradients: list[Any] = [p._grad for p in bucket]
        arrays = [process_run.on_first_device(g._array) for g in gradients]
        (flat,) = process_run.run("all_reduce", [_join(arrays)], self.group, op=ReduceOp.AVG)
        for gradient, piece in zip(gradients, _unflatten(flat, tuple(a.shape for a in arrays)), strict=True):
            state.write(gradient, process_run.laid_out_as(piece, gradient._array))


def _buckets(parameters: Sequence[Parameter], size: int, last: int) -> Iterator[list[Parameter]]:
    """Parameters last to first, as gradients come, in runs of one dtype and at most size bytes; the last run has at
    most last bytes. A parameter larger than that is a run by itself.
    """
    runs: list[list[Parameter]] = []
    room = 0
    for p in parameters:
        if not runs or runs[-1][0].dtype != p.dtype or p.nbytes > room:
            room = size if runs else last
            runs.append([])
        runs[-1].append(p)
        room -= p.nbytes
    return (run[::-1] for run in reversed(runs))


@jax.jit
def _join(arrays: list[Any]) -> Any:
    return jnp.concatenate([a.reshape(-1) for a in arrays])


@functools.partial(jax.jit, static_argnums=1)
def _unflatten(flat: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    ends = np.cumsum([math.prod(s) for s in shapes])[:-1]
    return [piece.reshape(shape) for piece, shape in zip(jnp.split(flat, ends), shapes, strict=True)]
