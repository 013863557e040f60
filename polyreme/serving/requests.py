"""Bodies of requests, checked field by field: what is not known or not supported is refused by name."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from polyreme.errors import ConfigError, did_you_mean
from polyreme.generation.sampling import SamplingParams
from polyreme.serving.refusals import HttpRefusal
from polyreme.serving.tool_calls import as_value

MOST_STOPS = 16
MOST_STOP_CHARS = 512
MOST_TEXTS = 128
"""Texts of one request: prompts times n."""
MOST_INPUTS = 2048
"""Texts of one request for vectors."""
MOST_LOGPROBS = 20
MOST_BIASES = 1024
MOST_PATTERN_CHARS = 1 << 14
MOST_CHOICES = 1024
MOST_TOOLS = 128
_MOST_TOKENS = 2**31 - 1
_MOST_DIGITS = len(str(_MOST_TOKENS))

Body = TypeVar("Body", bound=BaseModel)


def _strings(value: Any) -> list[str]:
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError("give a string that is not empty, or a list of such")
    if len(strings) > MOST_STOPS or any(len(s) > MOST_STOP_CHARS for s in strings):
        raise ValueError(f"give at most {MOST_STOPS} strings of at most {MOST_STOP_CHARS} characters")
    return strings


def _choices(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(s, str) and s for s in value):
        raise ValueError("give a list of strings that are not empty")
    if len(value) > MOST_CHOICES or sum(map(len, value)) > MOST_PATTERN_CHARS:
        raise ValueError(f"give at most {MOST_CHOICES} texts of {MOST_PATTERN_CHARS} characters together")
    return value


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


def _content(value: Any) -> Any:
    """Content given as parts: one text, where all of them are, or the parts, each with its type and what that names."""
    if not isinstance(value, list):
        return value
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image_url") or kind not in part:
            raise ValueError(
                'a part of content is not {"type": "text", "text": "..."} or {"type": "image_url", "image_url": '
                '{"url": "data:..."}}'
            )
        if set(part) != {"type", kind}:
            raise ValueError(f"a part of content has {sorted(set(part) - {'type', kind})[0]!r}, which is not known")
        _check_part(kind, part[kind])
    is_text = all(part["type"] == "text" for part in value)
    return "".join(part["text"] for part in value) if is_text else value


def _check_part(kind: str, value: Any) -> None:
    url = value.get("url") if isinstance(value, dict) else None
    if not isinstance(value if kind == "text" else url, str):
        raise ValueError(f"a part of content of type {kind} has no {'text' if kind == 'text' else 'url'}")
    if kind == "image_url" and (set(value) - {"url", "detail"} or value.get("detail") not in (None, "auto")):
        raise ValueError("an image_url has its url alone, and detail auto; images are seen as the model takes them")


def accept_only(*accepted: Any) -> Callable[[Any], Any]:
    """Takes values that ask for nothing, for a field that is not supported."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in (None, *accepted)):
            listed = " or ".join(["null", *map(repr, accepted)])
            raise ValueError(f"not supported; leave it out, or give {listed}")
        return value

    return check


class Strict(BaseModel):
    """A part of a body: fields that are not known, and values of another type, are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class StreamOptions(Strict):
    """include_usage: a last event counts tokens; continuous_usage_stats: every event counts those so far.
    include_obfuscation pads events, which is not done."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[Any, PlainValidator(accept_only(False))] = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """A JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema as OpenAI wraps it. strict is not asked: the schema is always followed."""

    name: Annotated[str, Field(max_length=200)]
    description: Annotated[str, Field(max_length=10_000)] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(Strict):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class WantedForm(NamedTuple):
    """A grammar that a text is to follow: the field that asks for it, the kind ("schema", "regex" or "choice"), and
    the value, as of TextGrammars."""

    param: str
    kind: str
    value: Any


class StructuredOutputs(Strict):
    """vLLM's newer word for guided_json, guided_regex and guided_choice."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1, max_length=MOST_PATTERN_CHARS)] | None = None
    choice: Annotated[list[str], PlainValidator(_choices)] | None = None

    @property
    def forms(self) -> list[WantedForm]:
        """The forms asked of the text, by each field that asks for one."""
        wanted = (("json", "schema", self.json_), ("regex", "regex", self.regex), ("choice", "choice", self.choice))
        return [
            WantedForm(f"structured_outputs.{name}", kind, value) for name, kind, value in wanted if value is not None
        ]


