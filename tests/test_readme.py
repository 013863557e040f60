"""README's code runs, and what it names is there."""

import re
from pathlib import Path

import pytest

from polyreme.distributed import fleet
from polyreme.distributed.placement import clear_plan

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(autouse=True)
def _no_job_afterwards():
    yield
    fleet.reset()
    clear_plan()


@pytest.mark.slow_cases("code0")
@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_every_python_block_runs(code, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    losses = [float(line) for line in capsys.readouterr().out.split()]
    assert losses[-1] < losses[0]


def test_every_linked_and_named_file_exists():
    linked = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(
        r"`((?:docs|examples|configs|data|tests)/[\w./]*)`", README
    )
    assert linked
    for name in linked:
        assert (ROOT / name).exists(), name


def test_no_placeholder_is_left():
    assert not re.findall(r"@[A-Z]+@", README)
