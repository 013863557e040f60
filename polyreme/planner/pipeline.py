"""Seconds of a pipeline over its stages: the real schedule where it is short, else its closed form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from polyreme.mesh import Durations, Plan, ScheduleKind, make_schedule
from polyreme.mesh.schedules import stage_seconds, whole_seconds

_TIMELINE = 192
"""Tasks up to which the timeline itself is worked out: it takes about a millisecond."""

_DIGITS = 2
"""Of the ratios of durations that the bubble of a timeline is kept for."""


def pipeline_seconds(plan: Plan, chunks: Sequence[Durations]) -> float:
    """From the first task of a batch to the last; chunks: durations of each chunk, in the order that data flows."""
    m = plan.num_microbatches
    if plan.mesh.pp == 1:
        return m * sum(whole_seconds(chunk) for chunk in chunks)
    if len(chunks) * m * 2 <= _TIMELINE:
        return plan.make_schedule().makespan(chunks)
    return closed_form(plan, chunks)


def closed_form(plan: Plan, chunks: Sequence[Durations]) -> float:
    """The same from the schedule's own formula, ScheduleKind.step_seconds.

    A schedule without one takes m times the longest stage, and the bubble of the timeline of even chunks with
    microbatches enough to fill it.
    """
    kind, m = plan.schedule_kind, plan.num_microbatches
    stages: list[list[Durations]] = [[] for _ in range(plan.mesh.pp)]
    for owner, chunk in zip(plan.stage_of_chunk, chunks, strict=True):
        stages[owner].append(chunk)
    if kind.step_seconds is not None:
        return kind.step_seconds(stages, m)
    longest = max(stage_seconds(stages))
    return m * longest + _even_bubble(plan, chunks)


def _even_bubble(plan: Plan, chunks: Sequence[Durations]) -> float:
    count = len(chunks)
    forward, inputs, weights, send = (sum(times) / count for times in zip(*chunks, strict=True))
    unit = max(forward, inputs, weights)
    ratios = tuple(round(time / unit, _DIGITS) for time in (forward, inputs, weights, send)) if unit else (0.0,) * 4
    return unit * _unit_bubble(plan.schedule_kind, plan.mesh.pp, plan.virtual_stages, ratios)


@lru_cache(maxsize=4096)
def _unit_bubble(kind: ScheduleKind, p: int, v: int, ratios: tuple[float, ...]) -> float:
    m = 2 * p  # the zero-bubble schedules fill with 2p - 1, the others sooner
    durations = Durations(*ratios)
    return make_schedule(kind.name, p, m, v).makespan(durations) - m * v * whole_seconds(durations)
