"""Whether a checkpoint fits what is asked of it: names, shapes and dtypes, with the nearest name for each miss."""

import difflib
from typing import Any

import numpy as np

from polyreme.distributed.checkpoint.manifest import TensorEntry

LISTED = 10  # mismatches written out; a model of the wrong size has thousands


def mismatches(target: dict[str, Any], tensors: dict[str, TensorEntry]) -> dict[str, str]:
    """Name -> what does not fit, for target entries missing or different and for tensors nobody asked for."""
    reasons = {}
    for name, want in target.items():
        got = tensors.get(name)
        if got is None:
            reasons[name] = "missing in the checkpoint"
        elif tuple(want.shape) != got.shape or np.dtype(want.dtype) != got.dtype:
            reasons[name] = f"expected {_text(want)}, the checkpoint has {_text(got)}"
    for name in tensors.keys() - target.keys():
        reasons[name] = f"unexpected: {_text(tensors[name])} in the checkpoint, asked for by nobody"
    return dict(sorted(reasons.items()))


def report(reasons: dict[str, str], target: dict[str, Any], tensors: dict[str, TensorEntry]) -> str:
    """The first ten mismatches, one a line, each missing or unexpected name with the nearest one on the other side."""
    lines = []
    for name in list(reasons)[:LISTED]:
        others = tensors if name not in tensors else target if name not in target else {}
        near = difflib.get_close_matches(name, others, n=1)
        lines.append(f"  {name}: {reasons[name]}" + (f" (nearest name: {near[0]})" if near else ""))
    if len(reasons) > LISTED:
        lines.append(f"  and {len(reasons) - LISTED} more")
    return "\n".join(lines)


def _text(entry: Any) -> str:
    return f"{np.dtype(entry.dtype).name}{list(entry.shape)}"
