"""Seeds: what a generator argument means, and the random numbers of one epoch."""

from typing import Any

import numpy as np

from polyreme import host_random
from polyreme.errors import ConfigError, DTypeError


def seed_of(generator: Any, asked_by: str) -> int:
    """The seed that a generator argument stands for.

    An int is the seed itself; an object with initial_seed() is asked for it; a numpy Generator gives its next number.
    None draws one: polyreme.seed(n) fixes the order of a whole program, and before that np.random.seed(n) does.
    """
    if generator is None:
        return host_random.draw()
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(0, 2**63 - 1))
    seed = generator.initial_seed() if hasattr(generator, "initial_seed") else generator
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise DTypeError(
            f"{asked_by}: generator is a {type(generator).__name__}; give an int seed, a numpy Generator or an object "
            "with initial_seed()"
        )
    if seed < 0:
        raise ConfigError(f"{asked_by}: the seed is {seed}; give one of at least 0")
    return int(seed)


def epoch_rng(seed: int, epoch: int) -> np.random.Generator:
    """Random numbers that depend on (seed, epoch) alone."""
    return np.random.default_rng([seed, epoch])
