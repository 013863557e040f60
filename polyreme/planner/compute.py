"""Seconds of arithmetic and of bytes moved inside one device: a roofline for each operation on its local shapes.

Source: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009; the share of the peak that a kernel reaches is a
curve of the device kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from polyreme.planner.cluster import DeviceKind, at
from polyreme.planner.graph import OperationCost, Value
from polyreme.planner.prediction import Training
from polyreme.planner.sharding import Cuts

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8": 1}

_BACKWARD_OF_ATTENTION = 2.5
"""Products of the backward over those of the forward: scores again, then dv, dp, dq, dk. Source: arXiv:2307.08691."""

_SLOWER_BACKWARD = 0.85
"""Rate of the attention's backward over its forward's. Source: arXiv:2307.08691, figures 4 and 5: 0.75 to 0.9."""

_SHARE_OF_8_BITS = 0.9
"""Share of the peak that a product in 8 bits reaches, over that of one in 16: twice the FLOP at the same power.
Source: set on the FP8 rows of NeMo 24.07 in published_more.csv."""

_FIRST_FLASH = 0.5
"""Rate of the first fused attention over the second's. Source: arXiv:2307.08691, section 4: about twice as fast."""


class Seconds(NamedTuple):
    """Of one operation on one device: forward; gradients of its inputs; gradients of its weights."""

    forward: float
    inputs: float
    weights: float


class Arithmetic(NamedTuple):
    """What operations run on: a device kind in one dtype, how many devices work at a time on its units, and whether
    they share them."""

    device: DeviceKind
    training: Training
    crowd: int = 1
    is_shared: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the compute dtype."""
        return ITEMSIZE[self.training.dtype]

    def product(self, flops: float, moved: float, share: float) -> float:
        """Seconds of arithmetic that also moves bytes: the slower of the two, of a processor one after the other, and
        no less than a launch."""
        return self.arithmetic(flops, moved, self.device.flops[self.training.dtype] * share)

    def arithmetic(self, flops: float, moved: float, rate: float) -> float:
        """The same at so many FLOP a second."""
        device, arithmetic = self.device, flops / rate
        both = sum if self.is_shared else max
        return max(self.crowd * both((arithmetic, self.stream(moved))), device.launch)

    def stream(self, moved: float) -> float:
        """Seconds to read and write bytes of the device's memory, all together."""
        return moved / (self.device.bandwidth * at(self.device.streaming, moved))

    def copy(self, moved: float) -> float:
        """Seconds of an operation that is limited by bytes, no less than a launch."""
        return max(self.crowd * self.stream(moved), self.device.launch) if moved else 0.0


def operation_seconds(
    op: OperationCost, weights: Mapping[str, Value], cuts: Cuts, samples: float, arithmetic: Arithmetic
) -> Seconds:
    """Of one run of an operation on one microbatch of `samples` samples over the whole job."""
    if op.kind in ("product", "convolution"):
        return _product(op, weights, cuts, samples, arithmetic)
    if op.kind == "attention":
        return _attention(op, cuts, samples, arithmetic)
    return _copies(op, weights, cuts, samples, arithmetic)


def local_flops(op: OperationCost, weights: Mapping[str, Value], cuts: Cuts, samples: float) -> float:
    """FLOP of the forward on one device: cut by the axes that cut the output, and those that cut the sum."""
    axes = cuts.axes("act", op.output.dims, op.output.shape)
    for name in op.weights[:1]:
        axes |= cuts.axes("use", weights[name].dims, weights[name].shape)
    return op.flops * samples / cuts.degree(axes)


def _bytes(value: Value, cuts: Cuts, samples: float, itemsize: int) -> float:
    return cuts.local(value, samples) * (value.itemsize or itemsize)


