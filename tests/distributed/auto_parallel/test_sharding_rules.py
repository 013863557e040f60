"""Rules as values: derived from a function, read from dims, and listed on a page."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyreme
import polyreme.nn.functional as F
from polyreme.core import mode
from polyreme.core.op import OPS
from polyreme.core.sharding_rule import DimsRule, OpCall
from polyreme.distributed import Partial, ProcessMesh, Replicate, Shard, shard_tensor
from polyreme.distributed.auto_parallel.dims.derived import derived_rule, unknown_primitives
from polyreme.utils import register_op
from tools import write_sharding_rules

R, S0, S1 = Replicate(), Shard(0), Shard(1)
GRID = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])


def outline(rule):
    """Names as letters in the order in which they first stand; "." for none."""
    letters = {}
    tensors = [[rule.split_name(n) for n in names] for names in (*rule.inputs, *rule.outputs)]
    for name in (n for names in tensors for n in names if n is not None):
        letters.setdefault(name, "abcdefgh"[len(letters)])
    shown = ["".join("." if n is None else letters[n] for n in names) for names in tensors]
    return f"{' '.join(shown[: len(rule.inputs)])} -> {' '.join(shown[len(rule.inputs) :])}"


@pytest.mark.parametrize(
    ("fn", "shapes", "outlined"),
    [
        (lambda x, y: x[:, None] - y, [(2, 3), (4, 3)], "ab cb -> acb"),
        (lambda x, y: x @ y, [(2, 3), (3, 4)], "ab bc -> ac"),
        (lambda x: jax.nn.softmax(x * 2), [(2, 3)], "ab -> ab"),
        (lambda x: jnp.sort(x, 0), [(2, 3)], ".a -> .a"),
        (lambda x: x.reshape(2, 3, 4).sum(1), [(6, 4)], "ab -> ab"),
        (lambda x: x[:, 1:], [(4, 3)], "a. -> a."),
        (lambda x, i: x[i], [(4, 3), (2,)], ".a b -> ba"),
        (jnp.linalg.inv, [(2, 3, 3)], "a.. -> a.."),
        (jnp.linalg.svd, [(2, 3, 4)], "a.. -> a.. a. a.."),
        (lambda x: jnp.fft.rfft(x), [(2, 8)], "a. -> a."),
        (jnp.outer, [(3,), (3,)], "a b -> ab"),
        (lambda x: jnp.einsum("i,j->ij", x, x), [(3,)], "a -> a."),
        (lambda x: jnp.unstack(x, axis=1), [(2, 2)], "a. -> a a"),
        (lambda x, y: jnp.ones((3, 3)).at[x].max(y), [(2,), (2, 3)], "a bc -> .c"),
    ],
)
def test_the_rule_of_a_function(fn, shapes, outlined):
    dtypes = [np.int32 if s == (2,) else np.float32 for s in shapes]
    jaxpr = jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)])
    assert outline(derived_rule(jaxpr)) == outlined


def test_pieces_of_a_dim_that_is_parted_or_joined_are_whole_rows():
    jaxpr = jax.make_jaxpr(lambda x: (x.reshape(2, 3, 4), x.reshape(24)))(jax.ShapeDtypeStruct((6, 4), np.float32))
    rule = derived_rule(jaxpr)
    assert outline(rule) == "ab -> a.b a"
    assert rule.inputs[0][0] in rule.aligned
    assert rule.inputs[0][1] not in rule.aligned


def test_dims_say_a_rule_for_any_rank_and_nothing_of_other_arrays():
    rule = DimsRule.parse("*b [n] -> *b draws", ["x"], "draw")
    call = OpCall("draw", ("x", "key"), ((2, 3, 4), (2,)), ("f", "u"), {}, ((2, 3, 5),), ("i",), drawn=True)
    assert outline(rule(call)) == "ab. . -> ab."


@pytest.fixture
def registered():
    names = set(OPS)
    yield register_op
    for name in set(OPS) - names:
        del OPS[name]


def test_a_registered_op_has_placements_by_its_dims(registered):
    center = registered(
        lambda x, w: (x - x.mean(-1, keepdims=True)) * w, name="center", sharding="*b [n], [n] -> *b [n]"
    )
    values = np.arange(24, dtype="float32").reshape(4, 6)
    out = center(shard_tensor(values, GRID, [S0, S1]), polyreme.ones([6]))
    assert out.placements == [S0, R]
    np.testing.assert_allclose(out.numpy(), values - values.mean(-1, keepdims=True), rtol=1e-6)  # 6 terms


def test_a_scatter_of_indexes_cut_out_of_a_split_array_counts_no_padding(registered):
    counts = registered(lambda x: jnp.zeros(4, int).at[x.reshape(2, 3)[:, :2].reshape(4)[1:]].add(1), name="counts_of")
    values = np.array([0, 1, 3, 0, 0, 1])
    for placements in ([R, R], [S0, R], [R, S0]):
        assert counts(shard_tensor(values, GRID, placements)).tolist() == [2, 1, 0, 0], placements


def test_an_op_without_a_rule_is_logged_once(registered, caplog):
    def doubled(x):
        return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    op = registered(doubled, name="doubled_on_the_host", backward=None)
    values = np.arange(4, dtype="float32")
    with caplog.at_level(logging.INFO, "polyreme.distributed.auto_parallel"):
        for placements in ([R, R], [Partial(), R]):
            np.testing.assert_array_equal(op(shard_tensor(values, GRID, placements)).numpy(), values * 2)
        polyreme.exp(shard_tensor(values, GRID, [S0, R]))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "doubled_on_the_host has no sharding rule (nothing is known of the dims of pure_callback)" in record.message
    assert unknown_primitives(jax.make_jaxpr(doubled)(values)) == ["pure_callback"]


def test_a_captured_op_that_draws_has_a_rule_only_if_it_declares_one(caplog):
    x = shard_tensor(np.arange(64, dtype="float32").reshape(4, 1, 4, 4), GRID, [S0, R])
    mode.current.mode.logged.discard("fractional_max_pool2d")
    placements = []

    def run(x):
        pooled, kept = F.fractional_max_pool2d(x, 2), F.dropout(x, 0.5)
        placements.append(kept.placements)
        return pooled

    with caplog.at_level(logging.INFO, "polyreme.distributed.auto_parallel"):
        pooled = polyreme.jit.to_static(run)(x)
    assert placements[-1] == [S0, R]
    assert pooled.shape == [4, 1, 2, 2]
    told = [r.message for r in caplog.records if r.name == "polyreme.distributed.auto_parallel"]
    assert [message.partition(":")[0] for message in told] == [
        "fractional_max_pool2d has no sharding rule (what it draws is not known in captured code)"
    ]


def test_the_page_names_every_op_and_the_rules_that_are_declared():
    text = write_sharding_rules.PAGE.read_text()
    for line in write_sharding_rules.declared_part():
        assert f"{line}\n" in text, "run: python -m tools.write_sharding_rules"
    ops = {name for name, public in OPS.items() if hasattr(public, "op")}
    assert {name for name in ops if f"`{name}`" not in text} == set()


@pytest.mark.slow
def test_the_whole_page_is_true():
    assert write_sharding_rules.PAGE.read_text() == write_sharding_rules.page(), "python -m tools.write_sharding_rules"
