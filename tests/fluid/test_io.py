"""fluid.io: variables in files of their own or in one, models for inference, training that continues."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle
from polyreme import static
from polyreme.errors import CheckpointError, ConfigError, ProgramError
from polyreme.fluid import core, io

EPS = float(np.finfo("float32").eps)
X = np.random.default_rng(0).normal(size=(4, 3, 4, 4)).astype("float32")


@pytest.fixture
def net(script):
    """(fluid, executor, output, loss): a convolution with statistics, dropout, Adam with a decay, a seed."""
    fluid = script
    x = fluid.data("x", [None, 3, 4, 4])
    h = fluid.layers.batch_norm(fluid.layers.conv2d(x, 2, 3), act="relu")
    out = fluid.layers.fc(fluid.layers.dropout(h, 0.3, dropout_implementation="upscale_in_train"), 2)
    loss = fluid.layers.mean(fluid.layers.square(out))
    rate = fluid.layers.exponential_decay(0.1, decay_steps=2, decay_rate=0.5)
    fluid.optimizer.Adam(rate).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    return fluid, exe, out, loss


def steps(exe, loss):
    return [exe.run(static.default_main_program(), feed={"x": X}, fetch_list=[loss])[0].tobytes() for _ in range(3)]


def value(name):
    return np.array(static.global_scope().find_var(name).get_tensor())


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("filename", [None, "everything"])
def test_training_continues_exactly_from_persistables(net, filename, tmp_path):
    _, exe, _, loss = net
    steps(exe, loss)
    io.save_persistables(exe, tmp_path / "d", filename=filename)
    want = steps(exe, loss)
    assert len(set(want)) == 3
    assert (sorted(os.listdir(tmp_path / "d")) == ["everything"]) == (filename is not None)
    with static.scope_guard(static.Scope()):
        io.load_persistables(exe, tmp_path / "d", filename=filename)
        assert steps(exe, loss) == want


def test_fluid_save_and_load(net, tmp_path):
    fluid, exe, _, loss = net
    main = fluid.default_main_program()
    steps(exe, loss)
    io.save(main, tmp_path / "net")
    want = steps(exe, loss)
    with static.scope_guard(static.Scope()):
        io.load(main, tmp_path / "net", exe)
        assert steps(exe, loss) == want
    state = io.load_program_state(tmp_path / "net")
    assert io.set_program_state(main, state) == ["@RANDOM_STREAM_1"]
    assert {p.name for p in io.get_program_parameter(main)} < {v.name for v in io.get_program_persistable_vars(main)}


@pytest.mark.parametrize("filename", [None, "parameters"])
def test_parameters_alone_with_the_statistics_of_normalization(net, filename, tmp_path):
    fluid, exe, out, loss = net
    steps(exe, loss)
    io.save_params(exe, tmp_path, filename=filename)
    test = fluid.default_main_program().clone(for_test=True)
    (want,) = exe.run(test, feed={"x": X}, fetch_list=[out])
    with static.scope_guard(static.Scope()):
        exe.run(fluid.default_startup_program())
        io.load_params(exe, tmp_path, test, filename=filename)
        np.testing.assert_array_equal(exe.run(test, feed={"x": X}, fetch_list=[out])[0], want)


def test_training_continues_from_parameters_made_elsewhere(net, tmp_path):
    fluid, exe, _, loss = net
    steps(exe, loss)
    io.save_params(exe, tmp_path)
    filters = value("conv2d_0.w_0")
    other, startup = fluid.Program(), fluid.Program()
    with paddle.utils.unique_name.guard(), fluid.program_guard(other, startup), fluid.scope_guard(fluid.Scope()):
        x = fluid.data("x", [None, 3, 4, 4])
        h = fluid.layers.batch_norm(fluid.layers.conv2d(x, 2, 3), act="relu")
        out = fluid.layers.fc(h, 5, param_attr="head", bias_attr=False)
        fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(fluid.layers.square(out)))
        exe.run(startup)
        head = value("head")
        io.load_vars(exe, tmp_path, other, predicate=lambda v: os.path.exists(os.path.join(tmp_path, v.name)))
        np.testing.assert_array_equal(value("conv2d_0.w_0"), filters)
        np.testing.assert_array_equal(value("head"), head)
        exe.run(other, feed={"x": X})
        assert not np.array_equal(value("conv2d_0.w_0"), filters)


def test_chosen_variables(net, tmp_path):
    fluid, exe, _, loss = net
    main = fluid.default_main_program()
    steps(exe, loss)
    io.save_vars(exe, tmp_path, vars=[main.global_block().var("fc_0.w_0"), "fc_0.w_0_moment1_0"])
    assert sorted(os.listdir(tmp_path)) == ["fc_0.w_0", "fc_0.w_0_moment1_0"]
    before = value("fc_0.w_0_moment1_0")
    steps(exe, loss)
    io.load_vars(exe, tmp_path, vars=["fc_0.w_0_moment1_0"])
    np.testing.assert_array_equal(value("fc_0.w_0_moment1_0"), before)
    io.save_vars(exe, tmp_path, predicate=lambda v: v.persistable and v.name.endswith("moment2_0"), filename="second")
    io.save_vars(exe, tmp_path / "parameters", predicate=io.is_parameter)
    io.save_vars(exe, tmp_path / "all", predicate=io.is_persistable)
    parameters, every = set(os.listdir(tmp_path / "parameters")), set(os.listdir(tmp_path / "all"))
    assert parameters == {p.name for p in main.all_parameters()} < every
    assert "fc_0.w_0_moment1_0" in every
    with pytest.raises(ConfigError, match=r"save_vars: give vars, .* or predicate"):
        io.save_vars(exe, tmp_path)
    with pytest.raises(ProgramError, match=r"'fc_0\.w_1' is no persistable variable .*did you mean 'fc_0\.w_0'"):
        io.save_vars(exe, tmp_path, vars=["fc_0.w_1"])
    with pytest.raises(ConfigError, match="give a folder, and a name in it"):
        io.save_vars(exe, tmp_path, vars=["fc_0.w_0"], filename="../up")
    with pytest.raises(TypeError, match="main_program is a Program, got str"):
        io.save_vars(exe, tmp_path, "main", vars=["fc_0.w_0"])


def test_files_that_are_not_as_they_should_be(net, tmp_path):
    _, exe, _, _ = net
    io.save_params(exe, tmp_path)
    io.save_persistables(exe, tmp_path, filename="all")
    path = tmp_path / "fc_0.w_0"
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(CheckpointError, match=r"fc_0\.w_0: tensors end at byte"):
        io.load_params(exe, tmp_path)
    path.write_bytes((tmp_path / "fc_0.b_0").read_bytes())
    with pytest.raises(CheckpointError, match=r"fc_0\.w_0 lacks 'fc_0\.w_0' and has 'fc_0\.b_0' too"):
        io.load_params(exe, tmp_path)
    path.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointError, match="is a pickle"):
        io.load_params(exe, tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"has no file for 'fc_0\.w_0'"):
        io.load_params(exe, tmp_path)
    with pytest.raises(CheckpointError, match=r"all has .*'adam_0_step', .* too"):
        io.load_params(exe, tmp_path, filename="all")
    io.save_params(exe, tmp_path, filename="parameters")
    with pytest.raises(CheckpointError, match="lacks '@LR_DECAY_COUNTER@'"):
        io.load_persistables(exe, tmp_path, filename="parameters")
    io.save_vars(exe, tmp_path, vars=["fc_0.b_0"], filename="wrong")


def test_models_for_inference(net, tmp_path):
    fluid, exe, out, loss = net
    steps(exe, loss)
    main = fluid.default_main_program()
    assert io.save_inference_model(tmp_path, ["x"], [out], exe, params_filename="__params__") == [out.name]
    assert sorted(os.listdir(tmp_path)) == ["__model__.json", "__model__.safetensors", "__model__.stablehlo"]
    (want,) = exe.run(main.clone(for_test=True), feed={"x": X}, fetch_list=[out])
    with static.scope_guard(static.Scope()):
        program, feed, fetch = io.load_inference_model(tmp_path, exe)
        np.testing.assert_array_equal(exe.run(program, feed={feed[0]: X}, fetch_list=fetch)[0], want)
    with pytest.raises(ConfigError, match=r"use fluid\.save"):
        io.save_inference_model(tmp_path, ["x"], [out], exe, program_only=True)
    with pytest.raises(ConfigError, match="no parameter servers"):
        io.load_inference_model(tmp_path, exe, pserver_endpoints=["127.0.0.1:1"])


def paddle_record(array):
    """A float32 array as PaddlePaddle writes it: a version, no levels, a version, what it is, and the bytes."""
    about = bytes([8, 5]) + b"".join(bytes([16, size]) for size in array.shape)
    return struct.pack("<IQIi", 0, 0, 0, len(about)) + about + array.tobytes()


@pytest.mark.parametrize("filename", [None, "all"])
def test_parameters_that_paddlepaddle_saved(script, tmp_path, filename):
    script.layers.fc(script.data("x", [None, 2]), 3)
    random = np.random.RandomState(0)
    values = {"fc_0.w_0": random.randn(2, 3).astype("float32"), "fc_0.b_0": random.randn(3).astype("float32")}
    records = {name: paddle_record(array) for name, array in values.items()}
    if filename is not None:
        records = {filename: b"".join(records[name] for name in sorted(records))}
    for name, data in records.items():
        (tmp_path / name).write_bytes(data)
    exe = script.Executor(script.CPUPlace())
    for load in (script.io.load_params, script.io.load_persistables):
        exe.run(script.default_startup_program())
        load(exe, str(tmp_path), filename=filename)
        for name, array in values.items():
            np.testing.assert_array_equal(script.global_scope().find_var(name).get_tensor(), array)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut"):
        script.io.load_params(exe, str(tmp_path), filename=filename)


FLUID = Path(__file__).parents[1] / "paddle_files" / "fluid"  # what tools/write_fluid_files.py writes
READ = {
    "folder": lambda f, exe: f.io.load_persistables(exe, FLUID / "variables"),
    "one file": lambda f, exe: f.io.load_persistables(exe, FLUID, filename="all"),
    "save": lambda f, exe: f.load(f.default_main_program(), FLUID / "model"),
    "state": lambda f, exe: io.set_program_state(
        f.default_main_program(),
        {k: v for k, v in io.load_program_state(FLUID / "variables").items() if "pow" not in k},
    ),
}


@pytest.fixture
def trained_by_paddlepaddle(script):
    """(fluid, executor, output, loss) of the Program of tools/write_fluid_files.py."""
    layers = script.layers
    x, y = script.data("x", [None, 2]), script.data("y", [None, 1])
    hidden = layers.batch_norm(layers.fc(x, 2, bias_attr=False))
    out = layers.fc(hidden, 1, act="tanh", param_attr="weight")
    loss = layers.mean(layers.square_error_cost(out, y))
    evaluation = script.default_main_program().clone(for_test=True)
    script.optimizer.Adam(layers.exponential_decay(0.1, 2, 0.5)).minimize(loss)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    return script, exe, evaluation, out, loss


@pytest.mark.parametrize("read", READ)
def test_training_continues_from_what_paddlepaddle_1_8_saved(trained_by_paddlepaddle, read):
    fluid, exe, evaluation, out, loss = trained_by_paddlepaddle
    known = np.load(FLUID / "values.npz")
    feed = {"x": known["x"], "y": known["y"]}
    READ[read](fluid, exe)
    # sums of three products, scaled by a norm
    (value,) = exe.run(evaluation, feed=feed, fetch_list=[out])
    np.testing.assert_allclose(value, known["out"], atol=32 * EPS)
    if read != "state":  # without the number of steps
        losses = [exe.run(feed=feed, fetch_list=[loss])[0].item() for _ in known["losses"]]
        np.testing.assert_allclose(losses, known["losses"], rtol=1024 * EPS)  # three steps, each a division by a root


def test_a_model_of_paddlepaddle_1_8_with_a_file_for_each_parameter(script):
    known, exe = np.load(FLUID / "values.npz"), script.Executor(script.CPUPlace())
    program, feeds, fetches = io.load_inference_model(FLUID / "inference", exe)
    (value,) = exe.run(program, feed={feeds[0]: known["x"]}, fetch_list=fetches)
    np.testing.assert_allclose(value, known["out"], atol=32 * EPS)
    predictor = core.create_paddle_predictor(core.AnalysisConfig(str(FLUID / "inference")))
    np.testing.assert_array_equal(predictor.run([core.PaddleTensor(known["x"])])[0].as_ndarray(), value)


def test_what_paddlepaddle_1_8_saved_of_another_program(script, tmp_path):
    x = script.data("x", [None, 2])
    script.layers.fc(x, 3, param_attr="weight", bias_attr="other")
    with pytest.raises(CheckpointError, match="lacks 'other'"):
        script.load(script.default_main_program(), FLUID / "model")
    with pytest.raises(CheckpointError, match="holds 28 Tensors, without names; the Program has 2 persistable"):
        io.load_persistables(None, FLUID, filename="all")
    (tmp_path / "notes").write_text("none")
    with pytest.raises(CheckpointError, match="holds no file of a variable"):
        io.load_program_state(tmp_path)
