"""polyreme.reader and polyreme.dataset."""

import gzip
import hashlib
import random
import struct
import threading

import numpy as np
import pytest

import polyreme as paddle
from polyreme import reader
from polyreme.errors import ConfigError, DataError
from polyreme.vision.datasets import MNIST


def count(n):
    return lambda: iter(range(n))


def test_batches_group_samples():
    assert list(paddle.batch(count(5), 2)()) == [[0, 1], [2, 3], [4]]
    assert list(reader.batch(count(5), 2, drop_last=True)()) == [[0, 1], [2, 3]]
    assert list(reader.batch(count(0), 2)()) == []
    with pytest.raises(ConfigError, match="batch_size=0; give an int of at least 1"):
        reader.batch(count(5), 0)


def test_readers_of_readers():
    assert list(reader.map_readers(lambda a, b: a + b, count(3), count(3))()) == [0, 2, 4]
    assert list(reader.chain(count(2), count(1))()) == [0, 1, 0]
    assert list(reader.firstn(count(9), 2)()) == [0, 1]
    pairs = reader.compose(count(2), lambda: iter([(5, 6), (7, 8)]))
    assert list(pairs()) == [(0, 5, 6), (1, 7, 8)]
    assert list(reader.compose(count(2), count(1), check_alignment=False)()) == [(0, 0)]
    with pytest.raises(DataError, match="different lengths"):
        list(reader.compose(count(2), count(1))())
    random.seed(1)
    assert sorted(reader.shuffle(count(10), 4)()) == list(range(10))
    assert set(list(reader.shuffle(count(10), 4)())[:4]) == {0, 1, 2, 3}


def test_a_cached_reader_is_read_once():
    reads = []
    kept = reader.cache(lambda: (reads.append(i) or i for i in range(3)))
    assert [*kept(), *kept()] == [0, 1, 2, 0, 1, 2]
    assert len(reads) == 3


def test_a_buffered_reader_raises_what_the_reader_raised_and_ends_its_thread():
    def broken():
        yield 1
        raise OSError("the disk is gone")

    samples = reader.buffered(broken, 2)()
    assert next(samples) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(samples)
    before = threading.active_count()
    endless = reader.buffered(lambda: iter(int, 1), 2)()
    next(endless)
    endless.close()
    for thread in threading.enumerate()[before:]:
        thread.join(5)
    assert threading.active_count() <= before


def test_mapping_in_threads_keeps_the_order():
    assert list(reader.xmap_readers(lambda n: n * n, count(20), 4, 8, order=True)()) == [n * n for n in range(20)]
    with pytest.raises(ConfigError, match="process_num=0"):
        reader.xmap_readers(abs, count(1), 0, 1)


def test_digits_from_local_files(tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "folders", classmethod(lambda cls: [tmp_path]))
    with pytest.raises(DataError, match="nothing is downloaded"):
        paddle.dataset.mnist.test()
    pixels = np.arange(2 * 784).reshape(2, 784) % 256
    files = {
        "images-idx3": struct.pack(">4i", 2051, 2, 28, 28) + pixels.astype("u1").tobytes(),
        "labels-idx1": struct.pack(">2i", 2049, 2) + bytes([3, 7]),
    }
    digests = {}
    for kind, content in files.items():
        packed = gzip.compress(content, mtime=0)
        (tmp_path / f"t10k-{kind}-ubyte.gz").write_bytes(packed)
        digests[f"t10k-{kind.split('-')[0]}"] = (hashlib.md5(packed).hexdigest(),)
    monkeypatch.setattr(MNIST, "DIGESTS", digests)
    (first, label), second = paddle.dataset.mnist.test()()
    assert (label, second[1]) == (3, 7)
    np.testing.assert_allclose(first, pixels[0] / 127.5 - 1, atol=1e-6)


def test_other_data_sets_are_refused():
    with pytest.raises(AttributeError, match="no 'uci_housing', only mnist: nothing is downloaded"):
        _ = paddle.dataset.uci_housing
