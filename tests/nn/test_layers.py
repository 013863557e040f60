"""Every layer against its row: PaddlePaddle's recorded values, the functional, capture, gradients, state, modes."""

import inspect
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import polyreme.nn as nn
from polyreme import autograd
from polyreme.core import dtype as dtypes
from polyreme.core import rng
from polyreme.core.op import OPS
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.jit import to_static
from polyreme.nn import functional
from tests.nn.table import ROWS, build, state_value, wave

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "layers.json").read_text())
EPS = float(np.finfo(np.float32).eps)
# programs in which the rows are captured, dealt out in turn so that each has some of every kind
CAPTURES = 6
# outputs and gradients pass through as many roundings as a row's terms say; a factor 4 for the functions inside
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda r: r.id)
recorded_row = pytest.mark.parametrize("row", [r for r in ROWS if not r.paddle], ids=lambda r: r.id)


def prepared(row):
    """The row's layer with the state that the recording had, and its inputs."""
    layer = build(row, nn)
    for at, (name, tensor) in enumerate(layer.state_dict().items()):
        tensor.set_value(state_value(name, tuple(tensor.shape), at))
    layer.eval() if row.random else layer.train()
    return layer, [to_tensor(a) for a in row.arrays()]


def wanting_gradients(row):
    """The same, with gradients of the floating inputs too."""
    layer, inputs = prepared(row)
    for t in inputs:
        t.stop_gradient = not dtypes.is_floating(t.dtype)
    return layer, inputs


def check_reached(layer, inputs):
    """Every parameter and the first input have a finite gradient of their own shape."""
    assert [n for n, p in layer.named_parameters() if p.trainable and p.grad is None] == []
    assert inputs[0].grad is not None or inputs[0].stop_gradient
    for tensor in [*layer.parameters(), inputs[0]]:
        if tensor.grad is not None:
            assert np.isfinite(tensor.grad.numpy()).all()
            assert list(tensor.grad.shape) == list(tensor.shape)


def outputs(value):
    return [value] if isinstance(value, Tensor) else [t for v in value for t in outputs(v)]


def backward(results):
    """Gradients of the sum of the floating results times fixed weights, which are handed to the tape as cotangents."""
    roots = [t for t in results if dtypes.is_floating(t.dtype) and not t.stop_gradient]
    # a cell returns its output and its state, which may be one Tensor
    times = Counter(id(t) for t in roots)
    roots = list({id(t): t for t in roots}.values())
    autograd.backward(roots, [to_tensor(times[id(t)] * wave(tuple(t.shape), 9)) for t in roots])


def close(got, want, row, scale=0.0):
    """Equal but for rounding; scale: size of the terms summed, where they may cancel."""
    want = np.asarray(want, np.float64).reshape(got.shape)
    bound = 4 * row.terms * EPS
    np.testing.assert_allclose(
        got, want, rtol=bound, atol=bound * max(1e-3, scale, float(np.abs(want).max(initial=0))), err_msg=row.id
    )


def test_rows_have_ids_of_their_own_and_every_layer_has_one():
    ids = [r.id for r in ROWS]
    assert sorted({i for i in ids if ids.count(i) > 1}) == []
    layers = {n for n in nn.__all__ if inspect.isclass(getattr(nn, n)) and issubclass(getattr(nn, n), nn.Layer)}
    elsewhere = {"Layer", "LayerDict", "LayerList", "ParameterDict", "ParameterList", "RNNCellBase"}  # no forward
    # made of a function: test_stacked.py; of a parameter: models/test_adapters.py
    elsewhere |= {"Stacked", "ExpertLoRA"}
    named = {getattr(nn, r.name) for r in ROWS}
    assert (
        sorted(n for n in layers - elsewhere if getattr(nn, n) not in {*named, nn.Layer, nn.LayerDict, nn.LayerList})
        == []
    )


