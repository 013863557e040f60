"""save and load: values come back as they were; whatever is damaged, hostile or pickled is refused."""

import argparse
import ast
import dataclasses
import enum
import gc
import json
import math
import os
import pickle
import resource
import sys
import time
from collections import OrderedDict
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyreme
from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CheckpointError, ConfigError, DTypeError
from polyreme.io import safetensors_file
from polyreme.io.serialization import load, save


def round_trip(value, **configs):
    buffer = BytesIO()
    save(value, buffer)
    buffer.seek(0)
    return load(buffer, **configs)


def random_bits(dtype, shape):
    rng = np.random.default_rng(0)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype).reshape(shape)


def assert_same_bits(got, want):
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    as_bytes = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (got, want)]
    np.testing.assert_array_equal(*as_bytes)


# what comes back


class Kind(enum.StrEnum):
    """A setting that is one of a few."""

    COSINE = "cosine"


@dataclasses.dataclass
class Settings:
    """As trainers save beside a checkpoint."""

    rate: float
    schedule: Kind
    tags: set
    more: argparse.Namespace


def test_settings_come_back_as_records_and_import_nothing():
    saved = {"args": Settings(0.5, Kind.COSINE, {1, 2}, argparse.Namespace(depth=3)), "step": 7}
    args = round_trip(saved)["args"]
    assert (args.rate, args.schedule, args.tags, args.more.depth) == (0.5, "cosine", {1, 2}, 3)
    assert args.saved_class.endswith("test_serialization.Settings")
    assert round_trip(args) == args
    with pytest.raises(DTypeError, match=r"args.more is a function; only dicts, .* dataclasses"):
        round_trip({"args": Settings(0.5, Kind.COSINE, set(), round_trip)})


