"""Trainer and Inferencer, and evaluators whose counts the Program keeps."""

import numpy as np
import pytest

from polyreme import fluid
from polyreme.errors import ConfigError, DataError
from polyreme.fluid import layers

X = np.random.default_rng(0).standard_normal((8, 3)).astype("f")
Y = (X @ np.array([[1.0], [-2.0], [0.5]])).astype("f")


def batches():
    for i in range(0, 8, 2):
        yield list(zip(X[i : i + 2], Y[i : i + 2], strict=True))


def predict():
    weight = fluid.ParamAttr(name="w", initializer=fluid.initializer.Constant(0.0))
    return layers.fc(layers.data("x", [3]), 1, param_attr=weight, bias_attr=False)


def measure():
    value = predict()
    return [layers.mean(layers.square_error_cost(value, layers.data("y", [1]))), value]


def trained(config, until=None):
    """A Trainer after three epochs, or up to a step of the second; what its events told."""
    trainer = fluid.Trainer(measure, lambda: fluid.optimizer.Momentum(0.1, 0.9), checkpoint_config=config)
    told = []

    def handle(event):
        told.append(event)
        if isinstance(event, fluid.BeginStepEvent):
            event.fetch_metrics = event.step == 0
        if isinstance(event, fluid.EndStepEvent) and (event.epoch, event.step) == until:
            trainer.stop()

    trainer.train(3, handle, batches, ["x", "y"])
    return trainer, told


def weight(trainer):
    return np.array(trainer.scope.find_var("w").get_tensor())


def test_a_trainer_learns_tests_saves_and_goes_on_where_it_was_stopped(tmp_path):
    whole, told = trained(None)
    kinds = [type(event).__name__ for event in told]
    steps = ["BeginStepEvent", "EndStepEvent"] * 4
    assert kinds == ["BeginEpochEvent", *steps, "EndEpochEvent"] * 3
    assert [len(event.metrics) for event in told if isinstance(event, fluid.EndStepEvent)] == [2, 0, 0, 0] * 3
    w = np.zeros((3, 1))
    speed = np.zeros_like(w)
    for _ in range(3):
        for samples in batches():
            x, y = (np.stack(part) for part in zip(*samples, strict=True))
            speed = 0.9 * speed + x.T @ (x @ w - y)
            w = w - 0.1 * speed
    np.testing.assert_allclose(weight(whole), w, rtol=2.0**-14, atol=2.0**-14)  # 12 steps of sums of 3 products
    loss, _ = whole.test(batches, ["x", "y"])
    np.testing.assert_allclose(loss, ((X @ w - Y) ** 2).mean(), rtol=2.0**-8, atol=2.0**-12)

    def config():
        return fluid.CheckpointConfig(str(tmp_path / "checkpoints"), max_num_checkpoints=2, step_interval=1)

    trained(config(), until=(1, 1))
    assert len(config().serials()) == 2
    (notes := tmp_path / "checkpoints" / "notes").write_text("of somebody else")
    later, told = trained(config())
    assert told[1] == fluid.BeginStepEvent(1, 2, fetch_metrics=False)
    np.testing.assert_array_equal(weight(later), weight(whole))
    assert not config().serials()
    assert [*notes.parent.iterdir()] == [notes]
    notes.unlink()
    config().remove()
    assert not notes.parent.exists()
    later.save_params(str(tmp_path / "parameters"))
    outputs = fluid.Inferencer(predict, str(tmp_path / "parameters")).infer({"x": X})[0]
    np.testing.assert_allclose(outputs, X @ weight(later), rtol=2.0**-18, atol=2.0**-18)
    later.save_inference_model(str(tmp_path / "model"), ["x"], [1])
    exe = fluid.Executor()
    program, names, targets = fluid.io.load_inference_model(str(tmp_path / "model"), exe)
    np.testing.assert_array_equal(exe.run(program, feed={names[0]: X}, fetch_list=targets)[0], outputs)
    with pytest.raises(ConfigError, match="reader=None; give a function"):
        later.train(1, print)
    with pytest.raises(ConfigError, match="give ints above 0"):
        fluid.CheckpointConfig(step_interval=0)


def test_evaluators_add_minibatches_up_and_begin_anew(script):
    tags, labels = (layers.data(name, [1], dtype="int64", lod_level=1) for name in ("tags", "labels"))
    chunks = script.evaluator.ChunkEvaluator(tags, labels, "IOB", 2)
    edits = script.evaluator.EditDistance(tags, labels, ignored_tokens=[4], normalized=False)
    exe = script.Executor()
    exe.run(script.default_startup_program())
    with pytest.raises(DataError, match="no minibatch was run"):
        edits.eval(exe)

    def run(seen, wanted):
        feed = {
            name: script.create_lod_tensor(np.array(v).reshape(-1, 1), [[2, 3]], "cpu")
            for name, v in (("tags", seen), ("labels", wanted))
        }
        return exe.run(feed=feed, fetch_list=[*chunks.metrics, *edits.metrics])

    wrong, right = [0, 1, 2, 4, 0], [0, 1, 2, 3, 4]
    *_, distance, count = run(wrong, right)  # [2, 0] is one change away from [2, 3]
    assert (distance.item(), count.item()) == (1, 1)
    precision, recall, f1 = (value.item() for value in chunks.eval(exe))
    assert (precision, recall) == pytest.approx((1 / 3, 1 / 2))
    assert f1 == pytest.approx(0.4)
    run(right, right)
    assert [value.item() for value in edits.eval(exe)] == [0.25, 0.25]
    chunks.reset(exe)
    edits.reset(exe)
    run(right, right)
    assert [value.item() for value in (*chunks.eval(exe), *edits.eval(exe))] == [1, 1, 1, 0, 0]
