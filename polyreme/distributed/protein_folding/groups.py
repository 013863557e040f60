"""scg: which kinds of parallelism there are, and how many devices each has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from polyreme.core import layout as layouts
from polyreme.core.layout import Layout
from polyreme.errors import ConfigError, did_you_mean
from polyreme.mesh import MeshShape, Plan

_AXES = {"dp": "dp", "dap": "sep", "bp": "mp", "mp": "mp"}


class SingletonCommunicationGroup:
    """The plan of the job; None before init_process_group."""

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def init_process_group(
        self,
        parallel_degree: Sequence[tuple[Any, ...]] | None = (("dp", None),),
        custom_parallel_degree: Sequence[tuple[Any, ...]] | None = None,
    ) -> None:
        """Put a plan in force: [("dp", None), ("dap", 2), ("bp", 2)], outermost first.

        dap, axial parallelism, is the mesh axis sep; bp, branches, is mp, as ("mp", "bp", 2) says too; dp, if None or
        left out, takes the devices that are left. Raises ConfigError for a name or a degree that there is not, for
        custom_parallel_degree and for a second call; PlacementError for degrees that do not fit the devices.
        """
        if custom_parallel_degree is not None or parallel_degree is None:
            raise ConfigError("scg.init_process_group: groups follow from the mesh; give parallel_degree, nothing else")
        if self.plan is not None:
            raise ConfigError(f"scg.init_process_group: there is a plan already, {self.plan.mesh}; call it once")
        degrees: dict[str, int] = {}
        branches = False
        for *names, degree in parallel_degree:
            axis = _axis_of(names)
            if axis in degrees:
                raise ConfigError(f"scg.init_process_group: {names} and others before are one mesh axis; join them")
            if degree is None and axis != "dp":
                raise ConfigError(f"scg.init_process_group: degree None for {names}; only dp may take what is left")
            if degree is not None:
                degrees[axis] = degree
            branches = branches or "bp" in names
        mesh = MeshShape(**degrees)
        if "dp" not in degrees:
            mesh = mesh.grow("dp", len(jax.devices()))
        branch_axis = "mp" if branches and mesh.mp > 1 else ""
        plan = Plan.from_degrees(dp=mesh.dp, sep=mesh.sep, mp=mesh.mp, branch_axis=branch_axis)
        layouts.active.layout = Layout(plan)
        self.plan = plan


def _axis_of(names: Sequence[str]) -> str:
    """The one mesh axis of names that share a degree."""
    for name in names:
        if name not in _AXES:
            raise ConfigError(f"scg.init_process_group: unknown name {name!r}{did_you_mean(name, _AXES)}")
    axes = {_AXES[name] for name in names}
    if len(axes) != 1:
        raise ConfigError(
            f"scg.init_process_group: {tuple(names)} share a degree; of one there are ('mp', 'bp') and single names"
        )
    return axes.pop()


scg: SingletonCommunicationGroup = SingletonCommunicationGroup()
