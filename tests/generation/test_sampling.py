"""What is drawn, against NumPy: which tokens are among those chosen from, and how often each comes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.eager.tensor import to_tensor
from polyreme.generation import SamplingParams
from polyreme.generation.choosing import DraftRow, TokenChooser
from polyreme.generation.sampling import gumbel_noise, marked, next_tokens, penalized

VOCAB, ROWS = 12, 4096


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, choice="filter", rows=ROWS):
    """One token for each of many seeds."""
    columns = [(temperature, np.float32), (top_k, np.int32), (top_p, np.float32), (min_p, np.float32)]
    settings = [to_tensor(np.full(rows, value, dtype)) for value, dtype in columns]
    seeds = to_tensor(np.arange(rows, dtype=np.int64))
    noise = gumbel_noise(seeds, seeds * 0 + 3, VOCAB)
    logits = to_tensor(np.broadcast_to(logits, (rows, VOCAB)).astype(np.float32))
    return next_tokens(logits, noise, *settings, choice).numpy()


def among(logits, temperature, top_k, top_p, min_p):
    """The probabilities that are drawn from: cut by count, then by their sum, then by the likeliest's."""
    scaled = (logits / np.float32(temperature)).astype(np.float64)
    if top_k > 0:
        scaled[scaled < np.sort(scaled)[::-1][min(top_k, VOCAB) - 1]] = -np.inf
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    least = p[order][before < top_p].min()
    kept = (p >= least) & (p >= min_p * p.max()) & (p > 0)
    return np.where(kept, p, 0) / p[kept].sum()


@settings(max_examples=25)
@given(
    st.integers(0, 2**31),
    st.floats(0.2, 3),
    st.sampled_from([0, 1, 3, 12, 40]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_tokens_are_drawn_among_the_ones_that_numpy_finds(seed, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 2
    p = among(logits, temperature, top_k, top_p, min_p)
    counts = np.bincount(draw(logits, temperature, top_k, top_p, min_p), minlength=VOCAB)
    assert counts[p == 0].sum() == 0
    # five standard deviations of a binomial number, and one for the smallest
    assert (np.abs(counts - ROWS * p) <= 5 * np.sqrt(ROWS * p * (1 - p)) + 1).all()


@pytest.mark.parametrize("choice", ["draw", "filter"])
def test_a_temperature_of_zero_takes_the_likeliest_in_any_batch(choice):
    logits = np.random.default_rng(0).standard_normal(VOCAB)
    assert set(draw(logits, temperature=0.0, choice=choice, rows=8)) == {logits.argmax()}


def test_a_row_of_one_possible_token_takes_it():
    logits = np.full(VOCAB, -np.inf)
    logits[5] = 0.0
    assert set(draw(logits, top_p=0.5, rows=8)) == {5}


def test_tokens_that_were_seen_are_penalized():
    seen = marked(to_tensor(np.zeros((2, 4), bool)), to_tensor([[1, -1, 3], [0, 0, 9]]))
    np.testing.assert_array_equal(seen.numpy(), [[False, True, False, True], [True, False, False, False]])
    logits = to_tensor(np.array([[2.0, 2.0, -2.0, -2.0], [1.0, 1.0, 1.0, 1.0]], np.float32))
    got = penalized(logits, seen, to_tensor(np.array([2.0, 4.0], np.float32))).numpy()
    np.testing.assert_array_equal(got, [[2.0, 1.0, -2.0, -4.0], [0.25, 1.0, 1.0, 1.0]])


def test_tokens_that_were_written_are_penalized_by_how_often():
    """Each row by its own settings, the prompt apart: worked out by hand."""
    chooser = TokenChooser(3, 5, 4, ())
    plain = SamplingParams(temperature=0, max_tokens=9)
    chooser.begin(0, SamplingParams(temperature=0, frequency_penalty=0.3, max_tokens=9), [0, 0, 0], 3)
    chooser.begin(1, SamplingParams(temperature=0, presence_penalty=0.6, max_tokens=9), [2, 0], 1)
    chooser.begin(2, plain, [1], 1)
    logits = to_tensor(np.tile(np.array([1.0, 0.75, 0.5, -1.0, 9.0], np.float32), (3, 1)))
    lengths = to_tensor(np.zeros(3, np.int32))
    written = np.array([chooser(logits, lengths).read().token_ids for _ in range(5)]).T
    # of the first row 1, 0.75, 0.5; 0.7 0.75 0.5; 0.7 0.45 0.5; 0.4 0.45 0.5; 0.4 0.45 0.2
    assert written.tolist() == [[0, 1, 0, 2, 1], [1, 2, 0, 0, 0], [0] * 5]
    chooser.note(0, [1])  # which another row chose for it: 0.4 -0.15 0.2
    assert chooser(logits, lengths).read().token_ids.tolist() == [0, 0, 0]
    # drafts of 0 and 2 for the first text, on the third row: -0.2 -0.15 -0.1
    assert chooser(logits, lengths, [DraftRow(2, 0, [0, 2])]).read().token_ids[2] == 2
