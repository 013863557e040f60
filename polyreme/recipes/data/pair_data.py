"""Pairs of token files as the data of a run: mixed by weight, cut into samples, each split of its own documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from polyreme.data.blend import Mixture, StreamSampler
from polyreme.data.packing import PackedDataset
from polyreme.data.preparation import read_facts
from polyreme.data.token_pair import TokenPair, beside, prefix_of
from polyreme.errors import DataError
from polyreme.recipes.config import DataSource, PretrainConfig
from polyreme.recipes.corpus import NEXT_TOKENS, Corpus, RowForm
from polyreme.recipes.data.paths import resolve

_FORMAT = 1  # raised when the same files give other samples, so that no run is resumed on them


def load_pairs(config: PretrainConfig, base: Path | None, form: RowForm = NEXT_TOKENS) -> Corpus:
    """Open the pairs that data.train and data.validation name; only their indexes are read.

    Raises DataError for pairs that are missing, torn, prepared with different tokenizers or one of more tokens than
    model.vocab_size, and for a split too short for one batch.
    """
    data, seq_len = config.data, config.dimensions.seq_len
    pairs = _open(data.train, base, "data.train")
    others = _open(data.validation, base, "data.validation")
    tokenizer = _check_tokenizers([*pairs, *others], config.dimensions.vocab_size)
    train, validation = [], [split_documents(pair, 0.0, seq_len, data.packing, form)[0] for pair in others]
    for pair in pairs:
        held_out = 0.0 if others else data.validation_fraction
        first, last = split_documents(pair, held_out, seq_len, data.packing, form)
        train.append(first)
        if not others:
            validation.append(last)
    mixtures = []
    for key, sources, parts, opened in (
        ("data.train", data.train, train, pairs),
        ("data.validation", data.validation or data.train, validation, others or pairs),
    ):
        for pair, part in zip(opened, parts, strict=True):
            if not len(part):
                raise DataError(
                    f"{pair.prefix}: its {pair.num_tokens:,} tokens do not give {key} one sample of model.seq_len="
                    f"{seq_len}; give more text, a shorter seq_len or another data.validation_fraction"
                )
        weights = [source.weight or len(part) for source, part in zip(sources, parts, strict=True)]
        mixtures.append(Mixture(parts, weights, data.seed))
        needed = config.train.global_batch if key == "data.train" or config.log.validation_interval else 0
        if len(mixtures[-1]) < needed:
            raise DataError(
                f"{key}: {len(mixtures[-1])} samples are fewer than train.global_batch={needed}; give more text, a "
                "smaller batch or a shorter model.seq_len"
            )
    facts = [_FORMAT, seq_len, data.packing, 0.0 if others else data.validation_fraction]
    facts += [[pair.digest for pair in (*pairs, *others)], *(mixture.blend.shares for mixture in mixtures)]
    return Corpus(
        *mixtures,
        digest=xxhash.xxh3_128_hexdigest(json.dumps(facts).encode()),
        num_tokens=sum(pair.num_tokens for pair in pairs),
        vocab_size=config.dimensions.vocab_size,
        folder=pairs[0].prefix.parent,
        sampler=partial(StreamSampler, multiple=config.train.global_batch),
        tokenizer_file=tokenizer,
    )


def _open(sources: Sequence[DataSource], base: Path | None, key: str) -> list[TokenPair]:
    return [TokenPair(resolve(str(beside(prefix_of(source.path), ".idx")), base, key)) for source in sources]


def _check_tokenizers(pairs: Sequence[TokenPair], vocab_size: int) -> str:
    """The name of the tokenizer's file beside the first pair."""
    first: dict[str, Any] | None = None
    for pair in pairs:
        facts = read_facts(pair.prefix)
        if facts is None:  # another program wrote it: tokens are looked at in each batch
            continue
        if facts["vocab_size"] > vocab_size:
            raise DataError(
                f"{pair.prefix}: prepared with a vocabulary of {facts['vocab_size']}, but model.vocab_size="
                f"{vocab_size}; raise that"
            )
        if first is not None and first["tokenizer"] != facts["tokenizer"]:
            raise DataError(
                f"{pair.prefix}: prepared with another tokenizer than {first['prefix']}; prepare both with one"
            )
        first = first or {**facts, "prefix": pair.prefix}
    return beside(pairs[0].prefix, ".tokenizer.json").name


def split_documents(
    pair: TokenPair, held_out: float, seq_len: int, packing: str, form: RowForm = NEXT_TOKENS
) -> tuple[Any, Any]:
    """Samples of a pair: of all but its last documents, and of those, which hold about this part of the tokens."""
    tokenizer = beside(pair.prefix, ".tokenizer.json")
    first, last = _split_rows(pair, held_out, seq_len, packing, form)
    return form.wrap(first, tokenizer), form.wrap(last, tokenizer)


def _split_rows(pair: TokenPair, held_out: float, seq_len: int, packing: str, form: RowForm) -> tuple[Any, Any]:
    starts = pair.document_starts
    document = int(starts.searchsorted(pair.num_tokens * (1 - held_out))) if held_out else pair.num_documents
    if packing != "concat":
        document = min(document, pair.num_documents - bool(held_out))  # one document at least
        parts = ((0, document), (document, pair.num_documents))
        first, last = (PackedDataset(pair, *part, seq_len, packing == "best_fit", ahead=form.ahead) for part in parts)
        return first, last
    boundary = int(starts[document])
    if held_out and boundary == pair.num_tokens:  # one long document at the end: cut within it
        boundary = pair.num_tokens - max(round(pair.num_tokens * held_out), 1)
    return form.windows(pair.tokens, 0, boundary, seq_len), form.windows(
        pair.tokens, boundary, pair.num_tokens, seq_len
    )
