"""Tensors on a mesh: what they say of themselves, uneven and partial ones, Parameters, copies, writes, parts."""

import copy
import pickle

import numpy as np
import pytest

import polyreme
from polyreme.distributed import (
    Partial,
    ProcessMesh,
    ReduceType,
    Replicate,
    Shard,
    dtensor_from_fn,
    shard_tensor,
    unshard_dtensor,
)
from polyreme.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local
from polyreme.errors import CaptureError, ConfigError, DTypeError, GradError, NumericsError, PlacementError, ShapeError

R = Replicate()
GRID = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
LINE = ProcessMesh([4, 5, 6], dim_names=["x"])
V = np.arange(8, dtype="float32").reshape(4, 2)


def leaf(values=V):
    return polyreme.to_tensor(values, stop_gradient=False)


def test_members_of_a_dist_tensor():
    x = shard_tensor(V, GRID, [Shard(0)])
    assert (x.is_dist(), x.process_mesh, x.placements, x.num_shard) == (True, GRID, [Shard(0), R], 2)
    assert (x.shape, x._local_shape) == ([4, 2], [2, 2])
    np.testing.assert_array_equal(x._local_value().numpy(), V[:2])
    np.testing.assert_array_equal(x._local_value(3).numpy(), V[2:])
    assert not x._local_value().is_dist()
    text = repr(x)
    assert "process_mesh={shape: [2, 2], process_ids: [0, 1, 2, 3], dim_names: [x, y]}" in text
    assert "placements=[Shard(dim=0), Replicate()], GlobalDenseTensor=\n" in text
    dense = polyreme.ones([2])
    members = (dense.is_dist(), dense.process_mesh, dense.placements, dense.num_shard, dense._local_shape)
    assert members == (False, None, None, None, None)
    with pytest.raises(PlacementError, match="_local_value: this Tensor lies on no ProcessMesh"):
        dense._local_value()
    with pytest.raises(PlacementError, match="process id 7 is not on the mesh"):
        x._local_value(7)


def test_uneven_pieces_have_ceil_rows_and_the_last_may_have_none():
    x = shard_tensor(V, LINE, [Shard(0)])
    assert [x._local_value(i).shape for i in (4, 5, 6)] == [[2, 2], [2, 2], [0, 2]]
    np.testing.assert_array_equal(x._local_value(5).numpy(), V[2:])
    np.testing.assert_array_equal(x.numpy(), V)
    wide = shard_tensor(np.arange(5), GRID, [Shard(0), Shard(0)])
    assert [wide._local_value(i).tolist() for i in range(4)] == [[0, 1], [2, 3], [4], []]


def test_addends_are_the_value_once_and_what_changes_nothing_elsewhere():
    for kind, others in [(ReduceType.kRedSum, 0 * V), (ReduceType.kRedProd, 0 * V + 1), (ReduceType.kRedMax, V)]:
        x = shard_tensor(V, GRID, [R, Partial(kind)])
        np.testing.assert_array_equal(x._local_value(2).numpy(), V)
        np.testing.assert_array_equal(x._local_value(3).numpy(), others)
        np.testing.assert_array_equal(x.numpy(), V)


def test_parts_of_a_split_factor_and_an_order():
    x = shard_tensor(np.arange(12), LINE, [Shard(0, split_factor=2)])
    assert x._local_value(5).tolist() == [2, 3, 8, 9]
    y = shard_tensor(np.arange(8), GRID, [Shard(0, shard_order=1), Shard(0)])
    assert y._local_value(1).tolist() == [4, 5]
    np.testing.assert_array_equal((x * 2).numpy(), np.arange(12) * 2)
    assert shard_tensor(V, GRID, [Shard(-1)]).placements == [Shard(1), R]


def test_a_parameter_stays_one_and_its_gradient_and_state_follow():
    layer = polyreme.nn.Linear(8, 4)
    before = layer.weight
    layer.weight = shard_tensor(before, GRID, [Shard(0), Shard(1)])
    assert type(layer.weight) is type(before)
    assert layer.weight.name == before.name
    assert not before.is_dist()
    layer.bias = shard_tensor(layer.bias, ProcessMesh(shape=[4], process_ids=range(4)), [R])
    layer.bias = shard_tensor(layer.bias, GRID, [R, R])
    optimizer = polyreme.optimizer.AdamW(0.1, parameters=layer.parameters())
    layer(polyreme.ones([2, 8])).sum().backward()
    assert layer.weight.grad.placements == [Shard(0), Shard(1)]
    optimizer.step()
    assert layer.weight.placements == [Shard(0), Shard(1)]
    moment = next(v for k, v in optimizer.state_dict().items() if "moment1" in k and v.shape == [8, 4])
    assert moment.placements == [Shard(0), Shard(1)]


