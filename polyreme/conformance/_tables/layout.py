"""Contract rows of ops/layout.py; placement itself is tested in tests/distributed."""

import jax
import numpy as np

from polyreme.conformance.case import Case

CASES = [
    Case(
        "sharding_constraint",
        lambda rng: (
            rng.standard_normal((4, 3)).astype("float32"),
            jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        ),
        lambda x, s: x,
    ),
    Case(
        "relayout",
        lambda rng: (
            rng.standard_normal((4, 3)).astype("float32"),
            jax.sharding.SingleDeviceSharding(jax.devices()[0]),
            jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        ),
        lambda x, there, back: x,
    ),
    Case(
        "whole_over",
        lambda rng: (rng.standard_normal((4, 3)).astype("float32"), jax.make_mesh((1,), ("mp",)), "mp"),
        lambda x, mesh, axis: x,
    ),
    Case("constrain", lambda rng: (np.ones((2, 3), "float32"), "batch", None), lambda x, *dims: x),
    Case(
        "into_zigzag",
        lambda rng: (rng.standard_normal((2, 12)).astype("float32"), 3, 1),
        lambda x, ways, dim: x[:, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]],
    ),
    Case(
        "out_of_zigzag",
        lambda rng: (rng.standard_normal((12, 2)).astype("float32"), 3, 0),
        lambda x, ways, dim: x[[0, 1, 4, 5, 8, 9, 10, 11, 6, 7, 2, 3]],
    ),
]
