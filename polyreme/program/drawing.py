"""Pictures of Programs: SVG of our own, and DOT text for Graphviz.

Both show one model: a graph of boxes for each block, an operation with blocks holding theirs. Parameters and
other persistable values are listed in the boxes that read them, instead of edges from one place to all over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Protocol

from polyreme.errors import ConfigError
from polyreme.program.branches import Cond, OverRows, Recompute, UntilFinished, While
from polyreme.program.layered import GAP_Y, Box, place
from polyreme.program.operation import Operation
from polyreme.program.values import refs

_CHAR, _LINE, _PAD = 7.3, 16.0, 9.0  # pixels of a 12 pixel fixed-width font, with room to spare
_LISTED = 6  # results and parameters that a box names; the rest is counted
_FILL = {"op": "#ffffff", "data": "#e3f2e6", "port": "#eceff3", "train": "#fdeaea", "frame": "#f6f8fb"}
_EDGE = {"op": "#57606a", "data": "#2f7d43", "port": "#8c959f", "train": "#b3404a", "frame": "#c3ccd6"}
_NAMES = {
    Cond: ("true", "false"),
    While: ("test", "body"),
    Recompute: ("run again in backward",),
    OverRows: ("step",),
    UntilFinished: ("step", "behind the end"),
}


class BlockView(Protocol):
    """What a picture shows of a block (program.block.Block)."""

    ops: list[Any]
    takes: list[str]
    gives: list[Any]
    vars: dict[str, Any]

    def find_var(self, name: str) -> Any: ...
    def free(self) -> list[str]: ...


class ProgramView(Protocol):
    """What a picture shows of a Program (program.program.Program)."""

    captured: dict[str, Any]

    def global_block(self) -> Any: ...


@dataclass
class GraphBox:
    """A box: a title, lines of results, persistable values it reads, and graphs inside it by name."""

    kind: str
    title: str
    lines: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    inside: list[tuple[str, BoxGraph]] = field(default_factory=list)


@dataclass
class BoxGraph:
    """Boxes in order, and (from, to) for each value that goes from one to another."""

    items: list[GraphBox] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)


def draw(program: ProgramView, path: str | Path) -> None:
    """Write a picture of a Program: a file ending in .svg, which any browser shows, or .dot, which Graphviz reads.

    Operations from top to bottom with the shapes of their results; what is fed in green, parameters and other
    persistable values as yellow labels in the boxes that use them, backward and updates in red, blocks as frames.
    Raises ConfigError for another ending.
    """
    path = Path(path)
    writers = {".svg": svg, ".dot": dot}
    if path.suffix not in writers:
        raise ConfigError(f"draw: the file {path.name!r} ends in {path.suffix!r}; choose '.svg' or '.dot'")
    path.write_text(writers[path.suffix](program), encoding="utf-8")


def graph_of(program: ProgramView) -> BoxGraph:
    """What a picture of the Program shows."""
    return _graph(program.global_block(), program)


# ---- the model ----


def _graph(block: BlockView, program: ProgramView, inner: bool = False) -> BoxGraph:
    graph, maker_of = BoxGraph(), {}
    entering = [*block.takes, *(n for n in block.free() if n not in block.takes and not _is_kept(n, block, program))]
    for name in entering:
        var = block.find_var(name)
        fed = not inner and getattr(var, "is_data", False)
        maker_of[name] = len(graph.items)
        graph.items.append(
            GraphBox("data" if fed else "port", _short(name), [] if inner and var is None else _convert(var))
        )
    for op in block.ops:
        item = _item(op, block, program)
        index = len(graph.items)
        graph.items.append(item)
        graph.edges += [(a, index) for a in dict.fromkeys(maker_of[n] for n in op.reads() if n in maker_of)]
        maker_of.update(dict.fromkeys(op.outputs, index))
    if block.gives:
        index = len(graph.items)
        graph.items.append(GraphBox("port", "gives", [_argument_text(v) for v in block.gives][:_LISTED]))
        graph.edges += [(a, index) for a in dict.fromkeys(maker_of[n] for n in refs(block.gives) if n in maker_of)]
    return graph


def _item(op: Operation, block: BlockView, program: ProgramView) -> GraphBox:
    kind = "train" if op.kind in ("backward", "optimize") else "op"
    results = [" ".join(_convert(block.vars[n])) for n in op.outputs if n in block.vars]
    lines = results if kind == "op" else ([f"{len(results)} gradients"] if results else [])
    reads = [n for n in dict.fromkeys([*op.reads(), *op.writes()]) if _is_kept(n, block, program)]
    written = set(op.writes())
    shown = [f"{'writes ' if n in written else ''}{_short(n)} {_shape(block.find_var(n))}".rstrip() for n in reads]
    item = GraphBox(kind, op.kind, _some(lines), _some(shown))
    if op.blocks:
        names = _NAMES.get(type(op)) or tuple(f"block {b.idx}" for b in op.blocks)
        item.parameters = []  # shown inside
        item.inside = [(name, _graph(b, program, True)) for name, b in zip(names, op.blocks, strict=True)]  # type: ignore[arg-type]
    return item


def _is_kept(name: str, block: BlockView, program: ProgramView) -> bool:
    var = block.find_var(name)
    return name in program.captured or (var is not None and bool(var.persistable))


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LISTED else [*lines[: _LISTED - 1], f"and {len(lines) - _LISTED + 1} more"]


def _shape(var: Any) -> str:
    return "" if var is None else str([int(s) for s in var.shape])


def _convert(var: Any) -> list[str]:
    return [] if var is None else [f"{var.dtype.name} {_shape(var)}"]


def _argument_text(value: Any) -> str:
    names = refs(value)
    return _short(names[0]) if names else str(value)


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:12]}...{name[-13:]}"


# ---- SVG ----


def svg(program: ProgramView) -> str:
    """The picture as SVG text."""
    body, width, height = _place(graph_of(program))
    margin = 16
    size = f'width="{width + 2 * margin:.0f}" height="{height + 2 * margin:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="12">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#57606a"/></marker></defs>',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<g transform="translate({margin} {margin})">',
            *body,
            "</g>",
            "</svg>",
            "",
        ]
    )


@dataclass
class _Part:
    """A box with what is drawn inside it."""

    item: GraphBox
    box: Box
    frames: list[tuple[float, float, float, str, list[str]]]  # x, width, height, name, body


def _place(graph: BoxGraph) -> tuple[list[str], float, float]:
    """(SVG elements, width, height) of a graph."""
    parts = [_part(item) for item in graph.items]
    found = place([p.box for p in parts], graph.edges)
    body = [_path(line) for line in found.lines]
    for part in parts:
        body += _draw(part)
    return body, found.width, found.height


def _part(item: GraphBox) -> _Part:
    frames, x, tallest = [], _PAD, 0.0
    for name, graph in item.inside:
        body, width, height = _place(graph)
        width = max(width, len(name) * _CHAR)
        frames.append((x, width + 2 * _PAD, height + _LINE + 2 * _PAD, name, body))
        x += width + 3 * _PAD
        tallest = max(tallest, height + _LINE + 3 * _PAD)
    texts = [item.title, *item.lines, *(f" {p} " for p in item.parameters)]
    width = max([len(t) * _CHAR + 2 * _PAD for t in texts] + ([x] if frames else []))
    height = _LINE * len(texts) + 2 * len(item.parameters) + _PAD + tallest
    return _Part(item, Box(width, height, last=item.title == "gives" and item.kind == "port"), frames)


def _draw(part: _Part) -> list[str]:
    item, box = part.item, part.box
    fill = _FILL["frame"] if part.frames else _FILL[item.kind]
    lines = [
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="{12 if item.kind in ("data", "port") else 4}" fill="{fill}" stroke="{_EDGE[item.kind]}"/>'
    ]
    y = box.y + _LINE - 1
    lines.append(_write(box.centre, y, item.title, "middle", weight="bold"))
    for text in item.lines:
        y += _LINE
        lines.append(_write(box.centre, y, text, "middle", "#57606a"))
    for text in item.parameters:
        y += _LINE + 2
        width = (len(text) + 2) * _CHAR
        lines.append(
            f'<rect x="{box.centre - width / 2:.1f}" y="{y - 12:.1f}" width="{width:.1f}" height="16" rx="8" '
            'fill="#fff3cd" stroke="#c99700"/>'
        )
        lines.append(_write(box.centre, y, text, "middle", "#6b5200"))
    top = y + _PAD
    for x, width, height, name, body in part.frames:
        lines.append(
            f'<rect x="{box.x + x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
            f'fill="#ffffff" stroke="{_EDGE["frame"]}" stroke-dasharray="5 3"/>'
        )
        lines.append(_write(box.x + x + _PAD, top + _LINE - 2, name, "start", "#57606a", "bold"))
        lines.append(f'<g transform="translate({box.x + x + _PAD:.1f} {top + _LINE + _PAD:.1f})">')
        lines += [*body, "</g>"]
    return lines


def _write(x: float, y: float, text: str, anchor: str, colour: str = "#1f2328", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def _path(points: list[tuple[float, float]]) -> str:
    """A line through points: straight down along layers, bent in the gaps between them."""
    (x, y), *rest = points
    steps = [f"M{x:.1f} {y:.1f}"]
    for i, (to_x, to_y) in enumerate(rest):
        if i % 2 == 0:
            steps.append(f"L{to_x:.1f} {to_y:.1f}")
        else:
            bend = GAP_Y / 2
            steps.append(f"C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
    return f'<path d="{" ".join(steps)}" fill="none" stroke="#8c959f" marker-end="url(#tip)"/>'


# ---- DOT ----


def dot(program: ProgramView) -> str:
    """The picture as text in the language of Graphviz."""
    lines = ["digraph program {", "  rankdir=TB;", '  node [shape=box, fontname="monospace", fontsize=10];']
    return "\n".join([*lines, *_dot(graph_of(program), "n", "  "), "}", ""])


def _dot(graph: BoxGraph, prefix: str, indent: str) -> Iterator[str]:
    for at, item in enumerate(graph.items):
        me = f"{prefix}_{at}"
        label = "\\n".join(map(_quote, [item.title, *item.lines, *(f"[{p}]" for p in item.parameters)]))
        style = f'style="filled{",rounded" if item.kind in ("data", "port") else ""}", fillcolor="{_FILL[item.kind]}"'
        node = f'{indent}{me} [label="{label}", {style}, color="{_EDGE[item.kind]}"];'
        if not item.inside:
            yield node
            continue
        yield f"{indent}subgraph cluster_{me} {{"
        yield f"  {node}"
        for i, (name, inner) in enumerate(item.inside):
            yield f"{indent}  subgraph cluster_{me}_{i} {{"
            yield f'{indent}    label="{_quote(name)}"; style=dashed; fontname="monospace"; fontsize=10;'
            yield from _dot(inner, f"{me}_{i}", indent + "    ")
            yield f"{indent}  }}"
        yield f"{indent}}}"
    yield from (f"{indent}{prefix}_{a} -> {prefix}_{b};" for a, b in graph.edges)


def _quote(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
