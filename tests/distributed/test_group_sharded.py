"""Grouped sharding by level: who holds how many bytes; training, saving and loading are those of one device."""

import jax
import numpy as np
import pytest

from polyreme.amp import GradScaler, auto_cast, decorate
from polyreme.core import layout, rng
from polyreme.distributed import fleet
from polyreme.distributed.fleet.layers.mpu import ColumnParallelLinear, RowParallelLinear
from polyreme.distributed.parallel import init_parallel_env
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.distributed.sharding import group_sharded_parallel, save_group_sharded_model
from polyreme.distributed.spawning import spawn
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CheckpointError, ConfigError, PlacementError
from polyreme.io.serialization import load
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.nn import Layer, LayerNorm, Linear
from polyreme.nn import functional as F
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.nn.initializer import Constant
from polyreme.optimizer import AdamW

WIDTH, INNER, STEPS = 16, 32, 4
LEVELS = ("os", "os_g", "p_g_os")
X = np.random.default_rng(0).normal(size=(STEPS, 16, WIDTH)).astype("float32")


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


class Net(Layer):
    def __init__(self, split=False):
        super().__init__()
        self.norm = LayerNorm(WIDTH)
        if split:
            self.up = ColumnParallelLinear(WIDTH, INNER, has_bias=True, gather_output=False)
            self.down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True)
        else:
            self.up, self.down = Linear(WIDTH, INNER), Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def made(split=False, dtype=None, **settings):
    """(model, optimizer), with initial values that do not depend on how they are placed."""
    rng.seed(3)
    model = Net(split)
    optimizer = AdamW(1e-2, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(0.1), **settings)
    if dtype is not None:
        model, optimizer = decorate(model, optimizer, level="O2", dtype=dtype)
    return model, optimizer


def train(model, optimizer, scaler=None, dtype=None, captured=True):
    """(losses, parameters or, where there are some, their master weights)."""

    def step(x):
        with auto_cast(enable=dtype is not None, level="O2", dtype=dtype or "float16"):
            loss = (model(x).astype("float32") ** 2).mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.clear_grad()
        return loss

    step = to_static(step) if captured else step
    losses = [float(step(to_tensor(x))) for x in X]
    held = optimizer.state_dict()
    return losses, {n: held.get(f"{p.name}_master_0", p).numpy() for n, p in model.named_parameters()}


def on_each(arrays):
    """Bytes that each device holds of these arrays."""
    found = dict.fromkeys(jax.devices(), 0)
    for array in arrays:
        for shard in array.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return set(found.values())


