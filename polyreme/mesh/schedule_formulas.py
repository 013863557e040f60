"""Published bubble of each pipeline schedule, to hold its table against. Costs are the papers': F = B = W."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from polyreme.mesh.schedule import Schedule


class Formula(NamedTuple):
    """A bubble fraction of p stages, m microbatches and v chunks a stage.

    is_of_span: whether it is of a stage's own span (Schedule.span_bubble_fraction), not of the whole step.
    least_microbatches: fewest that it holds for, given p.
    """

    text: str
    value: Callable[[int, int, int], float]
    source: str
    is_of_span: bool = False
    least_microbatches: Callable[[int], int] = lambda p: 1


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        # Idle per stage (p - 1)(tF + tB), work m (tF + tB).
        "FThenB": Formula("(p-1)/(m+p-1)", lambda p, m, v: (p - 1) / (m + p - 1), "arXiv:2104.04473, 2.2.1"),
        "1F1B": Formula("(p-1)/(m+p-1)", lambda p, m, v: (p - 1) / (m + p - 1), "arXiv:2104.04473, 2.2.1"),
        # Idle per stage (p - 1)(tF + tB) / v. The paper states it for m a multiple of p.
        "VPP": Formula(
            "(p-1)/(v*m+p-1)",
            lambda p, m, v: (p - 1) / (v * m + p - 1),
            "arXiv:2104.04473, 2.2.2",
            least_microbatches=lambda p: p,
        ),
        # Idle per stage (p - 1)(tF + tB - tW), work m (tF + tB + tW).
        "ZBH1": Formula(
            "(p-1)/(3*m+p-1)",
            lambda p, m, v: (p - 1) / (3 * m + p - 1),
            "arXiv:2401.10241, section 2",
            least_microbatches=lambda p: p,
        ),
        # No stage idles between its first and its last task.
        "ZBVPP": Formula(
            "0", lambda p, m, v: 0.0, "arXiv:2401.10241, ZB-V", is_of_span=True, least_microbatches=lambda p: 2 * p - 1
        ),
    }
)


def published_bubble(schedule: Schedule) -> float | None:
    """The bubble fraction its paper gives; None for a table of another name or with too few microbatches to fill.

    >>> from polyreme.mesh.schedule import make_schedule
    >>> published_bubble(make_schedule("VPP", 4, 8, 2))  # 3 / (2 * 8 + 3)
    0.15789473684210525
    >>> published_bubble(make_schedule("VPP", 4, 3, 2)) is None
    True
    """
    formula = FORMULAS.get(schedule.name)
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_virtual
    if formula is None or m < formula.least_microbatches(p):
        return None
    return formula.value(p, m, v)


def measured_bubble(schedule: Schedule) -> float:
    """The bubble fraction that `published_bubble` is about, from the table under unit costs."""
    formula = FORMULAS.get(schedule.name)
    return schedule.span_bubble_fraction() if formula and formula.is_of_span else schedule.bubble_fraction()
