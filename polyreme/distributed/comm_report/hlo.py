"""Optimized HLO text as data: computations, instructions, shapes, trip counts of loops and the work in them.

Reads the text that jax.stages.Compiled.as_text() gives, of any backend; no XLA library is needed for it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16}
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COST = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
# a counter of 64 bits is below n: the upper word is negative, or it is 0 and the lower one below n
_OF_TWO_WORDS = ["and", "bitcast-convert", "compare", "compare", "compare", "or"]
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
# bytes no kernel touches: these only rename or point
_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"}
)


@dataclass(frozen=True)
class HloShape:
    """One array's dtype, as HLO spells it, and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes; dtypes of less than a byte are packed."""
        return -(-self.size * bits(self.dtype) // 8)


def bits(dtype: str) -> int:
    """Bits of one element of an HLO dtype: 32 for f32, 8 for f8e4m3fn."""
    found = _BITS.get(dtype)
    return found if found is not None else int(re.findall(r"\d+", dtype)[0])


@dataclass(frozen=True)
class Instruction:
    """One line of HLO. shapes: of the result, a tuple's parts in order; operands: names; rest: the attributes' text."""

    name: str
    opcode: str
    shapes: tuple[HloShape, ...]
    operands: tuple[str, ...]
    rest: str
    literal: str

    @functools.cached_property
    def op_name(self) -> str:
        """The origin of the instruction, as jax wrote it: jit(step)/GPT/blocks.0/jit(linear)/dot_general."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        """Computations that run as part of this instruction, a loop's condition left out."""
        return [name for text in _CALLED.findall(self.rest) for name in _NAME.findall(text)]


@dataclass
class Computation:
    """A list of instructions; if the module is scheduled, in the order they run."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results this one takes."""
        return [self.instructions[n] for n in instruction.operands if n in self.instructions]


class Module:
    """A parsed HLO module.

    >>> text = "HloModule m\\nENTRY %main (p: f32[2]) -> f32[2] {\\n  %p = f32[2]{0} parameter(0)\\n}"
    >>> [i.opcode for i in Module(text).entry]
    ['parameter']
    """

    entry: Computation
    num_partitions: int
    num_replicas: int
    is_scheduled: bool

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = Computation("")
        header, _, body = text.partition("\n")
        self.num_partitions = _header_number(header, "num_partitions")
        self.num_replicas = _header_number(header, "replica_count")
        self.is_scheduled = "is_scheduled=true" in header
        current: Computation | None = None
        for line in body.splitlines():
            stripped = line.strip()
            if current is None:
                found = _HEADER.match(stripped)
                if found and "=" not in stripped.split("(")[0]:
                    current = self.computations[found[2]] = Computation(found[2])
                    if found[1]:
                        self.entry = current
            elif stripped.startswith("}"):
                current = None
            else:
                made = parse_instruction(stripped)
                if made is not None:
                    current.instructions[made.name] = made
                    if stripped.startswith("ROOT "):
                        current.root = made.name
        self._flop: dict[str, int] = {}

    def trips(self, loop: Instruction) -> int | None:
        """The trip count of a while loop: XLA's own count, else the one constant its condition compares with, whose
        counter has 32 bits, or 64 in two words on TPU. None if neither is there.
        """
        known = re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.rest)
        if known:
            return int(known[1])
        condition = re.search(r"condition=%([\w.\-]+)", loop.rest)
        if condition is None or condition[1] not in self.computations:
            return None
        inside = list(self._inside(condition[1]))
        bounds = {int(i.literal) for i in inside if i.opcode == "constant" and i.literal.lstrip("-").isdigit()}
        if sorted(i.opcode for i in inside if i.opcode in _OF_TWO_WORDS) == _OF_TWO_WORDS:
            bounds.discard(0)  # what the upper word is compared with
        return bounds.pop() if len(bounds) == 1 else None

    def flop(self, instruction: Instruction, computation: Computation) -> int:
        """Arithmetic in one instruction, called computations and loops included: 2 m n k for a product, what a kernel
        says of itself, else about one operation for each element written.
        """
        if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            return 0
        inner = sum(self._flop_of(name) for name in instruction.called if name in self.computations)
        if instruction.opcode == "while":
            return inner * (self.trips(instruction) or 1)
        if instruction.opcode in ("fusion", "call", "conditional", "async-start"):
            return inner
        size = sum(s.size for s in instruction.shapes)
        cost = _COST.search(instruction.rest) if instruction.opcode == "custom-call" else None
        if cost:  # a Pallas kernel's own, of all its rows
            return int(cost[1])
        if instruction.opcode == "dot" or "matmul" in instruction.rest or "gemm" in instruction.rest:
            return 2 * size * _contract(instruction, computation)
        if instruction.opcode == "convolution":
            return _convolution_flop(instruction, *(x.shapes[0] for x in computation.operands_of(instruction)[:2]))
        return size

    def _flop_of(self, name: str) -> int:
        if name not in self._flop:
            self._flop[name] = 0  # a computation never calls itself; this only guards against malformed text
            computation = self.computations[name]
            self._flop[name] = sum(self.flop(i, computation) for i in computation)
        return self._flop[name]

    def _inside(self, name: str) -> Iterator[Instruction]:
        for instruction in self.computations[name]:
            yield instruction
            for called in instruction.called:
                if called in self.computations:
                    yield from self._inside(called)


