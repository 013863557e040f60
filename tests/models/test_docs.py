"""The examples of docs/branches.md, docs/models.md, docs/generation.md, docs/serving.md and docs/finetuning.md run."""

import re
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "page", [pytest.param("branches", marks=pytest.mark.slow), "models", "generation", "serving", "finetuning"]
)
def test_examples(page):
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    names = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, f"docs/{page}.md", "exec"), names)
