"""A PyLayer with a backward of its own, hooks, paddle.grad and double differentiation."""

import numpy as np
import paddle
from paddle.autograd import PyLayer


class Clipped(PyLayer):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return paddle.clip(x, -limit, limit)

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensor()
        inside = paddle.cast(paddle.abs(x) < ctx.limit, "float32")
        return upstream * (inside + 0.1 * (1 - inside))


x = paddle.to_tensor(np.array([-2.0, -0.5, 0.5, 2.0], "float32"), stop_gradient=False)
seen = []
y = Clipped.apply(x * 1.0, 1.0)
y.register_hook(lambda g: seen.append(g.numpy().tolist()))
(y * y).sum().backward()
print("gradient", x.grad.numpy().round(4).tolist())
print("hook", seen)
x.clear_gradient()
(first,) = paddle.grad((x**3).sum(), [x], create_graph=True)
(second,) = paddle.grad(first.sum(), [x])
print("first", first.numpy().tolist(), "second", second.numpy().tolist())
with paddle.no_grad():
    print("stopped", (x * 2).stop_gradient)
