"""Pairs of token files: the layout byte by byte, what is read back, and every way in which two files can be wrong."""

import os
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.data.token_pair import PairWriter, TokenPair, prefix_of, token_dtype
from polyreme.errors import ConfigError, DataError

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 65535]]


def write(prefix, documents=DOCUMENTS, dtype="uint16"):
    with PairWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)
    return prefix


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "v1.0")


def index_bytes(lengths, bounds, *, magic=b"MMIDIDX\0\0", version=1, code=8, pointers=None, width=2):
    """An index written field by field."""
    if pointers is None:
        pointers = [width * sum(lengths[:i]) for i in range(len(lengths))]
    parts = [magic, struct.pack("<QBQQ", version, code, len(lengths), len(bounds))]
    parts += [struct.pack("<i", length) for length in lengths]
    parts += [struct.pack("<q", value) for value in (*pointers, *bounds)]
    return b"".join(parts)


def test_both_files_byte_by_byte(prefix):
    assert (prefix.parent / "v1.0.idx").read_bytes() == index_bytes([3, 0, 1, 3], [0, 1, 2, 3, 4])
    assert (prefix.parent / "v1.0.bin").read_bytes() == struct.pack("<7H", 5, 6, 7, 8, 9, 10, 65535)
    assert sorted(os.listdir(prefix.parent)) == ["v1.0.bin", "v1.0.idx"]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), max_size=6),
    st.sampled_from(["uint16", "int32", "int64", "uint32"]),
)
def test_what_is_written_is_read(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("pair") / "p"
    with PairWriter(prefix, dtype) as writer:
        for sequences in documents:
            writer.add(
                [token for sequence in sequences for token in sequence], [len(sequence) for sequence in sequences]
            )
    pair = TokenPair(f"{prefix}.bin")
    sequences = [sequence for document in documents for sequence in document]
    assert [pair.sequence(i).tolist() for i in range(len(pair))] == sequences
    assert (pair.num_documents, pair.num_tokens, pair.dtype) == (len(documents), sum(map(len, sequences)), dtype)
    sizes = [sum(map(len, document)) for document in documents]
    assert pair.document_starts.tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]


def test_nothing_is_left_of_a_writer_that_fails(tmp_path):
    with pytest.raises(DataError, match=r"p: token 70000 in document 1 does not fit uint16"):
        write(tmp_path / "p", [[1], [2, 70_000]])
    assert os.listdir(tmp_path) == []


def test_refused_places_and_dtypes(prefix, tmp_path):
    with pytest.raises(ConfigError, match=r"v1\.0\.bin: is there already; remove it, or give another name"):
        PairWriter(prefix, "uint16")
    with pytest.raises(ConfigError, match="dtype float64 is not one of tokens"):
        PairWriter(tmp_path / "f", "float64")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/p: cannot be written: (Not a directory|File exists)"):
        PairWriter(tmp_path / "file" / "p", "uint16")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b"", r"p\.idx: begins with b'', not with"),
        (b"TNTIDX\0\0" + bytes(40), r"begins with b'TNTIDX"),
        (b"MMIDIDX\0\0\1", "torn, 10 bytes where its header alone has 34"),
        (index_bytes([1], [0, 1], version=2), "version 2 of the index; version 1 is read"),
        (index_bytes([1], [0, 1], code=7), "dtype code 7 is not one of tokens; those are 1 uint8"),
        (index_bytes([1], [0, 1], code=77), "dtype code 77"),
        (index_bytes([1, 1], [0, 2])[:-3], r"71 bytes, where 2 sequences and 2 bounds of documents take 74: torn"),
        (index_bytes([1, 1], [0, 2]) + b"\0\0", "modes of sequences, which are not read"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**62, 2**60), "18,446,744,073,709,551,615|torn or damaged"),
        (index_bytes([1, -1], [0, 2]), "sequence 1 has -1 tokens"),
        (index_bytes([1, 1], [0, 2], pointers=[0, 4]), "sequence 1 begins at byte 4, and those before it end at 2"),
        (index_bytes([1, 1], []), "bounds of documents are none; they must rise from 0 to 2"),
        (index_bytes([1, 1], [0, 1]), "bounds of documents are 0 to 1; they must rise from 0 to 2"),
        (index_bytes([1, 1], [0, 2, 1, 2]), "must rise from 0 to 2"),
        (index_bytes([1, 2], [0, 2]), r"p\.bin: 4 bytes, and p\.idx says 6; the two are not of one run"),
    ],
)
def test_a_wrong_index_is_named(tmp_path, index, says):
    (tmp_path / "p.bin").write_bytes(b"\1\0\2\0")
    (tmp_path / "p.idx").write_bytes(index)
    with pytest.raises(DataError, match=says):
        TokenPair(tmp_path / "p")


def test_a_missing_half_is_named(prefix, tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.idx: cannot be read: No such file"):
        TokenPair(tmp_path / "nowhere")
    (tmp_path / "v1.0.bin").unlink()
    with pytest.raises(DataError, match=r"v1\.0\.bin: cannot be read: No such file"):
        TokenPair(prefix)


def test_a_pair_that_changes_under_its_reader_is_refused(prefix, tmp_path):
    pair = TokenPair(prefix)
    sent = pickle.loads(pickle.dumps(pair))  # as to a worker
    assert sent.sequence(3).tolist() == [9, 10, 65535]
    path = tmp_path / "v1.0.bin"
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match=r"v1\.0\.bin: the file has changed under this run: it was written to"):
        pair.sequence(0)
    os.truncate(path, 6)  # a mapped file would end the process here
    with pytest.raises(DataError, match=r"6 bytes, 14 when it was opened; .* prepare it again"):
        sent.sequence(3)


def test_digest_is_of_content_not_of_place(prefix, tmp_path):
    other = write(tmp_path / "other")
    assert TokenPair(prefix).digest == TokenPair(other).digest
    assert TokenPair(write(tmp_path / "third", [*DOCUMENTS[:-1], [9, 10, 11]])).digest != TokenPair(other).digest


def test_names_and_dtypes():
    assert [str(prefix_of(name)) for name in ("a/b.bin", "a/b.c.idx", "a/b.c")] == ["a/b", "a/b.c", "a/b.c"]
    assert [token_dtype(size) for size in (65499, 65500)] == ["uint16", "int32"]  # as Megatron-LM chooses


@pytest.mark.parametrize(("dtype", "wrong"), [("int64", 2**32 + 5), ("int32", -1), ("uint32", 2**31), ("int16", -7)])
def test_tokens_that_are_none_are_refused_and_not_wrapped(tmp_path, dtype, wrong):
    pair = TokenPair(write(tmp_path / "p", [[1, 2], [3, wrong]], dtype))
    assert pair.sequence(0).tolist() == [1, 2]
    with pytest.raises(DataError, match=rf"p\.bin: token 3 is {wrong}, and tokens are 0 to 2,147,483,647; prepare it"):
        pair.sequence(1)
