"""Model: one batch and whole data sets, against steps written by hand."""

import logging

import numpy as np
import pytest

from polyreme.callbacks import Callback
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CheckpointError, ConfigError, DataError, DTypeError, NumericsError, ShapeError
from polyreme.hapi import InputSpec, Model
from polyreme.io import DataLoader, Dataset, IterableDataset
from polyreme.jit import load, to_static
from polyreme.metric import Accuracy
from polyreme.nn import BatchNorm1D, CrossEntropyLoss, Embedding, Layer, Linear, MSELoss, ReLU, Sequential
from polyreme.optimizer import SGD, Adam
from polyreme.optimizer.lr import StepDecay
from polyreme.training import Microbatch

RNG = np.random.default_rng(0)
X = RNG.standard_normal((20, 4)).astype("float32")
Y = X.argmax(1).reshape(-1, 1)
# sums of at most 20 * 4 float32 products of size about 1, in another order
CLOSE = {"rtol": 0, "atol": 80 * 2.0**-23}


class Points(Dataset):
    def __init__(self, count=20):
        self.count = count

    def __getitem__(self, index):
        return X[index], Y[index]

    def __len__(self):
        return self.count


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Recorder(Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, step, logs=None):
        self.seen.append((step, logs["loss"][0], logs["batch_size"]))


def linear(seed=1):
    network = Linear(4, 4)
    network.weight.set_value(np.random.default_rng(seed).standard_normal((4, 4)).astype("float32"))
    return network


def ready(network=None, metrics=None, rate=0.1, make=SGD, **more):
    network = network or linear()
    model = Model(network)
    model.prepare(make(rate, parameters=network.parameters()), CrossEntropyLoss(), metrics, **more)
    return model


def softmax(scores):
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def cross_entropy(scores, labels):
    return -np.log(softmax(scores)[np.arange(len(labels)), labels[:, 0]]).mean()


def sgd_step(weight, bias, x, y, rate):
    """One step of softmax regression in NumPy."""
    error = softmax(x @ weight + bias)
    error[np.arange(len(y)), y[:, 0]] -= 1
    return weight - rate * x.T @ error / len(y), bias - rate * error.mean(0)


def test_train_batch_is_a_step_of_gradient_descent():
    model = ready()
    weight, bias = model.network.weight.numpy(), model.network.bias.numpy()
    (loss,) = model.train_batch([X], [Y])
    np.testing.assert_allclose(loss, cross_entropy(X @ weight + bias, Y), **CLOSE)
    weight, bias = sgd_step(weight, bias, X, Y, 0.1)
    np.testing.assert_allclose(model.network.weight.numpy(), weight, **CLOSE)
    np.testing.assert_allclose(model.network.bias.numpy(), bias, **CLOSE)
    assert model.is_captured == {"train": True, "evaluate": True, "predict": True}


def test_update_false_only_adds_up_gradients():
    model, whole = ready(), ready()
    before = model.network.weight.numpy()
    model.train_batch([X[:10]], [Y[:10]], update=False)
    np.testing.assert_array_equal(model.network.weight.numpy(), before)
    model.train_batch([X[10:]], [Y[10:]])
    # two means of 10 add up to twice the mean of 20
    whole.optimizer.set_lr(0.2)
    whole.train_batch([X], [Y])
    np.testing.assert_allclose(model.network.weight.numpy(), whole.network.weight.numpy(), **CLOSE)


def test_eval_and_predict_batch():
    model = ready(metrics=Accuracy())
    scores = X @ model.network.weight.numpy()
    losses, (accuracy,) = model.eval_batch([X], [Y])
    np.testing.assert_allclose(losses[0], cross_entropy(scores, Y), **CLOSE)
    assert accuracy == (scores.argmax(1) == Y[:, 0]).mean()
    (predicted,) = model.predict_batch([X])
    np.testing.assert_allclose(predicted, scores, **CLOSE)


