"""A token file that is written to under its reader, and then says the time of its old last write."""

import os
import pickle

import numpy as np
import pytest
import xxhash

from polyreme.data.token_file import TokenFile
from polyreme.errors import DataError


@pytest.fixture(params=["digest", "no digest"])
def file(request, tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.arange(4000, dtype=np.uint16).tobytes())
    digest = xxhash.xxh3_128(path.read_bytes()).hexdigest() if request.param == "digest" else None
    return TokenFile(path, "uint16", digest)


def _rewrite(path, at, value):
    times = path.stat()
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(value)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_tokens_rewritten_under_their_old_time_are_refused(file):
    sent = pickle.loads(pickle.dumps(file))  # as to a worker
    assert file.window(10, 3).tolist() == [10, 11, 12]
    _rewrite(file.path, 20, b"\7\7")
    for reader in (file, sent):
        with pytest.raises(DataError, match=r"tokens\.bin: the file has changed under this run"):
            reader.window(10, 3)


def test_a_file_that_is_only_linked_is_read_on(file):
    file.window(0, 2)
    os.link(file.path, file.path.with_suffix(".link"))
    os.chmod(file.path, 0o400)
    assert file.window(3998, 2).tolist() == [3998, 3999]
