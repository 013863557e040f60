"""parallelize: a model and optimizer of one device spread over a mesh, as a dictionary of plans says."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.distributed.auto_parallel.layers.plans import MP, LayerPlan
from polyreme.distributed.auto_parallel.layers.shard_optimizer import STAGES, check_optimizer, shard_optimizer
from polyreme.distributed.auto_parallel.layers.split_points import matching, stages_of_layers
from polyreme.distributed.auto_parallel.tensors.moves import each_tensor, place_tensor, placements_on, put_on
from polyreme.distributed.auto_parallel.tensors.placements import Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh, get_mesh, set_mesh
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn.layer import Layer
from polyreme.optimizer import Optimizer

_KEYS: dict[str, tuple[str, ...]] = {
    "dp_config": ("sharding_level", "sharding_mesh_dim", "offload", "exclude_layer"),
    "mp_config": ("parallelize_plan",),
    "pp_config": ("split_spec", "global_spec"),
    "cp_config": ("parallelize_plan",),
}
_PLANS = ("mp_config", "cp_config")
PP = "pp"


class Meshes:
    """The mesh of every layer of a model, by name: the whole one, or, under a pipeline, its stage's slice along PP.

    shared: names of the layers that every stage has.
    """

    layers: dict[str, Layer]
    of: dict[str, ProcessMesh]

    def __init__(self, model: Layer, whole: ProcessMesh, config: Mapping[str, Any] | None) -> None:
        self.whole = whole
        self.layers = dict(model.named_sublayers(include_self=True))
        self.of = dict.fromkeys(self.layers, whole)
        self.shared: list[str] = []
        if config is None:
            return
        stages = [whole.get_mesh_with_dim(PP, s) for s in range(whole.get_dim_size(PP))]
        spread = config.get("global_spec")
        self.shared += [] if spread is None else _matches("pp_config: global_spec", spread, list(self.layers))
        for name, stage in stages_of_layers(model, config["split_spec"], len(stages)).items():
            is_shared = stage is None or any(name == g or name.startswith(f"{g}.") for g in self.shared)
            self.of[name] = whole if is_shared or stage is None else stages[stage]

    def entries(self) -> list[str]:
        """The outermost layers that lie on one stage as a whole: where data comes from another stage."""
        split = [n for n in self.of if self.of[n] != self.whole]
        return [n for n in split if not any(n.startswith(f"{outer}.") for outer in split if outer != n)]


def parallelize(
    model: Layer,
    optimizer: Optimizer | None = None,
    mesh: ProcessMesh | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[Layer, Optimizer | None]:
    """Spread a model, and the optimizer of its parameters, over a mesh: -> the same two, changed in place.

    mesh: becomes the global one; by default that is taken. Its dims are named "dp", "mp", "pp" and "sep" as far as they
    are used. config:

    - "pp_config": {"split_spec": ..., "global_spec": ...}: see stages_of_layers. A layer of stage s goes to the s-th
      slice of the mesh along "pp" and moves what it is given there; layers of global_spec are on every stage.
    - "mp_config": {"parallelize_plan": {name: plan, or a list of plans}}: a name is a regular expression that fits the
      whole name of a layer, or of a parameter if it ends with .weight or .bias; one that fits nothing is warned of.
    - "cp_config": the same, with ContextParallel and PrepareContextParallel.
    - "dp_config": {"sharding_level": 0 to 3, "sharding_mesh_dim": "dp"}: what the dim holds once instead of on every
      device: nothing, optimizer state, also gradients, also parameters. Dense Tensors that the model is called with are
      split along dim 0 over "dp" where it divides.

    Whatever no plan names is whole on every device of its mesh. Without a config, or a mesh, both come back as they
    are, with a warning. Raises ConfigError for unknown keys, settings out of range, and mesh dims that are not there.
    """
    if config is None:
        warnings.warn("parallelize: no config was given, so the model stays on one device", stacklevel=2)
        return model, optimizer
    mesh = mesh if mesh is not None else get_mesh()
    if mesh is None:
        warnings.warn("parallelize: no mesh was given or set, so the model stays on one device", stacklevel=2)
        return model, optimizer
    config = _check(model, optimizer, mesh, config)
    meshes = Meshes(model, mesh, config.get("pp_config"))
    # all that is asked is checked before anything is changed, so that what fails can be asked again
    plans = [plan for key in _PLANS for plan in _plans(key, config.get(key, {}).get("parallelize_plan"), meshes)]
    set_mesh(mesh)
    _split_batch(model, meshes)
    for name in meshes.entries():
        _move_inputs(meshes.layers[name], meshes.of[name])
    for name in meshes.shared:
        _move_there_and_back(meshes.layers[name], mesh)
    for plan, name, only in plans:
        plan.apply(meshes.layers[name], meshes.of[name], only)
    _place_rest(meshes)
    data = config.get("dp_config", {})
    level, dim = data.get("sharding_level", 0), data.get("sharding_mesh_dim", "dp")
    if level:
        stage = STAGES[level](dim, mesh)
        if optimizer is None:
            stage.place(model.parameters())
        else:
            shard_optimizer(optimizer, stage)
    elif optimizer is not None:
        shard_optimizer(optimizer)
    return model, optimizer


def _check(model: Any, optimizer: Any, mesh: Any, config: Any) -> dict[str, Any]:
    if not isinstance(model, Layer):
        raise ConfigError(f"parallelize takes a Layer, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(f"parallelize: optimizer is {type(optimizer).__name__}; give an Optimizer or None")
    if not isinstance(mesh, ProcessMesh):
        raise ConfigError(f"parallelize: mesh is {type(mesh).__name__}; give a ProcessMesh")
    if not isinstance(config, Mapping):
        raise ConfigError(f"parallelize: config is {type(config).__name__}; give a dict with any of {', '.join(_KEYS)}")
    if optimizer is not None:
        check_optimizer("parallelize", optimizer)
        own = set(map(id, model.parameters()))
        if optimizer._parameters and not own.intersection(map(id, optimizer._parameters)):
            raise ConfigError("parallelize: the optimizer has no parameter of the model; make it with those it has now")
    for part, settings in config.items():
        if part not in _KEYS:
            raise ConfigError(f"parallelize: unknown config {part!r}{did_you_mean(part, _KEYS)}")
        if not isinstance(settings or {}, Mapping):
            raise ConfigError(f"parallelize: {part} is {settings!r}; give a dict with any of {', '.join(_KEYS[part])}")
        for name in settings or {}:
            if name not in _KEYS[part]:
                raise ConfigError(f"parallelize: {part} has no setting {name!r}{did_you_mean(name, _KEYS[part])}")
    kept = {part: dict(settings) for part, settings in config.items() if settings is not None}
    _check_settings(mesh, kept)
    return kept


def _check_settings(mesh: ProcessMesh, config: Mapping[str, Mapping[str, Any]]) -> None:
    data = config.get("dp_config", {})
    for name in ("offload", "exclude_layer"):
        if data.get(name):
            raise ConfigError(f"parallelize: dp_config {name}={data[name]!r} is not available; leave it out")
    level = data.get("sharding_level", 0)
    if level not in (0, 1, 2, 3) or isinstance(level, bool):
        raise ConfigError(f"parallelize: sharding_level={level!r}; give 0, 1, 2 or 3")
    needed = {"mp_config": MP, "pp_config": PP} | ({"dp_config": data.get("sharding_mesh_dim", "dp")} if level else {})
    for part, dim in needed.items():
        if part in config and dim not in mesh.dim_names:
            raise ConfigError(f"parallelize: {part} needs a mesh dim {dim!r}; the mesh has {mesh.dim_names}")
    if "pp_config" in config and "split_spec" not in config["pp_config"]:
        raise ConfigError("parallelize: pp_config needs split_spec, where the model is cut")


def _matches(what: str, pattern: Any, names: Sequence[str]) -> list[str]:
    if not isinstance(pattern, str):
        raise ConfigError(f"parallelize: {what} {pattern!r} is not a string; give the name of a layer")
    found = matching(pattern, names)
    if not found:
        warnings.warn(f"parallelize: {what} {pattern!r} fits no layer or parameter of the model", stacklevel=4)
    return found


def _plans(part: str, plans: Any, meshes: Meshes) -> list[tuple[LayerPlan, str, str | None]]:
    """(plan, name of a layer, its parameter that is meant or None), in order, each checked against its layer."""
    if not isinstance(plans or {}, Mapping):
        raise ConfigError(f"parallelize: {part}: parallelize_plan is a {type(plans).__name__}; give {{name: plan}}")
    pairs = []
    for pattern, given in (plans or {}).items():
        chosen = given if isinstance(given, (list, tuple)) else [given]
        stem, only = _parameter(pattern)
        _check_plans(part, pattern, chosen, only)
        names = (
            list(meshes.layers)
            if only is None
            else [n for n, la in meshes.layers.items() if la._parameters.get(only) is not None]
        )
        fits = _matches(part, stem, names)
        _warn_of_none(part, pattern, chosen, [meshes.layers[n] for n in fits])
        pairs += [(plan, name, only) for name in fits for plan in chosen]
    for plan, name, only in pairs:
        plan.check(meshes.layers[name], meshes.of[name], only)
    return pairs


def _check_plans(part: str, pattern: Any, chosen: Sequence[Any], only: str | None) -> None:
    wrong = [p for p in chosen if not isinstance(p, LayerPlan)]
    if wrong:
        raise ConfigError(
            f"parallelize: {part} maps {pattern!r} to {wrong[0]!r}; give a plan, such as ColWiseParallel()"
        )
    misplaced = [] if only is None else [p for p in chosen if not p.of_parameters]
    if misplaced:
        raise ConfigError(
            f"parallelize: {part} maps {pattern!r}, one parameter, to {misplaced[0]}, which is of a whole layer; "
            f"drop .{only} from the key"
        )


def _warn_of_none(part: str, pattern: Any, chosen: Sequence[LayerPlan], layers: Sequence[Layer]) -> None:
    """Warn of plans that split parameters where no layer has one of its own."""
    lacking = layers and not any(la._parameters.get(name) is not None for la in layers for name in ("weight", "bias"))
    for plan in chosen:
        if lacking and plan.of_parameters:
            warnings.warn(
                f"parallelize: {part} maps {pattern!r} to {plan}, and a {type(layers[0]).__name__} has no weight or "
                "bias of its own; name the layers that have",
                stacklevel=4,
            )


def _parameter(pattern: Any) -> tuple[Any, str | None]:
    """(pattern of a layer, its parameter that is meant) of a pattern; None for the layer."""
    for only in ("weight", "bias"):
        if isinstance(pattern, str) and pattern.endswith(f".{only}"):
            return pattern.removesuffix(f".{only}").removesuffix("\\"), only
    return pattern, None


def _place_rest(meshes: Meshes) -> None:
    """Parameters and buffers that no plan placed: whole on the mesh of their layer."""
    for name, layer in meshes.layers.items():
        parameters = (p.whole for p in layer.parameters(include_sublayers=False))
        for tensor in (*parameters, *layer.buffers(include_sublayers=False)):
            if tensor.process_mesh is None:
                place_tensor(tensor, meshes.of[name], [Replicate()] * meshes.of[name].ndim)


def _move_inputs(layer: Layer, mesh: ProcessMesh) -> None:
    def here(_: Layer, inputs: tuple) -> tuple:
        return each_tensor(inputs, lambda x: put_on(x, mesh, placements_on(x, mesh)))

    layer.register_forward_pre_hook(here)


def _move_there_and_back(layer: Layer, mesh: ProcessMesh) -> None:
    """Have a layer that every stage has compute on the whole mesh, and give the stage that called it what it gives."""
    stage: ProcessMesh | None = None

    def there(_: Layer, inputs: tuple) -> tuple:
        nonlocal stage
        meshes: list[ProcessMesh] = []

        def move(x: Tensor) -> Tensor:
            if x.process_mesh is None or x.process_mesh == mesh:
                return x
            meshes.append(x.process_mesh)
            return put_on(x, mesh, placements_on(x, mesh))

        moved = each_tensor(inputs, move)
        stage = meshes[0] if meshes else None
        return moved

    def back(_layer: Layer, _inputs: tuple, outputs: Any) -> Any:
        home = stage
        return outputs if home is None else each_tensor(outputs, lambda x: put_on(x, home, placements_on(x, home)))

    layer.register_forward_pre_hook(there)
    layer.register_forward_post_hook(back)


def _split_batch(model: Layer, meshes: Meshes) -> None:
    """Have the model split the dense Tensors it is given along dim 0 over "dp"."""
    mesh = next((m for m in meshes.of.values() if m != meshes.whole), meshes.whole)
    if "dp" not in mesh.dim_names or mesh.get_dim_size("dp") == 1:
        return
    placements = [Shard(0) if name == "dp" else Replicate() for name in mesh.dim_names]

    def split(x: Tensor) -> Tensor:
        fits = x.process_mesh is None and x.ndim and x.shape[0] % mesh.get_dim_size("dp") == 0
        return put_on(x, mesh, placements) if fits else x

    model.register_forward_pre_hook(lambda _, inputs: each_tensor(inputs, split))
