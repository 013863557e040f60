"""PipelineParallel as the tutorials use it: batches, losses, scalers, schedules and updates, against one device."""

import functools
import gc

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.amp import GradScaler
from polyreme.core import rng
from polyreme.distributed import fleet
from polyreme.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, PipelineParallel, SharedLayerDesc
from polyreme.distributed.pipeline import run
from polyreme.distributed.pipeline.update import frozen_settings
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.optimizer import SGD, AdamW
from polyreme.optimizer.lr import StepDecay
from polyreme.regularizer import L2Decay

VOCAB, WIDTH, PARTS, ROWS = 16, 8, 4, 8
DATA = np.random.default_rng(0).integers(0, VOCAB, (4, PARTS * ROWS, 7))
# float32 sums of at most 32 x 6 x 16 terms in another order, in numbers of at most 8; a few steps of them
CLOSE = {"rtol": 8 * 2.0**-23 * 55, "atol": 8 * 2.0**-23 * 55}


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    fleet.reset()


class Block(nn.Layer):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(nn.functional.gelu(self.linear(self.norm(x))))


def logits(embedding, x):
    return paddle.matmul(x, embedding.weight, transpose_y=True)


def loss_of(out, labels):
    return 64 * nn.functional.cross_entropy(out.reshape([-1, VOCAB]), labels.reshape([-1]))


def pipeline(stages=1, dropout=0.0, loss_fn=loss_of, blocks=4, **options):
    ends = [SharedLayerDesc("embedding", nn.Embedding, f, "weight", VOCAB, WIDTH) for f in (None, logits)]
    described = [ends[0], *[LayerDesc(Block, dropout) for _ in range(blocks)], ends[1]]
    return PipelineLayer(described, num_stages=stages, loss_fn=loss_fn, **options)


