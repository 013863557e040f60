"""Pickles as data: what they give, and that nothing else in them has an effect."""

import contextlib
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from polyreme.errors import DataError
from polyreme.io import pickled_data
from polyreme.io.pickled_data import read_pickle

NAME = Path("a.tgz")
NUMBERS = st.one_of(st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.none())
LEAVES = NUMBERS | st.text(max_size=9) | st.binary(max_size=300)
KEYS = st.text(max_size=3) | st.integers()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=20,
)


def read(data):
    return read_pickle(io.BytesIO(data), NAME)


@given(VALUES, st.integers(0, 5))
def test_values_are_what_pickle_reads(value, protocol):
    assert repr(read(pickle.dumps(value, protocol))) == repr(value)


@given(
    arrays.arrays(
        st.sampled_from(["u1", "<i2", ">i4", "i8", "f2", ">f8", "c8", "?"]), arrays.array_shapes(min_dims=0, min_side=0)
    ),
    st.sampled_from([2, 3, 4]),
    st.booleans(),
)
def test_arrays_are_what_pickle_reads(array, protocol, fortran):
    array = np.asfortranarray(array) if fortran else array
    shared = {b"x": array, "again": [array, {"y": array}], "pair": (array, 3)}
    result = read(pickle.dumps(shared, protocol))
    assert result[b"x"].dtype == array.dtype
    np.testing.assert_array_equal(result[b"x"], array)
    assert result["again"][0] is result[b"x"] is result["again"][1]["y"] is result["pair"][0]
    assert result[b"x"].flags.writeable


def test_what_cifar_is_stored_as():
    # Python 2: strings are bytes, protocol 2, names of NumPy before 2
    text = (
        b"\x80\x02}q\x00(U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85q\x04"
        b"U\x01bq\x05\x87q\x06Rq\x07(K\x01K\x01K\x02\x86q\x08cnumpy\ndtype\nq\tU\x02u1q\nK\x00K\x01\x87q\x0bRq\x0c"
        b"(K\x03U\x01|q\rNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x0eb\x89U\x02\x07\x08q\x0ftq\x10bU\x06labelsq\x11"
        b"]q\x12(K\x03K\x09eu."
    )
    with pytest.raises(DataError, match="an array that is not of a shape, a dtype of numbers and bytes"):
        read(text.replace(b"U\x02\x07\x08", b"K\x07"))
    result = read(text)
    np.testing.assert_array_equal(result[b"data"], np.array([[7, 8]], "u1"))
    assert result[b"labels"] == [3, 9]


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments, state=None):
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.call


RECONSTRUCT = np.ones(1).__reduce__()[0]
EMPTY = (np.ndarray, (0,), b"b")
U1 = np.dtype("u1")
HOSTILE = {
    "objects over bytes": (Calls(np.ndarray, (3072,), np.dtype("O"), b"A" * 8 * 3072), "only"),
    "numbers over bytes": (Calls(np.ndarray, (3,), U1, b"abc"), "calls numpy.ndarray"),
    "field far away": (
        Calls(np.dtype, "V8", False, True, state=(3, "|", None, ("f",), {"f": (U1, 10**9)}, 8, 1, 0)),
        "dtype 'V8'",
    ),
    "state of objects": (Calls(np.dtype, "O", False, True), "dtype 'O'"),
    "fields in plain numbers": (
        Calls(np.dtype, "u1", False, True, state=(3, "|", None, ("f",), {"f": (U1, 9)}, 8, 1, 0)),
        "plain numbers",
    ),
    "ten terabytes": (Calls(RECONSTRUCT, *EMPTY, state=(1, (10**13,), U1, False, b"x")), "in 1 bytes; it is damaged"),
    "negative dim": (Calls(RECONSTRUCT, *EMPTY, state=(1, (-1,), U1, False, b"x")), "not of a shape"),
    "never built": ([Calls(RECONSTRUCT, *EMPTY)], "unfinished"),
    "object array": (np.array([{}], object), "dtype 'O8'"),
    "code": (Calls(os.system, "touch canary"), "system"),
    "a class": ({"x": np.dtype("f4")}, "a dtype or a name"),
    "a codec": (Calls(__import__("_codecs").encode, "x", "rot13"), "encodes a str as 'rot13'"),
    "a number of another length": (Calls(np.float32(1).__reduce__()[0], np.dtype("f4"), b"x"), "and as many bytes"),
    "a key of tuples": ({(1,): 2}, "key is a tuple"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_data_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, message = HOSTILE[name]
    with pytest.raises(DataError, match=rf"a\.tgz: .*{message}"):
        read(pickle.dumps(value, 4))
    assert not list(tmp_path.iterdir())


@given(st.binary(max_size=40) | st.binary(max_size=30).map(lambda b: b"\x80\x02" + b + b"."))
def test_noise_is_refused_or_data(data):
    try:
        read(data)
    except DataError as error:
        assert str(error).startswith("a.tgz: ")  # noqa: PT017  either way of ending is right, another error is not


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a memo of 2^31 places, of which one is used
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes longer than memory
        b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",  # tuples in tuples
        b"\x80\x02]q\x00h\x00a.",  # a list in itself
    ],
)
def test_claims_cost_nothing(data):
    with contextlib.suppress(DataError):
        read(data)


def test_length_is_bounded(monkeypatch):
    monkeypatch.setattr(pickled_data, "MAX_BYTES", 1000)
    assert read(pickle.dumps([b"x" * 400] * 9, 3)) == [b"x" * 400] * 9
    with pytest.raises(DataError, match="longer than 1,000 bytes"):
        read(pickle.dumps(b"x" * 1000, 3))
    with pytest.raises(DataError, match="more than 1,000 bytes of arrays"):
        read(b"\x80\x02c_codecs\nencode\nq\x00X\x58\x02\0\0" + b"x" * 600 + b"X\x06\0\0\0latin1\x86q\x01Rh\x00h\x01R0.")
