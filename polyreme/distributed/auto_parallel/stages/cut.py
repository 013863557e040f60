"""Cuts a recorded forward into chunks: the operations, inputs and outputs of each.

A value that a later chunk needs is handed on through the chunks between. What depends on constants alone (a
causal mask, a rotary table) is computed where it is needed and never sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from polyreme.distributed.auto_parallel.stages.record import Recorded, RecordedLayerCall
from polyreme.errors import ConfigError, did_you_mean
from polyreme.mesh import default_schedule
from polyreme.nn.parameter import Parameter
from polyreme.program.operation import Call, Operation, function_of
from polyreme.program.values import Ref


class Cut(Protocol):
    """A rule that says the chunk of every operation."""

    def chunks_of(self, recorded: Recorded) -> list[int]:
        """The chunk of each operation, in order."""
        ...


@dataclass(frozen=True)
class Slice:
    """One chunk: indexes of its operations, in order; names of the values it takes from the chunk before, and of those
    that the next takes from it, or the model gives; the Tensors it reads; the Layers that it runs a part of."""

    ops: tuple[int, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    captured: tuple[Any, ...]
    layers: tuple[Any, ...]


def slices(recorded: Recorded, chunk_of: Sequence[int], count: int) -> list[Slice]:
    """The Slice of each chunk, given the chunk of every operation.

    Raises ConfigError if a chunk needs what a later one makes, or a buffer is changed in one and used in another.
    """
    _check_order(recorded, chunk_of)
    _check_written(recorded, chunk_of)
    free = free_ops(recorded)
    position = {name: at for at, name in enumerate([*recorded.inputs, *_define(recorded)])}
    wanted = {leaf.name for leaf in recorded.outputs[1] if isinstance(leaf, Ref)}
    gives = sorted(wanted & position.keys(), key=position.__getitem__)
    result: list[Slice] = []
    for chunk in reversed(range(count)):
        needed, run = set(gives), []
        for index in reversed(range(len(recorded.ops))):
            op = recorded.ops[index]
            ours = index not in free and chunk_of[index] == chunk
            if ours or (index in free and not needed.isdisjoint(op.outputs)):
                run.append(index)
                needed = (needed - set(op.outputs)) | {n for n in op.reads() if n in position}
        takes = tuple(sorted(needed, key=position.__getitem__))
        result.append(Slice(tuple(reversed(run)), takes, tuple(gives), *_tensors_and_layers(recorded, run)))
        gives = list(takes)
    return result[::-1]


def _define(recorded: Recorded) -> list[str]:
    return [name for op in recorded.ops for name in op.outputs]


def _tensors_and_layers(recorded: Recorded, run: Sequence[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    names = dict.fromkeys(n for i in sorted(run) for n in (*recorded.ops[i].reads(), *recorded.ops[i].writes()))
    tensors = tuple(recorded.captured[n] for n in names if n in recorded.captured)
    ran, end = set(run), len(recorded.ops) - 1
    called: dict[int, Any] = {}
    for call in recorded.calls:
        # one that calls nothing may call something in another mode; one in a recomputed part is inside its operation
        if not ran.isdisjoint((min(call.first, end), *range(call.first, call.last))):
            called[id(call.layer)] = call.layer
    return tensors, tuple(called.values())


def free_ops(recorded: Recorded) -> frozenset[int]:
    """Indexes of operations that follow from constants alone, without parameters, random numbers or effects."""
    written = {name for op in recorded.ops for name in op.writes()}
    bound = {n for n, t in recorded.captured.items() if n in written or isinstance(t, Parameter) or not t.stop_gradient}
    bound.update(recorded.inputs)
    indexes = set()
    for index, op in enumerate(recorded.ops):
        if index not in recorded.random and _only_computes(op) and bound.isdisjoint(op.reads()):
            indexes.add(index)
        else:
            bound.update(op.outputs)
    return frozenset(indexes)


def _only_computes(op: Operation) -> bool:
    return isinstance(op, Call) and not op.writes() and not getattr(function_of(op.name), "acts", False)


def _check_order(recorded: Recorded, chunk_of: Sequence[int]) -> None:
    maker: dict[str, int] = {}
    for op, chunk in zip(recorded.ops, chunk_of, strict=True):
        late = next((n for n in op.reads() if maker.get(n, 0) > chunk), None)
        if late is not None:
            raise ConfigError(
                f"operation {op.kind!r} on chunk {chunk} needs {late!r} of chunk {maker[late]}: data flows through "
                "the chunks in one direction; place the layers in the order they are called, or give each stage several"
                f" chunks ({default_schedule(2)})"
            )
        maker.update(dict.fromkeys(op.outputs, chunk))


def _check_written(recorded: Recorded, chunk_of: Sequence[int]) -> None:
    """Refuse a buffer that chunks would have to tell each other of."""
    written = {name for op in recorded.ops for name in op.writes()}
    where: dict[str, int] = {}
    for op, chunk in zip(recorded.ops, chunk_of, strict=True):
        for name in written.intersection((*op.reads(), *op.writes())):
            if where.setdefault(name, chunk) != chunk:
                raise ConfigError(
                    f"the forward changes a buffer of shape {list(recorded.captured[name].shape)} that chunks "
                    f"{where[name]} and {chunk} use; a Layer with running statistics that is called twice belongs on "
                    "one stage: cut elsewhere"
                )


# by names of Layers


@dataclass(frozen=True)
class AtEnds:
    """Cuts after calls of Layers: (dotted name, number of the call, from 0), in the order they end."""

    ends: tuple[tuple[str, int], ...]

    def chunks_of(self, recorded: Recorded) -> list[int]:
        """The chunk of every operation. Raises ConfigError for a call that does not exist, or not in this order."""
        bounds = [self._position(recorded, *end) for end in self.ends]
        if any(a >= b for a, b in itertools.pairwise([0, *bounds, len(recorded.ops)])):
            shown = ", ".join(f"{name!r} after {n} operations" for (name, _), n in zip(self.ends, bounds, strict=True))
            raise ConfigError(
                f"the cuts leave a chunk nothing to run: {shown}, of {len(recorded.ops)}; give layers that end one "
                "after another, and none at the end of the model"
            )
        return [sum(index >= bound for bound in bounds) for index in range(len(recorded.ops))]

    @staticmethod
    def _position(recorded: Recorded, name: str, number: int) -> int:
        calls = [c for c in recorded.calls if c.name == name]
        if not calls:
            names = [c.name for c in recorded.calls if c.name]
            raise ConfigError(
                f"the model cannot be cut at the end of {name!r}, which its forward does not call"
                f"{did_you_mean(name, names)}"
            )
        call = next((c for c in calls if c.number == number), calls[-1])
        if not call.is_whole:
            raise ConfigError(
                f"the model cannot be cut at the end of {name!r}, which lies in a branch, a loop or a recomputed "
                "part; cut at the end of a layer around that"
            )
        return call.last


# by where parameters are


class ByStage:
    """Operations go where their parameters are; those without follow their inputs.

    stage_of: by id, the stage of a parameter or buffer. stages: of each chunk, in the order that data flows. moves: the
    stage of an operation that says itself where its result goes, as reshard does; None for all others.
    """

    def __init__(
        self, stage_of: Mapping[int, int], stages: Sequence[int], moves: Callable[[Operation], int | None]
    ) -> None:
        self._stage_of, self._stages, self._moves = stage_of, tuple(stages), moves

    def chunks_of(self, recorded: Recorded) -> list[int]:
        """The chunk of every operation. Raises ConfigError if data would have to go back to an earlier stage."""
        free = free_ops(recorded)
        chunk_of: dict[str, int] = {}
        home: dict[str, int] = {}  # chunk where a parameter was first read
        chunks: list[int] = []
        for index, op in enumerate(recorded.ops):
            reads = op.reads()
            after = max((chunk_of.get(n, 0) for n in reads), default=0)
            chunk = self._chunk(recorded, op, after, home)
            chunks.append(chunk)
            if index not in free:
                chunk_of.update(dict.fromkeys(op.outputs, chunk))
                for name in reads:
                    if name in recorded.captured:
                        home.setdefault(name, chunk)
        return chunks

    def _chunk(self, recorded: Recorded, op: Operation, after: int, home: dict[str, int]) -> int:
        moved = self._moves(op)
        if moved is not None:
            return self._next(moved, after, op)
        result = after
        for name in op.reads():
            stage = self._stage_of.get(id(recorded.captured.get(name)))
            # a weight that an earlier chunk has read is shared: its value comes to where it is used again
            if stage is not None and not (name in home and home[name] < after):
                result = max(result, self._next(stage, after, op))
        return result

    def _next(self, stage: int, after: int, op: Operation) -> int:
        """The first chunk on a stage, not before `after`."""
        for chunk in range(after, len(self._stages)):
            if self._stages[chunk] == stage:
                return chunk
        raise ConfigError(
            f"operation {op.kind!r} belongs on stage {stage} but takes what chunk {after}, on stage "
            f"{self._stages[after]}, gives: data would go back; place the layers in the order they are called, or "
            f"give each stage several chunks (schedule {default_schedule(2)})"
        )


def whole_calls(recorded: Recorded) -> list[RecordedLayerCall]:
    """Calls that a cut can follow, one for each place they end at: the outermost."""
    ends: dict[int, RecordedLayerCall] = {
        c.last: c for c in recorded.calls if c.is_whole and 0 < c.last < len(recorded.ops)
    }
    return [ends[at] for at in sorted(ends)]


def live_bytes(recorded: Recorded, positions: Sequence[int]) -> list[int]:
    """Bytes that a cut at each of these positions would send on: before the operation of that index."""
    free = free_ops(recorded)
    last: dict[str, int] = {leaf.name: len(recorded.ops) for leaf in recorded.outputs[1] if isinstance(leaf, Ref)}
    first = dict.fromkeys(recorded.inputs, -1)
    for index, op in enumerate(recorded.ops):
        if index not in free:
            first.update(dict.fromkeys(op.outputs, index))
        for name in op.reads():
            last[name] = max(index, last.get(name, -1))
    sent = np.zeros(len(recorded.ops) + 2, np.int64)
    for name, made in first.items():
        array = recorded.value(name)
        size = int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
        if last.get(name, -1) > made:
            sent[made + 1] += size
            sent[last[name] + 1] -= size
    totals = np.cumsum(sent)
    return [int(totals[at]) for at in positions]
