"""Models with published weights: from a folder or a GGUF file onto devices, and from a model into a folder."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices.transfer import in_c_order
from polyreme.distributed.placement import apply_plan
from polyreme.eager.host import from_host
from polyreme.errors import CheckpointError, ConfigError, did_you_mean
from polyreme.mesh import Plan
from polyreme.models.families import ARCHITECTURES, DECODER_HEADS, FAMILIES, TASKS, Architecture, Family
from polyreme.models.files.folder import (
    CONFIG,
    GENERATION_CONFIG,
    has_weights,
    open_weights,
    read_json,
    write_json,
    write_weights,
)
from polyreme.models.files.gguf_file import is_gguf, open_gguf
from polyreme.models.files.loader_words import read_words
from polyreme.models.files.low_bit_folder import (
    DEFAULT_METHODS,
    KEY,
    LowBitLayer,
    LowBitLayout,
    expert_maps,
    low_bit_layers,
    modules_of,
    open_low_bit,
    packed_parts,
    packed_source,
    parts_of,
    place_low_bit_layers,
    read_layout,
    unpacked,
    unpacked_shapes,
    with_scales,
)
from polyreme.models.files.mxfp4 import decoded_weights, is_mxfp4
from polyreme.models.files.published import (
    PublishedFamily,
    WeightSource,
    check_fields,
    load_weights,
    read_config,
    store_weights,
    write_config,
)
from polyreme.nn import Linear
from polyreme.nn.lazy import LazyGuard

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|MB|KB|B)?", re.IGNORECASE)


class TextPart(NamedTuple):
    """The text model inside one that takes pictures too: what it is by itself, keys of the whole that are its too, what
    the names of its weights begin with, and those of the other parts."""

    architecture: str
    model_type: str
    keys: tuple[str, ...]
    prefixes: tuple[str, ...]
    others: tuple[str, ...]

    def rename(self, name: str) -> str:
        """The name of a weight in the text model by itself."""
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
        if prefix is None:
            return name
        inner = name.removeprefix(prefix)
        return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"


_TEXT_PARTS = {
    "gemma3": TextPart(
        "Gemma3ForCausalLM",
        "gemma3_text",
        ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"),
        ("language_model.", "model.language_model."),
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    )
}
"""By the model_type of the whole."""
_log = logging.getLogger("polyreme.models")
_TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
_OF_A_VERSION = ("transformers_version", "_from_model_config")
_READERS = 4
"""Threads that read weights: decoding and copying wait for memory, which few cores use up."""
_UNITS = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}


class Opened(NamedTuple):
    """Published weights before they are read: their family, how it is published, config.json, sources by name, and how
    linear maps are stored where that is in few bits."""

    family: Family | Architecture
    published: PublishedFamily
    config: dict[str, Any]
    weights: Mapping[str, WeightSource]
    layout: LowBitLayout | None = None


def published_families() -> dict[str, tuple[Family | Architecture, PublishedFamily]]:
    """Families that can be read and written, by the name that config.json has for the architecture."""
    also = {(record.name, record.task) for record in ARCHITECTURES}  # trained as families, read as architectures
    families = [family for family in FAMILIES.values() if (family.name, family.task) not in also]
    records: list[Family | Architecture] = [*families, *ARCHITECTURES, *DECODER_HEADS]
    pairs = ((record, record.published.load()) for record in records if record.published)
    return {published.architecture: (family, published) for family, published in pairs}


def open_published(path: str | Path, *, needs_weights: bool = True, task: str = "") -> Opened:
    """What lies at a path: a folder with config.json and safetensors files, or a GGUF file.

    needs_weights: whether a folder with config.json alone is an error. task: one of families.TASKS that the family is
    taken for, whatever it was saved for; that which it was saved for if "". Raises CheckpointError for anything else,
    ConfigError for an architecture that is not known here.
    """
    path = Path(path)
    if is_gguf(path):
        config, weights = open_gguf(path)
    elif path.is_dir():
        config = read_json(path / CONFIG)
        weights = open_weights(path) if needs_weights or has_weights(path) else {}
    else:
        raise CheckpointError(f"{path}: no folder of published weights, and no GGUF file")
    _check_named(config, path)
    if config.get("model_type") in _TEXT_PARTS and isinstance(config.get("text_config"), Mapping):
        config, weights = _text_part(config, weights, path)
    family, published = family_of(config, path, task)
    in_few_bits = config.pop(KEY, None)
    if is_mxfp4(in_few_bits):
        in_few_bits, weights = None, decoded_weights(weights)
    layout = None if in_few_bits is None else read_layout(in_few_bits)
    return Opened(family, published, config, weights, layout)


def _check_named(config: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for a config.json that names its family by what is no name."""
    kind, named = config.get("model_type"), config.get("architectures") or []
    if not isinstance(kind, (str, NoneType)) or not isinstance(named, list) or not all(type(n) is str for n in named):
        raise ConfigError(
            f"{path}: model_type {kind!r:.60} and architectures {named!r:.60} in config.json; they are a name and a "
            "list of names"
        )


