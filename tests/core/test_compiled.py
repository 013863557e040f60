"""Programs that draw are compiled with options of their own; many shapes of one function are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyreme as pr
from polyreme.core.compiled import DRAWS, Alone, ProgramAlone, compiled
from polyreme.core.engine import backend
from polyreme.core.kernel import Kernel
from polyreme.eager import tape
from polyreme.nn import functional as F

LEVEL = {"xla_backend_optimization_level": 2}


@pytest.fixture
def with_options(monkeypatch):
    """The options that users get: the tests' XLA_FLAGS name the same one."""
    asked = []
    monkeypatch.setattr(backend, "options_alone", lambda table: asked.append(1) or LEVEL)
    return asked


def test_alone_and_inside_another_program_draw_the_same(with_options):
    program = ProgramAlone(lambda key: jax.random.bits(key, (5,)), DRAWS)
    key = jax.random.key(7)
    want = np.asarray(jax.random.bits(key, (5,)))
    for draw in (program, jax.jit(lambda k: program(k)), jax.jit(lambda k: program(key))):
        np.testing.assert_array_equal(np.asarray(draw(key)), want)
    assert jax.eval_shape(lambda k: program(k), key).shape == (5,)
    assert with_options == [1]


def test_options_are_for_the_calls_they_fit(with_options):
    kernel = Kernel(lambda x, y: x @ y, "product", alone=Alone({}, lambda x, y: len(y) > 2))
    for size, asked in ((2, []), (3, [1]), (2, [1])):
        x = np.ones((4, size))
        np.testing.assert_array_equal(kernel.forward(x, x.T), np.full((4, 4), size))
        assert with_options == asked
    for size, asked in ((2, [1]), (3, [1, 1])):
        x = jnp.ones((4, size))
        (gradient,) = kernel.backward((False, True))((x, x.T), (jnp.ones((4, 4)),))
        np.testing.assert_array_equal(gradient, np.full((size, 4), 4))
        assert with_options == asked
    x = jnp.ones((4, 3))
    kernel.grad_kernel((True, False), (True,)).forward(x, x.T, jnp.ones((4, 4)))
    assert with_options == [1, 1, 1]


@pytest.mark.usefixtures("with_options")
@pytest.mark.parametrize("captures", [False, True])
def test_dropout_and_its_gradient_leave_the_same_places_out(captures):
    def step(x):
        pr.seed(3)
        y = F.dropout(x, 0.5)
        return y, pr.grad([y], [x], create_graph=True)[0]

    x = pr.full([4, 9], 3.0)
    x.stop_gradient = False
    y, gradient = (pr.jit.to_static(step) if captures else step)(x)
    kept = y.numpy() != 0
    assert 0 < kept.sum() < kept.size
    np.testing.assert_array_equal(gradient.numpy(), np.where(kept, 2.0, 0.0))
    np.testing.assert_array_equal(y.numpy(), np.where(kept, 6.0, 0.0))


@pytest.mark.parametrize("draws", [False, True])
def test_many_shapes_are_told_once_and_what_a_capture_traces_is_not_counted(draws, monkeypatch, caplog):
    monkeypatch.setitem(compiled.__globals__, "_MANY_SHAPES", 3)
    kernel = Kernel(lambda x, y: 3 * x + y.sum(), "thrice", alone=DRAWS if draws else None)
    two = jnp.ones(2, jnp.float32)

    @pr.jit.to_static
    def captured(x):
        return tape.apply(kernel, (x._array, two), (None, None))

    for n in (8, 9, 10):
        captured(pr.ones([n]))
    for n in (4, 5, 4, 5):
        kernel.forward(jnp.ones(n, jnp.float32), two)
    assert not caplog.records
    for n in (6, 7):
        x = jnp.arange(n, dtype=jnp.float32)
        np.testing.assert_array_equal(kernel.forward(x, two), 3 * np.arange(n) + 2)
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.startswith("thrice was compiled for 3 sets of shapes, the last of them float32[6], float32[2]")
    for n in (4, 5, 6, 7):
        kernel.backward((True, False))((jnp.ones(n), two), (jnp.ones(n),))
    assert [r.getMessage().split()[0] for r in caplog.records] == ["thrice", "thrice_grad"]
