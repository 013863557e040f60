"""Solve Burgers' equation with a neural network whose loss holds third derivatives.

    python examples/pinn_burgers.py

    u_t + u u_x = nu u_xx for x in [-1, 1], t in [0, 1];  u(x, 0) = -sin(pi x),  u(-1, t) = u(1, t) = 0

The wave steepens in the middle to a width of about nu. u = -sin(pi x) + t (1 - x^2) network(x, t) meets the beginning
and the ends whatever the network says. The loss is the mean square of the residual r = u_t + u u_x - nu u_xx, and of
its derivative by x, which flattens r between the points (gradient-enhanced, arXiv:2111.02801):

    r_x = u_tx + u_x^2 + u u_xx - nu u_xxx

`derivatives(u, z, along_x, order=3)` gives u, u_x, u_xx, u_xxx in one pass; u_t and u_tx are the derivative by t of
(u, u_x). The result is compared with the exact solution (E. Hopf, Comm. Pure Appl. Math. 3, 1950; J. D. Cole, Quart.
Appl. Math. 9, 1951), an integral that Gauss-Hermite quadrature gives to rounding.
"""

import argparse
import math

import numpy as np

import polyreme as paddle
from polyreme.incubate.autograd import derivatives


def exact(x, t, nu, nodes=200):
    """u at ndarrays x and t > 0 of one shape."""
    at, weights = np.polynomial.hermite.hermgauss(nodes)
    shifted = math.pi * (x[..., None] - 2 * np.sqrt(nu * t)[..., None] * at)
    density = weights * np.exp(-np.cos(shifted) / (2 * math.pi * nu))
    return -(np.sin(shifted) * density).sum(-1) / density.sum(-1)


class Burgers:
    """The equation, and a network that solves it. enhancement: how much the residual's slope counts."""

    def __init__(self, nu=0.05, width=32, depth=3, points=512, enhancement=0.01):
        self.nu, self.points, self.enhancement = nu, points, enhancement
        layers = [paddle.nn.Linear(2, width), paddle.nn.Tanh()]
        for _ in range(depth - 1):
            layers += [paddle.nn.Linear(width, width), paddle.nn.Tanh()]
        self.net = paddle.nn.Sequential(*layers, paddle.nn.Linear(width, 1))

    def u(self, z):
        """The solution at points (x, t): [points, 2] -> [points, 1]."""
        x, t = z[:, :1], z[:, 1:]
        return -paddle.sin(math.pi * x) + t * (1 - x * x) * self.net(z)

    def residuals(self, z, u=None):
        """(r, r_x) at z."""
        u = self.u if u is None else u
        along_x = paddle.to_tensor([1.0, 0.0], dtype=z.dtype).expand_as(z)
        along_t = paddle.to_tensor([0.0, 1.0], dtype=z.dtype).expand_as(z)
        value, u_x, u_xx, u_xxx = derivatives(u, z, along_x, order=3)
        _, (u_t, u_tx) = derivatives(lambda z: derivatives(u, z, along_x, order=1), z, along_t, order=1)
        r = u_t + value * u_x - self.nu * u_xx
        return r, u_tx + u_x * u_x + value * u_xx - self.nu * u_xxx

    def loss(self, z):
        """Mean square of the residual and, weighted, of its slope."""
        r, r_x = self.residuals(z)
        return r.square().mean() + self.enhancement * r_x.square().mean()

    def train_adam(self, steps, rate=5e-3):
        """Captured steps on points drawn anew; -> the last loss."""
        schedule = paddle.optimizer.lr.CosineAnnealingDecay(rate, steps)
        adam = paddle.optimizer.Adam(schedule, parameters=self.net.parameters())

        @paddle.jit.to_static
        def step():
            x, t = paddle.uniform([self.points, 1], min=-1.0, max=1.0), paddle.rand([self.points, 1])
            loss = self.loss(paddle.concat([x, t], axis=1))
            loss.backward()
            adam.step()
            adam.clear_grad()
            return loss

        for _ in range(steps):
            loss = step()
            schedule.step()
        return loss.item()

    def error(self, n=41):
        """The norm of the error over that of the solution, on a grid of x and t > 0."""
        x, t = np.meshgrid(np.linspace(-1, 1, n), np.linspace(0, 1, n)[1:])
        want = exact(x, t, self.nu)
        z = paddle.to_tensor(np.stack([x.ravel(), t.ravel()], 1), dtype="float32")
        with paddle.no_grad():
            found = self.u(z).numpy().reshape(x.shape)
        return np.linalg.norm(found - want) / np.linalg.norm(want)


def main():
    """Train, then compare with the exact solution."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--nu", type=float, default=0.05)
    arguments = parser.parse_args()
    paddle.seed(1)
    problem = Burgers(arguments.nu)
    print(f"error before      {problem.error():.1e}")
    print(f"after Adam: loss {problem.train_adam(arguments.steps):.1e}, error {problem.error():.1e}")


if __name__ == "__main__":
    main()
