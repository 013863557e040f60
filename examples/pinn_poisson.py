"""Solve Poisson's equation in a square with a neural network: its Laplacian in one pass forward.

    python examples/pinn_poisson.py

    laplacian(u) = f in the unit square, u = 0 on its border;  f = -2 pi^2 sin(pi x) sin(pi y)

so that u = sin(pi x) sin(pi y). The network's output times x (1 - x) y (1 - y) is 0 on the border whatever the network
says; what is left to learn is the mean square of the residual laplacian(u) - f over points of the square
(arXiv:1711.10561). `laplacian(u, points)` carries value, two first derivatives and the Laplacian through the network
together; backward() then goes through that computation to the weights. First Adam takes captured steps on random
points, then L-BFGS comes to the bottom on fixed ones.
"""

import argparse
import math

import polyreme as paddle
from polyreme.incubate.autograd import laplacian


def network(width, depth):
    """Linear layers and tanh: [points, 2] -> [points, 1]."""
    layers = [paddle.nn.Linear(2, width), paddle.nn.Tanh()]
    for _ in range(depth - 1):
        layers += [paddle.nn.Linear(width, width), paddle.nn.Tanh()]
    return paddle.nn.Sequential(*layers, paddle.nn.Linear(width, 1))


class Poisson:
    """The problem, and a network that solves it."""

    def __init__(self, width=32, depth=3, points=512):
        self.net, self.points = network(width, depth), points

    def u(self, xy):
        """The solution at [points, 2] -> [points, 1]."""
        x, y = xy[:, :1], xy[:, 1:]
        return x * (1 - x) * y * (1 - y) * self.net(xy)

    def loss(self, xy):
        """Mean square of the residual, over that of the right side."""
        _, lap = laplacian(self.u, xy)
        pi = math.pi
        f = -2 * pi**2 * paddle.sin(pi * xy[:, :1]) * paddle.sin(pi * xy[:, 1:])
        return (lap - f).square().mean() / pi**4

    def train_adam(self, steps, rate=5e-3):
        """Steps on points drawn anew; -> the last loss."""
        schedule = paddle.optimizer.lr.CosineAnnealingDecay(rate, steps)
        adam = paddle.optimizer.Adam(schedule, parameters=self.net.parameters())

        @paddle.jit.to_static
        def step():
            loss = self.loss(paddle.rand([self.points, 2]))
            loss.backward()
            adam.step()
            adam.clear_grad()
            return loss

        for _ in range(steps):
            loss = step()
            schedule.step()
        return loss.item()

    def train_lbfgs(self, iterations):
        """Iterations on the same points; -> the loss after them."""
        xy = paddle.rand([2 * self.points, 2])
        lbfgs = paddle.optimizer.LBFGS(
            max_iter=iterations, line_search_fn="strong_wolfe", parameters=self.net.parameters()
        )

        @paddle.jit.to_static
        def closure():
            lbfgs.clear_grad()
            loss = self.loss(xy)
            loss.backward()
            return loss

        lbfgs.step(closure)
        return closure().item()

    def error(self, n=33):
        """The norm of the error over that of the solution, on a grid."""
        line = paddle.linspace(0, 1, n)
        x, y = paddle.meshgrid(line, line)
        exact = paddle.sin(math.pi * x) * paddle.sin(math.pi * y)
        with paddle.no_grad():
            found = self.u(paddle.stack([x.flatten(), y.flatten()], axis=1)).reshape([n, n])
        return ((found - exact).norm() / exact.norm()).item()


def main():
    """Train, then compare with the exact solution."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="of Adam")
    parser.add_argument("--iterations", type=int, default=200, help="of L-BFGS")
    arguments = parser.parse_args()
    paddle.seed(1)
    problem = Poisson()
    print(f"error before          {problem.error():.1e}")
    print(f"after Adam:   loss {problem.train_adam(arguments.steps):.1e}, error {problem.error():.1e}")
    print(f"after L-BFGS: loss {problem.train_lbfgs(arguments.iterations):.1e}, error {problem.error():.1e}")


if __name__ == "__main__":
    main()
