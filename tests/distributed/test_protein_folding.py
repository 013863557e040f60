"""scg, dap, bp and dp: a plan from HelixFold's names, and where each says that a Tensor lies."""

import numpy as np
import pytest

from polyreme import nn
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.protein_folding import bp, dap, dp, scg
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, PlacementError


@pytest.fixture
def plan():
    """dp2 sep2 mp2, with branches over mp."""
    scg.init_process_group(parallel_degree=[("dp", None), ("dap", 2), ("mp", "bp", 2)])
    yield scg.plan
    scg.plan = None
    clear_plan()


def split(x):
    """The dims of x that sep splits."""
    return [at for at, entry in enumerate(x._array.sharding.spec) if entry == "sep"]


def test_names_are_layouts(plan):
    assert str(plan.mesh) == "dp2 sep2 mp2"
    assert plan.strategy.rule("act")["bp"] == ("mp",)
    model = nn.Linear(3, 3)
    dp.param_sync(model)
    assert len(model.weight._array.sharding.device_set) == 8
    values = np.arange(48.0, dtype="float32").reshape(1, 4, 4, 3)
    rows = dap.scatter(to_tensor(values), axis=1)
    cols = dap.row_to_col(rows)
    again = dap.all_to_all_opp(dap.all_to_all(cols, in_axis=1, out_axis=2), in_axis=1, out_axis=2)
    whole = dap.all_gather_opp(dap.all_gather(again, axis=1), axis=1)
    assert [split(x) for x in (rows, cols, again, whole, dap.col_to_row(cols))] == [[1], [2], [1], [], [1]]
    for x in (rows, cols, again, whole):
        np.testing.assert_array_equal(x.numpy(), values)
    msa, pair = bp.sync_evoformer_results(rows, cols, cols)
    np.testing.assert_array_equal(msa.numpy(), values)
    np.testing.assert_array_equal(pair.numpy(), 2 * values)
    with pytest.raises(PlacementError, match=r"dap.row_to_col: dim 2 of shape \[1, 4, 3, 1\].*make it 2 or 4"):
        dap.row_to_col(to_tensor(values[:, :, :3, :1]))
    with pytest.raises(ConfigError, match="there is a plan already, dp2 sep2 mp2"):
        scg.init_process_group()


def test_gradients_go_the_other_way(plan):
    x = dap.scatter(to_tensor(np.ones((1, 4, 4, 2), "float32"), stop_gradient=False), axis=1)
    x.retain_grads()
    cols = dap.row_to_col(x)
    (cols * cols).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), 2)
    assert split(x.grad) == [1]


def test_refusals():
    for degrees, match in (
        ([("ddp", 2)], "unknown name 'ddp'"),
        ([("dap", None)], "only dp may take what is left"),
        ([("dp", "dap", 2)], "share a degree"),
        ([("mp", 2), ("bp", 2)], "one mesh axis; join them"),
    ):
        with pytest.raises(ConfigError, match=match):
            scg.init_process_group(parallel_degree=degrees)
    with pytest.raises(ConfigError, match="groups follow from the mesh"):
        scg.init_process_group(None, [("dp", [[0, 1]])])
    with pytest.raises(ConfigError, match=r"call scg.init_process_group first"):
        dp.param_sync(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="a mean loss has means"):
        dp.grad_sync([], grad_avg=False)
    with pytest.raises(ConfigError, match="sync_op=False"):
        dap.set_dap_sync_op(False)
