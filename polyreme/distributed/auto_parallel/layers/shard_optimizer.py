"""shard_optimizer: where an optimizer's state, and with it gradients and parameters, lie over a mesh; shard_scaler.

Source of the stages: arXiv:1910.02054.  A stage changes no values: it tells each parameter where it, its
gradient and its state go (`Parameter.layouts`), and the one optimizer there is does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from polyreme.amp import GradScaler
from polyreme.core import state
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.kept import encoded, form_of, in_form, place
from polyreme.distributed.auto_parallel.tensors.placements import Placement, Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh, get_mesh
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, PlacementError, ProgramError
from polyreme.nn.parameter import Parameter, Unmade
from polyreme.optimizer import LBFGS, Optimizer


class ShardingStage:
    """The tensors that are split over one dim of a mesh along which every device would else hold a copy.

    sharding_mesh_dim: the dim, by name or index. mesh: for parameters that are dense yet; the global one by default,
    when shard_optimizer is called. A parameter that lies on another mesh (a pipeline stage's) is split along the dim of
    that name. Split is a tensor dim that no mesh dim splits yet, else one that is, where it divides evenly; a parameter
    without such a dim stays whole along the mesh dim. Raises ConfigError for what is no dim or no mesh.
    """

    stage: ClassVar[int]

    def __init__(self, sharding_mesh_dim: int | str, mesh: ProcessMesh | None = None) -> None:
        if isinstance(sharding_mesh_dim, bool) or not isinstance(sharding_mesh_dim, (int, str)):
            raise ConfigError(
                f"{type(self).__name__}: sharding_mesh_dim={sharding_mesh_dim!r}; give a name or an index"
            )
        if mesh is not None and not isinstance(mesh, ProcessMesh):
            raise ConfigError(f"{type(self).__name__}: mesh is a {type(mesh).__name__}; give a ProcessMesh or None")
        self.sharding_mesh_dim = sharding_mesh_dim
        self.mesh = mesh
        if mesh is not None:
            mesh.get_dim_size(sharding_mesh_dim)

    def place(self, parameters: Iterable[Parameter], dim: int | None = None) -> None:
        """Place parameters by this stage: their state, from stage 2 on their gradients, under 3 themselves; running
        statistics stay whole.

        dim: the tensor dim to split; by default it is chosen.
        """
        default = self.mesh if self.mesh is not None else get_mesh()
        for p in parameters:
            form = form_of(p)
            if form is None:
                if default is None:
                    raise PlacementError(
                        f"{type(self).__name__}: parameter {p.name} is on no mesh; give the stage a mesh, or set_mesh"
                    )
                form = Form(default, (Replicate(),) * default.ndim, tuple(p.shape))
                place(p, form)
            axis = self._axis(form.mesh, default)
            self._place(p, form, split_along(form, axis, range(len(form.shape)) if dim is None else [dim]))

    def _axis(self, mesh: ProcessMesh, default: ProcessMesh | None) -> int:
        """Index of the mesh dim, on the mesh that a parameter lies on."""
        dim = self.sharding_mesh_dim
        if isinstance(dim, int):
            named = default if default is not None else mesh
            named.get_dim_size(dim)
            dim = named.dim_names[dim]
        if dim not in mesh.dim_names:
            raise PlacementError(f"{type(self).__name__}: a parameter lies on {mesh}, which has no dim {dim!r}")
        return mesh.dim_names.index(dim)

    def _place(self, p: Parameter, whole: Form, split: Form | None) -> None:
        if not whole.plain or split is None or p.is_statistic:
            return
        own, part = whole.sharding, split.sharding
        p.layouts = {"param": own, "grad": own if self.stage == 1 else part, "state": part}
        if self.stage == 3:
            p.layouts |= {"param": part, "use": own}
            state.write(p, put(p._array, part))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sharding_mesh_dim!r})"


class ShardingStage1(ShardingStage):
    """Optimizer state is split along a mesh dim."""

    stage = 1


class ShardingStage2(ShardingStage):
    """Optimizer state and gradients are split along a mesh dim."""

    stage = 2


class ShardingStage3(ShardingStage):
    """Optimizer state, gradients and parameters are split along a mesh dim; an op that reads a parameter gathers it."""

    stage = 3


STAGES: dict[int, type[ShardingStage]] = {1: ShardingStage1, 2: ShardingStage2, 3: ShardingStage3}


def split_along(form: Form, axis: int, among: Iterable[int]) -> Form | None:
    """The form, evenly split along a mesh dim too; None if it is split there already, partial, or nothing divides.

    among: the tensor dims that may be split.
    """
    ways = form.mesh.get_dim_size(axis)
    if not form.placements[axis].is_replicated() or ways == 1:
        return None
    dims = sorted(among, key=lambda d: form.ways(d) > 1)  # those that are whole yet come first
    for dim in dims:
        if form.shape[dim] and form.factor(dim) == 1 and form.shape[dim] % (form.ways(dim) * ways) == 0:
            placements: list[Placement] = list(form.placements)
            # innermost, so that gathering it joins neighbours
            orders = [p.get_co_shard_order() for p in placements if isinstance(p, Shard) and p.is_shard(dim)]
            placements[axis] = Shard(dim, shard_order=max(orders) + 1 if orders else 0)
            return form.having(placements)
    return None


def shard_optimizer(
    optimizer: Optimizer, shard_fn: ShardingStage | None = None, gradient_accumulation_steps: int = 1
) -> Optimizer:
    """The optimizer itself, whose state lies over the mesh of its parameters.

    shard_fn: ShardingStage1, 2 or 3; by default the state lies as the parameters do. State that is there already is
    moved, the rest is made. Numbers that it keeps per parameter (steps) are whole everywhere.
    gradient_accumulation_steps: how many backward passes make one step; gradients add up, and dividing the loss is
    yours; a model of dist.to_static, whose call is one pass, updates once in so many calls.

    Works for every optimizer whose state is per parameter. Raises ConfigError for LBFGS, whose state is not, for
    another shard_fn, for steps below 1 and for parameters of LazyGuard that have no values yet; PlacementError for a
    stage whose parameters are on no mesh; ProgramError in static mode.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"shard_optimizer takes an Optimizer, got {type(optimizer).__name__}")
    check_optimizer("shard_optimizer", optimizer)
    if shard_fn is not None and not isinstance(shard_fn, ShardingStage):
        raise ConfigError(f"shard_optimizer: shard_fn={shard_fn!r}; give ShardingStage1, 2 or 3, made with a mesh dim")
    steps = gradient_accumulation_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"shard_optimizer: gradient_accumulation_steps={steps!r}; give a whole number of at least 1")
    if state.recording():
        raise ProgramError(
            "shard_optimizer in static mode, where there is no state yet; call it after disable_static()"
        )
    if shard_fn is not None:
        shard_fn.place(optimizer._parameters)
    optimizer.gradient_accumulation_steps = steps
    optimizer.create_state()
    optimizer.map_state(laid_out)
    return optimizer


def check_optimizer(what: str, optimizer: Optimizer) -> None:
    """Raises ConfigError for an optimizer whose state is not per parameter, or whose parameters have no values yet."""
    if isinstance(optimizer, LBFGS):
        raise ConfigError(f"{what}: LBFGS keeps vectors over all parameters joined; use another optimizer")
    for p in optimizer._parameters:
        if isinstance(p._array, Unmade):
            raise p._array.refuse()


def laid_out(p: Any, slot: Tensor) -> Tensor:
    """A Tensor of a parameter's state where the parameter says, in the pieces that the parameter is in."""
    form = form_of(p)
    if form is not None and not form.plain:
        return in_form(encoded(slot._array, form), form)
    where = p.sharding_of("state")
    if where is None:
        where = form.sharding if form is not None else None
    if where is not None and slot._array.sharding != where:
        state.write(slot, put(slot._array, where))
    return slot


def shard_scaler(scaler: GradScaler) -> GradScaler:
    """The scaler itself: gradients are global, so an overflow on any device leaves out the step on all.

    Raises ConfigError for what is no GradScaler.
    """
    if not isinstance(scaler, GradScaler):
        raise ConfigError(f"shard_scaler takes an amp.GradScaler, got {type(scaler).__name__}")
    return scaler
