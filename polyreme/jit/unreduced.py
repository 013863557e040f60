"""Sums over rows that different devices have, left as one addend for each replica.

The gradient of a weight is a sum over the rows of a batch. Where the rows are split over replicas, XLA's partitioner
ends a program with that sum over devices, as it has no value that is "not yet summed" to hand to another program. Here
a traced function is evaluated such that results of it leave as addends, an array with one more dim in front, split
over the replicas, whose sum is the result: the contraction over the rows becomes one contraction for each replica's
rows, and what follows it, as long as it is linear, is done to each addend.

That is algebra, whatever the function: nothing is taken for granted of rows. A sum that is used in another way within
the program (a batch's mean, say) stays a sum over all devices, and so does a result made by an operation of which
nothing is known here. Where rows lie is followed from the layouts of the arguments; a wrong guess would cost
communication, never change a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]
Split = tuple[Axes, ...]
"""Of each dim of an array, the axes of the mesh that split it, outermost first."""

_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")

_UNARY = "neg convert_element_type copy copy_p real imag conj sharding_constraint"
_MOVES = "reshape transpose broadcast_in_dim squeeze reduce_sum slice rev"
_LINEAR = frozenset(f"{_UNARY} {_MOVES}".split())
"""Of their first operand."""

_JOINTLY_LINEAR = frozenset({"add", "add_any", "sub", "concatenate", "select_n"})
"""Of all operands together (of select_n: of its cases)."""

_BILINEAR = frozenset({"mul", "dot_general"})


class Replicas(NamedTuple):
    """The axes of a mesh whose devices have different rows, outermost first."""

    mesh: Mesh
    axes: Axes

    def ways(self, axes: Sequence[str]) -> int:
        """Number of devices along these axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def split_of(self, array: Any) -> Split:
        """The split of an array's dims over replicas, by its layout; no split if that is on another mesh."""
        sharding = getattr(array, "sharding", None)
        nowhere: Split = ((),) * array.ndim
        if not isinstance(sharding, NamedSharding) or not set(self.axes) <= set(sharding.mesh.axis_names):
            return nowhere
        return self.split_by(sharding.spec, nowhere)

    def split_by(self, spec: PartitionSpec, otherwise: Split) -> Split:
        """The split of dims over replicas by a PartitionSpec; a dim that it leaves open is split as in `otherwise`."""
        entries = [*spec, *[None] * (len(otherwise) - len(spec))]
        return tuple(
            other if entry is PartitionSpec.UNCONSTRAINED else self._outermost(entry)
            for entry, other in zip(entries, otherwise, strict=True)
        )

    def layout(self, axes: Axes, sharding: NamedSharding) -> NamedSharding:
        """The layout of addends whose sum is laid out so."""

        def without(entry: Any) -> Any:
            if entry is None or entry is PartitionSpec.UNCONSTRAINED:
                return entry
            names = tuple(n for n in ((entry,) if isinstance(entry, str) else entry) if n not in axes)
            return names or None

        return NamedSharding(sharding.mesh, PartitionSpec(axes, *map(without, sharding.spec)))

    def narrow(self, addends: jax.Array, axes: Axes, wanted: Axes) -> jax.Array:
        """[ways(axes), ...] -> [ways(kept), ...], summed over the other axes; without that dim if none is kept."""
        if axes == wanted:
            return addends
        sizes = [self.mesh.shape[axis] for axis in axes]
        apart = addends.reshape(*sizes, *addends.shape[1:])
        summed = apart.sum([i for i, axis in enumerate(axes) if axis not in wanted], dtype=addends.dtype)
        return summed.reshape(*([self.ways(wanted)] if wanted else []), *addends.shape[1:])

    def widen(self, value: jax.Array, axes: Axes, wanted: Axes) -> jax.Array:
        """The opposite of narrow: the addends of replicas that have none are zero."""
        if axes == wanted:
            return value
        shape = value.shape[1:] if axes else value.shape
        sizes = [self.mesh.shape[axis] for axis in wanted]
        apart = value.reshape(*[n if axis in axes else 1 for axis, n in zip(wanted, sizes, strict=True)], *shape)
        for dim, (axis, n) in enumerate(zip(wanted, sizes, strict=True)):
            if axis not in axes:
                first = jnp.arange(n).reshape(n, *[1] * (apart.ndim - dim - 1)) == 0
                apart = jnp.where(first, apart, jnp.zeros((), apart.dtype))
        return apart.reshape(self.ways(wanted), *shape)

    def _outermost(self, entry: Any) -> Axes:
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        rows = [n for n in names if self.mesh.shape[n] > 1] if set(names) <= set(self.mesh.axis_names) else []
        count = next((i for i, name in enumerate(rows) if name not in self.axes), len(rows))
        return tuple(rows[:count])


