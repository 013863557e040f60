"""What nets of detectors ask of Programs whose images have open sizes."""

import numpy as np
import pytest

from polyreme.errors import CaptureError
from polyreme.fluid import layers as L


def pyramid(image):
    """Maps of half, a quarter, ... to a 32nd of the size, and the smallest ones doubled again to meet the larger."""
    maps = [image]
    for _ in range(5):
        maps.append(L.pool2d(maps[-1], 3, pool_stride=2, pool_padding=1))
    top = maps[-1]
    for below in maps[-2:1:-1]:
        top = L.concat([L.resize_nearest(top, scale=2.0), below], axis=1)
    return top


def nearest(x, size):
    at = np.floor(np.arange(size) * ((x.shape[2] - 1) / (size - 1)) + 0.5).astype(int)
    return x[:, :, at][:, :, :, at]


def test_images_of_open_sizes_are_halved_and_doubled(script):
    image = script.data("image", [None, 2, None, None])
    merged, doubled = pyramid(image), L.resize_nearest(image, scale=2.0)
    assert merged.shape[1] == 2 * 4
    x = np.random.default_rng(0).standard_normal((1, 2, 64, 64)).astype("float32")
    exe = script.Executor(script.CPUPlace())
    found, twice = exe.run(feed={"image": x}, fetch_list=[merged, doubled])
    assert found.shape == (1, 8, 16, 16)
    np.testing.assert_array_equal(twice, nearest(x, 128))


@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_a_case_of_one_element_has_any_number_of_dims(script, shape):
    rate = L.create_global_var([1], 0.0, "float32", persistable=True)
    one, two = (L.fill_constant(shape, "float32", v) for v in (1.0, 2.0))
    with L.Switch() as switch:
        with switch.case(L.less_than(one, two)):
            L.assign(L.fill_constant([1], "float32", 5.0), rate)
        with switch.default():
            L.assign(L.fill_constant([1], "float32", 7.0), rate)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    assert exe.run(fetch_list=[rate])[0] == [5.0]


def test_a_variable_of_several_numbers_is_there_and_a_condition_has_no_value(script):
    image = script.data("image", [None, 2, None, None])
    assert image
    for condition in (L.mean(image), L.mean(image) > 1.0, image > 1.0):
        with pytest.raises(CaptureError, match="bool"):
            bool(condition)


def test_targets_are_fed_for_a_map_whose_size_is_computed(script):
    image, target = (script.data(n, [None, 2, None, None]) for n in ("image", "target"))
    loss = L.mean(L.abs(L.pool2d(image, 2, "avg", pool_stride=2) - target))
    x = np.ones((1, 2, 8, 8), "float32")
    exe = script.Executor(script.CPUPlace())
    assert exe.run(feed={"image": x, "target": 3 * x[:, :, ::2, ::2]}, fetch_list=[loss])[0] == [2.0]


def test_targets_of_a_known_batch_meet_a_map_whose_size_is_computed(script):
    image, target = script.data("image", [2, 2, None, None]), script.data("target", [None, 2, None, None])
    loss = L.mean(target * L.pool2d(image, 2, "avg", pool_stride=2))
    x = np.ones((2, 2, 8, 8), "float32")
    exe = script.Executor(script.CPUPlace())
    assert exe.run(feed={"image": x, "target": 3 * x[:, :, ::2, ::2]}, fetch_list=[loss])[0] == [3.0]


def test_levels_of_boxes_have_the_dims_that_are_known(script):
    boxes = script.data("boxes", [None, 4], lod_level=1)
    levels, order = L.distribute_fpn_proposals(boxes, 2, 3, 4, 224)
    assert [level.shape for level in levels] == [[-1, 4]] * 2
    assert order.shape == [-1, 1]


def test_a_variable_that_does_not_persist_takes_the_shape_of_the_case(script):
    boxes = script.data("boxes", [None, 6])
    count = L.reshape(L.reduce_prod(L.shape(boxes)), [1, 1])
    masks = L.create_global_var([1], 0.0, "float32", persistable=False, name="masks")
    with L.Switch() as switch:
        with switch.case(L.less_than(count, L.fill_constant([1, 1], "int32", 12))):
            L.assign(boxes, output=masks)
        with switch.default():
            L.assign(L.reshape(boxes, [-1, 2, 3]), output=masks)
    exe = script.Executor(script.CPUPlace())
    assert masks.shape == [-1, 2, 3]
    assert not script.default_startup_program().global_block().ops
    for n, shape in ((1, (1, 6)), (4, (4, 2, 3))):
        assert exe.run(feed={"boxes": np.ones((n, 6), "f")}, fetch_list=[masks])[0].shape == shape
