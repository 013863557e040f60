"""Models spread by shard_layer and by plans train as they do on one device; what is wrong in a config is told."""

import re
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed import (
    ColWiseParallel,
    ContextParallel,
    ConvParallel,
    PrepareContextParallel,
    PrepareLayerInput,
    PrepareLayerOutput,
    ProcessMesh,
    Replicate,
    RowWiseParallel,
    SequenceParallelBegin,
    SequenceParallelDisable,
    SequenceParallelEnable,
    SequenceParallelEnd,
    Shard,
    SplitPoint,
    Strategy,
    get_mesh,
    parallelize,
    shard_layer,
    shard_tensor,
    to_static,
)
from polyreme.distributed.auto_parallel.layers import plans
from polyreme.distributed.auto_parallel.tensors.process_mesh import clear_mesh
from polyreme.distributed.comm_report import find_collectives
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.errors import ConfigError, ProgramError
from polyreme.mesh import MeshShape, Plan
from polyreme.nn import functional as F

from .small_models import RATE, Plain, assert_same, batches, llama, train

MESH = ProcessMesh(np.arange(8).reshape(2, 4), ["dp", "mp"])
LLAMA_PLAN = {
    "tokens": RowWiseParallel(),
    r"blocks\.\d+\.attention\.[qkv]": ColWiseParallel(),
    "blocks.*.attention.out": RowWiseParallel(),
    "blocks.*.ffn.(gate|up)": ColWiseParallel(),
    "blocks.*.ffn.down": RowWiseParallel(),
    "head.weight": ColWiseParallel(),
}
PLAIN_PLAN = {
    "tokens": RowWiseParallel(),
    "blocks.*.(qkv|up)": ColWiseParallel(),
    "blocks.*.(out|down)": RowWiseParallel(),
    "head": [ColWiseParallel(gather_output=True)],
}


@pytest.fixture(autouse=True)
def _no_mesh_is_left():
    yield
    clear_mesh()


def momentum(model):
    return paddle.optimizer.Momentum(RATE, 0.9, parameters=model.parameters())


@pytest.fixture(scope="module")
def llama_alone():
    model = llama()
    return train(model, momentum(model), batches(32))


@pytest.fixture(scope="module")
def plain_alone():
    model = Plain()
    return train(model, momentum(model), batches(16))


@pytest.mark.slow
def test_llama_by_parallelize_equals_one_device(llama_alone):
    model = llama()
    model, optimizer = parallelize(model, momentum(model), MESH, {"mp_config": {"parallelize_plan": LLAMA_PLAN}})
    assert get_mesh() is MESH
    assert_same(train(model, optimizer, batches(32)), llama_alone)
    q, norm = model.blocks[0].attention.q.weight, model.norm.weight
    assert (q.placements, q._local_shape) == ([Replicate(), Shard(1)], [16, 4])
    assert (norm.placements, model.cos.placements) == ([Replicate(), Replicate()], [Replicate(), Replicate()])
    assert model.blocks[0].ffn.down.weight.placements == [Replicate(), Shard(0)]
    assert {s.data.shape for s in optimizer._slots["velocity"][id(q)]._array.addressable_shards} == {(16, 4)}


def test_llama_by_shard_layer_equals_one_device(llama_alone):
    seen = []

    def place(name, layer, mesh):
        seen.append(name)
        if re.search(r"attention\.[qkv]$|gate|up", name):
            layer.weight = shard_tensor(layer.weight, mesh, [Replicate(), Shard(1)])

    def split(inputs, mesh):
        return tuple(shard_tensor(x, mesh, [Shard(0), Replicate()]) for x in inputs)

    model = llama()
    assert shard_layer(model, MESH, place, split, lambda loss, mesh: loss * 1.0) is model
    assert seen[0] == ""
    assert "blocks.0.attention.q" in seen
    assert model.blocks[0].attention.q.weight.placements == [Replicate(), Shard(1)]
    assert model.head.weight.placements == [Replicate(), Replicate()]
    assert_same(train(model, momentum(model), batches(32)), llama_alone)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("captured", [True, False])
def test_plain_layers_equal_one_device(plain_alone, captured):
    model = Plain()
    model, optimizer = parallelize(model, momentum(model), MESH, {"mp_config": {"parallelize_plan": PLAIN_PLAN}})
    assert model.blocks[0].up.bias.placements == [Replicate(), Shard(0)]
    assert model.blocks[0].down.bias.placements == [Replicate(), Replicate()]
    assert_same(train(model, optimizer, batches(16), captured), plain_alone)


