"""Changes of colour against Pillow, OpenCV and colorsys, the same on Pillow images, ndarrays and Tensors."""

import colorsys
import random

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, DataError, DTypeError, ShapeError
from polyreme.vision import transforms as T
from polyreme.vision.transforms import color


def pixels(height=5, width=7, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


CHANGES = {
    "brightness": (T.adjust_brightness, ImageEnhance.Brightness),
    "contrast": (T.adjust_contrast, ImageEnhance.Contrast),
    "saturation": (color.adjust_saturation, ImageEnhance.Color),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 1.7])
def test_bytes_are_changed_as_by_pillow_whatever_the_class(name, factor):
    change, enhance = CHANGES[name]
    image = Image.fromarray(pixels())
    want = np.asarray(enhance(image).enhance(factor))
    np.testing.assert_array_equal(np.asarray(change(image, factor)), want)
    np.testing.assert_array_equal(change(pixels(), factor), want)
    tensor = change(to_tensor(pixels().transpose(2, 0, 1)), factor)
    assert isinstance(tensor, Tensor)
    np.testing.assert_array_equal(tensor.numpy(), want.transpose(2, 0, 1))


def test_floats_are_changed_by_the_formula():
    image = np.random.default_rng(0).random((4, 5, 3))
    grey = image @ [0.299, 0.587, 0.114]
    bound = 8 * 2.0**-52
    np.testing.assert_allclose(T.adjust_brightness(image, 1.5), np.minimum(image * 1.5, 1), atol=bound)
    want = (0.4 * image + 0.6 * grey.mean()).clip(0, 1)
    np.testing.assert_allclose(T.adjust_contrast(image, 0.4), want, atol=bound)
    want = (1.8 * image - 0.8 * grey[:, :, None]).clip(0, 1)
    np.testing.assert_allclose(color.adjust_saturation(image, 1.8), want, atol=bound)
    assert T.adjust_contrast(image[:, :, 0].astype("float32"), 0.5).shape == (4, 5)


def turned(rgb, turn):
    hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
    return colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)


@pytest.mark.parametrize("turn", [-0.5, -0.13, 0.0, 0.4])
def test_hue_is_turned_in_the_hexcone(turn):
    image = pixels() / 255
    image[0, :3] = [[0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5]]
    want = np.array([[turned(p, turn) for p in row] for row in image])
    np.testing.assert_allclose(T.adjust_hue(image, turn), want, atol=64 * 2.0**-52)
    # bytes are the same, rounded
    want = np.rint(255 * np.array([[turned(p / 255, turn) for p in row] for row in pixels()]))
    np.testing.assert_array_equal(T.adjust_hue(pixels(), turn), want)
    np.testing.assert_array_equal(np.asarray(T.adjust_hue(Image.fromarray(pixels()), turn)), want)
    found = T.adjust_hue(to_tensor(image.transpose(2, 0, 1).astype("float32")), turn)
    np.testing.assert_allclose(found.numpy().transpose(1, 2, 0), T.adjust_hue(image, turn), atol=2.0**-23)


def test_hue_agrees_with_what_pillow_and_opencv_hold_in_bytes():
    hsv = np.asarray(Image.fromarray(pixels()).convert("HSV")).copy()
    hsv[:, :, 0] += np.uint8(51)
    pillow = np.asarray(Image.fromarray(hsv, "HSV").convert("RGB")).astype(int)
    hues = T.adjust_hue(pixels(), 0.2).astype(int)
    # hue, saturation and value are each rounded to 1/256; six sixths of hue to a full range
    assert np.abs(hues - pillow).max() <= 6 + 3
    cv2 = pytest.importorskip("cv2")
    hsv = cv2.cvtColor(pixels().astype("float32") / 255, cv2.COLOR_RGB2HSV)
    hsv[:, :, 0] = (hsv[:, :, 0] + 0.2 * 360) % 360
    # degrees in float32: 360 * 2^-24, a sixth of them to a range of 255
    np.testing.assert_allclose(hues, 255 * cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB), atol=0.5 + 255 * 6 * 2.0**-20)
    grey = cv2.cvtColor(pixels(), cv2.COLOR_RGB2GRAY)
    # both round a weighted sum; OpenCV's weights have 14 bits
    assert np.abs(T.to_grayscale(pixels())[:, :, 0].astype(int) - grey).max() <= 1


def test_grey_images_keep_their_hue_and_saturation():
    grey = pixels(channels=1)
    assert T.adjust_hue(grey, 0.3) is grey
    np.testing.assert_array_equal(color.adjust_saturation(grey, 0.3), grey)
    image = Image.fromarray(grey[:, :, 0])
    assert T.adjust_brightness(image, 0.5).mode == "L"


def test_jitter_draws_from_its_range():
    random.seed(0)
    transform = T.BrightnessTransform(0.4)
    factors = [transform._get_params(()) for _ in range(200)]
    assert 0.6 <= min(factors) < 0.62
    assert 1.38 < max(factors) <= 1.4
    assert T.ContrastTransform(3.0).range == (0.0, 4.0)
    assert T.SaturationTransform((0.2, 0.5)).range == (0.2, 0.5)
    assert T.HueTransform(0.25).range == (-0.25, 0.25)
    image = Image.fromarray(pixels())
    assert T.HueTransform(0)(image) is image
    np.testing.assert_array_equal(T.ContrastTransform((0.5, 0.5))(pixels()), T.adjust_contrast(pixels(), 0.5))


def test_color_jitter_is_its_four_parts_in_a_drawn_order_the_same_for_all_inputs():
    jitter = T.ColorJitter(0.4, (0.5, 0.5), 0.4, 0.2, keys=("image", "image"))
    random.seed(1)
    one, other = jitter((pixels(), Image.fromarray(pixels())))
    np.testing.assert_array_equal(one, np.asarray(other))
    want = pixels()
    for part in jitter.params:
        want = part.adjust(want, part.params)
    np.testing.assert_array_equal(one, want)
    orders = {tuple(type(p).__name__ for p in jitter._get_params(())) for _ in range(300)}
    assert len(orders) == 24
    np.testing.assert_array_equal(T.ColorJitter()(pixels()), pixels())


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: T.adjust_brightness(pixels(), -0.1),
            ConfigError,
            "brightness_factor=-0.1; give a number of at least 0",
        ),
        (lambda: T.adjust_hue(pixels(), 0.6), ConfigError, "hue_factor=0.6; give -0.5 to 0.5"),
        (lambda: T.adjust_hue(pixels(channels=4), 0.1), ShapeError, "4 channels; give a grey or RGB image"),
        (lambda: T.adjust_contrast(Image.new("P", (2, 2)), 2), ShapeError, "mode P; give a grey or RGB image"),
        (lambda: T.adjust_contrast(pixels().astype("float32"), 2), DataError, "give 0 .. 1, or uint8"),
        (lambda: T.adjust_brightness(pixels().astype("int64"), 2), DTypeError, "the image is int64"),
        (
            lambda: T.adjust_brightness(to_tensor(pixels()[0]), 2),
            ShapeError,
            r"give a Tensor \[channels, height, width\]",
        ),
        (lambda: T.HueTransform(0.6), ConfigError, "makes factors -0.5 .. 0.6"),
        (lambda: T.HueTransform((0.2, 0.1)), ConfigError, "makes factors 0.2 .. 0.1"),
        (lambda: T.BrightnessTransform(-1), ConfigError, "value=-1; give a number of at least 0"),
        (lambda: T.ColorJitter(contrast="much"), ConfigError, "ContrastTransform: value='much'"),
    ],
)
def test_bad_input_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
