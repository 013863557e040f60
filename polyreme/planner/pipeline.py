"""Seconds of a pipeline over its stages: the real schedule where it is short, else its closed form.

the timeline of uneven ones, which the tests compare them with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from polyreme.mesh import Durations, Plan, make_schedule

_TIMELINE = 192
"""Tasks up to which the timeline itself is worked out: it takes about a millisecond."""

_DIGITS = 2
"""Of the ratios of durations that a timeline of a zero-bubble schedule is kept for."""


def pipeline_seconds(plan: Plan, chunks: Sequence[Durations]) -> float:
    """From the first task of a batch to the last; chunks: durations of each chunk, in the order that data flows."""
    m, p, v = plan.num_microbatches, plan.mesh.pp, plan.virtual_stages
    if p == 1:
        return m * sum(_whole(chunk) for chunk in chunks)
    if len(chunks) * m * 2 <= _TIMELINE:
        return make_schedule(str(plan.schedule), p, m, v).makespan(chunks)
    return closed_form(plan, chunks)


def closed_form(plan: Plan, chunks: Sequence[Durations]) -> float:
    """The same from a formula. t: time of a stage on one microbatch, c: time to send.

    FThenB: forwards and backwards are each a flow shop: sum + (m - 1) max. 1F1B: sum(t) + 2 (p - 1) c to fill, then one
    microbatch every max(t), or every round trip over the microbatches that may be under way, where sending takes long.
    VPP: m max(t) + (sum(t) - max(t)) / v. Sources: arXiv:2104.04473, 2.2. ZBH1, ZBVPP: the bubble of the timeline of
    even chunks, of which there are enough microbatches to fill it; arXiv:2401.10241.
    """
    m, p, v = plan.num_microbatches, plan.mesh.pp, plan.virtual_stages
    stages: list[list[Durations]] = [[] for _ in range(p)]
    for owner, chunk in zip(plan.stage_of_chunk, chunks, strict=True):
        stages[owner].append(chunk)
    works = [sum(_whole(chunk) for chunk in stage) for stage in stages]
    longest, send = max(works), max(chunk.send for chunk in chunks)
    if plan.schedule == "FThenB":
        passes = [[sum(c.forward for c in s) for s in stages], [sum(_whole(c) - c.forward for c in s) for s in stages]]
        return sum(sum(each) + (m - 1) * max(each) + (p - 1) * send for each in passes)
    if plan.schedule == "1F1B":
        return sum(works) + 2 * (p - 1) * send + (m - 1) * _period(works, send)
    if plan.schedule == "VPP":
        # a chunk's round trip through all stages takes p chunks and p sends: there is a wait where m has no room for it
        return m * longest + (sum(works) - longest) / v + 2 * (p - 1) * send + (v - 1) * send
    return m * longest + _even_bubble(plan, chunks)


def _whole(chunk: Durations) -> float:
    return chunk.forward + chunk.input_grad + chunk.weight_grad


def _period(works: Sequence[float], send: float) -> float:
    """Seconds between two microbatches of 1F1B: at most p - s are under way on stage s and those after it."""
    p, longest, behind = len(works), max(works), 0.0
    for s in reversed(range(p)):
        behind += works[s]
        longest = max(longest, (behind + 2 * (p - 1 - s) * send) / (p - s))
    return longest


def _even_bubble(plan: Plan, chunks: Sequence[Durations]) -> float:
    count = len(chunks)
    forward, inputs, weights, send = (sum(each) / count for each in zip(*chunks, strict=True))
    unit = max(forward, inputs, weights)
    ratios = tuple(round(each / unit, _DIGITS) for each in (forward, inputs, weights, send)) if unit else (0.0,) * 4
    return unit * _unit_bubble(str(plan.schedule), plan.mesh.pp, plan.virtual_stages, ratios)


@lru_cache(maxsize=4096)
def _unit_bubble(schedule: str, p: int, v: int, ratios: tuple[float, ...]) -> float:
    m = 2 * p  # both fill with 2p - 1
    durations = Durations(*ratios)
    return make_schedule(schedule, p, m, v).makespan(durations) - m * v * _whole(durations)
