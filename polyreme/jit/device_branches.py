"""Branches of a computation that need nothing of each other, each on devices of its own, in one SPMD program.

Devices along the axis of a mesh run different branches: a conditional on the axis index inside a shard_map over that
axis alone, so that a branch is split over the other axes as everything is. Results are exchanged afterwards, and
gradients after the backward, which runs a branch again: what it keeps of the forward would take room on all devices.
Source: arXiv:2211.00235. See docs/decisions/0017-branches-over-an-axis.md.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from polyreme.core import dtype as dtypes
from polyreme.core import layout, state
from polyreme.core.devices.abstract import original
from polyreme.core.kernel import Kernel
from polyreme.core.layout import Layout
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, PlacementError
from polyreme.jit.region import Inputs, Out, Region, SharedArrayError, evaluate, returned, separating, trace
from polyreme.mesh.strategy import BRANCHES


def branches(functions: Sequence[Callable[[], Any]], axis: str = BRANCHES) -> list[Any]:
    """[f() for f in functions], each on devices of its own where the plan in force gives them some.

    axis: the logical dim of activations that the plan's strategy maps to a mesh axis, of as many devices as there are
    functions (`mesh.branch_parallel`, `Plan.from_degrees(branch_axis=)`). Without a plan, where it maps no axis, and in
    eager code, every device runs all of them. The functions take nothing, and read the Tensors they need; none may
    need what another computes. They may draw random numbers, the same as if called one after another, and write no
    Tensor. In backward each is run again, but where all run everywhere.

    Raises ConfigError for no functions, PlacementError for an axis of another number of devices and for one that splits
    something else too, CaptureError for functions that write Tensors.

    >>> from polyreme.ops.creation import ones
    >>> x = ones([2])
    >>> [y.tolist() for y in branches([lambda: x + 1, lambda: x * 3])]
    [[2.0, 2.0], [3.0, 3.0]]
    """
    functions = list(functions)
    if not functions or not all(map(callable, functions)):
        raise ConfigError(f"branches: functions={functions!r}; give a list of functions that take nothing")
    placed = layout.active.layout
    axes = () if placed is None else _axes(placed, axis, len(functions))
    if placed is None or not axes or not state.capturing():
        return [function() for function in functions]
    _runs.axes += axes
    return separating(lambda: _run_apart(functions, placed, axes))


@contextmanager
def counting_branches() -> Iterator[list[str]]:
    """Inside the block, the axes of every `branches` that runs on devices of its own, in the order that they are
    captured."""
    outer, _runs.axes = _runs.axes, []
    try:
        yield _runs.axes
    finally:
        outer += _runs.axes
        _runs.axes = outer


class _Runs(threading.local):
    def __init__(self) -> None:
        self.axes: list[str] = []


_runs = _Runs()


def _axes(placed: Layout, axis: str, count: int) -> tuple[str, ...]:
    """The mesh axes that branches lie along; none if they are of one device."""
    act = placed.plan.strategy.rule("act")
    axes = tuple(a for a in act.get(axis, ()) if placed.mesh.shape.get(a, 1) > 1)
    ways = math.prod(placed.mesh.shape[a] for a in axes)
    if axes and ways != count:
        raise PlacementError(
            f"branches: {count} functions over mesh axis {'+'.join(axes)} of {ways} devices; set its degree to "
            f"{count}, or to 1 to run all of them everywhere"
        )
    other = next((dim for dim, used in act.items() if dim != axis and set(used) & set(axes)), None)
    if other is not None:
        raise PlacementError(
            f"branches: mesh axis {'+'.join(axes)} has other devices for each branch, and splits dim {other!r} too; "
            f"drop one of {axis!r} and {other!r} from the strategy"
        )
    return axes


def _run_apart(functions: Sequence[Callable[[], Any]], placed: Layout, axes: tuple[str, ...]) -> list[Any]:
    regions, before = [], []
    watcher = state.code_watcher()
    for function in functions:
        converted = function if watcher is None else watcher.converted(function)
        region = trace(lambda converted=converted: [converted()])
        before += [(ended.tensor, state.read(ended.tensor)) for ended in region.written.values()]
        _write_keys(region)
        regions.append(region)
    try:
        inputs = Inputs(regions)
    except SharedArrayError:
        # they are traced again, from the same random keys
        for tensor, array in reversed(before):
            state.write(tensor, array)
        raise
    run = _Apart(regions, [inputs.consts(region) for region in regions], placed, axes)
    kernel = Kernel(run.kernel(), "branches", saves=True)
    results = tape.apply(kernel, tuple(inputs.arrays), tuple(inputs.edges))
    return [
        returned(region, dict(zip(outs, results[start:], strict=False)))
        for region, outs, start in zip(regions, run.outs, run.starts, strict=True)
    ]


def _write_keys(region: Region) -> None:
    """Move random generators on as the region does, on all devices: the next branch's numbers follow from there."""
    if region.grads or any(isinstance(ended.tensor, Tensor) for ended in region.written.values()):
        raise CaptureError(
            "branches: a function writes a Tensor or a gradient, which other devices would not see; return it instead"
        )
    if not region.written:
        return
    ends = sorted(region.written.values(), key=lambda ended: ended.out)
    wanted = {ended.out for ended in ends}
    jaxpr = region.closed.jaxpr
    alone, kept, _ = partial_eval.dce_jaxpr_consts(jaxpr, [i in wanted for i in range(len(jaxpr.outvars))])
    consts = [original(c) for c, is_kept in zip(region.closed.consts, kept, strict=True) if is_kept]
    arrays = jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, consts))()
    for ended, array in zip(ends, arrays, strict=True):
        state.write(ended.tensor, array)


