"""Gradients left as one addend for each replica: their sum is the gradient, and no device waits for another's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.jit.unreduced import Replicas, Unreduced

ROWS = ("dp", "sharding")


@pytest.fixture(scope="module")
def replicas():
    devices = np.asarray(jax.devices()[:8]).reshape(2, 2, 2)
    return Replicas(Mesh(devices, ("dp", "sharding", "mp")), ROWS)


def put(replicas, value, *spec):
    return jax.device_put(np.asarray(value), NamedSharding(replicas.mesh, PartitionSpec(*spec)))


def parameters(replicas):
    g = np.random.default_rng(0)
    return {
        "table": put(replicas, g.standard_normal((16, 6), "float32"), "mp"),
        "weight": put(replicas, g.standard_normal((6, 10), "float32"), None, "mp"),
        "bias": put(replicas, g.standard_normal(10, "float32"), "mp"),
        "gain": put(replicas, np.ones(10, "float32")),
    }


def ids_of(replicas):
    return put(replicas, np.random.default_rng(1).integers(0, 16, (8, 4)), ROWS)


def hidden(p, ids):
    x = p["table"][ids]
    h = jax.jit(lambda x, w, b: (x.reshape(-1, 6) @ w + b).reshape(8, 4, 10))(x, p["weight"], p["bias"])
    # statistics of the whole batch, as BatchNorm takes them: a sum over all devices in the middle
    return jnp.tanh(h - h.mean((0, 1))) * p["gain"]


def unreduced(replicas, loss, *args):
    """(what was traced, its flat arguments, its plain results)."""
    gradients = jax.grad(loss)
    closed = jax.make_jaxpr(gradients)(*args)
    p, *data = args
    splits = [((),) * a.ndim for a in jax.tree.leaves(p)] + [replicas.split_of(a) for a in data]
    return Unreduced(closed, replicas, splits), jax.tree.leaves(args), jax.tree.leaves(gradients(*args))


def check_sums(program, flat, want, axes):
    assert program.axes == axes
    found = jax.jit(lambda *args: program(args, program.axes))(*flat)
    for addends, gradient, names in zip(found, want, axes, strict=True):
        total = np.asarray(addends).sum(0) if names else np.asarray(addends)
        # 32 rows in another order
        np.testing.assert_allclose(total, gradient, atol=2.0**-23 * np.sqrt(32) * max(1, np.abs(gradient).max()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "recomputed"])
def test_addends_of_products_lookups_and_reductions_are_the_gradient(replicas, wrap):
    def loss(p, ids):
        return (wrap(hidden)(p, ids) ** 2).mean()

    program, flat, want = unreduced(replicas, loss, parameters(replicas), ids_of(replicas))
    check_sums(program, flat, want, [ROWS] * 4)


def test_loops_that_are_recomputed_are_looked_into(replicas):
    """jax makes the backward's program of them a closed_call, whose jaxpr has another key."""

    def loss(p, ids):
        return (jax.lax.fori_loop(0, 2, lambda _, h: jnp.sin(h), hidden(p, ids)) ** 2).mean()

    program, flat, want = unreduced(replicas, jax.checkpoint(loss), parameters(replicas), ids_of(replicas))
    assert "closed_call" in str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss)))(parameters(replicas), ids_of(replicas)))
    check_sums(program, flat, want, program.axes)


def all_reduced(replicas, program, flat, kept):
    """Elements on a device of every sum over all replicas in the compiled program."""

    def laid_out(*args):
        rows = NamedSharding(replicas.mesh, PartitionSpec(ROWS))
        results = zip(program(args, kept), kept, strict=True)
        return [jax.lax.with_sharding_constraint(r, rows) if names else r for r, names in results]

    text = jax.jit(laid_out).lower(*flat).compile().as_text()
    shapes = re.findall(r"= (.*?) all-reduce\([^\n]*replica_groups=(?:\[2,4\]|\S*=4)", text)
    return sorted(
        int(np.prod([int(n) for n in dims.split(",") if n])) for s in shapes for dims in re.findall(r"f32\[(.*?)\]", s)
    )


