"""Weights of nf4 as bitsandbytes lays them out in folders, and transformers with it: QLoRA's base.

A linear map's `weight` is bytes [numbers / 2, 1], two numbers in each, the first in the high half, in the order of
[out, in]; every 64 of them share a scale, `weight.absmax`, which may itself be stored in 8 bits: a table's value times
the scale of 256 of them, and an offset for all. Source: QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from polyreme.errors import CheckpointError, ConfigError, ShapeError
from polyreme.kernels.low_bit import NF4
from polyreme.models.files.published import Changed, Index, WeightSource

METHOD, BLOCK = "bitsandbytes", 64
_STATE = "weight.quant_state.bitsandbytes__nf4"
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
PARTS = ("weight", "weight.absmax", "weight.quant_map", _STATE, *_NESTED)
OPTIONAL = frozenset(_NESTED)
"""Parts that only folders have whose scales are stored in 8 bits."""


def to_config(ignored: list[str]) -> dict[str, Any]:
    """quantization_config; ignored: linear maps that are stored as ever."""
    return {
        "quant_method": METHOD,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "float32",
        "llm_int8_skip_modules": ignored,
    }


def check_config(config: Mapping[str, Any], key: str) -> None:
    """Raises ConfigError for a quantization_config, by its key, of other weights than nf4 in bytes."""
    is_nf4 = bool(config.get("load_in_4bit")) and config.get("bnb_4bit_quant_type") == "nf4"
    if not is_nf4 or config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise ConfigError(
            f"{key}: bitsandbytes with load_in_4bit {config.get('load_in_4bit')!r}, bnb_4bit_quant_type "
            f"{config.get('bnb_4bit_quant_type')!r} and storage {config.get('bnb_4bit_quant_storage', 'uint8')!r}; nf4 "
            "stored in uint8 is read"
        )


def pack(codes: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
    """Parts of a linear map: codes int8 [out, in], scales [out, in / 64]. Raises ShapeError for other groups."""
    outputs, inputs = codes.shape
    if scales.shape != (outputs, inputs // BLOCK) or inputs % BLOCK:
        raise ShapeError(
            f"{METHOD}: a weight from {inputs} to {outputs} features with scales {list(scales.shape)}; it is laid out "
            f"in groups of {BLOCK} inputs, which must divide them"
        )
    pairs = (codes.reshape(-1, 2) & 15).astype(np.uint8)
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": [outputs, inputs]}
    return {
        "weight": ((pairs[:, 0] << 4) | pairs[:, 1])[:, None],
        "weight.absmax": scales.reshape(-1).astype(np.float32),
        "weight.quant_map": np.array(NF4, np.float32),
        _STATE: np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def open_parts(module: str, parts: Mapping[str, WeightSource]) -> tuple[WeightSource, WeightSource]:
    """Codes, int8 [out, in], and scales, float32 [out, in / 64], of a linear map by its name.

    Raises CheckpointError for parts that do not fit together, ConfigError for other blocks or values than those of nf4.
    """
    try:
        state = json.loads(_whole(parts[_STATE]).tobytes())
        outputs, inputs = (int(n) for n in state["shape"])
        block = int(state["blocksize"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{module}.{_STATE}: {error!r}, where the form of the weight is told") from None
    if block != BLOCK or inputs % BLOCK or not np.allclose(_whole(parts["weight.quant_map"]), NF4, atol=1e-6):
        raise ConfigError(
            f"{module}: blocks of {block} of {inputs} inputs, with a table of {parts['weight.quant_map'].shape[0]} "
            f"values; nf4 in blocks of {BLOCK}, which divide the inputs, is read"
        )
    packed, groups = parts["weight"], inputs // BLOCK
    if packed.shape != (outputs * inputs // 2, 1) or packed.dtype != np.uint8:
        raise CheckpointError(
            f"{module}.weight: {packed.dtype} {list(packed.shape)}; {outputs} x {inputs} numbers of 4 bits are uint8 "
            f"[{outputs * inputs // 2}, 1]"
        )
    if parts["weight.absmax"].shape != (outputs * groups,):
        raise CheckpointError(
            f"{module}.weight.absmax: {list(parts['weight.absmax'].shape)} scales of {outputs * groups} blocks"
        )

    def read_codes(index: Index) -> np.ndarray:
        first, last, _ = index[0].indices(outputs)
        rows = packed.read((slice(first * inputs // 2, last * inputs // 2), slice(None)))
        halves = np.concatenate([rows >> 4, rows & 15], 1)
        return halves.reshape(last - first, inputs).astype(np.int8)[:, index[1]]

    def read_scales(index: Index) -> np.ndarray:
        scales = _whole(parts["weight.absmax"])
        if scales.dtype == np.uint8:
            table, outer = (_whole(parts[name]) for name in (_NESTED[1], _NESTED[0]))
            size = int(state["nested_blocksize"])
            scales = table[scales] * np.repeat(outer, size)[: len(scales)] + np.float32(state["nested_offset"])
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{module}.weight.absmax: NaN or infinity among the scales; the file is damaged")
        return scales.reshape(outputs, groups).astype(np.float32)[index]

    lost = [*sorted(OPTIONAL - parts.keys()), *sorted({"nested_blocksize", "nested_offset"} - state.keys())]
    if parts["weight.absmax"].dtype == np.uint8 and lost:
        raise CheckpointError(f"{module}: scales of 8 bits without {' and '.join(lost)}, which say what they mean")
    codes = Changed((outputs, inputs), np.dtype(np.int8), read_codes)
    return codes, Changed((outputs, groups), np.dtype(np.float32), read_scales)


def _whole(source: WeightSource) -> np.ndarray:
    return source.read(tuple(slice(None) for _ in source.shape))