class _Sampled(Strict):
    """Fields of both kinds of completions, under OpenAI's names and those that vLLM adds.

    From metadata to prompt_cache_key, and user, they say nothing of the text: what a platform keeps, routes or counts
    by. The last fields are vLLM's, which may say what is done anyway.
    """

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_TEXTS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], PlainValidator(_strings)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)] | None = (
        None
    )
    bad_words: Annotated[list[str], PlainValidator(_strings)] = Field(default_factory=list)
    guided_json: dict[str, Any] | None = None
    guided_regex: Annotated[str, Field(min_length=1, max_length=MOST_PATTERN_CHARS)] | None = None
    guided_choice: Annotated[list[str], PlainValidator(_choices)] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: Annotated[Any, PlainValidator(accept_only(False))] = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    skip_special_tokens: Annotated[Any, PlainValidator(accept_only(True))] = None
    spaces_between_special_tokens: Annotated[Any, PlainValidator(accept_only(True, False))] = None
    include_stop_str_in_output: Annotated[Any, PlainValidator(accept_only(False))] = None
    truncate_prompt_tokens: Annotated[Any, PlainValidator(accept_only())] = None
    use_beam_search: Annotated[Any, PlainValidator(accept_only(False))] = None
    length_penalty: Annotated[Any, PlainValidator(accept_only(1.0, 1))] = None
    prompt_logprobs: Annotated[Any, PlainValidator(accept_only())] = None
    priority: Annotated[Any, PlainValidator(accept_only(0))] = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream set to true")
        forms = self.forms
        if len(forms) > 1:
            raise ValueError(f"{forms[1].param}: the text has a form by {forms[0].param} already; give one of them")
        if forms and self.min_tokens:
            raise ValueError(f"min_tokens: a text by {forms[0].param} ends where it is whole; leave it out")
        for token in self.logit_bias or {}:
            if not token.isdecimal() or len(token) > _MOST_DIGITS:
                raise ValueError(f"logit_bias: {token[:50]!r} is no token id")
        return self

    @property
    def forms(self) -> list[WantedForm]:
        """The forms asked of the text, by each field that asks for one; a valid request has one at most."""
        kind = self.response_format
        schema = kind.json_schema.schema_ if isinstance(kind, SchemaFormat) else None
        wanted = [
            WantedForm("response_format", "schema", schema) if isinstance(kind, (ObjectFormat, SchemaFormat)) else None,
            None if self.guided_json is None else WantedForm("guided_json", "schema", self.guided_json),
            None if self.guided_regex is None else WantedForm("guided_regex", "regex", self.guided_regex),
            None if self.guided_choice is None else WantedForm("guided_choice", "choice", self.guided_choice),
            *(self.structured_outputs.forms if self.structured_outputs else ()),
        ]
        return [form for form in wanted if form is not None]

    @property
    def counts_always(self) -> bool:
        """Whether each event of a stream counts the tokens so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self, max_tokens: int, logprobs: int | None, defaults: Mapping[str, float] | None = None
    ) -> SamplingParams:
        """The engine's settings, those left out as defaults, or else OpenAI, have them; without a seed, one is
        drawn."""
        # the engine's are not negative, and a request's n texts have the next ones; -1 is vLLM's word for none
        seed = secrets.randbits(31) if self.seed in (None, -1) else self.seed % 2**62
        same = ("n", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        named = {name: getattr(self, name) for name in (*same, *penalties)}
        named |= {"min_tokens": self.min_tokens, "stop": self.stop, "bad_words": self.bad_words}
        named["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        known: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        known = {**(defaults or {}), **known}
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
    suffix: Annotated[Any, PlainValidator(accept_only(""))] = None
    best_of: Annotated[Any, PlainValidator(accept_only(1))] = None

    @model_validator(mode="after")
    def _is_not_too_much(self) -> Self:
        if len(self.prompt) * (self.n or 1) > MOST_TEXTS:
            raise ValueError(f"n: {len(self.prompt)} prompts times {self.n} are over {MOST_TEXTS} texts; ask for fewer")
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise ValueError("max_tokens: 0 writes nothing; give at least 1, or echo without stream")
        return self


class CalledFunction(Strict):
    """The function that a call names, with arguments as JSON."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: str


