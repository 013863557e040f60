"""ScheduleKind: all that the rest of the library asks of a pipeline schedule, as one record per schedule.

Names: p stages, m microbatches, v chunks per stage, s one stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polyreme.errors import ConfigError
from polyreme.mesh.timeline import Durations, Task

Table = list[Task]
Step = tuple[str, int]
"""(kind, chunk) of a task whose microbatch follows from how many of the same came before."""


class BubbleFormula(NamedTuple):
    """A published bubble fraction, under the papers' costs F = B = W.

    value: of (p, m, v). is_of_span: whether it is of a stage's own span (Schedule.span_bubble_fraction), not of the
    whole step. least_microbatches: fewest that it holds for, given p.
    """

    text: str
    value: Callable[[int, int, int], float]
    source: str
    is_of_span: bool = False
    least_microbatches: Callable[[int], int] = lambda p: 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScheduleKind:
    """One pipeline schedule: the builder of its table, and what planner, runtime and commands read of it.

    name: as a Plan says it. aliases: other spellings that Paddle's settings have. summary: its idea in a few words.
    source: paper and place. tables: (p, m, v) -> the tasks of each stage in the order that it runs them.
    least_virtual, most_virtual: chunks a stage may hold. is_v: whether the second chunks go back up the stages, two a
    stage; else chunk c is on stage c % p. alternative: name of the schedule for other numbers of chunks.
    split_backward: whether a backward gives input gradients only (B) and each has a W for the weights.
    bubble: what its paper gives for it.
    step_seconds: closed form of the time of a step, of (durations of the chunks of each stage, m); without one the
    planner takes the bubble from the timeline of 2 p even microbatches.
    peak_live: microbatches alive on stage s at most, of (p, m, s), where a stage has one chunk and backwards are whole;
    without one the planner counts them in the table. steady_rounds: rounds of p microbatches after which a table only
    repeats itself, so that it counts no further; None if live microbatches may grow with m.
    in_groups: whether microbatches go through a chunk p at a time, so that other multiples cost more.
    is_searched: whether the planner considers it; a schedule that another beats in time and memory need not be.

    Two are equal if they are the same object. Raises ConfigError for chunks or closed forms that contradict each other.
    """

    name: str
    summary: str
    source: str
    tables: Callable[[int, int, int], Sequence[Sequence[Task]]]
    least_virtual: int = 1
    most_virtual: float = 1
    is_v: bool = False
    alternative: str = ""
    split_backward: bool = False
    bubble: BubbleFormula | None = None
    step_seconds: Callable[[Sequence[Sequence[Durations]], int], float] | None = None
    peak_live: Callable[[int, int, int], int] | None = None
    steady_rounds: int | None = None
    in_groups: bool = False
    is_searched: bool = True
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        chunks = f"{self.least_virtual} to {self.most_virtual} chunks a stage"
        if not 1 <= self.least_virtual <= self.most_virtual:
            raise ConfigError(f"schedule {self.name} of {chunks}; give at least 1, and the larger number second")
        if self.is_v and (self.least_virtual, self.most_virtual) != (2, 2):
            raise ConfigError(f"schedule {self.name}, laid out as a V, of {chunks}; a V has 2")
        if self.peak_live is not None and (self.most_virtual > 1 or self.split_backward):
            raise ConfigError(
                f"schedule {self.name}: peak_live counts one chunk a stage with a whole backward; leave it out, and "
                "the planner counts in the table"
            )

    def __repr__(self) -> str:
        return f"ScheduleKind({self.name!r})"

    @property
    def chunks_text(self) -> str:
        """The chunks a stage may hold, in words: "1", "2", "2 or more", "2 to 4"."""
        if self.most_virtual == self.least_virtual:
            return str(self.least_virtual)
        return f"{self.least_virtual} " + ("or more" if math.isinf(self.most_virtual) else f"to {self.most_virtual}")

    def takes(self, num_virtual: int) -> bool:
        """Whether a stage may hold so many chunks."""
        return self.least_virtual <= num_virtual <= self.most_virtual

    def stage_of_chunk(self, num_stages: int, num_virtual: int) -> tuple[int, ...]:
        """The stage of each chunk of the model, in the order that data flows through them."""
        if self.is_v:
            return v_stage_of_chunk(num_stages)
        return tuple(range(num_stages)) * num_virtual


def v_stage_of_chunk(p: int) -> tuple[int, ...]:
    """Stage of each of the 2p chunks of a V.

    >>> v_stage_of_chunk(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(p), *reversed(range(p)))


def count_microbatches(steps: Sequence[Step]) -> Table:
    """The table of a list of (kind, chunk): the n-th F of a chunk is of microbatch n, and so for B and W.

    >>> [task.microbatch for task in count_microbatches([("F", 0), ("F", 0), ("B", 0)])]
    [0, 1, 0]
    """
    counts: Counter[Step] = Counter()
    table = []
    for kind, chunk in steps:
        table.append(Task(kind, counts[kind, chunk], chunk))
        counts[kind, chunk] += 1
    return table


def whole_seconds(chunk: Durations) -> float:
    """Time of one microbatch on a chunk, there and back."""
    return chunk.forward + chunk.input_grad + chunk.weight_grad


def stage_seconds(stages: Sequence[Sequence[Durations]]) -> list[float]:
    """Time of one microbatch on each stage, there and back."""
    return [sum(whole_seconds(chunk) for chunk in stage) for stage in stages]


def longest_send(stages: Sequence[Sequence[Durations]]) -> float:
    """Time of the longest send from one chunk to the next."""
    return max(chunk.send for stage in stages for chunk in stage)
