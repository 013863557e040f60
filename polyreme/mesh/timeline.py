"""Tasks of a pipeline and when they run: a stage works through its list in order, a task waits for its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from polyreme.errors import ConfigError

KINDS = ("F", "B", "W")
"""Forward, backward (input gradients alone where the schedule splits it), weight gradients."""


class Task(NamedTuple):
    """One run of one model chunk on one microbatch.

    kind: one of KINDS. chunk: index in data-flow order over the whole model, 0 at the input.

    >>> Task("B", 3, 0).inputs(num_chunks=2)
    (Task(kind='F', microbatch=3, chunk=0), Task(kind='B', microbatch=3, chunk=1))
    """

    kind: str
    microbatch: int
    chunk: int

    def inputs(self, num_chunks: int) -> tuple[Task, ...]:
        """The tasks whose results this one reads, of a model of num_chunks chunks."""
        kind, microbatch, chunk = self
        if kind == "F":
            return (Task("F", microbatch, chunk - 1),) if chunk > 0 else ()
        if kind == "W":
            return (Task("B", microbatch, chunk),)
        own = (Task("F", microbatch, chunk),)
        return (*own, Task("B", microbatch, chunk + 1)) if chunk < num_chunks - 1 else own


class Durations(NamedTuple):
    """Time of one task on one chunk, in any one unit; a backward that is not split takes input_grad + weight_grad.

    send: time from the end of a task to when its result is on another stage; nothing waits for it but the reader.
    The default is the unit cost of the papers: F = B = W = 1, so a whole backward is 2.
    """

    forward: float = 1
    input_grad: float = 1
    weight_grad: float = 1
    send: float = 0

    def of(self, kind: str, split_backward: bool) -> float:
        """Time of a task of this kind."""
        if kind == "F":
            return self.forward
        if kind == "W":
            return self.weight_grad
        return self.input_grad if split_backward else self.input_grad + self.weight_grad


class Span(NamedTuple):
    """A task, the stage that runs it, and when it starts and ends."""

    stage: int
    task: Task
    start: float
    end: float


Tables = Sequence[Sequence[Task]]


def run_in_order(
    tables: Tables, stage_of_chunk: Sequence[int], durations: Durations | Sequence[Durations], split: bool
) -> list[Span]:
    """Start every task as soon as its stage is free and its inputs are there; each stage keeps the order of its table.

    The result is sorted by start and is a topological order. Durations are finite and not negative: those of every
    chunk, or one for each.

    Raises ConfigError if stages wait for each other for ever, naming what each waits for.
    """
    of_chunk = [durations] * len(stage_of_chunk) if isinstance(durations, Durations) else list(durations)
    for task_durations in set(of_chunk):
        _check_durations(task_durations)
    num_chunks, ended, spans = len(stage_of_chunk), {}, []
    free_at, position = [0.0] * len(tables), [0] * len(tables)
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, table in enumerate(tables):
            while position[stage] < len(table):
                task = table[position[stage]]
                inputs = task.inputs(num_chunks)
                if any(task_durations not in ended for task_durations in inputs):
                    break
                hops = [
                    of_chunk[task_durations.chunk].send if stage_of_chunk[task_durations.chunk] != stage else 0
                    for task_durations in inputs
                ]
                arrivals = [ended[task_durations] + hop for task_durations, hop in zip(inputs, hops, strict=True)]
                start = max([free_at[stage], *arrivals])
                ended[task] = free_at[stage] = start + of_chunk[task.chunk].of(task.kind, split)
                spans.append(Span(stage, task, start, ended[task]))
                position[stage] += 1
                is_moving = True
    _check_finished(tables, position, num_chunks, ended)
    return sorted(spans, key=lambda span: span.start)


def _check_durations(durations: Durations) -> None:
    for name, value in durations._asdict().items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"duration {name}={value}; give a finite number of at least 0")


def _check_finished(tables: Tables, at: list[int], num_chunks: int, ended: dict[Task, float]) -> None:
    waiting = [(stage, table[at[stage]]) for stage, table in enumerate(tables) if at[stage] < len(table)]
    if not waiting:
        return
    lines = []
    for stage, task in waiting:
        missing = [label(each) for each in task.inputs(num_chunks) if each not in ended]
        lines.append(f"stage {stage} is at {label(task)} and waits for {' and '.join(missing)}")
    raise ConfigError(f"schedule deadlocks: {'; '.join(lines)}; put each task after its inputs on every stage")


def label(task: Task) -> str:
    """Short name of a task in messages.

    >>> label(Task("F", 2, 5))
    'F2 of chunk 5'
    """
    return f"{task.kind}{task.microbatch} of chunk {task.chunk}"
