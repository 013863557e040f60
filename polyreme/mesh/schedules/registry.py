"""The table of pipeline schedules by name. A new schedule is a file beside this one and a line in _BUILT_IN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from polyreme.errors import ConfigError, did_you_mean
from polyreme.mesh.schedules.gpipe import GPIPE
from polyreme.mesh.schedules.interleaved import INTERLEAVED
from polyreme.mesh.schedules.one_f_one_b import ONE_F_ONE_B
from polyreme.mesh.schedules.record import ScheduleKind
from polyreme.mesh.schedules.zero_bubble_h1 import ZERO_BUBBLE_H1
from polyreme.mesh.schedules.zero_bubble_v import ZERO_BUBBLE_V

_BUILT_IN = (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE_H1, ZERO_BUBBLE_V)
"""In the order that lists show them; of two plans of equal time the planner takes the earlier."""

_KINDS = {kind.name: kind for kind in _BUILT_IN}

SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(_KINDS)
"""Pipeline schedules by name, as the public API spells them."""

DEFAULT_SCHEDULE = ONE_F_ONE_B.name
"""What a plan with a pipeline has unless it names another."""

WITHOUT_PIPELINE = GPIPE
"""What runs on the one stage of a plan without a pipeline."""


def register_schedule(kind: ScheduleKind) -> None:
    """Add a schedule to those that plans, configurations and commands take, after the others.

    Raises ConfigError for a name or alias that is taken.
    """
    for name in (kind.name, *kind.aliases):
        if canonical_name(name) in _KINDS:
            raise ConfigError(f"there is a schedule {name!r} already; give this one another name")
    _KINDS[kind.name] = kind


@contextmanager
def registered(kind: ScheduleKind) -> Iterator[ScheduleKind]:
    """A schedule that is there inside the with block only."""
    register_schedule(kind)
    try:
        yield kind
    finally:
        del _KINDS[kind.name]


def schedule_kind(name: str) -> ScheduleKind:
    """The record of a schedule. Raises ConfigError for an unknown name, with the closest known one."""
    if name not in _KINDS:
        raise ConfigError(f"unknown schedule {name!r}{did_you_mean(name, _KINDS)}")
    return _KINDS[name]


def canonical_name(name: str) -> str:
    """The name of the schedule that has this alias; any other name as it is.

    >>> canonical_name("F-then-B"), canonical_name("1F1B")
    ('FThenB', '1F1B')
    """
    return next((kind.name for kind in _KINDS.values() if name in kind.aliases), name)


def default_schedule(num_virtual: int = 1, *, is_v: bool = False) -> str:
    """Name of the schedule for stages of so many chunks, or for a model laid out as a V, where none is named.

    >>> default_schedule(), default_schedule(2), default_schedule(2, is_v=True)
    ('1F1B', 'VPP', 'ZBVPP')
    """
    if is_v:
        return next(kind.name for kind in _KINDS.values() if kind.is_v)
    default = _KINDS[DEFAULT_SCHEDULE]
    return default.name if default.takes(num_virtual) else default.alternative
