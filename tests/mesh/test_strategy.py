"""Strategies: joins, specs, movable and fixed axes, presets, and the errors that name what does not fit."""

import copy
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from polyreme.errors import ConfigError, PlacementError, ShapeError
from polyreme.mesh import (
    ANY,
    AXES,
    MeshShape,
    Rule,
    Strategy,
    data_parallel,
    expert_parallel,
    join,
    segment_parallel,
    sequence_parallel,
    tensor_parallel,
    zero,
)

DIMS = ("batch", "seq", "embed", "heads", "ffn", "vocab", "expert")
TENSOR_AXES = tuple(a for a in AXES if a != "pp")
axis_tuples = st.lists(st.sampled_from(TENSOR_AXES), unique=True, max_size=3).map(tuple)
rules = st.dictionaries(st.sampled_from((*DIMS, ANY)), axis_tuples, max_size=4)
strategies = st.builds(Strategy, param=rules, act=rules, grad=st.none() | rules, state=st.none() | rules)
dim_lists = st.lists(st.sampled_from(DIMS), unique=True, max_size=4).map(tuple)


def axes_of(spec):
    return [a for entry in spec if entry is not None for a in ((entry,) if isinstance(entry, str) else entry)]


@given(strategies, strategies, strategies)
def test_joins_are_associative(a, b, c):
    assert (a | b) | c == a | (b | c)


@given(strategies)
def test_join_with_itself_or_nothing_changes_nothing(a):
    assert a | a == a
    assert a | Strategy() == Strategy() | a == a
    assert hash(a | a) == hash(a)
    assert copy.deepcopy(a) == pickle.loads(pickle.dumps(a)) == Strategy.from_dict(a.to_dict()) == a


@given(strategies, dim_lists, st.sampled_from(("param", "act", "grad", "state")))
def test_no_axis_is_used_twice(a, dims, kind):
    fixed = [x for dim in dims for x in a.rule(kind).get(dim, ()) if x not in a.rule(kind).get(ANY, ())]
    if len(set(fixed)) < len(fixed):
        with pytest.raises(PlacementError, match="splits both"):
            getattr(a, f"{kind}_spec")(dims)
        return
    spec = getattr(a, f"{kind}_spec")(dims)
    assert len(spec) == len(dims)
    assert len(set(axes_of(spec))) == len(axes_of(spec))


