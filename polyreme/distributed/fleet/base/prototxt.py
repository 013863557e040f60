"""Nested settings as protobuf's text format: written so that its parsers accept it, and read back.

Source: protobuf.dev/reference/protobuf/textformat-spec. A group of settings is a message, a list a repeated
field. What is read is untyped: words and numbers stay `Word`s until the table says what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from polyreme.errors import ConfigError

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_UNESCAPED = {
    "n": 10, "r": 13, "t": 9, "a": 7, "b": 8, "f": 12, "v": 11, '"': 34, "'": 39, "\\": 92, "?": 63,
}  # fmt: skip
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*) | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>[-+]?[A-Za-z0-9_.](?:[A-Za-z0-9_.]|(?<=[eE])[-+])*) | (?P<mark>[{}<>\[\]:;,])""",
    re.VERBOSE,
)


class Word(str):
    """A value without quotes: a number, true, false or a name."""

    __slots__ = ()


def write(values: Mapping[str, Any], indent: str = "") -> str:
    """The text of nested settings; a Word is written without quotes.

    >>> print(write({"amp": True, "amp_configs": {"decr_ratio": 0.5, "custom_white_list": ["matmul"]}}), end="")
    amp: true
    amp_configs {
      decr_ratio: 0.5
      custom_white_list: "matmul"
    }
    """
    return "".join(_lines(values, indent))


def _lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield f"{indent}{name} {{\n{write(each, indent + '  ')}{indent}}}\n"
            else:
                yield f"{indent}{name}: {_scalar(each)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not isinstance(value, Word):
        return '"' + "".join(_ESCAPES.get(c, c if c.isprintable() else _octal(c)) for c in value) + '"'
    return str(value)


def _octal(char: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in char.encode())


def read(text: str, where: str = "the text") -> dict[str, list[Any]]:
    """name -> the values given for it, in order: a Word, a str (was in quotes) or the same again for a message.

    Raises ConfigError with the line of what is not text format. where: what the text is, for the message.

    >>> read('stage: 2 order: ["dp", "mp"] pp_configs { profiling: true }')
    {'stage': ['2'], 'order': ['dp', 'mp'], 'pp_configs': [{'profiling': ['true']}]}
    """
    return _PrototxtReader(text, where).message(None)


class _PrototxtReader:
    """The tokens of a text, one ahead of what was taken."""

    def __init__(self, text: str, where: str) -> None:
        self.where, self.line = where, 1
        self.tokens = self._split(text)
        self.next = next(self.tokens)

    def _split(self, text: str) -> Iterator[tuple[str, str, int]]:
        position, line = 0, 1
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ConfigError(f"{self.where}, line {line}: cannot read {text[position : position + 20]!r}")
            if match.lastgroup != "space":
                yield match.lastgroup or "", match[0], line
            line += match[0].count("\n")
            position = match.end()
        while True:
            yield "end", "", line

    def take(self, *wanted: str) -> str:
        kind, token, line = self.next
        if wanted and kind not in wanted and token not in wanted:
            got = repr(token) if kind != "end" else "the end"
            raise ConfigError(f"{self.where}, line {line}: got {got} where {' or '.join(wanted)} is due")
        self.next = next(self.tokens)
        self.line = line
        return token

    def message(self, end: str | None) -> dict[str, list[Any]]:
        fields: dict[str, list[Any]] = {}
        while self.next[0] != "end" if end is None else self.next[1] != end:
            name = self.take("word")
            fields.setdefault(name, []).extend(self.values())
            if self.next[1] in (",", ";"):
                self.take()
        if end is not None:
            self.take(end)
        return fields

    def values(self) -> list[Any]:
        if self.next[1] in ("{", "<"):
            return [self.value()]
        self.take(":")
        if self.next[1] != "[":
            return [self.value()]
        self.take("[")
        result: list[Any] = []
        while self.next[1] != "]":
            result.append(self.value())
            if self.next[1] != "]":
                self.take(",")
        self.take("]")
        return result

    def value(self) -> Any:
        kind, token, _ = self.next
        if token in ("{", "<"):
            self.take()
            return self.message({"{": "}", "<": ">"}[token])
        if kind != "text":
            return Word(self.take("word", "text"))
        parts = []
        while self.next[0] == "text":  # texts side by side are one
            parts.append(_unescape(self.take("text")[1:-1]))
        return b"".join(parts).decode()


def _unescape(text: str) -> bytes:
    def byte(match: re.Match[bytes]) -> bytes:
        code = match[1].decode()
        if code[0] == "x":
            return bytes([int(code[1:], 16)])
        return bytes([int(code, 8) if code[0] in "01234567" else _UNESCAPED.get(code, ord(code))])

    return re.sub(rb"\\(x[0-9a-fA-F]{1,2}|[0-3]?[0-7]{1,2}|.)", byte, text.encode())
