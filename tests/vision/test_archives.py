"""Image data sets from tiny archives in their published formats, and from folders."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

import polyreme
from polyreme.errors import ConfigError, DataError
from polyreme.io import DataLoader
from polyreme.vision.datasets import VOC2012, Cifar10, Cifar100, DatasetFolder, Flowers, ImageFolder
from polyreme.vision.datasets.mat_file import read_mat
from tests.io.archives import picture, tar

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (3, 3072), dtype=np.uint8)
SMALL = RNG.integers(0, 20, (3, 4, 3), dtype=np.uint8)
CLASSES = RNG.integers(0, 20, (3, 4), dtype=np.uint8)


def batch(data, key, labels):
    return pickle.dumps({b"data": data, key: labels, b"batch_label": b"x"}, 2)


@pytest.fixture
def cifar10(tmp_path):
    return tar(
        tmp_path / "c.tgz",
        {
            "cifar-10-batches-py/data_batch_1": batch(PIXELS[:2], b"labels", [3, 9]),
            "cifar-10-batches-py/readme.html": "x",
            "cifar-10-batches-py/test_batch": batch(PIXELS[2:], b"labels", [7]),
            "cifar-10-batches-py/data_batch_2": batch(PIXELS[1:2], b"labels", [4]),
        },
    )


def test_cifar10(cifar10):
    data, test = Cifar10(cifar10), Cifar10(cifar10, "test", backend="cv2")
    assert (len(data), len(test)) == (3, 1)
    assert [data[i][1].tolist() for i in range(3)] == [3, 9, 4]
    image, label = data[1]
    # a row is all red bytes, then green, then blue, each by rows of the picture
    want = PIXELS[1].reshape(3, 32, 32).transpose(1, 2, 0)
    np.testing.assert_array_equal(np.asarray(image), want)
    assert (label.dtype, label.shape) == ("int64", ())
    array, _ = test[0]
    assert (array.dtype, array.shape) == ("float32", (32, 32, 3))
    moved = Cifar10(cifar10, transform=lambda image: np.asarray(image)[0, 0], backend="cv2")
    x, y = next(iter(DataLoader(moved, batch_size=3)))
    assert (x.shape, y.tolist()) == ([3, 3], [3, 9, 4])


def test_a_batch_is_of_pictures_and_labels(tmp_path):
    # NumPy would take these bytes for pointers to objects
    forged = batch(Objects(), b"labels", [0])
    for content in (forged, batch(PIXELS[0], b"labels", [1]), batch(PIXELS, b"labels", [1, 2])):
        path = tar(tmp_path / "c.tgz", {"data_batch_1": content})
        with pytest.raises(DataError, match=r"c\.tgz: .*(dtype 'O8'|is not of pictures)"):
            Cifar10(path)


class Objects:
    """Pickles as an array of objects over bytes."""

    def __reduce__(self):
        return (np.ndarray, ((3072,), np.dtype("O"), b"A" * 8 * 3072))


def test_cifar100(tmp_path):
    files = {
        "cifar-100-python/train": batch(PIXELS[:2], b"fine_labels", [50, 60]),
        "cifar-100-python/test": batch(PIXELS[2:], b"fine_labels", [7]),
        "cifar-100-python/meta": pickle.dumps({b"x": 1}, 2),
    }
    path = tar(tmp_path / "c.tgz", files)
    assert [Cifar100(path)[i][1].tolist() for i in range(2)] == [50, 60]
    assert len(Cifar100(path, "test")) == 1
    with pytest.raises(DataError, match=r"no batches data_batch\* with data and labels"):
        Cifar10(path)
    with pytest.raises(ConfigError, match="Cifar100: mode='valid'"):
        Cifar100(path, "valid")


def test_missing_files_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for make, name, md5 in (
        (Cifar10, "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
        (Cifar100, "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
        (Flowers, "102flowers.tgz", "52808999861908f626f3c1f4e79d11fa"),
        (VOC2012, "VOCtrainval_11-May-2012.tar", "6cd6e144f989b92b3379bac3b3de84fd"),
    ):
        with pytest.raises(DataError, match=rf"{make.__name__}: no {name} in .*fetch http.*{md5}"):
            make()


def test_flowers(tmp_path):
    archive = tar(tmp_path / "f.tgz", {f"jpg/image_{i:05d}.jpg": picture(SMALL + i, "JPEG") for i in (1, 2, 3)})
    scipy.io.savemat(tmp_path / "labels.mat", {"labels": np.array([[30, 10, 20]], np.uint8)}, do_compression=True)
    parts = {"trnid": np.array([[2]], np.uint16), "valid": np.array([[3]]), "tstid": np.array([[3, 1]], np.uint16)}
    scipy.io.savemat(tmp_path / "setid.mat", parts)
    files = (archive, tmp_path / "labels.mat", tmp_path / "setid.mat")
    data = Flowers(*files)
    assert [data[i][1].tolist() for i in range(len(data))] == [[20], [30]]
    assert data[0][1].dtype == "int64"
    np.testing.assert_array_equal(np.asarray(data[1][0]), np.asarray(_opened(picture(SMALL + 1, "JPEG"))))
    image, label = Flowers(*files, mode="test", backend="cv2", transform=lambda image: image + 1)[0]
    assert (image.dtype, image.shape, label.tolist()) == ("float32", (3, 4, 3), [10])
    assert Flowers(*files, "valid")[0][1].tolist() == [20]
    with pytest.raises(DataError, match="has no array 'labels', only trnid, valid, tstid"):
        Flowers(archive, files[2], files[2])
    scipy.io.savemat(files[2], {"tstid": np.array([[4]])})
    with pytest.raises(DataError, match=r"numbers images up to 4, .* labels 3"):
        Flowers(*files)
    scipy.io.savemat(files[1], {"labels": np.arange(5)})
    with pytest.raises(DataError, match=r"holds no image_00004.jpg, and 0 more of 1"):
        Flowers(*files)


def _opened(data):
    return Image.open(io.BytesIO(data))


def test_matlab_files(tmp_path):
    path = tmp_path / "a.mat"
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([[1, 300]], np.int32), "c": np.zeros((0, 2))}
    for packed in (False, True):
        scipy.io.savemat(path, {**arrays, "text": "no array"}, do_compression=packed)
        found = read_mat(path)
        assert sorted(found) == ["a", "b", "c"]
        for name, want in arrays.items():
            np.testing.assert_array_equal(found[name], want)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read as a MATLAB file"):
        read_mat(path)
    path.write_bytes(b"x" * 200)
    with pytest.raises(DataError, match="no MATLAB file of version 5"):
        read_mat(path)


def test_voc2012(tmp_path):
    root = "VOCdevkit/VOC2012/"
    files = {
        root + f"ImageSets/Segmentation/{n}.txt": t
        for n, t in (("trainval", "a\nb\n"), ("train", "a\n"), ("val", "b\n"))
    }
    for at, n in enumerate("ab"):
        files[f"{root}JPEGImages/{n}.jpg"] = picture(SMALL + at, "JPEG")
        files[f"{root}SegmentationClass/{n}.png"] = picture(CLASSES + at)
    path = tar(tmp_path / "v.tar", files, "w")
    assert [len(VOC2012(path, mode)) for mode in ("train", "test", "valid")] == [2, 1, 1]
    image, label = VOC2012(path, "valid")[0]
    assert image.size == (4, 3)
    np.testing.assert_array_equal(np.asarray(label), CLASSES + 1)
    image, label = VOC2012(path, "test", backend="cv2", transform=lambda image: image[0])[0]
    assert (image.dtype, image.shape, label.dtype, label.shape) == ("float32", (4, 3), "float32", (3, 4))
    with pytest.raises(DataError, match="cannot be read"):
        VOC2012(tar(tmp_path / "v.tgz", files))
    del files[root + "JPEGImages/b.jpg"]
    with pytest.raises(DataError, match=r"holds no VOCdevkit/VOC2012/JPEGImages/b.jpg"):
        VOC2012(tar(tmp_path / "w.tar", files, "w"))


@pytest.fixture
def root(tmp_path):
    for name in ("b/sub/z.png", "b/y.png", "a/x.PNG", "top.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(picture(SMALL))
    (tmp_path / "a" / "n.txt").write_text("x")
    return tmp_path


def test_folders_are_classes(root):
    data = DatasetFolder(root)
    assert data.classes == ["a", "b"]
    assert data.class_to_idx == {"a": 0, "b": 1}
    assert data.samples == [(f"{root}/a/x.PNG", 0), (f"{root}/b/y.png", 1), (f"{root}/b/sub/z.png", 1)]
    assert data.targets == [0, 1, 1]
    image, target = data[2]
    assert (image.mode, target, len(data)) == ("RGB", 1, 3)
    images = ImageFolder(root, transform=np.asarray)
    assert images.samples == [f"{root}/{n}" for n in ("top.png", "a/x.PNG", "b/y.png", "b/sub/z.png")]
    (array,) = images[0]
    np.testing.assert_array_equal(array, SMALL)
    texts = DatasetFolder(root, loader=lambda path: Path(path).read_text(), extensions=["txt"])
    assert [texts[i] for i in range(len(texts))] == [("x", 0)]
    assert len(ImageFolder(root, is_valid_file=lambda path: path.endswith("y.png"))) == 1
    polyreme.vision.set_image_backend("cv2")
    try:
        np.testing.assert_array_equal(ImageFolder(root)[0][0], SMALL[:, :, ::-1])
    finally:
        polyreme.vision.set_image_backend("pil")


def test_folders_that_do_not_fit(root):
    with pytest.raises(ConfigError, match="both say which files are samples"):
        ImageFolder(root, extensions=[".png"], is_valid_file=lambda path: True)
    with pytest.raises(DataError, match=r"no file under .*/CLASS that ends in .xyz"):
        DatasetFolder(root, extensions=[".xyz"])
    with pytest.raises(DataError, match=r"no file under .* for which is_valid_file is true"):
        ImageFolder(root, is_valid_file=lambda path: False)
    with pytest.raises(DataError, match="root='nowhere' is no folder"):
        ImageFolder("nowhere")
