"""Time one gradient step on derivatives of a network, as solvers of differential equations take: several frameworks.

    python benchmarks/pinn.py --python-torch ~/torch/bin/python --save pinn

A 2-64x4-1 network with tanh at 1024 points, float32; the loss is the mean square of a derivative of the network by its
inputs: the Laplacian, or the third or fourth derivative by the first input. A step is the loss, its gradient by all
parameters and SGD. All sides start at the same weights and must give the same first loss.

Sides: polyreme is laplacian or derivatives in a captured step, polyreme-eager the same uncaptured, polyreme-grad nested
paddle.grad(create_graph=True) captured; jax-reverse is jax.grad nested in jax.jit; torch is nested autograd.grad,
torch-compile torch.func's nested grad and vmap under torch.compile.
"""

import argparse
import itertools
from collections.abc import Callable

import numpy as np
import sides as s

SIDES = ("polyreme", "polyreme-eager", "polyreme-grad", "jax-reverse", "torch", "torch-compile")
CASES = ("Laplacian", "third", "fourth")
ORDER = {"third": 3, "fourth": 4}
SIZES = (2, 64, 64, 64, 64, 1)
POINTS = 1024
LEARNING_RATE = 1e-4
# a mean of squares below 10; each a sum of 64 products in each of 4 layers, differentiated up to four times
TOLERANCE = 2.0**-23 * 64 * 16


def weights():
    """[(weight [in, out], bias [out]), ...] as float32."""
    rng = np.random.default_rng(0)
    shapes = itertools.pairwise(SIZES)
    made = [(rng.uniform(-1.3, 1.3, shape) / np.sqrt(shape[0]), 0.1 * rng.normal(size=shape[1])) for shape in shapes]
    return [(weight.astype("float32"), bias.astype("float32")) for weight, bias in made]


def points():
    """[1024, 2] float32 in the unit square."""
    return np.random.default_rng(1).random((POINTS, 2)).astype("float32")


def polyreme_step(side: str, case: str) -> Callable[[], object]:
    """-> one step of polyreme."""
    import polyreme as paddle
    from polyreme.incubate.autograd import derivatives, laplacian

    layers = []
    for weight, bias in weights():
        layers += [paddle.nn.Linear(*weight.shape), paddle.nn.Tanh()]
        layers[-2].weight.set_value(weight)
        layers[-2].bias.set_value(bias)
    network = paddle.nn.Sequential(*layers[:-1])
    optimizer = paddle.optimizer.SGD(LEARNING_RATE, parameters=network.parameters())
    x, first = paddle.to_tensor(points()), paddle.to_tensor(np.tile(np.float32([1, 0]), (POINTS, 1)))

    def taylor(x):
        return laplacian(network, x)[1] if case == "Laplacian" else derivatives(network, x, first, ORDER[case])[-1]

    def nested(x):
        x = x.detach()
        x.stop_gradient = False
        if case == "Laplacian":
            (g,) = paddle.grad(network(x).sum(), x, create_graph=True)
            return sum(paddle.grad(g[:, i].sum(), x, create_graph=True)[0][:, i : i + 1] for i in range(2))
        value = network(x)
        for _ in range(ORDER[case]):
            value = paddle.grad(value.sum(), x, create_graph=True)[0][:, :1]
        return value

    def step(x):
        loss = (nested(x) if side == "polyreme-grad" else taylor(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    run = step if side == "polyreme-eager" else paddle.jit.to_static(step)
    return lambda: run(x)


def jax_step(case: str) -> Callable[[], object]:
    """-> one step of plain JAX, reverse mode over reverse mode."""
    import jax
    import jax.numpy as jnp

    def network(params, x):
        for weight, bias in params[:-1]:
            x = jnp.tanh(x @ weight + bias)
        return (x @ params[-1][0] + params[-1][1])[:, 0]

    def slope(fn, i):
        return lambda x: jax.grad(lambda x: fn(x).sum())(x)[:, i]

    def residual(params, x):
        def u(x):
            return network(params, x)

        if case == "Laplacian":
            return slope(slope(u, 0), 0)(x) + slope(slope(u, 1), 1)(x)
        for _ in range(ORDER[case]):
            u = slope(u, 0)
        return u(x)

    @jax.jit
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(residual(p, x) ** 2))(params)
        return loss, jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)

    state = [[(jnp.asarray(w), jnp.asarray(b)) for w, b in weights()], jnp.asarray(points())]

    def run():
        loss, state[0] = step(*state)
        return loss

    return run


def torch_step(side: str, case: str) -> Callable[[], object]:
    """-> one step of PyTorch."""
    import torch

    params = [torch.tensor(a, requires_grad=True) for pair in weights() for a in pair]
    data = torch.tensor(points())

    def network(params, x):
        for i in range(0, len(params) - 2, 2):
            x = torch.tanh(x @ params[i] + params[i + 1])
        return x @ params[-2] + params[-1]

    def nested(params):
        x = data.clone().requires_grad_()
        if case == "Laplacian":
            (g,) = torch.autograd.grad(network(params, x).sum(), x, create_graph=True)
            return sum(torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))
        value = network(params, x)
        for _ in range(ORDER[case]):
            value = torch.autograd.grad(value.sum(), x, create_graph=True)[0][:, :1]
        return value

    def functional(params):
        from torch.func import grad, hessian, vmap

        def u(x):
            return network(params, x)[0]

        if case == "Laplacian":
            return vmap(lambda x: hessian(u)(x).diagonal().sum())(data)

        def slope(fn):
            return lambda x: grad(fn)(x)[0]

        fn = u
        for _ in range(ORDER[case]):
            fn = slope(fn)
        return vmap(fn)(data)

    def loss_of(*params):
        return (functional(params) if side == "torch-compile" else nested(params)).square().mean()

    if side == "torch-compile":
        loss_of = torch.compile(loss_of)

    def step():
        loss = loss_of(*params)
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                if g is not None:
                    p -= LEARNING_RATE * g
        return loss.detach()

    return step


def build(side: str) -> dict[str, Callable[[], object]]:
    """-> a step for each case; the framework is imported here, in the side's own process."""
    if side.startswith("torch"):
        return {case: torch_step(side, case) for case in CASES}
    if side == "jax-reverse":
        return {case: jax_step(case) for case in CASES}
    return {case: polyreme_step(side, case) for case in CASES}


def ratios(sides: list[s.Side]) -> str:
    """How many times the first side's median each other side's is, a line for each case."""
    lines = []
    for case in CASES:
        others = ", ".join(f"{o.name} {o.median(case) / sides[0].median(case):.1f}" for o in sides[1:])
        lines.append(f"{case}: time to that of {sides[0].name}: {others}")
    return "\n".join(lines)


def main() -> None:
    """Reads the command line, then measures or works."""
    parser: argparse.ArgumentParser = s.parser(__doc__, SIDES, rounds=15)
    parser.add_argument("--steps", type=int, default=20, help="steps a side takes in each round")
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    text, sides = s.table_of_cases(__file__, options, CASES, calls=options.steps, tolerance=TOLERANCE)
    print(text)
    print(ratios(sides))
    if options.save:
        what = (
            f"2-64x4-1, tanh, {POINTS} points, float32: mean square of a derivative, its gradient and SGD. "
            f"{options.rounds} rounds of {options.steps} steps."
        )
        print(s.save(options.save, "Derivatives of a network", what, f"{text}\n\n{ratios(sides)}", sides))


if __name__ == "__main__":
    main()