class _Slots:
    """Arrays of which each is some branches' alone, one of each branch to a slot: what devices hold beside each other,
    and exchange in one permute.

    owners: of each array, its branch. avals, branches: of each slot, and the number of each branch's array in it.
    """

    def __init__(self, avals: Sequence[Any], owners: Sequence[int]) -> None:
        self.avals: list[Any] = []
        self.branches: list[dict[int, int]] = []
        self.count = len(owners)
        for number, (aval, owner) in enumerate(zip(avals, owners, strict=True)):
            slot = next(self._fitting(aval, owner), len(self.avals))
            if slot == len(self.avals):
                self.avals.append(aval)
                self.branches.append({})
            self.branches[slot][owner] = number

    def _fitting(self, aval: Any, owner: int) -> Iterator[int]:
        """Slots for arrays of this shape and dtype in which the branch has none yet."""
        for slot, (other, taken) in enumerate(zip(self.avals, self.branches, strict=True)):
            if (other.shape, other.dtype) == (aval.shape, aval.dtype) and owner not in taken:
                yield slot

    def of_branch(self, branch: int, arrays: dict[int, Any]) -> tuple:
        """The slots of a device of this branch, given its arrays by their number."""
        return tuple(
            arrays[taken[branch]] if branch in taken else jnp.zeros(aval.shape, aval.dtype)
            for aval, taken in zip(self.avals, self.branches, strict=True)
        )

    def exchanged(self, held: Sequence[Any], axes: tuple[str, ...], ways: int) -> list[Any]:
        """Every array, on every device, given what each device has in the slots."""
        index = lax.axis_index(axes)
        every: dict[int, Any] = {}
        for array, taken in zip(held, self.branches, strict=True):
            every |= dict.fromkeys(taken.values(), array)
            for step in range(1, ways):
                moves = [(branch, (branch + step) % ways) for branch in taken]
                received = lax.ppermute(array, axes, moves)
                for branch, number in taken.items():
                    every[number] = jnp.where(index == (branch + step) % ways, received, every[number])
        return [every[number] for number in range(self.count)]


