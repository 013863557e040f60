"""Calls of tools in what a model writes: read out of the text in the form that its chat template asks for."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolForm:
    """The form in which models of some families write calls: after one of `begins`, up to `end` or the end of the text,
    as JSON: an object with a name and arguments (or parameters), or a list of such. mark: in their chat templates."""

    name: str
    mark: str
    begins: tuple[str, ...]
    end: str = ""


FORMS = (
    ToolForm("hermes", "<tool_call>", ("<tool_call>",), "</tool_call>"),
    # marks that are special tokens are not in the text; bare JSON then begins it
    ToolForm("mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]", '[{"name"')),
    ToolForm("llama", "<|python_tag|>", ("<|python_tag|>", '{"name"')),
    ToolForm("llama", '"parameters": dictionary', ("<|python_tag|>", '{"name"')),
)
"""Of Qwen, Hermes and SmolLM; of Mistral; of LLaMA 3.1 and later."""


def form_of(template: str | None) -> ToolForm | None:
    """The form that a chat template asks for; None where it has no place for tools, or asks for one not known here."""
    if template is None or "tools" not in template:
        return None
    return next((form for form in FORMS if form.mark in template), None)


@dataclass(frozen=True)
class ToolCall:
    """One call; arguments: JSON, as it was written where it is a text."""

    name: str
    arguments: str

    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        called = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": called}


class ToolCallReader:
    """Parts a text into what is said and what is called, as it comes.

    form: of the model; None where the whole text is JSON that a grammar asked for: of the calls, or, where `name` is
    given, of the arguments of this one. A call is told when it is whole; what does not read as one is text.

    >>> reader = ToolCallReader(FORMS[0], ["add"])
    >>> reader.add('Well. <tool_call>{"name": "add", "argu'), reader.add('ments": {"a": 1}}</tool_call>')
    ('Well. ', '')
    >>> reader.finish()
    ('', [ToolCall(name='add', arguments='{"a": 1}')])
    """

    def __init__(self, form: ToolForm | None, names: Sequence[str], name: str | None = None) -> None:
        self._form, self._names, self._name = form, frozenset(names), name
        self._text, self._is_begun, self._was_said = "", False, False

    def add(self, text: str) -> str:
        """What of the text so far is sure to be said, and was not given yet."""
        self._text += text
        if self._form is None:
            return ""
        if self._is_begun:
            return ""
        place = self._begin(self._form)
        said, self._text = self._text[:place], self._text[place:]
        self._was_said = self._was_said or bool(said.strip())
        self._is_begun = any(self._text.startswith(begin) for begin in self._form.begins)
        return said

    def _begin(self, form: ToolForm) -> int:
        """Where the first call begins, or what may become its beginning; the text's length if nothing does."""
        for place in range(len(self._text)):
            rest = self._text[place:]
            is_first = not self._was_said and not self._text[:place].strip()
            for begin in form.begins:
                # bare JSON is a call at the beginning of a text alone
                if (is_first or not begin.endswith('"')) and (rest.startswith(begin) or begin.startswith(rest)):
                    return place
        return len(self._text)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of what is said, and the calls."""
        if self._form is None:
            calls = self._read_whole(self._text)
        else:
            calls = self._read(self._form, self._text) if self._is_begun else []
        return ("", calls) if calls else (self._text, [])

    def _read_whole(self, text: str) -> list[ToolCall]:
        if self._name is not None:
            return [ToolCall(self._name, text)] if isinstance(as_value(text), dict) else []
        return self._calls(as_value(text))

    def _read(self, form: ToolForm, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        while text := text.strip():
            begin = next((begin for begin in form.begins if text.startswith(begin)), None)
            if begin is None:
                return []
            text = text if begin[-1] == '"' else text[len(begin) :].strip()
            part, _, text = text.partition(form.end) if form.end else (text, "", "")
            found = self._calls(as_value(part))
            if not found:
                return []
            calls += found
        return calls

    def _calls(self, value: Any) -> list[ToolCall]:
        """The calls in a JSON value; none if one of them is not of a tool that there is."""
        calls = []
        for one in value if isinstance(value, list) else [value]:
            name = one.get("name") if isinstance(one, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return []
            arguments = one.get("arguments", one.get("parameters", {}))
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(name, arguments))
        return calls


def calls_schema(tools: Sequence[tuple[str, dict[str, Any]]], *, several: bool) -> dict[str, Any]:
    """A JSON schema of a list of calls of tools, (name, schema of its parameters) each, at least one."""
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, parameters in tools
    ]
    return {"type": "array", "items": {"anyOf": kinds}, "minItems": 1} | ({} if several else {"maxItems": 1})


def as_value(text: str) -> Any:
    """The value of JSON; what is none as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
