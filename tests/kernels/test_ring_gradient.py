"""A linear map whose weight's gradient is summed in a ring, against the whole product on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core.engine import backend  # noqa: F401  # configures jax: eight CPU devices, x64
from polyreme.errors import ShapeError
from polyreme.kernels import linear_plain, ring_gradient_linear
from polyreme.kernels.ring_gradient import GradientRing

from .test_ring_linear import normal, with_gradients
from .tolerance import assert_near

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("dp", "sharding", "mp"))
BATCH = ("dp", "sharding")


@pytest.mark.parametrize(
    ("features", "dim", "pieces"),
    [
        pytest.param(((), ("mp",)), 0, ("sharding", "mp"), id="columns"),
        pytest.param((("mp",), ()), 0, (("mp", "sharding"), None), id="rows, of which mp has parts too"),
    ],
)
def test_it_equals_the_whole_product_and_sums_pieces_by_permutes(features, dim, pieces):
    ring = GradientRing(MESH, BATCH, (), features, "sharding", dim)
    x, weight = normal(0, 4, 6, 8), normal(1, 8, 12)
    pieces_layout = NamedSharding(MESH, PartitionSpec(*pieces))
    spread = jax.device_put(x, NamedSharding(MESH, ring.rows(0))), jax.device_put(weight, pieces_layout)
    mapped = jax.jit(lambda x, w: ring_gradient_linear(x, w, ring))
    # 24 terms of a weight's gradient, of values up to about 30
    assert_near(with_gradients(mapped, *spread), with_gradients(linear_plain, x, weight), jnp.float32, 24)
    pull = jax.jit(jax.grad(lambda w, x: (mapped(x, w) ** 2).sum()), out_shardings=pieces_layout)
    sums = re.findall(r"(reduce-scatter|all-reduce|collective-permute)[(-].*?channel_id", pull.lower(
        spread[1], spread[0]).compile().as_text())  # fmt: skip
    # one permute of a piece, then the sum of that over dp; with rows in parts also the product's own sum
    assert sums.count("collective-permute") == 1
    assert "reduce-scatter" not in sums


def test_dims_that_do_not_fit_are_refused():
    ring = GradientRing(MESH, BATCH, (), ((), ()), "sharding", 0)
    with pytest.raises(ShapeError, match=r"ring_gradient_linear: x \[4, 8\] and weight \[8, 12\] do not fit"):
        ring_gradient_linear(normal(0, 4, 8), normal(1, 8, 12), ring)
