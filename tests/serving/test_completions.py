"""Completions, whole and streamed, by OpenAI's own client where it is installed; an engine that repeats its prompt."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from polyreme.serving import engine_thread  # noqa: E402
from polyreme.serving.requests import ChatBody, CompletionBody  # noqa: E402
from polyreme.serving.service import ServiceLimits  # noqa: E402
from tests.serving.scripted import ServedThread, scripted_model, wait_until  # noqa: E402


@pytest.fixture(scope="module")
def served():
    with ServedThread(scripted_model()) as served:
        yield served


@pytest.fixture(scope="module")
def client(served, openai):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(served, path, body):
    return httpx.post(f"{served.url}{path}", json=body)


def events_of(response):
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_a_text_is_completed(client):
    answer = client.completions.create(model="nano", prompt="to be", max_tokens=4, seed=1)
    (choice,) = answer.choices
    ids = len(client.completions.create(model="nano", prompt="to be", max_tokens=2).choices[0].text)
    assert choice.text.startswith("to be")
    assert ids
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_a_stream_has_the_text_of_the_whole(client):
    arguments = {"model": "nano", "prompt": "né 北 to\U0001f600 be", "max_tokens": 30, "seed": 1}
    whole = client.completions.create(**arguments)
    parts = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(part.choices[0].text for part in parts[:-2])
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].choices == []
    assert parts[-1].usage == whole.usage
    assert all(part.usage is None for part in parts[:-1])


def test_a_conversation_is_answered(client, served):
    messages = [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "né?"}]
    arguments = {"model": "nano", "messages": messages, "max_completion_tokens": 20}
    whole = client.chat.completions.create(**arguments, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    message = whole.choices[0].message
    assert (message.role, message.content[:8]) == ("assistant", "<system>")
    assert len(whole.choices[0].logprobs.content) == 20
    first = whole.choices[0].logprobs.content[0]
    assert bytes(first.bytes).decode() == first.token
    assert first.logprob == first.top_logprobs[0].logprob == -0.5
    # JSON has no infinity
    assert first.top_logprobs[1].logprob == -9999
    parts = list(client.chat.completions.create(**arguments, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == message.content
    assert parts[-1].choices[0].finish_reason == "length"


def test_an_answer_is_sent_back_as_it_came(client, served):
    """With what a client's own types add to it, and what platforms keep, which changes nothing."""
    asked = {"role": "user", "content": "to", "name": "anna"}
    said = client.chat.completions.create(model="nano", messages=[asked], max_tokens=3, seed=1).choices[0].message
    more = {"metadata": {"run": "1"}, "store": False, "service_tier": "auto", "prompt_cache_key": "a"}
    more["extra_body"] = {
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "priority": 0,
        "echo": False,
    }
    tokens = []
    for message in (said, said.model_dump(), said.model_dump(exclude_none=True)):
        answer = client.chat.completions.create(
            model="nano", messages=[asked, message, asked], max_tokens=2, seed=1, modalities=["text"], **more
        )
        tokens.append((answer.usage.prompt_tokens, answer.choices[0].message.content))
    assert len({*tokens}) == 1


def test_every_event_may_count_tokens(served):
    """With vLLM's continuous_usage_stats; the last one counts all."""
    body = {"prompt": "to be", "max_tokens": 4, "seed": 1, "stream": True}
    body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    events = events_of(post(served, "/v1/completions", body))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert events[-1]["choices"] == []


