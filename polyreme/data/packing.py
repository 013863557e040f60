"""Documents as samples of one length: cut into pieces that fit, which share rows or are padded."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from polyreme.errors import ConfigError

NO_LABEL = -100
"""The label that a loss leaves out."""


class TokenWindows(Protocol):
    """Tokens that are read by position."""

    def window(self, start: int, count: int) -> np.ndarray: ...


class TokenDocuments(Protocol):
    """Documents one after another. document_starts: the token each begins at and how many there are, int64 [d + 1]."""

    @property
    def tokens(self) -> TokenWindows: ...

    @property
    def document_starts(self) -> np.ndarray: ...


def cut_documents(starts: np.ndarray, seq_len: int, ahead: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(the token each piece begins at, how many places of a row it takes), int64 `[pieces]`, of documents whose bounds
    are starts `[documents + 1]`.

    ahead: how far behind a token the one lies that is asked about there. Of a document of n tokens n - ahead have one,
    and a piece has seq_len of them at most: its labels end where the next piece's begin, so that none is lost. A
    document of `ahead` tokens gives none.

    >>> cut_documents(np.array([0, 1, 8]), 4)
    (array([1, 5]), array([4, 2]))
    """
    slots = np.maximum(np.diff(starts) - ahead, 0)
    counts = -(-slots // seq_len)
    document = np.repeat(np.arange(len(slots)), counts)
    before = (np.arange(len(document)) - (np.cumsum(counts) - counts)[document]) * seq_len
    return starts[:-1][document] + before, np.minimum(slots[document] - before, seq_len)


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: (order `[pieces]`, bounds `[rows + 1]`), row r having order[bounds[r]:bounds[r + 1]].

    From the longest piece on, each goes into the fullest row that has room for it. Rows with as much room as each other
    are taken together, so that time follows the number of lengths and not of pieces. Source: D. S. Johnson,
    "Near-optimal bin packing algorithms", MIT 1973. Raises ConfigError for a piece longer than capacity.

    >>> best_fit(np.array([3, 5, 2, 6]), 8)
    (array([3, 2, 1, 0]), array([0, 2, 4]))
    """
    if len(sizes) and (sizes.min() < 1 or sizes.max() > capacity):
        raise ConfigError(f"pieces of {sizes.min()} to {sizes.max()} tokens in rows of {capacity}; cut them up first")
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), np.int64)
    rows_with: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # by the room that is left
    rooms = 0  # bit r: whether rows_with[r] has any
    num_rows, begin = 0, 0
    lengths, counts = np.unique(-sizes, return_counts=True)
    for length, count in zip((-lengths).tolist(), counts.tolist(), strict=True):
        pieces, begin = order[begin : begin + count], begin + count
        while len(pieces):
            fitting = rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            per_row = room // length  # the fullest row takes pieces until none fits
            needed = -(-len(pieces) // per_row)
            if fitting:
                rows = np.concatenate(rows_with[room])
                rows, rest = rows[:needed], rows[needed:]
                rows_with[room] = [rest] if len(rest) else []
                rooms &= ~(0 if len(rest) else 1 << room)
            else:
                rows = np.arange(num_rows, num_rows + needed)
                num_rows += needed
            placed, pieces = pieces[: per_row * len(rows)], pieces[per_row * len(rows) :]
            row_of[placed] = np.repeat(rows, per_row)[: len(placed)]
            last = len(placed) - per_row * (len(rows) - 1)  # of the last row, which may have room for more
            for part, taken in ((rows[:-1], per_row), (rows[-1:], last)):
                left = room - taken * length
                if left and len(part):
                    rows_with[left].append(part)
                    rooms |= 1 << left
    by_row = np.argsort(row_of[order], kind="stable")
    return order[by_row], np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=num_rows))])


class PackedDataset:
    """Documents first to last - 1 as rows of seq_len tokens, of whole documents where they fit: map-style.

    is_asked: for every token of the documents whether a model is asked for it, bool [tokens]; None for all. is_packed:
    pieces share rows, as best_fit says; item i is then row(i). Otherwise a row is one piece, and item i tokens and
    labels, int32 `[seq_len]` each; with ahead=0, for models that look both ways, row(i) as well. ahead: as of
    cut_documents.
    """

    order: np.ndarray
    bounds: np.ndarray

    tokens: TokenWindows
    seq_len: int
    is_packed: bool
    is_asked: np.ndarray | None
    starts: np.ndarray
    slots: np.ndarray

    def __init__(
        self,
        documents: TokenDocuments,
        first: int,
        last: int,
        seq_len: int,
        is_packed: bool = True,
        is_asked: np.ndarray | None = None,
        ahead: int = 1,
    ) -> None:
        self.tokens, self.seq_len, self.is_packed, self.is_asked = documents.tokens, seq_len, is_packed, is_asked
        self.ahead = ahead
        self.starts, self.slots = cut_documents(documents.document_starts[first : last + 1], seq_len, ahead)
        if is_packed:
            self.order, self.bounds = best_fit(self.slots, seq_len)
        else:
            self.order, self.bounds = np.arange(len(self.slots)), np.arange(len(self.slots) + 1)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def fill(self) -> float:
        """The part of all places that has a label."""
        return float(self.slots.sum() / max(len(self) * self.seq_len, 1))

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = self.row(index)
        return (inputs if self.is_packed or not self.ahead else inputs[0]), labels

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(int32 `[3, seq_len]`: tokens, for each the place where its document ends, and its place in the document;
        int32 `[seq_len]`: labels, the tokens that lie `ahead`).

        Behind the last piece tokens are 0 and labels NO_LABEL, as documents of one token that nobody sees.
        """
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of a data set of {length}")
        row = index % length
        inputs, labels = np.zeros((3, self.seq_len), np.int32), np.full(self.seq_len, NO_LABEL, np.int32)
        tokens, ends, places = inputs
        ends[:] = np.arange(1, self.seq_len + 1)
        begin = 0
        for piece in self.order[self.bounds[row] : self.bounds[row + 1]]:
            start, count = int(self.starts[piece]), int(self.slots[piece])
            window, stop = self.tokens.window(start, count + self.ahead), begin + count
            tokens[begin:stop], labels[begin:stop] = window[:count], window[self.ahead :]
            if self.is_asked is not None:
                labels[begin:stop][~self.is_asked[start + self.ahead : start + self.ahead + count]] = NO_LABEL
            ends[begin:stop], places[begin:stop] = stop, np.arange(count)
            begin = stop
        return inputs, labels
