"""fluid.incubate.fleet.base: who a process is in a job."""

from polyreme.fluid.incubate.fleet.base import fleet_base, role_maker

__all__ = ["fleet_base", "role_maker"]
