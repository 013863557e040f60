"""Pipeline schedules, one file each, as records in one table."""

from polyreme.mesh.schedules.record import (
    BubbleFormula,
    ScheduleKind,
    Step,
    Table,
    count_microbatches,
    longest_send,
    stage_seconds,
    v_stage_of_chunk,
    whole_seconds,
)
from polyreme.mesh.schedules.registry import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    WITHOUT_PIPELINE,
    default_schedule,
)

__all__ = [
    "DEFAULT_SCHEDULE",
    "SCHEDULES",
    "WITHOUT_PIPELINE",
    "BubbleFormula",
    "ScheduleKind",
    "Step",
    "Table",
    "count_microbatches",
    "default_schedule",
    "longest_send",
    "stage_seconds",
    "v_stage_of_chunk",
    "whole_seconds",
]
