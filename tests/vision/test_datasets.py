"""MNIST and FashionMNIST from idx files; the shipped subset; image loading."""

import gzip
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

import polyreme.vision
from polyreme.errors import ConfigError, DataError
from polyreme.io import DataLoader
from polyreme.vision.datasets import MNIST, FashionMNIST, mnist
from polyreme.vision.transforms import Compose, Normalize, ToTensor


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def pair(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (5, 28, 28)), np.array([3, 1, 4, 1, 5])
    (tmp_path / "images.gz").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "labels").write_bytes(idx(labels))
    return tmp_path / "images.gz", tmp_path / "labels", images, labels


@pytest.fixture
def no_full_set(monkeypatch, tmp_path):
    """Folders as on a machine with nothing but a checkout."""
    monkeypatch.setattr(MNIST, "folders", classmethod(lambda cls: [tmp_path / "nowhere"]))


def test_reads_idx_files(pair):
    images_path, labels_path, images, labels = pair
    data = MNIST(images_path, labels_path)
    assert len(data) == 5
    picture, label = data[2]
    assert isinstance(picture, Image.Image)
    np.testing.assert_array_equal(np.asarray(picture), images[2])
    assert label.dtype == np.int64
    assert label.tolist() == [labels[2]]
    assert data[-1][1].tolist() == [5]
    array, _ = MNIST(images_path, labels_path, backend="cv2")[0]
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, images[0])


def test_a_loader_makes_batches_of_it(pair):
    data = MNIST(*pair[:2], transform=Compose([ToTensor(), Normalize([0.5], [0.5])]))
    x, y = next(iter(DataLoader(data, batch_size=5)))
    assert (x.shape, y.shape) == ([5, 1, 28, 28], [5, 1])
    want = (pair[2].astype("float32") / 255 - 0.5) / 0.5
    # two roundings of numbers up to 1
    np.testing.assert_allclose(x.numpy()[:, 0], want, rtol=0, atol=4 * 2.0**-24)
    workers = next(iter(DataLoader(data, batch_size=5, num_workers=1)))
    np.testing.assert_array_equal(workers[0].numpy(), x.numpy())


def test_the_subset_is_found_and_named(no_full_set, caplog):
    train, test = FashionMNIST(), FashionMNIST(mode="test")
    assert train.is_subset
    assert "using the subset of 6,000 training and 1,000 test images" in caplog.text
    assert np.bincount(train.labels).tolist() == [600] * 10
    assert np.bincount(test.labels).tolist() == [100] * 10
    assert train.images.shape == (6000, 28, 28)


def test_a_changed_file_is_noticed(no_full_set, monkeypatch, tmp_path):
    folder = tmp_path / "nowhere"
    folder.mkdir()
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (folder / name).write_bytes(gzip.compress(b"changed"))
    with pytest.raises(DataError, match="is not that of the published file"):
        FashionMNIST()


def test_missing_files_name_the_folders(no_full_set, tmp_path):
    with pytest.raises(DataError, match=r"no t10k-images-idx3-ubyte.gz .*nowhere; nothing is downloaded"):
        MNIST(mode="test", download=True)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"\0\0\x0d\x03" + b"\0" * 20, "starts with '00 00 0d 03'"),
        (idx(np.zeros((2, 3)))[:-1], r"5 bytes of data, its head says \[2, 3\]"),
        (gzip.compress(idx(np.zeros((2, 3))), mtime=0)[:-9], "cannot be read"),
        (b"", "starts with ''"),
    ],
)
def test_torn_and_foreign_files(tmp_path, raw, match):
    path = tmp_path / "file"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=match):
        mnist.read_idx(path)


def test_mnist_refuses_labels_for_images_and_unknown_modes(pair):
    with pytest.raises(DataError, match="give images"):
        MNIST(pair[1], pair[1])
    with pytest.raises(ConfigError, match="give 'train' or 'test'"):
        MNIST(mode="valid")
    with pytest.raises(ConfigError, match="give both image_path and label_path"):
        MNIST(image_path=pair[0])
    with pytest.raises(ConfigError, match="image backend 'tensor'"):
        MNIST(*pair[:2], backend="tensor")
    with pytest.raises(ConfigError, match="download='yes'"):
        MNIST(*pair[:2], download="yes")


def test_image_load_and_backend(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    np.testing.assert_array_equal(np.asarray(polyreme.vision.image_load(tmp_path / "a.png")), pixels)
    blue_first = polyreme.vision.image_load(tmp_path / "a.png", backend="cv2")
    np.testing.assert_array_equal(blue_first, pixels[:, :, ::-1])
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"b.png: cannot be read as an image"):
        polyreme.vision.image_load(tmp_path / "b.png")
    # a header of 30,000 x 30,000 pixels, and of just more than Pillow warns at; nothing of their sizes is held
    for side in (30_000, 9_500):
        head = struct.pack(">II5B", side, side, 8, 2, 0, 0, 0)
        chunk = b"IHDR" + head
        large = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
        (tmp_path / "large.png").write_bytes(large + struct.pack(">I4s", 0, b"IDAT") + b"\0" * 8)
        with pytest.raises(DataError, match=r"large\.png: .*pixels.*scale it down"):
            polyreme.vision.image_load(tmp_path / "large.png")
    polyreme.vision.set_image_backend("cv2")
    try:
        assert polyreme.vision.get_image_backend() == "cv2"
    finally:
        polyreme.vision.set_image_backend("pil")


def test_an_image_bomb_is_refused(tmp_path, monkeypatch):
    Image.new("L", (30, 40)).save(tmp_path / "a.png")
    monkeypatch.setattr("polyreme.vision.image.MAX_PIXELS", 1000)
    with pytest.raises(DataError, match="30 x 40 pixels; at most 1000"):
        polyreme.vision.image_load(tmp_path / "a.png")


def test_workers_need_no_jax():
    code = (
        "import sys, polyreme.vision.transforms as T, polyreme.vision.datasets; T.ToTensor(); "
        "assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
