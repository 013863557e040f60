"""A stack of layers that differ in their weights alone, run as one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.core.devices.transfer import from_host
from polyreme.errors import ConfigError, ProgramError
from polyreme.jit import to_static
from polyreme.jit.scanned import scan_layer
from polyreme.mesh.strategy import LAYERS
from polyreme.nn import parameter
from polyreme.nn.initializer import Initializer
from polyreme.nn.layer import Layer
from polyreme.nn.lazy import LazyGuard
from polyreme.nn.parameter import Parameter, Unmade


class Stacked(Layer):
    """count layers, each made as make() makes it, run one after another on what the one before returned.

    The layers are one loop in the compiled program: it is as large, and takes as long to compile, for 48 as for 2. A
    parameter of make()'s layer, which is the sublayer `layer`, is those of all of them: its first dim, of logical name
    "layers", is as long as the stack, and each entry is drawn by the parameter's own initializer.

    The layer returns as many Tensors as it takes, of the same shapes and dtypes; keywords are the same for all. It may
    draw random numbers (dropout) and be recomputed; it may not write buffers. Eager calls run the captured loop.

    Raises ConfigError for a count below 1 or a layer with buffers that it saves, ProgramError in static mode.

    >>> from polyreme.nn.layers.linear import Linear
    >>> from polyreme.ops.creation import ones
    >>> stack = Stacked(lambda: Linear(3, 3), 5)
    >>> stack.layer.weight.shape, stack(ones([2, 3])).shape
    (paddle.Size([5, 3, 3]), paddle.Size([2, 3]))
    """

    layer: Layer

    def __init__(self, make: Callable[[], Layer], count: int) -> None:
        super().__init__()
        if state.recording():
            raise ProgramError(
                "Stacked: a loop over layers is captured, not recorded into a Program; use a LayerList there"
            )
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"Stacked: count={count!r}; give a whole number of layers of at least 1")
        self.count = count
        lazily = parameter.making.lazily
        with LazyGuard():
            self.layer = make()
        trained = {name for name, p in self.layer.named_parameters() if not p.is_statistic}
        if self.layer.state_dict().keys() - trained:
            raise ConfigError(
                f"Stacked: {type(self.layer).__name__} has buffers that are saved, of which all layers would share "
                "one; use a LayerList"
            )
        for p in self.layer.parameters():
            _stack(p, count)
            if not lazily:
                p.initialize()

    def forward(self, *xs: Any, **constants: Any) -> Any:
        run = self._run if state.capturing() else self._run_captured
        outs = run(*xs, **constants)
        return outs[0] if len(xs) == 1 else tuple(outs)

    @to_static
    def _run_captured(self, *xs: Any, **constants: Any) -> list:
        return self._run(*xs, **constants)

    def _run(self, *xs: Any, **constants: Any) -> list:
        return scan_layer(self.layer, self.layer.parameters(), xs, constants)

    def extra_repr(self) -> str:
        return f"count={self.count}"


def _stack(p: Parameter, count: int) -> None:
    """Make a parameter without values one of `count` entries."""
    array = Unmade(p.name, (count, *p._array.shape), p._array.dtype)
    array.initializer = _OfEntries(p._array.initializer)
    p._array, p.dims = array, (LAYERS, *p.dims)


class _OfEntries(Initializer):
    """Values of each entry of the first dim as another initializer makes them."""

    def __init__(self, entry: Initializer) -> None:
        self.entry = entry

    def values(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """`entry` values for shape[1:], shape[0] times."""
        entries = [self.entry.values(shape[1:], dtype) for _ in range(shape[0])]
        if any(isinstance(entry, state.Tracer) for entry in entries):
            return jnp.stack(entries)
        return from_host(np.stack([np.asarray(entry) for entry in entries]), dtype)


__all__ = ["Stacked"]
