"""Weights of few bits in folders: quantization_config of config.json, and how codes and scales lie in the files.

Three layouts are written and read: compressed-tensors' (pack-quantized, int-quantized, float-quantized), GPTQ's, and
bitsandbytes' of nf4 (bitsandbytes_layout.py). What is not stored in few bits lies as ever. Symmetric codes are read as
they are; those of GPTQ with zero points of their own become int8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.errors import CheckpointError, ConfigError, ShapeError
from polyreme.kernels.low_bit import HALVES
from polyreme.models.files import bitsandbytes_layout
from polyreme.models.files.published import (
    Changed,
    Index,
    PublishedFamily,
    WeightRule,
    WeightSource,
    match,
    transposed_source,
)
from polyreme.nn import Layer, Linear, MoE
from polyreme.nn.quant import QuantizedExperts, QuantizedLinear

LowBitLayer = QuantizedLinear | QuantizedExperts
KEY = "quantization_config"
"""Of config.json."""
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_WHOLE = slice(None)
_CACHE_SCHEME = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Of compressed-tensors, of caches of keys and values: a scale for each head and token, made as they come."""
# dims of a part, and bytes that each of its whole numbers may have; none where they are floating
_FORMS: dict[str, tuple[int, tuple[int, ...]]] = {
    "qweight": (2, (4,)), "qzeros": (2, (4,)), "scales": (2, ()), "g_idx": (1, (4, 8)),
    "weight_packed": (2, (4,)), "weight_scale": (2, ()), "weight_shape": (1, (4, 8)),
}  # fmt: skip


METHODS = {
    "compressed-tensors": ("int8", "int4", "fp8"),
    "gptq": ("int8", "int4"),
    bitsandbytes_layout.METHOD: ("nf4",),
}
"""Layouts by what quant_method says, and the kinds of codes that each has."""
DEFAULT_METHODS = {kind: method for method, kinds in reversed(METHODS.items()) for kind in kinds}
"""The layout of each kind of codes where none is named."""
_OPTIONAL = {"g_idx", *bitsandbytes_layout.OPTIONAL}


