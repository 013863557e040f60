"""fleet: what init sets up, and that every strategy trains as one device does."""

import numpy as np
import pytest

from polyreme.amp import GradScaler
from polyreme.core import rng
from polyreme.distributed import fleet
from polyreme.distributed.fleet.meta_optimizers import HybridParallelOptimizer
from polyreme.distributed.fleet.meta_parallel import (
    LayerDesc,
    NoPipelineParallel,
    PipelineLayer,
    PipelineParallel,
    SegmentParallel,
    ShardingParallel,
    TensorParallel,
    get_rng_state_tracker,
)
from polyreme.distributed.fleet.wrappers import DataParallelModel
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, PlacementError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.nn import Linear, MSELoss, ReLU, Sequential
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.optimizer import SGD, AdamW

STEPS = 3


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    fleet.reset()


def strategy_of(*, configs=None, **hybrid):
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = hybrid
    for name, value in (configs or {}).items():
        setattr(strategy, name, value)
    return strategy


def train(strategy, optimizer_first=False):
    """Losses and final parameters of a GPT after a few captured steps, with dropout, clipping and decay."""
    rng.seed(3)
    model = GPT(GPTConfig.nano(num_layers=1, dropout=0.1))
    optimizer = AdamW(1e-2, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(1.0))
    net = model
    if strategy is not None:
        fleet.init(is_collective=True, strategy=strategy)
        if optimizer_first:
            optimizer = fleet.distributed_optimizer(optimizer)
            net = fleet.distributed_model(model)
        else:
            net = fleet.distributed_model(model)
            optimizer = fleet.distributed_optimizer(optimizer)

    @to_static
    def step(tokens, labels):
        loss = net(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    rng.seed(11)
    data = np.random.default_rng(0).integers(0, 128, (STEPS, 16, 17))
    losses = [float(step(to_tensor(rows[:, :-1]), to_tensor(rows[:, 1:]))) for rows in data]
    return losses, {n: p.astype("float32").numpy() for n, p in model.named_parameters()}, net, optimizer


@pytest.fixture(scope="module")
def alone():
    return train(None)[:2]


PLANS = {
    "dp2_sharding2_mp2": (
        {"dp_degree": 2, "sharding_degree": 2, "mp_degree": 2, "sharding_configs": {"stage": 2}},
        TensorParallel,
    ),
    "sharding4_mp2_sequence": (
        {
            "sharding_degree": 4, "mp_degree": 2, "sharding_configs": {"stage": 3},
            "mp_configs": {"sequence_parallel": True}, "order": ["mp", "dp", "pp", "sharding", "sep", "cp"],
        },
        TensorParallel,
    ),
    "dp4_sep2": ({"sep_degree": 2}, SegmentParallel),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.slow_cases("dp2_sharding2_mp2", "sharding4_mp2_sequence")
@pytest.mark.parametrize("name", PLANS)
def test_a_strategy_trains_as_one_device_does(alone, name):
    hybrid, wrapper = PLANS[name]
    losses, parameters, net, _ = train(strategy_of(**hybrid))
    assert type(net) is wrapper
    # float32 sums of up to 2048 terms in another order, amplified by Adam's division by a root
    np.testing.assert_allclose(losses, alone[0], rtol=2.0**-23 * np.sqrt(2048) * 64)
    for key, value in alone[1].items():
        np.testing.assert_allclose(parameters[key], value, atol=STEPS * 1e-2 * 0.05, err_msg=key)


@pytest.mark.slow
def test_recompute_gives_the_same_numbers(alone):
    losses, _, net, _ = train(strategy_of(configs={"recompute": True}))
    assert fleet.plan.recompute == "full"
    assert type(net) is DataParallelModel
    np.testing.assert_allclose(losses, alone[0], rtol=2.0**-23 * np.sqrt(2048) * 64)


@pytest.mark.slow
def test_master_weights_are_the_same_in_either_order():
    strategy = strategy_of(
        sharding_degree=2, configs={"amp": True, "amp_configs": {"use_pure_bf16": True, "custom_black_list": ["gelu"]}}
    )
    first = train(strategy)
    fleet.reset()
    second = train(strategy, optimizer_first=True)
    assert first[0] == second[0]
    for key, value in first[1].items():
        np.testing.assert_array_equal(value, second[1][key], err_msg=key)
    model, optimizer = second[2], second[3]
    assert type(model) is ShardingParallel
    assert {str(p.dtype) for p in model.parameters()} == {"bfloat16"}
    masters = [t for n, t in optimizer.state_dict().items() if n.endswith("_master_0")]
    assert len(masters) == len(model.parameters())
    assert {str(t.dtype) for t in masters} == {"float32"}


def test_weights_loaded_between_model_and_optimizer_are_those_that_are_trained():
    fleet.init(strategy=strategy_of(configs={"amp": True, "amp_configs": {"use_pure_bf16": True}}))
    rng.seed(5)
    model = fleet.distributed_model(Linear(2, 2))
    model.set_state_dict({name: np.full(t.shape, 3.0, "float32") for name, t in model.state_dict().items()})
    optimizer = fleet.distributed_optimizer(SGD(0.0, parameters=model.parameters()))
    model(to_tensor(np.ones((8, 2), "float32")).astype("bfloat16")).sum().backward()
    optimizer.step()
    assert {float(t.astype("float32").mean()) for t in model.parameters()} == {3.0}
    assert {float(t.mean()) for n, t in optimizer.state_dict().items() if n.endswith("master_0")} == {3.0}


# gradient merge


def small(merge, *, average=True):
    """A model on 8 devices whose gradients are merged, its optimizer, and the same model and optimizer by hand."""
    strategy = strategy_of(sharding_degree=2, mp_degree=2)
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": merge, "avg": average}
    fleet.init(is_collective=True, strategy=strategy)
    pair = []
    for place in (fleet.distributed_model, lambda model: model):
        rng.seed(5)
        model = Sequential(Linear(4, 8), ReLU(), Linear(8, 2))
        # not Adam, and no clip: both would hide a wrong scale
        optimizer = SGD(0.1, parameters=model.parameters())
        pair.append((place(model), optimizer))
    (placed, merged), by_hand = pair
    return placed, fleet.distributed_optimizer(merged), *by_hand


def batches(number):
    random = np.random.default_rng(7)
    return [(random.normal(size=(8, 4)), random.normal(size=(8, 2))) for _ in range(number)]


def squared_error(model, batch):
    inputs, labels = (to_tensor(part, "float32") for part in batch)
    return ((model(inputs) - labels) ** 2).mean()


def same_parameters(model, other):
    want = {n: p.numpy() for n, p in other.named_parameters()}
    for name, p in model.named_parameters():
        # float32 sums of up to 64 terms in another order, in a few steps
        np.testing.assert_allclose(p.numpy(), want[name.removeprefix("_layers.")], atol=2.0**-23 * 8 * 64, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_merged_gradients_make_one_update(captured, average):
    model, optimizer, twin, plain = small(3, average=average)

    def step(inputs, labels):
        loss = squared_error(model, (inputs, labels))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    run = to_static(step) if captured else step
    for i, batch in enumerate(batches(7)):
        run(*map(to_tensor, batch))
        loss = squared_error(twin, batch)
        (loss / 3 if average else loss).backward()
        if i % 3 == 2:
            plain.step()
            plain.clear_grad()
        same_parameters(model, twin)


def test_a_step_that_overflowed_is_no_part_of_a_merge():
    model, optimizer, twin, plain = small(2)
    scaler = fleet.distributed_scaler(GradScaler(init_loss_scaling=8.0))
    good, more = batches(2)
    for batch in (good, (good[0] * np.inf, good[1]), more):
        scaler.scale(squared_error(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
    for batch in (good, more):
        (squared_error(twin, batch) / 2).backward()
    plain.step()
    same_parameters(model, twin)


def test_a_merge_half_way_is_saved_and_gone_on_with():
    model, optimizer, twin, plain = small(2)
    first, second = batches(2)
    squared_error(model, first).backward()
    optimizer.minimize(squared_error(model, first))
    optimizer.clear_grad()
    saved = {name: np.asarray(value) for name, value in optimizer.state_dict().items()}
    assert int(saved["gradient_merge_count"]) == 1
    optimizer.minimize(squared_error(model, second))  # an update, which is undone
    model.set_state_dict(twin.state_dict())
    optimizer.set_state_dict(saved)
    optimizer.clear_grad()
    optimizer.minimize(squared_error(model, second))
    for batch in (first, second):
        (squared_error(twin, batch) / 2).backward()
    plain.step()
    same_parameters(model, twin)
    with pytest.raises(CheckpointError, match="holds gradients merged over 1 steps, and this optimizer merges none"):
        HybridParallelOptimizer(plain).set_state_dict(saved)
    with pytest.raises(ConfigError, match="apply_gradients passes gradient merge by"):
        optimizer.apply_gradients([])
    with pytest.raises(ConfigError, match="minimize: gradient merge updates all parameters"):
        optimizer.minimize(None, parameters=[])


# what a model must be


def test_before_init_there_is_no_job():
    for ask in (lambda: fleet.plan, lambda: fleet.distributed_model(Linear(2, 2)), fleet.get_hybrid_communicate_group):
        with pytest.raises(ConfigError, match=r"call fleet\.init"):
            ask()


def test_a_second_init_warns_and_changes_nothing():
    fleet.init(is_collective=True, strategy=strategy_of(mp_degree=2))
    with pytest.warns(UserWarning, match=r"fleet.init was called before; the mesh stays dp4 mp2"):
        assert fleet.init(is_collective=True) is fleet.fleet
    assert str(fleet.plan.mesh) == "dp4 mp2"


def test_a_plan_says_the_same_as_a_strategy():
    plan = Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=3, num_microbatches=2)
    fleet.init(is_collective=True, strategy=plan)
    assert fleet.plan is not None
    assert fleet.plan == plan
    assert fleet.fleet.strategy.hybrid_configs["mp_degree"] == 2
    assert fleet.get_hybrid_communicate_group().get_sharding_parallel_world_size() == 2
    fleet.reset()
    with pytest.raises(PlacementError, match="needs 4 devices, 8 given"):
        fleet.init(is_collective=True, strategy=Plan.from_degrees(dp=4))
    with pytest.raises(ConfigError, match=r"compile='blocks', and fleet compiles no steps.*leave compile out"):
        fleet.init(is_collective=True, strategy=Plan.from_degrees(dp=8, compile="blocks"))


def test_a_plan_takes_state_to_disk(tmp_path):
    plan = Plan.from_degrees(dp=8, offload={"state": "disk"}, offload_path=str(tmp_path))
    fleet.init(is_collective=True, strategy=plan)
    net = Linear(2, 2)
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(AdamW(0.1, parameters=net.parameters()))
    before = net.weight.numpy()
    model(to_tensor(np.ones((8, 2), "float32"))).sum().backward()
    optimizer.step()
    assert optimizer.files.nbytes > 0
    assert (net.weight.numpy() != before).all()


def test_init_copies_the_strategy():
    strategy = strategy_of(mp_degree=2)
    fleet.init(is_collective=True, strategy=strategy)
    strategy.hybrid_configs["mp_degree"] = 4
    assert fleet.fleet.strategy.hybrid_configs["mp_degree"] == 2


@pytest.mark.parametrize(
    ("ask", "error", "match"),
    [
        (lambda: fleet.distributed_model(Sequential(Linear(8, 8))), None, None),
        (lambda: fleet.distributed_model(lambda x: x), TypeError, "distributed_model takes a Layer, got function"),
        (lambda: fleet.distributed_optimizer(Linear(2, 2)), TypeError, "takes an Optimizer, got Linear"),
        (lambda: fleet.distributed_scaler(3), TypeError, "takes an amp.GradScaler, got int"),
        (
            lambda: fleet.distributed_model(GPT(GPTConfig.nano(ffn_size=99))),
            PlacementError,
            r"parameter blocks.0.ffn.up.weight: dim 'ffn' of size 99 .* make it 98 or 100, or set mp to 1",
        ),
        (
            lambda: fleet.distributed_optimizer(
                SGD(0.1, parameters=Linear(2, 2).parameters()), strategy_of(mp_degree=4)
            ),
            ConfigError,
            "makes another plan than fleet.init's",
        ),
    ],
)
def test_what_does_not_fit_is_refused(ask, error, match):
    fleet.init(is_collective=True, strategy=strategy_of(mp_degree=2))
    if error is None:
        assert type(ask()) is TensorParallel
    else:
        with pytest.raises(error, match=match):
            ask()


def test_a_pipeline_needs_a_pipeline_layer():
    fleet.init(is_collective=True, strategy=strategy_of(pp_degree=2))
    with pytest.raises(ConfigError, match="pp_degree is 2 and Linear is no PipelineLayer"):
        fleet.distributed_model(Linear(2, 2))


def test_recompute_of_a_model_that_does_not_follow_the_plan_wants_names():
    fleet.init(is_collective=True, strategy=strategy_of(configs={"recompute": True}))
    with pytest.raises(ConfigError, match="Sequential does not say which of its parts to recompute"):
        fleet.distributed_model(Sequential(Linear(4, 4)))
    fleet.reset()
    configs = {"recompute": True, "recompute_configs": {"checkpoints": ["0"]}}
    fleet.init(is_collective=True, strategy=strategy_of(configs=configs))
    calls = []

    class Counted(Linear):
        def forward(self, x):
            calls.append(x.shape)
            return super().forward(x)

    model = fleet.distributed_model(Sequential(Counted(4, 4), Linear(4, 2)))
    squared_error(model, batches(1)[0]).backward()
    assert len(calls) == 2
    with pytest.raises(ConfigError, match="names '0', which is no sublayer of Linear"):
        fleet.distributed_model(Linear(2, 2))


def test_inputs_that_are_no_tensors_pass():
    fleet.init(is_collective=True)

    class Scaled(Linear):
        def forward(self, x, factor, offset=None):
            assert offset is None
            return super().forward(x["in"][0]) * factor

    rng.seed(1)
    model = Scaled(4, 4)
    x = to_tensor(np.ones((8, 4), np.float32))
    want = model({"in": [x]}, 2).numpy()
    placed = fleet.distributed_model(model)
    got = placed({"in": [x]}, 2, offset=None)
    np.testing.assert_allclose(got.numpy(), want, rtol=2.0**-22)
    assert len(got._array.addressable_shards) == 8
    assert got._array.addressable_shards[0].data.shape == (1, 4)
    # 3 rows do not divide over 8 devices
    np.testing.assert_allclose(placed({"in": [x[:3]]}, 2).numpy(), want[:3], rtol=2.0**-22)
    assert list(placed.state_dict()) == ["weight", "bias"]


# train_batch without a pipeline


def pipeline_of_one():
    return PipelineLayer([LayerDesc(Linear, 4, 8), ReLU(), LayerDesc(Linear, 8, 2)], num_stages=1, loss_fn=MSELoss())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hybrid", [{}, {"sharding_degree": 2, "mp_degree": 2}])
def test_a_pipeline_of_one_stage_trains_whole_batches(hybrid):
    strategy = strategy_of(configs={"pipeline_configs": {"accumulate_steps": 2, "micro_batch_size": 1}}, **hybrid)
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(pipeline_of_one())
    assert isinstance(model, NoPipelineParallel)
    optimizer = fleet.distributed_optimizer(SGD(0.1, parameters=model.parameters()))
    twin = pipeline_of_one()
    plain = SGD(0.1, parameters=twin.parameters())
    rows = 2 * fleet.plan.batch_ways
    random = np.random.default_rng(3)
    for _ in range(2):
        inputs = random.normal(size=(rows, 4)).astype(np.float32)
        labels = random.normal(size=(rows, 2)).astype(np.float32)
        loss = model.train_batch([to_tensor(inputs), to_tensor(labels)], optimizer)
        want = MSELoss()(twin(to_tensor(inputs)), to_tensor(labels))
        want.backward()
        plain.step()
        plain.clear_grad()
        np.testing.assert_allclose(float(loss), float(want), rtol=2.0**-23 * 64)
    same_parameters(model, twin)
    np.testing.assert_allclose(model(to_tensor(inputs)).numpy(), twin(to_tensor(inputs)).numpy(), atol=2.0**-23 * 64)


@pytest.mark.slow
def test_a_pipeline_trains_as_one_device_does_with_its_gradients_merged():
    configs = {
        "pipeline_configs": {"accumulate_steps": 2},
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 2},
    }
    fleet.init(is_collective=True, strategy=strategy_of(pp_degree=2, sharding_degree=2, configs=configs))
    layers = [LayerDesc(Linear, 4, 8), ReLU(), LayerDesc(Linear, 8, 2)]
    model = fleet.distributed_model(PipelineLayer(layers, num_stages=2, loss_fn=MSELoss()))
    assert type(model) is PipelineParallel
    clip = ClipGradByGlobalNorm(0.5)
    optimizer = fleet.distributed_optimizer(AdamW(0.1, parameters=model.parameters(), grad_clip=clip))
    twin = pipeline_of_one()
    plain = AdamW(0.1, parameters=twin.parameters(), grad_clip=ClipGradByGlobalNorm(0.5))
    random = np.random.default_rng(4)
    for i in range(4):
        inputs, labels = (to_tensor(random.normal(size=(8, n)).astype(np.float32)) for n in (4, 2))
        loss = model.train_batch([inputs, labels], optimizer)
        want = MSELoss()(twin(inputs), labels)
        (want / 2).backward()
        if i % 2:
            plain.step()
            plain.clear_grad()
        np.testing.assert_allclose(float(loss), float(want), rtol=2.0**-23 * 64)
        same_parameters(model, twin)


# amp


def test_amp_runs_the_model_and_scales_as_the_strategy_says():
    amp = {"init_loss_scaling": 128.0, "incr_every_n_steps": 7, "custom_black_list": ["linear", "matmul"]}
    fleet.init(is_collective=True, strategy=strategy_of(configs={"amp": True}))
    x = to_tensor(np.ones((8, 4), np.float32))
    assert str(fleet.distributed_model(Linear(4, 4))(x).dtype) == "float16"
    fleet.reset()
    fleet.init(is_collective=True, strategy=strategy_of(configs={"amp": True, "amp_configs": amp}))
    assert str(fleet.distributed_model(Linear(4, 4))(x).dtype) == "float32"
    scaler = fleet.distributed_scaler()
    assert (float(scaler.get_loss_scaling()), scaler.get_incr_every_n_steps()) == (128.0, 7)
    assert scaler.get_decr_ratio() == pytest.approx(0.8)


def test_without_amp_nothing_is_scaled():
    fleet.init(is_collective=True)
    assert not fleet.distributed_scaler().is_enable()
    scaler = GradScaler()
    assert fleet.distributed_scaler(scaler) is scaler


def test_train_batch_scales_with_the_strategys_scaler():
    configs = {"amp": True, "amp_configs": {"init_loss_scaling": 2.0**30, "decr_every_n_nan_or_inf": 1}}
    fleet.init(is_collective=True, strategy=strategy_of(configs=configs))
    model = fleet.distributed_model(pipeline_of_one())
    optimizer = fleet.distributed_optimizer(SGD(0.1, parameters=model.parameters()))
    before = {n: p.numpy() for n, p in model.named_parameters()}
    x = to_tensor(np.ones((8, 4), np.float32))
    model.train_batch([x, to_tensor(np.full((8, 2), 9.0, np.float32))], optimizer)
    # gradients times 2^30 are beyond float16: the step is left out
    for name, p in model.named_parameters():
        np.testing.assert_array_equal(p.numpy(), before[name], err_msg=name)


# random numbers


def test_init_starts_the_stream_of_dropout_and_leaves_the_others():
    numbers = []
    for degree in (1, 2):
        rng.seed(21)
        fleet.init(is_collective=True, strategy=strategy_of(mp_degree=degree))
        with get_rng_state_tracker().rng_state():
            numbers.append(rng.default_generator.random())
        numbers.append(rng.default_generator.random())
        fleet.reset()
    rng.seed(21)
    assert numbers == numbers[:2] * 2
    assert numbers[1] == rng.default_generator.random()
    assert numbers[0] != numbers[1]


def test_tensor_init_seed_seeds_everything():
    strategy = strategy_of(configs={"tensor_parallel_configs": {"tensor_init_seed": 5}})
    fleet.init(is_collective=True, strategy=strategy)
    found = rng.default_generator.random()
    rng.seed(5)
    assert rng.default_generator.random() == found


# workers


def test_one_process_is_one_worker_whatever_its_devices():
    fleet.init(is_collective=True)
    assert (fleet.rank(), fleet.worker_index(), fleet.nranks(), fleet.worker_num(), fleet.world_size()) == (
        0,
        0,
        1,
        1,
        1,
    )
    assert (fleet.is_first_worker(), fleet.is_worker(), fleet.is_server(), fleet.node_num()) == (True, True, False, 1)
    assert (fleet.server_num(), fleet.server_index(), fleet.server_endpoints(), fleet.worker_endpoints()) == (
        0,
        0,
        [],
        [],
    )
    fleet.init_worker()
    fleet.barrier_worker()
    fleet.stop_worker()
    assert fleet.fleet.get_hybrid_parallel_topology().world_size() == 8


def test_endpoints_are_the_launchers(monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "10.0.0.1:80,10.0.0.1:81,10.0.0.2:80")
    assert fleet.worker_endpoints() == ["10.0.0.1:80", "10.0.0.1:81", "10.0.0.2:80"]
    assert fleet.worker_endpoints(to_string=True) == "10.0.0.1:80,10.0.0.1:81,10.0.0.2:80"
    assert fleet.node_num() == 2


@pytest.mark.parametrize("name", ["init_server", "run_server", "shrink", "save_persistables", "save_inference_model"])
def test_servers_and_static_programs_are_refused(name):
    with pytest.raises(ConfigError, match=f"fleet.{name}: (there is no parameter server|belongs to static programs)"):
        getattr(fleet, name)()


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"TRAINING_ROLE": "PSERVER"}, "parameter-server job"),
        ({"PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:80"}, "parameter-server job"),
        ({"TRAINING_ROLE": "TRAINR"}, "TRAINING_ROLE='TRAINR' in the environment; did you mean 'TRAINER'"),
    ],
)
def test_a_parameter_server_environment_is_refused(monkeypatch, variables, match):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=match):
        fleet.init()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"log_level": "LOUD"}, ConfigError, "log_level='LOUD'; give DEBUG"),
        ({"log_level": None}, ConfigError, "log_level=None"),
        ({"strategy": {"dp_degree": 8}}, TypeError, "a DistributedStrategy or a Plan, got dict"),
        ({"role_maker": "worker"}, TypeError, "role_maker is a PaddleCloudRoleMaker"),
        (
            {"role_maker": fleet.UserDefinedRoleMaker(current_id=1, worker_num=4)},
            ConfigError,
            "the role says worker 1 of 4, this process is 0 of 1",
        ),
        ({"role_maker": fleet.UserDefinedRoleMaker(role=fleet.Role.SERVER)}, ConfigError, "parameter-server job"),
    ],
)
def test_init_checks_what_it_is_given(arguments, error, match):
    with pytest.raises(error, match=match):
        fleet.init(is_collective=True, **arguments)
    with pytest.raises(ConfigError, match=r"call fleet\.init"):
        _ = fleet.plan


