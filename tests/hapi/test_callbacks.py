"""Callbacks: when they are called, what they print, save, stop and change."""

import io
import logging
import sys
import types

import numpy as np
import pytest

from polyreme import callbacks as C
from polyreme.errors import ConfigError
from polyreme.hapi import Model
from polyreme.io import Dataset
from polyreme.metric import Accuracy
from polyreme.nn import CrossEntropyLoss, Linear
from polyreme.optimizer import SGD
from polyreme.optimizer.lr import StepDecay

X = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")
Y = X.argmax(1).reshape(-1, 1)


class Points(Dataset):
    def __getitem__(self, index):
        return X[index], Y[index]

    def __len__(self):
        return 6


class Everything(C.Callback):
    """Writes down each hook's name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda *args: self.calls.append(name)
        return super().__getattribute__(name)


class Given(C.Callback):
    """Stands in for evaluation: replaces the results by given ones."""

    def __init__(self, values, name="loss"):
        super().__init__()
        self.values, self.name = iter(values), name

    def on_eval_end(self, logs=None):
        logs[self.name] = next(self.values)


def ready(rate=0.1, metrics=None):
    network = Linear(4, 4)
    model = Model(network)
    model.prepare(SGD(rate, parameters=network.parameters()), CrossEntropyLoss(), metrics)
    return model


def test_order_of_calls():
    seen = Everything()
    ready().fit(Points(), Points(), batch_size=3, epochs=2, eval_freq=2, verbose=0, callbacks=[seen])
    batch = ["on_train_batch_begin", "on_train_batch_end"]
    epoch = ["on_epoch_begin", *batch, *batch, "on_epoch_end"]
    test = ["on_eval_begin", *["on_eval_batch_begin", "on_eval_batch_end"] * 2, "on_eval_end"]
    assert seen.calls == ["on_train_begin", *epoch, *test, *epoch, "on_train_end"]
    seen.calls.clear()
    ready().predict(Points(), batch_size=3, verbose=0, callbacks=[seen])
    one = ["on_predict_batch_begin", "on_predict_batch_end"]
    assert seen.calls == ["on_predict_begin", *one, *one, "on_predict_end"]


def test_params_and_logs():
    class Look(C.Callback):
        def on_train_begin(self, logs=None):
            self.before = dict(self.params)

        def on_epoch_end(self, epoch, logs=None):
            self.logs = logs

    look = Look()
    ready(metrics=Accuracy()).fit(Points(), batch_size=4, epochs=2, verbose=0, callbacks=look)
    assert (look.before["epochs"], look.before["steps"], look.before["metrics"]) == (2, 2, ["loss", "acc"])
    assert set(look.logs) == {"loss", "acc", "step", "batch_size"}
    assert (look.logs["step"], look.logs["batch_size"]) == (1, 2)


def test_results_are_read_only_when_somebody_wants_them():
    bar = C.ProgBarLogger(log_freq=2, verbose=2)
    bar._steps = 5
    assert [bar.needs_logs("train", step) for step in range(5)] == [False, True, False, True, True]
    assert not C.ProgBarLogger(verbose=0).needs_logs("train", 0)
    assert not C.LRScheduler().needs_logs("train", 0)
    assert not C.EarlyStopping().needs_logs("train", 0)

    class Reads(C.Callback):
        def on_train_batch_end(self, step, logs=None):
            pass

    assert Reads().needs_logs("train", 0)
    assert not Reads().needs_logs("eval", 0)


def lines(verbose, **fit):
    out = io.StringIO()
    model = ready(metrics=Accuracy())
    model.fit(Points(), Points(), batch_size=2, verbose=verbose,
              callbacks=[C.ProgBarLogger(2, verbose, out)], **fit)  # fmt: skip
    return out.getvalue().splitlines()


@pytest.mark.parametrize("verbose", [1, 2])
def test_plain_lines_where_there_is_no_terminal(verbose, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook has it
    printed = lines(verbose, epochs=1)
    assert printed[0] == "Epoch 1/1"
    assert printed[1].startswith("step 2/3 - loss: ")
    assert " - acc: " in printed[1]
    assert printed[1].endswith(" ms/step")
    assert printed[2].startswith("step 3/3")
    assert printed[3] == "Evaluation"
    assert printed[-1].startswith("Evaluation: 6 samples - loss: ")


def test_verbose_0_prints_nothing():
    assert lines(0) == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    model = ready()
    model.fit(Points(), batch_size=2, verbose=1, callbacks=[C.ProgBarLogger(1, 1, out)])
    assert "step 3/3" in out.getvalue()
    assert "━" in out.getvalue()


def test_the_bar_is_taken_away_when_training_fails(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    bar = C.ProgBarLogger(1, 1, Terminal())

    class Fails(C.Callback):
        def on_train_batch_end(self, step, logs=None):
            assert bar._live is not None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ready().fit(Points(), batch_size=2, verbose=1, callbacks=[bar, Fails()])
    assert bar._live is None


def test_save_dir_and_save_freq_write_checkpoints(tmp_path):
    model = ready()
    model.fit(Points(), batch_size=3, epochs=4, verbose=0, save_dir=str(tmp_path / "runs"), save_freq=2)
    names = {p.name for p in (tmp_path / "runs").iterdir()}
    assert names == {f"{n}.{kind}" for n in ("0", "2", "final") for kind in ("pdparams", "pdopt")}
    final = ready()
    final.load(tmp_path / "runs" / "final", reset_optimizer=True)
    np.testing.assert_array_equal(final.network.weight.numpy(), model.network.weight.numpy())


@pytest.mark.parametrize(("by_step", "by_epoch", "want"), [(True, False, 6), (False, True, 3), (False, False, 0)])
def test_lr_scheduler(by_step, by_epoch, want):
    scheduler = StepDecay(1.0, step_size=1, gamma=0.5)
    ready(scheduler).fit(Points(), batch_size=3, epochs=3, verbose=0, callbacks=C.LRScheduler(by_step, by_epoch))
    assert scheduler() == 0.5**want


def test_the_scheduler_steps_each_batch_by_default():
    scheduler = StepDecay(1.0, step_size=1, gamma=0.5)
    ready(scheduler).fit(Points(), batch_size=3, verbose=0)
    assert scheduler() == 0.5**2


EVALUATIONS = [
    ([1, 1, 1, 1], {"patience": 1}, 2),
    ([1, 1, 1, 1], {"patience": 2}, 3),
    ([1, 0.9, 0.9, 0.8, 0.85, 0.85, 0.85], {"patience": 2}, 6),
    ([1, 0.95, 0.9, 0.85], {"patience": 1, "min_delta": 0.1}, 2),
    ([1, 0.95, 0.8, 0.7], {"patience": 1, "baseline": 0.9}, 1),
    ([1, 0.5, 0.6, 0.4], {}, 3),
    ([0.1, 0.2, 0.1, 0.3], {"patience": 1, "monitor": "acc"}, 3),
    ([0.1, 0.2, 0.1, 0.3], {"patience": 1, "monitor": "acc", "mode": "min"}, 2),
    ([4, 3, 2, 1], {"patience": 1}, 4),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("values", "settings", "want"), EVALUATIONS)
def test_early_stopping(values, settings, want, tmp_path):
    model, seen = ready(), Everything()
    stop = C.EarlyStopping(**settings, verbose=0)
    given = Given(values, settings.get("monitor", "loss"))
    model.fit(Points(), Points(), batch_size=6, epochs=len(values), verbose=0, callbacks=[given, stop, seen])
    assert seen.calls.count("on_eval_end") == want
    assert model.stop_training is (want < len(values))


def test_the_best_model_is_saved(tmp_path, caplog):
    model = ready()
    weights = []

    class Weights(C.Callback):
        def on_eval_begin(self, logs=None):
            weights.append(self.model.network.weight.numpy())

    calls = [Weights(), Given([1.0, 0.5, 0.9]), C.EarlyStopping(patience=1)]
    with caplog.at_level(logging.WARNING):
        model.fit(Points(), Points(), batch_size=6, epochs=3, verbose=0, callbacks=calls, save_dir=str(tmp_path))
    assert "stopping after epoch 3: loss is 0.9, the best was 0.5" in caplog.text
    best = ready()
    best.load(tmp_path / "best_model", reset_optimizer=True)
    np.testing.assert_array_equal(best.network.weight.numpy(), weights[1])


RATES = [
    ([1] * 5, {"patience": 2}, [1, 1, 0.1, 0.1, 0.01]),
    ([1] * 7, {"patience": 1, "cooldown": 2}, [1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01]),
    ([1] * 4, {"patience": 1, "factor": 0.5, "min_lr": 0.3}, [1, 0.5, 0.3, 0.3]),
    ([4, 3, 2, 1], {"patience": 1}, [1, 1, 1, 1]),
    ([1, 2, 3], {"patience": 1, "mode": "max"}, [1, 1, 1]),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("values", "settings", "want"), RATES)
def test_reduce_lr_on_plateau(values, settings, want):
    model, rates = ready(1.0), []

    class Rates(C.Callback):
        def on_eval_end(self, logs=None):
            rates.append(self.model.optimizer.get_lr())

    calls = [Given(values), C.ReduceLROnPlateau(**settings), Rates()]
    model.fit(Points(), Points(), batch_size=6, epochs=len(values), verbose=0, callbacks=calls)
    # the rate is kept as float32
    assert rates == pytest.approx(want, rel=4 * 2.0**-24)


def test_tensorboard(tmp_path):
    ready(metrics=Accuracy()).fit(Points(), Points(), batch_size=3, verbose=0, callbacks=C.TensorBoard(str(tmp_path)))
    (file,) = tmp_path.glob("events*")
    raw = file.read_bytes()
    for name in (b"train/loss", b"train/acc", b"eval/loss", b"eval/acc"):
        assert name in raw


def test_visualdl_writes_through_its_package(monkeypatch):
    written = []

    class LogWriter:
        def __init__(self, logdir):
            self.logdir = logdir

        def add_scalar(self, tag, value, step):
            written.append((self.logdir, tag, step, value))

        flush = close = lambda self: None

    monkeypatch.setitem(sys.modules, "visualdl", types.SimpleNamespace(LogWriter=LogWriter))
    ready().fit(Points(), Points(), batch_size=6, verbose=0, callbacks=C.VisualDL("logs"))
    assert [(folder, tag, step) for folder, tag, step, _ in written] == [
        ("logs", "train/loss", 1),
        ("logs", "eval/loss", 1),
    ]
    assert all(np.isfinite(value) for *_, value in written)
    monkeypatch.setitem(sys.modules, "visualdl", None)
    with pytest.raises(ConfigError, match=r"VisualDL: .*; pip install visualdl, or use callbacks\.TensorBoard"):
        C.VisualDL("logs")


REFUSED = [
    (lambda: C.LRScheduler(True, True), "choose one"),
    (lambda: C.EarlyStopping(mode="best"), "give 'auto', 'min' or 'max'"),
    (lambda: C.ReduceLROnPlateau(factor=1.5), "factor=1.5"),
    (lambda: C.ModelCheckpoint(save_freq=0), "save_freq=0"),
    (lambda: C.ProgBarLogger(verbose=5), "verbose=5"),
    (lambda: C.CallbackList([1]), "give instances of Callback"),
    (lambda: C.CallbackList([]).on_begin("test"), "phase 'test'"),
]


@pytest.mark.parametrize(("call", "match"), REFUSED)
def test_bad_settings_are_refused(call, match):
    with pytest.raises(ConfigError, match=match):
        call()


def test_an_unknown_monitor_is_refused():
    with pytest.raises(ConfigError, match=r"monitor='f1' is not among the results \(loss\)"):
        ready().fit(Points(), Points(), batch_size=6, verbose=0, callbacks=C.EarlyStopping(monitor="f1"))


def test_tensorboard_without_its_package(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError, match="pip install 'polyreme"):
        C.TensorBoard("logs")


class _Run:
    """What wandb.init gives, writing down what it is told."""

    def __init__(self):
        self.logged, self.metrics, self.ended = [], {}, False

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.ended = True


@pytest.mark.parametrize("is_active", [False, True])
def test_wandb(monkeypatch, is_active):
    run, asked = _Run(), {}
    wandb = types.SimpleNamespace(run=run if is_active else None, init=lambda **given: asked.update(given) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    board = C.WandbCallback(project="points", mode="offline", tags=["small"])
    ready(metrics=Accuracy()).fit(Points(), Points(), batch_size=3, epochs=2, verbose=0, callbacks=board)
    assert asked == ({} if is_active else {"project": "points", "mode": "offline", "tags": ["small"]})
    assert run.ended is not is_active
    assert run.metrics["eval/*"] == "eval/epoch"
    trained = [v for v in run.logged if "train/batch" in v]
    assert [v["train/batch"] for v in trained] == [1, 2, 3, 4]
    assert {"train/loss", "train/acc"} <= set(trained[0])
    assert [v["eval/epoch"] for v in run.logged if "eval/loss" in v] == [1, 2]


def test_wandb_writes_from_one_rank_and_needs_its_package(monkeypatch):
    run = _Run()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    board = C.WandbCallback()
    board.write("train", {"train/loss": 1.0}, 1)
    board.close()
    assert run.logged == []
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        C.WandbCallback()
