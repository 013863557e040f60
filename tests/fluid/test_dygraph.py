"""Dygraph of 1.7 and 1.8: layers against polyreme.nn and NumPy, decays against their formulas, whole small scripts."""

import gc
import math

import numpy as np
import pytest

import polyreme as paddle
from polyreme import fluid
from polyreme.errors import CheckpointError, ConfigError, GradError, NotReadyError, ShapeError
from polyreme.fluid import dygraph, dygraph_grad_clip, optimizer
from polyreme.nn import functional as F

RANDOM = np.random.default_rng(0)
IMAGE = RANDOM.normal(size=(2, 4, 5, 6)).astype("float32")
VOLUME = RANDOM.normal(size=(2, 4, 3, 5, 4)).astype("float32")
ROWS = RANDOM.normal(size=(3, 6)).astype("float32")


def bilinear(layer, x, y):
    return np.maximum(np.einsum("na,oab,nb->no", x, layer.weight.numpy(), y) + layer.bias.numpy(), 0)


def gru(layer, x, h):
    gates = x + layer.bias.numpy()
    w, d = layer.weight.numpy(), h.shape[1]
    u, r = (
        1 / (1 + np.exp(-v)) for v in np.split(gates[:, : 2 * d] + h @ w.reshape(-1)[: 2 * d * d].reshape(d, -1), 2, 1)
    )
    candidate = np.tanh(gates[:, 2 * d :] + (r * h) @ w.reshape(-1)[2 * d * d :].reshape(d, d))
    return (1 - u) * h + u * candidate


def normalized(x, dims):
    return (x - x.mean(dims, keepdims=True)) / np.sqrt(x.var(dims, keepdims=True) + 1e-5)


LAYERS = {
    "Conv3D": (lambda: dygraph.Conv3D(4, 2, 3, padding=1, act="relu"), [VOLUME],
               lambda m, x: F.relu(F.conv3d(paddle.to_tensor(x), m.weight, m.bias, padding=1)).numpy()),
    "Conv2DTranspose": (lambda: dygraph.Conv2DTranspose(4, 2, 3, stride=2, output_size=[12, 14]), [IMAGE],
                        lambda m, x: F.conv2d_transpose(
                            paddle.to_tensor(x), m.weight, m.bias, stride=2, output_size=[12, 14]).numpy()),
    "Conv3DTranspose": (lambda: dygraph.Conv3DTranspose(4, 2, 2, 1, 2, act="tanh"), [VOLUME],
                        lambda m, x: np.tanh(F.conv3d_transpose(
                            paddle.to_tensor(x), m.weight, m.bias, stride=2, padding=1).numpy())),
    "GroupNorm": (lambda: dygraph.GroupNorm(4, 2, act="relu"), [IMAGE],
                  lambda m, x: np.maximum(normalized(x.reshape(2, 2, -1), 2).reshape(x.shape), 0)),
    "InstanceNorm": (lambda: dygraph.InstanceNorm(4), [IMAGE], lambda m, x: normalized(x, (2, 3))),
    "BatchNorm": (lambda: dygraph.BatchNorm(4, act="relu"), [IMAGE],
                  lambda m, x: np.maximum(normalized(x, (0, 2, 3)), 0)),
    "PRelu all": (lambda: dygraph.PRelu("all"), [ROWS], lambda m, x: x),
    "PRelu channel": (lambda: dygraph.PRelu("channel", channel=4, param_attr=initial(0.5)), [IMAGE],
                      lambda m, x: np.where(x > 0, x, 0.5 * x)),
    "PRelu element": (lambda: dygraph.PRelu("element", input_shape=[2, 4, 5, 6], param_attr=initial(0.25)), [IMAGE],
                      lambda m, x: np.where(x > 0, x, 0.25 * x)),
    "BilinearTensorProduct": (lambda: dygraph.BilinearTensorProduct(6, 6, 4, act="relu"), [ROWS, ROWS], bilinear),
    "GRUUnit": (lambda: dygraph.GRUUnit(6), [ROWS, ROWS[:, :2]], gru),
    "Dropout": (lambda: dygraph.Dropout(0.25, is_test=True), [ROWS], lambda m, x: 0.75 * x),
    "SpectralNorm": (lambda: dygraph.SpectralNorm([3, 6], power_iters=50), [ROWS],
                     lambda m, x: x / np.linalg.svd(x)[1][0]),
}  # fmt: skip