class Unreduced:
    """A traced function of which results can be had as addends.

    splits: of each argument. axes: of each result, the axes over which it can be left unreduced, () for none.
    """

    axes: list[Axes]

    def __init__(self, closed: ClosedJaxpr, replicas: Replicas, splits: Sequence[Split]) -> None:
        self._closed = closed
        self._replicas = replicas
        self._frame = _Frame(closed.jaxpr, replicas, splits, [()] * len(closed.jaxpr.invars))
        self.axes = [self._frame.axes(v) for v in closed.jaxpr.outvars]

    def scope(self, index: int) -> str:
        """The names of the Layers that a result was computed in; "" if that is not known."""
        v = self._closed.jaxpr.outvars[index]
        while not isinstance(v, Literal) and v in self._frame.defined:
            eqn, _ = self._frame.defined[v]
            if _scope(eqn):
                return _scope(eqn)
            v = next((a for a in eqn.invars if not isinstance(a, Literal)), None)
        return ""

    def __call__(self, args: Sequence[Any], wanted_axes: Sequence[Axes]) -> list[Any]:
        """The results for these arguments. kept: of each, the axes over which it stays unreduced."""
        if not any(wanted_axes):
            return jaxpr_as_fun(self._closed)(*args)
        run = _AddendTrace(self._frame, [*self._closed.consts, *args], _no_addends)
        outs = []
        for v, axes, wanted in zip(self._closed.jaxpr.outvars, self.axes, wanted_axes, strict=True):
            outs.append(self._replicas.narrow(run.addends(v), axes, wanted) if wanted else run.whole(v))
        return outs


class _Cut(NamedTuple):
    """A contraction that can be made for each replica's rows: of operands by position, the axes of the dims to cut."""

    axes: Axes
    dims: dict[int, dict[int, Axes]]


