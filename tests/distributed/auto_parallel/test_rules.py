"""Placements follow from the rules, and whatever they are, values are those of dense NumPy arrays."""

import contextlib
import functools
import operator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyreme
import polyreme.nn.functional as F
from polyreme.core import mode
from polyreme.distributed import Partial, ProcessMesh, ReduceType, Replicate, Shard, shard_tensor
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.kept import form_of, place
from polyreme.distributed.auto_parallel.tensors.local_values import dtensor_from_local
from polyreme.errors import GradError, PlacementError

R, P = Replicate(), Partial()
GRID = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
LINE = ProcessMesh([0, 1, 2], dim_names=["x"])
rng = np.random.default_rng(0)


def put(values, mesh, placements, **kwargs):
    return shard_tensor(polyreme.to_tensor(values, stop_gradient=False), mesh, placements, **kwargs)


def pieces_joined(t):
    """The global value from local values alone, by the definition of placements."""
    form = form_of(t)
    joins = {
        ReduceType.kRedSum: operator.add,
        ReduceType.kRedAvg: operator.add,
        ReduceType.kRedMax: np.maximum,
        ReduceType.kRedMin: np.minimum,
        ReduceType.kRedProd: operator.mul,
        ReduceType.kRedAny: np.logical_or,
        ReduceType.kRedAll: np.logical_and,
    }
    seen = {}
    for pid in t.process_mesh.process_ids:
        where = form.coordinates(pid)
        rows = tuple(form.local_rows(d, where)[0] for d in range(t.ndim))
        addend = tuple(where[a] for a in form.partial)
        seen.setdefault(rows, {})[addend] = t._local_value(pid).numpy()
    out = np.empty(t.shape, t.numpy().dtype)
    for rows, addends in seen.items():
        parts = addends
        for axis in reversed(form.partial):
            n, grouped = t.process_mesh.get_dim_size(axis), {}
            for at in sorted(parts):
                grouped.setdefault(at[:-1], []).append(parts[at])
            kind = form.reduce_type(axis)
            parts = {
                k: functools.reduce(joins[kind], v) / (n if kind is ReduceType.kRedAvg else 1)
                for k, v in grouped.items()
            }
        part = parts[()]
        out[tuple(slice(r, r + n) for r, n in zip(rows, part.shape, strict=True))] = part
    return out


# name: (function, shapes of the inputs). Values are between 0.5 and 1.5, so that divisions and logs are tame.
OPS = {
    "add": (lambda a, b: a + b, [(4, 6), (4, 6)]),
    "broadcast": (lambda a, b: a * b - b, [(4, 6), (6,)]),
    "divide": (lambda a, b: a / b, [(4, 1), (4, 6)]),
    "chain": (lambda a, b: polyreme.exp(-(a @ b)), [(4, 6), (6, 5)]),
    "matmul": (lambda a, b: a @ b, [(2, 4, 6), (6, 5)]),
    "batched": (lambda a, b: polyreme.matmul(a, b, transpose_y=True), [(2, 4, 6), (2, 3, 6)]),
    "linear": (lambda a, w, b: F.linear(a, w, b), [(4, 6), (6, 4), (4,)]),
    "einsum": (lambda a, b: polyreme.einsum("bik,bkj->ij", a, b), [(2, 4, 3), (2, 3, 4)]),
    "sum": (lambda a: a.sum(1), [(4, 6)]),
    "mean": (lambda a: a.mean(0, keepdim=True), [(5, 6)]),
    "max": (lambda a: a.max(-1), [(4, 6)]),
    "prod": (lambda a: a.prod(0), [(4, 3)]),
    "var": (lambda a: a.var(0), [(4, 6)]),
    "softmax": (lambda a: F.softmax(a, -1), [(4, 6)]),
    "cumsum": (lambda a: polyreme.cumsum(a, 0), [(4, 6)]),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, [6], w, b), [(4, 2, 6), (6,), (6,)]),
    "reshape": (lambda a: a.reshape([8, 3]), [(2, 4, 3)]),
    "split dim": (lambda a: a.reshape([2, 2, 6]), [(4, 6)]),
    "transpose": (lambda a: a.transpose([2, 0, 1]), [(2, 4, 3)]),
    "concat": (lambda a, b: polyreme.concat([a, b], 1), [(4, 6), (4, 2)]),
    "stack": (lambda a, b: polyreme.stack([a, b], 1), [(4, 6), (4, 6)]),
    "split": (lambda a: polyreme.split(a, 2, 1)[1], [(4, 6)]),
    "slice": (lambda a: a[1:3, :, 0], [(4, 6, 2)]),
    "squeeze": (lambda a: a.squeeze(1).unsqueeze(0), [(4, 1, 6)]),
    "gather": (lambda a: polyreme.gather(a, polyreme.to_tensor([3, 0, 0]), 0), [(4, 6)]),
    "expand": (lambda a: a.expand([3, 4, 6]), [(4, 1)]),
    "pad": (lambda a: F.pad(a, [1, 0, 0, 1]), [(1, 2, 4, 6)]),
    "conv": (lambda a, w: F.conv2d(a, w, padding=1), [(2, 4, 3, 3), (4, 4, 3, 3)]),
    "pool": (lambda a: F.max_pool2d(a, 2), [(2, 4, 4, 2)]),
    "cast": (lambda a: a.astype("float64"), [(4, 6)]),
    "mse": (lambda a, b: F.mse_loss(a, b), [(4, 6), (4, 6)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 4, 2, 4)] * 3),
    "inverse": (lambda a: polyreme.linalg.inv(a @ a.T + polyreme.eye(4)), [(4, 6)]),
    "topk": (lambda a: polyreme.topk(a, 2, axis=0)[0], [(4, 6)]),
    "where": (lambda a, b: polyreme.where(a > 1.0, a, b), [(4, 6), (6,)]),
    "tril": (lambda a: polyreme.tril(a), [(4, 6)]),
    "scale": (lambda a: polyreme.scale(a, 3.0), [(4, 6)]),
}


