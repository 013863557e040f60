"""A decoder's linear maps rounded to few bits, block after block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyreme.compression.calibration import ExpertInputs, InputStatistics, collect, maps_of, walk_blocks
from polyreme.compression.rounding import Rounded, absmax_scales, clipped_scales, gptq, round_nearest
from polyreme.compression.scaling import Factors, apply_factors, awq_factors, scaled_inputs, smooth_factors
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, did_you_mean
from polyreme.kernels import low_bit
from polyreme.models.files.bitsandbytes_layout import BLOCK
from polyreme.models.files.low_bit_folder import (
    DEFAULT_METHODS,
    ExpertMaps,
    LowBitLayout,
    expert_maps,
    linear_maps,
    place_experts,
    quantized_experts,
    replace_layer,
)
from polyreme.nn import Linear
from polyreme.nn.eval_mode import eval_mode
from polyreme.nn.quant import QuantizedExperts, QuantizedLinear

_BITS = {"int8": 8, "int4": 4}


class WeightType(NamedTuple):
    """The low-bit form of linear maps: the kind of their codes, whether their inputs are rounded too, whether inputs
    share scales in groups; what caches of keys and values are kept in, that of the weights if None; and inputs of a
    group where the kind says how many."""

    weight_dtype: str
    low_bit_input: bool = False
    has_groups: bool = False
    kv_cache_dtype: str | None = None
    group_size: int = -1


WEIGHT_TYPES = {
    "wint8": WeightType("int8", has_groups=True),
    "wint4": WeightType("int4", has_groups=True),
    "a8w8": WeightType("int8", low_bit_input=True),
    "a8w8c8": WeightType("int8", low_bit_input=True, kv_cache_dtype="int8"),
    "nf4": WeightType("nf4", group_size=BLOCK),
    "wfp8": WeightType("fp8"),
    "a8w8_fp8": WeightType("fp8", low_bit_input=True),
}
QUANTIZATION_METHODS = {
    "rtn": tuple(WEIGHT_TYPES),
    "gptq": ("wint8", "wint4"),
    "awq": ("wint8", "wint4"),
    "smooth": ("a8w8", "a8w8c8", "a8w8_fp8"),
    "fp8": ("wfp8", "a8w8_fp8"),
}
"""Methods, and the types that each makes: rtn rounds to the nearest."""


@dataclass(frozen=True)
class QuantizationOptions:
    """Settings of quantizing a decoder.

    method, type: of QUANTIZATION_METHODS. group_size: inputs that share a scale, all if -1; 64 of nf4. act_order: GPTQ
    rounds the inputs with the largest activations first. smooth_strength: share of the outliers that weights take over.
    skip: names, or parts of them, of linear maps that stay as they are. Raises ConfigError for what does not go
    together.
    """

    method: str = "rtn"
    type: str = "wint8"
    group_size: int = -1
    act_order: bool = False
    smooth_strength: float = 0.5
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in QUANTIZATION_METHODS:
            raise ConfigError(f"--method {self.method}: unknown{did_you_mean(self.method, QUANTIZATION_METHODS)}")
        if self.type not in WEIGHT_TYPES:
            raise ConfigError(f"--type {self.type}: unknown{did_you_mean(self.type, WEIGHT_TYPES)}")
        if self.type not in (types := QUANTIZATION_METHODS[self.method]):
            raise ConfigError(f"--method {self.method} makes {' or '.join(types)}, not {self.type}")
        if self.group_size == -1:
            object.__setattr__(self, "group_size", self.weight_type.group_size)
        has_own = self.weight_type.has_groups or self.group_size == self.weight_type.group_size
        if self.group_size != -1 and (self.group_size < 1 or not has_own):
            grouped = " and ".join(name for name, kind in WEIGHT_TYPES.items() if kind.has_groups)
            raise ConfigError(
                f"--group-size {self.group_size} with {self.type}: {grouped} take groups of inputs; leave it out"
            )
        if self.act_order and self.method != "gptq":
            raise ConfigError(f"--act-order is of gptq, not of {self.method}")
        if not 0 < self.smooth_strength < 1:
            raise ConfigError(f"--smooth-strength {self.smooth_strength}: give a number between 0 and 1")

    @property
    def weight_type(self) -> WeightType:
        """The low-bit form of linear maps."""
        return WEIGHT_TYPES[self.type]

    @property
    def layout(self) -> LowBitLayout:
        """The layout of the folder: GPTQ's for that method."""
        kind = self.weight_type
        method = "gptq" if self.method == "gptq" else DEFAULT_METHODS[kind.weight_dtype]
        return LowBitLayout(
            method, kind.weight_dtype, self.group_size, kind.low_bit_input, kv_cache_dtype=kind.kv_cache_dtype
        )