def test_a_conversation_may_be_as_long_as_the_model(client):
    answer = client.chat.completions.create(model="nano", messages=[{"role": "user", "content": "to be"}])
    assert answer.usage.total_tokens == 64


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_text_and_its_engine_request(served, stream):
    body = {"prompt": "to be or not", "max_tokens": 40, "stop": ["notto"], "stream": stream}
    response = post(served, "/v1/completions", body)
    choices = [e["choices"][0] for e in (events_of(response) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == "to be or "
    assert choices[-1]["finish_reason"] == "stop"
    assert wait_until(lambda: not served.model.engine.live)


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_made_with_the_token_that_ends_a_text_is_not_of_it(served, stream):
    """As where drafts are met and a step gives several tokens."""
    body = {"prompt": "to be or not", "max_tokens": 40, "stop": ["notto"], "logprobs": 1, "return_token_ids": True}
    body |= {"stream": stream}
    engine, answers = served.model.engine, []
    for engine.tokens_a_step in (3, 1):
        response = post(served, "/v1/completions", body)
        choices = [e["choices"][0] for e in (events_of(response) if stream else [response.json()])]
        joined = {"text": "", "ids": [], "logs": []}
        for choice in choices:
            joined["text"] += choice["text"]
            joined["ids"] += choice["token_ids"]
            joined["logs"] += choice["logprobs"]["token_logprobs"]
        answers.append((joined, choices[-1]["finish_reason"], response.json()["usage"] if not stream else None))
    assert answers[0] == answers[1]
    assert answers[0][1] == "stop"


def test_token_ids_and_logprobs_come_with_the_text(served):
    ids = post(served, "/tokenize", {"prompt": "to né"}).json()["tokens"]
    body = {"prompt": ids, "max_tokens": len(ids) + 1, "logprobs": 1, "return_token_ids": True, "echo": False}
    (choice,) = post(served, "/v1/completions", body).json()["choices"]
    assert choice["token_ids"] == [*ids, ids[0]]
    assert choice["prompt_token_ids"] == ids
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][-3:-1] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"][0] == 0
    assert len(logprobs["text_offset"]) == len(logprobs["token_logprobs"]) == len(ids) + 1
    parts = events_of(post(served, "/v1/completions", body | {"stream": True}))
    assert [t for part in parts for t in part["choices"][0]["token_ids"]] == choice["token_ids"]
    assert [t for part in parts for t in part["choices"][0]["logprobs"]["tokens"]] == logprobs["tokens"]
    offsets = [o for part in parts for o in part["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]


def test_several_prompts_have_n_texts_in_order(served):
    body = {"prompt": ["to be", "that is"], "n": 2, "max_tokens": 3, "echo": True}
    choices = post(served, "/v1/completions", body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"][:7] for choice in choices] == ["to beto"] * 2 + ["that is"] * 2
    streamed = [""] * 4
    for event in events_of(post(served, "/v1/completions", body | {"stream": True})):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == [choice["text"] for choice in choices]


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_an_echo_tells_how_likely_the_prompt_was(served, max_tokens):
    """As evaluation by an API asks for it."""
    ids = post(served, "/tokenize", {"prompt": "to né"}).json()["tokens"]
    body = {"prompt": [ids, ids[:2]], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "return_token_ids": True}
    answer = post(served, "/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    for choice, prompt in zip(answer["choices"], (ids, ids[:2]), strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None, *(-float(i) for i in range(1, len(prompt)))] + [-0.5] * max_tokens
        assert logprobs["top_logprobs"][0] is None
        assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(prompt) + max_tokens
        assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
        assert choice["token_ids"] == (prompt * 2)[:max_tokens]
    if max_tokens:
        streamed = {}
        for event in events_of(post(served, "/v1/completions", body | {"stream": True})):
            (choice,) = event["choices"]
            streamed.setdefault(choice["index"], []).append(choice)
        for whole in answer["choices"]:
            parts = streamed[whole["index"]]
            assert "".join(part["text"] for part in parts) == whole["text"]
            for name in ("token_logprobs", "tokens", "text_offset", "top_logprobs"):
                assert [x for part in parts for x in part["logprobs"][name]] == whole["logprobs"][name]


def test_an_echo_alone_writes_nothing(served):
    steps = served.model.engine.steps
    (choice,) = post(served, "/v1/completions", {"prompt": "to be", "echo": True, "max_tokens": 0}).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("to be", "length")
    assert served.model.engine.steps == steps


def test_models_health_version_and_tokens(served, client):
    assert [model.id for model in client.models.list()] == ["nano", "second"]
    assert client.models.retrieve("second").id == "second"
    assert httpx.get(f"{served.url}/health").json() == {"status": "ready"}
    assert httpx.get(f"{served.url}/version").json()["version"]
    tokens = post(served, "/tokenize", {"prompt": "to né", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 64
    assert post(served, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "to né"}
    told = httpx.get(f"{served.url}/tokenizer_info").json()
    assert told["eos_token"] == "<|endoftext|>"
    assert told["bos_token"] is None
    assert told["chat_template"].startswith("{% for m in messages %}")
    of_chat = post(served, "/tokenize", {"messages": [{"role": "user", "content": "to"}]}).json()
    assert post(served, "/detokenize", {"tokens": of_chat["tokens"]}).json() == {"prompt": "<user>to<it>"}


CHAT = {"messages": [{"role": "user", "content": "a"}]}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(*names):
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


FORMAT = "response_format.x"
BAD = [
    ("/v1/completions", {"prompt": "a", "max_tokns": 2}, 400, "max_tokns", "did you mean 'max_tokens'"),
    ("/v1/completions", {"prompt": "a", "skip_special_tokens": False}, 400, "skip_special_tokens", "or give null or"),
    ("/v1/completions", {}, 400, "prompt", "is missing"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt", "token ids"),
    ("/v1/completions", {"prompt": [7, 10**9]}, 400, "prompt", "not among"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt", "no tokens"),
    ("/v1/completions", {"prompt": "a", "n": 10**6}, 400, "n", "128"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**9}, 400, "max_tokens", "do not fit into the 64"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "greater than or equal to 0"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ("/v1/completions", {"prompt": "ab" * 50}, 400, "prompt", "do not fit"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 10_000}, 400, "stop", "at most 16"),
    ("/v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop", "not empty"),
    ("/v1/completions", {"prompt": "a", "temperature": "1"}, 400, "temperature", "number"),
    ("/v1/completions", {"prompt": "a", "min_tokens": 17}, 400, None, "min_tokens=17"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias.5", "less than or equal to 100"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"to": 1}}, 400, "logit_bias", "'to' is no token id"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "is no token id"),
    ("/v1/completions", {"prompt": "a", "bad_words": [""]}, 400, "bad_words", "not empty"),
    ("/v1/completions", {"prompt": "a", "guided_regex": "("}, 400, "guided_regex", "is not understood"),
    ("/v1/completions", {"prompt": "a", "guided_choice": []}, 400, "guided_choice", "not empty"),
    ("/v1/completions", {"prompt": "a", "guided_regex": "a", "guided_json": {}}, 400, "guided_regex", "guided_json"),
    ("/v1/completions", {"prompt": "a", "best_of": 3}, 400, "best_of", "not supported"),
    ("/v1/completions", {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty", "less than or equal to 2"),
    ("/v1/completions", {"prompt": "a", "store": True}, 400, "store", "not supported; leave it out, or give null or F"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"jsn": {}}}, 400, "structured_outputs.jsn", "not known"),
    ("/v1/chat/completions", CHAT | {"functions": [ADD]}, 400, "functions", "not supported"),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": "high"}, 400, "reasoning_effort", "not supported"),
    ("/v1/completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options", "only with stream"),
    ("/v1/completions", {"prompt": ["a"] * 100, "n": 2}, 400, "n", "over 128 texts"),
    ("/v1/completions", {"prompt": ["a"] * 129}, 400, "prompt", "at most 128"),
    ("/v1/completions", {"prompt": ["a", "to refused"]}, 400, None, "no such prompt"),
    ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "model", "there is nano, second"),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools.0.function", "is missing"),
    ("/v1/chat/completions", CHAT | {"tools": [ADD]}, 400, "tools", "chat template has no place for tools"),
    ("/v1/chat/completions", CHAT | {"tools": [ADD, ADD]}, 400, "tools", "two have the same name"),
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice", "there are no tools"),
    ("/v1/chat/completions", CHAT | {"tools": [ADD], "tool_choice": named("sub")}, 400, "tool_choice", "there is add"),
    ("/v1/chat/completions", CHAT | {"tools": [ADD], "tool_choice": {"type": "custom"}}, 400, "tool_choice", "a mode"),
    (
        "/v1/chat/completions",
        CHAT | {"tools": [ADD], "tool_choice": allowed("sub")},
        400,
        "tool_choice",
        "there is add",
    ),
    ("/v1/chat/completions", CHAT | {"tool_choice": allowed()}, 400, "tool_choice.allowed_tools.tools", "at least 1"),
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        400,
        "response_format.json_schema.name",
        "is missing",
    ),
    ("/v1/rerank", {"query": "a", "documents": 1}, 400, "documents", "give a list of strings"),
    ("/v1/completions", {"prompt": "a", "seed": 2**63}, 400, "seed", "less than"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a", "tool_calls": []}, {"role": "tool"}]},
        400,
        "messages.1.content",
        "is missing",
    ),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs", "only with logprobs"),
    ("/v1/chat/completions", CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_completion_tokens", "one"),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"messages": 1}}, 400, "chat_template_kwargs", "is set"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages", "at least 1"),
    ("/v1/chat/completions", {"messages": [{"role": "x", "content": "a"}]}, 400, "messages.0.role", "'user'"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content", "is missing"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content",
        "a part of content is not",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        400,
        "messages",
        "reads text alone; leave images out",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "", "detail": "high"}}]}
            ]
        },
        400,
        "messages.0.content",
        "detail auto",
    ),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}, 400, "response_format", "json_schema"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_object", "x": 1}}, 400, FORMAT, "not known"),
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "b"}}}},
        400,
        "response_format",
        "Invalid type: b",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "min_tokens": 2, "response_format": {"type": "json_object"}},
        400,
        "min_tokens",
        "by response_format ends where it is whole",
    ),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, 400, "prompt", "either"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens.0", "greater"),
    ("/detokenize", {"tokens": [99999]}, 400, "tokens", "not among"),
    ("/v1/other", {}, 404, None, "no /v1/other here"),
    ("/health", {}, 405, None, "does not take POST"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), BAD)
