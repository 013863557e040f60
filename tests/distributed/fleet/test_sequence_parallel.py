"""Sequence-parallel pieces: values stay, the sequence lies where it should, programs have Megatron's pattern."""

import re

import numpy as np
import pytest

from polyreme.amp import auto_cast
from polyreme.core import rng
from polyreme.distributed.fleet.layers.mpu import VocabParallelEmbedding
from polyreme.distributed.fleet.utils import sequence_parallel_utils as sp
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.distributed.tensor_parallel.sequence import (
    ColumnSequenceParallelLinear,
    RowSequenceParallelLinear,
)
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, PlacementError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.nn import Layer, LayerNorm, Linear
from polyreme.nn import functional as F
from polyreme.optimizer import Momentum

EPS = 2.0**-23  # of float32
SEQ, BATCH, WIDTH, INNER = 8, 4, 8, 32
X = np.random.default_rng(0).normal(size=(SEQ, BATCH, WIDTH)).astype("float32")


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


class Block(Layer):
    """norm(x + ffn(norm(x))), with a way in and out for the sequence."""

    def __init__(self, split):
        super().__init__()
        self.before, self.after = LayerNorm(WIDTH), LayerNorm(WIDTH)
        self.split = split
        if split:
            self.up = ColumnSequenceParallelLinear(WIDTH, INNER, has_bias=True, gather_output=False)
            self.down = RowSequenceParallelLinear(INNER, WIDTH, input_is_parallel=True)
        else:
            self.up, self.down = Linear(WIDTH, INNER), Linear(INNER, WIDTH)

    def forward(self, x):
        x = sp.ScatterOp.apply(x) if self.split else x
        x = self.after(x + self.down(F.gelu(self.up(self.before(x)))))
        return sp.GatherOp.apply(x) if self.split else x


def train(split, plan=None):
    rng.seed(3)
    model = Block(split)
    placed = None if plan is None else apply_plan(plan, model)
    optimizer = Momentum(0.1, parameters=model.parameters())

    @to_static
    def step(x):
        loss = (model(x) ** 4).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    given = [X * (t + 1) for t in range(3)]
    place = to_tensor if placed is None else lambda x: shard_batch(placed, x, None, "batch", None)
    return [float(step(place(x))) for x in given], {n: p.numpy() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def alone():
    return train(False)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "degrees",
    [None, {"mp": 8}, {"dp": 2, "mp": 4}, {"dp": 2, "sep": 2, "mp": 2}, {"sharding": 4, "mp": 2, "sharding_stage": 3}],
    ids=str,
)
def test_a_split_sequence_trains_as_one_device_does(alone, degrees):
    losses, parameters = train(True, None if degrees is None else Plan.from_degrees(**degrees))
    # sums of up to SEQ x BATCH x WIDTH terms in another order, fourth powers of numbers below 4, three steps
    np.testing.assert_allclose(losses, alone[0], rtol=256 * EPS * 3)
    for name, want in alone[1].items():
        np.testing.assert_allclose(parameters[name], want, atol=256 * EPS * 3, err_msg=name)


def collectives(fn, *args):
    """[(kind, result type, the layer it is in)] of a captured function's program, in order."""
    text = fn.compiled(*args).as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return [
        (m[2], m[1].split("{")[0], m[3])
        for m in re.finditer(rf'= (.*?) ({kinds})(?:-start)?\(.*op_name="([^"]*)"', text)
    ]


def _layer(name):
    return "Column" if "Column" in name else "Row"


def test_the_program_gathers_before_column_and_scatters_after_row():
    model = Block(True)
    placed = apply_plan(Plan.from_degrees(dp=2, mp=4), model)

    @to_static
    def gradients(x, scale):
        y = model.down(F.gelu(model.up(model.before(sp.scatter(x)))))
        (y * y * sp.scatter(scale)).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    x = shard_batch(placed, X, None, "batch", None)
    collected = collectives(gradients, x, x)
    whole = f"f32[{SEQ},{BATCH // 2},{WIDTH}]"
    gathers = [(shape, _layer(name)) for kind, shape, name in collected if kind == "all-gather"]
    # forward before column; backward, of the gradient that reaches row
    assert gathers == [(whole, "Column"), (whole, "Row")]
    # arXiv:2205.05198, figure 6: g-bar. XLA on CPU has no reduce-scatter here: an all-reduce, of which each device then
    # keeps its slice. Elsewhere it is one op.
    sums = [
        f for f in collected if f[0] in ("all-reduce", "reduce-scatter") and "dot_general" in f[2] and "(" not in f[1]
    ]
    assert {np.prod([int(n) for n in re.findall(r"\d+", s.split("[")[1])]) for _, s, _ in sums} <= {
        SEQ * BATCH // 2 * WIDTH,
        SEQ * BATCH // 2 * WIDTH // 4,
    }
    assert [_layer(name) for _, _, name in sums] == ["Row", "Column"]
    # what is left: gradients of parameters, over dp, and of the norms and the bias over mp too
    left = [f for f in collected if f[0] != "all-gather" and f not in sums]
    assert {kind for kind, _, _ in left} == {"all-reduce"}


