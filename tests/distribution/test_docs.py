"""docs/distributions.md: its snippet runs, and what it says of differences is so."""

import re
from pathlib import Path

import numpy as np
import pytest

import polyreme.distribution as D

PAGE = Path(__file__).parents[2] / "docs" / "distributions.md"


@pytest.mark.slow
def test_the_snippet_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(compile(code, str(PAGE), "exec"), {})


def test_what_it_says_of_differences():
    assert D.Geometric(0.3).kl_divergence(D.Geometric(0.4)).item() == pytest.approx(0.0720, abs=5e-5)
    assert D.Uniform(1.0, 3.0).log_prob(1.0).item() == pytest.approx(-np.log(2))
    assert D.Normal([[0.0], [1.0]], [1.0, 2.0]).mean.shape == [2, 2]
