"""Conversations to tokens, and which of them a model is asked for: the text of answers and the token that ends each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import xxhash

from polyreme.data.chat_rows import ChatRow, Message
from polyreme.data.text_files import BadLines
from polyreme.errors import ConfigError, DataError, did_you_mean

TRUNCATIONS = ("turns", "drop", "cut", "refuse")
"""What becomes of a conversation that is too long."""


class ChatTokenizer(Protocol):
    """The part of generation.TextTokenizer that conversations need. end: ids that end a text."""

    @property
    def end(self) -> Sequence[int]: ...

    @property
    def special_texts(self) -> Sequence[str]:
        """The texts of special tokens."""
        ...

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> Any:
        """Ids of a conversation as the server gives them to a model."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        ...


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Settings by which conversations become tokens.

    max_tokens: of one conversation. train_on_prompt: a model is asked for every token, not for answers alone.
    mask_history: it is asked for the last answer alone. truncation, of conversations that are longer: turns leaves out
    turns at their end until what is left ends with a whole answer, drop leaves out the conversation, cut cuts it where
    it is full, refuse raises DataError; all but the last are counted.
    """

    max_tokens: int
    train_on_prompt: bool = False
    mask_history: bool = False
    truncation: str = "turns"

    def __post_init__(self) -> None:
        if self.truncation not in TRUNCATIONS:
            raise ConfigError(f"truncation {self.truncation!r} is unknown{did_you_mean(self.truncation, TRUNCATIONS)}")
        if self.max_tokens < 2:
            raise ConfigError(f"max_tokens={self.max_tokens}: a conversation has at least 2 tokens; give more")


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """An answer's tokens, begin to end - 1, the one that ends it included. message: its number in the conversation."""

    message: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """Tokens of a conversation and whether a model is asked for each: ids int32 `[n]`, is_asked bool `[n]`.

    answers: those that are learnt. left_out: what of the conversation is not in the tokens, by what it is.
    """

    ids: np.ndarray
    is_asked: np.ndarray
    answers: tuple[AnswerSpan, ...]
    left_out: Mapping[str, int]

    @property
    def is_empty(self) -> bool:
        """Whether a model is asked for nothing: the conversation is left out."""
        return not self.is_asked.any()