def state_of(model, optimizer):
    state = optimizer.state_dict()
    return {
        (name, slot): state[f"{p.name}_{slot}_0"]._array
        for name, p in model.named_parameters()
        for slot in ("moment1", "moment2", "master")
        if f"{p.name}_{slot}_0" in state
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("level", LEVELS)
def test_each_device_holds_its_share_to_the_byte(level):
    model, optimizer, scaler = group_sharded_parallel(*made(), level, segment_size=0)
    assert scaler is None
    (model(to_tensor(X[0])) ** 2).mean().backward()
    grads = [p.grad._array for p in model.parameters() if p.grad is not None]
    assert len(grads) == 6
    optimizer.step()
    whole = sum(p.size * 4 for p in model.parameters())
    # every size is a multiple of 8, so nothing is left whole
    assert on_each(state_of(model, optimizer).values()) == {2 * whole // 8}
    assert on_each(grads) == {whole if level == "os" else whole // 8}
    assert on_each([p._array for p in model.parameters()]) == {whole // 8 if level == "p_g_os" else whole}


@pytest.fixture(scope="module")
def alone():
    found = {None: train(*made())}
    clear_plan()
    return found


@pytest.fixture(scope="module")
def alone_by_dtype(alone):
    low = {kind: train(*made(dtype=kind), scaler_for(kind), kind) for kind in ("bfloat16", "float16")}
    clear_plan()
    return alone | low


def scaler_for(dtype):
    # float16 gradients of the first step overflow at this scale: one step is left out, on every device
    return GradScaler(init_loss_scaling=2.0**24, decr_ratio=2.0**-10) if dtype == "float16" else None


def check(found, want, dtype, start=None):
    eps = {None: 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    # sums of up to 512 terms in another order; Adam's steps, of length 1e-2 at most, divide that error by a gradient
    # that may be a thousand times smaller than the largest, or in low precision rounds to another sign now and then
    rounding = np.sqrt(512) * eps
    start = start or dict(made()[0].named_parameters())
    np.testing.assert_allclose(found[0], want[0], rtol=4 * rounding)
    for name, value in want[1].items():
        np.testing.assert_allclose(found[1][name], value, atol=STEPS * 1e-2 * min(0.1, 1000 * rounding), err_msg=name)
        assert np.abs(value - start[name].numpy()).max() > STEPS * 1e-2 * 0.5


@pytest.mark.slow
# every level and every dtype is here, with and without master weights
@pytest.mark.slow_cases("os-None", "os-float16", "os_g-bfloat16", "os_g-float16", "p_g_os-bfloat16")
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains_as_one_device_does(alone_by_dtype, level, dtype):
    model, optimizer, scaler = group_sharded_parallel(
        *made(dtype=dtype), level, scaler=scaler_for(dtype), segment_size=0
    )
    found = train(model, optimizer, scaler, dtype)
    check(found, alone_by_dtype[dtype], dtype)
    if scaler is not None:
        assert float(scaler.get_loss_scaling()) == 2.0**14
    masters = {key: a for key, a in state_of(model, optimizer).items() if key[1] == "master"}
    assert bool(masters) is (dtype is not None)
    for array in masters.values():
        assert on_each([array]) == {array.nbytes // 8}


@pytest.mark.slow
def test_eager_training_is_the_same(alone):
    check(train(*group_sharded_parallel(*made(), "p_g_os", segment_size=0)[:2], captured=False), alone[None], None)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_beside_tensor_parallel_layers(alone, level):
    model, optimizer = made(split=True)
    apply_plan(Plan.from_degrees(dp=2, sharding=2, mp=2), model)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=0)
    check(train(model, optimizer), alone[None], None)
    weight = model.up.weight
    split = (WIDTH // 2, INNER // 2)
    assert weight._array.sharding.shard_shape((WIDTH, INNER)) == (split if level == "p_g_os" else (WIDTH, INNER // 2))
    assert state_of(model, optimizer)["up.weight", "moment1"].sharding.shard_shape((WIDTH, INNER)) == split


def whole_parameters(model):
    return {n for n, p in model.named_parameters() if p._array.addressable_shards[0].data.size == p.size}


@pytest.mark.slow
def test_parameters_that_stay_whole_train_as_one_device_does(alone):
    model, optimizer, _ = group_sharded_parallel(*made(), "p_g_os", segment_size=INNER)
    check(train(model, optimizer), alone[None], None)
    # what is whole has its gradient and its state split all the same
    assert on_each([state_of(model, optimizer)["up.bias", "moment1"]]) == {INNER * 4 // 8}


def test_small_parameters_and_excluded_layers_stay_whole():
    model, _, _ = group_sharded_parallel(*made(), "p_g_os", segment_size=INNER)
    assert whole_parameters(model) == {"norm.weight", "norm.bias", "up.bias", "down.bias"}
    clear_plan()
    model, optimizer = made()
    group_sharded_parallel(model, optimizer, "p_g_os", segment_size=0, exclude_layer=["LayerNorm", id(model.up)])
    assert whole_parameters(model) == {"norm.weight", "norm.bias", "up.weight", "up.bias"}
    clear_plan()
    model, optimizer = made()
    group_sharded_parallel(model, optimizer, "p_g_os")
    assert whole_parameters(model) == set(dict(model.named_parameters()))


def test_state_that_is_there_already_moves(alone):
    model, optimizer = made()
    optimizer.create_state()
    group_sharded_parallel(model, optimizer, "os")
    assert on_each(state_of(model, optimizer).values()) == {sum(2 * p.size * 4 for p in model.parameters()) // 8}
    check(train(model, optimizer), alone[None], None)


class Odd(Layer):
    """Sizes that 4 does not divide, a scalar, and one that only mp and sharding together could cut."""

    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 14, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(14, 7, input_is_parallel=True)
        self.wide = RowParallelLinear(8, 7, has_bias=False)
        self.scale = self.create_parameter([], default_initializer=Constant(0.5))
        self.last = Linear(7, 3)

    def forward(self, x):
        return self.last(self.down(F.gelu(self.up(x))) + self.wide(x[:, :8])) * self.scale


@pytest.mark.slow
@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_odd_shapes_fall_back(stage):
    def fresh():
        rng.seed(3)
        return Odd()

    def trained(plan):
        model = fresh()
        if plan is not None:
            apply_plan(plan, model)
        optimizer = AdamW(1e-2, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(0.1))
        return train(model, optimizer), model, optimizer

    want, _, _ = trained(None)
    found, model, optimizer = trained(Plan.from_degrees(sharding=4, mp=2, sharding_stage=stage))
    check(found, want, None, dict(fresh().named_parameters()))
    # by hand, mp 2 and sharding 4: the first dim that sharding divides, beside mp where no other does, else none
    cut = {
        "up.weight": (4, 7),
        "up.bias": (7,),
        "down.weight": (7, 7),
        "down.bias": (7,),
        "wide.weight": (1, 7),
        "scale": (),
        "last.weight": (7, 3),
        "last.bias": (3,),
    }
    states = state_of(model, optimizer)
    for name, p in model.named_parameters():
        assert {s.data.shape for s in states[name, "moment1"].addressable_shards} == {cut[name]}
        if stage == 3:
            assert {s.data.shape for s in p._array.addressable_shards} == {cut[name]}


def test_the_batch_is_split():
    seen = []

    class Look(Layer):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x, scale, times):
            seen.extend([x._array.sharding.shard_shape(tuple(x.shape)), scale.shape, times])
            return self.net(x) * scale

    model = Look()
    group_sharded_parallel(model, AdamW(parameters=model.parameters()), "os")
    model(to_tensor(X[0]), to_tensor(2.0), 3)
    assert seen == [(2, WIDTH), [], 3]
    model(to_tensor(X[0][:3]), to_tensor(2.0), 3)
    assert seen[3] == (3, WIDTH)  # 3 rows do not divide by 8


def test_saving_gives_whole_tensors(tmp_path):
    model, optimizer, _ = group_sharded_parallel(*made(), "p_g_os", segment_size=0)
    train(model, optimizer)
    save_group_sharded_model(model, tmp_path / "out", optimizer)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.pdmodel", "model.pdopt"]
    clear_plan()
    again, _ = made()
    again.set_state_dict(load(tmp_path / "out" / "model.pdmodel"))
    for name, p in again.named_parameters():
        np.testing.assert_array_equal(p.numpy(), dict(model.named_parameters())[name].numpy())
    held = load(tmp_path / "out" / "model.pdopt", return_numpy=True)
    for (name, slot), array in state_of(model, optimizer).items():
        np.testing.assert_array_equal(held[f"{dict(model.named_parameters())[name].name}_{slot}_0"], np.asarray(array))
    save_group_sharded_model(model, tmp_path / "model_only")
    assert [p.name for p in (tmp_path / "model_only").iterdir()] == ["model.pdmodel"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file"):
        save_group_sharded_model(model, tmp_path / "file")


def save_from_one_of_two(folder):
    """What each of two processes does: its rows of one step, then the saving of what both hold parts of."""
    init_parallel_env()
    model, optimizer = made()
    group_sharded_parallel(model, optimizer, "p_g_os", segment_size=0)
    rows = X[0][8 * jax.process_index() :][:8]
    (model(to_tensor(rows)) ** 2).mean().backward()
    optimizer.step()
    assert not model.up.weight._array.is_fully_addressable
    save_group_sharded_model(model, folder, optimizer)


@pytest.mark.slow
def test_two_processes_save_what_one_device_would(tmp_path):
    context = spawn(save_from_one_of_two, (str(tmp_path / "out"),), nprocs=2, cpu_num=2, join=False)
    try:
        assert context.join(timeout=150)
    finally:
        context.end()
    model, optimizer = made()
    start = {n: p.numpy().copy() for n, p in model.named_parameters()}
    (model(to_tensor(X[0])) ** 2).mean().backward()
    optimizer.step()
    loaded = load(tmp_path / "out" / "model.pdmodel")
    for name, p in model.named_parameters():
        assert isinstance(loaded[name], Tensor)
        # as in check(): one Adam step
        atol = 1e-2 * 1000 * np.sqrt(512) * 2.0**-23
        np.testing.assert_allclose(loaded[name].numpy(), p.numpy(), atol=atol, err_msg=name)
        assert np.abs(p.numpy() - start[name]).max() > 0.5e-2
    assert (tmp_path / "out" / "model.pdopt").exists()


class Group:
    def __init__(self, axes, nranks=1):
        self.axes, self.nranks = axes, nranks


def test_groups_of_the_right_axes_are_taken():
    group_sharded_parallel(*made(), "os", group=Group(("sharding",)), dp_group=Group(("dp",)))
    clear_plan()
    group_sharded_parallel(*made(), "os", group=Group(()))  # the default group: everyone


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"level": "os_p"}, ConfigError, r"level='os_p'; choose 'os' .*'os_g'.*'p_g_os'"),
        ({"level": "os", "exclude_layer": ["Linear"]}, ConfigError, "which splits no parameters"),
        ({"level": "p_g_os", "exclude_layer": ["Liner"]}, ConfigError, "'Liner'.*did you mean 'Linear'"),
        ({"level": "os", "group": Group(("mp",))}, PlacementError, "group=.*mesh axis 'sharding'"),
        ({"level": "p_g_os", "segment_size": -1}, ConfigError, "segment_size=-1"),
        ({"level": "os", "dp_group": Group(("mp",))}, PlacementError, "dp_group=.*mesh axis 'dp'"),
    ],
)
def test_settings_that_cannot_be_honoured(settings, error, message):
    with pytest.raises(error, match=message):
        group_sharded_parallel(*made(), **settings)
    assert layout.active.layout is None


def test_a_pipeline_is_sharded_by_its_own_settings():
    with layout.using(layout.Layout(Plan.from_degrees(pp=2, dp=4))), pytest.raises(ConfigError, match="hybrid_configs"):
        group_sharded_parallel(*made(), "os")


@pytest.mark.slow
def test_the_mesh_of_fleet_is_taken(alone):
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "sharding_degree": 2, "mp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    try:
        groups = fleet.get_hybrid_communicate_group()
        model, optimizer, scaler = group_sharded_parallel(
            *made(split=True),
            "os_g",
            scaler=fleet.distributed_scaler(GradScaler()),
            group=groups.get_sharding_parallel_group(),
            dp_group=groups.get_data_parallel_group(),
        )
        check(train(model, optimizer, scaler), alone[None], None)
        moment = state_of(model, optimizer)["up.weight", "moment1"]
        assert moment.sharding.shard_shape((WIDTH, INNER)) == (WIDTH // 2, INNER // 2)
    finally:
        fleet.reset()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_offloaded_state_is_in_host_memory(alone_by_dtype, dtype):
    model, optimizer, _ = group_sharded_parallel(*made(dtype=dtype), "os_g", offload=True)
    trained = train(model, optimizer, dtype=dtype)
    arrays = state_of(model, optimizer)
    assert len(arrays) == 6 * (2 if dtype is None else 3)
    assert {a.sharding.memory_kind for a in arrays.values()} == {"pinned_host"}
    assert {p._array.sharding.memory_kind for p in model.parameters()} == {"device"}
    check(trained, alone_by_dtype[dtype], dtype)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="parameters that the model has not"):
        group_sharded_parallel(made()[0], made()[1], "os")


@pytest.mark.parametrize(
    ("degrees", "error", "message"),
    [
        ({"dp": 8}, PlacementError, "mesh dp8, without a sharding axis"),
        ({"sharding": 8, "sharding_stage": 3}, ConfigError, "by stage 3 already; use level 'p_g_os'"),
    ],
)
def test_a_plan_in_force_that_contradicts(degrees, error, message):
    model, optimizer = made()
    apply_plan(Plan.from_degrees(**degrees), model)
    with pytest.raises(error, match=message):
        group_sharded_parallel(model, optimizer, "os")
