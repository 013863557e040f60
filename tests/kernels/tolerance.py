"""Computed tolerances for kernels that sum in another order than their twins."""

import jax.numpy as jnp
import numpy as np


def of_sum(dtype, terms: int, size: float = 1.0, steps: int = 4) -> float:
    """Bound on how far two orders of one sum may be apart.

    terms values of at most `size`, each of the two sums made of `steps` such roundings in a row: 2 * steps * eps *
    sqrt(terms) * size; rounding errors add like a random walk. The result's own rounding is in `steps`.
    """
    return 2 * steps * float(jnp.finfo(dtype).eps) * np.sqrt(terms) * size


def assert_near(got, want, dtype, terms: int, steps: int = 4) -> None:
    """Compares pytrees of arrays; `size` is the largest value wanted, at least 1."""
    got, want = _flat(got), _flat(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        size = max(1.0, float(np.abs(b).max(initial=0)))
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=of_sum(dtype, terms, size, steps))


def _flat(tree) -> list[np.ndarray]:
    if isinstance(tree, (tuple, list)):
        return [x for part in tree for x in _flat(part)]
    return [np.asarray(tree).astype(np.float64)]
