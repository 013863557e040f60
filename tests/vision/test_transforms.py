"""Transforms against NumPy and Pillow, on images and on ndarrays."""

import random

import numpy as np
import pytest
from PIL import Image

from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.io.worker_info import WorkerInfo, set_worker_info
from polyreme.vision import transforms as T
from polyreme.vision.transforms import functional


def pixels(height=4, width=6, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def picture(*shape):
    return Image.fromarray(pixels(*shape))


def test_to_tensor_scales_bytes_and_puts_channels_first():
    found = T.to_tensor(picture())
    assert isinstance(found, Tensor)
    np.testing.assert_array_equal(found.numpy(), pixels().transpose(2, 0, 1).astype("float32") / np.float32(255))
    assert T.ToTensor("HWC")(pixels()).shape == [4, 6, 3]
    assert T.to_tensor(np.zeros((4, 6), np.uint8)).shape == [1, 4, 6]
    assert T.to_tensor(np.full((1, 1), 7, np.int32)).numpy().tolist() == [[[7]]]
    floats = np.full((2, 2, 1), 7.5)
    np.testing.assert_array_equal(T.to_tensor(floats).numpy(), np.full((1, 2, 2), 7.5, np.float32))


def test_to_tensor_gives_an_array_in_a_loader_worker():
    set_worker_info(WorkerInfo(0, 1, None, 0))
    try:
        assert isinstance(T.ToTensor()(picture()), np.ndarray)
    finally:
        set_worker_info(None)


def test_normalize_subtracts_mean_and_divides_by_std():
    image = np.random.default_rng(0).random((3, 4, 6)).astype("float32")
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 2.0]
    want = (image - np.float32(mean)[:, None, None]) / np.float32(std)[:, None, None]
    np.testing.assert_array_equal(T.Normalize(mean, std)(image), want)
    np.testing.assert_array_equal(T.normalize(T.to_tensor(image.transpose(1, 2, 0)), mean, std).numpy(), want)
    turned = T.normalize(image.transpose(1, 2, 0), 0.5, 0.5, "HWC", to_rgb=True)
    np.testing.assert_array_equal(turned, ((image[::-1] - np.float32(0.5)) / np.float32(0.5)).transpose(1, 2, 0))


@pytest.mark.parametrize(("size", "want"), [(2, (2, 3)), ((3, 5), (3, 5)), (8, (8, 12))])
def test_resize_equals_pillow(size, want):
    shown = T.Resize(size)(picture())
    assert (shown.height, shown.width) == want
    np.testing.assert_array_equal(np.asarray(shown), np.asarray(picture().resize(want[::-1], Image.BILINEAR)))
    # each channel by itself, as Pillow does it
    np.testing.assert_array_equal(T.resize(pixels(), size), np.asarray(shown))
    tall = T.resize(pixels().transpose(1, 0, 2), size if isinstance(size, int) else size[::-1], "nearest")
    assert tall.shape == (want[1], want[0], 3)
    assert T.resize(np.ones((4, 6), "float64"), size).shape == want


def test_crops_cut_the_rows_and_columns_asked_for():
    whole = pixels(5, 7)
    np.testing.assert_array_equal(T.CenterCrop((3, 3))(whole), whole[1:4, 2:5])
    np.testing.assert_array_equal(np.asarray(T.center_crop(Image.fromarray(whole), 3)), whole[1:4, 2:5])
    np.testing.assert_array_equal(T.crop(whole, 1, 2, 2, 4), whole[1:3, 2:6])
    with pytest.raises(ShapeError, match=r"crop: 3 x 8 at .* does not lie in an image of 5 x 7"):
        T.crop(whole, 0, 0, 3, 8)


def test_flips_mirror_rows_or_columns():
    np.testing.assert_array_equal(T.hflip(pixels()), pixels()[:, ::-1])
    np.testing.assert_array_equal(np.asarray(T.vflip(picture())), pixels()[::-1])
    always, never = T.RandomHorizontalFlip(1.0), T.RandomVerticalFlip(0.0)
    np.testing.assert_array_equal(never(always(pixels())), pixels()[:, ::-1])


def test_pad_equals_numpy():
    np.testing.assert_array_equal(T.pad(pixels(), 1), np.pad(pixels(), ((1, 1), (1, 1), (0, 0))))
    left_top_right_bottom = T.Pad((1, 2, 3, 4), padding_mode="edge")(picture())
    np.testing.assert_array_equal(
        np.asarray(left_top_right_bottom), np.pad(pixels(), ((2, 4), (1, 3), (0, 0)), mode="edge")
    )
    coloured = T.pad(pixels(), (1, 0), fill=(9, 8, 7))
    assert coloured.shape == (4, 8, 3)
    assert coloured[0, 0].tolist() == coloured[3, 7].tolist() == [9, 8, 7]


