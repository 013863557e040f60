"""LLM: text in and out, conversations, tokenizers of folders, templates that nobody vouches for."""

import json
import shutil
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from polyreme.core import rng
from polyreme.errors import CheckpointError, ConfigError
from polyreme.generation import LLM, AutoTokenizer, BeamSearchParams, SamplingParams, TextTokenizer
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.tokenizer import END_OF_TEXT, train_byte_level_bpe

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<it>{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights and a tokenizer, as a hub has them."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_byte_level_bpe(iter(["to be or not to be, that is the question"]), 270)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": END_OF_TEXT}, "chat_template": TEMPLATE})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id("z")]}))
    rng.seed(3)
    Llama(LlamaConfig.nano(vocab_size=272, seq_len=64)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder)


def test_a_tokenizer_is_called_as_those_of_transformers(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("to be"), tokenizer.encode("not")
    assert tokenizer("not") == {"input_ids": ids[1], "attention_mask": [1] * len(ids[1])}
    with pytest.raises(ConfigError, match=r"padding without a pad_token; set tokenizer\.pad_token"):
        tokenizer(["to be", "not"], padding=True)
    with pytest.raises(ConfigError, match="return_tensors of rows of several lengths"):
        tokenizer(["to be", "o"], return_tensors="np")
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    length = max(map(len, ids)) + 1
    batch = tokenizer(
        ["to be", "not"], padding="max_length", max_length=length, padding_side="left", return_tensors="pd"
    )
    for row, own in zip(batch["input_ids"].numpy().tolist(), ids, strict=True):
        assert row == [tokenizer.pad_token_id] * (length - len(own)) + own
    assert batch["attention_mask"].numpy().sum(1).tolist() == [*map(len, ids)]
    assert tokenizer.batch_decode(batch["input_ids"]) == ["to be", "not"]
    pair = tokenizer(["to be"], ["not"], truncation=True, max_length=2)
    assert pair["token_type_ids"] == [[0, 1]]
    assert tokenizer("to be or not")["input_ids"] == tokenizer.encode("to be or not")  # nothing is cut afterwards
    with pytest.raises(ConfigError, match="truncation=True with max_length=None"):
        tokenizer("to be", truncation=True)


def test_a_folder_may_have_a_template_for_tools(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    templates = [{"name": "default", "template": "{{ messages[0].content }}"}]
    templates.append({"name": "tool_use", "template": "{{ tools[0] }} {{ messages[0].content }}"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer, said = AutoTokenizer.from_pretrained(tmp_path), [{"role": "user", "content": "to be"}]
    assert tokenizer.apply_chat_template(said) == "to be"
    assert tokenizer.apply_chat_template(said, tools=["add"]) == "add to be"


def test_settings_that_the_weights_come_with_and_words_of_vllm(folder, llm, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    said = {"do_sample": True, "temperature": 0.5, "top_k": 7, "eos_token_id": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    other = LLM(tmp_path, max_model_len=32, gpu_memory_utilization=0.5, tensor_parallel_size=1, trust_remote_code=True)
    assert other.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
    assert llm.get_default_sampling_params() == SamplingParams()
    assert other.model.config.seq_len == 32
    (by_text,) = other.generate({"prompt": "to be"}, replace(GREEDY, max_tokens=None, ignore_eos=True))
    prompt = other.tokenizer.encode("to be")
    assert len(by_text.outputs[0].token_ids) == 33 - len(prompt)  # the last one needs no place
    (by_ids,) = other.generate([{"prompt_token_ids": prompt}], GREEDY)
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids[: len(by_ids.outputs[0].token_ids)]
    other.model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == said
    with pytest.raises(ConfigError, match="LLM: tensor_parallel_size=2 cannot be had here; give plan="):
        LLM(folder, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"a prompt with \['text'\]; give its prompt"):
        llm.generate({"text": "to be"}, GREEDY)


def test_texts_and_ids_are_written_after(llm):
    by_text, by_ids = llm.generate(["to be", llm.tokenizer.encode("to be")], GREEDY)
    assert by_text.prompt == by_ids.prompt == "to be"
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert by_text.outputs[0].text == llm.tokenizer.decode(by_text.outputs[0].token_ids)


@pytest.mark.slow
def test_several_texts_of_a_prompt_have_seeds_of_their_own(llm):
    (several,) = llm.generate("to be", SamplingParams(n=3, seed=4, max_tokens=6))
    (last,) = llm.generate("to be", SamplingParams(seed=6, max_tokens=6))
    assert len({tuple(output.token_ids) for output in several.outputs}) == 3
    assert several.outputs[2].token_ids == last.outputs[0].token_ids


def test_words_that_are_banned_are_not_written(llm):
    (free,) = llm.generate("to be", GREEDY)
    first = llm.tokenizer.decode(free.outputs[0].token_ids[:1])
    (other,) = llm.generate("to be", replace(GREEDY, bad_words=[first]))
    assert free.outputs[0].token_ids[0] not in other.outputs[0].token_ids
    (biased,) = llm.generate("to be", replace(GREEDY, logit_bias={7: 100.0}))
    assert set(biased.outputs[0].token_ids) == {7}


def test_a_beam_search_has_texts_and_scores(llm):
    (output,) = llm.beam_search("to be", BeamSearchParams(num_beams=3, n=2, max_tokens=5))
    first, second = output.outputs
    assert first.score > second.score
    assert first.text == llm.tokenizer.decode(first.token_ids)


def test_drafts_of_a_model_with_other_tokens_are_refused(folder, llm, tmp_path):
    drafted = LLM(folder, speculative=folder, num_draft_tokens=2)
    assert drafted.generate("to be", GREEDY) == llm.generate("to be", GREEDY)
    TextTokenizer(train_byte_level_bpe(iter(["ab"]), 258)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="its tokens are not the model's"):
        LLM(folder, speculative=tmp_path)


def test_a_stop_string_is_left_out_though_it_spans_tokens(llm):
    (whole,) = llm.generate("to be", SamplingParams(seed=1, max_tokens=12))
    text = whole.outputs[0].text
    stop = text[3:6]
    (cut,) = llm.generate("to be", SamplingParams(seed=1, max_tokens=12, stop=stop))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert len(cut.outputs[0].token_ids) < len(whole.outputs[0].token_ids)


def test_a_conversation_is_written_by_the_models_template(llm):
    pytest.importorskip("jinja2")
    (answer,) = llm.chat([{"role": "user", "content": "to be?"}], GREEDY)
    assert answer.prompt == "<user>to be?<it>"
    assert answer.prompt_token_ids == llm.tokenizer.encode("<user>to be?<it>", False)


def test_a_folder_says_what_ends_a_text(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.end == (known.token_to_id(END_OF_TEXT), known.token_to_id("z"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "OverflowError|over"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it took over 1 s"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError|it took over"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' * 10**9 }}", r"result of \*\* may be too large"),
        ("{{ 'a' * 1000000000 }}", r"result of \* may be too large"),
        ("{{ [1, 2] * 1000000000 }}", r"result of \* may be too large"),
        ("{% set x = namespace(n=3) %}{% for i in range(99) %}{% set x.n = x.n * x.n %}{% endfor %}", "too large"),
        ("{% if %}", "TemplateSyntaxError"),
        (None, "no chat template"),
    ],
)
def test_a_template_runs_nothing_and_fails_by_name(llm, template, message):
    pytest.importorskip("jinja2")
    tokenizer = TextTokenizer(llm.tokenizer.tokenizer, template=template)
    with pytest.raises(ConfigError, match=message):
        tokenizer.encode_chat([{"role": "user", "content": "a"}], self="a variable of any name")


def test_a_long_conversation_takes_no_more_than_it_may(llm):
    pytest.importorskip("jinja2")
    messages = [{"role": "user", "content": "a" * 100}] * 5000
    text = llm.tokenizer.apply_chat_template(messages)
    assert len(text) == 5000 * len("<user>" + "a" * 100) + len("<it>")


def test_what_an_llm_needs_is_said(llm):
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        LLM(llm.model)
    with pytest.raises(ConfigError, match="the model is there already"):
        LLM(llm.model, llm.tokenizer, dtype="bfloat16")
