"""Schedule: which stage of a pipeline runs what, in which order, as a table; and what such a table costs.

The runtime walks any Schedule and knows none by name.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from polyreme.errors import ConfigError
from polyreme.mesh.schedules import SCHEDULES, BubbleFormula, ScheduleKind
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


def make_schedule(name: str, num_stages: int, num_microbatches: int, num_virtual: int = 1) -> Schedule:
    """The named schedule, one of SCHEDULES, for any number of stages and microbatches.

    Raises ConfigError for an unknown name, a count below 1 and a num_virtual the schedule does not have.
    """
    kind = check_schedule(name, num_stages, num_microbatches, num_virtual)
    return _build(kind, num_stages, num_microbatches, num_virtual)


def check_schedule(name: str, num_stages: int, num_microbatches: int, num_virtual: int = 1) -> ScheduleKind:
    """The schedule's record; raises what make_schedule would, without making the tables."""
    kind = SCHEDULES.named(name)
    _check_counts(name, num_stages, num_microbatches, num_virtual)
    if not kind.takes(num_virtual):
        instead = f", or schedule {kind.alternative}" if kind.alternative else ""
        raise ConfigError(f"schedule {name} with num_virtual={num_virtual}; give {kind.chunks_text}{instead}")
    return kind


def stage_of_chunk(name: str, num_stages: int, num_virtual: int = 1) -> tuple[int, ...]:
    """The stage of each chunk of the model, in the order that data flows through them: Schedule.stage_of_chunk.

    >>> stage_of_chunk("VPP", 2, 2), stage_of_chunk("ZBVPP", 2, 2)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    return check_schedule(name, num_stages, 1, num_virtual).stage_of_chunk(num_stages, num_virtual)


@functools.lru_cache(maxsize=64)  # a training step asks for its schedule again and again
def _build(kind: ScheduleKind, num_stages: int, num_microbatches: int, num_virtual: int) -> Schedule:
    return Schedule(
        name=kind.name,
        num_stages=num_stages,
        num_virtual=num_virtual,
        num_microbatches=num_microbatches,
        tables=tuple(tuple(table) for table in kind.tables(num_stages, num_microbatches, num_virtual)),
        stage_of_chunk=kind.stage_of_chunk(num_stages, num_virtual),
        split_backward=kind.split_backward,
    )


def bubble_formula(schedule: Schedule) -> BubbleFormula | None:
    """What is published of the bubble of the schedule of this name; None where nothing is, or the name is not known."""
    kind = SCHEDULES.get(schedule.name)
    return kind.bubble if kind else None


def published_bubble(schedule: Schedule) -> float | None:
    """The bubble fraction its paper gives; None for a table of another name or with too few microbatches to fill.

    >>> published_bubble(make_schedule("VPP", 4, 8, 2))  # 3 / (2 * 8 + 3)
    0.15789473684210525
    >>> published_bubble(make_schedule("VPP", 4, 3, 2)) is None
    True
    """
    formula = bubble_formula(schedule)
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_virtual
    if formula is None or m < formula.least_microbatches(p):
        return None
    return formula.value(p, m, v)


def measured_bubble(schedule: Schedule) -> float:
    """The bubble fraction that `published_bubble` is about, from the table under unit costs."""
    formula = bubble_formula(schedule)
    return schedule.span_bubble_fraction() if formula and formula.is_of_span else schedule.bubble_fraction()


def _check_counts(name: str, num_stages: object, num_microbatches: object, num_virtual: object) -> None:
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_virtual": num_virtual}
    for key, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"schedule {name} with {key}={value!r}; give a whole number of at least 1")
