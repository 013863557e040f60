"""Viterbi decoding: the tags of highest score under emissions and transitions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import promote
from polyreme.core.op import composite, op
from polyreme.errors import ShapeError
from polyreme.ops.ids import check_within, visible


@op(amp="fp32", method=False, real=True)
def viterbi_path(
    potentials: Float[Array, "b t k"],
    transition_params: Float[Array, "k k"],
    lengths: Int[Array, " b"],
    include_bos_eos_tag: bool = True,
) -> tuple[Array, Array]:
    """viterbi_decode over all t steps: scores [b] and tags [b, t], int64, 0 after the end of a sequence."""
    potentials, move = promote(potentials, transition_params)
    steps, tags = potentials.shape[1:]
    if not steps or not tags:
        raise ShapeError(f"viterbi_decode: potentials has shape {list(potentials.shape)}; give [batch, steps, tags]")
    best = potentials[:, 0] + (move[-1] if include_bos_eos_tag else 0)

    def forward(best: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        score, t = now
        through = best[:, :, None] + move
        goes_on = (t < lengths)[:, None]
        # where a sequence has ended every tag comes from itself, so that walking back leaves its last tag alone
        came_from = jnp.where(goes_on, jnp.argmax(through, 1), jnp.arange(tags))
        return jnp.where(goes_on, through.max(1) + score, best), came_from

    rest = (jnp.swapaxes(potentials[:, 1:], 0, 1), jnp.arange(1, steps))
    best, came_from = lax.scan(forward, best, rest)
    best = best + (move[-2] if include_bos_eos_tag else 0)

    def backward(tag: Array, pointers: Array) -> tuple[Array, Array]:
        before = jnp.take_along_axis(pointers, tag[:, None], 1)[:, 0]
        return before, tag

    first, later = lax.scan(backward, jnp.argmax(best, 1), came_from, reverse=True)
    path = jnp.concatenate([first[:, None], later.T], 1).astype(dtypes.int64)
    return best.max(1), jnp.where(jnp.arange(steps) < lengths[:, None], path, 0)


@composite(method=False)
def viterbi_decode(
    potentials: AnyTensor,
    transition_params: AnyTensor,
    lengths: AnyTensor,
    include_bos_eos_tag: bool = True,
    name: str | None = None,
) -> tuple[AnyTensor, AnyTensor]:
    """(scores [b], tags [b, n], int64) of the best paths: potentials [b, t, k], transitions [k, k] from row to column.

    Tags are 0 after the end of a sequence, which lengths [b] give; of equal paths that of the lower last tags.
    include_bos_eos_tag: the last row of transitions scores starting with a tag, the last but one stopping with it. n is
    the longest length in eager code, and t in captured code and Programs, where lengths have no values. Raises
    IndexError in eager code for a length outside 1 .. t. Source: Forney 1973.
    """
    steps = potentials.shape[1] if len(potentials.shape) > 1 else 0

    def describe(length: int, at: tuple[int, ...]) -> Exception:
        return IndexError(f"viterbi_decode: lengths has {length} at {list(at)}; give 1 to {steps}, the steps there are")

    check_within(lengths, 1, steps + 1, describe)
    scores, path = viterbi_path(potentials, transition_params, lengths, include_bos_eos_tag)
    seen = visible(lengths)
    return (scores, path) if seen is None or not seen.size else (scores, path[:, : int(seen.max())])
