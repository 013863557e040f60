"""The model of a run's newest checkpoint, and any decoder on disk with its tokenizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme.distributed.placement import apply_plan
from polyreme.errors import CheckpointError, ConfigError
from polyreme.generation.images import ImageProcessor, ImagePrompts
from polyreme.generation.speculation import Speculation
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.mesh import Plan
from polyreme.models.auto import AutoModelForCausalLM, AutoModelForImageTextToText
from polyreme.models.files.adapters import apply_adapter, check_base, merge_adapters, open_adapter, place_adapters
from polyreme.models.files.gguf_file import is_gguf
from polyreme.models.files.low_bit_folder import low_bit_layers, parts_of, shape_of
from polyreme.models.files.packages import resolve
from polyreme.models.parts.decoder import Decoder
from polyreme.models.pretrained import open_published
from polyreme.nn.layers.lora_rows import AdapterRows
from polyreme.recipes.corpus import TOKENIZER
from polyreme.recipes.weights.base import base_digest, check_reads_tokens, is_run, load_tokenizer, load_trained
from polyreme.recipes.weights.published import floating_dtype

ONE_DEVICE = "one device"
"""The plan of a model that load_writer gives, as results name it."""


def dtype_of(model: Any) -> str:
    """The dtype that most of a model's values are stored in; of quantized weights int8, int4, nf4 or fp8."""
    sizes: Counter[str] = Counter()
    quantized = {id(getattr(layer, parts_of(layer)[0])): layer for layer in low_bit_layers(model).values()}
    for parameter in model.parameters():
        layer = quantized.get(id(parameter))
        if layer is None:
            sizes[parameter.dtype.name] += parameter.size
        else:  # a byte of codes may hold two
            sizes[layer.weight_dtype] += math.prod(shape_of(layer))
    return sizes.most_common(1)[0][0]


def load_writer(
    path: Path, dtype: str | None = None, adapter: Path | None = None, plan: Plan | None = None
) -> tuple[Any, TextTokenizer]:
    """A decoder and its tokenizer: of a run's folder, of a folder of published weights, or of a GGUF file.

    dtype: of published weights, float32 if None. adapter: the folder of one that was trained on these weights, which is
    merged into them, as those of a fine-tuning run are. plan: how the model lies on devices, on one if None. Raises
    CheckpointError for what is none of them, for a run or folder without a tokenizer and for an adapter of other
    weights, ConfigError for a model that writes no tokens, for a dtype that is not floating and for that of a run.
    """
    if dtype != "auto":
        floating_dtype(dtype)
    model, tokenizer = _load_writer(path, dtype, plan)
    merge_adapters(model)
    if adapter is not None:
        opened = open_adapter(adapter)
        check_base(opened, base_digest(str(path)), path)
        apply_adapter(model, opened)
        if (adapter / TOKENIZER).is_file():  # with the template that it was trained by
            tokenizer = load_tokenizer(adapter)
        merge_adapters(model)
    return model, tokenizer


def reads_images(path: Path) -> bool:
    """Whether a path, as of load_writer, is that of published weights which read images. Raises as open_published."""
    if is_run(path) or not (is_gguf(path) or (path / "config.json").is_file()):
        return False
    return open_published(path, needs_weights=False).family.task == "image_text_to_text"


def load_image_writer(path: Path, dtype: str | None = None) -> tuple[ImagePrompts, TextTokenizer]:
    """A model that reads images in prompts, whose decoder is its `language`, with its image processor, and its
    tokenizer, of a folder of published weights; dtype: float32 if None. Raises as load_writer, CheckpointError for a
    folder without preprocessor_config.json."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
    return ImagePrompts(model, ImageProcessor.from_pretrained(path)), load_tokenizer(path)


def _load_writer(path: Path, dtype: str | None, plan: Plan | None) -> tuple[Any, TextTokenizer]:
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
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, plan=plan), load_tokenizer(path)
    if dtype is not None:
        raise ConfigError(f"{path}: a run is read as it was trained, without --dtype; polyreme convert rounds weights")
    check_reads_tokens(path)
    tokenizer = load_tokenizer(path)
    model, _ = load_trained(path)
    if plan is not None:
        apply_plan(plan, model)
    return model, tokenizer


def load_adapters(
    path: Path, model: Any, tokenizer: TextTokenizer, folders: Mapping[str, Path]
) -> tuple[AdapterRows, dict[str, TextTokenizer]]:
    """Put the adapters of folders, by name, beside the maps of a model that load_writer read -> which of them a row
    takes, and the tokenizer of each: its own where the folder has one, with the template that it was trained by.

    Raises CheckpointError for an adapter of other weights, ConfigError for one whose tokens are others.
    """
    opened = {name: open_adapter(folder) for name, folder in folders.items()}
    if any(adapter.digest is not None for adapter in opened.values()):
        digest = base_digest(str(path))
        for adapter in opened.values():
            check_base(adapter, digest, path)
    tokenizers = {
        name: load_tokenizer(folder) if (folder / TOKENIZER).is_file() else tokenizer
        for name, folder in folders.items()
    }
    for name, theirs in tokenizers.items():
        theirs.check_same_tokens(tokenizer, folders[name])
    return place_adapters(model, opened), tokenizers


def drafting(
    speculative: str | None, num_draft_tokens: int, tokenizer: TextTokenizer, dtype: str | None = None
) -> Speculation | None:
    """The method of drafting tokens for texts of a tokenizer: none if None, "ngram", or the decoder at a path as of
    load_writer. Raises ConfigError for a decoder with other tokens."""
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
    check_reads_tokens(folder)
    return load_trained(folder)
