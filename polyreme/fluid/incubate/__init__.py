"""fluid.incubate: fleet, collectively, and generators of slot data."""

from polyreme.fluid.incubate import data_generator, fleet

__all__ = ["data_generator", "fleet"]
