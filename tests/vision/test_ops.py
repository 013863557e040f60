"""vision.ops beside the contract rows: layers, files, empty inputs, what a capture refuses."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from polyreme import disable_static, enable_static, static
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, ConfigError, DataError, DTypeError, ShapeError
from polyreme.jit import to_static
from polyreme.nn import functional as F
from polyreme.vision import ops
from polyreme.vision.image import decoded


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


BOXES = np.array([[0, 0, 4, 4], [1, 1, 6, 5]], "float32")


def test_layers_are_their_functions():
    x, boxes, count = to_tensor(array(1, 8, 6, 7)), to_tensor(BOXES), to_tensor(np.array([2], "int32"))
    for layer, expected in (
        (ops.RoIAlign(2, 0.5), ops.roi_align(x, boxes, count, 2, 0.5)),
        (ops.RoIPool((2, 3), 0.5), ops.roi_pool(x, boxes, count, (2, 3), 0.5)),
        (ops.PSRoIPool(2, 0.5), ops.psroi_pool(x, boxes, count, 2, 0.5)),
    ):
        np.testing.assert_array_equal(layer(x, boxes, count).numpy(), expected.numpy())
    shifted = ops.RoIAlign(2)(x, boxes, count, aligned=False)
    np.testing.assert_array_equal(shifted.numpy(), ops.roi_align(x, boxes, count, 2, aligned=False).numpy())


def test_regions_are_pooled_in_programs_of_open_sizes():
    feed = {"x": array(1, 8, 6, 7), "boxes": BOXES, "count": np.array([2], "int32")}
    want = [f(*map(to_tensor, feed.values()), 2).numpy() for f in (ops.roi_align, ops.roi_pool, ops.psroi_pool)]
    enable_static()
    try:
        with static.program_guard(static.Program(), static.Program()):
            inputs = [static.data(n, [None] * a.ndim, a.dtype.name) for n, a in feed.items()]
            outs = [f(*inputs, 2) for f in (ops.roi_align, ops.roi_pool, ops.psroi_pool)]
            got = static.Executor().run(feed=feed, fetch_list=outs)
            with pytest.raises(ShapeError, match=r"boxes \[-1, 5\], .*; needs .* \[boxes, 4\]"):
                ops.roi_align(inputs[0], static.data("wide", [None, 5]), inputs[2], 2)
    finally:
        disable_static()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=32 * 2.0**-23, atol=32 * 2.0**-23)


def test_a_deformable_layer_that_moves_nothing_is_a_convolution_and_learns():
    layer = ops.DeformConv2D(4, 6, 3, stride=2, padding=1, groups=2, deformable_groups=2)
    assert [list(p.shape) for p in layer.parameters()] == [[6, 2, 3, 3], [6]]
    x, still = to_tensor(array(2, 4, 5, 6)), to_tensor(np.zeros((2, 36, 3, 3), "float32"), stop_gradient=False)
    half = to_tensor(np.full((2, 18, 3, 3), 0.5, "float32"))
    output = layer(x, still)
    want = F.conv2d(x, layer.weight, layer.bias, 2, 1, 1, 2).numpy()
    # 18 terms of order 1
    np.testing.assert_allclose(output.numpy(), want, rtol=0, atol=18 * 4 * 2.0**-23)
    np.testing.assert_allclose(layer(x, still, half).numpy(), want / 2, rtol=0, atol=18 * 4 * 2.0**-23)
    output.sum().backward()
    assert np.abs(layer.weight.grad.numpy()).max() > 0
    assert np.abs(still.grad.numpy()).max() > 0


def test_no_boxes_give_no_regions():
    none, count = to_tensor(np.zeros((0, 4), "float32")), to_tensor(np.array([0], "int32"))
    x = to_tensor(array(1, 4, 3, 3))
    assert ops.roi_align(x, none, count, 2).shape == [0, 4, 2, 2]
    assert ops.roi_pool(x, none, count, (1, 2)).shape == [0, 4, 1, 2]
    assert ops.psroi_pool(x, none, count, 2).shape == [0, 1, 2, 2]
    assert ops.nms(none).shape == [0]
    assert ops.nms(none, scores=to_tensor(np.zeros(0, "float32"))).numpy().dtype == np.int64
    levels, restore, numbers = ops.distribute_fpn_proposals(none, 2, 3, 2, 10)
    assert ([list(v.shape) for v in levels], restore.shape, numbers) == ([[0, 4], [0, 4]], [0, 1], None)
    rows, number, index = ops.matrix_nms(
        to_tensor(BOXES[None]), to_tensor(np.zeros((1, 2, 2), "float32")), 0.5, 0, 2, 2
    )
    assert (rows.shape, index, number.numpy().tolist()) == ([0, 6], None, [0])


def test_regions_are_counted_and_captured():
    x, boxes = to_tensor(array(2, 1, 6, 7)), to_tensor(BOXES)
    with pytest.raises(ShapeError, match=r"roi_align: x .*, boxes_num \[\]; needs \[n, channels, height, width\]"):
        ops.roi_align(x, boxes, 2, 2)
    with pytest.raises(ShapeError, match=r"roi_align: boxes_num=\[1, 2\] adds up to 3, but there are 2 boxes"):
        ops.roi_align(x, boxes, to_tensor(np.array([1, 2], "int32")), 2)
    with pytest.raises(CaptureError, match="nms"):
        to_static(lambda b: ops.nms(b))(boxes)


def test_settings_that_mean_nothing_are_refused():
    x, box, count = to_tensor(array(1, 8, 6, 7)), to_tensor(BOXES[:1]), to_tensor(np.array([1], "int32"))
    for pool in (ops.roi_align, ops.roi_pool, ops.psroi_pool):
        with pytest.raises(ConfigError, match=f"{pool.__name__}: spatial_scale=-1.0; it must be positive"):
            pool(x, box, count, 2, -1.0)
    head, sizes = to_tensor(array(1, 16, 2, 2)), to_tensor(np.array([[32, 32]], "int32"))
    with pytest.raises(ConfigError, match=r"iou_aware_factor=2; it must lie in \[0, 1\]"):
        ops.yolo_box(head, sizes, [1, 2, 3, 4], 2, 0.1, 16, iou_aware=True, iou_aware_factor=2)
    with pytest.raises(ShapeError, match=r"levels -1 to 3; needs .* 0 < min_level"):
        ops.distribute_fpn_proposals(box, -1, 3, 2, 224, rois_num=count)
    with pytest.raises(ConfigError, match="refer_scale=0; it must be positive"):
        ops.distribute_fpn_proposals(box, 2, 3, 2, 0, rois_num=count)


def test_the_largest_of_a_bin_may_be_nan_or_minus_infinity():
    x = np.full((1, 1, 4, 4), -np.inf, "float32")
    x[0, 0, 0, 0], x[0, 0, 2, 3] = 5, np.nan
    boxes, count = to_tensor(np.array([[0, 0, 3, 3]], "float32")), to_tensor(np.array([1], "int32"))
    found = ops.roi_pool(to_tensor(x), boxes, count, 2).numpy()
    np.testing.assert_array_equal(found[0, 0], [[5, -np.inf], [-np.inf, np.nan]])


@pytest.mark.parametrize("bins", [3, 7, 14])
def test_the_last_bin_ends_with_its_region(bins):
    """3 (14 / 3) in float32, by a reciprocal, is more than 14: the bin took the row behind the region."""
    rows = np.arange(64, dtype="float32").reshape(1, 1, 64, 1)
    for length in (1, 14, 57, 62):
        box = to_tensor(np.array([[0, 0, 0, length - 1]], "float32"))
        largest = ops.roi_pool(to_tensor(rows), box, to_tensor(np.array([1], "int32")), (bins, 1)).numpy().ravel()
        assert largest.tolist() == [-(-(i + 1) * length // bins) - 1 for i in range(bins)]


def test_identical_boxes_decay_to_nothing_once():
    boxes = to_tensor(np.repeat(BOXES[:1], 3, 0)[None])
    scores = to_tensor(np.array([[[0.9, 0.8, 0.7]]], "float32"))
    rows, number, index = ops.matrix_nms(boxes, scores, 0.1, 0.05, -1, -1, background_label=-1, return_index=True)
    assert (index.numpy().tolist(), number.numpy().tolist()) == ([[0]], [1])
    np.testing.assert_array_equal(rows.numpy(), np.array([[0, 0.9, 0, 0, 4, 4]], "float32"))


def test_images_are_read_from_files(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    file = tmp_path / "a.jpg"
    Image.fromarray(pixels).save(file)
    raw = ops.read_file(file)
    assert raw.numpy().tobytes() == file.read_bytes()
    want = np.asarray(Image.open(file))
    np.testing.assert_array_equal(ops.decode_jpeg(raw).numpy(), want.transpose(2, 0, 1))
    grey = ops.decode_jpeg(raw, mode="gray").numpy()
    np.testing.assert_array_equal(grey, np.asarray(Image.open(file).convert("L"))[None])
    assert ops.decode_jpeg(raw, "rgb").shape == [3, 8, 12]
    stored = BytesIO()
    Image.fromarray(pixels[:, :, 0]).save(stored, "JPEG")
    assert ops.decode_jpeg(to_tensor(np.frombuffer(stored.getvalue(), np.uint8))).shape == [1, 8, 12]
    png = BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    with pytest.raises(DataError, match="bytes: cannot be read as an image"):
        decoded(png.getvalue(), "JPEG")
    with pytest.raises(DataError, match=r"read_file: .*none cannot be read: No such file"):
        ops.read_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="mode='cmyk'; give unchanged, gray, rgb"):
        ops.decode_jpeg(raw, "cmyk")
    with pytest.raises(DTypeError, match=r"x is float32 \[2, 4\]; give a file's bytes"):
        ops.decode_jpeg(to_tensor(BOXES))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ops.DeformConv2D(4, 6, 3, groups=3), ConfigError, "groups=3 must divide in_channels=4"),
        (lambda: ops.DeformConv2D(4, 5, 3, groups=2), ConfigError, "groups=2 must divide out_channels=5"),
        (lambda: ops.deform_conv2d(array(1, 1, 2, 2), array(1, 18, 1, 1), array(1, 1, 3, 3)), ShapeError, "pad more"),
        (
            lambda: ops.deform_conv2d(array(1, 3, 4, 4), array(1, 18, 2, 2), array(1, 3, 3, 3), deformable_groups=2),
            ShapeError,
            "both groups must divide",
        ),
        (lambda: ops.prior_box(BOXES, BOXES, [1.0]), ShapeError, "both need 4 dims"),
        (lambda: ops.box_coder(BOXES, None, BOXES, "decode_center_size"), ShapeError, "see decode_center_size"),
        (lambda: ops.yolo_box(array(1, 7, 2, 2), [[4, 4]], [1, 2, 3], 2, 0.1, 8), ConfigError, "give width and height"),
        (
            lambda: ops.yolo_loss(array(1, 7, 2, 2), BOXES[None], [[0, 1]], [3, 4], [1], 2, 0.1, 8),
            ConfigError,
            r"anchor_mask=\(1,\) of 1 anchors",
        ),
        (lambda: ops.nms(BOXES[0]), ShapeError, r"boxes \[4\]; needs \[n, 4\]"),
        (lambda: ops.distribute_fpn_proposals(BOXES, 3, 2, 2, 10), ShapeError, "levels 3 to 2"),
    ],
)
def test_bad_input_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
