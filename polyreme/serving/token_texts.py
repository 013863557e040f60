"""Texts of single tokens beside their logprobs."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from tokenizers import pre_tokenizers

from polyreme.generation.tokenizer import TextTokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary is for: printable ones are themselves, others are moved
    above 255 in order."""
    characters = set(pre_tokenizers.ByteLevel.alphabet())
    own = {c: ord(c) for c in characters if ord(c) < 256}
    moved = sorted(characters - own.keys())
    return own | dict(zip(moved, sorted(set(range(256)) - set(own.values())), strict=True))


class TokenTexts:
    """Strings and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in type(tokenizer.tokenizer.decoder).__name__
        self._special = tokenizer.tokenizer.get_added_tokens_decoder()

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text. Empty for an id that the tokenizer has not."""
        name = self._tokenizer.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._special:
            return name.encode()
        table = _bytes_of_characters()
        if self._is_byte_level and all(c in table for c in name):
            return bytes(table[c] for c in name)
        byte = _BYTE.fullmatch(name)
        if byte:
            return bytes([int(byte[1], 16)])
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def text_of(self, token: int) -> str:
        """A string for a token, as OpenAI writes one that is no whole characters: bytes:\\xe2\\x82."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def texts_of(self, tokens: Sequence[int]) -> list[str]:
        """text_of of each."""
        return [self.text_of(token) for token in tokens]
