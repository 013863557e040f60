"""Token files as samples: windows of one length."""

from __future__ import annotations

import numpy as np

from polyreme.data.token_file import TokenFile


class TokenDataset:
    """Windows of seq_len tokens with the token that follows each: map-style, deterministic, cheap to send to a worker.

    Item i is (tokens, labels), both int32 `[seq_len]`; labels are the tokens one place on. Windows do not overlap, what
    is left at the end is dropped.
    """

    tokens: TokenFile
    start: int
    stop: int
    seq_len: int

    def __init__(self, tokens: TokenFile, start: int, stop: int, seq_len: int):
        self.tokens, self.start, self.stop, self.seq_len = tokens, start, stop, seq_len

    def __len__(self) -> int:
        return max(0, (self.stop - self.start - 1) // self.seq_len)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of a data set of {length}")
        begin = self.start + (index % length) * self.seq_len
        window = self.tokens.window(begin, self.seq_len + 1)
        return window[:-1], window[1:]