def _text_part(
    config: Mapping[str, Any], weights: Mapping[str, WeightSource], path: Path
) -> tuple[dict[str, Any], dict[str, WeightSource]]:
    """What is published of the text model inside one that takes pictures too, whose other parts are left out."""
    part = _TEXT_PARTS[config["model_type"]]
    _log.warning("%s: takes pictures too; only its text model is read", path)
    kept = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", *part.keys) if key in config}
    named = {"architectures": [part.architecture], "model_type": part.model_type}
    names = {name: part.rename(name) for name in weights if not name.startswith(part.others)}
    return {**kept, **config["text_config"], **named}, {names[name]: weights[name] for name in names}


def read_family_config(opened: Opened, ignore: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> Any:
    """The family's config that config.json describes. ignore, changes: as of AutoModelForCausalLM.from_pretrained.

    Raises ConfigError for what cannot be had here and for changes of fields that there are not.
    """
    config_class = opened.family.config.load()
    fields = read_config(opened.published, opened.config, ignore)
    if opened.weights:
        fields = opened.published.fit(fields, opened.weights.keys())
    fields |= _changed_fields(opened, changes or {})
    check_fields(config_class, fields)
    return config_class(**fields)


def _changed_fields(opened: Opened, changes: Mapping[str, Any]) -> dict[str, Any]:
    """changes by the names of the family's config, some of which may be given by those of config.json."""
    config_class = opened.family.config.load()
    known = config_class.__dataclass_fields__
    fields = {name if name in known else opened.published.keys.get(name, name): changes[name] for name in changes}
    if "label_names" in fields and "label_names" in known:
        fields = {"num_labels": len(fields["label_names"]), **fields}
    unknown = fields.keys() - known.keys()
    if unknown:
        name = min(unknown)
        raise ConfigError(f"from_pretrained: {config_class.__name__} has no {name!r}{did_you_mean(name, known)}")
    return fields


def _changed(opened: Opened, config: Any, changes: Mapping[str, Any]) -> Any:
    """A config that was given, with changes. Raises ConfigError for one of another family."""
    config_class = opened.family.config.load()
    if type(config) is not config_class:
        raise ConfigError(
            f"from_pretrained: config is a {type(config).__name__}, and the weights are of a {config_class.__name__}; "
            "take the one that AutoConfig.from_pretrained gives, changed by dataclasses.replace"
        )
    fields = _changed_fields(opened, changes)
    check_fields(config_class, fields)
    return replace(config, **fields)


def build_without_values(opened: Opened, config: Any) -> Any:
    """A model of the family whose parameters have no memory yet."""
    with LazyGuard():
        model = opened.family.model.load()(config)
        if opened.layout is not None:
            place_low_bit_layers(model, opened.published, opened.layout, opened.weights)
    model.family = opened.family
    model.low_bit_layout = opened.layout
    if opened.layout is not None:
        model.kv_cache_dtype = opened.layout.kv_cache_dtype
    return model


def named_tensors(model: Any) -> dict[str, Any]:
    """Parameters and what else is saved, by name; one that has several names under the first."""
    names: dict[int, str] = {}
    state_dict = model.state_dict()
    for name, tensor in state_dict.items():
        names.setdefault(id(tensor), name)
    return {name: state_dict[name] for name in names.values()}


def match_weights(opened: Opened, model: Any, where: str, new_head: bool = False) -> dict[str, WeightSource]:
    """What each tensor of the model, by name, is read from. Raises as load_weights, before anything is read."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    if opened.layout is None:
        return dict(load_weights(opened.published, model.config, shapes, opened.weights, where, new_head))
    published, files = with_scales(opened.published), opened.weights
    files = open_low_bit(model, opened.published, opened.layout, files)
    sources = dict(load_weights(published, model.config, unpacked_shapes(model, shapes), files, where, new_head))
    for name, layer in low_bit_layers(model).items():
        for part in parts_of(layer):
            sources[f"{name}.{part}"] = packed_source(layer, part, sources[f"{name}.{part}"])
    return sources


def load_pretrained(
    path: str | Path,
    *,
    dtype: Any = None,
    plan: Plan | None = None,
    devices: Sequence[Any] | None = None,
    ignore: Sequence[str] = (),
    new_head: bool = False,
    config: Any = None,
    task: str = "",
    model: type | None = None,
    **changes: Any,
) -> Any:
    """As AutoModel.from_pretrained. task: as of open_published. model: the class that it is to be of; any if None."""
    opened = open_published(path, task=task)
    dtype, changes = read_words(dtype, changes)
    config = _changed(opened, config, changes) if config is not None else read_family_config(opened, ignore, changes)
    if plan is not None and plan.mesh.pp > 1:
        raise ConfigError(
            f"plan: pp={plan.mesh.pp} splits a model into stages, which loading does not; set pp to 1, or load on one "
            "device and build a PipelineLayer of the model"
        )
    model_class = opened.family.model.load()
    if model is not None and not issubclass(model_class, model):
        raise ConfigError(
            f"{path}: these are weights of a {model_class.__name__}, not of a {model.__name__}; load them with "
            f"{model_class.__name__} or {TASKS[opened.family.task]}"
        )
    loaded = build_without_values(opened, config)
    tensors, sources = named_tensors(loaded), match_weights(opened, loaded, str(path), new_head)
    if plan is not None:
        apply_plan(plan, loaded, devices)
    wanted = _dtype(dtype, opened)

    def place(name: str) -> Any:
        tensor = tensors[name]
        as_stored = np.dtype(wanted) if dtypes.is_floating(tensor.dtype) else np.dtype(tensor.dtype)
        layouts = getattr(tensor, "layouts", None)
        where = layouts["param"] if layouts else None if plan is None else tensor._array.sharding
        return _place(sources[name], as_stored, where)

    for name, array in zip(sources, in_order(place, sources), strict=True):
        state.write(tensors[name], array)
    for name in tensors.keys() - sources.keys():
        tensors[name].initialize()
    _set_dtype(loaded, wanted)
    loaded.generation_config = read_generation_config(Path(path), opened.config)
    loaded.eval()
    return loaded


def read_generation_config(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json in a folder says, and config.json of the ids around a text that it does not say."""
    file = path / GENERATION_CONFIG
    said = read_json(file) if file.is_file() else {}
    ids = {key: config[key] for key in _TEXT_IDS if config.get(key) is not None}
    return {**ids, **{key: value for key, value in said.items() if value is not None and key not in _OF_A_VERSION}}


def in_order(read: Callable[[str], Any], names: Iterable[str]) -> Iterator[Any]:
    """read of each name, in their order; meanwhile threads read a few of the next, so that files are decoded on all
    cores while memory holds little beside what was taken."""
    workers = min(_READERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, "polyreme-reading") as pool:
        ahead: deque[Future[Any]] = deque()
        try:
            for name in names:
                ahead.append(pool.submit(read, name))
                if len(ahead) > workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def save_pretrained(model: Any, folder: str | Path, *, max_shard_size: str | int = "5GB", dtype: Any = None) -> None:
    """As Pretrained.save_pretrained."""
    family = model.family
    if family.published is None:
        known = ", ".join(name for name, other in FAMILIES.items() if other.published)
        raise ConfigError(f"save_pretrained: {family.name} is published by nobody; families that are: {known}")
    tensors = named_tensors(model)
    write_folder(
        Path(folder),
        family.published.load(),
        model,
        lambda name: np.asarray(tensors[name].numpy()),
        max_shard_size=max_shard_size,
        dtype=dtype,
    )
    if model.generation_config:
        write_json(Path(folder) / GENERATION_CONFIG, dict(model.generation_config))


class Pretrained:
    """What a model with a record in models.families has of published weights."""

    family: Any = None
    low_bit_layout: LowBitLayout | None = None
    """How linear maps lie in a folder that are QuantizedLinears here; compressed-tensors' if None."""
    kv_cache_dtype: Any = None
    """Of keys and values that a cache keeps where it is not told otherwise; that of the weights if None."""
    generation_config: Mapping[str, Any] = MappingProxyType({})
    """What the folder says of writing, as generation_config.json does: the ids that end texts and fill up rows, and how
    a token is drawn."""

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Self:
        """A model with the weights of a folder or of a GGUF file; options: as of AutoModel.from_pretrained.

        Raises as that does, and ConfigError for weights of another family.
        """
        return load_pretrained(path, model=cls, task=cls.family.task if cls.family else "", **options)

    def save_pretrained(self, folder: str | Path, *, max_shard_size: str | int = "5GB", dtype: Any = None) -> None:
        """Write config.json, generation_config.json where there is something to say and safetensors files, of at most
        max_shard_size each, as the family is published.

        dtype: of the weights written, as they are if None. Raises ConfigError for a family that nobody publishes.
        """
        save_pretrained(self, folder, max_shard_size=max_shard_size, dtype=dtype)


def write_folder(
    folder: Path,
    published: PublishedFamily,
    model: Any,
    read: Callable[[str], np.ndarray],
    *,
    max_shard_size: str | int = "5GB",
    dtype: Any = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write a model's tensors, read by name one after the other, as a folder of a family.

    model: their names and shapes, and its config; it needs no values. dtype: of those that are floating, as they are
    read if None. more: keys of config.json beside those of config. Raises ConfigError for QuantizedLinears that no
    layout has.
    """
    nbytes = _num_bytes(max_shard_size)
    written: list[np.dtype] = []

    def cast(name: str) -> np.ndarray:
        array = cast_floating(read(name), dtype)
        if dtypes.is_floating(array.dtype):
            written.append(array.dtype)
        return array

    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    tensors, in_few_bits = _as_published(published, model, shapes, cast)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, tensors, nbytes)
    keys = write_config(published, model.config) | {"torch_dtype": str(written[0])} | in_few_bits
    write_json(folder / CONFIG, {**(more or {}), **keys})


def _as_published(
    published: PublishedFamily, model: Any, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> tuple[Iterator[tuple[str, np.ndarray]], dict[str, Any]]:
    """A model's tensors as its family is published, and what config.json says of how they are stored."""
    layers = low_bit_layers(model)
    if not layers:
        return store_weights(published, model.config, shapes, read), {}
    layout = _layout_of(model, layers.values())
    modules = modules_of(published, model.config, layers)
    is_transposed = {there: modules.is_transposed[name] for name in layers for there in modules.theirs[name]}

    def read_unpacked(name: str) -> np.ndarray:
        owner, _, part = name.rpartition(".")
        is_low_bit = owner in layers and part in parts_of(layers[owner])
        return unpacked(layers[owner], part, read(name)) if is_low_bit else read(name)

    plain = {name: layer for name, layer in model.named_sublayers() if type(layer) is Linear}
    plain = {n: layer for n, layer in plain.items() if f"{n}.weight" in shapes} | expert_maps(model)
    names = modules_of(published, model.config, plain)
    ignored = [there for theirs in names.theirs.values() for there in theirs] + ["lm_head"]
    stored = store_weights(with_scales(published), model.config, unpacked_shapes(model, shapes), read_unpacked)
    return packed_parts(layout, is_transposed, stored), {KEY: layout.to_config({*ignored})}


def _layout_of(model: Any, layers: Iterable[LowBitLayer]) -> LowBitLayout:
    kinds = {(layer.weight_dtype, layer.group_size, layer.low_bit_input) for layer in layers}
    if len(kinds) != 1:
        raise ConfigError(f"save_pretrained: linear maps in {len(kinds)} forms {sorted(kinds)}; a folder has one")
    kind, group_size, low_bit_input = kinds.pop()
    method = model.low_bit_layout.method if model.low_bit_layout else DEFAULT_METHODS[kind]
    cache = getattr(model, "kv_cache_dtype", None) if method == LowBitLayout.method else None
    return LowBitLayout(method, kind, group_size, low_bit_input, kv_cache_dtype=cache)


def cast_floating(array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array in this dtype, if it is floating and dtype is not None."""
    if dtype is None or not dtypes.is_floating(array.dtype):
        return array
    return array.astype(np.dtype(dtypes.as_dtype(dtype)), copy=False)


def family_of(config: Mapping[str, Any], path: Path | str, task: str) -> tuple[Any, PublishedFamily]:
    """The Family or Architecture that a config.json names, and how it is published. path: of what, for errors. task: as
    of open_published. Raises ConfigError for one that is not known here, and for one of other tasks."""
    known = published_families()
    named = config.get("architectures") or []
    exact = next((known[name] for name in named if name in known), None)
    kind = exact[1].model_type if exact else config.get("model_type")
    # one without its head, or a file that names none
    alike = [pair for pair in known.values() if pair[1].model_type == kind]
    if not alike:
        name = str((named or [kind])[0])
        raise ConfigError(f"{path}: unknown architecture {name!r}{did_you_mean(name, known)}")
    if not task and (exact or len(alike) == 1 or not named):
        return exact or alike[0]
    for record, published in alike:
        if record.task == task:
            return record, published
    classes = " or ".join(TASKS[record.task] for record, _ in alike)
    raise ConfigError(f"{path}: these are weights of a {', '.join(named) or kind}; load them with {classes}")


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
        return in_c_order(source.read(index).astype(dtype, copy=False))

    if where is None:  # copied once anyway, which turns what is read as a transpose
        return from_host(source.read(tuple(slice(None) for _ in source.shape)), dtype)
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
