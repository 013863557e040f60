"""shard_optimizer: stages 1 to 3 train as stage 0 does, and each device really holds one part."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed import (
    Partial,
    ProcessMesh,
    Replicate,
    Shard,
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    set_mesh,
    shard_layer,
    shard_optimizer,
    shard_scaler,
    shard_tensor,
)
from polyreme.distributed.auto_parallel.layers.shard_optimizer import split_along
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.process_mesh import clear_mesh
from polyreme.distributed.fsdp import fully_shard
from polyreme.errors import ConfigError, PlacementError, ProgramError

MESH = ProcessMesh(np.arange(8).reshape(4, 2), ["dp", "mp"])
W, X = (np.random.default_rng(s).standard_normal((8, 8)).astype(np.float32) for s in (0, 1))


@pytest.fixture(autouse=True)
def _no_mesh_is_left():
    yield
    clear_mesh()


def place(name, layer, mesh):
    if isinstance(layer, nn.Linear):
        layer.weight = shard_tensor(layer.weight, mesh, [Replicate(), Shard(1)])
        layer.bias = shard_tensor(layer.bias, mesh, [Replicate(), Shard(0)])


def trained(shard_fn, captured, make=lambda ps: paddle.optimizer.AdamW(0.1, epsilon=1e-3, parameters=ps)):
    """An MLP with a bias that the mesh dims do not divide: (its layer, optimizer, gradient shapes, weights)."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
    for p, seed in zip(model.parameters(), range(9), strict=False):
        p.set_value(np.random.default_rng(seed).standard_normal(p.shape).astype(np.float32) / 3)
    model = shard_layer(model, MESH, place)
    optimizer = shard_optimizer(make(model.parameters()), shard_fn)
    grads = {}

    def step(x):
        model(x).square().mean().backward()
        if not captured:
            grads.update({n: p.grad.placements for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.clear_grad()

    run = paddle.jit.to_static(step) if captured else step
    for _ in range(2):
        run(shard_tensor(X, MESH, [Shard(0)]))
    return model, optimizer, grads, [p.numpy() for p in model.parameters()]


def pieces(tensor):
    (shape,) = {s.data.shape for s in tensor._array.addressable_shards}
    return shape


@pytest.fixture(scope="module")
def whole():
    return trained(None, captured=False)


# two steps of at most 0.1; their gradients, sums of 64 terms below 1 rounded by 6e-8 each, are divided by at least 1e-3
TOLERANCE = 2 * 0.1 * 64 * 6e-8 / 1e-3


@pytest.mark.slow_cases("shard_fn0-False", "shard_fn3-True", "shard_fn2-False")
@pytest.mark.parametrize(
    ("shard_fn", "captured"),
    [
        (ShardingStage1("dp", MESH), False),
        (ShardingStage2(0, MESH), False),
        (ShardingStage3("dp"), False),
        (ShardingStage3("dp"), True),
    ],
)
def test_stages_equal_stage_0_and_each_device_holds_a_part(whole, shard_fn, captured):
    set_mesh(MESH)
    model, optimizer, grads, weights = trained(shard_fn, captured)
    for got, want in zip(weights, whole[3], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    first, last = model[0].weight, model[2].bias
    for slot in optimizer._slots.values():
        assert pieces(slot[id(first)]) == (2, 4)  # of [8, 8]: dim 1 over mp already, dim 0 over dp
        assert pieces(slot[id(last)]) == (3,)  # of [6], over mp: dp does not divide 3
    assert pieces(first) == ((2, 4) if shard_fn.stage == 3 else (8, 4))
    assert first.placements == [Shard(0) if shard_fn.stage == 3 else Replicate(), Shard(1)]
    if not captured:
        assert grads["0.weight"] == [Partial() if shard_fn.stage == 1 else Shard(0), Shard(1)]


def test_state_follows_the_parameters_and_numbers_are_whole(whole):
    model, optimizer, _, _ = whole
    assert {pieces(t[id(model[0].weight)]) for t in optimizer._slots.values()} == {(8, 4)}
    (shared,) = optimizer._shared.copies.values()
    assert shared.scalars["step"].sharding.is_fully_replicated


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adadelta", "RMSProp", "Adamax", "Lamb", "NAdam", "Rprop", "ASGD"])
def test_other_optimizers_keep_their_state_in_parts(name):
    w = shard_tensor(nn.Linear(8, 8).weight, MESH, [])
    w.set_value(W)
    optimizer = shard_optimizer(getattr(paddle.optimizer, name)(0.01, parameters=[w]), ShardingStage1("dp"), 2)
    assert optimizer.gradient_accumulation_steps == 2
    assert {pieces(t[id(w)]) for t in optimizer._slots.values()} <= {(2, 8)}
    assert all(optimizer._slots.values())


def test_state_that_is_there_is_moved_and_masters_too():
    w = nn.Linear(8, 8).weight
    w.set_value(W)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=[w], multi_precision=True)
    w._array = w._array.astype("bfloat16")
    w.grad = paddle.ones([8, 8], "bfloat16")
    optimizer.step()
    before = {n: t.numpy() for n, t in optimizer.state_dict().items()}
    shard_optimizer(optimizer, ShardingStage1("mp", MESH))
    assert pieces(optimizer._masters[id(w)]) == (4, 8)
    for name, value in before.items():
        np.testing.assert_array_equal(optimizer.state_dict()[name].numpy(), value)


def test_uneven_parameters_have_uneven_state():
    mesh = ProcessMesh([0, 1, 2], ["mp"])
    w = shard_tensor(nn.Linear(8, 8).weight, mesh, [Shard(0)])
    w.set_value(W)
    optimizer = shard_optimizer(paddle.optimizer.Momentum(0.5, 0.9, parameters=[w]), ShardingStage1("mp"))
    velocity = optimizer._slots["velocity"][id(w)]
    assert [velocity._local_value(i).shape for i in range(3)] == [[3, 8], [3, 8], [2, 8]]

    def step():
        (w * w).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    step()
    paddle.jit.to_static(step)()
    # w - 0.5 * 2 w = 0, then the velocity alone: 0 - 0.5 * 0.9 * 2 w; each step rounds once or twice
    np.testing.assert_allclose(w.numpy(), -0.9 * W, rtol=4 * 6e-8, atol=1e-6)
    assert (velocity.placements, w.placements) == ([Shard(0)], [Shard(0)])


@pytest.mark.parametrize(
    ("shape", "placements", "found"),
    [
        ((8, 4), [Replicate(), Replicate()], [Shard(0), Replicate()]),
        ((3, 4), [Replicate(), Replicate()], [Shard(1), Replicate()]),
        ((8, 3), [Replicate(), Shard(0)], [Shard(0, shard_order=1), Shard(0)]),  # no other dim divides: innermost
        ((3, 5), [Replicate(), Replicate()], None),
        ((8, 4), [Shard(0), Replicate()], None),
        ((), [Replicate(), Replicate()], None),
    ],
)
def test_the_dim_that_is_split(shape, placements, found):
    split = split_along(Form(MESH, tuple(placements), shape), 0, range(len(shape)))
    assert (None if split is None else list(split.placements)) == found


def test_what_is_no_stage_is_told():
    w = nn.Linear(2, 2).weight
    with paddle.LazyGuard():
        lazy = paddle.optimizer.SGD(parameters=nn.Linear(2, 2).parameters())
    sgd, elsewhere = paddle.optimizer.SGD(parameters=[w]), ProcessMesh([0, 1], ["x"])
    for message, call in [
        ("takes an Optimizer, got Linear", lambda: shard_optimizer(nn.Linear(2, 2))),
        ("LBFGS keeps vectors", lambda: shard_optimizer(paddle.optimizer.LBFGS(parameters=[w]))),
        ("shard_fn=<function", lambda: shard_optimizer(sgd, lambda name, p, t: t)),
        ("steps=0", lambda: shard_optimizer(sgd, None, 0)),
        ("made under LazyGuard", lambda: shard_optimizer(lazy)),
        ("sharding_mesh_dim=1.5", lambda: ShardingStage1(1.5)),
        ("mesh is a list", lambda: ShardingStage2("x", [0, 1])),
        ("has no dim 'y'", lambda: ShardingStage3("y", elsewhere)),
        ("takes an amp.GradScaler", lambda: shard_scaler(sgd)),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
    with pytest.raises(PlacementError, match=r"on no mesh; give the stage a mesh"):
        shard_optimizer(sgd, ShardingStage1("dp"))
    shard_optimizer(sgd, ShardingStage1("x", elsewhere))
    with pytest.raises(PlacementError, match="which has no dim 'dp'"):
        shard_optimizer(sgd, ShardingStage1("dp", MESH))
    paddle.enable_static()
    try:
        with pytest.raises(ProgramError, match="static mode"):
            shard_optimizer(sgd)
    finally:
        paddle.disable_static()
    scaler = paddle.amp.GradScaler()
    assert shard_scaler(scaler) is scaler
    assert repr(ShardingStage2("x")) == "ShardingStage2('x')"


def test_fully_shard_puts_all_in_parts():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1D(8), nn.Linear(8, 4))
    paddle.seed(1)
    for p in net.parameters():
        p.set_value(paddle.randn(p.shape) / 3)
    want = net(paddle.to_tensor(X)).numpy()
    set_mesh(MESH)
    first, kept = net[0].weight, net[0].bias
    found = fully_shard(net, None, True, lambda p: Shard(-1) if p is first else None, ignored_params=[kept])
    assert found is net
    assert (first.placements, kept.placements) == ([Shard(1), Replicate()], [Replicate(), Replicate()])
    assert (net[2].weight.placements, pieces(net[2].bias)) == ([Shard(0), Replicate()], (1,))
    assert net[1]._mean.placements == [Replicate(), Replicate()]
    net.eval()
    net.train()
    out = net(shard_tensor(X, MESH, [Shard(0)]))
    np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=64 * 8 * 6e-8)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=net.parameters())
    out.square().mean().backward()
    optimizer.step()
    assert pieces(optimizer._slots["moment1"][id(first)]) == (8, 2)
    alone = ProcessMesh([0, 1, 2, 3], ["x"])
    for message, call in [
        ("takes a Layer", lambda: fully_shard(first)),
        ("reshard_after_forward=False", lambda: fully_shard(net, reshard_after_forward=False)),
        ("mp_policy is not available", lambda: fully_shard(net, mp_policy=1)),
        ("which dim of .* splits", lambda: fully_shard(net, ProcessMesh([[0], [1]], ["x", "y"]))),
        ("gave Replicate", lambda: fully_shard(nn.Linear(2, 2), alone, shard_placement_fn=lambda p: Replicate())),
        (
            "does not split evenly over 4",
            lambda: fully_shard(nn.Linear(2, 2), alone, shard_placement_fn=lambda p: Shard(0)),
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
    clear_mesh()
    with pytest.raises(PlacementError, match="no mesh was given"):
        fully_shard(net)
