"""A model from disk behind the server: texts are what the LLM writes, alone and beside others; runs and folders."""

import asyncio
import dataclasses
import json
import random
import shutil

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from polyreme.core import rng  # noqa: E402
from polyreme.distributed.placement import clear_plan  # noqa: E402
from polyreme.errors import CheckpointError, ConfigError  # noqa: E402
from polyreme.generation import LLM, SamplingParams  # noqa: E402
from polyreme.models import AutoModelForCausalLM  # noqa: E402
from polyreme.models.decoders.llama import Llama, LlamaConfig  # noqa: E402
from polyreme.models.files import adapters  # noqa: E402
from polyreme.nn.layers.lora import LoRA  # noqa: E402
from polyreme.ops.random import standard_normal as normal  # noqa: E402
from polyreme.recipes.corpus import TOKENIZER  # noqa: E402
from polyreme.recipes.weights.base import base_digest  # noqa: E402
from polyreme.serving import loading  # noqa: E402
from polyreme.serving.requests import ChatBody, read_body  # noqa: E402
from polyreme.serving.service import ServiceLimits  # noqa: E402
from tests.recipes.tiny_run import train  # noqa: E402
from tests.serving.scripted import ServedThread, tokenizer_of  # noqa: E402

OPTIONS = loading.EngineOptions(max_num_seqs=4, block_size=4, prefill_chunk=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizer_of()
    tokenizer.save_pretrained(folder)
    rng.seed(3)
    Llama(LlamaConfig.nano(vocab_size=tokenizer.vocab_size + 2, seq_len=64)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder):
    model = loading.load_served(folder, OPTIONS)
    with ServedThread(model, ServiceLimits(max_num_seqs=4, max_waiting=1000)) as served:
        yield served


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder)


def test_a_text_is_what_the_llm_writes(served, llm):
    for params in (SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=5, top_p=0.9, max_tokens=12, n=2)):
        (output,) = llm.generate("to be", params)
        body = {"prompt": "to be", "temperature": params.temperature, "top_p": params.top_p, "n": params.n}
        body |= {"seed": params.seed, "max_tokens": 12, "logprobs": 2, "return_token_ids": True}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
        assert [c["text"] for c in answer["choices"]] == [text.text for text in output.outputs]
        assert [c["token_ids"] for c in answer["choices"]] == [text.token_ids for text in output.outputs]
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(output.outputs[0].token_ids)


def test_a_request_that_says_nothing_is_drawn_as_the_weights_say(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    said = json.loads((folder / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(said | {"do_sample": True, "top_k": 1}))
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}!")
    options = dataclasses.replace(OPTIONS, chat_template=tmp_path / "template.jinja")
    served = [
        loading.load_served(tmp_path, dataclasses.replace(options, generation_config=kind)) for kind in ("auto", "vllm")
    ]
    assert [model.defaults for model in served] == [{"top_k": 1}, {}]
    assert served[0].tokenizer.apply_chat_template([{"role": "user", "content": "to be"}]) == "to be!"
    with pytest.raises(ConfigError, match="--generation-config no: unknown"):
        loading.EngineOptions(generation_config="no")
    body = read_body(ChatBody, b'{"messages": [{"role": "user", "content": "a"}], "top_p": 0.5}')
    params = body.sampling(9, None, {"top_k": 1, "top_p": 0.9})
    assert (params.top_k, params.top_p, params.temperature) == (1, 0.5, 1)


def test_a_prompt_is_as_likely_as_it_was_to_write(served, llm):
    """The log-probabilities of an echoed text are those that it was written with, to rounding."""
    body = {"prompt": "to be", "seed": 7, "max_tokens": 12, "logprobs": 1, "return_token_ids": True}
    (written,) = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["choices"]
    ids = written["prompt_token_ids"] + written["token_ids"]
    echo = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    (scored,) = httpx.post(f"{served.url}/v1/completions", json=echo, timeout=60).json()["choices"]
    logprobs = scored["logprobs"]["token_logprobs"]
    assert len(logprobs) == len(ids)
    # float32 sums over the width in a few layers, once by row and once by chunk
    bound = 64 * llm.model.config.hidden_size * 2.0**-23
    count = len(written["token_ids"])
    assert logprobs[-count:] == pytest.approx(written["logprobs"]["token_logprobs"], abs=bound)


def test_an_answer_follows_a_schema(served):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}, "pet": {"enum": ["né", "cat"]}},
        "required": ["age", "pet"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": form,
        "n": 3,
        "temperature": 2,
        "seed": 1,
    }
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    values = [json.loads(choice["message"]["content"]) for choice in answer["choices"]]
    assert all(value["age"] in range(10) and value["pet"] in ("né", "cat") for value in values)
    assert len({json.dumps(value) for value in values}) > 1
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


