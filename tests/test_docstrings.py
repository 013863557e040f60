"""Every example in a docstring of the package gives what it shows."""

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle
from tests.isolated import isolated

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "polyreme").rglob("*.py")
    if "    >>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_hold(name):
    module = importlib.import_module(name)
    with isolated():
        result = doctest.testmod(module, extraglobs={"paddle": paddle, "np": np})
    assert result.attempted > 0
    assert result.failed == 0