@given(st.integers(1, 3), st.lists(st.integers(0, 24), max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_zero_takes_a_dim_exactly_when_one_divides(stage, shape, sharding, mp):
    dims = ("heads", "embed", "x", "y")[: len(shape)]
    mesh = MeshShape(sharding=sharding, mp=mp)
    both = zero(stage) | tensor_parallel()
    if shape and shape[0] % mp:
        with pytest.raises(PlacementError, match="'heads' of size"):
            both.state_spec(dims, shape, mesh)
        return
    spec = both.state_spec(dims, shape, mesh)
    taken = [i for i, e in enumerate(spec) if "sharding" in axes_of([e])]
    ways = [math.prod(mesh.degree(a) for a in axes_of([e])) for e in spec]
    assert all(size % n == 0 for size, n in zip(shape, ways, strict=True))
    free = [size % (sharding * (mp if dim == "heads" else 1)) == 0 for size, dim in zip(shape, dims, strict=True)]
    assert bool(taken) == (any(free) and sharding > 1)


def test_presets_join_to_the_known_placements():
    s = data_parallel() | zero(3) | tensor_parallel()
    assert s.param_spec(("embed", "ffn")) == ("sharding", "mp")
    assert s.param_spec(("vocab", "embed")) == ("mp", "sharding")
    assert s.param_spec(("embed", "heads", "head_dim")) == ("sharding", "mp", None)
    assert s.param_spec(("embed", "kv_heads", None)) == ("sharding", "mp", None)
    assert s.act_spec(("batch", "seq", "embed")) == (("dp", "sharding"), None, None)
    assert s.act_spec(("batch", "seq", "ffn")) == (("dp", "sharding"), None, "mp")
    assert s.param_spec(()) == ()


@pytest.mark.parametrize(
    ("stage", "param", "grad", "state"),
    [(1, None, None, "sharding"), (2, None, "sharding", "sharding"), (3, "sharding", "sharding", "sharding")],
)
def test_zero_stages(stage, param, grad, state):
    s = zero(stage) | tensor_parallel()
    dims = ("embed", "ffn")
    assert s.param_spec(dims) == (param, "mp")
    assert s.grad_spec(dims) == (grad, "mp")
    assert s.state_spec(dims) == (state, "mp")


def test_sequence_segment_and_expert_parallel():
    s = data_parallel() | tensor_parallel() | segment_parallel() | sequence_parallel()
    assert s.act_spec(("batch", "seq", "embed")) == (("dp", "sharding"), ("sep", "mp"), None)
    assert s.act_spec(("batch", "block_seq", "heads", "head_dim")) == (("dp", "sharding"), "sep", "mp", None)
    e = data_parallel() | tensor_parallel() | expert_parallel()
    assert e.param_spec(("expert", "embed", "ffn")) == ("ep", None, "mp")
    assert e.act_spec(("batch", "seq", "embed")) == (("dp", "sharding", "ep"), None, None)
    assert e.act_spec(("expert", "capacity", "embed")) == ("ep", None, None)


def test_grad_and_state_follow_param_unless_given():
    s = Strategy(param={"ffn": ("mp",)}, grad={})
    assert s.grad_spec(("ffn",)) == (None,)
    assert s.state_spec(("ffn",)) == ("mp",)


def test_movable_axis_falls_to_the_next_dim_that_divides():
    mesh, z = MeshShape(sharding=4, mp=2), zero(3)
    assert z.param_spec(("embed", "ffn"), (8, 8), mesh) == ("sharding", None)
    assert z.param_spec(("vocab", "embed"), (8, 8), mesh) == ("sharding", None)
    assert z.param_spec(("embed", "ffn"), (6, 8), mesh) == (None, "sharding")
    assert z.param_spec(("embed", "ffn"), (6, 10), mesh) == (None, None)
    assert z.param_spec(("ffn",), (8,), mesh) == ("sharding",)
    assert z.param_spec((None, None), (3, 8), mesh) == (None, "sharding")
    both = z | tensor_parallel()
    assert both.param_spec(("vocab", "embed"), (8, 8), mesh) == ("mp", "sharding")
    assert both.param_spec(("ffn",), (8,), mesh) == (("mp", "sharding"),)
    assert both.param_spec(("ffn",), (4,), mesh) == ("mp",)
    assert both.param_spec(("embed", "embed"), (8, 8), mesh) == ("sharding", None)


def test_a_spec_means_what_partition_spec_means():
    mesh = MeshShape(dp=2, sharding=2, mp=2)
    on = AbstractMesh(tuple(mesh.degrees.values()), tuple(mesh.degrees))
    s = data_parallel() | zero(3) | tensor_parallel()
    sharded = NamedSharding(on, PartitionSpec(*s.param_spec(("ffn", "embed", None), (8, 6, 3), mesh)))
    assert sharded.shard_shape((8, 6, 3)) == (4, 3, 3)
    sharded = NamedSharding(on, PartitionSpec(*s.act_spec(("batch", "seq", "heads"), (8, 5, 4), mesh)))
    assert sharded.shard_shape((8, 5, 4)) == (2, 5, 2)


def test_axes_of_degree_one_are_left_out_when_the_mesh_is_known():
    s = data_parallel() | zero(3) | tensor_parallel()
    assert s.act_spec(("batch", "heads"), (6, 3), MeshShape(dp=2)) == ("dp", None)
    assert s.param_spec(("embed", "ffn"), mesh=MeshShape(mp=2)) == (None, "mp")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: Strategy(param={"embed": ("mp",), "ffn": ("mp",)}).param_spec(("embed", "ffn")),
            PlacementError,
            r"'mp' splits both 'embed' and 'ffn' of dims \('embed', 'ffn'\); drop one",
        ),
        (
            lambda: tensor_parallel().param_spec(("embed", "heads"), (64, 6), MeshShape(mp=4)),
            PlacementError,
            r"'heads' of size 6 .*4 equal parts over mp \(mp has degree 4\); make it 4 or 8, or set mp to 3",
        ),
        (
            lambda: data_parallel().act_spec(("batch",), (6,), MeshShape(dp=2, sharding=2)),
            PlacementError,
            r"'batch' of size 6 .*over dp\+sharding \(sharding has degree 2\); make it 4 or 8, or set sharding to 1",
        ),
        (lambda: zero(3).param_spec(("embed",), (8,)), ConfigError, "no mesh; give both or neither"),
        (lambda: zero(3).param_spec(("embed",), (8, 8), MeshShape()), ShapeError, "name 1 dims, shape .* has 2"),
        (lambda: zero(4), ConfigError, "sharding stage 4; give 1"),
        (lambda: Strategy(param={"embed": ("tp",)}), PlacementError, "unknown mesh axis 'tp'"),
        (lambda: Strategy(act={"embed": ("pp",)}), PlacementError, "splits layers into stages"),
        (lambda: Strategy(act={"embed": ("mp", "mp")}), PlacementError, "names an axis twice"),
        (lambda: Strategy(act={"embed": "mp"}), ConfigError, "give a tuple of mesh axes"),
        (lambda: Strategy(act={3: ("mp",)}), ConfigError, "logical dim 3"),
        (lambda: Strategy(act=["mp"]), ConfigError, "strategy act=.*give a dict"),
        (lambda: Strategy.from_dict({"params": {}}), ConfigError, "did you mean 'param'"),
        (lambda: Strategy.from_dict("zero"), ConfigError, "strategy 'zero'; give a dict"),
    ],
)
def test_bad_input_says_what_to_change(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_printing_and_axes():
    s = join(data_parallel(), zero(2))
    assert "act   batch:dp+sharding" in str(s)
    assert "param replicated" in str(s)
    assert s.axes == {"dp", "sharding"}
    assert join() == Strategy()
    assert repr(Rule({"ffn": ("mp",)})) == "{'ffn': ('mp',)}"
