"""Programs in the manner of the 1.7 single-node guide: each is built, trained and seen to have learned."""

import numpy as np
import pytest

HOUSE = np.random.RandomState(0).randn(64, 13).astype("float32")
PRICE = (HOUSE @ np.arange(13).reshape(13, 1) / 10 + 3).astype("float32")


def test_linear_regression(script):
    fluid = script
    x = fluid.layers.data(name="x", shape=[13], dtype="float32")
    y = fluid.layers.data(name="y", shape=[1], dtype="float32")
    predicted = fluid.layers.fc(input=x, size=1, act=None)
    loss = fluid.layers.mean(fluid.layers.square_error_cost(input=predicted, label=y))
    assert loss.shape == [1]
    test_program = fluid.default_main_program().clone(for_test=True)
    fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    first = exe.run(feed={"x": HOUSE, "y": PRICE}, fetch_list=[loss])[0]
    for _ in range(100):
        exe.run(fluid.default_main_program(), feed={"x": HOUSE, "y": PRICE}, fetch_list=[loss.name])
    (last,) = exe.run(test_program, feed={"x": HOUSE, "y": PRICE}, fetch_list=[loss])
    assert first.shape == (1,)
    assert first > 9
    assert last < 1e-3
    weight = np.array(fluid.global_scope().find_var("fc_0.w_0").get_tensor())
    np.testing.assert_allclose(weight, np.arange(13).reshape(13, 1) / 10, atol=0.02)
    (tensor,) = exe.run(test_program, feed={"x": HOUSE[:3], "y": PRICE[:3]}, fetch_list=[predicted], return_numpy=False)
    assert (tensor.shape(), tensor.lod()) == ([3, 1], [])
    exe.run(fluid.default_startup_program())  # starts over
    (again,) = exe.run(test_program, feed={"x": HOUSE, "y": PRICE}, fetch_list=[loss])
    assert again > 5


@pytest.mark.parametrize("name", ["fc_0.w_0"])
def test_names_are_those_of_the_first_layer(script, name):
    script.layers.fc(script.layers.data("x", [2]), 3)
    assert [p.name for p in script.default_main_program().all_parameters()] == [name, "fc_0.b_0"]
