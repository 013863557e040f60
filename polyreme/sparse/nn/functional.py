"""polyreme.sparse.nn.functional: activations, softmax, attention, convolution and pooling of sparse Tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from polyreme.eager.sparse import SparseCsrTensor
from polyreme.eager.sparse.elementwise import need_sparse
from polyreme.eager.sparse.products import masked_matmul, matmul
from polyreme.errors import ShapeError
from polyreme.ops import activation
from polyreme.ops import arithmetic as ar
from polyreme.ops.bounds import dim_of
from polyreme.ops.indices.gather import gather
from polyreme.ops.manipulation import reshape, transpose
from polyreme.ops.sparse import sparse_coordinates, sparse_softmax
from polyreme.sparse.nn import convolution

# of each stored element


def relu(x: Any, name: str | None = None) -> Any:
    """max(value, 0) of each stored element."""
    need_sparse("sparse.relu", "x", x)
    return x.with_values(activation.relu(x.values()))


def relu6(x: Any, name: str | None = None) -> Any:
    """min(max(value, 0), 6) of each stored element."""
    need_sparse("sparse.relu6", "x", x)
    return x.with_values(activation.relu6(x.values()))


def leaky_relu(x: Any, negative_slope: float = 0.01, name: str | None = None) -> Any:
    """Of each stored element, value where it is positive, else negative_slope * value."""
    need_sparse("sparse.leaky_relu", "x", x)
    return x.with_values(activation.leaky_relu(x.values(), negative_slope))


# along a dim


def softmax(x: Any, axis: int = -1, name: str | None = None) -> Any:
    """exp(value) / sum of exp(value) over the stored elements along axis; what is not stored counts as -infinity.

    A CSR Tensor takes axis=-1 only. Where indices repeat, coalesce() first.

    >>> import polyreme as paddle
    >>> x = paddle.sparse.sparse_coo_tensor([[0, 0, 1], [0, 2, 1]], [0.0, 0.0, 5.0], [2, 3])
    >>> softmax(x).to_dense().tolist()
    [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    """
    need_sparse("sparse.softmax", "x", x)
    dim, count = dim_of(axis, len(x.dims), "sparse.softmax"), x.sparse_dim()
    if isinstance(x, SparseCsrTensor) and dim != len(x.dims) - 1:
        raise ShapeError(f"sparse.softmax: axis={axis} of a CSR Tensor; only the last, or to_sparse_coo() it first")
    if dim >= count:
        return x.with_values(activation.softmax(x.values(), dim - count + 1))
    return x.with_values(sparse_softmax(x.values(), x.where, x.dims[:count], dim))


def attention(
    query: Any,
    key: Any,
    value: Any,
    sparse_mask: Any,
    key_padding_mask: Any = None,
    attn_mask: Any = None,
    name: str | None = None,
) -> Any:
    """softmax(query key^T / sqrt(head_dim)) value, where only the scores that sparse_mask stores are computed.

    query, key, value [batch, heads, seq, head_dim] -> the same, dense. sparse_mask: CSR [batch * heads, seq, seq],
    whose values do not matter. A score is left out where key_padding_mask [batch, seq] of its key or attn_mask
    [seq, seq] is 0.
    """
    what = "sparse.attention"
    if not isinstance(sparse_mask, SparseCsrTensor):
        raise TypeError(f"{what}: sparse_mask is a {type(sparse_mask).__name__}, needs a SparseCsrTensor")
    shape = list(query.shape)
    if len(shape) != 4 or list(key.shape) != shape or list(value.shape) != shape:
        raise ShapeError(
            f"{what}: query {shape}, key {list(key.shape)} and value {list(value.shape)}; needs three of "
            "[batch, heads, seq, head_dim]"
        )
    batch, heads, seq, width = shape
    if sparse_mask.shape != [batch * heads, seq, seq]:
        raise ShapeError(f"{what}: sparse_mask {list(sparse_mask.shape)}, needs {[batch * heads, seq, seq]}")
    q, k, v = (reshape(each, [batch * heads, seq, width]) for each in (query, key, value))
    scores = masked_matmul(ar.multiply(q, 1 / math.sqrt(width)), transpose(k, [0, 2, 1]), sparse_mask)
    keep = _keep(what, sparse_mask, heads, key_padding_mask, attn_mask)
    weights = sparse_softmax(scores.values(), scores.where, scores.dims, 2, keep)
    return reshape(matmul(scores.with_values(weights), v), shape)


def _keep(what: str, mask: SparseCsrTensor, heads: int, key_padding_mask: Any, attn_mask: Any) -> Any:
    """Which stored scores no mask leaves out, [n]; None if there is no mask."""
    total, seq, _ = mask.dims
    coordinates = sparse_coordinates(mask.where, mask.dims)
    allowed = None
    for name, mask_, shape, row in (
        ("key_padding_mask", key_padding_mask, [total // heads, seq], coordinates[0] // heads),
        ("attn_mask", attn_mask, [seq, seq], coordinates[1]),
    ):
        if mask_ is None:
            continue
        if list(mask_.shape) != shape:
            raise ShapeError(f"{what}: {name} {list(mask_.shape)}, needs {shape}")
        found = gather(reshape(mask_, [-1]), row * seq + coordinates[2], 0) != 0
        allowed = found if allowed is None else ar.logical_and(allowed, found)
    return allowed


# windows

_CONV = {
    "conv": (
        convolution.conv,
        "Convolution of a sparse image, stored wherever a window holds an element.",
        "Reads the indices on the host: they decide how many elements there are. A bias is added to stored elements.",
    ),
    "subm_conv": (
        convolution.subm_conv,
        "Submanifold convolution of a sparse image: outputs are where elements are, windows centred on them.",
        "stride is 1 and padding what centres the window (or 0). It can be captured if x is coalesced. key, the name "
        "of a table of windows to share, changes nothing: the table is cheap to make.",
    ),
}


def _conv(kind: str, n: int) -> Callable[..., Any]:
    fn, meaning, note = _CONV[kind]
    what, usual = f"sparse.{kind}{n}d", {2: "NHWC", 3: "NDHWC"}[n]

    def plain(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        data_format: str = usual,
        name: str | None = None,
    ) -> Any:
        return fn(what, n, x, weight, bias, stride, padding, dilation, groups, data_format)

    def keyed(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        data_format: str = usual,
        key: str | None = None,
        name: str | None = None,
    ) -> Any:
        return fn(what, n, x, weight, bias, stride, padding, dilation, groups, data_format)

    public = plain if kind == "conv" else keyed
    sizes = "height, width" if n == 2 else "depth, height, width"
    public.__name__ = public.__qualname__ = f"{kind}{n}d"
    public.__doc__ = (
        f"{meaning}\n\n    x: COO [batch, {sizes}, channels] with channels dense; weight [*kernel, channels / groups, "
        f"out]; bias [out].\n    {note}"
    )
    return public


conv3d: Callable[..., Any]
conv2d: Callable[..., Any]
conv2d, conv3d = (_conv("conv", n) for n in (2, 3))
subm_conv3d: Callable[..., Any]
subm_conv2d: Callable[..., Any]
subm_conv2d, subm_conv3d = (_conv("subm_conv", n) for n in (2, 3))
subm_conv3d_igemm: Callable[..., Any]
subm_conv2d_igemm: Callable[..., Any]
subm_conv2d_igemm, subm_conv3d_igemm = subm_conv2d, subm_conv3d
"""The same function: every convolution here is one matrix product over looked-up windows."""


def max_pool3d(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    data_format: str = "NDHWC",
    name: str | None = None,
) -> Any:
    """The largest stored element of each window that holds one: what is not stored does not count.

    x: COO [batch, depth, height, width, channels] with channels dense; stride is kernel_size by default. Reads the
    indices on the host.
    """
    stride = kernel_size if stride is None else stride
    return convolution.max_pool("sparse.max_pool3d", 3, x, kernel_size, stride, padding, ceil_mode, data_format)


__all__ = [
    "attention",
    "conv2d",
    "conv3d",
    "leaky_relu",
    "max_pool3d",
    "relu",
    "relu6",
    "softmax",
    "subm_conv2d",
    "subm_conv2d_igemm",
    "subm_conv3d",
    "subm_conv3d_igemm",
]
