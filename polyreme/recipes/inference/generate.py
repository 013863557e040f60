"""Writing text after a prompt, with a run's newest checkpoint or published weights, printed as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError
from polyreme.generation import BeamSearch, BeamSearchParams, SamplingParams, TextGenerator, TextTokenizer
from polyreme.generation.images import parts_of_messages, read_image
from polyreme.generation.prompt_vectors import PromptVectors
from polyreme.generation.text_stream import TextStream
from polyreme.models.parts.cache import check_cache_dtype
from polyreme.recipes.weights.trained import drafting, load_image_writer, load_writer, reads_images


def run(
    path: Path,
    *,
    prompt: str,
    params: SamplingParams,
    chat: bool = False,
    dtype: str | None = None,
    speculative: str | None = None,
    num_draft_tokens: int = 5,
    adapter: Path | None = None,
    kv_cache_dtype: str | None = None,
    images: Sequence[Path] = (),
    say: Callable[[str], None],
) -> None:
    """Write n texts, of seeds seed, seed + 1, ..., after the prompt, each beginning with it; as answers to it if chat.

    path, dtype, adapter: as of load_writer, or a folder of a model that reads images. images: files of those that the
    prompt is about, which stand before it in a chat, and else where it has the image token. speculative,
    num_draft_tokens: as of drafting. kv_cache_dtype: one of models.parts.cache.CACHE_DTYPES. say: takes each piece of
    text as soon as it is sure. Raises as load_writer does, ConfigError for a model without a chat template, and for
    images of one that reads text alone.
    """
    check_cache_dtype(kv_cache_dtype)
    vectors, seen = None, None
    if images or reads_images(path):
        if adapter is not None:
            raise ConfigError(f"--adapter {adapter}: of models that read text alone; leave it out")
        if not reads_images(path):
            raise ConfigError(f"{path}: reads text alone; leave --image out")
        seer, tokenizer = load_image_writer(path, dtype)
        model = seer.model.language
        ids, shown = _ids_about(tokenizer, prompt, [read_image(image) for image in images], chat=chat)
        seen, vectors = seer.expand(ids, shown)
    else:
        model, tokenizer = load_writer(path, dtype, adapter)
        ids = prompt_ids(tokenizer, prompt, chat=chat)
    speculation = drafting(speculative, num_draft_tokens, tokenizer, dtype)
    generator = TextGenerator(model, tokenizer.end, tokenizer.vocab_size, speculation, kv_cache_dtype)
    for copy in range(params.n):
        if not chat:
            say(prompt)
        # an answer is a text of its own
        stream = TextStream(tokenizer, params.stop, params.min_tokens, () if chat else ids)
        write(generator, stream, seen or ids, replace(params, n=1, seed=params.seed + copy), say, vectors)
        say("\n" if copy == params.n - 1 else "\n\n")


def search(
    path: Path,
    *,
    prompt: str,
    params: BeamSearchParams,
    chat: bool = False,
    dtype: str | None = None,
    adapter: Path | None = None,
    kv_cache_dtype: str | None = None,
    say: Callable[[str], None],
) -> None:
    """Show the n continuations of the prompt with the highest scores, as `run` shows texts. Raises as run does."""
    check_cache_dtype(kv_cache_dtype)
    model, tokenizer = load_writer(path, dtype, adapter)
    ids = prompt_ids(tokenizer, prompt, chat=chat)
    generator = TextGenerator(model, tokenizer.end, tokenizer.vocab_size, kv_cache_dtype=kv_cache_dtype)
    texts = BeamSearch(generator).search(ids, params)
    for number, text in enumerate(texts):
        stream = TextStream(tokenizer, (), 0, () if chat else ids)
        written = stream.add(text.token_ids) + stream.finish()
        say(("" if chat else prompt) + written + ("\n" if number == len(texts) - 1 else "\n\n"))


def prompt_ids(tokenizer: TextTokenizer, prompt: str, *, chat: bool) -> list[int]:
    """The tokens to write after: of the prompt, or of a conversation that begins with it."""
    if chat:
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    # a text of no tokens begins where one has ended
    return tokenizer.encode(prompt) or [tokenizer.end[0] if tokenizer.end else 0]


def _ids_about(tokenizer: TextTokenizer, prompt: str, images: list[Any], *, chat: bool) -> tuple[list[int], list[Any]]:
    """prompt_ids of a prompt about images, and these."""
    if not chat:
        return prompt_ids(tokenizer, prompt, chat=False), images
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": prompt}]
    messages, shown = parts_of_messages([{"role": "user", "content": parts}])
    return tokenizer.encode_chat(messages), shown


def write(
    generator: TextGenerator,
    stream: TextStream,
    ids: Sequence[int],
    params: SamplingParams,
    say: Callable[[str], None],
    vectors: PromptVectors | None = None,
) -> None:
    """Show the text that follows ids, piece by piece. Where positions end, it goes on from the latter half; after
    vectors of images it ends."""
    known, positions, left, part = list(ids), generator.model.config.seq_len, params.max_tokens, 0
    if vectors is not None:
        left = min(left, max(1, positions - len(known)))

    def take(_: int, token: int) -> bool:
        say(stream.add([token]))
        return stream.stopped

    while left:
        seen = known[-(positions - min(left, positions // 2)) :]
        # a draw depends on seed and place, and places begin anew
        seed = (params.seed + (part << 32)) % 2**63
        least = max(0, params.min_tokens - (params.max_tokens - left))
        again = replace(params, max_tokens=left, min_tokens=least, seed=seed)
        (completion,) = generator.generate([seen], again, take, vectors=[vectors])
        known += completion.token_ids
        left, part = left - len(completion.token_ids), part + 1
        if completion.finish_reason == "stop":
            break
    say(stream.finish())
