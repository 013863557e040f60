"""VPP (interleaved 1F1B): several chunks of the model per stage. Source: arXiv:2104.04473, 2.2.2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from polyreme.mesh.schedules.record import BubbleFormula, ScheduleKind, Table, longest_send, stage_seconds
from polyreme.mesh.timeline import Durations, Task


def tables(p: int, m: int, v: int) -> list[Table]:
    """Chunk c p + s is on stage s; microbatches run a chunk in groups.

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


def step_seconds(stages: Sequence[Sequence[Durations]], m: int) -> float:
    """m max(t) + (sum(t) - max(t)) / v, t the work of a stage, and the sends. Source: arXiv:2104.04473, 2.2."""
    p, v = len(stages), len(stages[0])
    works, send = stage_seconds(stages), longest_send(stages)
    longest = max(works)
    # a chunk's round trip through all stages takes p chunks and p sends: there is a wait where m has no room for it
    return m * longest + (sum(works) - longest) / v + 2 * (p - 1) * send + (v - 1) * send


INTERLEAVED = ScheduleKind(
    name="VPP",
    summary="several chunks of the model per stage, so the pipeline fills sooner",
    source="arXiv:2104.04473, 2.2.2",
    tables=tables,
    least_virtual=2,
    most_virtual=math.inf,
    alternative="1F1B",
    # Idle per stage (p - 1)(tF + tB) / v. The paper states it for m a multiple of p.
    bubble=BubbleFormula(
        "(p-1)/(v*m+p-1)",
        lambda p, m, v: (p - 1) / (v * m + p - 1),
        "arXiv:2104.04473, 2.2.2",
        least_microbatches=lambda p: p,
    ),
    step_seconds=step_seconds,
    steady_rounds=3,
    in_groups=True,
)
