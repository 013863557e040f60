"""PaddlePaddle's counting of what a gate chose: how many tokens for each expert, and which of them fit a capacity.

What it drops on a GPU depends on the order in which threads come; here the first in the order of tokens stay. Choices
are integers of any shape, read in their order, and a negative one is none. Shape legend: e experts, w workers.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core.annotations import AnyTensor
from polyreme.core.op import composite, op
from polyreme.errors import ConfigError, ShapeError
from polyreme.kernels.experts import Groups
from polyreme.ops.arithmetic import cast
from polyreme.ops.experts.mixture import count_before, expert_load
from polyreme.ops.ids import visible


@composite(method=False)
def number_count(numbers: AnyTensor, upper_range: int) -> AnyTensor:
    """The number of choices that fell on each of upper_range experts -> [upper_range], in their dtype.

    >>> from polyreme.eager.tensor import to_tensor
    >>> number_count(to_tensor([[0, 2], [0, 2]]), 6).tolist()
    [2, 0, 2, 0, 0, 0]
    """
    return cast(expert_load(numbers, upper_range), numbers.dtype)


@op(method=False)
def positions_by_expert(x: Array, num_experts: int) -> Array:
    """Positions of the choices in the flattened x, expert by expert, of one expert the last first; then -1 -> [n]."""
    n = x.size
    ordered = Groups.of(x.reshape(-1)[::-1], num_experts, n).order
    return n - 1 - ordered


@composite(method=False)
def assign_pos(x: AnyTensor, cum_count: AnyTensor) -> AnyTensor:
    """Positions in the flattened choices x, expert by expert, of one expert the last first -> [cum_count[-1]].

    cum_count [e]: running sums of number_count(x, e). The length of the result depends on its values, so it can be
    called only where they are known. Raises ShapeError for sums of other choices.

    >>> from polyreme.eager.tensor import to_tensor
    >>> assign_pos(to_tensor([[0, 2], [0, 2]]), to_tensor([2, 2, 4, 4])).tolist()
    [2, 0, 3, 1]
    """
    experts = cum_count.shape[0]
    choices, sums = visible(x), visible(cum_count)
    if choices is not None and sums is not None:
        chosen = choices[(choices >= 0) & (choices < experts)].astype("int64")
        counts = np.cumsum(np.bincount(chosen, minlength=experts))
        if counts.tolist() != sums.tolist():
            raise ShapeError(f"assign_pos: cum_count={sums.tolist()}, the choices' running sums are {counts.tolist()}")
    total = int(cum_count[-1]) if experts else 0
    return cast(positions_by_expert(x, experts)[:total], cum_count.dtype)


@op(method=False)
def random_routing(topk_idx: Array, topk_value: Array, prob: Array, topk: int = 2) -> Array:
    """Choices [n, 2] without the second ones whose value is so small that 2 * topk_value[i, 1] < prob[i]: those are -1.

    topk_value [n, 2]; prob [n], drawn from [0, 1). Raises ConfigError for topk other than 2, ShapeError for other dims.
    Source: arXiv:2006.16668, section 2.2.
    """
    if topk != 2:
        raise ConfigError(f"random_routing: topk={topk}; only second choices are left out at random, give topk=2")
    if topk_idx.ndim != 2 or topk_idx.shape != topk_value.shape or prob.shape != topk_idx.shape[:1]:
        raise ShapeError(
            f"random_routing: topk_idx {list(topk_idx.shape)}, topk_value {list(topk_value.shape)} and prob "
            f"{list(prob.shape)}; needs [n, 2] twice and [n]"
        )
    second = jnp.where(2 * topk_value[:, 1] < prob, -1, topk_idx[:, 1])
    return topk_idx.at[:, 1].set(second.astype(topk_idx.dtype))


@op(method=False)
def limit_by_capacity(expert_count: Array, capacity: Array, n_worker: int) -> Array:
    """Tokens of each worker that fit: expert_count [w * e], capacity [e] -> [w * e]; the first workers' come first.

    Raises ShapeError for counts that are not n_worker times as many as capacities.
    """
    if capacity.ndim != 1 or expert_count.shape != (n_worker * len(capacity),):
        raise ShapeError(
            f"limit_by_capacity: expert_count {list(expert_count.shape)}, capacity {list(capacity.shape)}, "
            f"n_worker={n_worker}; needs [n_worker * experts] and [experts]"
        )
    counts = expert_count.reshape(n_worker, len(capacity))
    sums = jnp.cumsum(counts, 0)
    fits = jnp.clip(capacity.astype(counts.dtype) - (sums - counts), 0, counts)
    return fits.reshape(-1)


@op(method=False)
def prune_gate_by_capacity(gate_idx: Array, expert_count: Array, n_expert: int, n_worker: int) -> Array:
    """The choices gate_idx, with -1 for those after the first expert_count[e] of expert e.

    expert_count [n_expert * n_worker]. Raises ShapeError for another number of counts.
    """
    experts = n_expert * n_worker
    if expert_count.shape != (experts,):
        raise ShapeError(
            f"prune_gate_by_capacity: expert_count {list(expert_count.shape)}, n_expert={n_expert}, "
            f"n_worker={n_worker}; needs [{experts}]"
        )
    expert = gate_idx.reshape(-1)
    room = expert_count[jnp.clip(expert, 0, experts - 1)]
    is_one = (expert >= 0) & (expert < experts)
    return jnp.where(is_one & (count_before(expert, experts) < room), expert, -1).reshape(gate_idx.shape)


ALIASES: dict[str, str] = {}
"""Names under which these functions are called elsewhere."""