class ChatEncoder:
    """Conversations to tokens by a tokenizer's chat template.

    Raises ConfigError for a template that does not close an answer with one of the tokens that end a text, and for a
    tokenizer that has no such tokens: a model trained so would never stop.
    """

    tokenizer: ChatTokenizer
    form: ChatForm

    def __init__(self, tokenizer: ChatTokenizer, form: ChatForm) -> None:
        self.tokenizer, self.form = tokenizer, form
        self._end = frozenset(tokenizer.end)
        if not self._end:
            raise ConfigError(
                "the tokenizer says of no token that it ends a text; name it as eos_token_id in generation_config.json"
            )
        self._check_template()

    def _check_template(self) -> None:
        messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        prompt = self.tokenizer.encode_chat(messages[:1])
        whole = self.tokenizer.encode_chat(messages, add_generation_prompt=False)
        if not self._end & {*whole[len(prompt) :]}:
            ends = ", ".join(repr(self.tokenizer.decode([i], skip_special_tokens=False)) for i in sorted(self._end))
            shown = self.tokenizer.decode(whole[len(prompt) :], skip_special_tokens=False)
            raise ConfigError(
                f"the chat template does not close an answer with a token that ends a text ({ends}): of the answer 'b' "
                f"it makes {shown!r}; a model trained so would never stop. Set another template, or name the token "
                "that closes answers as eos_token_id in generation_config.json"
            )

    def encode(self, row: ChatRow) -> EncodedChat:
        """Tokens of a row. Raises DataError, naming the row, for answers that the template or the tokenizer does not
        keep apart from what is before them."""
        return self._encode(row, row.messages)

    def spells_special(self, text: str) -> bool:
        """Whether a text has, in letters, one of the tokens that mean something to the model."""
        return any(token in text for token in self.tokenizer.special_texts)

    def encode_rejected(self, row: ChatRow) -> EncodedChat:
        """Tokens of the conversation with the worse answer of a preference."""
        assert row.rejected is not None
        return self._encode(row, row.rejected)

    def _encode(self, row: ChatRow, messages: Sequence[Message]) -> EncodedChat:
        ids, answers = self._rendered(row, messages)
        if not self.form.train_on_prompt:  # nothing is asked behind the last answer
            ids = ids[: answers[-1].end] if answers else []
        left_out = {} if answers else {"conversations without an answer to learn": 1}
        if len(ids) > self.form.max_tokens:
            ids, answers, left_out = self._shortened(row, ids, answers)
        is_asked = np.full(len(ids), self.form.train_on_prompt)
        for answer in answers:
            is_asked[answer.begin : answer.end] = True
        is_asked[:1] = False  # nothing is before the first token
        return EncodedChat(np.array(ids, np.int32), is_asked, tuple(answers), left_out)

    def _shortened(
        self, row: ChatRow, ids: list[int], answers: list[AnswerSpan]
    ) -> tuple[list[int], list[AnswerSpan], dict[str, int]]:
        most, truncation = self.form.max_tokens, self.form.truncation
        if truncation == "refuse":
            raise DataError(f"{row.place}: {len(ids)} tokens, more than {most}; raise that, or set truncation")
        whole = [answer for answer in answers if answer.end <= most]
        begun = [answer for answer in answers if answer.begin < most < answer.end]
        if truncation == "drop" or not (whole or (truncation == "cut" and begun)):
            return [], [], {"conversations left out, too long": 1}
        lost = {
            "answers left out at the end of long conversations": len(answers) - len(whole),
            "answers cut short, without their end": 0,
        }
        if truncation == "turns":
            return ids[: whole[-1].end], whole, {what: count for what, count in lost.items() if count}
        lost = dict(zip(lost, (len(answers) - len(whole) - len(begun), len(begun)), strict=True))
        cut = [AnswerSpan(a.message, a.begin, most) for a in begun]
        return ids[:most], whole + cut, {what: count for what, count in lost.items() if count}

    def _rendered(self, row: ChatRow, messages: Sequence[Message]) -> tuple[list[int], list[AnswerSpan]]:
        """(ids of the conversation, its answers that are learnt)."""
        ids = self._ids(row, messages, False)
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = row.trained if row.trained is not None and messages is row.messages else (True,) * len(numbers)
        answers = []
        for number, is_trained in zip(numbers, trained, strict=True):
            is_last = number == len(messages) - 1
            if is_trained and (is_last or not self.form.mask_history):
                answers.append(self._answer(row, messages, number, ids))
        return ids, answers

    def _answer(self, row: ChatRow, messages: Sequence[Message], number: int, ids: list[int]) -> AnswerSpan:
        """The span of an answer: from behind the ids that a server would give for the messages before it, to the end
        token."""
        place = f"{row.place}: messages[{number}]"
        before = self._ids(row, messages[:number], True)
        through = ids if number == len(messages) - 1 else self._ids(row, messages[: number + 1], False)
        begin = len(before)
        if ids[:begin] != before:
            same = next((i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), begin))
            shown = self.tokenizer.decode(ids[max(same - 4, 0) : same + 8], skip_special_tokens=False)
            raise DataError(
                f"{place}: the tokens before this answer are others in the whole conversation than those a server "
                f"gives a model to answer to, from token {same} on ({shown!r}): the template changes earlier turns, "
                "or the tokenizer joins the end of the prompt and the beginning of the answer. Take away white space "
                "at the answer's beginning, or learn last answers alone with mask_history"
            )
        ends = [i for i, token in enumerate(through[begin:], begin) if token in self._end]
        if len(ends) != 1 or ids[: ends[0] + 1] != through[: ends[0] + 1]:
            what = "is closed by no end token" if not ends else "spells out a token that ends a text"
            raise DataError(f"{place}: this answer {what if len(ends) != 1 else 'is changed by later turns'}; mend it")
        return AnswerSpan(number, begin, ends[0] + 1)

    def _ids(self, row: ChatRow, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        variables = {} if row.tools is None else {"tools": list(row.tools)}
        try:
            return self.tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        except ConfigError as error:
            raise DataError(f"{row.place}: {error}") from None


class TokenArray:
    """Tokens in memory, read by position as those of a file."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def window(self, start: int, count: int) -> np.ndarray:
        """Tokens start to start + count - 1."""
        return self._tokens[start : start + count]


@dataclass(frozen=True)
class ChatTokens:
    """Conversations one after another, as data.packing.PackedDataset takes them.

    ids int32 `[n]`; is_asked bool `[n]`; document_starts int64 `[conversations + 1]`; places: where each came from.
    left_out: conversations and answers that are not whole, by why.
    """

    ids: np.ndarray
    is_asked: np.ndarray
    document_starts: np.ndarray
    places: tuple[str, ...]
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> TokenArray:
        """Tokens by position."""
        return TokenArray(self.ids)

    @property
    def num_documents(self) -> int:
        """Conversations."""
        return len(self.document_starts) - 1

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, is_asked) of a conversation."""
        part = slice(int(self.document_starts[number]), int(self.document_starts[number + 1]))
        return self.ids[part], self.is_asked[part]

    @cached_property
    def digest(self) -> str:
        """xxh3_128 of all of it, hex: what a run that resumes compares."""
        state = xxhash.xxh3_128()
        for array in (self.ids, self.is_asked, self.document_starts):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()


def encode_rows(rows: Sequence[ChatRow], encoder: ChatEncoder, bad: BadLines | None = None) -> ChatTokens:
    """All rows as tokens. bad: as of chat_rows.read_rows. Raises DataError also where nothing is left."""
    bad = BadLines() if bad is None else bad
    chats, places, counts = [], [], Counter[str]()
    for row in rows:
        try:
            chat = encoder.encode(row)
        except DataError as error:
            bad.leave_out(row.place, str(error).removeprefix(f"{row.place}: "), "mend it")
            continue
        counts.update(chat.left_out)
        if not chat.is_empty:
            chats.append(chat)
            places.append(row.place)
    if not chats:
        why = ", ".join(f"{count} {what}" for what, count in counts.items()) or "there are no rows"
        raise DataError(f"no conversation is left to learn from ({why}); give more rows, or raise the length")
    starts = np.concatenate([[0], np.cumsum([len(chat.ids) for chat in chats], dtype=np.int64)])
    ids, is_asked = (np.concatenate([getattr(chat, name) for chat in chats]) for name in ("ids", "is_asked"))
    return ChatTokens(ids, is_asked, starts, tuple(places), dict(counts))