def test_a_refusal_names_the_field(served, path, body, status, param, message):
    response = post(served, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b"null", b'{"prompt":"\\ud800"}', b'{"prompt":NaN}'),
        *(b'{"prompt":"a","temperature":NaN}', b'{"prompt":"a","seed":' + b"9" * 5000 + b"}"),
        b'{"prompt":"a","' + b"x" * 100_000 + b'":1}',
    ],
    ids=range(11),
)
def test_what_is_no_body_is_refused(served, data):
    response = httpx.post(f"{served.url}/v1/completions", content=data)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    assert len(response.content) < 2000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*CompletionBody.model_fields, *ChatBody.model_fields, "role", "tokens", "input"])
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/embeddings"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PATHS), st.dictionaries(NAMES, JSON, max_size=4), st.booleans())
def test_whatever_a_body_holds_the_server_does_not_fail(served, client, path, body, is_whole):
    likely = {"prompt": "to", "max_tokens": 2} if path.endswith("/completions") and is_whole else {}
    data = json.dumps(likely | body)
    answer = client._client.post(f"{served.url}{path}", content=data)
    assert answer.status_code in (200, 400, 404)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(("word", "message"), [("poison", "not finite"), ("broken", "the server's log says how")])
def test_the_server_outlives_what_fails_in_the_engine(served, client, word, message):
    response = post(served, "/v1/completions", {"prompt": word, "max_tokens": 3})
    assert response.status_code == 500
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "server_error"
    assert client.completions.create(model="nano", prompt="to be", max_tokens=3).choices[0].text
    stream = httpx.post(f"{served.url}/v1/completions", json={"prompt": f"to {word}", "stream": True})
    assert '"error"' in stream.text
    assert "[DONE]" not in stream.text


