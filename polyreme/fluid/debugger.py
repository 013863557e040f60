"""fluid.debugger: Programs as text and as pictures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme.program.drawing import dot


def draw_block_graphviz(block: Any, highlights: Sequence[str] | None = None, path: str = "./temp.dot") -> None:
    """Write the DOT text of a block's Program, for Graphviz. highlights changes nothing."""
    Path(path).write_text(dot(block.program))


def pprint_program_codes(program: Any) -> None:
    """Print a Program's listing."""
    sys.stdout.write(f"{program}\n")


def pprint_block_codes(block: Any, show_backward: bool = False) -> None:
    """Print the listing of a block's Program, backward included."""
    pprint_program_codes(block.program)


__all__ = ["draw_block_graphviz", "pprint_block_codes", "pprint_program_codes"]
