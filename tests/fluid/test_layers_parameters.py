"""Layers with parameters: their names and shapes, the shape of what the layer gives, and that training moves them."""

import numpy as np
import pytest
from scipy.special import expit

from polyreme import fluid

L = fluid.layers
IMAGE = np.random.RandomState(0).randn(2, 3, 8, 8).astype("float32")
ROWS = np.random.RandomState(1).randn(2, 4).astype("float32")
IDS = np.array([[1], [3]])
FEED = {"image": IMAGE, "rows": ROWS, "ids": IDS}


def image():
    return L.data("image", [3, 8, 8])


def rows():
    return L.data("rows", [4])


def ids():
    return L.data("ids", [1], dtype="int64")


CASES = {
    "fc": (lambda: L.fc([rows(), image()], 5, act="tanh"), (2, 5),
           {"fc_0.w_0": [4, 5], "fc_0.w_1": [192, 5], "fc_0.b_0": [5]}),
    "fc of 3 dims": (lambda: L.fc(image(), 5, num_flatten_dims=-1, name="last"), (2, 3, 8, 5),
                     {"last.w_0": [8, 5], "last.b_0": [5]}),
    "embedding": (lambda: L.embedding(ids(), [6, 4]), (2, 4), {"embedding_0.w_0": [6, 4]}),
    "fluid.embedding": (lambda: fluid.embedding(ids(), [6, 4], padding_idx=-1), (2, 1, 4), {"embedding_0.w_0": [6, 4]}),
    "conv2d": (lambda: L.conv2d(image(), 6, 3, groups=3, padding="SAME", bias_attr=False), (2, 6, 8, 8),
               {"conv2d_0.w_0": [6, 1, 3, 3]}),
    "conv2d_transpose": (lambda: L.conv2d_transpose(image(), 4, output_size=16, stride=2), (2, 4, 16, 16),
                         {"conv2d_transpose_0.w_0": [3, 4, 2, 2], "conv2d_transpose_0.b_0": [4]}),
    "batch_norm": (lambda: L.batch_norm(image(), act="relu"), (2, 3, 8, 8),
                   {f"batch_norm_0.{n}": [3] for n in ("w_0", "b_0", "w_1", "w_2")}),
    "layer_norm": (lambda: L.layer_norm(image(), begin_norm_axis=2), (2, 3, 8, 8),
                   {"layer_norm_0.w_0": [64], "layer_norm_0.b_0": [64]}),
    "group_norm": (lambda: L.group_norm(image(), 3), (2, 3, 8, 8), {"group_norm_0.w_0": [3], "group_norm_0.b_0": [3]}),
    "instance_norm": (lambda: L.instance_norm(image()), (2, 3, 8, 8),
                      {"instance_norm_0.w_0": [3], "instance_norm_0.b_0": [3]}),
    "prelu": (lambda: L.prelu(image(), "element"), (2, 3, 8, 8), {"prelu_0.w_0": [1, 3, 8, 8]}),
    "bilinear_tensor_product": (lambda: L.bilinear_tensor_product(rows(), rows_again(), 3), (2, 3),
                                {"bilinear_tensor_product_0.w_0": [3, 4, 4], "bilinear_tensor_product_0.b_0": [1, 3]}),
    "hsigmoid": (lambda: L.hsigmoid(rows(), ids(), 6), (2, 1),
                 {"hierarchical_sigmoid_0.w_0": [5, 4], "hierarchical_sigmoid_0.b_0": [5, 1]}),
    "deformable_conv": (
        lambda: L.deformable_conv(image(), L.conv2d(image_again(), 18, 3, padding=1, bias_attr=False), None, 4, 3,
                                  padding=1, modulated=False), (2, 4, 8, 8),
        {"conv2d_0.w_0": [18, 3, 3, 3], "deformable_conv_0.w_0": [4, 3, 3, 3], "deformable_conv_0.b_0": [4]}),
    "img_conv_group": (
        lambda: fluid.nets.img_conv_group(image(), [4, 4], 2, conv_act="relu", conv_with_batchnorm=[True, False],
                                          conv_batchnorm_drop_rate=0.2, pool_stride=2), (2, 4, 4, 4),
        {"conv2d_0.w_0": [4, 3, 3, 3], "conv2d_0.b_0": [4],
         **{f"batch_norm_0.{n}": [4] for n in ("w_0", "b_0", "w_1", "w_2")},
         "conv2d_1.w_0": [4, 4, 3, 3], "conv2d_1.b_0": [4]}),
    "a loop": (lambda: looped(), (2, 4), {"fc_0.w_0": [4, 4], "fc_0.b_0": [4]}),
}  # fmt: skip


