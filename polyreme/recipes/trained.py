"""The model of a run's newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.errors import CheckpointError, ConfigError
from polyreme.models.decoder import Decoder
from polyreme.recipes.build import build_model
from polyreme.recipes.config import ModelConfig


def checkpoints_of(folder: Path) -> Path:
    """Where a run keeps its checkpoints. Raises CheckpointError for a folder that is no run's."""
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir():
        raise CheckpointError(f"{folder}: no checkpoints/ in it; give the output folder of a run, such as runs/gpt_kjv")
    return checkpoints


def load_decoder(folder: Path) -> tuple[Decoder, dict[str, Any]]:
    """load_trained, for what reads and writes tokens. Raises ConfigError for a model of a family that does not."""
    model, meta = load_trained(folder)
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"{folder}: {model.family.name} takes {model.family.samples}, not tokens; give a decoder's run"
        )
    return model, meta


def load_trained(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of the newest valid checkpoint, on one device, in float32; and what was saved beside it (step, config).

    Raises CheckpointError if the folder is not a run's, or its checkpoint not of this model.
    """
    with CheckpointStore(checkpoints_of(folder), read_only=True) as store:
        arrays, meta = store.restore()
    saved = {k.removeprefix("model."): v for k, v in meta["config"].items() if k.startswith("model.")}
    model = build_model(ModelConfig(**saved))
    # a tied parameter has several names and was saved under the first
    tensors = {id(t): (f"model/{n}", t) for n, t in reversed(model.state_dict().items())}
    for name, tensor in tensors.values():
        if name not in arrays:
            raise CheckpointError(f"{folder}: the checkpoint of step {meta['step']} has no {name}")
        tensor.set_value(np.asarray(arrays[name], np.float32))
    return model, meta
