"""1F1B (PipeDream-Flush): a backward as soon as there is one. Source: arXiv:2104.04473, figure 4 (top)."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme.mesh.schedules.record import (
    BubbleFormula,
    ScheduleKind,
    Table,
    count_microbatches,
    longest_send,
    stage_seconds,
)
from polyreme.mesh.timeline import Durations


def tables(p: int, m: int, v: int) -> list[Table]:
    """At most p - s microbatches are alive on stage s."""

    def stage(s: int) -> Table:
        f, b, warm = ("F", s), ("B", s), min(p - s - 1, m)
        return count_microbatches([f] * warm + [f, b] * (m - warm) + [b] * warm)

    return [stage(s) for s in range(p)]


def step_seconds(stages: Sequence[Sequence[Durations]], m: int) -> float:
    """One microbatch through all stages, then one every period. Source: arXiv:2104.04473, 2.2."""
    works, send = stage_seconds(stages), longest_send(stages)
    return sum(works) + 2 * (len(works) - 1) * send + (m - 1) * _period(works, send)


def _period(works: Sequence[float], send: float) -> float:
    """Time between two microbatches: the longest stage's work, or, where sending takes long, a round trip over the
    p - s microbatches that may be under way on stage s and those after it."""
    p, longest, behind = len(works), max(works), 0.0
    for s in reversed(range(p)):
        behind += works[s]
        longest = max(longest, (behind + 2 * (p - 1 - s) * send) / (p - s))
    return longest


ONE_F_ONE_B = ScheduleKind(
    name="1F1B",
    summary="a backward as soon as there is one, so fewer activations wait",
    source="arXiv:2104.04473, 2.2.1",
    tables=tables,
    alternative="VPP",
    # Idle per stage (p - 1)(tF + tB), work m (tF + tB).
    bubble=BubbleFormula("(p-1)/(m+p-1)", lambda p, m, v: (p - 1) / (m + p - 1), "arXiv:2104.04473, 2.2.1"),
    step_seconds=step_seconds,
    peak_live=lambda p, m, s: min(m, p - s),
)
