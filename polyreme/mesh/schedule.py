"""Schedule: which stage of a pipeline runs what, in which order, as a table; and what such a table costs.

The runtime walks any Schedule and knows none by name.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from polyreme.errors import ConfigError, did_you_mean
from polyreme.mesh import schedule_tables as tables_of
from polyreme.mesh.timeline import Durations, Span, Task, label, run_in_order

UNIT = Durations()
"""F = B = W = 1 and sends for nothing: the costs the papers compare schedules under."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The work of every stage of a pipeline for one batch of num_microbatches.

    tables: per stage, its tasks in the order it runs them. stage_of_chunk: per model chunk, in data-flow order.
    num_virtual: chunks per stage. split_backward: B gives input gradients only and every B has a W for the weights;
    otherwise B is the whole backward and there is no W.

    Raises ConfigError if a task is missing, doubled, unknown or on the wrong stage, or if the stages would deadlock.
    """

    name: str
    num_stages: int
    num_virtual: int
    num_microbatches: int
    tables: tuple[tuple[Task, ...], ...]
    stage_of_chunk: tuple[int, ...]
    split_backward: bool

    def __post_init__(self) -> None:
        _check_counts(self.name, self.num_stages, self.num_microbatches, self.num_virtual)
        self._check_shape()
        for stage, table in enumerate(self.tables):
            self._check_tasks(stage, table)
        self.order()  # raises on a deadlock

    @property
    def num_chunks(self) -> int:
        """Model chunks over all stages."""
        return len(self.stage_of_chunk)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of task it has."""
        return ("F", "B", "W") if self.split_backward else ("F", "B")

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks a stage holds, in data-flow order. Raises ConfigError for a stage it does not have."""
        self._check_stage(stage)
        return tuple(chunk for chunk, owner in enumerate(self.stage_of_chunk) if owner == stage)

    def order(self, durations: Durations | Sequence[Durations] = UNIT) -> tuple[Span, ...]:
        """Every task with its stage, start and end, by start; a topological order, so one process may run it as it is.

        durations: those of every chunk, or one for each.

        >>> [(span.stage, *span.task) for span in make_schedule("1F1B", 2, 1).order()]
        [(0, 'F', 0, 0), (1, 'F', 0, 1), (1, 'B', 0, 1), (0, 'B', 0, 0)]
        """
        return tuple(run_in_order(self.tables, self.stage_of_chunk, durations, self.split_backward))

    def makespan(self, durations: Durations | Sequence[Durations] = UNIT) -> float:
        """Time from the first start to the last end over all stages."""
        return max(span.end for span in self.order(durations))

    def bubble_fraction(self, durations: Durations = UNIT) -> float:
        """Idle part of (stages x makespan), between 0 and 1.

        >>> make_schedule("1F1B", 4, 8).bubble_fraction() == 3 / (8 + 3)
        True
        """
        spans = self.order(durations)
        total = self.num_stages * max(span.end for span in spans)
        return _idle_fraction(spans, total)

    def span_bubble_fraction(self, durations: Durations = UNIT) -> float:
        """Idle part of the longest stage's own span, first start to last end: the zero-bubble paper's bubble rate.

        It is what repeats from step to step when a stage may begin the next step without waiting for the others.
        """
        rows = [[span for span in self.order(durations) if span.stage == stage] for stage in range(self.num_stages)]
        longest = max(rows, key=lambda row: row[-1].end - row[0].start)
        total = longest[-1].end - longest[0].start
        return _idle_fraction(longest, total)

    def peak_live(self, stage: int, until: str | None = None) -> int:
        """Most activations that a stage holds at once, in microbatches of a chunk: num_virtual of them are a stage's.

        One is held from its F until the task that reads it last: W where the backward is split, else B. until="B"
        counts to the B of a split schedule, for layers whose W needs little of what the forward saved.
        """
        self._check_stage(stage)
        last = self.kinds[-1] if until is None else until
        if last not in self.kinds[1:]:
            choices = " or ".join(self.kinds[1:])
            raise ConfigError(f"peak_live(until={until!r}) of schedule {self.name}; give {choices}, or leave it out")
        live = peak = 0
        for task in self.tables[stage]:
            live += (task.kind == "F") - (task.kind == last)
            peak = max(peak, live)
        return peak

    def stage_text(self, stage: int) -> str:
        """One stage's tasks as Paddle's static scheduler writes them; of several chunks, _vp is the index on the stage.

        >>> make_schedule("1F1B", 2, 3).stage_text(0)
        'f0;f1;b0;f2;b1;b2;'
        >>> make_schedule("VPP", 2, 2, 2).stage_text(1)
        'f0_vp0;f1_vp0;f0_vp1;b0_vp1;f1_vp1;b1_vp1;b0_vp0;b1_vp0;'
        """
        chunks = self.chunks_of(stage)
        suffix = {chunk: f"_vp{i}" if len(chunks) > 1 else "" for i, chunk in enumerate(chunks)}
        return "".join(f"{task.kind.lower()}{task.microbatch}{suffix[task.chunk]};" for task in self.tables[stage])

    def _check_stage(self, stage: int) -> None:
        if stage not in range(self.num_stages):
            raise ConfigError(f"stage {stage} of schedule {self.name}; give 0 to {self.num_stages - 1}")

    def _check_shape(self) -> None:
        owners = Counter(self.stage_of_chunk)
        if len(self.tables) != self.num_stages or owners != dict.fromkeys(range(self.num_stages), self.num_virtual):
            raise ConfigError(
                f"schedule {self.name}: {self.num_stages} stages of {self.num_virtual} chunks got {len(self.tables)} "
                f"tables and stage_of_chunk {self.stage_of_chunk}; give each a table and {self.num_virtual} chunks"
            )

    def _check_tasks(self, stage: int, table: tuple[Task, ...]) -> None:
        wanted = {
            Task(kind, microbatch, chunk)
            for chunk in self.chunks_of(stage)
            for kind in self.kinds
            for microbatch in range(self.num_microbatches)
        }
        counts = Counter(table)
        for problem, tasks in (
            ("lacks", wanted - counts.keys()),
            ("repeats", {task for task, count in counts.items() if count > 1}),
            ("has no place for", counts.keys() - wanted),
        ):
            if tasks:
                raise ConfigError(
                    f"schedule {self.name}: stage {stage} {problem} {label(min(tasks))}; every task of the chunks "
                    f"{self.chunks_of(stage)} must be there once"
                )


def _idle_fraction(spans: Sequence[Span], total: float) -> float:
    return (total - sum(span.end - span.start for span in spans)) / total if total else 0.0


class _Builder(NamedTuple):
    tables: Callable[..., list[list[Task]]]
    least_virtual: int = 1
    most_virtual: float = 1
    split_backward: bool = False
    is_v: bool = False
    instead: str = ""


_BUILDERS: Mapping[str, _Builder] = MappingProxyType(
    {
        "FThenB": _Builder(tables_of.gpipe),
        "1F1B": _Builder(tables_of.one_forward_one_backward, instead="VPP"),
        "VPP": _Builder(tables_of.interleaved, least_virtual=2, most_virtual=math.inf, instead="1F1B"),
        "ZBH1": _Builder(tables_of.zero_bubble_h1, split_backward=True, instead="ZBVPP"),
        "ZBVPP": _Builder(
            tables_of.zero_bubble_v, least_virtual=2, most_virtual=2, split_backward=True, is_v=True, instead="ZBH1"
        ),
    }
)

LEAST_VIRTUAL: Mapping[str, int] = MappingProxyType({name: each.least_virtual for name, each in _BUILDERS.items()})
"""Fewest chunks per stage of each schedule, by name."""


def make_schedule(name: str, num_stages: int, num_microbatches: int, num_virtual: int = 1) -> Schedule:
    """The named schedule for any number of stages and microbatches.

    FThenB (GPipe), 1F1B (PipeDream-Flush), VPP (interleaved; num_virtual >= 2), ZBH1 (zero bubble, the memory of 1F1B)
    and ZBVPP (ZB-V; num_virtual is 2). Sources are with the tables, in schedule_tables.

    Raises ConfigError for an unknown name, a count below 1 and a num_virtual the schedule does not have.
    """
    check_schedule(name, num_stages, num_microbatches, num_virtual)
    return _build(name, num_stages, num_microbatches, num_virtual)


def check_schedule(name: str, num_stages: int, num_microbatches: int, num_virtual: int = 1) -> None:
    """Raises what make_schedule would, without making the tables."""
    if name not in _BUILDERS:
        raise ConfigError(f"unknown schedule {name!r}{did_you_mean(name, _BUILDERS)}")
    _check_counts(name, num_stages, num_microbatches, num_virtual)
    builder = _BUILDERS[name]
    if not builder.least_virtual <= num_virtual <= builder.most_virtual:
        least = f"{builder.least_virtual}{' or more' if builder.most_virtual > builder.least_virtual else ''}"
        instead = f", or schedule {builder.instead}" if builder.instead else ""
        raise ConfigError(f"schedule {name} with num_virtual={num_virtual}; give {least}{instead}")


def stage_of_chunk(name: str, num_stages: int, num_virtual: int = 1) -> tuple[int, ...]:
    """The stage of each chunk of the model, in the order that data flows through them: Schedule.stage_of_chunk.

    >>> stage_of_chunk("VPP", 2, 2), stage_of_chunk("ZBVPP", 2, 2)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    check_schedule(name, num_stages, 1, num_virtual)
    return tables_of.v_stage_of_chunk(num_stages) if _BUILDERS[name].is_v else tuple(range(num_stages)) * num_virtual


@functools.lru_cache(maxsize=64)  # a training step asks for its schedule again and again
def _build(name: str, num_stages: int, num_microbatches: int, num_virtual: int) -> Schedule:
    builder = _BUILDERS[name]
    sizes = (num_stages, num_microbatches, num_virtual) if name == "VPP" else (num_stages, num_microbatches)
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_virtual=num_virtual,
        num_microbatches=num_microbatches,
        tables=tuple(tuple(table) for table in builder.tables(*sizes)),
        stage_of_chunk=stage_of_chunk(name, num_stages, num_virtual),
        split_backward=builder.split_backward,
    )


def _check_counts(name: str, num_stages: object, num_microbatches: object, num_virtual: object) -> None:
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_virtual": num_virtual}
    for key, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"schedule {name} with {key}={value!r}; give a whole number of at least 1")
