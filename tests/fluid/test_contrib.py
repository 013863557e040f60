"""fluid.contrib, debugger and net_drawer, against NumPy and what PaddlePaddle's ops give."""

import itertools

import numpy as np
import pytest

from polyreme import fluid
from polyreme.errors import AbsentError, ConfigError
from polyreme.fluid import contrib, debugger, net_drawer

from .table import Case, check, run_cases

L = fluid.layers
R = np.random.RandomState(3)
X, Y = R.randn(2, 3, 4).astype("float32")
IDS = fluid.create_lod_tensor(np.array([[1], [2], [0]]), [[2, 1]], "cpu")
TABLE = R.randn(5, 4).astype("float32")
ROWS = fluid.initializer.NumpyArrayInitializer(TABLE)
EPS = np.finfo("float32").eps


def fused(*functors):
    return lambda x, y: contrib.layers.fused_elemwise_activation(x, y, list(functors), scale=2.0)


CASES = [
    Case("binary of unary", fused("elementwise_add", "scale"), (X, Y), X + 2 * Y),
    Case("unary of binary", fused("relu", "elementwise_mul"), (X, Y), np.maximum(X * Y, 0)),
    Case("columns joined", lambda x, y: contrib.layers.partial_concat([x, y], 1, 2), (X, Y),
         np.concatenate([X[:, 1:3], Y[:, 1:3]], 1)),
    Case("columns from the end", lambda x, y: contrib.layers.partial_concat([x, y], -2), (X, Y),
         np.concatenate([X[:, 2:], Y[:, 2:]], 1)),
    Case("columns added", lambda x, y: contrib.layers.partial_sum([x, y], 1, 2), (X, Y), X[:, 1:3] + Y[:, 1:3]),
    Case("shuffled rows", lambda x: L.reduce_sum(contrib.layers.shuffle_batch(x), dim=0), (X,), X.sum(0)),
]  # fmt: skip