class _Frame:
    """Facts about the values in a jaxpr before it runs: their splits, and which can be left unreduced.

    inputs: of each argument, the axes over which the caller can give it unreduced.
    """

    def __init__(self, jaxpr: Any, replicas: Replicas, splits: Sequence[Split], inputs: Sequence[Axes]) -> None:
        self.jaxpr, self.replicas = jaxpr, replicas
        self.defined: dict[Any, tuple[Any, int]] = {}
        self.inner: dict[int, _Frame] = {}
        self.cuts: dict[int, _Cut] = {}
        self.device_sums: dict[int, list[Axes]] = {}
        self.position = {v: i for i, v in enumerate(jaxpr.invars)}
        self._splits: dict[Any, Split] = dict(zip(jaxpr.invars, splits, strict=True))
        self._axes: dict[Any, Axes] = dict(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            self._look_at(eqn)

    def split(self, v: Any) -> Split:
        """The split of a value's dims over replicas."""
        return self._splits.get(v, ()) if not isinstance(v, Literal) and v in self._splits else ((),) * _ndim(v)

    def axes(self, v: Any) -> Axes:
        """The axes over which a value can be had unreduced."""
        return () if isinstance(v, Literal) else self._axes.get(v, ())

    def _look_at(self, eqn: Any) -> None:
        self.defined.update({v: (eqn, i) for i, v in enumerate(eqn.outvars)})
        splits = [self.split(v) for v in eqn.invars]
        if eqn.primitive.name in _CALLS:
            jaxpr, _ = _call(eqn)
            inner = _Frame(jaxpr, self.replicas, splits, [self.axes(v) for v in eqn.invars])
            self.inner[id(eqn)] = inner
            self._splits.update(zip(eqn.outvars, map(inner.split, jaxpr.outvars), strict=True))
            self._axes.update(zip(eqn.outvars, map(inner.axes, jaxpr.outvars), strict=True))
            return
        self._splits.update(zip(eqn.outvars, split_after(eqn, splits, self.replicas), strict=True))
        if eqn.primitive.name == "shard_map":
            sums = self.device_sums[id(eqn)] = _device_sums(eqn, self.replicas)
            self._axes.update(zip(eqn.outvars, sums, strict=True))
            return
        cut = self._cut_of(eqn, splits)
        if cut is not None:
            self.cuts[id(eqn)] = cut
        self._axes.update({v: cut.axes if cut else self._linear_axes(eqn, i) for i, v in enumerate(eqn.outvars)})

    def _cut_of(self, eqn: Any, splits: Sequence[Split]) -> _Cut | None:
        """The cut of a contraction over rows; None for anything else."""
        pairs: list[tuple[Axes, dict[int, int]]] = []
        if eqn.primitive.name == "dot_general":
            (left, right), _ = eqn.params["dimension_numbers"]
            pairs = [(splits[0][i] or splits[1][j], {0: i, 1: j}) for i, j in zip(left, right, strict=True)]
        elif eqn.primitive.name == "reduce_sum":
            pairs = [(splits[0][i], {0: i}) for i in eqn.params["axes"]]
        elif eqn.primitive.name == "scatter-add" and self._is_zero(eqn.invars[0]) and not _is_batched(eqn):
            window = eqn.params["dimension_numbers"].update_window_dims
            rows = [d for d in range(_ndim(eqn.invars[2])) if d not in window]
            pairs = [(splits[2][d] or splits[1][i], {1: i, 2: d}) for i, d in enumerate(rows)]
        pairs = sorted((p for p in pairs if p[0]), key=lambda pair: self.replicas.axes.index(pair[0][0]))
        axes = tuple(axis for names, _ in pairs for axis in names)
        if not axes or list(axes) != sorted(set(axes), key=self.replicas.axes.index):
            return None
        dims: dict[int, dict[int, Axes]] = {}
        for names, of in pairs:
            for operand, dim in of.items():
                dims.setdefault(operand, {})[dim] = names
        return _Cut(axes, dims)

    def _linear_axes(self, eqn: Any, index: int) -> Axes:
        """The axes of a result that is linear in what can be had unreduced."""
        name, operands = eqn.primitive.name, eqn.invars
        if name in _LINEAR or name == "div" or (name == "pad" and _is_number(operands[1], 0)):
            is_exact = name != "convert_element_type" or _is_inexact(eqn.outvars[0])
            return self.axes(operands[0]) if is_exact else ()
        if name == "optimization_barrier":
            return self.axes(operands[index])
        if name == "scatter-add" and self._is_zero(operands[0]):
            return self.axes(operands[2])
        if name in _BILINEAR:
            return next((self.axes(v) for v in operands if self.axes(v)), ())
        if name in _JOINTLY_LINEAR:
            if any(isinstance(v, Literal) for v in _join(eqn)):
                return ()
            # an operand that is a sum already is what the first replica adds
            return max((self.axes(v) for v in _join(eqn)), key=len, default=())
        return ()

    def _is_zero(self, v: Any) -> bool:
        """True for an array known to hold zeros."""
        if isinstance(v, Literal):
            return _is_number(v, 0)
        eqn, _ = self.defined.get(v, (None, 0))
        return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and _is_number(eqn.invars[0], 0)


class _AddendTrace:
    """The values of a jaxpr as it is traced anew, whole and as addends. argument_addends: of an argument, by position.
    scope: the names that it is traced under."""

    def __init__(self, frame: _Frame, args: Sequence[Any], given: Callable[[int], Any], scope: str = "") -> None:
        self.frame, self.argument_addends, self.scope = frame, given, scope
        self._values: dict[Any, Any] = dict(zip([*frame.jaxpr.constvars, *frame.jaxpr.invars], args, strict=True))
        self._addends: dict[Any, Any] = {}
        self._inner: dict[int, _AddendTrace] = {}
        used = {v for eqn in frame.jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}
        used.update(v for v in frame.jaxpr.outvars if not isinstance(v, Literal))
        for eqn in frame.jaxpr.eqns:
            self._evaluate(eqn, used)

    def whole(self, v: Any) -> Any:
        """A value as the function has it."""
        return v.val if isinstance(v, Literal) else self._values[v]

    def addends(self, v: Any) -> Any:
        """[ways, ...], what each replica adds to a value; only where the frame has axes for it."""
        if v not in self._addends:
            self._addends[v] = self._make_addends(v)
        return self._addends[v]

    def _evaluate(self, eqn: Any, used: set[Any]) -> None:
        args = [self.whole(v) for v in eqn.invars]
        sums = self.frame.device_sums.get(id(eqn), ())
        if any(sums):
            with named(f"{self.scope}/{_scope(eqn)}".strip("/")):
                outs = _without_device_sums(eqn, sums)(*args)
            for v, out, axes in zip(eqn.outvars, outs, sums, strict=True):
                if axes:
                    self._addends[v] = out
                self._values[v] = out.sum(0, dtype=out.dtype) if axes else out
            return
        inner = self.frame.inner.get(id(eqn))
        if inner is None or not any(map(self.frame.axes, eqn.outvars)):
            outs = [v for v in eqn.outvars if v in used]
            if outs:
                self._values.update(zip(outs, _function_of(eqn, outs, self.frame.jaxpr)(*args), strict=True))
            return
        name = f"jit({eqn.params['name']})" if "name" in eqn.params else eqn.primitive.name
        with named(f"{_scope(eqn)}/{name}".lstrip("/")):
            scope = f"{self.scope}/{_scope(eqn)}/{name}".strip("/").replace("//", "/")
            if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                # what is computed again is not to be merged with what was computed: jax's own lowering does this
                args = jax.lax.optimization_barrier(args)
            run = _AddendTrace(inner, [*_call(eqn)[1], *args], lambda i: self.addends(eqn.invars[i]), scope)
        self._inner[id(eqn)] = run
        self._values.update({v: run.whole(o) for v, o in zip(eqn.outvars, inner.jaxpr.outvars, strict=True)})

    def _make_addends(self, v: Any) -> Any:
        frame = self.frame
        if v in frame.position:
            return self.argument_addends(frame.position[v])
        eqn, index = frame.defined[v]
        if id(eqn) in self._inner:
            return self._inner[id(eqn)].addends(frame.inner[id(eqn)].jaxpr.outvars[index])
        if eqn.primitive.name == "optimization_barrier":
            return self.addends(eqn.invars[index])
        if id(eqn) in frame.cuts:
            return self._contract(eqn, frame.cuts[id(eqn)])
        return self._map(eqn, frame.axes(v))

    def _contract(self, eqn: Any, cut: _Cut) -> Any:
        """The contraction of each replica's rows."""
        args = [self.whole(v) for v in eqn.invars]
        parts = [self._parted(a, cut.dims[i]) if i in cut.dims else a for i, a in enumerate(args)]
        return self._for_every_replica(eqn, parts, cut.dims)

    def _parted(self, array: Any, dims: dict[int, Axes]) -> Any:
        """[..., rows, ...] -> [ways, ..., rows / ways, ...]."""
        shape: list[int] = []
        front: list[tuple[int, int]] = []
        rest: list[int] = []
        for dim, size in enumerate(array.shape):
            if dim in dims:
                ways = self.frame.replicas.ways(dims[dim])
                front.append((self.frame.replicas.axes.index(dims[dim][0]), len(shape)))
                shape.append(ways)
                size //= ways
            rest.append(len(shape))
            shape.append(size)
        apart = array.reshape(shape).transpose(*[at for _, at in sorted(front)], *rest)
        return apart.reshape(-1, *apart.shape[len(front) :])

    def _map(self, eqn: Any, axes: Axes) -> Any:
        """A linear operation on each addend."""
        name, operands, replicas = eqn.primitive.name, eqn.invars, self.frame.replicas
        if name == "sharding_constraint":
            sharding, addends = eqn.params["sharding"], self.addends(operands[0])
            if not isinstance(sharding, NamedSharding) or not set(axes) <= set(sharding.mesh.axis_names):
                return addends
            return jax.lax.with_sharding_constraint(addends, replicas.layout(axes, sharding))
        mapped = [i for i, v in enumerate(operands) if self.frame.axes(v)]
        if name in _JOINTLY_LINEAR:
            mapped = list(range(len(operands) - len(_join(eqn)), len(operands)))
        elif name in _BILINEAR:
            mapped = mapped[:1]
        else:
            mapped = [2] if name == "scatter-add" else [0]
        args = [self._as(v, axes) if i in mapped else self.whole(v) for i, v in enumerate(operands)]
        return self._for_every_replica(eqn, args, mapped)

    def _for_every_replica(self, eqn: Any, args: Sequence[Any], mapped: Container[int]) -> Any:
        """An equation's result for each replica's part of the operands in `mapped`; the others are all of theirs."""
        in_axes = [0 if i in mapped else None for i in range(len(args))]
        with named(self.scope):
            return jax.vmap(_result_of(eqn, self.frame.jaxpr), in_axes=in_axes)(*args)

    def _as(self, v: Any, axes: Axes) -> Any:
        """A value as addends over these axes."""
        have = self.frame.axes(v)
        if have and set(have) <= set(axes):
            return self.frame.replicas.widen(self.addends(v), have, axes)
        return self.frame.replicas.widen(jnp.asarray(self.whole(v)), (), axes)


def _device_sums(eqn: Any, replicas: Replicas) -> list[Axes]:
    """The axes over which a shard_map over the whole mesh ends with a sum, for each result."""
    inner, mesh = eqn.params["jaxpr"], eqn.params["mesh"]
    nowhere: list[Axes] = [() for _ in eqn.outvars]
    is_full = eqn.params["newly_manual_axes"] == frozenset(mesh.axis_names) and not eqn.params["check_vma"]
    if not is_full or not set(replicas.axes) <= set(mesh.axis_names):
        return nowhere
    last = {v: e for e in inner.eqns if e.primitive.name == "psum" for v in e.outvars}
    return [
        tuple(axis for axis in replicas.axes if axis in last[v].params["axes"]) if _is_summed(v, last) else ()
        for v in inner.outvars
    ]


def _is_summed(v: Any, last: dict[Any, Any]) -> bool:
    return not isinstance(v, Literal) and v in last and last[v].params["axis_index_groups"] is None


def _without_device_sums(eqn: Any, sums: Sequence[Axes]) -> Callable[..., list[Any]]:
    """A shard_map whose results with axes here come as addends over these, [ways, ...]."""
    inner, specs = eqn.params["jaxpr"], eqn.params["out_specs"]
    last = {v: e for e in inner.eqns for v in e.outvars}
    sources = [
        last[v].invars[last[v].outvars.index(v)] if axes else v for v, axes in zip(inner.outvars, sums, strict=True)
    ]
    run = jaxpr_as_fun(ClosedJaxpr(inner.replace(outvars=sources), ()))

    def local(*args: Any) -> list[Any]:
        outs = []
        for out, v, axes in zip(run(*args), inner.outvars, sums, strict=True):
            if axes:
                rest = tuple(axis for axis in last[v].params["axes"] if axis not in axes)
                out = (jax.lax.psum(out, rest) if rest else out)[None]
            outs.append(out)
        return outs

    out_specs = [PartitionSpec(axes, *spec) if axes else spec for spec, axes in zip(specs, sums, strict=True)]
    in_specs = tuple(eqn.params["in_specs"])
    return jax.shard_map(local, mesh=eqn.params["mesh"], in_specs=in_specs, out_specs=out_specs, check_vma=False)


def split_after(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    """The likely splits of an equation's results, given those of its operands; a guess that correctness does not depend
    on."""
    rule = _SPLIT_RULES.get(eqn.primitive.name, _split_like_operands)
    return rule(eqn, splits, replicas)


def _split_like_operands(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    """Dim by dim as the first operand of as many dims that has a split dim of the same size."""
    out_splits: list[Split] = []
    for out in eqn.outvars:
        shape = out.aval.shape if hasattr(out.aval, "shape") else ()
        alike = [(v.aval.shape, s) for v, s in zip(eqn.invars, splits, strict=True) if len(s) == len(shape)]
        out_splits.append(
            tuple(next((s[d] for of, s in alike if s[d] and of[d] == size), ()) for d, size in enumerate(shape))
        )
    return out_splits


def _split_of_reshape(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    out: list[Axes] = [()] * len(new)
    for before, after in _groups(old, new):
        axes: list[str] = []
        for dim in before:
            axes += splits[0][dim]
            if replicas.ways(splits[0][dim]) != old[dim]:
                break
        for dim in after:
            size, taken = new[dim], []
            while axes and size % replicas.ways([axes[0]]) == 0:
                taken.append(axes.pop(0))
                size //= replicas.ways(taken[-1:])
            out[dim] = tuple(taken)
            if size != 1:
                break
    return [tuple(out)]


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dims of two shapes of one size in groups that become each other."""
    groups, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        before, after = [i], [j]
        a, b = old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= old[i]
                before.append(i)
                i += 1
            else:
                b *= new[j]
                after.append(j)
                j += 1
        groups.append((before, after))
    return groups


def _split_of_transpose(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    return [tuple(splits[0][dim] for dim in eqn.params["permutation"])]


def _split_of_broadcast(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes: list[Axes] = [()] * len(out)
    for dim, to in enumerate(eqn.params["broadcast_dimensions"]):
        if shape[dim] == out[to]:
            axes[to] = splits[0][dim]
    return [tuple(axes)]


def _split_of_removal(name: str) -> Callable[..., list[Split]]:
    def rule(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
        gone = eqn.params[name]
        return [tuple(axes for dim, axes in enumerate(splits[0]) if dim not in gone)] * len(eqn.outvars)

    return rule


def _split_of_product(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    batch = [splits[0][i] or splits[1][j] for i, j in zip(left_batch, right_batch, strict=True)]
    free = [a for i, a in enumerate(splits[0]) if i not in (*left, *left_batch)]
    free += [a for i, a in enumerate(splits[1]) if i not in (*right, *right_batch)]
    return [_each_once([*batch, *free])]


def _split_of_gather(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    inside = eqn.params["dimension_numbers"].offset_dims
    rows = iter(splits[1][:-1])
    return [tuple(() if d in inside else next(rows, ()) for d in range(_ndim(eqn.outvars[0])))]


def _split_of_scatter(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    return [splits[0]]


def _split_of_constraint(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, NamedSharding) or not set(replicas.axes) <= set(sharding.mesh.axis_names):
        return [splits[0]]
    return [replicas.split_by(sharding.spec, splits[0])]


def _split_of_shard_map(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    return [
        replicas.split_by(spec, ((),) * _ndim(v)) for v, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)
    ]


def _split_of_barrier(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    return list(splits)


def _split_of_scan(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    jaxpr, consts, carried = eqn.params["jaxpr"].jaxpr, eqn.params["num_consts"], eqn.params["num_carry"]
    fixed, carry = list(splits[:consts]), list(splits[consts : consts + carried])
    steps = [s[1:] for s in splits[consts + carried :]]
    outs: list[Split] = []
    for _ in range(2):  # what the first step makes of the carry is what the second takes
        outs = _split_through(jaxpr, [*fixed, *carry, *steps], replicas)
        carry = outs[:carried]
    return [*outs[:carried], *[((), *s) for s in outs[carried:]]]


def _split_of_wrapped(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    """An equation that calls one jaxpr with all its operands."""
    inner = next((eqn.params[n] for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in eqn.params), None)
    jaxpr = getattr(inner, "jaxpr", inner)
    if jaxpr is None or len(jaxpr.invars) != len(splits) or len(jaxpr.outvars) != len(eqn.outvars):
        return _split_like_operands(eqn, splits, replicas)
    return _split_through(jaxpr, splits, replicas)


def _split_of_branches(eqn: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    return _split_through(eqn.params["branches"][0].jaxpr, splits[1:], replicas)


def _split_through(jaxpr: Any, splits: Sequence[Split], replicas: Replicas) -> list[Split]:
    frame = _Frame(jaxpr, replicas, splits, [()] * len(splits))
    return [frame.split(v) for v in jaxpr.outvars]


def _each_once(dims: Sequence[Axes]) -> Split:
    """The same, an axis that splits two dims left to the first."""
    taken: set[str] = set()
    found = []
    for axes in dims:
        found.append(() if taken & set(axes) else axes)
        taken |= set(axes)
    return tuple(found)


_SPLIT_RULES: dict[str, Callable[..., list[Split]]] = {
    "reshape": _split_of_reshape,
    "transpose": _split_of_transpose,
    "broadcast_in_dim": _split_of_broadcast,
    "squeeze": _split_of_removal("dimensions"),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _split_of_removal("axes"),
    ),
    "dot_general": _split_of_product,
    "gather": _split_of_gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_mul", "scatter_min", "scatter_max"), _split_of_scatter),
    "sharding_constraint": _split_of_constraint,
    "shard_map": _split_of_shard_map,
    "optimization_barrier": _split_of_barrier,
    "scan": _split_of_scan,
    "cond": _split_of_branches,
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _split_of_wrapped),
}


@jax.jit
def sum_replicas(addends: jax.Array) -> jax.Array:
    """[ways, ...] -> [...], the sum of what each replica has."""
    return addends.sum(0, dtype=addends.dtype)


@jax.jit
def accumulate(total: jax.Array, more: jax.Array) -> jax.Array:
    """total + more."""
    return total + more


def named(scope: str) -> Any:
    """A context in which operations get these names in front, as a traced call of a Layer gives them."""
    return jax.named_scope(scope) if scope else nullcontext()


def _function_of(eqn: Any, outs: Sequence[Any], jaxpr: Any) -> Callable[..., list[Any]]:
    """An equation of a jaxpr as a function of all its operands; what is given for literals is not looked at."""
    invars = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
    alone = jaxpr.replace(constvars=[], invars=invars, outvars=list(outs), eqns=[eqn], effects=eqn.effects)
    run = jaxpr_as_fun(ClosedJaxpr(alone, ()))

    def call(*args: Any) -> list[Any]:
        values = {v: a for v, a in zip(eqn.invars, args, strict=True) if not isinstance(v, Literal)}
        return run(*[values[v] for v in invars])

    return call


def _result_of(eqn: Any, jaxpr: Any) -> Callable[..., Any]:
    """An equation with one result as a function of its operands, for any layout."""
    open_layout = {name: None for name in ("sharding", "out_sharding") if name in eqn.params}
    free = eqn.replace(params={**eqn.params, **open_layout})
    call = _function_of(free, free.outvars, jaxpr)
    return lambda *args: call(*args)[0]


def _call(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr that an equation calls, and its constants."""
    inner = eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]
    return (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())


def _scope(eqn: Any) -> str:
    """The names that an equation was traced under."""
    return str(eqn.source_info.name_stack)


def _join(eqn: Any) -> Sequence[Any]:
    """The operands that a result is jointly linear in."""
    return eqn.invars[1:] if eqn.primitive.name == "select_n" else eqn.invars


def _ndim(v: Any) -> int:
    return len(getattr(v.aval, "shape", ()))


def _is_number(v: Any, number: float) -> bool:
    return isinstance(v, Literal) and _ndim(v) == 0 and v.val == number


def _is_inexact(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _is_batched(eqn: Any) -> bool:
    return bool(eqn.params["dimension_numbers"].operand_batching_dims)


def _no_addends(position: int) -> Any:
    raise AssertionError(f"argument {position} of the whole function has no addends")
