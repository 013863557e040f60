"""What the contract rows of linear algebra and reductions cannot say: Hermitian gradients, norms at 0, ties."""

import numpy as np
import pytest
import scipy.linalg

from polyreme.autograd import derivatives
from polyreme.core import rng
from polyreme.core.op import OPS
from polyreme.eager.tensor import to_tensor
from polyreme.errors import DTypeError, ShapeError

RNG = np.random.default_rng(5)
HALF = RNG.standard_normal((3, 3))
EVEN = HALF @ HALF.T + np.eye(3)


def loss(name, x):
    """A number that depends on every output; |vectors| is used, since their signs are free."""
    outs = OPS[name](x)
    outs = outs if isinstance(outs, (tuple, list)) else [outs]
    total = 0.0
    for out in outs:
        weight = np.random.default_rng(1).uniform(0.5, 1.5, out.shape)
        total = total + OPS["sum"](out * out * to_tensor(weight))
    return total


@pytest.mark.parametrize("name", ["cholesky", "eigh", "eigvalsh"])
def test_gradient_of_a_hermitian_matrix_is_symmetric_and_equals_finite_differences(name):
    x = to_tensor(EVEN, stop_gradient=False)
    loss(name, x).backward()
    gradient = x.grad.numpy()
    np.testing.assert_allclose(gradient, gradient.T, rtol=1e-12)
    direction = HALF + HALF.T
    step = 1e-5
    ends = [float(loss(name, to_tensor(EVEN + sign * step * direction))) for sign in (1, -1)]
    numeric = (ends[0] - ends[1]) / (2 * step)
    # central differences: error step^2 * third derivative
    assert np.sum(gradient * direction) == pytest.approx(numeric, rel=1e-5)


@pytest.mark.parametrize("name", ["norm", "vector_norm"])
@pytest.mark.parametrize("p", [1, 2])
def test_gradient_of_a_norm_at_zero_is_finite(name, p):
    x = to_tensor(np.zeros((2, 2), "float32"), stop_gradient=False)
    OPS[name](x, p=p).backward()
    assert x.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("p", [1.5, 2, 3])
def test_gradient_of_distances_between_equal_points_is_zero(p):
    x = to_tensor(np.ones((2, 3), "float32"), stop_gradient=False)
    OPS["sum"](OPS["cdist"](x, to_tensor(np.ones((2, 3), "float32")), p=p)).backward()
    assert x.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", ["max", "amax", "min", "amin"])
def test_equal_elements_share_the_gradient_of_an_extreme(name):
    x = to_tensor([2.0, 2.0], stop_gradient=False)
    OPS[name](x).backward()
    assert x.grad.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "args"), [("norm", (np.inf,)), ("vector_norm", (-np.inf, -1)), ("dist", (np.zeros(3), np.inf))]
)
def test_equal_elements_have_the_gradient_of_an_infinite_norm_each(name, args):
    x = to_tensor([1.0, 1.0, -1.0], stop_gradient=False)
    OPS[name](x, *(to_tensor(a) if isinstance(a, np.ndarray) else a for a in args)).backward()
    assert x.grad.tolist() == [1, 1, -1]


@pytest.mark.parametrize("name", ["max", "amax", "min", "amin"])
def test_no_elements_have_no_extreme(name):
    with pytest.raises(ShapeError, match=rf"{name}: no elements over axis 1 of shape \[2, 0, 3\]"):
        OPS[name](to_tensor(np.ones((2, 0, 3), "float32")), 1)
    assert OPS[name](to_tensor(np.ones((2, 0, 3), "float32")), 0).shape == [0, 3]


def test_gradient_of_std_of_equal_elements_is_zero():
    x = to_tensor([3.0, 3.0], stop_gradient=False)
    OPS["std"](x).backward()
    assert x.grad.tolist() == [0.0, 0.0]


def test_low_rank_factors_follow_the_seed_and_their_gradient_is_that_of_the_singular_values():
    a = np.random.default_rng(2).standard_normal((5, 3))
    x = to_tensor(a, stop_gradient=False)
    rng.seed(3)
    u, s, _ = x.svd_lowrank(3)
    rng.seed(3)
    assert np.array_equal(u.numpy(), x.svd_lowrank(3)[0].numpy())
    OPS["sum"](s * to_tensor([1.0, 2.0, 3.0], "float64")).backward()
    left, _, right = np.linalg.svd(a, full_matrices=False)
    # d s_i = u_i^H dx v_i; 5 x 3 products and three orthogonalizations
    np.testing.assert_allclose(x.grad.numpy(), (left * [1, 2, 3]) @ right, atol=1e3 * np.finfo("float64").eps)


