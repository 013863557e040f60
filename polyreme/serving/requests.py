"""Bodies of requests, checked field by field: what is not known or not supported is refused by name."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from polyreme.errors import ConfigError, did_you_mean
from polyreme.generation.sampling import SamplingParams
from polyreme.serving.refusals import HttpRefusal

MOST_STOPS = 16
MOST_STOP_CHARS = 512
MOST_TEXTS = 128
"""Texts of one request: prompts times n."""
MOST_INPUTS = 2048
"""Texts of one request for vectors."""
MOST_LOGPROBS = 20
_MOST_TOKENS = 2**31 - 1

Body = TypeVar("Body", bound=BaseModel)


def _strings(value: Any) -> list[str]:
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError("give a string that is not empty, or a list of such")
    if len(strings) > MOST_STOPS or any(len(s) > MOST_STOP_CHARS for s in strings):
        raise ValueError(f"give at most {MOST_STOPS} strings of at most {MOST_STOP_CHARS} characters")
    return strings


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _prompts(most: int) -> Callable[[Any], list[str | list[int]]]:
    def check(value: Any) -> list[str | list[int]]:
        if isinstance(value, str) or _is_ids(value):
            return [value]
        if isinstance(value, list) and value and (all(isinstance(v, str) for v in value) or all(map(_is_ids, value))):
            if len(value) > most:
                raise ValueError(f"give at most {most} texts, not {len(value)}")
            return value
        raise ValueError("give a string, a list of strings, a list of token ids, or a list of such lists")

    return check


def _texts(value: Any) -> Any:
    """Content given as parts, of which text alone is read, as one text."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('a part of content is not {"type": "text", "text": "..."}; text alone is read')
        if set(part) != {"type", "text"}:
            raise ValueError(f"a part of content has {sorted(set(part) - {'type', 'text'})[0]!r}, which is not known")
    return "".join(part["text"] for part in value)


def _only(*accepted: Any) -> Callable[[Any], Any]:
    """Takes values that ask for nothing, for a field that is not supported."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in (None, *accepted)):
            listed = " or ".join(["null", *map(repr, accepted)])
            raise ValueError(f"not supported; leave it out, or give {listed}")
        return value

    return check


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Strict):
    """include_usage: a last event counts tokens. include_obfuscation pads events, which is not done."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, PlainValidator(_only(False))] = None


class TextFormat(_Strict):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(_Strict):
    """A JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Strict):
    """A JSON schema as OpenAI wraps it. strict is not asked: the schema is always followed."""

    name: Annotated[str, Field(max_length=200)]
    description: Annotated[str, Field(max_length=10_000)] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(_Strict):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class _Sampled(_Strict):
    """What both kinds of completions take, under OpenAI's names and those that vLLM adds."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_TEXTS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stop: Annotated[list[str], PlainValidator(_strings)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    presence_penalty: Annotated[Any, PlainValidator(_only(0, 0.0))] = None
    frequency_penalty: Annotated[Any, PlainValidator(_only(0, 0.0))] = None
    logit_bias: Annotated[Any, PlainValidator(_only({}))] = None
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream set to true")
        if self.wants_json and self.min_tokens:
            raise ValueError("min_tokens: JSON ends where it is whole; leave it out")
        return self

    @property
    def wants_json(self) -> bool:
        """Whether the text is to be JSON."""
        return isinstance(self.response_format, (ObjectFormat, SchemaFormat))

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """The schema that the JSON is to follow; None for any object."""
        form = self.response_format
        return form.json_schema.schema_ if isinstance(form, SchemaFormat) else None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The engine's settings, those left out as OpenAI has them; without a seed, one is drawn."""
        seed = secrets.randbits(31) if self.seed is None else self.seed
        named = {name: getattr(self, name) for name in ("n", "temperature", "top_p", "top_k", "min_p")}
        named |= {name: getattr(self, name) for name in ("repetition_penalty", "stop_token_ids", "ignore_eos")}
        named |= {"min_tokens": self.min_tokens, "stop": self.stop}
        known = {name: value for name, value in named.items() if value is not None}
        try:
            return SamplingParams(**known, seed=seed, max_tokens=max_tokens, logprobs=logprobs)
        except ConfigError as error:
            raise HttpRefusal(400, str(error), code="invalid_value") from None


class CompletionBody(_Sampled):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts(MOST_TEXTS))]
    max_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool = True
    return_token_ids: bool = False
    suffix: Annotated[Any, PlainValidator(_only(""))] = None
    best_of: Annotated[Any, PlainValidator(_only(1))] = None

    @model_validator(mode="after")
    def _is_not_too_much(self) -> Self:
        if len(self.prompt) * (self.n or 1) > MOST_TEXTS:
            raise ValueError(f"n: {len(self.prompt)} prompts times {self.n} are over {MOST_TEXTS} texts; ask for fewer")
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise ValueError("max_tokens: 0 writes nothing; give at least 1, or echo without stream")
        return self


class ChatMessage(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_texts)]
    name: Annotated[Any, PlainValidator(_only())] = None


class ChatBody(_Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool = False
    tools: Annotated[Any, PlainValidator(_only([]))] = None
    tool_choice: Annotated[Any, PlainValidator(_only("none"))] = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs set to true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_completion_tokens: differs from max_tokens; give one of them")
        taken = {"messages", "add_generation_prompt"} & set(self.chat_template_kwargs or {})
        if taken:
            raise ValueError(f"chat_template_kwargs: {sorted(taken)[0]!r} is set by the server")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens of the answer, at most."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def conversation(self) -> list[dict[str, str]]:
        """The messages as chat templates read them: developer is OpenAI's newer word for system."""
        roles = {"developer": "system"}
        return [{"role": roles.get(m.role, m.role), "content": m.content} for m in self.messages]


class EmbeddingBody(_Strict):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Annotated[list[str | list[int]], PlainValidator(_prompts(MOST_INPUTS))]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None


class TokenizeBody(_Strict):
    """POST /tokenize: of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeBody(_Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=_MOST_TOKENS)]]


def read_body(kind: type[Body], data: bytes) -> Body:
    """A body of JSON. Raises HttpRefusal 400 that names the field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _refusal(kind, first) from None


def _refusal(kind: type[BaseModel], error: Mapping[str, Any]) -> HttpRefusal:
    place: Sequence[Any] = error["loc"]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return HttpRefusal(400, f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}", code="invalid_json")
    if not place:
        # a check of several fields says which one is meant
        param, _, rest = message.partition(": ")
        named = param in kind.model_fields
        return HttpRefusal(400, message, param=param if named and rest else None, code="invalid_value")
    param = ".".join(map(str, place))[:200]
    if error["type"] == "extra_forbidden":
        names = _names(kind, place[:-1])
        hint = did_you_mean(str(place[-1])[:100], names) if names else ""
        return HttpRefusal(400, f"{param}: a field that is not known here{hint}", param=param, code="unknown_field")
    if error["type"] == "missing":
        return HttpRefusal(400, f"{param}: is missing", param=param, code="missing_field")
    return HttpRefusal(400, f"{param}: {message}", param=param, code="invalid_value")


def _names(kind: type[BaseModel], place: Sequence[Any]) -> list[str]:
    inner = {"stream_options": StreamOptions, "messages": ChatMessage, "response_format": NamedSchema}
    holder = inner.get(str(place[0])) if place else kind
    return list(holder.model_fields) if holder else []
