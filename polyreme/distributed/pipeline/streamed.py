"""A model whose parameters lie outside of the devices' memory, run chunk by chunk on one mesh.

The weights of the next chunk are brought by a thread while one computes. All microbatches go through a chunk before the
next one, so that a step brings each chunk's weights twice, however many microbatches it has. When the last backward of
a chunk has run its gradients leave at once, written by a second thread.

Experts that the plan offloads are brought one by one: a chunk that ends at a router says which its tokens chose, and
those alone are read for the chunk of the experts, while further microbatches are routed; theirs alone are the gradients
that are written. What stands in the place of others is zeros, which no token meets. Of several processes each reads
and writes what its devices hold of those, whichever process has the tokens.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from polyreme.core import state
from polyreme.core.host_array import HostArray
from polyreme.core.layout import Layout
from polyreme.core.state import Elsewhere, TensorState
from polyreme.distributed.communication import replicas
from polyreme.distributed.pipeline.blocks import BlockPipeline
from polyreme.distributed.pipeline.chunk import Chunk
from polyreme.distributed.pipeline.pipeline_layer import PipelineChunk
from polyreme.distributed.pipeline.run import Run, at_home, sum_arrays
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.mesh.schedule import Schedule, Task
from polyreme.optimizer.late_updates import check_same_parts
from polyreme.optimizer.on_disk import FileTier, Start, StateEntry, StateFiles, StoredArray, StoredEntries
from polyreme.training.microbatches import Microbatch

Values = list[tuple[TensorState, jax.Array]]


class Waiting:
    """Seconds of a step so far, and how many of them it waited for weights and gradients to move."""

    seconds: float
    waited: float

    def __init__(self) -> None:
        self.seconds, self.waited = 0.0, 0.0

    def result(self, future: Future) -> Any:
        """The result of a thread, once there is one."""
        begin = time.perf_counter()
        try:
            return future.result()
        finally:
            self.waited += time.perf_counter() - begin


class Gradients:
    """Gradients of parameters, each where its parameter lies: on a disk the update of a bucket reads them beside its
    state."""

    files: StateFiles

    def __init__(self, tier: FileTier, parameters: Sequence[Any]) -> None:
        self.files = StateFiles(tier, "gradients")
        trained = [p for p in parameters if isinstance(p._array, StoredArray) and not p.stop_gradient]
        entries = []
        for p in trained:
            where = p.sharding_of("grad") or p._array.sharding
            like = jax.ShapeDtypeStruct(p._array.shape, p.dtype, sharding=where)
            by_entry = isinstance(p._array, StoredEntries)
            entries.append((p, {"grad": StateEntry(f"{p.name}_grad", like, None, by_entry)}))
        if entries:
            self.files.add(entries)
        for p, _ in entries:
            if isinstance(p._array, StoredEntries):
                check_same_parts(p, self.files.tensor(p, "grad").stored)

    def add(self, p: Any, gradient: jax.Array, chosen: frozenset[int] | None = None) -> Callable[[], None]:
        """Add to a parameter's gradient, which is 0 where there is none; -> what writes it, which a thread may call.

        chosen: of one whose experts move by themselves, those that have a gradient; all if None.

        Tensors are for the caller's thread to change: another may meet one that is being traced.
        """
        total = gradient if p._grad is None else sum_arrays(state.read(p._grad), gradient)
        if not self.files.has(p):
            p._grad = Tensor(HostArray(total, total.sharding) if isinstance(p._array, HostArray) else total)
            return lambda: None
        stored = self.files.tensor(p, "grad").stored
        is_first = p._grad is None or p._grad._array is not stored
        if is_first:
            p._grad = Tensor(stored)  # type: ignore[arg-type]  # stands for an array
        if not isinstance(stored, StoredEntries) or chosen is None:
            return functools.partial(stored.fill, total)
        before = frozenset() if is_first else stored.holds
        stored.holds = None if before is None else before | chosen
        return functools.partial(stored.fill_entries, total, sorted(chosen))


class StreamedPipeline(BlockPipeline):
    """A BlockPipeline each of whose chunks has its weights brought for its turn.

    parameters: of the model.
    """

    waiting: Waiting
    gradients: Gradients

    def __init__(
        self,
        chunks: Sequence[PipelineChunk],
        losses: Sequence[Callable[[Any, Any], Any]],
        layout: Layout,
        output: Callable[[Any], Any] | None,
        parameters: Sequence[Any],
    ) -> None:
        super().__init__(chunks, losses, layout, output)
        # of each chunk, the parameters whose experts are brought one by one
        self._experts = [_experts_of(chunk) for chunk in chunks]
        if "expert" in self.plan.offload and not any(self._experts):
            raise ConfigError(
                "plan: offload 'expert', and no block of the model ends at a router; leave 'expert' out of the plan's "
                "offload"
            )
        self._parameters = list(parameters)
        self.waiting = Waiting()
        tier = FileTier(self.plan.offload_path, self.plan.offload_buffers)
        self.gradients = Gradients(tier, parameters)
        is_ahead = self.plan.offload_buffers > 1
        self._reader = ThreadPoolExecutor(1, "weights") if is_ahead else None
        self._writer = ThreadPoolExecutor(1, "gradients") if is_ahead else None

    @property
    def files(self) -> list[StateFiles]:
        """The files of parameters and gradients that lie on disk."""
        arrays = [p._array for p in self._parameters if isinstance(p._array, StoredArray)]
        keepers = {id(array.keeper): array.keeper for array in arrays}
        return [*keepers.values(), self.gradients.files] if arrays else []

    def schedule(self, num_microbatches: int) -> Schedule:
        """The order of tasks: each chunk's forwards, then from the last chunk to the first its backwards."""
        return _schedule(len(self.stage_of_chunk), num_microbatches)

    def _forwards(self, num_microbatches: int) -> list[tuple[int, int]]:
        return [(i, k) for k in range(len(self.stage_of_chunk)) for i in range(num_microbatches)]

    def _run(self, chunks: Sequence[Chunk], batch: Sequence[Microbatch], keys: Sequence[Any], **how: Any) -> Run:
        self._share()
        return StreamedRun(self, chunks, batch, keys, **how)

    def bring(self, chunk: Chunk, at: int) -> Future:
        """Read the weights that a chunk will need, -> Values; in a thread if the plan has room for it."""
        # of a block without its experts, where it is not known yet what its programs read
        whole = (p for p in self._parts[at].parameters() if not isinstance(p._array, StoredEntries))
        tensors = chunk.known_reads or list(whole)
        # what stands for their values now: while a program is traced Tensors hold tracers
        apart = {id(p) for p in self._experts[at]}
        away = [(t, t._array) for t in tensors if isinstance(t._array, Elsewhere) and id(t) not in apart]
        return _start(self._reader, lambda: [(t, array.read()) for t, array in away])

    def experts(self, at: int) -> ChosenExperts | None:
        """The experts of a chunk that loads them one by one, none loaded yet; None for any other chunk."""
        return ChosenExperts(self._experts[at], self._reader) if self._experts[at] else None

    def send(self, gradients: Sequence[tuple[TensorState, jax.Array]], chosen: frozenset[int] | None = None) -> Future:
        """Write gradients of a chunk; in a thread if the plan has room for it. chosen: as Gradients.add."""
        writes = [self.gradients.add(p, array, chosen) for p, array in gradients]

        def write() -> None:
            for write_one in writes:
                write_one()

        return _start(self._writer, write)


