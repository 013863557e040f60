"""docs/sparse.md, the examples in docstrings and examples/sparse_poisson.py say what is true."""

import doctest
import re
import runpy
from pathlib import Path

import pytest

from polyreme.eager.sparse import members, shaping
from polyreme.geometric import reindex, sampling
from polyreme.sparse import creation
from polyreme.sparse.nn import functional, layers

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("module", [creation, functional, layers, members, reindex, sampling, shaping])
def test_examples_in_docstrings(module):
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_every_block_of_the_page_runs():
    names = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sparse.md").read_text(), re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "docs/sparse.md", "exec"), names)


def test_the_poisson_example_solves_and_inverts():
    main = runpy.run_path(str(ROOT / "examples" / "sparse_poisson.py"))["main"]
    error, found = main(size=10)
    # second order: the error is pi^2 / 12 * step^2 to leading order, 0.0068 for a step of 1/11
    assert error < 1.2 * 0.0068
    assert abs(found[0] - 1) < 0.05
    assert abs(found[1] - 3) < 0.15
