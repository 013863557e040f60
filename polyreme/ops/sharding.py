"""Sharding rules that several ops share: elementwise, reductions, ops along an axis, moved elements.

Each is the `rule=` of an op's declaration, or makes one; an op whose rule is its alone has it in its own file. What the
fields of a rule mean is said in core/sharding_rule.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from polyreme.core import dtype as dtypes
from polyreme.core.sharding_rule import DimNames, Linear, OpCall, Padding, Reduce, RuleFor, ShardingRule

# names


def dim_names(shape: Sequence[int], prefix: str = "d") -> DimNames:
    """A name for each dim, counted from the last, so that shapes that broadcast share theirs."""
    return tuple(f"{prefix}{len(shape) - i}" for i in range(len(shape)))


def broadcast_names(shape: Sequence[int], out: Sequence[int], prefix: str = "d") -> DimNames:
    """Dim names of a shape that broadcasts to out: none for a dim of size 1 that grows."""
    sizes = out[len(out) - len(shape) :]
    return tuple(
        None if n != m else name for name, n, m in zip(dim_names(shape, prefix), shape, sizes, strict=True)
    )  # fmt: skip


def without(names: DimNames, *dims: int) -> DimNames:
    """The names, but none for these dims."""
    return tuple(None if i in dims else name for i, name in enumerate(names))


def unnamed(shapes: Sequence[Sequence[int]]) -> tuple[DimNames, ...]:
    """No names: every device needs these tensors whole."""
    return tuple((None,) * len(shape) for shape in shapes)


# element by element


def elementwise(call: OpCall) -> ShardingRule:
    """Dims that broadcast together are one; a dim of size 1 that grows is whole."""
    out = call.outs[0]
    inputs = tuple((None,) * len(s) if len(s) > len(out) else broadcast_names(s, out) for s in call.shapes)
    outputs = tuple(dim_names(s) if s == out else (None,) * len(s) for s in call.outs)
    return ShardingRule(inputs, outputs, piecewise=not call.drawn)


def elementwise_sum(call: OpCall) -> ShardingRule:
    """elementwise for an op that is linear in all its inputs together, such as add."""
    return dataclasses.replace(elementwise(call), linear="jointly")


def elementwise_product(call: OpCall) -> ShardingRule:
    """elementwise for an op that is linear in each of its inputs alone, such as multiply."""
    return dataclasses.replace(elementwise(call), linear="alone")


# products


def matrix_product(call: OpCall) -> ShardingRule | None:
    """[*b, m, k] x [*b, k, n] -> [*b, m, n], vectors being [k]; the sum over a split k makes the result Partial."""
    x, y, out = call.shapes[0], call.shapes[1], call.outs[0]
    if not x or not y:
        return None
    batch = out[: len(out) - (len(x) > 1) - (len(y) > 1)]
    rows = ("k", "m") if call.attrs.get("transpose_x") else ("m", "k")
    columns = ("n", "k") if call.attrs.get("transpose_y") else ("k", "n")
    x_names = (*broadcast_names(x[:-2], batch, "b"), *rows) if len(x) > 1 else ("k",)
    y_names = (*broadcast_names(y[:-2], batch, "b"), *columns) if len(y) > 1 else ("k",)
    out_names = (*dim_names(batch, "b"), *("m",) * (len(x) > 1), *("n",) * (len(y) > 1))
    return ShardingRule((x_names, y_names), (out_names,), reduce="sum", linear="alone", piecewise=True)


# one dim is gone or whole


def dims_in_axis(call: OpCall) -> set[int]:
    """The dims of the first input that its axis (or dim) names: all for None and for no axes."""
    ndim = len(call.shapes[0])
    axis = call.attrs.get("axis", call.attrs.get("dim"))
    axes = range(ndim) if axis is None or axis == () else [axis] if isinstance(axis, int) else axis
    return {a % ndim for a in axes} if ndim else set()


def reduction(reduce: Reduce | None = None, padding: Padding | None = None, *, linear: Linear = "no") -> RuleFor:
    """The rule of an op that has no dims of its axis in its result, or 1 with keepdim. Split, they make it Partial.

    reduce, padding: as in ShardingRule. linear: of floating inputs; whole numbers and truth values are joined first.
    """

    def rule(call: OpCall) -> ShardingRule | None:
        shape, keep = call.shapes[0], bool(call.attrs.get("keepdim", False))
        gone = dims_in_axis(call)
        if any(len(out) != len(shape) - (0 if keep else len(gone)) for out in call.outs):
            return None
        names = dim_names(shape)
        out = tuple(None if i in gone else name for i, name in enumerate(names) if keep or i not in gone)
        return ShardingRule(
            call.inputs(**{call.params[0]: names}),
            (out,) * len(call.outs),
            reduce=reduce,
            padding=padding,
            linear=linear if dtypes.is_inexact(call.dtypes[0]) else "no",
        )

    return rule


def along_axis(linear: Linear = "no", *, default: int | None = None) -> RuleFor:
    """The rule of an op that needs the dims of its axis (or dim) whole; the others go through.

    default: the axis that None stands for; without it an op without axis, which flattens, has no rule here.
    """

    def rule(call: OpCall) -> ShardingRule | None:
        shape = call.shapes[0]
        axis = call.attrs.get("axis", call.attrs.get("dim"))
        axis = default if axis is None else axis
        if axis is None or not shape:
            return None
        whole = {a % len(shape) for a in ([axis] if isinstance(axis, int) else axis)}
        names = without(dim_names(shape), *whole)
        left = tuple(name for i, name in enumerate(names) if i not in whole)
        by_rank = {len(left): left, len(names): names}
        if any(len(out) not in by_rank for out in call.outs):
            return None
        outputs = tuple(by_rank[len(out)] for out in call.outs)
        return ShardingRule(call.inputs(**{call.params[0]: names}), outputs, linear=linear)

    return rule


def along_last(call: OpCall) -> ShardingRule | None:
    """The last dim is whole, the others go through."""
    return along_axis(default=-1)(dataclasses.replace(call, attrs={}))


# elements moved


def permutes(order: Callable[[OpCall, int], Sequence[int]]) -> RuleFor:
    """The rule of an op that orders dims anew: dim i of the result is dim order(call, ndim)[i] of the input."""

    def rule(call: OpCall) -> ShardingRule:
        names = dim_names(call.shapes[0])
        out = tuple(names[i] for i in order(call, len(names)))
        return ShardingRule((names,), (out,), linear="moves", piecewise=True)

    return rule


def last_two_swapped(call: OpCall, ndim: int) -> list[int]:
    """The order of dims of a transposed matrix, or batch of matrices."""
    order = list(range(ndim))
    order[-2:] = order[:-3:-1]
    return order


def regroups(call: OpCall) -> ShardingRule | None:
    """Dims that join or part: the first of each group keeps its name, where pieces stay whole rows."""
    shape, out = call.shapes[0], call.outs[0]
    if 0 in shape or math.prod(shape) != math.prod(out):
        return None
    names: list[str | None] = [None] * len(shape)
    out_names: list[str | None] = [None] * len(out)
    aligned = set()
    for number, (ins, outs) in enumerate(_groups(shape, out)):
        names[ins[0]] = out_names[outs[0]] = f"g{number}"
        if len(ins) > 1 or len(outs) > 1:
            aligned.add(f"g{number}")
    return ShardingRule((tuple(names),), (tuple(out_names),), aligned=frozenset(aligned), linear="moves")


def _groups(shape: Sequence[int], out: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dims of both, none of size 1, in the smallest runs that hold equally many elements."""
    ins = [i for i, n in enumerate(shape) if n != 1]
    outs = [i for i, n in enumerate(out) if n != 1]
    groups: list[tuple[list[int], list[int]]] = []
    a = b = 0
    while a < len(ins):
        left, right = [ins[a]], [outs[b]]
        a, b = a + 1, b + 1
        while (have := math.prod(shape[i] for i in left)) != (want := math.prod(out[i] for i in right)):
            if have < want:
                left.append(ins[a])
                a += 1
            else:
                right.append(outs[b])
                b += 1
        groups.append((left, right))
    return groups


