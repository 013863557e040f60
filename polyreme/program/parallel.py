"""Data-parallel runs: one compiled program over several devices, each of which runs a Program on its part of the feeds.

The Program is replayed under jax.shard_map on a mesh of one axis. Persistable values have a copy on each
device. What differs from device to device: the feeds, and what follows from them; random numbers; batch statistics, of
which the first device's count, if they are not those of the whole batch. Parameters' gradients are reduced, so every
device makes the same update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core import rng, state
from polyreme.core.batch_parts import batch_parts
from polyreme.core.state import TensorState
from polyreme.eager.tensor import Tensor
from polyreme.errors import HostValueError, ProgramError
from polyreme.jit.program import CapturedProgram as Captured
from polyreme.program.operation import Initialize, Operation
from polyreme.program.padded_rows import PaddedReplay
from polyreme.program.parts import Feeds, joined_offsets, pieces
from polyreme.program.placing import AXIS, spread, state_of, updated
from polyreme.program.program import Program
from polyreme.program.run import drawing, results
from polyreme.program.scope import Scope
from polyreme.program.training import Backward, Optimize, StartOptimizer
from polyreme.program.uneven import Uneven

Reduce = Callable[[Any, str], Any]
MEAN: Reduce = jax.lax.pmean
SUM: Reduce = jax.lax.psum


@functools.lru_cache(maxsize=16)
def mesh_of(devices: tuple[Any, ...]) -> Mesh:
    """The mesh of these devices."""
    return Mesh(np.asarray(devices), (AXIS,))


class ParallelRun:
    """A Program compiled for feeds of certain shapes over devices, in a scope.

    reduce: what is done to a parameter's gradient over the devices. sync_batch_norm: whether batch norms use the
    statistics of the whole batch. padding: of sequences, to which feeds are padded. Raises ProgramError for what has no
    meaning on part of a batch.
    """

    def __init__(
        self,
        program: Program,
        scope: Scope,
        feeds: Feeds,
        names: Sequence[str],
        devices: tuple[Any, ...],
        reduce: Reduce,
        sync_batch_norm: bool,
        padding: PaddedReplay | None = None,
    ) -> None:
        _check(program)
        feeds.check(program)
        _check_statistics(program, feeds, sync_batch_norm)
        mesh = mesh_of(devices)
        self._scope = scope  # kept alive: its id is part of the key
        self._split = NamedSharding(mesh, PartitionSpec(AXIS))
        spread(state_of(program, scope), NamedSharding(mesh, PartitionSpec()))
        self._names, self._padding = names, padding
        self._offsets = {v._array.name for var in program.list_vars() for v in getattr(var, "lod", ())}
        self._arguments = [Tensor(self._placed(a)) for a in feeds.arrays.values()]
        dtypes = {n: a.dtype for n, a in feeds.arrays.items()}
        try:
            self._uneven = None if feeds.is_even else Uneven(program, scope, feeds.shapes, dtypes, names)
            step = _Step(program, scope, list(feeds.arrays), names, reduce, sync_batch_norm, self._uneven, padding)
            self._captured = _Replicated(step, mesh, self._arguments)
        except HostValueError as error:
            raise ProgramError(
                "with_data_parallel: the Program cannot be compiled, run it plain: a value is needed while it runs; "
                f"{error}"
            ) from error

    def _placed(self, array: Any) -> jax.Array:
        return jax.device_put(array, self._split)

    def serves(self, feeds: Any) -> bool:
        """Whether the scope still looks as it did."""
        return self._captured.serves(self._arguments)  # type: ignore[arg-type]

    def fits(self, feeds: Feeds) -> bool:
        """Whether feeds whose rows stand beside each other have as many."""
        return self._padding is None or self._padding.fits(feeds.parts)

    def __call__(self, feeds: Feeds) -> list[Any]:
        self._captured.settle()
        for tensor, array in zip(self._arguments, feeds.arrays.values(), strict=True):
            tensor._array = self._placed(array)
        outs = [out._array for out in self._captured.run(self._arguments)]  # type: ignore[arg-type]
        if self._padding is not None:
            return self._without_padding(self._padding, outs)
        return [self._together(n, out) for n, out in zip(self._names, outs, strict=True)]

    def _without_padding(self, padding: PaddedReplay, outs: list[Any]) -> list[Any]:
        """Fetches, of what the devices gave with the numbers of true rows of each behind them."""
        values, totals = outs[: len(self._names)], np.asarray(outs[len(self._names) :]).T
        result = []
        for i, (name, out) in enumerate(zip(self._names, values, strict=True)):
            each = np.split(np.asarray(out), self._split.mesh.size)
            if padding.cuts[i]:
                each = [padding.cut(piece, i, totals[device]) for device, piece in enumerate(each)]
            result.append(joined_offsets(each) if name in self._offsets else np.concatenate(each))
        return result

    def _together(self, name: str, out: Any) -> Any:
        """A fetch as it is returned, of what the devices gave one after the other."""
        shapes = None if self._uneven is None else self._uneven.fetch_shapes[name]
        if name not in self._offsets and (shapes is None or len(set(shapes)) == 1):
            return out
        count = self._split.mesh.size
        each = pieces(out, shapes or [(out.shape[0] // count, *out.shape[1:])] * count)
        return joined_offsets(each) if name in self._offsets else np.concatenate(each)


def _check(program: Program) -> None:
    """Refuse what has no meaning on part of a batch."""
    parameters = {n for op in program.every_op() if isinstance(op, Optimize) for n, _ in op.pairs}
    for op in program.global_block().ops:
        if isinstance(op, (Initialize, StartOptimizer)):
            raise ProgramError(
                "with_data_parallel on a startup Program: values are made once and copied to the devices; run it plain"
            )
        if isinstance(op, Backward) and op.again and not parameters.isdisjoint(op.inputs):
            raise ProgramError(
                f"with_data_parallel: the gradients of {sorted(parameters.intersection(op.inputs))} are differentiated "
                "in turn, which the reduction over devices does not support; run the Program plain"
            )


def _check_statistics(program: Program, feeds: Feeds, sync_batch_norm: bool) -> None:
    """Refuse statistics of a whole batch where devices do not come to them together."""
    kinds = ("sync_batch_norm", "batch_norm")[: 1 + sync_batch_norm]
    synced = [op for op in program.every_op() if op.kind in kinds and not _is_by_running(op)]
    inside = [op for op in synced if all(op is not other for other in program.global_block().ops)]
    if inside:
        raise ProgramError(
            f"with_data_parallel: a {inside[0].kind} of the whole batch stands in a branch or loop, which a device may "
            "not take; move it out, or use batch norms of each device's part"
        )
    if synced and not feeds.is_even:
        raise ProgramError(
            f"with_data_parallel: a {synced[0].kind} of the whole batch needs parts of one size, got "
            f"{[{n: list(s) for n, s in part} for part in feeds.shapes]}; feed as many samples for each device"
        )


def _is_by_running(op: Operation) -> bool:
    """Whether a batch norm uses its running statistics."""
    settings = op.all_attrs()
    given = settings.get("use_global_stats")
    return not settings.get("training", False) if given is None else bool(given)


class _Step:
    """What each device does. over_devices: under shard_map, where there are others; not while state is looked for.

    draws: whether it takes random numbers.
    """

    def __init__(
        self,
        program: Program,
        scope: Scope,
        wanted: list[str],
        names: Sequence[str],
        reduce: Reduce,
        sync_batch_norm: bool,
        uneven: Uneven | None,
        padding: PaddedReplay | None,
    ) -> None:
        self._padding = padding
        self.program, self.scope = program, scope
        self._sync_batch_norm = sync_batch_norm
        self._wanted, self._names, self._reduce, self._uneven = wanted, names, reduce, uneven
        self.over_devices = False
        self.draws = False

    def __call__(self, feeds: list[TensorState]) -> list[Tensor]:
        named: Any = dict(zip(self._wanted, feeds, strict=True))
        parts = batch_parts.along(AXIS if self.over_devices else None, self._sync_batch_norm)
        with drawing(self.program, self.scope), self._own_numbers(), parts:
            if self._padding is not None:
                tensors = self._padding(self.program, self.scope, named, self._names, self._reduced)
            elif self._uneven is None:
                tensors = results(self.program, self.scope, named, self._names, self._reduced)
            else:
                device = jax.lax.axis_index(AXIS) if self.over_devices else 0
                tensors = self._uneven.results(named, device, self._reduced)
        # concatenated over devices on dim 0, which a number does not have
        return [Tensor(jnp.atleast_1d(t._array)) for t in tensors]

    def _reduced(self, of: str, gradient: Tensor) -> Tensor:
        var = self.program.global_block().vars.get(of)
        if not self.over_devices or not (of in self.program.captured or (var is not None and var.persistable)):
            return gradient
        return Tensor(self._reduce(state.read(gradient), AXIS))

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Random numbers of the device's own; the stream advances by one key, the same on all."""
        if not (self.over_devices and self.draws):
            yield
            return
        key = jax.random.fold_in(rng.default_generator.next_key(), jax.lax.axis_index(AXIS))
        with rng.default_generator.starting_at(key):
            yield


