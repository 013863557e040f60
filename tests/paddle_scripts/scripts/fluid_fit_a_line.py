"""A linear model by the first guide of Fluid: data, fc, a reader, DataFeeder, Executor, test program, saved model."""

import tempfile

import numpy as np
import paddle.fluid as fluid
import paddle.fluid.layers as layers
from paddle.fluid.initializer import ConstantInitializer

rng = np.random.RandomState(11)
weights = np.array([1.0, -2.0, 0.5], "float32")


def reader():
    for _ in range(20):
        x = rng.randn(3).astype("float32")
        yield x, np.array([x @ weights + 0.25], "float32")


main, startup = fluid.Program(), fluid.Program()
with fluid.program_guard(main, startup):
    x = fluid.data(name="x", shape=[None, 3], dtype="float32")
    y = fluid.data(name="y", shape=[None, 1], dtype="float32")
    guess = layers.fc(
        input=x,
        size=1,
        param_attr=fluid.ParamAttr(name="w", initializer=ConstantInitializer(0.1)),
        bias_attr=fluid.ParamAttr(name="b"),
    )
    cost = layers.mean(layers.square_error_cost(input=guess, label=y))
    test = main.clone(for_test=True)
    fluid.optimizer.SGD(learning_rate=0.1).minimize(cost)

place = fluid.CPUPlace()
executor = fluid.Executor(place)
executor.run(startup)
feeder = fluid.DataFeeder(feed_list=[x, y], place=place)
w, b = np.full(3, 0.1), 0.0  # the same by NumPy
for epoch in range(5):
    samples = list(reader())
    for start in (0, 10):
        batch = samples[start : start + 10]
        (loss,) = executor.run(main, feed=feeder.feed(batch), fetch_list=[cost])
        xs, ys = (np.stack(part).astype("float64") for part in zip(*batch))
        error = xs @ w + b - ys[:, 0]
        assert np.isclose(loss.item(), (error**2).mean(), rtol=1e-4)
        w, b = w - 0.2 * xs.T @ error / 10, b - 0.2 * error.mean()
    print("epoch", epoch, f"{loss.item():.4f}")
(tested,) = executor.run(test, feed=feeder.feed(samples), fetch_list=[cost.name])
print("tested", f"{tested.item():.4f}")
learned = np.array(fluid.global_scope().find_var("w").get_tensor()).ravel()
assert np.allclose(learned, w, rtol=1e-4)
print("w", *(f"{value:.3f}" for value in learned))
with tempfile.TemporaryDirectory() as folder:
    fluid.io.save_inference_model(folder, ["x"], [guess], executor, main_program=test)
    program, names, targets = fluid.io.load_inference_model(folder, executor)
    (said,) = executor.run(program, feed={names[0]: np.eye(3, dtype="float32")}, fetch_list=targets)
print("loaded", names, *(f"{value:.3f}" for value in said.ravel()))
