"""Calibration: statistics of the inputs of a decoder's linear maps, from running its blocks one after the other on rows
of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.kernels.experts import ACTIVATIONS, gated
from polyreme.models.files.low_bit_folder import linear_maps
from polyreme.models.parts.cache import KVCache
from polyreme.nn import Layer, Linear, MoE
from polyreme.nn import functional as F


class InputStatistics:
    """Statistics of the rows x [n, in] that a linear map takes in.

    gram: x^T x, float64 [in, in]. absmax, absmean: of each input, float32 [in]. count: n.
    """

    gram: np.ndarray
    absmax: np.ndarray

    count: int

    def __init__(self, inputs: int) -> None:
        self.gram = np.zeros((inputs, inputs))
        self.absmax = np.zeros(inputs, np.float32)
        self._abssum = np.zeros(inputs)
        self.count = 0

    def add(self, x: np.ndarray) -> None:
        """Take in more rows."""
        rows = x.reshape(-1, x.shape[-1]).astype(np.float32)
        self.gram += rows.T @ rows
        sizes = np.abs(rows)
        self.absmax = np.maximum(self.absmax, sizes.max(0))
        self._abssum += sizes.sum(0)
        self.count += len(rows)

    @property
    def absmean(self) -> np.ndarray:
        """The mean |x| of each input, float32 [in]."""
        return (self._abssum / max(self.count, 1)).astype(np.float32)

    @property
    def norms(self) -> np.ndarray:
        """The Euclidean norm of each input, float64 [in]."""
        return np.sqrt(np.diag(self.gram))

    def divide(self, factors: np.ndarray) -> None:
        """Make them those of x / factors."""
        self.gram /= np.outer(factors, factors)
        self.absmax = self.absmax / factors
        self._abssum = self._abssum / factors

    def squared_error(self, change: np.ndarray) -> float:
        """|x change|^2 of a change [in, out] of the weight."""
        change = change.astype(np.float32)  # half the time of float64; it is an error that is told
        return float(np.vdot(change, self.gram.astype(np.float32) @ change))

    def relative_error(self, change: np.ndarray, weight: np.ndarray) -> float:
        """|x change| / |x weight|."""
        return float(np.sqrt(max(self.squared_error(change), 0) / max(self.squared_error(weight), 1e-30)))


class ExpertInputs:
    """Statistics of the inputs of a mixture's experts while it is watched: the rows that each expert works on.

    statistics: by the names of the maps (nn.MoE.matrices), of each expert.
    """

    statistics: dict[str, list[InputStatistics]]

    def __init__(self, moe: MoE) -> None:
        self.moe = moe
        self._weights = {name: matrix.numpy().astype(np.float32) for name, matrix in moe.matrices().items()}
        self._biases = [None if bias is None else bias.numpy() for bias in (moe.up_bias, moe.gate_bias)]
        self.statistics = {
            name: [InputStatistics(matrix.shape[1]) for _ in matrix] for name, matrix in self._weights.items()
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block what the mixture mixes is taken in."""
        mix = self.moe.mix

        def watched(x: Any, choices: Any, gates: Any) -> Any:
            self._add(x.astype("float32").numpy(), choices.numpy())
            return mix(x, choices, gates)

        self.moe.mix = watched
        try:
            yield
        finally:
            del self.moe.mix

    def _add(self, x: np.ndarray, choices: np.ndarray) -> None:
        rows, chosen = x.reshape(-1, x.shape[-1]), choices.reshape(-1, choices.shape[-1])
        activation, (up_bias, gate_bias) = self.moe.activation, self._biases
        for expert in np.unique(chosen[chosen >= 0]):
            mine = rows[(chosen == expert).any(-1)]
            up = mine @ self._weights["up"][expert] + (0 if up_bias is None else up_bias[expert])
            if "gate" in self._weights:
                gate = mine @ self._weights["gate"][expert] + (0 if gate_bias is None else gate_bias[expert])
                hidden = gated(activation, gate, up)
            else:
                hidden = ACTIVATIONS[activation](up)
            for name, taken in {"gate": mine, "up": mine, "down": np.asarray(hidden)}.items():
                if name in self.statistics:
                    self.statistics[name][expert].add(taken)


def collect(
    block: Layer, run: Callable[[], None], maps: Mapping[str, Linear], experts: Sequence[ExpertInputs] = ()
) -> dict[str, InputStatistics]:
    """The statistics of each of a block's linear maps while run() runs the block; what experts take in goes to them."""
    statistics = {name: InputStatistics(layer.in_features) for name, layer in maps.items()}
    hooks = []
    for name, layer in maps.items():

        def take(layer: Layer, inputs: tuple, name: str = name) -> None:
            (x, *_) = inputs
            statistics[name].add(x.astype("float32").numpy())

        hooks.append(layer.register_forward_pre_hook(take))
    try:
        with ExitStack() as stack:
            for inputs in experts:
                stack.enter_context(inputs.watching())
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return statistics


def walk_blocks(
    model: Any, rows: Sequence[np.ndarray], change: Callable[[str, Layer, Callable[[], None]], None]
) -> None:
    """Call change(name, block, run) of each block, in order; run() runs the block on what comes of all rows.

    rows: token ids [n, seq] each. What the next block takes comes of the block as it was changed, so that memory holds
    the activations between two blocks alone.
    """
    with no_grad():
        streams = [model.embed(to_tensor(ids)) for ids in rows]
        for number, block in enumerate(model.blocks):
            before = streams

            def run(block: Layer = block, before: list[Any] = before) -> None:
                for stream in before:
                    model.run_block(block, stream)

            change(f"blocks.{number}", block, run)
            streams = [model.run_block(block, stream) for stream in before]


def maps_of(model: Any, name: str) -> dict[str, Linear]:
    """The linear maps of the block of this name in a model that are stored in full, by name in the model."""
    prefix = f"{name}."
    return {n: layer for n, layer in linear_maps(model).items() if n.startswith(prefix) and type(layer) is Linear}


def nats_per_token(model: Any, rows: Sequence[np.ndarray]) -> float:
    """The mean cross-entropy of each token but the first after those before it in its row. rows: ids [n, seq] each.

    Keys and values are read out of a cache where the model keeps those in a dtype of their own.
    """
    total = count = 0.0
    with no_grad():
        for ids in rows:
            logits = _logits(model, to_tensor(ids[:, :-1])).astype("float32")
            loss = F.cross_entropy(logits, to_tensor(ids[:, 1:].astype(np.int64)), reduction="sum")
            total += float(loss)
            count += ids[:, 1:].size
    return total / count


def _logits(model: Any, ids: Any) -> Any:
    if model.kv_cache_dtype is None:
        return model(ids)
    cache = KVCache(model, *ids.shape)
    cache.is_empty = False  # so that what was put in is read
    return model.project(model.extend(ids, cache))
