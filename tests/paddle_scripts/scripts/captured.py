"""A Layer whose forward depends on values, as a captured program: the same numbers as its eager run."""

import numpy as np
import paddle
from paddle.jit import to_static
from paddle.static import InputSpec


class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc = paddle.nn.Linear(3, 3)

    def forward(self, x):
        y = self.fc(x)
        if y.mean() > 0:
            y = y - 1
        else:
            y = y + 1
        steps = paddle.zeros([1], "int64")
        while y.abs().sum() < 50:
            y = y * 2
            steps += 1
        return y, steps


@to_static
def first_above(x, limit):
    for i in range(x.shape[0]):
        if x[i] > limit:
            return x[i] * 10
    return x[0] * 0


net = Net()
rng = np.random.RandomState(3)
net.fc.weight.set_value(rng.randn(3, 3).astype("float32"))
net.fc.bias.set_value(rng.randn(3).astype("float32"))
inputs = [paddle.to_tensor(rng.randn(2, 3).astype("float32") * k) for k in (1, 3, 10)]
eager = [net(x) for x in inputs]
net = to_static(net, input_spec=[InputSpec([None, 3], "float32")])
for x, (want, want_steps) in zip(inputs, eager):
    got, steps = net(x)
    assert int(steps) == int(want_steps)
    assert np.allclose(got.numpy(), want.numpy(), rtol=1e-5)
    print("steps", int(steps), "sum", f"{float(got.sum()):.3f}")
values = paddle.to_tensor(np.array([0.5, 1.5, 2.5], "float32"))
print([float(first_above(values, paddle.to_tensor(limit))) for limit in (0.0, 1.0, 2.0, 3.0)])
