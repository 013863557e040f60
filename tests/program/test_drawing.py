"""Pictures of Programs: everything is in them, nothing lies on anything else."""

import shutil
import subprocess
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.errors import ConfigError
from polyreme.jit.control_flow import cond, while_loop
from polyreme.program.layered import Box, place

WIDTH = 7.23  # pixels a character takes in the widest of the fonts at 12 pixels


def build():
    """A network with parameters, statistics, nested blocks, and training."""
    x = static.data("x", [None, 3])
    h = F.relu(paddle.nn.BatchNorm1D(4)(paddle.nn.Linear(3, 4)(x)))
    y = cond(h.mean() > 0.1, lambda: paddle.nn.Linear(4, 4)(h), lambda: h - 1)
    start = [paddle.zeros([1], "int64"), y.mean()]
    _, z = while_loop(lambda i, t: i < 3, lambda i, t: [i + 1, cond(t > 1, lambda: t, lambda: t + y.mean())], start, 5)
    paddle.optimizer.SGD(0.1).minimize(z)


def texts(node, dx=0.0, dy=0.0):
    """(text, left, top, right, bottom) of every text, in the picture's coordinates."""
    for child in node:
        tag = child.tag.rpartition("}")[2]
        if tag == "g":
            x, y = child.get("transform").removeprefix("translate(").removesuffix(")").split()
            yield from texts(child, dx + float(x), dy + float(y))
        elif tag == "text":
            width = len(child.text) * WIDTH
            left = float(child.get("x")) - (width / 2 if child.get("text-anchor") == "middle" else 0) + dx
            base = float(child.get("y")) + dy
            yield child.text, left, base - 9, left + width, base + 3


def test_every_operation_is_in_the_picture_and_no_text_on_another(static_mode, tmp_path):
    main, _ = static_mode
    build()
    main.draw(tmp_path / "p.svg")
    root = ET.parse(tmp_path / "p.svg").getroot()
    boxes = list(texts(root))
    shown = [text for text, *_ in boxes]
    for op in main.every_op():
        assert shown.count(op.kind) >= sum(other.kind == op.kind for other in main.every_op())
    for text in ("x", "linear_0.w_0 [3, 4]", "writes batch_norm1d_0.w_1 [4]", "true", "false", "test", "body"):
        assert text in shown
    assert shown.count("gives") == 6
    for i, (text, left, top, right, bottom) in enumerate(boxes):
        assert left >= 0
        assert right <= float(root.get("width"))
        assert bottom <= float(root.get("height"))
        for other, a, b, c, d in boxes[:i]:
            assert right <= a or c <= left or bottom <= b or d <= top, f"{text} lies on {other}"


def test_dot_is_what_graphviz_reads(static_mode, tmp_path):
    main, _ = static_mode
    build()
    static.draw(main, str(tmp_path / "p.dot"))
    text = (tmp_path / "p.dot").read_text()
    assert text.count("{") == text.count("}")
    assert text.count("subgraph cluster_") == 3 + 6  # operations with blocks, and their blocks
    assert '[label="linear\\nfloat32 [-1, 4]\\n[linear_0.w_0 [3, 4]]\\n[linear_0.b_0 [4]]"' in text
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg", tmp_path / "p.dot"], check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"'p.png' ends in '.png'; choose '.svg' or '.dot'"):
        main.draw(tmp_path / "p.png")


def test_many_results_and_long_names_are_cut(static_mode, tmp_path):
    main, _ = static_mode
    w = paddle.create_parameter([2], "float32", name="a_name_that_is_much_too_long_to_be_shown_whole")
    paddle.split(static.data("x", [16]) * w.sum(), 16)
    main.draw(tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert "and 11 more" in text
    assert "a_name_that_...e_shown_whole [2]" in text


graphs = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.tuples(st.integers(10, 200), st.integers(10, 80)), min_size=n, max_size=n),
        st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] < e[1]), max_size=14),
    )
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(graphs)
def test_boxes_and_edges_of_any_graph_keep_apart(graph):
    sizes, edges = graph
    boxes, edges = [Box(w, h) for w, h in sizes], sorted(edges)
    placed = place(boxes, edges)
    for i, a in enumerate(boxes):
        assert 0 <= a.x <= a.x + a.width <= placed.width + 1e-6
        for b in boxes[:i]:
            apart = a.x + a.width < b.x or b.x + b.width < a.x
            assert apart or a.y + a.height < b.y or b.y + b.height < a.y
    for (source, target), line in zip(edges, placed.lines, strict=True):
        assert boxes[source].y < boxes[target].y
        for (x, top), (_, bottom) in zip(line[::2], line[1::2], strict=False):  # the straight parts
            for at, box in enumerate(boxes):
                clear = not box.x < x < box.x + box.width or bottom <= box.y or top >= box.y + box.height
                assert clear or at in (source, target)