def test_train_and_eval_mode_follow_the_call():
    network = Sequential(Linear(4, 4), BatchNorm1D(4))
    model = ready(network)
    mean = network[1]._mean
    model.eval_batch([X], [Y])
    np.testing.assert_array_equal(mean.numpy(), 0)
    model.train_batch([X], [Y])
    assert np.abs(mean.numpy()).max() > 0
    assert network.training
    model.predict_batch([X])
    assert not network.training


def test_fit_equals_the_loop_written_by_hand():
    model, recorder = ready(), Recorder()
    weight, bias = model.network.weight.numpy(), model.network.bias.numpy()
    model.fit(Points(), batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=recorder)
    losses = []
    for _ in range(2):
        for start in (0, 8, 16):
            x, y = X[start : start + 8], Y[start : start + 8]
            losses.append(cross_entropy(x @ weight + bias, y))
            weight, bias = sgd_step(weight, bias, x, y, 0.1)
    assert [(step, size) for step, _, size in recorder.seen] == [(0, 8), (1, 8), (2, 4)] * 2
    np.testing.assert_allclose([loss for _, loss, _ in recorder.seen], losses, **CLOSE)
    np.testing.assert_allclose(model.network.weight.numpy(), weight, **CLOSE)


def test_drop_last_shuffle_and_ready_made_loaders():
    model, recorder = ready(), Recorder()
    model.fit(Points(), batch_size=8, drop_last=True, verbose=0, callbacks=[recorder])
    assert [size for _, _, size in recorder.seen] == [8, 8]
    model.fit(DataLoader(Points(), batch_size=5), verbose=0, callbacks=[recorder])
    assert [size for _, _, size in recorder.seen[2:]] == [5] * 4
    model.fit(Stream(), batch_size=16, verbose=0, callbacks=[recorder])
    assert [size for _, _, size in recorder.seen[6:]] == [16, 4]


def test_accumulated_gradients_are_summed_and_the_rest_is_not_lost():
    model = ready()
    weight, bias = model.network.weight.numpy(), model.network.bias.numpy()
    model.fit(Points(), batch_size=8, shuffle=False, verbose=0, accumulate_grad_batches=2)
    one = sgd_step(weight, bias, X[:8], Y[:8], 0.1)
    other = sgd_step(weight, bias, X[8:16], Y[8:16], 0.1)
    weight, bias = one[0] + other[0] - weight, one[1] + other[1] - bias
    weight, bias = sgd_step(weight, bias, X[16:], Y[16:], 0.1)
    np.testing.assert_allclose(model.network.weight.numpy(), weight, **CLOSE)
    assert model.network.weight.grad is None or not np.abs(model.network.weight.grad.numpy()).any()


@pytest.mark.parametrize(("num_iters", "want"), [(2, [0, 1]), (3, [0, 1, 2]), (5, [0, 1, 2, 0, 1])])
def test_num_iters_overrides_epochs(num_iters, want):
    model, recorder = ready(), Recorder()
    model.fit(Points(), batch_size=8, verbose=0, num_iters=num_iters, callbacks=recorder)
    assert [step for step, _, _ in recorder.seen] == want
    recorder.seen.clear()
    model.fit(Stream(), batch_size=8, verbose=0, num_iters=num_iters, callbacks=recorder)
    assert [step for step, _, _ in recorder.seen] == want


def test_evaluate_gives_means_over_samples():
    model = ready(metrics=[Accuracy(topk=(1, 2))])
    metrics = model.evaluate(Points(), batch_size=8, verbose=0)
    scores = X @ model.network.weight.numpy()
    np.testing.assert_allclose(metrics["loss"], [cross_entropy(scores, Y)], **CLOSE)
    rank = (scores > scores[np.arange(20), Y[:, 0]][:, None]).sum(1)
    assert metrics["acc_top1"] == pytest.approx((rank < 1).mean())
    assert metrics["acc_top2"] == pytest.approx((rank < 2).mean())
    part = model.evaluate(Points(), batch_size=8, verbose=0, num_iters=1)
    np.testing.assert_allclose(part["loss"], [cross_entropy(scores[:8], Y[:8])], **CLOSE)