@dataclass(frozen=True)
class LayerError:
    """The error of a changed linear map: |x (w' - w)| / |x w| over its input rows x, w' being the changed weight."""

    name: str
    error: float


def quantize_decoder(
    model: Any, options: QuantizationOptions, rows: Sequence[np.ndarray], say: Callable[[str], None] = lambda text: None
) -> list[LayerError]:
    """Put a QuantizedLinear in the place of each linear map of a decoder's blocks, and QuantizedExperts in that of the
    maps of experts, in place; the error of each.

    rows: token ids [n, seq] each, which the model is calibrated on. Raises ConfigError for groups that do not divide a
    map's inputs, for names of skip that fit no map, and for a decoder without maps.
    """
    _check(model, options)
    model.kv_cache_dtype = options.weight_type.kv_cache_dtype
    errors: list[LayerError] = []

    def change(name: str, block: Any, run: Callable[[], None]) -> None:
        maps = {n: layer for n, layer in maps_of(model, name).items() if not _is_skipped(n, options)}
        experts = {n: e for n, e in _experts_of(model, options).items() if n.startswith(f"{name}.")}
        inputs = {id(e.moe): ExpertInputs(e.moe) for e in experts.values()}
        statistics = collect(block, run, maps, [*inputs.values()])
        factors: Factors | None = None
        if options.method == "smooth":
            factors = lambda scaled, stats: smooth_factors(scaled, stats, options.smooth_strength)
        elif options.method == "awq":
            bits = _BITS[options.weight_type.weight_dtype]
            factors = lambda scaled, stats: awq_factors(scaled, stats, bits, options.group_size)
        if factors is not None:
            for scaled in scaled_inputs(name, block):
                if scaled.maps.keys() <= maps.keys():
                    apply_factors(scaled, factors(scaled, statistics), statistics)
        for n, layer in maps.items():
            weight = layer.weight.numpy().astype(np.float32)
            quantized, values = _quantized(layer, weight, statistics[n], options)
            errors.append(LayerError(n, statistics[n].relative_error(values - weight, weight)))
            replace_layer(model, n, quantized)
        for n, e in experts.items():
            codes, error = _quantized_experts(e, inputs[id(e.moe)].statistics[e.part], options)
            errors.append(LayerError(n, error))
            place_experts(model, n, codes)
        count = len(maps) + len(experts)
        beside = f", {len(experts)} of them of all experts" if experts else ""
        say(f"{name}: {count} linear maps{beside}, error {max((e.error for e in errors[-count:]), default=0):.4f}")

    with eval_mode(model):
        walk_blocks(model, rows, change)
    model.low_bit_layout = options.layout
    return errors


def _quantized(
    layer: Linear, weight: np.ndarray, statistics: InputStatistics, options: QuantizationOptions
) -> tuple[QuantizedLinear, np.ndarray]:
    """The layer that takes another's place, and the weight that it has."""
    kind, group_size = options.weight_type.weight_dtype, options.group_size
    quantized = QuantizedLinear.like(layer, kind, group_size, options.weight_type.low_bit_input)
    codes, scales, values = _rounded(weight, statistics, options)
    quantized.set_codes(Tensor(codes), Tensor(scales))
    return quantized, values


