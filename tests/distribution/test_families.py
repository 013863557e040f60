"""Every family against SciPy: densities, moments, draws, derivatives; and captured, static and in float32."""

import numpy as np
import pytest
import scipy.stats as st

import polyreme as paddle
import polyreme.distribution as D
from polyreme import static
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from tests.distribution.families import FAMILIES, SIMPLEX
from tests.program.conftest import static_mode  # noqa: F401  (a fixture)

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
EPS = 2.0**-52
N = 4000
ORACLE = {"mean": "mean", "variance": "var", "entropy": "entropy"}


def made(family, dtype="float64", wants_grad=()):
    given = {n: paddle.to_tensor(v, dtype, stop_gradient=n not in wants_grad) for n, v in family.parameters.items()}
    return family.make(**given), given


def log_density(oracle, values):
    """SciPy's, which has another name where values are counts."""
    try:
        return oracle.logpdf(values)
    except AttributeError:
        return oracle.logpmf(values)


def near(got, want, family, scale=1.0):
    bound = 4 * family.terms * EPS * scale
    np.testing.assert_allclose(got.numpy(), want, rtol=bound, atol=bound * max(1.0, np.abs(want).max()))


@pytest.mark.slow_cases("Beta")
@every_family
def test_densities_and_moments_are_scipys(family):
    d, _ = made(family)
    oracle = family.scipy(**family.parameters)
    want = log_density(oracle, family.values)
    got = d.log_prob(paddle.to_tensor(family.values))
    assert got.dtype == "float64"
    near(got, want, family)
    near(d.prob(paddle.to_tensor(family.values)), np.exp(want), family)
    for value in family.outside:
        assert np.all(d.log_prob(value).numpy() == -np.inf)
    for name in family.has:
        if name in ORACLE:
            found = getattr(d, name)
            near(found() if callable(found) else found, getattr(oracle, ORACLE[name])(), family)
    if "cdf" in family.has:
        near(d.cdf(paddle.to_tensor(family.values)), oracle.cdf(family.values), family)
    if "icdf" in family.has:
        near(d.icdf(d.cdf(paddle.to_tensor(family.values))), np.broadcast_to(family.values, want.shape), family)
    if "variance" in family.has:
        near(d.stddev, np.sqrt(oracle.var()), family)


@pytest.mark.slow_cases("Beta", "Chi2", "ContinuousBernoulli")
@every_family
def test_draws_have_the_distribution(family):
    """Kolmogorov and Smirnov's test for numbers, moments for the others: wrong once in a million seeds."""
    paddle.seed(11)
    d, _ = made(family)
    got = d.sample([N])
    assert got.stop_gradient
    assert got.shape == [N, *d.batch_shape, *d.event_shape]
    draws = got.numpy().reshape(N, -1)
    if family.name in ("Bernoulli", "Binomial", "Geometric", "Poisson", "Dirichlet", "MultivariateNormal"):
        mean, spread = d.mean.numpy().ravel(), d.stddev.numpy().ravel()
        np.testing.assert_allclose((draws.mean(0) - mean) / spread, 0, atol=5 / np.sqrt(N))
        # the variance of a sample variance is (kurtosis - 1) / N, kurtosis at most 10 here
        np.testing.assert_allclose(draws.var(0) / spread**2, 1, atol=5 * np.sqrt(9 / N))
        return
    oracle = family.scipy(**family.parameters)
    uniform = np.asarray(oracle.cdf(got.numpy())).reshape(N, -1)
    for column in uniform.T:
        assert st.kstest(column, "uniform").pvalue > 1e-6
    assert np.ptp(draws) > 0


@pytest.mark.one_in(5)
@every_family
def test_derivatives_of_densities_are_finite_differences(family):
    d, arguments = made(family, wants_grad=family.differentiable)
    value = paddle.to_tensor(family.values)
    # the entropies of counts have no derivative by that number of terms; it is among the contract rows
    total = d.log_prob(value).sum() + (d.entropy().sum() if "entropy" in family.has else 0.0)
    step = 1e-6
    grads = paddle.grad(total, [arguments[n] for n in family.differentiable])
    for name, grad in zip(family.differentiable, grads, strict=True):
        ends = []
        for sign in (1, -1):
            moved = dict(family.parameters)
            shift = np.eye(3) if name == "covariance_matrix" else 1.0
            moved[name] = moved[name] + sign * step * shift
            other = family.make(**{n: paddle.to_tensor(v) for n, v in moved.items()})
            ends.append(other.log_prob(value).sum() + (other.entropy().sum() if "entropy" in family.has else 0.0))
        numeric = (float(ends[0]) - float(ends[1])) / (2 * step)
        analytic = float((grad * paddle.to_tensor(shift)).sum())
        # step^2 * third derivative, and rounding / step
        assert analytic == pytest.approx(numeric, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.unique], ids=lambda f: f.name)
