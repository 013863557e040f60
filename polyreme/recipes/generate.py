"""Writing text with a run's newest checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from polyreme.errors import CheckpointError
from polyreme.recipes.sampling import TOKENIZER, sample_text
from polyreme.recipes.trained import checkpoints_of, load_decoder


def run(folder: Path, *, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Print prompt and its continuation. Raises CheckpointError if the folder holds no valid run with a tokenizer."""
    checkpoints_of(folder)
    model, _ = load_decoder(folder)
    tokenizer = _tokenizer(folder)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    print(sample_text(model, tokenizer, prompt, **settings))  # noqa: T201  (the command's output)


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no {TOKENIZER} in it, so its tokens cannot be turned into text; the run trained on synthetic "
            "tokens, or the file was moved"
        )
    return Tokenizer.from_file(str(path))