def test_a_program_that_leaves_them_sums_no_gradient_over_replicas(replicas):
    def loss(p, ids):
        return (hidden(p, ids) ** 2).sum()

    program, flat, _ = unreduced(replicas, loss, parameters(replicas), ids_of(replicas))
    sizes = {"table": 16 * 6, "weight": 6 * 10 // 2}
    summed = all_reduced(replicas, program, flat, [()] * 4)
    assert set(sizes.values()) <= set(summed)
    left = all_reduced(replicas, program, flat, program.axes)
    assert not set(sizes.values()) & set(left)
    assert left, "the mean of the batch and its gradient are sums over devices still"


def test_what_is_not_a_sum_over_rows_is_whole(replicas):
    def loss(p, x):
        kernel = p["kernel"]  # a convolution's gradient contracts rows in a way that is not followed
        h = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return (h * p["scale"]).max() + (p["scale"] ** 2).sum()

    p = {
        "kernel": put(replicas, np.random.default_rng(2).standard_normal((3, 2, 4), "float32")),
        "scale": put(replicas, np.arange(4, dtype="float32")),
    }
    x = put(replicas, np.random.default_rng(3).standard_normal((8, 5, 2), "float32"), ROWS)
    program, flat, want = unreduced(replicas, loss, p, x)
    check_sums(program, flat, want, [(), ROWS])


def test_sums_that_devices_make_themselves_are_left_too(replicas):
    """As in experts, whose weights' gradient a shard_map ends with a sum over the devices that have other rows."""

    def loss(p, ids):
        def local(x, w, b):
            return jax.lax.psum(x @ w + b, "mp")

        specs = (PartitionSpec(ROWS), PartitionSpec(None, "mp"), PartitionSpec())
        over = jax.shard_map(local, mesh=replicas.mesh, in_specs=specs, out_specs=PartitionSpec(ROWS), check_vma=False)
        x = p["table"][ids].reshape(32, 6)
        return (over(x, p["weight"], p["bias"][:5]) ** 2).mean()

    p = {name: p for name, p in parameters(replicas).items() if name != "gain"}
    program, flat, want = unreduced(replicas, loss, p, ids_of(replicas))
    check_sums(program, flat, want, [ROWS] * 3)
    # the weight's gradient in halves, and the bias's over mp, are all that is summed
    assert max(all_reduced(replicas, program, flat, program.axes), default=0) == 0


def test_axes_of_sums_can_be_chosen(replicas):
    program, flat, want = unreduced(
        replicas,
        lambda p, x: (x @ p).sum(),
        put(replicas, np.ones((3, 2), "float32")),
        put(replicas, np.eye(8, 3), ROWS),
    )
    assert program.axes == [ROWS]
    for kept, ways in ((("dp",), 2), (("sharding",), 2), (ROWS, 4)):
        (addends,) = program(flat, [kept])
        assert addends.shape == (ways, 3, 2)
        np.testing.assert_allclose(addends.sum(0), want[0])


@pytest.mark.parametrize("axes", [(), ("dp",), ("sharding",), ROWS])
def test_widened_addends_have_the_same_sum(replicas, axes):
    value = jnp.arange(1.0, 1.0 + 6 * replicas.ways(axes)).reshape(*([replicas.ways(axes)] if axes else []), 2, 3)
    wide = replicas.widen(value, axes, ROWS)
    assert wide.shape == (4, 2, 3)
    np.testing.assert_array_equal(wide.sum(0), value.sum(0) if axes else value)
    np.testing.assert_array_equal(replicas.narrow(wide, ROWS, axes), value)


@pytest.mark.parametrize(
    ("move", "split"),
    [
        (lambda x: x.reshape(32, 6), (ROWS, ())),
        (lambda x: x.reshape(4, 2, 4, 6), (ROWS, (), (), ())),
        (lambda x: x.reshape(2, 2, 8, 6), (("dp",), ("sharding",), (), ())),
        (lambda x: x.reshape(2, 2, 8, 6).reshape(4, 8, 6), (ROWS, (), ())),
        (lambda x: x.transpose(2, 1, 0), ((), (), ROWS)),
        (lambda x: jnp.tanh(x).sum(1) * 2.0, (ROWS, ())),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, y * 2), x[:, 0], x.swapaxes(0, 1))[1], ((), ROWS, ())),
        (lambda x: jnp.einsum("abc,dc->dab", x, jnp.ones((5, 6))), ((), ROWS, ())),
        (lambda x: x.reshape(3, 64), ((), ())),
    ],
    ids=["joined", "parted", "by axis", "by axis and back", "transposed", "reduced", "scanned", "product", "mixed"],
)
def test_where_rows_lie_is_followed(replicas, move, split):
    closed = jax.make_jaxpr(move)(jnp.zeros((8, 4, 6)))
    program = Unreduced(closed, replicas, [(ROWS, (), ())])
    assert program._frame.split(closed.jaxpr.outvars[0]) == split
