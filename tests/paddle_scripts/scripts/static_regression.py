"""Linear regression as a static program: data, a program of its own, an optimizer, an Executor, a test clone."""

import numpy as np
import paddle
import paddle.static as static

paddle.enable_static()
main, startup = static.Program(), static.Program()
with static.program_guard(main, startup):
    x = static.data("x", [None, 4], "float32")
    y = static.data("y", [None, 1], "float32")
    hidden = static.nn.fc(
        x,
        6,
        activation="tanh",
        weight_attr=paddle.ParamAttr(initializer=paddle.nn.initializer.Assign(np.linspace(-1, 1, 24).reshape(4, 6))),
    )
    guess = static.nn.fc(
        hidden,
        1,
        weight_attr=paddle.ParamAttr(initializer=paddle.nn.initializer.Assign(np.linspace(-0.5, 0.7, 6).reshape(6, 1))),
    )
    loss = paddle.mean(paddle.nn.functional.square_error_cost(guess, y))
    test = main.clone(for_test=True)
    paddle.optimizer.SGD(learning_rate=0.1).minimize(loss)

executor = static.Executor(paddle.CPUPlace())
executor.run(startup)
rng = np.random.RandomState(5)
for step in range(10):
    xs = rng.randn(8 if step % 2 else 12, 4).astype("float32")
    ys = xs.sum(1, keepdims=True).astype("float32")
    (value,) = executor.run(main, feed={"x": xs, "y": ys}, fetch_list=[loss])
    if step % 3 == 0:
        print("step", step, f"{float(np.ravel(value)[0]):.4f}")
value, predicted = executor.run(test, feed={"x": xs, "y": ys}, fetch_list=[loss, guess])
print("tested", f"{float(np.ravel(value)[0]):.4f}", predicted.shape)
paddle.disable_static()
print("dynamic again", paddle.to_tensor([1.0, 2.0]).sum().item())
