"""Parallelism as values: mesh axes, strategies and plans. No device is touched here."""

from polyreme.mesh.axes import AXES, MeshShape, check_axis, nearest_divisor, nearest_multiples
from polyreme.mesh.offload import OFFLOAD, Offload
from polyreme.mesh.plan import EXPERT_DISPATCH, RECOMPUTE, Plan
from polyreme.mesh.schedule import Schedule, make_schedule
from polyreme.mesh.schedules import DEFAULT_SCHEDULE, SCHEDULES, ScheduleKind, default_schedule
from polyreme.mesh.segment import SEP_ATTENTION, SEP_ORDER, SegmentWay, check_heads
from polyreme.mesh.strategy import (
    ANY,
    Rule,
    Spec,
    Strategy,
    branch_parallel,
    data_parallel,
    expert_parallel,
    join,
    segment_parallel,
    sequence_parallel,
    tensor_parallel,
    zero,
)
from polyreme.mesh.timeline import Durations, Span, Task

__all__ = [
    "ANY",
    "AXES",
    "DEFAULT_SCHEDULE",
    "EXPERT_DISPATCH",
    "OFFLOAD",
    "RECOMPUTE",
    "SCHEDULES",
    "SEP_ATTENTION",
    "SEP_ORDER",
    "Durations",
    "MeshShape",
    "Offload",
    "Plan",
    "Rule",
    "Schedule",
    "ScheduleKind",
    "SegmentWay",
    "Span",
    "Spec",
    "Strategy",
    "Task",
    "branch_parallel",
    "check_axis",
    "check_heads",
    "data_parallel",
    "default_schedule",
    "expert_parallel",
    "join",
    "make_schedule",
    "nearest_divisor",
    "nearest_multiples",
    "segment_parallel",
    "sequence_parallel",
    "tensor_parallel",
    "zero",
]