def cuts(call: OpCall) -> ShardingRule:
    """The rule of an op that cuts its axis into several results: that dim is whole, or gone."""
    dim = call.dim(call.attrs["axis"])
    names = without(dim_names(call.shapes[0]), dim)
    gone = bool(call.outs) and len(call.outs[0]) < len(names)
    out = (*names[:dim], *names[dim + 1 :]) if gone else names
    return ShardingRule((names,), (out,) * len(call.outs), linear="moves")


def keeps_equal_dims(linear: Linear = "no") -> RuleFor:
    """The rule of an op that changes the size of some dims, which are whole; the others go through."""

    def rule(call: OpCall) -> ShardingRule:
        shape, out = call.shapes[0], call.outs[0]
        names = tuple(name if n == m else None for name, n, m in zip(dim_names(shape), shape, out, strict=True))
        return ShardingRule(call.inputs(**{call.params[0]: names}), (names,), linear=linear)

    return rule


def like_first(linear: Linear = "no") -> RuleFor:
    """The rule of an op whose result has the dims of its first input; other inputs are whole."""

    def rule(call: OpCall) -> ShardingRule:
        names = dim_names(call.shapes[0])
        return ShardingRule((names, *unnamed(call.shapes[1:])), (names,), linear=linear)

    return rule


def grows(call: OpCall) -> ShardingRule:
    """The rule of an op that repeats its input: dims that keep their size go through."""
    shape, out = call.shapes[0], call.outs[0]
    names = broadcast_names(shape, out)
    return ShardingRule((names,), ((*(None,) * (len(out) - len(shape)), *names),), linear="moves")


# batches and images


def by_batch(call: OpCall) -> ShardingRule:
    """The first dim of the first input goes through; all else is whole."""
    names = ("b", *(None,) * (len(call.shapes[0]) - 1))
    return ShardingRule((names, *unnamed(call.shapes[1:])), (names, *unnamed(call.outs[1:])))


def by_image(call: OpCall) -> ShardingRule:
    """The batch, and channels where they stay, go through; places are whole."""
    shape = call.shapes[0]
    last = not str(call.attrs.get("data_format", "NC")).startswith("NC")
    channel = len(shape) - 1 if last else 1
    names: list[str | None] = [None] * len(shape)
    names[0] = "b"
    if call.outs[0][channel] == shape[channel]:
        names[channel] = "c"
    return ShardingRule((tuple(names), *unnamed(call.shapes[1:])), (tuple(names),) * len(call.outs))
