"""Adapters of published models: LoRA on their linear maps, in a folder as peft has it, and merged into the weights.

An adapter lies in adapter_config.json and adapter_model.safetensors, under the names that the published model's own
modules have. The digest of the weights that it was trained on stands in the header of the second.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, did_you_mean
from polyreme.io import safetensors_file
from polyreme.kernels.low_bit import HALVES
from polyreme.models.files.folder import read_json, write_json
from polyreme.models.files.low_bit_folder import linear_maps, low_bit_layers, place_decoded, replace_layer, shape_of
from polyreme.models.files.published import Conversion, match
from polyreme.nn import Layer, Linear, MoE
from polyreme.nn.layers.lora import ExpertLoRA, LoRA, LoRALinear, dense_weight
from polyreme.nn.layers.lora_rows import AdapterRows, RowwiseLoRALinear
from polyreme.nn.layers.quantized import QuantizedExperts, QuantizedLinear
from polyreme.ops.quantization import weight_dequantize, weight_quantize

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL = "all"
_BASE_DIGEST, _BASE_KIND = "base_digest", "base_weight_dtype"
_GROUPS = (64, 32, 16)
"""Inputs of a linear map of 4 bits that share a scale: the first that divides. Source: QLoRA, arXiv:2305.14314."""
_PREFIX = "base_model.model."
_MAGNITUDE = "lora_magnitude_vector"
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?")


class AdaptableMap(NamedTuple):
    """A linear map of a model, or one of all its experts: its names in the published model, an expert's each, and how
    its weight lies there, [out, in] if is_transposed. shape: of the weight here, [in, out] or [expert, in, out]."""

    theirs: tuple[str, ...]
    change: Conversion
    is_transposed: bool
    shape: tuple[int, ...]

    @property
    def is_of_experts(self) -> bool:
        """Whether it is one of all experts."""
        return len(self.shape) == 3

    def store(self, product: LowRank, config: Any) -> Iterator[tuple[str, LowRank]]:
        """A product as peft has it, by the names there."""
        arrays = self._stored(product.b, config)
        magnitudes: Sequence[Any] = [None] * len(self.theirs)
        if product.magnitude is not None:
            magnitudes = [array.reshape(-1) for array in self._stored(product.magnitude[..., None, :], config)]
        each = product.a if self.is_of_experts else product.a[None]
        for name, a, b, magnitude in zip(self.theirs, each, arrays, magnitudes, strict=True):
            yield name, LowRank(a, b, product.scale, magnitude)

    def load(self, products: Sequence[LowRank], config: Any) -> LowRank:
        """What peft has, by the names there, as one product."""
        magnitude = None
        if products[0].magnitude is not None:
            magnitude = self._loaded([product.magnitude[None] for product in products], config)[..., 0, :]
        a = np.stack([product.a for product in products]) if self.is_of_experts else products[0].a
        return LowRank(a, self._loaded([product.b for product in products], config), products[0].scale, magnitude)

    def _stored(self, b: np.ndarray, config: Any) -> list[np.ndarray]:
        """B [.., rank, out], whose columns are those of a weight, with the columns' order of there."""
        return [array.T if self.is_transposed else array for array in self.change.store(b, config)]

    def _loaded(self, arrays: Sequence[np.ndarray], config: Any) -> np.ndarray:
        source = self.change.load([_Whole(b.T if self.is_transposed else b) for b in arrays], config)
        return source.read(tuple(slice(None) for _ in source.shape))


def is_adapter(path: Path) -> bool:
    """Whether a path is the folder of an adapter."""
    return (path / CONFIG).is_file()


