"""docs/oracle_report.md: how every covered function compares with PaddlePaddle, and why where it differs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.oracle.calls import function_names
from tests.oracle.compare import AGREE, BOTH_RAISE, DIFFER, WIDER, Finding, documented, explanation

PAGE = Path(__file__).parents[2] / "docs" / "oracle_report.md"
_HEAD = """# Compared with PaddlePaddle 3.3.1

Written by `make oracle`: each call is made in polyreme and in PaddlePaddle, each in a process of its own, with the same
inputs; results (shapes, dtypes, values) and gradients are compared. Calls come from the contract table of the ops, each
in other dtypes, elementwise functions and reductions over 0-D, 0-size and broadcast shapes and every kind of axis, and
from a table of layers with equal parameters. Values agree when they differ by less than the error that their dtype and
number of terms allow. Functions that draw random numbers are compared by shape and dtype.

"""


def unexplained(findings: list[Finding]) -> list[Finding]:
    """Differences for which tests/oracle/differences.txt has no reason."""
    known = documented()
    return [f for f in findings if f.kind == DIFFER and explanation(f, known) is None]


def page(findings: list[Finding]) -> str:
    """The text of the report."""
    counts = Counter(f.kind for f in findings)
    paths = {f.call.path for f in findings}
    called = {p.rpartition(".")[2] for p in paths}
    alone = sorted(p for p in function_names() if p.rpartition(".")[2] not in called)
    lines = [
        f"{len(findings)} calls of {len(paths)} functions and layers: {counts[AGREE]} agree, {counts[BOTH_RAISE]} are "
        f"refused by both, {counts[WIDER]} only polyreme computes, {counts[DIFFER]} differ, of which "
        f"{len(unexplained(findings))} without a reason.",
        "",
        *_differences(findings),
        *_wider(findings),
    ]
    if alone:
        shown = ", ".join(f"`{p}`" for p in alone)
        why = "What they take or give cannot be sent (functions, files, devices), or another function covers them"
        lines += ["## Not compared here", "", f"{why}: {shown}.", ""]
    return _HEAD + "\n".join([*lines, *_agreements(findings)])


def _differences(findings: list[Finding]) -> list[str]:
    known = documented()
    grouped: dict[str, dict[str, list[Finding]]] = {}
    for finding in findings:
        if finding.kind == DIFFER:
            why = explanation(finding, known) or "no reason given"
            grouped.setdefault(why, {}).setdefault(finding.call.path, []).append(finding)
    lines = ["## Differences", ""]
    for why, functions in sorted(grouped.items()):
        lines += [f"**{why}**", "", "| function | calls | for example |", "|---|---|---|"]
        for path, found in sorted(functions.items()):
            shown = found[0].what.replace("|", "\\|")[:140]
            lines.append(f"| `{path}` | {len(found)} | `{found[0].call.tag}`: {shown} |")
        lines.append("")
    return lines


def _wider(findings: list[Finding]) -> list[str]:
    wider: dict[str, Counter] = {}
    for finding in findings:
        if finding.kind == WIDER:
            wider.setdefault(finding.call.path, Counter())[finding.call.tag.rpartition("/")[2]] += 1
    lines = ["## What only polyreme computes", "", "Calls that PaddlePaddle refuses, or that end its process.", ""]
    rows = [f"| `{p}` | {', '.join(f'{t}' for t in sorted(c))[:160]} |" for p, c in sorted(wider.items())]
    return [*lines, "| function | calls |", "|---|---|", *rows, ""]


def _agreements(findings: list[Finding]) -> list[str]:
    agreed = Counter(f.call.path for f in findings if f.kind == AGREE)
    lines = ["## Agreements", "", "Function, and how many of its calls agree.", ""]
    return [*lines, ", ".join(f"`{p}` {n}" for p, n in sorted(agreed.items())) + ".", ""]
