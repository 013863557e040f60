"""What predict gives: time of a step and where it goes, memory of a device and what holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyreme.planner.frameworks import POLYREME, Fusion, MemoryHabits
from polyreme.planner.graph import PipelineCut


@dataclass(frozen=True, slots=True)
class Training:
    """How a step computes, apart from the plan.

    dtype: of the arithmetic; products: of matrix products, if another ("float8"). master: float32 parameters and two
    moments are kept beside parameters in dtype (autocast O2); else everything is float32 and cast in use. narrow: with
    master, that all of it is in dtype instead, and there is no second copy of parameters. attention: "fused" never
    stores the scores, "plain" does. gradients: bytes of a gradient's element where it is added up and reduced. cut: how
    a pipeline cuts the model. overlap: mesh axes whose communication runs beside arithmetic where there is enough of
    it: "mp" in pieces beside the product it belongs to, "mp_grad" only sums of inputs' gradients beside weights'
    gradients. prunes: whether a compiler leaves out of what is computed again all that no gradient reads (XLA does).
    fusion: which chains of elementwise operations are one kernel: "all" (XLA), "layers" (kernels made for a layer's
    parts, not for the loss), "none". sums: how often gradients are summed over replicas: "once" a step, under ZeRO 2
    once a microbatch; "program": as polyreme's programs do: under a pipeline once a step, ZeRO 2 included, which then
    keeps whole gradients between microbatches; in one program once a microbatch on a processor, whose compiler does not
    put sums off. overhead: seconds a step that no device works (input, logging, the host). keeps: what the framework's
    programs keep. flash: generation of the kernels of fused attention: 1 (arXiv:2205.14135), 2 (arXiv:2307.08691), 3:
    written for the device kind (arXiv:2407.08608, cuDNN 9). trains: "all" weights, or "adapters" beside frozen ones, so
    small that they count for nothing (arXiv:2106.09685). copies: of rows for experts: each is sent, or one to a node,
    which passes it on. sync: seconds that a dispatch or combine takes at least, where the host must know how many rows
    come. each_expert: seconds in which a host calls a kernel of one expert's product, where each expert's is a call of
    its own; 0 where one kernel computes all. cheap: whether what norms and elementwise operations of a layer make is
    computed again from what products and attention made, whatever the plan's recompute (jax's checkpoint policy of
    dots). away: whether all that layers keep for the backward lies in the host's memory, whatever the plan's recompute
    and offload. adapted: which products have adapters, those of attention or all of a layer. casts: of what products in
    few bits read, "apart": a kernel of their own, or "fused" into norms and activation functions that make it. tuned:
    whether kernels of products are chosen by measurement and the device's power is given to matrix units
    (DeviceKind.tuned). idle: seconds that a device waits for its host between kernels, over those that it computes.
    seen: whether runs of the software set constants here; it changes the interval alone.
    """

    dtype: str = "bfloat16"
    master: bool = True
    narrow: bool = False
    attention: Literal["fused", "plain"] = "fused"
    gradients: int = 4
    cut: PipelineCut = "items"
    products: str = ""
    overlap: tuple[str, ...] = ("dp", "sharding")
    prunes: bool = True
    fusion: Fusion = "all"
    sums: Literal["once", "program"] = "once"
    overhead: float = 0.0
    keeps: MemoryHabits = POLYREME
    flash: Literal[1, 2, 3] = 2
    trains: Literal["all", "adapters"] = "all"
    copies: Literal["rows", "nodes"] = "rows"
    sync: float = 0.0
    each_expert: float = 0.0
    cheap: bool = False
    away: bool = False
    adapted: Literal["attention", "all"] = "attention"
    casts: Literal["apart", "fused"] = "apart"
    tuned: bool = False
    idle: float = 0.0
    seen: bool = False

    @property
    def state_arrays(self) -> tuple[int, int]:
        """Arrays like the parameter that AdamW keeps beside it, and bytes of an element of theirs."""
        return (2, 2) if self.narrow else (2 + self.master, 4)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest device, by what holds them; each part is that of this one device."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step on the slowest stage: arithmetic, what is computed again, communication that nothing hides by
    mesh axis, waiting in the pipeline, the optimizer's update, movement to and from host memory, and waiting for the
    slowest of the devices."""

    compute: float
    recompute: float
    exposed: dict[str, float]
    bubble: float
    optimizer: float
    offload: float = 0.0
    slowest: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.compute, self.recompute, self.bubble, self.optimizer, self.offload, self.slowest)
        return sum(parts) + sum(self.exposed.values())


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one (model, plan, cluster, batch).

    mfu: model FLOP (without recompute, nor gradients of frozen weights) a second over the peak of Training.dtype.
    memory: of the fullest device. stages: memory of each pipeline stage. capacity: bytes a device can use. binds: what
    the step waits for most, in words. spread: how far off the seconds may be either way, as a share of them
    (planner/interval.py).
    """

    step_seconds: float
    mfu: float
    tokens_per_second: float
    memory: Memory
    stages: tuple[Memory, ...]
    times: Times
    capacity: float
    binds: str
    spread: float = 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds of a step that nine of ten runs like this one lie between."""
        return self.step_seconds / (1 + self.spread), self.step_seconds * (1 + self.spread)

    @property
    def fits(self) -> bool:
        """Whether the fullest device's memory is enough."""
        return self.memory.total <= self.capacity

    def capacity_of(self, stage: int) -> float:
        """Bytes that a device of a stage can use: as many in every stage."""
        return self.capacity
