"""Tokens as a pair of files, PREFIX.bin and PREFIX.idx, that Megatron-LM, NeMo and PaddleNLP read and write.

PREFIX.bin: the tokens, one sequence after another. PREFIX.idx, little-endian: `MMIDIDX\\0\\0`, version 1 as uint64,
the code of the dtype as uint8, the number of sequences n and of document bounds d + 1 as uint64; then int32 [n] tokens
of each sequence, int64 [n] the byte it begins at, int64 [d + 1] the first sequence of each document, and n at last.
"""

from __future__ import annotations

import os
import struct
import uuid
from array import array
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash

from polyreme.data.token_file import TokenFile
from polyreme.errors import ConfigError, DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float64", 8: "uint16",
         9: "uint32", 10: "uint64"}  # fmt: skip
"""dtypes by their code. 6 is float32 to some writers; neither is one of tokens. 9 and 10 are PaddleNLP's."""
_LONGEST = np.iinfo(np.int32).max
_DIGEST_BLOCKS, _DIGEST_BYTES = 64, 1 << 14


def token_dtype(vocab_size: int) -> str:
    """The dtype that the writers of such pairs take for a vocabulary.

    >>> token_dtype(50257), token_dtype(128256)
    ('uint16', 'int32')
    """
    return "uint16" if vocab_size < 65500 else "int32"


def prefix_of(path: str | Path) -> Path:
    """The prefix of PREFIX.bin and PREFIX.idx, given that or one of the two.

    >>> prefix_of("data/v1.0.idx"), prefix_of("data/v1.0")
    (PosixPath('data/v1.0'), PosixPath('data/v1.0'))
    """
    path = Path(path).expanduser()
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def beside(prefix: Path, ending: str) -> Path:
    """The file of a pair with this ending, such as `.bin`."""
    return prefix.with_name(prefix.name + ending)


