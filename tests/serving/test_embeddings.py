"""Vectors over HTTP, by OpenAI's own client; models that write refuse it, models that embed refuse to write."""

import json

import numpy as np
import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from scipy.special import expit  # noqa: E402
from tokenizers import processors  # noqa: E402

from polyreme.core import rng  # noqa: E402
from polyreme.eager.tensor import to_tensor  # noqa: E402
from polyreme.errors import ConfigError  # noqa: E402
from polyreme.generation.embedding import TextScorer  # noqa: E402
from polyreme.models.encoders.bert import Bert, BertConfig, BertForSequenceClassification  # noqa: E402
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


def test_vectors_come_in_order_in_both_encodings(served, openai):
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


def test_texts_are_scored_and_ranked_by_their_vectors(served):
    """By the cosine of what /v1/embeddings gives, in vLLM's and Jina's forms; equal scores in the given order."""
    texts = ["w1 w2", "w3", "w2 w1", "w3"]
    vectors = served.model.embed([served.model.encode(text) for text in texts]).astype("float64")
    want = vectors[1:] @ vectors[0]
    atol = 2 * 32**0.5 * np.finfo(np.float32).eps  # sums of 32 products of numbers of length 1
    for path in ("/v1/score", "/score"):
        answer = httpx.post(f"{served.url}{path}", json={"text_1": texts[0], "text_2": texts[1:]}).json()
        assert [row["index"] for row in answer["data"]] == [0, 1, 2]
        np.testing.assert_allclose([row["score"] for row in answer["data"]], want, rtol=0, atol=atol)
    pairs = {"text_1": texts[:2], "text_2": ["w5", "w3"]}
    scores = [row["score"] for row in httpx.post(f"{served.url}/score", json=pairs).json()["data"]]
    np.testing.assert_allclose(scores[1], 1, rtol=0, atol=atol)
    body = {"query": texts[0], "documents": [texts[1], {"text": texts[2]}, texts[3]], "model": "nano"}
    answer = httpx.post(f"{served.url}/rerank", json=body).json()
    order = sorted(range(3), key=lambda index: (-want[index], index))
    assert [row["index"] for row in answer["results"]] == order
    assert [row["document"]["text"] for row in answer["results"]] == [texts[1:][index] for index in order]
    assert answer["usage"]["total_tokens"] == sum(len(served.model.encode(text)) for text in texts)
    best = httpx.post(f"{served.url}/v1/rerank", json=body | {"top_n": 1}).json()["results"]
    assert [row["index"] for row in best] == order[:1]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer")
    rng.seed(2)
    BertForSequenceClassification(BertConfig.nano(vocab_size=64, seq_len=32, num_labels=1)).save_pretrained(folder)
    tokenizer = words()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    tokenizer.tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, special)
    tokenizer.save_pretrained(folder)
    with ServedThread(loading.load_served(folder, loading.EngineOptions())) as served:
        yield served


def test_a_classifier_with_one_label_reads_query_and_document_together(scorer):
    model, first, documents = scorer.model.model, "w1 w2", ["w3", "w2 w1 w5", "w7"]
    want = []
    for document in documents:
        ids, types = scorer.model.encode_pair(first, document)
        assert types == [0] * 4 + [1] * (len(ids) - 4)
        want.append(expit(model(to_tensor([ids]), token_type_ids=to_tensor([types])).numpy()[0, 0].astype("float64")))
    atol = 64 * 32 * np.finfo(np.float32).eps  # sums of up to hidden_size terms, in two layers, each a few times
    answer = httpx.post(f"{scorer.url}/score", json={"text_1": first, "text_2": documents}).json()
    got = [row["score"] for row in answer["data"]]
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    body = {"query": first, "documents": documents}
    answer = httpx.post(f"{scorer.url}/v1/rerank", json=body).json()
    assert [row["index"] for row in answer["results"]] == sorted(range(3), key=lambda index: -got[index])
    assert answer["usage"]["total_tokens"] == sum(len(scorer.model.encode_pair(first, d)[0]) for d in documents)
    # the same bits alone
    alone = httpx.post(f"{scorer.url}/score", json={"text_1": first, "text_2": "w3"}).json()
    assert alone["data"][0]["score"] == got[0]
    for path, body, message in (
        ("/score", {"text_1": [1, 2], "text_2": "w3"}, "give texts, not token ids"),
        ("/v1/rerank", {"query": "a", "documents": ["a " * 40]}, "tokens; give 1 to 32"),
        ("/v1/embeddings", {"input": "a"}, "scores texts and makes no vectors"),
        ("/v1/completions", {"prompt": "a"}, "ask /v1/rerank"),
    ):
        status, error = post(scorer, path, body)
        assert (status, message in error["message"]) == (400, True), error


def test_a_scorer_says_which_models_it_takes(scorer, tmp_path):
    scorer.model.model.save_pretrained(tmp_path)
    scorer.model.tokenizer.save_pretrained(tmp_path)
    said = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}}
    config = json.loads((tmp_path / "config.json").read_text()) | said
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert TextScorer.from_pretrained(tmp_path).activation == "identity"
    with pytest.raises(ConfigError, match="BertForSequenceClassification is no classifier of BERT's kin with one"):
        TextScorer(BertForSequenceClassification(BertConfig.nano()), words())
    with pytest.raises(ConfigError, match="activation='tanh'; give 'sigmoid' or 'identity'"):
        TextScorer(BertForSequenceClassification(BertConfig.nano(num_labels=1)), words(), activation="tanh")


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
        ("/score", {"text_1": ["a", "a"], "text_2": ["a", "a", "a"]}, "text_1", "2 texts beside 3; give one"),
        ("/score", {"text_1": "a", "text_2": "a " * 40}, "text_1", "has 42 tokens; give 1 to 32"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "list of strings that are not empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "return_documents": False}, "return_documents", "not supp"),
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