def linear_modules(model: Any, with_output: bool = False) -> dict[str, AdaptableMap]:
    """The linear maps of a decoder that an adapter may change, those of experts too, by our name; with_output: also the
    projection to the vocabulary, where that is no embedding.

    Raises ConfigError for a family that nobody publishes.
    """
    if model.family.published is None:
        raise ConfigError(f"{model.family.name} is published by nobody, so that its modules have no names for adapters")
    ends = [layer for layer in model.output_layers().values() if isinstance(layer, (Linear, LoRALinear))]
    outputs = {name: layer for name, layer in model.named_sublayers() if any(layer is end for end in ends)}
    maps = {_outer_name(name): layer for name, layer in linear_maps(model).items() if _outer_name(name) not in outputs}
    maps |= outputs if with_output else {}
    shapes = {f"{name}.weight": (layer.in_features, layer.out_features) for name, layer in maps.items()}
    shapes |= {name: _shape(layer.stored()[part]) for name, (layer, part) in expert_matrices(model).items()}
    modules = {}
    for weight in match(model.family.published.load(), model.config, shapes):
        *outer, _, outs = shape = shapes[weight.ours]
        if len(weight.theirs) == math.prod(outer):  # of several that are one here, none could be adapted by itself
            one_row = np.zeros((*outer, 1, outs), np.float32)
            is_transposed = weight.change.store(one_row, model.config)[0].shape != (1, outs)
            theirs = tuple(name.removesuffix(".weight") for name in weight.theirs)
            modules[weight.ours.removesuffix(".weight")] = AdaptableMap(theirs, weight.change, is_transposed, shape)
    return modules


def _check_own_names(model: Any, names: Iterable[str], modules: Mapping[str, AdaptableMap]) -> None:
    """Raise ConfigError for names of maps there of which several of a model's modules are parts, as an adapter's file
    has one pair of matrices for each name."""
    counts = Counter(name for module in modules.values() for name in module.theirs)
    shared = sorted({name.rsplit(".", 1)[-1] for name in names if counts[name] > 1})
    if shared:
        own = sorted({name.rsplit(".", 1)[-1] for name, count in counts.items() if count == 1})
        raise ConfigError(
            f"lora_target: {', '.join(shared)} of a {type(model).__name__} stands for several maps here, which the "
            f"file of an adapter does not tell apart; give some of {', '.join(own)}"
        )


def _shape(stored: Any) -> tuple[int, ...]:
    return shape_of(stored) if isinstance(stored, QuantizedExperts) else tuple(stored.shape)


def expert_matrices(model: Layer) -> dict[str, tuple[MoE, str]]:
    """The MoE and which of its matrices, by our name, of a model's experts."""
    experts = {name: layer for name, layer in model.named_sublayers() if isinstance(layer, MoE)}
    return {f"{name}.{part}": (layer, part) for name, layer in experts.items() for part in layer.stored()}


def _outer_name(name: str) -> str:
    """Of a Linear inside a LoRALinear, that one's."""
    return name.removesuffix(".base")


def map_of(adapter: str) -> str:
    """The name of a linear map, of that of its adapter in a model.

    >>> map_of("blocks.0.ffn.changes.up"), map_of("blocks.0.attention.q")
    ('blocks.0.ffn.up', 'blocks.0.attention.q')
    """
    owner, changes, part = adapter.rpartition(".changes.")
    return f"{owner}.{part}" if changes else adapter


def choose_modules(model: Any, target: str | Sequence[str] = ALL) -> dict[str, AdaptableMap]:
    """Those of linear_modules that are named: "all", or parts at the end of our names or of the published ones, as
    "q_proj"; the projection to the vocabulary, "lm_head", is not among all. Raises ConfigError for a name that is none,
    and for maps that are parts of one there (of a Phi-3)."""
    if target in (ALL, [ALL]):
        every = linear_modules(model)
        _check_own_names(model, (name for module in every.values() for name in module.theirs), every)
        return every
    modules = linear_modules(model, with_output=True)
    chosen: dict[str, AdaptableMap] = {}
    for wanted in [target] if isinstance(target, str) else target:
        hits = {
            ours: module
            for ours, module in modules.items()
            if any(f".{name}".endswith(f".{wanted}") for name in (ours, *module.theirs))
        }
        if not hits:
            known = sorted({name.rsplit(".", 1)[-1] for module in modules.values() for name in module.theirs})
            raise ConfigError(
                f"lora_target: {type(model).__name__} has no linear map {wanted!r}{did_you_mean(wanted, known)}; its "
                f"maps are {', '.join(known)}, or all"
            )
        chosen |= hits
    _check_own_names(model, (name for module in chosen.values() for name in module.theirs), modules)
    return {ours: modules[ours] for ours in modules if ours in chosen}


