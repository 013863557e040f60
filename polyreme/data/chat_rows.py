"""Rows that models are fine-tuned on: the common formats of data sets, each read into one typed value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from polyreme.data.record_files import Record, read_records
from polyreme.data.text_files import BadLines
from polyreme.errors import DataError, did_you_mean
from polyreme.registry import Registry

Message: TypeAlias = dict[str, Any]
"""role, content, and what else a template reads: tool_calls, name, ..."""

ROLES = ("system", "user", "assistant", "tool")
_ROLES = dict(zip(ROLES, ROLES, strict=True)) | {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "bing": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
}


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation that ends with an answer. place: file:line, which errors begin with.

    rejected: the conversation that another, worse answer makes of it, for preferences. is_desirable: what was judged of
    the last answer, for KTO. trained: for each answer whether it is learnt, None for all. tools: what the template is
    told of.
    """

    place: str
    messages: tuple[Message, ...]
    rejected: tuple[Message, ...] | None = None
    is_desirable: bool | None = None
    trained: tuple[bool, ...] | None = None
    tools: tuple[Any, ...] | None = None

    @property
    def kind(self) -> str:
        """The kind of lesson in the row: "answers", "preference" or "judgement"."""
        if self.rejected is not None:
            return "preference"
        return "answers" if self.is_desirable is None else "judgement"


class _FieldError(ValueError):
    """A fault of a field of a row."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of rows. It is one of those that have all keys of required, or of one of the sets of keys in it."""

    name: str
    required: tuple[frozenset[str], ...]
    read: Callable[[str, Mapping[str, Any]], ChatRow]
    """(place, fields) -> the row."""
    aliases: tuple[str, ...] = ()

    def takes(self, fields: Mapping[str, Any]) -> bool:
        """Whether a row with these fields may be of this format."""
        return any(keys <= fields.keys() for keys in self.required)


# parts of rows


def _text(value: Any, field: str) -> str:
    """A text, or one that is given as parts {"type": "text", "text": ...}."""
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        for number, part in enumerate(value):
            if part.get("type") != "text":
                raise _FieldError(f"{field}[{number}].type", f"{part.get('type')!r}; of parts text alone is read")
            _text(part.get("text"), f"{field}[{number}].text")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise _FieldError(field, f"{_describe(value)} where a text is expected")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _FieldError(field, "has half of a surrogate pair, which is no character") from None
    return value


def _describe(value: Any) -> str:
    return "nothing (null)" if value is None else f"a {type(value).__name__}"


def _role(value: Any, field: str) -> str:
    if not isinstance(value, str) or value not in _ROLES:
        raise _FieldError(field, f"{value!r} is no role{did_you_mean(value, _ROLES)}")
    return _ROLES[value]


def _message(value: Any, field: str) -> Message:
    if not isinstance(value, dict):
        raise _FieldError(field, f"{_describe(value)} where a message, an object, is expected")
    names = ("from", "value") if "from" in value and "role" not in value else ("role", "content")
    if names[0] not in value:
        raise _FieldError(field, f"has no {names[0]!r}, but {', '.join(map(repr, value)) or 'no keys'}")
    role, content = value[names[0]], value.get(names[1])
    if names[0] == "from" and role == "function_call":  # the call is the answer, and its text JSON
        call = _call(_text(content, f"{field}.value"), f"{field}.value")
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    message = {"role": _role(role, f"{field}.{names[0]}")}
    calls = value.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _FieldError(f"{field}.tool_calls", f"{_describe(calls)} where a list is expected")
    is_call = bool(calls) and content is None
    message["content"] = "" if is_call else _text(content, f"{field}.{names[1]}")
    others = {key: inner for key, inner in value.items() if key not in names and inner is not None}
    return {**others, **message}


def _call(text: str, field: str) -> dict[str, Any]:
    call = _parsed(text, field)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _FieldError(field, 'is no call {"name": ..., "arguments": ...}')
    return call


