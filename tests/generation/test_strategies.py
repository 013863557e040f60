"""model.generate under PaddleNLP's names: the same as the generator's and the search's texts."""

import numpy as np
import pytest

from polyreme.core import rng
from polyreme.errors import ConfigError, ShapeError
from polyreme.generation import BeamSearch, BeamSearchParams, SamplingParams, TextGenerator
from polyreme.models.decoders.llama import Llama, LlamaConfig

IDS, MASK = [[0, 5, 9, 3], [7, 2, 2, 1]], [[0, 1, 1, 1], [1, 1, 1, 1]]
PROMPTS = [[5, 9, 3], [7, 2, 2, 1]]
END = (20, 9, 3)


@pytest.fixture(scope="module")
def model():
    rng.seed(5)
    return Llama(LlamaConfig.nano(vocab_size=24, seq_len=48)).train()


def rows_of(texts):
    return [t.token_ids + ([] if t.end_token is None else [t.end_token]) for t in texts]


def check(ids, rows, pad):
    longest = max(map(len, rows))
    assert ids.numpy().tolist() == [row + [pad] * (longest - len(row)) for row in rows]


@pytest.fixture(scope="module")
def generator(model):
    generator = TextGenerator(model, END)
    model.train()
    return generator


def test_each_sampling_draws_anew(model):
    first, second = (
        model.generate(PROMPTS[:1], decode_strategy="sampling", max_length=8)[0].numpy().tolist() for _ in range(2)
    )
    model.train()
    assert first != second


@pytest.mark.slow
def test_greedy_search_and_sampling_write_as_a_generator(model, generator):
    ids, scores = model.generate(IDS, attention_mask=MASK, max_length=9, eos_token_id=END, pad_token_id=23)
    texts = generator.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9, logprobs=0))
    model.train()
    check(ids, rows_of(texts), 23)
    np.testing.assert_allclose(scores.numpy()[:, 0], [np.mean(t.logprobs or [0]) for t in texts], rtol=1e-6)
    settings = {"temperature": 0.9, "top_k": 12, "top_p": 0.95}
    ids, _ = model.generate(
        PROMPTS[:1],
        decode_strategy="sampling",
        max_length=6,
        num_return_sequences=3,
        seed=4,
        eos_token_id=20,
        **settings,
    )
    drawn = [
        TextGenerator(model, [20]).generate(PROMPTS[:1], SamplingParams(max_tokens=6, seed=4 + n, **settings))[0]
        for n in range(3)
    ]
    model.train()
    check(ids, rows_of(drawn), 20)
    assert model.training


def test_a_beam_search_is_that_of_beam_search(model, generator):
    settings = {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True}
    ids, scores = model.generate(
        IDS, attention_mask=MASK, decode_strategy="beam_search", max_length=5, min_length=2, num_return_sequences=2,
        eos_token_id=END, **settings,
    )  # fmt: skip
    model.eval()
    params = BeamSearchParams(n=2, max_tokens=5, min_tokens=2, **settings)
    texts = [text for prompt in PROMPTS for text in BeamSearch(generator).search(prompt, params)]
    model.train()
    check(ids, rows_of(texts), END[0])
    assert scores.numpy()[:, 0].tolist() == [text.score for text in texts]


def test_transformers_words_say_the_same(model):
    shared = {"attention_mask": MASK, "eos_token_id": END}
    pairs = [
        ({"max_length": 5}, {"max_new_tokens": 5, "do_sample": False, "use_cache": True}),
        (
            {"max_length": 5, "decode_strategy": "sampling", "seed": 3},
            {"max_new_tokens": 5, "do_sample": True, "seed": 3},
        ),
        ({"max_length": 5, "decode_strategy": "beam_search", "num_beams": 2}, {"max_new_tokens": 5, "num_beams": 2}),
    ]
    for ours, theirs in pairs:
        (ids, scores), (same, scores_too) = (
            model.generate(IDS, **shared, **ours),
            model.generate(IDS, **shared, **theirs),
        )
        assert ids.numpy().tolist() == same.numpy().tolist()
        assert scores.numpy().tolist() == scores_too.numpy().tolist()


def test_what_a_folder_says_of_ends_goes_where_nothing_else_is_said(model):
    want, _ = model.generate(IDS, attention_mask=MASK, max_length=9, eos_token_id=END, pad_token_id=23)
    model.generation_config = {"eos_token_id": list(END), "pad_token_id": 23, "temperature": 0.3}
    try:
        assert model.generate(IDS, attention_mask=MASK, max_length=9)[0].numpy().tolist() == want.numpy().tolist()
    finally:
        del model.generation_config


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"decode_strategy": "greedy"}, ConfigError, "unknown decode_strategy 'greedy'; did you mean 'greedy_search'"),
        ({"top_k": 3}, ConfigError, "greedy_search does not read top_k; leave it out, or take sampling"),
        ({"decode_strategy": "sampling", "num_beams": 2}, ConfigError, "sampling does not read num_beams"),
        ({"attention_mask": [[1]]}, ShapeError, "give ids as .batch, seq. and a mask of the same shape"),
        ({"max_length": 0}, ConfigError, "max_tokens=0 is out of range"),
        ({"max_len": 3}, TypeError, "max_len"),
        ({"max_length": 3, "max_new_tokens": 4}, ConfigError, "max_length=3 and max_new_tokens=4 are the same setting"),
        ({"decode_strategy": "greedy_search", "do_sample": True}, ConfigError, "and do_sample=True; give one of them"),
    ],
)
def test_settings_that_do_not_fit_are_refused(model, settings, error, message):
    with pytest.raises(error, match=message):
        model.generate(IDS, **settings)
