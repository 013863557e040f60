"""Calls of tools: read out of what models of several families write, however it comes, and forced by a grammar."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from polyreme.core import rng
from polyreme.generation import TextEngine
from polyreme.generation.grammar import TextGrammars
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.serving.service import ServedModel
from polyreme.serving.tool_calls import FORMS, ToolCall, ToolCallReader, form_of
from tests.serving.scripted import ServedThread, scripted_model, tokenizer_of

HERMES, MISTRAL, LLAMA = FORMS[:3]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = [ToolCall("add", '{"a": 1}')]
TEXTS = [
    (HERMES, 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "Well. ", CALL),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> <tool_call>{"name": "now"}</tool_call>', "",
     [*CALL, ToolCall("now", "{}")]),
    (HERMES, '<tool_call>[{"name": "add", "arguments": "{\\"a\\": 1}"}]</tool_call>', "", CALL),
    (HERMES, '<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
    (HERMES, '<tool_call>{"name": "sub"}</tool_call>', '<tool_call>{"name": "sub"}</tool_call>', []),
    (HERMES, "a < b, <tool, <tool_calls", "a < b, <tool, <tool_calls", []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "", CALL),
    (MISTRAL, ' [{"name": "add", "arguments": {"a": 1}}]', " ", CALL),
    (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", CALL),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", CALL),
    (LLAMA, 'So: {"name": "add"}', 'So: {"name": "add"}', []),
]  # fmt: skip


@given(st.sampled_from(TEXTS), st.integers(1, 9))
def test_calls_are_read_however_the_text_comes(case, size):
    form, text, said, calls = case
    reader = ToolCallReader(form, ["add", "now"])
    pieces = [reader.add(text[place : place + size]) for place in range(0, len(text), size)]
    rest, found = reader.finish()
    assert ("".join([*pieces, rest]), found) == (said, calls)


def test_what_is_sure_to_be_no_call_is_said_at_once():
    reader = ToolCallReader(HERMES, ["add"])
    assert [reader.add(piece) for piece in ("a <to", "y> b", " <tool_call")] == ["a ", "<toy> b", " "]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}<tool_call>", None),
        ("{{ tools }}", None),
        ("{{ tools }}<tool_call>", HERMES),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ('{{ tools }}{"name": function name, "parameters": dictionary of', FORMS[3]),
    ],
)
def test_a_template_says_how_calls_are_written(template, form):
    assert form_of(template) == form


def client_of(openai, served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_calls_come_as_openai_has_them(openai):
    """The scripted engine says the conversation again, which ends with a call."""
    template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}"
        '{% endfor %}{% if tools %}<tool_call>{"name": "{{ tools[0].function.name }}", "arguments": {"a": 7}}'
        '</tool_call>{% endif %}{% if twice %}<tool_call>{"name": "now"}</tool_call>{% endif %}<|endoftext|>'
    )
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    messages = [
        {"role": "user", "content": "né "},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ]
    with (
        ServedThread(scripted_model(max_model_len=400, template=template)) as served,
        client_of(openai, served) as client,
    ):
        arguments = {"model": "nano", "messages": messages, "tools": TOOLS}
        (choice,) = client.chat.completions.create(**arguments).choices
        assert (choice.message.content, choice.finish_reason) == ("né 512", "tool_calls")
        (called,) = choice.message.tool_calls
        assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"a": 7})
        parts = [part.choices[0] for part in client.chat.completions.create(**arguments, stream=True)]
        assert "".join(part.delta.content or "" for part in parts) == "né 512"
        ((streamed,),) = [part.delta.tool_calls for part in parts if part.delta.tool_calls]
        assert (streamed.index, streamed.function.name, streamed.function.arguments) == (0, "add", '{"a": 7}')
        assert parts[-1].finish_reason == "tool_calls"
        arguments["extra_body"] = {"chat_template_kwargs": {"twice": True}}
        for parallel, names in ((True, ["add", "now"]), (False, ["add"])):
            (choice,) = client.chat.completions.create(**arguments, parallel_tool_calls=parallel).choices
            assert [called.function.name for called in choice.message.tool_calls] == names
            streamed = client.chat.completions.create(**arguments, parallel_tool_calls=parallel, stream=True)
            told = [called for part in streamed for called in part.choices[0].delta.tool_calls or []]
            assert [(called.index, called.function.name) for called in told] == list(enumerate(names))
        arguments.pop("extra_body")
        (choice,) = client.chat.completions.create(**arguments, tool_choice="none").choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("né 512", None, "stop")


def test_a_forced_call_follows_its_schema_and_other_forms_theirs(openai):
    tokenizer = tokenizer_of(template="{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    rng.seed(3)
    model = Llama(LlamaConfig.nano(vocab_size=tokenizer.vocab_size + 2, seq_len=512))
    engine = TextEngine(model, tokenizer.end, tokenizer.vocab_size, max_num_seqs=2, block_size=8, prefill_chunk=64)
    served_model = ServedModel(engine, tokenizer, 512, TextGrammars(tokenizer, tokenizer.vocab_size + 2))
    with ServedThread(served_model) as served, client_of(openai, served) as client:
        arguments = {"model": "nano", "messages": [{"role": "user", "content": "a"}], "seed": 1, "max_tokens": 60}
        one = {"type": "function", "function": {"name": "add"}}
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
        for choice, tools in (("required", TOOLS[:1]), (one, TOOLS[:1]), (allowed, TOOLS)):
            settings = {"tools": tools, "parallel_tool_calls": False, "tool_choice": choice}
            (answer,) = client.chat.completions.create(**arguments, **settings).choices
            (call,) = answer.message.tool_calls
            assert (call.function.name, answer.finish_reason) == ("add", "tool_calls")
            assert set(json.loads(call.function.arguments)) == {"a"}
        with pytest.raises(openai.BadRequestError, match="how this model writes calls is not known here"):
            client.chat.completions.create(**arguments, tools=TOOLS)

        def write(**extra):
            whole = client.completions.create(model="nano", prompt="to be", seed=2, max_tokens=12, extra_body=extra)
            return whole.choices[0].text

        assert write(guided_regex="[ab]{3}") in [a + b + c for a in "ab" for b in "ab" for c in "ab"]
        choices = ["né (x)", "a.b", "to be or not"]
        assert write(guided_choice=choices) in choices
        wanted = tokenizer.encode("q")[0]
        assert write(logit_bias={str(wanted): 100}, temperature=0) == "q" * 12
        with pytest.raises(openai.BadRequestError, match="400 - logit_bias: token 99999 is not of the vocabulary"):
            write(logit_bias={"99999": 100})
        words = ["q", "to"]
        assert not any(word in write(logit_bias={str(wanted): 100}, temperature=0, bad_words=words) for word in words)
