"""examples/sparse_poisson.py solves its equation and finds its coefficients."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_poisson_example_solves_and_inverts():
    main = runpy.run_path(str(ROOT / "examples" / "sparse_poisson.py"))["main"]
    error, found = main(size=10)
    # second order: the error is pi^2 / 12 * step^2 to leading order, 0.0068 for a step of 1/11
    assert error < 1.2 * 0.0068
    assert abs(found[0] - 1) < 0.05
    assert abs(found[1] - 3) < 0.15
