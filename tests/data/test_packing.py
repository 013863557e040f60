"""Packing: every token that follows another in its document is asked about once, rows are as full as best fit makes."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.data.packing import NO_LABEL, PackedDataset, best_fit, cut_documents
from polyreme.data.token_pair import PairWriter, TokenPair
from polyreme.errors import ConfigError


def plain_best_fit(sizes, capacity):
    """Piece by piece, as textbooks have it: how full each row is. Of two as full either may be taken."""
    rows = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= capacity]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            rows.append([size])
    return sorted(map(sum, rows))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=60))))
def test_rows_are_those_of_best_fit_piece_by_piece(case):
    capacity, sizes = case
    order, bounds = best_fit(np.array(sizes, np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    rows = [sum(sizes[piece] for piece in order[a:b]) for a, b in itertools.pairwise(bounds)]
    assert sorted(rows) == plain_best_fit(sizes, capacity)


def test_pieces_that_do_not_fit():
    with pytest.raises(ConfigError, match="pieces of 2 to 9 tokens in rows of 8; cut them up first"):
        best_fit(np.array([2, 9]), 8)


def test_a_million_documents_are_packed_in_seconds():
    sizes = np.minimum(np.random.default_rng(0).lognormal(5.5, 1.2, 1_000_000).astype(np.int64) + 1, 2048)
    began = time.process_time()  # others load the machine
    _, bounds = best_fit(sizes, 2048)
    assert time.process_time() - began < 10
    assert len(bounds) - 1 <= 1.001 * np.ceil(sizes.sum() / 2048)  # no packing has fewer rows than that


@pytest.fixture(params=[0, 1])
def pair(tmp_path, request):
    """Documents of 1 to 40 tokens, none of which has a token twice; some are of several sequences."""
    rng = np.random.default_rng(request.param)
    with PairWriter(tmp_path / "p", "uint16") as writer:
        for number in range(30):
            size = int(rng.integers(1, 41))
            lengths = [size] if number % 3 else [size // 2, size - size // 2]
            writer.add(number * 100 + np.arange(size), lengths)
    return TokenPair(tmp_path / "p")


def asked(inputs, labels):
    """(token, label) of every place that counts."""
    return [(int(token), int(label)) for token, label in zip(inputs, labels, strict=True) if label != NO_LABEL]


@pytest.mark.parametrize("is_packed", [True, False])
def test_every_token_that_follows_another_is_asked_about_once(pair, is_packed):
    data = PackedDataset(pair, 0, pair.num_documents, 8, is_packed)
    pairs = [
        entry
        for inputs, labels in (data[row] for row in range(len(data)))
        for entry in asked(inputs[0] if is_packed else inputs, labels)
    ]
    expected = [
        (int(a), int(a) + 1)
        for begin, end in itertools.pairwise(pair.document_starts)
        for a in pair.tokens.window(int(begin), int(end - begin))[:-1]
    ]
    assert sorted(pairs) == expected
    assert data.fill == pytest.approx(len(expected) / (8 * len(data)))


def test_ends_and_places_say_where_documents_lie(pair):
    data = PackedDataset(pair, 0, pair.num_documents, 32)
    for row in range(len(data)):
        (tokens, ends, places), labels = data[row]
        for place in range(32):
            if labels[place] == NO_LABEL:
                assert (tokens[place], ends[place], places[place]) == (0, place + 1, 0)
                continue
            begin = place - places[place]
            inside = tokens[begin : ends[place]]
            np.testing.assert_array_equal(inside, tokens[place] - places[place] + np.arange(len(inside)))


def test_documents_of_a_split_alone_are_in_it(pair):
    last = PackedDataset(pair, 25, 30, 8)
    documents = {int(token) // 100 for row in range(len(last)) for token, _ in asked(last[row][0][0], last[row][1])}
    assert min(documents) >= 25
    with pytest.raises(IndexError, match="of a data set of"):
        last[len(last)]


def test_documents_of_one_token_give_no_sample():
    starts, slots = cut_documents(np.array([0, 1, 2]), 8)
    assert (len(starts), len(slots)) == (0, 0)
    assert best_fit(slots, 8)[1].tolist() == [0]
