"""Contract rows of ops/sampling.py: what may be drawn is worked out by hand."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

RANDOM = "random numbers do not depend on the input continuously"
ROWS = np.tile(np.float32([[0.1, 0.4, 0.2, 0.3]]), (500, 1))


def given(*args):
    return lambda rng: args


def draws_all_of(*indices):
    """Check that exactly these were drawn, with their probabilities."""

    def check(values, index, *top):
        assert index.shape == values.shape == (500, 1)
        assert index.dtype == "int64"
        assert set(index[:, 0]) == set(indices)
        np.testing.assert_array_equal(values, np.take_along_axis(ROWS, index, 1))
        for scores, order in zip(top[::2], top[1::2], strict=True):
            np.testing.assert_array_equal(scores[0], np.float32([0.4, 0.3]))
            np.testing.assert_array_equal(order[0], [1, 3])

    return check


CASES = [
    Case("top_p_sampling", given(ROWS, np.full(500, 0.75, "float32")), check=draws_all_of(1, 3, 2), no_grad=RANDOM, bad=((ROWS[0], np.ones(1, "float32")), ShapeError, "takes x")),
    Case("top_p_sampling", given(ROWS, np.full(500, 0.3, "float32")), check=draws_all_of(1), no_grad=RANDOM, tag="one", bad=((ROWS, np.ones(500, "float32"), None, None, -1, 0, "half"), ConfigError, "mode='half'")),
    Case("top_p_sampling", given(ROWS, np.ones(500, "float32"), np.full(500, 0.25, "float32")), check=draws_all_of(1, 3), no_grad=RANDOM, tag="threshold"),
    Case("top_p_sampling", given(ROWS, np.full(500, 0.3, "float32"), None, np.arange(500), -1, 2, "non-truncated", True), check=draws_all_of(0, 1, 2, 3), no_grad=RANDOM, tag="whole", bad=((ROWS, np.ones(500, "float32"), None, None, -1, 0, "truncated", True), ConfigError, "k=0 of 4")),
    Case("top_p_sampling", given(ROWS, np.full(500, 0.75, "float32"), None, None, 7), check=draws_all_of(1, 3, 2), no_grad=RANDOM, tag="seed"),
]  # fmt: skip
