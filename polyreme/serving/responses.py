"""OpenAI's responses: bodies as conversations, and answers to those as items, at once or as events come."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, model_validator

from polyreme.serving.requests import (
    MOST_LOGPROBS,
    MOST_TOOLS,
    ChatBody,
    NamedSchema,
    Strict,
    accept_only,
    known_choice,
    refusal_of,
)


class SaidPart(Strict):
    """A part of what somebody said. annotations, logprobs: of an answer that is sent back as it came."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class SaidItem(Strict):
    """A message; id and status: of an answer that is sent back as it came."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[SaidPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def message(self) -> dict[str, Any]:
        """As chat completions have it."""
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": parts}


class CallItem(Strict):
    """A call that an answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[SaidPart]
    id: str | None = None
    status: str | None = None

    def message(self) -> dict[str, Any]:
        """As chat completions have it."""
        text = self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": text}


class ResponseTool(Strict):
    """A function that may be called, its fields as of FunctionTool; other tools are not run here."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Strict):
    """The function that is to be called."""

    type: Literal["function"]
    name: str

    def as_chat(self) -> dict[str, Any]:
        """The same as chat completions have it."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedChoices(Strict):
    """Functions of which the answer may, or must, call some."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MOST_TOOLS)]


class PlainFormat(Strict):
    """Any text, or a JSON object."""

    type: Literal["text", "json_object"]


class SchemaText(NamedSchema):
    """JSON by a schema."""

    type: Literal["json_schema"]


class TextSettings(Strict):
    """The form asked of the text."""

    format: Annotated[PlainFormat | SchemaText, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, PlainValidator(accept_only("medium"))] = None


class ResponsesBody(Strict):
    """POST /v1/responses. Nothing is stored: a conversation is sent whole each time. user and what follows it say
    nothing of the text."""

    input: str | list[SaidItem | CallItem | ResultItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[
        Literal["none", "auto", "required"]
        | Annotated[NamedChoice | AllowedChoices, Field(discriminator="type")]
        | None,
        BeforeValidator(known_choice),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Annotated[Any, PlainValidator(accept_only("disabled"))] = None
    store: Annotated[Any, PlainValidator(accept_only(False))] = None
    background: Annotated[Any, PlainValidator(accept_only(False))] = None
    previous_response_id: Annotated[Any, PlainValidator(accept_only())] = None
    conversation: Annotated[Any, PlainValidator(accept_only())] = None
    prompt: Annotated[Any, PlainValidator(accept_only())] = None
    reasoning: Annotated[Any, PlainValidator(accept_only())] = None
    max_tool_calls: Annotated[Any, PlainValidator(accept_only())] = None
    stream_options: Annotated[Any, PlainValidator(accept_only({"include_obfuscation": False}))] = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if not self.input:
            raise ValueError("input: has no items; give a text, or at least one")
        return self

    def as_chat(self) -> ChatBody:
        """The same request to chat completions. Raises HttpRefusal 400 where that takes it not."""
        same = ("model", "temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs")
        fields: dict[str, Any] = {name: getattr(self, name) for name in (*same, "parallel_tool_calls", "stream")}
        fields["messages"] = [*self._messages()]
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.include or self.top_logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        if self.tools:
            tools = [tool.model_dump(exclude={"type"}) for tool in self.tools]
            fields["tools"] = [{"type": "function", "function": tool} for tool in tools]
        match self.tool_choice:
            case NamedChoice():
                fields["tool_choice"] = self.tool_choice.as_chat()
            case AllowedChoices(mode=mode, tools=tools):
                allowed = {"mode": mode, "tools": [tool.as_chat() for tool in tools]}
                fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
            case _:
                fields["tool_choice"] = self.tool_choice
        form = self.text.format if self.text else None
        if isinstance(form, SchemaText):
            schema = form.model_dump(by_alias=True, exclude={"type"})
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif form is not None:
            fields["response_format"] = {"type": form.type}
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise refusal_of(ChatBody, error) from None

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Of chat completions; calls that follow each other, and what was said before them, are one message."""
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        pending: dict[str, Any] | None = None
        for item in self.input:
            if isinstance(item, CallItem):
                pending = pending or {"role": "assistant", "content": None}
                called = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": called}
                pending.setdefault("tool_calls", []).append(call)
                continue
            if pending is not None:
                yield pending
                pending = None
            if isinstance(item, SaidItem) and item.role == "assistant":
                pending = item.message()
            else:
                yield item.message()
        if pending is not None:
            yield pending

    def echoed(self) -> dict[str, Any]:
        """The fields of the request that a response repeats."""
        form = self.text.format if self.text else None
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": form.model_dump(by_alias=True) if form else {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, Strict) else choice or "auto",
            "tools": [{"strict": None, **tool.model_dump()} for tool in self.tools],
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


