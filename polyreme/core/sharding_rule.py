"""Sharding rules: how the dims of an op's inputs and results go together, declared with the op.

A rule names every dim, as einsum does. A name that a mesh axis splits in an input is split in the results that
have it; a name that no result has is summed, or joined otherwise, over its pieces. Rules are read by the placements of
Tensors on a mesh, by the inference of a model's logical dims, and by partition.py, which runs calls that XLA cannot
look into piece by piece. They say where values lie and what adds up, never what the values are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polyreme.core import dims
from polyreme.errors import ConfigError, ShapeError

DimNames = tuple[str | None, ...]
"""The name of each dim of a tensor; None for one that every device needs whole."""

Reduce = Literal["sum", "avg", "prod", "max", "min", "any", "all"]
Padding = Literal["zero", "one", "low", "high"]
Linear = Literal["no", "jointly", "alone", "moves"]
Role = Literal["heads", "classes", "contracted"]


@dataclass(frozen=True)
class ShardingRule:
    """Dim names of the inputs and results of one call, and what may stay in pieces or addends.

    whole: names that every device needs whole. aligned: names split only where all pieces are equal; their sizes may be
    multiples of each other.

    reduce: how the pieces of a name that no result has join; None if results are joined at once. padding: what rows
    added to make uneven pieces even hold, so that they change no result; None if no value does. linear: which addends
    stay addends: none; sums and averages, if all inputs are such ("jointly", add) or exactly one of linear_in is
    ("alone", multiply; None stands for all inputs); any kind, as elements only move ("moves", reshape).
    piecewise: the op's function computes a piece of its results from the same pieces of its inputs, so that the
    gradient of an input without the name is a sum of addends.

    lookup: the name of the second input's rows that the first one, ids, picks. laid_out: inputs and results are laid
    out by their names before and after the op runs, because XLA's partitioner aborts on or miscounts other layouts.
    roles: what names mean to a model, for ops whose function differs by device or hides it.
    """

    inputs: tuple[DimNames, ...]
    outputs: tuple[DimNames, ...]
    whole: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()
    reduce: Reduce | None = None
    padding: Padding | None = "zero"
    linear: Linear = "no"
    linear_in: tuple[int, ...] | None = None
    piecewise: bool = False
    lookup: str | None = None
    laid_out: bool = False
    roles: tuple[tuple[str, Role], ...] = ()

    def split_name(self, name: str | None) -> str | None:
        """The name of a dim if a mesh axis may split it, else None."""
        return None if name in self.whole else name


@dataclass(frozen=True)
class OpCall:
    """An op call as rules see it: parameter name, shape and dtype of each array it takes, its attributes, and shape and
    dtype of each result. drawn: it takes random numbers."""

    name: str
    params: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    attrs: dict[str, Any]
    outs: tuple[tuple[int, ...], ...]
    out_dtypes: tuple[Any, ...]
    drawn: bool = False

    @classmethod
    def of(
        cls, name: str, params: Sequence[str], arrays: Sequence[Any], attrs: dict[str, Any], outs: Sequence[Any]
    ) -> OpCall:
        """A call on arrays, or on what else has a shape and a dtype, that draws nothing."""
        shapes, out_shapes = (tuple(tuple(a.shape) for a in side) for side in (arrays, outs))
        return cls(
            name, tuple(params), shapes, tuple(a.dtype for a in arrays), attrs, out_shapes, tuple(o.dtype for o in outs)
        )

    def shape(self, param: str) -> tuple[int, ...] | None:
        """Shape of the first array given for a parameter; None if it was left out."""
        return next((s for p, s in zip(self.params, self.shapes, strict=True) if p == param), None)

    def inputs(self, **names: DimNames) -> tuple[DimNames, ...]:
        """Dim names of every input: those of the parameters named here, none for the rest."""
        return tuple(names.get(p, (None,) * len(s)) for p, s in zip(self.params, self.shapes, strict=True))

    def dim(self, axis: int) -> int:
        """A dim of the first input, counted from 0."""
        ndim = len(self.shapes[0])
        return axis % ndim if ndim else 0


RuleFor = Callable[[OpCall], ShardingRule | None]
"""An op's rule for one call; None for a call that none describes."""


