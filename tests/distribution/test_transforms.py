"""Transforms: inverses, log determinants against derivatives, shapes; distributions made by them."""

import numpy as np
import pytest
import scipy.stats as st
from hypothesis import given, settings
from hypothesis import strategies as hs

import polyreme as paddle
import polyreme.distribution as D
from polyreme.distribution.transform import Transform, Type
from polyreme.errors import ConfigError, ShapeError
from polyreme.jit import to_static
from polyreme.paddle_scripts.internals.distributions import Real

# an event of each, its shape after the transform, and whether x is positive
TRANSFORMS = {
    "affine": (lambda: D.AffineTransform(0.5, -2.0), (), ()),
    "exp": (D.ExpTransform, (), ()),
    "power": (lambda: D.PowerTransform(2.5), (), ()),
    "sigmoid": (D.SigmoidTransform, (), ()),
    "tanh": (D.TanhTransform, (), ()),
    "reshape": (lambda: D.ReshapeTransform((2, 3), (6,)), (2, 3), (6,)),
    "stick": (D.StickBreakingTransform, (3,), (4,)),
    "stack": (lambda: D.IndependentTransform(D.StackTransform([D.ExpTransform(), D.TanhTransform()], -1), 1), (2,), (2,)),
    "independent": (lambda: D.IndependentTransform(D.ExpTransform(), 2), (2, 2), (2, 2)),
    "chain": (lambda: D.ChainTransform([D.TanhTransform(), D.AffineTransform(1.0, 3.0), D.StickBreakingTransform()]), (3,), (4,)),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=10)
@given(seed=hs.integers(0, 2**16))
def test_inverse_and_log_determinant(name, seed):
    make, shape_in, shape_out = TRANSFORMS[name]
    transform = make()
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.1, 2, (2, *shape_in)) if name == "power" else rng.normal(size=(2, *shape_in))
    given_x = paddle.to_tensor(x)
    y = transform.forward(given_x)
    assert tuple(y.shape) == (2, *shape_out) == transform.forward_shape((2, *shape_in))
    assert transform.inverse_shape((2, *shape_out)) == (2, *shape_in)
    # condition number of the inverse at |x| < 5: 1 / (1 - tanh^2) and its like
    np.testing.assert_allclose(transform.inverse(y).numpy(), x, rtol=1e-9, atol=1e-9)
    log_det = transform.forward_log_det_jacobian(given_x)
    assert log_det.shape == [2]
    np.testing.assert_allclose(transform.inverse_log_det_jacobian(y).numpy(), -log_det.numpy(), rtol=1e-9, atol=1e-9)
    for row, got in zip(x, log_det.numpy(), strict=True):
        jacobian = numeric_jacobian(transform, row, len(shape_out) and name in ("stick", "chain"))
        assert got == pytest.approx(np.linalg.slogdet(jacobian)[1], rel=1e-5, abs=1e-5)


def numeric_jacobian(transform, x, drop_last):
    """By central differences; of a point of the simplex without its last element, which follows from the others."""
    flat, step = x.ravel(), 1e-5
    steps = np.eye(flat.size) * step
    moved = paddle.to_tensor(np.concatenate([flat + steps, flat - steps]).reshape(-1, *x.shape))
    y = transform.forward(moved).numpy().reshape(2, flat.size, -1)
    found = (y[0] - y[1]) / (2 * step)
    return found[:, :-1] if drop_last else found


def test_abs_has_two_inverses():
    absolute = D.AbsTransform()
    np.testing.assert_array_equal(absolute.forward([-2.0, 1.0]), [2, 1])
    below, above = absolute.inverse([2.0])
    assert (below.item(), above.item()) == (-2, 2)
    assert [t.item() for t in absolute.inverse_log_det_jacobian([2.0])] == [0, 0]
    with pytest.raises(NotImplementedError, match="not one-to-one"):
        absolute.forward_log_det_jacobian([2.0])
    folded = D.TransformedDistribution(D.Normal(0.3, 1.2), [absolute])
    x = np.array([0.2, 1.5], "float32")
    np.testing.assert_allclose(folded.log_prob(x), st.foldnorm(0.25, scale=1.2).logpdf(x), rtol=1e-5)
    assert folded.log_prob(-1.0).item() == -np.inf
    vectors = D.TransformedDistribution(D.Normal([0.0, 1.0], 1.0), [D.IndependentTransform(absolute, 1)])
    with pytest.raises(NotImplementedError, match="event of 1 dims"):
        vectors.log_prob([1.0, 2.0])
    with pytest.raises(NotImplementedError, match="only the first transform of a chain"):
        D.ChainTransform([D.ExpTransform(), absolute]).inverse([1.0])
    with pytest.raises(NotImplementedError, match="StackTransform has no inverse"):
        D.StackTransform([absolute]).inverse([1.0])


