"""Wave files against the standard library's and SciPy's, in every encoding; torn ones."""

import io
import wave
from pathlib import Path

import numpy as np
import pytest
import scipy.io.wavfile

import polyreme as paddle
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DataError, DTypeError, ShapeError

RNG = np.random.default_rng(4)
FLOATS = RNG.uniform(-1, 1, (2, 9)).astype("float32")
INTEGERS = {"uint8": (0, 256), "int16": (-(2**15), 2**15), "int32": (-(2**31), 2**31)}


@pytest.mark.parametrize(
    ("bits", "encoding", "dtype", "shown"),
    [
        (8, None, "uint8", "PCM_U"),
        (16, None, "int16", "PCM_S"),
        (32, "PCM_S", "int32", "PCM_S"),
        (32, "PCM_F", "float32", "PCM_F"),
        (64, "PCM_F", "float64", "PCM_F"),
    ],
)
def test_what_is_saved_is_read_back_here_and_by_scipy(tmp_path, bits, encoding, dtype, shown):
    path = tmp_path / "a.wav"
    raw = FLOATS.astype(dtype) if dtype.startswith("f") else RNG.integers(*INTEGERS[dtype], (2, 9)).astype(dtype)
    paddle.audio.save(path, to_tensor(raw), 8000, encoding=encoding, bits_per_sample=bits)
    found = paddle.audio.info(path)
    assert (found.sample_rate, found.num_samples, found.num_channels) == (8000, 9, 2)
    assert (found.bits_per_sample, found.encoding) == (bits, shown)
    got, rate = paddle.audio.load(path, normalize=False)
    assert (got.dtype, rate) == (dtype, 8000)
    np.testing.assert_array_equal(got.numpy(), raw)
    rate, other = scipy.io.wavfile.read(path)
    assert rate == 8000
    np.testing.assert_array_equal(other.T, raw)


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_floats_round_to_integers_and_come_back(tmp_path, bits):
    path = tmp_path / "a.wav"
    paddle.audio.save(str(path), to_tensor(FLOATS), 8000, bits_per_sample=bits)
    got, _ = paddle.audio.load(str(path))
    assert got.dtype == "float32"
    # half a step of the integers, and the rounding of float32
    np.testing.assert_allclose(got.numpy(), FLOATS, atol=0.5 * 2.0 ** (1 - bits) + 2.0**-24)
    with wave.open(str(path)) as file:
        assert (file.getsampwidth(), file.getnframes(), file.getnchannels()) == (bits // 8, 9, 2)


def test_24_bits_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "a.wav"
    raw = np.int32([[0, 1, -1, 2**23 - 1, -(2**23)]])
    paddle.audio.save(path, to_tensor(raw), 8000, bits_per_sample=24)
    with wave.open(str(path)) as file:
        parts = file.readframes(5)
    assert [int.from_bytes(parts[i : i + 3], "little", signed=True) for i in range(0, 15, 3)] == raw[0].tolist()
    np.testing.assert_array_equal(paddle.audio.load(path, normalize=False)[0].numpy(), raw)


def test_parts_of_a_file_either_way_round_and_from_an_open_one(tmp_path):
    path = tmp_path / "a.wav"
    paddle.audio.save(
        path, to_tensor(FLOATS.T.copy()), 8000, channels_first=False, encoding="PCM_F", bits_per_sample=32
    )
    part, _ = paddle.audio.load(path, frame_offset=2, num_frames=3, channels_first=False)
    np.testing.assert_array_equal(part.numpy(), FLOATS[:, 2:5].T)
    with path.open("rb") as file:
        np.testing.assert_array_equal(paddle.audio.load(file)[0].numpy(), FLOATS)
        assert not file.closed
    assert paddle.audio.load(path, frame_offset=9)[0].shape == [2, 0]
    with pytest.raises(ConfigError, match="frame_offset=10, num_frames=-1 of 9 frames"):
        paddle.audio.load(path, frame_offset=10)


def test_samples_beyond_one_are_cut_off(tmp_path):
    path = tmp_path / "a.wav"
    paddle.audio.save(path, to_tensor([[2.0, -2.0]]), 8000)
    assert paddle.audio.load(path, normalize=False)[0].tolist() == [[32767, -32768]]


def test_extensible_headers_and_other_chunks_are_read():
    form = bytes.fromhex("feff 0100 401f0000 803e0000 0200 1000 1600 1000 04000000 0100000000001000800000aa00389b71")
    chunks = b"LIST" + (3).to_bytes(4, "little") + b"abc\0" + b"fmt " + len(form).to_bytes(4, "little") + form
    chunks += b"data" + (4).to_bytes(4, "little") + b"\x01\x00\xff\xff"
    file = io.BytesIO(b"RIFF" + (4 + len(chunks)).to_bytes(4, "little") + b"WAVE" + chunks)
    assert paddle.audio.load(file, normalize=False)[0].tolist() == [[1, -1]]


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(b"garbage")
    with pytest.raises(DataError, match="only WAVE files"):
        paddle.audio.info(path)
    paddle.audio.save(path, to_tensor(FLOATS), 8000)
    whole = path.read_bytes()
    for end, match in ((len(whole) - 1, "35 bytes of samples, its header says 36"), (40, "ends before its samples")):
        path.write_bytes(whole[:end])
        with pytest.raises(DataError, match=match):
            paddle.audio.load(path)
    path.write_bytes(whole[:20] + b"\x07\x00" + whole[22:])
    with pytest.raises(DataError, match="format 7 of 16 bits"):
        paddle.audio.load(path)
    path.write_bytes(whole[:16] + b"\x02\0\0\0" + b"\1\0" + b"data" + b"\0\0\0\0")
    with pytest.raises(DataError, match="a header of 2 bytes"):
        paddle.audio.load(path)


def test_samples_that_cannot_be_written(tmp_path):
    path: Path = tmp_path / "a.wav"
    for bad, error, match in (
        ({"encoding": "MP3"}, ConfigError, "encoding='MP3'"),
        ({"bits_per_sample": 12}, ConfigError, "12 bits"),
        ({"encoding": "PCM_U", "bits_per_sample": 16}, ConfigError, "encoding='PCM_U' of 16 bits"),
    ):
        with pytest.raises(error, match=match):
            paddle.audio.save(path, to_tensor(FLOATS), 8000, **bad)
    with pytest.raises(ShapeError, match=r"shape \[9\]"):
        paddle.audio.save(path, to_tensor(FLOATS[0]), 8000)
    with pytest.raises(DTypeError, match=r"int64 in 70000 .. 70000, of 16 bits"):
        paddle.audio.save(path, to_tensor([[70000]]), 8000)
    with pytest.raises(DTypeError, match="samples are int64; floats are written"):
        paddle.audio.save(path, to_tensor([[1]]), 8000, encoding="PCM_F", bits_per_sample=32)


def test_backends():
    assert paddle.audio.backends.list_available_backends() == [paddle.audio.backends.get_current_backend()]
    paddle.audio.backends.set_backend("wave_backend")
    with pytest.raises(ConfigError, match="'soundfile'; 'wave_backend' is the only one"):
        paddle.audio.backends.set_backend("soundfile")
