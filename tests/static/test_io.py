"""Saving and loading in static mode: resuming exactly, models for inference in a process without their code, and files
that are not as they should be.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import export, static
from polyreme.errors import CaptureError, CheckpointError, ConfigError, GradError, ProgramError
from polyreme.optimizer import SGD, Adam
from polyreme.optimizer.lr import StepDecay

X = np.random.default_rng(0).normal(size=(6, 3, 4, 4)).astype("float32")


def network(rate=0.1):
    """A convolution with statistics, dropout, a Linear, Adam; -> x, output, loss."""
    x = static.data("x", [None, 3, 4, 4])
    h = F.dropout(F.relu(paddle.nn.BatchNorm2D(2)(paddle.nn.Conv2D(3, 2, 3)(x))), 0.3)
    out = paddle.nn.Linear(8, 2)(h.reshape([x.shape[0], -1]))
    loss = out.square().mean()
    Adam(rate).minimize(loss)
    return x, out, loss


def value(variable):
    return np.asarray(static.global_scope().find_var(variable.name).get_tensor())


def steps(exe, main, loss, schedule=None):
    losses = []
    for _ in range(3):
        losses.append(exe.run(main, feed={"x": X}, fetch_list=[loss])[0].tobytes())
        if schedule is not None:
            schedule.step()
    return losses


def test_training_resumes_exactly_with_schedules_statistics_and_random_numbers(static_mode, tmp_path):
    main, startup = static_mode
    rate = StepDecay(0.1, 2, gamma=0.3)
    _, _, loss = network(rate)
    main.random_seed = 7
    exe = static.Executor()
    exe.run(startup)
    steps(exe, main, loss, rate)
    static.save(main, tmp_path / "net")
    want = steps(exe, main, loss, rate)
    assert len(set(want)) == 3
    with static.scope_guard(static.Scope()):
        static.load(main, tmp_path / "net", exe)
        assert rate.last_epoch == 3
        assert steps(exe, main, loss, rate) == want
    read = static.Program.from_json((tmp_path / "net.pdmodel").read_text())
    (update,) = (op for op in read.global_block().ops if op.kind == "optimize")
    with static.scope_guard(static.Scope()):
        static.load(read, tmp_path / "net")
        assert steps(exe, read, loss.name, update.optimizer._scheduler) == want


def test_a_fixed_rate_that_was_changed_is_kept(static_mode, tmp_path):
    main, startup = static_mode
    w = paddle.create_parameter([1], "float32", default_initializer=paddle.nn.initializer.Constant(1.0))
    optimizer = SGD(0.5)
    optimizer.minimize(w.sum())
    exe = static.Executor()
    exe.run(startup)
    optimizer.set_lr(0.25)
    static.save(main, tmp_path / "net")
    optimizer.set_lr(0.5)
    with static.scope_guard(static.Scope()):
        static.load(main, tmp_path / "net")
        exe.run(main)
        assert value(w).tolist() == [0.75]
    assert optimizer.get_lr() == 0.25


def test_layers_with_values_inside_programs_are_saved_too(static_mode, tmp_path):
    main, _ = static_mode
    paddle.disable_static()
    layer = paddle.nn.Linear(2, 1)
    paddle.enable_static()
    x = static.data("x", [None, 2])
    loss = layer(x).sum()
    SGD(0.1).minimize(loss)
    exe = static.Executor()
    before = layer.weight.numpy()
    static.save(main, tmp_path / "net")
    exe.run(main, feed={"x": np.ones((1, 2), "float32")})
    assert not np.array_equal(layer.weight.numpy(), before)
    static.load(main, tmp_path / "net")
    np.testing.assert_array_equal(layer.weight.numpy(), before)


def test_files_without_optimizer_and_states_as_dicts(static_mode, tmp_path):
    main, startup = static_mode
    x = static.data("x", [None, 2])
    first = paddle.nn.Linear(2, 2)
    first(x)
    exe = static.Executor()
    exe.run(startup)
    (tmp_path / "net.pdopt").write_bytes(b"of an earlier save")
    static.save(main, tmp_path / "net")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.pdmodel", "net.pdparams"]
    found = static.load_program_state(tmp_path / "net")
    assert found.keys() == {first.weight.name, first.bias.name}
    assert list(static.load_program_state(tmp_path / "net", [first.bias])) == [first.bias.name]
    unused = static.set_program_state(main, {first.weight.name: np.eye(2, dtype="float32"), "other": np.ones(1)})
    assert unused == ["other"]
    np.testing.assert_array_equal(value(first.weight), np.eye(2))
    static.load(main, tmp_path / "net", var_list=[first.bias])
    np.testing.assert_array_equal(value(first.weight), np.eye(2))
    with pytest.raises(ProgramError, match=r"no name in \['other'\] is a persistable variable"):
        static.set_program_state(main, {"other": np.ones(1)})
    with pytest.raises(CheckpointError, match=r"is float64\[2, 2\], the Program's is float32\[2, 2\]"):
        static.set_program_state(main, {first.weight.name: np.eye(2)})
    with pytest.raises(CheckpointError, match="of var_list, lacks 'nothing'"):
        static.load(main, tmp_path / "net", var_list=["nothing"])


def test_a_program_gives_its_values_by_name_and_takes_them(static_mode):
    main, startup = static_mode
    loss = static.nn.fc(static.data("x", [None, 2]), 1).mean()
    paddle.optimizer.Adam(0.1).minimize(loss)
    scope, exe, feed = static.Scope(), static.Executor(), {"x": np.ones((3, 2), "float32")}
    with pytest.raises(ProgramError, match="has no value in this scope; run the startup program"):
        main.state_dict(scope=scope)
    exe.run(startup, scope=scope)
    before = {name: value.numpy() for name, value in main.state_dict(scope=scope).items()}
    assert before.keys() == main.state_dict("param", scope).keys() | main.state_dict("opt", scope).keys()
    assert {name.partition(".")[2] for name in main.state_dict("param", scope)} >= {"w_0", "b_0"}
    first = [exe.run(main, feed=feed, fetch_list=[loss], scope=scope)[0] for _ in range(3)]
    assert main.set_state_dict(before | {"other": np.ones(1)}, scope) == ["other"]
    again = [exe.run(main, feed=feed, fetch_list=[loss], scope=scope)[0] for _ in range(3)]
    np.testing.assert_array_equal(first, again)  # the moments were set back too
    with pytest.raises(ConfigError, match="mode='params'; give 'all', 'param' or 'opt'"):
        main.state_dict("params")
    with pytest.raises(ProgramError, match=r"Program.set_state_dict: no name in \['other'\] is a persistable variable"):
        main.set_state_dict({"other": np.ones(1)}, scope)


@pytest.fixture
def saved(static_mode, tmp_path):
    """(main, prefix, executor) after static.save of a network."""
    main, startup = static_mode
    network()
    exe = static.Executor()
    exe.run(startup)
    static.save(main, tmp_path / "net")
    return main, tmp_path / "net", exe


def test_state_of_two_optimizers_over_one_parameter(static_mode, tmp_path):
    w = paddle.create_parameter([2], "float32")
    Adam(0.1).minimize(w.sum())
    Adam(0.1).minimize((w * w).sum())
    static.Executor().run(static_mode[1])
    with pytest.raises(ProgramError, match=r"two optimizers of the Program have state named .*moment1_0"):
        static.save(static_mode[0], tmp_path / "net")


def test_names_of_another_program_are_refused(saved):
    _, path, _ = saved
    other = static.Program()
    with static.program_guard(other, static.Program()):
        paddle.nn.Linear(8, 2)(static.data("y", [None, 8]))
    with pytest.raises(CheckpointError, match=r"net\.pdparams lacks 'linear_1\.b_0', .* and has 'batch_norm2d_0"):
        static.load(other, path)


def test_files_that_are_missing_cut_off_or_of_another_save(saved):
    main, path, exe = saved
    parameters, training = Path(f"{path}.pdparams"), Path(f"{path}.pdopt")
    data = parameters.read_bytes()
    parameters.write_bytes(data[:-5])
    with pytest.raises(CheckpointError, match=r"net\.pdparams: tensors end at byte"):
        static.load(main, path)
    parameters.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"net\.pdparams: is corrupt: digest"):
        static.load(main, path)
    exe.run(main, feed={"x": X})
    old = training.read_bytes()
    static.save(main, path)
    training.write_bytes(old)
    with pytest.raises(CheckpointError, match=r"net\.pdopt was saved with another .*net\.pdparams"):
        static.load(main, path)
    training.unlink()
    with pytest.raises(CheckpointError, match=r"net\.pdopt cannot be read: No such file"):
        static.load(main, path)
    static.load(main.clone(for_test=True), path)  # evaluation needs no optimizer
    training.write_bytes(parameters.read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 'polyreme\.parameters', not 'polyreme\.training'"):
        static.load(main, path)
    parameters.unlink()
    with pytest.raises(CheckpointError, match=r"net\.pdparams cannot be read"):
        static.load(main, path)


def test_paths_and_options(saved, tmp_path):
    main, path, _ = saved
    with pytest.raises(ConfigError, match="names a folder; give FOLDER/NAME"):
        static.save(main, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        static.save(main, tmp_path / "file" / "net")
    with pytest.raises(ConfigError, match="protocol=2"):
        static.save(main, path, protocol=2)
    with pytest.raises(TypeError, match=r"static\.save takes a Program, got str"):
        static.save("main", path)
    with static.scope_guard(static.Scope()), pytest.raises(ProgramError, match="has no value in this scope"):
        static.save(main, path)


SERVE = """
import sys, json
import numpy as np
import polyreme as paddle
from polyreme import inference, static

