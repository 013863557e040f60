"""Blends: shares kept at every sample, order a function of the number alone, found without walking there."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyreme.data.blend import Blend, Mixture, StreamSampler, shuffled
from polyreme.errors import ConfigError
from polyreme.io import BatchSampler, DataLoader

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.integers(0, 10**12))
@example([0.98, 0.01, 0.01], 0)
@example([1e-300, 1.0, 3.0], 10**6)
@example([1e300, 1e-300, 1.0], 0)
@example([5.0, 3.0, 4.0], 0)  # above 1, as some tools refuse
def test_each_source_has_its_share_after_every_sample(weights, begin):
    blend = Blend(weights)
    counts = blend.counts(begin)
    total = sum(map(Fraction, blend.shares))
    for number in range(begin, begin + 60):
        source, before = blend.locate(number)
        assert before == counts[source]  # each of its samples once, in order
        counts[source] += 1
        assert counts == blend.counts(number + 1)
        for count, share in zip(counts, blend.shares, strict=True):
            assert abs(count - (number + 1) * Fraction(share) / total) <= Fraction(blend.bound) + Fraction(1, 10**9)
    assert blend.bound <= (1.00001 if len(weights) <= 4 else 1.5)


def test_a_long_stretch_keeps_within_one_sample():
    weights = [0.7, 0.2, 0.0999, 0.0001]
    blend = Blend(weights)
    sources = np.array([blend.locate(number)[0] for number in range(30_000)])
    for source, weight in enumerate(weights):
        counts = np.cumsum(sources == source)
        assert np.abs(counts - np.arange(1, 30_001) * weight).max() <= 1.0


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [float("inf")], [1.0, float("nan")], ["a", 1]])
def test_weights_that_cannot_be_meant(weights):
    with pytest.raises(ConfigError, match="give one number above 0 for each source"):
        Blend(weights)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=15, deadline=None)
def test_a_shuffled_order_has_each_number_once(length, key):
    assert sorted(shuffled(place, length, key) for place in range(length)) == list(range(length))


def test_orders_of_other_keys_are_unlike():
    """1 of n! orders: the number of places that agree is about 1, its variance 1 (rencontres)."""
    orders = np.array([[shuffled(place, 500, key) for place in range(500)] for key in range(8)])
    agree = [(orders[i] == orders[j]).sum() for i in range(8) for j in range(i)] + [
        (orders == np.arange(500)).sum() / 8
    ]
    assert max(agree) <= 8  # more in 1 of 10^6
    steps = np.abs(np.diff(orders, axis=1)).mean()  # of a random order: (n + 1) / 3
    assert abs(steps - 501 / 3) < 5 * 120 / np.sqrt(8 * 499)


SETS = [[f"{name}{i}" for i in range(size)] for name, size in (("a", 7), ("b", 3), ("c", 20))]


def test_each_pass_has_each_sample_once_in_another_order():
    mixture = Mixture(SETS, [2, 1, 1], seed=5)
    taken = [mixture[number] for number in range(80)]
    of_a = [name for name in taken if name[0] == "a"]
    assert len(mixture) == 30
    assert sorted(of_a[:7]) == sorted(of_a[7:14]) == SETS[0]
    assert of_a[:7] != of_a[7:14]
    assert [Mixture(SETS, [2, 1, 1], seed=5)[number] for number in range(80)] == taken
    assert [Mixture(SETS, [2, 1, 1], seed=6)[number] for number in range(80)] != taken


def test_mixtures_that_cannot_be_meant():
    with pytest.raises(ConfigError, match="2 weights for 3 sources"):
        Mixture(SETS, [1, 2], seed=0)
    with pytest.raises(ConfigError, match="source 1 has no samples"):
        Mixture([[1], []], [1, 2], seed=0)
    with pytest.raises(IndexError, match="counts from 0"):
        Mixture(SETS, [1, 2, 3], seed=0)[-1]


def batches(loader, epochs):
    return [list(batch) for _ in range(epochs) for batch in loader]


def loader(batch_size=4, **settings):
    mixture = Mixture(SETS, [2, 1, 1], seed=5)
    sampler = StreamSampler(mixture, generator=0, multiple=batch_size)
    order = BatchSampler(sampler=sampler, batch_size=batch_size, drop_last=True)
    return DataLoader(mixture, batch_sampler=order, collate_fn=list, **settings)


def test_a_loader_reads_the_stream_without_gaps_and_goes_on_where_it_was():
    mixture = Mixture(SETS, [2, 1, 1], seed=5)
    whole = batches(loader(), 3)  # epochs of 28: 30 samples in whole batches
    assert sum(whole, []) == [mixture[number] for number in range(84)]  # noqa: RUF017
    first = loader()
    assert [list(batch) for _, batch in zip(range(5), first, strict=False)] == whole[:5]
    second = loader()
    second.set_state_dict(first.state_dict())
    assert batches(second, 2) == whole[5:14]


@pytest.mark.process
def test_workers_read_the_same_stream():
    assert batches(loader(num_workers=2), 1) == batches(loader(), 1)


def test_a_blend_of_a_million_samples_opens_at_once():
    began = time.process_time()  # others load the machine
    mixture = Mixture([range(700_000), range(200_000), range(100_000)], [0.5, 0.3, 0.2], seed=0)
    assert mixture[0] is not None
    assert mixture[10**12] is not None
    assert time.process_time() - began < 1.0