def test_pseudo_inverse_goes_forward_to_the_second_order():
    x, step = RNG.standard_normal((4, 3)), 1e-4
    _, first, second = derivatives(OPS["pinv"], to_tensor(x), order=2)
    low, mid, high = (np.linalg.pinv(x + h) for h in (-step, 0, step))
    # differences: error step^2 * third or fourth derivative, of about 1e2 and 1e4
    np.testing.assert_allclose(first.numpy(), (high - low) / (2 * step), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(second.numpy(), (high - 2 * mid + low) / step**2, rtol=1e-3, atol=1e-3)


def test_eigenvalues_go_forward_to_the_second_order():
    x, way = RNG.standard_normal((2, 4, 4))
    found = derivatives(lambda t: OPS["real"](OPS["eigvals"](t) ** 3).sum(), to_tensor(x), to_tensor(way), order=2)
    want = [np.trace(x @ x @ x), 3 * np.trace(x @ x @ way), 6 * np.trace(x @ way @ way)]
    np.testing.assert_allclose([float(f) for f in found], want, rtol=1e-9)


def test_half_precision_is_refused_where_there_is_no_routine():
    with pytest.raises(DTypeError, match=r"svdvals: there is no routine for bfloat16; use astype\('float32'\)"):
        OPS["svdvals"](to_tensor(EVEN).astype("bfloat16"))


def test_sizes_of_zero():
    none = to_tensor(np.zeros((0, 0), "float32"))
    assert OPS["det"](none).item() == 1.0
    assert OPS["matrix_rank"](none).item() == 0
    assert OPS["solve"](none, none).shape == [0, 0]
    batch = to_tensor(np.zeros((0, 3, 3), "float32"), stop_gradient=False)
    for name in ("inverse", "cholesky", "svdvals", "matrix_exp"):
        out = OPS[name](batch)
        assert out.shape[0] == 0
        OPS["sum"](out).backward()
        assert batch.grad.shape == [0, 3, 3]


COMPLEX = RNG.standard_normal((3, 3)) + 1j * RNG.standard_normal((3, 3)) + 2 * np.eye(3)
HERMITIAN = COMPLEX @ COMPLEX.conj().T
OF_COMPLEX = {
    "inverse": (np.linalg.inv, COMPLEX),
    "det": (np.linalg.det, COMPLEX),
    "slogdet": (lambda x: np.stack(np.linalg.slogdet(x)), COMPLEX),
    "solve": (np.linalg.solve, COMPLEX, COMPLEX[:, :2]),
    "cholesky": (np.linalg.cholesky, HERMITIAN),
    "eigvalsh": (np.linalg.eigvalsh, HERMITIAN),
    "svdvals": (lambda x: np.linalg.svd(x)[1], COMPLEX),
    "pinv": (np.linalg.pinv, COMPLEX[:, :2]),
    "matrix_exp": (scipy.linalg.expm, COMPLEX),
    "matrix_power": (np.linalg.matrix_power, COMPLEX, 3),
    "matrix_rank": (lambda x: np.array(2), COMPLEX[:, :2]),
    "cond": (np.linalg.cond, COMPLEX),
    "lstsq": (lambda x, y: np.linalg.lstsq(x, y)[0], COMPLEX[:, :2], COMPLEX[:, :1]),
    "qr": (lambda x: x, COMPLEX),
    "svd": (lambda x: x, COMPLEX),
    "eigh": (lambda x: x, HERMITIAN),
    "eig": (lambda x: x, COMPLEX),
}
PUT_TOGETHER = {
    "lstsq": lambda z, *_: z,
    "qr": lambda q, r: q @ r,
    "svd": lambda u, s, vh: (u * s) @ vh,
    "eigh": lambda w, v: (v * w) @ v.conj().T,
    "eig": lambda w, v: (v * w) @ np.linalg.inv(v),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", OF_COMPLEX)
def test_complex_matrices(name):
    reference, *args = OF_COMPLEX[name]
    got = OPS[name](*(to_tensor(a) if isinstance(a, np.ndarray) else a for a in args))
    got = PUT_TOGETHER[name](*(t.numpy() for t in got)) if name in PUT_TOGETHER else got.numpy()
    # elimination and rotations of 3 x 3 matrices, of condition numbers up to 50
    bound = 50 * 96 * np.finfo("float64").eps
    np.testing.assert_allclose(got, reference(*args), rtol=bound, atol=bound * np.abs(args[0]).max())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5)])
def test_a_full_svd_has_the_gradient_of_its_factors(shape):
    array, count = np.random.default_rng(2).standard_normal(shape), min(shape[-2:])
    gradients = []
    for full in (False, True):
        x = to_tensor(array, stop_gradient=False)
        u, s, vh = OPS["svd"](x, full)
        # signs of vectors are free: their squares and products are not
        total = OPS["sum"](u[..., :count] ** 2 * to_tensor(np.arange(float(count))) * to_tensor(array[..., :1]))
        total = total + OPS["sum"](s * vh[..., :count, 0] * u[..., 1, :count])
        total.backward()
        gradients.append(x.grad.numpy())
        square = u.numpy().mT @ u.numpy()
        np.testing.assert_allclose(square, np.broadcast_to(np.eye(u.shape[-1]), square.shape), atol=1e-12)
    np.testing.assert_allclose(*gradients, rtol=1e-9, atol=1e-9)
