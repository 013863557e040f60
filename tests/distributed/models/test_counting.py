"""Counting tokens for experts by PaddlePaddle's names: its documentation's examples, and what drops."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.distributed import new_group
from polyreme.distributed.communication import axis_group
from polyreme.distributed.models.moe import utils
from polyreme.errors import ConfigError
from polyreme.incubate.distributed.models.moe.utils import count_by_gate, limit_by_capacity


def integers(values):
    return paddle.to_tensor(values, dtype="int64")


def test_the_documentation_s_examples():
    choices = integers([[0, 2], [0, 2]])
    assert utils._number_count(numbers=choices, upper_range=6).tolist() == [2, 0, 2, 0, 0, 0]
    sums = paddle.cumsum(integers([2, 0, 2, 0]))
    assert utils._assign_pos(x=choices, cum_count=sums).tolist() == [2, 0, 3, 1]
    counts = utils._limit_by_capacity(integers([1, 2, 2, 8, 3, 6]), integers([5, 5, 5]), 2)
    assert counts.tolist() == [1, 2, 2, 4, 3, 3]
    pruned = utils._prune_gate_by_capacity(integers([1, 3, 3, 3, 3, 2, 1, 1]), integers([0, 3, 1, 3, 0, 0, 0, 0]), 8, 1)
    assert pruned.tolist() == [1, 3, 3, 3, -1, 2, 1, 1]
    assert pruned.dtype == counts.dtype == paddle.int64


def test_a_gate_is_counted_and_limited_in_the_order_of_tokens():
    choices = integers([[3, 1], [3, 0], [3, 1], [0, 3]])
    positions, goes, comes = count_by_gate(choices, 4, 1)
    assert goes.tolist() == comes.tolist() == [2, 2, 0, 4]
    assert positions.tolist() == [6, 3, 5, 1, 7, 4, 2, 0]
    goes, comes, left = limit_by_capacity(choices, 4, 1, 2)
    assert goes.tolist() == comes.tolist() == [2, 2, 0, 2]
    assert left.tolist() == [[3, 1], [3, 0], [-1, 1], [0, -1]]
    # what was dropped has no position
    positions, _, _ = count_by_gate(left, 4, 1)
    assert np.sort(positions.numpy()).tolist() == [0, 1, 2, 3, 5, 6]


def test_other_processes_than_there_are_are_refused():
    choices = integers([[0], [1]])
    with pytest.raises(ConfigError, match=r"world_size=2, but group .* has 1 members"):
        count_by_gate(choices, 2, 2, group=new_group([0]))
    mesh = paddle.distributed.ProcessMesh(list(range(8)), ["ep"]).jax_mesh
    with pytest.raises(ConfigError, match="world_size=8 over mesh axes; needs a group of processes"):
        limit_by_capacity(choices, 2, 8, 1, axis_group(mesh, "ep"))