def test_grayscale():
    np.testing.assert_array_equal(np.asarray(T.Grayscale()(picture())), np.asarray(picture().convert("L")))
    grey = T.to_grayscale(pixels(), 3)
    assert grey.shape == (4, 6, 3)
    # Pillow rounds its fixed-point sum, ours is exact: one step apart at most
    assert np.abs(grey[:, :, 0].astype(int) - np.asarray(picture().convert("L"))).max() <= 1


def test_random_crop_reaches_every_place_and_no_other():
    image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    random.seed(0)
    crop = T.RandomCrop(2)
    corners = {int(crop(image)[0, 0, 0]) for _ in range(200)}
    assert corners == {0, 1, 2, 4, 5, 6}
    assert T.RandomCrop(6, pad_if_needed=True)(image).shape == (6, 6, 1)
    assert T.RandomCrop(4, padding=1)(image).shape == (4, 4, 1)
    with pytest.raises(ShapeError, match="give padding or pad_if_needed"):
        T.RandomCrop(6)(image)


def test_random_resized_crop_keeps_to_its_bounds():
    random.seed(0)
    crop = T.RandomResizedCrop(8, scale=(0.25, 0.5), ratio=(0.5, 2.0))
    for _ in range(50):
        crop.params = crop._get_params(())
        top, left, height, width = crop._box(40, 60)
        assert 0 <= top <= 40 - height
        assert 0 <= left <= 60 - width
        # both sides are rounded to whole pixels, of 17 at least
        assert 0.25 * 0.94 <= height * width / 2400 <= 0.5 * 1.06
        assert 0.5 * 0.94 <= width / height <= 2.0 * 1.06
    assert crop(picture(40, 60)).size == (8, 8)
    # no draw can fit: the middle
    assert T.RandomResizedCrop(4, scale=(4.0, 4.0), ratio=(1.0, 1.0))(pixels(4, 6)).shape == (4, 4, 3)


def test_the_same_seed_draws_the_same():
    crop, image = T.RandomCrop(2), pixels(9, 9)
    random.seed(3)
    first = [crop(image) for _ in range(5)]
    random.seed(3)
    np.testing.assert_array_equal(first, [crop(image) for _ in range(5)])


def test_several_inputs_and_a_transform_of_ones_own():
    class Both(T.BaseTransform):
        def _apply_image(self, img):
            return img + 1

        def _apply_mask(self, mask):
            return mask - 1

    assert Both(keys=("image", "mask"))((1, 5, "label")) == (2, 4, "label")
    assert T.Compose([Both(), Both()])(1) == 3
    assert T.Transpose()(pixels()).shape == (3, 4, 6)
    assert T.Transpose()(Tensor(pixels())).shape == [3, 4, 6]
    with pytest.raises(ConfigError, match="there is no _apply_mask"):
        T.Resize(2, keys=("image", "mask"))((pixels(), pixels()))