@pytest.fixture(scope="module")
def adapter_folders(folder, tmp_path_factory):
    """Of two adapters, one of which has its own template and end."""
    folders = {}
    for number, name in enumerate(("loud", "quiet")):
        model = AutoModelForCausalLM.from_pretrained(folder)
        rng.seed(number)
        adapters.add_adapters(model, LoRA(rank=2 + number), "all")
        for p in model.parameters():
            if p.trainable:
                p.set_value(normal(p.shape) * 0.3)
        folders[name] = tmp_path_factory.mktemp(name)
        adapters.write_adapter(model, folders[name], digest=base_digest(str(folder)))
    tokenizer = tokenizer_of().with_template("{% for m in messages %}{{ m['content'] }}t{% endfor %}", "t")
    tokenizer.save_pretrained(folders["loud"])
    return folders


def test_requests_name_adapters_of_one_server(folder, adapter_folders, llm):
    model = loading.load_served(folder, dataclasses.replace(OPTIONS, adapters=adapter_folders))
    writers = {name: LLM(folder, adapter=path) for name, path in adapter_folders.items()} | {"nano": llm}

    async def ask_all(url, bodies):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json() for answer in answers]

    with ServedThread(model, names=("nano",), adapters=tuple(adapter_folders)) as served:
        listed = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert [(m["id"], m["parent"]) for m in listed] == [("nano", None), ("loud", "nano"), ("quiet", "nano")]
        base = {"prompt": "to be or not", "temperature": 0, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
        bodies = [base | {"model": name, "n": 2} for name in writers]
        together = asyncio.run(ask_all(served.url, bodies))
        for body, answer in zip(bodies, together, strict=True):
            (alone,) = asyncio.run(ask_all(served.url, [body]))
            assert answer["model"] == body["model"]
            assert answer["choices"] == alone["choices"]
            (want,) = writers[body["model"]].generate("to be or not", SamplingParams(temperature=0, max_tokens=12))
            assert answer["choices"][0]["token_ids"] == want.outputs[0].token_ids
            assert answer["choices"][0]["finish_reason"] == want.outputs[0].finish_reason
        assert len({answer["choices"][0]["text"] for answer in together}) == 3
        messages = [{"role": "user", "content": "be"}]
        tokens = {
            name: httpx.post(f"{served.url}/tokenize", json={"model": name, "messages": messages}).json()["tokens"]
            for name in writers
        }
        assert tokens["loud"] == tokenizer_of().encode("bet")
        assert tokens["quiet"] == tokens["nano"] != tokens["loud"]
        refused = httpx.post(f"{served.url}/v1/completions", json={"model": "laud", "prompt": "a"})
        assert refused.status_code == 404
        assert "there is nano, loud, quiet" in refused.json()["error"]["message"]


def test_an_adapter_of_other_weights_is_not_served(folder, adapter_folders, tmp_path):
    rng.seed(4)
    Llama(LlamaConfig.nano(vocab_size=tokenizer_of().vocab_size + 2, seq_len=64)).save_pretrained(tmp_path)
    tokenizer_of().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="give the weights that it was trained on"):
        loading.load_served(tmp_path, dataclasses.replace(OPTIONS, adapters={"a": adapter_folders["quiet"]}))


