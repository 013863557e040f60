"""Numbers that follow from shapes are known in captured code and exports, where they are given for sizes."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.errors import HostValueError
from polyreme.static import InputSpec

F = nn.functional


def resized(x):
    shape = paddle.shape(x)
    high, wide = shape[2:]
    count = paddle.concat([shape[:1], paddle.stack([shape[1] * high * wide])])
    return (
        F.interpolate(x, size=shape[2:] * 2),
        F.interpolate(x, size=[high + 1, wide // 2]),
        x.reshape(count),
        paddle.zeros([shape[0], paddle.numel(x) - 1], "int32"),
        paddle.expand(x[:1], shape.astype("int32")),
        paddle.arange(shape[-1].unsqueeze(0)),
        paddle.zeros([8 - (-shape[1])]),
    )


def test_sizes_of_captured_code_are_those_of_eager_code():
    captured = paddle.jit.to_static(resized)
    for shape in ([2, 3, 4, 6], [3, 1, 2, 4]):
        x = paddle.to_tensor(np.random.default_rng(0).random(shape, np.float32))
        for got, want in zip(captured(x), resized(x), strict=True):
            assert got.shape == want.shape
            np.testing.assert_array_equal(got.numpy(), want.numpy())


def masked(x):
    mask = None
    if paddle.shape(x)[-1] > 1:
        mask = paddle.tril(paddle.ones([paddle.shape(x)[-1]] * 2))
    if mask is not None and x.ndim:
        x = paddle.matmul(x, mask)
    return x * 2 if paddle.shape(x)[0] == 1 else x


def test_shapes_decide_an_if_whose_sides_differ():
    captured = paddle.jit.to_static(masked)
    for shape in ([2, 3], [1, 1], [1, 2]):
        x = paddle.to_tensor(np.arange(np.prod(shape), dtype="float32").reshape(shape) + 1)
        np.testing.assert_array_equal(captured(x), masked(x))


class Resized(nn.Layer):
    def forward(self, x):
        big = F.interpolate(x, size=paddle.shape(x)[2:] * 2)
        return big.reshape([paddle.shape(x)[0], 3, -1]), paddle.shape(x)[2:] * 2


def test_an_export_leaves_open_what_follows_from_open_sizes(tmp_path):
    layer = Resized()
    layer.eval()
    paddle.jit.save(layer, str(tmp_path / "model"), input_spec=[InputSpec([None, 3, None, None], "float32")])
    loaded = paddle.jit.load(str(tmp_path / "model"))
    for shape in ([1, 3, 4, 6], [2, 3, 5, 2]):
        x = paddle.to_tensor(np.random.default_rng(1).random(shape, np.float32))
        (got, sizes), (want, _) = loaded(x), layer(x)
        np.testing.assert_array_equal(got.numpy(), want.numpy())
        assert sizes.tolist() == [2 * shape[2], 2 * shape[3]]


class DoublesUnlessTwo(nn.Layer):
    def forward(self, x):
        if paddle.shape(x)[0] - 2:
            return x * 2
        return x + 1


def test_an_open_size_decides_an_if_when_it_is_known(tmp_path):
    layer, spec = DoublesUnlessTwo(), InputSpec([None, 2], "float32")
    paddle.jit.save(layer, str(tmp_path / "model"), input_spec=[spec])
    loaded = paddle.jit.load(str(tmp_path / "model"))
    for rows, value in ((2, 4.0), (5, 6.0)):
        x = paddle.full([rows, 2], 3.0)
        assert layer(x)[0, 0].item() == loaded(x)[0, 0].item() == value


def test_control_flow_takes_them_for_tensors_and_the_host_reads_them():
    @paddle.jit.to_static
    def summed(x):
        rows, total, at = paddle.shape(x)[0], paddle.zeros([]), paddle.zeros([], "int64")
        while at < rows:
            total, at = total + x[at].sum(), at + 1
        if rows > 2:
            total = total * 2
        return total, int(rows) + 1

    assert [float(summed(paddle.ones([n, 2]))[0]) for n in (2, 5)] == [4, 20]
    assert summed(paddle.ones([2, 2]))[1] == 3


def test_what_is_written_over_is_not_known_any_more():
    @paddle.jit.to_static
    def written(x):
        shape = paddle.shape(x)
        shape[0] = x.sum().astype("int64")
        return paddle.zeros([shape[0], 2])

    @paddle.jit.to_static
    def mixed(x):
        return paddle.zeros([paddle.shape(x)[0] + x.sum().astype("int64")])

    for function in (written, mixed):
        with pytest.raises(HostValueError, match="needs the value on the host"):
            function(paddle.ones([2, 2]))
