"""Contract rows of ops declared beside the layers."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.nn import clip  # noqa: F401  (declares global_norm)

CASES = [
    Case(
        "global_norm",
        lambda rng: ([rng.standard_normal((3, 4)).astype("float32"), rng.standard_normal(5).astype("float32")],),
        lambda xs: np.sqrt(sum((x.astype("float64") ** 2).sum() for x in xs)).astype("float32"),
        terms=17,
    )
]