def test_many_waiting_batches_give_the_same_metrics():
    # more batches than results may wait on the device
    model = ready(metrics=Accuracy())
    found = model.evaluate(Points(), batch_size=1, verbose=0)
    assert found["acc"] == pytest.approx(model.evaluate(Points(), batch_size=20, verbose=0)["acc"])


def test_predict_gives_scores_of_every_sample():
    model = ready()
    scores = X @ model.network.weight.numpy()
    (parts,) = model.predict(Points(), batch_size=8, verbose=0)
    assert [part.shape for part in parts] == [(8, 4), (8, 4), (4, 4)]
    (whole,) = model.predict(Points(), batch_size=8, stack_outputs=True, verbose=0)
    np.testing.assert_allclose(whole, scores, **CLOSE)


class TwoInTwoOut(Layer):
    def __init__(self):
        super().__init__()
        self.shared = Linear(4, 4)

    def forward(self, a, b, scale=1.0):
        return self.shared(a) * scale, self.shared(b)


def test_several_inputs_outputs_and_losses():
    class Pairs(Dataset):
        def __getitem__(self, index):
            return X[index], -X[index], Y[index]

        def __len__(self):
            return 8

    network = TwoInTwoOut()
    model = Model(network)

    def both(a, b, label):
        return [CrossEntropyLoss()(a, label), (b * b).mean()]

    model.prepare(SGD(0.1, parameters=network.parameters()), both)
    losses = model.train_batch([X, -X], [Y])
    assert len(losses) == 2
    model.fit(Pairs(), batch_size=4, verbose=0)
    one, other = model.predict(Pairs(), batch_size=4, stack_outputs=True, verbose=0)
    assert one.shape == other.shape == (8, 4)
    assert len(model.evaluate(Pairs(), batch_size=4, verbose=0)["loss"]) == 2


