"""The order of work of each pipeline schedule: pure functions of a few counts to task lists.

Names: p stages, m microbatches, v chunks per stage, s one stage.
A table is written as its list of (kind, chunk): the n-th F of a chunk is of microbatch n, and so for B and W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from polyreme.mesh.timeline import Durations, Task, run_in_order

Table = list[Task]
Step = tuple[str, int]


def gpipe(p: int, m: int) -> list[Table]:
    """All forwards, then all backwards. Source: arXiv:1811.06965, figure 2c."""
    return [_count([("F", s)] * m + [("B", s)] * m) for s in range(p)]


def one_forward_one_backward(p: int, m: int) -> list[Table]:
    """At most p - s microbatches are alive on stage s. Source: arXiv:2104.04473, figure 4 (top), PipeDream-Flush."""

    def stage(s: int) -> Table:
        f, b, warm = ("F", s), ("B", s), min(p - s - 1, m)
        return _count([f] * warm + [f, b] * (m - warm) + [b] * warm)

    return [stage(s) for s in range(p)]


def interleaved(p: int, m: int, v: int) -> list[Table]:
    """Chunk c p + s is on stage s; microbatches run a chunk in groups. Source: arXiv:2104.04473, 2.2.2, interleaved.

    The paper has groups of p and needs m to be a multiple of p. Here any m is cut into m // p groups of p or a few more
    (one group if m < p), with room in the warm-up for the largest: the bubble stays the paper's for every m >= p, and a
    stage holds at most (v - 1)(group - p) more chunk activations than with groups of p.
    """
    num_groups = max(1, m // p)
    bounds = [m * group // num_groups for group in range(num_groups + 1)]
    groups = [range(start, end) for start, end in pairwise(bounds)]
    largest = max(map(len, groups))

    def stage(s: int) -> Table:
        chunks = [c * p + s for c in range(v)]
        forwards = [Task("F", i, chunk) for group in groups for chunk in chunks for i in group]
        backwards = [Task("B", i, chunk) for group in groups for chunk in reversed(chunks) for i in group]
        warm = min(2 * (p - s - 1) + (v - 1) * largest, m * v)
        pairs = zip(forwards[warm:], backwards, strict=False)  # the last `warm` backwards have no partner
        steady = [task for pair in pairs for task in pair]
        return forwards[:warm] + steady + backwards[m * v - warm :]

    return [stage(s) for s in range(p)]


def zero_bubble_h1(p: int, m: int) -> list[Table]:
    """1F1B with the weight gradients of stage s put off by s microbatches. Source: arXiv:2401.10241, figure 3 (top)."""

    def stage(s: int) -> Table:
        f, b, w, warm = ("F", s), ("B", s), ("W", s), min(p - s - 1, m)
        late = min(s, m - warm)
        return _count([f] * warm + [f, b] * late + [f, b, w] * (m - warm - late) + [b, w] * warm + [w] * late)

    return [stage(s) for s in range(p)]


def zero_bubble_v(p: int, m: int) -> list[Table]:
    """Stage s holds chunks s and 2p - 1 - s: data goes down the stages and back up. Source: arXiv:2401.10241, ZB-V.

    The pattern needs 2p - 1 microbatches to fill. With fewer, the shorter is taken of a list schedule and the pattern
    without the microbatches that are not there: still a valid table, for no task reads another microbatch's result.
    """
    full = [_first(m, _v_stage(p, max(m, 2 * p - 1), s)) for s in range(p)]
    if m >= 2 * p - 1:
        return full
    return min(_v_list_schedule(p, m), full, key=lambda tables: _unit_makespan(tables, p))


def v_stage_of_chunk(p: int) -> tuple[int, ...]:
    """Stage of each of the 2p chunks of a V.

    >>> v_stage_of_chunk(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(p), *reversed(range(p)))


def _v_stage(p: int, m: int, s: int) -> Table:
    down, up = s, 2 * p - 1 - s
    f, b, w, f_up, b_up, w_up = ("F", down), ("B", down), ("W", down), ("F", up), ("B", up), ("W", up)
    warm = [f] * (2 * (p - s) - 1) + [f_up, f] * s + [f_up, b_up, w_up] * (p - s)
    steady = [f, b, w, f_up, b_up, w_up] * (m - 2 * p + 1 + s)
    # The last forwards are in; the stages nearer the turn have fewer left to come back up.
    drain = [b, w, f_up, b_up, w_up] * (p - 1 - s) + [b, b_up] * s + [b, w] * (p - s) + [w_up] * s + [w] * s
    return _count(warm + steady + drain)


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


def _unit_makespan(tables: list[Table], p: int) -> float:
    return max(span.end for span in run_in_order(tables, v_stage_of_chunk(p), Durations(), split=True))


def _count(steps: Sequence[Step]) -> Table:
    seen: Counter[Step] = Counter()
    table = []
    for kind, chunk in steps:
        table.append(Task(kind, seen[kind, chunk], chunk))
        seen[kind, chunk] += 1
    return table


def _first(m: int, table: Table) -> Table:
    return [task for task in table if task.microbatch < m]
