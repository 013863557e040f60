"""Grouped sharding of optimizer state, gradients and parameters, asked for by level instead of by a Plan.

Source: arXiv:1910.02054.  A level is a sharding stage: what is here works out the Plan and puts it in force.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from polyreme.core import layout as layouts
from polyreme.core import state
from polyreme.core.layout import Layout
from polyreme.core.state import TensorState
from polyreme.distributed.data_parallel import split_batch
from polyreme.distributed.fleet.fleet import fleet
from polyreme.distributed.placement import apply_plan, parameter_layouts, set_layouts
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError, PlacementError, did_you_mean
from polyreme.io.serialization import save
from polyreme.mesh import ANY, Offload, Plan, zero
from polyreme.nn.layer import Layer
from polyreme.optimizer import Optimizer

LEVELS = {"os": 1, "os_g": 2, "p_g_os": 3}
"""Level -> sharding stage: optimizer state; also gradients; also parameters."""


def group_sharded_parallel(
    model: Layer,
    optimizer: Optimizer,
    level: str,
    scaler: Any = None,
    group: Any = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = 2**20,
    sync_comm: bool = False,
    dp_group: Any = None,
    exclude_layer: Sequence[str | int] | None = None,
) -> tuple[Layer, Optimizer, Any]:
    """Split what training keeps over devices, and the batch that model is called with: -> model, optimizer, scaler.

    level: "os" splits the optimizer's state, "os_g" also the gradients, "p_g_os" also the parameters. All devices share
    in it; under a plan (of fleet.init, or in force) those of its `sharding` axis do, beside its other axes.
    offload: the optimizer's state is kept in host memory. Under "p_g_os", a parameter of at most segment_size elements
    stays whole, and so do those of the layers in exclude_layer, a list of class names and ids of layers.

    The three come back changed in place, not wrapped; the state that the optimizer has already is moved. dim 0 of each
    Tensor that model is given by position is split as the batch (of several processes, each gives its share). Buffers
    are always equal on all devices, an overflow that scaler meets is everyone's, and XLA sizes and orders transfers, so
    sync_buffers, buffer_max_size and sync_comm change nothing. group and dp_group: None, or the groups of the
    `sharding` and `dp` axes.

    Raises ConfigError for an unknown level, a segment_size below 0, an exclude_layer that is nowhere in model or that
    comes without "p_g_os", a pipeline, and an optimizer of other parameters; PlacementError for another group, or a
    plan in force without a sharding axis.
    """
    stage = _stage(level, exclude_layer)
    if isinstance(segment_size, bool) or not isinstance(segment_size, int) or segment_size < 0:
        raise ConfigError(
            f"group_sharded_parallel: segment_size={segment_size!r}; give a number of elements, at least 0"
        )
    names = _names(model, optimizer)
    whole = _exclude(model, exclude_layer)
    plan = _plan(stage, offload)
    _check_groups(plan, group, dp_group)
    layout = apply_plan(plan, model)
    if stage == 3:
        whole |= {id(p) for p in model.parameters() if p.size <= segment_size}
        _keep_whole(plan, [p for p in model.parameters() if id(p) in whole])
    _move_state(optimizer, names)

    model.register_forward_pre_hook(lambda layer, inputs: split_batch(inputs, layout))
    return model, optimizer, scaler


def _stage(level: Any, exclude_layer: Any) -> int:
    if level not in LEVELS:
        raise ConfigError(
            f"group_sharded_parallel: level={level!r}; choose 'os' (optimizer state), 'os_g' (also gradients) or "
            "'p_g_os' (also parameters)"
        )
    if exclude_layer is not None and level != "p_g_os":
        raise ConfigError(
            f"group_sharded_parallel: exclude_layer with level={level!r}, which splits no parameters; leave it out, or "
            "use 'p_g_os'"
        )
    return LEVELS[level]


def _names(model: Layer, optimizer: Optimizer) -> dict[int, str]:
    """id of every parameter -> its name in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    foreign = [p.name for p in optimizer._parameters if id(p) not in names]
    if foreign:
        raise ConfigError(
            f"group_sharded_parallel: the optimizer has parameters that the model has not: {foreign[:10]}; give it "
            "model.parameters()"
        )
    return names


