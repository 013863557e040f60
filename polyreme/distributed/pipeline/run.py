"""One batch on its way through the chunks of a model: tasks in, values sent on, losses and gradients out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from polyreme.core.layout import Layout
from polyreme.core.state import TensorState
from polyreme.distributed.pipeline.chunk import Chunk, Done
from polyreme.distributed.pipeline.transfer import join, move, note, place, send
from polyreme.eager.tensor import Tensor
from polyreme.errors import GradError
from polyreme.jit.called import Called
from polyreme.jit.split import Flow
from polyreme.mesh.schedule import Task
from polyreme.training.microbatches import Microbatch


class Run:
    """One batch on its way through the chunks."""

    chunks: Sequence[Chunk]
    batch: Sequence[Microbatch]
    backward: bool
    keys: list[Any]

    def __init__(
        self,
        chunks: Sequence[Chunk],
        batch: Sequence[Microbatch],
        keys: Sequence[Any],
        *,
        backward: bool,
        loss: int | None,
        outputs: bool = False,
    ) -> None:
        self.chunks, self.batch, self.backward = chunks, batch, backward
        # which of the losses is differentiated; None to compute none
        self.loss = loss
        # whether the last chunk gives outputs beside losses
        self.outputs = outputs
        # by the loss's dtype: the cotangent of each microbatch's loss
        self.weights: Callable[[Any], list[jax.Array]] = lambda dtype: []
        # by microbatch: every loss, and what the last chunk gives beside them
        self._results: dict[int, tuple[list[jax.Array], Any]] = {}
        # of each microbatch, the random key that it draws from next
        self.keys = list(keys)
        self._key_at: dict[int, Layout | None] = dict.fromkeys(range(len(batch)))
        # by (chunk, microbatch): what waits to be run forward, backward, and for the gradients of weights
        self._arrived: dict[tuple[int, int], Flow] = {}
        self._done: dict[tuple[int, int], Done] = {}
        self._cotangents: dict[tuple[int, int], list[Any]] = {}
        self._num_given: dict[tuple[int, int], int] = {}
        for chunk in chunks:
            chunk.begin(len(batch) if backward else 0)

    def do(self, task: Task) -> None:
        """Dispatch one task and send on what it gives."""
        run = {"F": self._run_forward, "B": self._run_backward, "W": self._run_weights}[task.kind]
        with self.chunks[task.chunk].stage.tracing():
            run(task.chunk, task.microbatch)

    @property
    def waiting(self) -> Mapping[tuple[int, int], Done]:
        """By (chunk, microbatch), the forwards that wait for their backward, or for the gradients of weights."""
        return self._done

    def output(self, k: int, i: int) -> list[jax.Array]:
        """The arrays that a chunk gave of a microbatch and that the next one has not taken yet; none where those are in
        another process, and of the last chunk its losses."""
        if k == len(self.chunks) - 1:
            return list(self._results[i][0]) if i in self._results else []
        flow = self._arrived.get((k + 1, i))
        return [] if flow is None else flow.arrays

    def _run_forward(self, k: int, i: int) -> None:
        chunk, last = self.chunks[k], len(self.chunks) - 1
        flow = self._flow_into(k, i)
        if chunk.draws and self._key_at[i] is not chunk.stage:
            (self.keys[i],) = send([self.keys[i]], chunk.stage)
            self._key_at[i] = chunk.stage
        outs, self.keys[i], done = chunk.forward(flow, self.keys[i], backward=self.backward)
        if self.backward:
            self._done[k, i] = done
        if k < last:
            self._arrived[k + 1, i] = self._sent_on(outs, i, chunk.stage, self.chunks[k + 1])
        else:
            self._finish(i, outs)

    def _flow_into(self, k: int, i: int) -> Flow:
        """The inputs of a chunk: the batch's, or the outputs of the chunk before; for the last chunk the labels too."""
        stage = self.chunks[k].stage
        flow = place(self.batch[i].inputs, stage) if k == 0 else self._arrived.pop((k, i))
        if k == len(self.chunks) - 1 and self.loss is not None:
            self._num_given[k, i] = len(flow.arrays)
            flow = join(flow, place(self.batch[i].labels, stage))
        return flow

    def _finish(self, i: int, outs: Flow) -> None:
        if self.loss is None:
            self._results[i] = [], outs.tensors()
        elif self.outputs:
            losses, out = outs.tensors()
            self._results[i] = [loss._array for loss in losses], out
        else:
            self._results[i] = self._losses(outs, i, self.loss), None

    def _sent_on(self, outs: Flow, i: int, here: Layout, following: Chunk) -> Flow:
        """A chunk's outputs on the stage of the next, the random key with them if that draws from it."""
        stage = following.stage
        if stage is here:
            return outs
        if following.draws and self._key_at[i] is here:
            *arrays, self.keys[i] = send([*outs.arrays, self.keys[i]], stage)
            self._key_at[i] = stage
            return outs.with_arrays(arrays)
        return outs.with_arrays(send(outs.arrays, stage))

    def _losses(self, outs: Flow, i: int, chosen: int) -> list[jax.Array]:
        if self.backward:
            if not outs.wants[chosen]:
                raise GradError(
                    "the pipeline's loss has stop_gradient=True: nothing it was computed from wants a gradient; set "
                    "stop_gradient=False on a parameter, or use eval_batch"
                )
            cotangents: list[Any] = [None] * len(outs.arrays)
            cotangents[chosen] = self._weight(i, outs.arrays[chosen])
            self._cotangents[len(self.chunks) - 1, i] = cotangents
        return outs.arrays

    def _weight(self, i: int, loss: jax.Array) -> jax.Array:
        weight = self.weights(loss.dtype)[i]
        return weight if weight.shape == loss.shape else weight.reshape(loss.shape)

    def _run_backward(self, k: int, i: int) -> None:
        chunk = self.chunks[k]
        cotangents = self._cotangents.pop((k, i))
        gradients, done = chunk.backward(self._done.pop((k, i)), cotangents)
        if chunk.cut:
            self._done[k, i] = done
        if k > 0:
            before = self.chunks[k - 1]
            # the last chunk's inputs end with the labels, which no chunk gave
            ours = gradients[: self._num_given.pop((k, i), None)]
            self._cotangents[k - 1, i] = ours if before.stage is chunk.stage else send(ours, before.stage, "gradients")

    def _run_weights(self, k: int, i: int) -> None:
        self.chunks[k].weights(self._done.pop((k, i)))

    def store(self) -> None:
        """Add each chunk's gradients to `.grad`, on the stage where the parameter is at home."""
        totals: dict[int, tuple[Any, jax.Array]] = {}
        for chunk in self.chunks:
            for p, array in chunk.gradients():
                accumulate(totals, p, at_home(p, array))
        self._keep(totals)

    @staticmethod
    def _keep(totals: dict[int, tuple[Any, jax.Array]]) -> None:
        for p, array in totals.values():
            p._grad = Tensor(array if p._grad is None else sum_arrays(p._grad._array, array))

    def results(self) -> list[tuple[list[jax.Array], Any]]:
        """The losses of each microbatch, and the outputs of the last chunk beside them."""
        return [self._results[i] for i in range(len(self.batch))]

    def end(self) -> None:
        """Release every array."""
        for chunk in self.chunks:
            chunk.end()


def accumulate(totals: dict[int, tuple[Any, jax.Array]], p: TensorState, array: jax.Array) -> None:
    """Add a gradient to a parameter's sum so far."""
    known = totals.get(id(p))
    totals[id(p)] = (p, array if known is None else sum_arrays(known[1], array))


def at_home(p: Any, array: jax.Array) -> jax.Array:
    """A gradient of a parameter on the parameter's own stage."""
    home = p.sharding_of("grad") if hasattr(p, "sharding_of") else None
    if home is None or array.sharding == home:
        return array
    if array.sharding.device_set != home.device_set:
        note("parameter gradients", [array])
    return move([array], [home])[0]


sum_arrays: Called = Called(operator.add)
