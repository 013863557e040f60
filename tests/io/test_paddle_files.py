"""Files that PaddlePaddle 3.3.1 wrote (tools/write_paddle_files.py), and hostile ones that look like them."""

import builtins
import collections
import gc
import os
import pickle
import struct
import weakref
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyreme as paddle
from polyreme.errors import CheckpointError
from polyreme.io import protobuf_wire
from polyreme.io.paddle_tensors import read_all
from polyreme.io.protobuf_wire import WireField, parse
from polyreme.io.serialization import load

FOLDER = Path(__file__).parent.parent / "paddle_files"
PARAMETERS = {
    "0.weight": (2, 3),
    "0.bias": (3,),
    "1.weight": (3,),
    "1.bias": (3,),
    "1._mean": (3,),
    "1._variance": (3,),
}
NAMES = ["linear_0.w_0", "linear_0.b_0", *(f"batch_norm1d_0.{n}" for n in ("w_0", "b_0", "w_1", "w_2"))]


def expected():
    values, start = {}, 0
    for name, shape in PARAMETERS.items():
        count = int(np.prod(shape))
        values[name] = (np.arange(start, start + count, dtype=np.float32) / 4).reshape(shape)
        start += count
    return values


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_state_dict(protocol):
    state = load(FOLDER / f"state_{protocol}.pdparams")
    assert list(state) == list(PARAMETERS)
    assert [t.name for t in state.values()] == NAMES
    for name, value in expected().items():
        np.testing.assert_array_equal(state[name].numpy(), value)
    net = paddle.nn.Sequential(paddle.nn.Linear(2, 3), paddle.nn.BatchNorm1D(3))
    assert net.set_state_dict(state) == ([], [])
    np.testing.assert_array_equal(net[1]._variance.numpy(), expected()["1._variance"])
    arrays = load(FOLDER / f"state_{protocol}.pdparams", return_numpy=True, keep_name_table=True)
    assert arrays.pop("StructuredToParameterName@@") == dict(zip(PARAMETERS, NAMES, strict=True))
    assert all(type(a) is np.ndarray for a in arrays.values())


def test_an_optimizers_state_goes_on():
    with paddle.utils.unique_name.guard():
        net = paddle.nn.Sequential(paddle.nn.Linear(2, 3), paddle.nn.BatchNorm1D(3))
        schedule = paddle.optimizer.lr.StepDecay(0.5, 3)
        optimizer = paddle.optimizer.Adam(schedule, parameters=net.parameters())
    optimizer.set_state_dict(load(FOLDER / "adam.pdopt"))
    assert schedule.last_epoch == 1
    saved, ours = load(FOLDER / "adam.pdopt", return_numpy=True), optimizer.state_dict()
    moments = [name for name in saved if "moment" in name]
    assert len(moments) == 8
    for name in moments:
        np.testing.assert_array_equal(np.asarray(ours[name]), saved[name])
    assert {float(ours[name]) for name in ours if name.endswith("step_0")} == {1.0}
    # beta1 ** n is 0 in float32 after 1000 steps, and beta2 ** n after 200,000
    for power1, power2, steps in ((0.9**801, 0.5, 800), (0.0, 0.999**2001, 2000), (0.0, 0.0, 1e6)):
        powers = {f"{NAMES[0]}_beta1_pow_acc_0": np.float32([power1]), f"{NAMES[0]}_beta2_pow_acc_0": [power2]}
        if power2 == 0.5:
            powers.pop(f"{NAMES[0]}_beta2_pow_acc_0")
        optimizer.set_state_dict(powers)
        assert float(optimizer.state_dict()[f"{NAMES[0]}_step_0"]) == steps
    with pytest.raises(CheckpointError, match=r"steps as 0\.64, which is no power of beta1=0\.9"):
        optimizer.set_state_dict({f"{NAMES[0]}_beta1_pow_acc_0": np.float32([0.64])})


W = np.float32([[0.5, -1.0]])
# class, arguments, PaddlePaddle's entries after two steps, ours
PADDLE_STATES = [
    ("Adadelta", {}, {"_avg_squared_grad": W, "_avg_squared_update": 2 * W},
     {"avg_squared_grad": W, "avg_squared_update": 2 * W}),
    ("RMSProp", {}, {"momentum": W, "mean_square": 2 * W, "mean_grad": 0 * W}, {"momentum": W, "mean_square": 2 * W}),
    ("RMSProp", {"centered": True}, {"momentum": W, "mean_square": W, "mean_grad": 3 * W}, {"mean_grad": 3 * W}),
    ("NAdam", {}, {"moment1": W, "moment2": W, "beta2_pow": np.full_like(W, 0.999**2), "mu_product": W,
                   "momentum_decay_pow": W}, {"moment1": W, "step": np.float32(2)}),
    ("RAdam", {}, {"moment1": W, "moment2": W, "beta1_pow": np.full_like(W, 0.9**2), "rho": W,
                   "beta2_pow": np.full_like(W, 0.999**2)}, {"moment2": W, "step": np.float32(2)}),
    ("ASGD", {"batch_num": 2}, {"d": W, "y": np.stack([W, 2 * W]), "m": np.array([2])},
     {"d": W, "y_0": W, "y_1": 2 * W, "step": np.float32(2)}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "theirs", "ours"), PADDLE_STATES, ids=lambda v: str(v)[:10])
