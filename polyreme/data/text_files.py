"""Text files, plain or compressed, read in pieces within bounds; lines that cannot be read are named and counted."""

import contextlib
import gzip
import logging
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polyreme.errors import DataError
from polyreme.io.archives import open_unpacked

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Endings of names of files that are unpacked."""
_CHUNK_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 24  # longer is not text with lines; it would be held in memory whole
_log = logging.getLogger("polyreme.data")


@dataclass
class BadLines:
    """Lines of text files that cannot be read: logged and left out, at most `most` of them, which `setting` says."""

    most: int = 0
    setting: str = "data.skip_bad"
    lines: set[str] = field(default_factory=set)
    """file:line of each that was left out."""

    def leave_out(self, line: str, why: str, cure: str) -> None:
        """Note a line, once however often the file is read. Raises DataError for one that is one too many."""
        if line in self.lines:
            return
        if not self.most:
            raise DataError(f"{line}: {why}; {cure}, or leave out up to n such lines with {self.setting}=n")
        if len(self.lines) == self.most:
            raise DataError(
                f"{line}: {why}; {self.most} lines before it were left out, which is all that {self.setting} "
                f"allows: {cure}, or raise {self.setting}"
            )
        self.lines.add(line)
        _log.warning("%s: %s; left out, %d of at most %d", line, why, len(self.lines), self.most)


class LineReport(Protocol):
    """Is told of lines that cannot be read."""

    def leave_out(self, line: str, why: str, cure: str) -> None: ...


def read_chunks(path: Path, bad: BadLines | None = None) -> Iterator[str]:
    """Text of a file, plain or compressed as its name says, in pieces that join to the whole and start where tokens do.

    bad: how many lines that are not UTF-8, or over-long, may be left out, none by default. Raises DataError with
    file:line for more of them, and for a broken stream.
    """
    bad = BadLines() if bad is None else bad
    carry = ""
    for line, block in line_blocks(path, bad):
        text = carry + decode(block, path, line, bad)
        # white space leads the next piece: byte-level BPE never joins a letter to the white space after it
        body = text.rstrip()
        if body != text and text[len(body)] not in " \t\r\n":
            body = ""  # rarer white space, which Python and the tokenizer do not class alike: wait for a plain cut
        carry = text[len(body) :]
        if body:
            yield body
    if carry:
        yield carry


def line_blocks(path: Path, bad: BadLines) -> Iterator[tuple[int, bytes]]:
    """Bytes of a file, decompressed, cut after line ends, and the number of the first line of each."""
    rest, line, in_long_line = b"", 1, False
    try:
        with open_unpacked(path, compression=path.suffix in COMPRESSED) as file:
            while piece := file.read(_CHUNK_BYTES):
                if in_long_line:
                    _, end, piece = piece.partition(b"\n")
                    in_long_line = not end
                    line += len(end)
                head, end, rest = (rest + piece).rpartition(b"\n")
                if end:
                    yield line, head + end
                    line += head.count(b"\n") + 1
                if len(rest) > _MAX_LINE_BYTES:
                    bad.leave_out(f"{path}:{line}", f"line is longer than {_MAX_LINE_BYTES:,} bytes", "break it up")
                    rest, in_long_line = b"", True
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}:{line}: broken {_stream(path)}: {error}; fetch the file again") from None
    except OSError as error:
        if error.errno is None:  # of the stream, not of the file
            raise DataError(f"{path}:{line}: broken {_stream(path)}: {error}; fetch the file again") from None
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if rest:
        yield line, rest


def decode(block: bytes, path: Path, line: int, bad: LineReport) -> str:
    """The text of whole lines, of which `line` is the first's number, without those that are not UTF-8."""
    with contextlib.suppress(UnicodeDecodeError):
        return block.decode("utf-8")
    texts = []
    for number, row in enumerate(block.split(b"\n"), line):
        try:
            texts.append(row.decode("utf-8"))
        except UnicodeDecodeError as error:
            why = f"byte 0x{row[error.start]:02x} is not UTF-8"
            bad.leave_out(f"{path}:{number}", why, "convert the file to UTF-8")
    return "\n".join(texts)


def _stream(path: Path) -> str:
    return f"{COMPRESSED.get(path.suffix, 'compressed')} stream"
