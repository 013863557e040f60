"""Seconds of arithmetic and of bytes moved inside one device: a roofline for each operation on its local shapes.

Source: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009; the share of the peak that a kernel reaches is a
curve of the device kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from polyreme.planner.cluster import DeviceKind, at
from polyreme.planner.graph import OperationCost, Value
from polyreme.planner.prediction import Training
from polyreme.planner.sharding import Cuts

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8": 1, "float4": 0.5}

_BACKWARD_OF_ATTENTION = 2.5
"""Products of the backward over those of the forward: scores again, then dv, dp, dq, dk. Source: arXiv:2307.08691."""

_SLOWER_BACKWARD = 0.85
"""Rate of the attention's backward over its forward's. Source: arXiv:2307.08691, figures 4 and 5: 0.75 to 0.9."""

_LOW = {"float8": 0.9, "float4": 0.65}
"""Share of the peak that a product in few bits reaches, over that of one in 16: more FLOP at the same power.
Source: float8 set on the rows of NeMo 24.07 in published_more.csv, float4 on b229 and b231 of published_blind.csv."""

_SORTED = 3.0
"""Bytes that putting rows in the order of their experts moves, over those of reading and writing each once: choices are
sorted, rows gathered one by one and their gradients scattered. Source: set on rows vi01 to vi15 of odd number of
published_blind.csv."""

_FIRST_FLASH = 0.55
"""Rate of the first fused attention over the second's. Source: arXiv:2307.08691, figures 4 and 5, both passes."""


class Seconds(NamedTuple):
    """Of one operation on one device: forward; gradients of its inputs; gradients of its weights."""

    forward: float
    inputs: float
    weights: float


class Arithmetic(NamedTuple):
    """What operations run on: a device kind in one dtype, how many devices work at a time on its units, and whether
    they share them. elementwise: names of the values that norms and elementwise operations of a block make."""

    device: DeviceKind
    training: Training
    crowd: int = 1
    is_shared: bool = False
    elementwise: frozenset[str] = frozenset()

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
    flops *= _filled(op, weights, cuts, arithmetic.device.tile)
    x = sum(_bytes(value, cuts, samples, arithmetic.itemsize) for value in op.inputs)
    y = _bytes(op.output, cuts, samples, arithmetic.itemsize)
    weight_elements = sum(weights[name].size / cuts.ways("use", weights[name]) for name in op.weights)
    w = weight_elements * arithmetic.itemsize
    share = at(arithmetic.device.matmul, flops / _matrices(op, weights, cuts))
    device, training = arithmetic.device, arithmetic.training
    rate, casts = device.flops[training.dtype] * share, (0.0, 0.0)
    if training.tuned and arithmetic.itemsize == 2:
        rate *= device.tuned
    if training.products and _in_8_bits(op, weights):
        rate = device.flops[training.products] * share * _LOW[training.products]
        # operands are read in 16 bits and written in 8, in both layouts, by a kernel of their own
        low = 2 * ITEMSIZE[training.products] / arithmetic.itemsize
        is_fused = training.casts == "fused" and all(value.name in arithmetic.elementwise for value in op.inputs)
        casts = (0.0 if is_fused else arithmetic.copy(x * (1 + low)), arithmetic.copy(y * (1 + low)))
        if training.casts == "apart":  # of weights too, in each forward
            casts = (casts[0] + arithmetic.copy(w * (1 + low)), casts[1])
        x, w = x * low / 2, w * low / 2
    is_adapted = training.trains == "adapters" and (training.adapted == "all" or op.part == "full_attn")
    if op.weights and is_adapted:
        casts = _beside_adapters(casts, x, y, arithmetic)
    least = _launches(op, weights, cuts, training)
    forward = max(least, arithmetic.arithmetic(flops, x + y + w, rate) + casts[0])
    if not op.weights:  # a product of activations: one backward product for each input
        return Seconds(forward, 2 * arithmetic.arithmetic(flops, x + y, rate), 0.0)
    # the gradient of a weight is added to what earlier microbatches left
    grown = weight_elements * 2 * training.gradients
    return Seconds(
        forward,
        max(least, arithmetic.arithmetic(flops, x + y + w, rate) + casts[1]),
        max(least, arithmetic.arithmetic(flops, x + y + grown, rate)),
    )


def _launches(op: OperationCost, weights: Mapping[str, Value], cuts: Cuts, training: Training) -> float:
    """Seconds for which a host launches the kernels of a product of experts one expert after another: one each, in few
    bits with one for either operand's cast."""
    if not training.each_expert or not any("expert" in weights[name].dims for name in op.weights[:1]):
        return 0.0
    return training.each_expert * _matrices(op, weights, cuts) * (3 if training.products else 1)


def _beside_adapters(casts: tuple[float, float], x: float, y: float, arithmetic: Arithmetic) -> tuple[float, float]:
    """Seconds beside a frozen product that has an adapter: its two thin products are bound by the bytes of x and y. A
    product's own output is read and written once more as the adapter's is added; so is the gradient of x, which the
    gradient of the first thin matrix reads x for. Where nothing fuses them the adapter's output, its scaled copy and x
    under dropout are arrays of their own. Source: arXiv:2106.09685, section 4.1."""
    more = (2 * x, 2 * y) if arithmetic.training.fusion == "none" else (0.0, 0.0)
    forward, backward = arithmetic.copy(x + 3 * y + sum(more)), arithmetic.copy(2 * x + 2 * y + sum(more))
    return casts[0] + forward, casts[1] + backward


def _filled(op: OperationCost, weights: Mapping[str, Value], cuts: Cuts, tile: int) -> float:
    """FLOP of a product whose weight's dims are filled up to whole tiles, over those of its own.

    >>> from polyreme.mesh import Plan
    >>> from polyreme.planner.sharding import cuts_of
    >>> weight = Value("w", ("embed", "ffn"), (2880, 2880))
    >>> op = OperationCost("product", "up", (), Value("y", ("batch", "ffn"), (1, 2880)), weights=("w",))
    >>> round(_filled(op, {"w": weight}, cuts_of(Plan.from_degrees()), 256), 3)
    1.138
    """
    if tile == 1 or not op.weights:
        return 1.0
    value = weights[op.weights[0]]
    local = [
        size / cuts.degree(cuts.axes("use", (dim,), (size,)))
        for dim, size in zip(value.dims, value.shape, strict=True)
        if dim != "expert"
    ]
    return math.prod(math.ceil(size / tile) * tile / size for size in local)


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
    share *= _narrow(op, arithmetic.device)
    share *= {1: _FIRST_FLASH, 2: 1.0, 3: arithmetic.device.own_attention}[arithmetic.training.flash]
    backward = arithmetic.product(_BACKWARD_OF_ATTENTION * flops, 3 * moved, share * _SLOWER_BACKWARD)
    return Seconds(arithmetic.product(flops, moved, share), backward, 0.0)


def _narrow(op: OperationCost, device: DeviceKind) -> float:
    """Rate of attention by its heads' width, over that of 128: a score's exponential stays, its product shrinks."""
    width = op.output.shape[-1] if "heads" in op.output.dims else 128
    return device.narrow_heads ** max(0.0, math.log2(128 / width)) if width < 128 else 1.0


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
    more *= _SORTED if op.kind == "route" else 1.0
    least = arithmetic.training.sync if op.kind == "route" else 0.0
    return Seconds(max(least, arithmetic.copy(more * forward)), max(least, arithmetic.copy(more * backward)), 0.0)
