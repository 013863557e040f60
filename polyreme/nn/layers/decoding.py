"""Decoding step by step: dynamic_decode, and beam search over a recurrent cell.

A decoder has initialize(inits) -> (inputs, states, finished) and step(time, inputs, states, **kwargs) ->
(outputs, states, inputs, finished); it may have finalize(outputs, states, lengths) -> (outputs, states),
tracks_own_finished, and idle(outputs), which gives what stands behind the end of everything in a captured program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from polyreme.errors import ConfigError
from polyreme.jit.steps import Decoding, until_finished
from polyreme.ops.arithmetic import cast, logical_not, logical_or
from polyreme.ops.creation import arange, full_like, zeros_like
from polyreme.ops.indices.gather import where
from polyreme.ops.manipulation import flatten, reshape, transpose, unflatten, unsqueeze
from polyreme.ops.recurrent import NEVER_CHOSEN, beam_choice, beam_rows, gather_tree, initial_state
from polyreme.ops.repetition import expand, repeat_interleave


class BeamOutput(NamedTuple):
    """What a step of a beam search chose, [batch, beams] each."""

    scores: Any
    predicted_ids: Any
    parent_ids: Any


class BeamState(NamedTuple):
    """Beams so far: the cell's states [batch, beams, ...]; log_probs, finished, lengths [batch, beams]."""

    cell_states: Any
    log_probs: Any
    finished: Any
    lengths: Any


class BeamSearchDecoder:
    """The beam_size likeliest sequences of a cell whose output_fn(output) are logits; for dynamic_decode.

    embedding_fn makes the cell's next inputs of token ids; without it, or output_fn, the cell does that itself. What
    else the cell reads, such as an encoder's outputs, is given once a beam by tile_beam_merge_with_batch.
    """

    embedding_fn: Callable[..., Any] | None
    output_fn: Callable[..., Any] | None

    start_token: int
    end_token: int
    beam_size: int

    OutputWrapper = BeamOutput
    StateWrapper = BeamState
    tracks_own_finished = True

    def __init__(
        self,
        cell: Any,
        start_token: int,
        end_token: int,
        beam_size: int,
        embedding_fn: Callable[..., Any] | None = None,
        output_fn: Callable[..., Any] | None = None,
    ) -> None:
        if beam_size < 1:
            raise ConfigError(f"BeamSearchDecoder: beam_size={beam_size}; give 1 or more")
        self.cell = cell
        self.start_token, self.end_token, self.beam_size = int(start_token), int(end_token), int(beam_size)
        self.embedding_fn, self.output_fn = embedding_fn, output_fn

    @staticmethod
    def tile_beam_merge_with_batch(x: Any, beam_size: int) -> Any:
        """Every Tensor in x with each entry repeated beam_size times: [batch, ...] -> [batch * beam_size, ...]."""
        return jax.tree.map(lambda leaf: repeat_interleave(leaf, beam_size, 0), x)

    def initialize(self, initial_cell_states: Any) -> tuple[Any, BeamState, Any]:
        """(inputs of start tokens, the states of beams that begin alike, none finished)."""
        first = jax.tree.leaves(initial_cell_states)[0]
        alike = jax.tree.map(self._beside_beams, initial_cell_states)

        def filled(value: Any, dtype: str) -> Any:
            return initial_state(first, (self.beam_size,), value, dtype)

        # all but one beam are ruled out, or they would choose the same
        live = reshape(cast(arange(self.beam_size), "float32"), [1, self.beam_size]) > 0
        log_probs = where(live, filled(NEVER_CHOSEN, "float32"), filled(0.0, "float32"))
        started = BeamState(alike, log_probs, cast(filled(0, "int32"), "bool"), filled(0, "int64"))
        return self._embedded(filled(self.start_token, "int64")), started, started.finished

    def step(self, time: Any, inputs: Any, states: BeamState, **kwargs: Any) -> tuple[BeamOutput, BeamState, Any, Any]:
        """The cell on every beam, and the best continuations -> (outputs, states, next inputs, finished)."""
        merged = [jax.tree.map(self._merged, part) for part in (inputs, states.cell_states)]
        made, new = self.cell(*merged, **kwargs)
        logits = self._split(made if self.output_fn is None else self.output_fn(made))
        scores, tokens, parents, finished, lengths = beam_choice(
            logits, states.log_probs, states.finished, states.lengths, self.end_token
        )
        new = jax.tree.map(lambda leaf: self._split(beam_rows(leaf, parents)), new)
        now = BeamState(new, scores, finished, lengths)
        return BeamOutput(scores, tokens, parents), now, self._embedded(tokens), finished

    def finalize(self, outputs: BeamOutput, final_states: BeamState, sequence_lengths: Any) -> tuple[Any, BeamState]:
        """(the complete sequence of each beam, int64 [steps, batch, beams], final_states)."""
        return gather_tree(outputs.predicted_ids, outputs.parent_ids), final_states

    def idle(self, outputs: BeamOutput) -> BeamOutput:
        """A step that extends every beam by the end token and keeps their order."""
        own = expand(reshape(arange(self.beam_size), [1, self.beam_size]), outputs.parent_ids.shape)
        return BeamOutput(zeros_like(outputs.scores), full_like(outputs.predicted_ids, self.end_token), own)

    def _embedded(self, tokens: Any) -> Any:
        return tokens if self.embedding_fn is None else self.embedding_fn(tokens)

    def _beside_beams(self, x: Any) -> Any:
        return self._split(repeat_interleave(x, self.beam_size, 0))

    def _merged(self, x: Any) -> Any:
        return flatten(x, 0, 1)

    def _split(self, x: Any) -> Any:
        return unflatten(x, 0, [-1, self.beam_size])