def add_adapters(model: Any, lora: LoRA, target: str | Sequence[str] = ALL) -> dict[str, LoRALinear | ExpertLoRA]:
    """Put a LoRALinear in the place of each linear map that target names (choose_modules), and an ExpertLoRA beside
    those of experts; by our names.

    No other parameter of the model trains any more. Raises ConfigError for a rank that is over a map's own.
    """
    chosen = choose_modules(model, target)
    for module in chosen.values():
        *_, ins, outs = module.shape
        if lora.rank > min(ins, outs):
            raise ConfigError(
                f"LoRA: rank {lora.rank} of a map from {ins} to {outs} features is no less than it has itself; give at "
                f"most {min(ins, outs)}"
            )
    for p in model.parameters():
        if not p.is_statistic:
            p.trainable = False
    return {name: _adapt(model, name, lora) for name in chosen}


def _adapt(model: Layer, name: str, lora: LoRA) -> LoRALinear | ExpertLoRA:
    experts = expert_matrices(model).get(name)
    if experts is not None:
        owner, part = experts
        stored = owner.stored()[part]
        if not isinstance(stored, QuantizedExperts):  # whose codes never train
            stored.trainable = False
        owner.changes[part] = change = ExpertLoRA(owner.matrices()[part], lora, stored.dims)
        change.training = owner.training
        return change
    base = _layer(model, name)
    layer = LoRALinear(base, lora)
    layer.training = base.training
    replace_layer(model, name, layer)
    return layer


def _layer(model: Layer, name: str) -> Any:
    layer = model
    for part in name.split("."):
        layer = layer._sub_layers[part]
    return layer


def adapters_of(model: Layer) -> dict[str, LoRALinear | ExpertLoRA]:
    """A model's adapters, by the names of the maps."""
    linear = {name: layer for name, layer in model.named_sublayers() if isinstance(layer, LoRALinear)}
    beside = {
        name: layer.changes[part] for name, (layer, part) in expert_matrices(model).items() if part in layer.changes
    }
    return linear | {name: layer for name, layer in beside.items() if isinstance(layer, ExpertLoRA)}


# the product as one pair of matrices


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a weight [.., in, out]: scale A B, with A [.., in, rank] and B [.., rank, out]; with a
    magnitude [.., out] the sum's columns then have these lengths."""

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None

    @property
    def scaled_a(self) -> np.ndarray:
        """A times the scale, float32."""
        return self.a.astype(np.float32) * np.float32(self.scale)

    def summed(self, weight: np.ndarray) -> np.ndarray:
        """W + scale A B of a weight, float32."""
        return weight.astype(np.float32) + self.scaled_a @ self.b.astype(np.float32)

    def factors(self, weight: np.ndarray) -> np.ndarray:
        """What the columns of summed(weight) are multiplied by, float32 [.., out]; ones without a magnitude."""
        if self.magnitude is None:
            return np.ones((*weight.shape[:-2], weight.shape[-1]), np.float32)
        return self.magnitude.astype(np.float32) / np.sqrt(np.square(self.summed(weight)).sum(-2))

    def merged(self, weight: np.ndarray) -> np.ndarray:
        """The weight of the one linear map that does the same, in the weight's dtype, computed in float32."""
        return (self.summed(weight) * self.factors(weight)[..., None, :]).astype(weight.dtype)


def product_of(layer: LoRALinear | ExpertLoRA) -> LowRank:
    """What a layer adds. Of one that began with a part of the weight the rank is doubled: that part is taken off."""
    tensors = [*layer._parameters.items(), *layer._buffers.items()]
    return joined(layer.lora, {name: tensor.numpy() for name, tensor in tensors})


def joined(lora: LoRA, parts: Mapping[str, np.ndarray]) -> LowRank:
    """The same of a layer's own tensors by name."""
    a, b = parts["lora_a"], parts["lora_b"]
    if lora.pissa_init:
        a, b = np.concatenate([a, parts["start_a"]], -1), np.concatenate([b, -parts["start_b"]], -2)
    return LowRank(a, b, lora.scale, parts.get("magnitude"))