class TokenPair:
    """A pair opened to be read: lengths int32 [n] of its sequences, documents int64 [d + 1] bounds, tokens by position.

    Only the index is read when it is opened. Tokens are read by position, so that a file that shrinks is an error and
    not the end of the process. Raises DataError, naming the file, for one that is missing, torn, of another kind, or
    does not fit the other.
    """

    prefix: Path
    index_path: Path
    dtype: str
    lengths: np.ndarray
    documents: np.ndarray
    tokens: TokenFile
    num_tokens: int

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = prefix_of(prefix)
        path = self.index_path = beside(self.prefix, ".idx")
        try:
            index = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
        self.dtype, self.lengths, self.documents = _read_index(path, index)
        self._index_digest = xxhash.xxh3_128_hexdigest(index)
        self.tokens = TokenFile(beside(self.prefix, ".bin"), self.dtype, None)
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        nbytes = self.num_tokens * np.dtype(self.dtype).itemsize
        if self.tokens.nbytes != nbytes:
            raise DataError(
                f"{self.tokens.path}: {self.tokens.nbytes:,} bytes, and {path.name} says {nbytes:,}; the two are not "
                "of one run, or one is torn: prepare them again"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents, each of one or more sequences."""
        return len(self.documents) - 1

    @cached_property
    def starts(self) -> np.ndarray:
        """The token each sequence begins at and, at last, how many there are, int64 [n + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def document_starts(self) -> np.ndarray:
        """The token each document begins at and, at last, how many there are, int64 [d + 1]."""
        return self.starts[self.documents]

    def sequence(self, number: int) -> np.ndarray:
        """The tokens of a sequence, int32 [length]."""
        return self.tokens.window(int(self.starts[number]), int(self.lengths[number]))

    @cached_property
    def digest(self) -> str:
        """xxh3_128 of the index, the size of the tokens and 64 pieces of them, hex: what a run that resumes compares.

        `digest_of` reads all tokens."""
        state = xxhash.xxh3_128(f"{self._index_digest} {self.tokens.nbytes}".encode())
        last = max(self.tokens.nbytes - _DIGEST_BYTES, 0)
        try:
            with self.tokens.path.open("rb") as file:
                for offset in sorted({last * i // (_DIGEST_BLOCKS - 1) for i in range(_DIGEST_BLOCKS)}):
                    file.seek(offset)
                    state.update(file.read(_DIGEST_BYTES))
        except OSError as error:
            raise DataError(f"{self.tokens.path}: cannot be read: {error.strerror or error}") from None
        return state.hexdigest()


def _read_index(path: Path, index: bytes) -> tuple[str, np.ndarray, np.ndarray]:
    """(dtype, lengths, documents) of an index."""
    if not index.startswith(MAGIC[: len(index)]) or not index:
        raise DataError(f"{path}: begins with {index[:9]!r}, not with {MAGIC!r}; give a pair of .bin and .idx files")
    if len(index) < _HEADER.size:
        raise DataError(f"{path}: torn, {len(index)} bytes where its header alone has {_HEADER.size}; fetch it again")
    _, version, code, count, bounds = _HEADER.unpack_from(index)
    if version != 1:
        raise DataError(f"{path}: version {version} of the index; version 1 is read: write it with that")
    if np.dtype(CODES.get(code, "float64")).kind not in "iu":
        known = ", ".join(f"{number} {name}" for number, name in CODES.items() if name[0] != "f")
        raise DataError(f"{path}: dtype code {code} is not one of tokens; those are {known}")
    nbytes = _HEADER.size + 12 * count + 8 * bounds
    if len(index) != nbytes:
        more = "modes of sequences, which are not read" if len(index) == nbytes + count else "torn or damaged"
        raise DataError(
            f"{path}: {len(index):,} bytes, where {count:,} sequences and {bounds:,} bounds of documents take "
            f"{nbytes:,}: {more}; write it again"
        )
    lengths = np.frombuffer(index, "<i4", count, _HEADER.size)
    pointers = np.frombuffer(index, "<i8", count, _HEADER.size + 4 * count)
    documents = np.frombuffer(index, "<i8", bounds, _HEADER.size + 12 * count)
    if count and lengths.min() < 0:
        number = int(np.argmax(lengths < 0))
        raise DataError(f"{path}: sequence {number} has {lengths[number]} tokens; it is damaged: write it again")
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(CODES[code]).itemsize
    is_other = pointers != np.concatenate([[0], ends[:-1]]) if count else np.zeros(0, bool)
    if is_other.any():
        number = int(np.argmax(is_other))
        raise DataError(
            f"{path}: sequence {number} begins at byte {pointers[number]:,}, and those before it end at "
            f"{ends[number - 1] if number else 0:,}; it is damaged: write it again"
        )
    if not bounds or documents[0] != 0 or documents[-1] != count or (np.diff(documents) < 0).any():
        shown = "none" if not bounds else f"{documents[0]} to {documents[-1]}"
        raise DataError(
            f"{path}: bounds of documents are {shown}; they must rise from 0 to {count}, the number of sequences"
        )
    return CODES[code], lengths, documents


def digest_of(path: Path) -> str:
    """xxh3_128 of a file, hex. Raises DataError for one that cannot be read."""
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                state.update(piece)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    return state.hexdigest()


class PairWriter:
    """Writes a pair, beside its place until `with` ends well; nothing is left of one that fails.

    Raises ConfigError for a place where there is one already or that cannot be written to.
    """

    prefix: Path
    dtype: np.dtype[Any]
    num_tokens: int

    def __init__(self, prefix: str | Path, dtype: str) -> None:
        self.prefix, self.dtype = prefix_of(prefix), np.dtype(dtype)
        self._code = next((code for code, name in CODES.items() if name == dtype and dtype[0] != "f"), None)
        if self._code is None:
            raise ConfigError(f"{self.prefix}: dtype {dtype} is not one of tokens; uint16 or int32 hold any vocabulary")
        for path in (beside(self.prefix, ".bin"), beside(self.prefix, ".idx")):
            if path.exists():
                raise ConfigError(f"{path}: is there already; remove it, or give another name")
        self._lengths, self._documents = array("i"), array("q", [0])
        self._digest = xxhash.xxh3_128()
        self.num_tokens = 0
        mark = uuid.uuid4().hex[:12]
        self._aside = {e: self.prefix.with_name(f".{self.prefix.name}.{mark}{e}") for e in (".bin", ".idx")}
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file: Any = self._aside[".bin"].open("wb")
        except OSError as error:
            raise ConfigError(f"{self.prefix}: cannot be written: {error.strerror}; give another path") from None

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._documents) - 1

    @property
    def bin_digest(self) -> str:
        """xxh3_128 of the tokens written so far, hex."""
        return self._digest.hexdigest()

    def add(self, tokens: np.ndarray, lengths: Any = None) -> None:
        """One more document: tokens [count], as one sequence or as sequences of these lengths.

        Raises DataError for a token that the dtype does not hold, or a sequence of 2**31 tokens or more.
        """
        whole = np.asarray(tokens)
        lengths = [len(whole)] if lengths is None else [int(length) for length in lengths]
        assert sum(lengths) == len(whole)
        limits = np.iinfo(self.dtype)
        if whole.size and not limits.min <= int(whole.min()) <= int(whole.max()) <= limits.max:
            wrong = whole.min() if whole.min() < limits.min else whole.max()
            raise DataError(f"{self.prefix}: token {wrong} in document {self.num_documents} does not fit {self.dtype}")
        if max(lengths, default=0) > _LONGEST:
            raise DataError(f"{self.prefix}: document {self.num_documents} has {max(lengths):,} tokens; cut it up")
        data = np.ascontiguousarray(whole, self.dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._lengths.extend(lengths)
        self._documents.append(len(self._lengths))
        self.num_tokens += len(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            for path in self._aside.values():
                path.unlink(missing_ok=True)

    def _finish(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        with self._aside[".idx"].open("wb") as index:
            index.write(_HEADER.pack(MAGIC, 1, self._code, len(lengths), len(self._documents)))
            index.write(lengths.astype("<i4").tobytes())
            index.write(np.concatenate([[0], ends])[: len(lengths)].astype("<i8").tobytes())
            index.write(np.frombuffer(self._documents, np.int64).astype("<i8").tobytes())
            _flush(index)
        _flush(self._file)
        for ending, path in self._aside.items():  # the index last: a .bin without one is no pair
            os.replace(path, beside(self.prefix, ending))


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