def test_derivatives_of_draws_follow_from_the_distribution_function(family):
    """dx / dtheta = -(dF / dtheta) / density where x is a monotone function of one number (arXiv:1805.08498)."""
    paddle.seed(5)
    n = 7
    flat = {k: np.resize(v, n) for k, v in _flat(family).items()}
    given = {k: paddle.to_tensor(v, stop_gradient=k not in family.unique) for k, v in flat.items()}
    x = family.make(**given).rsample()
    assert not x.stop_gradient
    grads = paddle.grad(x.sum(), [given[k] for k in family.unique])
    step = 1e-6
    for name, grad in zip(family.unique, grads, strict=True):
        up, down = (family.scipy(**{**flat, name: flat[name] + s * step}).cdf(x.numpy()) for s in (1, -1))
        want = -(up - down) / (2 * step) / family.scipy(**flat).pdf(x.numpy())
        # rounding of the distribution function over step and density; a density of 0.01 and below is the tail
        np.testing.assert_allclose(grad.numpy(), want, rtol=1e-5, atol=1e-6)


def _flat(family):
    arrays = np.broadcast_arrays(*family.parameters.values())
    return {k: a.ravel() for k, a in zip(family.parameters, arrays, strict=True)}


@pytest.mark.slow
@pytest.mark.slow_cases("Dirichlet-<lambda>-value2-want2")
@pytest.mark.parametrize(
    ("family", "make", "value", "want"),
    [
        # d / da of a / (a + b)
        ("Beta", lambda a: D.Beta(a, 3.0).rsample(), 2.0, 3 / 25),
        # d / ddf of df / (df - 2), the mean of a square
        pytest.param(
            "StudentT", lambda df: D.StudentT(df, 0.0, 1.0).rsample() ** 2, 6.0, -2 / 16, marks=pytest.mark.slow
        ),
        # d / dc of c_1 / sum c
        ("Dirichlet", lambda c: D.Dirichlet(c).rsample()[:, 1], [1.0, 2.0, 3.0], [-2 / 36, 4 / 36, -2 / 36]),
    ],
)
def test_derivatives_of_draws_that_are_not_monotone_are_right_on_average(family, make, value, want):
    paddle.seed(3)
    n = 500
    given = paddle.to_tensor(np.tile(value, (n, *[1] * np.ndim(value))), "float64", stop_gradient=False)
    (grad,) = paddle.grad(make(given).sum(), [given])
    bound = 5 * grad.numpy().std(0) / np.sqrt(n)
    np.testing.assert_array_less(np.abs(grad.numpy().mean(0) - want), bound)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * bool(f.slow), id=f.name) for f in FAMILIES]
)
def test_captured_in_float32(family):
    """Densities and entropies as SciPy has them, draws as eager code."""

    def draw(*given):
        return family.make(*given).sample([2])

    def everything(*given):
        d = family.make(*given)
        found = [draw(*given), d.log_prob(paddle.to_tensor(family.values, "float32"))]
        # a captured total_count has no value, over which the entropy would sum
        return [*found, d.entropy()] if "entropy" in family.has and family.name != "Binomial" else found

    rounded = {n: np.float32(v) for n, v in family.parameters.items()}
    given = [paddle.to_tensor(v) for v in rounded.values()]
    paddle.seed(7)
    eager = draw(*given).numpy()
    paddle.seed(7)
    got = [t.numpy() for t in to_static(everything)(*given)]
    oracle = family.scipy(**{n: v.astype("float64") for n, v in rounded.items()})
    want = [eager, log_density(oracle, family.values)]
    want += [oracle.entropy()] * (len(got) - 2)
    bound = 4 * family.terms * 2.0**-23
    for g, w in zip(got, want, strict=True):
        assert g.dtype == "float32"
        np.testing.assert_allclose(g, w, rtol=bound, atol=bound)


