"""Duplicates: what is the same is found, what is nearly the same by sets counted out, what differs is kept."""

import numpy as np
import pytest

from polyreme.data import duplicates
from polyreme.data.duplicates import ALIKE, SHINGLE, NearText, SameText
from polyreme.errors import ConfigError

WORDS = [f"w{i}" for i in range(5000)]


def text_of(rng, count):
    return [WORDS[i] for i in rng.integers(0, len(WORDS), count)]


def similarity(one, other):
    """Jaccard, of the sets themselves."""
    sets = [{tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)} for words in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def changed(rng, words, count):
    """The words with so many replaced, far enough from each other to change SHINGLE elements each."""
    words = list(words)
    for place in rng.choice(np.arange(SHINGLE, len(words) - SHINGLE, 2 * SHINGLE), count, replace=False):
        words[place] = "changed"
    return words


def test_signatures_estimate_the_similarity_of_the_sets():
    rng = np.random.default_rng(0)
    for count in (0, 2, 8, 20, 38):
        one = text_of(rng, 400)
        other = changed(rng, one, count)
        true = similarity(one, other)
        marks = [np.frombuffer(NearText.mark(" ".join(words)), np.uint32) for words in (one, other)]
        estimate = (marks[0] == marks[1]).mean()
        assert abs(estimate - true) <= 5 * np.sqrt(true * (1 - true) / 128)  # 1 in 10^6


def test_near_duplicates_are_found_and_others_are_kept():
    rng = np.random.default_rng(1)
    seen, missed, wrong = NearText(), 0, 0
    originals = [text_of(rng, 400) for _ in range(40)]
    for words in originals:
        assert seen.is_new(seen.mark(" ".join(words)))
    for words in originals:
        near, far = changed(rng, words, 2), changed(rng, words, 30)
        assert similarity(words, near) > 0.94
        assert similarity(words, far) < 0.5
        missed += seen.is_new(seen.mark(" ".join(near)))
        wrong += not seen.is_new(seen.mark(" ".join(far)))
    assert (missed, wrong) == (0, 0)


def test_what_is_compared_of_short_odd_and_spaceless_texts():
    seen = NearText()
    texts = ["one two", "One, two!", "two one", "...", "!!!", "\u5929\u5730\u7384\u9ec4" * 3, "\u5929\u5730" * 3]
    assert [seen.is_new(seen.mark(text)) for text in texts] == [True, False, True, True, True, True, True]
    assert ALIKE == 0.8


def test_long_documents_are_hashed_in_parts(monkeypatch):
    text = " ".join(text_of(np.random.default_rng(2), 300))
    whole = NearText.mark(text)
    monkeypatch.setattr(duplicates, "_BATCH", 7)
    assert NearText.mark(text) == whole


def test_same_text_is_the_same_to_the_letter():
    seen = SameText()
    assert [seen.is_new(seen.mark(text)) for text in ("a b", "a b ", "A b", "a b")] == [True, True, True, False]


def test_an_unknown_way_is_named():
    with pytest.raises(ConfigError, match=r"dedup 'minhsh' is unknown; did you mean 'minhash'\?"):
        duplicates.duplicates_by("minhsh")