@st.composite
def cases(draw):
    name = draw(st.sampled_from(sorted(OPS)))
    mesh = draw(st.sampled_from([GRID, LINE]))
    placements = []
    for shape in OPS[name][1]:
        one = st.sampled_from([R, P, *(Shard(d) for d in range(len(shape)))])
        placements.append(draw(st.none() | st.lists(one, min_size=mesh.ndim, max_size=mesh.ndim)))
    return name, mesh, placements


def check(name, mesh, placements):
    fn, shapes = OPS[name]
    values = [rng.uniform(0.5, 1.5, s).astype("float32") for s in shapes]
    given_ = [
        polyreme.to_tensor(v, stop_gradient=False) if p is None else put(v, mesh, p)
        for v, p in zip(values, placements, strict=True)
    ]
    dense = [polyreme.to_tensor(v, stop_gradient=False) for v in values]
    got, want = fn(*given_), fn(*dense)
    # float32, at most 216 terms of size about 1 added in another order; inverses lose two digits more
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3 if name == "inverse" else 2e-5, atol=2e-5)
    close(got.numpy(), want.numpy())
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if got.is_dist():
        close(pieces_joined(got), want.numpy())
        assert got._local_shape == got._local_value().shape
    seed = polyreme.to_tensor(rng.uniform(0.5, 1.5, want.shape).astype(want.dtype))
    got.backward(seed)
    want.backward(seed)
    for x, y, p in zip(given_, dense, placements, strict=True):
        close(x.grad.numpy(), y.grad.numpy())
        if p is not None:
            assert x.grad.is_dist()
            close(pieces_joined(x.grad), y.grad.numpy())
            assert [g for g, q in zip(x.grad.placements, p, strict=True) if q.is_shard()] == [
                q for q in p if q.is_shard()
            ]


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_placements_give_the_dense_value_and_gradients(case):
    check(*case)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_many_placements_give_the_dense_value_and_gradients(case):
    check(*case)


