"""Sequences padded with rows, so that a Program is compiled for a few numbers of rows and not for each.

Behind the true rows of a feed stand copies of its first row. Whatever is computed row by row gives copies again, which
are as finite as true rows are; ops on sequences leave rows behind the last sequence out of every sequence; sums and
the like over rows are given what changes nothing in place of the copies; and what is fetched is cut. So true rows come
out as without padding, sums over them up to rounding. What each operation does with rows is known by name for ops on
sequences, and read off its function otherwise (row_flow.py). A Program with an operation of which neither says
anything raises MixedRows, and is to run as it is fed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import rng, state
from polyreme.core.op import OPS
from polyreme.core.symbol import DYNAMIC
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DTypeError, HostValueError, ShapeError
from polyreme.jit.capture import Capture, watching
from polyreme.program import values
from polyreme.program.block import Block, Variable
from polyreme.program.branches import Cond, OverRows, Recompute, While
from polyreme.program.frame import Frame, as_it_is
from polyreme.program.operation import Call, Operation
from polyreme.program.program import Program
from polyreme.program.row_flow import PLACE, SAME, Dims, MixedRows, PaddedDim, RowFlow
from polyreme.program.run import CompiledRun, drawing, results
from polyreme.program.scope import Scope
from polyreme.program.training import Backward
from polyreme.program.values import Ref, SizeOf

PADDING_SEEN = (MixedRows, HostValueError, ShapeError, DTypeError, ConfigError)
"""What making a padded run raises for a Program that is to run as it is fed."""

# sizes


def rounded_up(count: int, parts: int, least: int) -> int:
    """The next of a few sizes: multiples of that part of the power of two below count, and of `least`.

    >>> [rounded_up(n, 4, 16) for n in (3, 20, 64, 65, 1000)]
    [16, 32, 64, 80, 1024]
    """
    step = max((1 << max(count.bit_length() - 1, 0)) // parts, least)
    return -(-count // step) * step


def rows_for(total: int) -> int:
    """The number of rows that so many are padded to: a quarter more at most, from 64 on."""
    return rounded_up(total, 4, 16)


def steps_for(longest: int) -> int:
    """The number of steps that sequences of up to so many rows are given: half as many more at most, from 8 on."""
    return rounded_up(longest, 2, 4)


class RowPadding:
    """Which feeds of a Program are sequences, and how many rows they are padded to."""

    def __init__(self, program: Program) -> None:
        self.version = program.version
        self.offsets = {
            name: v.lod[-1].name
            for name, v in program.global_block().vars.items()
            if isinstance(v, Variable) and v.is_data and v.lod
        }
        # a size that is met elsewhere would tell nothing of where rows are
        self._taken = {int(d) for v in program.list_vars() for d in v._array.shape if d != DYNAMIC}
        for op in program.every_op():
            if isinstance(op, Call):
                self._taken.update(n for n in values.leaves((op.args, op.kwargs), int) if type(n) is int)

    @staticmethod
    def of(program: Program) -> RowPadding:
        """That of a Program, kept with it until it changes."""
        known = program.__dict__.get("_row_padding")
        if known is None or known.version != program.version:
            known = program.__dict__["_row_padding"] = RowPadding(program)
        return known

    def sizes(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        """Name -> rows with the padding, of each feed of sequences; {} if there is none, or one without rows."""
        fed = {name: arrays[name].shape[0] for name in self.offsets if name in arrays}
        if not all(fed.values()):
            return {}
        met = {d for name, a in arrays.items() for d in (a.shape[1:] if name in fed else a.shape)}
        met |= {d - 1 for d in met}  # offsets are one more than their sequences
        return {name: self._free(rows_for(rows), met) for name, rows in fed.items()}

    def sizes_of_parts(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """sizes() that the parts of all devices are padded to; {} where one part has none, or where what else is fed,
        or the number of sequences, differs from part to part.
        """
        if not all(map(self.sizes, parts)) or len({_beside(part, self.offsets) for part in parts}) > 1:
            return {}
        fed = [name for name in self.offsets if name in parts[0]]
        most = {name: max(parts, key=lambda part: part[name].shape[0])[name] for name in fed}
        return self.sizes({**parts[0], **most})

    def _free(self, size: int, met: set[int]) -> int:
        while size in self._taken or size in met:
            size += 1
        return size


def padded(arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The arrays with copies of their first row behind them, up to these numbers of rows."""
    return {name: _pad(a, sizes[name]) if name in sizes else a for name, a in arrays.items()}


