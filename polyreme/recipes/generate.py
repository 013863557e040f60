"""Writing text with a run's newest checkpoint.

Floor: 7.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.errors import CheckpointError
from polyreme.recipes.build import build_model
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.sampling import TOKENIZER, sample_text


def run(folder: Path, *, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Print prompt and its continuation. Raises CheckpointError if the folder holds no valid run with a tokenizer."""
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder}: no checkpoints/ in it; give the output folder of a run, such as runs/gpt_kjv")
    tokenizer, model = _tokenizer(folder), _model(folder)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    print(sample_text(model, tokenizer, prompt, **settings))  # noqa: T201  (the command's output)


def _model(folder: Path) -> Any:
    """The model of the newest valid checkpoint, on one device, in float32."""
    with CheckpointStore(folder / "checkpoints", read_only=True) as store:
        arrays, meta = store.restore()
    saved = {k.removeprefix("model."): v for k, v in meta["config"].items() if k.startswith("model.")}
    model = build_model(ModelConfig(**saved))
    # a tied parameter has several names and was saved under the first
    tensors = {id(t): (f"model/{n}", t) for n, t in reversed(model.state_dict().items())}
    for name, tensor in tensors.values():
        if name not in arrays:
            raise CheckpointError(f"{folder}: the checkpoint of step {meta['step']} has no {name}")
        tensor.set_value(np.asarray(arrays[name], np.float32))
    return model


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no {TOKENIZER} in it, so its tokens cannot be turned into text; the run trained on synthetic "
            "tokens, or the file was moved"
        )
    return Tokenizer.from_file(str(path))
