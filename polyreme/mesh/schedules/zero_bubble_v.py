"""ZBVPP (ZB-V): the backward split in two, the model folded into a V over the stages. Source: arXiv:2401.10241."""

from __future__ import annotations

from collections import Counter

from polyreme.mesh.schedules.record import (
    BubbleFormula,
    ScheduleKind,
    Step,
    Table,
    count_microbatches,
    v_stage_of_chunk,
)
from polyreme.mesh.timeline import Durations, Task, run_in_order


def tables(p: int, m: int, v: int) -> list[Table]:
    """Stage s holds chunks s and 2p - 1 - s: data goes down the stages and back up.

    The pattern needs 2p - 1 microbatches to fill. With fewer, the shorter is taken of a list schedule and the pattern
    without the microbatches that are not there: still a valid table, for no task reads another microbatch's result.
    """
    full = [_first(m, _v_stage(p, max(m, 2 * p - 1), s)) for s in range(p)]
    if m >= 2 * p - 1:
        return full
    return min(_v_list_schedule(p, m), full, key=lambda candidate: _unit_makespan(candidate, p))


def _v_stage(p: int, m: int, s: int) -> Table:
    down, up = s, 2 * p - 1 - s
    f, b, w, f_up, b_up, w_up = ("F", down), ("B", down), ("W", down), ("F", up), ("B", up), ("W", up)
    warm = [f] * (2 * (p - s) - 1) + [f_up, f] * s + [f_up, b_up, w_up] * (p - s)
    steady = [f, b, w, f_up, b_up, w_up] * (m - 2 * p + 1 + s)
    # The last forwards are in; the stages nearer the turn have fewer left to come back up.
    drain = [b, w, f_up, b_up, w_up] * (p - 1 - s) + [b, b_up] * s + [b, w] * (p - s) + [w_up] * s + [w] * s
    return count_microbatches(warm + steady + drain)


def _v_list_schedule(p: int, m: int) -> list[Table]:
    """In unit time, each stage takes its most urgent ready task: backwards first, then the forward nearer the end."""
    stage_of_chunk, limit = v_stage_of_chunk(p), 2 * p
    tables: list[Table] = [[] for _ in range(p)]
    started: Counter[Step] = Counter()
    ended: set[Task] = set()

    def has_room(down: int, up: int) -> bool:
        # m < limit - 1, so the way down alone cannot fill a stage and shut out what must come back up.
        return sum(started["F", chunk] - started["W", chunk] for chunk in (down, up)) < limit

    def pick(s: int) -> Task | None:
        down, up = s, 2 * p - 1 - s
        for kind, chunk in (("B", down), ("B", up), ("F", up), ("F", down), ("W", up), ("W", down)):
            task = Task(kind, started[kind, chunk], chunk)
            is_ready = task.microbatch < m and ended.issuperset(task.inputs(len(stage_of_chunk)))
            if is_ready and (kind != "F" or has_room(down, up)):
                return task
        return None

    while len(ended) < 3 * 2 * p * m:
        picked = [(s, task) for s in range(p) if (task := pick(s)) is not None]
        for s, task in picked:
            tables[s].append(task)
            started[task.kind, task.chunk] += 1
        ended.update(task for _, task in picked)
    return tables


def _unit_makespan(candidate: list[Table], p: int) -> float:
    return max(span.end for span in run_in_order(candidate, v_stage_of_chunk(p), Durations(), split=True))


def _first(m: int, table: Table) -> Table:
    return [task for task in table if task.microbatch < m]


ZERO_BUBBLE_V = ScheduleKind(
    name="ZBVPP",
    summary="the same, with the model folded into a V over the stages",
    source="arXiv:2401.10241, 2405.15362",
    tables=tables,
    least_virtual=2,
    most_virtual=2,
    is_v=True,
    alternative="ZBH1",
    split_backward=True,
    # No stage idles between its first and its last task.
    bubble=BubbleFormula(
        "0", lambda p, m, v: 0.0, "arXiv:2401.10241, ZB-V", is_of_span=True, least_microbatches=lambda p: 2 * p - 1
    ),
    steady_rounds=3,
)