@pytest.mark.parametrize("dtype", dtypes.NAMES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_dtype_as_ndarray_and_as_tensor(dtype, shape):
    array = random_bits(dtype, shape)
    assert_same_bits(round_trip(array, return_numpy=True), array)
    tensor = round_trip(to_tensor(array))
    assert isinstance(tensor, Tensor)
    assert_same_bits(tensor.numpy(), array)


def test_nested_values(tmp_path):
    value = {
        "none": None, "bool": True, "int": 2**80, "str": "\u00e9\n\"", "float": 0.1, "big": 1e308, "inf": math.inf,
        "complex": complex(1.5, -math.inf), "list": [1, [2, (3, ())], {}], "tuple": (1, "a"), 7: "int key", None: 0,
        "": [], "a.b": np.arange(2), "a": {"b": np.arange(3)}, "__metadata__": np.ones(1), "tensor": {"tensor": 1},
    }  # fmt: skip
    save(value, tmp_path / "new" / "folder" / "x.pdparams")
    got = load(tmp_path / "new" / "folder" / "x.pdparams", return_numpy=True)
    assert list(got) == list(value)
    for key in value:
        np.testing.assert_equal(got[key], value[key])
        assert type(got[key]) is type(value[key])
    assert math.isnan(round_trip(math.nan))
    assert math.copysign(1, round_trip(-0.0)) == -1
    assert isinstance(round_trip(np.float32(3)), np.float32)
    assert round_trip(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}


def test_arrays_come_as_tensors_unless_they_were_saved_beside_tensors():
    array = np.arange(3)
    (alone,), nested = round_trip((array,)), round_trip([{"a": array, "n": np.float32(2)}])[0]
    assert isinstance(alone, Tensor)
    assert (alone.dtype, alone.tolist()) == (np.int64, [0, 1, 2])
    assert (type(nested["a"]), type(nested["n"])) == (Tensor, np.float32)
    assert type(round_trip([array, {"t": to_tensor(1.0)}])[0]) is np.ndarray
    assert type(round_trip(array, return_numpy=True)) is np.ndarray


def test_a_state_dict_gets_its_tensors_and_names_back(tmp_path):
    weight = to_tensor(np.ones((2, 3), "float32"), stop_gradient=False)
    weight.name = "linear_0.w_0"
    state = {"linear.weight": weight, "scale": to_tensor(np.float32(2)), "epoch": 3, "array": np.ones(2)}
    save(state, str(tmp_path / "x"))
    got = load(str(tmp_path / "x"))
    assert isinstance(got["linear.weight"], Tensor)
    assert (got["linear.weight"].name, got["linear.weight"].stop_gradient) == ("linear_0.w_0", True)
    assert isinstance(got["array"], np.ndarray)
    assert got["epoch"] == 3
    assert list(got) == list(state)
    table = load(tmp_path / "x", keep_name_table=True)["StructuredToParameterName@@"]
    assert table == {"linear.weight": "linear_0.w_0", "scale": state["scale"].name}
    arrays = load(tmp_path / "x", return_numpy=True)
    assert isinstance(arrays["linear.weight"], np.ndarray)
    np.testing.assert_array_equal(arrays["linear.weight"], np.ones((2, 3), "float32"))


def test_one_object_met_twice_is_stored_once():
    shared = np.ones(1000)
    buffer = BytesIO()
    save({"embed": shared, "head": shared}, buffer)
    assert len(buffer.getvalue()) < 9000
    buffer.seek(0)
    got = load(buffer)
    assert got["embed"] is got["head"]


def test_odd_layouts():
    for array in (
        np.arange(12)[::5],
        np.arange(6).reshape(2, 3).T,
        np.arange(3, dtype=">i4"),
        np.array(1 + 2j)[None][::-1],
    ):
        got = round_trip(array)
        np.testing.assert_array_equal(got, array)
        assert got.dtype.isnative


def test_the_library_reads_ours_and_we_read_the_librarys(tmp_path):
    arrays = {"w": np.arange(6.0).reshape(2, 3), "b": np.arange(3, dtype=np.int8), "e": np.zeros((0, 2), np.float16)}
    save(arrays, tmp_path / "ours")
    theirs = safetensors.numpy.load_file(tmp_path / "ours")
    assert theirs.keys() == arrays.keys()
    safetensors.numpy.save_file(arrays, tmp_path / "theirs", metadata={"format": "np"})
    ours = load(tmp_path / "theirs", return_numpy=True)
    assert ours.keys() == arrays.keys()
    for name, array in arrays.items():
        assert_same_bits(theirs[name], array)
        assert_same_bits(ours[name], array)
    assert all(isinstance(t, Tensor) for t in load(tmp_path / "theirs").values())


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_nested_value(value):
    got = round_trip(value)
    assert got == value
    assert repr(got) == repr(value)


# files


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x"
    save({"a": 1}, path)
    with pytest.raises(DTypeError, match=r"save: a\.0 is a object; only dicts"):
        save({"a": [object()]}, path)
    assert load(path) == {"a": 1}
    save({"a": 2}, path)
    assert load(path) == {"a": 2}
    assert os.listdir(tmp_path) == ["x"]


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "x")
    save(1, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "x") == 1


def test_several_values_of_one_buffer_are_loaded_one_after_the_other():
    buffer = BytesIO()
    save(1, buffer)
    save({"w": np.float32([2, 3])}, buffer)
    buffer.seek(0)
    assert load(buffer) == 1
    assert load(buffer, return_numpy=True)["w"].tolist() == [2, 3]
    assert not buffer.read()


@pytest.mark.parametrize("call", [lambda p: save(1, p), load], ids=["save", "load"])
@pytest.mark.parametrize(
    ("path", "reason"), [("", "names a folder"), (None, "is a NoneType"), ("folder", "names a folder")]
)
def test_paths_that_can_be_neither_written_nor_read(tmp_path, monkeypatch, call, path, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=reason):
        call(path)