def _quantized_experts(
    maps: ExpertMaps, statistics: Sequence[InputStatistics], options: QuantizationOptions
) -> tuple[QuantizedExperts, float]:
    """The codes that replace a matrix of all experts, and their error over the rows of all of them."""
    matrix = maps.moe.stored()[maps.part]
    codes, scales, wrong, whole = [], [], 0.0, 0.0
    for weight, of_expert in zip(matrix.numpy().astype(np.float32), statistics, strict=True):
        *stored, values = _rounded(weight, of_expert, options)
        codes.append(stored[0])
        scales.append(stored[1])
        wrong += max(of_expert.squared_error(values - weight), 0)
        whole += max(of_expert.squared_error(weight), 0)
    quantized = quantized_experts(maps, options.weight_type.weight_dtype, options.group_size)
    quantized.set_codes(Tensor(jnp.stack(codes)), Tensor(jnp.stack(scales)))
    return quantized, float(np.sqrt(wrong / max(whole, 1e-30)))


def _rounded(
    weight: np.ndarray, statistics: InputStatistics, options: QuantizationOptions
) -> tuple[Any, Any, np.ndarray]:
    """Codes and scales of a weight [in, out] as layers have them, and what they say."""
    kind, group_size = options.weight_type.weight_dtype, options.group_size
    if kind not in _BITS:
        codes, scale = low_bit.encode(jnp.asarray(weight), kind, group_size)
        return codes, scale, np.asarray(low_bit.decode(codes, scale, kind, group_size, jnp.float32)).T
    bits = _BITS[kind]
    rounded: Rounded
    if options.method == "gptq":
        rounded = gptq(weight, statistics, bits, group_size, options.act_order, half_scales=True)
    elif options.method == "awq":
        rounded = round_nearest(weight, clipped_scales(weight, statistics, bits, group_size), bits)
    else:
        rounded = round_nearest(weight, absmax_scales(weight, bits, group_size), bits)
    codes = jnp.asarray(np.ascontiguousarray(rounded.codes.T))
    codes = low_bit.pack(codes) if kind in low_bit.HALVES else codes
    scales = rounded.scales[0] if group_size == -1 else rounded.scales
    return codes, jnp.asarray(np.asarray(scales, np.float32)), rounded.values()


def _experts_of(model: Any, options: QuantizationOptions) -> dict[str, ExpertMaps]:
    """The maps of experts that are rounded, by name: none where what maps take in is rounded too, which mixtures do
    not do."""
    if options.weight_type.low_bit_input:
        return {}
    return {n: e for n, e in expert_maps(model).items() if n.startswith("blocks.") and not _is_skipped(n, options)}


def _is_skipped(name: str, options: QuantizationOptions) -> bool:
    return any(part in name for part in options.skip)


def _check(model: Any, options: QuantizationOptions) -> None:
    maps = {n: layer for n, layer in linear_maps(model).items() if n.startswith("blocks.") and type(layer) is Linear}
    if not maps:
        raise ConfigError(f"{type(model).__name__}: no linear maps in its blocks that are stored in full")
    experts = {n: e for n, e in expert_maps(model).items() if n.startswith("blocks.")}
    for part in options.skip:
        if not any(part in name for name in (*maps, *experts)):
            raise ConfigError(f"--skip {part}: no linear map is called so{did_you_mean(part, maps)}")
    for name, layer in (*_maps_to_quantize(maps, options), *_experts_of(model, options).items()):
        if options.group_size != -1 and layer.in_features % options.group_size:
            raise ConfigError(
                f"--group-size {options.group_size}: {name} has {layer.in_features} inputs; give what divides them, or "
                f"--skip {name}"
            )
        if options.weight_type.weight_dtype in low_bit.HALVES and layer.out_features % 2:
            raise ConfigError(f"{options.type}: {name} has {layer.out_features} outputs; skip it: --skip {name}")


def _maps_to_quantize(maps: dict[str, Linear], options: QuantizationOptions) -> Iterator[tuple[str, Linear]]:
    return ((name, layer) for name, layer in maps.items() if not _is_skipped(name, options))
