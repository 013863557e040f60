"""What differs between two outcomes of one call, in one line, and whether that is documented."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.conformance.case import tolerance
from polyreme.core import dtype as dtypes
from tests.oracle.calls import Call
from tests.oracle.side import decoded

AGREE, WIDER, BOTH_RAISE, DIFFER = "agree", "only polyreme computes", "both raise", "differ"
DOCUMENTED = Path(__file__).parent / "differences.txt"


@dataclass(frozen=True)
class Finding:
    """How one call came out: kind is one of the four above, what a line about it."""

    call: Call
    kind: str
    what: str = ""


def compared(call: Call, ours: dict[str, Any], theirs: dict[str, Any]) -> Finding:
    """The finding of a call: errors, numbers of results, shapes, dtypes, values, then gradients."""
    if "error" in ours or "error" in theirs:
        return _errors(call, ours.get("error"), theirs.get("error"))
    what = _results(call, "result", ours["outs"], theirs["outs"])
    if not what and "grads" in ours and "grads" in theirs:
        what = _gradients(call, ours["grads"], theirs["grads"])
    elif not what and "grad_error" in ours and "grads" in theirs and any(theirs["grads"]):
        what = f"gradient: {ours['grad_error']}"
    return Finding(call, DIFFER if what else AGREE, what)


def _errors(call: Call, ours: str | None, theirs: str | None) -> Finding:
    if ours and theirs:
        return Finding(call, BOTH_RAISE, ours)
    if theirs:
        return Finding(call, WIDER, theirs)
    return Finding(call, DIFFER, f"raises {ours}")


def _results(call: Call, which: str, ours: list[Any], theirs: list[Any]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} results, PaddlePaddle {len(theirs)}"
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        what = _array(call, np.asarray(decoded(mine)), np.asarray(decoded(its)))
        if what:
            return f"{which} {number}: {what}"
    return ""


def _gradients(call: Call, ours: list[Any], theirs: list[Any]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} inputs and parameters, PaddlePaddle {len(theirs)}"
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        if mine is None or its is None:
            # no gradient and a gradient of zeros say the same
            if any(held is not None and np.any(decoded(held)) for held in (mine, its)):
                sides = ("none", "PaddlePaddle has one") if mine is None else ("there", "PaddlePaddle has none")
                return f"gradient {number}: {', '.join(sides)}"
            continue
        what = _array(call, np.asarray(decoded(mine)), np.asarray(decoded(its)))
        if what:
            return f"gradient {number}: {what}"
    return ""


def _array(call: Call, mine: np.ndarray, its: np.ndarray) -> str:
    if mine.shape != its.shape:
        return f"shape {list(mine.shape)}, PaddlePaddle {list(its.shape)}"
    if mine.dtype != its.dtype:
        return f"{mine.dtype.name}, PaddlePaddle {its.dtype.name}"
    if call.random:
        return ""
    if not dtypes.is_inexact(mine.dtype):
        return "" if np.array_equal(mine, its) else f"{_few(mine)}, PaddlePaddle {_few(its)}"
    finite = np.abs(its[np.isfinite(its)])
    scale = max(float(finite.max()) if finite.size else 1.0, 1e-3)

    least = _precision(call)

    def close(dtype: np.dtype) -> bool:
        bound = max(tolerance(dtype, call.terms), least)
        return np.allclose(mine, its, rtol=bound, atol=bound * scale, equal_nan=True)

    if close(mine.dtype):
        return ""
    single = "equal in float32, not in float64: " if close(np.dtype("float32")) else ""
    return f"{single}{_few(mine)}, PaddlePaddle {_few(its)}"


def _precision(call: Call) -> float:
    """The relative error of inputs of 16 bits, which results of other dtypes have too; 0 where there are none."""
    half = [np.dtype("float16")] if "float16" in (a.dtype.name for a in call.arrays()) else []
    half += [dtypes.bfloat16] if any(view.how == "bfloat16" for view in call.views()) else []
    return max((tolerance(dtype, call.terms) for dtype in half), default=0.0)


def _few(array: np.ndarray) -> str:
    return np.array2string(array.ravel()[:4], precision=5 if array.dtype.itemsize < 8 else 12, separator=", ").replace(
        "\n", ""
    )


def documented(drawn: bool = False) -> list[tuple[str, str, str]]:
    """(pattern of a call's id, pattern of what differs, why) for every difference that is known and meant.

    drawn: also those that only calls of the fuzzer show.
    """
    reasons, why = [], ""
    for line in DOCUMENTED.read_text().splitlines():
        if line.startswith("  "):
            call, _, what = line.strip().partition(" | ")
            if drawn or not call.startswith("~ "):
                reasons.append((call.removeprefix("~ "), what or "*", why))
        elif line and not line.startswith("#"):
            why = line
    return reasons


def explanation(finding: Finding, known: list[tuple[str, str, str]]) -> str | None:
    """Why a difference is as it is; None if nobody said."""
    entry = _entry(finding, known)
    return entry[2] if entry else None


def _entry(finding: Finding, known: list[tuple[str, str, str]]) -> tuple[str, str, str] | None:
    fits = (e for e in known if fnmatchcase(finding.call.id, e[0]) and fnmatchcase(finding.what, e[1]))
    return next(fits, None)


def unused(findings: list[Finding], known: list[tuple[str, str, str]]) -> list[str]:
    """Patterns of known differences that explain none of the findings: nothing differs so, or one above fits first."""
    used = {_entry(finding, known) for finding in findings if finding.kind == DIFFER}
    return [f"{call} | {what}" if what != "*" else call for call, what, why in known if (call, what, why) not in used]
