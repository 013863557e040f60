"""Random numbers drawn on the host, for samplers and splits: from the seed if one was given, else numpy's own."""

import numpy as np


class _Stream:
    """The generator that seed() started, or None."""

    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator: np.random.Generator | None = None


_stream = _Stream()


def start(seed: int) -> None:
    """Draw from this seed from now on; polyreme.seed calls it."""
    # a stream of its own, apart from the keys that the same seed gives to random ops
    _stream.generator = np.random.default_rng([seed & (2**64 - 1), 1])


def draw() -> int:
    """A number below 2**31 - 1; before any seed, from numpy's global generator, which np.random.seed fixes."""
    if _stream.generator is None:
        return int(np.random.randint(0, 2**31 - 1))
    return int(_stream.generator.integers(0, 2**31 - 1))