@dataclass(frozen=True)
class LowBitLayout:
    """How a folder's linear maps are stored.

    method: one of METHODS. weight_dtype: int8, int4, fp8 or nf4. group_size: inputs that share a scale, all if
    -1. low_bit_input: activations are rounded too. stored_bits: of a number in the files, where those are codes with
    zero points of their own, which become int8. kv_cache_dtype: int8 where caches of keys and values are to be kept so.
    Raises ConfigError for what no layout has.
    """

    method: str = "compressed-tensors"
    weight_dtype: str = "int8"
    group_size: int = -1
    low_bit_input: bool = False
    stored_bits: int = 0
    kv_cache_dtype: str | None = None

    def __post_init__(self) -> None:
        kinds = METHODS.get(self.method)
        if kinds is None:
            raise ConfigError(f"method {self.method!r} of weights of few bits; one of {', '.join(METHODS)}")
        if self.weight_dtype not in kinds:
            raise ConfigError(
                f"weights of {self.weight_dtype} cannot be written as {self.method} lays them out; it has "
                f"{', '.join(kinds)}"
            )

    @property
    def bits(self) -> int:
        """Of a number in the files."""
        if self.stored_bits:
            return self.stored_bits
        return 4 if self.weight_dtype in HALVES else 8

    @property
    def parts(self) -> tuple[str, ...]:
        """What a linear map has in place of its weight."""
        if self.method == "gptq":
            return ("qweight", "qzeros", "scales", "g_idx")
        if self.method == bitsandbytes_layout.METHOD:
            return bitsandbytes_layout.PARTS
        if self.format == "pack-quantized":
            return ("weight_packed", "weight_scale", "weight_shape")
        return ("weight", "weight_scale")

    @property
    def format(self) -> str:
        """Of compressed-tensors."""
        if self.weight_dtype == "fp8":
            return "float-quantized"
        return "int-quantized" if self.low_bit_input else "pack-quantized"

    def to_config(self, ignored: Iterable[str]) -> dict[str, Any]:
        """quantization_config; ignored: linear maps that are stored as ever."""
        if self.method == "gptq":
            sizes = {"bits": self.bits, "group_size": self.group_size, "sym": True, "desc_act": False}
            return {"quant_method": "gptq", "checkpoint_format": "gptq", "lm_head": False, **sizes}
        if self.method == bitsandbytes_layout.METHOD:
            return bitsandbytes_layout.to_config(sorted(ignored))
        kind = "float" if self.weight_dtype == "fp8" else "int"
        shared = {"num_bits": self.bits, "type": kind, "symmetric": True}
        groups = {"strategy": "channel"} if self.group_size == -1 else {"strategy": "group"}
        size = None if self.group_size == -1 else self.group_size
        inputs = {**shared, "strategy": "token", "dynamic": True} if self.low_bit_input else None
        scheme = {
            "targets": ["Linear"],
            "weights": {**shared, **groups, "group_size": size, "dynamic": False},
            "input_activations": inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "ignore": sorted(ignored),
            "config_groups": {"group_0": scheme},
            **({} if self.kv_cache_dtype is None else {"kv_cache_scheme": _CACHE_SCHEME}),
        }

    def pack(self, codes: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
        """Parts of a linear map: codes int8 [out, in], scales [out, groups]."""
        outputs, inputs = codes.shape
        if self.method == bitsandbytes_layout.METHOD:
            return bitsandbytes_layout.pack(codes, scales)
        if self.method == "gptq":
            zero = 1 << (self.bits - 1)
            if inputs % (32 // self.bits) or outputs % (32 // self.bits):
                raise ShapeError(
                    f"gptq packs {32 // self.bits} numbers in a word; {inputs} x {outputs} does not divide"
                )
            shifted = (codes.T.astype(np.int32) + zero).astype(np.uint32)
            # what is read is one more than what is stored
            zeros = np.full((scales.shape[1], outputs), zero - 1, np.uint32)
            size = inputs if self.group_size == -1 else self.group_size
            return {
                "qweight": _words(shifted, self.bits, 0),
                "qzeros": _words(zeros, self.bits, 1),
                "scales": scales.T.astype(np.float16),
                "g_idx": (np.arange(inputs) // size).astype(np.int32),
            }
        if self.format == "pack-quantized":
            shifted = (codes.astype(np.int32) + (1 << (self.bits - 1))).astype(np.uint32)
            shape = np.array([outputs, inputs], np.int64)
            return {"weight_packed": _words(shifted, self.bits, 1), "weight_scale": scales, "weight_shape": shape}
        return {"weight": codes.view(_FP8) if self.weight_dtype == "fp8" else codes, "weight_scale": scales}

    def open(self, module: str, files: Mapping[str, WeightSource]) -> tuple[WeightSource, WeightSource]:
        """Codes, int8 [out, in], and scales [out, groups] of a linear map. Raises CheckpointError for parts that are
        missing or do not fit together, ConfigError for groups of inputs that are not in a row."""
        lost = [part for part in self.parts if f"{module}.{part}" not in files and part not in _OPTIONAL]
        if lost:
            raise CheckpointError(f"{module}: has no {lost[0]}, which {self.method} stores")
        parts = {part: files[f"{module}.{part}"] for part in self.parts if f"{module}.{part}" in files}
        if self.method == bitsandbytes_layout.METHOD:
            return bitsandbytes_layout.open_parts(module, parts)
        for part, (dims, sizes) in _FORMS.items():
            if part in parts:
                _check_form(f"{module}.{part}", parts[part], dims, sizes)
                if not sizes:
                    parts[part] = _finite(parts[part])
        if self.method == "gptq":
            return self._open_gptq(module, parts)
        scales = parts["weight_scale"]
        if self.format != "pack-quantized":
            stored = parts["weight"]
            if stored.dtype.itemsize != 1 or len(stored.shape) != 2:
                raise CheckpointError(
                    f"{module}.weight: {stored.dtype} {list(stored.shape)}; codes of a byte [out, in]"
                )
            return Changed(stored.shape, np.dtype(np.int8), lambda index: stored.read(index).view(np.int8)), scales
        packed, shape = parts["weight_packed"], _read(parts["weight_shape"])
        if len(shape) != 2 or packed.shape != (shape[0], -(-shape[1] // (32 // self.bits))):
            raise CheckpointError(
                f"{module}: weight_packed of {list(packed.shape)} words, and weight_shape says {shape.tolist()} "
                f"numbers of {self.bits} bits"
            )
        sizes = (int(shape[0]), int(shape[1]))

        def read(index: Index) -> np.ndarray:
            words = packed.read((index[0], _WHOLE))
            return (_numbers(words, self.bits, 1)[:, : sizes[1]] - (1 << (self.bits - 1))).astype(np.int8)[:, index[1]]

        return Changed(sizes, np.dtype(np.int8), read), scales

    def _open_gptq(self, module: str, parts: Mapping[str, WeightSource]) -> tuple[WeightSource, WeightSource]:
        qweight, qzeros, scales = (parts[part] for part in ("qweight", "qzeros", "scales"))
        per_word = 32 // self.bits
        inputs, outputs = qweight.shape[0] * per_word, qweight.shape[1]
        groups = scales.shape[0]
        order = parts.get("g_idx")
        if (
            not 0 < groups <= inputs
            or scales.shape[1] != outputs
            or qzeros.shape != (groups, -(-outputs // per_word))
            or (order is not None and order.shape != (inputs,))
        ):
            told = ", ".join(f"{part} {list(source.shape)}" for part, source in parts.items())
            raise CheckpointError(f"{module}: {told} of {self.bits} bits, which do not fit together")
        size = -(-inputs // groups)
        if order is not None and (_read(order) != np.arange(inputs) // size).any():
            raise ConfigError(
                f"{module}: its groups are of inputs that are not in a row (desc_act); quantize it with static groups"
            )
        limit = 1 << ((4 if self.weight_dtype == "int4" else 8) - 1)

        def read(index: Index) -> np.ndarray:
            numbers = _numbers(_read(qweight), self.bits, 0).T
            zeros = _numbers(_read(qzeros), self.bits, 1)[:, :outputs] + 1
            codes = numbers - np.repeat(zeros.T, size, 1)[:, :inputs]
            if codes.min() < -limit or codes.max() >= limit:
                raise CheckpointError(
                    f"{module}: numbers less their zero points are {codes.min()} to {codes.max()}, which "
                    f"{self.weight_dtype} does not hold; zero points of their own are read of 4 bits, with sym: false"
                )
            return codes.astype(np.int8)[index]

        codes = Changed((outputs, inputs), np.dtype(np.int8), read)
        return codes, Changed((outputs, groups), scales.dtype, lambda index: scales.read(index[::-1]).T)


def read_layout(config: Any) -> LowBitLayout:
    """What a quantization_config says. Raises ConfigError for a method or a setting that is not read here."""
    config = _section(config, "")
    method = config.get("quant_method")
    if method == "gptq":
        if config.get("bits") not in (4, 8):
            raise ConfigError(f"{KEY}: gptq of {config.get('bits')!r} bits; 4 and 8 are read")
        if config.get("checkpoint_format", "gptq") != "gptq":
            raise ConfigError(f"{KEY}: checkpoint_format {config['checkpoint_format']!r}; only gptq is read")
        is_symmetric = config.get("sym", True)
        kind = "int4" if config["bits"] == 4 and is_symmetric else "int8"
        return LowBitLayout("gptq", kind, _group_size(config), stored_bits=int(config["bits"]))
    if method == bitsandbytes_layout.METHOD:
        bitsandbytes_layout.check_config(config, KEY)
        return LowBitLayout(method, "nf4", bitsandbytes_layout.BLOCK)
    if method != "compressed-tensors":
        raise ConfigError(f"{KEY}: quant_method {method!r}; {', '.join(METHODS)} are read")
    groups = [*_section(config.get("config_groups") or {}, "config_groups").values()]
    group = _section(groups[0], "config_groups") if len(groups) == 1 else {}
    if not group.get("weights"):
        raise ConfigError(f"{KEY}: {len(groups)} config_groups; one that says how weights lie is read")
    weights, inputs = _section(group["weights"], "weights"), group.get("input_activations")
    kinds = [("int", 8, "int8"), ("int", 4, "int4"), ("float", 8, "fp8")]
    kind = next((kind for *said, kind in kinds if said == [weights.get("type"), weights.get("num_bits")]), None)
    is_plain = weights.get("symmetric", True) and not weights.get("actorder")
    if kind is None or not is_plain or weights.get("strategy") not in ("channel", "group"):
        raise ConfigError(f"{KEY}: weights {dict(weights)}; symmetric int4, int8 and fp8 by channel or group are read")
    if inputs:
        inputs = _section(inputs, "input_activations")
        if not (inputs.get("dynamic") and inputs.get("strategy") == "token"):
            raise ConfigError(
                f"{KEY}: input_activations {dict(inputs)}; those that are rounded token by token are read"
            )
    layout = LowBitLayout(method, kind, _group_size(weights), bool(inputs), kv_cache_dtype=_cache_dtype(config))
    if config.get("format") != layout.format:
        raise ConfigError(f"{KEY}: format {config.get('format')!r} of {kind}; it is read as {layout.format}")
    return layout


def _cache_dtype(config: Mapping[str, Any]) -> str | None:
    scheme = config.get("kv_cache_scheme")
    if scheme is None:
        return None
    said = {**_section(scheme, "kv_cache_scheme")}
    if any(said.get(key) != value for key, value in _CACHE_SCHEME.items()):
        raise ConfigError(f"{KEY}: kv_cache_scheme {said}; caches of {_CACHE_SCHEME} are read")
    return "int8"


def _section(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{'.'.join(filter(None, (KEY, name)))}: {value!r}, which is no object of settings")
    return value


def _group_size(settings: Mapping[str, Any]) -> int:
    size = settings.get("group_size")
    size = -1 if size is None else size
    if type(size) is not int or (size != -1 and size < 1):
        raise ConfigError(f"{KEY}: group_size {size!r}; it is a number of inputs, or -1 for all of them")
    return size


class LowBitModules(NamedTuple):
    """The linear maps of a model that are stored in few bits: our name -> names there, and whether they are [out, in]
    there, as all but GPT-2's are."""

    theirs: dict[str, tuple[str, ...]]
    is_transposed: dict[str, bool]


def linear_maps(model: Any) -> dict[str, Linear | QuantizedLinear]:
    """The linear maps of a model by name, but for those that make its output."""
    outputs = {id(layer) for layer in model.output_layers().values()} if hasattr(model, "output_layers") else set()
    maps = {name: layer for name, layer in model.named_sublayers() if isinstance(layer, (Linear, QuantizedLinear))}
    return {name: layer for name, layer in maps.items() if id(layer) not in outputs}


class ExpertMaps(NamedTuple):
    """One of the maps of all experts of a mixture: the MoE, the name that it has there, and its sizes."""

    moe: MoE
    part: str
    num_experts: int
    in_features: int
    out_features: int


def expert_maps(model: Any) -> dict[str, ExpertMaps]:
    """The maps of experts that are stored in full, by name."""
    mixtures = {name: layer for name, layer in model.named_sublayers() if isinstance(layer, MoE)}
    return {
        f"{name}.{part}": ExpertMaps(layer, part, *stored.shape)
        for name, layer in mixtures.items()
        for part, stored in layer.stored().items()
        if not isinstance(stored, QuantizedExperts)
    }


def shape_of(layer: Any) -> tuple[int, ...]:
    """[in, out] of a linear map, [expert, in, out] of those of experts."""
    experts = () if getattr(layer, "num_experts", None) is None else (layer.num_experts,)
    return (*experts, layer.in_features, layer.out_features)


def parts_of(layer: Any) -> tuple[str, str]:
    """What the codes and the scales of a linear map, or of those of experts, are called."""
    return ("weight", "weight_scale") if getattr(layer, "num_experts", None) is None else ("codes", "codes_scale")


def quantized_experts(maps: ExpertMaps, weight_dtype: str, group_size: int) -> QuantizedExperts:
    """What takes their place; codes are still to be set."""
    dims = maps.moe.stored()[maps.part].dims
    experts, in_features, out_features = shape_of(maps)
    layer = QuantizedExperts(experts, in_features, out_features, weight_dtype, group_size, dims)
    layer._dtype, layer.training = maps.moe._dtype, maps.moe.training
    return layer


def place_experts(model: Any, name: str, layer: QuantizedExperts) -> None:
    """Put codes in the place of the matrix of all experts with this name."""
    owner, _, part = name.rpartition(".")
    del dict(model.named_sublayers())[owner]._parameters[part]
    replace_layer(model, name, layer)


def place_decoded(moe: MoE, part: str, values: np.ndarray) -> None:
    """Put a parameter with these values in the place of codes of all experts."""
    dims = moe.stored()[part].dims
    del moe._sub_layers[part]
    matrix = moe.create_parameter(list(values.shape), dims=dims)
    matrix.set_value(values)
    setattr(moe, part, matrix)


def modules_of(published: PublishedFamily, config: Any, maps: Mapping[str, Any]) -> LowBitModules:
    """What these linear maps are called there; maps of experts have a name for each."""
    shapes = {f"{name}.{parts_of(layer)[0]}": shape_of(layer) for name, layer in maps.items()}
    theirs, is_transposed = {}, {}
    for weight in match(with_scales(published), config, shapes):
        name = weight.ours.rpartition(".")[0]
        theirs[name] = tuple(there.removesuffix(".weight") for there in weight.theirs)
        *experts, _, outputs = shapes[weight.ours]
        one_row = np.zeros((*experts, 1, outputs), np.int8)
        is_transposed[name] = weight.change.store(one_row, config)[0].shape[0] != 1
    return LowBitModules(theirs, is_transposed)


def place_low_bit_layers(
    model: Any, published: PublishedFamily, layout: LowBitLayout, files: Mapping[str, WeightSource]
) -> None:
    """Put a QuantizedLinear in the place of each linear map that the files store in few bits."""
    maps = {**linear_maps(model), **expert_maps(model)}
    modules = modules_of(published, model.config, maps)
    marks = layout.parts[:1] if layout.parts[0] != "weight" else layout.parts[1:2]
    for name, theirs in modules.theirs.items():
        stored = [there for there in theirs if any(f"{there}.{mark}" in files for mark in marks)]
        if stored and isinstance(maps[name], ExpertMaps):
            place_experts(model, name, quantized_experts(maps[name], layout.weight_dtype, layout.group_size))
        elif stored:
            layer = QuantizedLinear.like(maps[name], layout.weight_dtype, layout.group_size, layout.low_bit_input)
            replace_layer(model, name, layer)


def replace_layer(model: Layer, name: str, layer: Layer) -> None:
    """Put a layer in the place of the one with this name in a model."""
    owner: Any = model
    *path, last = name.split(".")
    for part in path:
        owner = owner._sub_layers[part]
    owner._sub_layers[last] = layer


def with_scales(published: PublishedFamily) -> PublishedFamily:
    """The family with a rule for the scales of each weight, which lie as its columns do."""

    def rules(config: Any) -> list[WeightRule]:
        plain = list(published.weights(config))
        matrices = [rule for rule in plain if rule.theirs.endswith(".weight")]
        # of experts, whose matrices are parameters of a mixture until codes stand in their place
        experts = [rule._replace(ours=f"{rule.ours}.codes") for rule in matrices if "{e}" in rule.theirs]
        scales = [
            WeightRule(f"{rule.theirs}_scale", f"{rule.ours}_scale", rule.change)
            for rule in (*matrices, *experts)
            if rule.ours.endswith((".weight", ".codes"))
        ]
        return plain + experts + scales

    return replace(published, weights=rules)


def low_bit_layers(model: Any) -> dict[str, LowBitLayer]:
    """The QuantizedLinears and QuantizedExperts of a model by name."""
    return {name: layer for name, layer in model.named_sublayers() if isinstance(layer, LowBitLayer)}


def unpacked_shapes(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of our tensors where codes are [in, out] and scales [groups, out], as rules take them."""
    changed = dict(shapes)
    for name, layer in low_bit_layers(model).items():
        codes, scales = parts_of(layer)
        *experts, _, _ = changed[f"{name}.{codes}"] = shape_of(layer)
        groups = 1 if layer.group_size == -1 else layer.in_features // layer.group_size
        changed[f"{name}.{scales}"] = (*experts, groups, layer.out_features)
    return changed


def open_low_bit(
    model: Any, published: PublishedFamily, layout: LowBitLayout, files: Mapping[str, WeightSource]
) -> dict[str, WeightSource]:
    """The files with a `weight`, its codes, and a `weight_scale` in place of each linear map's parts, as rules take
    them."""
    modules = modules_of(published, model.config, low_bit_layers(model))
    opened = dict(files)
    for name, theirs in modules.theirs.items():
        for there in theirs:
            codes, scales = layout.open(there, files)
            for part in layout.parts:
                opened.pop(f"{there}.{part}", None)
            turned = (lambda source: source) if modules.is_transposed[name] else transposed_source
            opened[f"{there}.weight"], opened[f"{there}.weight_scale"] = turned(codes), turned(scales)
    return opened


def packed_source(layer: LowBitLayer, name: str, source: WeightSource) -> WeightSource:
    """What rules give of a layer's tensor, [in, out] or [groups, out], as the layer has it; of experts with these in
    front."""
    if isinstance(layer, QuantizedExperts):
        return _packed_experts(layer, name, source)
    if name == "weight_scale":
        if layer.group_size != -1:
            return source
        return Changed(source.shape[1:], source.dtype, lambda index: source.read((_WHOLE, index[0]))[0])
    shape = tuple(layer.weight.shape)

    def read(index: Index) -> np.ndarray:
        rows = index[0]
        if layer.weight_dtype in HALVES:
            first, last, _ = rows.indices(shape[0])
            codes = source.read((index[1], slice(2 * first, 2 * last))).T
            return _halves(codes)
        return source.read((index[1], rows)).T

    return Changed(shape, np.dtype(np.int8), read)


def _packed_experts(layer: QuantizedExperts, name: str, source: WeightSource) -> WeightSource:
    shape = tuple(getattr(layer, name).shape)

    def read(index: Index) -> np.ndarray:
        """Of the experts that are asked for; the matrix of one is read whole."""
        matrices = [source.read((slice(e, e + 1), _WHOLE, _WHOLE))[0] for e in range(shape[0])[index[0]]]
        if name == "codes_scale":
            parts = [scales if layer.group_size != -1 else scales[0] for scales in matrices]
        else:
            parts = [_halves(codes.T) if layer.weight_dtype in HALVES else codes.T for codes in matrices]
        return np.stack(parts)[(_WHOLE, *index[1:])]

    return Changed(shape, np.dtype(np.int8) if name == "codes" else source.dtype, read)


def unpacked(layer: LowBitLayer, name: str, array: np.ndarray) -> np.ndarray:
    """A layer's tensor as rules take it: codes [in, out], scales [groups, out]; of experts with these in front."""
    if isinstance(layer, QuantizedExperts):
        return np.stack([_unpacked(layer, name, each) for each in array])
    return _unpacked(layer, name, array)


def _unpacked(layer: LowBitLayer, name: str, array: np.ndarray) -> np.ndarray:
    if name.endswith("_scale"):
        return array if array.ndim == 2 else array[None]
    if layer.weight_dtype not in HALVES:
        return array.T
    low, high = (array << 4) >> 4, array >> 4
    return np.stack([low, high], 1).reshape(-1, array.shape[1]).T


def packed_parts(
    layout: LowBitLayout, is_transposed: Mapping[str, bool], tensors: Iterable[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors as rules give them, each linear map's `weight` and `weight_scale` as the layout's parts.

    is_transposed: of those maps, by their names there.
    """
    waiting: dict[str, np.ndarray] = {}
    for name, array in tensors:
        module, _, part = name.rpartition(".")
        if module not in is_transposed or part not in ("weight", "weight_scale"):
            yield name, array
            continue
        array = array if is_transposed[module] else array.T
        other = "weight_scale" if part == "weight" else "weight"
        if (beside := waiting.pop(f"{module}.{other}", None)) is None:
            waiting[name] = array
            continue
        codes, scales = (array, beside) if part == "weight" else (beside, array)
        yield from ((f"{module}.{key}", value) for key, value in layout.pack(codes, scales).items())


def _check_form(name: str, source: WeightSource, dims: int, sizes: Sequence[int]) -> None:
    fits = source.dtype.kind in "iu" and source.dtype.itemsize in sizes if sizes else dtypes.is_floating(source.dtype)
    if not fits or len(source.shape) != dims:
        kind = " or ".join(f"int{8 * size}" for size in sizes) or "floating numbers"
        raise CheckpointError(f"{name}: {source.dtype} {list(source.shape)}; {kind} in {dims} dims are stored there")


def _finite(source: WeightSource) -> WeightSource:
    """Scales that are looked at as they are read."""

    def read(index: Index) -> np.ndarray:
        scales = source.read(index)
        if not np.isfinite(scales.astype(np.float32)).all():
            raise CheckpointError(
                f"{source}: NaN or infinity among the scales; the file is damaged, or was quantized from weights that "
                "were not finite: quantize it again"
            )
        return scales

    return Changed(source.shape, source.dtype, read)


def _read(source: WeightSource) -> np.ndarray:
    return source.read(tuple(_WHOLE for _ in source.shape))


def _halves(codes: np.ndarray) -> np.ndarray:
    pairs = codes.reshape(-1, 2, codes.shape[1]).astype(np.uint8) & 15
    return (pairs[:, 0] | (pairs[:, 1] << 4)).view(np.int8)


def _words(numbers: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """Unsigned numbers packed along a dim into int32, the first in the lowest bits, the last word filled with 0."""
    per_word = 32 // bits
    last = np.moveaxis(numbers, dim, -1)
    last = np.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % per_word)])
    parts = last.reshape(*last.shape[:-1], -1, per_word) << np.arange(0, 32, bits, dtype=np.uint32)
    words = np.bitwise_or.reduce(parts, -1).astype(np.uint32).view(np.int32)
    return np.ascontiguousarray(np.moveaxis(words, -1, dim))


def _numbers(words: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """What _words packed, int32."""
    last = np.moveaxis(np.ascontiguousarray(words).view(np.uint32), dim, -1)
    parts = (last[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & ((1 << bits) - 1)
    return np.moveaxis(parts.reshape(*last.shape[:-1], -1), -1, dim).astype(np.int32)