def bodies(count, seed=0):
    """Requests of random lengths and settings, some of which stop early, and some that are bad."""
    draw = random.Random(seed)
    words = ["to", " be", " or", "né", " \U0001f600", "question", "\ufffd"]
    for number in range(count):
        body = {
            "prompt": "".join(draw.choices(words, k=draw.randint(1, 8))),
            "max_tokens": draw.randint(1, 20),
            "seed": number,
            "temperature": draw.choice([0, 0.7, 2]),
            "top_p": draw.choice([1, 0.9]),
            "stream": draw.random() < 0.6,
            "return_token_ids": True,
            "stop": draw.choice([[], ["t"], ["be", "question"]]),
            "n": draw.choice([1, 1, 2]),
        }
        if draw.random() < 0.15:
            body |= draw.choice([{"n": -1}, {"foo": 1}, {"prompt": ""}, {"max_tokens": 10**9}, {"temperature": None}])
        yield body, draw.random() < 0.2


async def ask(client, body, leaves):
    """(status, texts by choice, token ids by choice), or None of what was left before its end."""
    texts, ids = {}, {}

    def take(choice):
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["text"]
        ids.setdefault(index, []).extend(choice["token_ids"])

    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200 or not body["stream"]:
            data = json.loads(await response.aread())
            for choice in data.get("choices", ()):
                take(choice)
            return response.status_code, texts, ids
        async for line in response.aiter_lines():
            if leaves:
                return None
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    take(choice)
    return 200, texts, ids


async def soak(served, count):
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=httpx.Limits(max_connections=24)) as client:
        return await asyncio.gather(*(ask(client, body, leaves) for body, leaves in bodies(count)))


def test_many_clients_of_all_kinds_leave_nothing_behind(served, llm):
    """Every text is the one of the same request alone; nothing is left behind."""
    count = 40
    answers = asyncio.run(soak(served, count))
    statuses = [answer[0] for answer in answers if answer]
    assert set(statuses) <= {200, 400}
    assert statuses.count(200) > count / 2
    for (body, _), answer in zip(bodies(count), answers, strict=True):
        if answer is None or answer[0] != 200:
            continue
        for index, text in answer[1].items():
            whole = llm.tokenizer.decode(answer[2][index])
            ends = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in body["stop"] if stop in whole]
            assert text == (whole[: min(ends)[1]] if ends else whole)
    engine = served.model.engine
    for _ in range(200):
        if not engine.has_unfinished and not served.service.num_texts:
            break
        asyncio.run(asyncio.sleep(0.02))
    assert not engine.has_unfinished
    assert served.service.num_texts == 0
    assert engine.statistics.num_blocks_used == 0
    # and texts are still the same
    assert asyncio.run(soak(served, 3))[:3] == [None if a is None else a for a in answers[:3]]


@pytest.mark.slow
def test_a_run_on_text_is_served(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("In the beginning was the word, and the word was with all. " * 200)
    settings = [f"data.text={text}", "data.tokenizer_vocab_size=300", "train.steps=5"]
    train(tmp_path / "run", *settings)
    clear_plan()
    with ServedThread(loading.load_served(tmp_path / "run", OPTIONS)) as served:
        body = {"prompt": "In the", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["choices"][0]["text"]
        # a run has no chat template
        refused = httpx.post(f"{served.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        assert "no chat template" in refused.json()["error"]["message"]
        assert httpx.get(f"{served.url}/tokenizer_info").json()["eos_token"] == "<|endoftext|>"
    (tmp_path / "run" / TOKENIZER).unlink()
    with pytest.raises(CheckpointError, match="the run trained on synthetic tokens"):
        loading.load_served(tmp_path / "run", OPTIONS)


def test_a_run_without_checkpoints_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="nothing was saved yet"):
        loading.load_served(tmp_path, OPTIONS)
    with pytest.raises(ConfigError, match="without --dtype"):
        loading.load_served(tmp_path, loading.EngineOptions(dtype="bfloat16"))
