"""Which kernel attention may run."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from polyreme.errors import ConfigError
from polyreme.kernels import select
from polyreme.kernels.select import AttentionKernel


class SDPBackend(IntEnum):
    """A kernel of attention.

    MATH: every score at once. FLASH_ATTENTION: cuDNN's, on a GPU, for float16 and bfloat16 without mask and dropout.
    EFFICIENT_ATTENTION: query blocks with a backward pass that computes the probabilities again, on every device.
    ERROR is what no attention runs.
    """

    ERROR = -1
    MATH = 0
    FLASH_ATTENTION = 1
    EFFICIENT_ATTENTION = 2


_NAMES: dict[SDPBackend, AttentionKernel] = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}


def sdpa_kernel(backends: SDPBackend | Iterable[SDPBackend], set_priority: bool = False) -> Any:
    """A context in which scaled_dot_product_attention, and all that is built on it, runs one of these kernels only.

    The first that takes the inputs runs: in the order given with set_priority, else FLASH_ATTENTION,
    EFFICIENT_ATTENTION, MATH. It acts where programs are traced. Attention over a sequence that is split over a ring of
    devices has one kernel, which counts as EFFICIENT_ATTENTION. Raises ConfigError for no
    backend, ERROR or what is none; and attention inside raises it if no kernel that is allowed takes its inputs.

    >>> with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
    ...     select.attention_order()
    ('math', 'efficient')
    """
    asked = [backends] if isinstance(backends, SDPBackend) else list(backends)
    if not asked or any(b not in _NAMES or not isinstance(b, SDPBackend) for b in asked):
        raise ConfigError(
            f"sdpa_kernel: backends={backends!r}; give one or more of SDPBackend's {', '.join(b.name for b in _NAMES)}"
        )
    order = asked if set_priority else [b for b in _NAMES if b in asked]
    return select.attention_only(tuple(_NAMES[b] for b in dict.fromkeys(order)))
