"""Every collective of a compiled program: kind, mesh axes, bytes, the layer it comes from, and whether it can hide.

Bytes. payload is the value the collective is about, on one device, whole: what is summed, what is gathered when it is
complete, what is scattered before it is. wire is what one device sends in the ring form of the collective among n
devices (Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002): all-reduce 2 (n - 1) / n payload; all-gather,
reduce-scatter and all-to-all (n - 1) / n payload; broadcast payload; a permute its payload, averaged over the devices.

Overlap. A collective is
    overlapped  if it is a start and a done with enough work scheduled between them to hide it, or on TPU fusions that
                drive it beside enough work of their own;
    free        if it is not, but enough work neither feeds it nor waits for it: a scheduler could hide it;
    critical    otherwise: the devices wait.
Enough is `balance` FLOP for each wire byte: what a device computes while a byte is on its way. Several collectives may
count the same work, so free is a claim about each alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

from polyreme.distributed.comm_report.groups import Groups, axes_of, axes_of_pairs, parse_groups, parse_pairs
from polyreme.distributed.comm_report.hlo import Computation, Instruction, Module
from polyreme.mesh import MeshShape

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
PHASES = ("forward", "backward", "update")

BALANCE = {"gpu": 2200.0, "tpu": 1000.0, "cpu": 20.0}
"""FLOP a device does while one byte is on the wire. gpu: 989e12 dense bf16 FLOP/s over 450e9 bytes/s of NVLink one way
(NVIDIA H100 SXM data sheet); tpu: 197e12 over 200e9 (v5e system documentation); cpu: 1e11 over 5e9, a core's memory."""