def test_a_role_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="current_id=3 is not one of 2 workers"):
        fleet.UserDefinedRoleMaker(current_id=3, worker_endpoints=["a:1", "b:1"])
    for call in (lambda: fleet.UserDefinedRoleMaker(init_gloo=True), lambda: fleet.PaddleCloudRoleMaker(path="store")):
        with pytest.raises(ConfigError, match="init_gloo and path start a rendezvous of their own"):
            call()


# util; the shards are those of PaddlePaddle 3.3.1

SHARDS = {(0, 1): "abcdefg", (0, 2): "abcd", (1, 2): "efg", (0, 3): "abc", (1, 3): "de", (2, 3): "fg"}


@pytest.mark.parametrize(("index", "number"), SHARDS)
def test_files_are_shared_out_as_elsewhere(index, number, capsys):
    util = fleet.UtilBase(fleet.UserDefinedRoleMaker(current_id=index, worker_num=number))
    assert util.get_file_shard(list("abcdefg")) == list(SHARDS[index, number])
    assert util.get_file_shard(["a"]) == (["a"] if index == 0 else [])
    util.print_on_rank("here", 0)
    assert capsys.readouterr().out == ("here\n" if index == 0 else "")
    with pytest.raises(TypeError, match="takes a list of file names, got str"):
        util.get_file_shard("abc")


def test_util_joins_values_of_the_workers():
    fleet.init(is_collective=True)
    assert fleet.util.all_reduce(3) == 3
    np.testing.assert_array_equal(fleet.util.all_reduce([1.0, 2.0], "max"), [1.0, 2.0])
    assert fleet.util.all_gather(3, "all") == [3]
    fleet.util.barrier()
    with pytest.raises(ConfigError, match="mode='avg'; the choices are sum, min, max"):
        fleet.util.all_reduce(3, "avg")
    with pytest.raises(ConfigError, match="comm_world='server'; there are workers only"):
        fleet.util.barrier("server")
