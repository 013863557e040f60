"""polyreme.random: the default generator's seed."""

from polyreme.core.rng import default_generator


def initial_seed() -> int:
    """The seed that random numbers have followed from since seed() was last called."""
    return default_generator.initial_seed()


__all__ = ["initial_seed"]
