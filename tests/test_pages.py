"""The Python of every page of docs/ runs as it is written, one program a page, and gives what the page says.

By what runs it for the site, in this process: another one takes longer to start than most pages.
"""

import contextlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from polyreme.paddle_scripts import as_paddle
from tests.isolated import isolated

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS / "_extensions"))
import run_page  # noqa: E402

PAGES = {
    str(path.relative_to(DOCS).with_suffix("")): path
    for path in sorted(DOCS.rglob("*.md"))
    # the page of errors is written from the classes, and its examples are looked at with these; that of custom ops
    # shows examples/, which utils/test_cpp_extension.py runs: an op is declared once in a process
    if path.stem not in ("errors", "custom_ops") and run_page.blocks(path.read_text(encoding="utf-8"))
}
BEHIND_PRINT = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
PROSE = re.compile(r"[a-z] [a-z]|[^\x00-\x7f]")
INDENTED = re.compile(r"```\n\n((?:    [^\n]*\n)+)")

CLAIMS = {
    "dashboard": lambda _, printed: (
        printed == [line.strip() for line in INDENTED.search(PAGES["dashboard"].read_text())[1].splitlines()]
    ),
    "data": lambda names, _: names["written"],
    "data_loading": lambda names, printed: (
        names["train"].classes == ["blue", "green", "red"]
        and names["result"]["acc"] > 0.9
        and printed[-1].startswith("['blue'")
    ),
    "evaluation": lambda names, _: names["row"]["task"] == "choice",
    "fluid": lambda _, printed: "array([" in "\n".join(printed),
    "generation": lambda _, printed: printed[0].endswith("length"),
    "hardware": lambda names, _: names["message"].startswith("device.register: npu: /etc/hostname is no PJRT plugin"),
    "long_sequence": lambda names, _: names["model"].tokens.weight.grad is not None,
    "overlap": lambda _, printed: printed == ["moe in 2 parts", "mp by ring", "sharding by ring"],
    # the mean of squares of sums of eight numbers of variance 1 is near 8 untrained
    "pipeline": lambda names, printed: names["proof"].holds and float(printed[-1]) < 4,
    "profiler": lambda _, printed: all(
        any(word in line for line in printed) for word in ("train_step", "rows/s", "linear: ")
    ),
    "sequences": lambda names, _: (
        names["value"].shape == (1,) and names["features"].recursive_sequence_lengths() == [[3, 2]]
    ),
}
"""What pages say in words, of the names that they leave and the lines that they print."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the checkout's own in it, where nothing that a page sets outlives it."""
    run_page.share(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    np.random.seed(0)
    with isolated():
        yield tmp_path


# what these are about is compiled by tests of its own; make docs runs every page
@pytest.mark.slow_cases(
    "compression",
    "evaluation",
    "experts",
    "auto_parallel",
    "branches",
    "distributions",
    "finetuning",
    "generation",
    "long_sequence",
    "offload",
    "pipeline",
    "profiler",
    "quickstart",
    "recurrent",
    "zh/index",
    "zh/quickstart",
)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page, place):
    text = PAGES[page].read_text(encoding="utf-8")
    names = {"__name__": "page", "__file__": str(place / "examples" / "page.py")}  # scripts that are shown stand there
    # what the page installs for the rest of its process ends with this block
    with as_paddle() if "as_paddle()" in text else contextlib.nullcontext():
        records = run_page.run(PAGES[page], names)
    assert [record["error"] for record in records if record["error"]] == []
    printed = "".join(record["printed"] for record in records).splitlines()
    shown = [said for _, code, _ in run_page.blocks(text) for said in BEHIND_PRINT.findall(code)]
    shown = [said for said in shown if not PROSE.search(said)]
    assert [said for said in shown if said not in printed] == []
    assert CLAIMS.get(page, lambda *_: True)(names, printed)


def test_claims_are_of_pages():
    assert CLAIMS.keys() <= PAGES.keys()
