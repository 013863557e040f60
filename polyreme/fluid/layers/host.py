"""Python functions in a Program, printing, and layers of static.nn that are the same in 1.7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.fluid.layer import layer
from polyreme.static import host
from polyreme.static import nn as static_nn

py_func: Callable[..., Any] = layer(host.py_func)
nce: Callable[..., Any] = layer(static_nn.nce)
spectral_norm: Callable[..., Any] = layer(static_nn.spectral_norm)


@layer
def Print(
    input: Any, first_n: int = -1, message: str | None = None, summarize: int = 20, print_tensor_name: bool = True,
    print_tensor_type: bool = True, print_tensor_shape: bool = True, print_tensor_lod: bool = True,
    print_phase: str = "both",
) -> Any:  # fmt: skip
    """input; its value is printed when it is computed, and its gradient: print_phase "forward", "backward" or "both".

    first_n: how many times, always if negative. summarize: how many elements. Go on with the result.
    """
    return host.Print(
        input, first_n, message, summarize, print_tensor_name, print_tensor_type, print_tensor_shape, False,
        print_tensor_lod, print_phase,
    )  # fmt: skip


__all__ = ["Print", "nce", "py_func", "spectral_norm"]
