"""Linear maps whose exchange is a ring, against whole products on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from polyreme.core.engine import backend  # noqa: F401  # configures jax: eight CPU devices, x64
from polyreme.errors import ShapeError
from polyreme.kernels import gather_linears, linear_plain, scatter_linear
from polyreme.kernels.ring_linear import RingSplit

from .tolerance import assert_near

MESH = Mesh(np.array(jax.devices()[:8]).reshape(1, 2, 4), ("dp", "sep", "mp"))
SPLIT = RingSplit(MESH, (), ("sep",), "mp")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def with_gradients(function, *args):
    """What function gives, and the gradients of its squares."""

    def loss(*args):
        out = function(*args)
        return sum((y**2).sum() for y in jax.tree.leaves(out)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*args)
    return jax.tree.leaves((out, gradients))


def test_both_equal_whole_products_and_send_by_permutes_alone():
    x, wide = normal(0, 3, 16, 5), normal(1, 3, 16, 12)
    columns, rows = [normal(2, 5, 8), normal(3, 5, 12)], normal(4, 12, 5)
    gathered = jax.jit(lambda x, w: gather_linears(x, w, SPLIT))
    scattered = jax.jit(lambda x, w: scatter_linear(x, w, SPLIT))
    # 16 * 3 terms of a weight's gradient, of values up to about 30
    wanted = with_gradients(lambda x, ws: tuple(linear_plain(x, w) for w in ws), x, columns)
    assert_near(with_gradients(gathered, x, columns), wanted, jnp.float32, 48)
    assert_near(with_gradients(scattered, wide, rows), with_gradients(linear_plain, wide, rows), jnp.float32, 48)
    for function, args in ((gathered, (x, columns)), (scattered, (wide, rows))):
        assert {*re.findall(r"(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)[(-]",
                            function.lower(*args).compile().as_text())} == {"collective-permute"}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "width", "message"),
    [
        ((3, 12, 5), 8, r"sequence of size 12 does not divide into 8 equal parts over mesh axis sep\+mp"),
        ((3, 16, 5), 6, "features of size 6 does not divide into 4 equal parts over mesh axis mp"),
        ((16, 5), 8, r"x \[16, 5\] and weight \[5, 8\] do not fit; needs \[batch, seq, in\]"),
    ],
)
def test_what_does_not_divide_is_refused(shape, width, message):
    with pytest.raises(ShapeError, match=f"gather_linears: .*{message}"):
        gather_linears(normal(0, *shape), [normal(1, 5, width)], SPLIT)
    with pytest.raises(ShapeError, match="scatter_linear: "):
        scatter_linear(normal(0, *shape[:-1], width), normal(1, width, 5), SPLIT)
