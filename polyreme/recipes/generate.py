"""Writing text with a run's newest checkpoint.

Floor: 7.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.errors import CheckpointError
from polyreme.recipes.build import build_model
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.sampling import sample_text


def run(folder: Path, *, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Print prompt and its continuation. Raises CheckpointError if the folder holds no valid run."""
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder}: no checkpoints/ in it; give the output folder of a run, such as runs/gpt_kjv")
    with CheckpointStore(folder / "checkpoints", read_only=True) as store:
        arrays, meta = store.restore()
    saved: dict[str, Any] = meta["config"]
    model = build_model(ModelConfig(**{k.removeprefix("model."): v for k, v in saved.items() if k.startswith("model.")}))
    tensors = {id(t): (f"model/{n}", t) for n, t in reversed(model.state_dict().items())}
    for name, tensor in tensors.values():
        if name not in arrays:
            raise CheckpointError(f"{folder}: the checkpoint of step {meta['step']} has no {name}")
        tensor.set_value(arrays[name])
    tokenizer = _tokenizer(folder, meta)
    print(  # noqa: T201  (the command's output)
        sample_text(
            model, tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
        )
    )


def _tokenizer(folder: Path, meta: dict[str, Any]) -> Tokenizer:
    found = sorted((folder / "data").glob("*/tokenizer.json"))
    wanted = [p for p in found if meta["host"]["data_digest"] in p.parent.name] or found
    if not wanted:
        raise CheckpointError(f"{folder}: no tokenizer under data/; the run trained on synthetic tokens or its data was moved")
    return Tokenizer.from_file(str(wanted[0]))
