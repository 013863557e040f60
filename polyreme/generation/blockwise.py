"""A decoder's steps over a cache, compiled a few blocks at a time: spans that differ in their weights alone share a
program.

One program of all blocks takes as many times longer to compile. On a CPU it runs no faster, since a step waits for
weights being read; on an accelerator each program costs the host a start, and a span holds several blocks. Nothing is
stacked or copied: a program is called with the arrays of each span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyreme.core.state import TensorState
from polyreme.eager.tensor import to_tensor
from polyreme.jit import to_static
from polyreme.jit.program import CapturedProgram
from polyreme.kernels import select
from polyreme.models.parts.cache import CacheRows
from polyreme.models.parts.decoder import InsertedVectors
from polyreme.nn.alike import AlikeLayers, first_places, tensors_of
from polyreme.nn.layer import Layer
from polyreme.ops.indices.gather import take_along_axis

SPAN_BLOCKS: dict[select.Backend, int] = {"cpu": 1, "gpu": 8, "tpu": 8, "other": 1}
"""Blocks of a program, by the kind of device."""


class BlockwiseSteps:
    """Steps that extend the texts of a cache by tokens and return the logits after the last token of each row.

    is_first: the cache is empty when it is called.
    """

    model: Any
    cache: CacheRows
    is_first: bool

    def __init__(self, model: Any, cache: CacheRows, *, is_first: bool) -> None:
        self.model, self.cache, self.is_first = model, cache, is_first
        self._embed, self._finish = to_static(self._embedded), to_static(self._finished)
        self._finish_all = to_static(self._finished_all)
        self._alike = AlikeLayers(lambda: list(model.blocks))
        self._spans: list[range] = []
        self._firsts: list[int] = []
        self._tensors: list[list[TensorState]] = []
        self._captured: dict[tuple[range, tuple[Layer, ...]], Any] = {}
        self._runs: list[Any] = []
        self._twins: dict[tuple[int, int], tuple[CapturedProgram, CapturedProgram]] = {}

    def __call__(self, tokens: Any, counts: Any, inserted: InsertedVectors | None = None) -> Any:
        """Logits [batch, vocab], float32, after tokens [batch, s] of which the first counts [batch] are of each row."""
        return self.finish(counts, self.hidden(tokens, counts, inserted))

    def hidden(self, tokens: Any, counts: Any, inserted: InsertedVectors | None = None) -> tuple[Any, ...]:
        """What the last block makes of tokens [batch, s], the first counts [batch] of which are of each row and then in
        the cache; its lengths are as they were. inserted: what stands in place of embeddings."""
        self._share()
        if self.model.has_states:
            self.cache.counts.set_value(counts)
        self.cache.is_empty = self.is_first
        parts = self._embed(tokens, *(inserted or ()))
        for number in range(len(self._spans)):
            parts = self._run(number, parts)
        self.cache.is_empty = False
        return parts

    def hidden_of_each(self, tokens: Sequence[int]) -> list[tuple[Any, ...]]:
        """What hidden makes of tokens of one row that come one after another, each by the programs of a single one and
        so with its bits; the cache's lengths are as they were.

        Each span takes in all of them while its weights are in the processor's cache.
        """
        self._share()
        lengths = self.cache.lengths
        start = lengths.numpy()
        places = [to_tensor(start + np.int32(number)) for number in range(len(tokens))]
        self.cache.is_empty = self.is_first
        parts = []
        for token, place in zip(tokens, places, strict=True):
            lengths.set_value(place)
            parts.append(self._embed(to_tensor(np.array([[token]], np.int64))))
        for number in range(len(self._spans)):
            for index, place in enumerate(places):
                lengths.set_value(place)
                parts[index] = self._run(number, parts[index])
        lengths.set_value(start)
        self.cache.is_empty = False
        return parts

    def finish(self, counts: Any, parts: tuple[Any, ...]) -> Any:
        """Logits [batch, vocab], float32, after the last of `counts` tokens of each row; parts: what hidden made of
        them. The cache's lengths are then larger by counts."""
        return self._finish(counts, *parts)

    def finish_all(self, parts: tuple[Any, ...]) -> Any:
        """Logits [batch * s, vocab], float32, after each token; parts: what hidden made of them."""
        return self._finish_all(*parts)

    def _share(self) -> None:
        """Have each span run the programs of the first one that does the same now: Layers may have changed."""
        if not self._alike.have_changed():
            return
        blocks = list(self.model.blocks)
        size = SPAN_BLOCKS[select.backend()]
        self._spans = [range(start, min(start + size, len(blocks))) for start in range(0, len(blocks), size)]
        self._tensors = [
            [tensor for n in span for tensor in (*tensors_of(blocks[n]), *self.cache.layers[n].tensors)]
            for span in self._spans
        ]
        kinds = [
            (tuple(self._alike.firsts[n] for n in span), first_places(tensors))
            for span, tensors in zip(self._spans, self._tensors, strict=True)
        ]
        self._firsts = [kinds.index(kind) for kind in kinds]
        parts = [(span, tuple(blocks[n] for n in span)) for span in self._spans]
        firsts = (parts[number] for number in dict.fromkeys(self._firsts))
        self._captured = {key: self._captured.get(key) or to_static(self._span_of(*key)) for key in firsts}
        self._runs = [self._captured[parts[first]] for first in self._firsts]
        self._twins.clear()

    def _run(self, number: int, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """The output of a span for these inputs."""
        first, run = self._firsts[number], self._runs[number]
        return run(*parts) if number == first else self._twin(number, first, run.served).run(list(parts))

    def _twin(self, number: int, first: int, program: CapturedProgram) -> CapturedProgram:
        """The program of the span `first`, over the span `number`."""
        known = self._twins.get((number, id(program)))
        if known is None:
            pairs = zip(self._tensors[first], self._tensors[number], strict=True)
            others = {id(mine): other for mine, other in pairs}
            known = program, program.over(lambda tensor: others.get(id(tensor), tensor))
            self._twins[number, id(program)] = known
        return known[1]

    # what is captured

    def _embedded(self, tokens: Any, *inserted: Any) -> tuple[Any, ...]:
        return _parts(self.model.embed(tokens, self.cache, InsertedVectors(*inserted) if inserted else None))

    def _span_of(self, span: range, blocks: Sequence[Layer]) -> Callable[..., tuple[Any, ...]]:
        layers = [self.cache.layers[number] for number in span]

        def run(*parts: Any) -> tuple[Any, ...]:
            for block, layer in zip(blocks, layers, strict=True):
                parts = _parts(self.model.run_block(block, _rejoin(parts), layer))
            return parts

        return run

    def _finished(self, counts: Any, *parts: Any) -> Any:
        x_bse = self.model.extended(_rejoin(parts), self.cache, counts)
        if x_bse.shape[1] > 1:
            last = (counts - 1).clip(min=0).astype("int64").reshape([-1, 1, 1]).expand([-1, 1, x_bse.shape[-1]])
            x_bse = take_along_axis(x_bse, last, 1)
        return self.model.project(x_bse)[:, 0].astype("float32")

    def _finished_all(self, *parts: Any) -> Any:
        x_bse = self.model.extended(_rejoin(parts), self.cache, 0)
        return self.model.project(x_bse).astype("float32").flatten(0, 1)


def _parts(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _rejoin(parts: Sequence[Any]) -> Any:
    """The inverse of _parts."""
    return parts[0] if len(parts) == 1 else tuple(parts)
