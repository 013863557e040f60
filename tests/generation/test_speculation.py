"""Drafts: what is proposed, when it pays, and the same text with and without."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.core import rng
from polyreme.errors import ConfigError
from polyreme.generation import SamplingParams, Speculation, TextGenerator
from polyreme.generation.speculation import DraftGate
from polyreme.models.decoders.llama import Llama, LlamaConfig

REQUESTS = [
    ([5, 6, 7, 8, 5, 6], SamplingParams(temperature=0, max_tokens=30, logprobs=2)),
    ([9, 9, 9], SamplingParams(temperature=0.6, seed=3, max_tokens=20, logprobs=0)),
    (
        [4, 5, 4],
        SamplingParams(temperature=0, repetition_penalty=0.7, frequency_penalty=0.05, max_tokens=20, logprobs=1),
    ),
    ([1], SamplingParams(max_tokens=1)),
]


def nano(**changes):
    rng.seed(5)
    return Llama(LlamaConfig.nano(**{"vocab_size": 24, "seq_len": 48, **changes}))


@pytest.fixture(scope="module")
def model():
    return nano()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_a_generator_writes_the_same_bits_with_drafts(model, kind):
    plain = TextGenerator(model, [0])
    draft = nano(num_layers=1) if kind == "model" else kind
    drafted = TextGenerator(model, [0], speculation=Speculation(draft, 4, max_loss=np.inf))
    for prompt, params in REQUESTS:
        assert drafted.generate([prompt], params) == plain.generate([prompt], params)
    assert 0 < drafted.num_accepted <= drafted.num_drafted - (kind == "model")  # which errs
    ends = [drafted.generate([[5, 6, 7]], REQUESTS[0][1], lambda row, token: token == 3)[0].token_ids for _ in range(2)]
    assert ends[0] == ends[1]
    prompts, settings = zip(*REQUESTS[:2], strict=True)
    before = drafted.num_drafted
    assert drafted.generate(prompts, settings) == plain.generate(prompts, settings)
    assert drafted.num_drafted == before


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 8))
def test_what_followed_the_same_tokens_last_is_proposed(text, count, step):
    """However the text comes in parts."""
    drafter = Speculation().drafter(1, 64, 24, 24)
    for end in [*range(1, len(text), step), len(text)]:
        drafts = drafter.propose({0: text[:end]}, {0: count})[0]
    wanted = []
    for size in (2, 3, 4):
        places = [p for p in range(size, len(text)) if text[p - size : p] == text[len(text) - size :]]
        if places:
            following = text[places[-1] :]
            wanted = [following[n % len(following)] for n in range(count)]
    assert drafts == wanted


def test_drafts_that_are_not_met_cost_a_bounded_share():
    gate, lost = DraftGate(5, 0.03), 0.0
    for _ in range(2000):
        drafted = gate.count
        seconds = 1 + 0.3 * drafted
        lost += seconds - 1
        gate.note(seconds, drafted, 0)
    assert 0 < lost <= 0.03 * (2000 + lost) + 0.6


def test_drafts_that_are_met_become_longer():
    gate = DraftGate(6, 0.03)
    gate.note(1.0)
    counts = []
    for _ in range(4):
        counts.append(gate.count)
        gate.note(1.2, gate.count, gate.count)
    assert counts == [2, 4, 6, 6]
    gate.note(1.2, 6, 1)
    assert gate.count == 2
    assert DraftGate(3, np.inf).count == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": "ngrams"}, "'ngrams' drafts no tokens; give 'ngram' or a Decoder"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0; give at least 1"),
        ({"max_loss": -0.1}, "max_loss=-0.1; give a share of at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Speculation(**settings)


def test_a_model_of_other_tokens_is_refused(model):
    with pytest.raises(ConfigError, match="the drafting model has 30 tokens, and the model 24"):
        Speculation(nano(vocab_size=30)).drafter(1, 64, 24, 24)
