"""ZBH1 (zero bubble, in the memory of 1F1B): weight gradients fill what would be idle. Source: arXiv:2401.10241."""

from __future__ import annotations

from polyreme.mesh.schedules.record import BubbleFormula, ScheduleKind, Table, count_microbatches


def tables(p: int, m: int, v: int) -> list[Table]:
    """1F1B with the weight gradients of stage s put off by s microbatches. Source: arXiv:2401.10241, figure 3 (top)."""

    def stage(s: int) -> Table:
        f, b, w, warm = ("F", s), ("B", s), ("W", s), min(p - s - 1, m)
        late = min(s, m - warm)
        steps = [f] * warm + [f, b] * late + [f, b, w] * (m - warm - late) + [b, w] * warm + [w] * late
        return count_microbatches(steps)

    return [stage(s) for s in range(p)]


ZERO_BUBBLE_H1 = ScheduleKind(
    name="ZBH1",
    summary="B passes input gradients on first; W fills what would be idle",
    source="arXiv:2401.10241",
    tables=tables,
    alternative="ZBVPP",
    split_backward=True,
    # Idle per stage (p - 1)(tF + tB - tW), work m (tF + tB + tW).
    bubble=BubbleFormula(
        "(p-1)/(3*m+p-1)",
        lambda p, m, v: (p - 1) / (3 * m + p - 1),
        "arXiv:2401.10241, section 2",
        least_microbatches=lambda p: p,
    ),
    steady_rounds=3,
)
