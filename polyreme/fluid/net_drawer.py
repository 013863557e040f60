"""fluid.net_drawer: a Program as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyreme.program.drawing import dot


def draw_graph(startup_program: Any, main_program: Any, filename: str = "graph.dot", **kwargs: Any) -> str:
    """Write the DOT text of main_program, for Graphviz; returns it. Other settings of 1.7's picture change nothing."""
    text = dot(main_program)
    Path(filename).write_text(text)
    return text


__all__ = ["draw_graph"]
