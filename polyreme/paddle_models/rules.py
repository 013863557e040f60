"""What rows of the tables of operations are made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.core.op import OPS
from polyreme.paddle_models.call import PaddleCall, Results

Rule = Callable[[PaddleCall], Results]


def plain(op: str, *slots: str, out: str = "Out", **attributes: tuple[str, Any]) -> Rule:
    """One of our ops on the Tensors in slots ("Bias?": if there is one); attributes: of ours -> theirs, its default."""

    def rule(call: PaddleCall) -> Results:
        tensors = [call.optional(s[:-1]) if s.endswith("?") else call.tensor(s) for s in slots or ("X",)]
        settings = {ours: call.attribute(theirs, default) for ours, (theirs, default) in attributes.items()}
        return {out: OPS[op](*tensors, **settings)}

    return rule


def layout_of(call: PaddleCall, name: str = "data_format", known: tuple[str, ...] = ("NCHW", "NHWC")) -> str:
    """The order of dims that an attribute says. Programs of 1.x say NCHW of volumes too, and may leave it open."""
    layout = call.attribute(name, known[0])
    return {"AnyLayout": known[0], "NCHW": known[0], "NHWC": known[1]}.get(layout, layout)
