"""Files of an Engine: training state that a run on any mesh can resume from, and artefacts for inference.

Training state is a folder PATH.train, a checkpoint (docs/checkpoints.md) with parameters and buffers under
"model", the optimizer's arrays under "optimizer" by the parameters' names in the model, gradients merged so far under
"merged", and plain numbers of the schedule and the loss scaler. Placements are in its manifest. Nothing is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.distributed.auto_parallel.engine.dist_model import DistModel, inner_optimizer
from polyreme.distributed.checkpoint import CheckpointStore, load_state_dict, save_state_dict
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError

SUFFIX = ".train"
_MERGED = "merged."


def save_training(model: DistModel, path: str | os.PathLike[str]) -> None:
    """Write the model's training state to the folder PATH.train, replacing one that is there."""
    folder = folder_of(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_state_dict(_state(model), folder)


def load_training(
    model: DistModel, path: str | os.PathLike[str], strict: bool, load_optimizer: bool
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Go on from the folder PATH.train, each array laid out as it is here; -> (model's, optimizer's) Tensors by name.

    Raises CheckpointError, changing nothing, for shapes that do not fit and, if strict, for names that only one side
    has.
    """
    folder = folder_of(path)
    if not folder.is_dir():
        raise CheckpointError(f"Engine.load: there is no folder {folder}; give the path that Engine.save(path) took")
    manifest = _manifest(folder)
    wanted = {**_state(model), "merged": _merge_in(manifest, model)} if load_optimizer else {"model": _model(model)}
    held = {*manifest.tensors, *manifest.meta.get("values", {})}
    known = set(_keys(wanted))
    if strict:
        _check_names(folder, known, {key for key in held if load_optimizer or key.startswith("model.")})
    chosen = _prune(wanted, held)
    load_state_dict(chosen, folder)
    optimizer = chosen.get("optimizer", {})
    if load_optimizer and model.optimizer is not None:
        _restore(model, chosen)
    return chosen.get("model", {}), optimizer


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder of the training state at a path. Raises ConfigError for one that ends in a separator."""
    if not Path(path).name or str(path).endswith(("/", os.sep)):
        raise ConfigError(f"Engine: path={str(path)!r} names a folder; give FOLDER/NAME")
    return Path(f"{path}{SUFFIX}")


def _state(model: DistModel) -> dict[str, Any]:
    result: dict[str, Any] = {"model": _model(model)}
    if model.optimizer is None:
        return result
    inner, names = inner_optimizer(model.optimizer), _names(model)
    inner.create_state()
    result["optimizer"] = {name: Tensor(array) for name, array in inner.state_arrays(names).items()}
    result["merged"] = _merge(model)
    scheduler = getattr(inner, "_scheduler", None)
    result["schedule"] = {"lr": inner.get_lr()} if scheduler is None else dict(scheduler.state_dict())
    scaler = model.scaler
    if scaler is not None:
        result["scaler"] = dict(scaler.state_dict())
    return result


def _model(model: DistModel) -> dict[str, Tensor]:
    """Parameters and buffers by name, one that has several names once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.network.state_dict().items():
        if id(tensor) not in seen:
            tensors[name] = tensor
            seen.add(id(tensor))
    return tensors


def _names(model: DistModel) -> dict[int, str]:
    """id of each parameter of the optimizer -> its name in the model; its own name for one the model has not."""
    own = {id(p): p.name for p in inner_optimizer(model.optimizer)._parameters}
    return own | {id(p): name for name, p in model.network.named_parameters() if id(p) in own}


def _merge(model: DistModel) -> dict[str, Any]:
    """Gradients that are merged half way, by the parameters' names in the model."""
    inner = inner_optimizer(model.optimizer)
    if inner is model.optimizer:
        return {}
    extra = {k: v for k, v in model.optimizer.state_dict().items() if k not in inner.state_dict()}
    return {_rename(key, _by_own_name(model)): value for key, value in extra.items()}


def _merge_in(manifest: Any, model: DistModel) -> dict[str, Any]:
    """Places for the gradients that a checkpoint holds merged half way; where nothing is merged, none of them."""
    if model.optimizer is None or inner_optimizer(model.optimizer) is model.optimizer:
        return {}
    tensors = {key.removeprefix(_MERGED): t for key, t in manifest.tensors.items() if key.startswith(_MERGED)}
    return {key: Tensor(np.zeros(t.shape, t.dtype)) for key, t in tensors.items()}


def _by_own_name(model: DistModel) -> dict[str, str]:
    names = _names(model)
    return {p.name: names[id(p)] for p in inner_optimizer(model.optimizer)._parameters}


def _rename(key: str, names: Mapping[str, str]) -> str:
    own = max((n for n in names if key.startswith(f"{n}_")), key=len, default=None)
    return key if own is None else names[own] + key[len(own) :]


def _restore(model: DistModel, chosen: Mapping[str, Any]) -> None:
    """The values read besides the model's own Tensors, which are filled in place."""
    inner, names = inner_optimizer(model.optimizer), _names(model)
    arrays = inner.state_arrays(names)
    inner.load_state_arrays(arrays | {n: t._array for n, t in chosen.get("optimizer", {}).items()}, names)
    scheduler, schedule = getattr(inner, "_scheduler", None), chosen.get("schedule", {})
    if scheduler is not None and schedule:
        scheduler.set_state_dict(dict(schedule))
    elif scheduler is None and "lr" in schedule:
        inner.set_lr(schedule["lr"])
    if chosen.get("merged"):
        back = {mine: own for own, mine in _by_own_name(model).items()}
        values = {_rename(key, back): value for key, value in chosen["merged"].items()}
        model.optimizer.set_state_dict({**inner.state_dict(), **values})
    if chosen.get("scaler") and model.scaler is not None:
        model.scaler.load_state_dict(dict(chosen["scaler"]))


def _manifest(folder: Path) -> Any:
    with CheckpointStore(folder, read_only=True) as store:
        step = store.latest_step()
        if step is None:
            raise CheckpointError(f"Engine.load: {folder} holds no training state; save it again")
        return store.manifest(step)


def _check_names(folder: Path, wanted: set[str], held: set[str]) -> None:
    missing, more = sorted(wanted - held), sorted(held - wanted)
    if missing or more:
        raise CheckpointError(
            f"Engine.load: {folder} lacks {len(missing)} of what the model and its optimizer have ({missing[:5]}) and "
            f"has {len(more)} that they have not ({more[:5]}); load the right one, or give strict=False for what fits"
        )


def _keys(nested: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in nested.items():
        found += _keys(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [f"{prefix}{name}"]
    return found


def _prune(nested: Mapping[str, Any], names: set[str], prefix: str = "") -> dict[str, Any]:
    """The entries of nested that the checkpoint has."""
    result: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            result[name] = _prune(value, names, f"{prefix}{name}.")
        elif f"{prefix}{name}" in names:
            result[name] = value
    return result