def rows_again():
    return L.scale(fluid.default_main_program().global_block().var("rows"), 2.0)


def image_again():
    return L.scale(fluid.default_main_program().global_block().var("image"), 0.1)


def looped():
    x = L.fc(rows(), 4)
    i, n = L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", 3)
    total = L.zeros_like(x)
    go = L.less_than(i, n)
    loop = L.While(go, maximum_iterations=4)
    with loop.block():
        L.assign(L.tanh(L.elementwise_add(total, x)), output=total)
        L.increment(i)
        L.less_than(i, n, cond=go)
    return total


@pytest.mark.parametrize("name", CASES)
def test_layer_with_parameters(script, name):
    build, shape, parameters = CASES[name]
    out = build()
    loss = L.mean(L.square(L.elementwise_sub(out, L.fill_constant([1], "float32", 0.5))))
    declared = script.default_main_program().all_parameters()
    assert {p.name: p.shape for p in declared} == parameters
    script.optimizer.SGD(0.005).minimize(loss)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    used = {v.name for v in script.default_main_program().list_vars() if getattr(v, "is_data", False)}
    feed = {n: FEED[n] for n in used}
    found, first = exe.run(feed=feed, fetch_list=[out, loss])
    for _ in range(6):
        (last,) = exe.run(feed=feed, fetch_list=[loss])
    assert found.shape == shape
    assert all(s in (-1, n) for s, n in zip(out.shape, shape, strict=True))
    assert last < first


def test_lstm_of_two_layers_is_that_of_numpy(script):
    x, h, c = (script.data(n, s, "float32") for n, s in (("x", [3, 2, 4]), ("h", [4, 2, 5]), ("c", [4, 2, 5])))
    outs = L.lstm(x, h, c, 3, 5, 2, is_bidirec=True, default_initializer=script.initializer.Normal(0, 0.3))
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    rng = np.random.RandomState(2)
    feed = {n: rng.randn(*s).astype("float32") for n, s in (("x", (3, 2, 4)), ("h", (4, 2, 5)), ("c", (4, 2, 5)))}
    (parameter,) = script.default_main_program().all_parameters()
    flat = np.asarray(script.global_scope().find_var(parameter.name).get_tensor())
    values = exe.run(feed=feed, fetch_list=list(outs))

    def take(*shape):
        nonlocal flat
        part, flat = flat[: np.prod(shape)], flat[np.prod(shape) :]
        return part.reshape(shape)

    weights = [(take(20, width), take(20, 5)) for width in (4, 4, 10, 10)]
    biases = [take(20) + take(20) for _ in range(4)]
    now, last = feed["x"], []
    for layer in range(2):
        sides = []
        for side in range(2):
            n = 2 * layer + side
            hidden, cell, steps = feed["h"][n], feed["c"][n], [None] * 3
            for t in (0, 1, 2) if side == 0 else (2, 1, 0):
                gates = now[t] @ weights[n][0].T + hidden @ weights[n][1].T + biases[n]
                i, f, g, o = np.split(gates, 4, 1)
                cell = expit(f) * cell + expit(i) * np.tanh(g)
                hidden = steps[t] = expit(o) * np.tanh(cell)
            sides.append(np.stack(steps))
            last.append((hidden, cell))
        now = np.concatenate(sides, 2)
    assert flat.size == 0
    for value, want in zip(values, [now, *(np.stack(v) for v in zip(*last, strict=True))], strict=True):
        # two layers of three steps, each of sums of up to 15 terms
        np.testing.assert_allclose(value, want, atol=90 * np.finfo("float32").eps)


def test_center_loss_moves_its_centres(script):
    x, y = script.data("x", [3, 2], "float32"), script.data("y", [3, 1], "int64")
    name = script.ParamAttr("centres", initializer=script.initializer.Constant(0.0))
    loss = L.center_loss(x, y, 4, 0.5, name)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    rows = np.array([[2, 4], [4, 8], [1, 1]], "float32")
    (found,) = exe.run(feed={"x": rows, "y": np.array([[1], [1], [3]])}, fetch_list=[loss])
    np.testing.assert_array_equal(found, [[10], [40], [1]])
    centres = np.asarray(script.global_scope().find_var("centres").get_tensor())
    # half of the sum of distances over one more than their number
    np.testing.assert_array_equal(centres, np.array([[0, 0], [1, 2], [0, 0], [0.25, 0.25]], "float32"))
