"""The table of pipeline schedules. A new schedule is a file beside this one and a line in the table."""

from __future__ import annotations

from polyreme.mesh.schedules.dual_pipe_v import DUAL_PIPE_V
from polyreme.mesh.schedules.eager import EAGER
from polyreme.mesh.schedules.gpipe import GPIPE
from polyreme.mesh.schedules.interleaved import INTERLEAVED
from polyreme.mesh.schedules.one_f_one_b import ONE_F_ONE_B
from polyreme.mesh.schedules.record import ScheduleKind
from polyreme.mesh.schedules.zero_bubble_h1 import ZERO_BUBBLE_H1
from polyreme.mesh.schedules.zero_bubble_v import ZERO_BUBBLE_V
from polyreme.registry import Registry

SCHEDULES: Registry[ScheduleKind] = Registry(
    "schedule", [GPIPE, ONE_F_ONE_B, EAGER, INTERLEAVED, ZERO_BUBBLE_H1, ZERO_BUBBLE_V, DUAL_PIPE_V]
)
"""Pipeline schedules by name, as the public API spells them, plainest first: lists show them in this order, the
planner judges a mesh by the first that it searches, and of two plans of equal time takes the earlier."""

DEFAULT_SCHEDULE = ONE_F_ONE_B.name
"""What a plan with a pipeline has unless it names another."""

WITHOUT_PIPELINE = GPIPE
"""What runs on the one stage of a plan without a pipeline."""


def default_schedule(num_virtual: int = 1, *, is_v: bool = False) -> str:
    """Name of the schedule for stages of so many chunks, or for a model laid out as a V, where none is named.

    >>> default_schedule(), default_schedule(2), default_schedule(2, is_v=True)
    ('1F1B', 'VPP', 'ZBVPP')
    """
    if is_v:
        return next(kind.name for kind in SCHEDULES.values() if kind.is_v)
    default = SCHEDULES[DEFAULT_SCHEDULE]
    return default.name if default.takes(num_virtual) else default.alternative
