"""Datasets for the loader's tests; a module of their own, so that worker processes can import them without jax."""

import dataclasses
import os
import signal
import sys
import time

import numpy as np

from polyreme.io import Dataset, IterableDataset, get_worker_info


class Rows(Dataset):
    """Sample i is (i, an array full of i)."""

    def __init__(self, n, width=3):
        self.n, self.width = n, width

    def __getitem__(self, idx):
        return idx, np.full(self.width, idx, "float32")

    def __len__(self):
        return self.n


class Faulty(Rows):
    """Fails in the given way at the given sample."""

    def __init__(self, n, at, how, delay=0.0):
        super().__init__(n)
        self.at, self.how, self.delay = at, how, delay

    def __getitem__(self, idx):
        time.sleep(self.delay)
        if idx == self.at:
            getattr(self, self.how)()
        return super().__getitem__(idx)

    def raises(self):
        raise KeyError("no such file")

    def raises_own(self):
        raise OwnError(1, 2)

    def is_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def leaves(self):
        sys.exit(3)

    def hangs(self):
        time.sleep(3600)


class OwnError(Exception):
    """Cannot be made from its args, as pickle would."""

    def __init__(self, a, b):
        super().__init__("own trouble")


class Ragged(Rows):
    """Sample i has i + 1 numbers."""

    def __getitem__(self, idx):
        return np.ones(idx + 1)


class Growing(Rows):
    """Batches whose size changes a lot, so that slots must grow."""

    def __getitem__(self, idx):
        return np.full(1 + (idx * 7919) % 5000, idx, "int64")


class Modules(Rows):
    """Whether jax was imported where the sample was read."""

    def __getitem__(self, idx):
        return int("jax" in sys.modules), os.getpid()


class Augmented(Rows):
    """A sample with a number of numpy's global generator in it."""

    def __getitem__(self, idx):
        return idx, np.random.random()


class Held(Dataset):
    """Holds an array, in memory or mapped from a file."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, idx):
        info = get_worker_info()
        return self.array[idx], type(info.dataset.array).__name__, bool(self.array.flags.writeable)

    def __len__(self):
        return len(self.array)


class Count(IterableDataset):
    """0, 1, ... n - 1, shared by the workers in turn."""

    def __init__(self, n, at=None):
        self.n, self.at = n, at

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, self.n, step):
            if i == self.at:
                raise ValueError("bad line")
            yield i


class Unloadable(Rows):
    """Pickles, but cannot be unpickled."""

    def __reduce__(self):
        return (_refuse, ())


def _refuse():
    raise RuntimeError("the database is closed")


def odd_collate(samples):
    return {"ids": {sample[0] for sample in samples}, "names": np.array([None, "x"], dtype=object)}


def lambda_collate(samples):
    return lambda: samples


def init_fails(worker):
    raise OSError(f"no device for {worker}")


def init_seeds(worker):
    np.random.seed(worker)


class Logged(Rows):
    """Writes one byte to a file for each sample that is read."""

    def __init__(self, n, path):
        super().__init__(n)
        self.path = path

    def __getitem__(self, idx):
        with open(self.path, "ab") as log:
            log.write(b".")
        return super().__getitem__(idx)

    def count(self):
        """Samples read so far."""
        return os.path.getsize(self.path)


class AllBad(Rows):
    """No sample can be read."""

    def __getitem__(self, index):
        raise OSError(f"bad {index}")


class SlowInOneWorker:
    """Samples that worker 0 takes 0.2 s for, each with its number and the worker's."""

    def __len__(self):
        return 36

    def __getitem__(self, index):
        worker = get_worker_info().id
        time.sleep(0.2 if worker == 0 else 0.002)
        return np.array([index, worker])


@dataclasses.dataclass
class Sample:
    """What a local class is derived from."""

    value: int