# (what, inputs' shapes and placements on GRID, function, placements of the result, of the inputs' gradients)
S0, S1 = Shard(0), Shard(1)
V4 = np.array([1.5, 2.0, 3.0, 0.5], "float32")  # 2, 2 and no rows over LINE
TABLE = [
    ("batch", [((4, 6), [S0, R]), ((6, 8), [R, R])], lambda x, w: x @ w, [S0, R], [[S0, R], [P, R]]),
    ("column", [((4, 6), [S0, R]), ((6, 8), [R, S1])], lambda x, w: x @ w, [S0, S1], [[S0, P], [P, S1]]),
    ("row", [((4, 6), [R, S1]), ((6, 8), [R, S0])], lambda x, w: x @ w, [R, P], [[R, S1], [R, S0]]),
    ("partial in", [((4, 6), [P, R]), ((6, 8), [R, S1])], lambda x, w: x @ w, [P, S1], [[R, P], [R, S1]]),
    ("bias", [((4, 6), [S0, R]), ((6,), [R, R])], lambda x, b: x + b, [S0, R], [[S0, R], [P, R]]),
    ("linear ops", [((4, 6), [P, R])], lambda x: (-x * 2).reshape([8, 3]).transpose([1, 0]), [P, R], [[R, R]]),
    ("not linear", [((4, 6), [P, S0])], lambda x: polyreme.exp(x), [R, S0], [[R, S0]]),
    ("sum of two", [((4, 6), [P, R]), ((4, 6), [R, R])], lambda x, y: x + y, [R, R], [[R, R], [R, R]]),
    ("sum", [((4, 6), [S0, S1])], lambda x: x.sum(0), [P, S0], [[S0, S1]]),
    ("mean", [((4, 6), [S0, R])], lambda x: x.mean(), [Partial(ReduceType.kRedAvg), R], [[S0, R]]),
    ("max", [((4, 6), [S0, R])], lambda x: x.max(0), [Partial(ReduceType.kRedMax), R], [[S0, R]]),
    ("prod", [((4, 6), [S0, R])], lambda x: x.prod(0), [Partial(ReduceType.kRedProd), R], [[S0, R]]),
    ("softmax", [((4, 6), [S0, S1])], lambda x: F.softmax(x), [S0, R], [[S0, S1]]),
    ("merge", [((4, 2, 3), [S0, S1])], lambda x: x.reshape([8, 3]), [S0, R], [[S0, S1]]),
    ("conv", [((4, 4, 3, 3), [S0, S1]), ((2, 4, 1, 1), [R, S1])], F.conv2d, [S0, R], [[S0, S1], [R, S1]]),
    ("norm", [((4, 6), [S0, R]), ((6,), [R, R])], lambda x, w: F.layer_norm(x, [6], w), [S0, R], [[S0, R], [P, R]]),
    ("queries", [((4, 2, 4), [S0, S1])], lambda q: F.scaled_dot_product_attention(q, q, q), [S0, S1], [[S0, S1]]),
    ("rows' products", [((4, 6), [S0, S1]), ((4, 6), [R, R])], polyreme.dot, [S0, P], [[S0, S1], [R, R]]),
    ("two orders", [((4, 6), [S0, R]), ((4, 6), [R, S0])], lambda x, y: x + y, [S0, S0], [[S0, R], [R, S0]]),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "fn", "placements", "grads"), [c[1:] for c in TABLE], ids=[c[0] for c in TABLE])
def test_placements_follow_the_rules(inputs, fn, placements, grads):
    values = [rng.uniform(0.5, 1.5, shape).astype("float32") for shape, _ in inputs]
    on_mesh = [put(v, GRID, p) for v, (_, p) in zip(values, inputs, strict=True)]
    result = fn(*on_mesh)
    assert result.placements == placements
    result.sum().backward()
    assert [x.grad.placements for x in on_mesh] == grads


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "any", "all", "count_nonzero"])
def test_reductions_of_uneven_pieces(name):
    values = {"max": -V4, "any": V4 > 9, "all": V4 > 0}.get(name, V4)  # what zeros in the padding would change
    result = getattr(polyreme, name)(shard_tensor(values, LINE, [S0]))
    want = getattr(np, name)(values)
    assert result.placements[0].is_partial()
    np.testing.assert_allclose(result.numpy(), want, rtol=1e-6)
    np.testing.assert_allclose(pieces_joined(result), want, rtol=1e-6)