def _exclude(model: Layer, exclude_layer: Sequence[str | int] | None) -> set[int]:
    """ids of the parameters in layers that are excluded by class name or by id."""
    layers = model.sublayers(include_self=True)
    classes = {type(layer).__name__ for layer in layers}
    for wanted in exclude_layer or ():
        if wanted not in classes and wanted not in {id(layer) for layer in layers}:
            raise ConfigError(
                f"group_sharded_parallel: exclude_layer has {wanted!r}, which is neither a class name nor the id of a "
                f"layer of {type(model).__name__}{did_you_mean(wanted, sorted(classes))}"
            )
    chosen = [layer for layer in layers if {type(layer).__name__, id(layer)} & set(exclude_layer or ())]
    return {id(p) for layer in chosen for p in layer.parameters()}


def _plan(stage: int, offload: bool) -> Plan:
    base = _plan_in_force()
    if base is None:
        base = Plan.from_degrees(sharding=jax.device_count(), sharding_stage=stage)
    _check_base(base, stage)
    away = {"state": "host", **base.offload} if offload else base.offload
    return replace(base, strategy=base.strategy | zero(stage), offload=Offload(away))


def _plan_in_force() -> Plan | None:
    found = layouts.active.layout
    if found is not None:
        return found.plan
    try:
        return fleet.plan
    except ConfigError:  # before fleet.init
        return None


def _check_base(plan: Plan, stage: int) -> None:
    if plan.mesh.pp > 1:
        raise ConfigError(
            f"group_sharded_parallel under a pipeline (mesh {plan.mesh}): give fleet.init the sharding_degree and the "
            "stage in its hybrid_configs instead"
        )
    if plan.mesh.sharding == 1 and plan.mesh.size > 1:
        raise PlacementError(
            f"group_sharded_parallel: the plan in force has mesh {plan.mesh}, without a sharding axis; give devices to "
            "sharding_degree, in place of dp_degree"
        )
    for kind, needed in (("param", 3), ("grad", 2)):
        if stage < needed and "sharding" in plan.strategy.rule(kind).get(ANY, ()):
            level = next(name for name, at in LEVELS.items() if at == needed)
            raise ConfigError(
                f"group_sharded_parallel: stage {stage} was asked for, and the plan in force splits by stage {needed} "
                f"already; use level {level!r}"
            )


def _check_groups(plan: Plan, group: Any, dp_group: Any) -> None:
    for name, value, axis in (("group", group, "sharding"), ("dp_group", dp_group, "dp")):
        if value is None or tuple(getattr(value, "axes", ("?",))) == (axis,):
            continue
        # the default group is everyone, which is what the sharding axis is when there is no other
        everyone = getattr(value, "axes", None) == () and value.nranks == jax.process_count()
        if axis == "sharding" and everyone and plan.mesh.sharding == plan.mesh.size:
            continue
        raise PlacementError(
            f"group_sharded_parallel: {name}={value!r} does not lie along the mesh axis {axis!r} of {plan.mesh}; leave "
            "it out"
        )


def _keep_whole(plan: Plan, parameters: Iterable[Any]) -> None:
    """Place these as stage 2 does: whole, while gradients and optimizer state are split."""
    rules = plan.strategy
    param = {d: [a for a in axes if a != "sharding"] for d, axes in rules.rule("param").items()}
    beside = Layout(replace(plan, strategy=replace(rules, param=param)))
    for p in parameters:
        set_layouts(p, plan, parameter_layouts(beside, p))
        state.write(p, put(p._array, p.layouts["param"]))


def _move_state(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Move the state that the optimizer has already to where the plan wants it."""
    where = {names[id(p)]: p.sharding_of("state") for p in optimizer._parameters}
    arrays = optimizer.state_arrays(names)
    for key, array in arrays.items():
        _, _, name = key.partition("/")
        if name in where:
            arrays[key] = put(array, where[name])
    optimizer.load_state_arrays(arrays, names)


def save_group_sharded_model(model: Layer, output: str | os.PathLike[str], optimizer: Optimizer | None = None) -> None:
    """Write the whole model into the folder output as model.pdmodel, and the optimizer's state as model.pdopt.

    Both are what polyreme.save writes, whole Tensors whatever the level: load them on any mesh. With several processes
    all call it and the first writes. Raises CheckpointError if output is a file.
    """
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"save_group_sharded_model: {folder} is a file; give a folder")
    for name, found in (("model.pdmodel", model), ("model.pdopt", optimizer)):
        if found is not None:
            values = {key: _gather(value) for key, value in found.state_dict().items()}
            if jax.process_index() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                save(values, folder / name)


def _gather(value: Any) -> Any:
    """A Tensor whose pieces other processes hold, as one that this process holds whole; anything else as it is."""
    if not isinstance(value, TensorState) or value._array.is_fully_addressable:
        return value
    return Tensor(np.asarray(multihost_utils.process_allgather(value._array, tiled=True)))