def merge_adapters(model: Any) -> None:
    """Give each adapted linear map its adapter's part, and put it back where it was; one of few bits as a Linear."""
    for name, layer in adapters_of(model).items():
        if isinstance(layer, ExpertLoRA):
            owner, part = expert_matrices(model)[name]
            stored, merged = owner.stored()[part], product_of(layer).merged(owner.matrices()[part].numpy())
            if isinstance(stored, QuantizedExperts):
                place_decoded(owner, part, merged)
            else:
                stored.set_value(merged)
            del owner.changes[part]
            continue
        base, merged = layer.base, product_of(layer).merged(dense_weight(layer.base).numpy())
        if isinstance(base, QuantizedLinear):
            plain = Linear(base.in_features, base.out_features, bias_attr=False, dims=base.weight.dims[::-1])
            plain.bias, plain.training, base = base.bias, base.training, plain
        base.weight.set_value(merged)
        replace_layer(model, name, base)


# a base of few bits


def quantize_maps(model: Any, kind: str) -> None:
    """Store the weights of a decoder's linear maps, but for experts and the projection to the vocabulary, in codes of a
    kind: int8, int4 or nf4, one after another. Source: QLoRA, arXiv:2305.14314."""
    for name, module in linear_modules(model).items():
        if module.is_of_experts:
            continue
        linear = _layer(model, name)
        replace_layer(model, name, QuantizedLinear.of(linear, kind, _group_size(kind, linear.in_features)))


def rounded(weight: np.ndarray, kind: str) -> np.ndarray:
    """A weight [in, out] as it is decoded from codes of a kind, in its dtype."""
    size = _group_size(kind, weight.shape[0])
    codes, scale = weight_quantize(to_tensor(weight), algo=kind, group_size=size)
    return weight_dequantize(codes, scale, kind, weight.dtype.name, size).numpy()


def _group_size(kind: str, ins: int) -> int:
    return next((size for size in _GROUPS if ins % size == 0), -1) if kind in HALVES else -1


# folders


class Adapter(NamedTuple):
    """An adapter before it is in a model. products: by the published names of modules. lora: what all of them have.
    base: what it says that it was trained on; digest: of those weights, None if another program wrote it; weight_dtype:
    of the codes that they were stored in meanwhile, "" for none."""

    path: Path
    lora: LoRA
    products: Mapping[str, LowRank]
    base: str
    digest: str | None
    weight_dtype: str = ""


def write_adapter(model: Any, folder: str | Path, *, base: str = "", digest: str | None = None) -> None:
    """Write the adapters of a model as peft does.

    base: where its weights are; digest: models.files.folder.weights_digest.

    Raises ConfigError for a model without adapters.
    """
    layers, modules = adapters_of(model), linear_modules(model, with_output=True)
    if not layers:
        raise ConfigError("write_adapter: the model has no adapters; add some, or save the model itself")
    arrays: dict[str, np.ndarray] = {}
    for name, layer in layers.items():
        for theirs, product in modules[name].store(product_of(layer), model.config):
            key = f"{_PREFIX}{theirs}"
            arrays[f"{key}.lora_A.weight"] = np.ascontiguousarray(product.a.T)
            arrays[f"{key}.lora_B.weight"] = np.ascontiguousarray(product.b.T)
            if product.magnitude is not None:
                arrays[f"{key}.{_MAGNITUDE}"] = product.magnitude
    lora = next(iter(layers.values())).lora
    rank = lora.rank * (2 if lora.pissa_init else 1)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": lora.scale * (math.sqrt(rank) if lora.rslora else rank),
        "lora_dropout": lora.dropout,
        "target_modules": _targets(modules, layers),
        "use_rslora": lora.rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "fan_in_fan_out": not all(modules[name].is_transposed for name in layers),
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", **({} if digest is None else {_BASE_DIGEST: digest})}
    linear = [layer for layer in layers.values() if isinstance(layer, LoRALinear)]
    bases = {layer.base.weight_dtype for layer in linear if isinstance(layer.base, QuantizedLinear)}
    if bases:
        (metadata[_BASE_KIND],) = bases
    partial = folder / f"{WEIGHTS}.tmp"
    with open(partial, "wb") as file:
        safetensors_file.write(file, arrays, metadata)
    partial.replace(folder / WEIGHTS)
    write_json(folder / CONFIG, config)