def test_a_client_that_leaves_frees_its_slot():
    with ServedThread(scripted_model(seconds=0.02, max_model_len=4000)) as slow:
        engine = slow.model.engine
        for stream in (True, False):
            with httpx.Client() as client:
                body = {"prompt": "to be", "max_tokens": 3000, "stream": stream, "n": 2}
                if stream:
                    with client.stream("POST", f"{slow.url}/v1/completions", json=body) as response:
                        next(response.iter_lines())
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        client.post(f"{slow.url}/v1/completions", json=body, timeout=0.2)
            left = engine.steps
            assert wait_until(lambda: not engine.live)
            # the two it takes to hear of it, and the one that was under way
            assert engine.steps - left <= 5
            assert wait_until(lambda: not slow.service.num_texts)


def test_chores_are_done_when_nobody_asks(caplog, monkeypatch):
    """One that fails stops neither the others nor the server."""
    monkeypatch.setattr(engine_thread, "_IDLE_SECONDS", 0.05)
    done = []
    chores = (lambda: done.append("first"), lambda: 1 / 0, lambda: done.append("last"))
    with ServedThread(replace(scripted_model(), chores=chores)) as served:
        assert post(served, "/v1/completions", {"prompt": "to be"}).status_code == 200
        assert wait_until(lambda: done == ["first", "last"])
        assert post(served, "/v1/completions", {"prompt": "to be"}).status_code == 200
    assert "a chore of the engine failed" in caplog.text


def test_more_than_fits_is_told_to_come_again():
    limits = ServiceLimits(max_num_seqs=2, max_waiting=1)
    with ServedThread(scripted_model(seconds=0.02, max_model_len=4000), limits) as slow, httpx.Client() as client:
        body = {"prompt": "to be", "max_tokens": 3000, "stream": True}
        with client.stream("POST", f"{slow.url}/v1/completions", json=body | {"n": 3}) as response:
            lines = response.iter_lines()  # whose end closes the connection
            next(lines)
            refused = post(slow, "/v1/completions", body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert post(slow, "/v1/completions", body | {"n": 4}).status_code == 400


def test_a_request_that_takes_too_long_is_given_up():
    limits = ServiceLimits(request_seconds=0.2)
    with ServedThread(scripted_model(seconds=0.02, max_model_len=4000), limits) as slow:
        body = {"prompt": "to be", "max_tokens": 3000}
        assert post(slow, "/v1/completions", body).status_code == 504
        stream = post(slow, "/v1/completions", body | {"stream": True})
        assert "not done within 0.2 seconds" in stream.text
        assert "[DONE]" not in stream.text
        assert wait_until(lambda: not slow.model.engine.live)


def test_nothing_is_served_before_the_model_is_there():
    with ServedThread(None) as loading:
        assert httpx.get(f"{loading.url}/health").status_code == 503
        response = post(loading, "/v1/completions", {"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