class ResponseAnswer:
    """Answers of /v1/responses, made of those of chat completions."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._head = {"id": _new_id("resp"), "object": "response", "created_at": int(time.time()), "model": model}
        self._echoed = body.echoed()
        self._number = 0

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A response, of the body of a chat completion."""
        (choice,) = answer["choices"]
        message, logprobs = choice["message"], (choice["logprobs"] or {}).get("content") or []
        calls = message.get("tool_calls") or []
        output = [] if calls and not message["content"] else [_message(_new_id("msg"), message["content"], logprobs)]
        output += [_call(_new_id("fc"), call) for call in calls]
        return self._response(output, choice["finish_reason"], answer["usage"])

    async def events(self, chunks: AsyncGenerator[Any]) -> AsyncGenerator[dict[str, Any] | None]:
        """The events of a response, of those of a chat completion: None when the request was taken, then bodies."""
        said, logprobs, name, output, calls = "", [], _new_id("msg"), [], []
        is_begun, reason, usage = False, None, None
        async for chunk in chunks:
            if chunk is None:
                yield None
                for kind in ("created", "in_progress"):
                    yield self._event(kind, response=self._response([], None, None))
                continue
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta, new = choice["delta"], (choice["logprobs"] or {}).get("content") or []
                calls += delta.get("tool_calls") or []
                reason = choice["finish_reason"] or reason
                if not delta.get("content"):
                    continue
                if not is_begun:
                    is_begun = True
                    for event in self._begin(name):
                        yield event
                said, logprobs = said + delta["content"], logprobs + new
                yield self._event("output_text.delta", **_place(name), delta=delta["content"], logprobs=new)
        if not is_begun and not calls:  # an empty text is an item too
            is_begun = True
            for event in self._begin(name):
                yield event
        if is_begun:
            output.append(_message(name, said, logprobs))
            (part,) = output[0]["content"]
            yield self._event("output_text.done", **_place(name), text=said, logprobs=logprobs)
            yield self._event("content_part.done", **_place(name), part=part)
            yield self._event("output_item.done", output_index=0, item=output[0])
        for call in calls:
            item, index = _call(_new_id("fc"), call), len(output)
            output.append(item)
            empty = item | {"arguments": "", "status": "in_progress"}
            place = {"item_id": item["id"], "output_index": index}
            yield self._event("output_item.added", output_index=index, item=empty)
            yield self._event("function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **place, **done)
            yield self._event("output_item.done", output_index=index, item=item)
        response = self._response(output, reason, usage)
        yield self._event(response["status"], response=response)

    def _begin(self, name: str) -> Iterator[dict[str, Any]]:
        """The events before a message's first text."""
        item = _message(name, "", []) | {"status": "in_progress", "content": []}
        yield self._event("output_item.added", output_index=0, item=item)
        yield self._event("content_part.added", **_place(name), part=_part("", []))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def _response(self, output: list[dict[str, Any]], reason: str | None, usage: Any) -> dict[str, Any]:
        """reason: why a text ended; None while it is written."""
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        return {
            **self._head,
            **self._echoed,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message(name: str, text: str | None, logprobs: list[Any]) -> dict[str, Any]:
    parts = [_part(text or "", logprobs)]
    return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": parts}


def _call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """An item of a call as chat completions have it."""
    called = call["function"]
    item = {"id": name, "type": "function_call", "call_id": call["id"], "status": "completed"}
    return item | {"name": called["name"], "arguments": called["arguments"]}


def _place(name: str) -> dict[str, Any]:
    """The place of a message's text."""
    return {"item_id": name, "output_index": 0, "content_index": 0}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
