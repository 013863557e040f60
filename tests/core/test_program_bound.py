"""Compiled programs of eager ops are let go of by bytes and by mappings, and calls go on with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyreme import flags
from polyreme.core import compiled as module
from polyreme.core.compiled import DRAWS
from polyreme.core.engine import program_bound
from polyreme.core.engine.program_bound import PROGRAM_BYTES, ProgramBound
from polyreme.core.kernel import Kernel


@pytest.fixture
def bound(monkeypatch):
    """One of 8 programs, in which kernels made from now on count theirs."""
    bound = ProgramBound(8 * PROGRAM_BYTES, 100)
    monkeypatch.setattr(module, "bound", bound)
    return bound


def call(kernel, sizes):
    for n in sizes:
        x = jnp.arange(n, dtype=jnp.float32)
        np.testing.assert_array_equal(kernel.forward(x), 3 * np.arange(n))
        np.testing.assert_array_equal(kernel.backward((True,))((x,), (x,))[0], 3 * np.arange(n))


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("alone", [None, DRAWS])
def test_programs_stay_below_their_bytes_and_one_warning_names_the_functions(bound, alone, caplog):
    kernel = Kernel(lambda x: 3 * x, "thrice", alone=alone)
    for rounds in range(2):
        for n in range(1, 13):
            call(kernel, [n])
            assert bound.num_programs <= 8, rounds
    if alone is None:
        sizes = kernel.forward._cache_size(), kernel.backward((True,))._cache_size()
        assert 1 <= sum(sizes) <= 8
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "polyreme.core"]
    assert warning.startswith("let go of compiled programs, as they take 4 MB: thrice (")
    assert "POLYREME_PROGRAM_BYTES" in warning


def test_programs_in_use_stay_and_functions_that_are_gone_do_not_count(bound):
    few, gone = Kernel(lambda x: 3 * x, "few"), Kernel(lambda x: 3 * x, "gone")
    few.forward(jnp.ones(1))
    for n in range(1, 7):
        gone.forward(jnp.ones(n))
    del gone
    many = Kernel(lambda x: 3 * x, "many")
    for n in range(1, 8):
        many.forward(jnp.ones(n))
    assert bound.num_programs == 8
    assert (few.forward._cache_size(), many.forward._cache_size()) == (1, 7)
    many.forward(jnp.ones(8))
    assert (few.forward._cache_size(), many.forward._cache_size()) == (1, 0)
    assert many.forward(jnp.ones(8)).shape == (8,)


def test_too_many_mappings_let_go_of_eager_programs_first_and_of_all_after(bound, monkeypatch, caplog):
    kernel = Kernel(lambda x: 3 * x, "thrice")
    call(kernel, [1, 2])
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    answers = iter([90, 101, 100, 101, 101, 20])
    monkeypatch.setattr(program_bound, "num_mappings", lambda: next(answers))

    def compile_programs():
        for _ in range(64):
            bound._count_compilation(program_bound._COMPILED, 0.1)
            bound._count_compilation("/jax/another", 0.1)

    compile_programs()
    assert (bound.num_programs, cleared) == (4, [])
    compile_programs()
    assert (bound.num_programs, cleared) == (2, [])
    compile_programs()
    assert (bound.num_programs, cleared) == (0, [1])
    assert not list(answers)
    first, second = [r.getMessage() for r in caplog.records if r.name == "polyreme.core"]
    assert "as this process has 101 memory mappings and the system allows 133: thrice" in first
    assert "captured functions too, as this process has 101" in second
    call(kernel, [1, 2])


def test_mappings_of_others_than_programs_do_not_clear_again_and_again(bound, monkeypatch):
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    monkeypatch.setattr(program_bound, "num_mappings", lambda: mappings)
    for mappings, times in ((113, 1), (122, 1), (124, 2), (127, 2), (140, 3)):
        bound._look()
        assert len(cleared) == times, mappings


def test_the_bound_of_this_process_is_that_of_the_machine_or_of_the_environment(monkeypatch):
    assert program_bound.bound.max_programs <= (3 << 30) // PROGRAM_BYTES
    monkeypatch.setenv("POLYREME_PROGRAM_BYTES", "1000000")
    assert flags.program_bytes() == program_bound._max_bytes() == 1_000_000
    assert program_bound.num_mappings() < (program_bound._max_mappings() or 1 << 40)
