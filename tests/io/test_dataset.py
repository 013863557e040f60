"""Datasets: indexing, joining, splitting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme import io
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.io.dataset import reader


class Numbers(io.Dataset):
    def __init__(self, n, start=0):
        self.n, self.start = n, start

    def __getitem__(self, idx):
        return idx + self.start

    def __len__(self):
        return self.n


class Stream(io.IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_tensor_dataset_gives_rows_as_tensors_and_the_loader_arrays():
    rows = io.TensorDataset([to_tensor(np.eye(3, dtype="float32")), to_tensor(np.arange(3))])
    x, y = rows[1]
    assert isinstance(x, Tensor)
    np.testing.assert_array_equal(x.numpy(), [0, 1, 0])
    assert int(y) == 1
    assert len(rows) == 3
    for read in (reader(rows), reader(io.Subset(rows, [2, 1]))):
        assert isinstance(read(1)[0], np.ndarray)
        np.testing.assert_array_equal(read(1)[0], [0, 1, 0])


def test_a_subclass_of_tensor_dataset_keeps_its_own_getitem():
    class Doubled(io.TensorDataset):
        def __getitem__(self, idx):
            return super().__getitem__(idx)[0] * 2

    assert reader(Doubled([np.arange(3)]))(2) == 4


@pytest.mark.parametrize("shapes", [[(3, 2), (4,)], [], [()]])
def test_tensor_dataset_refuses_other_first_dims(shapes):
    with pytest.raises(ShapeError, match="one common first dim"):
        io.TensorDataset([np.zeros(shape) for shape in shapes])


def test_compose_concat_chain_and_subset():
    assert io.ComposeDataset([io.Subset([(1, 2)], [0]), Numbers(1, 3)])[0] == (1, 2, 3)
    joined = io.ConcatDataset([Numbers(3), Numbers(0), Numbers(2, 100)])
    assert [joined[i] for i in range(len(joined))] == [0, 1, 2, 100, 101]
    assert joined[-1] == 101
    assert list(io.ChainDataset([Stream([1]), Stream([2, 3])])) == [1, 2, 3]
    assert io.Subset(Numbers(9), [4, 2])[1] == 2


def test_dataset_errors():
    with pytest.raises(ShapeError, match=r"lengths \[1, 2\]"):
        io.ComposeDataset([Numbers(1), Numbers(2)])
    with pytest.raises(ConfigError, match="got no datasets"):
        io.ConcatDataset([])
    with pytest.raises(DTypeError, match="takes IterableDatasets, got a Numbers"):
        io.ChainDataset([Numbers(1)])
    with pytest.raises(DTypeError, match="index and a length, got a Stream"):
        io.ConcatDataset([Stream([])])
    with pytest.raises(IndexError, match="of 3 samples has no sample 3"):
        io.ConcatDataset([Numbers(3)])[3]
    with pytest.raises(NotImplementedError, match="does not define __getitem__"):
        io.Dataset()[0]
    with pytest.raises(NotImplementedError, match="does not define __len__"):
        len(io.Dataset())
    with pytest.raises(NotImplementedError, match="does not define __iter__"):
        iter(io.IterableDataset())
    with pytest.raises(TypeError, match="has no sample 0"):
        Stream([])[0]
    with pytest.raises(TypeError, match="has no length"):
        len(Stream([]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 2**32))
def test_random_split_covers_the_dataset_once(lengths, seed):
    parts = io.random_split(range(sum(lengths)), lengths, generator=seed)
    assert [len(part) for part in parts] == lengths
    assert sorted(i for part in parts for i in part.indices) == list(range(sum(lengths)))
    assert [p.indices for p in parts] == [p.indices for p in io.random_split(range(sum(lengths)), lengths, seed)]


def test_random_split_of_fractions_and_its_errors():
    assert [len(part) for part in io.random_split(range(10), [0.35, 0.35, 0.3])] == [4, 3, 3]
    with pytest.warns(UserWarning, match="part 1 of"):
        io.random_split(range(1), [0.5, 0.5])
    with pytest.raises(ConfigError, match="sum to 6, the dataset has 10"):
        io.random_split(range(10), [3, 3])
    with pytest.raises(ConfigError, match="sum to 1"):
        io.random_split(range(10), [0.5, 0.6])


def test_unknown_name_in_io():
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        io.Loader  # noqa: B018
    assert "DataLoader" in dir(io)