class _Replicated(Captured):
    """A captured step that each device of a mesh does on its part of the arguments."""

    def __init__(self, step: _Step, mesh: Mesh, arguments: list) -> None:
        self._mesh = mesh
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._step = step
        self._alike: set[int] = set()
        super().__init__(step, step, arguments)

    def settle(self) -> None:
        """Have a copy of all state on each device."""
        spread(self._current(), self._everywhere)

    def _settle_placement(self) -> None:
        keys = {id(g.key_state()) for g in (rng.default_generator, *self._step.scope.generators.values())}
        self._step.draws = any(id(t) in keys for t in self._current())
        self._alike = keys | {id(t) for t in updated(self._step.program, self._step.scope)}
        self.settle()

    def _discover(self, arguments: list[TensorState]) -> Any:
        count = self._mesh.size
        return super()._discover(
            [
                TensorState(jax.ShapeDtypeStruct((a._array.shape[0] // count, *a._array.shape[1:]), a._array.dtype))
                for a in arguments
            ]
        )

    def _pure(self, written: Sequence, unwritten: Sequence, *arguments: Any) -> tuple[list, list, list]:
        whole, parts = PartitionSpec(), PartitionSpec(AXIS)
        self._step.over_devices = True
        try:
            return jax.shard_map(
                self._local,
                mesh=self._mesh,
                in_specs=(whole, whole, parts),
                out_specs=(parts, whole, whole),
                check_vma=False,
            )(written, unwritten, arguments)
        finally:
            self._step.over_devices = False

    def _local(self, written: Sequence, unwritten: Sequence, arguments: Sequence) -> tuple[list, list, list]:
        outs, new, extra = super()._pure(written, unwritten, *arguments)
        tensors = self._current()
        return outs, [a if id(t) in self._alike else _first(a) for t, a in zip(tensors, new, strict=False)], extra


def _first(array: Any) -> Any:
    """The first device's value, on all."""
    mine = jnp.where(jax.lax.axis_index(AXIS) == 0, array, jnp.zeros_like(array))
    return jax.lax.psum(mine.astype(jnp.int32), AXIS).astype(bool) if array.dtype == bool else jax.lax.psum(mine, AXIS)