def initial(value):
    return paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(value))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_what_they_say(name):
    make, inputs, expected = LAYERS[name]
    with dygraph.guard():
        layer = make()
        assert isinstance(layer, dygraph.Layer)
        outputs = layer(*(dygraph.to_variable(x) for x in inputs))
    got = (outputs[0] if isinstance(outputs, tuple) else outputs).numpy()
    want = expected(layer, *inputs)
    assert got.shape == want.shape
    # sums of at most 4 * 27 float32 terms, each off by a rounding
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=108 * 2.0**-23 * np.abs(want).max())


def test_nce_learns_to_tell_the_true_class():
    with dygraph.guard():
        paddle.seed(1)
        layer = dygraph.NCE(5, 5, num_neg_samples=3, sampler="custom_dist", custom_dist=[0.4, 0.3, 0.1, 0.1, 0.1])
        x, label = dygraph.to_variable(np.eye(5, dtype="float32")), dygraph.to_variable(np.arange(5)[:, None])
        step = optimizer.Adam(0.2, parameter_list=layer.parameters())
        losses = []
        for _ in range(30):
            loss = paddle.mean(layer(x, label))
            loss.backward()
            step.minimize(loss)
            layer.clear_gradients()
            losses.append(float(loss))
        assert layer(x, label).shape == [5, 1]
        assert (layer(x, label, sample_weight=0.0).numpy() == 0).all()
        assert sorted(layer.state_dict()) == ["bias", "weight"]
    assert losses[-1] < 0.5 * losses[0]
    assert (layer.weight.numpy().argmax(0) == np.arange(5)).all()


