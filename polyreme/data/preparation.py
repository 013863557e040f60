"""Text to a pair of token files: documents tokenized in several processes, the same bytes whatever their number."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer

from polyreme.data.documents import Block, DocumentForm, kind_of, read_blocks
from polyreme.data.duplicates import duplicates_by
from polyreme.data.text_files import BadLines
from polyreme.data.token_pair import PairWriter, beside, digest_of, prefix_of, token_dtype
from polyreme.errors import ConfigError, DataError

SPLITS = {1: ("",), 2: ("_train", "_valid"), 3: ("_train", "_valid", "_test")}
"""What comes after PREFIX in the names of the pairs, by their number."""
_AHEAD = 2  # blocks a worker has waiting
_SAID_SECONDS = 10.0


@dataclass(frozen=True)
class Preparation:
    """Settings by which documents become tokens.

    tokenizer: as tokenizers.Tokenizer.to_str gives it; it adds no special tokens, and text that spells one out is only
    text. end: the token after each document, or None. parts: weights of the pairs that documents are dealt out to.
    skip_bad: lines that may be left out because they cannot be read. dedup: exact or minhash (data.duplicates), which
    leaves out documents that are as one before, or nearly, or None. workers: processes; with 0 this one, whose threads
    the tokenizer uses.
    """

    tokenizer: str
    end: int | None = None
    form: DocumentForm = field(default_factory=DocumentForm)
    parts: tuple[float, ...] = (1.0,)
    skip_bad: int = 0
    dedup: str | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        if self.dedup is not None:
            duplicates_by(self.dedup)
        if len(self.parts) not in SPLITS or not all(0 < part < float("inf") for part in self.parts):
            raise ConfigError(f"split {self.parts}: give one to three weights above 0, such as 98,2")
        if self.workers < 0 or self.skip_bad < 0:
            raise ConfigError(f"workers={self.workers}, skip_bad={self.skip_bad}: give whole numbers of at least 0")


@dataclass(frozen=True)
class Prepared:
    """The result of preparation: the pairs written, by prefix, and counts of what was left out, by reason."""

    pairs: dict[Path, tuple[int, int]]
    """(documents, tokens) of each pair."""
    left_out: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Encoded:
    """The documents of a block: all tokens one after another, how many each has, and lines that could not be read."""

    tokens: np.ndarray
    lengths: np.ndarray
    bad: list[tuple[str, str, str]]
    marks: list[bytes] | None
    """What tells duplicates, of each document, if they are looked for."""


def prepare(
    inputs: Sequence[str | Path], prefix: str | Path, how: Preparation, say: Callable[[str], None] | None = None
) -> Prepared:
    """Tokenize files into PREFIX.bin and PREFIX.idx, or into PREFIX_train and so on for several parts.

    Beside each pair stand PREFIX.json, what it was made of, and PREFIX.tokenizer.json. No file is left of a
    preparation that fails. say: is told how far it is. Raises ConfigError for files that are there already and for
    settings that cannot be meant, DataError, naming file and line, for input that cannot be read.
    """
    paths = [Path(name).expanduser() for name in inputs]
    for path in paths:  # before minutes go into those before it
        if path.is_file():
            kind_of(path)
        else:
            raise DataError(
                f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}; give files of text"
            )
    began = time.monotonic()
    tokenizer = Tokenizer.from_str(how.tokenizer)
    size = tokenizer.get_vocab_size()
    if how.end is not None and not 0 <= how.end < size:
        raise ConfigError(f"end token {how.end} is not one of the tokenizer's, 0 to {size - 1}; give one of those")
    bad = BadLines(how.skip_bad, "--skip-bad")
    prefixes = [beside(prefix_of(prefix), ending) for ending in SPLITS[len(how.parts)]]
    seen = None if how.dedup is None else duplicates_by(how.dedup)()
    empty = repeated = 0
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(PairWriter(place, token_dtype(size))) for place in prefixes]
        deal = _dealt(how.parts)
        said = began
        for encoded in _encoded(paths, how, bad):
            for line in encoded.bad:
                bad.leave_out(*line)
            ends = np.cumsum(encoded.lengths)
            for i, (begin, stop) in enumerate(zip(ends - encoded.lengths, ends, strict=True)):
                if begin == stop:
                    empty += 1
                    continue
                if seen is not None and encoded.marks is not None and not seen.is_new(encoded.marks[i]):
                    repeated += 1
                    continue
                tokens = encoded.tokens[begin:stop]
                writers[next(deal)].add(tokens if how.end is None else np.append(tokens, how.end))
            if say is not None and time.monotonic() > said + _SAID_SECONDS:
                said = time.monotonic()
                say(_progress(writers, said - began))
        for writer in writers:
            if not writer.num_documents:
                raise DataError(f"{writer.prefix}: no documents for it in {', '.join(map(str, paths))}; give more text")
    facts = {"sources": [path.name for path in paths], "vocab_size": size, "end": how.end, "dedup": how.dedup}
    for writer in writers:
        _write_facts(writer, how.tokenizer, facts)
    left_out = {"lines that cannot be read": len(bad.lines), "documents without a token": empty}
    left_out |= {"duplicates": repeated}
    pairs = {writer.prefix: (writer.num_documents, writer.num_tokens) for writer in writers}
    return Prepared(pairs, {why: count for why, count in left_out.items() if count}, time.monotonic() - began)


def read_facts(prefix: Path) -> dict[str, Any] | None:
    """The facts that `prepare` wrote about a pair; None for a pair that it did not write. Raises DataError for a torn
    file."""
    path = beside(prefix, ".json")
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the pair again, or remove that file") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("bin"), str):
        raise DataError(f"{path}: does not say what a pair was made of; remove it if something else wrote it")
    return facts


def _write_facts(writer: PairWriter, tokenizer: str, facts: dict[str, Any]) -> None:
    counts = {"num_tokens": writer.num_tokens, "num_documents": writer.num_documents}
    digests = {
        "bin": writer.bin_digest,
        "idx": digest_of(beside(writer.prefix, ".idx")),
        "tokenizer": xxhash.xxh3_128_hexdigest(tokenizer.encode()),
    }
    for ending, text in ((".tokenizer.json", tokenizer), (".json", json.dumps(facts | counts | digests, indent=1))):
        path = beside(writer.prefix, ending)
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)


def _progress(writers: list[PairWriter], seconds: float) -> str:
    documents, tokens = sum(w.num_documents for w in writers), sum(w.num_tokens for w in writers)
    return f"{documents:,} documents, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"


def _dealt(parts: Sequence[float]) -> Iterator[int]:
    """The part each document goes to: the one that is furthest behind its share."""
    total, counts, number = sum(parts), [0] * len(parts), 0
    while True:
        number += 1
        part = max(range(len(parts)), key=lambda i: (parts[i] / total * number - counts[i], -i))
        counts[part] += 1
        yield part


class _BlockTokenizer:
    """Takes blocks apart and tokenizes them, in whatever process it is."""

    def __init__(self, tokenizer: str, dedup: str | None) -> None:
        self.mark = None if dedup is None else duplicates_by(dedup).mark
        self.tokenizer = Tokenizer.from_str(tokenizer)
        self.tokenizer.encode_special_tokens = True  # text that spells out a marker gets its letters, not the marker
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def __call__(self, block: Block) -> Encoded:
        texts, bad = block.texts()
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.array([len(row) for row in rows], np.int64)
        tokens = np.fromiter((token for row in rows for token in row), np.int64, int(lengths.sum()))
        return Encoded(tokens, lengths, bad, None if self.mark is None else [self.mark(text) for text in texts])


def _encoded(paths: Sequence[Path], how: Preparation, bad: BadLines) -> Iterator[Encoded]:
    blocks = (block for path in paths for block in read_blocks(path, how.form, bad))
    if not how.workers:
        yield from map(_BlockTokenizer(how.tokenizer, how.dedup), blocks)
        return
    # forked processes would have locks of this one's threads
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(how.workers, context, _start_worker, (how.tokenizer, how.dedup))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for block in blocks:
            waiting.append(pool.submit(_encode_in_worker, block))
            if len(waiting) > _AHEAD * how.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            f"a process that tokenizes has ended; with fewer than {how.workers} workers each has more memory"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(tokenizer: str, dedup: str | None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as were asked for
    _worker.append(_BlockTokenizer(tokenizer, dedup))


def _encode_in_worker(block: Block) -> Encoded:
    return _worker[0](block)


_worker: list[_BlockTokenizer] = []
"""Of a worker process."""
