"""paddle._C_ops: calls of PaddlePaddle's kernels, by the functions of the same mathematics.

A kernel takes all of its arguments by position. Those whose order is that of a public function are that function; the
others are in kernels/.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from polyreme import api, fft, geometric, incubate, linalg
from polyreme.eager.dispatch import inplace
from polyreme.incubate.nn import functional as fused
from polyreme.nn import functional as F
from polyreme.paddle_scripts.internals.kernels import (
    communication,
    detection,
    graphs,
    layers,
    losses,
    tensors,
    windows,
)
from polyreme.stand_ins import Absent, absent
from polyreme.vision import ops as vision

KERNELS: dict[str, Callable[..., Any]] = {
    **tensors.KERNELS, **windows.KERNELS, **layers.KERNELS, **losses.KERNELS, **detection.KERNELS, **graphs.KERNELS,
    **communication.KERNELS,
}  # fmt: skip
"""Kernels whose arguments come in another order than the public function's, by name."""

# kernels that write the one Tensor they return into the first; others of that form are public functions
_IN_PLACE = (
    "assign", "bce_loss", "cumprod", "cumsum", "dropout", "fill", "fill_diagonal", "fill_diagonal_tensor",
    "gaussian_inplace", "increment", "index_add", "logcumsumexp", "sigmoid_cross_entropy_with_logits", "silu",
    "uniform_inplace",
)  # fmt: skip
# where functions are that kernels are called after
_HOMES = (api, F, linalg, fft, vision, fused, geometric, incubate)


@functools.cache
def kernel(name: str) -> Any:
    """The function that a kernel of this name is; a stand-in that says so where there is none."""
    if name in KERNELS:
        return KERNELS[name]
    if name.endswith("_") and name[:-1] in _IN_PLACE:
        form = inplace(kernel(name[:-1]))
        form.__name__ = name
        return form
    for home in _HOMES:
        value = getattr(home, name, None)
        if callable(value) and not isinstance(value, Absent):
            return value
    return absent(f"_C_ops.{name}", "it is a kernel of PaddlePaddle that no public function here is called after")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return kernel(name)
