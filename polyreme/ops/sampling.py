"""Drawing tokens from the distributions that a language model gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.op import DRAWN, Key, op
from polyreme.errors import ConfigError, ShapeError


@op(real=True)
def top_p_sampling(
    x: Array,
    ps: Array,
    threshold: Array | None = None,
    topp_seed: Array | None = None,
    seed: int = -1,
    k: int = 0,
    mode: str = "truncated",
    return_top: bool = False,
    key: Key = DRAWN,
) -> Any:
    """One index for each row of probabilities x [rows, n], drawn from its nucleus: the fewest most probable ones whose
    sum reaches ps[row]. -> (probabilities [rows, 1], indices [rows, 1] int64), and with return_top the k greatest of
    each row too, (scores [rows, k], indices [rows, k]).

    threshold [rows]: what is less probable is left out, but for the most probable one. mode "non-truncated" draws from
    the whole row above the threshold. topp_seed [rows], or a seed >= 0, fixes the numbers. Source: arXiv:1904.09751.
    Raises ShapeError and ConfigError.
    """
    if x.ndim != 2 or ps.size != x.shape[0]:
        raise ShapeError(f"top_p_sampling takes x [rows, n] and ps [rows], got {list(x.shape)} and {list(ps.shape)}")
    if mode not in ("truncated", "non-truncated"):
        raise ConfigError(f"top_p_sampling: mode={mode!r}; choose 'truncated' or 'non-truncated'")
    if return_top and not 1 <= k <= x.shape[1]:
        raise ConfigError(f"top_p_sampling: k={k} of {x.shape[1]} with return_top; give 1 or more")
    scores, order = jax.lax.top_k(x.astype(dtypes.float32), x.shape[1])
    before = jnp.cumsum(scores, 1) - scores
    kept = before < ps.reshape(-1, 1) if mode == "truncated" else jnp.ones(scores.shape, bool)
    if threshold is not None:
        kept &= scores >= threshold.reshape(-1, 1)
    kept = kept.at[:, 0].set(True)
    drawn = _rows(jnp.where(kept, jnp.log(scores), -jnp.inf), topp_seed, seed, key)
    index = jnp.take_along_axis(order, drawn[:, None], 1).astype(dtypes.int64)
    result = jnp.take_along_axis(x, index, 1), index
    return (*result, scores[:, :k].astype(x.dtype), order[:, :k].astype(dtypes.int64)) if return_top else result


def _rows(logits: Array, seeds: Array | None, seed: int, key: Array) -> Array:
    if seeds is None:
        return jax.random.categorical(jax.random.PRNGKey(seed) if seed >= 0 else key, logits)
    keys = jax.vmap(jax.random.PRNGKey)(seeds.reshape(-1))
    return jax.vmap(jax.random.categorical)(keys, logits)
