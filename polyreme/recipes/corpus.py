"""The data of a run on token samples: both splits, and their properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from polyreme.data.packing import NO_LABEL, PackedDataset
from polyreme.data.windows import TokenDataset
from polyreme.io.sampler import RandomSampler

TOKENIZER = "tokenizer.json"  # in the output folder of a run


@dataclass(frozen=True)
class RowForm:
    """The form of a row for a model: its labels are the tokens that lie `ahead` of each, all of them, or what wrap
    makes of rows, given the file of their tokenizer, which need not exist."""

    ahead: int = 1
    wrap: Callable[[Any, Path], Any] = lambda rows, tokenizer: rows

    def windows(self, tokens: Any, start: int, stop: int, seq_len: int) -> Any:
        """Rows of seq_len tokens each, one after another, of tokens start to stop - 1."""
        if self.ahead:
            return TokenDataset(tokens, start, stop, seq_len)
        count = max(0, stop - start) // seq_len
        bounds = WindowBounds(tokens, start + seq_len * np.arange(count + 1))
        return PackedDataset(bounds, 0, count, seq_len, is_packed=False, ahead=self.ahead)


class WindowBounds(NamedTuple):
    """Windows of tokens as documents."""

    tokens: Any
    document_starts: np.ndarray


NEXT_TOKENS = RowForm()


@dataclass(frozen=True)
class Corpus:
    """Prepared data: both splits, the digest a resumed run compares, and the folder it lies in.

    sampler: makes the order in which a run reads the samples, of (data set, generator).
    """

    train: Any
    validation: Any
    digest: str
    num_tokens: int
    vocab_size: int
    folder: Path
    sampler: Callable[..., Any] = RandomSampler
    tokenizer_file: str = "tokenizer.json"

    @property
    def summary(self) -> str:
        """The size of the data, in words."""
        return f"{self.num_tokens:,} tokens of a vocabulary of {self.vocab_size:,}"

    def shown(self, index: int, marks: Any = None) -> str:
        """A training sample as the model sees it, decoded again; every token counts in the loss: marks is not used."""
        inputs, labels = self.train[index]
        tokens, _, places = inputs if inputs.ndim == 2 else (inputs, None, np.arange(len(inputs)))
        counted = labels != NO_LABEL
        begins = np.flatnonzero(places == 0)[1:]
        parts = zip(np.split(tokens, begins), np.split(counted, begins), strict=True)
        texts = [self._text(row[is_counted]) for row, is_counted in parts if is_counted.any()]  # without what pads it
        return "\n".join([f"{len(tokens)} tokens, {counted.sum()} counted in the loss", *texts])

    def _text(self, tokens: np.ndarray) -> str:
        row = tokens.tolist()
        return str(row) if self.tokenizer is None else self.tokenizer.decode(row, skip_special_tokens=False)

    def keep_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer beside what a run leaves."""
        assert self.tokenizer is not None
        temporary = folder / f".{TOKENIZER}.tmp"
        self.tokenizer.save(str(temporary), pretty=False)
        temporary.replace(folder / TOKENIZER)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the tokens, or None where none is known, as for synthetic ones."""
        path = self.folder / self.tokenizer_file
        return Tokenizer.from_file(str(path)) if path.exists() else None
