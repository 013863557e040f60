"""One batch on its way through chunks whose stages lie on devices of several processes.

See processes.py for what is agreed and how arrays travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from polyreme.core import amp_policy
from polyreme.core import dtype as dtypes
from polyreme.core.layout import Layout
from polyreme.core.state import TensorState
from polyreme.distributed.pipeline.chunk import Chunk
from polyreme.distributed.pipeline.processes import Piece, decode, encode, from_all, hop, is_here, leader
from polyreme.distributed.pipeline.run import Run, accumulate
from polyreme.eager.host import put
from polyreme.jit.capture import parts_of
from polyreme.jit.split import Flow
from polyreme.nn.layer import Layer
from polyreme.training.microbatches import Microbatch


class Agreed:
    """The facts that processes have agreed on, kept for as long as a Pipeline lives.

    chunks: the model's, each with the layout of its stage; their Tensors are in the same order in every process, so
    that one is named by its place.
    """

    homes: list[Layout]
    place: dict[int, int]

    def __init__(self, chunks: Sequence[tuple[Layer, Layout]]) -> None:
        homes: dict[TensorState, Layout] = {
            t: stage for chunk, stage in reversed(chunks) for t in (*chunk.parameters(), *chunk.buffers())
        }
        self.tensors: list[TensorState] = list(
            dict.fromkeys(t for chunk, _ in chunks for t in (*chunk.parameters(), *chunk.buffers()))
        )
        self.homes = [homes[t] for t in self.tensors]
        self.place = {id(t): at for at, t in enumerate(self.tensors)}
        self.facts: dict[Any, Any] = {}
        self._layers = [layer for chunk, _ in chunks for layer in chunk.sublayers(include_self=True)]

    def mode(self) -> tuple[Any, ...]:
        """The settings besides the shapes of a microbatch that the programs of chunks depend on; they are equal in
        every process, since all run the same script."""
        return (
            amp_policy.active.policy,
            dtypes.default_dtype(),
            tuple(t.stop_gradient for t in self.tensors),
            tuple((layer.training, len(parts_of(layer))) for layer in self._layers),
        )

    def from_leader(self, key: Any, stage: Layout, value: Any) -> Any:
        """The value of the rank that leads a stage, asked for once for each key; all ranks must come here."""
        if key not in self.facts:
            self.facts[key] = from_all(value() if is_here(stage) else None)[leader(stage)]
        return self.facts[key]


class RunAcross(Run):
    """A Run of which every process does its part."""

    keys: Any

    def __init__(
        self,
        chunks: Sequence[Chunk],
        batch: Sequence[Microbatch],
        keys: Sequence[Any],
        *,
        backward: bool,
        loss: int | None,
        outputs: bool = False,
        agreed: Agreed,
    ) -> None:
        hosted = [np.asarray(key) for key in keys]
        super().__init__(chunks, batch, hosted, backward=backward, loss=loss, outputs=outputs)
        self._agreed = agreed
        # what tells the programs of one microbatch from those of another, alike in every process
        mode = agreed.mode()
        self._kinds = [(_shape_of(part), backward, loss, outputs, mode) for part in batch]
        self._outs: dict[tuple[int, int], tuple[Flow, list[Piece]]] = {}
        self._copied: set[tuple[int, int]] = set()

    def _run_forward(self, k: int, i: int) -> None:
        chunk, last = self.chunks[k], len(self.chunks) - 1
        here, facts = is_here(chunk.stage), (k, self._kinds[i])
        flow = key = outs = None
        if here:
            flow = self._flow_into(k, i)
            key = put(self.keys[i], chunk.stage.replicated()) if k == 0 else self.keys[i]
        foreign = self._agreed.from_leader(("reads", *facts), chunk.stage, lambda: self._foreign(chunk, flow))
        self._copy(k, foreign)
        if here:
            assert flow is not None
            outs, self.keys[i], done = chunk.forward(flow, key, backward=self.backward)
            if self.backward:
                self._done[k, i] = done
        if k < last:
            told = self._agreed.from_leader(
                ("gives", *facts), chunk.stage, lambda: None if outs is None else encode(outs)
            )
            self._pass_on(k, i, outs, *decode(told))
        elif outs is not None:
            self._finish(i, outs)

    def _pass_on(self, k: int, i: int, outs: Flow | None, structure: Flow, pieces: list[Piece]) -> None:
        """Send a chunk's outputs, and the random key that follows, to the stage of the next."""
        here, there = self.chunks[k].stage, self.chunks[k + 1].stage
        self._outs[k, i] = (structure, pieces)
        if here is there:
            if outs is not None:
                self._arrived[k + 1, i] = outs
            return
        key = Piece((2,), "uint32", ())
        arrays = None if outs is None else [*outs.arrays, put(np.asarray(self.keys[i]), here.replicated())]
        moved = hop(arrays, [*pieces, key], here, there)
        if moved is not None:
            *arrived, self.keys[i] = moved
            self._arrived[k + 1, i] = structure.with_arrays(arrived)

    def _run_backward(self, k: int, i: int) -> None:
        chunk = self.chunks[k]
        ours: list[Any] | None = None
        if is_here(chunk.stage):
            gradients, done = chunk.backward(self._done.pop((k, i)), self._cotangents.pop((k, i)))
            if chunk.cut:
                self._done[k, i] = done
            ours = gradients[: self._num_given.pop((k, i), None)]
        if k == 0:
            return
        before = self.chunks[k - 1]
        present = self._agreed.from_leader(
            ("wants", k, self._kinds[i]), chunk.stage, lambda: [g is not None for g in ours or ()]
        )
        pieces = [
            piece if is_there else None for piece, is_there in zip(self._outs.pop((k - 1, i))[1], present, strict=True)
        ]
        if before.stage is chunk.stage:
            moved = ours
        else:
            moved = hop(ours, pieces, chunk.stage, before.stage)
        if moved is not None:
            self._cotangents[k - 1, i] = moved

    def _run_weights(self, k: int, i: int) -> None:
        if is_here(self.chunks[k].stage):
            super()._run_weights(k, i)

    # parameters that a chunk shares with another stage

    def _foreign(self, chunk: Chunk, flow: Flow | None) -> list[int]:
        assert flow is not None
        read = chunk.reads(flow, backward=self.backward)
        return [self._agreed.place[id(t)] for t in read if self._is_foreign(t, chunk)]

    def _is_foreign(self, tensor: Any, chunk: Chunk) -> bool:
        at = self._agreed.place.get(id(tensor))
        return at is not None and self._agreed.homes[at] is not chunk.stage

    def _copy(self, k: int, foreign: Sequence[int]) -> None:
        """Bring the values a chunk reads of other stages' parameters to its stage, once a step."""
        chunk = self.chunks[k]
        for at in foreign:
            if (k, at) in self._copied:
                continue
            self._copied.add((k, at))
            tensor, home = self._agreed.tensors[at], self._agreed.homes[at]
            moved = hop([tensor._array], [Piece.of(tensor._array)], home, chunk.stage)
            if moved is not None:
                chunk.lend(tensor, moved[0])

    def store(self) -> None:
        """Add each chunk's gradients to `.grad`, on the stage where the parameter is at home."""
        totals: dict[int, tuple[Any, jax.Array]] = {}
        for k in range(len(self.chunks)):
            self._store_of(k, totals)
        self._keep(totals)

    def _store_of(self, k: int, totals: dict[int, tuple[Any, jax.Array]]) -> None:
        chunk = self.chunks[k]
        found = dict(chunk.gradients()) if is_here(chunk.stage) else {}
        foreign = {self._agreed.place[id(p)]: a for p, a in found.items() if self._is_foreign(p, chunk)}
        for p, array in found.items():
            if not self._is_foreign(p, chunk):
                accumulate(totals, p, array)
        told = self._agreed.from_leader(
            ("sums", k, tuple(self._kinds)),
            chunk.stage,
            lambda: [[key, Piece.of(array).plain()] for key, array in foreign.items()],
        )
        for key, piece in told:
            ours = [foreign[key]] if key in foreign else None
            moved = hop(ours, [Piece.read(piece)], chunk.stage, self._agreed.homes[key])
            if moved is not None:
                accumulate(totals, self._agreed.tensors[key], moved[0])

    def results(self) -> list[tuple[list[jax.Array], Any]]:
        """Every microbatch's losses in every process, and the last chunk's outputs where they were made, None
        elsewhere. The keys that follow are those of the last stage then, in every process."""
        last = self.chunks[-1].stage
        results = [self._results.get(i, ([], None)) for i in range(len(self.batch))]
        ours = None
        if is_here(last):
            ours = [[np.asarray(v) for v in losses] for losses, _ in results], [np.asarray(key) for key in self.keys]
        theirs, self.keys = from_all(ours)[leader(last)]
        return [([jax.numpy.asarray(v) for v in losses], out) for losses, (_, out) in zip(theirs, results, strict=True)]


def _shape_of(part: Microbatch) -> Any:
    def told(value: Any) -> Any:
        flow = Flow.of(value)
        return tuple((v.shape, v.dtype.name) if isinstance(v, (np.ndarray, jax.Array)) else v for v in flow.leaves)

    return told(part.inputs), told(part.labels)
