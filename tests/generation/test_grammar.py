"""Texts of a form: whatever a model would say, JSON that follows its schema comes; other requests are as they were."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("llguidance")

from polyreme.core import rng
from polyreme.errors import ConfigError
from polyreme.generation import SamplingParams, TextEngine, TextTokenizer
from polyreme.generation.grammar import TextGrammars
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.tokenizer import END_OF_TEXT, train_byte_level_bpe

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-c]{1,4}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dög"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    trained = train_byte_level_bpe(iter(['{"name": "cat", "age": 12}'] * 3), 280)
    return TextTokenizer(trained, [trained.token_to_id(END_OF_TEXT)])


@pytest.fixture(scope="module")
def engine(tokenizer):
    rng.seed(5)
    model = Llama(LlamaConfig.nano(vocab_size=tokenizer.vocab_size + 3, seq_len=96))
    return TextEngine(model, tokenizer.end, tokenizer.vocab_size, max_num_seqs=3, block_size=8, prefill_chunk=16)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return TextGrammars(tokenizer, tokenizer.vocab_size + 3)


def write(engine, requests):
    """{id: (tokens, how it ended)}."""
    for number, (prompt, params, grammar) in enumerate(requests):
        engine.add(str(number), prompt, params, None, grammar)
    texts = {str(number): ([], None) for number in range(len(requests))}
    while engine.has_unfinished:
        for output in engine.step():
            tokens, _ = texts[output.request_id]
            texts[output.request_id] = ([*tokens, *output.token_ids], output.finish_reason)
    return [texts[str(number)] for number in range(len(requests))]


def test_a_text_follows_its_schema_beside_one_that_has_none(engine, tokenizer, grammars):
    free = ([5, 6, 7], SamplingParams(seed=1, max_tokens=20), None)
    alone = write(engine, [free])
    for seed in range(4):
        params = SamplingParams(seed=seed, max_tokens=80, temperature=0.0 if seed == 0 else 1.0)
        grammar = grammars.of_schema(SCHEMA)
        (tokens, reason), beside = write(engine, [([1, 2], params, grammar), free])
        value = json.loads(tokenizer.decode(tokens))
        assert reason == "stop"
        assert set(value) == {"name", "age", "kind"}
        assert re.fullmatch("[a-c]{1,4}", value["name"])
        assert 0 <= value["age"] <= 99
        assert value["kind"] in ("cat", "dög")
        assert [beside] == alone


def test_a_text_that_is_cut_is_told(engine, grammars):
    params = SamplingParams(temperature=0, max_tokens=3)
    ((tokens, reason),) = write(engine, [([1], params, grammars.of_schema(SCHEMA))])
    assert (len(tokens), reason) == (3, "length")


def test_any_object_begins_with_a_brace_and_copies_go_their_own_way(tokenizer, grammars):
    grammar = grammars.of_schema()
    allowed = grammar.allowed()
    assert allowed.shape == (tokenizer.vocab_size + 3,)
    assert {tokenizer.decode([i])[:1] for i in np.flatnonzero(allowed)} == {"{"}
    copy = grammar.copy()
    for token in tokenizer.encode("{}"):
        grammar.take(token)
    assert grammar.is_done
    assert not copy.is_done
    np.testing.assert_array_equal(copy.allowed(), allowed)
    # something may always come, also where a token that was not allowed came
    copy.take(tokenizer.encode("x")[0])
    assert copy.is_done
    assert copy.allowed().any()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "string", "pattern": "("},
        {"$ref": "#/nowhere"},
        {"not": {}},
        {"type": "string", "format": "nonsense"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(grammars, schema):
    with pytest.raises(ConfigError, match=r"the JSON schema is not understood: \S"):
        grammars.of_schema(schema)


def test_a_schema_that_no_text_follows_is_refused(grammars):
    with pytest.raises(ConfigError, match=r"no JSON follows the schema; look for a \$ref"):
        grammars.of_schema({"$ref": "#"})


def test_what_goes_with_no_grammar_is_refused(engine, tokenizer, grammars):
    with pytest.raises(ConfigError, match="min_tokens and a grammar"):
        engine.add("x", [1], SamplingParams(min_tokens=2), None, grammars.of_schema())
    with pytest.raises(ConfigError, match="needs a tokenizer with an end"):
        TextGrammars(TextTokenizer(tokenizer.tokenizer), tokenizer.vocab_size).of_schema()