REFUSED = [
    (lambda: T.resize(pixels(), 2, "cubic"), ConfigError, "did you mean 'bicubic'"),
    (lambda: T.resize(pixels().astype("int64"), 2), DTypeError, "give uint8 or floats"),
    (lambda: T.resize(pixels(), 0), ConfigError, "whole numbers of at least 1"),
    (lambda: T.resize(pixels(), (1, 2, 3)), ConfigError, "give one number, or"),
    (lambda: T.pad(pixels(), (1, 2, 3)), ConfigError, "give 1, 2 or 4 whole numbers"),
    (lambda: T.pad(pixels(), 1, fill=(1, 2)), ShapeError, "fill has 2 numbers, the image 3 channels"),
    (lambda: T.pad(pixels(), 1, padding_mode="wrap"), ConfigError, "padding_mode='wrap'"),
    (lambda: T.normalize(np.ones((3, 2, 2)), [0.1, 0.2], 1.0), ShapeError, "mean has 2 numbers, the image 3 channels"),
    (lambda: T.normalize(np.ones((3, 2, 2)), 0.1, 0.0), ConfigError, "std=0.0 has a 0"),
    (lambda: T.normalize(np.ones((2, 2)), 0.1, 1.0), ShapeError, "give three dims, CHW"),
    (lambda: T.normalize(np.ones((3, 2, 2)), 0.1, 1.0, "NCHW"), ConfigError, "give 'CHW' or 'HWC'"),
    (lambda: T.to_tensor(pixels(), "NCHW"), ConfigError, "give 'CHW' or 'HWC'"),
    (lambda: T.to_tensor(pixels().astype("uint16")), DTypeError, "to_tensor: the image is uint16"),
    (lambda: T.to_tensor([1, 2]), DTypeError, "the image is a list; give a Pillow image, an ndarray or a Tensor"),
    (lambda: T.to_tensor(np.zeros(3)), ShapeError, r"the image has shape \[3\]"),
    (lambda: T.to_grayscale(pixels(), 2), ConfigError, "give 1 or 3"),
    (lambda: T.to_grayscale(pixels(4, 6, 2)), ShapeError, "the image has 2 channels"),
    (lambda: T.RandomHorizontalFlip(1.5), ConfigError, "give a probability"),
    (lambda: T.Transpose((0, 1, 1)), ConfigError, "give 0, 1 and 2 in some order"),
    (lambda: T.RandomResizedCrop(4, scale=(0.5, 0.1)), ConfigError, "0 < low <= high"),
    (lambda: T.Compose([3]), ConfigError, "give callables"),
    (lambda: T.Resize(2, keys=("picture",)), ConfigError, "keys has 'picture'"),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSED)
def test_bad_input_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def pixels_of(kind):
    rng = np.random.default_rng(0)
    shape = {"gray": (37, 53), "one": (37, 53, 1), "rgba": (37, 53, 4)}.get(kind, (37, 53, 3))
    array = rng.integers(0, 256, shape, dtype=np.uint8)
    if kind == "pillow":
        return Image.fromarray(array)
    if kind == "pillow gray":
        return Image.fromarray(array[:, :, 0])
    if kind == "pillow bits":
        return Image.fromarray(array[:, :, 0]).convert("1")
    if kind == "floats":
        return rng.random(shape, np.float32)
    return Tensor(array.transpose(2, 0, 1)) if kind == "tensor" else array


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "box", "lanczos", "hamming"])
@pytest.mark.parametrize(
    "kind", ["array", "gray", "one", "rgba", "floats", "pillow", "pillow gray", "pillow bits", "tensor"]
)
def test_one_pass_gives_the_bits_of_three_calls(kind, interpolation):
    image = pixels_of(kind)
    channels = {"gray": 1, "one": 1, "pillow gray": 1, "pillow bits": 1, "rgba": 4}.get(kind, 3)
    mean, std = [0.485, 0.456, 0.406, 0.1][:channels], [0.229, 0.224, 0.225, 3.0][:channels]
    for data_format, to_rgb in (("CHW", False), ("HWC", True)):
        resized = T.resize(image, (20, 31), interpolation)
        expected = T.normalize(functional.to_chw(resized, data_format), mean, std, data_format, to_rgb)
        found = T.resize_normalize(image, (20, 31), mean, std, interpolation, data_format, to_rgb)
        assert (found.dtype, found.flags["C_CONTIGUOUS"]) == (np.float32, True)
        np.testing.assert_array_equal(found, expected)
    compose = T.Compose([T.Resize(20), T.ToTensor(), T.Normalize(mean, std)])
    one = T.ResizeNormalize(20, mean, std)
    if kind != "tensor":  # ToTensor takes no Tensor
        np.testing.assert_array_equal(one(image), compose(image).numpy())


def test_one_pass_refuses_what_the_three_calls_refuse():
    image = pixels_of("array")
    with pytest.raises(ConfigError, match="resize_normalize: data_format='WHC'"):
        T.resize_normalize(image, 8, 0.5, 0.5, data_format="WHC")
    with pytest.raises(ShapeError, match="mean has 2 numbers, the image 3 channels"):
        T.resize_normalize(image, 8, [0.5, 0.5], 0.5)
    with pytest.raises(ConfigError, match=r"std=0\.0 has a 0"):
        T.resize_normalize(image, 8, 0.5, 0.0)
    with pytest.raises(ConfigError, match="interpolation='linear'"):
        T.resize_normalize(image, 8, 0.5, 0.5, "linear")
    with pytest.raises(DTypeError, match="resize: the image is int64; give uint8 or floats"):
        T.resize_normalize(image.astype(np.int64), 8, 0.5, 0.5)
    with pytest.raises(DTypeError, match="resize_normalize: the image is a str"):
        T.resize_normalize("cat.png", 8, 0.5, 0.5)
