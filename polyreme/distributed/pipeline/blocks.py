"""A model that lies whole on one mesh, as a program for each of its parts: alike parts share it.

A transformer's step as one program takes a compiler time in proportion to its blocks; so it takes that of one block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from polyreme.core.layout import Layout
from polyreme.distributed.pipeline.chunk import Chunk
from polyreme.distributed.pipeline.pipeline_layer import PipelineChunk
from polyreme.distributed.pipeline.run import Run
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.mesh.schedule import Schedule, Task
from polyreme.nn.alike import AlikeLayers, tensors_of
from polyreme.nn.layer import Layer
from polyreme.training.microbatches import Microbatch


class BlockPipeline(Pipeline):
    """Runs the chunks of a model on all devices of a mesh without stages, one microbatch after another.

    Chunks of one Layer each that are alike share their programs.
    """

    def __init__(
        self,
        chunks: Sequence[PipelineChunk],
        losses: Sequence[Callable[[Any, Any], Any]],
        layout: Layout,
        output: Callable[[Any], Any] | None = None,
        told: Sequence[str] = (),
    ) -> None:
        super().__init__(chunks, losses, layout, output, told)
        self._parts = list(chunks)
        self._alike = AlikeLayers(lambda: [_layer_of(part) for part in self._parts])

    def schedule(self, num_microbatches: int) -> Schedule:
        """Each microbatch's forwards, then from the last chunk to the first its backwards."""
        return _schedule(len(self.stage_of_chunk), num_microbatches)

    def _run(self, chunks: Sequence[Chunk], batch: Sequence[Microbatch], keys: Sequence[Any], **how: Any) -> Run:
        self._share()
        return super()._run(chunks, batch, keys, **how)

    def _share(self) -> None:
        """Have each chunk call the programs of the first one that does the same now: since the last batch Layers may
        have changed."""
        if not self._alike.have_changed():
            return
        for at, (chunk, part, first) in enumerate(zip(self._first, self._parts, self._alike.firsts, strict=False)):
            if first == at:
                chunk.share_programs(None, {})
            else:
                pairs = zip(tensors_of(self._parts[first]), tensors_of(part), strict=True)
                chunk.share_programs(self._first[first], {id(theirs): ours for theirs, ours in pairs})

    def _stages_of(self, num_chunks: int) -> tuple[int, ...]:
        return (0,) * num_chunks

    def _agreement(self, chunks: Sequence[Any]) -> None:
        """None: every process runs every task on its devices of the one mesh."""


def _layer_of(chunk: PipelineChunk) -> Layer | None:
    """The Layer that a chunk is, whose programs others may call: None if it is more, or has gradient hooks."""
    layer = chunk.items[0].layer if len(chunk.items) == 1 else None
    is_one = layer is not None and chunk.items[0].call is layer
    return layer if is_one and not any(t.__dict__.get("_hooks") for t in tensors_of(chunk)) else None


@functools.lru_cache(maxsize=64)
def _schedule(num_chunks: int, num_microbatches: int) -> Schedule:
    chunks = range(num_chunks)
    tasks = [
        Task(kind, i, k)
        for i in range(num_microbatches)
        for kind, order in (("F", chunks), ("B", reversed(chunks)))
        for k in order
    ]
    return Schedule("blocks", 1, num_chunks, num_microbatches, (tuple(tasks),), (0,) * num_chunks, False)
