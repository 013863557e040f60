"""kl_divergence: every closed form against integration, sums or draws; how a function is found."""

import numpy as np
import pytest
import scipy.stats as st
from scipy.integrate import quad

import polyreme as paddle
import polyreme.distribution as D
from polyreme import static
from polyreme.errors import ConfigError, ShapeError
from tests.program.conftest import static_mode  # noqa: F401  (a fixture)

N = 4000


def f64(*values):
    return [paddle.to_tensor(np.asarray(v, "float64")) for v in values]


def cb(p):
    t = np.log(p / (1 - p))
    return type("CB", (), {"logpdf": staticmethod(lambda x: x * t + np.log(1 - p) + np.log(t / (2 * p - 1)))})


# family, two sets of parameters, SciPy's, where to integrate (None: sum over counts below 200)
CLOSED = [
    (D.Normal, (0.3, 1.2), (-0.5, 0.8), st.norm, (-15, 15)),
    (D.Laplace, (0.3, 1.2), (-0.5, 0.8), st.laplace, (-60, 60)),
    (D.Cauchy, (0.3, 1.2), (-0.5, 0.8), st.cauchy, (-np.inf, np.inf)),
    (D.Gumbel, (0.3, 0.6), (-0.5, 0.8), st.gumbel_r, (-8, 30)),
    (D.Uniform, (0.3, 0.8), (0.0, 2.0), lambda a, b: st.uniform(a, b - a), (0.3, 0.8)),
    (D.LogNormal, (0.3, 0.5), (-0.5, 0.8), lambda m, s: st.lognorm(s, scale=np.exp(m)), (0, 60)),
    (D.Gamma, (2.0, 1.2), (1.5, 0.8), lambda a, b: st.gamma(a, scale=1 / b), (0, 60)),
    (D.Chi2, (3.0,), (5.0,), st.chi2, (0, 100)),
    (D.Exponential, (1.2,), (0.5,), lambda r: st.expon(scale=1 / r), (0, 60)),
    (D.Beta, (2.0, 1.2), (1.5, 3.0), st.beta, (0, 1)),
    (D.ContinuousBernoulli, (0.3,), (0.8,), cb, (0, 1)),
    (D.Bernoulli, (0.3,), (0.8,), st.bernoulli, None),
    (D.Binomial, (5, 0.3), (5, 0.8), st.binom, None),
    (D.Geometric, (0.3,), (0.4,), lambda p: st.geom(p, loc=-1), None),
    (D.Poisson, (2.0,), (3.5,), st.poisson, None),
]


@pytest.mark.parametrize("row", CLOSED, ids=lambda r: r[0].__name__)
def test_closed_forms_are_integrals(row):
    family, first, second, scipy, interval = row
    p, q = scipy(*first), scipy(*second)
    if interval is None:
        k = np.arange(200)
        k = k[p.pmf(k) > 0]
        want = np.sum(p.pmf(k) * (p.logpmf(k) - q.logpmf(k)))
    else:
        want, _ = quad(lambda x: np.exp(p.logpdf(x)) * (p.logpdf(x) - q.logpdf(x)), *interval, epsabs=1e-10, limit=200)
    got = D.kl_divergence(family(*f64(*first)), family(*f64(*second)))
    # what quad promises
    np.testing.assert_allclose(np.squeeze(got.numpy()), want, rtol=1e-7, atol=1e-9)


def test_divergences_of_vectors_are_means_over_draws():
    paddle.seed(9)
    a, b = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([[1.0, -0.3], [-0.3, 2.0]])
    pairs = [
        (D.Dirichlet(np.array([2.0, 3.0, 4.0])), D.Dirichlet(np.array([1.0, 5.0, 2.0]))),
        (D.MultivariateNormal(np.zeros(2), a), D.MultivariateNormal(np.ones(2), b)),
        (D.Multinomial(5, np.array([0.2, 0.3, 0.5])), D.Multinomial(5, np.array([0.3, 0.3, 0.4]))),
        (D.Independent(D.Normal(np.zeros(3), 1.0), 1), D.Independent(D.Normal(np.ones(3), 2.0), 1)),
    ]
    for p, q in pairs:
        x = p.sample([N])
        each = (p.log_prob(x) - q.log_prob(x)).numpy()
        assert p.kl_divergence(q).item() == pytest.approx(each.mean(), abs=5 * each.std() / np.sqrt(N))
        assert p.kl_divergence(p).item() == pytest.approx(0, abs=1e-12)


def test_complex_normals_are_pairs_of_real_ones():
    got = D.kl_divergence(D.Normal(*f64(0.3), 1.2), D.Normal(*f64(-0.5), 0.8)).item()
    found = D.kl_divergence(D.Normal(0.3 + 0.3j, 1.2 * 2**0.5), D.Normal(-0.5 - 0.5j, 0.8 * 2**0.5))
    assert found.item() == pytest.approx(2 * got, rel=1e-6)


def test_uniform_outside_is_infinitely_far():
    assert D.kl_divergence(D.Uniform(0.0, 2.0), D.Uniform(0.0, 1.0)).item() == np.inf


