"""Models with published weights: from a folder or a GGUF file onto devices, and from a model into a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.distributed.placement import apply_plan
from polyreme.eager.host import from_host
from polyreme.errors import CheckpointError, ConfigError, did_you_mean
from polyreme.mesh import Plan
from polyreme.models.families import FAMILIES, Family
from polyreme.models.folder import CONFIG, open_weights, read_json, write_json, write_weights
from polyreme.models.gguf_file import is_gguf, open_gguf
from polyreme.models.published import (
    PublishedFamily,
    WeightSource,
    load_weights,
    read_config,
    store_weights,
    write_config,
)
from polyreme.nn.lazy import LazyGuard

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|MB|KB|B)?", re.IGNORECASE)
_UNITS = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}


class Opened(NamedTuple):
    """Published weights before they are read: their family, how it is published, config.json, sources by name."""

    family: Family
    published: PublishedFamily
    config: dict[str, Any]
    weights: Mapping[str, WeightSource]


def published_families() -> dict[str, tuple[Family, PublishedFamily]]:
    """Families that can be read and written, by the name that config.json has for the architecture."""
    pairs = ((family, family.published.load()) for family in FAMILIES.values() if family.published)
    return {published.architecture: (family, published) for family, published in pairs}


def open_published(path: str | Path) -> Opened:
    """What lies at a path: a folder with config.json and safetensors files, or a GGUF file.

    Raises CheckpointError for anything else, ConfigError for an architecture that is not known here.
    """
    path = Path(path)
    if is_gguf(path):
        config, weights = open_gguf(path)
    elif path.is_dir():
        config, weights = read_json(path / CONFIG), open_weights(path)
    else:
        raise CheckpointError(f"{path}: no folder of published weights, and no GGUF file")
    family, published = _family_of(config, path)
    return Opened(family, published, config, weights)


def load_pretrained(
    path: str | Path,
    *,
    dtype: Any = None,
    plan: Plan | None = None,
    devices: Sequence[Any] | None = None,
    ignore: Sequence[str] = (),
    model: type | None = None,
    **changes: Any,
) -> Any:
    """As AutoModelForCausalLM.from_pretrained. model: the class that it is to be of; any if None."""
    opened = open_published(path)
    config = _config(opened, ignore, changes)
    if plan is not None and plan.mesh.pp > 1:
        raise ConfigError(
            f"plan: pp={plan.mesh.pp} splits a model into stages, which loading does not; set pp to 1, or load on one "
            "device and build a PipelineLayer of the model"
        )
    model_class = opened.family.model.load()
    if model is not None and not issubclass(model_class, model):
        raise ConfigError(
            f"{path}: these are weights of a {model_class.__name__}, not of a {model.__name__}; load them with "
            f"{model_class.__name__} or AutoModelForCausalLM"
        )
    with LazyGuard():
        loaded = model_class(config)
    loaded.family = opened.family
    tensors = _tensors(loaded)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    sources = dict(load_weights(opened.published, config, shapes, opened.weights, str(path)))
    if plan is not None:
        apply_plan(plan, loaded, devices)
    wanted = _dtype(dtype, opened)
    for name, source in sources.items():
        tensor = tensors[name]
        as_stored = np.dtype(wanted) if dtypes.is_floating(tensor.dtype) else np.dtype(tensor.dtype)
        layouts = getattr(tensor, "layouts", None)
        where = layouts["param"] if layouts else None if plan is None else tensor._array.sharding
        state.write(tensor, _place(source, as_stored, where))
    _set_dtype(loaded, wanted)
    loaded.eval()
    return loaded


def save_pretrained(model: Any, folder: str | Path, *, max_shard_size: str | int = "5GB", dtype: Any = None) -> None:
    """As Decoder.save_pretrained."""
    family = model.family
    if family.published is None:
        known = ", ".join(name for name, other in FAMILIES.items() if other.published)
        raise ConfigError(f"save_pretrained: {family.name} is published by nobody; families that are: {known}")
    published, config, folder = family.published.load(), model.config, Path(folder)
    tensors = _tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = None if dtype is None else np.dtype(dtypes.as_dtype(dtype))

    def read(name: str) -> np.ndarray:
        array = np.asarray(tensors[name].numpy())
        return array.astype(wanted) if wanted is not None and dtypes.is_floating(tensors[name].dtype) else array

    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, store_weights(published, config, shapes, read), _num_bytes(max_shard_size))
    named = wanted or np.dtype(next(iter(tensors.values())).dtype)
    write_json(folder / CONFIG, write_config(published, config) | {"torch_dtype": str(named)})


def _family_of(config: Mapping[str, Any], path: Path) -> tuple[Family, PublishedFamily]:
    known = published_families()
    for name in config.get("architectures") or ():
        if name in known:
            return known[name]
    for family, published in known.values():
        # a model without its head, or a file that names none
        if config.get("model_type") == published.model_type:
            return family, published
    named = (config.get("architectures") or [config.get("model_type")])[0]
    raise ConfigError(f"{path}: unknown architecture {named!r}{did_you_mean(str(named), known)}")


def _config(opened: Opened, ignore: Sequence[str], changes: Mapping[str, Any]) -> Any:
    config_class = opened.family.config.load()
    fields = read_config(opened.published, opened.config, ignore)
    unknown = changes.keys() - config_class.__dataclass_fields__.keys()
    if unknown:
        name = min(unknown)
        raise ConfigError(
            f"from_pretrained: {config_class.__name__} has no {name!r}"
            f"{did_you_mean(name, config_class.__dataclass_fields__)}"
        )
    return config_class(**fields | changes)


def _tensors(model: Any) -> dict[str, Any]:
    """Parameters and what else is saved, by name; one that has several names under the first."""
    names: dict[int, str] = {}
    state_dict = model.state_dict()
    for name, tensor in state_dict.items():
        names.setdefault(id(tensor), name)
    return {name: state_dict[name] for name in names.values()}


def _dtype(dtype: Any, opened: Opened) -> Any:
    if dtype is None:
        return dtypes.default_dtype()
    if dtype != "auto":
        return dtypes.as_dtype(dtype)
    stored = opened.config.get("dtype") or opened.config.get("torch_dtype")
    if stored is None:
        stored = next(source.dtype for source in opened.weights.values()).name
    return dtypes.as_dtype(stored)


def _place(source: WeightSource, dtype: np.dtype, where: Any) -> Any:
    def read(index: tuple[slice, ...]) -> np.ndarray:
        return np.ascontiguousarray(source.read(index).astype(dtype, copy=False))

    if where is None:
        return from_host(read(tuple(slice(None) for _ in source.shape)), dtype)
    return jax.make_array_from_callback(source.shape, where, read, dtype=dtype)


def _set_dtype(model: Any, dtype: Any) -> None:
    """What parameters of the model's layers that are made later have."""
    for layer in model.sublayers(include_self=True):
        layer._dtype = dtype


def _num_bytes(size: str | int) -> int:
    if isinstance(size, int) and size > 0:
        return size
    hit = _SIZE.fullmatch(str(size).strip())
    if not hit or float(hit[1]) <= 0:
        raise ConfigError(f"max_shard_size={size!r}; give bytes, as 5GB or 200MB")
    return int(float(hit[1]) * _UNITS[(hit[2] or "B").upper()])
