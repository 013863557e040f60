"""`polyreme schedule`: what it prints and draws, what it refuses; docs/schedules.md says what it does."""

import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from polyreme.cli import schedule as command
from polyreme.cli.main import app
from polyreme.errors import ConfigError
from polyreme.mesh import SCHEDULES, make_schedule
from polyreme.recipes.planning import schedule_drawing as drawing

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
SIGNS = re.compile(r"([FBW])(\d+)([a-z]?)(-*)|(\.)")


def run(*words):
    result = CliRunner().invoke(app, ["schedule", *map(str, words)], env={"COLUMNS": "120"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def read_rows(text):
    """stage -> [(start, end, kind, microbatch, chunk on the stage)], from panels of text columns."""
    rows = {}
    cell = len(max((found.group().rstrip("-") for found in SIGNS.finditer(text)), key=len)) + 1
    for panel in text.split("\n\n"):
        for line in panel.splitlines():
            if sign := re.match(r"stage (\d+)\s+", line):
                width = len(max(re.findall(r"stage \d+", text), key=len)) + 2
                rows.setdefault(int(sign[1]), []).append(line[width:])
    length = {stage: [-(-len(part) // cell) for part in parts] for stage, parts in rows.items()}
    tasks = {}
    for stage, parts in rows.items():
        clock, tasks[stage] = 0, []
        for index, part in enumerate(parts):
            for sign in SIGNS.finditer(part):
                if not sign[5]:
                    start = clock + sign.start() / cell
                    tasks[stage].append((start, sign[1], int(sign[2]), sign[3]))
            clock += max(length[other][index] for other in rows)
    return tasks


@pytest.mark.parametrize(("name", "v"), [("FThenB", 1), ("1F1B", 1), ("VPP", 3), ("ZBH1", 1), ("ZBVPP", 2)])
@pytest.mark.parametrize("width", [60, 1000])
def test_text_shows_every_task_at_its_time(name, v, width):
    schedule = make_schedule(name, 3, 11, v)
    text = drawing.timeline_text(schedule, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
    shown = read_rows(text)
    for stage in range(3):
        chunks = schedule.chunks_of(stage)
        letters = dict(zip(chunks, "abc" if v > 1 else [""], strict=False))
        mine = [span for span in schedule.order() if span.stage == stage]
        expected = [(s.start, s.task.kind, s.task.microbatch, letters[s.task.chunk]) for s in mine]
        assert shown[stage] == expected


def test_command_prints_timeline_and_figures():
    result = run("VPP", "--stages", 2, "--microbatches", 3, "--virtual", 2)
    assert result.exit_code == 0
    assert "VPP: 2 stages of 2 chunks, 3 microbatches" in result.output
    assert "\x1b" not in result.output  # plain where it is not a terminal
    assert "bubble                 14.3% (formula (p-1)/(v*m+p-1) = 14.3%)" in result.output
    assert "tasks                  12 12, per stage" in result.output
    assert "a..b chunks of a stage" in result.output
    # the least chunks a schedule has, if not told
    assert "of 2 chunks" in run("ZBVPP").output
    assert "formula" not in run("VPP", "--stages", 4, "--microbatches", 2).output


def test_all_compares_every_schedule():
    lines = run("--all", "--stages", 4, "--microbatches", 8, "--virtual", 3).output.splitlines()
    rows = {line.split()[0]: line for line in lines[3:]}
    assert list(rows) == list(SCHEDULES)
    for name, chunks, tasks in (("FThenB", 1, 64), ("VPP", 3, 192), ("ZBH1", 1, 96), ("ZBVPP", 2, 192)):
        assert rows[name].split()[1:3] == [str(chunks), str(tasks)]
    assert "11.1%" in rows["VPP"]  # 3 / (3 * 8 + 3)


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_draws_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    one, every = tmp_path / "one.png", tmp_path / "all.svg"
    assert f"drawn: {one}" in run("ZBVPP", "--stages", 2, "--microbatches", 3, "--draw", one).output
    width, height = png_size(one)
    assert (width, height) == (9 * 150, round((2 * 0.36 + 0.66 + 0.16 + 0.34) * 150))
    assert run("--all", "--stages", 2, "--microbatches", 2, "--draw", every).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.svg", "one.png"]


@pytest.mark.parametrize(("name", "v"), [("ZBH1", 1), ("VPP", 2)])
def test_a_picture_says_what_the_table_says(tmp_path, monkeypatch, name, v):
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, path, **_: (figures.append(self), path.touch()))
    schedule = make_schedule(name, 3, 5, v)
    drawing.draw([schedule], tmp_path / "x.png")
    (axes,) = figures[0].axes
    texts = [text.get_text() for text in axes.texts]
    assert drawing.title_text(schedule) in texts
    live = drawing.live_text(schedule)
    assert f"bubble {drawing.bubble_text(schedule)}   |   peak live activations per stage {live}" in texts
    # time in forwards of a whole stage; the three wide boxes behind are the idle time
    boxes = sorted((round(b.get_x(), 6), round(b.get_y() + 0.43), b.get_width()) for b in axes.patches)
    spans = [(span.start / v, span.stage, (span.end - span.start) / v) for span in schedule.order()]
    assert boxes == sorted([*spans, *((0, stage, schedule.makespan() / v) for stage in range(3))])
    assert texts.count("0") == len([span for span in schedule.order() if span.task.microbatch == 0])
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    shown = ["F  forward", "B  input gradients", "W  weight gradients", "idle"]
    assert legend == (shown if v == 1 else ["F  forward", "B  backward", "idle", "lighter: earlier chunk of a stage"])


def test_a_terminal_gets_colours(monkeypatch):
    monkeypatch.setattr(command, "Console", lambda **options: Console(**options, force_terminal=True, _environ={}))
    output = run("ZBH1", "--stages", 2, "--microbatches", 2).output
    for kind, code in (("F", "37;44"), ("B", "30;42"), ("W", "30;43")):
        assert f"\x1b[{code}m{kind}0\x1b[0m" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ZBH"], "unknown schedule 'ZBH'; did you mean 'ZBH1'"),
        ([], "needs the name of one .*1F1B.* or --all"),
        (["1F1B", "--all"], "give a name or --all, not both"),
        (["1F1B", "--virtual", "2"], "1F1B with num_virtual=2; give 1, or schedule VPP"),
        (["--all", "--virtual", "1"], "VPP with num_virtual=1; give 2 or more"),
        (["1F1B", "--draw", "x.bmp"], "--draw x.bmp: a picture ends in .png, .svg, .pdf"),
        (["1F1B", "--draw", "no/such/x.png"], "there is no folder no/such; make it first"),
    ],
)
def test_refuses_what_it_cannot_do(words, message):
    with pytest.raises(ConfigError, match=message):
        run(*words)


def test_refuses_a_folder_and_a_missing_matplotlib(tmp_path, monkeypatch):
    (tmp_path / "x.png").mkdir()
    with pytest.raises(ConfigError, match="is a folder; give the name of a file in it"):
        run("1F1B", "--draw", tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ConfigError, match=r"--draw needs matplotlib.*pip install polyreme\[logs\]"):
        run("1F1B", "--draw", tmp_path / "y.png")


def test_the_program_ends_with_the_code_of_a_bad_setting():
    words = [sys.executable, "-m", "polyreme.cli.main", "schedule", "1F1B", "--stages", "0"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")


def test_the_page_is_true():
    text = PAGE.read_text()
    listings = re.findall(r"```console\n\$ polyreme schedule (.*?)\n(.*?)```", text, re.S)
    assert len(listings) == 2
    for words, output in listings:
        assert run(*shlex.split(words)).output == output
