"""The site's pages: each has a place, links lead somewhere, commands exist, notebooks are whole."""

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer
from rich.markup import render

import polyreme
from polyreme.cli.main import app
from tools.write_api_coverage import names

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *(`{3,}).*?^ *\1`*$", re.MULTILINE | re.DOTALL)
sys.path.insert(0, str(DOCS / "_extensions"))
import page_order  # noqa: E402


def _is_written(path):
    """Whether make docs writes it."""
    return path.is_relative_to(DOCS / "api") or path.is_relative_to(DOCS / "_extensions")


PAGES = sorted(p for p in DOCS.rglob("*.md") if not _is_written(p))


def _source(path):
    """The Markdown of a page or notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return "\n\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")


@cache
def _anchors(path):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", _source(path)), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).lower()) for h in headings)
    return {h.strip().replace(" ", "-") for h in plain}


def test_every_page_has_its_place():
    there = {str(p.relative_to(DOCS).with_suffix("")) for p in (*PAGES, *NOTEBOOKS)}
    listed = {page for page in page_order.order() if not page.startswith("api/")}
    assert not there - listed, "list it, with a line, in docs/guides.md, tutorials.md, reference.md or explanation.md"
    assert not listed - there


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=lambda p: str(p.relative_to(DOCS)))
def test_links_lead_somewhere(path):
    modules = {*names(), *_extension_modules(), "index", "commands", "settings"}
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", _source(path)))):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if target.is_relative_to(DOCS / "api"):
            assert target.stem in modules, link
            continue
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), link


def _extension_modules():
    """Modules of the reference that PaddlePaddle has not."""
    tree = ast.parse((DOCS / "_extensions" / "reference.py").read_text())
    return next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "OURS")


def test_the_configuration_is_read():
    settings = {}
    before = list(sys.path)
    exec(
        compile((DOCS / "conf.py").read_text(), DOCS / "conf.py", "exec"), {"__file__": str(DOCS / "conf.py")}, settings
    )
    sys.path[:] = before
    own = [name for name in settings["extensions"] if (DOCS / "_extensions" / f"{name}.py").exists()]
    assert own
    for name in own:
        ast.parse((DOCS / "_extensions" / f"{name}.py").read_text())
    assert all((DOCS / "_static" / name).exists() for name in settings["html_css_files"])


def _commands():
    """Words of a command -> its options; None for a command that reads its line itself, or has commands below it."""
    options_of = {}

    def walk(command, path):
        below = getattr(command, "commands", None)
        if below is not None:
            for name, one in below.items():
                walk(one, (*path, name))
            return
        reads_all = not any(p.param_type_name == "option" for p in command.params)
        options_of[path] = None if reads_all else {o for p in command.params for o in (*p.opts, *p.secondary_opts)}

    walk(typer.main.get_command(app), ())
    return options_of


def test_no_help_holds_what_a_terminal_takes_for_markup():
    def texts(command):
        yield command.help or ""
        yield from (parameter.help or "" for parameter in command.params if hasattr(parameter, "help"))
        for below in getattr(command, "commands", {}).values():
            yield from texts(below)

    told = list(texts(typer.main.get_command(app)))
    assert len(told) > 100
    assert [text for text in told if render(text).plain != text] == []


def test_commands_on_the_pages_exist():
    commands = _commands()
    lines = []
    for path in (*PAGES, ROOT / "README.md"):
        text = path.read_text(encoding="utf-8")
        lines += [
            (path, line)
            for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)
            for line in block.splitlines()
        ]
        lines += [(path, line) for line in text.splitlines() if re.match(r" {4}(\S*/)?polyreme ", line)]
    lines = [(p, re.match(r"\s*(?:[A-Z_]+=\S+ )*(?:\S*/)?polyreme ([^#|>&]*)", line)) for p, line in lines]
    lines = [(p, match[1].split()) for p, match in lines if match]
    assert len(lines) > 50
    for path, words in lines:
        if words[0].endswith(":"):  # what the command prints
            continue
        command = next((c for c in commands if tuple(words[: len(c)]) == c), None)
        if command is None:
            assert words[0] in {c[0] for c in commands} | {"COMMAND", "--help", "--version"}, (path.name, words)
            continue
        options = commands[command]
        for word in words[len(command) :]:
            if options is not None and word.startswith("--") and "=" not in word:
                assert word in options | {"--help", "--debug"}, (path.name, words)


def test_each_of_the_24_points_has_a_command_and_a_test():
    page = (DOCS / "first_ten_minutes.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 25))
    for _, _, command, test in rows:
        assert command.strip()
        assert test.strip()
        for name in re.findall(r"`(tests/[\w/.:]+)`", test):
            file, _, function = name.partition("::")
            assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "README.md"])
def test_files_that_a_page_of_the_root_names_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:polyreme|tests|tools|docs|examples|configs|data)/[\w/.]*)`", text)
    linked = [link.partition("#") for link in LINK.findall(text) if not link.startswith("http")]
    assert linked
    for path in (*named, *(path for path, _, _ in linked)):
        assert (ROOT / path).exists(), path
    for path, _, anchor in linked:
        assert not anchor or anchor in _anchors(ROOT / path), anchor


def test_recipes_for_contributors_are_those_that_are_promised():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipes = re.findall(r"^### An? (.+)$", text, re.MULTILINE)
    assert recipes == ["op", "layer", "optimizer", "model family", "pipeline schedule", "device"]


def test_one_version_everywhere():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    built = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert cited[1] == built[1] == polyreme.__version__
    assert f"## {polyreme.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_shell_completes():
    asked = {"_POLYREME_COMPLETE": "complete_bash", "COMP_WORDS": "polyreme pret", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "polyreme"]
    answer = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, timeout=60)
    assert answer.stdout.split() == ["pretrain"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_whole(path):
    assert path.stat().st_size < 300_000
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    for cell in code:
        assert cell["execution_count"], "executed when it was committed"
        assert not [o for o in cell["outputs"] if o["output_type"] == "error"]
        lines = "".join(cell["source"]).splitlines()
        ast.parse("\n".join(line for line in lines if not line.startswith(("!", "%"))))
    assert any(cell["outputs"] for cell in code)
    assert "".join(cells[0]["source"]).startswith("# ")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("configs", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    for name in ("CPU_NUM", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
