"""Tensor-parallel layers: one device is the oracle, NumPy for the loss, the compiled program for what is exchanged."""

import re

import jax
import numpy as np
import pytest

from polyreme.core import layout, rng
from polyreme.distributed import fleet
from polyreme.distributed.fleet.layers import mpu
from polyreme.distributed.fleet.layers.mpu import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RNGStatesTracker,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_rng_state_tracker,
    model_parallel_random_seed,
)
from polyreme.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.distributed.splitting import split
from polyreme.distributed.tensor_parallel.constraints import constrain_dim
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, PlacementError, ShapeError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.models.parts.vocab import padded_vocab_size
from polyreme.nn import Layer, Linear, MSELoss
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.optimizer import Momentum

EPS = 2.0**-23  # of float32
WIDTH, INNER, VOCAB = 8, 32, 16
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")
PLANS = {
    "mp2_dp4": Plan.from_degrees(dp=4, mp=2),
    "mp4_dp2": Plan.from_degrees(dp=2, mp=4),
    "mp8": Plan.from_degrees(mp=8),
    "zero3_mp2": Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=3),
}


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()
    get_rng_state_tracker().reset()


class SingleCard(Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(WIDTH, INNER), Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Swapped(SingleCard):
    """The same network with the classes swapped."""

    def __init__(self):
        Layer.__init__(self)
        self.up = ColumnParallelLinear(WIDTH, INNER, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True)


def pieces(tensor):
    """Shapes of what the devices hold."""
    return {s.data.shape for s in tensor._array.addressable_shards}


def collectives(fn, *args):
    """[(kind, result type)] of a captured function's program."""
    text = fn.compiled(*args).as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return [(m[2], m[1]) for m in re.finditer(rf"= (.*?) ({kinds})(?:-start)?\(", text)]


def train(cls, plan=None, captured=True, late=False):
    """(losses, the first step's gradients, parameters) of three steps. late: the model is built under the plan."""
    rng.seed(3)
    model = None if late else cls()
    placed = None if plan is None else apply_plan(plan, model or Layer())
    model = model or cls()
    optimizer = Momentum(0.1, parameters=model.parameters())
    first = {}

    def step(x):
        loss = (model(x) ** 2).mean()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.clear_grad()
        return loss, grads

    step = to_static(step) if captured else step
    losses = []
    for t in range(3):
        x = X * (t + 1)
        loss, grads = step(to_tensor(x) if placed is None else shard_batch(placed, x, "batch", None))
        losses.append(float(loss))
        first = first or {n: g.numpy() for (n, _), g in zip(model.named_parameters(), grads, strict=True)}
    return losses, first, {n: p.numpy() for n, p in model.named_parameters()}, model


@pytest.fixture(scope="module")
def alone():
    return train(SingleCard)[:3]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("plan", "captured", "late"),
    [(None, True, False), *((name, True, False) for name in PLANS), ("mp4_dp2", False, False), ("mp2_dp4", True, True)],
)
def test_a_single_card_network_with_its_classes_swapped_trains_the_same(alone, plan, captured, late):
    losses, grads, parameters, model = train(Swapped, PLANS.get(plan), captured, late)
    # sums of up to WIDTH x 8 terms of size below 1 in another order, through three steps
    np.testing.assert_allclose(losses, alone[0], rtol=64 * EPS * 3)
    for name, want in alone[1].items():
        np.testing.assert_allclose(grads[name], want, atol=64 * EPS * np.abs(want).max(), err_msg=name)
    for name, want in alone[2].items():
        np.testing.assert_allclose(parameters[name], want, atol=3 * 64 * EPS, err_msg=name)
        assert parameters[name].shape == want.shape
    mp = 1 if plan is None else PLANS[plan].mesh.mp
    sharding = 1 if plan is None else PLANS[plan].mesh.sharding
    assert pieces(model.up.weight) == {(WIDTH // sharding, INNER // mp)}
    assert pieces(model.down.weight) == {(INNER // mp, WIDTH // sharding)}
    assert pieces(model.up.bias) == {(INNER // mp // sharding,)}


def test_what_a_layer_says_of_its_parameters():
    column, row = ColumnParallelLinear(4, 8), RowParallelLinear(8, 4, has_bias=False)
    assert column.bias is None
    assert row.bias is None
    assert [p.split_axis for p in (column.weight, row.weight)] == [1, 0]
    column, row = ColumnParallelLinear(4, 8, has_bias=True), RowParallelLinear(8, 4)
    assert (column.bias.is_distributed, row.bias.is_distributed) == (True, False)
    assert not np.any(column.bias.numpy())
    table = VocabParallelEmbedding(VOCAB, WIDTH).weight
    assert (table.is_distributed, table.split_axis) == (True, 0)
    assert "gather_output=True" in repr(column)
    assert "input_is_parallel=False" in repr(row)
    assert "ignore_index=-1" in repr(ParallelCrossEntropy(ignore_index=-1))


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_where_outputs_lie(is_parallel, captured):
    column = ColumnParallelLinear(WIDTH, INNER, has_bias=True, gather_output=not is_parallel)
    row = RowParallelLinear(INNER, WIDTH, input_is_parallel=is_parallel)
    model = Layer()
    model.column, model.row = column, row
    placed = apply_plan(PLANS["mp4_dp2"], model)
    wide, out = (to_static(f) if captured else f for f in (column.forward, lambda x: row(column(x))))
    x = shard_batch(placed, np.stack([X, X], 1), "batch", None, None)
    assert pieces(wide(x)) == {(4, 2, INNER // 4 if is_parallel else INNER)}
    result = out(x)
    assert pieces(result) == {(4, 2, WIDTH)}
    weights = [p.numpy().astype("float64") for p in (column.weight, column.bias, row.weight, row.bias)]
    want = (X @ weights[0] + weights[1]) @ weights[2] + weights[3]
    # two products of up to INNER terms; entries below 8
    np.testing.assert_allclose(result.numpy()[:, 1], want, atol=2 * INNER * EPS * 8)


def test_a_block_sums_once_each_way():
    model = Swapped()
    placed = apply_plan(PLANS["mp8"], model)
    x = shard_batch(placed, X, "batch", None)

    @to_static
    def both_ways(x):
        x.stop_gradient = False
        y = model(x)
        (y * y).sum().backward()  # so that one sum waits for the other
        return y, x.grad

    found = collectives(both_ways, x)
    # arXiv:1909.08053, figure 3: g in the forward pass, f in the backward pass
    assert [kind for kind, _ in found] == ["all-reduce"] * 2
    assert [shape.split("{")[0] for _, shape in found] == [f"f32[8,{WIDTH}]"] * 2


def lookup():
    table = VocabParallelEmbedding(VOCAB, WIDTH)
    table.weight.set_value(np.random.default_rng(1).normal(size=(VOCAB, WIDTH)).astype("float32"))
    return table


def test_an_embedding_is_looked_up_where_its_rows_are():
    table = lookup()
    placed = apply_plan(PLANS["mp4_dp2"], table)
    ids = np.random.default_rng(2).integers(0, VOCAB, (8, 3))
    x = shard_batch(placed, ids, "batch", None)

    @to_static
    def both_ways(ids, weight_of):
        y = table(ids)
        (y * weight_of).sum().backward()
        return y, table.weight.grad

    scale = np.random.default_rng(3).normal(size=(8, 3, WIDTH)).astype("float32")
    y, grad = both_ways(x, shard_batch(placed, scale, "batch", None, None))
    np.testing.assert_array_equal(y.numpy(), table.weight.numpy()[ids])
    want = np.zeros((VOCAB, WIDTH))
    np.add.at(want, ids, scale)
    # a row is used by at most 24 ids, each with a scale below 4
    np.testing.assert_allclose(grad.numpy(), want, atol=24 * 4 * EPS)
    assert pieces(table.weight) == {(VOCAB // 4, WIDTH)}
    # the rows found are summed over mp, the table's gradient over dp; nothing is gathered
    shapes = [s.split("{")[0] for _, s in collectives(both_ways, x, y)]
    assert {k for k, _ in collectives(both_ways, x, y)} == {"all-reduce"}
    assert sorted(shapes) == [f"f32[4,3,{WIDTH}]", f"f32[{VOCAB // 4},{WIDTH}]"]


def log_sum_exp_loss(logits, label):
    wide = logits.astype("float64")
    top = wide.max(-1, keepdims=True)
    norm = top[..., 0] + np.log(np.exp(wide - top).sum(-1))
    return norm - np.take_along_axis(wide, label[..., None], -1)[..., 0]


@pytest.mark.parametrize("plan", [None, "mp4_dp2"])
def test_cross_entropy_over_split_classes(plan):
    placed = None if plan is None else apply_plan(PLANS[plan], Layer())
    logits = 4 * np.random.default_rng(4).normal(size=(8, 3, VOCAB)).astype("float32")
    label = np.random.default_rng(5).integers(0, VOCAB, (8, 3))
    label[0, 0] = 7
    loss_of = ParallelCrossEntropy(ignore_index=7)

    @to_static
    def both_ways(logits, label):
        logits.stop_gradient = False
        loss = loss_of(logits, label)
        loss.mean().backward()
        return loss, logits.grad

    arguments = (to_tensor(logits), to_tensor(label))
    if placed is not None:
        arguments = (shard_batch(placed, logits, "batch", None, "vocab"), shard_batch(placed, label, "batch", None))
    loss, grad = both_ways(*arguments)
    live = (label != 7)[..., None]
    want = np.where(live, log_sum_exp_loss(logits, label)[..., None], 0)
    assert loss.shape == [8, 3, 1]
    # a sum of VOCAB exponentials and two subtractions of numbers below 32
    np.testing.assert_allclose(loss.numpy(), want, atol=32 * 4 * EPS)
    soft = np.exp(logits - logits.max(-1, keepdims=True))
    soft = soft / soft.sum(-1, keepdims=True) - np.eye(VOCAB)[label]
    np.testing.assert_allclose(grad.numpy(), np.where(live, soft, 0) / 24, atol=VOCAB * EPS)
    if placed is not None:
        assert pieces(grad) == {(4, 3, VOCAB // 4)}
        found = collectives(both_ways, *arguments)
        assert {kind for kind, _ in found} == {"all-reduce"}
        # one number an element at most (maximum, sum, the label's logit), never one a class
        assert max(np.prod([int(n) for n in re.findall(r"\d+", s.split("[")[1].split("]")[0])]) for _, s in found) == 12


def test_cross_entropy_takes_labels_with_a_class_dim_and_refuses_ones_out_of_range():
    logits, loss_of = to_tensor(np.zeros((2, 4), "float32")), ParallelCrossEntropy()
    flat, column = loss_of(logits, to_tensor([1, -100])), loss_of(logits, to_tensor([[1], [-100]]))
    np.testing.assert_array_equal(flat.numpy(), column.numpy())
    np.testing.assert_allclose(flat.numpy(), [[np.log(4)], [0]], rtol=2 * EPS)
    with pytest.raises(IndexError, match="4"):
        loss_of(logits, to_tensor([1, 4]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColumnParallelLinear(4, 10), r"weight: dim 'inner' of size 10.*8 or 12.*set mp to 5"),
        (lambda: RowParallelLinear(10, 4), r"weight: dim 'inner' of size 10.*8 or 12"),
        (lambda: VocabParallelEmbedding(10, 4), r"weight: dim 'vocab' of size 10.*8 or 12"),
    ],
)
def test_a_size_that_mp_does_not_divide_is_refused(make, message):
    plan = Plan.from_degrees(dp=2, mp=4)
    with pytest.raises(PlacementError, match=message):
        apply_plan(plan, make())
    apply_plan(plan, Layer())
    with pytest.raises(PlacementError, match=message):
        make()


def test_padded_vocab_size():
    assert [padded_vocab_size(n) for n in (1, 128, 129, 50257)] == [128, 128, 256, 50304]
    assert padded_vocab_size(10, multiple=4) == 12
    with pytest.raises(ConfigError, match=r"padded_vocab_size\(0, 128\)"):
        padded_vocab_size(0)


def test_only_a_group_of_the_mp_axis_is_taken():
    fleet.init(is_collective=True, strategy=PLANS["mp4_dp2"])
    try:
        groups = fleet.get_hybrid_communicate_group()
        for make in (
            lambda group: ColumnParallelLinear(4, 8, mp_group=group),
            lambda group: RowParallelLinear(4, 8, mp_group=group),
            lambda group: VocabParallelEmbedding(4, 8, mp_group=group),
            lambda group: ParallelCrossEntropy(mp_group=group),
        ):
            make(groups.get_model_parallel_group())
            with pytest.raises(PlacementError, match="mesh axis 'mp'"):
                make(groups.get_data_parallel_group())
    finally:
        fleet.reset()


def test_split_makes_parallel_layers():
    x = to_tensor(X)
    ones = Constant(0.5)
    column = split(x, (WIDTH, INNER), "linear", axis=1, weight_attr=ones, bias_attr=Constant(2.0))
    # a sum of WIDTH terms below 4
    np.testing.assert_allclose(column.numpy(), np.tile(X.sum(1, keepdims=True) / 2 + 2, INNER), atol=WIDTH * 4 * EPS)
    apply_plan(PLANS["mp4_dp2"], Layer())
    row = split(x, (WIDTH, 4), "linear", axis=0, num_partitions=4, weight_attr=ones, bias_attr=False)
    np.testing.assert_allclose(row.numpy(), np.tile(X.sum(1, keepdims=True) / 2, 4), atol=WIDTH * 4 * EPS)
    parted = split(x, (WIDTH, INNER), "linear", axis=1, num_partitions=4, gather_out=False)
    assert pieces(parted) == {(8, INNER // 4)}
    rows = split(to_tensor([[1, 2]]), (VOCAB, WIDTH), "embedding", num_partitions=4, weight_attr=ones)
    np.testing.assert_array_equal(rows.numpy(), np.full((1, 2, WIDTH), 0.5, "float32"))
    with pytest.raises(ConfigError, match=r"num_partitions=2.*mp=4"):
        split(x, (WIDTH, 4), "linear", num_partitions=2)
    with pytest.raises(ConfigError, match=r"operation='embedding', axis=1"):
        split(x, (WIDTH, 4), "embedding", axis=1, num_partitions=4)
    with pytest.raises(ShapeError, match="two sizes"):
        split(x, (WIDTH,), "linear", num_partitions=4)


# random streams


def draws(plan, captured):
    """Masks of three dropouts: from a stream, from the default generator, from the stream again."""
    model_parallel_random_seed(5)
    if plan is not None:
        apply_plan(PLANS[plan], Layer())

    def three(x):
        return [mpu.dropout(x, 0.5, rng_name=name) for name in ("model_parallel_rng", None, "model_parallel_rng")]

    three = to_static(three) if captured else three
    ones = to_tensor(np.ones((8, 8), "float32"))
    masks = [m.numpy() for _ in range(2) for m in three(ones)]
    clear_plan()
    return masks, get_rng_state_tracker().get_states_tracker()["model_parallel_rng"]


def test_streams_give_the_same_numbers_on_every_mesh_eager_or_captured():
    masks, state = draws(None, captured=False)
    assert len({m.tobytes() for m in masks}) == 6
    for plan, captured in ((None, True), ("mp4_dp2", False), ("mp8", True), (None, False)):
        again, end = draws(plan, captured)
        for a, b in zip(masks, again, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(state, end)


class Dropped(Layer):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, INNER, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True)

    def forward(self, x):
        y = mpu.dropout(self.down(F.gelu(self.up(x))), 0.25, rng_name="model_parallel_rng")
        return mpu.dropout(x + y, 0.1)


def piped(stages, **degrees):
    """Losses of batches trained over pipeline stages."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {**degrees, "pp_degree": stages}
    rows = 8 // degrees["dp_degree"]
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": rows // 4}
    fleet.init(is_collective=True, strategy=strategy)
    try:
        model_parallel_random_seed(5)
        model = PipelineLayer([LayerDesc(Dropped) for _ in range(4)], num_stages=stages, loss_fn=MSELoss())
        model = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(Momentum(0.01, parameters=model.parameters()))
        return [float(model.train_batch([to_tensor(X), to_tensor(X)], optimizer)) for _ in range(3)]
    finally:
        fleet.reset()


@pytest.mark.slow
def test_streams_over_pipeline_stages():
    # a whole dropout mask that moves between streams or microbatches changes the loss by percents
    want = piped(1, dp_degree=2, mp_degree=4)
    found = piped(4, dp_degree=1, mp_degree=2)
    # three steps; sums of WIDTH x 8 terms in another order
    np.testing.assert_allclose(found, want, rtol=64 * EPS * 3)
    assert want[2] < 0.9 * want[0]


def test_a_stream_outlives_the_plan_it_was_used_under():
    def step(x):
        return mpu.dropout(x, 0.5, rng_name="model_parallel_rng")

    model_parallel_random_seed(5)
    want = [step(to_tensor(X)).numpy() for _ in range(3)]
    model_parallel_random_seed(5)
    on_eight = apply_plan(PLANS["mp8"], Layer())
    outputs = [to_static(step)(shard_batch(on_eight, X, None, None))]
    on_four = apply_plan(Plan.from_degrees(mp=4), Layer(), jax.devices()[:4])
    outputs.append(step(shard_batch(on_four, X, None, None)))
    clear_plan()
    outputs.append(step(to_tensor(X)))
    assert len(outputs[2]._array.addressable_shards) == 1
    for a, b in zip(want, outputs, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_a_stream_leaves_the_default_generator_where_it_was():
    tracker = RNGStatesTracker()
    tracker.add("a", 1)
    rng.seed(9)
    before = rng.default_generator.get_state()
    with tracker.rng_state("a"):
        inside = rng.default_generator.random()
    np.testing.assert_array_equal(rng.default_generator.get_state(), before)
    assert inside == rng.Generator().manual_seed(1).random()
    with pytest.raises(ZeroDivisionError), tracker.rng_state("a"):
        _ = 1 / 0
    np.testing.assert_array_equal(rng.default_generator.get_state(), before)


def test_streams_are_saved_and_restored():
    tracker = RNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    assert "b" in tracker.states_
    assert tracker.seeds_ == {1, 2}
    states = tracker.get_states_tracker()

    def numbers(names):
        found = []
        for name in names:
            with tracker.rng_state(name):
                found.append(rng.default_generator.random())
        return found

    drawn = numbers("abab")
    tracker.reset()
    tracker.set_states_tracker(states)
    assert numbers("abab") == drawn
    tracker.set_states_tracker({"b": states["b"]})
    assert list(tracker.get_states_tracker()) == ["b"]
    with pytest.raises(ConfigError, match="name -> state"):
        tracker.set_states_tracker([states["a"]])  # pyright: ignore[reportArgumentType]


def test_streams_are_checked():
    tracker = RNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(ConfigError, match="stream of that name already"):
        tracker.add("a", 2)
    with pytest.raises(ConfigError, match="stream 'a' started from that seed"):
        tracker.add("b", 1)
    with pytest.raises(ConfigError, match=r"'model_parallel_rng'.*add\(\) it first"), tracker.rng_state():
        pass


def test_model_parallel_random_seed():
    model_parallel_random_seed(5)
    assert rng.default_generator.initial_seed() == 5
    np.testing.assert_array_equal(
        get_rng_state_tracker().get_states_tracker()["model_parallel_rng"], rng.Generator().manual_seed(6).get_state()
    )
    seeds = []
    for _ in range(2):
        rng.seed(1)
        model_parallel_random_seed()
        seeds.append(rng.default_generator.initial_seed())
    assert seeds[0] == seeds[1]


def test_nothing_is_constrained_without_a_plan():
    assert layout.active.layout is None
    x = to_tensor(X)
    assert constrain_dim(x, -1, "inner") is x