x = np.load(sys.argv[2])
exe = static.Executor()
program, feed, fetch = static.load_inference_model(sys.argv[1], exe)
first = exe.run(program, feed={feed[0]: x}, fetch_list=fetch)[0]
predictor = inference.create_predictor(inference.Config(sys.argv[1]))
handle = predictor.get_input_handle(predictor.get_input_names()[0])
handle.copy_from_cpu(x)
predictor.run()
second = predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()

paddle.enable_static()  # and it can be trained on
startup = static.Program()
program.random_seed = startup.random_seed = 7
with static.program_guard(program, startup):
    loss = paddle.nn.Linear(2, 1)(fetch[0]).square().mean()
    paddle.optimizer.SGD(0.01).minimize(loss)  # at a rate of 0.1 one draw of weights in sixty diverges
exe.run(startup)
losses = [exe.run(program, feed={feed[0]: x}, fetch_list=[loss])[0].item() for _ in range(3)]
np.savez(sys.argv[3], first=first, second=second, losses=losses)
"""


@pytest.mark.slow
def test_a_model_runs_is_served_and_trained_on_where_its_code_is_not(saved, tmp_path):
    main, _, exe = saved
    (out,) = (v for v in main.list_vars() if v.name == "linear_0.tmp_0")
    x = main.global_block().var("x")
    static.save_inference_model(tmp_path / "model", [x], [out], exe)
    (want,) = exe.run(main.clone(for_test=True), feed={"x": X}, fetch_list=[out])
    np.save(tmp_path / "x.npy", X)
    program = tmp_path / "serve.py"
    program.write_text(SERVE)
    files = [tmp_path / "model", tmp_path / "x.npy", tmp_path / "found.npz"]
    subprocess.run([sys.executable, program, *files], check=True, cwd=Path(paddle.__file__).parent.parent)
    with np.load(files[2]) as file:
        found = dict(file)
    np.testing.assert_array_equal(found["first"], want)  # one backend, one Program
    np.testing.assert_array_equal(found["second"], want)
    assert found["losses"][2] < found["losses"][0]
    manifest = json.loads((tmp_path / "model.json").read_text())
    manifest["extra"]["static"]["feed"] = ["y"]
    (tmp_path / "model.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"model\.json: changed since it was written"):
        static.load_inference_model(tmp_path / "model", exe)


def test_a_model_holds_what_it_needs_and_no_more(static_mode, tmp_path):
    main, startup = static_mode
    x = static.data("x", [None, 2])
    label = static.data("label", [None, 1])
    hidden = paddle.nn.Linear(2, 3)(x) * paddle.to_tensor(np.full(3, 2 + 1j, "complex64")).real()
    out = paddle.nn.Linear(3, 1)(hidden)
    SGD(0.1).minimize((out - label).square().mean())
    exe = static.Executor()
    exe.run(startup)
    pruned = static.normalize_program(main, [hidden], out)
    assert [op.kind for op in pruned.global_block().ops] == ["linear"]
    assert [p.name for p in pruned.all_parameters()] == ["linear_1.w_0", "linear_1.b_0"]
    static.save_inference_model(tmp_path / "tail", hidden, out, exe, platforms=["cpu"])
    artifact = export.read(tmp_path / "tail")
    assert [s.name for s in artifact.inputs] == [hidden.name]
    assert artifact.state.keys() == {"linear_1.w_0", "linear_1.b_0"}
    static.save_inference_model(tmp_path / "whole", [x], [out, hidden], exe, platforms=["cpu"])
    program, feed, fetch = static.load_inference_model(tmp_path / "whole", exe)
    rows = np.array([[1.0, 2.0]], "float32")
    want = exe.run(main.clone(for_test=True), feed={"x": rows, "label": rows[:, :1]}, fetch_list=[out, hidden])
    found = exe.run(program, feed={feed[0]: rows}, fetch_list=fetch)
    for a, b, c in zip(found, want, export.read(tmp_path / "whole").call([rows]), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(c, b)


def test_a_model_saved_with_gradients_is_trained_as_a_layer(static_mode, tmp_path):
    x = static.data("x", [None, 3])
    out = static.nn.fc(x, 2)
    exe = static.Executor()
    exe.run(static.default_startup_program())
    for differentiable in (True, False):
        path = tmp_path / str(differentiable)
        static.save_inference_model(path, [x], [out], exe, platforms=["cpu"], differentiable=differentiable)
    paddle.disable_static()
    layer = paddle.jit.load(tmp_path / "True")
    layer.train()
    weight, bias = layer.parameters()
    data = np.float32([[1, 2, 3], [4, 5, 6]])
    (scores,) = layer(paddle.to_tensor(data))
    np.testing.assert_allclose(scores, data @ weight.numpy() + bias.numpy(), rtol=8 * 2.0**-23, atol=2.0**-21)
    scores.sum().backward()
    np.testing.assert_array_equal(weight.grad, data.sum(0)[:, None] * np.ones(2))
    np.testing.assert_array_equal(bias.grad, [2, 2])
    with pytest.raises(GradError, match="save it with differentiable=True"):
        paddle.jit.load(tmp_path / "False").train()
    paddle.enable_static()
    with pytest.raises(ConfigError, match="buckets, differentiable are of the StableHLO"):
        static.save_inference_model(
            tmp_path / "none", [x], [out], exe, program_only=True, buckets=[[1, 2]], differentiable=True
        )


def test_programs_and_values_as_bytes(static_mode, tmp_path):
    _, startup = static_mode
    x = static.data("x", [None, 2])
    out = paddle.nn.Linear(2, 3)(x)
    exe = static.Executor()
    exe.run(startup)
    static.save_to_file(tmp_path / "program", static.serialize_program([x], [out]))
    values = static.serialize_persistables([x], [out], exe)
    rows = np.ones((1, 2), "float32")
    (want,) = exe.run(feed={"x": rows}, fetch_list=[out])
    with static.scope_guard(static.Scope()):
        program = static.deserialize_program(static.load_from_file(tmp_path / "program"))
        static.deserialize_persistables(program, values, exe)
        np.testing.assert_array_equal(exe.run(program, feed={"x": rows}, fetch_list=[out.name])[0], want)
    with pytest.raises(CheckpointError, match="data: has"):
        static.deserialize_persistables(program, b"no", exe)
    with pytest.raises(CheckpointError, match="holds no Program"):
        static.deserialize_program(values)
    with pytest.raises(TypeError, match="save_to_file writes bytes, got str"):
        static.save_to_file(tmp_path / "program", "text")


def test_sequences_are_kept_as_programs_alone(static_mode, tmp_path):
    x = static.data("x", [None, 2], lod_level=1)
    exe = static.Executor()
    static.save_inference_model(tmp_path / "model", [x], [x * 2], exe)
    program, feed, _ = static.load_inference_model(tmp_path / "model", exe)
    assert feed == ["x"]
    assert program.global_block().var("x").lod_level == 1
    assert not (tmp_path / "model.stablehlo").exists()
    with pytest.raises(CheckpointError, match="holds a static Program and no compiled function"):
        _ = export.read(tmp_path / "model").inputs


def test_sizes_that_a_program_computes_with_stay_open(static_mode, tmp_path):
    x = static.data("x", [None, 2])
    shape = paddle.shape(x)
    rows = paddle.reshape(x, [shape[0] * 2, 1]) + paddle.full([x.shape[0] * 2, 1], 3.0)
    padded = paddle.concat([x, paddle.expand(paddle.ones([1, 2]), [shape[0] - 1 + 2, 2])])
    same = paddle.reshape(x * shape[0], shape)
    inside = paddle.static.nn.cond(shape[0] > 2, lambda: shape[0] * 1, lambda: shape[0] + 10)
    fetch = [rows, padded, same, inside]
    exe = static.Executor()
    static.save_inference_model(tmp_path / "model", [x], fetch, exe, platforms=["cpu"])
    artifact = export.read(tmp_path / "model")
    for n in (1, 5):
        values = np.arange(2 * n, dtype="float32").reshape(n, 2)
        want = exe.run(feed={"x": values}, fetch_list=fetch)
        for a, b in zip(artifact.call([values]), want, strict=True):
            np.testing.assert_array_equal(a, b)


def random_numbers(x):
    return x + paddle.rand([2])


def changed_state(x):
    total = paddle.create_parameter([2], "float32", default_initializer=paddle.nn.initializer.Constant(0.0))
    with paddle.no_grad():
        paddle.assign(total + 1, output=total)
    return x + total


def size_needed(x):
    return paddle.topk(x, 2, axis=0)[0]


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (random_numbers, ProgramError, "takes random numbers even in evaluation"),
        (size_needed, CaptureError, "dim 0 of input 'x' cannot be left open"),
        (changed_state, ProgramError, r"changes \['.*'\] in place"),
    ],
)
def test_what_no_model_for_inference_can_do(build, error, match, static_mode, tmp_path):
    x = static.data("x", [None, 2])
    out = build(x)
    static.Executor().run(static_mode[1])
    with pytest.raises(error, match=match):
        static.save_inference_model(tmp_path / "model", [x], [out], None, platforms=["cpu"])


def test_arguments_of_models(static_mode, tmp_path):
    x, y = static.data("x", [None, 2]), static.data("y", [None, 2])
    exe, path = static.Executor(), tmp_path / "model"
    with pytest.raises(ProgramError, match=r"need \['y'\] to be fed, which feed_vars \['x'\] lacks"):
        static.save_inference_model(path, [x], [x + y], exe)
    with pytest.raises(TypeError, match="feed_vars holds Variables, got str"):
        static.save_inference_model(path, ["x"], [x + y], exe)
    with pytest.raises(ConfigError, match="fetch_vars is empty"):
        static.save_inference_model(path, [x], [], exe)
    with pytest.raises(ConfigError, match="unknown option 'programm'; did you mean 'program'"):
        static.save_inference_model(path, [x], [x], exe, programm=1)
    with pytest.raises(ConfigError, match="unknown options skip"):
        static.normalize_program(static_mode[0], [x], [x], skip=True)
    with pytest.raises(
        ConfigError, match="params_filename without model_filename: files are found by path_prefix alone"
    ):
        static.load_inference_model(path, exe, params_filename="p")
    with pytest.raises(CheckpointError, match="no such file"):
        static.load_inference_model(path, exe)
    paddle.disable_static()
    paddle.jit.save(lambda x: x * 2, path, [static.InputSpec([2])], platforms=["cpu"])
    with pytest.raises(CheckpointError, match=r"was written by jit\.save"):
        static.load_inference_model(path, exe)