@recorded_row
def test_state_names_and_shapes_are_paddles(row):
    layer, _ = prepared(row)
    # in PaddlePaddle's order: optimizers of other projects go by position
    assert [(n, list(t.shape)) for n, t in layer.state_dict().items()] == list(RECORDED[row.id]["state"].items())


@pytest.mark.slow_cases("Transformer")
@recorded_row
def test_outputs_statistics_and_gradients_are_paddles(row):
    layer, inputs = wanting_gradients(row)
    results = outputs(layer(*inputs))
    want = RECORDED[row.id]
    assert [list(t.shape) for t in results] == [w["shape"] for w in want["outputs"]]
    for t, w in zip(results, want["outputs"], strict=True):
        close(t.numpy(), w["values"], row)
    if any(not t.stop_gradient for t in (*inputs, *layer.parameters())):
        backward(results)
    check_reached(layer, inputs)
    # the gradient of a key's bias is 0: what softmax does not see cancels, terms of the other gradients' size
    scale = max((abs(v) for values in want["grads"].values() for v in values), default=0.0)
    trained = {n: p for n, p in layer.named_parameters() if p.trainable}
    assert trained.keys() == want["grads"].keys()
    for name, p in trained.items():
        close(p.grad.numpy(), want["grads"][name], row, scale)
    state = layer.state_dict()
    for name, value in want["after"].items():
        close(state[name].numpy(), value, row)


@pytest.mark.parametrize("row", [r for r in ROWS if r.function], ids=lambda r: r.id)
def test_equals_the_functional(row):
    layer, inputs = prepared(row)
    want = getattr(functional, row.function)(*inputs, **row.settings)
    np.testing.assert_array_equal(layer(*inputs).numpy(), want.numpy())


class _Together(nn.Layer):
    """Layers called one after the other, each with inputs of its own."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.LayerList(layers)

    def forward(self, *inputs):
        return [outputs(layer(*arguments)) for layer, arguments in zip(self.layers, inputs, strict=True)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("rows", [ROWS[at::CAPTURES] for at in range(CAPTURES)], ids=lambda rows: f"{rows[0].id}, ...")
def test_captured_equals_eager(rows):
    """Many layers in one program: of a program for each, most of the time would go to what all programs take."""
    layers, inputs = zip(*map(prepared, rows), strict=True)
    together = _Together(layers)
    before = {n: t.numpy().copy() for n, t in together.state_dict().items()}
    wants = [[t.numpy() for t in outputs(layer(*given))] for layer, given in zip(layers, inputs, strict=True)]
    moved = [{n: t.numpy() for n, t in layer.state_dict().items()} for layer in layers]
    together.set_state_dict(before)
    results = to_static(together)(*inputs)
    for row, layer, got, want, states in zip(rows, layers, results, wants, moved, strict=True):
        for g, w in zip(got, want, strict=True):
            close(g.numpy(), w, row)
        for name, tensor in layer.state_dict().items():
            close(tensor.numpy(), states[name], row)


@pytest.mark.parametrize("row", [r for r in ROWS if r.paddle and not r.no_grad], ids=lambda r: r.id)
def test_gradient_reaches_every_parameter_and_every_floating_input(row):
    """Of layers that PaddlePaddle's were not recorded of; of the others the test of their gradients says it."""
    layer, inputs = wanting_gradients(row)
    backward(outputs(layer(*inputs)))
    check_reached(layer, inputs)


