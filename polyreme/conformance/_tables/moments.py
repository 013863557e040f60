"""Contract rows of ops/moments.py."""

import numpy as np

from polyreme.conformance._tables.attention import floats, then
from polyreme.conformance.case import Case


def moments(x, dims, eps):
    rows = x.reshape(-1, int(np.prod(x.shape[-dims:])))
    return rows.mean(-1), 1 / np.sqrt(rows.var(-1) + eps)


CASES = [
    Case("layer_norm_moments", then(floats((2, 3, 4)), 2, 0.01), moments, terms=24),
    Case("rms_norm_moments", then(floats((2, 3, 4)), 1, 0.01), lambda x, _, eps: 1 / np.sqrt((x**2).mean(-1).ravel() + eps), terms=24),
]  # fmt: skip
