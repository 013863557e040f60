"""The text of tokens as they come: what is handed out stays, characters are whole, stop strings are left out."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme.generation.tokenizer import TextTokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_PENDING = 3
"""Bytes, and so tokens or replacement characters, that the beginning of a UTF-8 character may have."""
_NEIGHBOURS = 8
"""Tokens before a text by which its first one is written."""


class TextStream:
    """Pieces of the text that token ids make, as soon as no later token can change them.

    What `add` and `finish` return, joined, is the whole text, however the ids are cut into calls. For tokenizers whose
    text of some ids begins with the text of fewer, which all byte-level ones are, it is what decode gives of all ids. A
    replacement character is in it only where the bytes are no UTF-8.

    stop: strings at which the text ends, left out, the one that is complete first; `stopped` says that one was seen.
    min_tokens: strings that are complete with fewer tokens are text. after: ids whose text stands before, for a
    tokenizer that writes the first token of a text in another way than the same one behind others.

    >>> from polyreme.models.tokenizer import train_byte_level_bpe
    >>> tokenizer = TextTokenizer(train_byte_level_bpe(iter(["ab"]), 258))
    >>> stream = TextStream(tokenizer, stop=["END"])
    >>> [stream.add([i]) for i in tokenizer.encode("né EN. END")], stream.finish()
    (['n', '', 'é', ' ', '', '', 'EN.', ' ', '', '', ''], '')
    """

    stopped: bool

    def __init__(
        self, tokenizer: TextTokenizer, stop: Sequence[str] = (), min_tokens: int = 0, after: Sequence[int] = ()
    ) -> None:
        self.stopped = False
        self._tokenizer, self._stop, self._min_tokens = tokenizer, tuple(stop), min_tokens
        self._longest_stop = max(map(len, self._stop), default=0)
        self._ids = list(after)[-_NEIGHBOURS:]
        # ids from _start are decoded, as neighbours decide how a token is written; _text of them is out, up to _sure
        self._start, self._sure = 0, len(self._ids)
        self._text = self._decode(0) if self._ids else ""
        self._count = 0
        # text that is sure but may begin a stop string; what precedes _from cannot be part of one any more
        self._tail, self._from = "", 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that is sure now, with these ids; empty after a stop string."""
        pieces = []
        for token in ids:
            if self.stopped:
                break
            self._count += 1
            pieces.append(self._without_stop(self._next(token), may_stop=self._count >= self._min_tokens))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, where no tokens come any more."""
        if self.stopped:
            return ""
        whole = self._decode(self._start)
        if whole.startswith(self._text):
            rest = whole[len(self._text) :]
        else:
            rest = self._decode(self._sure)
        self._start = self._sure = len(self._ids)
        self._text = ""
        piece = self._without_stop(rest, may_stop=self._count >= self._min_tokens)
        if self.stopped:
            return piece
        piece, self._tail = piece + self._tail, ""
        return piece

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:])

    def _next(self, token: int) -> str:
        """The text that becomes sure with a token, stop strings not looked at."""
        self._ids.append(token)
        whole = self._decode(self._start)
        broken = len(whole) - len(whole.rstrip(_BROKEN))
        if broken:
            # the last ones may become a character; those before them are what was generated
            whole = whole[: len(whole) - min(broken, _MOST_PENDING)]
            if broken <= _MOST_PENDING or not whole.startswith(self._text):
                return ""
            piece, self._text = whole[len(self._text) :], whole
            return piece
        piece = whole[len(self._text) :] if whole.startswith(self._text) else self._decode(self._sure)
        if piece:
            # the tokens of this piece are what the next one is decoded after
            self._start, self._sure = self._sure, len(self._ids)
            self._text = self._decode(self._start)
        return piece

    def _without_stop(self, text: str, *, may_stop: bool) -> str:
        """What of the tail and this text is sure to be before any stop string; the rest is the tail."""
        if not self._stop:
            return text
        tail = self._tail + text
        if not may_stop:
            # a string that is complete by now is text; one that is begun may still end it
            self._from = len(tail)
        else:
            ends = [
                (end, place)
                for string in self._stop
                if (place := self._first(tail, string)) >= 0
                if (end := place + len(string))
            ]
            if ends:
                self.stopped, self._tail = True, ""
                return tail[: min(ends)[1]]
        keep = self._begun(tail)
        cut = len(tail) - keep
        self._tail, self._from = tail[cut:], max(0, self._from - cut)
        return tail[:cut]

    def _first(self, tail: str, string: str) -> int:
        """The index after _from at which a string first ends, or -1."""
        return tail.find(string, max(0, self._from - len(string) + 1))

    def _begun(self, tail: str) -> int:
        """The number of characters at the end that may begin a stop string."""
        most = min(self._longest_stop - 1, len(tail))
        lengths = range(most, 0, -1)
        return next((n for n in lengths if any(s.startswith(tail[-n:]) and len(s) > n for s in self._stop)), 0)
