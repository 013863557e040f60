"""Mesh shapes: degrees, strides, coordinates, groups, text, and errors that say what would fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import AXES, MeshShape, nearest_divisor, nearest_multiples

meshes = st.builds(MeshShape, **{axis: st.integers(1, 3) for axis in AXES}, order=st.permutations(AXES).map(tuple))


@given(meshes)
def test_coordinates_are_bijective(mesh):
    seen = {tuple(mesh.coordinates(d).items()) for d in range(mesh.size)}
    assert len(seen) == mesh.size
    assert all(mesh.device(**dict(at)) in range(mesh.size) for at in seen)
    assert [mesh.device(**mesh.coordinates(d)) for d in range(mesh.size)] == list(range(mesh.size))


@given(meshes)
def test_strides_are_those_of_a_row_major_array(mesh):
    array = np.arange(mesh.size).reshape([mesh.degree(a) for a in mesh.order])
    for at, axis in enumerate(mesh.order):
        rows = np.moveaxis(array, at, -1).reshape(-1, mesh.degree(axis))
        assert mesh.groups(axis) == [tuple(row) for row in rows.tolist()]
        assert (np.diff(rows) == mesh.strides[axis]).all()


@given(meshes, st.sets(st.sampled_from(AXES)))
def test_groups_cut_the_devices_into_equal_parts(mesh, names):
    groups = mesh.groups(*names)
    assert sorted(d for g in groups for d in g) == list(range(mesh.size))
    assert len({len(g) for g in groups}) == 1
    assert len(groups[0]) == np.prod([mesh.degree(a) for a in names], dtype=int)


@given(meshes)
def test_text_and_dict_round_trip(mesh):
    assert MeshShape.parse(str(mesh)) == mesh
    assert MeshShape.parse(mesh.to_dict()) == mesh
    assert MeshShape.parse(mesh) is mesh
    assert hash(MeshShape.parse(str(mesh))) == hash(mesh)


def test_usual_order_puts_mp_inside_dp():
    mesh = MeshShape(dp=2, sharding=2, mp=2)
    assert str(mesh) == "dp2 sharding2 mp2"
    assert mesh.strides == {"dp": 4, "pp": 4, "sharding": 2, "sep": 2, "mp": 1, "ep": 1}
    assert mesh.groups("mp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups("dp", "sharding") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_an_order_may_leave_out_axes():
    assert MeshShape(dp=2, mp=2, order=("mp", "dp")).strides["mp"] == 2
    assert MeshShape(dp=2, mp=2, order=("mp", "dp")) != MeshShape(dp=2, mp=2)


def test_text_forms():
    assert MeshShape.parse("dp=2 x mp=4") == MeshShape(dp=2, mp=4)
    assert str(MeshShape()) == "dp1"


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: MeshShape(mp=0), ConfigError, r"'mp' has degree 0; give a whole number"),
        (lambda: MeshShape(dp=True), ConfigError, r"'dp' has degree True"),
        (lambda: MeshShape(order=("dp", "dp")), ConfigError, "names an axis twice"),
        (lambda: MeshShape(order=("dp", "tp")), ConfigError, "unknown mesh axis 'tp' in order"),
        (lambda: MeshShape.parse({"shardin": 2}), ConfigError, "did you mean 'sharding'"),
        (lambda: MeshShape.parse("dp2 mpx"), ConfigError, "'mpx' is not an axis and its degree"),
        (lambda: MeshShape.parse("dp2 dp4"), ConfigError, "gives 'dp' twice"),
        (lambda: MeshShape.parse(7), ConfigError, "a mesh cannot be made from 7"),
        (lambda: MeshShape().degree("tp"), PlacementError, "unknown mesh axis 'tp'"),
        (lambda: MeshShape(dp=2).coordinates(2), PlacementError, "device index 2 is not on mesh dp2"),
        (lambda: MeshShape(dp=2).coordinates(-1), PlacementError, "device index -1"),
        (lambda: MeshShape(dp=2).device(dp=2), PlacementError, r"dp=2 is not on mesh dp2; give 0 .. 1"),
        (lambda: MeshShape(dp=2, mp=3).check_devices(8), PlacementError, r"needs 6 devices, 8 given; .*: 'dp2 mp4'"),
        (lambda: MeshShape(dp=3, mp=2).check_devices(8), PlacementError, r"8: 'dp4 mp2'"),
        (lambda: MeshShape(dp=2, mp=2).check_devices(8), PlacementError, r"8: 'dp4 mp2' or 'dp2 mp4'"),
        (lambda: MeshShape(mp=3).grow("dp", 8), PlacementError, r"'dp' cannot be sized.*divide 8.*'mp8'"),
    ],
)
def test_bad_input_says_what_to_change(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_check_devices_accepts_its_own_size():
    MeshShape(dp=2, mp=3).check_devices(6)


@given(meshes, st.integers(1, 60))
def test_the_nearest_meshes_offered_do_fit(mesh, count):
    if mesh.size == count:
        return
    with pytest.raises(PlacementError) as caught:
        mesh.check_devices(count)
    offered = str(caught.value).split(f"use {count}: ")[1].split(" or ")
    assert all(MeshShape.parse(text.strip("'")).size == count for text in offered)


@given(meshes, st.sampled_from(AXES), st.integers(1, 4))
def test_grow_uses_every_device(mesh, axis, times):
    count = mesh.size // mesh.degree(axis) * times
    assert mesh.grow(axis, count).size == count


@given(st.integers(1, 60), st.integers(1, 60))
def test_nearest_divisor_is_the_closest(number, target):
    found = nearest_divisor(number, target)
    assert number % found == 0
    assert all(abs(found - target) <= abs(d - target) for d in range(1, number + 1) if number % d == 0)
    assert int(nearest_multiples(number, target).split(" or ")[-1]) % target == 0
