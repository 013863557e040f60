"""How an op that XLA cannot look into is split over a mesh: a rule over named dims, "*b [n], [n] -> *b [n]".

A dim that inputs and results share is computed piece by piece, wherever its pieces lie; a dim in brackets,
and one that only inputs or only results have, is whole on every device. "*b" stands for as many dims as there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core import dims
from polyreme.errors import ConfigError, ShapeError

_DIM = re.compile(r"(\[)?(\*?[A-Za-z]\w*)(\])?")


@dataclass(frozen=True)
class PartitionRule:
    """dims of each input and result, such as "*b n", and which of these dims every device needs whole."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    whole: frozenset[str]

    @classmethod
    def parse(cls, text: str, what: str) -> PartitionRule:
        """The rule that text says; ConfigError, beginning with `what`, for one that is no rule."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ConfigError(f"{what}: sharding={text!r} has no '->'; write it as 'b [n], [n] -> b [n]'")
        whole: set[str] = set()
        sides = [tuple(_dims(part, whole, what) for part in side.split(",")) for side in (left, right)]
        names = [{d for tensor in side for d in tensor.split()} for side in sides]
        return cls(sides[0], sides[1], frozenset(whole | (names[0] ^ names[1])))

    def split(self, run: Callable[..., Any], arrays: Sequence[Any], present: Sequence[int], what: str) -> Any:
        """run(*arrays), each device on its own pieces. present: which inputs of the rule the arrays are."""
        results = jax.eval_shape(run, *arrays)
        many = isinstance(results, (tuple, list))
        outs = list(results) if many else [results]
        if len(outs) != len(self.outputs):
            raise ConfigError(f"{what}: its sharding rule names {len(self.outputs)} results, and it gives {len(outs)}")
        named = [*(self.inputs[i] for i in present), *self.outputs]
        placed = [_named(d, a.shape, what) for d, a in zip(named, [*arrays, *outs], strict=True)]
        ins, results_of = placed[: len(arrays)], placed[len(arrays) :]
        # names of dims over inputs and results together
        labels = [f"input {i}" for i in range(len(arrays))] + [f"result {i}" for i in range(len(outs))]
        shapes = [tuple(a.shape) for a in (*arrays, *outs)]
        shown = [" ".join(names) for names in placed]
        dims.check(
            f"{what}: sharding rule", dict(zip(labels, shown, strict=True)), dict(zip(labels, shapes, strict=True))
        )

        def partition(mesh: Any, given: Sequence[Any], result: Any) -> tuple:
            axes = self._axes(ins, given)
            shardings = [NamedSharding(mesh, PartitionSpec(*(axes.get(d) for d in tensor))) for tensor in placed]
            made = shardings[len(arrays) :]
            return mesh, run, (type(results)(made) if many else made[0]), tuple(shardings[: len(arrays)])

        split = custom_partitioning(lambda *given: run(*given))
        split.def_partition(partition, sharding_rule=f"{_shown(ins)} -> {_shown(results_of)}")
        return split(*arrays)

    def _axes(self, ins: Sequence[Sequence[str]], given: Sequence[Any]) -> dict[str, Any]:
        """dim -> the mesh axes that split it, as the first input that has it lies; no axis splits two dims."""
        axes: dict[str, Any] = {}
        used: set[str] = set()
        for names, array in zip(ins, given, strict=True):
            for dim, entry in zip(names, tuple(array.sharding.spec), strict=False):
                own = {entry} if isinstance(entry, str) else set(entry or ())
                if own and dim not in axes and own.isdisjoint(used) and not self._is_whole(dim):
                    axes[dim] = entry
                    used |= own
        return axes

    def _is_whole(self, dim: str) -> bool:
        return dim in self.whole or f"*{dim.partition('_of_')[0]}" in self.whole


def _dims(text: str, whole: set[str], what: str) -> str:
    found = []
    for word in text.split():
        match = _DIM.fullmatch(word)
        if match is None or bool(match[1]) is not bool(match[3]):
            raise ConfigError(f"{what}: {word!r} in its sharding rule is no dim; write n, [n] or *n")
        found.append(match[2])
        if match[1]:
            whole.add(match[2])
    if sum(d.startswith("*") for d in found) > 1:
        raise ConfigError(f"{what}: [{text.strip()}] in its sharding rule has several starred dims; star one")
    return " ".join(found)


def _named(tensor: str, shape: Sequence[int], what: str) -> list[str]:
    """A name for each dim; those of a starred one are numbered from the last."""
    try:
        pairs = dims.pair(tensor, tuple(shape))
    except ShapeError as error:
        raise ShapeError(f"{what}: sharding rule {error}") from None
    names: list[str] = []
    for dim, sizes in pairs:
        count = len(sizes)
        names += [f"{dim[1:]}_of_{count - i}" for i in range(count)] if dim.startswith("*") else [dim]
    return names


def _shown(tensors: Sequence[Sequence[str]]) -> str:
    return ", ".join(" ".join(names) for names in tensors)
