"""Samplers: coverage, determinism in (seed, epoch), shares of several processes."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyreme as paddle
from polyreme import host_random, io
from polyreme.errors import ConfigError, DTypeError

FEW = settings(max_examples=60, deadline=None)


@FEW
@given(st.integers(1, 50), st.integers(0, 2**63), st.integers(0, 5))
def test_random_sampler_is_a_function_of_seed_and_epoch(n, seed, epoch):
    one = io.RandomSampler(range(n), generator=seed)
    orders = [list(one) for _ in range(epoch + 1)]
    other = io.RandomSampler(range(n), generator=seed)
    other.set_epoch(epoch)
    assert list(other) == orders[-1]
    assert all(sorted(order) == list(range(n)) for order in orders)


def test_epochs_differ_and_seeds_differ():
    sampler = io.RandomSampler(range(100), generator=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert list(io.RandomSampler(range(100), generator=2)) not in (first, second)


def test_what_a_generator_may_be(monkeypatch):
    class Like:
        def initial_seed(self):
            return 7

    assert io.RandomSampler(range(5), generator=Like()).seed == 7
    by_numpy = [io.RandomSampler(range(9), generator=np.random.default_rng(4)).seed for _ in range(2)]
    assert by_numpy[0] == by_numpy[1]
    monkeypatch.setattr(host_random._stream, "generator", None)  # as before any polyreme.seed
    np.random.seed(3)
    first = list(io.RandomSampler(range(99)))
    np.random.seed(3)
    assert list(io.RandomSampler(range(99))) == first
    assert list(io.RandomSampler(range(3), generator=iter([2, 1, 0, 0]))) == [2, 1, 0]
    with pytest.raises(DTypeError, match="generator is a str"):
        io.RandomSampler(range(5), generator="7")
    with pytest.raises(ConfigError, match="seed is -1"):
        io.RandomSampler(range(5), generator=-1)


def test_random_sampler_counts():
    assert len(list(io.RandomSampler(range(10), num_samples=3))) == 3
    drawn = list(io.RandomSampler(range(3), replacement=True, num_samples=50))
    assert len(drawn) == 50
    assert set(drawn) <= {0, 1, 2}
    with pytest.raises(ConfigError, match="num_samples=5 of 3"):
        io.RandomSampler(range(3), num_samples=5)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        io.RandomSampler(range(3), num_samples=0)
    with pytest.raises(DTypeError, match="replacement must be"):
        io.RandomSampler(range(3), replacement=1)


def test_sequence_subset_and_base():
    assert list(io.SequenceSampler("abc")) == [0, 1, 2]
    subset = io.SubsetRandomSampler([5, 7, 9])
    assert sorted(subset) == [5, 7, 9]
    assert len(subset) == 3
    with pytest.raises(ConfigError, match="no indices"):
        io.SubsetRandomSampler([])
    with pytest.raises(NotImplementedError, match="does not define __iter__"):
        iter(io.Sampler())
    with pytest.raises(DTypeError, match="no length"):
        len(io.Sampler())


def test_weighted_sampler_follows_the_weights():
    n = 4000
    drawn = Counter(io.WeightedRandomSampler([0.0, 1.0, 3.0], n))
    assert drawn[0] == 0
    # binomial(n, 3/4): standard deviation sqrt(n 3/16); 6 of them fail once in 5e8 runs
    assert abs(drawn[2] - 0.75 * n) < 6 * math.sqrt(n * 3 / 16)
    assert sorted(io.WeightedRandomSampler([1, 1, 2], 3, replacement=False)) == [0, 1, 2]
    with pytest.raises(ConfigError, match="finite numbers"):
        io.WeightedRandomSampler([-1.0, 2.0], 1)
    with pytest.raises(ConfigError, match="1 of 2 weights are positive"):
        io.WeightedRandomSampler([0.0, 2.0], 2, replacement=False)


@FEW
@given(st.integers(0, 40), st.integers(1, 9), st.booleans())
def test_batch_sampler_cuts_the_order(n, size, drop):
    batches = list(sampler := io.BatchSampler(dataset=range(n), batch_size=size, drop_last=drop))
    assert len(batches) == len(sampler) == (n // size if drop else math.ceil(n / size))
    assert [i for batch in batches for i in batch] == list(range(len(batches) * size if drop else n))
    assert all(len(batch) == size for batch in batches[:-1])


def test_batch_sampler_errors():
    with pytest.raises(ConfigError, match="got neither"):
        io.BatchSampler()
    with pytest.raises(ConfigError, match="got both"):
        io.BatchSampler(range(3), io.SequenceSampler(range(3)))
    with pytest.raises(ConfigError, match="no effect on a given sampler"):
        io.BatchSampler(sampler=io.SequenceSampler(range(3)), shuffle=True)
    with pytest.raises(ConfigError, match="batch_size must be"):
        io.BatchSampler(range(3), batch_size=0)
    with pytest.raises(DTypeError, match="no indices to sample"):
        io.BatchSampler(io.IterableDataset())
    with pytest.raises(DTypeError, match="got a int"):
        io.BatchSampler(sampler=3)


@FEW
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_the_ranks_share_every_sample_and_take_equal_steps(n, size, ranks, shuffle, epoch):
    samplers = [io.DistributedBatchSampler(range(n), size, ranks, rank, shuffle=shuffle) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert len({tuple(map(len, share)) for share in shares}) == 1
    assert all(len(share) == len(sampler) for share, sampler in zip(shares, samplers, strict=True))
    counts = Counter(i for share in shares for batch in share for i in batch)
    assert set(counts) == set(range(n))
    assert sum(counts.values()) == math.ceil(n / ranks) * ranks


def test_distributed_sampler_deals_blocks_as_paddle_does():
    # recorded from PaddlePaddle 3.3.1, 11 samples, batch size 2, 3 replicas
    shares = [list(io.DistributedBatchSampler(range(11), 2, 3, rank)) for rank in range(3)]
    assert shares == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 0]]]
    assert list(io.DistributedBatchSampler(range(7), 2, 3, 2, drop_last=True)) == [[4, 5]]
    assert list(io.DistributedBatchSampler([0], 2, 4, 3)) == [[0]]


def test_distributed_sampler_epochs_and_environment(monkeypatch):
    sampler = io.DistributedBatchSampler(range(50), 5, 1, 0, shuffle=True)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(0)
    assert first != second
    assert list(sampler) == first
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "2")
    mine = io.DistributedBatchSampler(range(8), 1)
    assert (mine.nranks, mine.local_rank, list(mine)) == (4, 2, [[2], [6]])
    with pytest.raises(ConfigError, match="rank 4 of 4"):
        io.DistributedBatchSampler(range(8), 1, rank=4)


def test_the_root_seed_fixes_shuffles_and_splits():
    def draws():
        paddle.seed(5)
        first, second = io.random_split(list(range(20)), [12, 8])
        return list(first), list(second), list(io.RandomSampler(list(range(10))))

    assert draws() == draws()
    paddle.seed(6)
    assert list(io.RandomSampler(list(range(10)))) != draws()[2]
