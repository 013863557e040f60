"""dist.to_static: a model with its loss and optimizer, a batch at a time, against an eager loop on one device."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed import ProcessMesh, Replicate, Shard, shard_layer, shard_optimizer, shard_tensor
from polyreme.distributed.auto_parallel.engine.dist_model import DistModel, to_static
from polyreme.distributed.auto_parallel.engine.strategy import Strategy
from polyreme.distributed.gradient_merge import COUNT
from polyreme.errors import CheckpointError, ConfigError, PlacementError, ProgramError

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 16)
# three steps of float32 sums of at most 16 terms, of numbers of size about 1, in another order: 16 eps each
NEAR = {"rtol": 3 * 16 * 1.2e-7}

RECOMPUTED = {"enable": True, "checkpoints": ["2"]}


def network():
    paddle.seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def adam(layer):
    return paddle.optimizer.AdamW(0.01, parameters=layer.parameters())


def made(strategy=None, layer=None):
    layer = layer or network()
    return to_static(layer, None, nn.CrossEntropyLoss(), adam(layer), strategy and Strategy(strategy))


@pytest.fixture(scope="module")
def eager():
    """Losses of three steps on one device."""
    layer, loss_fn = network(), nn.CrossEntropyLoss()
    optimizer, losses = adam(layer), []
    for _ in range(3):
        loss = loss_fn(layer(paddle.to_tensor(X)), paddle.to_tensor(Y))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def test_data_parallel_equals_one_device_in_every_mode(eager):
    model = made()
    assert model.mode == "train"
    losses = [model(X, Y) for _ in range(3)]
    assert losses[0].shape == []
    np.testing.assert_allclose([float(v) for v in losses], eager, **NEAR)
    assert str(model.plan.mesh) == "dp8"
    weight = model.network[0].weight
    before = weight.numpy()
    model.eval()
    loss = float(model(X, Y))
    assert loss < eager[-1]
    model.predict()
    logits = model(X)
    np.testing.assert_allclose(float(nn.CrossEntropyLoss()(logits, paddle.to_tensor(Y))), loss, **NEAR)
    assert model([X[:3]], []).shape == [3, 3]  # rows that do not divide
    np.testing.assert_array_equal(weight.numpy(), before)
    assert "all-reduce" in model.compiled("train").as_text()
    assert "all-reduce" not in model.dist_main_program("predict").as_text()
    with pytest.raises(ProgramError, match="serial_main_program"):
        model.serial_main_program()
    with pytest.raises(ProgramError, match="no startup program"):
        model.dist_startup_program()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ({"sharding": {"enable": True, "stage": 2}}, "sharding8"),
        ({"sharding": {"enable": True, "stage": 3, "degree": 4}, "recompute": RECOMPUTED}, "dp2 sharding4"),
    ],
)
def test_sharded_and_recomputed_equals_one_device(eager, strategy, mesh):
    model = made(strategy)
    np.testing.assert_allclose([float(model(X, Y)) for _ in range(3)], eager, **NEAR)
    assert str(model.plan.mesh) == mesh
    state = model.optimizer._slots["moment1"][id(model.network[0].weight)]._array
    assert state.sharding.shard_shape(state.shape) != state.shape


def test_an_optimizer_that_was_told_to_accumulate_does():
    layer, mesh = network(), ProcessMesh(list(range(8)), ["dp"])
    optimizer = shard_optimizer(adam(shard_layer(layer, mesh)), gradient_accumulation_steps=3)
    assert COUNT in to_static(layer, None, nn.CrossEntropyLoss(), optimizer).state_dict("opt")
    assert COUNT not in made().state_dict("opt")


@pytest.mark.slow
def test_gradients_are_merged_over_k_batches(eager):
    """As the strategy says, or shard_optimizer was told: then of the sum, which AdamW scales away."""
    layer = network()
    mesh = ProcessMesh(list(range(8)), ["dp"])
    optimizer = shard_optimizer(adam(shard_layer(layer, mesh)), gradient_accumulation_steps=2)
    for model in (
        made({"gradient_merge": {"enable": True, "k_steps": 2}}),
        to_static(layer, None, nn.CrossEntropyLoss(), optimizer),
    ):
        losses = [float(model(X, Y)) for _ in range(4)]
        np.testing.assert_allclose(losses, [eager[0], eager[0], eager[1], eager[1]], **NEAR)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("amp", [{"dtype": "bfloat16", "level": "o2"}, {"dtype": "float16"}])
def test_mixed_precision(eager, amp):
    model = made({"amp": {"enable": True, **amp}})
    # a product's 8 mantissa bits (bfloat16) times the depth of two layers, on losses of size 1
    np.testing.assert_allclose([float(model(X, Y)) for _ in range(3)], eager, rtol=2 * 2**-8)
    assert (model.scaler is None) == (amp["dtype"] == "bfloat16")
    assert model.network[0].weight.dtype == (paddle.bfloat16 if amp.get("level") else paddle.float32)


def marked(mesh):
    """The network, its first layer split by columns over the mesh's last dim and its second by rows."""
    layer = network()
    layer[0].weight = shard_tensor(layer[0].weight, mesh, [Replicate(), Shard(1)])
    layer[2].weight = shard_tensor(layer[2].weight, mesh, [Replicate(), Shard(0)])
    return layer


