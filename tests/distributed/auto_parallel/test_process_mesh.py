"""Meshes of devices and placements: members, equality, slices, what is refused."""

import copy
import pickle

import jax
import numpy as np
import pytest

from polyreme.distributed import (
    Partial,
    Placement,
    ProcessMesh,
    ReduceType,
    Replicate,
    Shard,
    get_mesh,
    set_mesh,
)
from polyreme.distributed.auto_parallel import create_mesh
from polyreme.distributed.auto_parallel.tensors import process_mesh
from polyreme.errors import ConfigError, PlacementError

MESH = ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])


@pytest.fixture(autouse=True)
def _no_mesh_left():
    yield
    process_mesh.clear_mesh()


def test_members_of_a_process_mesh():
    assert (MESH.shape, MESH.ndim, MESH.size, MESH.dim_names) == ([2, 3], 2, 6, ["x", "y"])
    assert MESH.process_ids == [2, 4, 5, 0, 1, 3]
    np.testing.assert_array_equal(MESH.mesh, [[2, 4, 5], [0, 1, 3]])
    assert (MESH.get_dim_size("x"), MESH.get_dim_size(1), MESH.dim_size(0)) == (2, 3, 2)
    ranks = [MESH.get_rank_by_dim_and_process_id(d, p) for d, p in (("y", 1), (0, 1), ("y", 77))]
    assert ranks == [1, 1, -1]
    assert MESH.contains(4)
    assert not MESH.contains(6)
    assert not MESH.empty()
    assert str(MESH) == "shape [2, 3], process_ids [2, 4, 5, 0, 1, 3], dim_names ['x', 'y']"
    assert MESH.jax_mesh.devices[0, 1] == jax.devices()[4]
    assert MESH.jax_mesh.axis_names == ("x", "y")


def test_names_and_other_ways_to_say_it():
    same = ProcessMesh(shape=[2, 3], process_ids=[2, 4, 5, 0, 1, 3])
    assert same.dim_names == ["d0", "d1"]
    assert same == MESH
    assert hash(same) == hash(MESH)
    assert same.unique_id == MESH.unique_id != ProcessMesh([0, 1]).unique_id
    assert ProcessMesh([2, 4, 5, 0, 1, 3]) != MESH
    for other in (copy.deepcopy(MESH), copy.copy(MESH), pickle.loads(pickle.dumps(MESH))):
        assert (other, other.dim_names) == (MESH, MESH.dim_names)


@pytest.mark.parametrize(
    ("made", "ids", "names"),
    [
        (lambda m: m[0], [2, 4, 5], ["y"]),
        (lambda m: m[:, 1], [4, 1], ["x"]),
        (lambda m: m[:, 0:2], [[2, 4], [0, 1]], ["x", "y"]),
        (lambda m: m[0:1], [[2, 4, 5]], ["x", "y"]),
        (lambda m: m[1, 2], [3], ["d0"]),
        (lambda m: m["y"], [2, 4, 5], ["y"]),  # holds the first device of this process
        (lambda m: m.get_submesh_with_dim("x"), [2, 0], ["x"]),
        (lambda m: m.get_mesh_with_dim("y"), [[2, 0], [4, 1], [5, 3]], ["y", "x"]),
        (lambda m: m.get_mesh_with_dim("y", 1), [4, 1], ["x"]),
        (lambda m: m.get_mesh_with_dim("y", slice(0, 2)), [[2, 0], [4, 1]], ["y", "x"]),
    ],
)
def test_parts_of_a_mesh_have_its_ids_and_names(made, ids, names):
    np.testing.assert_array_equal(made(MESH).mesh, ids)
    assert made(MESH).dim_names == names


def test_the_group_of_a_dim():
    group = MESH.get_group("y")
    assert (group.nranks, group.axes) == (3, ("y",))
    assert MESH.get_group("y") is group
    assert ProcessMesh([3, 4]).get_group().nranks == 2
    with pytest.raises(ConfigError, match=r"get_group: .* has 2 dims; name one of x, y"):
        MESH.get_group()