def test_sizes_that_the_mesh_does_not_divide():
    def made():
        paddle.seed(2)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        return model, momentum(model)

    def run(model, optimizer):
        class Loss(nn.Layer):
            def __init__(self):
                super().__init__()
                self.inner = model

            def forward(self, x, y):
                return (self.inner(x) - y).square().mean()

        data = [(paddle.ones([5, 4]) * (i + 1), paddle.ones([5, 4])) for i in range(2)]
        return train(Loss(), optimizer, data)

    want = run(*made())
    plan = {"0": ColWiseParallel(), "2": RowWiseParallel()}
    model, optimizer = parallelize(*made(), ProcessMesh([0, 1, 2], ["mp"]), {"mp_config": {"parallelize_plan": plan}})
    assert [model[0].weight._local_value(i).shape for i in range(3)] == [[4, 3], [4, 3], [4, 2]]
    assert_same(run(model, optimizer), want)
    assert model[0].weight.placements == [Shard(1)]


def collectives(step, inputs):
    """(kind, bytes) of each in a captured step."""
    found = find_collectives(step.compiled(*inputs).as_text(), MeshShape(dp=2, mp=4))
    return sorted((c.kind, c.payload) for c in found)


@pytest.mark.slow
def test_marks_communicate_as_a_plan_by_hand_does():
    def captured(model, inputs):
        optimizer = momentum(model)

        def step(x, y):
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            return loss

        run = paddle.jit.to_static(step)
        run(*inputs)
        return collectives(run, inputs)

    inputs = batches(32)[0]
    model, _ = parallelize(llama(), None, MESH, {"mp_config": {"parallelize_plan": LLAMA_PLAN}})
    marked = captured(model, inputs)
    model = llama()
    layout = apply_plan(Plan.from_degrees(dp=2, mp=4), model)
    try:
        by_hand = captured(model, [shard_batch(layout, x.numpy(), "batch", "seq") for x in inputs])
    finally:
        clear_plan()
    assert marked == by_hand


@pytest.mark.slow
def test_stages_of_a_parallelized_model_run_as_a_pipeline():
    class Logits(Plain):
        def forward(self, x):
            h = self.tokens(x)
            for block in self.blocks:
                h = block(h)
            return self.head(h)

    loss = nn.CrossEntropyLoss()
    alone = Plain(blocks=2)
    want = train(alone, momentum(alone), batches(16), captured=False)
    model = Logits(blocks=2)
    mesh = ProcessMesh(np.arange(8).reshape(2, 2, 2), ["pp", "dp", "mp"])
    config = {"mp_config": {"parallelize_plan": PLAIN_PLAN}, "pp_config": {"split_spec": "blocks"}}
    _, optimizer = parallelize(model, momentum(model), mesh, config | {"dp_config": {"sharding_level": 1}})
    strategy = Strategy({"pipeline": {"enable": True, "accumulate_steps": 2, "schedule_mode": "1F1B"}})
    staged = to_static(model, None, loss, optimizer, strategy)
    losses = [float(staged(x, y)) for x, y in batches(16)]
    assert_same((losses, {n: p.numpy() for n, p in model.named_parameters()}), want)


class Swapped(nn.Layer):
    """Layers on [seq, batch, 8] between layers on [batch, seq, 8]; swap=True: the model itself exchanges the dims."""

    def __init__(self):
        super().__init__()
        paddle.seed(7)
        self.begin, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.after, self.local, self.end = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x, swap):
        turned = (lambda h: h.transpose([1, 0, 2])) if swap else (lambda h: h)
        h = turned(self.begin(x))
        h = h + self.norm(h)
        h = h + turned(self.block(turned(h)))
        self.middle = h
        return self.end(self.local(self.after(turned(h))))


def test_sequence_parallel_plans_change_no_values():
    x = paddle.to_tensor(np.random.default_rng(1).standard_normal((2, 8, 8)).astype(np.float32))
    alone, seen = Swapped(), {}
    alone(x, True).square().mean().backward()

    def note(mesh):
        return lambda layer, inputs, out: seen.update({layer.full_name().rpartition("_")[0]: inputs[0].placements})

    config = {
        "begin": SequenceParallelBegin(),
        "block": SequenceParallelDisable(),
        "block.0": ColWiseParallel(),
        "block.2": RowWiseParallel(),
        "after": SequenceParallelEnd(),
        "local": [SequenceParallelEnable(), PrepareLayerOutput(note)],
        "end": PrepareLayerInput(lambda mesh: lambda layer, inputs: seen.update(end=inputs[0].placements)),
    }
    mesh = ProcessMesh(np.arange(4).reshape(1, 4), ["dp", "mp"])
    model, _ = parallelize(Swapped(), None, mesh, {"mp_config": {"parallelize_plan": config}})
    out = model(x, False)
    out.square().mean().backward()
    np.testing.assert_allclose(out.numpy(), alone(x, True).numpy(), rtol=0, atol=16 * 6e-8 * 4)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=0, atol=128 * 6e-8, err_msg=name)
    assert (model.middle.shape, model.middle.placements) == ([8, 2, 8], [Replicate(), Shard(0)])
    assert seen == {"layer_norm": [Replicate(), Shard(1)], "end": [Replicate(), Replicate()]}


