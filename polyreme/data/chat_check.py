"""Checks of rows of conversations before a model learns from them: faults, and what looks like one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from polyreme.data.chat_encoding import ChatEncoder, EncodedChat
from polyreme.data.chat_rows import ChatRow
from polyreme.data.duplicates import SameText
from polyreme.data.packing import best_fit
from polyreme.errors import DataError

_SHOWN = 5  # places in a line before it says how many more


class _Note(Protocol):
    def __call__(self, what: str, place: str, is_error: bool = False) -> None: ...


@dataclass
class Finding:
    """Rows that one thing is the matter with. is_error: a model would learn something wrong, or nothing, of them."""

    what: str
    is_error: bool
    places: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shown = ", ".join(self.places[:_SHOWN])
        more = len(self.places) - _SHOWN
        return f"{self.what}: {len(self.places)} ({shown}{f' and {more} more' if more > 0 else ''})"


@dataclass
class ChatReport:
    """The result of checking all rows. lengths and asked: tokens of each conversation, and those a model is asked
    for."""

    findings: list[Finding]
    lengths: list[int]
    asked: list[int]
    errors: list[str]
    """Messages of rows that cannot be encoded."""

    @property
    def is_good(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors and not any(finding.is_error for finding in self.findings)

    def lines(self, max_tokens: int) -> Iterator[str]:
        """The report as text; max_tokens: of a row that conversations share."""
        lengths = np.array(self.lengths)
        if len(lengths):
            total = int(lengths.sum())
            shown = np.percentile(lengths, [0, 50, 90, 100], method="nearest")
            points = ", ".join(f"{n} {v:,}" for n, v in zip(("least", "50%", "90%", "most"), shown, strict=True))
            yield f"{len(lengths):,} conversations, {total:,} tokens, {sum(self.asked):,} of them counted in the loss"
            yield f"  tokens of a conversation: mean {lengths.mean():,.1f}; {points}"
            places = np.clip(lengths - 1, 1, max_tokens)  # the last token of each is a label alone
            rows = len(best_fit(places, max_tokens)[1]) - 1
            padded, packed = (1 - int(places.sum()) / (number * max_tokens) for number in (len(lengths), rows))
            yield f"  rows of {max_tokens:,} tokens: {100 * padded:.1f}% padding one by one, {100 * packed:.1f}% packed"
        for finding in self.findings:
            yield f"{'error' if finding.is_error else 'note'}: {finding}"
        for error in self.errors[:_SHOWN]:
            yield f"error: {error}"
        if len(self.errors) > _SHOWN:
            yield f"error: {len(self.errors) - _SHOWN:,} more rows cannot be encoded"
        if not self.findings and not self.errors:
            yield "nothing is wrong with them"


def check_rows(rows: Sequence[ChatRow], encoder: ChatEncoder, bos: int | None = None) -> ChatReport:
    """Encode every row and look for: a doubled token at the beginning (bos), answers without their end, conversations
    that are too long, empty messages, duplicates, and texts that spell out special tokens."""
    findings: dict[str, Finding] = {}
    report = ChatReport([], [], [], [])

    def note(what: str, place: str, is_error: bool = False) -> None:
        findings.setdefault(what, Finding(what, is_error)).places.append(place)

    seen = SameText()
    for row in rows:
        if not seen.is_new(seen.mark(json.dumps([row.messages, row.rejected], sort_keys=True))):
            note("rows that come again", row.place)
        for role in sorted({m["role"] for m in row.messages if not m["content"].strip() and not m.get("tool_calls")}):
            note(f"empty messages of {role}", row.place, is_error=role == "assistant")
        for role in sorted({m["role"] for m in row.messages if encoder.spells_special(m["content"])}):
            note(f"messages of {role} that spell out a special token", row.place)
        try:
            chats = [encoder.encode(row), *([] if row.rejected is None else [encoder.encode_rejected(row)])]
        except DataError as error:
            report.errors.append(str(error))
            continue
        if row.rejected is not None and row.rejected == row.messages:
            note("rows whose chosen and rejected are the same", row.place, is_error=True)
        for chat in chats:
            _look_at(chat, row, encoder, bos, note)
            if not chat.is_empty:
                report.lengths.append(len(chat.ids))
                report.asked.append(int(chat.is_asked.sum()))
    report.findings = sorted(findings.values(), key=lambda finding: (not finding.is_error, finding.what))
    return report


def _look_at(chat: EncodedChat, row: ChatRow, encoder: ChatEncoder, bos: int | None, note: _Note) -> None:
    ids = chat.ids.tolist()
    if bos is not None and any(a == b == bos for a, b in itertools.pairwise(ids)):
        note("the token that begins a text stands twice", row.place, is_error=True)
    if any(ids[answer.end - 1] not in encoder.tokenizer.end for answer in chat.answers):
        note("answers without the token that ends them in the loss", row.place, is_error=True)
    for what in chat.left_out:
        note(what, row.place)
