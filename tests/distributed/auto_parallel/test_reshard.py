"""Tensors moved between placements and meshes: every pair of placements, gradients back where they came from."""

import itertools

import jax
import numpy as np
import pytest

import polyreme
from polyreme.distributed import (
    Partial,
    ProcessMesh,
    ReduceType,
    Replicate,
    Shard,
    reshard,
    shard_tensor,
    unshard_dtensor,
)
from polyreme.distributed.auto_parallel.tensors import form, kept
from polyreme.errors import CaptureError, ConfigError, PlacementError

R, P = Replicate(), Partial()
GRID = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
LINE, SUB, OTHER = ProcessMesh([0, 1], ["x"]), GRID[1], ProcessMesh([4, 5, 6], ["z"])
V = np.arange(20, dtype="float32").reshape(4, 5)


def leaf(mesh, placements):
    return shard_tensor(polyreme.to_tensor(V, stop_gradient=False), mesh, placements)


def local_is_by_definition(x):
    """Every device's part is what its placements say, Partial ones of whatever makes the value."""
    found = kept.form_of(x)
    for pid in x.process_mesh.process_ids:
        where = found.coordinates(pid)
        cut = tuple(slice(s, s + n) for s, n in (found.local_rows(d, where) for d in range(x.ndim)))
        if not found.partial:
            np.testing.assert_array_equal(x._local_value(pid).numpy(), V[cut])
        assert x._local_value(pid).shape == list(V[cut].shape)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("source", "target"), itertools.product([Shard(0), Shard(1), R, P], repeat=2), ids=str)
def test_every_pair_on_one_mesh(source, target):
    x = leaf(LINE, [source])
    y = reshard(x, LINE, [target])
    assert y.placements == [target]
    np.testing.assert_array_equal(y.numpy(), V)
    local_is_by_definition(y)
    (y * polyreme.to_tensor(V)).sum().backward()
    assert x.grad.placements == [R if source == P else source]
    np.testing.assert_array_equal(x.grad.numpy(), V)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
        ([Shard(0), P], [R, Shard(0)]),
        ([P, P], [Shard(0), P]),
        ([Shard(1, shard_order=1), Shard(1)], [P, Shard(0)]),
        ([R, Partial(ReduceType.kRedMax)], [P, Shard(1)]),
        ([Partial(ReduceType.kRedAvg), P], [P, R]),
    ],
    ids=str,
)
def test_two_mesh_dims(source, target):
    y = reshard(leaf(GRID, source), GRID, target)
    assert y.placements == target
    np.testing.assert_array_equal(y.numpy(), V)
    local_is_by_definition(y)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("mesh", [SUB, OTHER], ids=str)
@pytest.mark.parametrize(("source", "target"), [(Shard(0), Shard(1)), (P, Shard(0)), (R, P), (Shard(1), R)], ids=str)
def test_reshard_to_another_mesh(mesh, source, target):
    x = leaf(GRID, [source])
    y = reshard(x, mesh, [target])
    assert (y.process_mesh, y.placements) == (mesh, [target])
    np.testing.assert_array_equal(y.numpy(), V)
    back = reshard(y, GRID, [Shard(0), Shard(1)])
    (back * back).sum().backward()
    assert x.grad.process_mesh == GRID
    np.testing.assert_array_equal(x.grad.numpy(), 2 * V)


def collectives(source, target):
    a, b = (form.Form(LINE, (p,), (4, 8)) for p in (source, target))
    like = jax.ShapeDtypeStruct(a.stored_shape, "float32", sharding=a.sharding)
    text = form.converter(a, b).lower(like).compile().as_text()
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    return {n for n in names if f" {n}(" in text or f" {n}-start(" in text}


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (R, Shard(0), [set()]),
        (R, P, [set()]),
        (Shard(0), R, [{"all-gather"}]),
        (P, R, [{"all-reduce"}]),
        (P, Shard(0), [{"reduce-scatter"}, {"all-reduce"}]),  # XLA's CPU backend has no reduce-scatter pass
        (Shard(0), Shard(1), [{"all-to-all"}]),
    ],
    ids=str,
)
def test_what_is_communicated(source, target, kinds):
    assert collectives(source, target) in kinds


def test_addends_that_stay_are_not_joined():
    x = leaf(GRID, [P, P])
    y = reshard(x, GRID, [P, R])
    np.testing.assert_array_equal(y._local_value(0).numpy(), V)
    np.testing.assert_array_equal(y._local_value(3).numpy(), 0 * V)


def test_gradients_of_gradients():
    x = leaf(LINE, [Shard(0)])
    (first,) = polyreme.grad((reshard(x, LINE, [Shard(1)]) ** 3).sum(), [x], create_graph=True)
    (second,) = polyreme.grad(first.sum(), [x])
    np.testing.assert_allclose(second.numpy(), 6 * V)


def test_in_a_captured_function():
    @polyreme.jit.to_static
    def run(x):
        y = reshard(x, GRID, [R, Shard(1)])
        placed.append(y.placements)
        z = reshard(y * 2, GRID, [P, R])
        return reshard(z, GRID, [Shard(0), R])

    placed = []
    x = shard_tensor(V, GRID, [Shard(0), R])
    y = run(x)
    assert placed[-1] == [R, Shard(1)]
    assert y.placements == [Shard(0), R]
    np.testing.assert_array_equal(y.numpy(), 2 * V)
    with pytest.raises(CaptureError, match="inside a captured function: one program runs on one set of devices"):
        polyreme.jit.to_static(lambda v: reshard(v, OTHER, [R]))(x)


@pytest.mark.parametrize(
    "moved",
    [
        lambda x: reshard(x, LINE, [P]),
        lambda x: reshard(x, LINE, [Shard(1)]),  # 5 columns over 2 devices
        lambda x: reshard(x, LINE, [Shard(0, split_factor=2)]),
        lambda x: shard_tensor(x, LINE, [P]),
        unshard_dtensor,
    ],
    ids=["partial", "uneven", "split_factor", "shard_tensor", "unshard"],
)
def test_a_leaf_gets_its_gradient_in_a_captured_function(moved):
    @polyreme.jit.to_static
    def run(x):
        loss = (moved(x) ** 2).sum() + x.sum()
        loss.backward()
        return loss

    x = leaf(LINE, [Shard(0)])
    run(x)
    np.testing.assert_array_equal(x.grad.numpy(), 2 * V + 1)


def test_misuse_is_refused():
    dense = polyreme.ones([2])
    with pytest.raises(PlacementError, match=r"reshard: this Tensor of shape \[2\] lies on no ProcessMesh"):
        reshard(dense, LINE, [R])
    with pytest.raises(TypeError, match="reshard takes a Tensor, got ndarray"):
        reshard(V, LINE, [R])
    with pytest.raises(ConfigError, match="reshard: mesh must be a ProcessMesh"):
        reshard(leaf(LINE, [R]), None, [R])