def test_softmax_has_no_determinant():
    softmax = D.SoftmaxTransform()
    y = softmax.forward([1.0, 2.0, 3.0])
    np.testing.assert_allclose(softmax.forward(softmax.inverse(y)), y.numpy(), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="neither _forward_log_det_jacobian nor"):
        softmax.forward_log_det_jacobian([1.0, 2.0])


def test_calling_a_transform():
    exp, affine = D.ExpTransform(), D.AffineTransform(1.0, 2.0)
    assert exp(0.0).item() == 1
    # as documented: the transform itself first, then the one given
    assert exp(affine).forward(0.0).item() == 3
    assert isinstance(exp(D.Normal(0.0, 1.0)), D.TransformedDistribution)


def test_a_transform_by_its_inverse_determinant():
    class Cube(D.Transform):
        def _forward(self, x):
            return x**3

        def _inverse(self, y):
            return y.sign() * y.abs() ** (1 / 3)

        def _inverse_log_det_jacobian(self, y):
            return -(3 * y.abs() ** (2 / 3)).log()

    d = D.TransformedDistribution(D.Normal(0.0, 1.0), [Cube()])
    assert Cube().forward_log_det_jacobian(2.0).item() == pytest.approx(np.log(12), rel=1e-6)
    assert d.log_prob(8.0).item() == pytest.approx(st.norm.logpdf(2) - np.log(12), rel=1e-5)
    for name in ("forward", "inverse"):
        with pytest.raises(NotImplementedError, match=f"Transform has no _{name}"):
            getattr(D.Transform(), name)(1.0)


def test_a_transform_that_broadcasts_makes_draws_of_their_own():
    wide = D.TransformedDistribution(D.Normal(0.0, 1.0), [D.AffineTransform([0.0, 0.0, 0.0], 1.0)])
    assert wide.batch_shape == (3,)
    for draw in (wide.sample, wide.rsample):
        assert len(set(draw().tolist())) == 3


@pytest.mark.slow
def test_transformed_distributions():
    paddle.seed(3)
    # logit-normal, by SciPy's normal and the change of variables
    x = np.array([0.2, 0.7], "float32")
    d = D.TransformedDistribution(D.Normal(0.3, 1.2), [D.AffineTransform(1.0, 0.5), D.SigmoidTransform()])
    want = st.norm(1.15, 0.6).logpdf(np.log(x / (1 - x))) - np.log(x * (1 - x))
    np.testing.assert_allclose(d.log_prob(x), want, rtol=1e-5, atol=1e-6)
    assert np.all(d.log_prob([-0.5, 0.0, 1.0]).numpy() == -np.inf)
    draws = d.sample([2000]).numpy()
    assert st.kstest(np.log(draws / (1 - draws)), st.norm(1.15, 0.6).cdf).pvalue > 1e-6
    # base batch dims become event dims, of independent elements
    simplex = D.TransformedDistribution(D.Normal(np.zeros((4, 2)), 1.0), [D.StickBreakingTransform()])
    assert (simplex.batch_shape, simplex.event_shape) == ((4,), (3,))
    np.testing.assert_allclose(simplex.sample([5]).numpy().sum(-1), 1, rtol=1e-12)
    assert simplex.log_prob(np.array([0.2, 0.3, 0.5])).shape == [4]
    scale = paddle.to_tensor(2.0, stop_gradient=False)
    moved = D.TransformedDistribution(D.Normal(0.0, 1.0), [D.AffineTransform(1.0, scale)]).rsample()
    (grad,) = paddle.grad(moved, [scale])
    assert grad.item() == pytest.approx((moved.item() - 1) / 2, rel=1e-5)


