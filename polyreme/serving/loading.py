"""A model from disk, ready to be served: published weights or a run, with its tokenizer, in an engine that is warm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from polyreme.errors import ConfigError, did_you_mean
from polyreme.generation import SamplingParams, TextEngine
from polyreme.generation.embedding import TextEmbedder, TextScorer
from polyreme.generation.grammar import TextGrammars
from polyreme.generation.images import ImagePrompts
from polyreme.generation.sampling import settings_of
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.generation.transcriber import Transcriber
from polyreme.mesh import Plan
from polyreme.models.encoder_decoders.whisper import SAMPLE_RATE
from polyreme.models.encoders.bert import BertConfig
from polyreme.models.encoders.modernbert import ModernBertConfig
from polyreme.models.families import FAMILIES
from polyreme.models.parts.cache import check_cache_dtype
from polyreme.models.parts.decoder import Decoder
from polyreme.models.pretrained import open_published, read_family_config
from polyreme.recipes.weights.base import is_run
from polyreme.recipes.weights.trained import (
    ONE_DEVICE,
    drafting,
    dtype_of,
    load_adapters,
    load_image_writer,
    load_writer,
)
from polyreme.serving.service import AnyModel, ServedModel

DTYPES = ("float32", "bfloat16", "float16", "auto")
"""Of parameters; auto is that of the files."""
GENERATION_CONFIGS = ("auto", "vllm")
"""Where settings come from that requests leave out."""


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the engine, as of TextEngine; dtype of published weights: one of DTYPES, float32 if None. speculative,
    num_draft_tokens, adapter: as of drafting and load_writer of recipes.weights.trained. adapters: folders of others by
    name, which stand beside the weights and are written by in the same steps. plan: "mp=N" for weights, heads and their
    cache split over N devices, or None for one. kv_cache_dtype: of keys and values, one of CACHE_DTYPES.
    generation_config: "auto" for what the weights' generation_config.json says of drawing, where requests do not,
    "vllm" for OpenAI's own. chat_template: a file with one in place of the tokenizer's.

    Raises ConfigError for another dtype, and for what does not go together.
    """

    dtype: str | None = None
    max_num_seqs: int = 8
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    prefill_chunk: int = 64
    enable_prefix_caching: bool | None = None
    speculative: str | None = None
    num_draft_tokens: int = 5
    adapter: Path | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    plan: str | None = None
    kv_cache_dtype: str | None = None
    generation_config: str = "auto"
    chat_template: Path | None = None

    def __post_init__(self) -> None:
        check_cache_dtype(self.kv_cache_dtype)
        if self.generation_config not in GENERATION_CONFIGS:
            raise ConfigError(
                f"--generation-config {self.generation_config}: unknown"
                f"{did_you_mean(self.generation_config, GENERATION_CONFIGS)}"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: not one that is served in{did_you_mean(self.dtype, DTYPES)}")
        folders = [*self.adapters.values()] if self.adapter is None else [self.adapter, *self.adapters.values()]
        if self.degree > 1 and folders:
            raise ConfigError(f"--adapter {folders[0]}: is served on one device; merge it, or leave out --plan")
        if self.adapter is not None and self.adapters:
            raise ConfigError(
                f"--adapter {self.adapter}: without a name it becomes one with the weights, which others were not "
                "trained on; give each its name, as NAME=FOLDER"
            )
        if self.degree > 1 and self.speculative not in (None, "ngram"):
            raise ConfigError(f"--speculative {self.speculative}: under --plan drafts come from the text; give ngram")

    @property
    def degree(self) -> int:
        """Devices of the plan."""
        axis, _, number = (self.plan or "mp=1").partition("=")
        if axis != "mp" or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--plan {self.plan}: a model is served split by tensors alone; give mp=N")
        return int(number)


def load_served(path: Path, options: EngineOptions, say: Callable[[str], None] = lambda text: None) -> AnyModel:
    """Load the model at a path, a folder of published weights, a GGUF file or the output folder of a run, to be served:
    one that writes text, of images too, a Whisper, which hears, or a BERT or one of its kin, which scores pairs of
    texts where it is a classifier with one label and else makes vectors.

    Programs that write are compiled for one size of prompt; those for other sizes and ways of choosing are the model's
    chores. Raises as reading weights does,
    CheckpointError for a model without a tokenizer.
    """
    encoders = (BertConfig, ModernBertConfig)
    opened = None if is_run(path) else open_published(path, needs_weights=False)
    if opened is not None and issubclass(opened.family.config.load(), encoders):
        _refuse_of_decoders(path, options, "an encoder")
        is_scorer = opened.family.task == "classification" and read_family_config(opened).num_labels == 1
        kind = TextScorer if is_scorer else TextEmbedder
        return kind.from_pretrained(path, dtype=options.dtype)
    if opened is not None and opened.family.task == "speech_seq2seq":
        _refuse_of_decoders(path, options, "a model that hears")
        transcriber = Transcriber(path, dtype=options.dtype)
        say("compiling")
        transcriber.transcribe(np.zeros(SAMPLE_RATE), max_new_tokens=2)
        return transcriber
    if opened is not None and opened.family.task != "image_text_to_text" and opened.family.name not in FAMILIES:
        name = str((opened.config.get("architectures") or [opened.family.name])[0])
        raise ConfigError(
            f"{path}: weights of a {name:.60} are not served; those of decoders are, of models that read images with "
            "text, of Whispers and of BERT's kin"
        )
    plan = None if options.plan is None else Plan.from_degrees(mp=options.degree)
    images = None
    if opened is not None and opened.family.task == "image_text_to_text":
        images, model, tokenizer = _load_image_text(path, options)
    else:
        model, tokenizer = load_writer(path, options.dtype, options.adapter, plan)
    if options.chat_template is not None:
        tokenizer = tokenizer.with_template(read_template(options.chat_template))
    rows, tokenizers = load_adapters(path, model, tokenizer, options.adapters)
    engine = TextEngine(
        model,
        tokenizer.end,
        tokenizer.vocab_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        prefill_chunk=options.prefill_chunk,
        enable_prefix_caching=options.enable_prefix_caching,
        speculation=drafting(options.speculative, options.num_draft_tokens, tokenizer, options.dtype),
        adapters=rows,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    say("compiling")
    first, *others = warmings(engine)
    first()
    grammars = TextGrammars(tokenizer, model.config.vocab_size)
    dtype, plan_name = dtype_of(model), options.plan or ONE_DEVICE
    defaults = settings_of(model.generation_config) if options.generation_config == "auto" else {}
    return ServedModel(
        engine, tokenizer, engine.max_model_len, grammars, dtype, plan_name, tokenizers, others, defaults, images
    )


def _refuse_of_decoders(path: Path, options: EngineOptions, what: str) -> None:
    """Raises ConfigError for options that are of decoders alone."""
    asked = {
        "--adapter": options.adapter is not None or bool(options.adapters),
        "--speculative": options.speculative is not None,
        "--plan": options.plan is not None,
        "--kv-cache-dtype": options.kv_cache_dtype is not None,
        "--chat-template": options.chat_template is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigError(f"{path}: is {what}, and {name} is of decoders; leave it out")


def _load_image_text(path: Path, options: EngineOptions) -> tuple[ImagePrompts, Decoder, TextTokenizer]:
    """A model that reads images, its decoder and its tokenizer."""
    if options.adapter is not None or options.adapters:
        raise ConfigError(f"{path}: reads images, and adapters are of models that read text alone; leave out --adapter")
    if options.plan is not None:
        raise ConfigError(f"{path}: reads images, on one device; leave out --plan")
    images, tokenizer = load_image_writer(path, options.dtype)
    return images, images.model.language, tokenizer


def read_template(file: Path) -> str:
    """The chat template in a file. Raises ConfigError for one that cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {file}: {error}; give a file with a jinja2 template") from None


def warmings(engine: TextEngine) -> list[Callable[[], None]]:
    """What compiles, or loads from the cache, all that most requests need: each one size of the parts of a prompt,
    whole parts first, and a way of choosing a token."""
    ways = (SamplingParams(temperature=0), SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.9))
    sizes = engine.prompt_sizes[::-1]  # at most three

    def warm(number: int, params: SamplingParams) -> None:
        size = sizes[min(number, len(sizes) - 1)]
        two_tokens = replace(params, max_tokens=2, ignore_eos=True)
        engine.add(f"warm-{number}", [0] * max(1, min(size, engine.max_model_len - 2)), two_tokens)
        while engine.has_unfinished:
            engine.step()

    return [partial(warm, number, params) for number, params in enumerate(ways)]
