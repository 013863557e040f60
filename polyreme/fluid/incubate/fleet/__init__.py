"""fluid.incubate.fleet: collective training; there are no parameter servers."""

from polyreme.fluid.absent import refusing
from polyreme.fluid.incubate.fleet import base, collective

__all__ = ["base", "collective"]

__getattr__ = refusing("fluid.incubate.fleet", __name__)