class Attending(nn.Layer):
    """scaled_dot_product_attention of a sublayer's own, after an Embedding."""

    def __init__(self):
        super().__init__()
        paddle.seed(9)
        self.tokens, self.sdpa = nn.Embedding(16, 16), Sdpa()

    def forward(self, x):
        h = self.tokens(x).reshape([*x.shape, 4, 4])
        return self.sdpa(h, h * 2.0, h + 1.0)


class Sdpa(nn.Layer):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("backend", "name"), [("p2p", "sep"), ("all2all", "cp")])
def test_context_parallel_attends_over_a_split_sequence(backend, name):
    x = paddle.to_tensor(np.random.default_rng(2).integers(0, 16, (2, 8)))
    alone = Attending()
    alone(x).square().sum().backward()
    mesh = ProcessMesh(np.arange(4).reshape(2, 2), ["dp", name])
    config = {"": PrepareContextParallel(backend), "sdpa": ContextParallel(backend)}
    model, _ = parallelize(Attending(), None, mesh, {"cp_config": {"parallelize_plan": config}})
    out = model(x)
    out.square().sum().backward()
    assert out.placements == [Shard(0), Shard(1)]
    np.testing.assert_allclose(out.numpy(), alone(x).numpy(), rtol=0, atol=16 * 6e-8 * 4)
    # gradients are sums of 16 terms below 20
    got, want = (m.tokens.weight.grad.numpy() for m in (model, alone))
    np.testing.assert_allclose(got, want, rtol=0, atol=16 * 20 * 6e-8)


def test_convolutions_over_a_split_width():
    paddle.seed(4)
    net, x = (
        nn.Sequential(nn.Conv2D(2, 3, 3, padding=1), nn.Conv2D(3, 2, 3, stride=2, padding=1)),
        paddle.randn([2, 2, 4, 8]),
    )
    want = net(x).numpy()
    mesh = ProcessMesh([0, 1], ["mp"])
    net, _ = parallelize(net, None, mesh, {"mp_config": {"parallelize_plan": {r"\d": ConvParallel()}}})
    out = net(x)
    assert out.placements == [Shard(3)]
    np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=27 * 6e-8 * 4)


@pytest.mark.parametrize(
    "spec",
    ["blocks", ["blocks"], {"blocks.1": SplitPoint.END}, {"blocks.2": SplitPoint.BEGINNING}],
    ids=["name", "names", "end", "beginning"],
)
def test_layers_go_to_the_meshes_of_their_stages(spec):
    mesh = ProcessMesh(np.arange(4).reshape(2, 2), ["pp", "mp"])
    config = {"pp_config": {"split_spec": spec, "global_spec": "head"}}
    config["mp_config"] = {"parallelize_plan": {"blocks.*.up": ColWiseParallel()}}
    model = Plain(blocks=3)
    optimizer = momentum(model)
    assert parallelize(model, optimizer, mesh, config) == (model, optimizer)
    where = {name: p.process_mesh.process_ids for name, p in model.named_parameters()}
    assert where["tokens.weight"] == where["blocks.0.out.bias"] == where["blocks.1.up.weight"] == [0, 1]
    assert where["blocks.2.up.weight"] == [2, 3]
    assert where["head.weight"] == [0, 1, 2, 3]  # global_spec: on every stage
    assert model.blocks[2].up.weight.placements == [Shard(1)]
    # data goes on to the mesh of the stage that takes it
    sent = model.blocks[2](model.blocks[1](model.blocks[0](model.tokens(paddle.to_tensor([[1, 2]])))))
    assert sent.process_mesh.process_ids == [2, 3]