def parse_instruction(line: str) -> Instruction | None:
    """One HLO line, or None if it is something else.

    >>> parse_instruction("%a = (f32[2]{0}, s32[]) all-reduce(%b, /*index=1*/%c), channel_id=1").operands
    ('b', 'c')
    """
    name, equals, text = line.removeprefix("ROOT ").partition(" = ")
    if not equals or " " in name:
        return None
    cut = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    shape, tail = text[:cut], text[cut:].lstrip()
    opcode, opened, _ = tail.partition("(")
    if not opened or not re.fullmatch(r"[\w\-]+", opcode):
        return None
    end = _closing(tail, len(opcode))
    inside = tail[len(opcode) + 1 : end]
    return Instruction(
        name.lstrip("%"), opcode, parse_shapes(shape), tuple(_NAME.findall(inside)), tail[end + 1 :], inside
    )


def parse_shapes(text: str) -> tuple[HloShape, ...]:
    """Every array in a shape's text, in order.

    >>> parse_shapes("(f32[4,2]{1,0}, (s32[], pred[<=3]))")[0].nbytes
    32
    """
    return tuple(HloShape(dtype, _dims(dims)) for dtype, dims in _SHAPE.findall(text))


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(d.strip().removeprefix("<=")) for d in text.split(",") if d.strip())


def _closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return len(text) - 1


def _header_number(header: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", header)
    return int(found[1]) if found else 1


def _contract(instruction: Instruction, computation: Computation) -> int:
    found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]', instruction.rest)
    operands = computation.operands_of(instruction)
    if found is None or not operands or not operands[0].shapes:
        return 1
    dims = [int(d.strip(' "')) for d in found[1].split(",") if d.strip(' "')]
    return math.prod(operands[0].shapes[0].dims[d] for d in dims)


def _convolution_flop(instruction: Instruction, left: HloShape, kernel: HloShape) -> int:
    """2 for each multiplication of two entries.

    The TPU compiler writes all products as convolutions: the dims of a batch of them are spatial, dilated such that all
    but one of a window's places fall into holes, which are not counted.
    """
    labels = _LABELS.search(instruction.rest)
    if labels is None:
        raise ValueError(f"convolution {instruction.name} without dim_labels; give the text of as_text()")
    shapes = (left, kernel, instruction.shapes[0])
    sizes = [dict(zip(names, s.dims, strict=True)) for names, s in zip(labels.groups(), shapes, strict=True)]
    window = _WINDOW.search(instruction.rest)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    taps = 1
    for dim in sorted(name for name in sizes[0] if name.isdigit()):
        at, (whole, width, out) = int(dim), (size[dim] for size in sizes)
        pad, stride, hole, spread = (_along(fields, key, at) for key in ("pad", "stride", "lhs_dilate", "rhs_dilate"))
        taps *= _taps(whole, width, out, int(pad.split("_")[0]), int(stride), int(hole), int(spread))
    return 2 * sizes[2]["b"] * sizes[2]["f"] * sizes[1]["i"] * taps


def _along(fields: dict[str, str], key: str, at: int) -> str:
    return fields[key].split("x")[at] if key in fields else "0_0" if key == "pad" else "1"


@functools.lru_cache(maxsize=1024)
def _taps(whole: int, width: int, out: int, pad: int, stride: int, hole: int, spread: int) -> int:
    """Pairs of an output's place and a window's along one dim that meet an entry, not padding nor a hole."""
    place = np.arange(out)[:, None] * stride + np.arange(width) * spread - pad
    return int(((place >= 0) & (place <= (whole - 1) * hole) & (place % hole == 0)).sum())
