"""For type checkers: polyreme.ops.windows.depthwise. Written by tools/write_stubs.py."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

class Windows(NamedTuple):
    sizes: tuple
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    last: bool

    @property
    def first(self) -> int:
        ...

    @property
    def reach(self) -> tuple[int, ...]:
        ...
depthwise: Callable[..., Any]
spread: Callable[..., Any]
products: Callable[..., Any]
