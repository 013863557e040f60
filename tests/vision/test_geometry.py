"""Turned, moved and erased images against NumPy, Pillow and OpenCV, the same on Pillow images, ndarrays and Tensors."""

import random

import numpy as np
import pytest
from PIL import Image

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.vision import transforms as T

CORNERS = [[0, 0], [51, 0], [51, 39], [0, 39]]
SEEN = [[3, 2], [48, 5], [50, 36], [1, 38]]


def noise(height=6, width=8, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height=40, width=52):
    """Waves, so that neighbours differ by at most 100 / 6 levels."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 7 + y / 11), np.cos(y / 6), np.sin(x / 9 - y / 8)]
    return (127 + 100 * np.stack(waves, -1)).astype(np.uint8)


GEOMETRIES = {
    "rotate": lambda img, how, fill: T.rotate(img, 33, how, fill=fill),
    "expand": lambda img, how, fill: T.rotate(img, -77, how, expand=True, fill=fill),
    "center": lambda img, how, fill: T.rotate(img, 20, how, center=(5, 8), fill=fill),
    "affine": lambda img, how, fill: T.affine(img, 25, (4, 2), 0.8, (10, -12), how, fill),
    "perspective": lambda img, how, fill: T.perspective(img, CORNERS, SEEN, how, fill),
}


@pytest.mark.parametrize("how", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_all_classes_of_images_agree(name, how):
    call, image = GEOMETRIES[name], smooth()
    want = call(image, how, (1, 2, 3))
    np.testing.assert_array_equal(np.asarray(call(Image.fromarray(image), how, (1, 2, 3))), want)
    tensor = call(to_tensor(image.transpose(2, 0, 1)), how, (1, 2, 3))
    assert isinstance(tensor, Tensor)
    np.testing.assert_array_equal(tensor.numpy(), want.transpose(2, 0, 1))
    np.testing.assert_array_equal(call(image[:, :, 0], how, 1), want[:, :, 0])
    # floats are the same but for the rounding
    floats = call(image.astype("float32"), how, (1, 2, 3))
    assert np.abs(floats.clip(0, 255) - want).max() <= 0.5 + 255 * 16 * 2.0**-23


def pillow_of(name, image, resample):
    image = Image.fromarray(image)
    if name == "rotate":
        return image.rotate(33, resample, fillcolor=(1, 2, 3))
    if name == "expand":
        return image.rotate(-77, resample, expand=True, fillcolor=(1, 2, 3))
    if name == "center":
        return image.rotate(20, resample, center=(5, 8), fillcolor=(1, 2, 3))
    if name == "perspective":
        mode, inverse = Image.Transform.PERSPECTIVE, homography(SEEN, CORNERS).ravel()[:8]
    else:
        mode, inverse = (
            Image.Transform.AFFINE,
            np.linalg.inv(affinity(25, (4, 2), 0.8, (10, -12), (26, 20))).ravel()[:6],
        )
    return image.transform(image.size, mode, inverse, resample, fillcolor=(1, 2, 3))


def homography(start, end):
    """The matrix that takes start (x, y, 1) to multiples of end: the null vector of the usual eight equations."""
    rows = []
    for (x, y), (u, v) in zip(start, end, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y, -u], [0, 0, 0, x, y, 1, -v * x, -v * y, -v]]
    found = np.linalg.svd(np.array(rows, float))[2][-1].reshape(3, 3)
    return found / found[2, 2]


def affinity(angle, translate, scale, shear, center):
    """Move the centre to the origin, shear along x, then along y, turn, scale, move back and on."""
    turn, x, y = (np.radians(v) for v in (angle, *shear))
    along_x, along_y = np.array([[1, -np.tan(x)], [0, 1]]), np.array([[1, 0], [-np.tan(y), 1]])
    turning = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    linear = scale * turning @ along_y @ along_x
    whole = np.eye(3)
    whole[:2, :2], whole[:2, 2] = linear, np.array(center) + translate - linear @ center
    return whole


@pytest.mark.parametrize("name", GEOMETRIES)
def test_as_pillow_does_it(name):
    for how, resample in (("nearest", Image.Resampling.NEAREST), ("bilinear", Image.Resampling.BILINEAR)):
        want = np.asarray(pillow_of(name, smooth(), resample)).astype(int)
        found = GEOMETRIES[name](smooth(), how, (1, 2, 3)).astype(int)
        assert found.shape == want.shape
        apart = np.abs(found - want).max(-1)
        if how == "bilinear":
            # Pillow cuts off where we round; of the pixels whose place is on the very edge a few may be outside
            assert (apart > 1).sum() <= 4
        else:
            # a place on the edge of two pixels, by Pillow's 16 binary places, may be of either
            assert (apart > 0).mean() <= 0.01


def test_as_opencv_does_it():
    cv2 = pytest.importorskip("cv2")
    image, size = smooth(), (52, 40)
    forward = affinity(25, (4, 2), 0.8, (10, -12), (26, 20))
    # OpenCV's pixels have their centres at whole numbers
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    matrix = np.linalg.inv(half) @ forward @ half
    seen = np.linalg.inv(half) @ homography(CORNERS, SEEN) @ half
    # what lies beside the image is blended with it by OpenCV
    middle = np.pad(np.ones((34, 46), np.uint8), 3)
    for how, flag in (("bilinear", cv2.INTER_LINEAR), ("bicubic", cv2.INTER_CUBIC)):
        # places in OpenCV have 5 binary places, values change by at most 100 / 6 a pixel: a level, and its rounding
        moved = cv2.warpAffine(image, matrix[:2], size, flags=flag).astype(int)
        pixels = T.affine(image, 25, (4, 2), 0.8, (10, -12), how).astype(int)
        within = T.affine(middle, 25, (4, 2), 0.8, (10, -12)) > 0
        assert np.abs(pixels - moved)[within].max() <= 2
        viewed = cv2.warpPerspective(image, seen, size, flags=flag).astype(int)
        pixels = T.perspective(image, CORNERS, SEEN, how).astype(int)
        within = T.perspective(middle, CORNERS, SEEN) > 0
        assert np.abs(pixels - viewed)[within].max() <= 2
        sizes = T.resize(image, (80, 104), how).astype(int)
        larger = cv2.resize(image, (104, 80), interpolation=flag).astype(int)
        # Pillow's bicubic has the parameter -0.5, OpenCV's -0.75
        assert np.abs(sizes - larger)[4:-4, 4:-4].max() <= (1 if how == "bilinear" else 3)


def test_right_angles_and_whole_pixels_are_exact():
    image = noise()
    for how in ("nearest", "bilinear", "bicubic"):
        for turned in (image, image[:5, :6]):  # an odd difference of sides too
            np.testing.assert_array_equal(T.rotate(turned, 90, how, expand=True), np.rot90(turned))
        np.testing.assert_array_equal(T.rotate(image, 180, how), np.rot90(image, 2))
        np.testing.assert_array_equal(T.affine(image[:, :6], 90, (0, 0), 1.0, 0.0, how), np.rot90(image[:, :6], -1))
        moved = T.affine(image, 0, (2, -1), 1.0, 0.0, how, fill=7)
        np.testing.assert_array_equal(moved[:-1, 2:], image[1:, :-2])
        assert (moved[-1] == 7).all()
        assert (moved[:, :2] == 7).all()
    # the middle 3 x 4 pixels, each four times
    twice = np.repeat(np.repeat(image[1:-1, 2:-2], 2, 0), 2, 1)
    np.testing.assert_array_equal(T.affine(image, 0, (0, 0), 2.0, 0), twice[1:-1])
    same = T.perspective(image, CORNERS, CORNERS, "bilinear")
    np.testing.assert_array_equal(same, image)


def test_erase_gives_a_new_image_or_changes_the_one_given():
    image = noise()
    want = image.copy()
    want[1:3, 2:6] = [9, 8, 7]
    np.testing.assert_array_equal(T.erase(image, 1, 2, 2, 4, np.array([9, 8, 7])), want)
    np.testing.assert_array_equal(np.asarray(T.erase(Image.fromarray(image), 1, 2, 2, 4, np.array([9, 8, 7]))), want)
    tensor = to_tensor(image.transpose(2, 0, 1))
    found = T.erase(tensor, 1, 2, 2, 4, to_tensor(np.array([9, 8, 7], np.uint8).reshape(3, 1, 1)))
    np.testing.assert_array_equal(found.numpy(), want.transpose(2, 0, 1))
    np.testing.assert_array_equal(tensor.numpy(), image.transpose(2, 0, 1))
    for one in (image.copy(), Image.fromarray(image), tensor):
        assert T.erase(one, 0, 0, 6, 8, 0, inplace=True) is one
        assert np.asarray(one).max() == 0
    np.testing.assert_array_equal(T.erase(image[:, :, 0], 5, 7, 1, 1, 3)[5, 7], 3)


def test_random_rotation_and_affine_draw_from_their_ranges():
    random.seed(0)
    angles = [T.RandomRotation(30)._get_params(()) for _ in range(100)]
    assert -30 <= min(angles) < -25
    assert 25 < max(angles) <= 30
    assert T.RandomRotation((90, 90), expand=True)(noise()).shape == (8, 6, 3)
    affine = T.RandomAffine((10, 20), (0.5, 0.25), (0.5, 2), (1, 2, 3, 4), "bilinear", 5)
    for _ in range(50):
        angle, (right, down), scale, (x, y) = affine._get_params(())
        assert 10 <= angle <= 20
        assert abs(right) <= 0.5
        assert abs(down) <= 0.25
        assert 0.5 <= scale <= 2
        assert 1 <= x <= 2
        assert 3 <= y <= 4
    assert T.RandomAffine(0, shear=5)._get_params(())[3][1] == 0
    np.testing.assert_array_equal(T.RandomAffine(0)(noise()), noise())
    affine.params = (15.0, [0.5, -0.2], 0.75, [1.5, 3.5])
    want = T.affine(smooth(), 15.0, (26, -8), 0.75, (1.5, 3.5), "bilinear", 5)
    np.testing.assert_array_equal(affine._apply_image(smooth()), want)


def test_random_perspective_moves_corners_inwards():
    transform = T.RandomPerspective(1.0, 0.5, "bilinear")
    transform.params = [(0.0, 0.999)] * 4
    # half of half of 40 rows
    want = T.perspective(smooth(), CORNERS, [[0, 10], [51, 10], [51, 29], [0, 29]], "bilinear")
    np.testing.assert_array_equal(transform._apply_image(smooth()), want)
    image = Image.fromarray(noise())
    assert T.RandomPerspective(0.0)(image) is image


def test_random_erasing():
    random.seed(0)
    ones = np.ones((30, 40, 3), np.float32)
    erasing = T.RandomErasing(1.0, (0.1, 0.2), (0.5, 2.0))
    for _ in range(20):
        gone = erasing(ones) == 0
        rows, columns = gone.any((1, 2)).sum(), gone.any((0, 2)).sum()
        assert gone.sum() == 3 * rows * columns
        # whole pixels, of 8 at least
        assert 0.1 * 0.87 <= rows * columns / 1200 <= 0.2 * 1.13
        assert 0.5 * 0.87 <= rows / columns <= 2.0 * 1.13
    assert T.RandomErasing(0.0)(ones) is ones
    assert T.RandomErasing(1.0, (1.0, 1.0), (9.0, 9.0))(ones) is ones
    whole = {"prob": 1.0, "scale": (1.0, 1.0), "ratio": (0.75, 0.75)}
    np.testing.assert_array_equal(T.RandomErasing(**whole, value=(1, 2, 3))(noise(30, 40))[3, 4], [1, 2, 3])
    tensor = T.RandomErasing(**whole, value=(1, 2, 3))(to_tensor(ones.transpose(2, 0, 1)))
    np.testing.assert_array_equal(tensor.numpy()[:, 3, 4], [1, 2, 3])
    drawn = T.RandomErasing(**whole, value="random")(ones)
    # 3,600 draws: the mean of a normal variable within 4 standard errors, and no two are equal
    assert abs(drawn.mean()) < 4 / 60
    assert len(np.unique(drawn)) > 3500
    levels = np.asarray(T.RandomErasing(**whole, value="random")(Image.fromarray(noise(30, 40))))
    assert levels.min() < 10
    assert levels.max() > 245
    assert T.RandomErasing(**whole, value="random")(ones[:, :, 0]).shape == (30, 40)
    T.RandomErasing(**whole, inplace=True)(ones)
    assert ones.max() == 0


def test_the_older_transforms_take_tensors_too():
    image = noise()
    tensor = to_tensor(image.transpose(2, 0, 1))
    settings = [(T.hflip,), (T.vflip,), (T.pad, (1, 2)), (T.crop, 1, 2, 3, 4), (T.resize, 3), (T.center_crop, 4)]
    for call, *rest in [*settings, (T.to_grayscale, 3)]:
        np.testing.assert_array_equal(call(tensor, *rest).numpy(), call(image, *rest).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: T.rotate(noise(), 3, "linear"), ConfigError, "interpolation='linear'"),
        (lambda: T.rotate(noise(), 3, fill=(1, 2)), ShapeError, "fill has 2 numbers, the image 3 channels"),
        (lambda: T.affine(noise(), 0, (0, 0), 0.0, 0), ConfigError, "scale=0.0"),
        (lambda: T.affine(noise(), 0, (0,), 1.0, 0), ConfigError, r"translate=\(0,\)"),
        (lambda: T.perspective(noise(), CORNERS, CORNERS[:3]), ConfigError, r"give four \(x, y\) each"),
        (lambda: T.perspective(noise(), CORNERS, [[0, 0]] * 4), ConfigError, "lie on a line"),
        (lambda: T.erase(noise(), 3, 3, 4, 4, 0), ShapeError, r"4 x 4 at \(3, 3\) does not lie in an image of 6 x 8"),
        (lambda: T.RandomRotation(-3), ConfigError, "degrees=-3"),
        (lambda: T.RandomAffine(0, translate=(2, 0)), ConfigError, r"translate=\(2, 0\)"),
        (lambda: T.RandomAffine(0, scale=(0, 1)), ConfigError, r"scale=\(0, 1\)"),
        (lambda: T.RandomAffine(0, shear=(1, 2, 3)), ConfigError, r"shear=\(1, 2, 3\)"),
        (lambda: T.RandomPerspective(distortion_scale=2), ConfigError, "distortion_scale=2"),
        (lambda: T.RandomErasing(2), ConfigError, "prob=2"),
        (lambda: T.RandomErasing(scale=(0.5, 2)), ConfigError, r"scale=\(0.5, 2\)"),
        (lambda: T.RandomErasing(value="black"), ConfigError, "value='black'"),
    ],
)
def test_bad_input_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