class Pareto(D.ExponentialFamily):
    """Density a x^(-a - 1) for x >= 1: t(x) = log x, theta = -a - 1, F = -log(-1 - theta), k = 0."""

    def __init__(self, a):
        self.a = a
        super().__init__(a.shape)

    @property
    def _natural_parameters(self):
        return (-self.a - 1,)

    def _log_normalizer(self, x):
        return -(-1 - x).log()

    _mean_carrier_measure = 0


class Near(Pareto):
    pass


def test_an_exponential_family_of_ones_own():
    """Entropy and divergence follow from the log normalizer, and have derivatives."""
    a = paddle.to_tensor(np.array([1.5, 3.0]), stop_gradient=False)
    b = paddle.to_tensor(np.array([2.0, 0.7]))
    entropy = Pareto(a).entropy()
    np.testing.assert_allclose(entropy.numpy(), st.pareto(a.numpy()).entropy(), rtol=1e-12)
    (slope,) = paddle.grad(entropy.sum(), [a])
    # d / da of 1 + 1 / a - log a
    np.testing.assert_allclose(slope.numpy(), -1 / a.numpy() ** 2 - 1 / a.numpy(), rtol=1e-12)
    assert Pareto(b).entropy().stop_gradient
    want = np.log(a.numpy() / b.numpy()) + b.numpy() / a.numpy() - 1
    np.testing.assert_allclose(D.kl_divergence(Pareto(a), Pareto(b)).numpy(), want, rtol=1e-12)
    for family, args in ((D.Gamma, (a, b)), (D.Exponential, (a,)), (D.Beta, (a, b)), (D.Bernoulli, (b / 4,))):
        p, q = family(*args), family(*(v * 0.9 for v in args))
        bregman = D.kl.kl_divergence(p, q) if family is D.Beta else D.exponential_family._bregman(p, q)
        np.testing.assert_allclose(bregman.numpy(), p.kl_divergence(q).numpy(), rtol=1e-10)
    with pytest.raises(NotImplementedError, match="between two of one class"):
        D.kl_divergence(Pareto(a), D.Gamma(a, b))
    with pytest.raises(NotImplementedError, match="Distribution has no entropy"):
        D.Distribution().entropy()


def test_a_family_of_ones_own_in_a_static_program(static_mode):  # noqa: F811
    x = static.data("x", [None, 2], "float64")
    fetch = [D.kl_divergence(Pareto(x), Pareto(x * 2)), Pareto(x).entropy()]
    fed = np.array([[1.5, 3.0]])
    found = static.Executor().run(feed={"x": fed}, fetch_list=fetch)
    np.testing.assert_allclose(found[0], np.full((1, 2), 1 - np.log(2)), rtol=1e-12)
    np.testing.assert_allclose(found[1], st.pareto(fed).entropy(), rtol=1e-12)


def test_a_captured_family_of_ones_own():
    a = paddle.to_tensor(np.array([1.5, 3.0]))
    got = paddle.jit.to_static(lambda x: D.kl_divergence(Pareto(x), Pareto(x * 2)))(a)
    np.testing.assert_allclose(got.numpy(), 1 - np.log(2), rtol=1e-12)


def test_the_nearest_function_is_found():
    a = paddle.to_tensor([1.0])
    D.register_kl(Pareto, D.Distribution)(lambda p, q: "far")
    assert D.kl_divergence(Near(a), D.Normal(0.0, 1.0)) == "far"
    D.register_kl(Near, Near)(lambda p, q: "near")
    assert D.kl_divergence(Near(a), Near(a)) == "near"
    D.register_kl(D.Distribution, Near)(lambda p, q: "other")
    with pytest.raises(ConfigError, match=r"fit equally well; register one for \(Pareto, Near\)"):
        D.kl_divergence(Pareto(a), Near(a))
    with pytest.raises(NotImplementedError, match=r"kl_divergence\(Normal, Gamma\): no function is registered"):
        D.kl_divergence(D.Normal(0.0, 1.0), D.Gamma(1.0, 1.0))
    with pytest.raises(ConfigError, match="two subclasses of Distribution, got 3"):
        D.register_kl(3, Near)


def test_divergences_that_have_no_closed_form():
    with pytest.raises(ConfigError, match=r"total_count is 5.0 and 6.0"):
        D.kl_divergence(D.Binomial(5, 0.3), D.Binomial(6, 0.3))
    with pytest.raises(ConfigError, match="total_count is 5 and 6"):
        D.kl_divergence(D.Multinomial(5, [0.3, 0.7]), D.Multinomial(6, [0.3, 0.7]))
    with pytest.raises(ConfigError, match="reinterpreted_batch_rank is 1 and 2"):
        D.kl_divergence(*(D.Independent(D.Normal(np.zeros((2, 2)), 1.0), n) for n in (1, 2)))
    with pytest.raises(ShapeError, match="lengths 2 and 3"):
        D.kl_divergence(*(D.MultivariateNormal(np.zeros(n), np.eye(n)) for n in (2, 3)))