_WRAPPED = re.compile(r"^[\w\-]+\((.*)\)$")
# path elements that jax writes for its own constructs
_CONTROL = frozenset(
    {"while", "body", "cond", "closed_call", "checkpoint", "remat", "remat2", "shard_map", "custom_jvp_call"}
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CONTROL_START = ("branch_", "custom_vjp", "rematted_computation")


@dataclass(frozen=True)
class Origin:
    """The origin of an instruction in the source: phase, dotted layer ("" outside all), kernel ("linear_grad") and
    primitive."""

    phase: str
    layer: str
    kernel: str
    primitive: str


@dataclass(frozen=True)
class CollectiveArray:
    """One array of a collective: a combined one has several."""

    nbytes: int
    dtype: str
    dims: tuple[int, ...]
    origin: Origin


@dataclass(frozen=True)
class CollectiveInstruction:
    """One collective instruction.

    axes: mesh axes, outermost first; None if its groups run along none. times: how often it runs in one call of the
    program, loops multiplied; counted is False where a loop's length is not known (then once). independent_flop: work
    that could hide one run of it.
    """

    name: str
    kind: str
    axes: tuple[str, ...] | None
    group_size: int
    parts: tuple[CollectiveArray, ...]
    times: int
    counted: bool
    is_async: bool
    overlap: str
    independent_flop: int
    moved_share: float

    @property
    def payload(self) -> int:
        """Bytes of the whole value on one device, one run."""
        return sum(part.nbytes for part in self.parts)

    @property
    def wire(self) -> float:
        """Bytes one device sends, one run."""
        return self.payload * wire_share(self.kind, self.group_size) * self.moved_share

    @property
    def total_wire(self) -> float:
        """Bytes one device sends in a call of the program."""
        return self.wire * self.times


def wire_share(kind: str, devices: int) -> float:
    """Bytes one device sends for each byte of payload, in the ring form of the collective.

    >>> wire_share("all-reduce", 4), wire_share("all-gather", 4)
    (1.5, 0.75)
    """
    if devices <= 1:
        return 0.0
    if kind == "all-reduce":
        return 2 * (devices - 1) / devices
    if kind in ("collective-permute", "collective-broadcast", "send"):
        return 1.0
    return (devices - 1) / devices


def find_collectives(text: str, mesh: MeshShape, balance: float = BALANCE["gpu"]) -> list[CollectiveInstruction]:
    """Every collective in a program's optimized HLO text that moves bytes between devices, in the order of the text.

    mesh: the shape whose device indexes the program's partitions are. balance: see BALANCE.
    """
    module = Module(text)
    collectives = []
    running = list(_running(module, module.entry, 1, True))
    begun = {channel for computation, _, _ in running for channel in _begun_in(module, computation)}
    for computation, times, counted in running:
        work = _Work(module, computation, begun)
        for instruction in computation:
            kind = _kind(module, instruction)
            if kind is not None and instruction.name not in work.steps:
                made = _collective(module, work, instruction, kind, mesh, (times, counted), balance)
                if made.wire:
                    collectives.append(made)
    return collectives


def _begun_in(module: Module, computation: Computation) -> Iterator[str]:
    """Channels of the collectives that fusions of a computation begin and others take further, some of them in the body
    of a loop that runs meanwhile."""
    for instruction in computation:
        if instruction.opcode == "fusion" and _begins(module, instruction):
            yield from _channels(module, instruction)


def _begins(module: Module, instruction: Instruction) -> bool:
    return any("AsyncCollectiveStart" in i.rest for i in _inside(module, instruction) if i.opcode == "custom-call")


def _channels(module: Module, instruction: Instruction) -> list[str]:
    inside = (i for i in _inside(module, instruction) if i.opcode in KINDS)
    return [found[1] for i in inside if (found := _CHANNEL.search(i.rest))]


_OF_GRADIENTS = ("accumulate", "pull_saved", "sum_replicas")


def origin_of(op_name: str) -> Origin:
    """Phase, layer, kernel and primitive from an HLO op_name.

    >>> origin_of("jit(f)/GPT/blocks.0/ffn/up/jit(linear_grad)/transpose(jvp())/dot_general").layer
    'GPT.blocks.0.ffn.up'
    >>> origin_of("jit(f)/transpose(jvp(Chunk.1))/block/remat2/rematted_computation/ffn/jit(gelu)/tanh").layer
    'Chunk.1.block.ffn'
    """
    # a combined one names several: take the first
    text = re.sub(r"/\((.*?)(:.*)?\)$", r"/\1", op_name.partition(";")[0])
    layers, kernels, is_backward = [], [], False
    for element in _elements(text):
        name = element
        while wrapped := _WRAPPED.match(name):
            if name.startswith("transpose("):
                is_backward = True
            if name.startswith(("jit(", "pjit(")):
                kernels.append(wrapped[1])
                name = ""
                break
            name = wrapped[1]
        if name and name not in _CONTROL and not name.startswith(_CONTROL_START):
            layers += name.split("/")
    primitive = layers.pop() if layers and not text.endswith(")") else ""
    kernel = kernels[-1] if len(kernels) > 1 else ""
    is_update = any(k.endswith("_update") or k in ("global_norm", "squares") for k in kernels)
    is_backward = is_backward or any(k.endswith("_grad") or k in _OF_GRADIENTS for k in kernels)
    phase = "update" if is_update else "backward" if is_backward else "forward"
    return Origin(phase, ".".join(layers), kernel, primitive)


def _elements(path: str) -> list[str]:
    """The path cut at slashes outside parentheses."""
    cut, depth, last = [], 0, 0
    for at, letter in enumerate(path):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            cut.append(path[last:at])
            last = at + 1
    return [element for element in [*cut, path[last:]] if element]


def _running(
    module: Module, computation: Computation, times: int, counted: bool
) -> Iterator[tuple[Computation, int, bool]]:
    """The computations that run as programs of their own, not inside a kernel, with how often each runs."""
    yield computation, times, counted
    for instruction in computation:
        if instruction.opcode not in ("while", "call", "conditional"):
            continue
        trips = module.trips(instruction) if instruction.opcode == "while" else 1
        for name in instruction.called:
            if name in module.computations:
                yield from _running(
                    module, module.computations[name], times * (trips or 1), counted and trips is not None
                )


def _core(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction is, or wraps in a computation of its own (an async start, a TPU fusion)."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        return instruction
    if instruction.opcode not in ("async-start", "fusion"):
        return None
    return next((i for i in _inside(module, instruction) if i.opcode in KINDS), None)


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    return (i for name in instruction.called for i in module.computations.get(name, ()))


def _kind(module: Module, instruction: Instruction) -> str | None:
    core = _core(module, instruction)
    if core is None:
        return None
    # the TPU compiler writes a reduce-scatter as a fusion of an all-reduce and the slice that is kept of it
    is_scattered = any(name.startswith("all-reduce-scatter") for name in instruction.called)
    return "reduce-scatter" if is_scattered else core.opcode.removesuffix("-start")


def _collective(
    module: Module,
    work: _Work,
    instruction: Instruction,
    kind: str,
    mesh: MeshShape,
    runs: tuple[int, bool],
    balance: float,
) -> CollectiveInstruction:
    core = _core(module, instruction) or instruction
    axes, size, moved = _reach(module, core, kind, mesh)
    parts = _parts(module, work.computation, instruction, kind, size)
    is_async = instruction.name in work.done
    wire = sum(p.nbytes for p in parts) * wire_share(kind, size) * moved
    between = work.between(instruction) if is_async else 0
    independent = work.independent(instruction)
    overlap = "overlapped" if is_async and between >= balance * wire else "critical"
    if overlap == "critical" and independent >= balance * wire:
        overlap = "free"
    return CollectiveInstruction(
        instruction.name, kind, axes, size, parts, *runs, is_async, overlap, max(between, independent), moved
    )


def _reach(module: Module, core: Instruction, kind: str, mesh: MeshShape) -> tuple[tuple[str, ...] | None, int, float]:
    """Axes, devices in a group, and the share of the devices that send."""
    if kind == "collective-permute":
        pairs = parse_pairs(core.rest)
        axes, moved = axes_of_pairs(pairs, mesh), sum(a != b for a, b in pairs)
        return axes, 2 if moved else 1, moved / max(1, module.num_partitions)
    groups: Groups = parse_groups(core.rest, module.num_partitions)
    if "use_global_device_ids" not in core.rest and module.num_replicas == 1 and kind not in _PARTITION_KINDS:
        # ids are replicas': with a channel each stands for all its partitions, without one nothing leaves the device
        groups = (tuple(range(module.num_partitions)),) if "channel_id=" in core.rest else ((0,),)
    return axes_of(groups, mesh), max(len(group) for group in groups), 1.0


# with a channel these count partitions, whatever use_global_device_ids says
_PARTITION_KINDS = ("all-to-all", "ragged-all-to-all", "collective-broadcast")


def _parts(
    module: Module, computation: Computation, instruction: Instruction, kind: str, size: int
) -> tuple[CollectiveArray, ...]:
    """One part an operand; a combined collective's parts are told apart by what computed them."""
    operands, named = computation.operands_of(instruction), instruction.op_name
    if instruction.opcode == "fusion":  # whose operands may be those of a product beside it
        (called,) = instruction.called
        computation = module.computations[called]
        core = _core(module, instruction) or instruction
        operands, named = computation.operands_of(core), instruction.op_name or core.op_name
    if kind == "ragged-all-to-all":  # the room for what comes, offsets and sizes follow
        operands = operands[:1]
    whole_origin = origin_of(named)
    scale = size if kind == "all-gather" else 1
    parts = []
    for operand in operands:
        shape = operand.shapes[0]
        origin = (
            whole_origin
            if len(operands) == 1 or kind == "all-to-all"
            else _producer(computation, operand, whole_origin)
        )
        parts.append(CollectiveArray(shape.nbytes * scale, shape.dtype, shape.dims, origin))
    return tuple(parts)


def _producer(computation: Computation, operand: Instruction, default: Origin) -> Origin:
    """The instruction that computed an operand, sought through instructions that only rename."""
    instruction: Instruction | None = operand
    while (
        instruction is not None
        and instruction.opcode in ("get-tuple-element", "bitcast", "copy", "tuple")
        and instruction.operands
    ):
        instruction = computation.instructions.get(instruction.operands[0])
    if instruction is None or not instruction.op_name:
        return default
    return origin_of(instruction.op_name)


class _Work:
    """The arithmetic of a computation, and what depends on what in it."""

    def __init__(self, module: Module, computation: Computation, begun: Container[str]) -> None:
        self.computation = computation
        self._begun = begun  # channels of the collectives that fusions drive in turns
        self.order = {name: at for at, name in enumerate(computation.instructions)}
        self.done = {
            i.operands[0]: self.order[i.name] for i in computation if i.opcode.endswith("-done") and i.operands
        }
        self.steps: set[str] = set()
        """Fusions that take further a collective which another one began."""
        self._find_steps(module)
        self.flop = [
            module.flop(i, computation) if i.name in self.steps or _kind(module, i) is None else 0 for i in computation
        ]

    def _find_steps(self, module: Module) -> None:
        """The TPU compiler's async collective fusion: a collective, by its channel, that fusions drive in turns, some
        of which compute beside it."""
        starts: dict[str, str] = {}
        for instruction in self.computation:
            if instruction.opcode != "fusion":
                continue
            begins = _begins(module, instruction)
            for channel in _channels(module, instruction):
                if begins and channel not in starts:
                    starts[channel] = instruction.name
                elif channel in self._begun:
                    self.steps.add(instruction.name)
                    if channel in starts:
                        self.done[starts[channel]] = self.order[instruction.name]

    @functools.cached_property
    def before(self) -> list[int]:
        """Bit sets of the instructions that each instruction depends on."""
        result: list[int] = []
        for instruction in self.computation:
            bits = 0
            for name in instruction.operands:
                at = self.order.get(name)
                if at is not None and at < len(result):
                    bits |= result[at] | 1 << at
            result.append(bits)
        return result

    @functools.cached_property
    def after(self) -> list[int]:
        """Bit sets of the instructions that depend on each instruction."""
        result = [0] * len(self.order)
        for at, instruction in reversed(list(enumerate(self.computation))):
            for name in instruction.operands:
                if name in self.order:
                    result[self.order[name]] |= result[at] | 1 << at
        return result

    def independent(self, instruction: Instruction) -> int:
        """FLOP that neither feed the instruction nor wait for it."""
        at = self.order[instruction.name]
        tied = self.before[at] | self.after[at] | 1 << at
        return sum(flop for other, flop in enumerate(self.flop) if flop and not tied >> other & 1)

    def between(self, start: Instruction) -> int:
        """FLOP scheduled between a start and its done."""
        first = self.order[start.name]
        return sum(self.flop[first + 1 : self.done.get(start.name, first + 1)])