class CallMade(Strict):
    """A call of a tool in an answer of before."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    """One message of a conversation; name: who says it, for templates that tell; tool_call_id: the call that a tool's
    message answers. An answer may be sent back as it came: the last fields are those of it that said nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[dict[str, Any]] | None, BeforeValidator(_content)] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: list[CallMade] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[Any, PlainValidator(accept_only())] = None
    annotations: Annotated[Any, PlainValidator(accept_only([]))] = None
    audio: Annotated[Any, PlainValidator(accept_only())] = None
    function_call: Annotated[Any, PlainValidator(accept_only())] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: of an assistant's message alone, not of a {self.role}'s")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: is missing")
        if isinstance(self.content, list) and self.role != "user":
            raise ValueError(f"content: images are of a user's message, not of a {self.role}'s")
        return self

    def as_template_reads(self) -> dict[str, Any]:
        """With arguments of calls as values, and developer, OpenAI's newer word for system, as that."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self.content or ""
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": as_value(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class FunctionTool(Strict):
    """A function that may be called; parameters: a JSON schema. strict is not asked: a forced call follows it."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]
    description: Annotated[str, Field(max_length=10_000)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Strict):
    """A function by name."""

    name: str


class NamedTool(Strict):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedNames(Strict):
    """Tools by name, of which the answer may, or must, call some."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedTools(Strict):
    """Some of the tools in place of all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


def known_choice(value: Any) -> Any:
    """A choice of tools as it came. Raises ValueError for what is of no known kind."""
    is_known = value.get("type") in ("function", "allowed_tools") if isinstance(value, dict) else False
    if not is_known and value not in (None, "none", "auto", "required"):
        raise ValueError(
            'give "none", "auto", "required", or an object whose type is "function", with a name, or "allowed_tools", '
            "with a mode and tools"
        )
    return value


