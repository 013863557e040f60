"""Contract rows of ops/losses/elementwise.py: every loss unreduced, and each reduction."""

import numpy as np
import scipy.special as sp

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError


def floats(*args, n=2, shape=(3, 4)):
    return lambda rng: (*(rng.standard_normal(shape).astype("float32") for _ in range(n)), *args)


def chances(*args, n=2, shape=(3, 4)):
    return lambda rng: (*(rng.uniform(0.1, 0.9, shape).astype("float32") for _ in range(n)), *args)


def mixed(*args, shape=(3, 4)):
    """A normal array, then one of numbers in (0, 1)."""
    return lambda rng: (*floats(n=1, shape=shape)(rng), *chances(n=1, shape=shape)(rng), *args)


def signed(*args, n=1, shape=(3, 4)):
    """n normal arrays, then one of +1 and -1 as integers, which carry no gradient."""
    return lambda rng: (*floats(n=n, shape=shape)(rng), rng.choice([-1, 1], shape), *args)


REDUCE = {"none": lambda v: v, "mean": np.mean, "sum": np.sum}


def rows(name, make, loss, terms=24, bad=None, **kwargs):
    """One row a reduction; loss(arrays) is unreduced."""
    return [
        Case(name, make, lambda *a, reduction, r=r, **k: REDUCE[r](loss(*a)), kwargs={**kwargs, "reduction": r}, tag="-".join([*map(str, kwargs), r]), terms=terms, bad=bad if r == "none" else None)
        for r in REDUCE
    ]  # fmt: skip


A23, A24 = np.ones((2, 3), "float32"), np.ones((2, 4), "float32")
APART = ((A23, A24), ShapeError, r"\[2, 3\].*\[2, 4\]")
BROADCAST = ((A23, A23[None]), ShapeError, r"\[2, 3\] and \[1, 2, 3\], and need one")


def entropy(p, y):
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


def logit_entropy(x, y, positive=1.0):
    return -(positive * y * sp.log_expit(x) + (1 - y) * sp.log_expit(-x))


def focal(x, y, alpha=0.25, gamma=2.0):
    p = sp.expit(x)
    q = np.where(y == 1, p, 1 - p)
    return -np.where(y == 1, alpha, 1 - alpha) * (1 - q) ** gamma * np.log(q)


def huber(x, y, delta=1.0):
    e = np.abs(x - y)
    return np.where(e < delta, e * e / 2, delta * (e - delta / 2))


def kl(x, y):
    return sp.xlogy(y, y) - y * x


def stirling(y):
    return np.where(y > 1, sp.xlogy(y, y) - y + 0.5 * np.log(2 * np.pi * np.maximum(y, 1)), 0)


def gauss(x, y, v, full=False):
    v = np.maximum(v, 1e-6)
    return 0.5 * (np.log(v) + (x - y) ** 2 / v) + (0.5 * np.log(2 * np.pi) if full else 0)


def cos(x, y, axis=-1):
    return (x * y).sum(axis) / np.linalg.norm(x, axis=axis) / np.linalg.norm(y, axis=axis)


def apart(x, y, p=2, eps=1e-6):
    return np.linalg.norm(x - y + eps, p, -1)


def triplet(x, near, far, p=2, swap=False):
    other = np.minimum(apart(x, far, p), apart(near, far, p)) if swap else apart(x, far, p)
    return np.maximum(apart(x, near, p) - other + 1, 0)


def manhattan(x, y):
    return abs(x - y).sum(-1)


ONE_HOT = np.float32([[0, 0.2, 0.8]])
V12 = np.float32([0.5, 2.0, 1.0, 1.5])