def test_marks_are_kept_and_dims_of_any_name_understood(eager):
    layer = marked(ProcessMesh(np.arange(8).reshape(2, 4), ["x", "y"]))
    model = made(layer=layer)
    np.testing.assert_allclose([float(model(X, Y)) for _ in range(3)], eager, **NEAR)
    assert (model.plan.mesh.dp, model.plan.mesh.mp) == (2, 4)  # y splits parameters, x does not
    assert model.network[0].weight.placements == [Replicate(), Shard(1)]
    assert model.network[0].weight._local_shape == [4, 2]
    assert model.optimizer._slots["moment1"][id(layer[0].weight)]._local_shape == [4, 2]


def test_a_mesh_without_a_dim_for_the_batch_cannot_be_sharded_over():
    layer = network()
    layer[0].weight = shard_tensor(layer[0].weight, ProcessMesh(np.arange(8), ["y"]), [Shard(1)])
    with pytest.raises(ConfigError, match="each of whose dims splits parameters, and none is named 'dp' or"):
        made({"sharding": {"enable": True}}, layer)


@pytest.mark.parametrize("names", [["dp", "mp"], ["x", "y"]])
def test_state_of_a_marked_model_is_sharded_over_the_batch_s_dim(eager, names):
    mesh = ProcessMesh(np.arange(8).reshape(2, 4), names)
    layer = marked(mesh)
    model = made({"sharding": {"enable": True, "stage": 3, "degree": 2}}, layer)
    np.testing.assert_allclose([float(model(X, Y)) for _ in range(3)], eager, **NEAR)
    weight = layer[0].weight
    assert weight.sharding.shard_shape((4, 8)) == (2, 2)
    assert model.optimizer._slots["moment2"][id(weight)].sharding.shard_shape((4, 8)) == (2, 2)
    with pytest.raises(ConfigError, match=rf"sharding.degree=4, and dim '{names[0]}' of the mesh .* has 2 devices"):
        made({"sharding": {"enable": True, "degree": 4}}, marked(mesh))


def test_state_dicts(eager):
    model = made()
    model(X, Y)
    assert list(model.state_dict("param")) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    state = model.state_dict()
    assert len(state) == 4 + len(model.state_dict("opt"))
    kept = {name: paddle.to_tensor(np.asarray(value)) for name, value in state.items()}
    losses = [float(model(X, Y)) for _ in range(2)]
    model.set_state_dict(kept)
    np.testing.assert_array_equal([float(model(X, Y)) for _ in range(2)], losses)
    np.testing.assert_allclose(losses, eager[1:], **NEAR)
    with pytest.raises(CheckpointError, match=r"neither the layer nor the optimizer has \['nothing'\]"):
        model.set_state_dict({"nothing": X})
    with pytest.raises(ConfigError, match="mode='some'; give 'all', 'param' or 'opt'"):
        model.state_dict("some")


def test_modes_follow_what_is_there():
    layer = network()
    assert to_static(layer).mode == "predict"
    assert to_static(layer, loss=nn.CrossEntropyLoss()).mode == "eval"
    with pytest.raises(ConfigError, match="mode 'train' needs loss and optimizer"):
        to_static(layer).train()
    with pytest.raises(ConfigError, match="mode 'eval' needs loss"):
        to_static(layer).eval()
    with pytest.raises(ConfigError, match="there is no predict program before the first batch"):
        to_static(layer).compiled()
    with pytest.raises(ConfigError, match="mode 'test'"):
        to_static(layer).to_mode("test")


