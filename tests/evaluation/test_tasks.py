"""Tasks give the same numbers in this process, from a server and through the harness, and say what those depend on."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from polyreme.core import rng
from polyreme.data.record_files import Record
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DataError
from polyreme.evaluation import TASKS, EngineScorer, EvalOptions, ServerScorer, metrics, tasks
from polyreme.evaluation.harness import choice_task, harness_model, run_harness
from polyreme.evaluation.tasks import encode_pair, read_choices, score_pairs, windows
from polyreme.generation import TextEngine
from polyreme.generation.grammar import TextGrammars
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.tokenizer import END_OF_TEXT, train_byte_level_bpe
from polyreme.nn import functional as F
from polyreme.recipes.inference import evaluate
from polyreme.serving.service import ServedModel
from tests.serving.scripted import ServedThread

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void. " * 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model():
    rng.seed(3)
    return Llama(LlamaConfig.nano(vocab_size=300, seq_len=128))


@pytest.fixture(scope="module")
def here(model):
    tokenizer = train_byte_level_bpe(iter([TEXT]), 299)
    tokenizer.add_special_tokens(["<s>"])
    end = tokenizer.token_to_id(END_OF_TEXT)
    special = {"bos_token": "<s>", "eos_token": END_OF_TEXT}
    text = TextTokenizer(tokenizer, [end], None, TEMPLATE, special)
    return EngineScorer(engine_of(model, text), text, {"model": "m", "dtype": "float32", "plan": "one device"})


def engine_of(model, text):
    return TextEngine(model, text.end, text.vocab_size, max_num_seqs=4, prefill_chunk=32)


@pytest.fixture(scope="module")
def served(here, model):
    grammars = TextGrammars(here.tokenizer, model.config.vocab_size)
    # an engine of its own: a thread takes its steps, which may go on after the answer
    engine = engine_of(model, here.tokenizer)
    whole = ServedModel(engine, here.tokenizer, engine.max_model_len, grammars, "float32", "one device")
    with ServedThread(whole) as served:
        yield ServerScorer(served.url)


@pytest.fixture
def data(tmp_path):
    """Files that each task can take."""
    (tmp_path / "a.txt").write_text(TEXT)
    rows = [
        {"prompt": f"And {word}", "choices": ["the heaven", "void", "God created"], "answer": number % 3}
        for number, word in enumerate(["the", "earth", "was", "without", "form"])
    ]
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": f"And {word}", "completion": "the heaven"} for word in ("God", "the", "earth")]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@given(st.integers(2, 200), st.integers(2, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_windows_score_each_token_once(count, sizes):
    length, stride = sizes
    scored = [place for begin, end, first in windows(count, length, stride) for place in range(first, end)]
    assert scored == list(range(1, count))
    for number, (begin, end, first) in enumerate(windows(count, length, stride)):
        assert end - begin <= length
        assert first - begin >= (length - stride if number else 1)


@pytest.mark.slow
def test_perplexity_is_that_of_the_logits(here, model, data):
    result = TASKS["ppl"](here, EvalOptions(max_length=60, stride=20), [data / "a.txt", data / "choices.jsonl"])
    ids = np.array(here.encode(TEXT))
    costs = []
    for begin, end, first in windows(len(ids), 60, 20):
        window = np.pad(ids[begin:end], (0, 60 - (end - begin)))
        logs = F.log_softmax(model(to_tensor(window[None]))[0], axis=-1).numpy()
        costs += [-logs[place - begin - 1, ids[place]] for place in range(first, end)]
    # float32 sums over the width in a few layers
    assert result.metrics["nats_per_token"] == pytest.approx(np.mean(costs), abs=64 * 64 * 2.0**-23)
    assert result.metrics["num_tokens"] == len(ids) - 1
    assert result.metrics["bits_per_byte"] == pytest.approx(
        np.sum(costs) / np.log(2) / len(here.decode(ids[1:]).encode()), rel=1e-4
    )
    assert (result.depends_on["max_length"], result.depends_on["stride"]) == (60, 20)


ROUTES = [
    ("ppl", "a.txt", {"max_length": 60}),
    ("ppl", "a.txt", {"add_bos": True, "limit": 2}),
    ("choice", "choices.jsonl", {}),
    ("choice", "choices.jsonl", {"num_fewshot": 2, "chat": True}),
    ("generate", "answers.jsonl", {"max_new_tokens": 8, "num_fewshot": 1}),
    ("generate", "answers.jsonl", {"max_new_tokens": 8, "chat": True, "stop": ("e",)}),
]


@pytest.mark.slow_cases("generate-answers.jsonl-options4")
@pytest.mark.parametrize(("name", "file", "options"), ROUTES)
def test_both_routes_give_the_same_row(here, served, data, name, file, options):
    rows = [TASKS[name](scorer, EvalOptions(**options), [data / file]).as_row() for scorer in (here, served)]
    assert {**rows[0], "model": None} == {**rows[1], "model": None}
    has_bos = bool(options.get("add_bos") or options.get("chat"))
    assert rows[0]["add_bos"] == has_bos
    assert rows[0]["first_prompt"].startswith("<s>") == has_bos
    assert rows[0]["first_prompt"].count("<s>") == has_bos
    assert {"template", "num_fewshot", "seed", "dtype", "plan", "data", "polyreme"} <= rows[0].keys()
    assert list(rows[0]["data"]) == [file]


def test_a_choice_is_weighed_by_its_log_probability(here, model, data):
    result = TASKS["choice"](here, EvalOptions(), [data / "choices.jsonl"])
    right, right_normalized = [], []
    for line in (data / "choices.jsonl").read_text().splitlines():
        row = read_choices(Record("f:1", json.loads(line)))
        costs = []
        for choice in row.choices:
            before, ids = encode_pair(here, [], row.prompt, f" {choice}")
            padded = np.array([(before + ids + [0] * 40)[:40]])  # what comes after changes nothing before
            logs = F.log_softmax(model(to_tensor(padded))[0], axis=-1).numpy()
            costs.append(sum(logs[len(before) - 1 + place, token] for place, token in enumerate(ids)))
        right.append(np.argmax(costs) == row.answer)
        right_normalized.append(np.argmax(np.array(costs) / [len(c) for c in row.choices]) == row.answer)
    assert result.metrics["acc"] == np.mean(right)
    assert result.metrics["acc_norm"] == np.mean(right_normalized)


@pytest.mark.slow
def test_a_shipped_task_needs_no_data(here):
    result = TASKS["kjv_cloze"](here, EvalOptions(limit=3), [])
    assert (result.num_samples, list(result.depends_on["data"])) == (3, ["cloze.jsonl"])


def test_the_harness_gives_the_same_numbers(here, data, tmp_path):
    pytest.importorskip("lm_eval")
    (ours, theirs) = (
        TASKS["kjv_cloze"](here, EvalOptions(limit=8), []),
        run_harness(here, "kjv_cloze", EvalOptions(limit=8)),
    )
    assert {name: theirs[0].metrics[name] for name in ours.metrics} == pytest.approx(ours.metrics)
    assert theirs[0].depends_on["first_prompt"] == ours.depends_on["first_prompt"]
    instance = type("Instance", (), {})()
    instance.args = (TEXT,)
    (cost,) = harness_model(here, EvalOptions()).loglikelihood_rolling([instance])
    ids = [here.token_id("bos_token"), *here.encode(TEXT)]
    (whole,) = here.score([ids[:127]])
    assert cost < whole.logprobs.sum() if len(ids) > 127 else cost == pytest.approx(whole.logprobs.sum())
    with pytest.raises(ConfigError, match="lm_eval:kjv_clozee: the harness has no such task"):
        run_harness(here, "kjv_clozee", EvalOptions())


def test_the_harness_is_asked_for_by_name(here):
    assert choice_task("x", tasks._SHIPPED / "cloze.jsonl")["output_type"] == "multiple_choice"
    try:
        import lm_eval  # noqa: F401, PLC0415
    except ImportError:
        with pytest.raises(ConfigError, match=r"need the lm-evaluation-harness: pip install polyreme\[eval\]"):
            run_harness(here, "kjv_cloze", EvalOptions())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": 1, "choices": ["a", "b"], "answer": 0}, "f:1: prompt: int where a text"),
        ({"prompt": "a", "choices": ["a"], "answer": 0}, "f:1: choices: two texts or more"),
        ({"prompt": "a", "choices": ["a", "b"], "answer": 2}, "f:1: answer: 2 is no choice; give its number, 0 to 1"),
        ({"prompt": "a", "choices": ["a", "b"], "answer": True}, "f:1: answer: True is no choice"),
    ],
)
def test_rows_of_choices_are_checked(fields, told):
    with pytest.raises(DataError, match=told):
        read_choices(Record("f:1", fields))
    assert read_choices(Record("f:1", {"prompt": "a", "choices": ["a", "b"], "answer": "b"})).answer == 1


def test_each_task_reads_the_files_of_its_kind(here, data):
    files = [data / name for name in ("answers.jsonl", "choices.jsonl", "a.txt")]
    results = evaluate.evaluate(here, ["choice", "generate"], EvalOptions(limit=1, max_new_tokens=1), files[:2])
    assert [list(result.depends_on["data"]) for result in results] == [["choices.jsonl"], ["answers.jsonl"]]
    with pytest.raises(ConfigError, match=r"--data .*a\.txt: none of the tasks choice, generate reads it"):
        next(evaluate.evaluate(here, ["choice", "generate"], EvalOptions(), files))


def test_what_cannot_be_asked(here, data):
    with pytest.raises(ConfigError, match="task ppl needs --data FILE of text"):
        TASKS["ppl"](here, EvalOptions(), [data / "choices.jsonl"])
    with pytest.raises(ConfigError, match="unknown task 'choise'; did you mean 'choice'"):
        evaluate.check_tasks(["lm_eval:x", "choise"])
    with pytest.raises(ConfigError, match="num_fewshot=9 of 5 rows"):
        TASKS["choice"](here, EvalOptions(num_fewshot=9), [data / "choices.jsonl"])
    with pytest.raises(ConfigError, match="stride=60 in windows of 60 tokens leaves none"):
        TASKS["ppl"](here, EvalOptions(max_length=60, stride=60), [data / "a.txt"])
    with pytest.raises(ConfigError, match=f"max_length=9999: the model scores windows of at most {here.max_tokens}"):
        TASKS["ppl"](here, EvalOptions(max_length=9999), [data / "a.txt"])
    with pytest.raises(ConfigError, match="limit=0; give at least 1"):
        EvalOptions(limit=0)
    with pytest.raises(ConfigError, match="seed=-1; give at least 0"):
        EvalOptions(seed=-1)
    (data / "b.txt").write_text("a")
    with pytest.raises(DataError, match="not one token that follows another"):
        TASKS["ppl"](here, EvalOptions(), [data / "b.txt"])
    with pytest.raises(DataError, match="a continuation has no tokens"):
        score_pairs(here, [([1], [])])
    with pytest.raises(DataError, match="nothing is before a continuation"):
        score_pairs(here, [([], [1])])
    with pytest.raises(ConfigError, match="Port out of range"):
        ServerScorer("http://127.0.0.1:99999")
    with pytest.raises(ConfigError, match="ftp://x: not an address"):
        ServerScorer("ftp://x")
    with pytest.raises(DataError, match="is a server there"):
        ServerScorer("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="--dtype bfloat16: http://x serves its model as it was started"):
        evaluate.open_scorer("http://x", "bfloat16")


def test_rouge_l_takes_the_nearest_reference():
    assert metrics.rouge_l("a b c d", ["x", "a c d"]) == pytest.approx(2 * 3 / (4 + 3))
    assert metrics.rouge_l("", ["a"]) == 0