class ChatBody(_Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[Any, PlainValidator(accept_only(False))] = None
    add_special_tokens: Annotated[Any, PlainValidator(accept_only(False))] = None
    chat_template: Annotated[Any, PlainValidator(accept_only())] = None
    echo: Annotated[Any, PlainValidator(accept_only(False))] = None
    best_of: Annotated[Any, PlainValidator(accept_only(1))] = None
    return_token_ids: bool = False
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None,
        BeforeValidator(known_choice),
    ] = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[Any, PlainValidator(accept_only(["text"]))] = None
    functions: Annotated[Any, PlainValidator(accept_only([]))] = None
    function_call: Annotated[Any, PlainValidator(accept_only("none"))] = None
    reasoning_effort: Annotated[Any, PlainValidator(accept_only("none"))] = None
    verbosity: Annotated[Any, PlainValidator(accept_only("medium"))] = None
    prediction: Annotated[Any, PlainValidator(accept_only())] = None
    web_search_options: Annotated[Any, PlainValidator(accept_only())] = None
    audio: Annotated[Any, PlainValidator(accept_only())] = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs set to true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_completion_tokens: differs from max_tokens; give one of them")
        taken = {"messages", "add_generation_prompt", "tools"} & set(self.chat_template_kwargs or {})
        if taken:
            raise ValueError(f"chat_template_kwargs: {sorted(taken)[0]!r} is set by the server")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have the same name")
        choice = self.tool_choice
        if (self.is_call_forced or isinstance(choice, AllowedTools)) and self.forms:
            raise ValueError(f"tool_choice: the text has a form by {self.forms[0].param}; leave one of them out")
        if choice not in (None, "none") and not names:
            raise ValueError("tool_choice: there are no tools; give some")
        unknown = [name for name in self._chosen_names or () if name not in names]
        if unknown:
            raise ValueError(f"tool_choice: no tool {unknown[0][:100]!r}; there is {', '.join(names)}")
        return self

    @property
    def called(self) -> list[FunctionTool]:
        """The tools that may be called."""
        names = self._chosen_names
        return [tool.function for tool in self.tools if names is None or tool.function.name in names]

    @property
    def _chosen_names(self) -> list[str] | None:
        """Names of the tools that tool_choice leaves, None for all."""
        match self.tool_choice:
            case NamedTool(function=function):
                return [function.name]
            case AllowedTools(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools]
        return [] if self.tool_choice == "none" else None

    @property
    def is_call_forced(self) -> bool:
        """Whether the answer is to be a call."""
        return self.is_call_by_schema or isinstance(self.tool_choice, NamedTool)

    @property
    def is_call_by_schema(self) -> bool:
        """Whether the answer is to be calls of any of the tools."""
        choice = self.tool_choice
        return choice == "required" or (isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required")

    @property
    def limit(self) -> int | None:
        """Tokens of the answer, at most."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them."""
        return [message.as_template_reads() for message in self.messages]

    def variables(self) -> dict[str, Any]:
        """What else chat templates read: the tools, where any may be called."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        begins = {} if self.add_generation_prompt is None else {"add_generation_prompt": self.add_generation_prompt}
        return begins | (self.chat_template_kwargs or {}) | ({"tools": tools} if self.called else {})


class EmbeddingBody(Strict):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Annotated[list[str | list[int]], PlainValidator(_prompts(MOST_INPUTS))]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None


class ScoreBody(Strict):
    """POST /v1/score: pairs of texts; one first text goes with all of the second ones."""

    model: str | None = None
    text_1: Annotated[list[str | list[int]], PlainValidator(_prompts(MOST_INPUTS))]
    text_2: Annotated[list[str | list[int]], PlainValidator(_prompts(MOST_INPUTS))]
    user: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _is_paired(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise ValueError(f"text_1: {len(self.text_1)} texts beside {len(self.text_2)}; give one, or as many")
        return self


def _documents(value: Any) -> list[str]:
    parts = value if isinstance(value, list) else []
    texts = [part.get("text") if isinstance(part, dict) and set(part) == {"text"} else part for part in parts]
    strings = [text for text in texts if isinstance(text, str) and text]
    if not texts or len(strings) < len(texts):
        raise ValueError('give a list of strings that are not empty, or of {"text": "..."}')
    if len(texts) > MOST_INPUTS:
        raise ValueError(f"give at most {MOST_INPUTS} texts, not {len(texts)}")
    return strings


class RerankBody(Strict):
    """POST /v1/rerank: documents by how alike they are to a query; top_n: so many of them."""

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str], PlainValidator(_documents)]
    top_n: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    return_documents: Annotated[Any, PlainValidator(accept_only(True))] = None
    user: Annotated[str, Field(max_length=1024)] | None = None


class TokenizeBody(Strict):
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


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=_MOST_TOKENS)]]


_TAGGED = ("response_format", "tool_choice")
"""Fields of one of several kinds."""


def read_body(kind: type[Body], data: bytes) -> Body:
    """A body of JSON. Raises HttpRefusal 400 that names the field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise refusal_of(kind, error) from None


def refusal_of(kind: type[BaseModel], error: ValidationError) -> HttpRefusal:
    """A 400 that names the first field of a body of this kind that is wrong."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    # of a field that is a word or an object, what is wrong with the object tells more
    told = next((one for one in errors if not any(str(part).startswith("literal[") for part in one["loc"])), errors[0])
    return _refusal(kind, told)


def _refusal(kind: type[BaseModel], error: Mapping[str, Any]) -> HttpRefusal:
    place: Sequence[Any] = [part for part in error["loc"] if not str(part).startswith("tagged-union[")]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return HttpRefusal(400, f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}", code="invalid_json")
    if not place:
        # a check of several fields says which one is meant
        param, _, rest = message.partition(": ")
        named = param in kind.model_fields
        return HttpRefusal(400, message, param=param if named and rest else None, code="invalid_value")
    name, _, rest = message.partition(": ")
    if error["type"] == "value_error" and rest and name in _names(kind, place):
        # likewise, of a part of the body
        place, message = (*place, name), rest
    if len(place) > 2 and place[0] in _TAGGED:
        place = (place[0], *place[2:])  # the kind of which it is
    param = ".".join(map(str, place))[:200]
    if error["type"] == "extra_forbidden":
        names = _names(kind, place[:-1])
        hint = did_you_mean(str(place[-1])[:100], names) if names else ""
        return HttpRefusal(400, f"{param}: a field that is not known here{hint}", param=param, code="unknown_field")
    if error["type"] == "missing":
        return HttpRefusal(400, f"{param}: is missing", param=param, code="missing_field")
    return HttpRefusal(400, f"{param}: {message}", param=param, code="invalid_value")


def _names(kind: type[BaseModel], place: Sequence[Any]) -> list[str]:
    inner: dict[str, type[BaseModel]] = {"stream_options": StreamOptions, "messages": ChatMessage}
    inner |= {"response_format": NamedSchema, "tools": FunctionTool, "tool_choice": NamedTool}
    inner |= {"structured_outputs": StructuredOutputs}
    holder = inner.get(str(place[0])) if place else kind
    return list(holder.model_fields) if holder else []
