"""The programs of docs/science.md for flows and spins: solvers and gradients are right, and find what they seek."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_navier_stokes_follows_a_known_vortex_and_its_gradient_is_right():
    navier_stokes = load("navier_stokes")
    # a Taylor-Green vortex is a solution of the discrete equations too: rounding alone, of 3 steps of 4 transforms
    assert navier_stokes.vortex_error(n=8, steps=3) < 1e-13
    # differences: the square of the step 1e-5 times third derivatives, and rounding over the step
    assert navier_stokes.gradient_error(n=8, steps=3) < 1e-8


def test_ising_gradients_are_those_of_the_formulas():
    ising = load("ising")
    against_formula, against_differences = ising.gradient_errors(n=3)
    assert against_formula < 1e-14
    assert against_differences < 1e-8
    # eigenvectors of an 8 x 8 matrix with a gap of 1
    assert ising.magnetization_error(n=3) < 1e-13


@pytest.mark.slow
def test_navier_stokes_finds_the_viscosity_and_the_beginning():
    navier_stokes = load("navier_stokes")
    assert navier_stokes.find_viscosity() == pytest.approx(0.05, rel=0.02)
    first, last, error = navier_stokes.find_beginning()
    assert last < 1e-4 * first
    # viscosity has damped the small eddies below what the loss still sees
    assert error < 0.15


@pytest.mark.slow
def test_ising_descends_to_the_ground_state():
    energy, lost = load("ising").compare(n=8)
    assert abs(energy) < 1e-8
    assert lost < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["navier_stokes.py", "ising.py"])
def test_programs_run_as_a_user_runs_them(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "iteration   0" in done.stdout