def _beside(part: Mapping[str, Any], sequences: Mapping[str, str]) -> tuple[Any, ...]:
    """The shapes of what is fed, but for the number of rows of sequences."""
    return tuple((n, a.shape[1:] if n in sequences else a.shape) for n, a in part.items())


def _pad(array: Any, size: int) -> np.ndarray:
    rows = np.asarray(array)
    return np.concatenate([rows, np.broadcast_to(rows[:1], (size - len(rows), *rows.shape[1:]))])


# a run


class _CountedRows(PaddedDim):
    """Rows of which the first `total`, an integer array, are true as the Program runs. feed: the name of what is fed
    with them; those of another feed are the same if `have_as_many` says so of the names, which notes that it matters.
    """

    def __init__(
        self, size: int, total: Any, feed: str = "", have_as_many: Callable[[str, str], bool] | None = None
    ) -> None:
        super().__init__(size)
        self.total, self._feed, self._have_as_many = total, feed, have_as_many

    def is_same(self, other: PaddedDim) -> bool:
        if self is other or self._have_as_many is None:
            return self is other
        return isinstance(other, _CountedRows) and bool(other._feed) and self._have_as_many(self._feed, other._feed)

    def inside(self, dim: int, ndim: int) -> Tensor:
        """True for true rows, to be broadcast against an array that has them at this dim."""
        is_true = jnp.arange(self.size, dtype=self.total.dtype) < self.total
        return Tensor(is_true.reshape([-1 if i == dim else 1 for i in range(ndim)]))


