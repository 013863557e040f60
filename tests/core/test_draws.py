"""Random arrays drawn in blocks: jax.random's numbers, from one program a distribution."""

import jax
import numpy as np
import pytest

from polyreme.core import draws
from polyreme.core.devices import transfer
from tests.compilations import counted_compilations

KEY = np.array([7, 11], np.uint32)
SAMPLERS = {
    "normal": (draws.normal, jax.random.normal, ()),
    "uniform": (draws.uniform, jax.random.uniform, (-0.25, 0.5)),
    "truncated_normal": (draws.truncated_normal, jax.random.truncated_normal, (-1.5, 2.0)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SAMPLERS)
def test_blocks_hold_the_numbers_of_jax_random(name):
    drawn, sampler, bounds = SAMPLERS[name]
    key = jax.random.wrap_key_data(KEY)
    for shape in ((), (0, 3), (5, 7), (3, 41_000)):  # the last one lies in two blocks
        want = (
            sampler(key, *bounds, shape, np.float32)
            if name == "truncated_normal"
            else sampler(key, shape, np.float32, *bounds)
        )
        np.testing.assert_array_equal(drawn(KEY, shape, *bounds), np.asarray(want))


def test_another_shape_compiles_nothing():
    draws.normal(KEY, (3,))
    with counted_compilations() as programs:
        draws.normal(KEY, (4, 5))
        transfer.from_host(np.zeros((4, 5), np.float32))
    assert not programs


def test_a_traced_key_gives_traced_numbers():
    traced = jax.jit(lambda key: draws.uniform(key, (6,), 0.0, 2.0))(KEY)
    np.testing.assert_array_equal(np.asarray(traced), draws.uniform(KEY, (6,), 0.0, 2.0))
