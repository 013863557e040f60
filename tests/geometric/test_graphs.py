"""Neighbours sampled and nodes renumbered, against loops over the graph; messages run captured and in training."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import geometric, incubate
from polyreme.errors import ConfigError, HostValueError, ShapeError

ROW = [3, 7, 0, 9, 1, 4, 2, 9, 3, 9, 1, 9, 7]
COLPTR = [0, 2, 4, 5, 6, 7, 9, 11, 11, 13, 13]


def tensors(*values, dtype="int64"):
    return [paddle.to_tensor(np.array(v, dtype)) for v in values]


GRAPH = tensors(ROW, COLPTR)


def neighbors_of(node):
    return ROW[COLPTR[node] : COLPTR[node + 1]]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_all_neighbors(dtype):
    row, colptr, nodes, eids = tensors(ROW, COLPTR, [0, 8, 7, 2], np.arange(13) * 10, dtype=dtype)
    found, counts, ids = geometric.sample_neighbors(row, colptr, nodes, -1, eids, True)
    assert found.tolist() == [n for node in (0, 8, 7, 2) for n in neighbors_of(node)]
    assert (found.dtype, counts.dtype, counts.tolist()) == (dtype, np.int32, [2, 2, 0, 1])
    assert ids.tolist() == [0, 10, 110, 120, 40]


def test_a_sample_is_even_without_repetition_and_follows_the_seed():
    row, colptr = tensors(np.arange(40), [0, 10, 10, 40])
    nodes = tensors([2, 0, 1])[0]
    paddle.seed(5)
    first = geometric.sample_neighbors(row, colptr, nodes, 4)
    assert first[1].tolist() == [4, 4, 0]
    chosen = first[0].numpy()
    assert len(set(chosen[:4])) == 4
    assert (chosen[:4] >= 10).all()
    assert (chosen[4:] < 10).all()
    other = geometric.sample_neighbors(row, colptr, nodes, 4)[0]
    paddle.seed(5)
    again = incubate.graph_sample_neighbors(row, colptr, nodes, sample_size=4)
    assert (again[0].tolist(), other.tolist() == chosen.tolist()) == (chosen.tolist(), False)
    drawn = np.concatenate([geometric.sample_neighbors(row, colptr, nodes, 4)[0].numpy()[4:] for _ in range(300)])
    # 300 draws of 4 of 10: each is met 120 times on average, with a standard deviation below 8.5
    assert (np.abs(np.bincount(drawn, minlength=10) - 120) < 5 * 8.5).all()


def test_weights_decide_what_is_drawn():
    row, colptr, nodes = tensors(np.arange(4), [0, 4], [0])
    weight = paddle.to_tensor([1.0, 0.0, 3.0, 0.0])
    paddle.seed(1)
    drawn = [int(geometric.weighted_sample_neighbors(row, colptr, weight, nodes, 1)[0]) for _ in range(400)]
    # 3 of 4 draws are node 2: 300 on average, standard deviation 8.7
    assert set(drawn) == {0, 2}
    assert abs(drawn.count(2) - 300) < 5 * 8.7
    both, counts = geometric.weighted_sample_neighbors(row, colptr, weight, nodes, 2)
    assert (sorted(both.tolist()), counts.tolist()) == ([0, 2], [2])
    _, _, ids = geometric.weighted_sample_neighbors(row, colptr, weight, nodes, -1, row + 5, True)
    assert ids.tolist() == [5, 6, 7, 8]


def renumbered(x, neighbors):
    nodes = list(x)
    for n in neighbors:
        if n not in nodes:
            nodes.append(n)
    return [nodes.index(n) for n in neighbors], nodes


def test_reindexed_graphs():
    x, a, b = [4, 0, 2], [8, 9, 0, 4, 7, 6, 7], [0, 2, 3, 5, 1]
    count_a, count_b = [2, 3, 2], [1, 3, 1]
    src, dst, nodes = geometric.reindex_graph(*tensors(x, a, count_a))
    assert (src.tolist(), nodes.tolist()) == renumbered(x, a)
    assert dst.tolist() == [0, 0, 1, 1, 1, 2, 2]
    lists = [tensors(a, b, dtype="int32"), tensors(count_a, count_b, dtype="int32")]
    joined = geometric.reindex_heter_graph(tensors(x, dtype="int32")[0], *lists)
    assert (joined[0].tolist(), joined[2].tolist()) == renumbered(x, a + b)
    assert joined[1].tolist() == [*dst.tolist(), 0, 1, 1, 1, 2]
    assert joined[0].dtype == "int32"
    earlier = incubate.graph_reindex(*tensors(x, a + b, count_a + count_b))
    assert [t.tolist() for t in earlier] == [t.tolist() for t in joined]


def test_neighbors_over_two_hops():
    eids = paddle.arange(13) + 100
    nodes = tensors([0, 8])[0]
    src, dst, index, sampled, ids = incubate.graph_khop_sampler(*GRAPH, nodes, [-1, -1], eids, True)
    # every node met in the first hop gives its own neighbours in the second, and none twice
    met, wanted = [0, 8], []
    for _ in range(2):
        fresh = [n for n in met if n not in {d for _, d in wanted}]
        wanted += [(n, d) for d in fresh for n in neighbors_of(d)]
        met += sorted({n for n, _ in wanted} - set(met))
    names = index.numpy()
    edges = list(zip(names[src.numpy()[:, 0]].tolist(), names[dst.numpy()[:, 0]].tolist(), strict=True))
    assert sorted(edges) == sorted(wanted)
    assert [ROW[i - 100] for i in ids.numpy()[:, 0]] == [e[0] for e in edges]
    assert (names[sampled.numpy()].tolist(), names[:2].tolist(), src.shape) == ([0, 8], [0, 8], [len(edges), 1])
    paddle.seed(2)
    src, *_ = incubate.graph_khop_sampler(*GRAPH, nodes, [1, 1])
    assert src.shape[0] in (2, 3, 4)  # node 7 has no neighbours


def test_a_graph_layer_is_trained_and_captured():
    src, dst = tensors([0, 1, 2, 3, 0], [1, 2, 3, 0, 2])
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((4, 3)).astype("float32"), stop_gradient=False)
    gate = paddle.to_tensor(np.full(5, 0.5, "float32"), stop_gradient=False)

    def layer(x, gate, src, dst):
        edges = geometric.send_uv(x, x, src, dst, "mul").sum(1) * gate
        return geometric.send_ue_recv(x, edges, src, dst, "mul", "mean", 5).sum()

    captured = paddle.jit.to_static(layer)
    for fn in (layer, captured):
        fn(x, gate, src, dst).backward()
    # the same gradient twice over, eager and captured
    loss = layer(x, gate, src, dst)
    grads = paddle.grad([loss], [x, gate])
    np.testing.assert_allclose(x.grad.numpy(), 2 * grads[0].numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gate.grad.numpy(), 2 * grads[1].numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(HostValueError, match="send_u_recv takes out_size"):
        paddle.jit.to_static(lambda x, i: geometric.segment_sum(x, i))(x, dst[:4])
    # out of range where no value can be read: reads give NaN, writes are dropped
    lost = paddle.jit.to_static(lambda x, s, d: geometric.send_u_recv(x, s, d))(x, src - 9, dst)
    assert np.isnan(lost.numpy()[1:]).all()
    gone = paddle.jit.to_static(lambda x, s, d: geometric.send_u_recv(x, s, d))(x, src, dst - 9)
    assert not gone.numpy().any()


def test_equal_rows_share_the_derivative_of_their_maximum():
    data = paddle.to_tensor([[2.0], [2.0], [1.0]], stop_gradient=False)
    geometric.segment_max(data, paddle.to_tensor([0, 0, 0])).sum().backward()
    assert data.grad.tolist() == [[0.5], [0.5], [0.0]]
    size = paddle.to_tensor(2)
    assert geometric.send_u_recv(data, *tensors([0], [1]), out_size=size).tolist() == [[0.0], [2.0]]
    earlier = incubate.graph_send_recv(data, *tensors([0, 2], [1, 1]), "min")
    assert earlier.tolist() == [[0.0], [1.0], [0.0]]
    half = paddle.ones([4096, 1], "float16")
    assert float(geometric.segment_sum(half, paddle.zeros([4096], "int64"))) == 4096


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: geometric.sample_neighbors(*GRAPH, *tensors([10])), IndexError, "10 nodes"),
        (lambda: geometric.sample_neighbors(*GRAPH, *tensors([[1, 2]])), ShapeError, r"input_nodes \[1, 2\] must be"),
        (lambda: geometric.sample_neighbors(*GRAPH, *tensors([1]), -2), ConfigError, "sample_size=-2"),
        (lambda: geometric.sample_neighbors(*GRAPH, *tensors([1]), 2, None, True), ConfigError, "needs eids"),
        (
            lambda: geometric.sample_neighbors(
                *GRAPH,
                *tensors(
                    [1],
                ),
                2,
                GRAPH[1],
                True,
            ),
            ShapeError,
            "11 ids for 13",
        ),
        (lambda: geometric.sample_neighbors(*tensors([1], [0, 2]), *tensors([0])), ShapeError, "colptr must rise"),
        (
            lambda: geometric.weighted_sample_neighbors(*GRAPH, paddle.ones([3]), *tensors([0])),
            ShapeError,
            "one weight, not below 0",
        ),
        (lambda: geometric.reindex_graph(*tensors([1, 1], [0], [1, 0])), ShapeError, "holds a node twice"),
        (lambda: geometric.reindex_graph(*tensors([1, 2], [0], [1, 1])), ShapeError, "count adds up to 2"),
        (lambda: geometric.reindex_heter_graph(tensors([1])[0], [], []), ShapeError, "give as many of each"),
        (lambda: incubate.graph_khop_sampler(*GRAPH, *tensors([0]), []), ConfigError, "sample_sizes="),
        (lambda: incubate.graph_khop_sampler(*GRAPH, *tensors([0]), [1], None, True), ConfigError, "sorted_eids"),
        (lambda: incubate.graph_khop_sampler(*GRAPH, *tensors([0]), [1], GRAPH[1], True), ShapeError, "11 ids for 13"),
    ],
)
def test_what_is_wrong_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