class PaddedReplay:
    """Runs a Program on feeds of sequences padded to these sizes, and cuts what is fetched.

    parts: the feeds that it is made for, those of each device. Which of them have to have as many rows is noted when
    it runs: fits says whether others do.
    """

    def __init__(self, program: Program, parts: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self._offsets = RowPadding.of(program).offsets
        self._totals = [{name: part[name].shape[0] for name in sizes} for part in parts]
        self._pairs: set[tuple[str, str]] = set()
        self.cuts: list[dict[int, int]] = []

    def have_as_many(self, one: str, other: str) -> bool:
        """Whether two feeds have as many rows, on each device; others that fit have as well."""
        self._pairs.add((one, other))
        return self.sizes[one] == self.sizes[other] and all(total[one] == total[other] for total in self._totals)

    def fits(self, parts: Sequence[Mapping[str, Any]]) -> bool:
        """Whether feeds whose rows stand beside each other have as many."""
        return all(part[one].shape[0] == part[other].shape[0] for part in parts for one, other in self._pairs)

    def __call__(
        self,
        program: Program,
        scope: Scope,
        feeds: Mapping[str, Tensor],
        names: Sequence[str],
        reduced: Callable[[str, Tensor], Tensor] = as_it_is,
    ) -> list[Tensor]:
        """The values of the names, and behind them how many true rows there are of what is to be cut."""
        frame = PaddedFrame(program.global_block(), scope, reduced=reduced)
        for name, size in self.sizes.items():
            total = state.read(feeds[self._offsets[name]])[-1]
            frame.rows[name] = (
                _CountedRows(size, total, name, self.have_as_many),
                *[None] * (len(feeds[name].shape) - 1),
            )
        outs = results(program, scope, feeds, names, frame=frame)
        totals: list[Tensor] = []
        self.cuts = []
        for name in names:
            rows = {i: d for i, d in enumerate(frame.dims(name)) if isinstance(d, _CountedRows)}
            self.cuts.append({i: len(totals) + at for at, i in enumerate(rows)})
            totals += [Tensor(d.total) for d in rows.values()]
        return [*outs, *totals]

    def cut(self, out: Any, which: int, totals: Sequence[int]) -> Any:
        """The value of a name without padding, of what a run gave."""
        cuts = self.cuts[which]
        if not cuts:
            return out
        # on the host: a slice of every size would be compiled
        array = np.asarray(out)
        return array[tuple(slice(totals[cuts[i]]) if i in cuts else slice(None) for i in range(array.ndim))]


class PaddedRun:
    """A Program compiled for feeds of sequences with so many rows, padding included, in a scope; called with feeds
    as they are.

    Raises MixedRows for a Program in which padding would be seen, HostValueError for one that cannot be compiled.
    """

    def __init__(
        self, program: Program, scope: Scope, arrays: Mapping[str, Any], sizes: Mapping[str, int], names: Sequence[str]
    ) -> None:
        self._replay = PaddedReplay(program, [arrays], sizes)

        def replayed(*args: Any) -> list[Tensor]:
            with drawing(program, scope):
                return self._replay(*args)

        self._run = CompiledRun(program, scope, padded(arrays, sizes), names, replayed)

    def serves(self, arrays: Mapping[str, Any]) -> bool:
        """Whether the scope still looks as it did."""
        return self._run.serves(arrays)

    def fits(self, arrays: Mapping[str, Any]) -> bool:
        """Whether feeds whose rows stand beside each other have as many."""
        return self._replay.fits([arrays])

    def __call__(self, arrays: Mapping[str, Any]) -> list[Any]:
        values = self._run(padded(arrays, self._replay.sizes))
        count = len(self._replay.cuts)
        totals = [int(total) for total in values[count:]]
        return [self._replay.cut(out, i, totals) for i, out in enumerate(values[:count])]


class PaddedFrame(Frame):
    """A frame in which dims of values are padded rows. rows: by name of a value, the rows at each of its dims."""

    def __init__(self, block: Block, scope: Scope, outer: Frame | None = None, reduced: Any = None) -> None:
        super().__init__(block, scope, outer, *([] if reduced is None else [reduced]))
        self.rows: dict[str, Dims] = {}
        self._takes: list[Dims] = []
        self._gives: dict[int, list[Dims]] = {}

    def dims(self, name: str) -> Dims:
        """The rows at each dim of a value, () if it has none."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.values:
                return frame.rows.get(name, ()) if isinstance(frame, PaddedFrame) else ()
            frame = frame.outer
        return self.rows.get(name, ())

    def perform(self, operation: Operation) -> None:
        """Run one operation. Raises MixedRows if padding would be seen in its results."""
        if isinstance(operation, Call):
            self._call(operation)
        elif isinstance(operation, (While, Cond, Recompute)):
            self._run_blocks(operation)
        elif isinstance(operation, OverRows):
            self._walk(operation)
        elif isinstance(operation, Backward):
            self._differentiate(operation)
        elif any(self.dims(name) for name in operation.reads()):
            raise MixedRows(f"{operation.kind} reads rows of sequences")
        else:
            operation.run(self)

    # blocks

    def inside(self, block: Block, given: Sequence[Any]) -> list[Any]:
        """Results of a block within this one, run on these values."""
        frame = PaddedFrame(block, self.scope, self, self.reduced)
        frame.values.update(zip(block.takes, given, strict=True))
        frame.rows.update(zip(block.takes, self._takes, strict=False))
        frame.run()
        self._gives[block.idx] = [frame.dims(v.name) if isinstance(v, Ref) else () for v in block.gives]
        return [values.replace(r, Ref, lambda ref: frame.get(ref.name)) for r in block.gives]

    def _run_blocks(self, op: While | Cond | Recompute) -> None:
        start: list[Any] = op.init if isinstance(op, While) else []
        if isinstance(op, Recompute):
            start = [Ref(name) for name in op.inputs]
        self._takes = [self.dims(v.name) if isinstance(v, Ref) else () for v in start]
        self._gives = {}
        op.run(self)
        if isinstance(op, While):
            sides = [self._takes, self._gives.get(op.body.idx, self._takes)]
            if any(self._gives.get(op.test.idx, [])):
                raise MixedRows("the test of a loop has rows of sequences")
        else:
            sides = list(self._gives.values())
        for dims in zip(*sides, strict=True):
            if not all(_are_same(dims[0], d) for d in dims):
                raise MixedRows(
                    f"{op.kind}: a value has rows of sequences at one step or branch and others at the next"
                )
        self.rows.update((name, dims) for name, dims in zip(op.outputs, sides[-1], strict=True) if dims)

    def _walk(self, op: OverRows) -> None:
        """Run a step over the first dim, which is no rows of sequences, of what may have them at others."""
        dims = [self.dims(name) for name in op.x]
        if any(d and d[0] is not None for d in dims):
            raise MixedRows("a recurrence goes along rows of sequences")
        start = [self.dims(v.name) if isinstance(v, Ref) else () for v in op.start]
        self._takes, self._gives = [*(d[1:] for d in dims), *start], {}
        op.run(self)
        gives = self._gives[op.step.idx]
        if not all(map(_are_same, start, gives[op.count :])):
            raise MixedRows("a recurrence: a state has rows of sequences at one step and others at the next")
        outs = [(None, *d) if any(d) else () for d in gives[: op.count]]
        self.rows.update((n, d) for n, d in zip(op.outputs, [*outs, *gives[op.count :]], strict=True) if d)

    # gradients

    def _differentiate(self, op: Backward) -> None:
        starts: list[str | None] = list(op.starts) or [None] * len(op.targets)
        for i, name in enumerate(op.targets):
            if not self.dims(name):
                continue
            target, start = self.get(name), starts[i]
            first = Tensor(jnp.ones_like(state.read(target))) if start is None else self.get(start)
            starts[i] = f"{name}@ROWS"
            self.values[f"{name}@ROWS"] = _filled(first, self.dims(name), 0)
        replace(op, starts=starts).run(self)
        for name, x in zip(op.outputs, op.inputs, strict=True):
            if self.dims(x):
                self.values[name] = _filled(self.get(name), self.dims(x))
                self.rows[name] = self.dims(x)

    # calls

    def _call(self, op: Call) -> None:
        sizes = [s for s in values.leaves((op.args, op.kwargs), SizeOf) if self._is_rows(s)]
        if not sizes and not any(self.dims(name) for name in _inputs(op)):
            op.run(self)
            return
        if op.changes:
            raise MixedRows(f"{op.name} changes {op.changes} by rows of sequences")
        if op.name in _SEQUENCE_OPS:
            self._sequence_call(op)
        elif op.name in _CREATIONS:
            self._create(op)
        elif sizes:
            raise MixedRows(f"{op.name} is given the number of rows")
        elif op.name in _FILLS and (axes := self._axes(op)):
            self._reduce(op, axes)
        else:
            self._by_row(op)

    def _is_rows(self, size: SizeOf) -> bool:
        dims = self.dims(size.name)
        return bool(dims) and dims[size.dim] is not None

    def _note(self, op: Call, tensors: Sequence[Tensor], dims: Sequence[Dims], are_copies: bool) -> None:
        for name, tensor, each in zip(op.outputs, tensors, dims, strict=True):
            rows = tuple(d if isinstance(d, PaddedDim) else None for d in each)
            if not any(rows):
                self.define(name, tensor)
                continue
            self.define(name, tensor if are_copies else _filled(tensor, rows))
            self.rows[name] = rows

    def _by_row(self, op: Call) -> None:
        """A call whose function says what it does with rows."""
        names = list(dict.fromkeys(_inputs(op)))
        tensors = [self.get(name) for name in names]
        inputs = dict(zip(names, tensors, strict=True))
        every_dim = [self.dims(n) or tuple(SAME if s == 1 else None for s in t.shape) for n, t in inputs.items()]
        flow = RowFlow(self._traced(op, inputs), every_dim)
        fed = {d.size: d for name in names for d in self.dims(name) if isinstance(d, PaddedDim)}
        outs = op.results(self.get)
        is_copy, every = flow.is_copy, []
        for name, out, dims in zip(op.outputs, outs, flow.outputs, strict=True):
            var = self.block.vars.get(name)
            known = list(dims)
            for i, (dim, size) in enumerate(zip(dims, out.shape, strict=True)):
                is_open = var is None or var.shape[i] == DYNAMIC
                if isinstance(dim, PaddedDim) or size not in fed or not is_open:
                    continue
                if dim is None:
                    raise MixedRows(f"{op.name}: a size may be the number of rows")
                known[i], is_copy = fed[size], is_copy and dim is not PLACE
            every.append(tuple(known))
        self._note(op, outs, every, is_copy)

    def _traced(self, op: Call, inputs: Mapping[str, Tensor]) -> Any:
        """The jaxpr of a call."""
        names = list(inputs)

        def stage(*arrays: Any) -> list[Any]:
            with watching(Capture()), rng.default_generator.drawing_from(rng.Generator().manual_seed(0)):
                given = {n: Tensor(a) for n, a in zip(names, arrays, strict=True)}
                outs = op.results(lambda name: given[name] if name in given else self.get(name))
                return [state.read(out) for out in outs]

        structs = [jax.ShapeDtypeStruct(tuple(t._array.shape), t._array.dtype) for t in inputs.values()]
        with tape.GradEnabled(False):
            return jax.make_jaxpr(stage)(*structs)

    def _create(self, op: Call) -> None:
        """A call that makes an array of a size, each row like the others."""
        shape, *rest = op.args
        if any(self.dims(name) for name in values.refs((rest, op.kwargs))) or not isinstance(shape, (list, tuple)):
            raise MixedRows(f"{op.name} is given rows of sequences")
        dims = tuple(self.dims(s.name)[s.dim] if isinstance(s, SizeOf) and self._is_rows(s) else None for s in shape)
        self._note(op, op.results(self.get), [dims], True)

    # sums and the like over rows

    def _axes(self, op: Call) -> list[int]:
        """The dims that a reduction takes away, if rows are among them; [] if none are."""
        arguments = op.by_parameter()
        x = None if arguments is None else arguments.get("x")
        dims = self.dims(x.name) if isinstance(x, Ref) else ()
        if arguments is None or not dims or values.refs([v for k, v in arguments.items() if k != "x"]):
            return []
        axis = arguments.get("axis")
        listed = range(len(dims)) if axis is None or axis == [] else axis if isinstance(axis, (list, tuple)) else [axis]
        axes = [int(a) % len(dims) for a in listed]
        return axes if any(dims[a] is not None for a in axes) else []

    def _reduce(self, op: Call, axes: list[int]) -> None:
        arguments: Any = op.by_parameter()
        name, keepdim = arguments["x"].name, bool(arguments.get("keepdim"))
        x, dims = self.get(name), self.dims(name)
        if op.name == "mean":
            outs = [self._mean(x, dims, axes, keepdim)]
        else:
            masked = _filled(x, dims, _FILLS[op.name](x.dtype), axes)
            outs = op.results(lambda read: masked if read == name else self.get(read))
        left = tuple(None if i in axes else d for i, d in enumerate(dims) if keepdim or i not in axes)
        self._note(op, outs, [left], True)

    def _mean(self, x: Tensor, dims: Dims, axes: list[int], keepdim: bool) -> Tensor:
        if not dtypes.is_inexact(x.dtype):
            raise MixedRows("mean of integers")
        wide = x.dtype if x.dtype.itemsize >= 4 else np.dtype("float32")
        total = OPS["sum"](OPS["cast"](_filled(x, dims, 0, axes), wide), axis=axes, keepdim=keepdim)
        counts = [d.total if isinstance(d := dims[a], _CountedRows) else x.shape[a] for a in axes]
        count = Tensor(jnp.asarray(math.prod(counts[1:], start=jnp.asarray(counts[0])), wide))
        return OPS["cast"](OPS["divide"](total, count), x.dtype)

    # ops on sequences

    def _sequence_call(self, op: Call) -> None:
        arguments, (row_names, size_names) = op.by_parameter(), _SEQUENCE_OPS[op.name]
        if arguments is None:
            raise MixedRows(f"{op.name} is called in a form of its own")
        rows: list[Any] = []
        for name, value in arguments.items():
            for ref in values.leaves(value, Ref):
                dims = self.dims(ref.name)
                is_ragged = bool(dims) and isinstance(dims[0], _CountedRows) and not any(dims[1:])
                if is_ragged is not (name in row_names):
                    raise MixedRows(f"{op.name}: {name} has {'padded rows' if dims else 'no padded rows'}")
                rows += dims[:1] if is_ragged else ()
            for size in filter(self._is_rows, values.leaves(value, SizeOf)):
                if name not in size_names:
                    raise MixedRows(f"{op.name}: {name} is the number of rows")
                rows += () if row_names else (self.dims(size.name)[size.dim],)
        if op.name not in _APART and not all(rows[0].is_same(r) for r in rows):
            raise MixedRows(f"{op.name}: its rows are not as many in each input")
        outs = op.results(self.get)
        by_size = {r.size: r for r in rows}
        if op.name in _RELAID and outs[0].shape[0] not in by_size:
            size = outs[0].shape[0]
            by_size[size] = _CountedRows(size, state.read(outs[1]).sum())
        firsts = [by_size.get(out.shape[0]) if out.shape else None for out in outs]
        self._note(
            op, outs, [(r, *[None] * (len(o.shape) - 1)) if r else () for r, o in zip(firsts, outs, strict=True)], False
        )


_SEQUENCE_TABLE = """
crf_decoding: x label / maxlen
linear_chain_crf: x label / maxlen
row_conv: x
sequence_concat: xs
sequence_conv: x
sequence_ctc_greedy_decoder: x
sequence_edit_distance: input label / maxlen label_maxlen
sequence_enumerate: x
sequence_expand_as: / rows
sequence_gru: x / maxlen
sequence_lstm: x / maxlen
sequence_pad: x
sequence_pool: x
sequence_reshape: x
sequence_reverse: x
sequence_scatter: index updates
sequence_softmax: x
sequence_unpad: / rows
"""
_SEQUENCE_OPS = {
    name: tuple(part.split() for part in f"{rest}/".split("/")[:2])
    for name, rest in (line.split(":") for line in _SEQUENCE_TABLE.split("\n") if line)
}
"""Ops on sequences, in whose results rows behind the last sequence are zero or absent -> (parameters that are rows,
those that may be their number, where more changes nothing but rows behind the last sequence)."""
_APART = {"sequence_concat", "sequence_edit_distance"}
"""Those whose inputs may have rows of their own each."""
_RELAID = {"sequence_concat", "sequence_reshape"}
"""Those that give other rows, and their lengths."""
_CREATIONS = {"full", "zeros", "ones"}
"""Calls whose first argument is the shape of what they make, all rows of which are alike."""


def _lowest(dtype: np.dtype) -> Any:
    return -np.inf if dtypes.is_inexact(dtype) else False if dtype == np.bool_ else np.iinfo(dtype).min


def _highest(dtype: np.dtype) -> Any:
    return np.inf if dtypes.is_inexact(dtype) else True if dtype == np.bool_ else np.iinfo(dtype).max


_FILLS: dict[str, Callable[[np.dtype], Any]] = {
    "all": lambda _: True,
    "amax": _lowest,
    "amin": _highest,
    "any": lambda _: False,
    "max": _lowest,
    "mean": lambda _: 0,
    "min": _highest,
    "prod": lambda _: 1,
    "sum": lambda _: 0,
}
"""What changes nothing in each reduction."""


def _inputs(op: Call) -> list[str]:
    """Names of the values that a call is given, apart from their sizes."""
    return [ref.name for ref in values.leaves((op.args, op.kwargs), Ref)]


def _are_same(one: Dims, other: Dims) -> bool:
    pairs = list(zip(one, other, strict=False))
    return len(one) == len(other) and all(
        a.is_same(b) if isinstance(a, PaddedDim) and isinstance(b, PaddedDim) else a is b for a, b in pairs
    )


def _filled(tensor: Tensor, dims: Dims, fill: Any = None, among: Sequence[int] | None = None) -> Tensor:
    """tensor with fill, its first row unless given, in place of rows that are padding, at all dims or those among
    these; no gradient goes through what was there."""
    for i, rows in enumerate(dims):
        if isinstance(rows, _CountedRows) and (among is None or i in among):
            first = jax.lax.slice_in_dim(state.read(tensor), 0, 1, axis=i) if fill is None else fill
            tensor = OPS["where"](rows.inside(i, len(dims)), tensor, Tensor(jnp.asarray(first, tensor.dtype)))
    return tensor
