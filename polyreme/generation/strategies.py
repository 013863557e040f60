"""model.generate, as PaddleNLP has it: a decoding strategy by name, tensors in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from polyreme.core.rng import default_generator
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError, did_you_mean
from polyreme.generation.beams import BeamSearch, BeamSearchParams, BeamText
from polyreme.generation.choosing import Completion, SuppressedTokens, TokenGrammar
from polyreme.generation.generator import TextGenerator
from polyreme.generation.prompt_vectors import PromptVectors
from polyreme.generation.sampling import SamplingParams
from polyreme.generation.seq2seq import Seq2SeqGenerator
from polyreme.models.parts.encoder_decoder import EncoderDecoder
from polyreme.nn.eval_mode import eval_mode

STRATEGIES = ("greedy_search", "beam_search", "sampling")
_SEARCHES: WeakKeyDictionary[Any, dict[tuple[int, ...], BeamSearch | Seq2SeqGenerator]] = WeakKeyDictionary()
"""Of each model, what writes with it to these ends, with its programs."""


def generate(
    model: Any,
    input_ids: Any,
    attention_mask: Any = None,
    max_length: int = 20,
    min_length: int = 0,
    decode_strategy: str | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    num_beams: int = 1,
    length_penalty: float = 0.0,
    early_stopping: bool | Literal["never"] = False,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    num_return_sequences: int = 1,
    seed: int | None = None,
    *,
    max_new_tokens: int | None = None,
    min_new_tokens: int | None = None,
    do_sample: bool | None = None,
    use_cache: bool = True,
    forced_bos_token_id: int | None = None,
    forced: Sequence[int] | Sequence[Sequence[int]] | None = None,
    suppress_tokens: Sequence[int] | None = None,
    begin_suppress_tokens: Sequence[int] | None = None,
    grammar: TokenGrammar | None = None,
    inserted: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[Any, Any]:
    """Write after prompts -> ids [batch * num_return_sequences, longest], int64, and scores [.., 1], float32.

    input_ids: [batch, seq]; attention_mask: of the same shape, 0 where a row has no token, all have one if None.
    max_length, min_length: of new tokens, which alone are given back, with the one that ended the text, and
    pad_token_id after it. eos_token_id, pad_token_id: those of model.generation_config if None, no end and an end or 0
    where it has none. decode_strategy: one of STRATEGIES, as num_beams and do_sample say if None. A score is the mean
    log-probability of a text's tokens, that of a beam search as of BeamSearchParams; PaddleNLP counts lengths there by
    ((5 + length) / 6) ** length_penalty, which for 0 is the same. seed: of sampling, the next of the default generator
    if None. max_new_tokens, min_new_tokens, do_sample, use_cache: transformers' words of max_length, min_length and the
    strategy; texts are written over a cache always. forced_bos_token_id: the first token of each text, of what reads a
    text and writes another, as the language that it is translated to; forced: the first tokens of each, the same or
    each its own. suppress_tokens: tokens that are not written, begin_suppress_tokens: that no text begins with; those
    of model.generation_config if None. grammar: says which tokens may come in each text. inserted: which
    places of input_ids have no embeddings, bool [batch, seq], but vectors, [..., width] in their order. Raises
    ConfigError for settings that the strategy does not read and for two words that say different things, ShapeError for
    ids of other shapes.
    """
    max_length = _one_of("max_length", max_length, 20, "max_new_tokens", max_new_tokens)
    min_length = _one_of("min_length", min_length, 0, "min_new_tokens", min_new_tokens)
    decode_strategy = _strategy(decode_strategy, do_sample, num_beams)
    known = model.generation_config
    eos_token_id = known.get("eos_token_id") if eos_token_id is None else eos_token_id
    pad_token_id = known.get("pad_token_id") if pad_token_id is None else pad_token_id
    suppressed = (known.get("suppress_tokens") if suppress_tokens is None else suppress_tokens) or ()
    at_first = (known.get("begin_suppress_tokens") if begin_suppress_tokens is None else begin_suppress_tokens) or ()
    if forced_bos_token_id is not None:
        forced = [forced_bos_token_id]
    if decode_strategy not in STRATEGIES:
        raise ConfigError(
            f"generate: unknown decode_strategy {decode_strategy!r}{did_you_mean(decode_strategy, STRATEGIES)}"
        )
    _refuse_unread(
        decode_strategy,
        sampling={"temperature": temperature != 1, "top_k": top_k != 0, "top_p": top_p != 1, "seed": seed is not None},
        beam_search={
            "num_beams": num_beams != 1,
            "length_penalty": length_penalty != 0,
            "early_stopping": early_stopping is not False,
        },
    )
    reads_ids = not isinstance(model, EncoderDecoder) or model.reads_ids
    prompts = _prompts(input_ids, attention_mask) if reads_ids else [*input_ids]
    end = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    pad = (end[0] if end else 0) if pad_token_id is None else pad_token_id
    shared = {"max_tokens": max_length, "min_tokens": min_length, "repetition_penalty": repetition_penalty}
    with eval_mode(model):
        search = _search(model, tuple(end), decode_strategy)
        if forced is not None and not isinstance(search, Seq2SeqGenerator):
            raise ConfigError("generate: forced_bos_token_id is of encoders with decoders; leave it out")
        if decode_strategy == "beam_search":
            if inserted is not None:
                raise ConfigError("generate: beam_search reads text alone; take greedy_search or sampling for images")
            if suppressed or at_first or grammar is not None:
                raise ConfigError("generate: beam_search leaves out no tokens; take greedy_search or sampling")
            params = BeamSearchParams(num_beams, length_penalty, early_stopping, num_return_sequences, **shared)
            assert isinstance(search, BeamSearch)
            texts = [text for prompt in prompts for text in search.search(prompt, params)]
            return _as_tensors([_with_end(text) for text in texts], [text.score for text in texts], pad)
        if decode_strategy == "sampling":
            if seed is None:
                seed = default_generator.random()
            shared |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        else:
            shared["temperature"] = 0
        # each row draws by a seed of its own
        params = [
            SamplingParams(**shared, seed=(seed or 0) + number, logprobs=0)
            for number in range(len(prompts) * num_return_sequences)
        ]
        copies = [prompt for prompt in prompts for _ in range(num_return_sequences)]
        free = [None if grammar is None else grammar.copy() for _ in copies]
        if suppressed or at_first:
            free = [SuppressedTokens(model.config.vocab_size, suppressed, at_first, own) for own in free]
        if isinstance(search, Seq2SeqGenerator):
            texts = search.generate(copies, params, grammars=free, forced=forced)
        else:
            vectors = [] if inserted is None else _vectors_of_rows(*inserted, input_ids, attention_mask)
            of_copies = [row for row in vectors for _ in range(num_return_sequences)]
            texts = search.generator.generate(copies, params, grammars=free, vectors=of_copies)
        rows = [_with_end(text) for text in texts]
        return _as_tensors(rows, [float(np.mean(t.logprobs)) if t.logprobs else 0.0 for t in texts], pad)


def _one_of(name: str, value: int, default: int, word: str, other: int | None) -> int:
    """A setting that has two names."""
    if other is not None and value not in (default, other):
        raise ConfigError(f"generate: {name}={value} and {word}={other} are the same setting; give one of them")
    return value if other is None else other


def _strategy(name: str | None, do_sample: bool | None, num_beams: int) -> str:
    """The strategy of a name, or as transformers' words say."""
    said = "sampling" if do_sample else "beam_search" if num_beams > 1 else "greedy_search"
    if name is not None and do_sample is not None and (name == "sampling") != do_sample:
        raise ConfigError(f"generate: decode_strategy={name!r} and do_sample={do_sample}; give one of them")
    return said if name is None else name