def init(schedule="1F1B", configs=None, **hybrid):
    """fleet over all devices, for batches of PARTS microbatches of ROWS rows."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{name}_degree": n for name, n in hybrid.items() if name != "stage"}
    if "stage" in hybrid:
        strategy.hybrid_configs = {"sharding_configs": {"stage": hybrid["stage"]}}
    ways = 8 // hybrid.get("pp", 1) // hybrid.get("mp", 1)
    strategy.pipeline_configs = {
        "accumulate_steps": PARTS, "micro_batch_size": ROWS // ways, "schedule_mode": schedule
    }  # fmt: skip
    for name, value in (configs or {}).items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy)


def adamw(parameters, rate=0.05, **options):
    clip = ClipGradByGlobalNorm(0.5)
    return AdamW(rate, parameters=parameters, weight_decay=0.1, grad_clip=clip, **options)


def scaler(scale):
    return GradScaler(init_loss_scaling=scale, decr_every_n_nan_or_inf=1, decr_ratio=2.0**-20, incr_every_n_steps=2)


def halves(rows):
    return paddle.to_tensor(rows[:, :-1]), paddle.to_tensor(rows[:, 1:])


def on_one_device(scale=None):
    """Losses, parameters and scaler of a plain loop over DATA."""
    net = pipeline()
    schedule = StepDecay(0.05, 2, 0.5)
    optimizer, grad_scaler = adamw(net.parameters(), schedule), scaler(scale or 1.0)
    losses = []
    for rows in DATA:
        x, y = halves(rows)
        loss = loss_of(net(x), y)
        if scale is None:
            loss.backward()
            optimizer.step()
        else:
            grad_scaler.scale(loss).backward()
            grad_scaler.step(optimizer)
            grad_scaler.update()
        optimizer.clear_grad()
        schedule.step()
        losses.append(float(loss))
    return losses, named(net), grad_scaler


def named(model):
    return {name: p.astype("float32").numpy() for name, p in model.named_parameters()}


def same(model, want):
    found = named(model)
    assert found.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **CLOSE)


# 64 x 2^127 / PARTS is beyond float32, so the first step is left out; later ones are 2^20 times below that
SCALE = 2.0**127


@pytest.fixture(scope="module")
def alone():
    """alone(scale): what on_one_device gives, when first asked for."""
    return functools.cache(on_one_device)


@pytest.mark.slow_cases("1F1B-recompute", "V-scaler", "VPP-sharding")
@pytest.mark.parametrize(
    ("strategy", "options", "scale"),
    [
        ({"pp": 2, "dp": 2, "mp": 2}, {"seg_method": "parameters", "recompute_interval": 1}, None),
        (
            {"pp": 2, "sharding": 4, "stage": 2, "schedule": "VPP"},
            {"seg_method": "layer:Block", "num_virtual_pipeline_stages": 2},
            None,
        ),
        ({"pp": 2, "dp": 4}, {"use_dualpipev": True}, SCALE),
    ],
    ids=["1F1B-recompute", "VPP-sharding", "V-scaler"],
)
def test_trains_as_one_device_does(alone, strategy, options, scale):
    losses, want, oracle = alone(scale)
    if options.get("use_dualpipev"):
        strategy = {**strategy, "schedule": "ZBVPP"}
    init(**strategy)
    model = fleet.distributed_model(pipeline(2, **options))
    schedule = StepDecay(0.05, 2, 0.5)
    optimizer = fleet.distributed_optimizer(adamw(model.parameters(), schedule))
    grad_scaler = None if scale is None else fleet.distributed_scaler(scaler(scale))
    for rows, expected in zip(DATA, losses, strict=True):
        loss = model.train_batch(halves(rows), optimizer, lr_scheduler=schedule, scaler=grad_scaler)
        np.testing.assert_allclose(float(loss), expected, **CLOSE)
    assert optimizer.get_lr() == 0.05 * 0.25
    same(model._layers, want)
    if scale is not None:
        assert grad_scaler.state_dict() == oracle.state_dict()
        assert float(grad_scaler.get_loss_scaling()) < scale


@pytest.mark.slow
def test_bfloat16_weights_have_masters_on_their_stage():
    configs = {"amp": True, "amp_configs": {"use_pure_bf16": True}}
    results = []
    for degrees in ({}, {"pp": 2, "sharding": 2}):
        init(configs=configs, **degrees)
        model = fleet.distributed_model(pipeline(degrees.get("pp", 1), blocks=2))
        optimizer = fleet.distributed_optimizer(adamw(model.parameters()))
        losses = [float(model.train_batch(halves(rows), optimizer)) for rows in DATA[:3]]
        masters = {n: optimizer.state_dict()[f"{p.name}_master_0"].numpy() for n, p in model.named_parameters()}
        assert {str(p.dtype) for p in model.parameters()} == {"bfloat16"}
        results.append((losses, masters))
        fleet.reset()
    (want, want_masters), (found, masters) = results
    # rounding of activations to 8 bits, in other sums; Adam moves a weight by at most the rate, 0.05, a step
    np.testing.assert_allclose(found, want, rtol=2.0**-8)
    for name, value in want_masters.items():
        assert masters[name].dtype == np.float32
        assert np.mean(np.abs(masters[name] - value)) < 0.05 / 8, name


@pytest.mark.slow
def test_evaluation_between_steps_changes_nothing_and_compiles_nothing_twice():
    def train(evaluates):
        init(pp=2)
        rng.seed(3)
        model = fleet.distributed_model(pipeline(2, dropout=0.3, blocks=1))
        optimizer = fleet.distributed_optimizer(adamw(model.parameters()))
        losses = []
        for rows in DATA[:3]:
            losses.append(float(model.train_batch(halves(rows), optimizer)))
            if evaluates:
                mean = model.eval_batch(halves(rows), compute_loss=True)
                assert model._layers.training
                outs = model.eval_batch(halves(rows))
                assert [out.shape for out in outs] == [[ROWS, 6, VOCAB]] * PARTS
                ours = loss_of(paddle.concat([paddle.to_tensor(o.numpy()) for o in outs]), halves(rows)[1])
                np.testing.assert_allclose(float(mean), float(ours), **CLOSE)
        programs = [len(made) for c in model._pipeline._first for made in c._split_programs.values()]
        fleet.reset()
        return losses, programs

    losses, programs = train(evaluates=True)
    assert losses == train(evaluates=False)[0]
    assert programs == [1, 1]  # forward with backward, and alone


def test_a_batch_may_come_as_an_iterator_lists_or_microbatches():
    init(pp=2)
    model = fleet.distributed_model(pipeline(2, blocks=2))
    x, y = halves(DATA[0])
    parts = [(x[i : i + ROWS], y[i : i + ROWS]) for i in range(0, PARTS * ROWS, ROWS)]
    forms = [(x, y), iter(parts), [list(each) for each in zip(*parts, strict=True)], [x.numpy(), y.numpy()]]
    losses = [float(model.forward_backward_pipeline(form)) for form in forms]
    assert losses == losses[:1] * 4
    text = model.forward_backward_pipeline(None, static_scheduler=True)
    assert text == "f0;f1;b0;f2;b1;f3;b2;b3;"


def test_several_losses_are_returned_and_one_is_trained():
    def square(out, labels):
        return (out**2).mean()

    init(pp=2)
    model = fleet.distributed_model(pipeline(2, blocks=2, loss_fn=[loss_of, square]))
    net = pipeline(blocks=2)
    optimizer = fleet.distributed_optimizer(SGD(0.1, parameters=model.parameters()))
    plain = SGD(0.1, parameters=net.parameters())
    for i, rows in enumerate(DATA[:2]):
        x, y = halves(rows)
        want = [fn(net(x), y) for fn in (loss_of, square)]
        want[1].backward()
        plain.step()
        plain.clear_grad()
        evaluated = model.eval_batch((x, y), compute_loss=True)
        losses = model.train_batch((x, y), optimizer, loss_fn_idx=1, return_micro_batch_loss=i == 1)
        assert [list(loss.shape) for loss in losses] == [[PARTS] if i == 1 else []] * 2
        np.testing.assert_allclose([float(v) for v in evaluated], [float(v) for v in want], **CLOSE)
        np.testing.assert_allclose([float(v.mean()) for v in losses], [float(v) for v in want], **CLOSE)
    same(model._layers, named(net))


@pytest.mark.slow
def test_a_parameter_may_be_frozen_and_its_rate_changed_between_steps():
    init(pp=2)
    model = fleet.distributed_model(pipeline(2, blocks=2))
    net = pipeline(blocks=2)
    optimizer = fleet.distributed_optimizer(SGD(0.01, parameters=model.parameters()))
    plain = SGD(0.01, parameters=net.parameters())
    for step, rows in enumerate(DATA[:3]):
        for each in (model._layers, net):
            parameters = dict(each.named_parameters())
            parameters["1.linear.weight"].stop_gradient = step == 0
            parameters["2.linear.weight"].optimize_attr["learning_rate"] = 1.0 if step < 2 else 0.0
        x, y = halves(rows)
        loss = loss_of(net(x), y)
        loss.backward()
        plain.step()
        plain.clear_grad()
        np.testing.assert_allclose(float(model.train_batch((x, y), optimizer)), float(loss), **CLOSE)
    same(model._layers, named(net))


def places(tensor):
    return [shard.data.unsafe_buffer_pointer() for shard in tensor._array.addressable_shards]


def size(array):
    """Bytes over all devices; asking for the shards would make arrays of its own."""
    return int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize * len(array.sharding.device_set)


def held():
    """(number, bytes) of all live arrays once everything dispatched has run."""
    gc.collect()
    arrays = jax.live_arrays()
    jax.block_until_ready(arrays)
    del arrays
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(size(a) for a in arrays)


@pytest.mark.slow_cases("1F1B")
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBH1", marks=pytest.mark.slow)])
def test_a_step_updates_in_place_and_leaves_nothing_behind(schedule):
    init(pp=2, schedule=schedule)
    model = fleet.distributed_model(pipeline(2, blocks=2))
    optimizer = fleet.distributed_optimizer(adamw(model.parameters()))
    x, y = (t.numpy() for t in halves(DATA[0]))
    model.train_batch((x, y), optimizer)
    where = [places(p) for p in model.parameters()]
    model.train_batch((x, y), optimizer)
    before = held()
    for _ in range(2):
        model.train_batch((x, y), optimizer)
        assert held() == before
    model.eval_batch((x, y), compute_loss=True)
    assert held()[1] <= before[1] + 1024  # a few numbers: no copy of a tied weight, no activation
    # after the backward alone there are gradients besides, of each parameter one
    model.forward_backward_pipeline((x, y))
    grads = sum(size(p.grad._array) for p in model.parameters())
    assert held()[1] <= before[1] + grads + 1024
    assert [places(p) for p in model.parameters()] == where


@pytest.mark.parametrize(
    "change",
    [
        {"need_clip": False},
        {"stop_gradient": True},
        {"regularizer": L2Decay(0.1)},
        {"optimize_attr": {"learning_rate": 2.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_step_is_made_anew_for_other_settings_of_a_parameter(change):
    weight = nn.Linear(2, 2).weight
    optimizer = SGD(1.0, parameters=[weight])
    before = frozen_settings(optimizer)
    assert frozen_settings(optimizer) == before
    for name, value in change.items():
        setattr(weight, name, value)
    assert frozen_settings(optimizer) != before


@pytest.mark.slow
def test_need_clip_of_one_stage_counts_on_every_stage_from_the_next_step_on():
    init(pp=2)
    layers = PipelineLayer([nn.Linear(4, 4), nn.Linear(4, 4)], 2, loss_fn=nn.MSELoss())
    model = fleet.distributed_model(layers)
    clip = ClipGradByGlobalNorm(2.0**-8)
    optimizer = fleet.distributed_optimizer(SGD(1.0, parameters=layers.parameters(), grad_clip=clip))
    g = np.random.default_rng(2)
    batch = [g.standard_normal((16, 4), np.float32), g.standard_normal((16, 4), np.float32)]
    data = [[batch[0][i : i + 4] for i in range(0, 16, 4)], [batch[1][i : i + 4] for i in range(0, 16, 4)]]
    model.train_batch(data, optimizer)
    layers.parameters()[0].need_clip = False
    before = [p.numpy().astype(np.float64) for p in layers.parameters()]
    model.train_batch(data, optimizer)
    moved = [b - p.numpy() for b, p in zip(before, layers.parameters(), strict=True)]
    # those that are clipped have the norm that was asked for, between them; 48 terms
    norm = np.sqrt(sum((m**2).sum() for m in moved[1:]))
    assert norm == pytest.approx(2.0**-8, rel=2.0**-23 * 48 + 2.0**-23 * 2**8)


def test_wrong_use_is_refused():
    with pytest.raises(TypeError, match="a pipeline needs a PipelineLayer, got Linear"):
        PipelineParallel(nn.Linear(2, 2))
    init(pp=2)
    with pytest.raises(ConfigError, match="has 4 stages, pp_degree is 2"):
        fleet.distributed_model(pipeline(4))
    model = fleet.distributed_model(pipeline(2, blocks=2))
    optimizer = fleet.distributed_optimizer(SGD(0.1, parameters=model.parameters()))
    batch = halves(DATA[0])
    with pytest.raises(TypeError, match="takes the optimizer that distributed_optimizer gave, got NoneType"):
        model.train_batch(batch, None)
    with pytest.raises(TypeError, match=r"takes an amp.GradScaler as its scaler, got float"):
        model.train_batch(batch, optimizer, scaler=2.0)
    with pytest.raises(TypeError, match=r"takes an optimizer.lr scheduler as its lr_scheduler, got float"):
        model.train_batch(batch, optimizer, 0.1)
    with pytest.raises(ConfigError, match="loss_fn_idx='0', the"):
        model.train_batch(batch, optimizer, loss_fn_idx="0")
    with pytest.raises(ConfigError, match="loss_fn_idx=1, the PipelineLayer has 1 loss functions"):
        model.train_batch(batch, optimizer, loss_fn_idx=1)
    with pytest.raises(ShapeError, match="inputs has 31 rows, a batch has 32: 4 microbatches of 8 rows"):
        model.train_batch([t[:31] for t in batch], optimizer)
    with pytest.raises(TypeError, match="call train_batch or eval_batch"):
        model(batch[0])
    fleet.reset()
    init(pp=2)
    with pytest.raises(ConfigError, match="has no loss_fn"):
        fleet.distributed_model(pipeline(2, loss_fn=None)).eval_batch(batch, compute_loss=True)


# a schedule that splits the backward has every kind of task
@pytest.mark.slow_cases("1F1B")
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_during_a_step_nothing_is_alive_but_what_tasks_to_come_need(schedule, monkeypatch):
    init(pp=2, schedule=schedule)
    model = fleet.distributed_model(pipeline(2, blocks=2))
    x, y = (t.numpy() for t in halves(DATA[0]))
    model.forward_backward_pipeline((x, y))
    model._layers.clear_gradients()
    gc.collect()
    outside = {id(a) for a in jax.live_arrays()}
    steps, do = [], run.Run.do

    def checked(self, task):
        do(self, task)
        needed = [a for flow in self._arrived.values() for a in flow.arrays]
        needed += jax.tree.leaves([*self._cotangents.values(), *[tuple(done.saved) for done in self._done.values()]])
        for chunk in self.chunks:
            needed += [*chunk._copies.values(), *chunk.sums]
        known = outside | {id(a) for a in needed}
        # losses, their weights and random keys are numbers of at most 2 elements
        others = [(a.shape, a.dtype) for a in jax.live_arrays() if id(a) not in known and a.size > 2]
        assert others == [], task
        steps.append(task)

    monkeypatch.setattr(run.Run, "do", checked)
    model.forward_backward_pipeline((x, y))
    assert len(steps) == PARTS * 2 * (3 if schedule == "ZBH1" else 2)