def test_state_under_paddles_names_goes_on(name, settings, theirs, ours):
    p = paddle.create_parameter([1, 2], "float32")
    optimizer = getattr(paddle.optimizer, name)(0.1, parameters=[p], **settings)
    optimizer.set_state_dict({f"{p.name}_{slot}_0": value for slot, value in theirs.items()})
    optimizer.create_state()
    held = optimizer.state_dict()
    for slot, value in ours.items():
        np.testing.assert_array_equal(np.asarray(held[f"{p.name}_{slot}_0"]), value)


def test_values_for_a_static_program():
    values = paddle.static.load_program_state(str(FOLDER / "state_2"))
    assert list(values) == list(PARAMETERS)
    for name, value in expected().items():
        np.testing.assert_array_equal(values[name], value)
    chosen = paddle.static.load_program_state(str(FOLDER / "state_2"), ["0.bias"])
    assert list(chosen) == ["0.bias"]


def test_every_dtype():
    for name, tensor in load(FOLDER / "dtypes.pdparams").items():
        assert tensor.dtype == name
        np.testing.assert_array_equal(
            tensor.astype("complex128").numpy(), np.arange(3.0).astype(name).astype("complex128")
        )
    assert load(FOLDER / "dtypes.pdparams", return_numpy=True)["bfloat16"].dtype == paddle.bfloat16


def test_nested_values_and_loose_tensors():
    value = load(FOLDER / "nested.pdparams")
    assert list(value["model"]) == list(PARAMETERS)
    np.testing.assert_array_equal(value["model"]["0.weight"].numpy(), expected()["0.weight"])
    (tensor, three), array = value["pairs"]
    assert (tensor.dtype, three, type(array)) == ("bfloat16", 3, np.ndarray)
    assert (value["epoch"], value["name"], value["rate"], value["none"]) == (7, "x", np.float32(0.5), None)
    np.testing.assert_array_equal(load(FOLDER / "record.pdtensor").numpy(), [0.0, 1, 2])
    (dense,) = load(FOLDER / "dense.pdtensor")
    np.testing.assert_array_equal(dense.numpy(), np.ones((2, 2), np.float32))


def test_arrays_that_nobody_keeps_are_freed_without_the_collector():
    gc.disable()
    try:
        array = weakref.ref(load(FOLDER / "state_2.pdparams", return_numpy=True)["0.weight"])
        assert array() is None
    finally:
        gc.enable()


def test_several_in_one_stream():
    data = (FOLDER / "state_2.pdparams").read_bytes() + (FOLDER / "record.pdtensor").read_bytes()
    stream = BytesIO(data)
    assert list(load(stream)) == list(PARAMETERS)
    np.testing.assert_array_equal(load(stream, return_numpy=True), np.arange(3, dtype=np.float32))


def big(**change):
    """The layout of parameters over 1 GB under protocols 2 and 3; PaddlePaddle reads this very dict."""
    array = np.arange(12, dtype=np.float32)
    record = {"OriginShape": (3, 4), "slices": ["w@@.0", "w@@.1"], **change}
    return {"w@@.0": array[:7], "w@@.1": array[7:], "b": np.ones(2), "UnpackBigParamInfor@@": {"w": record}}


def test_parameters_in_pieces():
    value = load(BytesIO(pickle.dumps(big(), 2)))
    np.testing.assert_array_equal(value["w"].numpy(), np.arange(12, dtype=np.float32).reshape(3, 4))
    assert set(value) == {"w", "b"}
    for change in ({"OriginShape": (5, 4)}, {"slices": ["w@@.0", "none"]}, {"OriginShape": (-3, -4)}, {"slices": 3}):
        with pytest.raises(CheckpointError, match="UnpackBigParamInfor@@ is malformed"):
            load(BytesIO(pickle.dumps(big(**change), 2)))


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Loop(list):
    """A list in itself."""


def looped():
    loop = []
    loop.append(loop)
    return loop