def test_a_layer_of_every_stage_computes_for_the_one_that_calls_it():
    class Net(nn.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x):
            x = self.norm(self.first(x)) + self.first(x)
            return self.last(self.norm(x))

    paddle.seed(3)
    net, x = Net(), paddle.randn([4, 8])
    want = net(x)
    (want**2).sum().backward()
    grads = [p.grad.numpy() for p in net.parameters()]
    net.clear_gradients()
    mesh = ProcessMesh(np.arange(4).reshape(2, 2), ["pp", "dp"])
    config = {"pp_config": {"split_spec": {"norm": SplitPoint.END}, "global_spec": "norm"}}
    net, _ = parallelize(net, None, mesh, config)
    assert net.norm.weight.process_mesh == mesh
    got = net(x)
    (got**2).sum().backward()
    assert got.process_mesh.process_ids == [2, 3]
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=0, atol=8 * 6e-8 * 8)
    for p, grad in zip(net.parameters(), grads, strict=True):
        # sums over 4 rows and 8 columns of terms below 20
        np.testing.assert_allclose(p.grad.numpy(), grad, rtol=0, atol=32 * 20 * 6e-8)


def test_parameters_of_a_layer_over_several_stages_are_on_all():
    class Tied(Plain):
        def __init__(self):
            super().__init__(blocks=2)
            self.scale = self.create_parameter([8])

    mesh = ProcessMesh([0, 1], ["pp"])
    model, _ = parallelize(Tied(), None, mesh, {"pp_config": {"split_spec": {"blocks.0": SplitPoint.END}}})
    assert [p.process_mesh.process_ids for p in (model.scale, model.tokens.weight, model.head.bias)] == [
        [0, 1],
        [0],
        [1],
    ]


def test_sharding_levels_and_a_model_alone():
    mesh = ProcessMesh([0, 1, 2, 3], ["dp"])
    for level, optimizer in ((1, True), (3, True), (3, False)):
        model = nn.Linear(8, 8)
        found = momentum(model) if optimizer else None
        parallelize(model, found, mesh, {"dp_config": {"sharding_level": level}})
        assert model.weight.placements == [Shard(0) if level == 3 else Replicate()]
        if found is not None:
            assert found._slots["velocity"][id(model.weight)].placements == [Shard(0)]
    assert model(paddle.ones([4, 8])).placements == [Shard(0)]  # a dense batch is split where it divides
    model(paddle.ones([3, 8]))


class Pair(NamedTuple):
    first: Any
    second: Any


class Pairs(nn.Layer):
    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([4, 8])

    def forward(self, pair):
        y = pair.first @ self.weight
        return OrderedDict(pair=Pair(y, pair.second @ self.weight))


