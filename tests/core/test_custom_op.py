"""register_op: gradients, kernels, and every world an op runs in; the eager run and finite formulas are the oracles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from polyreme import amp, autograd, static
from polyreme.core.custom_op import register_op
from polyreme.core.op import OPS, Op
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, GradError, HostValueError, ProgramError, ShapeError
from polyreme.jit import to_static
from polyreme.program.mode import disable_static, enable_static

X = np.float32([[1, 2], [3, -1]])


@pytest.fixture(autouse=True)
def _ops_do_not_stay():
    before = set(OPS)
    yield
    disable_static()
    for name in set(OPS) - before:
        del OPS[name]


def cube(x, scale=1.0):
    return scale * x**3


def cube_grad(x, y, dy, scale):
    return dy * scale * 3 * x * x


def leaf(value, dtype="float32"):
    return to_tensor(np.asarray(value, dtype), stop_gradient=False)


def slope(fn, *inputs):
    return [g.numpy() for g in autograd.grad([fn(*inputs).sum()], list(inputs))]


@pytest.mark.parametrize("backward", ["traced", cube_grad])
def test_gradients_of_first_and_second_order(backward):
    op = register_op(cube, backward=backward)
    x = leaf(X)
    (first,) = autograd.grad([op(x, scale=2.0).sum()], [x], create_graph=True)
    (second,) = autograd.grad([first.sum()], [x])
    np.testing.assert_allclose(first.numpy(), 6 * X * X, rtol=1e-6)
    np.testing.assert_allclose(second.numpy(), 12 * X, rtol=1e-6)


def test_an_own_gradient_is_the_one_that_is_used_in_every_world():
    op = register_op(cube, backward=lambda x, y, dy, scale: 100 * dy)
    x = leaf(X)
    hundred = np.full_like(X, 100)
    np.testing.assert_array_equal(slope(op, x)[0], hundred)
    np.testing.assert_array_equal(slope(to_static(op), x)[0], hundred)

    @to_static
    def step(x):
        return autograd.grad([op(x).sum()], [x])[0]

    np.testing.assert_array_equal(step(x).numpy(), hundred)
    enable_static()
    program = static.Program()
    with static.program_guard(program):
        fed = static.data("x", [-1, 2])
        fed.stop_gradient = False
        (grad,) = static.gradients([op(fed).sum()], [fed])
        (got,) = static.Executor().run(program, feed={"x": X}, fetch_list=[grad])
    np.testing.assert_array_equal(got, hundred)


def test_a_saved_program_finds_the_op_by_name():
    op = register_op(cube, backward=cube_grad)
    enable_static()
    program = static.Program()
    with static.program_guard(program):
        out = op(static.data("x", [-1, 2]), scale=3.0)
    again = static.Program.from_json(program.to_json())
    (got,) = static.Executor().run(again, feed={"x": X}, fetch_list=[out.name])
    np.testing.assert_allclose(got, 3 * X**3, rtol=1e-6)
    del OPS["cube"]
    with pytest.raises(ProgramError, match="'cube', which is not declared here; import the module"):
        static.Executor().run(static.Program.from_json(program.to_json()), feed={"x": X}, fetch_list=[out.name])


def test_without_a_gradient_asking_for_one_is_an_error():
    op = register_op(cube, backward=None)
    np.testing.assert_allclose(op(leaf(X)).numpy(), X**3, rtol=1e-6)
    with pytest.raises(GradError, match="cube has no gradient: it was registered with backward=None"):
        slope(op, leaf(X))


def test_the_kernel_of_the_platform_runs_and_the_gradient_is_of_the_function():
    op = register_op(cube, kernels={"cpu": lambda x, scale: x**3 * scale + 1, "tpu": lambda x, scale: x + jnp.nan})
    x = leaf(X)
    np.testing.assert_allclose(op(x).numpy(), X**3 + 1, rtol=1e-6)
    np.testing.assert_allclose(to_static(lambda x: op(x))(x).numpy(), X**3 + 1, rtol=1e-6)
    np.testing.assert_allclose(slope(op, x)[0], 3 * X * X, rtol=1e-6)


def test_autocast_follows_the_class():
    ops = {c: register_op(cube, name=f"cube_{c}", amp=c) for c in ("low", "fp32")}
    with amp.auto_cast(dtype="bfloat16"):
        found = {c: op(leaf(X)).dtype.name for c, op in ops.items()}
    assert found == {"low": "bfloat16", "fp32": "float32"}


@pytest.mark.parametrize(
    "reads",
    [lambda x: jnp.asarray(np.sin(np.asarray(x))), lambda x: x if x[0, 0] > 0 else -x, lambda x: x * int(x[0, 0])],
)
def test_a_function_that_reads_values_is_told_what_to_write(reads):
    op = register_op(reads, name="reads")
    with pytest.raises(HostValueError, match=r"reads\(x float32\[.*\]\): its function needs the value .* jax.lax.cond"):
        op(leaf(X))


def test_one_input_may_have_its_gradient_in_a_tuple():
    op = register_op(cube, name="boxed", backward=lambda x, y, dy, scale: (dy * 7,))
    np.testing.assert_array_equal(slope(op, leaf(X))[0], np.full_like(X, 7))
    op = register_op(cube, name="two_for_one", backward=lambda x, y, dy, scale: (dy, dy))
    with pytest.raises(GradError, match=r"two_for_one: backward gave 2 gradients for 1 inputs \(x\)"):
        slope(op, leaf(X))


def test_lists_optional_tensors_and_several_results():
    def blend(parts: list[jax.Array], bias: jax.Array | None = None, power: int = 1):
        total = sum(parts)
        return total**power if bias is None else total**power + bias, len(parts) * jnp.ones((), "int32")

    def backward(parts, bias, total, count, d_total, d_count, power):
        assert d_count is None
        return [d_total * 7] * len(parts), None if bias is None else d_total

    op = register_op(blend, backward=backward)
    a, b, bias = leaf(X), leaf(X), leaf(X[0])
    total, count = op([a, b], power=2)
    np.testing.assert_allclose(total.numpy(), (2 * X) ** 2)
    assert int(count) == 2
    with pytest.raises(GradError, match=r"gave float32\[2, 2\] as the gradient of 'bias', which is float32\[2\]"):
        op([a, b], bias)[0].sum().backward()
    total.sum().backward()
    np.testing.assert_array_equal(b.grad.numpy(), np.full_like(X, 7))


def test_complex_gradients_follow_the_convention():
    op = register_op(lambda z: z * z, name="square_of", backward=lambda z, y, dy: dy * jnp.conj(2 * z))
    plain = register_op(lambda z: z * z, name="square_traced")
    z = leaf([1 + 2j, -1j], "complex64")
    both = [autograd.grad([(o(z) * (2 - 1j)).abs().sum()], [z])[0].numpy() for o in (op, plain)]
    np.testing.assert_allclose(*both, rtol=1e-6)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "mp"))


def test_a_sharding_rule_keeps_pieces_where_they_are(mesh):
    pieces = []

    def center(x, w):
        pieces.append(x.shape)
        return (x - x.mean(-1, keepdims=True)) * w

    op = register_op(center, sharding="*b [n], [n] -> *b [n]")
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 3, 4)).astype("float32"), rng.normal(size=4).astype("float32")
    want = center(x, w)
    taped = [leaf(x), leaf(w)]
    wanted = slope(op, *taped)
    pieces.clear()
    for run in (op, to_static(lambda x, w: op(x, w))):
        placed = [leaf(x), leaf(w)]
        placed[0]._array = jax.device_put(x, NamedSharding(mesh, P("dp", None, "mp")))
        placed[1]._array = jax.device_put(w, NamedSharding(mesh, P("mp")))
        out = run(*placed)
        # 4 terms a mean, in another order
        np.testing.assert_allclose(out.numpy(), want, rtol=1e-5, atol=1e-6)
        assert out._array.sharding.spec[0] == "dp"
        for got, ref in zip(slope(run, *placed), wanted, strict=True):
            np.testing.assert_allclose(got, ref, rtol=1e-5, atol=1e-5)
    assert (2, 3, 4) in pieces  # a quarter of the rows, all of the dim that is averaged over


def test_without_a_rule_an_op_of_jax_is_split_by_xla(mesh):
    op = register_op(cube)
    x = Tensor(jax.device_put(np.ones((8, 2), "float32"), NamedSharding(mesh, P("dp"))))
    assert op(x)._array.sharding.spec[0] == "dp"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": "matmul"}, "'matmul' is taken by the op of polyreme.ops"),
        ({"name": "my op"}, "'my op' is no name for an op"),
        ({"amp": "half"}, "amp='half'; choose 'low'"),
        ({"backward": 3}, "backward=3; give a function, 'traced' or None"),
        ({"kernels": {"cdua": cube}}, "'cdua', no platform; did you mean 'cuda'"),
        ({"kernels": {"cpu": 1}}, "kernel for 'cpu' is int, no function"),
        ({"sharding": "n n"}, "has no '->'"),
        ({"sharding": "n, n -> n"}, "names 2 inputs, and it has 1: x"),
        ({"sharding": "n! -> n"}, "'n!' in its sharding rule is no dim"),
        ({"sharding": "*a *b -> a"}, "several starred dims"),
    ],
)
def test_what_is_registered_wrong_is_named(options, match):
    with pytest.raises(ConfigError, match=match):
        register_op(cube, **options)
    assert "cube" not in OPS


def test_functions_that_are_no_ops_are_refused():
    def starred(*xs):
        return xs[0]

    def late(x: "NotThere"):  # noqa: F821
        return x

    def setting(scale=1.0):
        return scale

    for fn, match in [
        (starred, r"starred parameters \['xs'\]"),
        (late, "annotation of 'late' cannot be read"),
        (setting, "'setting' has no tensor parameter"),
        (3, "takes a function, got int"),
    ]:
        with pytest.raises(ConfigError, match=match):
            register_op(fn, name=getattr(fn, "__name__", "three"))


@pytest.mark.parametrize(
    ("fn", "options", "error", "match"),
    [
        (lambda x: {"y": x}, {}, ConfigError, "gave dict; an op gives an array"),
        (lambda x: (), {}, ConfigError, "gave nothing"),
        (lambda x: x, {"kernels": {"cpu": lambda x: x[0]}}, ShapeError, r"gives float32\[2\], the op gives float32\["),
        (lambda x: x, {"sharding": "a -> a"}, ShapeError, r"sharding rule needs \[a\], got 2 dims"),
        (lambda x: x, {"sharding": "a b -> a b, a"}, ConfigError, "names 2 results, and it gives 1"),
        (lambda x: x[:1], {"sharding": "a b -> a b"}, ShapeError, "dim 'a' is 2 in input 0"),
    ],
)
def test_results_that_do_not_fit_are_named(fn, options, error, match):
    with pytest.raises(error, match=match):
        register_op(fn, name="odd", **options)(to_tensor(X))


@pytest.mark.parametrize(
    ("backward", "match"),
    [
        (lambda x, dy: dy, r"is called with the inputs \(x, y\), 1 results"),
        (lambda x, y, z, dz: dz, r"gave 1 gradients for 2 inputs \(x, y\)"),
        (lambda x, y, z, dz: (dz, dz[0]), r"gave float32\[2\] as the gradient of 'y'"),
        (lambda x, y, z, dz: (dz * 1j, dz), r"gave complex64\[2, 2\] as the gradient of 'x'"),
    ],
)
def test_gradients_that_do_not_fit_are_named(backward, match):
    op = register_op(lambda x, y: x * y, name="product_of", backward=backward)
    with pytest.raises(GradError, match=match):
        slope(op, leaf(X), leaf(X))


def test_a_list_of_gradients_fits_the_list():
    op = register_op(lambda a, b: a + b, name="plus_of", backward=lambda *given: (given[-1], None))
    assert slope(op, leaf(X), leaf(X))[0].shape == (2, 2)

    def total(parts: list[jax.Array]):
        return sum(parts)

    wrong = register_op(total, backward=lambda parts, y, dy: dy)
    with pytest.raises(GradError, match="no list of 2 gradients for the list 'parts'"):
        wrong([leaf(X), leaf(X)]).sum().backward()
    with pytest.raises(ConfigError, match="takes a list of tensors, whose sharding no rule can tell"):
        register_op(total, name="total_split", sharding="n -> n")


def test_it_has_what_every_op_has():
    own = vars(register_op(lambda x: x * 2, name="doubled_by_lambda").op)
    read_later = {name for name, value in vars(Op).items() if isinstance(value, functools.cached_property)}
    # read from the declaration where rules are written down
    assert vars(OPS["sin"].op).keys() - own.keys() - read_later == {"declared_rule"}
