"""Reports of `polyreme data` on pairs of token files, and the tokenizers it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from polyreme.data.packing import PackedDataset
from polyreme.data.preparation import read_facts
from polyreme.data.token_pair import TokenPair, beside, digest_of
from polyreme.data.windows import TokenDataset
from polyreme.errors import ConfigError, DataError
from polyreme.generation.tokenizer import AutoTokenizer
from polyreme.models.files import packages
from polyreme.models.tokenizer import END_OF_TEXT
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.data.pair_data import load_pairs

_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
"""Tokens that close a text, where nothing says which one does."""
_PIECE_TOKENS = 1 << 22


def load_tokenizer(name: str, end: str | None) -> tuple[Tokenizer, int | None]:
    """A tokenizer by tokenizer.json, folder or GGUF file of published weights, or their fetched name; its end token.

    end: the token's text; if None what the folder says, else a usual one that there is, else none. Raises ConfigError
    for a text that is no token, and what reading the tokenizer raises.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  (the library raises bare Exceptions)
            raise DataError(
                f"{path}: not a readable tokenizer ({error}); save it with the tokenizers library"
            ) from None
        ids: list[int] = []
    else:
        text = AutoTokenizer.from_pretrained(packages.resolve(name))
        tokenizer, ids = text.tokenizer, list(text.end)
    if end is not None:
        number = tokenizer.token_to_id(end)
        if number is None:
            raise ConfigError(f"--eos {end!r} is not a token of {name}; leave it out, or give one of its tokens")
        return tokenizer, number
    usual = (tokenizer.token_to_id(token) for token in _ENDS)
    return tokenizer, next((number for number in [*ids, *usual] if number is not None), None)


def stats_lines(prefix: Path) -> Iterator[str]:
    """The size of a pair, and the lengths of its documents."""
    pair = TokenPair(prefix)
    yield f"{pair.prefix}: {pair.num_documents:,} documents, {pair.num_tokens:,} tokens of {pair.dtype}"
    if len(pair) != pair.num_documents:
        yield f"  {len(pair):,} sequences, {len(pair) / max(pair.num_documents, 1):.2f} a document"
    sizes = np.diff(pair.document_starts)
    if len(sizes):
        points = np.percentile(sizes, [0, 10, 50, 90, 99, 100], method="nearest")
        shown = ", ".join(
            f"{name} {size:,}" for name, size in zip(("least", "10%", "50%", "90%", "99%", "most"), points, strict=True)
        )
        yield f"  tokens of a document: mean {sizes.mean():,.1f}; {shown}"
    facts = read_facts(pair.prefix)
    if facts is not None:
        yield f"  prepared from {', '.join(facts['sources'])}; a vocabulary of {facts['vocab_size']:,}"


def check_lines(prefix: Path) -> Iterator[str]:
    """Read every byte of a pair: both files of one run, tokens within the vocabulary, digests where there are some.

    Raises DataError for what is wrong.
    """
    pair = TokenPair(prefix)
    yield f"{pair.index_path}: {len(pair):,} sequences in {pair.num_documents:,} documents, whole"
    facts = read_facts(pair.prefix)
    largest = -1
    for begin in range(0, pair.num_tokens, _PIECE_TOKENS):
        window = pair.tokens.window(begin, min(_PIECE_TOKENS, pair.num_tokens - begin))
        largest = max(largest, int(window.max()))
    yield f"{pair.tokens.path}: {pair.num_tokens:,} tokens, 0 to {largest}"
    if facts is None:
        yield "no digests beside it: another program wrote it"
        return
    for name, path in (("bin", pair.tokens.path), ("idx", pair.index_path)):
        if digest_of(path) != facts.get(name):
            raise DataError(f"{path}: the file has changed since it was prepared: its digest differs; prepare it again")
    if largest >= facts["vocab_size"]:
        raise DataError(
            f"{pair.tokens.path}: token {largest} of a vocabulary of {facts['vocab_size']}; prepare it again"
        )
    path = beside(pair.prefix, ".tokenizer.json")
    yield f"digests as prepared{'' if path.is_file() else f'; {path.name}, which generation needs, is missing'}"


def pack_lines(prefix: Path, seq_len: int) -> Iterator[str]:
    """For each data.packing the rows of seq_len tokens that a pair gives, and the share of their places with a
    label."""
    pair = TokenPair(prefix)
    windows = TokenDataset(pair.tokens, 0, pair.num_tokens, seq_len)
    sets = {
        "concat": (len(windows), 1.0),
        **{
            name: (len(rows), rows.fill)
            for name, rows in (
                ("best_fit", PackedDataset(pair, 0, pair.num_documents, seq_len)),
                ("none", PackedDataset(pair, 0, pair.num_documents, seq_len, is_packed=False)),
            )
        },
    }
    long = int((np.diff(pair.document_starts) > seq_len + 1).sum())
    yield f"{pair.num_documents:,} documents, {long:,} of them too long for a row of {seq_len:,} tokens"
    for name, (count, fill) in sets.items():
        yield f"  {name:<9}{count:>12,} rows, {100 * fill:.2f}% of places have a label"


def blend_lines(config: PretrainConfig, base: Path | None) -> Iterator[str]:
    """For each source of data.train its share, its samples, and how many of them a run takes.

    Raises ConfigError for a configuration without data.train, and what opening the pairs raises.
    """
    if not config.data.train:
        raise ConfigError("the configuration has no data.train, whose sources could be mixed; data.text is one source")
    mixture = load_pairs(config, base).train
    blend, taken = mixture.blend, config.train.steps * config.train.global_batch
    steps = f"{config.train.steps:,} steps of {config.train.global_batch}"
    yield f"{taken:,} samples: {steps}, {config.dimensions.seq_len} tokens each"
    rows = zip(config.data.train, blend.shares, mixture.lengths, blend.counts(taken), strict=True)
    for source, share, length, count in rows:
        yield (
            f"  {source.path}: {100 * share / sum(blend.shares):.4g}% of samples, {count:,} of {length:,}: "
            f"{count / length:.2f} passes"
        )
    yield f"after any number of samples a source is off its share by {blend.bound:.2f} samples at most"
