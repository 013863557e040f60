"""The sweeps make the calls that they say."""

import numpy as np
import pytest

from tests.oracle import sweeps
from tests.oracle.calls import Call

ROW = Call("paddle.sum", "row", (np.ones((2, 3), "float32"), 1), {"keepdim": True})


def test_dtypes_change_one_dtype_at_a_time():
    made = dict(sweeps.dtypes(ROW))
    assert len(made) == 11
    assert made["float32 as int64"].args[0].dtype == "int64"
    assert made["float32 as bfloat16"].args[0].how == "bfloat16"


def test_empty_sets_sizes_to_0():
    shapes = [call.args[0].shape for _, call in sweeps.empty(ROW)]
    assert shapes == [(0, 3), (2, 0), ()]


def test_tensors_stand_for_numbers():
    made = dict(sweeps.tensors(ROW))
    assert list(made) == ["1 as int64", "1 as int32", "1 as [1]"]
    assert made["1 as [1]"].args[1].shape == (1,)


def test_names_are_those_of_paddlepaddle_and_their_second_ones():
    made = dict(sweeps.names(ROW))
    assert list(made["by name"].kwargs) == ["x", "axis", "keepdim"]
    assert "axis as dim" in made


def test_wrong_arguments_are_of_each_kind():
    assert {"0 as text", "1 as fraction", "keepdim as 2"} <= {tag for tag, _ in sweeps.wrong(ROW)}


@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_every_sweep_has_calls_that_can_be_sent(name):
    swept = sweeps.calls(name, "softmax")
    assert swept
    assert len({call.id for call in swept}) > len(swept) // 2
