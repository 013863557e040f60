"""What docs/distributions.md says of differences from PaddlePaddle is so."""

import numpy as np
import pytest

import polyreme.distribution as D


def test_results_that_differ_from_paddles():
    assert D.Geometric(0.3).kl_divergence(D.Geometric(0.4)).item() == pytest.approx(0.0720, abs=5e-5)
    assert D.Uniform(1.0, 3.0).log_prob(1.0).item() == pytest.approx(-np.log(2))
    assert D.Normal([[0.0], [1.0]], [1.0, 2.0]).mean.shape == [2, 2]