def as_laid_out(call: OpCall) -> ShardingRule | None:
    """The rule of an op that says itself where its result lies: none, it is read off the result."""
    return None


_DIM = re.compile(r"(\[)?(\*?[A-Za-z]\w*)(\])?")


@dataclass(frozen=True)
class DimsRule:
    """A rule written as dims, "*b [n], [n] -> *b [n]", for calls of any shapes.

    A name in brackets, and one that only inputs or only results have, is whole. "*b" stands for any number of dims.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    whole: frozenset[str]
    params: tuple[str, ...]
    what: str

    @classmethod
    def parse(cls, text: str, params: Sequence[str], what: str) -> DimsRule:
        """The rule that text says of an op with these tensor parameters; ConfigError, beginning with `what`, for one
        that is no rule or names another number of inputs."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ConfigError(f"{what}: sharding={text!r} has no '->'; write it as 'b [n], [n] -> b [n]'")
        whole: set[str] = set()
        inputs, outputs = (tuple(_dims(part, whole, what) for part in side.split(",")) for side in (left, right))
        if len(inputs) != len(params):
            raise ConfigError(
                f"{what}: its sharding rule names {len(inputs)} inputs, and it has {len(params)}: {', '.join(params)}"
            )
        alone = _names(inputs) ^ _names(outputs)
        return cls(inputs, outputs, frozenset(whole | alone), tuple(params), what)

    def __call__(self, call: OpCall) -> ShardingRule:
        """The rule for a call; ConfigError for another number of results, ShapeError for shapes that do not fit."""
        if len(call.outs) != len(self.outputs):
            raise ConfigError(
                f"{self.what}: its sharding rule names {len(self.outputs)} results, and it gives {len(call.outs)}"
            )
        inputs = dict(zip(self.params, self.inputs, strict=True))
        patterns: list[str | None] = [*map(inputs.get, call.params), *self.outputs]  # None for a random key
        shapes = [*call.shapes, *call.outs]
        tensors = [
            (None,) * len(s) if p is None else _number(p, s, self.what) for p, s in zip(patterns, shapes, strict=True)
        ]
        count = len(call.params)
        labels = [*(f"input {i}" for i in range(count)), *(f"result {i}" for i in range(len(self.outputs)))]
        shown = {
            label: " ".join(map(str, names))
            for label, names, pattern in zip(labels, tensors, patterns, strict=True)
            if pattern is not None
        }
        dims.check(f"{self.what}: sharding rule", shown, dict(zip(labels, shapes, strict=True)))
        whole = {name for tensor in tensors for name in tensor if name is not None and self._is_whole(name)}
        return ShardingRule(tuple(tensors[:count]), tuple(tensors[count:]), frozenset(whole))

    def _is_whole(self, name: str) -> bool:
        return name in self.whole or f"*{name.partition('_of_')[0]}" in self.whole


def _names(tensors: Sequence[str]) -> set[str]:
    return {name for tensor in tensors for name in tensor.split()}


def _dims(text: str, whole: set[str], what: str) -> str:
    names = []
    for word in text.split():
        match = _DIM.fullmatch(word)
        if match is None or bool(match[1]) is not bool(match[3]):
            raise ConfigError(f"{what}: {word!r} in its sharding rule is no dim; write n, [n] or *n")
        names.append(match[2])
        if match[1]:
            whole.add(match[2])
    if sum(name.startswith("*") for name in names) > 1:
        raise ConfigError(f"{what}: [{text.strip()}] in its sharding rule has several starred dims; star one")
    return " ".join(names)


def _number(pattern: str, shape: Sequence[int], what: str) -> tuple[str, ...]:
    """A name for each dim; those of a starred one are numbered from the last."""
    try:
        pairs = dims.pair(pattern, tuple(shape))
    except ShapeError as error:
        raise ShapeError(f"{what}: sharding rule {error}") from None
    names: list[str] = []
    for dim, sizes in pairs:
        count = len(sizes)
        names += [f"{dim[1:]}_of_{count - i}" for i in range(count)] if dim.startswith("*") else [dim]
    return tuple(names)