HALVES, TRUTHS = [np.array([0.5, 1.5], "float32")] * 2, [np.array([True, True]), np.array([True, False])]
INTS, BYTES = [np.array([1, 7]), np.array([2, 4])], [np.array([100, 7], "int8"), np.array([100, 4], "int8")]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("addends", "kind", "fn"),
    [
        (HALVES, ReduceType.kRedSum, lambda x: polyreme.cumsum(x, 0, dtype="int32")),
        (HALVES, ReduceType.kRedSum, lambda x: polyreme.sum(x, dtype="int32")),
        (TRUTHS, ReduceType.kRedSum, lambda x: x * 2.0),
        (TRUTHS, ReduceType.kRedSum, lambda x: polyreme.cumsum(x, 0)),
        (TRUTHS, ReduceType.kRedSum, lambda x: polyreme.outer(x, polyreme.ones([2]))),
        (TRUTHS, ReduceType.kRedSum, lambda x: x + shard_tensor([1.0, 2.0], GRID, [P, P])),
        (INTS, ReduceType.kRedAvg, lambda x: x * 3),
        (INTS, ReduceType.kRedAvg, lambda x: x + x),
        (BYTES, ReduceType.kRedSum, lambda x: x * polyreme.to_tensor([10, 10])),
    ],
)
def test_addends_join_in_their_own_dtype(addends, kind, fn):
    parts = [polyreme.to_tensor(addend) for addend in addends]
    x = dtensor_from_local(parts * 2, GRID, [R, Partial(kind)])
    want = fn(polyreme.to_tensor(x.numpy()))
    got = fn(x)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.numpy(), want.numpy())


@pytest.mark.parametrize("placements", [[S0], [S1]], ids=str)
def test_the_gradient_of_a_sort_of_uneven_pieces(placements):
    values = rng.normal(size=(4, 5)).astype("float32")
    x, seed = put(values, LINE, placements), polyreme.to_tensor(rng.normal(size=(4, 5)).astype("float32"))
    polyreme.sort(x, 0).backward(seed)
    want = np.empty_like(values)
    np.put_along_axis(want, values.argsort(0), seed.numpy(), 0)
    np.testing.assert_array_equal(x.grad.numpy(), want)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("placements", [[S0], [S1]], ids=str)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: polyreme.index_select(x, polyreme.to_tensor([1, 0, 0]), 1),
        lambda x: polyreme.take(x, polyreme.to_tensor([1, 7, 9])),  # a derived rule
        lambda x: polyreme.masked_scatter(x, x > 0, polyreme.ones([30])),
    ],
)
def test_rows_looked_up_and_put_in_uneven_pieces(fn, placements):
    values = rng.normal(size=(5, 6)).astype("float32")
    line, dense = ProcessMesh([0, 1, 2, 3], ["x"]), polyreme.to_tensor(values, stop_gradient=False)
    x = put(values, line, placements)
    got, want = fn(x), fn(dense)
    (got * got).sum().backward()
    (want * want).sum().backward()
    np.testing.assert_array_equal(got.numpy(), want.numpy())
    np.testing.assert_allclose(x.grad.numpy(), dense.grad.numpy(), rtol=1e-6)


def test_embedding_of_split_rows():
    ids = shard_tensor(np.array([[0, 5], [3, 2]]), GRID, [S0, R])
    table = put(rng.normal(size=(6, 4)).astype("float32"), GRID, [R, S0])
    rows = F.embedding(ids, table, padding_idx=5)
    assert rows.placements == [S0, P]
    want = table.numpy()[[[0, 5], [3, 2]]]
    want[0, 1] = 0
    np.testing.assert_array_equal(rows.numpy(), want)
    np.testing.assert_array_equal(rows._local_value(1).numpy(), [[[0] * 4, [0] * 4]])  # it has rows 3..5
    rows.sum().backward()
    np.testing.assert_array_equal(table.grad.numpy()[:, 0], [1, 0, 1, 1, 0, 0])


def test_placements_of_losses():
    logits, labels = put(rng.normal(size=(4, 6)).astype("float32"), GRID, [S0, S1]), polyreme.to_tensor([0, 1, 5, 2])
    placed = {how: F.cross_entropy(logits, labels, reduction=how).placements for how in ("none", "sum", "mean")}
    assert placed == {"none": [S0, R], "sum": [P, R], "mean": [R, R]}
    assert F.mse_loss(logits, logits * 2).placements == [Partial(ReduceType.kRedAvg)] * 2


