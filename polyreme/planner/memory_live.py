"""How many microbatches of each of its chunks a pipeline stage keeps when, under each schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from polyreme.mesh import Plan
from polyreme.mesh.schedule_tables import interleaved, zero_bubble_h1, zero_bubble_v
from polyreme.mesh.timeline import Task

_ENOUGH = 3
"""Rounds of as many microbatches as stages after which a schedule only repeats itself."""


class Standing(NamedTuple):
    """A stage as it begins a task. kind, chunk: of the task; chunk counts the stage's own, in the order of data flow.

    live: by chunk, microbatches whose forward has run and whose backward has not ended, that of the task included.
    waiting: of these, those whose backward was cut and whose weights wait.
    """

    kind: str
    chunk: int
    live: tuple[int, ...]
    waiting: tuple[int, ...]


def standings(plan: Plan, stage: int) -> tuple[Standing, ...]:
    """What a stage may hold as a backward, or the second part of one, begins; those that another exceeds left out.

    >>> standings(Plan.from_degrees(pp=4, num_microbatches=8), 1)
    (Standing(kind='B', chunk=0, live=(3,), waiting=(0,)),)
    """
    pp, m = plan.mesh.pp, plan.num_microbatches
    if plan.schedule == "1F1B":
        return (Standing("B", 0, (min(m, pp - stage),), (0,)),)
    if plan.schedule == "FThenB":
        return (Standing("B", 0, (m,), (0,)),)
    few = m if m <= _ENOUGH * pp else _ENOUGH * pp + m % pp
    return _walked(plan.schedule or "", pp, few, plan.virtual_stages, stage)


@lru_cache(maxsize=4096)
def _walked(name: str, pp: int, m: int, virtual: int, stage: int) -> tuple[Standing, ...]:
    chunks = [stage, 2 * pp - 1 - stage] if name == "ZBVPP" else [c * pp + stage for c in range(virtual)]
    split = name != "VPP"
    live: Counter[int] = Counter()
    waiting: Counter[int] = Counter()
    found: set[Standing] = set()
    for task in _tables(name, pp, m, virtual)[stage]:
        if task.kind == "F":
            live[task.chunk] += 1
            continue
        counts = tuple(live[c] for c in chunks), tuple(waiting[c] for c in chunks)
        found.add(Standing(task.kind, chunks.index(task.chunk), *counts))
        waiting[task.chunk] += split * (1 if task.kind == "B" else -1)
        live[task.chunk] -= task.kind == "W" or not split
    return tuple(sorted(each for each in found if not any(_exceeds(other, each) for other in found)))


def _exceeds(one: Standing, other: Standing) -> bool:
    """Whether the same task begins with no less held in any way."""
    same = (one.kind, one.chunk) == (other.kind, other.chunk) and one != other
    return same and _covers(one.live, other.live) and _covers(one.waiting, other.waiting)


def _covers(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))


@lru_cache(maxsize=64)
def _tables(name: str, pp: int, m: int, virtual: int) -> list[list[Task]]:
    if name == "VPP":
        return interleaved(pp, m, virtual)
    return zero_bubble_h1(pp, m) if name == "ZBH1" else zero_bubble_v(pp, m)
