"""FThenB (GPipe): all forwards, then all backwards. Source: arXiv:1811.06965, figure 2c."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme.mesh.schedules.record import (
    BubbleFormula,
    ScheduleKind,
    Table,
    count_microbatches,
    longest_send,
    whole_seconds,
)
from polyreme.mesh.timeline import Durations


def tables(p: int, m: int, v: int) -> list[Table]:
    """All forwards, then all backwards, on each stage."""
    return [count_microbatches([("F", s)] * m + [("B", s)] * m) for s in range(p)]


def step_seconds(stages: Sequence[Sequence[Durations]], m: int) -> float:
    """Forwards and backwards are each a flow shop: sum + (m - 1) max, and p - 1 sends."""
    forwards = [sum(chunk.forward for chunk in stage) for stage in stages]
    backwards = [sum(whole_seconds(chunk) - chunk.forward for chunk in stage) for stage in stages]
    send = longest_send(stages)
    return sum(sum(way) + (m - 1) * max(way) + (len(stages) - 1) * send for way in (forwards, backwards))


GPIPE = ScheduleKind(
    name="FThenB",
    aliases=("F-then-B",),
    summary="all forwards, then all backwards (GPipe)",
    source="arXiv:1811.06965",
    tables=tables,
    # Idle per stage (p - 1)(tF + tB), work m (tF + tB).
    bubble=BubbleFormula("(p-1)/(m+p-1)", lambda p, m, v: (p - 1) / (m + p - 1), "arXiv:2104.04473, 2.2.1"),
    step_seconds=step_seconds,
    peak_live=lambda p, m, s: m,
    is_searched=False,  # it hides sends as Eager1F1B does, but holds every microbatch
)