class ChosenExperts:
    """The experts of a chunk that the tokens of a batch chose, on their way from the disk.

    chosen: those asked for so far.
    """

    def __init__(self, parameters: Sequence[Any], reader: ThreadPoolExecutor | None) -> None:
        self._stored: list[tuple[Any, StoredEntries]] = [(p, p._array) for p in parameters]
        self._reader = reader
        self._rooms: list[dict[Start, np.ndarray]] = []
        self._reading: list[Future] = []
        self.chosen: frozenset[int] = frozenset()

    def bring(self, choices: np.ndarray) -> None:
        """Begin to read those of these choices, -1 for none, that were not asked for before."""
        new = sorted(frozenset(np.unique(choices[choices >= 0]).tolist()) - self.chosen)
        self.chosen |= frozenset(new)
        if new:
            self._read(new)

    def values(self, waiting: Waiting) -> Values:
        """The parameters, with zeros where no token chose an expert, when all is read."""
        self._rooms = self._rooms or [array.room() for _, array in self._stored]
        for future in self._reading:
            waiting.result(future)
        values = [(p, array.assemble(room)) for (p, array), room in zip(self._stored, self._rooms, strict=True)]
        self._reading, self._rooms = [], []
        return values

    def bring_again(self) -> None:
        """Begin to read all that were asked for, whose values were let go."""
        self._read(sorted(self.chosen))

    def _read(self, experts: list[int]) -> None:
        self._rooms = self._rooms or [array.room() for _, array in self._stored]
        rooms = self._rooms

        def read() -> None:
            for (p, array), room in zip(self._stored, rooms, strict=True):
                if array.late is not None:
                    array.late.bring(p, experts)
                array.read_into(room, experts)

        self._reading.append(_start(self._reader, read))


