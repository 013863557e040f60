"""One chunk of a model on its pipeline stage: its programs, the values they read, the gradients they add up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from polyreme.core.devices.abstract import Abstract, mode
from polyreme.core.layout import Layout
from polyreme.core.meshes import HOST
from polyreme.core.state import Elsewhere, TensorState
from polyreme.distributed.pipeline.transfer import move, note
from polyreme.distributed.placement import parameter_layouts
from polyreme.eager.host import put
from polyreme.jit.called import Called
from polyreme.jit.split import Flow, Kept, SplitProgram
from polyreme.jit.unreduced import sum_replicas


class Done(NamedTuple):
    """A forward that waits for its backward."""

    program: SplitProgram
    saved: Kept


class Chunk:
    """A function of one Flow on the devices of a stage.

    cut: its backward gives gradients of inputs and of weights in two calls. What is at home on another stage is copied
    here: trained parameters once a step, other Tensors whenever they changed.
    """

    draws: bool

    def __init__(self, run: Callable[[Any], Any], stage: Layout, *, cut: bool) -> None:
        self.run = run
        self.stage = stage
        self.cut = cut
        # all that were made, and those of the modes that this step runs in
        self._split_programs: dict[Any, list[SplitProgram]] = {}
        self._programs: dict[Any, SplitProgram] = {}
        self._devices = frozenset(stage.mesh.devices.flat)
        # whether a program of it draws random numbers; True until one is known
        self.draws = True
        self._no_key: Any = None
        self._copies: dict[int, jax.Array] = {}
        # of what is not trained: what was copied, and the copy
        self._constants: dict[int, tuple[jax.Array, jax.Array]] = {}
        self._values: dict[SplitProgram, list[Any]] = {}
        # of parameters, the sum of gradients so far; over replicas their addends, with one more dim in front
        self._sums: dict[int, tuple[TensorState, jax.Array]] = {}
        # microbatches of this step whose gradients are not in the sums yet
        self._to_come = 0
        # a chunk like this one, whose programs it calls with Tensors of its own, by the ids of the other's
        self._like: Chunk | None = None
        self._mine: dict[int, TensorState] = {}

    def share_programs(self, other: Chunk | None, tensors: Mapping[int, TensorState]) -> None:
        """Call the programs of a chunk that does the same with other values from the next step on; None for its own.
        tensors: by id of each of its Tensors, this one's. Programs that write Tensors are not shared."""
        self._like, self._mine = other, dict(tensors)

    def begin(self, backwards: int = 0) -> None:
        """Start a step with this many backwards: parameters may have changed since the last one, and Layers their
        mode."""
        self.end()
        self._to_come = backwards
        # its own programs name its own Tensors, which need not be those that stand for the other chunk's
        self._programs = {} if self._like is not None else dict(self._serving())
        self.draws = not self._programs or any(p.draws for p in self._programs.values())

    def _serving(self) -> Iterator[tuple[Any, SplitProgram]]:
        """Programs of its own that may be called as things are, by what they take."""
        return ((key, p) for key, made in self._split_programs.items() for p in made if p.serves())

    def end(self) -> None:
        """Hold no array any longer: parameters that only the model holds can be updated in place."""
        self._sums.clear()
        self.let_go()

    def let_go(self) -> None:
        """Hold no values of Tensors any longer; they are read again when they are needed."""
        self._values.clear()
        self._copies.clear()

    def forward(self, flow: Flow, key: Any, *, backward: bool) -> tuple[Flow, Any, Done]:
        """Run the forward program: (outputs, the next random key, the state for backward). key may lie anywhere if the
        chunk draws no random numbers."""
        program = self._program(flow, backward)
        if not program.draws:
            if self._no_key is None:
                self._no_key = put(np.zeros(2, np.uint32), self.stage.replicated())
            outs, _, residuals = program.forward(self._read(program), self._no_key, flow.arrays)
            return outs, key, Done(program, self._moved(residuals, HOST))
        if key.sharding.device_set != self._devices:
            # sent along only where the programs known so far draw
            (key,) = move([key], [self.stage.replicated()])
        outs, key, residuals = program.forward(self._read(program), key, flow.arrays)
        return outs, key, Done(program, self._moved(residuals, HOST))

    def backward(self, done: Done, cotangents: list[Any]) -> tuple[list[Any], Done]:
        """Run the backward program: (gradients of the input arrays, None where there are none; the state for
        weights)."""
        program, residuals = done.program, self._moved(done.saved, "device")
        read = self._read(program)
        if self.cut:
            gradients, _, residuals = program.backward(read, residuals, cotangents, [])
            return gradients, Done(program, residuals)
        last = self._is_last()
        sums = self._sums_of(program, residuals, cotangents, last)
        gradients, sums, residuals = program.backward(read, residuals, cotangents, sums, last=last)
        self._keep_sums(program, sums)
        return gradients, Done(program, residuals)

    def _moved(self, kept: Kept, memory: str) -> Kept:
        """The residuals of a forward, moved to this memory of their devices where the plan offloads activations."""
        if "act" not in self.stage.plan.offload or mode.is_on:
            return kept
        arrays, form = jax.tree.flatten(kept)
        places = [array.sharding.with_memory_kind(memory) for array in arrays]
        return jax.tree.unflatten(form, jax.device_put(arrays, places))

    def weights(self, done: Done) -> None:
        """The second part of a backward that was cut."""
        program, kept = done
        last = self._is_last()
        sums = self._sums_of(program, kept, None, last)
        self._keep_sums(program, program.weights(self._read(program), kept, sums, last=last))

    def reads(self, flow: Flow, *, backward: bool) -> list[TensorState]:
        """The Tensors that forward would read the values of."""
        return [self._tensor_of(t) for t in self._program(flow, backward).read]

    @property
    def known_reads(self) -> list[TensorState]:
        """The Tensors that the programs of this step or the last one read."""
        return list(
            {id(t): t for program in self._programs.values() for t in map(self._tensor_of, program.read)}.values()
        )

    def lend(self, tensor: TensorState, array: jax.Array) -> None:
        """Read this value, which lies on this stage, for a tensor of another stage until the step ends."""
        self._copies[id(tensor)] = array

    @property
    def copies(self) -> list[jax.Array]:
        """The copies of other stages' Tensors that this step made here."""
        return list(self._copies.values())

    @property
    def programs(self) -> list[tuple[str, Called]]:
        """The calls of this step or the last one: ("forward" | "backward" | "weights", call)."""
        return [found for program in self._programs.values() for found in program.programs]

    @property
    def fusions(self) -> list[str]:
        """Names of the patterns that calls of this step or the last one were fused by."""
        return [name for program in self._programs.values() for name in program.fusions]

    @property
    def sums(self) -> list[jax.Array]:
        """The gradients added up so far, as they lie: whole, or an addend for each replica."""
        return [array for _, array in self._sums.values()]

    def gradients(self) -> list[tuple[TensorState, jax.Array]]:
        """(parameter, the sum of its gradients over the step's microbatches), on this stage's devices."""
        return [(p, self._whole(p, array)) for p, array in self._sums.values()]

    def take_gradients(self) -> list[tuple[TensorState, jax.Array]]:
        """gradients(), which this chunk then has no longer."""
        taken = self.gradients()
        self._sums.clear()
        return taken

    def _program(self, flow: Flow, backward: bool) -> SplitProgram:
        key = (flow.key, backward)
        program = self._programs.get(key)
        if program is None and self._like is not None:
            program = self._like._program(flow, backward)
            if program.written or program.moved:
                self._like, self._mine = None, {}
                self._programs = dict(self._serving())
                program = self._programs.get(key)
            else:
                self._programs[key] = program
                self.draws = any(known.draws for known in self._programs.values())
        if program is None:
            program = SplitProgram(self.run, flow, self.stage, backward=backward, cut=self.cut)
            foreign: list[Any] = [t for t in program.read if self._is_foreign(t)]
            program.moved = [(p, parameter_layouts(self.stage, p)) for p in foreign]
            self._programs[key] = program
            self._split_programs.setdefault(key, []).append(program)
            self.draws = any(known.draws for known in self._programs.values())
        return program

    def _is_foreign(self, tensor: Any) -> bool:
        layouts = getattr(tensor, "layouts", None)
        return bool(layouts) and layouts["param"].mesh != self.stage.mesh

    def _read(self, program: SplitProgram) -> list[Any]:
        values = self._values.get(program)
        if values is None:
            values = self._values[program] = [self._here(self._tensor_of(t)) for t in program.read]
        return values

    def _here(self, tensor: Any) -> Any:
        """The value on this stage's devices, copied if it is at home elsewhere."""
        array = tensor._array
        if isinstance(array, Elsewhere):
            if id(tensor) not in self._copies:
                self._copies[id(tensor)] = array.read()
            return self._copies[id(tensor)]
        if array.sharding.device_set == self._devices:
            return array
        if id(tensor) not in self._copies:
            source, copy = self._constants.get(id(tensor), (None, None))
            self._copies[id(tensor)] = copy if source is array and copy is not None else self._copy(tensor, array)
        return self._copies[id(tensor)]

    def _tensor_of(self, tensor: TensorState) -> TensorState:
        """This chunk's Tensor for one of a program that may be shared."""
        return self._mine.get(id(tensor), tensor)

    def _copy(self, tensor: Any, array: jax.Array) -> jax.Array:
        dims = getattr(tensor, "dims", None)
        place = self.stage.replicated() if dims is None else self.stage.sharding("param", dims, array.shape)
        note("parameters", [array])
        copy = put(array, place)
        if tensor.stop_gradient:
            self._constants[id(tensor)] = (array, copy)
        return copy

    def _is_last(self) -> bool:
        """Counts a microbatch whose gradients are about to be added; True for the last of the step."""
        self._to_come -= 1
        return self._to_come == 0

    def _sums_of(self, program: SplitProgram, kept: Kept, cotangents: list[Any] | None, last: bool) -> list[jax.Array]:
        leaves = [self._tensor_of(p) for p in program.leaves]
        if any(id(p) not in self._sums for p in leaves):
            zeros = program.zeros(self._read(program), kept, cotangents, last=last)
            for p, zero in zip(leaves, zeros, strict=True):
                self._sums.setdefault(id(p), (p, zero))
        return [self._sums[id(p)][1] for p in leaves]

    def _keep_sums(self, program: SplitProgram, sums: Sequence[jax.Array]) -> None:
        for p, array in zip(map(self._tensor_of, program.leaves), sums, strict=True):
            self._sums[id(p)] = (p, array)

    def _whole(self, p: TensorState, array: jax.Array) -> Any:
        """A gradient that the step's last backward left as addends, as it had none for this parameter."""
        if array.ndim == p._array.ndim:
            return array
        dims = getattr(p, "dims", None)
        place = self.stage.replicated() if dims is None else self.stage.sharding("grad", dims, p._array.shape)
        return Abstract.of(p._array.shape, array.dtype, place) if mode.is_on else _sum_of_addends(place)(array)


@functools.lru_cache(maxsize=256)
def _sum_of_addends(place: Any) -> Any:
    """A program that sums over the dim in front, for a result laid out so."""
    return jax.jit(sum_replicas, out_shardings=place)
