"""The model of a run's newest checkpoint, and any decoder on disk with its tokenizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.errors import CheckpointError, ConfigError
from polyreme.generation.speculation import Speculation
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer
from polyreme.models.auto import AutoModelForCausalLM
from polyreme.models.decoder import Decoder
from polyreme.models.gguf_file import is_gguf
from polyreme.models.tokenizer import END_OF_TEXT
from polyreme.recipes.build import build_model
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.published import resolve
from polyreme.recipes.sampling import TOKENIZER

ONE_DEVICE = "one device"
"""The plan of a model that load_writer gives, as results name it."""


def dtype_of(model: Any) -> str:
    """The dtype of most of a model's values."""
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype.name] += parameter.size
    return sizes.most_common(1)[0][0]


def checkpoints_of(folder: Path) -> Path:
    """Where a run keeps its checkpoints. Raises CheckpointError for a folder that is no run's."""
    checkpoints = folder / "checkpoints"
    if not is_run(folder):
        raise CheckpointError(f"{folder}: no checkpoints/ in it; give the output folder of a run, such as runs/gpt_kjv")
    return checkpoints


def is_run(path: Path) -> bool:
    """Whether a path is the output folder of a run."""
    return (path / "checkpoints").is_dir()


def load_writer(path: Path, dtype: str | None = None) -> tuple[Any, TextTokenizer]:
    """A decoder and its tokenizer: of a run's folder, of a folder of published weights, or of a GGUF file.

    dtype: of published weights, float32 if None. Raises CheckpointError for what is none of them and for a run or
    folder without a tokenizer, ConfigError for a model that writes no tokens and for the dtype of a run.
    """
    if not is_run(path):
        if path.is_dir() and not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path}: neither checkpoints/ nor config.json in it; give the output folder of a run, such as "
                "runs/gpt_kjv, a folder of published weights, or a GGUF file"
            )
        if not path.is_dir() and not is_gguf(path):
            raise CheckpointError(
                f"{path}: neither a folder nor a GGUF file; give a run, published weights or a GGUF file"
            )
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype), load_tokenizer(path)
    if dtype is not None:
        raise ConfigError(f"{path}: a run is read as it was trained, without --dtype; polyreme convert rounds weights")
    tokenizer = load_tokenizer(path)
    model, _ = load_decoder(path)
    return model, tokenizer


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a run's folder, of a folder of published weights, or of a GGUF file.

    Raises CheckpointError for a run or folder without one.
    """
    if not is_run(path) or (path / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(path)
    file = path / TOKENIZER
    if not file.is_file():
        raise CheckpointError(
            f"{path}: no {TOKENIZER} in it, so its tokens have no text; the run trained on synthetic tokens, or the "
            "file was moved"
        )
    tokenizer = Tokenizer.from_file(str(file))
    end = tokenizer.token_to_id(END_OF_TEXT)
    return TextTokenizer(tokenizer, [] if end is None else [end])


def drafting(
    speculative: str | None, num_draft_tokens: int, tokenizer: TextTokenizer, dtype: str | None = None
) -> Speculation | None:
    """How tokens are drafted, for texts of a tokenizer: not if None, by "ngram", or by the decoder at a path as of
    load_writer. Raises ConfigError for one whose tokens are others."""
    if speculative is None:
        return None
    if speculative == "ngram":
        return Speculation("ngram", num_draft_tokens)
    path = resolve(speculative)
    model, theirs = load_writer(path, None if is_run(path) else dtype)
    theirs.check_same_tokens(tokenizer, speculative)
    return Speculation(model, num_draft_tokens)


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