def test_captured_equals_eager():
    def density(loc, x):
        chain = [D.AffineTransform(loc, 2.0), D.StickBreakingTransform()]
        d = D.TransformedDistribution(D.Normal(loc, 1.0), chain)
        return d.log_prob(x), d.sample()

    args = [paddle.to_tensor(v) for v in (np.array([0.1, 0.2]), np.array([0.2, 0.3, 0.5]))]
    results = []
    for run in (density, to_static(density)):
        paddle.seed(1)
        results.append([t.numpy() for t in run(*args)])
    for eager, captured in zip(*results, strict=True):
        np.testing.assert_allclose(captured, eager, rtol=64 * 2.0**-52)


WRONG = [
    (lambda: D.Normal(0.0, -1.0), ConfigError, r"Normal: scale needs every value above 0, got -1\.0"),
    (lambda: D.Normal(0.0, paddle.to_tensor([1.0, float("nan")])), ConfigError, "scale needs every value above 0, got nan"),
    (lambda: D.Normal("0", 1.0), TypeError, "loc is a str"),
    (lambda: D.Normal(np.zeros(2), np.ones(3)), ShapeError, r"2.*3"),
    (lambda: D.Uniform(2.0, 1.0), ConfigError, r"high - low is -1\.0 somewhere"),
    (lambda: D.Gamma(-1.0, 1.0), ConfigError, "Gamma: concentration needs"),
    (lambda: D.Gamma(1.0, 0.0), ConfigError, "Gamma: rate needs"),
    (lambda: D.Beta(1.0, -1.0), ConfigError, "Beta: beta needs"),
    (lambda: D.Chi2(0.0), ConfigError, "Chi2: df needs"),
    (lambda: D.StudentT(-5.0, 0.0, 1.0), ConfigError, "StudentT: df needs"),
    (lambda: D.Exponential(-1.0), ConfigError, "Exponential: rate needs"),
    (lambda: D.Poisson(-1.0), ConfigError, "Poisson: rate needs every value at least 0"),
    (lambda: D.Bernoulli(1.3), ConfigError, "Bernoulli: probs needs every value between 0 and 1"),
    (lambda: D.Bernoulli(0.3).rsample(temperature=0.0), ConfigError, r"temperature=0\.0"),
    (lambda: D.Geometric(0.0), ConfigError, "above 0 and at most 1"),
    (lambda: D.Binomial(-1, 0.3), ConfigError, "Binomial: total_count needs"),
    (lambda: D.Binomial(1.5, 0.3), ConfigError, "give whole numbers"),
    (lambda: D.ContinuousBernoulli(2.0), ConfigError, "ContinuousBernoulli: probs needs"),
    (lambda: D.ContinuousBernoulli(0.2, (0.6, 0.7)), ConfigError, r"lims=\(0\.6, 0\.7\)"),
    (lambda: D.Dirichlet(1.0), ShapeError, "concentration is one number"),
    (lambda: D.Dirichlet([1.0, -1.0]), ConfigError, "Dirichlet: concentration needs"),
    (lambda: D.Categorical(1.0), ShapeError, r"logits has shape \[\]"),
    (lambda: D.Categorical([1.0, -1.0]).log_prob(0), ConfigError, "logits needs every value at least 0"),
    (lambda: D.Categorical([1.0, 2.0]).prob(5), IndexError, "5"),
    (lambda: D.Categorical([1.0, 2.0]).log_prob([-1]), IndexError, "index -1 is out of range .* give 0 to 1"),
    (lambda: D.Categorical([[1.0, 2.0]]).prob(np.zeros((1, 1, 1), "int64")), ShapeError, r"value has shape \[1, 1, 1\]"),
    (lambda: D.Multinomial(0, [1.0]), ConfigError, "total_count=0"),
    (lambda: D.Multinomial(2, 1.0), ShapeError, r"probs has shape \[\]"),
    (lambda: D.Multinomial(2, [-1.0, 2.0]), ConfigError, "Multinomial: probs needs"),
    (lambda: D.MultivariateNormal([0.0, 0.0]), ConfigError, "give one of covariance_matrix, .* got none"),
    (lambda: D.MultivariateNormal([0.0], scale_tril=np.ones((2, 3))), ShapeError, r"scale_tril has shape \[2, 3\]"),
    (lambda: D.LKJCholesky(1), ConfigError, "dim=1"),
    (lambda: D.LKJCholesky(3, -1.0), ConfigError, "LKJCholesky: concentration needs"),
    (lambda: D.LKJCholesky(3, 1.0, "vine"), ConfigError, "sample_method='vine'"),
    (lambda: D.LKJCholesky(3).log_prob(np.eye(2)), ShapeError, r"give \[..., 3, 3\]"),
    (lambda: D.Independent(D.Normal(0.0, 1.0), 1), ConfigError, r"base has batch_shape \(\)"),
    (lambda: D.Independent(3, 1), ConfigError, "base is a int"),
    (lambda: D.Normal(0.0, 1.0).sample(3), TypeError, r"for one dim give \[3\]"),
    (lambda: D.Normal(0.0, 1.0).sample([1.5]), ShapeError, r"got \[1\.5\]"),
    (lambda: D.Poisson(1.0).rsample(), NotImplementedError, "Poisson has no rsample; it has log_prob, sample"),
    (lambda: D.LKJCholesky(3).entropy(), NotImplementedError, "LKJCholesky has no entropy"),
    (lambda: D.AffineTransform(0.0, 0.0), ConfigError, "AffineTransform: scale needs every value other than 0"),
    (lambda: D.PowerTransform(0.0), ConfigError, "PowerTransform: power needs"),
    (lambda: D.ReshapeTransform((2, 3), (4,)), ShapeError, r"\[2, 3\] holds 6 elements, \[4\] holds 4"),
    (lambda: D.ReshapeTransform((2, 3), (6,)).forward(np.ones((3, 2))), ShapeError, r"does not end in \[2, 3\]"),
    (lambda: D.ChainTransform([]), ConfigError, "at least one Transform"),
    (lambda: D.ChainTransform([3]), ConfigError, "a transform is a int"),
    (lambda: D.StackTransform([D.ExpTransform()], "0"), ConfigError, "axis='0'"),
    (lambda: D.StackTransform([D.ExpTransform()]).forward([1.0, 2.0]), ShapeError, "1 transforms along axis 0"),
    (lambda: D.IndependentTransform(D.ExpTransform(), 0), ConfigError, "reinterpreted_batch_rank=0"),
    (lambda: D.StickBreakingTransform().forward(1.0), ShapeError, "an event has 1 dims"),
    (lambda: D.TransformedDistribution(3, []), ConfigError, "base is a int"),
    (lambda: D.TransformedDistribution(D.Normal(0.0, 1.0), [D.StickBreakingTransform()]), ShapeError, "events of 1 dims"),
    (lambda: D.TransformedDistribution(D.Normal([0.0], 1.0), [D.AffineTransform([0.0, 0.0], 1.0)]), ShapeError, "over a dim of size 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "match"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_wrong_is_said(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_captured_total_count_has_no_entropy():
    with pytest.raises(Exception, match="total_count has no value in a capture"):
        to_static(lambda n: D.Binomial(n, 0.5).entropy())(paddle.to_tensor([3.0]))


def test_a_transform_written_for_paddlepaddle_says_its_type_and_ranks():
    class Cube(Transform):
        _type = Type.BIJECTION
        _domain = _codomain = Real(event_rank=1)

        def _forward(self, x):
            return x**3

        def _forward_log_det_jacobian(self, x):
            return (3 * x**2).log().sum(-1)

    class Square(Cube):
        _type = Type.SURJECTION

    assert (Cube().domain_rank, Cube().codomain_rank, Cube._is_injective()) == (1, 1, True)
    np.testing.assert_allclose(Cube().forward_log_det_jacobian([[1.0, 2.0]]), [np.log(36)], rtol=1e-6)
    with pytest.raises(ShapeError, match=r"Cube.forward: an event has 1 dims, got a Tensor of shape \[\]"):
        Cube().forward(2.0)
    with pytest.raises(NotImplementedError, match="it is not one-to-one"):
        Square().forward_log_det_jacobian([1.0])
