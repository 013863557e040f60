"""Beam search in a While, over arrays of what is chosen at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.fluid.layer import layer
from polyreme.fluid.layers.arrays import as_array
from polyreme.sequences import beams

beam_search: Callable[..., Any] = layer(beams.beam_search)


@layer
def beam_search_decode(ids: Any, scores: Any, beam_size: int, end_id: int, name: str | None = None) -> tuple[Any, Any]:
    """(ids [words], their accumulated scores [words]) of whole sentences: for each source the best first.

    ids, scores: arrays of what beam_search gave at each step, the first words too. Level 0 of the results says how many
    sentences a source has, level 1 how many words a sentence. beam_size is what they were chosen with.
    """
    one, other = (as_array("beam_search_decode", v).value("beam_search_decode") for v in (ids, scores))
    return beams.beam_search_decode(one, other, beam_size, end_id)


__all__ = ["beam_search", "beam_search_decode"]
