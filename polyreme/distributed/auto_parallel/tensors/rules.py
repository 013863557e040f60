"""Placements of an op's results from its sharding rule: SPMD propagation over one mesh.

A name that a mesh dim splits in an input is split in the results that have it; where no result has it, the results
are Partial along that mesh dim, if the rule says how its pieces join. Values never depend on rules, only layouts do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core.sharding_rule import DimNames, OpCall, Reduce, ShardingRule
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.placements import Partial, Placement, ReduceType, Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh

LINEAR = frozenset({ReduceType.kRedSum, ReduceType.kRedAvg})
_REDUCE_TYPES: dict[Reduce, ReduceType] = {
    "sum": ReduceType.kRedSum,
    "avg": ReduceType.kRedAvg,
    "prod": ReduceType.kRedProd,
    "max": ReduceType.kRedMax,
    "min": ReduceType.kRedMin,
    "any": ReduceType.kRedAny,
    "all": ReduceType.kRedAll,
}


@dataclass
class CallPlacement:
    """The placements of one call on a mesh.

    split: name -> the mesh dims that split it. partial: mesh dim along which inputs stay Partial -> how they join.
    reduced: name that no result has -> the mesh dims along which its pieces make results Partial. outs: of each result.
    """

    mesh: ProcessMesh
    split: dict[str, list[int]] = field(default_factory=dict)
    partial: dict[int, ReduceType] = field(default_factory=dict)
    reduced: dict[str, list[int]] = field(default_factory=dict)
    outs: list[Form] = field(default_factory=list)

    def ways(self, name: str) -> int:
        """Pieces of a name."""
        return math.prod(self.mesh.get_dim_size(a) for a in self.split.get(name, ()))

    @property
    def lead(self) -> list[int]:
        """Mesh dims along which results are Partial."""
        return sorted([*self.partial, *(a for axes in self.reduced.values() for a in axes)])


def propagate(rule: ShardingRule, forms: Sequence[Form | None], call: OpCall, mesh: ProcessMesh) -> CallPlacement:
    """The placements of the results of a call. forms: of each input, None for a dense one, which is whole everywhere.

    A mesh dim splits one name: where inputs differ, that of the first input that has one.
    """
    flow = CallPlacement(mesh)
    _note_splits(flow, rule, forms)
    _drop_unaligned(flow, rule, call)
    _keep_partial(flow, rule, forms, call)
    _make_partial(flow, rule, call)
    for names, shape in zip(rule.outputs, call.outs, strict=True):
        flow.outs.append(_place(flow, rule, names, shape))
    return flow


def _note_splits(flow: CallPlacement, rule: ShardingRule, forms: Sequence[Form | None]) -> None:
    owner: dict[int, str] = {}
    for names, form in zip(rule.inputs, forms, strict=True):
        if form is None:
            continue
        for dim, name in enumerate(map(rule.split_name, names)):
            if name is None or form.factor(dim) > 1 or form.shape[dim] == 0:
                continue
            for axis in form.axes(dim):
                if owner.setdefault(axis, name) == name and axis not in flow.split.setdefault(name, []):
                    flow.split[name].append(axis)
    flow.split = {name: axes for name, axes in flow.split.items() if axes}


def _sizes(rule: ShardingRule, call: OpCall, name: str) -> Iterable[int]:
    for names, shape in zip((*rule.inputs, *rule.outputs), (*call.shapes, *call.outs), strict=True):
        yield from (n for at, n in zip(names, shape, strict=True) if at == name)


def is_even(flow: CallPlacement, rule: ShardingRule, call: OpCall, name: str) -> bool:
    """Whether the pieces of a name are equal, wherever it stands."""
    return all(n % flow.ways(name) == 0 for n in _sizes(rule, call, name))


def _drop_unaligned(flow: CallPlacement, rule: ShardingRule, call: OpCall) -> None:
    for name in rule.aligned & set(flow.split):
        if not is_even(flow, rule, call, name):
            del flow.split[name]


def _keep_partial(flow: CallPlacement, rule: ShardingRule, forms: Sequence[Form | None], call: OpCall) -> None:
    taken = {a for axes in flow.split.values() for a in axes}
    if rule.linear == "no":
        return
    for axis in range(flow.mesh.ndim):
        kinds = [None if f is None or axis not in f.partial else f.reduce_type(axis) for f in forms]
        partial = [i for i, k in enumerate(kinds) if k is not None]
        kind = {k for k in kinds if k is not None}
        if axis in taken or len(kind) != 1:
            continue
        alike = len(partial) == len(forms)
        fits = {
            "jointly": alike and kind <= LINEAR,
            "alone": len(partial) == 1 and kind <= LINEAR and (rule.linear_in is None or partial[0] in rule.linear_in),
            "moves": alike,
        }[rule.linear]
        inputs = {call.dtypes[i] for i in partial}
        if fits and are_commutative(kind.union(flow.partial.values())) and _exact(kind, rule, inputs, call.out_dtypes):
            flow.partial[axis] = kind.pop()


def _exact(kind: set[ReduceType], rule: ShardingRule, ins: set[Any], out: Sequence[Any]) -> bool:
    """Whether addends of these dtypes join to the same value after the op as before it, but for rounding.

    Truth values and whole numbers join by other arithmetic than what they are cast to, and averages of whole numbers
    are rounded down.
    """
    if rule.linear == "moves":
        return len(ins.union(out)) == 1 or (kind <= LINEAR and all(map(dtypes.is_inexact, ins.union(out))))
    if all(map(dtypes.is_inexact, ins)):
        return all(map(dtypes.is_inexact, out))
    return kind == {ReduceType.kRedSum} and dtypes.bool_ not in ins and len(ins.union(out)) == 1


def are_commutative(types: set[ReduceType]) -> bool:
    """Whether joining by these, along one mesh dim after another, may be done in any order."""
    return len(types) <= 1 or types <= LINEAR


def _make_partial(flow: CallPlacement, rule: ShardingRule, call: OpCall) -> None:
    if rule.reduce is None or not are_commutative({_REDUCE_TYPES[rule.reduce], *flow.partial.values()}):
        return
    ends = {name for names in rule.outputs for name in names}
    for name, axes in flow.split.items():
        if name not in ends and (rule.padding is not None or is_even(flow, rule, call, name)):
            flow.reduced[name] = axes


def _place(flow: CallPlacement, rule: ShardingRule, names: DimNames, shape: tuple[int, ...]) -> Form:
    placements: list[Placement] = [Replicate()] * flow.mesh.ndim
    for dim, name in enumerate(names):
        axes = flow.split.get(name or "", [])
        ordered = axes == sorted(axes)
        for order, axis in enumerate(axes):
            placements[axis] = Shard(dim, shard_order=0 if ordered else order)
    for axis, kind in flow.partial.items():
        placements[axis] = Partial(kind)
    if rule.reduce is not None:
        for axis in itertools.chain(*flow.reduced.values()):
            placements[axis] = Partial(_REDUCE_TYPES[rule.reduce])
    return Form(flow.mesh, tuple(placements), shape)
