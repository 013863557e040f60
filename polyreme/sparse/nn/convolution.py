"""Convolution and pooling of sparse images: the windows are looked up, then read and multiplied as dense arrays.

An image is a SparseCooTensor of shape [batch, *spatial, channels] that stores whole pixels: its last dim is
dense. Source of the submanifold kind: arXiv:1706.01307.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core.op import freeze
from polyreme.eager.sparse import SparseCooTensor
from polyreme.eager.sparse.structure import constant, indices_of, on_host, places_of
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.sparse import window_matmul, window_max, window_sources
from polyreme.ops.windows.geometry import Pads, per_dim, resolve_pads

_FORMATS = {2: "NHWC", 3: "NDHWC"}


def _check_image(what: str, x: Any, n: int, data_format: str) -> SparseCooTensor:
    """x without repeated pixels. Raises for what is no sparse image of n spatial dims."""
    if data_format != _FORMATS[n]:
        raise ConfigError(f"{what}: data_format={data_format!r}; a sparse image is {_FORMATS[n]}, the only choice")
    if not isinstance(x, SparseCooTensor):
        raise TypeError(f"{what}: x is a {type(x).__name__}, needs a SparseCooTensor; to_sparse_coo({n + 1}) makes one")
    if len(x.dims) != n + 2 or x.sparse_dim() != n + 1:
        raise ShapeError(
            f"{what}: x {list(x.shape)} with {x.sparse_dim()} sparse dims; needs {n + 2} dims, {n + 1} of them sparse: "
            f"batch and {n} spatial ones; channels are dense"
        )
    if x.coalesced:
        return x
    places = places_of(on_host(x, f"{what} of a Tensor not known to be coalesced (coalesce() it before)"), x.dims[:-1])
    return x if len(np.unique(places)) == len(places) else x.coalesce()


class _Window:
    """The sliding window of one call: sizes, and the sizes of what it makes."""

    def __init__(
        self, what: str, spatial: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
    ) -> None:
        n = len(spatial)
        self.kernel, self.stride = per_dim(kernel, n, f"{what}: kernel_size"), per_dim(stride, n, f"{what}: stride")
        self.dilation = per_dim(dilation, n, f"{what}: dilation")
        self.pads: Pads = resolve_pads(
            freeze(padding), tuple(spatial), self.kernel, self.stride, self.dilation, True, what
        )
        self.outs = []
        for size, k, s, d, (before, after) in zip(
            spatial, self.kernel, self.stride, self.dilation, self.pads, strict=True
        ):
            room = size + before + after - d * (k - 1) - 1
            if room < 0:
                raise ShapeError(f"{what}: a window of {d * (k - 1) + 1} does not fit into {size} and padding")
            self.outs.append((-(-room // s) if ceil else room // s) + 1)

    @property
    def steps(self) -> tuple:
        """Stride, padding before and dilation, as ops.sparse takes them."""
        return self.stride, tuple(before for before, _ in self.pads), self.dilation

    def reached(self, sites: np.ndarray, batch: int) -> np.ndarray:
        """Coordinates of the outputs whose windows hold an element, sorted: sites [1 + d, n] -> [1 + d, m]."""
        shape, places = (batch, *self.outs), []
        for offset in itertools.product(*(range(k) for k in self.kernel)):
            moved = [
                outs + before - k * d
                for outs, (before, _), k, d in zip(sites[1:], self.pads, offset, self.dilation, strict=True)
            ]
            outs = [m // s for m, s in zip(moved, self.stride, strict=True)]
            inside = [
                (m % s == 0) & (a >= 0) & (a < size)
                for m, s, a, size in zip(moved, self.stride, outs, self.outs, strict=True)
            ]
            places.append(places_of(np.stack([sites[0], *outs])[:, np.all(inside, axis=0)], shape))
        return indices_of(np.unique(np.concatenate(places)), shape, sites.dtype)


def _slide(what: str, x: SparseCooTensor, window: _Window) -> tuple[Any, Any]:
    """(coordinates of the outputs, which element each place of their windows reads)."""
    sites = on_host(x, f"{what}, whose outputs are where its windows hold an element (subm_conv keeps the indices),")
    outs = constant(window.reached(sites, x.dims[0]))
    return outs, window_sources(x.indices(), outs, x.dims[1:-1], window.kernel, window.steps)


def _check_weight(what: str, x: SparseCooTensor, weight: Any, n: int, groups: int) -> None:
    shape, channels = list(weight.shape), x.dims[-1]
    if len(shape) != n + 2 or shape[n] * groups != channels or shape[-1] % groups:
        raise ShapeError(
            f"{what}: weight {shape} and x {list(x.shape)} in groups={groups}; needs [*kernel, channels / groups, "
            "out], with out a multiple of groups"
        )


def conv(
    what: str, n: int, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, fmt: str
) -> SparseCooTensor:
    """Convolution whose outputs are stored wherever a window holds an element."""
    x = _check_image(what, x, n, fmt)
    _check_weight(what, x, weight, n, groups)
    window = _Window(what, x.dims[1:-1], tuple(weight.shape[:n]), stride, padding, dilation, False)
    outs, sources = _slide(what, x, window)
    values = window_matmul(x.values(), sources, weight, bias, groups)
    return SparseCooTensor(outs, values, (x.dims[0], *window.outs, weight.shape[-1]), True)


def subm_conv(
    what: str, n: int, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, fmt: str
) -> SparseCooTensor:
    """Convolution with outputs where the elements are, and windows centred on them."""
    x = _check_image(what, x, n, fmt)
    _check_weight(what, x, weight, n, groups)
    kernel, dilation = tuple(weight.shape[:n]), per_dim(dilation, n, f"{what}: dilation")
    centre = [d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True)]
    _check_centred(what, stride, padding, n, centre)
    steps = ((1,) * n, tuple(centre), dilation)
    sources = window_sources(x.indices(), x.indices(), x.dims[1:-1], kernel, steps)
    return x.with_values(window_matmul(x.values(), sources, weight, bias, groups))


def _check_centred(what: str, stride: Any, padding: Any, n: int, centre: list[int]) -> None:
    if per_dim(stride, n, f"{what}: stride") != (1,) * n:
        raise ConfigError(
            f"{what}: stride={stride!r}; outputs are where elements are, so it is 1; conv{n}d has strides"
        )
    if isinstance(padding, str):
        fits = padding.upper() == "SAME"
    else:
        fits = padding == 0 or list(per_dim(padding, n, f"{what}: padding", 0)) in ([0] * n, centre)
    if not fits:
        raise ConfigError(f"{what}: padding={padding!r}; windows are centred, leave it out or give {centre}")


def max_pool(
    what: str, n: int, x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, fmt: str
) -> SparseCooTensor:
    """The largest stored element of each window that holds one, channel by channel."""
    x = _check_image(what, x, n, fmt)
    window = _Window(what, x.dims[1:-1], kernel_size, stride, padding, 1, ceil_mode)
    outs, sources = _slide(what, x, window)
    return SparseCooTensor(outs, window_max(x.values(), sources), (x.dims[0], *window.outs, x.dims[-1]), True)
