"""The communication of a compiled step as a table: every collective, totals by axes and kind, beside the formula's."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyreme.distributed.comm_report.collectives import BALANCE, CollectiveInstruction, find_collectives
from polyreme.distributed.comm_report.volume import BEST, COMPILERS, Term, Workload, terms
from polyreme.mesh import Plan
from polyreme.units import bytes_text

Key = tuple[str, tuple[str, ...] | None]


@dataclass(frozen=True)
class Total:
    """Wire bytes a device sends in a step by one kind of collective along some axes: in the program, by the formula for
    its backend, and by the formula with every pass at work, the lower bound. runs: how many collectives of the program
    that is, loops multiplied.
    """

    kind: str
    axes: tuple[str, ...] | None
    measured: float
    expected: float
    bound: float
    runs: int = 0

    @property
    def ratio(self) -> float:
        """measured / expected; infinite for what the formula does not name."""
        if self.expected == 0:
            return math.inf if self.measured else 1.0
        return self.measured / self.expected


@dataclass(frozen=True)
class Report:
    """The communication of one step.

    expected: the formula for the backend; bound: with every pass at work; None, both of them, for a model that no
    formula is of.
    """

    plan: Plan
    backend: str
    collectives: tuple[CollectiveInstruction, ...]
    expected: tuple[Term, ...] | None
    bound: tuple[Term, ...] | None

    @property
    def totals(self) -> list[Total]:
        """By kind and axes, the largest first."""
        measured = _sums((c.kind, c.axes, c.total_wire) for c in self.collectives)
        runs = _sums((c.kind, c.axes, c.times) for c in self.collectives)
        expected, bound = (
            _sums((t.kind, t.axes, t.total_wire) for t in terms or ()) for terms in (self.expected, self.bound)
        )
        totals = [
            Total(*key, measured.get(key, 0), expected.get(key, 0), bound.get(key, 0), int(runs.get(key, 0)))
            for key in {*measured, *expected, *bound}
        ]
        return sorted(totals, key=lambda t: (-max(t.measured, t.expected, t.bound), t.kind, str(t.axes)))

    @property
    def whole(self) -> Total:
        """All kinds and axes together."""
        parts = self.totals
        return Total("all", (), *(sum(getattr(t, n) for t in parts) for n in ("measured", "expected", "bound", "runs")))

    @property
    def unnamed(self) -> list[Total]:
        """Collectives of the program that the formula does not name; empty without a formula."""
        return [t for t in self.totals if t.expected == 0 and t.measured] if self.expected is not None else []

    @property
    def exposed(self) -> dict[str, float]:
        """Wire bytes a step by "overlapped", "free" and "critical"; see collectives."""
        found = {"overlapped": 0.0, "free": 0.0, "critical": 0.0}
        for c in self.collectives:
            if c.kind != "send":
                found[c.overlap] += c.total_wire
        return found

    def messages(self, *between: str) -> int:
        """Messages that a device sends in a step by all-to-alls of the programs, to devices that differ from it along
        these axes, if any are given."""
        mesh, total = self.plan.mesh, 0
        for c in self.collectives:
            if c.kind == "all-to-all" and c.axes is not None:
                near = math.prod(mesh.degree(axis) for axis in c.axes if axis not in between) if between else 1
                total += c.times * (c.group_size - near)
        return total

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values fit for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "backend": self.backend,
            "collectives": [_plain(c) for c in self.collectives],
            "totals": [_total_dict(t) for t in [*self.totals, self.whole]],
            "formula": _terms_plain(self.expected),
            "lower_bound": _terms_plain(self.bound),
            "overlap": self.exposed,
            "all_to_all_messages": {
                "all": self.messages(),
                **{axis: self.messages(axis) for axis in self._message_axes},
            },
        }

    @property
    def _message_axes(self) -> tuple[str, ...]:
        """The axis between the nodes of experts that have several axes."""
        return self.plan.expert_axes[:1] if len(self.plan.expert_axes) > 1 else ()

    def as_text(self) -> str:
        """The tables, as text."""
        formula = "no formula is of this model" if self.expected is None else _terms_text(self.expected)
        return "\n\n".join([_list_text(self.collectives), _totals_text(self), formula])


def examine(
    programs: Iterable[tuple[str, int]],
    plan: Plan,
    work: Workload | None,
    backend: str,
    balance: float | None = None,
    sends: Iterable[CollectiveInstruction] = (),
) -> Report:
    """The Report of a step made of compiled programs: (optimized HLO text, how often it runs in the step).

    Under a pipeline, of one stage: programs, work and sends are that stage's. work: None for a model that no formula is
    of. backend: cpu, gpu or tpu. balance: FLOP
    for a wire byte that hide it; see collectives.BALANCE.
    """
    enough = BALANCE.get(backend, BALANCE["gpu"]) if balance is None else balance
    # a stage's programs run on its own devices, which no pp tells apart
    mesh = dataclasses.replace(plan.mesh, pp=1)
    collectives = [
        c if runs == 1 else _repeat(c, runs) for text, runs in programs for c in find_collectives(text, mesh, enough)
    ]
    if work is None:
        return Report(plan, backend, (*collectives, *sends), None, None)
    compiler = COMPILERS.get(backend, BEST)
    bound = terms(plan, work, dataclasses.replace(BEST, has_ragged=compiler.has_ragged))
    return Report(plan, backend, (*collectives, *sends), tuple(terms(plan, work, compiler)), tuple(bound))


def _repeat(collective: CollectiveInstruction, runs: int) -> CollectiveInstruction:
    return dataclasses.replace(collective, times=collective.times * runs)


def _sums(items: Iterable[tuple[str, tuple[str, ...] | None, float]]) -> dict[Key, float]:
    found: dict[Key, float] = defaultdict(float)
    for kind, axes, nbytes in items:
        found[kind, axes] += nbytes
    return found


def _plain(c: CollectiveInstruction) -> dict[str, Any]:
    return {**asdict(c), "payload_bytes": c.payload, "wire_bytes": c.total_wire}


def _terms_plain(terms: Sequence[Term] | None) -> list[dict[str, Any]] | None:
    return None if terms is None else [{**asdict(t), "wire_bytes": t.total_wire} for t in terms]


def _total_dict(t: Total) -> dict[str, Any]:
    return {**asdict(t), "ratio": t.ratio if math.isfinite(t.ratio) else None}


def _list_text(collectives: Sequence[CollectiveInstruction]) -> str:
    rows = [("collective", "axes", "phase", "layer", "dtype", "runs", "payload", "wire a step", "overlap")]
    for c in collectives:
        main = max(c.parts, key=lambda p: p.nbytes)
        layers = list(dict.fromkeys(p.origin.layer or p.origin.kernel or p.origin.primitive for p in c.parts))
        first = main.origin.layer or main.origin.kernel or main.origin.primitive
        layer = first if len(layers) == 1 else f"{first} and {len(layers) - 1} more"
        dtypes = "+".join(dict.fromkeys(p.dtype for p in c.parts if p.nbytes > 4)) or main.dtype
        runs = f"{c.times}" if c.counted else f"{c.times}+"
        payload, wire = bytes_text(c.payload), bytes_text(c.total_wire)
        rows.append((c.kind, axes_text(c.axes), main.origin.phase, layer, dtypes, runs, payload, wire, c.overlap))
    return table(rows, right=(5, 6, 7))


def _totals_text(report: Report) -> str:
    rows = [("total a device and step", "axes", "runs", "in the program", "by formula", "ratio", "lower bound")]
    for t in [*report.totals, report.whole]:
        ratio = f"{t.ratio:.3f}" if math.isfinite(t.ratio) else "not named"
        expected, bound = bytes_text(t.expected), bytes_text(t.bound)
        by_formula = (expected, ratio, bound) if report.expected is not None else ("-", "-", "-")
        rows.append((t.kind, axes_text(t.axes), f"{t.runs:,}", bytes_text(t.measured), *by_formula))
    overlap = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in report.exposed.items())
    lines = [table(rows, right=(2, 3, 4, 5, 6)), f"overlap: {overlap}"]
    if report.messages():
        along = "".join(f", of which {report.messages(axis)} along {axis}" for axis in report._message_axes)
        lines.append(f"all-to-all messages a device sends in a step: {report.messages()}{along}")
    return "\n\n".join(lines)


def _terms_text(terms: Sequence[Term]) -> str:
    """The formula's lines, equal ones of many parameters together."""
    rows = [("formula", "collective", "axes", "phase", "of", "bytes", "wire a step")]
    grouped: dict[tuple, list[Term]] = defaultdict(list)
    for t in terms:
        grouped[t.name, t.kind, t.axes, t.phase].append(t)
    for (name, kind, axes, phase), found in grouped.items():
        count = sum(t.times for t in found)
        nbytes = sum(t.payload * t.times for t in found)
        wire = sum(t.total_wire for t in found)
        rows.append((name, kind, axes_text(axes), phase, f"{count}", bytes_text(nbytes), bytes_text(wire)))
    return table(rows, right=(4, 5, 6))


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows as text in columns, the first row ruled off; columns in `right` are set to the right.

    >>> print(table([("a", "n"), ("x", "10")], right=(1,)))
    a   n
    -  --
    x  10
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def axes_text(axes: tuple[str, ...] | None) -> str:
    """Axes for a table: dp+sharding; "-" for none, "?" where the groups run along no axes of the mesh."""
    return "?" if axes is None else "+".join(axes) or "-"
