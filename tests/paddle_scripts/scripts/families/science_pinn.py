"""A network that obeys an equation: Burgers' equation by derivatives of derivatives, Adam, then L-BFGS."""

import itertools

import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.framework import core
from paddle.nn import initializer

VISCOSITY = 0.05


class MLP(nn.Layer):
    def __init__(self, input_keys, output_keys, num_layers, hidden_size, activation="tanh", weight_norm=False):
        super().__init__()
        self.input_keys, self.output_keys = input_keys, output_keys
        sizes = [len(input_keys)] + [hidden_size] * num_layers
        linears = [nn.Linear(wide, narrow) for wide, narrow in itertools.pairwise(sizes)]
        if weight_norm:
            linears = [nn.utils.weight_norm(linear, dim=1) for linear in linears]
        self.linears = nn.LayerList(linears)
        self.act = getattr(paddle, activation)
        self.last_fc = nn.Linear(hidden_size, len(output_keys))

    def forward(self, x):
        y = paddle.concat([x[key] for key in self.input_keys], axis=-1)
        for linear in self.linears:
            y = self.act(linear(y))
        y = self.last_fc(y)
        return dict(zip(self.output_keys, paddle.split(y, len(self.output_keys), axis=-1)))


class Derivatives:
    """First derivatives, each computed once; derivatives of them are asked for in the same way."""

    def __init__(self):
        self._cache = {}

    def __call__(self, y, x):
        key = (id(y), id(x))
        if key not in self._cache:
            # what is kept stays alive, so that no other Tensor gets its id
            self._cache[key] = (paddle.grad(y, x, create_graph=True, retain_graph=True)[0], y, x)
        return self._cache[key][0]


class Burgers:
    def __call__(self, out, derivative):
        u, x, t = out["u"], out["x"], out["t"]
        u_x = derivative(u, x)
        return derivative(u, t) + u * u_x - VISCOSITY * derivative(u_x, x)


def to_tensors(**columns):
    return {key: paddle.to_tensor(value, stop_gradient=False) for key, value in columns.items()}


core.set_prim_eager_enabled(False)
rng = np.random.RandomState(9)
model = MLP(("x", "t"), ("u",), num_layers=2, hidden_size=8)
for parameter in model.parameters():
    if parameter.ndim > 1:
        parameter.set_value(rng.normal(0, 0.6, parameter.shape).astype("float32"))
    else:
        initializer.Constant(0.0)(parameter)
inside = to_tensors(x=rng.uniform(-1, 1, [16, 1]).astype("float32"), t=rng.uniform(0, 1, [16, 1]).astype("float32"))
line = np.linspace(-1, 1, 16, dtype="float32").reshape(-1, 1)
start = to_tensors(x=line, t=np.zeros_like(line))
wall = to_tensors(x=np.sign(line), t=np.abs(line))
equation = Burgers()


def compute_loss():
    derivative = Derivatives()
    residual = equation({**model(inside), **inside}, derivative)
    losses = {
        "equation": nn.functional.mse_loss(residual, paddle.zeros_like(residual), "mean"),
        "start": nn.functional.mse_loss(model(start)["u"], -paddle.sin(np.pi * start["x"])),
        "wall": paddle.square(model(wall)["u"]).mean(),
    }
    return losses, losses["equation"] + 2.0 * losses["start"] + losses["wall"]


print("parameters", all(isinstance(p, EagerParamBase) for p in model.parameters()), model.last_fc.weight.shape)
schedule = paddle.optimizer.lr.ExponentialDecay(0.02, gamma=0.9)
optimizer = paddle.optimizer.Adam(schedule, parameters=model.parameters())
for step in range(5):
    losses, total = compute_loss()
    total.backward()
    optimizer.step()
    optimizer.clear_grad()
    schedule.step()
    print(f"adam {step} total {total.item():.4f}", *(f"{key} {value.item():.4f}" for key, value in losses.items()))

lbfgs = paddle.optimizer.LBFGS(
    learning_rate=1.0, max_iter=3, history_size=5, line_search_fn="strong_wolfe", parameters=model.parameters()
)


def closure():
    total = compute_loss()[1]
    lbfgs.clear_grad()
    total.backward()
    return total


for step in range(2):
    before = lbfgs.step(closure)
    print(f"lbfgs {step} before {float(before):.3f} after {compute_loss()[1].item():.3f}")

out = {**model(inside), **inside}
derivative = Derivatives()
u_xxx = derivative(derivative(derivative(out["u"], out["x"]), out["x"]), out["x"])
print("third derivative", u_xxx.shape, f"{u_xxx.abs().mean().item():.2f}")
point = paddle.to_tensor([0.3, 0.2], stop_gradient=False)


def value(point):
    return model(dict(zip(model.input_keys, paddle.split(point, 2))))["u"].sum()


hessian = paddle.autograd.hessian(value(point), point)
matrix = hessian[:].numpy()
print("hessian", list(hessian.shape), bool(np.allclose(matrix, matrix.T)), f"{np.trace(matrix):.2f}")