def _product(
    op: OperationCost, weights: Mapping[str, Value], cuts: Cuts, samples: float, arithmetic: Arithmetic
) -> Seconds:
    flops = local_flops(op, weights, cuts, samples) * op.executed
    x = sum(_bytes(value, cuts, samples, arithmetic.itemsize) for value in op.inputs)
    y = _bytes(op.output, cuts, samples, arithmetic.itemsize)
    weight_elements = sum(weights[name].size / cuts.ways("use", weights[name]) for name in op.weights)
    w = weight_elements * arithmetic.itemsize
    share = at(arithmetic.device.matmul, flops / _matrices(op, weights, cuts))
    device, training = arithmetic.device, arithmetic.training
    rate, casts = device.flops[training.dtype] * share, (0.0, 0.0)
    if training.products and _in_8_bits(op, weights):
        rate = device.flops[training.products] * share * _SHARE_OF_8_BITS
        # operands are read in 16 bits and written in 8, in both layouts, by a kernel of their own
        low = 2 * ITEMSIZE[training.products] / arithmetic.itemsize
        casts = (arithmetic.copy(x * (1 + low)), arithmetic.copy(y * (1 + low)))
        x, w = x * low / 2, w * low / 2
    forward = arithmetic.arithmetic(flops, x + y + w, rate) + casts[0]
    if not op.weights:  # a product of activations: one backward product for each input
        return Seconds(forward, 2 * arithmetic.arithmetic(flops, x + y, rate), 0.0)
    # the gradient of a weight is added to what earlier microbatches left
    grown = weight_elements * 2 * training.gradients
    return Seconds(
        forward,
        arithmetic.arithmetic(flops, x + y + w, rate) + casts[1],
        arithmetic.arithmetic(flops, x + y + grown, rate),
    )


def _in_8_bits(op: OperationCost, weights: Mapping[str, Value]) -> bool:
    """Whether a product is one of those that low-precision training casts: of layers' weights, not of the output
    projection over the vocabulary, nor a router's, whose output is kept wide."""
    if not op.weights or op.output.itemsize:
        return False
    return op.kind == "product" and "vocab" not in weights[op.weights[0]].dims


def _matrices(op: OperationCost, weights: Mapping[str, Value], cuts: Cuts) -> float:
    """Matrices that a batched product is made of on one device: experts each have their own."""
    for name in op.weights[:1]:
        value = weights[name]
        if "expert" in value.dims:
            count = value.shape[value.dims.index("expert")]
            return count / cuts.degree(cuts.axes("use", ("expert",), (count,)))
    return 1.0


def _attention(op: OperationCost, cuts: Cuts, samples: float, arithmetic: Arithmetic) -> Seconds:
    flops = local_flops(op, {}, cuts, samples) * op.executed
    moved = sum(_bytes(value, cuts, samples, arithmetic.itemsize) for value in (*op.inputs, op.output))
    share = at(arithmetic.device.attention, flops) * at(arithmetic.device.few, arithmetic.crowd)
    share *= {1: _FIRST_FLASH, 2: 1.0, 3: arithmetic.device.own_attention}[arithmetic.training.flash]
    backward = arithmetic.product(_BACKWARD_OF_ATTENTION * flops, 3 * moved, share * _SLOWER_BACKWARD)
    return Seconds(arithmetic.product(flops, moved, share), backward, 0.0)


def _copies(
    op: OperationCost, weights: Mapping[str, Value], cuts: Cuts, samples: float, arithmetic: Arithmetic
) -> Seconds:
    read = {value.name: _bytes(value, cuts, samples, arithmetic.itemsize) for value in op.inputs}
    written = _bytes(op.output, cuts, samples, arithmetic.itemsize)
    table = sum(weights[name].size / cuts.ways("use", weights[name]) for name in op.weights) * arithmetic.itemsize
    if op.kind == "lookup":
        # reads the rows that are looked up; the backward adds gradients to those rows of a gradient of the whole table
        return Seconds(arithmetic.copy(sum(read.values()) + 2 * written), 0.0, arithmetic.copy(written * 3 + table))
    fusion = arithmetic.training.fusion
    more = op.unfused if fusion == "none" or (fusion == "layers" and op.kind == "loss") else 1.0
    if op.kind == "loss":
        # forward: the largest, the sum of exponentials, the label's; backward: softmax minus one-hot, in place
        logits = sum(read.values()) * more
        return Seconds(arithmetic.copy(2 * logits), arithmetic.copy(2 * logits), 0.0)
    again = sum(n for name, n in read.items() if name in op.saved) + (written if op.output.name in op.saved else 0)
    gradients = sum(_bytes(value, cuts, samples, arithmetic.itemsize) for value in op.inputs if not value.itemsize)
    forward, backward = sum(read.values()) + written + table, written + gradients + again
    least = arithmetic.training.sync if op.kind == "route" else 0.0
    return Seconds(max(least, arithmetic.copy(more * forward)), max(least, arithmetic.copy(more * backward)), 0.0)
