"""Vectors over HTTP, by OpenAI's own client; models that write refuse it, models that embed refuse to write."""

import numpy as np
import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from polyreme.core import rng  # noqa: E402
from polyreme.models.bert import Bert, BertConfig  # noqa: E402
from polyreme.serving import loading  # noqa: E402
from tests.generation.test_embedding import words  # noqa: E402
from tests.serving.scripted import ServedThread, scripted_model  # noqa: E402


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    rng.seed(0)
    Bert(BertConfig.nano(vocab_size=64, seq_len=32)).save_pretrained(folder)
    words().save_pretrained(folder)
    with ServedThread(loading.load_served(folder, loading.EngineOptions())) as served:
        yield served


def post(served, path, body):
    answer = httpx.post(f"{served.url}{path}", json=body)
    return answer.status_code, answer.json().get("error", {"param": None, "message": ""})


def test_vectors_come_in_order_in_both_encodings(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        texts = [f"w{i} w{i + 1}" for i in range(40)]
        # the client asks for base64 by itself, and reads it
        options = ({}, {"encoding_format": "float"})
        answers = [client.embeddings.create(model="nano", input=texts, **option) for option in options]
        alone = client.embeddings.create(model="nano", input=[1, 5, 2])
    for answer in answers:
        assert [row.index for row in answer.data] == list(range(40))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 160
    vectors = [np.array([row.embedding for row in answer.data], np.float32) for answer in answers]
    np.testing.assert_array_equal(*vectors)
    expected = served.model.embed([served.model.encode(text) for text in texts])
    np.testing.assert_array_equal(vectors[0], expected)
    np.testing.assert_array_equal(np.float32(alone.data[0].embedding), served.model.embed([[1, 5, 2]])[0])


def test_tokens_and_models_are_told(served):
    answer = httpx.post(f"{served.url}/tokenize", json={"prompt": "w1"}).json()
    assert (answer["tokens"], answer["max_model_len"]) == ([1, 5, 2], 32)
    assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["max_model_len"] == 32
    assert httpx.get(f"{served.url}/metrics").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {"input": []}, "input", "list of strings"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "at most 2048"),
        ("/v1/embeddings", {"input": "a " * 40}, "input", "has 42 tokens; give 1 to 32"),
        ("/v1/embeddings", {"input": [1, 99]}, "input", "not among"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions", "vectors have 32"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ("/v1/completions", {"prompt": "a"}, None, "ask /v1/embeddings"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None, "ask /v1/embeddings"),
    ],
)
def test_a_refusal_names_the_field(served, path, body, param, message):
    status, error = post(served, path, body)
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_model_that_writes_makes_no_vectors():
    with ServedThread(scripted_model()) as served:
        status, error = post(served, "/v1/embeddings", {"input": "a"})
    assert (status, error["code"]) == (400, "task")
    assert "makes no vectors" in error["message"]
