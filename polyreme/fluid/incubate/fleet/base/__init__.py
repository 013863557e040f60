"""fluid.incubate.fleet.base: who a process is in a job."""

from polyreme.fluid.incubate.fleet.base import role_maker

__all__ = ["role_maker"]
