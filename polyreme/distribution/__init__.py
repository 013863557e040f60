"""Probability distributions, transforms of them, and divergences between them."""

from polyreme.distribution.categorical import Categorical, Multinomial
from polyreme.distribution.continuous_bernoulli import ContinuousBernoulli
from polyreme.distribution.counts import Bernoulli, Binomial, Geometric, Poisson
from polyreme.distribution.distribution import Distribution
from polyreme.distribution.elementwise_transforms import (
    AbsTransform,
    AffineTransform,
    ExpTransform,
    PowerTransform,
    SigmoidTransform,
    TanhTransform,
)
from polyreme.distribution.exponential_family import ExponentialFamily
from polyreme.distribution.gamma import Beta, Chi2, Dirichlet, Exponential, Gamma
from polyreme.distribution.independent import Independent
from polyreme.distribution.kl import kl_divergence, register_kl
from polyreme.distribution.lkj_cholesky import LKJCholesky
from polyreme.distribution.location_scale import Cauchy, Gumbel, Laplace, Normal, StudentT, Uniform
from polyreme.distribution.log_normal import LogNormal
from polyreme.distribution.multivariate_normal import MultivariateNormal
from polyreme.distribution.transform import ChainTransform, IndependentTransform, Transform, TransformedDistribution
from polyreme.distribution.vector_transforms import (
    ReshapeTransform,
    SoftmaxTransform,
    StackTransform,
    StickBreakingTransform,
)
from polyreme.module_names import suggest_names

__all__ = [
    "AbsTransform",
    "AffineTransform",
    "Bernoulli",
    "Beta",
    "Binomial",
    "Categorical",
    "Cauchy",
    "ChainTransform",
    "Chi2",
    "ContinuousBernoulli",
    "Dirichlet",
    "Distribution",
    "ExpTransform",
    "Exponential",
    "ExponentialFamily",
    "Gamma",
    "Geometric",
    "Gumbel",
    "Independent",
    "IndependentTransform",
    "LKJCholesky",
    "Laplace",
    "LogNormal",
    "Multinomial",
    "MultivariateNormal",
    "Normal",
    "Poisson",
    "PowerTransform",
    "ReshapeTransform",
    "SigmoidTransform",
    "SoftmaxTransform",
    "StackTransform",
    "StickBreakingTransform",
    "StudentT",
    "TanhTransform",
    "Transform",
    "TransformedDistribution",
    "Uniform",
    "kl_divergence",
    "register_kl",
]

suggest_names(__name__)