def _targets(modules: Mapping[str, AdaptableMap], chosen: Iterable[str]) -> list[str]:
    """The last parts of the names if they mean these modules alone, else the whole names."""
    chosen = [*chosen]
    lasts = {modules[name].theirs[0].rsplit(".", 1)[-1] for name in chosen}
    means = [name for name, module in modules.items() if module.theirs[0].rsplit(".", 1)[-1] in lasts]
    return sorted(lasts) if len(means) == len(chosen) else sorted(t for name in chosen for t in modules[name].theirs)


def open_adapter(folder: str | Path) -> Adapter:
    """An adapter of a folder that write_adapter or peft wrote.

    Raises CheckpointError for a folder that is none and for weights that are no pairs, ConfigError for what an adapter
    may say and cannot be had here.
    """
    folder = Path(folder)
    if not is_adapter(folder):
        within = f", as {folder / 'adapter'}" if is_adapter(folder / "adapter") else ""
        raise CheckpointError(f"{folder}: no {CONFIG} in it; give the folder of an adapter{within}")
    config = read_json(folder / CONFIG)
    _check_config(folder, config)
    arrays_of: dict[str, dict[str, np.ndarray]] = {}
    arrays, metadata = _read(folder / WEIGHTS)
    for name, array in arrays.items():
        hit = _KEY.fullmatch(name)
        if hit is None:
            raise CheckpointError(f"{folder / WEIGHTS}: {name} is no part of a LoRA; others are not read here")
        arrays_of.setdefault(hit[1], {})[hit[2]] = array
    if not arrays_of:
        raise CheckpointError(f"{folder / WEIGHTS}: has no tensors, so that there is nothing to adapt")
    rank = int(config.get("r", 8))
    lora = LoRA(
        rank=rank,
        alpha=float(config.get("lora_alpha", 8)),
        dropout=float(config.get("lora_dropout") or 0.0),
        rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
    )
    products = {}
    for name, parts in arrays_of.items():
        a, b, magnitude = (parts.get(part) for part in ("lora_A", "lora_B", _MAGNITUDE))
        if a is None or b is None or a.shape[:1] != b.shape[1:] or (magnitude is None) == lora.use_dora:
            raise CheckpointError(f"{folder / WEIGHTS}: the parts of {name} are {sorted(parts)}, which make no LoRA")
        if a.shape[0] != rank:
            raise CheckpointError(f"{folder / WEIGHTS}: {name} has rank {a.shape[0]}, {CONFIG} says {rank}")
        products[name] = LowRank(a.T, b.T, lora.scale, None if magnitude is None else magnitude.reshape(-1))
    base = str(config.get("base_model_name_or_path") or "")
    return Adapter(folder, lora, products, base, metadata.get(_BASE_DIGEST), metadata.get(_BASE_KIND, ""))


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        with open(path, "rb") as file:
            return safetensors_file.read(file, str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{folder / CONFIG}: peft_type is {config.get('peft_type')!r}; LORA can be had here")
    for key, accepted in {"bias": (None, "none"), "modules_to_save": (None, []), "rank_pattern": (None, {}),
                          "alpha_pattern": (None, {}), "lora_bias": (None, False)}.items():  # fmt: skip
        if config.get(key) not in accepted:
            raise ConfigError(f"{folder / CONFIG}: {key} is {config[key]!r}, which cannot be had here")
    for key, kinds in {"r": (int,), "lora_alpha": (int, float), "lora_dropout": (int, float, type(None))}.items():
        value = config.get(key, 1)
        if type(value) not in kinds or not (key == "lora_dropout" or 0 < value < math.inf):
            raise ConfigError(f"{folder / CONFIG}: {key} is {value!r}; give a number above 0")


def check_base(adapter: Adapter, digest: str, where: Any) -> None:
    """Raises CheckpointError for an adapter that was trained on weights of another digest than those at a path."""
    if adapter.digest is not None and adapter.digest != digest:
        raise CheckpointError(
            f"{adapter.path}: trained on {adapter.base or 'other weights'} of digest {adapter.digest[:12]}, and those "
            f"of {where} have {digest[:12]}; give the weights that it was trained on"
        )


def products_by_name(adapter: Adapter, model: Any) -> dict[str, LowRank]:
    """The products of an adapter by our names of a model's linear maps. Raises CheckpointError for one that the model
    has not, or whose shape is another."""
    modules = linear_modules(model, with_output=True)
    ours: dict[str, list[str]] = {}
    for name, module in modules.items():
        for theirs in module.theirs:
            ours.setdefault(theirs, []).append(name)
    for theirs, product in adapter.products.items():
        if theirs not in ours:
            raise CheckpointError(
                f"{adapter.path}: {theirs} is no linear map of a {type(model).__name__} that an adapter may change"
            )
        # several of ours may be parts of one there, one under the other
        ins, outs = modules[ours[theirs][0]].shape[-2], sum(modules[name].shape[-1] for name in ours[theirs])
        if (product.a.shape[0], product.b.shape[1]) != (ins, outs):
            raise CheckpointError(
                f"{adapter.path}: {theirs} maps {product.a.shape[0]} features to {product.b.shape[1]}, in the model "
                f"{ins} to {outs}; the adapter is of another model"
            )
    products = {}
    for name, module in modules.items():
        published = [adapter.products[theirs] for theirs in module.theirs if theirs in adapter.products]
        if published and len(published) < len(module.theirs):
            raise CheckpointError(
                f"{adapter.path}: adapts {len(published)} of the {len(module.theirs)} experts of {name}; all or none "
                "of them are adapted here"
            )
        if published:
            products[name] = module.load(published, model.config)
    return products


@dataclass(frozen=True)
class _Whole:
    """An array as a WeightSource."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.array[index]


def apply_adapter(model: Any, adapter: Adapter) -> None:
    """Put an adapter that was read on a model; merge_adapters makes its weights one with the model's.

    Raises as products_by_name, before anything is changed.
    """
    lora = replace(adapter.lora, pissa_init=False)
    products = products_by_name(adapter, model)
    if adapter.weight_dtype and not low_bit_layers(model):
        quantize_maps(model, adapter.weight_dtype)
    for name, product in products.items():
        layer = _adapt(model, name, lora)
        layer.lora_a.set_value(product.a)
        layer.lora_b.set_value(product.b)
        if product.magnitude is not None:
            layer.magnitude.set_value(product.magnitude)


def place_adapters(model: Any, adapters: Mapping[str, Adapter]) -> AdapterRows:
    """Put adapters that were read beside a model's linear maps; what is returned says which of them a row takes.

    Raises as products_by_name before anything is changed, ConfigError for an adapter that was trained beside weights of
    few bits, where the model's are not: it would stand beside others here.
    """
    rows = AdapterRows([*adapters])
    for adapter in adapters.values():
        if adapter.weight_dtype and not low_bit_layers(model):
            raise ConfigError(
                f"{adapter.path}: was trained beside weights of {adapter.weight_dtype}, which other adapters of this "
                "model are not; merge it (polyreme merge), or serve it alone and without a name"
            )
    products = [products_by_name(adapter, model) for adapter in adapters.values()]
    names = linear_modules(model)
    for adapter, own in zip(adapters.values(), products, strict=True):
        shared = [name for name in own if name not in names or names[name].is_of_experts]
        if shared:
            what = "experts" if shared[0] in names else "the projection to the vocabulary"
            raise ConfigError(
                f"{adapter.path}: adapts {what}, which rows of a batch share; merge it (polyreme merge), or serve it "
                "alone and without a name"
            )
    for name in names:
        of_each = [product.get(name) for product in products]
        if any(of_each):
            replace_layer(model, name, _rowwise(_layer(model, name), rows, of_each))
    return rows


def _rowwise(base: Any, rows: AdapterRows, products: Sequence[LowRank | None]) -> RowwiseLoRALinear:
    """A linear map with these beside it, None for an adapter that leaves it as it is."""
    rank = max(product.a.shape[1] for product in products if product is not None)
    a = np.zeros((1 + len(products), base.in_features, rank), np.float32)
    b = np.zeros((1 + len(products), rank, base.out_features), np.float32)
    factors = np.ones((1 + len(products), base.out_features), np.float32)
    for number, product in enumerate(products, 1):
        if product is None:
            continue
        own = product.a.shape[1]
        a[number, :, :own], b[number, :own] = product.scaled_a, product.b
        if product.magnitude is not None:
            factors[number] = product.factors(dense_weight(base).numpy())
    has_magnitudes = any(product is not None and product.magnitude is not None for product in products)
    layer = RowwiseLoRALinear(base, rows, a, b, factors if has_magnitudes else None)
    layer.training = base.training
    return layer
