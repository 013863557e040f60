"""The communication of a pipelined step: a report for each stage, and what the stages send each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from polyreme.distributed.comm_report.collectives import CollectiveArray, CollectiveInstruction, Origin
from polyreme.distributed.comm_report.report import Report, Total, table
from polyreme.mesh import Plan
from polyreme.units import bytes_text

Sending = tuple[str, str, tuple[int, ...], int]
"""What is sent, its dtype, shape and bytes on one device."""

_PHASES = {"activations": "forward", "parameters": "forward"}


@dataclass(frozen=True)
class PipelineReport:
    """The communication of one step over pipeline stages; stages: the Report of each."""

    plan: Plan
    backend: str
    stages: tuple[Report, ...]

    @property
    def totals(self) -> list[Total]:
        """Every stage's, one after the other: bytes a device of that stage sends."""
        return [total for stage in self.stages for total in stage.totals]

    @property
    def whole(self) -> Total:
        """All kinds and axes together, the mean over all devices."""
        parts = [stage.whole for stage in self.stages]
        measured, expected, bound = (
            sum(getattr(t, n) for t in parts) / len(parts) for n in ("measured", "expected", "bound")
        )
        return Total("all", (), measured, expected, bound)

    @property
    def unnamed(self) -> list[Total]:
        """Collectives of a stage that its formula does not name."""
        return [total for stage in self.stages for total in stage.unnamed]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values fit for JSON: what Report.to_dict has, for each stage."""
        stages = [stage.to_dict() for stage in self.stages]
        kept = [{key: value for key, value in s.items() if key not in ("plan", "backend")} for s in stages]
        whole = {"measured": self.whole.measured, "expected": self.whole.expected, "bound": self.whole.bound}
        return {"plan": self.plan.to_dict(), "backend": self.backend, "stages": kept, "whole": whole}

    def as_text(self) -> str:
        """The tables of each stage, and of all, as text."""
        parts = [f"stage {at}\n\n{stage.as_text()}" for at, stage in enumerate(self.stages)]
        rows = [("total a device and step", "measured", "by formula", "ratio", "lower bound")]
        named = [*((f"stage {at}", s.whole) for at, s in enumerate(self.stages)), ("mean", self.whole)]
        for name, t in named:
            rows.append((name, bytes_text(t.measured), bytes_text(t.expected), f"{t.ratio:.3f}", bytes_text(t.bound)))
        return "\n\n".join([*parts, table(rows, right=(1, 2, 3, 4))])


def sends_of(sent: Iterable[Sending]) -> list[CollectiveInstruction]:
    """The sends of one stage as rows of the report, equal ones joined; along axis pp, each device to its
    counterpart."""
    sends = []
    for (what, dtype, shape, nbytes), times in Counter(sent).items():
        origin = Origin(_PHASES.get(what, "backward"), what, "", "")
        part = CollectiveArray(nbytes, dtype, shape, origin)
        sends.append(
            CollectiveInstruction("", "send", ("pp",), 2, (part,), times, True, True, "between programs", 0, 1.0)
        )
    return sends
