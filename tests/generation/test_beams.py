"""Beam search: the texts and scores of transformers' generate (fixtures/record_beams.py), and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, NumericsError
from polyreme.generation import BeamSearch, BeamSearchParams, SamplingParams, TextGenerator
from polyreme.models import AutoModelForCausalLM
from tests.models.parity import FIXTURES

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "beams.json").read_text())
NAMES = {
    "num_beams": "num_beams",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "repetition_penalty": "repetition_penalty",
    "eos_token_id": "stop_token_ids",
}


@pytest.fixture(scope="module")
def search():
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "folders" / "llama")
    for parameter in model.parameters():
        parameter.set_value(parameter * 2.0)
    return BeamSearch(TextGenerator(model))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_texts_and_scores_are_those_of_transformers(search, number):
    want = RECORDED[number]
    params = BeamSearchParams(**{ours: want[theirs] for theirs, ours in NAMES.items() if theirs in want})
    texts = search.search(want["prompt"], params)
    assert [t.token_ids + ([] if t.end_token is None else [t.end_token]) for t in texts] == want["texts"]
    assert [t.finish_reason == "stop" for t in texts] == [t.end_token is not None for t in texts]
    # sums of at most 12 log-probabilities, each of logits that differ by 1e-6 of their size from transformers'
    np.testing.assert_allclose([t.score for t in texts], want["scores"], rtol=2e-5)


def test_recorded_texts_end_in_every_way():
    lengths = [(len(text), one["max_new_tokens"]) for one in RECORDED for text in one["texts"]]
    assert any(length < most for length, most in lengths)
    assert any(length == most for length, most in lengths)


@pytest.mark.slow
def test_one_beam_is_greedy_and_a_score_is_the_texts_log_probability(search):
    prompt = [5, 9, 3]
    (text,) = search.search(prompt, BeamSearchParams(num_beams=1, max_tokens=6, length_penalty=0.0))
    (greedy,) = search.generator.generate([prompt], SamplingParams(temperature=0, max_tokens=6))
    assert text.token_ids == greedy.token_ids
    with no_grad():
        logits = search.generator.model(to_tensor([[*prompt, *text.token_ids]])).numpy()[0].astype(np.float64)
    logs = log_softmax(logits, -1)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(text.score, logs[range(6), text.token_ids].sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_beams": 0}, "num_beams=0 is out of range; give at least 1"),
        ({"n": 5}, "n=5 is out of range; give 1 to num_beams"),
        ({"length_penalty": np.inf}, "length_penalty=inf is out of range"),
        ({"length_penalty": -50.0}, "length_penalty=-50.0 is out of range; give -6 to 6"),
        ({"early_stopping": "always"}, "early_stopping='always' is out of range; give True, False or 'never'"),
        ({"min_tokens": 17}, "min_tokens=17 is out of range"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is out of range"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        BeamSearchParams(**changes)


def test_what_cannot_be_searched_is_refused(search):
    with pytest.raises(ConfigError, match="num_beams=49 of 48 tokens; give fewer beams"):
        search.search([1], BeamSearchParams(num_beams=49))
    with pytest.raises(ConfigError, match="prompt 0 has no tokens"):
        search.search([], BeamSearchParams())
    weight = search.generator.model.norm.weight
    before = weight.numpy()
    weight.set_value(np.full_like(before, np.nan))
    with pytest.raises(NumericsError, match="logits are not finite at token 0"):
        search.search([1], BeamSearchParams(num_beams=2))
    weight.set_value(before)
