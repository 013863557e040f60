"""The older names of auto_parallel: marks by names of mesh dims, shard_op, recompute, fetch, and the ring functions."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed import DistAttr, ProcessMesh, Replicate, Shard, auto_parallel, set_mesh
from polyreme.distributed import shard_tensor as by_placements
from polyreme.distributed.auto_parallel import RingConv2d, RingFlashAttention
from polyreme.distributed.auto_parallel.layers import annotate
from polyreme.distributed.auto_parallel.tensors.process_mesh import clear_mesh
from polyreme.errors import ConfigError, PlacementError, ShapeError
from polyreme.nn import functional as F

MESH = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])


@pytest.fixture(autouse=True)
def _no_mesh_is_left():
    yield
    clear_mesh()


def test_marks_by_names_of_mesh_dims():
    w = nn.Linear(4, 6).weight
    assert auto_parallel.shard_tensor(w, MESH, ["y", None]) is w
    assert w.placements == [Replicate(), Shard(0)]
    set_mesh(MESH)
    x = auto_parallel.shard_tensor(paddle.ones([6, 12]), shard_spec=["y", "x"])
    assert (x.placements, x._local_shape) == ([Shard(1), Shard(0)], [3, 6])
    taped = auto_parallel.shard_tensor(w * 2, None, None)
    assert taped.placements == [Replicate(), Replicate()]
    taped.sum().backward()
    np.testing.assert_array_equal(w.grad.numpy(), np.full((4, 6), 2.0))


@pytest.mark.parametrize("captured", [False, True])
def test_shard_op_places_inputs_and_outputs(captured):
    seen = []

    def add(a, b, *, scale):
        seen.append((a.placements, b.placements))
        return (a + b) * scale, "text"

    spread = auto_parallel.shard_op(add, MESH, [["x", None], None], [["x", "y"]])
    run = (
        paddle.jit.to_static(lambda a, b: spread(a, b, scale=2.0)[0])
        if captured
        else lambda a, b: spread(a, b, scale=2.0)[0]
    )
    out = run(paddle.ones([4, 4]), paddle.full([4, 4], 2.0))
    assert seen[0] == ([Shard(0), Replicate()], [Replicate(), Replicate()])
    assert out.placements == [Shard(0), Shard(1)]
    np.testing.assert_array_equal(out.numpy(), np.full((4, 4), 6.0))


def test_fetch_notes_values_also_of_captured_code(caplog):
    def step(x):
        y = x * 2
        auto_parallel.fetch(y, "y", logging=True)
        return y + 1

    x = by_placements(np.arange(4.0), MESH, [Shard(0)])
    with caplog.at_level("INFO"):
        for run in (step, paddle.jit.to_static(step)):
            run(x).numpy()
            paddle.device.synchronize()
            (value,) = annotate.fetched.take().values()
            np.testing.assert_array_equal(value, np.arange(4.0) * 2)
    assert annotate.fetched.take() == {}
    assert "y = [0. 2. 4. 6.]" in caplog.text


def test_one_seed_gives_the_same_numbers_on_a_mesh():
    auto_parallel.parallel_manual_seed(5)
    alone = F.dropout(paddle.ones([4, 4]), 0.5).numpy()
    auto_parallel.parallel_manual_seed(5)
    spread = F.dropout(by_placements(np.ones((4, 4), np.float32), MESH, [Shard(0), Shard(1)]), 0.5)
    np.testing.assert_array_equal(spread.numpy(), alone)


def test_ring_attention_over_a_split_sequence():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 8, h, 4)).astype(np.float32) for h in (4, 2, 2))
    want = F.scaled_dot_product_attention(*map(paddle.to_tensor, (q, k, v)), is_causal=True).numpy()
    spread = [by_placements(a, MESH, [Shard(0), Shard(1)], stop_gradient=False) for a in (q, k, v)]
    out = RingFlashAttention.apply(*spread, is_causal=True)
    assert out.placements == [Shard(0), Shard(1)]
    # 8 weights that add up to 1, of values below 4
    np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=8 * 4 * 6e-8)
    out.sum().backward()
    assert spread[1].grad.shape == [2, 8, 2, 4]


def test_convolution_over_a_split_width():
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((2, 3, 5, 8)).astype(np.float32), rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    want = F.conv2d(paddle.to_tensor(x), paddle.to_tensor(w), stride=2, padding=1, dilation=2).numpy()
    image = by_placements(x, MESH, [Replicate(), Shard(3)])
    out = RingConv2d.apply(image, paddle.to_tensor(w), stride=2, padding=1, dilation=2)
    assert out.placements == [Replicate(), Shard(3)]
    np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=27 * 16 * 6e-8)  # 27 terms below 16


def test_what_does_not_fit_is_told():
    x, op = paddle.ones([4, 4]), paddle.add
    split = by_placements(np.ones((2, 4, 4, 4), np.float32), MESH, [Shard(0)])
    odd = by_placements(np.ones((2, 3, 4, 4), np.float32), MESH, [Replicate(), Shard(1)])
    wide = by_placements(np.ones((2, 4, 4, 4), np.float32), MESH, [Replicate(), Shard(3)])
    for kind, message, call in [
        (TypeError, "takes a Tensor, got int", lambda: auto_parallel.shard_tensor(3, MESH)),
        (TypeError, "takes a Tensor, got int", lambda: auto_parallel.fetch(3)),
        (PlacementError, "no process_mesh was given", lambda: auto_parallel.shard_tensor(x, None, [None, None])),
        (ConfigError, "process_mesh is a list", lambda: auto_parallel.shard_op(op, [0])),
        (ShapeError, "has 1 entries, the Tensor 2 dims", lambda: auto_parallel.shard_tensor(x, MESH, ["x"])),
        (PlacementError, "names 'z'", lambda: auto_parallel.shard_tensor(x, MESH, ["z", None])),
        (PlacementError, "names 'x' twice", lambda: auto_parallel.shard_tensor(x, MESH, ["x", "x"])),
        (ConfigError, "op is a int", lambda: auto_parallel.shard_op(3, MESH)),
        (ConfigError, "unknown settings .'chunk_id'.", lambda: auto_parallel.shard_op(op, MESH, chunk_id=1)),
        (ConfigError, "1 in_shard_specs for 2 Tensors", lambda: auto_parallel.shard_op(op, MESH, [None])(x, x)),
        (ConfigError, "takes a function or Layer", lambda: auto_parallel.recompute(3)),
        (ConfigError, "name='a'", lambda: auto_parallel.parallel_manual_seed(1, "a")),
        (ConfigError, "fixed_seed_offset", lambda: RingFlashAttention.apply(split, split, split, fixed_seed_offset=1)),
        (PlacementError, "split along dim 1, but lies", lambda: RingFlashAttention.apply(split, split, split)),
        (PlacementError, "lies on no mesh", lambda: RingFlashAttention.apply(paddle.ones([1, 2, 1, 4]), split, split)),
        (ShapeError, "3 queries do not divide into 2", lambda: RingFlashAttention.apply(odd, odd, odd)),
        (ConfigError, "channel_dim=3", lambda: RingConv2d.apply(split, split, channel_dim=3)),
        (ConfigError, "padding_algorithm='FULL'", lambda: RingConv2d.apply(wide, split, padding_algorithm="FULL")),
        (ConfigError, "data_format 'NCL'", lambda: RingConv2d.apply(split, split, data_format="NCL")),
        (PlacementError, "split along dim 3, its width", lambda: RingConv2d.apply(split, split)),
    ]:
        with pytest.raises(kind, match=message):
            call()


def test_dist_attr():
    attr = DistAttr(MESH, sharding_specs=["y", None])
    assert attr == DistAttr(MESH, ["y", None]) != DistAttr(MESH, [None, "y"])
    assert hash(attr) == hash(DistAttr(MESH, ["y", None]))
    assert repr(attr).endswith("['y', None])")
    with pytest.raises(ConfigError, match="mesh is a list"):
        DistAttr([0], ["x"])


def test_a_variable_of_a_program_lies_nowhere():
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            x = paddle.static.data("x", [2, 3])
            assert (x.is_dist(), x.num_shard, x.placements) == (False, None, None)
    finally:
        paddle.disable_static()
