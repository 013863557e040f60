"""Weights of experts in MXFP4, as gpt-oss is published: 4 bits a number, and a power of 2 for every 32 of them.

`NAME_blocks` are bytes [expert, out, groups, 16], two numbers in each, the first in the low half; `NAME_scales` are
bytes [expert, out, groups], exponents with an offset of 127. Together they are a map [expert, in, out].
Source: Open Compute Project, Microscaling formats 1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyreme.errors import CheckpointError
from polyreme.models.files.published import Changed, Index, WeightSource

METHOD = "mxfp4"
GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"
_OFFSET = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)


def is_mxfp4(config: Any) -> bool:
    """Whether a quantization_config says that experts are stored so."""
    return isinstance(config, Mapping) and config.get("quant_method") == METHOD


def decoded_weights(weights: Mapping[str, WeightSource]) -> dict[str, WeightSource]:
    """The same with each pair of NAME_blocks and NAME_scales as NAME, float32, which is decoded when it is read.

    Raises CheckpointError for one without the other, and for shapes and dtypes that are not a pair's.
    """
    paired = {name.removesuffix(ending) for name in weights for ending in (_BLOCKS, _SCALES) if name.endswith(ending)}
    plain = {
        name: source
        for name, source in weights.items()
        if name.removesuffix(_BLOCKS) not in paired and name.removesuffix(_SCALES) not in paired
    }
    return plain | {name: _pair(name, weights) for name in sorted(paired)}


def _pair(name: str, weights: Mapping[str, WeightSource]) -> WeightSource:
    lost = [f"{name}{ending}" for ending in (_BLOCKS, _SCALES) if f"{name}{ending}" not in weights]
    if lost:
        raise CheckpointError(f"{METHOD}: {name} is stored in two parts, and {lost[0]} is missing")
    blocks, scales = weights[f"{name}{_BLOCKS}"], weights[f"{name}{_SCALES}"]
    fits = len(blocks.shape) == 4 and blocks.shape[:3] == scales.shape and blocks.shape[3] == GROUP // 2
    if not fits or blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise CheckpointError(
            f"{METHOD}: {name}_blocks are {blocks.dtype} {list(blocks.shape)} and {name}_scales {scales.dtype} "
            f"{list(scales.shape)}; they are bytes [experts, out, groups, {GROUP // 2}] and [experts, out, groups]"
        )
    experts, outputs, groups, _ = blocks.shape
    inputs = groups * GROUP

    def read(index: Index) -> np.ndarray:
        taken, lines = range(inputs)[index[1]], range(outputs)[index[2]]
        first, last = taken.start // GROUP, -(-taken.stop // GROUP)
        part = (index[0], slice(lines.start, lines.stop, lines.step), slice(first, last))
        codes, exponents = blocks.read((*part, slice(None))), scales.read(part).astype(np.int32) - _OFFSET
        numbers = _VALUES[np.stack([codes & 15, codes >> 4], -1)].reshape(*codes.shape[:3], GROUP)
        wide = np.ldexp(numbers, exponents[..., None]).reshape(*codes.shape[:2], -1)
        return wide[..., taken.start - first * GROUP : taken.stop - first * GROUP].swapaxes(1, 2)

    return Changed((experts, inputs, outputs), np.dtype(np.float32), read)
