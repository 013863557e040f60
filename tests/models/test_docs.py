"""The examples of pages of docs/ that are about models run."""

import re
from pathlib import Path

import pytest

PAGES = ("models", "generation", "serving", "finetuning", "compression")


@pytest.mark.parametrize("page", [pytest.param("branches", marks=pytest.mark.slow), *PAGES])
def test_examples(page):
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    names = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, f"docs/{page}.md", "exec"), names)