def test_a_table_is_not_gathered_for_a_split_sequence():
    table = VocabParallelEmbedding(16, WIDTH)
    placed = apply_plan(Plan.from_degrees(dp=2, mp=4), table)

    @to_static
    def gradient(ids, scale):
        x = sp.scatter(table(ids).transpose([1, 0, 2]))
        (x * x * scale).sum().backward()
        return table.weight.grad

    ids = np.random.default_rng(1).integers(0, 16, (BATCH, SEQ))
    arguments = shard_batch(placed, ids, "batch", None), shard_batch(placed, X, None, "batch", None)
    # forward: the rows found, summed over mp; backward: their gradient, gathered, and the table's summed over dp
    assert [f[:2] for f in collectives(gradient, *arguments)] == [
        ("all-reduce", f"f32[{BATCH // 2},{SEQ},{WIDTH}]"),
        ("all-gather", f"f32[{SEQ},{BATCH // 2},{WIDTH}]"),
        ("all-reduce", f"f32[{16 // 4},{WIDTH}]"),
    ]
    want = np.zeros((16, WIDTH))
    np.add.at(want, ids.T, 2 * table.weight.numpy()[ids.T] * X)
    # a row is used by at most 32 ids
    np.testing.assert_allclose(gradient(*arguments).numpy(), want, atol=32 * 8 * EPS)


def pieces(tensor):
    return {s.data.shape for s in tensor._array.addressable_shards}


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_where_a_value_and_its_gradient_lie(captured):
    placed = apply_plan(Plan.from_degrees(dp=2, mp=4), Layer())
    whole, split = (SEQ, BATCH // 2, WIDTH), (SEQ // 4, BATCH // 2, WIDTH)
    wanted = {
        sp.scatter: (split, whole),
        sp.ScatterOp.apply: (split, whole),
        sp.reduce_scatter: (split, whole),
        sp.ReduceScatterOp.apply: (split, whole),
        sp.all_gather: (whole, split),
        sp.AllGatherOp.apply: (whole, split),
        sp.GatherOp.apply: (whole, split),
    }

    def both_ways(fn, x):
        x = x.detach()
        x.stop_gradient = False
        y = fn(x)
        (y * y).sum().backward()
        return y, x.grad

    x = shard_batch(placed, X, None, "batch", None)
    for fn, (there, back) in wanted.items():
        y, grad = (to_static(both_ways) if captured else both_ways)(fn, x)
        np.testing.assert_array_equal(y.numpy(), X)
        assert grad is not None
        np.testing.assert_array_equal(grad.numpy(), 2 * X)
        assert pieces(y) == {there}
        assert pieces(grad) == {back}


def test_a_sequence_split_over_sep_stays_so():
    placed = apply_plan(Plan.from_degrees(sep=2, mp=4), Layer())
    x = shard_batch(placed, X, "seq", None, None)
    assert pieces(x) == {(SEQ // 2, BATCH, WIDTH)}
    split = sp.scatter(x)
    assert pieces(split) == {(1, BATCH, WIDTH)}
    assert pieces(sp.all_gather(split)) == {(SEQ // 2, BATCH, WIDTH)}


def test_ids_can_be_scattered():
    apply_plan(Plan.from_degrees(mp=8), Layer())
    ids = to_tensor(np.arange(16).reshape(8, 2))
    assert pieces(sp.scatter(ids)) == {(1, 2)}
    np.testing.assert_array_equal(sp.scatter(ids).numpy(), ids.numpy())


def test_without_a_plan_everything_is_the_identity():
    x = to_tensor(X)
    for fn in (sp.scatter, sp.all_gather, sp.reduce_scatter, sp.GatherOp.apply):
        assert fn(x) is x


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="give gather_output=False"):
        ColumnSequenceParallelLinear(4, 8)
    with pytest.raises(ConfigError, match="give input_is_parallel=True"):
        RowSequenceParallelLinear(8, 4)
    apply_plan(Plan.from_degrees(mp=8), Layer())
    with pytest.raises(PlacementError, match=r"scatter: dim 0 of shape \[6, 2\].*8 equal parts over mp; make it 8"):
        sp.scatter(to_tensor(np.ones((6, 2))))
    with pytest.raises(PlacementError, match=r"all_gather: dim 0 of shape \[\]"):
        sp.all_gather(to_tensor(1.0))


def test_marks_and_hooks():
    layer = RowSequenceParallelLinear(8, 4, input_is_parallel=True)
    assert sp.is_sequence_parallel_parameter(layer.bias)
    assert not sp.is_sequence_parallel_parameter(layer.weight)
    sp.mark_as_sequence_parallel_parameter(layer.weight)
    assert sp.is_sequence_parallel_parameter(layer.weight)
    sp.register_sequence_parallel_allreduce_hooks(layer, 1, True)
    for hook in (
        sp.create_fused_allreduce_gradient_hook([layer.weight], 1),
        sp.create_non_fused_allreduce_gradient_hook(layer.weight, 1),
    ):
        layer.weight.register_hook(hook)
    layer(to_tensor(np.ones((2, 1, 8), "float32"))).sum().backward()
    assert layer.weight.grad is not None
    sp.fused_allreduce_gradients_with_group(layer.parameters(), None)
    np.testing.assert_array_equal(layer.weight.grad.numpy(), np.full((8, 4), 2, "float32"))
    assert not sp.is_fused_matmul_bias_supported()
    assert not sp.is_fused_linear_param_grad_add_supported()
    with pytest.raises(ConfigError, match="takes a Layer, got int"):
        sp.register_sequence_parallel_allreduce_hooks(3, 1, True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"scale=2\.0"):
        sp.fused_allreduce_gradients_with_group(layer.parameters(), None, scale=2.0)


def test_under_autocast_the_result_is_low_as_linears_is():
    row = RowSequenceParallelLinear(8, 4, input_is_parallel=True)
    with auto_cast(dtype="bfloat16"):
        assert row(to_tensor(np.ones((2, 1, 8), "float32"))).dtype == "bfloat16"