def test_unreadable_and_unwritable_paths(tmp_path):
    with pytest.raises(CheckpointError, match="absent cannot be read: No such file"):
        load(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: (Not a directory|File exists)"):
        save(1, tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda p: save(1, p, protocol=2), r"save\(protocol=2\): nothing is pickled"),
        (lambda p: save(1, p, use_binary_format=True), r"save\(use_binary_format=True\): there is one format"),
        (lambda p: save(1, p, pickle_protocol=4), r"save\(pickle_protocol=...\): no such setting"),
        (lambda p: load(p, params_filename="x"), r"load\(params_filename='x'\): there is one format"),
        (lambda p: load(p, return_numpy=1), r"load\(return_numpy=1\): needs True or False"),
        (lambda p: load(p, map_location="cpu"), r"load\(map_location=...\): no such setting"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(tmp_path, call, reason):
    with pytest.raises(ConfigError, match=reason):
        call(tmp_path / "x")


def test_values_that_are_not_saved():
    cycle = []
    cycle.append(cycle)
    for value, error, reason in [
        (b"12", DTypeError, "the object is a bytes"),
        ({"x": {"y": [b"raw"]}}, DTypeError, r"x\.y\.0 is a bytes"),
        ({"x": np.array(["a"])}, DTypeError, "x has dtype <U1"),
        ({"x": np.array([None])}, DTypeError, "x has dtype object"),
        ({(1, 2): 3}, DTypeError, "a key of the dict is a tuple"),
        (cycle, CheckpointError, "does a container hold itself"),
        ([0] * 200_001, CheckpointError, "more than 200000 values .* put numbers into an ndarray"),
        ({"x" * (5 << 20): np.ones(1)}, CheckpointError, "save fewer tensors per file"),
    ]:
        with pytest.raises(error, match=reason):
            save(value, BytesIO())


# damage


def test_every_flipped_bit_is_found_or_harmless():
    buffer = BytesIO()
    value = {"w": np.arange(4, dtype=np.float32), "b": np.array([True, False]), "step": 3, "t": (1, 0.5)}
    save(value, buffer)
    whole = buffer.getvalue()
    noticed = 0
    for position in range(len(whole) * 8):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        try:
            got = load(BytesIO(data))
        except CheckpointError:
            noticed += 1
        else:  # white space of the header
            np.testing.assert_equal(got, value)
    assert noticed > len(whole) * 8 * 0.97


def test_every_truncation_is_found():
    buffer = BytesIO()
    save({"w": np.arange(4, dtype=np.float32)}, buffer)
    for length in range(len(buffer.getvalue())):
        with pytest.raises(CheckpointError):
            load(BytesIO(buffer.getvalue()[:length]))


# hostile files


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def ours(structure, **tensors):
    """A file with a right digest and any structure."""
    text = structure if isinstance(structure, str) else json.dumps(structure)
    header = {**tensors, "__metadata__": {"polyreme.structure": text}}
    data = bytes(max([e["data_offsets"][1] for e in tensors.values()], default=0))
    digest = safetensors_file.digest(header, [data])
    header["__metadata__"]["polyreme.xxh3_128"] = digest
    return file_of(header, data)


MIB = 1 << 20
CAP = safetensors_file.HEADER_BYTES - 50
HOSTILE = {
    "empty": (b"", "has 0 bytes"),
    "short": (b"\1\0\0", "has 3 bytes"),
    "truncated header": (file_of({"x": entry()})[:20], "declares a header of"),
    "huge header length": (file_of(b"{}", length=2**63), "truncated, or not safetensors"),
    "header of 9 MiB": (file_of(b"{" + b" " * (9 * MIB) + b"}"), "over the limit"),
    "not JSON": (file_of(b"{\xff\xfe}"), "header is not valid JSON"),
    "not an object": (file_of(b"[]"), "does not begin with '{'"),
    "deep": (file_of(b'{"x":' + b"[" * 500_000), "header is not valid JSON"),
    "many lists": (file_of(b'{"x":[' + b"[]," * (CAP // 3) + b"[]]}"), "needs exactly"),
    "many strings": (file_of(b'{"x":[' + b'"ab",' * (CAP // 5) + b"1]}"), "needs exactly"),
    "many entries": (file_of(b"{" + b",".join(b'"%d":1' % i for i in range(CAP // 11)) + b"}"), "needs exactly"),
    "long name": (file_of({"x" * CAP: 1}), "needs exactly"),
    "long number": (file_of(b'{"x":' + b"9" * 5000 + b"}"), "header is not valid JSON"),
    "duplicate key": (file_of(b'{"x":%b,"x":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)), "'x' comes twice"),
    "duplicate field": (
        file_of(b'{"x":{"dtype":"U8","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "'dtype' comes twice",
    ),
    "wrong dtype": (file_of({"x": entry("F31")}, bytes(4)), "has dtype 'F31'"),
    "dtype of another kind": (file_of({"x": entry(["F32"])}, bytes(4)), "has dtype"),
    "object dtype": (file_of({"x": entry("O")}, bytes(4)), "has dtype 'O'"),
    "huge shape": (file_of({"x": entry(shape=(2**40,))}, bytes(4)), "takes 4398046511104 bytes, not 4"),
    "overflowing shape": (file_of({"x": entry(shape=(2**62, 4, 2**62))}, bytes(4)), "is too large"),
    "overflow hidden by a zero": (file_of({"x": entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}), "is too large"),
    "too many dims": (file_of({"x": entry(shape=(1,) * 100)}, bytes(4)), "at most 64 whole numbers"),
    "negative shape": (file_of({"x": entry(shape=(-1, -1))}, bytes(4)), "shape is not a list"),
    "float shape": (file_of({"x": entry(shape=(1.0,))}, bytes(4)), "shape is not a list"),
    "bool shape": (file_of({"x": entry(shape=(True,))}, bytes(4)), "shape is not a list"),
    "huge offsets": (file_of({"x": entry(shape=(2**40,), offsets=(0, 2**42))}, bytes(4)), "the file holds 4 bytes"),
    "offsets beyond int64": (file_of({"x": entry(offsets=(2**70, 2**70 + 4))}, bytes(4)), "not a pair"),
    "reversed offsets": (file_of({"x": entry(offsets=(4, 0))}, bytes(4)), "not a pair"),
    "negative offsets": (file_of({"x": entry(offsets=(-4, 0))}, bytes(4)), "not a pair"),
    "overlap": (file_of({"x": entry(), "y": entry(offsets=(2, 6))}, bytes(6)), "an overlap or a gap"),
    "same bytes twice": (file_of({"x": entry(), "y": entry()}, bytes(4)), "an overlap or a gap"),
    "gap": (file_of({"x": entry(), "y": entry(offsets=(8, 12))}, bytes(12)), "an overlap or a gap"),
    "trailing bytes": (file_of({"x": entry()}, bytes(5)), "the file holds 5 bytes"),
    "missing data": (file_of({"x": entry()}, bytes(3)), "the file holds 3 bytes"),
    "extra field": (file_of({"x": {**entry(), "run": "me"}}, bytes(4)), "needs exactly"),
    "entry is a list": (file_of({"x": [1]}), "needs exactly"),
    "metadata is a list": (file_of({"__metadata__": []}), "__metadata__ is not"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "__metadata__ is not"),
    "bool of 2": (file_of({"x": entry("BOOL", (4,))}, b"\0\1\2\0"), "bytes other than 0 and 1"),
    "structure without digest": (file_of({"__metadata__": {"polyreme.structure": "1"}}), "only one of"),
    "digest without structure": (
        file_of({"__metadata__": {safetensors_file.DIGEST: safetensors_file.digest({"__metadata__": {}}, [])}}),
        "only one of",
    ),
    "wrong digest": (file_of({"__metadata__": {"polyreme.structure": "1", "polyreme.xxh3_128": "0"}}), "is corrupt"),
    "structure not JSON": (ours("{"), "is malformed"),
    "structure names no tensor": (ours({"tensor": "x", "dtype": "float32", "as": "ndarray"}), "is malformed"),
    "structure of another dtype": (
        ours({"tensor": "x", "dtype": "int32", "as": "ndarray"}, x=entry()), "is float32, not int32",
    ),
    "structure of no dtype": (ours({"tensor": "x", "dtype": "object", "as": "ndarray"}, x=entry()), "is malformed"),
    "no pairs": (ours({"tensor": "x", "dtype": "complex64", "as": "ndarray"}, x=entry()), "no pairs of complex64"),
    "unknown tag": (ours({"eval": "1"}), "unknown tag 'eval'"),
    "two tags": (ours({"tuple": [], "dict": []}), "is malformed"),
    "unhashable key": (ours({"dict": [[[1], 2]]}), "is malformed"),
    "key without value": (ours({"dict": [[1]]}), "is malformed"),
    "deep structure": (ours("[" * 80 + "]" * 80), "nested deeper"),
    "deeper structure": (ours("[" * 99_999), "is malformed"),
    "structure of many lists": (ours("[" + "[]," * (CAP // 3 - 100) + "{}]"), "more than 200000 values"),
    "huge complex": (ours({"complex": [10**400, 0]}), "is malformed"),
    "duplicate in structure": (ours('{"tuple":[],"tuple":[]}'), "twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_fast_and_small(tmp_path, name):
    data, reason = HOSTILE[name]
    path = tmp_path / "hostile"
    path.write_bytes(data)
    gc.freeze()  # what other tests left in this process is not walked through while this one is timed
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()  # others load the machine
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1500


def fuzz(data, draw_position):
    """Change some bytes of a good file; loading gives a value or a CheckpointError, nothing else."""
    changed = bytearray(data)
    for position, byte in draw_position:
        changed[position % len(changed)] = byte
    try:
        load(BytesIO(changed))
    except CheckpointError:
        return
    # what still loads is a file without a digest, or one whose white space was changed


def good_files():
    with_digest = BytesIO()
    save({"w": np.arange(3.0), "l": [1, {"x": np.ones(2, bool)}], "c": np.ones(2, np.complex64)}, with_digest)
    plain = safetensors.numpy.save({"w": np.arange(3.0), "b": np.ones((2, 0, 1), np.int8)}, {"format": "np"})
    return [with_digest.getvalue(), plain]


byte_changes = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
shapes = st.lists(st.integers(-1, 3) | st.integers(), max_size=4)
offsets = st.lists(st.integers(-1, 24) | st.integers(), min_size=2, max_size=2)
entries = st.fixed_dictionaries(
    {"dtype": st.sampled_from([*safetensors_file.CODES, "F4", ""]), "shape": shapes, "data_offsets": offsets}
)
headers = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries | json_values, max_size=4)
structures = st.recursive(
    json_values | st.just({"tensor": "x", "dtype": "float32", "as": "ndarray"}),
    lambda inner: (
        st.builds(lambda tag, body: {tag: body}, st.sampled_from(["tuple", "dict", "complex", "float"]), inner)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


def loads_or_refuses(data, **configs):
    try:
        load(BytesIO(data), **configs)
    except CheckpointError:
        return False
    return True


FUZZERS = {
    "changed bytes": (st.tuples(st.deferred(lambda: st.sampled_from(good_files())), byte_changes), fuzz),
    "any bytes": (st.tuples(st.binary(max_size=200)), loads_or_refuses),
    "headers": (st.tuples(headers, st.binary(max_size=24)), lambda *parts: loads_or_refuses(file_of(*parts))),
    "headers of any JSON": (st.tuples(json_values), lambda header: loads_or_refuses(file_of(header))),
    "structures": (
        st.tuples(structures),
        lambda structure: loads_or_refuses(ours(structure, x=entry()), keep_name_table=True),
    ),
}


@pytest.mark.parametrize("name", FUZZERS)
def test_files_with_random_damage_are_refused(name):
    drawn, check = FUZZERS[name]

    @settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(drawn)
    def each(arguments):
        check(*arguments)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    each()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


# other formats


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def pickled_in_text(path, canary):
    path.write_bytes(pickle.dumps([canary], protocol=0))


def npz_of_objects(path, canary):
    with open(path, "wb") as file:
        np.savez(file, weight=np.array([canary], dtype=object))


def npy_of_objects(path, canary):
    with open(path, "wb") as file:
        np.save(file, np.array([canary], dtype=object), allow_pickle=True)


def torch_zip(path, canary):
    import zipfile  # noqa: PLC0415

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(canary))


def joblib_zlib(path, canary):
    import zlib  # noqa: PLC0415

    path.write_bytes(zlib.compress(pickle.dumps(canary)))


def tar(path, canary):
    import tarfile  # noqa: PLC0415

    payload = pickle.dumps(canary)
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("pickle")
        member.size = len(payload)
        archive.addfile(member, BytesIO(payload))


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (pickled_in_text, "a pickle of protocol 0"), (npz_of_objects, "NumPy .npz"),
        (npy_of_objects, "NumPy .npy"), (torch_zip, "torch .pt"), (joblib_zlib, "joblib"), (tar, "a tar archive"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["model.pdparams", "model.safetensors"])
def test_what_can_hold_code_is_refused_by_type(tmp_path, write, what, name):
    canary = tmp_path / "canary"
    write(tmp_path / name, Canary(canary))
    with pytest.raises(
        CheckpointError, match=rf"{name}: is .*{what}.*refused because loading it can run code; convert"
    ):
        load(tmp_path / name)
    assert not canary.exists()


def test_pickle_protocols_that_paddle_does_not_write_are_refused():
    for protocol in (0, 1, 5):
        for value in ({"a": 1}, [1], (1,), np.ones(2), "text", 3):
            with pytest.raises(CheckpointError):
                load(BytesIO(pickle.dumps(value, protocol=protocol)))


MAY_SPEAK_TO_WORKERS = {"polyreme/io"}  # pickles between a loader and its own worker processes, never weights
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch", "pandas"}


def calls_and_imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (("import", alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "import", (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            allows = any(
                k.arg == "allow_pickle" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                for k in node.keywords
            )
            yield ("allow_pickle", name) if allows else ("call", name)


def test_nothing_unpickles_weights():
    root = Path(next(iter(polyreme.__path__)))
    files = sorted(root.rglob("*.py"))
    assert len(files) > 10
    words = (*UNPICKLERS, "allow_pickle")
    parsed = 0
    for file in files:
        place, text = file.relative_to(root.parent).as_posix(), file.read_text()
        if not any(word in text for word in words):
            continue
        parsed += 1
        found = set(calls_and_imports(ast.parse(text)))
        assert not [name for kind, name in found if kind == "allow_pickle"], place
        imported = {name for kind, name in found if kind == "import"} & UNPICKLERS
        if any(place.startswith(f"{folder}/") for folder in MAY_SPEAK_TO_WORKERS) and "seriali" not in place:
            imported -= {"pickle", "cloudpickle"}
        assert not imported, f"{place} imports {imported}"
    assert parsed > 10


def test_the_test_above_can_fail():
    bad = "import pickle\nnumpy.load(f, allow_pickle=flag)\nfrom torch.serialization import load\n"
    assert set(calls_and_imports(ast.parse(bad))) >= {
        ("import", "pickle"), ("allow_pickle", "load"), ("import", "torch"),
    }  # fmt: skip


def test_the_digest_is_the_one_anyone_can_compute(tmp_path):
    save({"w": np.arange(3, dtype=np.int16)}, tmp_path / "x")
    raw = (tmp_path / "x").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    digest = header["__metadata__"].pop("polyreme.xxh3_128")
    want = xxhash.xxh3_128_hexdigest(json.dumps(header, sort_keys=True).encode() + raw[8 + length :])
    assert digest == want
    assert sys.byteorder == "little"