@pytest.mark.slow
def test_a_static_program_draws_and_evaluates(static_mode):  # noqa: F811
    x = static.data("x", [None, 3])
    loc = paddle.static.create_parameter([3], "float32", default_initializer=paddle.nn.initializer.Constant(0.5))
    d = D.Normal(loc, x.exp())
    one = D.Gamma(x.exp(), 2.0)
    picks = D.Categorical(x)
    vectors = D.MultivariateNormal(x, np.eye(3, dtype="float32"))
    fetch = [d.log_prob(1.0), one.log_prob(1.0), picks.entropy(), d.sample([2]), one.sample(), picks.sample([4])]
    fetch.append(vectors.log_prob(vectors.sample()))
    exe = static.Executor()
    exe.run(static.default_startup_program())
    fed = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    found = exe.run(feed={"x": fed}, fetch_list=fetch)
    np.testing.assert_allclose(found[0], st.norm(0.5, np.exp(fed)).logpdf(1.0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], st.gamma(np.exp(fed), scale=0.5).logpdf(1.0), rtol=1e-4, atol=1e-5)
    assert [f.shape for f in found[2:]] == [(5,), (2, 5, 3), (5, 3), (4, 5), (5,)]


def test_parameters_keep_their_dtype_and_shape():
    assert D.Normal(0, 1).log_prob(0.0).shape == []
    assert D.Normal(0, 1).sample().dtype == "float32"
    assert D.Normal(np.zeros(2), 1.0).sample().dtype == "float64"
    assert D.Normal([0.0, 1.0], paddle.to_tensor(2.0, "float64")).loc.dtype == "float64"
    assert D.Gamma(paddle.to_tensor([1, 2]), 1.0).sample([3]).shape == [3, 2]
    assert D.Normal(np.zeros((0, 2), "float32"), 1.0).sample([3]).shape == [3, 0, 2]
    assert D.Poisson(2.0).batch_shape == (1,)
    loc = paddle.to_tensor([0.5], stop_gradient=False)
    assert D.Normal(loc, 1.0).loc is loc
    assert D.Normal(loc, 1.0).rsample([2]).stop_gradient is False


def test_seeds_fix_draws():
    paddle.seed(4)
    first = D.Gamma([1.0, 2.0], 1.0).sample([3]).numpy()
    paddle.seed(4)
    np.testing.assert_array_equal(D.Gamma([1.0, 2.0], 1.0).sample([3]).numpy(), first)
    for d in (D.Normal([0.0, 1.0], 2.0), D.Uniform([0.0, 1.0], 2.0), D.Normal(1j, 2.0)):
        np.testing.assert_array_equal(d.sample([3], seed=9).numpy(), d.sample([3], seed=9).numpy())
        assert np.any(d.sample([3]).numpy() != d.sample([3]).numpy())