HOSTILE = {
    "a system call": (Calls(os.system, "touch canary"), "asks for posix.system"),
    "evaluated text": (Calls(eval, "open('canary', 'w')"), "evaluates \"open\\('canary', 'w'\\)\""),
    "text in a scope": (Calls(eval, "data", {"data": np.ones(1), "__builtins__": {}}), "evaluates 'data'"),
    "another builtin": (Calls(builtins.getattr, "x", "y"), "asks for (builtins|__builtin__).getattr"),
    "a tuple of no items": (Calls(tuple, 3), "a tuple of what is no tuple"),
    "a class by itself": ({"x": collections.OrderedDict}, "a dtype or a name"),
    "a class of the test": (Loop(), "asks for tests.io.test_paddle_files.Loop"),
    "an object array": (np.array([{}], object), "dtype 'O8'"),
    "a list in itself": (looped(), "nested deeper than 64"),
    "a dict of tuples": (Calls(collections.OrderedDict, [((1,), 2)]), "key is a tuple"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_is_no_data_is_refused(name, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, message = HOSTILE[name]
    Path("x.pdparams").write_bytes(pickle.dumps({"w": value}, protocol))
    with pytest.raises(CheckpointError, match=rf"x\.pdparams: .*{message}"):
        load("x.pdparams")
    assert os.listdir() == ["x.pdparams"]


@pytest.mark.parametrize("name", ["state_2.pdparams", "state_4.pdparams", "record.pdtensor"])
def test_torn_and_joined_files(name, tmp_path):
    data = (FOLDER / name).read_bytes()
    for length in range(12, len(data), 7):
        with pytest.raises(CheckpointError, match=r"the file is cut|a message"):
            load(BytesIO(data[:length]))
    (tmp_path / "x").write_bytes(data + b"more")
    with pytest.raises(CheckpointError, match="x: 4 bytes follow the value"):
        load(tmp_path / "x")


def record(dtype=5, shape=(3,), data=b"\0" * 12, version=0, levels=0):
    said = bytes([8, dtype]) + b"".join(b"\x10" + varint(n) for n in shape)
    return struct.pack("<IQIi", version, levels, 0, len(said)) + said + data


def varint(number):
    number, text = number % 2**64, b""
    while number > 127:
        text += bytes([number & 127 | 128])
        number >>= 7
    return text + bytes([number])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (record(version=1), "has version 1 and 0 levels"),
        (record(levels=2**60), "levels: it is no Tensor's"),
        (record(shape=(2**40, 2**40)), "bytes long, and 12 are left"),
        (record(shape=(-3,)), "shape \\[-3\\]: none is known"),
        (record(dtype=99), "dtype number 99"),
        (record(data=b"\0" * 13), "1 bytes follow the 1 Tensors"),
        (record(data=b""), "0 are left; the file is cut"),
        (record()[:12] + b"\1" + record()[13:], "has version 1 inside"),
        (record()[:20] + b"\x0b" + record()[21:], "wire type 3"),
    ],
)
def test_records_that_cannot_be(data, message):
    with pytest.raises(CheckpointError, match=f"w.pdiparams: .*{message}"):
        read_all(data, ["w"], "w.pdiparams")


MESSAGE = {
    1: WireField("count", "int"),
    2: WireField("items", "float", True),
    3: WireField("name", "string"),
    5: WireField("on", "bool"),
}
MESSAGE |= {4: WireField("inner", MESSAGE)}


def test_fields_of_messages():
    inner = b"\x08\x07"
    data = b"\x08" + varint(-2) + b"\x12\x08" + struct.pack("<2f", 1, 2) + b"\x15" + struct.pack("<f", 3)
    data += b"\x1a\x03abc" + b"\x22\x02" + inner + b"\x28\x01" + b"\x7a\x01x"
    assert parse(data, MESSAGE) == {
        "count": -2, "items": [1.0, 2.0, 3.0], "name": "abc", "on": True, "inner": {"count": 7, "items": []},
    }  # fmt: skip
    nested = b""
    for _ in range(40):
        nested = b"\x22" + varint(len(nested)) + nested
    for bad, message in (
        (b"\x1a\x7f", "claims 127 bytes, and there are 0"), (b"\x08", "ends at byte 1, inside a number"),
        (b"\x08" + b"\xff" * 11, "longer than 64 bits"), (b"\x1d\0\0\0\0", "'name' has wire type 5"),
        (nested, "nested deeper than 32"), (b"\x12\x03abc", "'items' has wire type 2"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            parse(bad, MESSAGE)


@given(st.binary(max_size=60))
def test_noise_is_a_message_or_refused(data):
    try:
        protobuf_wire.parse(data, MESSAGE)
    except CheckpointError as error:
        assert str(error)  # noqa: PT017  either way of ending is right, another error is not