def test_arguments_of_other_kinds():
    layer = network()
    with pytest.raises(TypeError, match="takes a Layer, got int"):
        to_static(3)
    with pytest.raises(TypeError, match="loss is a Layer or a function"):
        to_static(layer, loss=3)
    with pytest.raises(TypeError, match="optimizer is an Optimizer, got int"):
        to_static(layer, optimizer=3)
    with pytest.raises(ConfigError, match="metrics holds a str"):
        DistModel(layer, None, metrics="acc")
    with pytest.raises(ConfigError, match=r"give \[specs of the inputs, specs of the labels\]"):
        to_static(layer, input_spec=3)
    with pytest.raises(ConfigError, match=r"input_spec holds a int"):
        to_static(layer, input_spec=[[3], []])
    with pytest.raises(ConfigError, match=r"checkpoints names 'layers.0', which is no sublayer of Sequential"):
        made({"recompute": {"enable": True, "checkpoints": ["layers.0"]}})
    with pytest.raises(ConfigError, match="Sequential does not say which of its parts to recompute"):
        made({"recompute": {"enable": True}})
    spec = paddle.static.InputSpec([None, 5], "float32")
    with pytest.raises(ValueError, match=r"specified as \[None, 5\], the batch has \[16, 4\]"):
        to_static(layer, input_spec=[[spec], []])(X)


def test_an_optimizer_of_other_parameters():
    layer = network()
    optimizer = adam(layer)
    with pytest.raises(ConfigError, match="the optimizer has none of the parameters of Sequential"):
        to_static(network(), None, nn.CrossEntropyLoss(), optimizer)
    layer[0].weight = shard_tensor(layer[0].weight, ProcessMesh(list(range(8)), ["dp"]), [Replicate()])
    with pytest.raises(ConfigError, match=r"under the names \['linear.*'\]: marking a Parameter .* makes a new one"):
        to_static(layer, None, nn.CrossEntropyLoss(), optimizer)


def test_batches_to_merge_are_said_once():
    layer = network()
    optimizer = shard_optimizer(adam(layer), gradient_accumulation_steps=2)
    strategy = Strategy({"gradient_merge": {"enable": True, "k_steps": 3}})
    with pytest.raises(ConfigError, match=r"k_steps=3, and shard_optimizer was told gradient_accumulation_steps=2"):
        to_static(layer, None, nn.CrossEntropyLoss(), optimizer, strategy)


def test_static_mode_is_refused():
    layer = network()
    paddle.enable_static()
    try:
        with pytest.raises(ProgramError, match=r"static mode only records it; call disable_static\(\) first"):
            to_static(layer)
    finally:
        paddle.disable_static()


def test_meshes_that_do_not_go_together():
    layer = network()
    layer[0].weight = shard_tensor(layer[0].weight, ProcessMesh([0, 1, 2]), [])
    layer[2].weight = shard_tensor(layer[2].weight, ProcessMesh([2, 3, 4]), [])
    with pytest.raises(PlacementError, match=r"0.weight is on the mesh .*no device in common"):
        to_static(layer)
    layer = network()
    mesh = ProcessMesh(np.arange(8).reshape(2, 4), ["x", "y"])
    layer[0].weight = shard_tensor(layer[0].weight, mesh, [Shard(0), Shard(1)])
    with pytest.raises(PlacementError, match="dim 'y' would be the axis mp, as another one is; name the dims"):
        to_static(layer)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_master_weights_are_split_like_the_moments(stage):
    paddle.seed(3)
    layer = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = adam(layer)
    amp = {"enable": True, "dtype": "bfloat16", "level": "o2"}
    strategy = Strategy({"amp": amp, "sharding": {"enable": True, "stage": stage}})
    model = to_static(layer, None, nn.CrossEntropyLoss(), optimizer, strategy)
    model(np.zeros((8, 16), np.float32), np.zeros(8, np.int64))
    state = optimizer.state_arrays({id(p): name for name, p in layer.named_parameters()})
    pieces = {name: array.addressable_shards[0].data.size / array.size for name, array in state.items()}
    kinds = {name.split("/")[0] for name in pieces if name.endswith("/0.weight")}
    assert kinds == {"master", "moment1", "moment2"}
    assert {pieces[f"{kind}/0.weight"] for kind in kinds} == {1 / 8}


def test_what_is_drawn_after_a_step_over_all_devices_lies_on_one():
    made()(X, Y)
    assert len(paddle.rand([2])._array.devices()) == 1
