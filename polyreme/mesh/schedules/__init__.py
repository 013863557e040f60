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
    canonical_name,
    default_schedule,
    register_schedule,
    registered,
    schedule_kind,
)

__all__ = [
    "DEFAULT_SCHEDULE",
    "SCHEDULES",
    "WITHOUT_PIPELINE",
    "BubbleFormula",
    "ScheduleKind",
    "Step",
    "Table",
    "canonical_name",
    "count_microbatches",
    "default_schedule",
    "longest_send",
    "register_schedule",
    "registered",
    "schedule_kind",
    "stage_seconds",
    "v_stage_of_chunk",
    "whole_seconds",
]