@pytest.fixture(scope="module")
def results():
    return run_cases(CASES, seed=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_equals_numpy(results, case):
    check(case, results)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(x, h, gates, candidate):
    (w, b), (v, c) = gates, candidate
    r, u = np.split(sigmoid(np.concatenate([x, h], 1) @ w + b), 2, 1)
    return u * h + (1 - u) * np.tanh(np.concatenate([x, r * h], 1) @ v + c)


def test_recurrent_layers_and_the_rest_of_a_script(script):
    """Two GRU layers, backward too, and an LSTM; embeddings summed; sums for click models."""
    x = script.data("x", [2, 3, 4], "float32")
    rows, last = contrib.layers.basic_gru(x, None, 5, num_layers=2, bidirectional=True)
    lstm_rows, lstm_hidden, cells = contrib.layers.basic_lstm(x, None, None, 5, forget_bias=0.5)
    summed = contrib.layers.fused_embedding_seq_pool(
        script.data("ids", [None, 1], "int64", lod_level=1), [5, 4], param_attr=script.ParamAttr(initializer=ROWS)
    )
    chance, click = script.data("p", [2, 1], "float32"), script.data("c", [2, 1], "int64")
    sums = contrib.layers.ctr_metric_bundle(chance, click)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    value = R.randn(2, 3, 4).astype("float32")
    feed = {"x": value, "ids": IDS, "p": np.float32([[0.25], [0.5]]), "c": np.array([[1], [0]])}
    fetched = [rows, last, lstm_rows, lstm_hidden, cells, summed, *sums]
    for _ in range(2):
        got = [np.asarray(v) for v in exe.run(feed=feed, fetch_list=fetched, return_numpy=False)]
    np.testing.assert_allclose(got[5], [TABLE[1] + TABLE[2], TABLE[0]], atol=8 * EPS)
    want = [2 * (0.75**2 + 0.25), 2 * 1.25, 2 * 0.75, 2 * (sigmoid(0.25) + sigmoid(0.5)), 2, 4]
    np.testing.assert_allclose(np.concatenate(got[6:]), want, rtol=16 * EPS)
    scope, names = script.global_scope(), [p.name for p in script.default_main_program().all_parameters()]
    weights = [np.asarray(scope.find_var(n).get_tensor()) for n in names]
    above, state = [value, value], {}  # each direction goes through layers of its own
    for side, layer in itertools.product(range(2), range(2)):
        w, v, b, c = weights[4 * (2 * side + layer) :][:4]
        h, outs = np.zeros((2, 5), "float32"), {}
        for t in range(3)[:: -1 if side else 1]:
            h = outs[t] = gru(above[side][:, t], h, (w, b), (v, c))
        above[side], state[layer, side] = np.stack([outs[t] for t in range(3)], 1), h
    # sums of 15 products, twelve times
    np.testing.assert_allclose(got[0], np.concatenate(above, 2), atol=256 * EPS)
    np.testing.assert_allclose(got[1], np.stack([state[k] for k in sorted(state)]), atol=256 * EPS)
    assert names[4] == "basic_gru_layers_1/BasicGRUUnit_0.w_0"
    assert names[11] == "basic_gru_reverse_layers_0/BasicGRUUnit_0.b_1"
    w, b = weights[16:18]
    h = c = np.zeros((2, 5), "float32")
    for t in range(3):
        i, j, f, o = np.split(np.concatenate([value[:, t], h], 1) @ w + b, 4, 1)
        c = c * sigmoid(f + 0.5) + sigmoid(i) * np.tanh(j)
        h = sigmoid(o) * np.tanh(c)
    np.testing.assert_allclose(got[2][:, -1], h, atol=128 * EPS)
    np.testing.assert_allclose(got[3:5], [[h], [c]], atol=128 * EPS)
    least, most, unit = contrib.memory_usage(script.default_main_program(), batch_size=4)
    assert (0 < least < most, unit in ("B", "KB")) == (True, True)
    single, pairs = contrib.op_freq_statistic(script.default_main_program())
    counts = dict(single)
    assert single == sorted(single, key=lambda pair: -pair[1])
    assert counts["matmul"] == 9 == sum(op.type == "matmul" for op in script.default_main_program().every_op())
    assert dict(pairs)["concat->matmul"] == 9


def test_decay_apart_from_gradients_and_pictures(script, tmp_path, capsys):
    x = script.data("x", [None, 3], "float32")
    start = script.initializer.Constant(1.0)
    attr = script.ParamAttr(name="w", initializer=start)
    loss = L.mean(L.fc(x, 1, param_attr=attr, bias_attr=script.ParamAttr(name="b", initializer=start)))
    decayed = contrib.extend_with_decoupled_weight_decay(script.optimizer.SGD)
    decayed(weight_decay=0.25, apply_decay_param_fun=lambda n: n == "w", learning_rate=0.5).minimize(loss)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    exe.run(feed={"x": np.full((2, 3), 2.0, "float32")})
    w, b = (np.asarray(script.global_scope().find_var(n).get_tensor()) for n in ("w", "b"))
    np.testing.assert_allclose(w, np.full((3, 1), 0.75 - 0.5 * 2), atol=4 * EPS)
    np.testing.assert_allclose(b, [0.5])
    debugger.draw_block_graphviz(script.default_main_program().global_block(), path=tmp_path / "block.dot")
    text = net_drawer.draw_graph(script.default_startup_program(), script.default_main_program(), tmp_path / "net.dot")
    assert (tmp_path / "block.dot").read_text() == text == (tmp_path / "net.dot").read_text()
    assert text.startswith("digraph")
    debugger.pprint_program_codes(script.default_main_program())
    assert "matmul" in capsys.readouterr().out
    with pytest.raises(TypeError, match="takes a class"):
        contrib.extend_with_decoupled_weight_decay("sgd")


def test_mixed_precision_trains_in_float16(script):
    x = script.data("x", [None, 3], "float32")
    hidden = L.fc(x, 4, param_attr=script.ParamAttr(initializer=script.initializer.Constant(0.1)))
    loss = L.mean(hidden)
    sgd = contrib.mixed_precision.decorate(script.optimizer.SGD(0.5), init_loss_scaling=8.0)
    sgd.minimize(loss)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    feed = {"x": np.ones((2, 3), "float32")}
    first, second = (exe.run(feed=feed, fetch_list=[loss])[0] for _ in range(2))
    assert first == np.float32(3 * np.float16(0.1))  # the product's operands are rounded
    np.testing.assert_allclose(second, [0.3 - 0.5 * (3 + 1) / 4], rtol=4 * np.finfo("float16").eps)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: contrib.layers.fused_elemwise_activation(x, x, ["relu", "tanh"]), ConfigError, "one of"),
        (lambda x: contrib.layers.partial_sum([x], 2, 9), ConfigError, "of 4 columns"),
        (lambda x: contrib.layers.fused_embedding_seq_pool(x, [4, 4], combiner="max"), ConfigError, "sequence_pool"),
        (lambda x: contrib.layers.basic_gru(x, x, 5, num_layers=2), ConfigError, "for 2 layers"),
        (lambda x: contrib.memory_usage(fluid.default_main_program(), 0), ConfigError, "1 or more"),
        (lambda x: contrib.layers.tree_conv(x), AbsentError, "sequence_pad"),
    ],
    ids=["functors", "columns", "combiner", "first states", "batch", "absent"],
)
def test_what_is_refused(script, call, error, says):
    with pytest.raises(error, match=says):
        call(script.data("x", [3, 4], "float32"))


def test_each_worker_reads_its_part_of_the_minibatches(monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    assert list(contrib.distributed_batch_reader(lambda: iter(range(7)))()) == [1, 3, 5]
