"""How many microbatches of each of its chunks a pipeline stage keeps when, under each schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from polyreme.mesh import Plan
from polyreme.mesh.schedules import ScheduleKind
from polyreme.mesh.timeline import Task


class Standing(NamedTuple):
    """A stage at a task. kind, chunk: of the task; chunk counts the stage's own, in the order of data flow.

    live: by chunk, microbatches whose forward has begun and whose backward has not ended, that of the task included.
    waiting: of these, those whose backward was cut and whose weights wait.
    """

    kind: str
    chunk: int
    live: tuple[int, ...]
    waiting: tuple[int, ...]


def standings(plan: Plan, stage: int) -> tuple[Standing, ...]:
    """What a stage may hold at a forward that has the loss, a backward or the second part of one; those that another
    exceeds left out.

    >>> standings(Plan.from_degrees(pp=4, num_microbatches=8), 1)
    (Standing(kind='B', chunk=0, live=(3,), waiting=(0,)),)
    """
    kind, pp, m = plan.schedule_kind, plan.mesh.pp, plan.num_microbatches
    if kind.peak_live is not None:
        tasks = ("B", "F") if stage == pp - 1 else ("B",)
        return tuple(Standing(task, 0, (kind.peak_live(pp, m, stage),), (0,)) for task in tasks)
    if kind.steady_rounds is not None and m > kind.steady_rounds * pp:
        m = kind.steady_rounds * pp + m % pp
    return _count(kind, pp, m, plan.virtual_stages, stage)


@lru_cache(maxsize=4096)
def _count(kind: ScheduleKind, pp: int, m: int, virtual: int, stage: int) -> tuple[Standing, ...]:
    chunks = [chunk for chunk, owner in enumerate(kind.stage_of_chunk(pp, virtual)) if owner == stage]
    split, last = kind.split_backward, len(kind.stage_of_chunk(pp, virtual)) - 1
    live: Counter[int] = Counter()
    waiting: Counter[int] = Counter()
    highest: list[Standing] = []
    seen: set[Standing] = set()
    for task in _tables(kind, pp, m, virtual)[stage]:
        live[task.chunk] += task.kind == "F"
        if task.kind == "F" and task.chunk != last:
            continue
        counts = tuple(live[c] for c in chunks), tuple(waiting[c] for c in chunks)
        standing = Standing(task.kind, chunks.index(task.chunk), *counts)
        if standing not in seen and not any(_covers(other, standing) for other in highest):
            highest = [other for other in highest if not _covers(standing, other)] + [standing]
        seen.add(standing)
        if task.kind != "F":
            waiting[task.chunk] += split * (1 if task.kind == "B" else -1)
            live[task.chunk] -= task.kind == "W" or not split
    return tuple(sorted(highest))


def _covers(one: Standing, other: Standing) -> bool:
    """Whether the same task begins with no less held in any way."""
    if (one.kind, one.chunk) != (other.kind, other.chunk):
        return False
    return all(a >= b for a, b in zip(one.live + one.waiting, other.live + other.waiting, strict=True))


@lru_cache(maxsize=64)
def _tables(kind: ScheduleKind, pp: int, m: int, virtual: int) -> Sequence[Sequence[Task]]:
    return kind.tables(pp, m, virtual)
