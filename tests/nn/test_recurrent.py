"""Recurrent layers beyond the table: loops against fused ops, lengths, capture, Programs, autocast, states, errors."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn as nn
from polyreme import amp, static
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from tests.nn.table import wave

EPS = float(np.finfo(np.float32).eps)
X, LENGTHS = wave((3, 4, 5), 1), np.array([2, 4, 0])
# four steps, each of sums over 5 + 6 terms, through a second layer in places
CLOSE = {"rtol": 256 * EPS, "atol": 256 * EPS}


class Hooked(nn.LSTMCell):
    """LSTMCell whose own forward keeps RNN from running it as one op."""

    def forward(self, inputs, states=None):
        return super().forward(inputs, states)


def leaves(value):
    return [v for part in value for v in leaves(part)] if isinstance(value, (list, tuple)) else [value.numpy()]


@pytest.mark.one_in(3)
@pytest.mark.slow_cases("0-False")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("projection", [0, 2])
def test_a_loop_over_steps_is_the_fused_op(reverse, projection):
    cell = Hooked(5, 6, proj_size=projection)
    plain = nn.LSTMCell(5, 6, proj_size=projection)
    plain.set_state_dict(cell.state_dict())
    results = []
    for one in (cell, plain):
        outputs, last = nn.RNN(one, reverse)(to_tensor(X), None, to_tensor(LENGTHS))
        (outputs.sum() + last[1].sum()).backward()
        results.append([*leaves((outputs, last)), *(p.grad.numpy() for p in one.parameters())])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)
    assert (results[1][0][0, 2:] == 0).all()
    assert (results[1][1][2] == 0).all()


def test_a_stack_is_its_layers_one_after_another():
    net = nn.GRU(5, 6, 2, "bidirectional")
    x, h = to_tensor(X), to_tensor(wave((4, 3, 6), 2))
    got, last = net(x, h, to_tensor(LENGTHS))
    middle, (a, b) = net[0](x, (h[0], h[1]), to_tensor(LENGTHS))
    want, (c, d) = net[1](middle, (h[2], h[3]), to_tensor(LENGTHS))
    np.testing.assert_allclose(got.numpy(), want.numpy(), **CLOSE)
    np.testing.assert_allclose(last.numpy(), np.stack([t.numpy() for t in (a, b, c, d)]), **CLOSE)
    assert net.weight_hh_l1_reverse is net[1].cell_bw.weight_hh
    assert len(net.parameters()) == 16
    assert len(net.state_dict()) == 32


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5)])
def test_no_sequences_and_no_steps(shape):
    layer, x = nn.GRU(5, 6), to_tensor(np.zeros(shape, "float32"), stop_gradient=False)
    outputs, last = layer(x)
    (outputs.sum() + last.sum()).backward()
    assert (outputs.shape, last.shape, x.grad.shape) == ([*shape[:2], 6], [1, shape[0], 6], [*shape])
    assert not layer.weight_ih_l0.grad.any()


def test_names_with_projection_and_what_is_fixed():
    net = nn.LSTM(3, 4, proj_size=2, bias_ih_attr=False)
    assert [n for n, _ in net.named_parameters()] == [
        *(f"{n}_l0" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
        "0.cell.weight_ho",
    ]
    assert net.bias_ih_l0.stop_gradient
    assert (net.bias_ih_l0.numpy() == 0).all()
    bound = 1 / np.sqrt(4)
    assert 0 < np.abs(net.weight_hh_l0.numpy()).max() <= bound


def test_captured_step_and_dropout_between_layers():
    paddle.seed(0)
    net = nn.LSTM(5, 6, 2, dropout=0.5)
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())

    def step(x, lengths):
        loss = net(x, None, lengths)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    start = {n: t.numpy().copy() for n, t in net.state_dict().items()}
    paddle.seed(3)
    want = [step(to_tensor(X), to_tensor(LENGTHS)).item() for _ in range(2)]
    net.set_state_dict(start)
    captured = to_static(step)
    paddle.seed(3)
    got = [captured(to_tensor(X), to_tensor(LENGTHS)).item() for _ in range(2)]
    np.testing.assert_allclose(got, want, rtol=64 * EPS)
    net.eval()
    assert net(to_tensor(X))[0].numpy().tolist() == net(to_tensor(X))[0].numpy().tolist()


def test_under_autocast_and_in_float64():
    net = nn.GRU(5, 6)
    with amp.auto_cast(level="O1", dtype="bfloat16"):
        outputs, last = net(to_tensor(X))
    assert (outputs.dtype, last.dtype) == ("bfloat16", "bfloat16")
    want = net(to_tensor(X))[0].numpy()
    # four steps of gates from bfloat16 sums; a gate's slope is at most 1
    np.testing.assert_allclose(outputs.astype("float32").numpy(), want, atol=16 * 2.0**-8)
    net.to(dtype="float64")
    wide = net(to_tensor(X.astype("float64")))[0]
    assert wide.dtype == "float64"
    np.testing.assert_allclose(wide.numpy(), want, **CLOSE)


def test_in_a_program_with_an_open_batch():
    paddle.enable_static()
    try:
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup):
            x = static.data("x", [None, 4, 5], "float32")
            net = nn.LSTM(5, 6)
            outputs, (h, c) = net(x)
            loss = outputs.mean()
            paddle.optimizer.SGD(0.1).minimize(loss)
        exe = static.Executor()
        exe.run(startup)
        state = {n: np.asarray(static.global_scope().find_var(p.name).get_tensor()) for n, p in net.named_parameters()}
        got = exe.run(main, feed={"x": X}, fetch_list=[outputs, h, c])
    finally:
        paddle.disable_static()
    eager = nn.LSTM(5, 6)
    eager.set_state_dict(state)
    for a, b in zip(got, leaves(eager(to_tensor(X))), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


def test_a_cell_of_ones_own_is_one_loop_in_a_long_captured_sequence():
    x, lengths = wave((2, 20, 2), 1), to_tensor(np.array([20, 3]))
    cell = Hooked(2, 3)
    net = nn.RNN(cell, is_reverse=True)

    def loss(x):
        outputs, (_, c) = net(x, None, lengths)
        value = outputs.square().mean() + c.mean()
        value.backward()
        return value, outputs

    results, calls = [], []
    cell.register_forward_pre_hook(lambda *_: calls.append(1))
    for run in (loss, to_static(loss)):
        cell.clear_gradients(set_to_zero=False)
        calls.clear()
        value, outputs = run(to_tensor(x))
        results.append([value.numpy(), outputs.numpy(), *(p.grad.numpy() for p in cell.parameters())])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(b, a, **CLOSE)
    # traced a few times to find what is carried, in each of the two runs of a capture, not 20 times in each
    assert len(calls) < 20


@pytest.mark.slow
def test_over_a_mesh_as_on_one_device():
    x = wave((8, 3, 5), 1)
    results = []
    for plan in (None, Plan.from_degrees(dp=2, sharding=4, sharding_stage=3)):
        paddle.seed(0)
        net = nn.GRU(5, 8)
        try:
            laid = None if plan is None else apply_plan(plan, net)
            outputs, _ = net(to_tensor(x) if laid is None else shard_batch(laid, x, "batch", None, None))
            outputs.square().mean().backward()
            results.append([outputs.numpy(), *(p.grad.numpy() for p in net.parameters())])
        finally:
            clear_plan()
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


class Pair(nn.RNNCellBase):
    """Takes {"a": [b, 2], "b": [b, 3]}; its state is nested, its output a dict."""

    @property
    def state_shape(self):
        return {"sum": (2,), "past": [[3], (1, 3)]}

    def forward(self, inputs, states, scale=1.0):
        total = states["sum"] + scale * inputs["a"]
        return {"y": total * 2}, {"sum": total, "past": [states["past"][0] + inputs["b"], states["past"][1]]}


def test_a_cell_begins_with_the_states_of_its_class():
    class Ones(nn.GRUCell):
        def get_initial_states(self, *args, **kwargs):
            return super().get_initial_states(*args, **kwargs) + 1

    cell, plain = Ones(2, 3), nn.GRUCell(2, 3)
    plain.set_state_dict(cell.state_dict())
    ones, x = to_tensor(np.ones((2, 3), "float32")), to_tensor(np.ones((2, 4, 2), "float32"))
    np.testing.assert_array_equal(cell(x[:, 0])[0].numpy(), plain(x[:, 0], ones)[0].numpy())
    np.testing.assert_array_equal(nn.RNN(cell)(x)[0].numpy(), nn.RNN(plain)(x, ones)[0].numpy())


def test_nested_inputs_states_and_outputs():
    a, b = wave((2, 3, 2), 1), wave((2, 3, 3), 2)
    outputs, last = nn.RNN(Pair())({"a": to_tensor(a), "b": to_tensor(b)}, scale=0.5)
    np.testing.assert_allclose(outputs["y"].numpy(), np.cumsum(a, 1), rtol=8 * EPS, atol=8 * EPS)
    np.testing.assert_allclose(last["past"][0].numpy(), b.sum(1), rtol=8 * EPS, atol=8 * EPS)
    assert last["past"][1].shape == [2, 1, 3]
    ref = to_tensor(b)
    made = Pair().get_initial_states(ref, [[2], [-1, 4]], ["float64", "int32"], 1.5, batch_dim_idx=1)
    assert [(t.shape, t.dtype.name) for t in made] == [([3, 2], "float64"), ([3, 4], "int32")]
    assert made[0].numpy()[0, 0] == 1.5


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: nn.GRU(3, 4, direction="backward"), ConfigError, "direction='backward'; choose 'forward'"),
        (lambda: nn.GRU(3, 4, num_layers=0), ConfigError, "num_layers=0"),
        (lambda: nn.SimpleRNN(3, 4, activation="gelu"), ConfigError, "activation='gelu'; choose 'tanh' or 'relu'"),
        (lambda: nn.GRUCell(3, 0), ConfigError, "hidden_size=0; both are greater than 0"),
        (lambda: nn.LSTMCell(3, 4, proj_size=4), ConfigError, "proj_size=4; give 0"),
        (lambda: nn.RNN("GRU"), ConfigError, "cell is a str"),
        (lambda: nn.BiRNN(nn.GRUCell(3, 4), nn.GRUCell(2, 4)), ConfigError, "inputs of size 3, cell_bw of 2"),
        (lambda: nn.GRU(4, 6)(to_tensor(X)), ShapeError, r"inputs \[3, 4, 5\]; needs \[batch, steps, input_size=4"),
        (lambda: nn.LSTM(5, 6, time_major=True)(to_tensor(X[0])), ShapeError, r"needs \[steps, batch, input_size=5\]"),
        (lambda: nn.LSTM(5, 6)(to_tensor(X), to_tensor(X)), ShapeError, r"needs a pair \(h, c\) of Tensors \[1, batch"),
        (lambda: nn.LSTMCell(5, 6)(to_tensor(X[0]), to_tensor(X[0])), ConfigError, r"states are a pair \(h, c\)"),
        (lambda: nn.BiRNN(nn.GRUCell(5, 4), nn.GRUCell(5, 4))(to_tensor(X), to_tensor(X)), ConfigError, "is a pair"),
        (lambda: nn.GRU(5, 6)(to_tensor(X), None, to_tensor([1, 5, 2])), ShapeError, "length 5 of a sequence padded"),
        (lambda: nn.RNN(Hooked(5, 6))(to_tensor(X[:, :0])), ShapeError, "have 0 steps"),
        (lambda: nn.RNNCellBase().state_shape, NotImplementedError, "RNNCellBase has no state_shape"),
    ],
)
def test_bad_input_says_what_to_change(make, error, match):
    with pytest.raises(error, match=match):
        make()
