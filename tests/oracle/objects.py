"""Distributions and sparse functions of the differential run: what is made of which arguments, and then called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.oracle.calls import Call
from tests.oracle.layers import ids, unit, x
from tests.oracle.side import Sparse

LOC, SCALE, POSITIVE = x(2, 3), unit(2, 3), 3 * unit(2, 3)
SHARE = (unit(2, 3) / unit(2, 3).sum(-1, keepdims=True)).astype("float32")
TRIL = np.float32([[1.5, 0, 0], [0.3, 1, 0], [-0.2, 0.4, 0.8]])
COUNTS = np.float32([[1, 2, 1], [0, 3, 1]])
# class: arguments, a value in the support
FAMILIES: dict[str, tuple[tuple, np.ndarray]] = {
    "Bernoulli": ((unit(2, 3),), ids(2, 2, 3).astype("float32")),
    "Beta": ((POSITIVE, POSITIVE[::-1].copy()), unit(2, 3)),
    "Binomial": ((5, unit(2, 3)), ids(6, 2, 3).astype("float32")),
    "Categorical": ((POSITIVE,), ids(3, 2)),
    "Cauchy": ((LOC, SCALE), x(2, 3)),
    "Chi2": ((POSITIVE,), POSITIVE),
    "ContinuousBernoulli": ((0.8 * unit(2, 3),), unit(2, 3)),
    "Dirichlet": ((POSITIVE,), SHARE),
    "Exponential": ((POSITIVE,), POSITIVE),
    "Gamma": ((POSITIVE, SCALE), POSITIVE),
    "Geometric": ((unit(2, 3),), ids(4, 2, 3).astype("float32")),
    "Gumbel": ((LOC, SCALE), x(2, 3)),
    "LKJCholesky": ((3, 1.5), np.linalg.cholesky(np.float32([[1, 0.3, 0.2], [0.3, 1, 0.4], [0.2, 0.4, 1]]))),
    "Laplace": ((LOC, SCALE), x(2, 3) + 0.1),
    "LogNormal": ((LOC, SCALE), POSITIVE),
    "Multinomial": ((4, SHARE), COUNTS),
    "MultivariateNormal": ((LOC, None, None, TRIL), x(2, 3) + 0.1),
    "Normal": ((LOC, SCALE), x(2, 3) + 0.1),
    "Poisson": ((POSITIVE,), ids(5, 2, 3).astype("float32")),
    "StudentT": ((POSITIVE + 2, LOC, SCALE), x(2, 3) + 0.1),
    "Uniform": ((LOC, LOC + SCALE), LOC + SCALE / 2),
}
TRANSFORMS: dict[str, tuple[tuple, np.ndarray]] = {
    "AffineTransform": ((x(3), unit(3)), x(2, 3)),
    "ExpTransform": ((), x(2, 3)),
    "PowerTransform": ((np.float32(2.0).reshape(()),), POSITIVE),
    "ReshapeTransform": (((2, 3), (3, 2)), x(4, 2, 3)),
    "SigmoidTransform": ((), x(2, 3)),
    "SoftmaxTransform": ((), x(2, 3)),
    "StickBreakingTransform": ((), x(2, 3)),
    "TanhTransform": ((), x(2, 3)),
}
# what inverses are given where (0.05, 0.95) will not do
IMAGES = {"ReshapeTransform": x(4, 3, 2), "StickBreakingTransform": SHARE}
# stored elements are where x is above 0.5 in size
HOLED = np.where(np.abs(x(4, 5)) > 0.5, x(4, 5), 0)
OTHER = np.where(HOLED != 0, unit(4, 5), 0).astype("float32")
UNARY = """
    abs asin asinh atan atanh deg2rad expm1 isnan log1p neg rad2deg sin sinh sqrt square tan tanh coalesce
""".split()  # noqa: SIM905


def object_calls() -> Iterator[Call]:
    """Methods of distributions and transforms, and functions of sparse Tensors."""
    for name, (distribution, value) in FAMILIES.items():
        for method, args in (("log_prob", (value,)), ("prob", (value,)), ("entropy", ())):
            yield _method(f"paddle.distribution.{name}", method, distribution, args)
        yield _method(f"paddle.distribution.{name}", "sample", distribution, ((2,),), random=True)
    for name, (distribution, value) in TRANSFORMS.items():
        for method in ("forward", "inverse", "forward_log_det_jacobian", "inverse_log_det_jacobian"):
            given = IMAGES.get(name, unit(*value.shape)) if method.startswith("inverse") else value
            yield _method(f"paddle.distribution.{name}", method, distribution, (given,))
    yield from _sparse()


def _method(path: str, method: str, made: tuple, args: tuple, random: bool = False) -> Call:
    layer = {"args": list(made), "kwargs": {}, "method": method}
    return Call(path, method, args, layer=layer, terms=64, random=random, grad=not random)


def _sparse() -> Iterator[Call]:
    for layout in ("coo", "csr"):

        def call(name: str, *args: Any, at: str = layout, **kwargs: Any) -> Call:
            return Call(f"paddle.sparse.{name}", at, args, kwargs, terms=32)

        a, b = Sparse(HOLED, layout), Sparse(OTHER, layout)
        inside = Sparse(HOLED / 2.5, layout)  # in (-1, 1) for asin and atanh
        yield from (
            call(name, Sparse(np.abs(HOLED), layout) if name in ("sqrt", "log1p") else inside) for name in UNARY
        )
        yield call("pow", a, 2.0)
        yield call("cast", a, "int32", "float64")
        yield from (call(name, a, b) for name in ("add", "subtract", "multiply", "divide"))
        yield call("is_same_shape", a, b)
        yield call("matmul", a, x(5, 3))
        yield call("mv", a, x(5))
        yield call("masked_matmul", x(4, 2), x(2, 5), b)
        yield call("addmm", x(4, 3), a, x(5, 3), 0.5, 2.0)
        yield call("transpose", a, [1, 0])
        yield call("reshape", a, [2, 10])
        yield call("sum", a, 1)
        yield call("sum", a, at=f"{layout}-all")
        yield call("slice", a, [0, 1], [1, 1], [3, 4])
        yield call("mask_as", x(4, 5), b)