def _search(model: Any, end: tuple[int, ...], strategy: str) -> BeamSearch | Seq2SeqGenerator:
    """The generator or beam search for a model. Raises ConfigError for beams of one that reads a text and writes
    another."""
    reads_another = isinstance(model, EncoderDecoder)
    if reads_another and strategy == "beam_search":
        name = type(model).__name__
        raise ConfigError(f"generate: beam_search is of decoders; take greedy_search or sampling for a {name}")
    searches = _SEARCHES.setdefault(model, {})
    if end not in searches:
        searches[end] = Seq2SeqGenerator(model, end) if reads_another else BeamSearch(TextGenerator(model, end))
    return searches[end]


def _refuse_unread(strategy: str, **settings: dict[str, bool]) -> None:
    for reader, is_set in settings.items():
        unread = [name for name, given in is_set.items() if given and reader != strategy]
        if unread:
            raise ConfigError(f"generate: {strategy} does not read {unread[0]}; leave it out, or take {reader}")


def _prompts(input_ids: Any, attention_mask: Any) -> list[list[int]]:
    """The token ids of each row."""
    try:
        ids = np.asarray(input_ids.numpy() if hasattr(input_ids, "numpy") else input_ids)
    except ValueError:
        raise ShapeError("generate: input_ids are rows of several lengths; pad them, and give attention_mask") from None
    mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask)
    if ids.ndim != 2 or mask.shape != ids.shape:
        raise ShapeError(
            f"generate: input_ids {list(ids.shape)} and attention_mask {list(mask.shape)}; give ids as [batch, seq] "
            "and a mask of the same shape"
        )
    return [row[own != 0].tolist() for row, own in zip(ids, mask, strict=True)]


def _vectors_of_rows(
    is_inserted: np.ndarray, vectors: np.ndarray, input_ids: Any, attention_mask: Any
) -> list[PromptVectors]:
    """The vectors of each prompt, at places among its tokens. Raises ShapeError for another number of vectors."""
    vectors = vectors.reshape(-1, vectors.shape[-1])
    if is_inserted.sum() != len(vectors):
        raise ShapeError(f"generate: {int(is_inserted.sum())} places of images, and {len(vectors)} vectors of them")
    mask = np.ones_like(is_inserted) if attention_mask is None else np.asarray(attention_mask) != 0
    parts = np.split(vectors, np.cumsum(is_inserted.sum(1))[:-1])
    return [
        PromptVectors(np.flatnonzero(row[own]), part) for row, own, part in zip(is_inserted, mask, parts, strict=True)
    ]


def _with_end(text: Completion | BeamText) -> list[int]:
    return text.token_ids + ([] if text.end_token is None else [text.end_token])


def _as_tensors(rows: list[list[int]], scores: list[float], pad: int) -> tuple[Any, Any]:
    ids = np.full((len(rows), max(map(len, rows))), pad, np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return to_tensor(ids), to_tensor(np.array(scores, np.float32)[:, None])