@every_row
def test_state_dict_round_trip(row):
    layer, inputs = prepared(row)
    saved = {n: t.numpy().copy() for n, t in layer.state_dict().items()}
    want = [t.numpy() for t in outputs(layer(*inputs))]
    other = build(row, nn)
    other.eval() if row.random else other.train()
    assert other.set_state_dict(saved) == ([], [])
    for g, w in zip([t.numpy() for t in outputs(other(*inputs))], want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("row", [r for r in ROWS if r.random], ids=lambda r: r.id)
def test_what_draws_differs_in_training_and_repeats_by_seed(row):
    layer, inputs = prepared(row)
    calm = layer(*inputs).numpy()
    np.testing.assert_array_equal(layer(*inputs).numpy(), calm)
    layer.train()
    rng.seed(3)
    first, second = layer(*inputs).numpy(), layer(*inputs).numpy()
    rng.seed(3)
    np.testing.assert_array_equal(layer(*inputs).numpy(), first)
    assert not np.array_equal(first, second) or not np.array_equal(first, calm)


@every_row
def test_repr_names_the_class(row):
    assert repr(build(row, nn)).startswith(f"{row.name}(")


def test_repr_says_settings_that_differ_from_the_usual():
    conv = nn.Conv2D(2, 4, 3, padding=1, padding_mode="reflect", groups=2)
    transposed = nn.Conv1DTranspose(2, 3, 3, stride=2, output_padding=1)
    shown = {
        conv: "Conv2D(2, 4, kernel_size=[3, 3], padding=1, padding_mode=reflect, groups=2, data_format=NCHW)",
        transposed: "Conv1DTranspose(2, 3, kernel_size=[3], stride=[2], output_padding=1, data_format=NCL)",
        nn.Dropout(0.1): "Dropout(p=0.1, axis=None, mode=upscale_in_train, inplace=False)",
        nn.Embedding(7, 3, 0): "Embedding(7, 3, padding_idx=0, sparse=False, scale_grad_by_freq=False)",
        nn.PReLU(3): "PReLU(num_parameters=3, data_format=NCHW, init=0.25, dtype=float32)",
        nn.Bilinear(4, 3, 5): "Bilinear(in1_features=4, in2_features=3, out_features=5, dtype=float32)",
        nn.BatchNorm1D(3): "BatchNorm1D(num_features=3, momentum=0.9, epsilon=1e-05, data_format=NCL)",
        nn.SimpleRNN(3, 4): "SimpleRNN(3, 4\n  (0): RNN(\n    (cell): SimpleRNNCell(3, 4)\n  )\n)",
    }
    assert {repr(layer): repr(layer) for layer in shown} == {text: text for text in shown.values()}


@pytest.mark.parametrize("row", [r for r in ROWS if r.id in ("Linear", "BatchNorm2D", "GroupNorm")], ids=lambda r: r.id)
def test_layers_are_cast_by_to(row):
    layer, inputs = prepared(row)
    layer.to(dtype="float64")
    wide = [t.astype("float64") if dtypes.is_floating(t.dtype) else t for t in inputs]
    for t in outputs(layer(*wide)):
        assert not dtypes.is_floating(t.dtype) or t.dtype == "float64"


def test_inputs_under_their_public_names():
    x, y = to_tensor(wave((1, 1, 4), 1)), to_tensor(wave((1, 1, 4), 2))
    np.testing.assert_array_equal(nn.MSELoss()(label=y, input=x).numpy(), nn.MSELoss()(x, y).numpy())
    np.testing.assert_array_equal(nn.MaxPool1D(2)(input=x).numpy(), nn.MaxPool1D(2)(x).numpy())
    assert nn.SyncBatchNorm(1)(x=to_tensor(wave((1, 1, 2, 2), 1))).shape == [1, 1, 2, 2]
    values, mask = nn.MaxPool1D(2, return_mask=True)(x)
    assert nn.MaxUnPool1D(2)(values, mask, output_size=[5]).shape == [1, 1, 5]
    with pytest.raises(TypeError, match="reduction"):
        nn.MSELoss()(x, y, reduction="sum")


def test_every_activation_loss_and_norm_row_names_functions_that_exist():
    assert [r.id for r in ROWS if r.function and not hasattr(functional, r.function)] == []
    assert all(callable(getattr(functional, n)) for n in functional.__all__)
    assert OPS
