"""Random sparse matrices, and what is computed with them in SciPy, NumPy and loops."""

import itertools

import numpy as np

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.sparse import sparse_coo_tensor

RTOL = 8 * 16 * np.finfo("float32").eps  # 16 rounded terms, and a factor 8 for the functions inside


def random_dense(rng, shape, density=0.4, dtype="float32"):
    """A dense array with most elements 0."""
    value = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.startswith("complex") else 0)
    return np.where(rng.random(shape) < density, value, 0).astype(dtype)


def coo(dense, sparse_dim=None, wants_grad=True):
    """A dense array as a leaf in coordinate format."""
    x = to_tensor(dense).to_sparse_coo(sparse_dim or dense.ndim)
    return sparse_coo_tensor(x.indices(), x.values(), dense.shape, stop_gradient=not wants_grad)


def csr(dense, wants_grad=True):
    """A dense array in rows, and the leaf behind it."""
    x = to_tensor(dense).to_sparse_csr().detach()
    x.stop_gradient = not wants_grad
    return x


def value(x):
    """The dense value of a sparse or dense Tensor."""
    return x.numpy() if isinstance(x, Tensor) else x.to_dense().numpy()


def weighted(x, seed=5):
    """The sum of all elements times fixed random weights: one number whose derivative tests all."""
    dense = x if isinstance(x, Tensor) else x.to_dense()
    weights = np.random.default_rng(seed).standard_normal(dense.shape)
    return (dense * to_tensor(weights.astype("float32").astype(dense.dtype))).sum()


def conv_dense(x, weight, stride, pads, dilation):
    """Convolution by loops: x [batch, *spatial, c], weight [*kernel, c, out], all sizes per spatial dim."""
    kernel = weight.shape[:-2]
    x = np.pad(x, [(0, 0), *((p, p) for p in pads), (0, 0)])
    outs = [(s - d * (k - 1) - 1) // t + 1 for s, k, t, d in zip(x.shape[1:-1], kernel, stride, dilation, strict=True)]
    out = np.zeros((x.shape[0], *outs, weight.shape[-1]), x.dtype)
    for at in itertools.product(*map(range, outs)):
        for k in itertools.product(*map(range, kernel)):
            place = tuple(a * s + i * d for a, s, i, d in zip(at, stride, k, dilation, strict=True))
            out[(slice(None), *at)] += x[(slice(None), *place)] @ weight[k]
    return out
