"""Inputs of linear maps made smaller, and the weights larger by as much, by what comes before: nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from polyreme.compression.calibration import InputStatistics
from polyreme.compression.rounding import absmax_scales, round_nearest
from polyreme.nn import Layer, Linear


class ScaledInput(NamedTuple):
    """Linear maps of one input, by their names in a model, and the layer whose outputs are divided in its place: a norm
    or a linear map."""

    producer: Layer
    maps: dict[str, Linear]


def scaled_inputs(name: str, block: Any) -> Iterator[ScaledInput]:
    """Of a block, as far as its parts are those of a LLaMA or a GPT: norms before attention and feed-forward, values
    before attention's output where each head has its own, and a gated feed-forward's `up` before `down`."""
    attention: Any = getattr(block, "attention", None)
    ffn: Any = getattr(block, "ffn", None)

    def maps(owner: Any, part: str, names: tuple[str, ...]) -> dict[str, Linear]:
        layers = {f"{name}.{part}.{n}": getattr(owner, n, None) for n in names}
        return {n: layer for n, layer in layers.items() if type(layer) is Linear}

    for norm, owner, part, names in (
        ("attention_norm", attention, "attention", ("q", "k", "v", "qkv")),
        ("ffn_norm", ffn, "ffn", ("gate", "up")),
    ):
        if owner is None:
            continue
        inside = maps(owner, part, names)
        # a part that takes the norm's output otherwise, as a router, is no map of these
        is_whole = {id(layer) for layer in inside.values()} >= {
            id(layer) for n, layer in owner._sub_layers.items() if n in ("q", "k", "v", "qkv", "gate", "up", "router")
        }
        if inside and is_whole and getattr(block, norm) is not None:
            yield ScaledInput(getattr(block, norm), inside)
    value = getattr(attention, "v", None)
    if type(value) is Linear and attention.num_heads == getattr(attention, "num_kv_heads", 0):
        yield ScaledInput(value, maps(attention, "attention", ("out",)))
    up = getattr(ffn, "up", None)
    if type(up) is Linear and type(getattr(ffn, "gate", None)) is Linear:
        yield ScaledInput(up, maps(ffn, "ffn", ("down",)))


def apply_factors(scaled: ScaledInput, factors: np.ndarray, statistics: dict[str, InputStatistics]) -> None:
    """Divide the input by factors [in], and multiply the rows of the weights."""
    producer = scaled.producer
    for tensor, offset in ((producer.weight, getattr(producer, "offset", 0.0)), (getattr(producer, "bias", None), 0.0)):
        if tensor is not None:
            values = tensor.numpy()
            tensor.set_value(((values + offset) / factors - offset).astype(values.dtype))
    for name, layer in scaled.maps.items():
        weight = layer.weight.numpy()
        layer.weight.set_value((weight * factors[:, None]).astype(weight.dtype))
        statistics[name].divide(factors)


def smooth_factors(scaled: ScaledInput, statistics: dict[str, InputStatistics], strength: float = 0.5) -> np.ndarray:
    """max |x|^strength / max |w|^(1 - strength) of each input. Source: arXiv:2211.10438, equation 4."""
    (first, *_) = scaled.maps
    x = np.maximum(statistics[first].absmax, 1e-5)
    w = np.maximum(np.max([np.abs(layer.weight.numpy()).max(1) for layer in scaled.maps.values()], 0), 1e-5)
    return np.maximum(x**strength / w ** (1 - strength), 1e-5).astype(np.float32)


def awq_factors(
    scaled: ScaledInput, statistics: dict[str, InputStatistics], bits: int, group_size: int, steps: int = 20
) -> np.ndarray:
    """mean |x|^a of each input, over the root of the product of the largest and the smallest, with that a of 0 to 1
    under which outputs of weights rounded to the nearest err least. Source: arXiv:2306.00978, equations 4 and 5."""
    (first, *_) = scaled.maps
    mean = np.maximum(statistics[first].absmean, 1e-6)

    def error(factors: np.ndarray) -> float:
        total = 0.0
        for name, layer in scaled.maps.items():
            weight = layer.weight.numpy().astype(np.float32)
            larger = weight * factors[:, None]
            rounded = round_nearest(larger, absmax_scales(larger, bits, group_size), bits).values()
            total += statistics[name].squared_error(rounded / factors[:, None] - weight)
        return total

    return min((_centred(mean**power) for power in np.linspace(0, 1, steps, endpoint=False)), key=error)


def _centred(factors: np.ndarray) -> np.ndarray:
    return (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)


Factors = Callable[[ScaledInput, dict[str, InputStatistics]], np.ndarray]
"""What the input of some maps is divided by."""
