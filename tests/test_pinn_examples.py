"""The networks of docs/science.md that solve equations: residuals are right, a short training finds the solution."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_poisson_is_solved():
    paddle.seed(1)
    problem = load("pinn_poisson").Poisson(width=16, depth=2, points=64)
    before = problem.error()
    problem.train_adam(200)
    first = problem.error()
    problem.train_lbfgs(30)
    assert first < 0.4 * before
    assert problem.error() < first / 2


def test_burgers_residuals_vanish_for_a_travelling_wave():
    burgers = load("pinn_burgers")
    nu = 0.5
    problem = burgers.Burgers(nu, width=4, depth=1)
    z = paddle.to_tensor(np.random.default_rng(0).uniform(-1, 1, (5, 2)), dtype="float64")
    r, r_x = problem.residuals(z, lambda z: 1 - paddle.tanh((z[:, :1] - z[:, 1:]) / (2 * nu)))
    # differences of some ten terms below 8
    np.testing.assert_allclose(r.numpy(), np.zeros((5, 1)), rtol=0, atol=64 * 8 * 2.0**-52)
    np.testing.assert_allclose(r_x.numpy(), np.zeros((5, 1)), rtol=0, atol=64 * 8 * 2.0**-52)


def test_the_exact_solution_of_burgers():
    exact, nu, h = load("pinn_burgers").exact, 0.1, 1e-3
    x, t = np.meshgrid(np.linspace(-0.9, 0.9, 7), np.array([0.2, 0.7]))
    np.testing.assert_allclose(exact(x, 0 * t + 1e-9, nu), -np.sin(math.pi * x), rtol=0, atol=1e-7)
    u_t = (exact(x, t + h, nu) - exact(x, t - h, nu)) / (2 * h)
    u_x = (exact(x + h, t, nu) - exact(x - h, t, nu)) / (2 * h)
    u_xx = (exact(x + h, t, nu) - 2 * exact(x, t, nu) + exact(x - h, t, nu)) / h**2
    # h^2 times third and fourth derivatives, of size pi^4 / nu at the steepest
    np.testing.assert_allclose(u_t + exact(x, t, nu) * u_x - nu * u_xx, 0 * x, rtol=0, atol=h**2 * math.pi**4 / nu)


@pytest.mark.slow
def test_burgers_is_learnt():
    paddle.seed(1)
    problem = load("pinn_burgers").Burgers(0.1, width=16, depth=2, points=64)
    before = problem.error()
    problem.train_adam(200)
    assert problem.error() < 0.4 * before


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("pinn_poisson.py", 1e-3), ("pinn_burgers.py", 1e-2)])
def test_programs_run_as_a_user_runs_them(name, most):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < most