class _Apart:
    """The kernel of branches over mesh axes: arrays that the branches read -> all their results.

    outs: of each branch, the outputs of its region that are results; starts: where these begin among all results.
    """

    def __init__(
        self, regions: Sequence[Region], consts: Sequence[list[int]], placed: Layout, axes: tuple[str, ...]
    ) -> None:
        self.regions, self.consts, self.placed, self.axes = regions, consts, placed, axes
        self.outs = [
            list(dict.fromkeys(leaf.index for leaf in region.values[0][1] if isinstance(leaf, Out)))
            for region in regions
        ]
        self.starts = [sum(map(len, self.outs[:branch])) for branch in range(len(regions))]
        owners = [branch for branch, outs in enumerate(self.outs) for _ in outs]
        avals = [r.closed.out_avals[out] for r, outs in zip(regions, self.outs, strict=True) for out in outs]
        self.results = _Slots(avals, owners)

    def kernel(self) -> Callable[..., tuple]:
        """The kernel, with its own backward."""

        def plain(*arrays: Any) -> tuple:
            return self._forward(arrays)

        def forward(*arrays: Any) -> tuple:
            return self._forward(arrays), arrays

        run = jax.custom_vjp(plain)
        run.defvjp(forward, self._backward)
        return lambda *arrays: run(*arrays)

    def _forward(self, arrays: tuple) -> tuple:
        def local(*arrays: Any) -> tuple:
            def side(branch: int) -> Callable[[], tuple]:
                def run() -> tuple:
                    start = self.starts[branch]
                    return self.results.of_branch(branch, dict(enumerate(self._branch(branch, arrays), start)))

                return run

            held = lax.switch(lax.axis_index(self.axes), [side(branch) for branch in range(self.ways)])
            return tuple(self.results.exchanged(held, self.axes, self.ways))

        return self._over_axes(local)(*arrays)

    def _backward(self, arrays: tuple, cotangents: tuple) -> tuple:
        users = [[b for b in range(self.ways) if at in self.consts[b]] for at in range(len(arrays))]
        wanted = [at for at, array in enumerate(arrays) if dtypes.is_inexact(array.dtype)]
        alone = [at for at in wanted if len(users[at]) == 1]
        shared = [at for at in wanted if len(users[at]) > 1]
        slots = _Slots([arrays[at] for at in alone], [users[at][0] for at in alone])

        pulls = [
            self._pullback(branch, [at for at in wanted if branch in users[at]], arrays, cotangents)
            for branch in range(self.ways)
        ]

        def local(arrays: tuple, cotangents: tuple) -> tuple:
            def side(branch: int) -> Callable[[], tuple]:
                def run() -> tuple:
                    grads = pulls[branch](arrays, cotangents)
                    apart = {i: grads[at] for i, at in enumerate(alone) if at in grads}
                    return slots.of_branch(branch, apart), [
                        grads[at] if at in grads else jnp.zeros_like(arrays[at]) for at in shared
                    ]

                return run

            held, addends = lax.switch(lax.axis_index(self.axes), [side(branch) for branch in range(self.ways)])
            return slots.exchanged(held, self.axes, self.ways), [lax.psum(a, self.axes) for a in addends]

        apart, sums = self._over_axes(local)(arrays, cotangents)
        found = dict(zip((*alone, *shared), (*apart, *sums), strict=True))
        return tuple(found.get(at) for at in range(len(arrays)))

    def _pullback(
        self, branch: int, ours: list[int], arrays: tuple, cotangents: tuple
    ) -> Callable[[tuple, tuple], dict[int, Any]]:
        """(arrays, cotangents of all results) -> gradients of one branch's arrays, by their number.

        It is traced here, outside of the shard_map, because jax transposes no sharding constraint of the whole mesh
        inside of one.
        """
        start = self.starts[branch]
        stop = start + len(self.outs[branch])

        def pull(diff: list[Any], others: dict[int, Any], cotangents: list[Any]) -> list[Any]:
            def again(*diff: Any) -> list[Any]:
                every = others | dict(zip(ours, diff, strict=True))
                ends = evaluate(self.regions[branch], [every[at] for at in self.consts[branch]])
                return [ends[out] for out in self.outs[branch]]

            return list(jax.vjp(again, *diff)[1](cotangents))

        def split(arrays: tuple, cotangents: tuple) -> tuple:
            others = {at: arrays[at] for at in self.consts[branch] if at not in ours}
            return [arrays[at] for at in ours], others, list(cotangents[start:stop])

        closed = jax.make_jaxpr(pull)(*split(arrays, cotangents))
        run = jex.jaxpr_as_fun(closed)
        return lambda arrays, cotangents: dict(zip(ours, run(*jax.tree.leaves(split(arrays, cotangents))), strict=True))

    @property
    def ways(self) -> int:
        """Number of branches."""
        return len(self.regions)

    def _branch(self, branch: int, arrays: Sequence[Any]) -> list[Any]:
        """The results of one branch."""
        ends = evaluate(self.regions[branch], [arrays[at] for at in self.consts[branch]])
        return [ends[out] for out in self.outs[branch]]

    def _over_axes(self, local: Callable[..., Any]) -> Callable[..., Any]:
        # check_vma off: that all devices have the same results in the end is the exchange's doing
        return jax.shard_map(
            local, mesh=self.placed.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(),
            axis_names=set(self.axes), check_vma=False,
        )  # fmt: skip