def _parsed(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _FieldError(field, f"not JSON ({error})") from None


def _messages(value: Any, field: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _FieldError(field, f"{'an empty list' if value == [] else _describe(value)} where messages are expected")
    return [_message(inner, f"{field}[{number}]") for number, inner in enumerate(value)]


def _turns(value: Any, field: str, role: str) -> list[Message]:
    """Messages, or a text that is one message of this role."""
    return _messages(value, field) if isinstance(value, list) else [{"role": role, "content": _text(value, field)}]


def _tools(fields: Mapping[str, Any]) -> tuple[Any, ...] | None:
    value = fields.get("tools")
    if isinstance(value, str) and value.strip():
        value = _parsed(value, "tools")
    if value is None or value == [] or value == "":
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise _FieldError("tools", f"{_describe(value)} where a list of objects is expected")
    return tuple(value)


def _flag(value: Any, field: str) -> bool:
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise _FieldError(field, f"{value!r} is neither true nor false")


def _system(fields: Mapping[str, Any]) -> list[Message]:
    text = fields.get("system")
    return [] if text in (None, "") else [{"role": "system", "content": _text(text, "system")}]


# formats


def _of_messages(place: str, fields: Mapping[str, Any]) -> ChatRow:
    messages = _messages(fields["messages"], "messages")
    weights = [message.pop("weight", 1) for message in messages]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = tuple(_flag(weights[i], f"messages[{i}].weight") for i in answers)
    return ChatRow(place, tuple(messages), trained=None if all(trained) else trained, tools=_tools(fields))


def _of_prompt(place: str, fields: Mapping[str, Any]) -> ChatRow:
    prompt = _turns(fields["prompt"], "prompt", "user")
    messages = (*_system(fields), *prompt, *_turns(fields["completion"], "completion", "assistant"))
    judged = _flag(fields["label"], "label") if "label" in fields else None
    return ChatRow(place, messages, is_desirable=judged, tools=_tools(fields))


def _of_preference(place: str, fields: Mapping[str, Any]) -> ChatRow:
    chosen = _turns(fields["chosen"], "chosen", "assistant")
    rejected = _turns(fields["rejected"], "rejected", "assistant")
    if "prompt" in fields:
        prompt = [*_system(fields), *_turns(fields["prompt"], "prompt", "user")]
        # some data sets repeat the prompt before each answer
        repeated = prompt[-len(chosen) + 1 :] if len(chosen) > 1 else []
        if repeated and chosen[: len(repeated)] == repeated == rejected[: len(repeated)]:
            chosen, rejected = chosen[len(repeated) :], rejected[len(repeated) :]
        chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
    elif len(chosen) < 2 or chosen[0] != rejected[0]:
        raise _FieldError("prompt", "is missing, and chosen and rejected do not begin with the same messages")
    return ChatRow(place, tuple(chosen), rejected=tuple(rejected), tools=_tools(fields))


def _of_alpaca(place: str, fields: Mapping[str, Any]) -> ChatRow:
    messages = _system(fields)
    history = fields.get("history") or []
    if not isinstance(history, list):
        raise _FieldError("history", f"{_describe(history)} where a list of [question, answer] is expected")
    for number, turn in enumerate(history):
        if not isinstance(turn, list) or len(turn) != 2:
            raise _FieldError(f"history[{number}]", "is no [question, answer]")
        for text, role, part in zip(turn, ("user", "assistant"), (0, 1), strict=True):
            messages.append({"role": role, "content": _text(text, f"history[{number}][{part}]")})
    question = [_text(fields["instruction"], "instruction")]
    if fields.get("input"):
        question.append(_text(fields["input"], "input"))
    messages.append({"role": "user", "content": "\n".join(question)})
    return _answered(place, messages, fields, "output")


def _of_sharegpt(place: str, fields: Mapping[str, Any]) -> ChatRow:
    messages = [*_system(fields), *_messages(fields["conversations"], "conversations")]
    return _answered(place, messages, fields, None)


def _answered(place: str, messages: list[Message], fields: Mapping[str, Any], output: str | None) -> ChatRow:
    """A row whose last answer is its field output, or stands already, or is one of chosen and rejected."""
    if "chosen" in fields or "rejected" in fields:
        both = []
        for name in ("chosen", "rejected"):
            if name not in fields:
                raise _FieldError(name, "is missing beside the other of chosen and rejected")
            value = fields[name]
            answer = _message(value, name) if isinstance(value, dict) else _turns(value, name, "assistant")[0]
            both.append((*messages, answer))
        return ChatRow(place, both[0], rejected=both[1], tools=_tools(fields))
    if output is not None:
        if output not in fields:
            raise _FieldError(output, "is missing, and so are chosen and rejected")
        messages = [*messages, {"role": "assistant", "content": _text(fields[output], output)}]
    judged = _flag(fields["kto_tag"], "kto_tag") if "kto_tag" in fields else None
    return ChatRow(place, tuple(messages), is_desirable=judged, tools=_tools(fields))


def _of_paddle(place: str, fields: Mapping[str, Any]) -> ChatRow:
    questions, answers = _texts(fields["src"], "src"), _texts(fields.get("tgt") or [], "tgt")
    is_open = "response" in fields  # the last question has several answers
    if len(questions) != len(answers) + is_open:
        wanted = "one more than" if is_open else "as many as"
        raise _FieldError(
            "src", f"{len(questions)} texts; there must be {wanted} those of tgt, which has {len(answers)}"
        )
    messages = _system(fields)
    for number, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        if number < len(answers):
            messages.append({"role": "assistant", "content": answers[number]})
    if not is_open:
        labels = fields.get("label")
        if labels is None:
            return ChatRow(place, tuple(messages), tools=_tools(fields))
        labels = labels if isinstance(labels, list) else [labels]
        if len(labels) != len(answers):
            raise _FieldError("label", f"{len(labels)} values for {len(answers)} texts of tgt; give one for each")
        trained = tuple(_flag(label, f"label[{number}]") for number, label in enumerate(labels))
        return ChatRow(place, tuple(messages), trained=trained, tools=_tools(fields))
    responses, sort = fields["response"], fields.get("sort")
    if not isinstance(responses, list) or len(responses) != 2:
        raise _FieldError("response", "is no list of two answers")
    if (
        not isinstance(sort, list)
        or len(sort) != 2
        or any(type(number) not in (int, float) for number in sort)
        or not (sort[0] < sort[1] or sort[0] > sort[1])
    ):
        raise _FieldError("sort", f"{sort!r} does not say which of two responses is better, as [1, 0] does")
    both = [
        (*messages, *_alternating(_texts(response, f"response[{number}]"), f"response[{number}]"))
        for number, response in enumerate(responses)
    ]
    better = 0 if sort[0] > sort[1] else 1  # the smaller number is that of the rejected one
    return ChatRow(place, both[better], rejected=both[1 - better], tools=_tools(fields))


def _texts(value: Any, field: str) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_text(inner, f"{field}[{number}]") for number, inner in enumerate(values)]


def _alternating(texts: Sequence[str], field: str) -> Iterator[Message]:
    if len(texts) % 2 == 0:
        raise _FieldError(field, f"{len(texts)} texts; an answer, or answer, question, answer and so on is expected")
    for number, text in enumerate(texts):
        yield {"role": "user" if number % 2 else "assistant", "content": text}


def _keys(*names: str) -> frozenset[str]:
    return frozenset(names)


FORMATS: Registry[RowFormat] = Registry(
    "type of rows",
    [
        RowFormat("messages", (_keys("messages"),), _of_messages, ("chatml", "openai")),
        RowFormat("prompt_completion", (_keys("prompt", "completion"),), _of_prompt, ("kto",)),
        RowFormat("preference", (_keys("chosen", "rejected"),), _of_preference, ("dpo",)),
        RowFormat("alpaca", (_keys("instruction", "output"), _keys("instruction", "chosen", "rejected")), _of_alpaca),
        RowFormat("sharegpt", (_keys("conversations"),), _of_sharegpt),
        RowFormat("paddle", (_keys("src", "tgt"), _keys("src", "response")), _of_paddle, ("erniekit",)),
    ],
)
"""Formats of rows by the name that train_dataset_type has for them."""


def format_named(name: str) -> RowFormat:
    """The format of this name or alias. Raises ConfigError for one that there is not."""
    return FORMATS.named(FORMATS.canonical_name(name))


def _guess(fields: Mapping[str, Any]) -> RowFormat:
    fitting = [form for form in FORMATS.values() if form.takes(fields)]
    # chosen and rejected belong to three formats, of which the others are told by more keys
    fitting = [form for form in fitting if form.name != "preference" or len(fitting) == 1] or fitting
    if len(fitting) == 1:
        return fitting[0]
    keys = ", ".join(map(repr, fields)) or "none"
    if fitting:
        raise _FieldError("keys", f"{keys} are of several types, {', '.join(f.name for f in fitting)}; say which one")
    forms = "; ".join(" + ".join(sorted(form.required[0])) for form in FORMATS.values())
    raise _FieldError("keys", f"{keys} are of no type of rows; those have {forms}")


def _check(row: ChatRow) -> ChatRow:
    for name, messages in (("", row.messages), ("rejected ", row.rejected or row.messages)):
        last = messages[-1]["role"]
        if last != "assistant":
            what = f"{last!r}; the last message must be an answer, of the assistant"
            raise _FieldError(f"{name}messages[{len(messages) - 1}].role", what)
        if not any(message["role"] != "assistant" for message in messages):
            raise _FieldError(f"{name}messages", "has answers alone; there must be something to answer")
    return row


def read_row(record: Record, form: RowFormat | None = None) -> ChatRow:
    """The row of a record; its format is told by its keys if form is None. Raises DataError with place and field."""
    try:
        form = form or _guess(record.fields)
        if not form.takes(record.fields):
            wanted = " or ".join(" and ".join(sorted(keys)) for keys in form.required)
            keys = ", ".join(map(repr, record.fields)) or "none"
            raise _FieldError("keys", f"{keys}, but rows of type {form.name} have {wanted}")
        return _check(form.read(record.place, record.fields))
    except _FieldError as error:
        raise DataError(f"{record.place}: {error}") from None


def read_rows(paths: Sequence[str | Path], row_type: str | None = None, bad: BadLines | None = None) -> list[ChatRow]:
    """The rows of files, in their order. row_type: their format by name; None: each row's own keys tell.

    bad: how many rows that cannot be read may be left out, none by default. Raises DataError with file, line and field
    for more of them, and for files without a row; ConfigError for an unknown type.

    >>> row = read_row(Record("a.jsonl:1", {"prompt": "To be", "completion": "or not"}))
    >>> [message["content"] for message in row.messages], row.kind
    (['To be', 'or not'], 'answers')
    """
    form = None if row_type is None else format_named(row_type)
    bad = BadLines() if bad is None else bad
    rows = []
    for path in map(Path, paths):
        before = len(rows)
        for record in read_records(path, bad):
            try:
                rows.append(read_row(record, form))
            except DataError as error:
                bad.leave_out(record.place, str(error).removeprefix(f"{record.place}: "), "mend it")
        if len(rows) == before:
            raise DataError(f"{path}: has no rows; give a file that has some")
    return rows


def check_kind(rows: Sequence[ChatRow], kind: str, stage: str) -> None:
    """Raises DataError for the first row that cannot teach what a stage needs: "answers", "preference", "judgement"."""
    needs = {"preference": "chosen and rejected", "judgement": "label", "answers": "one answer each"}
    for row in rows:
        if row.kind != kind:
            raise DataError(f"{row.place}: a row of kind {row.kind}; stage {stage} needs rows with {needs[kind]}")
