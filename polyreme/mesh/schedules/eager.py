"""Eager1F1B: 1F1B with twice the warm-up, so that sends hide behind other microbatches. Source: arXiv:2211.05322."""

from __future__ import annotations

from polyreme.mesh.schedules.record import BubbleFormula, ScheduleKind, Table, count_microbatches


def tables(p: int, m: int, v: int) -> list[Table]:
    """At most 2 (p - s) - 1 microbatches are alive on stage s: those of 1F1B, and one under way between each two."""

    def stage(s: int) -> Table:
        f, b, warm = ("F", s), ("B", s), min(2 * (p - s - 1), m)
        return count_microbatches([f] * warm + [f, b] * (m - warm) + [b] * warm)

    return [stage(s) for s in range(p)]


EAGER = ScheduleKind(
    name="Eager1F1B",
    summary="1F1B with twice the warm-up, so that sends are hidden",
    source="arXiv:2211.05322",
    tables=tables,
    alternative="VPP",
    # Idle per stage (p - 1)(tF + tB), as 1F1B, where sending takes no time.
    bubble=BubbleFormula("(p-1)/(m+p-1)", lambda p, m, v: (p - 1) / (m + p - 1), "as 1F1B, arXiv:2104.04473, 2.2.1"),
    peak_live=lambda p, m, s: min(m, 2 * (p - s) - 1),
)