DECAYS = {
    "noam": (lambda: dygraph.NoamDecay(64, 3), lambda i: 0.125 * min((i + 1) ** -0.5, (i + 1) * 3**-1.5)),
    "piecewise": (lambda: dygraph.PiecewiseDecay([2, 4], [0.3, 0.2, 0.1], 1), lambda i: [0.3, 0.2, 0.2, 0.1, 0.1][i]),
    "natural": (lambda: dygraph.NaturalExpDecay(0.1, 2, 0.5), lambda i: 0.1 * math.exp(-0.25 * i)),
    "staircase": (lambda: dygraph.ExponentialDecay(0.1, 2, 0.5, True), lambda i: 0.1 * 0.5 ** (i // 2)),
    "exponential": (lambda: dygraph.ExponentialDecay(0.1, 2, 0.5, step=2), lambda i: 0.1 * 0.5**i),
    "inverse": (lambda: dygraph.InverseTimeDecay(0.1, 2, 0.5), lambda i: 0.1 / (1 + 0.25 * i)),
    "polynomial": (lambda: dygraph.PolynomialDecay(0.1, 3, 0.01, 2.0),
                   lambda i: 0.09 * (1 - min(i, 3) / 3) ** 2 + 0.01),
    "cycle": (lambda: dygraph.PolynomialDecay(0.1, 2, 0.0, cycle=True), lambda i: [0.1, 0.05, 0, 0.025, 0][i]),
    "cosine": (lambda: dygraph.CosineDecay(0.1, 2, 4), lambda i: 0.05 * (math.cos(i // 2 * math.pi / 4) + 1)),
    "warmup": (lambda: dygraph.LinearLrWarmup(dygraph.ExponentialDecay(0.1, 1, 0.5), 2, 0.0, 0.4, begin=0),
               lambda i: 0.2 * i if i < 2 else 0.1 * 0.5**i),
    "own": (lambda: Halving(), lambda i: 0.5**i),
}  # fmt: skip


class Halving(dygraph.LearningRateDecay):
    def step(self):
        return 0.5**self.step_num


@pytest.mark.parametrize("name", DECAYS)
def test_every_minimize_takes_the_next_rate_and_a_state_goes_on(name):
    make, formula = DECAYS[name]

    def training():
        weight = fluid.layers.create_parameter([1], "float32", default_initializer=paddle.nn.initializer.Constant(0.0))
        return weight, optimizer.SGD(make(), parameter_list=[weight])

    def step(weight, sgd):
        before = weight.numpy()
        loss = weight.sum()
        loss.backward(dygraph.BackwardStrategy())
        sgd.minimize(loss)
        sgd.clear_gradients()
        return (before - weight.numpy())[0]

    with dygraph.guard():
        weight, sgd = training()
        rates = [step(weight, sgd) for _ in range(3)]
        assert sgd.current_step_lr() == pytest.approx(formula(2), rel=1e-6)
        again, resumed = training()
        resumed.set_dict({n: np.asarray(v.numpy()) for n, v in sgd.state_dict().items()})
        rates += [step(again, resumed) for _ in range(2)]
    # differences of float32 weights of at most 2
    np.testing.assert_allclose(rates, [formula(i) for i in range(5)], rtol=1e-6, atol=2.0**-22)


def test_epoch_decays_go_on_with_epochs_and_plateaus_with_losses():
    by_epoch = {
        dygraph.StepDecay(1.0, 2, 0.5): [1, 1, 0.5, 0.5],
        dygraph.MultiStepDecay(1.0, [1, 3], 0.5): [1, 0.5, 0.5, 0.25],
        dygraph.LambdaDecay(1.0, lambda n: 1 / (1 + n)): [1, 1 / 2, 1 / 3, 1 / 4],
    }
    for decay, want in by_epoch.items():
        got = []
        for _ in want:
            got.append(float(decay()))
            assert float(decay()) == got[-1]
            decay.epoch()
        np.testing.assert_allclose(got, want, rtol=1e-7)
    plateau = dygraph.ReduceLROnPlateau(1.0, decay_rate=0.5, patience=1)
    for loss in (3.0, 2.0, 2.0, 2.0):
        plateau.step(paddle.to_tensor([loss]))
    assert float(plateau()) == 0.5
    other = dygraph.ReduceLROnPlateau(1.0, decay_rate=0.5, patience=1)
    other.set_dict(plateau.state_dict())
    assert other.step() == 0.5


class Mnist(dygraph.Layer):
    def __init__(self):
        super().__init__()
        self.conv = dygraph.Conv2D(1, 4, 3, act="relu")
        self.pool = dygraph.Pool2D(2, "max", 2)
        self.norm = dygraph.BatchNorm(4)
        self.out = dygraph.Linear(4 * 3 * 3, 4, act="softmax")

    def forward(self, x):
        hidden = self.norm(self.pool(self.conv(x)))
        return self.out(paddle.reshape(hidden, [-1, 36]))


def test_a_script_that_saves_and_goes_on_exactly(script, tmp_path):
    fluid = script
    labels = RANDOM.integers(0, 4, (16, 1))
    images = RANDOM.normal(size=(16, 1, 8, 8)).astype("float32") + labels[:, :, None, None].astype("float32")

    def training():
        model = Mnist()
        rate = dygraph.ExponentialDecay(0.02, 4, 0.5, True)
        clip = dygraph_grad_clip.GradClipByGlobalNorm(5.0)
        return model, fluid.optimizer.Adam(rate, parameter_list=model.parameters()), clip

    def run(model, adam, clip, steps):
        model.train()
        losses = []
        for _ in range(steps):
            predicted = model(dygraph.to_variable(images))
            loss = fluid.layers.mean(fluid.layers.cross_entropy(predicted, dygraph.to_variable(labels)))
            loss.backward()
            adam.minimize(loss, grad_clip=clip)
            model.clear_gradients()
            losses.append(loss.numpy()[0])
        return losses

    with fluid.dygraph.guard(fluid.CPUPlace()):
        paddle.seed(7)
        model, adam, clip = training()
        losses = run(model, adam, clip, 8)
        assert losses[-1] < 0.5 * losses[0]
        dygraph.save_dygraph(model.state_dict(), str(tmp_path / "mnist"))
        dygraph.save_dygraph(adam.state_dict(), str(tmp_path / "mnist"))
        want = run(model, adam, clip, 3)
        with paddle.utils.unique_name.guard():
            model, adam, clip = training()
        parameters, state = dygraph.load_dygraph(str(tmp_path / "mnist"))
        assert isinstance(parameters["out.weight"], np.ndarray)
        assert state["global_step"].tolist() == [8]
        model.set_dict(parameters)
        names = {p.name: n for n, p in model.named_parameters()}
        adam.set_dict(state)
        assert adam.current_step_lr() == pytest.approx(0.02 / 4, rel=1e-6)
        assert len(names) == len(model.parameters())
        assert run(model, adam, clip, 3) == want
        # inference: what was traced is a Program
        model.eval()
        outputs, traced = dygraph.TracedLayer.trace(model, [dygraph.to_variable(images)])
        np.testing.assert_array_equal(traced([images[:5]])[0].numpy(), model(dygraph.to_variable(images[:5])).numpy())
        traced.save_inference_model(str(tmp_path / "model"))
        wrapped = dygraph.DataParallel(model, dygraph.prepare_context())
        np.testing.assert_array_equal(wrapped(dygraph.to_variable(images)).numpy(), outputs.numpy())
    exe = fluid.Executor(fluid.CPUPlace())
    program, feeds, fetches = fluid.io.load_inference_model(str(tmp_path / "model"), exe)
    (served,) = exe.run(program, feed={feeds[0]: images}, fetch_list=fetches)
    np.testing.assert_allclose(served, outputs.numpy(), rtol=1e-5)  # a program of its own may round otherwise


def test_sublayers_and_their_state_by_1_7s_parameters():
    with dygraph.guard():
        inner = dygraph.Sequential(dygraph.Linear(2, 2), dygraph.Linear(2, 2))
        outer = dygraph.Sequential(inner, dygraph.Linear(2, 1))
        assert outer.sublayers(include_sublayers=False) == [inner, outer[1]]
        assert outer.sublayers() == [inner, outer[1], inner[0], inner[1]]
        assert [n for n, _ in outer.named_sublayers()] == ["0", "0.0", "0.1", "1"]
        assert [n for n, _ in outer.named_sublayers("net", False, include_self=True)] == ["net", "net.0", "net.1"]
        assert len(outer.parameters()) == 6

        class Own(dygraph.Layer):
            def __init__(self):
                super().__init__("own")
                self.w = self.create_parameter([1])
                self.inner = dygraph.Linear(1, 1)

        first, second = Own(), Own()
        before = second.inner.weight.numpy()
        second.set_dict(first.state_dict(), include_sublayers=False)
        np.testing.assert_array_equal(second.w.numpy(), first.w.numpy())
        np.testing.assert_array_equal(second.inner.weight.numpy(), before)
        second.load_dict({n: v.numpy() for n, v in first.state_dict().items()})
        np.testing.assert_array_equal(second.inner.weight.numpy(), first.inner.weight.numpy())


def test_attributes_of_parameters_reach_the_layers(tmp_path):
    attr = fluid.ParamAttr(
        initializer=fluid.initializer.Constant(0.5), learning_rate=0.5, regularizer=fluid.regularizer.L2Decay(0.1),
        gradient_clip=fluid.clip.GradientClipByValue(1.0),
    )  # fmt: skip
    with fluid.dygraph.guard():
        linear = fluid.dygraph.Linear(2, 3, param_attr=attr, bias_attr=False)
        table = fluid.dygraph.Embedding([4, 2], padding_idx=0, param_attr=attr)
        for layer in (linear, table):
            (weight,) = layer.parameters()
            assert weight.optimize_attr["learning_rate"] == 0.5
            assert weight.regularizer is attr.regularizer
        np.testing.assert_array_equal(linear.weight.numpy(), np.full((2, 3), 0.5))
        np.testing.assert_array_equal(table.weight.numpy(), [[0, 0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
        assert attr.name is None
        fluid.save_dygraph(linear.state_dict(), str(tmp_path / "linear"))
        np.testing.assert_array_equal(fluid.load_dygraph(str(tmp_path / "linear"))[0]["weight"], linear.weight.numpy())


def test_declarative_and_its_switch():
    traced = []

    @dygraph.declarative
    def double(x):
        traced.append(x)
        return x + x if paddle.mean(x) > 0 else x

    translator = dygraph.ProgramTranslator.get_instance()
    assert translator is dygraph.ProgramTranslator()
    with dygraph.guard():
        x = dygraph.to_variable(np.ones(2, "float32"))
        assert double(x).tolist() == translator.get_output(double, x).tolist() == [2, 2]
        assert double(-x).tolist() == [-1, -1]
        captured = len(traced)
        translator.enable(False)
        try:
            double(x)
        finally:
            translator.enable(True)
        assert len(traced) == captured + 1
        main, _, feeds, fetches = translator.get_program(lambda x: x + 1, x)
        assert "add" in str(main)
        assert (len(feeds), len(fetches)) == (1, 1)
        assert "def double" in translator.get_code(double)


@pytest.mark.parametrize(
    ("clip", "want"),
    [
        (dygraph_grad_clip.GradClipByValue(1.0), [1.0, -1.0]),
        (dygraph_grad_clip.GradClipByValue(-0.5, 2.0), [2.0, -0.5]),
        (dygraph_grad_clip.GradClipByNorm(1.0), [0.6, -0.8]),
        (dygraph_grad_clip.GradClipByGlobalNorm(10.0), [3.0, -4.0]),
    ],
)
def test_gradient_clips(clip, want):
    with dygraph.guard():
        weight = paddle.create_parameter([2], "float32", default_initializer=paddle.nn.initializer.Constant(0.0))
        loss = (weight * dygraph.to_variable(np.array([3.0, -4.0], "float32"))).sum()
        loss.backward()
        optimizer.SGD(1.0, parameter_list=[weight]).minimize(loss, grad_clip=clip)
    np.testing.assert_allclose(weight.numpy(), -np.array(want), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: dygraph.Linear(1, 1).backward(), GradError, "backward\\(\\) of the loss"),
        (lambda: dygraph.Linear(1, 1).create_variable(type="reader"), ConfigError, "lod_tensor"),
        (lambda: dygraph.PRelu("channel"), ConfigError, "'channel' with channel="),
        (lambda: dygraph.GRUUnit(7), ShapeError, "no multiple of 3"),
        (lambda: dygraph.GroupNorm(4, 2, data_layout="NHWC"), ConfigError, "transpose the input"),
        (lambda: dygraph.Dropout(dropout_implementation="up"), ConfigError, "upscale_in_train"),
        (lambda: dygraph.PiecewiseDecay([1], [0.1], 0), ConfigError, "one value more"),
        (lambda: dygraph.NoamDecay(4, 2, begin=0), ConfigError, "first step is 1"),
        (lambda: dygraph.StepDecay(1.0, 0), ConfigError, "at least 1"),
        (lambda: dygraph.MultiStepDecay(1.0, [3, 1]), ConfigError, "increasing epochs"),
        (lambda: dygraph.LinearLrWarmup(0.1, 2, 0.2, 0.1), ConfigError, "not below"),
        (lambda: dygraph.save_dygraph({}, "x"), ConfigError, "is empty"),
        (lambda: dygraph.save_dygraph(dygraph.Linear(1, 1).state_dict(), "x/"), ConfigError, "is a folder"),
        (lambda: dygraph.load_dygraph("nowhere/x"), CheckpointError, "neither nowhere/x.pdparams nor"),
        (lambda: dygraph.DataParallel(dygraph.Linear(1, 1), 2), ConfigError, "prepare_context"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call, error, says):
    with dygraph.guard(), pytest.raises(error, match=says):
        call()


def test_a_decay_of_dygraph_is_refused_in_a_program(script):
    with pytest.raises(ConfigError, match=r"give a decay of fluid\.layers"):
        script.optimizer.SGD(dygraph.CosineDecay(0.1, 1, 1))


def test_layers_on_values_run_at_once_and_leave_static_mode_off():
    x = paddle.to_tensor([[1.0, -2.0]])
    assert fluid.layers.relu(x).tolist() == [[1.0, 0.0]]
    assert fluid.layers.concat([x, x], axis=1).shape == [1, 4]
    assert paddle.in_dynamic_mode()


def test_fluid_beside_dynamic_mode_of_2_0_records_nothing():
    layer = paddle.nn.Linear(2, 1, bias_attr=False)
    before = layer.weight.numpy()
    step = optimizer.LarsMomentum(0.5, 0.9, lars_coeff=0.1, parameter_list=layer.parameters(), epsilon=1.0)
    assert paddle.in_dynamic_mode()
    assert step.type == "lars_momentum"
    loss = layer(paddle.ones([1, 2])).sum()
    loss.backward()
    step.minimize(loss)
    step.set_state_dict(step.state_dict())
    norm = np.linalg.norm(before)
    rate = 0.5 * 0.1 * norm / (math.sqrt(2) + 0.0005 * norm + 1)
    np.testing.assert_allclose(layer.weight.numpy(), before - rate * (1 + 0.0005 * before), rtol=1e-6)
    mask = fluid.layers.sequence_mask(paddle.to_tensor([1, 3]))
    assert mask.numpy().tolist() == [[1, 0, 0], [1, 1, 1]]


class Digits(fluid.dygraph.Layer):
    """As 1.5 writes a network: name scopes in front, sizes of inputs left out."""

    def __init__(self, name_scope):
        super().__init__(name_scope)
        scope = self.full_name()
        self.conv = dygraph.Conv2D(scope, num_filters=2, filter_size=3, param_attr=None, act="relu")
        self.norm = dygraph.BatchNorm(scope, num_channels=2)
        self.pool = dygraph.Pool2D(name_scope=scope, pool_size=2, pool_stride=2)
        self.back = dygraph.Conv2DTranspose(scope, 1, output_size=[6, 6], stride=2)
        self.level = dygraph.LayerNorm(scope, begin_norm_axis=2)
        self.out = dygraph.FC(scope, 3, act="softmax")

    def forward(self, x):
        return self.out(self.level(self.back(self.pool(self.norm(self.conv(x))))))


def test_layers_by_name_scopes_are_made_at_their_first_call_and_trained(monkeypatch):
    with fluid.dygraph.guard():
        net, sgd = Digits("digits"), fluid.optimizer.SGD(learning_rate=0.5)
        assert net.parameters() == []
        with pytest.raises(NotReadyError, match="from the first minimize"):
            sgd.clear_gradients()
        x = np.random.default_rng(0).standard_normal((6, 1, 6, 6)).astype("float32")
        labels = dygraph.to_variable(np.arange(6).reshape(6, 1) % 3)
        losses = []
        for _ in range(4):
            loss = fluid.layers.mean(fluid.layers.cross_entropy(net(dygraph.to_variable(x)), labels))
            loss.backward()
            sgd.minimize(loss)
            net.clear_gradients()
            losses.append(loss.numpy().item())
        assert losses[3] < losses[0]
        shapes = [tuple(p.shape) for p in net.parameters()]
        assert shapes == [(2, 1, 3, 3), (2,), *[(2,)] * 4, (2, 1, 4, 4), (1,), (36,), (36,), (36, 3), (3,)]
        assert net.conv.weight is net.conv.layer.weight
        net.eval()
        same = dygraph.Conv2D(1, 2, 3, act="relu")
        same.set_dict({"weight": net.conv.weight, "bias": net.conv.bias})
        image = dygraph.to_variable(x)
        np.testing.assert_array_equal(net.conv(image).numpy(), same(image).numpy())
        other = dygraph.FC("later", 1)
        loss = fluid.layers.mean(other(image) * net.out.bias)
        loss.backward()
        with pytest.raises(ConfigError, match="had no gradients at the first step"):
            sgd.minimize(loss)
        with pytest.raises(ConfigError, match="give filter_size, or output_size"):
            dygraph.Conv2DTranspose("up", 1)(image)
        monkeypatch.setattr(optimizer, "parameters_with_gradients", list)
        with pytest.raises(ConfigError, match="no parameter has a gradient"):
            fluid.optimizer.SGD(0.5).minimize(loss)


def test_a_model_that_nothing_refers_to_is_not_trained():
    """Whether or not Python has looked for cycles since."""
    gc.disable()
    try:
        with fluid.dygraph.guard():
            x = dygraph.to_variable(ROWS)
            gone, net = dygraph.Linear(6, 1), dygraph.Linear(6, 1)
            gone.__dict__["itself"] = gone
            for layer in (gone, net):
                fluid.layers.mean(layer(x)).backward()
            del gone, layer
            sgd = fluid.optimizer.SGD(0.5)
            sgd.minimize(fluid.layers.mean(net(x)))
            assert [id(p) for p in sgd.optimizer._parameters] == [id(p) for p in net.parameters()]
    finally:
        gc.enable()