def test_addends_of_a_product_lie_where_they_were_made():
    x, w = rng.normal(size=(4, 6)).astype("float32"), rng.normal(size=(6, 2)).astype("float32")
    y = put(x, LINE, [S1]) @ put(w, LINE, [S0])
    for i in range(3):  # 2 terms
        np.testing.assert_allclose(y._local_value(i).numpy(), x[:, 2 * i : 2 * i + 2] @ w[2 * i : 2 * i + 2], rtol=1e-5)


def kernels_of(name):
    return [k for k in mode.current.mode.kernels.values() if k.base.name == name]


COLLECTIVES = (" all-reduce(", " all-gather(", " reduce-scatter(", " all-to-all(", " collective-permute(")


def count(text):
    return sorted(c.strip(" (") for line in text.splitlines() for c in COLLECTIVES if c in line)


def test_partial_results_and_gradients_communicate_nothing():
    x, w, b = put(np.ones((4, 6), "float32"), GRID, [S0, R]), put(np.ones((6, 10), "float32"), GRID, [R, S1]), None
    b = put(np.ones(10, "float32"), GRID, [R, S0])
    y = F.linear(x, w, b)
    kernel = kernels_of("linear")[-1]
    assert count(kernel.forward.lower(x._array, w._array, b._array).compile().as_text()) == []
    run, forms = kernel.backward((True, True, True), (True,), [form_of(y)])
    assert [list(f.placements) for f in forms] == [[S0, P], [P, S1], [P, S0]]
    assert count(run.lower((x._array, w._array, b._array), (y._array,)).compile().as_text()) == []
    a, c = put(np.ones((4, 14), "float32"), GRID, [S0, S1]), put(np.ones((14, 8), "float32"), GRID, [R, S0])
    assert (a @ c).placements == [S0, P]
    assert count(kernels_of("matmul")[-1].forward.lower(a._array, c._array).compile().as_text()) == []


class Block(polyreme.nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = polyreme.nn.LayerNorm(4), polyreme.nn.Linear(4, 8), polyreme.nn.Linear(8, 4)
        self.seen = []

    def forward(self, x):
        h = F.relu(self.up(self.norm(x)))
        self.seen.append(h.placements)
        return x + self.down(h)


def captured(marked):
    """(losses, collectives of the step, placements inside) of a split block; marked: Tensors know their placements."""
    polyreme.seed(1)
    block = Block()
    placed = {"up.weight": [R, S1], "up.bias": [R, S0], "down.weight": [R, S0]}
    for name, p in block.named_parameters():
        place(p, Form(GRID, tuple(placed.get(name, [R, R])), tuple(p.shape)))
    optimizer = polyreme.optimizer.AdamW(0.1, parameters=block.parameters())

    @polyreme.jit.to_static
    def step(x):
        loss = (block(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    x = shard_tensor(np.random.default_rng(2).normal(size=(8, 4)).astype("float32"), GRID, [S0, R])
    with mode.using(mode.current.plain) if not marked else contextlib.nullcontext():
        losses = [float(step(x)) for _ in range(2)]
        return losses, count(step.compiled(x).as_text()), block.seen[-1]


@pytest.mark.slow
def test_a_captured_step_communicates_as_one_that_only_xla_places():
    marked, plain = captured(True), captured(False)
    assert marked[2] == [S0, S1]
    np.testing.assert_allclose(marked[0], plain[0], rtol=1e-5)  # 32 terms
    assert marked[1] == plain[1]


def test_other_meshes_in_one_op_are_refused_and_dense_tensors_are_whole():
    x = put(np.ones((6, 2), "float32"), GRID, [S0, R])
    with pytest.raises(PlacementError, match="add: inputs lie on different meshes"):
        x + put(np.ones((6, 2), "float32"), LINE, [S0])
    dense = polyreme.ones([2])
    dense.stop_gradient = False
    y = x * dense + np.ones(2, "float32")
    assert y.placements == [S0, R]
    y.sum().backward()
    assert dense.grad.tolist() == [6, 6]
    with pytest.raises(TypeError, match="concat takes a list of Tensors"):
        polyreme.concat(x)
    with pytest.raises(GradError, match=r"backward through .* a second time"):
        y.sum().backward()