CASES = [
    *rows("mse_loss", floats(), lambda x, y: (x - y) ** 2, bad=APART),
    Case("mse_loss", lambda rng: (*floats(n=1)(rng), rng.integers(0, 3, 4)), lambda x, y: ((x - y) ** 2).mean(), tag="broadcast-int", terms=24, bad=((A23, A23, "avg"), ConfigError, "reduction='avg'")),
    Case("square_error_cost", floats(), lambda x, y: (x - y) ** 2, bad=APART),
    *rows("l1_loss", floats(), lambda x, y: np.abs(x - y), bad=APART),
    Case("l1_loss", lambda rng: (np.complex64([3 + 4j, 1]), np.complex64([0, 1j])), lambda x, y: np.abs(x - y).mean(), tag="complex"),
    *rows("smooth_l1_loss", floats(), huber, bad=BROADCAST),
    Case("smooth_l1_loss", floats("sum", 0.5, False), lambda x, y, *_: huber(x, y, 0.5).sum() / 0.5, terms=24, tag="delta", bad=((A23, A23, "sum", 0), ConfigError, "delta=0")),
    *rows("binary_cross_entropy", chances(), entropy, bad=APART),
    Case("binary_cross_entropy", chances(V12), lambda p, y, w: (entropy(p, y) * w).mean(), terms=24, tag="weight"),
    Case("binary_cross_entropy", lambda rng: (np.float32([1.5, -0.2]), np.float32([1, 0]), None, "none"), lambda *_: np.array([np.nan, np.nan]), no_grad="no probabilities", tag="outside"),
    Case("binary_cross_entropy", lambda rng: (np.float32([0, 1, 0.5]), np.float32([1, 0, 1]), None, "none"), lambda *_: np.array([100, 100, np.log(2)]), no_grad="held at -100", tag="ends"),
    *rows("binary_cross_entropy_with_logits", mixed(), logit_entropy, bad=APART),
    Case("binary_cross_entropy_with_logits", mixed(V12, "mean", V12 + 1), lambda x, y, w, r, p: (w * logit_entropy(x, y, p)).mean(), terms=24, tag="weights"),
    Case("binary_cross_entropy_with_logits", lambda rng: (np.float32([200, -200]), np.float32([0, 1])), lambda x, y: (np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))).mean(), tag="large"),
    *rows("sigmoid_focal_loss", lambda rng: (*floats(n=1)(rng), rng.integers(0, 2, (3, 4))), focal, bad=APART),
    Case("sigmoid_focal_loss", lambda rng: (*floats(n=1)(rng), rng.integers(0, 2, (3, 4)), np.float32([4]), 0.6, 1.5), lambda x, y, n, a, g: (focal(x, y, a, g) / n).sum(), terms=24, tag="normalizer"),
    Case("log_loss", chances(0.01), lambda p, y, e: -y * np.log(p + e) - (1 - y) * np.log(1 - p + e), bad=APART),
    Case("label_smooth", chances(n=1), lambda y: 0.9 * y + 0.1 / 4, bad=((A23, A24[:1]), ShapeError, r"prior_dist \[1, 4\]")),
    Case("label_smooth", lambda rng: (*chances(n=1, shape=(2, 3))(rng), ONE_HOT, 0.3), lambda y, d, e: 0.7 * y + 0.3 * d, tag="prior", bad=((A23, None, 1.5), ConfigError, "epsilon=1.5")),
    Case("label_smooth", lambda rng: (np.ones((3, 0), "float32"),), lambda y: y, no_grad="no elements", tag="no-classes"),
    Case("label_smooth", lambda rng: (np.eye(3, dtype="int64"),), lambda y: (0.9 * y + 0.1 / 3).astype("float32"), no_grad="integers", tag="int"),
    Case("dice_loss", lambda rng: (*chances(n=1, shape=(2, 5, 3))(rng), rng.integers(0, 3, (2, 5, 1))), lambda p, y: np.mean([1 - 2 * (q * o).sum() / (q.sum() + o.sum() + 1e-5) for q, o in zip(p, np.eye(3)[y[..., 0]], strict=True)]), terms=40, bad=((A23, A23.astype(int)), ShapeError, r"label \[2, 3\]")),
    *rows("kl_div", mixed(), kl, bad=BROADCAST),
    *rows("kl_div", floats(), lambda x, y: np.exp(y) * (y - x), log_target=True),
    Case("kl_div", mixed("batchmean"), lambda x, y, _: kl(x, y).sum() / 3, terms=24, tag="batchmean", bad=((A23, A23, "batch"), ConfigError, "reduction='batch'")),
    Case("kl_div", lambda rng: (np.float32([[-1, -2, -3]]), np.float32([[0, 1, 0]]), "none"), lambda x, y, _: np.float32([[0, 2, 0]]), no_grad="at the edge of the labels' range", tag="zero"),
    *rows("poisson_nll_loss", mixed(), lambda x, y: np.exp(x) - y * x, bad=BROADCAST),
    Case("poisson_nll_loss", lambda rng: (*chances(n=1)(rng), rng.uniform(1.5, 9, (3, 4)).astype("float32"), False, True, 1e-3), lambda x, y, *_: (x - y * np.log(x + 1e-3) + stirling(y)).mean(), terms=24, tag="full", bad=((A23, A23, True, False, 0), ConfigError, "epsilon=0")),
    *rows("gaussian_nll", lambda rng: (*floats()(rng), *chances(n=1)(rng)), gauss, bad=((A23, A23, A24), ShapeError, r"variance \[2, 4\]")),
    *rows("gaussian_nll_loss", lambda rng: (*floats()(rng), *chances(n=1, shape=(3, 1))(rng)), gauss, bad=((A23, A23, -A23), ConfigError, "negative entry -1.0")),
    Case("gaussian_nll_loss", lambda rng: (*floats()(rng), *chances(n=1, shape=(3,))(rng), True), lambda x, y, v, f: gauss(x, y, v[:, None], True).mean(), terms=24, tag="full"),
    *rows("margin_ranking_loss", signed(n=2), lambda x, y, t: np.maximum(-t * (x - y), 0), bad=((A23, A24, A24), ShapeError, r"\[2, 3\].*\[2, 4\]")),
    Case("margin_ranking_loss", signed(0.4, n=2), lambda x, y, t, m: np.maximum(-t * (x - y) + m, 0).mean(), terms=24, tag="margin"),
    Case("hinge_embedding_loss", lambda rng: (np.float32([0.5, 0.5, 0.5]), np.float32([1, -1, 2]), 2.0, "none"), lambda x, t, m, r: np.float32([0.5, 1.5, 0]), tag="other labels"),
    *rows("hinge_embedding_loss", signed(), lambda x, t: np.where(t == 1, x, np.maximum(1 - x, 0)), bad=APART),
    *rows("soft_margin_loss", signed(), lambda x, t: np.logaddexp(0, -t * x), bad=APART),
    *rows("multi_label_soft_margin_loss", lambda rng: (*floats(n=1)(rng), rng.integers(0, 2, (3, 4))), lambda x, y: logit_entropy(x, y).mean(-1), bad=APART),
    Case("multi_label_soft_margin_loss", lambda rng: (*floats(n=1)(rng), rng.integers(0, 2, (3, 4)), V12), lambda x, y, w: (logit_entropy(x, y) * w).mean(), terms=24, tag="weight"),
    *rows("cosine_embedding_loss", lambda rng: (*floats()(rng), np.array([1, -1, 1])), lambda x, y, t: np.where(t == 1, 1 - cos(x, y), np.maximum(cos(x, y), 0)), bad=((A23, A23, A23), ShapeError, "label")),
    Case("cosine_embedding_loss", lambda rng: (*floats(shape=(4,))(rng), np.array(-1), -0.9), lambda x, y, t, m: np.maximum(cos(x, y) - m, 0), tag="one", bad=((A23, A23, np.array([1, 1]), 2.0), ConfigError, "margin=2.0")),
    *rows("triplet_margin_loss", floats(n=3), triplet, bad=((A23, A23, A23[:1]), ShapeError, r"input and negative .*\[2, 3\] and \[1, 3\]")),
    Case("triplet_margin_loss", floats(n=3), lambda x, y, z, **_: triplet(x, y, z, 3, True).mean(), kwargs={"p": 3, "swap": True}, terms=24, tag="swap"),
    Case("triplet_margin_loss", floats(1.0, n=3), lambda x, y, z, m: triplet(x, y, z).mean(), terms=24, tag="margin", bad=((A23, A23, A23, 0), ConfigError, "margin=0")),
    *rows("triplet_margin_with_distance_loss", floats(n=3), triplet, bad=((A23, A23[:1], A23), ShapeError, r"input and positive .*\[2, 3\] and \[1, 3\]")),
    Case("triplet_margin_with_distance_loss", floats(n=3), lambda x, y, z, **_: np.maximum(np.abs(x - y).sum(-1) - np.minimum(np.abs(x - z).sum(-1), np.abs(y - z).sum(-1)) + 3, 0).mean(), kwargs={"distance_function": manhattan, "swap": True, "margin": 3.0}, terms=24, tag="distance"),
]  # fmt: skip
