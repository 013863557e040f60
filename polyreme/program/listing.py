"""A Program as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.eager.tensor import Tensor
from polyreme.program.block import Block, Variable
from polyreme.program.operation import Call, Initialize, Operation
from polyreme.program.training import Optimize

_SHOWN = 8  # elements of a constant that a listing writes out


def listing(program: Any, with_details: bool) -> str:
    """A Program as text: a line for each operation, results on the left."""
    lines: list[str] = []
    for block in program.blocks:
        head = "program" if block.parent is None else f"block {block.idx} (in block {block.parent.idx})"
        takes = f" takes {', '.join('%' + n for n in block.takes)}" if block.takes else ""
        lines.append(f"{head}{takes} {{")
        if with_details:
            lines += [f"  var {_describe(v)}" for v in block.vars.values()]
        lines += [f"  {line(op, block)}" for op in block.ops]
        if block.gives:
            lines.append(f"  give {', '.join(map(repr, block.gives))}")
        lines.append("}")
    return "\n".join(lines)


def _describe(var: Tensor) -> str:
    kind = (
        " parameter" if var.persistable and not isinstance(var, Variable) else " persistable" if var.persistable else ""
    )
    return f"{var._array!r}{kind}{', stop_gradient' if var.stop_gradient else ''}"


def line(op: Operation, block: Block) -> str:
    """One operation as text."""
    shown = []
    for name in op.outputs:
        var = block.vars.get(name)
        shown.append(f"%{name}" + (f": {var.dtype.name}{list(var.shape)}" if var is not None else ""))
    left = f"{', '.join(shown)} = " if shown else ""
    return f"{left}{_right(op)}"


def _right(op: Operation) -> str:
    if isinstance(op, Call):
        arguments = [*map(_text, op.args), *(f"{k}={_text(v)}" for k, v in op.kwargs.items())]
        note = "".join(
            [
                f"  writes {', '.join('%' + n for n in op.changes)}" if op.changes else "",
                f"  autocast {op.policy.level} {op.policy.low}" if op.policy is not None else "",
                "" if op.taped else "  no_grad",
            ]
        )
        return f"{op.name}({', '.join(arguments)}){note}"
    reads = ", ".join(f"%{n}" for n in op.reads())
    blocks = f" blocks {', '.join(str(b.idx) for b in op.blocks)}" if op.blocks else ""
    writes = f"  writes {', '.join('%' + n for n in op.writes())}" if op.writes() else ""
    maker = op.optimizer if isinstance(op, Optimize) else op.initializer if isinstance(op, Initialize) else None
    by = "" if maker is None else f"[{type(maker).__name__}]"
    return f"{op.kind}{by}({reads}){blocks}{writes}"


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        shown = np.array2string(value, separator=", ", threshold=_SHOWN).replace("\n", "")
        return f"{value.dtype.name}{list(value.shape)} {' '.join(shown.split())}"
    return repr(value)
