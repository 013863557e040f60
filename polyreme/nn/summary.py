"""summary: a table of a network's layers, their shapes and their parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn.eval_mode import eval_mode
from polyreme.nn.layer import Layer

_MB = 1024 * 1024
_WIDTHS = (15, 20, 20, 15)  # of the columns, at least


@dataclass
class _Row:
    """One layer's line. nbytes: of its output."""

    label: str
    inputs: Any
    outputs: Any = None
    count: int = 0
    nbytes: int = 0


@dataclass
class _Record:
    """Lines in the order layers are called, and how many of each class there are."""

    rows: list[_Row] = field(default_factory=list)
    seen: dict[int, None] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)

    def enter(self, layer: Layer, inputs: Any) -> _Row:
        kind = type(layer).__name__
        self.classes[kind] = self.classes.get(kind, 0) + 1
        row = _Row(f"{kind}-{self.classes[kind]}", _shapes(inputs))
        self.rows.append(row)
        return row

    def leave(self, row: _Row, layer: Layer, outputs: Any) -> None:
        row.outputs, row.nbytes = _shapes(outputs), sum(t.nbytes for t in _tensors(outputs))
        # a layer called twice, or tied weights, are counted once
        for p in layer.parameters():
            if id(p) not in self.seen:
                self.seen[id(p)] = None
                row.count += math.prod(p.shape)


def summary(net: Layer, input_size: Any = None, dtypes: Any = None, input: Any = None) -> dict[str, int]:
    """Print a line for every layer without sublayers (and the parameters' totals), from one forward in eval mode.

    input_size: a shape or InputSpec, or a list of them for several inputs; None or -1 count as 1. dtypes: of them,
    float32 if None. input: instead, what forward takes as its one argument, a list or dict too. Returns
    {"total_params": ..., "trainable_params": ...}, in elements. Raises ConfigError if neither or both are given.

    >>> from polyreme.nn.layers.linear import Linear
    >>> summary(Linear(3, 2), (1, 3))["total_params"]  # doctest: +ELLIPSIS
    ----...
    8
    """
    inputs = _inputs(input_size, dtypes, input)
    record = _run(net, inputs)
    parameters = net.parameters()
    total = sum(math.prod(p.shape) for p in parameters)
    trainable = sum(math.prod(p.shape) for p in parameters if p.trainable)
    in_bytes = sum(t.nbytes for t in _tensors(inputs))
    print(_table(record.rows, total, trainable, in_bytes, sum(p.nbytes for p in parameters)))  # noqa: T201
    return {"total_params": total, "trainable_params": trainable}


def _inputs(size: Any, kinds: Any, given: Any) -> Any:
    if (size is None) == (given is None):
        raise ConfigError("summary: give the inputs' shapes as input_size=, or the inputs themselves as input=")
    if given is not None:
        return [given]
    listed = [size] if isinstance(size, int) or hasattr(size, "shape") or _is_shape(size) else list(size)
    names = [kinds] * len(listed) if kinds is None or isinstance(kinds, str) else list(kinds)
    if len(names) != len(listed):
        raise ConfigError(f"summary: {len(listed)} input shapes but {len(names)} dtypes; give one each")
    return [_ones(one, name) for one, name in zip(listed, names, strict=True)]


def _is_shape(size: Any) -> bool:
    return all(n is None or isinstance(n, int) for n in size)


def _ones(spec: Any, name: Any) -> Tensor:
    """An input for a shape, or for what has a shape and a dtype, such as an InputSpec."""
    shape = getattr(spec, "shape", (spec,) if isinstance(spec, int) else spec)
    return to_tensor(np.ones(_sizes(shape), np.float32)).astype(name or getattr(spec, "dtype", None) or "float32")


def _sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    sizes = tuple(1 if n in (None, -1) else n for n in shape)
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ShapeError(f"summary: an input shape has positive sizes (None or -1 stand for 1), got {tuple(shape)}")
    return sizes


def _run(net: Layer, inputs: Any) -> _Record:
    record = _Record()
    open_rows: dict[int, list[_Row]] = {}
    handles = []
    for layer in {id(layer): layer for layer in _lines(net)}.values():
        handles.append(
            layer.register_forward_pre_hook(
                lambda it, given: open_rows.setdefault(id(it), []).append(record.enter(it, given))
            )
        )
        handles.append(
            layer.register_forward_post_hook(lambda it, _, made: record.leave(open_rows[id(it)].pop(), it, made))
        )
    try:
        with eval_mode(net), no_grad():
            net(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return record


def _lines(layer: Layer) -> Iterator[Layer]:
    """The layers with a line of their own: those without sublayers, and those that call theirs step by step."""
    children = [] if layer._is_recurrent else list(layer.children())
    if not children:
        yield layer
    for child in children:
        yield from _lines(child)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, (list, tuple)):
        return [_shapes(v) for v in value if isinstance(v, (Tensor, list, tuple))]
    return []


def _table(rows: list[_Row], total: int, trainable: int, in_bytes: int, parameter_bytes: int) -> str:
    cells = [["Layer (type)", "Input Shape", "Output Shape", "Param #"]]
    cells += [[r.label, str(r.inputs), str(r.outputs), f"{r.count:,}"] for r in rows]
    widths = [max(low, *(len(line[at]) for line in cells)) for at, low in enumerate(_WIDTHS)]
    lines = [" ".join(f"{c:^{w}}" for c, w in zip(line, widths, strict=True)) for line in cells]
    out_bytes = 2 * sum(r.nbytes for r in rows)  # what layers give, and gradients of it
    thin, thick = "-" * (sum(widths) + 5), "=" * (sum(widths) + 5)
    sizes = [
        ("Input size", in_bytes),
        ("Forward/backward pass size", out_bytes),
        ("Params size", parameter_bytes),
        ("Estimated Total Size", in_bytes + out_bytes + parameter_bytes),
    ]
    return "\n".join(
        [
            thin, lines[0], thick, *lines[1:], thick,
            f"Total params: {total:,}", f"Trainable params: {trainable:,}",
            f"Non-trainable params: {total - trainable:,}", thin,
            *(f"{label} (MB): {nbytes / _MB:.2f}" for label, nbytes in sizes), thin,
        ]
    )  # fmt: skip


__all__ = ["summary"]
