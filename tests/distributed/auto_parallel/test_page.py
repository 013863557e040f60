"""The Python of docs/auto_parallel.md runs as it is written, section by section; its links lead somewhere."""

import doctest
import re
from pathlib import Path

import pytest

from polyreme.distributed.auto_parallel.engine import dist_model, engine, strategy
from polyreme.distributed.auto_parallel.tensors.process_mesh import clear_mesh

PAGE = Path(__file__).parents[3] / "docs" / "auto_parallel.md"
SECTIONS = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]}
BLOCKS = {name: re.findall(r"```python\n(.*?)```", part, re.DOTALL) for name, part in SECTIONS.items()}
NEEDS = {"to_static and DistModel": "Engine"}
"""Sections that go on with the data of another."""


@pytest.mark.parametrize("name", [name for name, blocks in BLOCKS.items() if blocks])
def test_the_examples_run(name, capsys, tmp_path):
    blocks = [*BLOCKS.get(NEEDS.get(name, ""), [])[:1], *BLOCKS[name]]
    code = "\n".join(blocks)
    script = tmp_path / "example.py"  # where captured code looks for its source
    script.write_text(code)
    try:
        exec(compile(code, str(script), "exec"), {"__name__": "docs"})
    finally:
        clear_mesh()
    printed = capsys.readouterr().out.splitlines()
    # what a print is said to give stands behind it
    for shown in re.findall(r"^ *print\(.*\)  # (.+)$", code, re.MULTILINE):
        assert shown in printed, shown


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([\w/]+\.md)(?:#[\w-]+)?\)", PAGE.read_text()):
        assert (PAGE.parent / link).exists(), link


@pytest.mark.parametrize("module", [strategy, dist_model, engine], ids=lambda m: m.__name__.rpartition(".")[2])
def test_the_doctests_run(module):
    failed, attempted = doctest.testmod(module)
    assert attempted
    assert failed == 0