def test_complex_normal():
    """Circular: of a complex number z with E|z - loc|^2 = scale^2, as a real vector of two parts of half that."""
    paddle.seed(2)
    d = D.Normal(1 + 1j, 2.0)
    parts = st.multivariate_normal([1, 1], 2 * np.eye(2))
    np.testing.assert_allclose(d.log_prob(2 + 0.5j).item(), parts.logpdf([2, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(d.entropy().item(), parts.entropy(), rtol=1e-6)
    draws = d.sample([N]).numpy()
    # real and imaginary parts of variance 2; a variance's own is 2 * 2^2 / N
    for part in (draws.real, draws.imag):
        assert part.var() == pytest.approx(2, abs=5 * np.sqrt(8 / N))
        assert part.mean() == pytest.approx(1, abs=5 * np.sqrt(2 / N))


def test_categorical_takes_logits_in_both_ways():
    """Numbers of PaddlePaddle 3.3.1 for logits [1, 2, 3, 4]: probabilities by their sum, entropy by their softmax."""
    one, two = D.Categorical([1.0, 2.0, 3.0, 4.0]), D.Categorical([4.0, 3.0, 2.0, 1.0])
    np.testing.assert_allclose(one.prob([0, 1, 3]), [0.1, 0.2, 0.4], rtol=1e-6)
    np.testing.assert_allclose(one.log_prob(2).item(), -1.2039728, rtol=1e-6)
    np.testing.assert_allclose(one.entropy().item(), 0.94753695, rtol=1e-6)
    np.testing.assert_allclose(one.kl_divergence(two), [1.9853055], rtol=1e-6)
    paddle.seed(0)
    share = np.bincount(one.sample([N]).numpy()) / N
    soft = np.exp([1, 2, 3, 4]) / np.exp([1, 2, 3, 4]).sum()
    np.testing.assert_allclose(share, soft, atol=5 * np.sqrt(0.25 / N))
    batch = D.Categorical([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    np.testing.assert_allclose(batch.prob([0, 1]), [[1 / 6, 1 / 3], [1 / 2, 1 / 3]], rtol=1e-6)
    np.testing.assert_allclose(batch.prob([[0], [1]]), [[1 / 6], [1 / 3]], rtol=1e-6)
    np.testing.assert_allclose(batch.prob(0), [1 / 6, 1 / 2], rtol=1e-6)
    assert batch.sample([5, 4]).shape == [5, 4, 2]
    assert batch.sample([5]).dtype == "int64"
    with pytest.raises(ConfigError, match=r"Categorical.sample: logits needs every value a number below infinity"):
        D.Categorical([np.nan, 1.0]).sample([1])


def test_multinomial():
    paddle.seed(1)
    d = D.Multinomial(4, 2 * SIMPLEX)
    value = np.array([1.0, 1.0, 2.0])
    want = [st.multinomial(4, p) for p in SIMPLEX]
    np.testing.assert_allclose(d.log_prob(value).numpy(), [w.logpmf(value) for w in want], rtol=1e-12)
    np.testing.assert_allclose(d.entropy().numpy(), [w.entropy() for w in want], rtol=1e-12)
    np.testing.assert_allclose(d.mean.numpy(), 4 * SIMPLEX, rtol=1e-12)
    assert np.all(d.log_prob([1.0, 1.0, 3.0]).numpy() == -np.inf)
    draws = d.sample([N]).numpy()
    np.testing.assert_array_equal(draws.sum(-1), 4)
    np.testing.assert_allclose(draws.var(0), d.variance.numpy(), atol=5 * np.sqrt(10 / N))


@pytest.mark.slow_cases("onion")
@pytest.mark.parametrize("method", ["onion", "cvine"])
def test_lkj_draws(method):
    """Each correlation is 2 b - 1, b from Beta(s, s), s = concentration - 1 + dim / 2 (Lewandowski et al. 2009)."""
    paddle.seed(6)
    d = D.LKJCholesky(4, paddle.to_tensor([0.7, 2.0], "float64"), method)
    draws = d.sample([N]).numpy()
    assert draws.shape == (N, 2, 4, 4)
    np.testing.assert_array_equal(draws, np.tril(draws))
    np.testing.assert_allclose((draws**2).sum(-1), 1, rtol=1e-12)
    correlations = draws @ draws.swapaxes(-1, -2)
    for at, eta in enumerate((0.7, 2.0)):
        for i, j in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
            share = (correlations[:, at, i, j] + 1) / 2
            assert st.kstest(share, st.beta(eta + 1, eta + 1).cdf).pvalue > 1e-6


def test_lkj_density():
    """Integrates to 1: for dim 2 over the entry, for dim 3 by draws that are uniform over the half spheres."""
    r = np.linspace(-1, 1, 20002)[1:-1]
    factors = np.zeros((len(r), 2, 2))
    factors[:, 0, 0], factors[:, 1, 0], factors[:, 1, 1] = 1, r, np.sqrt(1 - r**2)
    mass = D.LKJCholesky(2, paddle.to_tensor(2.5, "float64")).prob(factors).numpy()
    assert np.trapezoid(mass, r) == pytest.approx(1, rel=1e-6)
    # numbers of PaddlePaddle 3.3.1, whose density is right (its draws are not)
    given = [[[1, 0, 0], [-0.0488711, 0.99880517, 0], [-0.28785187, 0.27872977, 0.9162157]]]
    found = D.LKJCholesky(3, 2.0).log_prob(np.array(given, "float32"))
    np.testing.assert_allclose(found, [-0.7940768], rtol=1e-5)
    rng = np.random.default_rng(0)
    x = np.zeros((20000, 3, 3))
    x[:, 0, 0] = 1
    x[:, 1, 0] = rng.uniform(-1, 1, 20000)
    angle, radius = rng.uniform(0, 2 * np.pi, 20000), np.sqrt(rng.uniform(0, 1, 20000))
    x[:, 2, 0], x[:, 2, 1] = radius * np.cos(angle), radius * np.sin(angle)
    x[:, 1, 1] = np.sqrt(1 - x[:, 1, 0] ** 2)
    x[:, 2, 2] = np.sqrt(1 - x[:, 2, 0] ** 2 - x[:, 2, 1] ** 2)
    mass = D.LKJCholesky(3, paddle.to_tensor(1.5, "float64")).prob(x).numpy() * 2 * np.pi
    assert mass.mean() == pytest.approx(1, abs=5 * mass.std() / np.sqrt(20000))


def test_matrices_of_a_multivariate_normal():
    covariance = np.array([[2.0, 0.5], [0.5, 1.0]])
    ways = [
        D.MultivariateNormal(np.zeros(2), covariance_matrix=covariance),
        D.MultivariateNormal(np.zeros(2), precision_matrix=np.linalg.inv(covariance)),
        D.MultivariateNormal(np.zeros(2), scale_tril=np.linalg.cholesky(covariance)),
    ]
    for d in ways:
        np.testing.assert_allclose(d.covariance_matrix, covariance, rtol=1e-12)
        np.testing.assert_allclose(d.precision_matrix, np.linalg.inv(covariance), rtol=1e-12)
        np.testing.assert_allclose(d.scale_tril, np.linalg.cholesky(covariance), rtol=1e-12)
        np.testing.assert_allclose(d.variance, [2, 1], rtol=1e-12)
    assert D.MultivariateNormal(1.0, np.eye(3, dtype="float32")).sample([2]).shape == [2, 3]


def test_relaxed_bernoulli():
    """Logits of the Concrete distribution: logits plus logistic noise, over the temperature."""
    paddle.seed(8)
    p = paddle.to_tensor(np.full(N, 0.3), stop_gradient=False)
    relaxed = D.Bernoulli(p).rsample(temperature=0.5)
    noise = 0.5 * relaxed.numpy() - np.log(0.3 / 0.7)
    assert st.kstest(noise, "logistic").pvalue > 1e-6
    (grad,) = paddle.grad(relaxed.sum(), [p])
    np.testing.assert_allclose(grad.numpy(), 1 / (0.3 * 0.7) / 0.5, rtol=1e-12)


def test_moments_that_do_not_exist():
    np.testing.assert_array_equal(D.StudentT([0.5, 1.5, 3.0], 1.0, 1.0).mean, [np.nan, 1, 1])
    np.testing.assert_array_equal(D.StudentT([0.5, 1.5, 3.0], 1.0, 1.0).variance, [np.nan, np.inf, 3])
    with pytest.raises(ValueError, match="Cauchy: its mean does not exist"):
        _ = D.Cauchy(0.0, 1.0).mean
    np.testing.assert_allclose(D.Geometric([0.3, 1.0]).entropy(), [st.geom(0.3).entropy(), 0], rtol=1e-6)


def test_edges_of_probabilities():
    sure = D.Bernoulli([0.0, 1.0])
    np.testing.assert_array_equal(sure.log_prob(1.0), [-np.inf, 0])
    np.testing.assert_array_equal(sure.entropy(), [0, 0])
    np.testing.assert_array_equal(sure.cdf([0.5, 0.5]), [1, 0])
    np.testing.assert_array_equal(D.Geometric([0.5, 1.0]).sample([20]).numpy()[:, 1], 0)
    # log-gammas of up to log 6, which cancel
    np.testing.assert_allclose(D.Binomial(3, [0.0, 1.0]).log_prob([0.0, 3.0]), [0, 0], atol=8 * 2.0**-23)
    np.testing.assert_array_equal(D.Uniform(1.0, 3.0).log_prob([1.0, 3.0]).numpy() > -np.inf, [True, False])


def test_moments_that_are_small_differences_of_large_numbers():
    # within 2e-3 of 1/2 the variance is 1/12 - (p - 1/2)^2 / 15
    near = D.ContinuousBernoulli([0.498, 0.499, 0.5, 0.5011])
    np.testing.assert_allclose(near.variance, np.full(4, 1 / 12), rtol=1e-5)
    np.testing.assert_allclose(near.mean, 0.5 + np.array([-0.002, -0.001, 0, 0.0011]) / 3, rtol=1e-6)
    counts = D.Binomial([1000.0, 5000.0], [0.6, 0.01])
    np.testing.assert_allclose(counts.entropy(), st.binom([1000, 5000], np.float32([0.6, 0.01])).entropy(), rtol=1e-6)
