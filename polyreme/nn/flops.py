"""flops: multiply-adds of a network's layers, counted in one forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.nn.eval_mode import eval_mode
from polyreme.nn.layer import Layer
from polyreme.nn.layers import activation, batch_norm, conv, linear, pooling

Count = Callable[[Any, tuple, Any], Any]


def _convolution(layer: Any, x: tuple, y: Tensor) -> int:
    taps = math.prod(layer.weight.shape[2:]) * layer.weight.shape[1]
    if isinstance(layer, _TRANSPOSED):
        taps = math.prod(layer.weight.shape[2:]) * x[0].shape[1]
    return math.prod(y.shape) * (taps + (layer.bias is not None))


def _adaptive(layer: Any, x: tuple, y: Tensor) -> int:
    sizes = zip(x[0].shape[2:], y.shape[2:], strict=True)
    return math.prod(y.shape) * (math.prod(n // m for n, m in sizes) + 1)


def _of_outputs(each: int) -> Count:
    return lambda layer, x, y: each * math.prod(y.shape)


def _linear(layer: Any, x: tuple, y: Tensor) -> int:
    return layer.weight.shape[0] * math.prod(y.shape)


_TRANSPOSED = (conv.Conv1DTranspose, conv.Conv2DTranspose, conv.Conv3DTranspose)
COUNTS: dict[tuple[type, ...], Count] = {
    (conv.Conv1D, conv.Conv2D, conv.Conv3D, *_TRANSPOSED): _convolution,
    (linear.Linear,): _linear,
    (batch_norm.BatchNorm1D, batch_norm.BatchNorm2D, batch_norm.BatchNorm3D): _of_outputs(2),
    (activation.LeakyReLU, pooling.AvgPool1D, pooling.AvgPool2D, pooling.AvgPool3D): _of_outputs(1),
    (pooling.AdaptiveAvgPool1D, pooling.AdaptiveAvgPool2D, pooling.AdaptiveAvgPool3D): _adaptive,
}  # fmt: skip
"""Classes of layers -> f(layer, inputs, output), their multiply-adds; other layers count as 0."""


def flops(net: Layer, input_size: Any, custom_ops: Any = None, print_detail: bool = False) -> int:
    """Multiply-adds of one forward of net, each counted once, of its layers without sublayers; prints the total.

    input_size: shape of the input, batch included. custom_ops: {class of layer: f(layer, inputs, output)}, where f adds
    to layer.total_ops; it goes before the built-in counts. print_detail: a line for each layer. A convolution counts
    its bias, Linear does not. Raises ConfigError for what is no Layer.

    >>> from polyreme.nn.layers.linear import Linear
    >>> flops(Linear(3, 5), [1, 3])
    Total Flops: 15     Total Params: 20
    15
    """
    if not isinstance(net, Layer):
        raise ConfigError(
            f"flops counts a Layer, got {type(net).__name__}; of a Program, count the layers that build it"
        )
    record = _run(net, input_size, dict(custom_ops or {}))
    total, count = sum(r["Flops"] for r in record), sum(r["Params"] for r in record)
    if print_detail:
        print(_table(record))  # noqa: T201
    print(f"Total Flops: {total}     Total Params: {count}")  # noqa: T201
    return total


def _count_of(layer: Layer, custom: dict[type, Count]) -> Count | None:
    """What adds to a layer's total_ops."""
    own = custom.get(type(layer))
    if own is not None:
        return own
    count = next((f for classes, f in COUNTS.items() if type(layer) in classes), None)
    if count is None:
        return None

    def add(layer: Any, x: tuple, y: Any) -> None:
        layer.total_ops += count(layer, x, y)

    return add


def _run(net: Layer, input_size: Any, custom: dict[type, Count]) -> list[dict[str, Any]]:
    leaves = [m for m in net.sublayers(include_self=True) if not list(m.children())]
    rows: dict[int, dict[str, Any]] = {}
    handles = []

    def note(layer: Any, x: tuple, y: Any) -> None:
        count = _count_of(layer, custom)
        if count is not None:
            count(layer, x, y)
        row = rows.setdefault(id(layer), {"Layer Name": layer.full_name(), "Params": _size(layer)})
        row |= {"Input Shape": _shape(x[0] if x else None), "Output Shape": _shape(y), "Flops": int(layer.total_ops)}

    try:
        for layer in leaves:
            layer.total_ops = 0
            handles.append(layer.register_forward_post_hook(note))
        with eval_mode(net), no_grad():
            net(to_tensor(np.ones(list(input_size), np.float32)))
    finally:
        for handle in handles:
            handle.remove()
        for layer in leaves:
            layer.__dict__.pop("total_ops", None)
    return list(rows.values())


def _size(layer: Layer) -> int:
    return sum(math.prod(p.shape) for p in layer.parameters())


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else []


def _table(rows: list[dict[str, Any]]) -> str:
    names = ["Layer Name", "Input Shape", "Output Shape", "Params", "Flops"]
    lines = [names, *([str(r[n]) for n in names] for r in rows)]
    widths = [max(len(line[i]) for line in lines) + 2 for i in range(len(names))]
    rule = "+".join(["", *("-" * w for w in widths), ""])
    shown = ["|".join(["", *(c.center(w) for c, w in zip(line, widths, strict=True)), ""]) for line in lines]
    return "\n".join([rule, shown[0], rule, *shown[1:], rule])


__all__ = ["flops"]
