"""Plans of tensor parallelism: what parallelize does to the layers that a pattern names.

A plan places a layer's parameters on a mesh and hooks what goes in and comes out; it changes no values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from polyreme.distributed.auto_parallel.tensors.moves import (
    each_tensor,
    first_tensor,
    moved,
    place_tensor,
    placements_on,
)
from polyreme.distributed.auto_parallel.tensors.placements import Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer

MP = "mp"
"""The mesh dim that tensor parallelism splits over."""


class LayerPlan:
    """The change that parallelize makes to a layer. A subclass defines apply, and check where a layer may not fit.

    of_parameters: whether it can be asked of one parameter, by a key that ends in .weight or .bias.
    """

    of_parameters: ClassVar[bool] = False

    def check(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        """Raises ConfigError if the plan is not for such a layer or mesh; changes nothing."""

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        """Place the layer's parameters on the mesh and register hooks. only: the one parameter that was named."""
        raise NotImplementedError(f"{type(self).__name__} has no apply(); write one")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class ColWiseParallel(LayerPlan):
    """Splits the columns: weight [in, out] along dim 1, bias [out] along dim 0, and so the output's last dim.

    For Linear, Embedding, and any layer with such a weight or bias. gather_output: the output is made whole again.
    Raises ConfigError for a weight that has not 2 dims, or a bias that has not 1.

    >>> ColWiseParallel(gather_output=True)
    ColWiseParallel(gather_output=True)
    """

    of_parameters = True

    def __init__(self, gather_output: bool = False) -> None:
        self.gather_output = gather_output

    def check(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        parameter_of(self, layer, "weight", 2, only)
        parameter_of(self, layer, "bias", 1, only)

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        split_parameter(self, layer, mesh, "weight", 2, 1, only)
        split_parameter(self, layer, mesh, "bias", 1, 0, only)
        if self.gather_output:
            after(layer, lambda out: each_tensor(out, lambda x: moved(x, mesh, MP, Replicate())))


class RowWiseParallel(LayerPlan):
    """Splits the rows: weight [in, out] along dim 0; the bias stays whole and is added once, after the sum.

    is_input_parallel: the input's last dim is split already, as ColWiseParallel leaves it; else it is split first.
    Raises ConfigError for a weight that has not 2 dims.
    """

    of_parameters = True

    def __init__(self, is_input_parallel: bool = True) -> None:
        self.is_input_parallel = is_input_parallel

    def check(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        parameter_of(self, layer, "weight", 2, only)

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        split_parameter(self, layer, mesh, "weight", 2, 0, only)
        if not self.is_input_parallel:
            before(layer, lambda args: first_tensor(args, lambda x: moved(x, mesh, MP, Shard(x.ndim - 1))))


class PrepareLayerInput(LayerPlan):
    """Registers the forward pre-hook that fn(process_mesh) returns: hook(layer, inputs) -> inputs."""

    fn: Any

    def __init__(self, fn: Callable[[ProcessMesh], Callable[..., Any]] | None = None) -> None:
        self.fn = _check_fn(self, fn)

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        layer.register_forward_pre_hook(self.fn(mesh))


class PrepareLayerOutput(LayerPlan):
    """Registers the forward post-hook that fn(process_mesh) returns: hook(layer, inputs, outputs) -> outputs."""

    fn: Any

    def __init__(self, fn: Callable[[ProcessMesh], Callable[..., Any]] | None = None) -> None:
        self.fn = _check_fn(self, fn)

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        layer.register_forward_post_hook(self.fn(mesh))


def split_parameter(
    plan: LayerPlan, layer: Layer, mesh: ProcessMesh, name: str, ndim: int, dim: int, only: str | None
) -> None:
    """Split a parameter of the layer along dim over MP, if it has one of that name and it is the one asked for."""
    parameter = parameter_of(plan, layer, name, ndim, only)
    if parameter is None:
        return
    placements = placements_on(parameter, mesh)
    placements[mesh.dim_names.index(MP)] = Shard(dim)
    place_tensor(parameter, mesh, placements)


def parameter_of(plan: LayerPlan, layer: Layer, name: str, ndim: int, only: str | None) -> Any:
    """The layer's parameter of that name, None if it has none or another is asked for; ConfigError for other dims."""
    parameter = layer._parameters.get(name)
    if parameter is None or only not in (None, name):
        return None
    if parameter.ndim != ndim:
        raise ConfigError(
            f"{type(plan).__name__}: {name} of {layer.full_name()} has shape {list(parameter.shape)}, and is to have "
            f"{ndim} dims; place it with shard_tensor instead"
        )
    return parameter


def before(layer: Layer, change: Callable[[Any], Any]) -> None:
    """Run the layer on change(inputs), a tuple, from now on."""
    layer.register_forward_pre_hook(lambda _, inputs: change(inputs))


def after(layer: Layer, change: Callable[[Any], Any]) -> None:
    """Have the layer give change(outputs) from now on."""
    layer.register_forward_post_hook(lambda _, __, outputs: change(outputs))


def _check_fn(plan: LayerPlan, fn: Any) -> Any:
    if not callable(fn):
        raise ConfigError(f"{type(plan).__name__}: fn={fn!r}; give a function of the process mesh that returns a hook")
    return fn
