"""A decoder with narrower feed-forwards: whole channels are gone, so that any program is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polyreme.compression.calibration import collect, maps_of, walk_blocks
from polyreme.errors import ConfigError

_MULTIPLE = 8
"""Of channels that stay: products are made of such parts."""


def narrowed(
    model: Any, share: float, rows: Sequence[np.ndarray], say: Callable[[str], None] = lambda text: None
) -> Any:
    """A model of the family whose feed-forwards have that share of their channels less: of each block those whose part
    of its output, |x_c| |down_c|, is smallest.

    rows: token ids [n, seq] each, which channels are weighed on. Raises ConfigError for a decoder whose blocks have no
    feed-forward of `up` and `down`, and for a share that leaves less than 8 channels.
    """
    config = model.config
    if any(not hasattr(getattr(block, "ffn", None), "down") for block in model.blocks):
        raise ConfigError(f"structured: blocks of a {model.family.name} have no feed-forward of `up` and `down`")
    left = int(config.ffn_size * (1 - share)) // _MULTIPLE * _MULTIPLE
    if left < _MULTIPLE:
        raise ConfigError(f"structured: {share:.2f} of {config.ffn_size} channels leaves {left}; give less")
    channels: list[np.ndarray] = []

    def weigh(name: str, block: Any, run: Callable[[], None]) -> None:
        down = f"{name}.ffn.down"
        statistics = collect(block, run, {down: maps_of(model, name)[down]})[down]
        importance = statistics.norms * np.linalg.norm(block.ffn.down.weight.numpy(), axis=1)
        channels.append(np.sort(np.argsort(-importance, kind="stable")[:left]))
        lost = 1 - importance[channels[-1]].sum() / importance.sum()
        say(f"{name}: {config.ffn_size - left} of {config.ffn_size} channels gone, {lost:.1%} of their weight")

    model.eval()
    walk_blocks(model, rows, weigh)
    smaller = type(model)(replace(config, ffn_size=left))
    smaller.family = model.family
    tensors = dict(model.state_dict())
    for name, tensor in smaller.state_dict().items():
        value = tensors[name].numpy()
        parts = name.split(".")
        if "ffn" in parts:
            chosen = channels[int(parts[1])]
            if "down" in parts:
                value = value[chosen] if parts[-1] == "weight" else value
            else:
                value = value[..., chosen]
        tensor.set_value(value)
    smaller.eval()
    return smaller