def dynamic_decode(
    decoder: Any,
    inits: Any = None,
    max_step_num: int | None = None,
    output_time_major: bool = False,
    impute_finished: bool = False,
    is_test: bool = False,
    return_length: bool = False,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """decoder.step until all is finished or step max_step_num, counted from 0, is done -> (outputs, last states).

    outputs are those of all steps, or what decoder.finalize makes of them, [batch, steps, ...] (output_time_major:
    [steps, batch, ...]). return_length: also how many steps each sequence was not finished. impute_finished: what is
    finished keeps its state, for decoders that do not see to that themselves (tracks_own_finished). kwargs go to step.
    Captured there are always max_step_num + 1 steps in the outputs: behind the end stands decoder.idle, or zeros;
    is_test then computes none of these and saves nothing for a gradient. A static Program without max_step_num runs
    operation by operation. Raises ConfigError for a capture without it.
    """
    inputs, states, finished = decoder.initialize(inits)
    start = Decoding(inputs, states, finished, cast(zeros_like(finished), "int64"))

    def advance(time: Any, now: Decoding) -> tuple[Any, Decoding]:
        return _advance(decoder, time, now, impute_finished, kwargs)

    idle = getattr(decoder, "idle", lambda outputs: jax.tree.map(zeros_like, outputs))
    outputs, now = until_finished(advance, idle, start, max_step_num, is_test)
    decoded, last = outputs, now.states
    if hasattr(decoder, "finalize"):
        decoded, last = decoder.finalize(outputs, now.states, now.lengths)
    if not output_time_major:
        decoded = jax.tree.map(lambda leaf: transpose(leaf, [1, 0, *range(2, len(leaf.shape))]), decoded)
    return (decoded, last, now.lengths) if return_length else (decoded, last)


def _advance(decoder: Any, time: Any, now: Decoding, impute: bool, kwargs: dict[str, Any]) -> tuple[Any, Decoding]:
    outputs, states, inputs, finished = decoder.step(time, now.inputs, now.states, **kwargs)
    lengths = now.lengths + cast(logical_not(now.finished), "int64")
    if getattr(decoder, "tracks_own_finished", False):
        lengths = getattr(states, "lengths", lengths)
    else:
        finished = logical_or(finished, now.finished)
        if impute:
            states = jax.tree.map(lambda a, b: where(_beside(now.finished, a), b, a), states, now.states)
    return outputs, Decoding(inputs, states, finished, lengths)


def _beside(flags: Any, x: Any) -> Any:
    """[batch, ...] with as many dims as x."""
    for _ in range(len(x.shape) - len(flags.shape)):
        flags = unsqueeze(flags, -1)
    return flags
