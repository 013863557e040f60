"""OpenAI's responses by its own client: texts, streams, calls of tools, forms, limits, and what is not done here."""

import json

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from pydantic import TypeAdapter  # noqa: E402

from polyreme.serving.requests import read_body  # noqa: E402
from polyreme.serving.responses import ResponsesBody  # noqa: E402
from tests.serving.scripted import ServedThread, scripted_model  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    '{% if tools %}<tool_call>{"name": "{{ tools[0].function.name }}", "arguments": {"a": 7}}</tool_call>{% endif %}'
    "<|endoftext|>"
)
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def client(openai):
    """Of a scripted engine, which says the conversation again."""
    with (
        ServedThread(scripted_model(max_model_len=400, template=TEMPLATE)) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_response_is_what_openai_has(client):
    response = client.responses.create(model="nano", input="né", instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == "<system>Be brief.<user>né"
    assert (response.status, response.incomplete_details, response.metadata) == ("completed", None, {"a": "b"})
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    cut = client.responses.create(model="nano", input="né", max_output_tokens=2, top_logprobs=1)
    assert (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens) == (
        "incomplete",
        "max_output_tokens",
        2,
    )
    (message,) = cut.output
    assert [token.logprob for token in message.content[0].logprobs] == [-0.5, -0.5]


def test_a_stream_tells_of_each_item_and_ends_with_the_response(client):
    whole = client.responses.create(model="nano", input="né a")
    events = list(client.responses.create(model="nano", input="né a", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage
    with client.responses.stream(model="nano", input="né a") as stream:  # the client's own account of the events
        assert stream.get_final_response().output_text == whole.output_text


def test_calls_are_items_and_go_back_with_what_they_gave(client, openai):
    described = TypeAdapter(openai.types.responses.ResponseStreamEvent)
    asked = {"role": "user", "content": [{"type": "input_text", "text": "né "}]}
    response = client.responses.create(model="nano", input=[asked], tools=[ADD])
    said, call = response.output
    assert (said.content[0].text, call.name, json.loads(call.arguments)) == ("<user>né ", "add", {"a": 7})
    events = list(client.responses.create(model="nano", input=[asked], tools=[ADD], stream=True))
    for event in events:
        described.validate_python(event.model_dump(), strict=False)
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads(done.arguments) == {"a": 7}
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    items = [asked, *(item.model_dump(exclude_none=True) for item in response.output), result]
    again = client.responses.create(model="nano", input=items, tools=[ADD], tool_choice="none")
    assert again.output_text == "<user>né <assistant><user>né add7<tool>12"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "has no items"),
        ({"store": True}, "store", "not supported; leave it out, or give null or False"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "Input should be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"temprature": 1}, "temprature", "a field that is not known here; did you mean 'temperature'"),
        ({"max_output_tokens": 4000}, "max_tokens", "do not fit into the 400 of the model"),
    ],
)
def test_what_is_not_done_is_refused_by_name(client, openai, fields, param, message):
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={"input": "a", **fields}, cast_to=object)
    assert refused.value.param == param
    assert message in refused.value.body["message"]


def test_forms_of_texts_are_those_of_chat_completions():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    body = read_body(ResponsesBody, json.dumps({"input": "a", "text": {"format": form}}).encode())
    assert body.as_chat().response_format.json_schema.schema_ == schema
    assert body.echoed()["text"]["format"]["schema"] == schema
    named = {"input": "a", "tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}
    assert read_body(ResponsesBody, json.dumps(named).encode()).as_chat().is_call_forced
