"""DualPipeV: a forward of one chunk beside a backward of the other, over a model folded into a V.

Source: arXiv:2412.19437, section 3.2.1 (DualPipe); github.com/deepseek-ai/DualPipe (cut in half into a V).
"""

from __future__ import annotations

from polyreme.mesh.schedules.record import BubbleFormula, ScheduleKind, Step, Table, count_microbatches


def tables(p: int, m: int, v: int) -> list[Table]:
    """Stage s holds chunks s and 2p - 1 - s. In the steady part each forward stands beside a backward of the other
    chunk: where a device runs both at once, each hides the sends and exchanges of the other.

    The pattern needs 2p microbatches to fill; with fewer, those that are not there are left out.
    """
    stages = [_stage(p, max(m, 2 * p), s) for s in range(p)]
    return [[task for task in table if task.microbatch < m] for table in stages]


def _stage(p: int, m: int, s: int) -> Table:
    down, up, after = s, 2 * p - 1 - s, p - 1 - s
    f, f_up = ("F", down), ("F", up)
    whole, whole_up = [("B", down), ("W", down)], [("B", up), ("W", up)]
    steps = [f] * (2 * after) + [f, f_up] * (s + 1) + [*whole_up, f_up] * after
    steps += [f, *whole_up, f_up, *whole] * (m - 2 * p + s + 1)
    steps += [*whole_up, f_up, *whole] * after
    # no forwards are left: the weights of the later half of what comes back fill what would be idle
    backwards: list[Step] = [("B", chunk) for _ in range(s + 1) for chunk in (up, down)]
    for kind, chunk in backwards[: s + 1]:
        steps += [(kind, chunk), ("W", chunk)]
    steps += backwards[s + 1 :]
    late: list[Step] = [("W", chunk) for _, chunk in backwards[s + 1 :]] + [("W", down)] * after
    for weights in late[:after]:
        steps += [weights, ("B", down)]
    return count_microbatches(steps + late[after:])


DUAL_PIPE_V = ScheduleKind(
    name="DualPipeV",
    summary="a V in which each forward stands beside a backward of the other chunk",
    source="arXiv:2412.19437, 3.2.1",
    tables=tables,
    least_virtual=2,
    most_virtual=2,
    is_v=True,
    alternative="ZBH1",
    split_backward=True,
    # DualPipe's own is (p - 1)(F&B + B - 3 W), of a forward and a backward that run as one; one after the other, the
    # backward passes its input gradients on before the pair ends.
    bubble=BubbleFormula(
        "(p-1)/(6*m+p-1)",
        lambda p, m, v: (p - 1) / (6 * m + p - 1),
        "counted in the table",
        least_microbatches=lambda p: 2 * p,
    ),
    steady_rounds=4,
    # where a forward and a backward run one after the other, ZBVPP takes no longer and holds less
    is_searched=False,
)