def test_the_mesh_in_force():
    assert get_mesh() is None
    set_mesh(MESH)
    line = ProcessMesh([0, 1])
    with line:
        assert get_mesh() is line
    assert get_mesh() is MESH
    assert create_mesh([("dp", 2), ("mp", 4)]).process_ids == list(range(8))
    assert get_mesh().dim_names == ["dp", "mp"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "needs mesh, or both shape and process_ids"),
        ({"shape": [2, 2], "process_ids": [0, 1]}, r"shape=\[2, 2\] does not hold the 2 process_ids"),
        ({"shape": [-1, -2], "process_ids": [0, 1]}, r"shape=\[-1, -2\] must be whole numbers of at least 1"),
        ({"shape": [2.0], "process_ids": [0, 1]}, r"shape=\[2.0\] must be whole numbers of at least 1"),
        ({"mesh": (0, 1)}, "must be a list or an ndarray, got tuple"),
        ({"mesh": [[0, 1], [2]]}, "equally long"),
        ({"mesh": [0.5, 1]}, "whole numbers, at least one"),
        ({"mesh": []}, "whole numbers, at least one"),
        ({"mesh": [0, 0]}, r"\[0, 0\] must be distinct and not negative"),
        ({"mesh": [-1, 0]}, "must be distinct and not negative"),
        ({"mesh": [0, 1], "dim_names": ["a", "b"]}, "must be 1 different names"),
        ({"mesh": [[0, 1]], "dim_names": ["a", "a"]}, "must be 2 different names"),
        ({"mesh": [0, 1], "dim_names": [3]}, "must be strings"),
    ],
)
def test_what_is_no_mesh_is_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        ProcessMesh(**args)


def test_other_misuse_is_refused():
    with pytest.raises(ConfigError, match=r"has no dim 'xx'; did you mean 'x'"):
        MESH.get_dim_size("xx")
    with pytest.raises(ConfigError, match=r"cannot be indexed with 1\.5"):
        MESH[1.5]
    with pytest.raises(ConfigError, match="cannot be indexed with True"):
        MESH[True]
    with pytest.raises(ConfigError, match="has no devices"):
        MESH[0:0]
    with pytest.raises(ConfigError, match="set_mesh takes a ProcessMesh, got list"):
        set_mesh([0])
    with pytest.raises(ConfigError, match="sizes of at least 1"):
        create_mesh([("dp", 0)])
    with pytest.raises(PlacementError, match=r"needs process ids \[99\], but there are 8 devices"):
        ProcessMesh([0, 99]).jax_mesh  # noqa: B018


def test_placements_say_what_they_are():
    assert [repr(p) for p in (Shard(1), Replicate(), Partial(), Partial(ReduceType.kRedProd))] == [
        "Shard(dim=1)",
        "Replicate()",
        "Partial(reduce_type=SUM)",
        "Partial(reduce_type=PRODUCT)",
    ]
    assert repr(Shard(0, split_factor=2)) == "Shard(dim=0, split_factor=2)"
    assert repr(Shard(0, shard_order=1)) == "Shard(dim=0, shard_order=1)"
    assert repr(ReduceType.kRedMax) == "<ReduceType.kRedMax: 1>"
    assert [int(ReduceType.kRedAvg), ReduceType(3)] == [4, ReduceType.kRedProd]
    shard = Shard(2, split_factor=4)
    assert (shard.get_dim(), shard.get_split_factor(), Shard(0, shard_order=3).get_co_shard_order()) == (2, 4, 3)
    assert [shard.is_shard(), shard.is_shard(2), shard.is_shard(0), shard.is_replicated(), shard.is_partial()] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert Replicate().is_replicated()
    assert Partial().is_partial()
    assert Partial().reduce_type() is ReduceType.kRedSum


def test_placements_are_equal_by_value():
    every = [Shard(0), Shard(1), Shard(0, split_factor=2), Shard(0, shard_order=1), Replicate(), Partial()]
    every += [Partial(ReduceType.kRedMax), Placement()]
    assert len({*every, *(pickle.loads(pickle.dumps(p)) for p in every)}) == len(every)
    assert Shard(1) == Shard(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard("a"), "Shard: dim='a' must be a whole number"),
        (lambda: Shard(0, split_factor=0), "split_factor=0 must be a whole number of at least 1"),
        (lambda: Shard(0, shard_order=-1), "shard_order=-1 must be a whole number of at least 0"),
        (lambda: Partial(3), "reduce_type=3 must be a ReduceType"),
    ],
)
def test_what_is_no_placement_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