class StreamedRun(Run):
    """One batch on its way through the chunks, a chunk's tasks after another's."""

    def __init__(
        self,
        pipeline: StreamedPipeline,
        chunks: Sequence[Chunk],
        batch: Sequence[Microbatch],
        keys: Sequence[Any],
        **how: Any,
    ) -> None:
        super().__init__(chunks, batch, keys, **how)
        self._pipeline, self._begin = pipeline, time.perf_counter()
        last = len(chunks) - 1
        down = list(range(last - 1, -1, -1)) if self.backward else []
        # the chunks whose weights are brought, in order: the last one's serve its forward and its backward
        self._coming = iter([*range(len(chunks)), *down])
        self._next: tuple[int, Future] | None = None
        self._writing: Future | None = None
        self._now: tuple[str, int] | None = None
        self._experts: dict[int, ChosenExperts | None] = {}
        self._bring_next()

    def do(self, task: Task) -> None:
        if self._now != (task.kind, task.chunk):
            self._turn(task.kind, task.chunk)
        super().do(task)
        following = (task.chunk + 1, task.microbatch)
        if task.kind == "F" and following in self._arrived:
            self._bring_chosen(*following)

    def _bring_chosen(self, k: int, i: int) -> None:
        """Read the experts of a chunk that the tokens of a microbatch chose, which is about to be run."""
        if k not in self._experts:
            self._experts[k] = self._pipeline.experts(k)
        experts = self._experts[k]
        if experts is not None:
            routed = self._arrived[k, i].tensors()[0]
            choices = replicas.whole(routed.choices._array, self._pipeline.layout.replicated())
            experts.bring(np.asarray(choices))

    def store(self) -> None:
        """Wait until every gradient is where it belongs; those of a chunk left when it had run."""
        self._leave()
        if self._writing is not None:
            self._pipeline.waiting.result(self._writing)

    def results(self) -> list[tuple[list[jax.Array], Any]]:
        self._pipeline.waiting.seconds += time.perf_counter() - self._begin
        return super().results()

    def _turn(self, kind: str, k: int) -> None:
        """A chunk's tasks of a kind begin."""
        before, self._now = self._now, (kind, k)
        if before is not None and before[1] == k:
            return
        assert self._next is not None
        assert self._next[0] == k  # tasks come in the schedule's order
        self._now = before
        self._leave()
        # after the chunk before has computed: what is waited for from now on keeps the devices idle
        values: Values = self._pipeline.waiting.result(self._next[1])
        self._now = (kind, k)
        experts = self._experts.get(k)
        if experts is not None:
            values = [*values, *experts.values(self._pipeline.waiting)]
        for tensor, array in values:
            self.chunks[k].lend(tensor, array)
        self._bring_next()

    def _leave(self) -> None:
        """The tasks of a kind of a chunk are over: wait for them, and let go of what the chunk held."""
        if self._now is None:
            return
        kind, k = self._now
        chunk = self.chunks[k]
        if kind == "F":
            waiting = [done.saved.inputs for (at, _), done in self.waiting.items() if at == k]
            arrived = [flow.arrays for (at, _), flow in self._arrived.items() if at == k + 1]
            jax.block_until_ready((waiting, arrived, [losses for losses, _ in self._results.values()]))
        else:
            gradients = [(p, at_home(p, array)) for p, array in chunk.take_gradients()]
            jax.block_until_ready([array for _, array in gradients])
            if self._writing is not None:
                self._pipeline.waiting.result(self._writing)
            experts = self._experts.get(k)
            self._writing = self._pipeline.send(gradients, None if experts is None else experts.chosen)
        chunk.let_go()

    def _bring_next(self) -> None:
        k = next(self._coming, None)
        self._next = None if k is None else (k, self._pipeline.bring(self.chunks[k], k))
        experts = None if k is None else self._experts.get(k)
        if experts is not None:  # known from the forward
            experts.bring_again()


def _experts_of(chunk: PipelineChunk) -> list[Any]:
    """The parameters of a chunk behind a router whose experts move by themselves."""
    layer = chunk.items[0].layer if len(chunk.items) == 1 else None
    if layer is None or not getattr(layer, "mixes_experts", False):
        return []
    return [p for p in layer.parameters() if isinstance(p._array, StoredEntries)]


def _start(pool: ThreadPoolExecutor | None, call: Callable[[], Any]) -> Future:
    """The call in a thread; run here and now when somebody waits for it, if there is none."""
    return pool.submit(call) if pool is not None else CallWhenAsked(call)


class CallWhenAsked(Future):
    """A call that is made when its result is asked for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._call())
        return super().result(timeout)


@functools.lru_cache(maxsize=64)
def _schedule(num_chunks: int, num_microbatches: int) -> Schedule:
    chunks, batch = range(num_chunks), range(num_microbatches)
    tasks = [Task("F", i, k) for k in chunks for i in batch] + [
        Task("B", i, k) for k in reversed(chunks) for i in batch
    ]
    return Schedule("stream", 1, num_chunks, num_microbatches, (tuple(tasks),), (0,) * num_chunks, False)