def test_named_tuples_and_ordered_dicts_stay_what_they_are():
    mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"])
    model, x = Pairs(), paddle.ones([2, 4])
    want = model(Pair(x, 2 * x))
    parallelize(model, None, mesh, {"mp_config": {"parallelize_plan": {"": ColWiseParallel(gather_output=True)}}})
    got = model(Pair(x, 2 * x))
    assert isinstance(got, OrderedDict)
    assert isinstance(got["pair"], Pair)
    for mine, dense in zip(got["pair"], want["pair"], strict=True):
        assert mine.placements == [Shard(0), Replicate()]
        np.testing.assert_allclose(mine.numpy(), dense.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        ({"mp_config": {"parallelize_plan": {"0": [SequenceParallelBegin()], "2": "oops"}}}, None),
        ({"mp_config": {"parallelize_plan": {"0": [SequenceParallelBegin()], "2": ConvParallel()}}}, None),
        ({"mp_config": {"parallelize_plan": {"0": ColWiseParallel(), "1": ColWiseParallel()}}}, None),
        ({"mp_config": {"parallelize_plan": {"0": ColWiseParallel(), "2": ContextParallel()}}}, None),
        ({"dp_config": {"sharding_level": 1}}, paddle.optimizer.LBFGS),
    ],
    ids=["no plan", "of another layer", "of other dims", "without its mesh dim", "no state per parameter"],
)
def test_what_fails_changes_nothing(config, optimizer):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    x = paddle.ones([2, 6, 4])
    want = model(x).numpy()
    made = None if optimizer is None else optimizer(parameters=model.parameters())
    with pytest.raises(ConfigError):
        parallelize(model, made, ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"]), config)
    assert get_mesh() is None
    assert not any(p.is_dist() for p in model.parameters())
    np.testing.assert_array_equal(model(x).numpy(), want)


def test_a_plan_without_a_parameter_to_split_is_warned_of():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    plan = {"mp_config": {"parallelize_plan": {r"\d": ColWiseParallel()}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(model, None, ProcessMesh([0, 1], ["mp"]), plan)  # one of two has parameters
    for pattern, name in (("1", "ReLU"), ("", "Sequential")):
        plan = {"mp_config": {"parallelize_plan": {pattern: RowWiseParallel()}}}
        with pytest.warns(UserWarning, match=rf"RowWiseParallel\(.*\), and a {name} has no weight or bias of its own"):
            parallelize(model, None, ProcessMesh([0, 1], ["mp"]), plan)


def test_what_is_wrong_in_a_config_is_told():
    model, mesh = Plain(), ProcessMesh([0, 1], ["mp"])
    for given in ({"config": None}, {"config": {"dp_config": {}}, "mesh": None}):
        with pytest.warns(UserWarning, match="stays on one device"):
            assert parallelize(model, None, **{"mesh": mesh, **given}) == (model, None)
    assert not model.head.weight.is_dist()
    with pytest.warns(UserWarning, match=r"mp_config 'haed' fits no layer"):
        parallelize(Plain(), None, mesh, {"mp_config": {"parallelize_plan": {"haed": ColWiseParallel()}}})

    def by_plan(plan):
        return lambda: parallelize(Plain(), None, mesh, {"mp_config": {"parallelize_plan": plan}})

    def by(config, names=("mp",), model=model, optimizer=None):
        where = ProcessMesh(np.arange(2 ** len(names)).reshape([2] * len(names)), list(names))
        return lambda: parallelize(model, optimizer, where, config)

    ends = {"blocks.0": SplitPoint.END}
    for message, call in [
        ("takes a Layer", by({}, model=3)),
        ("optimizer is int", by({}, optimizer=3)),
        ("mesh is list", lambda: parallelize(model, None, [0], {})),
        ("config is list", by([])),
        ("unknown config 'mp_confg'; did you mean 'mp_config'", by({"mp_confg": {}})),
        ("no setting 'plan'; the choices are parallelize_plan", by({"mp_config": {"plan": {}}})),
        ("parallelize_plan is a list; give {name: plan}", by_plan([ColWiseParallel()])),
        ("mp_config is True; give a dict", by({"mp_config": True})),
        ("optimizer has no parameter of the model", by({}, optimizer=momentum(nn.Linear(2, 2)))),
        ("parallelize: LBFGS keeps vectors", by({}, optimizer=paddle.optimizer.LBFGS(parameters=model.parameters()))),
        ("offload=True is not available", by({"dp_config": {"offload": True}})),
        ("sharding_level=4", by({"dp_config": {"sharding_level": 4}})),
        ("dp_config needs a mesh dim 'dp'", by({"dp_config": {"sharding_level": 1}})),
        ("mp_config needs a mesh dim 'mp'", by({"mp_config": {}}, ["dp"])),
        ("pp_config needs split_spec", by({"pp_config": {}}, ["pp"])),
        ("maps 'head' to 'col'", by_plan({"head": "col"})),
        (r"\('head',\) is not a string", by_plan({("head",): ColWiseParallel()})),
        (r"'\(' is not a regular expression", by_plan({"(": ColWiseParallel()})),
        ("ColWiseParallel: weight of .* has shape", by_plan({"blocks.0.norm": ColWiseParallel()})),
        ("fn=None; give a function", lambda: PrepareLayerInput()),
        ("backend='p2'; did you mean 'p2p'", lambda: ContextParallel("p2")),
        ("needs a mesh dim 'sep' or 'cp'", by({"cp_config": {"parallelize_plan": {"": PrepareContextParallel()}}})),
        ("one parameter, to SequenceParallelEnable.*drop .weight", by_plan({"head.weight": SequenceParallelEnable()})),
        ("ConvParallel is for Conv2D", by_plan({"head": ConvParallel()})),
        ("is 'END'; give SplitPoint", by({"pp_config": {"split_spec": {"head": "END"}}}, ["pp"])),
        ("fits 0 layers", by({"pp_config": {"split_spec": {"x": SplitPoint.END}}}, ["pp"])),
        ("has 1 layers to divide over 2 stages", by({"pp_config": {"split_spec": "blocks"}}, ["pp"])),
        ("split_spec=3; give a name", by({"pp_config": {"split_spec": 3}}, ["pp"])),
        ("cuts the model 2 times", by({"pp_config": {"split_spec": {**ends, "tokens": SplitPoint.END}}}, ["pp"])),
        ("process_mesh is None", lambda: shard_layer(model, None)),
        ("process_mesh is a list", lambda: shard_layer(model, [0])),
        ("takes a Layer, got int", lambda: shard_layer(3, mesh)),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="LayerPlan has no apply"):
        plans.LayerPlan().apply(model, mesh)
    paddle.enable_static()
    try:
        with pytest.raises(ProgramError, match="in static mode"):
            shard_layer(model, mesh)
    finally:
        paddle.disable_static()