class Peeks(Layer):
    """Cannot be captured: looks at a value."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        out = self.inner(x)
        if float(out.sum()) > 1e9:
            return out * 0
        return out


def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(caplog):
    model, captured = ready(Peeks()), ready()
    with caplog.at_level(logging.WARNING, "polyreme.hapi"):
        losses = [model.train_batch([X], [Y])[0] for _ in range(3)]
    assert [r.message.startswith("Model: the train step runs eagerly") for r in caplog.records] == [True]
    assert "test_model.py" in caplog.text
    assert model.is_captured == {"train": False, "evaluate": True, "predict": True}
    np.testing.assert_allclose(losses, [captured.train_batch([X], [Y])[0] for _ in range(3)], **CLOSE)


def test_the_step_is_compiled_once_for_each_batch_size():
    model = ready(make=Adam)
    model.fit(Points(), batch_size=8, epochs=3, verbose=0)
    # batches of 8 and of 4
    assert len(model._steps._captured["train"].retraces) <= 3
    before = len(model._steps._captured["train"].retraces)
    model.fit(Points(), batch_size=8, epochs=2, verbose=0)
    assert len(model._steps._captured["train"].retraces) == before


def test_the_learning_rate_is_not_baked_in():
    network = linear()
    model = Model(network)
    scheduler = StepDecay(0.5, step_size=1, gamma=0.1)
    model.prepare(SGD(scheduler, parameters=network.parameters()), lambda out, _: out.mean())
    changes = []
    for _ in range(3):
        before = network.bias.numpy()
        model.train_batch([X], [Y])
        changes.append((before - network.bias.numpy())[0])
        scheduler.step()
    # the gradient of the mean with respect to each bias is 1/4
    np.testing.assert_allclose(changes, [0.5 / 4, 0.05 / 4, 0.005 / 4], rtol=0, atol=2.0**-24)


def test_save_and_load_continue_the_run(tmp_path):
    model, other = ready(make=Adam), ready(linear(2), make=Adam)
    model.train_batch([X], [Y])
    model.save(tmp_path / "runs" / "a")
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["a.pdopt", "a.pdparams"]
    other.network.weight.name, other.network.bias.name = model.network.weight.name, model.network.bias.name
    other = ready(other.network, make=Adam)
    other.load(tmp_path / "runs" / "a")
    for one in (model, other):
        one.train_batch([X], [Y])
    np.testing.assert_array_equal(other.network.weight.numpy(), model.network.weight.numpy())


def test_load_without_the_optimizer(tmp_path):
    model = ready(make=Adam)
    model.train_batch([X], [Y])
    model.save(str(tmp_path / "a"))
    fresh = ready(make=Adam)
    fresh.load(str(tmp_path / "a.pdparams"), reset_optimizer=True)
    np.testing.assert_array_equal(fresh.network.weight.numpy(), model.network.weight.numpy())
    assert not [k for k in fresh.optimizer.state_dict() if "moment" in k]


def test_load_of_another_network(tmp_path):
    ready(Sequential(Linear(4, 4), Linear(4, 4))).save(tmp_path / "a")
    model = ready(Sequential(Linear(4, 4), Linear(4, 3), ReLU(), Linear(3, 4)))
    before = model.network[1].weight.numpy()
    with pytest.raises(CheckpointError, match=r"1.weight: shape \[4, 4\] in the file, \[4, 3\] in the network"):
        model.load(tmp_path / "a", reset_optimizer=True)
    with pytest.warns(UserWarning, match=r"skips (1.weight|1.bias|3.weight|3.bias)"):
        model.load(tmp_path / "a", skip_mismatch=True, reset_optimizer=True)
    np.testing.assert_array_equal(model.network[1].weight.numpy(), before)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("configs", ["O1", {"level": "O1", "dtype": "bfloat16"}, {"level": "O2", "dtype": "bfloat16"}])
def test_mixed_precision_trains(configs):
    network = linear()
    model = Model(network)
    optimizer = SGD(0.1, parameters=network.parameters(), multi_precision=True)
    model.prepare(optimizer, CrossEntropyLoss(), Accuracy(), configs)
    losses = [float(model.train_batch([X], [Y])[0][0]) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    level = configs if isinstance(configs, str) else configs["level"]
    assert network.weight.dtype.name == ("bfloat16" if level == "O2" else "float32")


def test_input_specs_are_checked():
    model = Model(linear(), InputSpec([None, 4], "float32", "x"), InputSpec([None, 1], "int64", "y"))
    model.prepare(SGD(0.1, parameters=model.parameters()), CrossEntropyLoss())
    model.train_batch([X], [Y])
    assert model.summary()["total_params"] == 20
    with pytest.raises(ShapeError, match=r"input 0 is specified as \[None, 4\], the batch has \[20, 3\]"):
        model.train_batch([X[:, :3]], [Y])
    same = [float(model.eval_batch([X], [y])[0]) for y in (Y, Y[:, 0], Y.astype("int32"))]
    assert same == [same[0]] * 3
    with pytest.raises(DTypeError, match="label 0 is specified as int64, the batch has float32"):
        model.train_batch([X], [Y.astype("float32")])
    with pytest.raises(ShapeError, match=r"label 0 is specified as \[None, 1\], the batch has \[20, 2\]"):
        model.train_batch([X], [np.repeat(Y, 2, 1)])
    with pytest.raises(ShapeError, match="1 inputs are specified, the batch has 2"):
        model.train_batch([X, X], [Y])


class Empty:
    """A loader without batches."""

    def __iter__(self):
        return iter(())


REFUSED = [
    (lambda: Model(lambda x: x), ConfigError, "network is a function; give a Layer"),
    (lambda: Model(linear(), inputs=[[4]]), ConfigError, "inputs holds a list; give InputSpec"),
    (lambda: Model(linear()).fit(Points()), ConfigError, "call prepare"),
    (lambda: Model(linear()).train_batch([X], [Y]), ConfigError, "call prepare"),
    (lambda: Model(linear()).prepare(loss=3), ConfigError, "loss is a int"),
    (lambda: Model(linear()).prepare(metrics="acc"), ConfigError, "metrics holds a str"),
    (lambda: Model(linear()).prepare(amp_configs="O3"), ConfigError, "amp level 'O3'"),
    (lambda: Model(linear()).prepare(amp_configs={"levle": "O1"}), ConfigError, "did you mean 'level'"),
    (lambda: ready().fit(), ConfigError, "train_data is None"),
    (lambda: ready().fit(3), ConfigError, "data is a int"),
    (lambda: ready().fit(Points(), epochs=0), ConfigError, "epochs=0"),
    (lambda: ready().fit(Points(), num_iters=0), ConfigError, "num_iters=0"),
    (lambda: ready().fit(Points(), batch_size=[1, 2, 3]), ConfigError, r"give one size, or \[train size, eval size\]"),
    (lambda: ready().fit(Points(), callbacks=[print]), ConfigError, "give instances of Callback"),
    (lambda: ready().fit(Points(), verbose=3), ConfigError, "verbose=3"),
    (lambda: ready().fit(Points(), log_freq=0), ConfigError, "log_freq=0"),
    (lambda: ready().fit(Points(), save_freq=0), ConfigError, "save_freq=0"),
    (lambda: ready().fit(Empty(), verbose=0), DataError, "train_data gave no batch"),
    (lambda: ready().evaluate(Empty(), verbose=0), DataError, "the evaluation data gave no batch"),
    (lambda: ready().save("folder/"), ConfigError, "names a folder"),
    (lambda: ready().save("a", training=False), ConfigError, "which needs the inputs' shapes"),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSED)
def test_bad_input_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_loss_that_is_no_number_is_refused():
    model = Model(linear())
    model.prepare(SGD(0.1, parameters=model.parameters()), MSELoss(reduction="none"))
    with pytest.raises(ShapeError, match=r"the loss has shape \[20, 4\]"):
        model.train_batch([X], [X])


def test_input_spec():
    spec = InputSpec([-1, 3], "int64", "ids")
    assert spec == InputSpec([None, 3], "int64", "ids")
    assert spec != InputSpec([None, 3], "int32", "ids")
    assert spec.unbatch().shape == (3,)
    assert spec.batch(8).shape == (8, 3)
    assert InputSpec.from_tensor(to_tensor(X), "x") == InputSpec.from_numpy(X, "x")
    assert repr(InputSpec([None], "float32")) == "InputSpec(shape=[None], dtype=float32, name=None)"
    assert isinstance(hash(spec), int)
    with pytest.raises(ConfigError, match=r"a dim is 2\.5"):
        InputSpec([2.5])
    with pytest.raises(ConfigError, match="batch_size='8'"):
        spec.batch("8")
    with pytest.raises(ConfigError, match="has no dim to take away"):
        InputSpec([]).unbatch()


def test_outputs_are_off_the_tape():
    [(_, outputs)] = ready()._steps.predict([Microbatch([to_tensor(X)], [], len(X))])
    assert all(isinstance(o, Tensor) and o.stop_gradient for o in outputs)


def test_save_for_inference_without_inputs_takes_those_of_the_first_batch(tmp_path):
    model = Model(Sequential(Linear(3, 4), ReLU(), Linear(4, 2)))
    want = model.predict_batch([np.ones((5, 3), np.float32)])[0]
    model.save(tmp_path / "net", training=False)
    found = load(tmp_path / "net")(to_tensor(np.ones((2, 3), np.float32))).numpy()
    np.testing.assert_allclose(found, want[:2], rtol=1e-6)


def test_save_for_inference_writes_an_artefact_of_the_network(tmp_path):
    network = Sequential(Linear(3, 4), ReLU(), Linear(4, 2))
    model = Model(network, inputs=[InputSpec([None, 3], "float32", "x")])
    model.save(tmp_path / "net", training=False)
    assert not list(tmp_path.glob("*.pdparams"))
    x = to_tensor(np.ones((5, 3), np.float32))
    network.eval()
    np.testing.assert_array_equal(load(tmp_path / "net")(x).numpy(), to_static(network)(x).numpy())


class Ids(Dataset):
    """Ids below 10 but for sample 7's, labels below 4 but for sample 9's, where those are given."""

    def __init__(self, bad_id=3, bad_label=1):
        self.bad_id, self.bad_label = bad_id, bad_label

    def __getitem__(self, index):
        return np.array(self.bad_id if index == 7 else index % 10), np.array(
            self.bad_label if index == 9 else index % 4
        )

    def __len__(self):
        return 20


def embedded(non_finite=None):
    network = Sequential(Embedding(10, 8), Linear(8, 4))
    model = Model(network)
    kwargs = {} if non_finite is None else {"non_finite": non_finite}
    model.prepare(SGD(0.1, parameters=network.parameters()), CrossEntropyLoss(), **kwargs)
    return model


def values(model):
    return np.concatenate([p.numpy().ravel() for p in model.parameters()])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Ids(bad_id=12), r"Model\.fit: epoch 0, batch 1, sample 7: embedding: id: 12 at .3. is out of range"),
        (Ids(bad_label=4), r"Model\.fit: epoch 0, batch 2, sample 9: cross_entropy: .*4"),
    ],
)
def test_fit_names_the_sample_that_is_out_of_range_and_changes_nothing_by_it(data, message):
    model = embedded()
    with pytest.raises(DataError, match=message):
        model.fit(data, batch_size=4, epochs=2, verbose=0, shuffle=False)
    after = values(model)
    assert np.isfinite(after).all()
    model.fit(Ids(), batch_size=4, verbose=0)  # it trains again
    assert not np.array_equal(values(model), after)


def test_what_is_not_finite_ends_fit_or_is_left_out(caplog):
    bad = X.copy()
    bad[9] = np.inf
    rows = list(zip(bad, Y, strict=True))
    fits = {"batch_size": 4, "verbose": 0, "shuffle": False}
    model = ready()
    with pytest.raises(NumericsError, match=r"epoch 0, batch 2: the loss or its gradients are not finite; .*left out"):
        model.fit(rows, **fits)
    expected = ready()
    expected.fit(rows[:8], **fits)
    np.testing.assert_array_equal(values(model), values(expected))
    model = ready(non_finite="skip")
    with caplog.at_level(logging.WARNING, "polyreme.hapi"):
        model.fit(rows, **fits)
    assert (
        "Model.fit: epoch 0, batch 2: the loss or its gradients are not finite; the update was left out, 1"
        in caplog.text
    )
    expected = ready()
    expected.fit(rows[:8] + rows[12:], **fits)
    np.testing.assert_array_equal(values(model), values(expected))
    with pytest.raises(NumericsError, match="epoch 2, batch 0"):  # the eleventh in a row
        ready(non_finite="skip").fit(rows[8:12] * 5, epochs=3, **fits)
    with pytest.raises(NumericsError, match=r"Model\.train_batch"):
        ready().train_batch([bad[8:12]], [Y[8:12]])
    model = ready(non_finite="apply")
    model.fit(rows, **fits)
    assert np.isnan(values(model)).any()
    with pytest.raises(ConfigError, match="give one of halt, skip, apply"):
        ready(non_finite="stop")
    with pytest.raises(ConfigError, match="a loss scaler leaves out what overflows by itself"):
        ready(non_finite="halt", amp_configs={"level": "O1", "init_loss_scaling": 8.0})
