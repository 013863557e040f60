"""Names of layers, and loading an optimizer's state onto a second copy of a model."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.errors import CheckpointError


def trained():
    model = paddle.nn.Linear(3, 2)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    model(paddle.ones([1, 3])).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_guard_counts_from_zero_and_ends():
    outside = paddle.nn.Linear(1, 1).full_name()
    with paddle.utils.unique_name.guard():
        assert paddle.nn.Linear(1, 1).full_name() == "linear_0"
    after = paddle.nn.Linear(1, 1).full_name()
    assert int(after.split("_")[1]) == int(outside.split("_")[1]) + 1


def test_state_fits_a_second_copy_built_under_a_guard():
    with paddle.utils.unique_name.guard():
        _, first = trained()
    with paddle.utils.unique_name.guard():
        _, second = trained()
    second.set_state_dict(first.state_dict())
    for key, value in first.state_dict().items():
        np.testing.assert_array_equal(second.state_dict()[key].numpy(), value.numpy())


def test_without_a_guard_the_refusal_names_the_remedy():
    _, first = trained()
    _, second = trained()
    with pytest.raises(CheckpointError, match=r"unique_name\.guard"):
        second.set_state_dict(first.state_dict())
