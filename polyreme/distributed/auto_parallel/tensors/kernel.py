"""A kernel on Tensors that lie on a mesh: from what is kept of its inputs to what is kept of its results.

The op's own function runs on values (padding cut, addends joined) inside one compiled program, whose inputs
and results lie as the placement rules say; XLA's partitioner splits the work. Partial is real: along a mesh dim where a
result is Partial the function is mapped over pieces (of a dim that is summed over) or addends, one for each device,
and the results stay apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyreme.core import dtype as dtypes
from polyreme.core.kernel import Kernel, Mask
from polyreme.core.sharding_rule import DimNames, OpCall, Padding, ShardingRule
from polyreme.core.taylor.primitives import primitives
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.placements import Partial, ReduceType, Replicate
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.distributed.auto_parallel.tensors.rules import CallPlacement, is_even, propagate


class DistKernel:
    """base on inputs kept in these forms (None: a dense one, whole everywhere).

    rule: the op's for this call, or None: results lie as XLA leaves them. outs: the forms of results, None if they
    are read off the results. many: the sequence class of several results, None for one.
    """

    base: Kernel
    rule: ShardingRule | None
    call: OpCall
    forms: tuple[Form | None, ...]
    mesh: ProcessMesh
    flow: CallPlacement | None
    forward: Callable[..., Any]

    def __init__(
        self, base: Kernel, rule: ShardingRule | None, call: OpCall, forms: Sequence[Form | None], mesh: ProcessMesh
    ) -> None:
        self.base, self.rule, self.call, self.forms, self.mesh = base, rule, call, tuple(forms), mesh
        self.flow = None if rule is None else propagate(rule, forms, call, mesh)
        self.outs: list[Form] | None = None if self.flow is None else self.flow.outs
        self.many: Any = None
        self._backward: dict[Any, Any] = {}
        self.forward = self._compiled()

    @classmethod
    def of(
        cls,
        base: Kernel,
        stored_fn: Callable[..., tuple[Any, ...]],
        call: OpCall,
        forms: Sequence[Form | None],
        mesh: ProcessMesh,
        outs: Sequence[Form],
    ) -> DistKernel:
        """One whose forward on what is kept is given, base being the same function on values."""
        kernel = cls.__new__(cls)
        kernel.base, kernel.rule, kernel.call, kernel.forms, kernel.mesh = base, None, call, tuple(forms), mesh
        kernel.flow, kernel.outs, kernel.many, kernel._backward, kernel.laid_out = None, list(outs), tuple, {}, False
        stored_fn.__name__ = stored_fn.__qualname__ = base.name
        kernel.forward = jax.jit(stored_fn, out_shardings=tuple(f.sharding for f in outs))
        return kernel

    @property
    def rule_and_flow(self) -> tuple[ShardingRule, CallPlacement]:
        """The rule and what follows from it, for a call that has one."""
        assert self.rule is not None, self.call.name
        assert self.flow is not None, self.call.name
        return self.rule, self.flow

    # forward

    def _compiled(self) -> Callable[..., Any]:
        run = self._apart if self.flow is not None and self.flow.lead else self._whole

        def forward(*stored: Any) -> tuple:
            return run(stored)

        forward.__name__ = forward.__qualname__ = self.base.name
        if self.outs is None:
            return jax.jit(forward)
        return jax.jit(forward, out_shardings=tuple(f.sharding for f in self.outs))

    def values(self, stored: Sequence[Any]) -> list[Any]:
        """The value of every input. Traceable."""
        values = [a if f is None else f.decode(a) for a, f in zip(stored, self.forms, strict=True)]
        return self._laid_out(values, None if self.rule is None else self.rule.inputs)

    @functools.cached_property
    def laid_out(self) -> bool:
        """Whether values are laid out by their names, in even pieces: where the rule says so, and where rows are
        looked up or put in uneven pieces, on which XLA's partitioner aborts."""
        if self.rule is not None and self.rule.laid_out:
            return True
        return any(f is not None and 0 not in f.shape and f.cut_off for f in self.forms) and self._indexes()

    def _indexes(self) -> bool:
        """Whether the op looks up or puts rows, or sorts."""
        given = [jax.ShapeDtypeStruct(s, d) for s, d in zip(self.call.shapes, self.call.dtypes, strict=True)]
        found = primitives(jax.make_jaxpr(self.base.fn)(*given).jaxpr)
        return any(name.startswith(("gather", "scatter", "sort")) for name in found)

    def _laid_out(self, values: Sequence[Any], names: Sequence[DimNames] | None) -> list[Any]:
        """values laid out by their names, whole without any, for an op that wants it so."""
        if not self.laid_out:
            return list(values)
        if names is None:
            return [jax.lax.with_sharding_constraint(v, self.everywhere) for v in values]
        return [self._told(v, own) for v, own in zip(values, names, strict=True)]

    @property
    def everywhere(self) -> jax.sharding.NamedSharding:
        """A whole copy on every device."""
        return jax.sharding.NamedSharding(self.mesh.jax_mesh, jax.sharding.PartitionSpec())

    def _told(self, value: Any, names: DimNames) -> Any:
        _, flow = self.rule_and_flow
        axis_names, entries = self.mesh.dim_names, []
        for size, name in zip(value.shape, names, strict=True):
            axes = tuple(axis_names[a] for a in flow.split.get(name or "", ()))
            entries.append(axes if axes and size % flow.ways(name or "") == 0 else None)
        where = jax.sharding.NamedSharding(self.mesh.jax_mesh, jax.sharding.PartitionSpec(*entries))
        return jax.lax.with_sharding_constraint(value, where)

    def _whole(self, stored: Sequence[Any]) -> tuple:
        outs = self._flat(self.base.fn(*self.values(stored)))
        outs = tuple(self._laid_out(outs, None if self.rule is None else self.rule.outputs))
        if self.outs is None:
            return outs
        return tuple(f.encode(o) for f, o in zip(self.outs, outs, strict=True))

    def _flat(self, outs: Any) -> tuple:
        self.many = type(outs) if isinstance(outs, (tuple, list)) else None
        return tuple(outs) if self.many is not None else (outs,)

    def _apart(self, stored: Sequence[Any]) -> tuple:
        """Results in addends."""
        rule, flow = self.rule_and_flow
        arrays, leads = [], []
        for array, form, names in zip(stored, self.forms, rule.inputs, strict=True):
            kept = [] if form is None else [a for a in form.partial if a in flow.partial]
            value = array if form is None else form.cut(form.joining(array, kept), len(kept))
            value, lead = self._pieces(value, names, flow.reduced, kept)
            arrays.append(value)
            leads.append(lead)
        fn = self._rows(flow, rule.lookup) if rule.lookup in flow.reduced else self.base.fn
        outs = self._flat(mapped(fn, leads, flow.lead)(*arrays))
        if rule.reduce == "avg" and (factor := self._uneven_mean(flow)) != 1:
            outs = tuple(o * factor for o in outs)
        return tuple(f.padded(o, len(flow.lead)) for f, o in zip(flow.outs, outs, strict=True))

    def _pieces(
        self, value: Any, names: DimNames, cut: dict[str, list[int]], lead: Sequence[int]
    ) -> tuple[Any, list[int]]:
        """value with the dims of the names in cut taken apart: their pieces in front, by mesh dim, in order."""
        front, dim = list(lead), len(lead)
        rule, flow = self.rule_and_flow
        for name in names:
            axes = cut.get(name or "", [])
            if not axes:
                dim += 1
                continue
            ways = flow.ways(name or "")
            value = _pad(value, dim, ways, rule.padding)
            sizes = [self.mesh.get_dim_size(a) for a in axes]
            value = value.reshape(*value.shape[:dim], *sizes, value.shape[dim] // ways, *value.shape[dim + 1 :])
            value = jnp.moveaxis(value, range(dim, dim + len(axes)), range(len(front), len(front) + len(axes)))
            front += axes
            dim += len(axes) + 1
        order = sorted(range(len(front)), key=front.__getitem__)
        value = jnp.transpose(value, [*order, *range(len(front), value.ndim)])
        front.sort()
        return self._constrain(value, front, names, cut), front

    def _constrain(self, value: Any, front: Sequence[int], names: DimNames, cut: dict[str, list[int]]) -> Any:
        """value told where it lies, so that taking dims apart moves nothing."""
        _, flow = self.rule_and_flow
        axis_names = self.mesh.dim_names
        entries: list[Any] = [axis_names[a] for a in front]
        for size, name in zip(value.shape[len(front) :], names, strict=True):
            axes = () if name in cut else tuple(flow.split.get(name or "", ()))
            fits = axes and size % flow.ways(name or "") == 0
            entries.append(tuple(axis_names[a] for a in axes) if fits else jax.sharding.PartitionSpec.UNCONSTRAINED)
        if not front:
            return value
        where = jax.sharding.NamedSharding(self.mesh.jax_mesh, jax.sharding.PartitionSpec(*entries))
        return jax.lax.with_sharding_constraint(value, where)

    def _uneven_mean(self, flow: CallPlacement) -> float:
        """The factor that makes the means over padded pieces average to the mean of all."""
        sizes = dict(zip(self.rule_and_flow[0].inputs[0], self.call.shapes[0], strict=True))
        factor = 1.0
        for name in flow.reduced:
            size = sizes[name]
            room = -(-size // flow.ways(name)) * flow.ways(name)
            factor *= room / size if size else 1.0
        return factor

    def _rows(self, flow: CallPlacement, name: str) -> Callable[..., Any]:
        """A lookup of rows, split by name, where each device has some of them: what it has not is zero."""
        axes = flow.reduced[name]
        sizes = [self.mesh.get_dim_size(a) for a in axes]
        names = {a: f"piece{a}" for a in axes}
        padding_idx = self.call.attrs.get("padding_idx")

        def lookup(ids: Any, weight: Any) -> Any:
            rank: Any = 0
            for axis, size in zip(axes, sizes, strict=True):
                rank = rank * size + jax.lax.axis_index(names[axis])
            rows = weight.shape[0]
            mine = (ids >= rank * rows) & (ids < (rank + 1) * rows)
            found_rows = weight[jnp.where(mine, ids - rank * rows, 0)]
            kept = mine if padding_idx is None else mine & (ids != padding_idx)
            # an id that no device has is out of range, and makes NaN, as without a mesh
            missing = ((ids < 0) | (ids >= self.call.shapes[1][0]))[..., None]
            return jnp.where(missing, jnp.nan, jnp.where(kept[..., None], found_rows, 0)).astype(weight.dtype)

        return lookup

    # backward

    def backward(self, mask: Mask, present: Mask, cots: Sequence[Form]) -> tuple[Callable[..., Any], list[Form]]:
        """((inputs as kept, cotangents as kept) -> gradients as kept, their forms).

        present: which results have a cotangent; cots: how those lie.
        """
        key = (mask, present, tuple(cots))
        compiled = self._backward.get(key)
        if compiled is None:
            cut = self._gradient_names(mask, present)
            forms = self._gradient_forms(mask, cut)
            compiled = self._backward[key] = (self._compiled_backward(mask, present, cots, cut, forms), forms)
        return compiled

    def _gradient_names(self, mask: Mask, present: Mask) -> dict[str, list[int]]:
        """Names along which the gradient of some input is a sum of addends: split in results, not in that input."""
        rule, flow = self.rule, self.flow
        if rule is None or flow is None or not rule.piecewise or not all(present):
            return {}
        ends = {name for names in rule.outputs for name in names}
        cut = {}
        for name, axes in flow.split.items():
            lacking = any(m and name not in names for m, names in zip(mask, rule.inputs, strict=True))
            everywhere = all(name in names for names in rule.outputs)
            if name in ends and everywhere and lacking and is_even(flow, rule, self.call, name):
                cut[name] = axes
        return cut

    def _carried(self) -> list[DimNames]:
        """Dim names of the results that have cotangents: those of inexact dtypes."""
        names = zip(self.rule_and_flow[0].outputs, self.call.out_dtypes, strict=True)
        return [own for own, dtype in names if dtypes.is_inexact(dtype)]

    def _gradient_forms(self, mask: Mask, cut: dict[str, list[int]]) -> list[Form]:
        forms = []
        for i, wanted in enumerate(mask):
            if not wanted:
                continue
            form = self.forms[i]
            whole = Form(self.mesh, (Replicate(),) * self.mesh.ndim, self.call.shapes[i])
            base = whole if form is None else form.joined()
            placements = list(base.placements)
            for name, axes in cut.items():
                if form is not None and self.rule is not None and name not in self.rule.inputs[i]:
                    for axis in axes:
                        if placements[axis].is_replicated():
                            placements[axis] = Partial(ReduceType.kRedSum)
            forms.append(base.having(placements))
        return forms

    def _compiled_backward(
        self, mask: Mask, present: Mask, cots: Sequence[Form], cut: dict[str, list[int]], forms: Sequence[Form]
    ) -> Callable[..., Any]:
        pull = self.base.backward(mask)

        def backward(stored: tuple, given: tuple) -> tuple:
            values = self.values(stored)
            cotangents = [f.decode(c) for f, c in zip(cots, given, strict=True)]
            if self.rule is None or all(present):
                cotangents = self._laid_out(cotangents, None if self.rule is None else self._carried())
            if cut:
                return self._cut_gradients(pull, values, cotangents, mask, cut, forms)
            waiting = iter(cotangents)
            full = tuple(next(waiting) if p else None for p in present)
            grads = pull(tuple(values), full)
            own = None if self.rule is None else [at for at, m in zip(self.rule.inputs, mask, strict=True) if m]
            grads = self._laid_out(grads, own)
            return tuple(f.encode(g) for f, g in zip(forms, grads, strict=True))

        backward.__name__ = backward.__qualname__ = f"{self.base.name}_grad"
        return jax.jit(backward, out_shardings=tuple(f.sharding for f in forms))

    def _cut_gradients(
        self, pull: Any, values: list, cotangents: list, mask: Mask, cut: dict[str, list[int]], forms: Sequence[Form]
    ) -> tuple:
        """Gradients piece by piece, so that those of inputs that all pieces share stay addends."""
        rule, _ = self.rule_and_flow
        n = len(values)
        pieces, leads = [], []
        for value, names in zip([*values, *cotangents], [*rule.inputs, *self._carried()], strict=True):
            piece, lead = self._pieces(value, names, cut, [])
            pieces.append(piece)
            leads.append(lead)
        lead = sorted(a for axes in cut.values() for a in axes)
        run = mapped(lambda *arrays: pull(tuple(arrays[:n]), tuple(arrays[n:])), leads, lead)
        wanted = [i for i, m in enumerate(mask) if m]
        return tuple(
            self._gradient(g, i, form, lead, cut) for g, i, form in zip(run(*pieces), wanted, forms, strict=True)
        )  # fmt: skip

    def _gradient(self, g: Any, i: int, form: Form, lead: list[int], cut: dict[str, list[int]]) -> Any:
        """A gradient in pieces put together, or kept as addends where its input is without the name."""
        names = self.rule_and_flow[0].inputs[i]
        for axis in reversed(lead):
            if axis not in form.partial and not any(axis in cut.get(index or "", ()) for index in names):
                g = g.sum(lead.index(axis), dtype=g.dtype)
        front = [a for a in lead if a in form.partial or any(a in cut.get(index or "", ()) for index in names)]
        for index, name in enumerate(names):
            axes = cut.get(name or "", [])
            if not axes:
                continue
            places = [front.index(a) for a in axes]
            dim = len(front) + index
            g = jnp.moveaxis(g, places, range(dim - len(axes), dim))
            front = [a for a in front if a not in axes]
            start = len(front) + index
            size = self.call.shapes[i][index]
            g = g.reshape(*g.shape[:start], size, *g.shape[start + len(axes) + 1 :])
        return form.padded(g, len(front))


def mapped(fn: Callable[..., Any], leads: Sequence[Sequence[int]], lead: Sequence[int]) -> Callable[..., Any]:
    """fn over the leading dims of its inputs: leads says which mesh dims each has, lead which the results have."""
    for axis in reversed(lead):
        ins = tuple(0 if axis in own else None for own in leads)
        fn = jax.vmap(fn, in_axes=ins, axis_name=f"piece{axis}")
    return fn


def _pad(value: Any, dim: int, ways: int, padding: Padding | None) -> Any:
    """value with a dim grown to a multiple of ways by what changes no result."""
    missing = -value.shape[dim] % ways
    if not missing or padding is None:
        return value
    widths = [(0, missing) if i == dim else (0, 0) for i in range(value.ndim)]
    return jnp.pad(value, widths, constant_values=_neutral(padding, value.dtype))


def _neutral(padding: Padding, dtype: Any) -> Any:
    if padding in ("zero", "one"):
        return padding == "one"
    if dtype == jnp.bool_:
        return padding == "high"
    if dtypes.is_inexact(dtype):
        return jnp.inf if padding == "high" else -jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.max if padding == "high" else limits.min