def train(layer, capture):
    optimizer = polyreme.optimizer.AdamW(0.1, parameters=layer.parameters())

    def step(x):
        loss = (layer(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    run = polyreme.jit.to_static(step) if capture else step
    return [float(run(polyreme.to_tensor(V))) for _ in range(3)]


def test_an_uneven_parameter_trains_as_a_dense_one():
    start = polyreme.nn.Linear(2, 4)
    losses = train(copy.deepcopy(start), capture=False)
    start.weight, start.bias = shard_tensor(start.weight, LINE, [Shard(1)]), shard_tensor(start.bias, LINE, [Shard(0)])
    for capture in (False, True):
        layer = copy.deepcopy(start)
        np.testing.assert_allclose(train(layer, capture), losses, rtol=1e-5)  # 8 terms, three steps
        assert [layer.weight._local_value(i).shape for i in (4, 5, 6)] == [[2, 2], [2, 2], [2, 0]]
        other = polyreme.nn.Linear(2, 4)
        other.set_state_dict(layer.state_dict())
        np.testing.assert_array_equal(other.weight.numpy(), layer.weight.numpy())
    assert isinstance(start.weight, polyreme.nn.Parameter)


@pytest.mark.parametrize("placements", [[Shard(0)], [Partial()]], ids=str)
def test_copies_and_writes_keep_the_placement(placements):
    x = shard_tensor(leaf(), LINE, placements)
    for y in (x.detach(), x.clone(), copy.deepcopy(x), x.astype("float64")):
        assert y.placements == placements
        np.testing.assert_array_equal(y.numpy(), V)
    assert x.clone()._node is not None
    with pytest.raises(GradError, match="only a leaf"):
        copy.deepcopy(x * 1)
    y = x.detach()
    y.add_(polyreme.ones([2]))
    y[0] = 5.0
    np.testing.assert_array_equal(y.numpy(), np.concatenate([[[5, 5]], V[1:] + 1]))
    y.set_value(V * 2)
    np.testing.assert_array_equal(y.numpy(), V * 2)
    assert y.placements == placements
    y.data = polyreme.ones([3])
    assert (y.is_dist(), y.shape) == (False, [3])
    again = pickle.loads(pickle.dumps(x))
    assert not again.is_dist()
    np.testing.assert_array_equal(again.numpy(), V)


def test_dtype_and_stop_gradient():
    assert shard_tensor(leaf(), LINE, [R], stop_gradient=True).stop_gradient is False  # as the Tensor's
    assert shard_tensor(V, LINE, [R]).stop_gradient is True
    made = shard_tensor(polyreme.to_tensor(V), LINE, [R], dtype="float64", stop_gradient=False)
    assert (made.dtype.name, made.stop_gradient) == ("float64", False)
    np.testing.assert_array_equal(dtensor_from_fn(polyreme.ones, LINE, [Shard(0)], [2]).numpy(), [1, 1])


def test_unshard_gives_a_dense_tensor_that_gradients_flow_through():
    x = shard_tensor(leaf(), LINE, [Shard(0)])
    whole = unshard_dtensor(x)
    assert not whole.is_dist()
    (whole * polyreme.to_tensor(V)).sum().backward()
    assert x.grad.placements == [Shard(0)]
    np.testing.assert_array_equal(x.grad.numpy(), V)
    dense = polyreme.ones([2])
    assert unshard_dtensor(dense) is dense
    with pytest.raises(TypeError, match="unshard_dtensor takes a Tensor, got ndarray"):
        unshard_dtensor(V)


def test_parts_make_a_whole_and_get_its_gradient():
    parts = [polyreme.to_tensor(np.full((2 - i // 2, 2), i, "float32"), stop_gradient=False) for i in range(4)]
    x = dtensor_from_local(parts, GRID, [Shard(0), Partial()])
    np.testing.assert_array_equal(x.numpy(), [[1, 1], [1, 1], [5, 5]])
    (x * x).sum().backward()
    assert [p.grad.numpy()[0, 0] for p in parts] == [2, 2, 10, 10]
    part = leaf(np.ones(2, "float32"))
    whole = dtensor_from_local(part, GRID, [R, Shard(0)])
    assert whole.shape == [4]
    whole.sum().backward()
    assert part.grad.tolist() == [2, 2]  # it is two pieces of the whole


def test_a_part_of_a_whole():
    x = shard_tensor(leaf(), GRID, [Shard(0), R])
    part = dtensor_to_local(x * 2, GRID, [Shard(1), R])
    np.testing.assert_array_equal(part.numpy(), 2 * V[:, :1])
    part.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [[2, 0]] * 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shard_tensor(V, [0], [R]), ConfigError, "mesh must be a ProcessMesh, got list"),
        (lambda: shard_tensor(V, LINE, [R, R]), PlacementError, "2 placements .* for a mesh of 1 dims"),
        (lambda: shard_tensor(V, LINE, ["x"]), PlacementError, "must be a list of Shard, Replicate and Partial"),
        (lambda: shard_tensor(V, LINE, [Shard(2)]), PlacementError, r"Shard\(dim=2\) of a tensor of shape \[4, 2\]"),
        (lambda: shard_tensor(V, LINE, [Shard(0, split_factor=3)]), PlacementError, "size 4 into 3 equal parts"),
        (
            lambda: shard_tensor(V, GRID, [Shard(0), Shard(0, split_factor=2)]),
            PlacementError,
            "dim 0 is split by 2 mesh dims, and a split_factor counts for one",
        ),
        (lambda: dtensor_from_local([leaf()], GRID, [R]), ConfigError, "1 parts for the 4 devices"),
        (
            lambda: dtensor_from_local([leaf(), leaf(V[:1]), leaf()], LINE, [Shard(0)]),
            ShapeError,
            r"process id 4 has a part of shape \[4, 2\], but its part of \[9, 2\]",
        ),
        (
            lambda: shard_tensor(V, LINE, [Partial(ReduceType.kRedAny)]),
            PlacementError,
            r"Partial\(reduce_type=ANY\) joins truth values, and the tensor is of float32; cast it to bool",
        ),
        (
            lambda: shard_tensor(V.astype("complex64"), LINE, [Partial(ReduceType.kRedMax)]),
            PlacementError,
            r"Partial\(reduce_type=MAX\) of complex64, which has no order",
        ),
        (lambda: shard_tensor(1.0, LINE, [Shard(0)]), PlacementError, r"of shape \[\], which has no dims"),
        (lambda: dtensor_from_local([V] * 3, LINE, [R]), TypeError, "takes a Tensor, or a list of them, got ndarray"),
        (
            lambda: dtensor_from_local([leaf(), leaf().astype("int32"), leaf()], LINE, [R]),
            DTypeError,
            "parts of one whole are of float32, int32; cast them to one dtype",
        ),
        (lambda: dtensor_to_local(V), TypeError, "dtensor_to_local takes a Tensor, got ndarray"),
        (lambda: dtensor_to_local(leaf()), PlacementError, "dtensor_to_local: this Tensor lies on no ProcessMesh"),
        (
            lambda: polyreme.jit.to_static(lambda x: dtensor_to_local(x))(shard_tensor(V, LINE, [R])),
            CaptureError,
            "dtensor_to_local inside a captured function",
        ),
        (
            lambda: polyreme.jit.to_static(lambda: shard_tensor(polyreme.nn.Linear(2, 2).weight, LINE, [R]))(),
            CaptureError,
            "shard_tensor of parameter .* inside a captured function",
        ),
    ],
)
def test_misuse_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shape", [(3, 0, 2), (0, 6)], ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Shard(-1), Shard(-1, split_factor=2), Partial()], ids=str)
def test_a_tensor_without_elements(shape, placement):
    x = shard_tensor(polyreme.zeros(shape), LINE, [placement])
    assert polyreme.concat([x, x]).numpy().shape == (2 * shape[0], *shape[1:])
    np.testing.assert_array_equal(x.sum(0).numpy(), np.zeros(shape[1:]))
    parts = [x._local_value(i) for i in LINE.process_ids]
    assert dtensor_from_local(parts, LINE, [placement]).shape == list(shape)


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 60000), ("int8", 100), ("uint8", 200), ("bool", True), ("int64", 7)]
)
def test_an_average_of_copies_is_the_value(dtype, value):
    x = shard_tensor(polyreme.to_tensor([value, 0]).astype(dtype), LINE, [Partial(ReduceType.kRedAvg)])
    assert x.numpy().dtype == dtype
    assert x.tolist() == [value, 0]


def test_a_tensor_without_values_is_refused():
    with polyreme.LazyGuard():
        layer = polyreme.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="a Tensor without values"):
        shard_tensor(layer.weight, LINE, [R])


def test_the_checked_mode_looks_at_what_ops_on_a_mesh_give():
    line = ProcessMesh([0, 1], ["x"])
    polyreme.set_flags({"FLAGS_check_nan_inf": True})
    try:
        for data, placements in (([1.0, 0.0, 2.0], [Shard(0)]), ([1.0, 0.0], [Partial()])):
            with pytest.raises(NumericsError, match=r"log: its result, .* has 0 NaN and 1 infinite"):
                polyreme.log(shard_tensor(np.array(data, "float32"), line, placements))
        uneven = shard_tensor(np.ones(3, "float32"), line, [Shard(0)])
        assert polyreme.log(uneven).sum().item() == 0  # padding is no value
    finally:
        polyreme.set_flags({"FLAGS_check_nan_inf": False})
