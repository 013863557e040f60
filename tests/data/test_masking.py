"""Masked words: which places are asked about, what stands there instead, and that it is the same again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.data.masking import MaskedDataset, num_asked
from polyreme.data.packing import NO_LABEL, PackedDataset
from polyreme.data.token_pair import PairWriter, TokenPair
from polyreme.errors import ConfigError

MASK, VOCAB = 99, 100


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    prefix, rng = tmp_path_factory.mktemp("masking") / "pair", np.random.default_rng(0)
    with PairWriter(prefix, "uint16") as writer:
        for size in rng.integers(1, 30, 200):
            writer.add(rng.integers(0, MASK, size))
    return TokenPair(prefix)


@settings(max_examples=40, deadline=None)
@given(rate=st.floats(0.01, 0.99), is_packed=st.booleans(), index=st.integers(0, 10**6))
def test_what_is_asked_about_stood_there(pair, rate, is_packed, index):
    rows = PackedDataset(pair, 0, pair.num_documents, 24, is_packed, ahead=0)
    data = MaskedDataset(rows, MASK, VOCAB, seed=3, rate=rate, copies=2)
    index %= len(data)
    (tokens, ends, places), labels = rows.row(index % len(rows))
    inputs, (asked, ids) = data[index]
    size = int((labels != NO_LABEL).sum())
    count = max(1, round(rate * size))
    assert len(asked) == num_asked(24, rate) >= count
    assert np.all(asked[count:] == NO_LABEL)
    assert np.all(ids[count:] == NO_LABEL)
    assert np.all(np.diff(asked[:count]) > 0)
    assert asked[count - 1] < size  # never what pads a row
    np.testing.assert_array_equal(ids[:count], tokens[asked[:count]])
    np.testing.assert_array_equal(inputs[1:], [ends, places])
    is_asked = np.isin(np.arange(24), asked[:count])
    np.testing.assert_array_equal(inputs[0][~is_asked], tokens[~is_asked])
    np.testing.assert_array_equal(inputs, data[index][0])


def test_every_token_is_in_a_row_once(pair):
    rows = PackedDataset(pair, 0, pair.num_documents, 24, ahead=0)
    tokens = np.concatenate([labels[labels != NO_LABEL] for _, labels in map(rows.row, range(len(rows)))])
    np.testing.assert_array_equal(np.sort(tokens), np.sort(pair.tokens.window(0, pair.num_tokens)))


def test_of_ten_words_eight_are_masked_one_is_another_and_one_stays(pair):
    rows = PackedDataset(pair, 0, pair.num_documents, 24, ahead=0)
    data = MaskedDataset(rows, MASK, VOCAB, seed=0, rate=0.5, copies=20)
    items = [data[i] for i in range(len(data))]
    now = np.concatenate([inputs[0][asked[asked >= 0]] for inputs, (asked, _) in items])
    before = np.concatenate([ids[ids >= 0] for _, (_, ids) in items])
    for share, expected in ((now == MASK, 0.8 + 0.1 / VOCAB), (now == before, 0.1 + 0.1 / VOCAB)):
        assert abs(share.mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / len(now))
    again = {tuple(asked[0]) for _, asked in items[:: len(rows)]}  # the copies of a row
    assert len(again) > 15


def test_settings_that_mask_nothing(pair):
    rows = PackedDataset(pair, 0, pair.num_documents, 24, ahead=0)
    with pytest.raises(ConfigError, match=r"rate 1.5, mask 99, copies 1; give a rate between 0 and 1"):
        MaskedDataset(rows, MASK, VOCAB, 0, 1.5)
