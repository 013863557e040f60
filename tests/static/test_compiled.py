"""CompiledProgram: a batch split over devices trains as on one; what cannot be split is refused."""

from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.errors import ConfigError, DeviceError, ProgramError
from polyreme.fluid.lod_tensor import create_lod_tensor
from polyreme.static.compiled import BuildStrategy, CompiledProgram, ExecutionStrategy
from polyreme.static.strategies import BUILD, EXECUTION

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
FEED = {"x": X, "y": Y}
STEPS = 20
# each step adds errors of one rounding of sums of 8 terms of order 1 (gradients in another order), and steps add up
TOLERANCE = {"rtol": STEPS * 8 * 2**-24, "atol": STEPS * 8 * 2**-24}


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setenv("CPU_NUM", "2")


def mlp(optimizer=None):
    """-> loss, the Program for evaluation."""
    x, y = static.data("x", [None, 4]), static.data("y", [None, 1])
    first, second = paddle.nn.Linear(4, 8), paddle.nn.Linear(8, 1)
    out = second(F.relu(first(x)))
    loss = ((out - y) ** 2).mean()
    test = static.default_main_program().clone(for_test=True)
    if optimizer is not None:
        optimizer.minimize(loss)
    return loss, test


def started(*scopes):
    """The same parameters in every scope; returns the Executor."""
    exe = static.Executor()
    for scope in scopes:
        paddle.seed(5)
        exe.run(static.default_startup_program(), scope=scope)
    return exe


def values(scope):
    return {n: np.asarray(scope.find_var(n).get_tensor()) for n in scope.local_var_names()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "make", [lambda: paddle.optimizer.SGD(0.05), lambda: paddle.optimizer.Adam(0.05)], ids=["SGD", "Adam"]
)
def test_two_devices_train_as_one(static_mode, make):
    loss, test = mlp(make())
    one, two = static.Scope(), static.Scope()
    exe = started(one, two)
    compiled = CompiledProgram(static_mode[0]).with_data_parallel(loss_name=loss.name)
    for _ in range(STEPS):
        (want,) = exe.run(feed=FEED, fetch_list=[loss], scope=one)
        (losses,) = exe.run(compiled, feed=FEED, fetch_list=[loss], scope=two)
        assert (want.shape, losses.shape) == ((), (2,))
        np.testing.assert_allclose(losses.mean(), want, **TOLERANCE)
    assert losses[0] != losses[1]
    assert want < 0.5
    mine = values(two)
    assert len(mine) > 4
    for name, value in values(one).items():
        np.testing.assert_allclose(mine[name], value, **TOLERANCE, err_msg=name)
    # the scope serves a plain run, a plain run of training, and then a parallel one again
    (alone,) = exe.run(test, feed=FEED, fetch_list=[loss], scope=two)
    np.testing.assert_allclose(alone, exe.run(test, feed=FEED, fetch_list=[loss], scope=one)[0], **TOLERANCE)
    for program in (static_mode[0], compiled, static_mode[0]):
        (want,) = exe.run(feed=FEED, fetch_list=[loss], scope=one)
        (losses,) = exe.run(program, feed=FEED, fetch_list=[loss], scope=two)
        np.testing.assert_allclose(losses.mean(), want, **TOLERANCE)


def test_values_stay_on_the_devices_between_runs_and_compile_once(static_mode):
    loss, test = mlp(paddle.optimizer.SGD(0.05))
    scope = static.Scope()
    exe = started(scope)
    compiled = CompiledProgram(static_mode[0]).with_data_parallel(loss_name=loss.name)
    exe.run(compiled, feed=FEED, fetch_list=[loss], scope=scope)
    parameter = scope.find("linear_0.w_0")
    assert len(parameter._array.sharding.device_set) == 2
    assert parameter._array.sharding.is_fully_replicated
    before = list(exe._compiled.values())
    exe.run(compiled, feed=FEED, fetch_list=[loss], scope=scope)
    assert list(exe._compiled.values()) == before
    assert len(parameter._array.sharding.device_set) == 2
    scope.var("linear_0.w_0").get_tensor().set(np.zeros((4, 8), "float32"))
    a, b = exe.run(compiled, feed=FEED, fetch_list=["linear_0.w_0", loss], scope=scope)
    assert (a.shape, b.shape) == ((8, 8), (2,))  # a copy from each device
    # evaluation changes nothing: a plain one brings values to one device, a parallel one spreads them again
    evaluate = CompiledProgram(test).with_data_parallel()
    for program, count in ((evaluate, 2), (test, 1), (evaluate, 2)):
        exe.run(program, feed=FEED, fetch_list=[loss], scope=scope)
        assert len(parameter._array.sharding.device_set) == count


def test_a_list_feeds_each_device_and_numbers_keep_their_dtype(static_mode):
    loss, _ = mlp()
    exe = started(static.global_scope())
    compiled = CompiledProgram(static_mode[0]).with_data_parallel()
    parts = [{"x": X[:4], "y": Y[:4]}, {"x": X[4:], "y": Y[4:]}]
    want = exe.run(compiled, feed=FEED, fetch_list=[loss])[0]
    np.testing.assert_array_equal(exe.run(compiled, feed=parts, fetch_list=[loss])[0], want)
    listed = {"x": X.tolist(), "y": paddle.to_tensor(Y) if paddle.in_dynamic_mode() else Y}
    np.testing.assert_array_equal(exe.run(compiled, feed=listed, fetch_list=[loss])[0], want)
    with pytest.raises(ProgramError, match="list of 1 dicts for 2 devices"):
        exe.run(compiled, feed=parts[:1], fetch_list=[loss])
    with pytest.raises(ProgramError, match=r"device 0 is given \['x', 'y'\], device 1 \['x'\]|feed lacks \['y'\]"):
        exe.run(compiled, feed=[parts[0], {"x": X}], fetch_list=[loss])
    with pytest.raises(ProgramError, match="feed is a dict, or a list"):
        exe.run(compiled, feed=X, fetch_list=[loss])


def test_the_last_device_gets_the_rest(static_mode):
    loss, _ = mlp(paddle.optimizer.SGD(0.05))
    exe = started(static.global_scope())
    before = {n: v.copy() for n, v in values(static.global_scope()).items() if ".w_" in n or ".b_" in n}
    compiled = CompiledProgram(static_mode[0]).with_data_parallel(loss_name=loss.name)
    out = static_mode[0].global_block().ops[2].outputs[0]
    rows, losses = exe.run(compiled, feed={"x": X[:5], "y": Y[:5]}, fetch_list=[out, loss])
    after = values(static.global_scope())
    w1, b1, w2, b2 = (before[f"linear_{i}.{k}_0"] for i in (0, 1) for k in "wb")
    part_gradients = []
    for at, part in enumerate((slice(0, 2), slice(2, 5))):
        h = X[part] @ w1 + b1
        error = np.maximum(h, 0) @ w2 + b2 - Y[part]
        np.testing.assert_allclose(losses[at], (error**2).mean(), rtol=1e-5)
        part_gradients.append((2 * error / len(error) * w2.T * (h > 0)).T @ X[part])
    assert rows.shape[0] == 5
    # float32 sums of few terms of order 1
    np.testing.assert_allclose(after["linear_0.w_0"], w1 - 0.05 * np.mean(part_gradients, 0).T, atol=1e-6)


def test_sequences_are_cut_between_devices(static_mode):
    x = static.data("x", [None, 2], lod_level=1)
    rows = x * 2
    total = x.sum()
    exe = static.Executor()
    compiled = CompiledProgram(static_mode[0]).with_data_parallel()
    data = np.arange(12, dtype="float32").reshape(6, 2)
    fed = create_lod_tensor(data, [[1, 2, 3]], "cpu")
    a, b = exe.run(compiled, feed={"x": fed}, fetch_list=[rows, total])
    np.testing.assert_array_equal(a, data * 2)
    np.testing.assert_array_equal(b, [data[:1].sum(), data[1:].sum()])  # one sequence, and two with the rest
    (offsets,) = x.lod
    for lengths in ([1, 2, 3], [1, 2, 2, 1]):
        fed = create_lod_tensor(data, [lengths], "cpu")
        (found,) = exe.run(compiled, feed={"x": fed}, fetch_list=[offsets])
        np.testing.assert_array_equal(found, fed.lod()[0])
    with pytest.raises(ProgramError, match="'x' has 1 sequences for 2 devices"):
        exe.run(compiled, feed={"x": create_lod_tensor(data, [[6]], "cpu")}, fetch_list=[total])


def test_dropout_differs_over_devices_and_repeats_by_seed(static_mode):
    main, _ = static_mode
    main.random_seed = 3
    out = F.dropout(static.data("x", [None, 64]), 0.5)
    compiled, exe = CompiledProgram(main).with_data_parallel(), static.Executor()
    feed = {"x": np.ones((2, 64), "float32")}
    runs = [
        [exe.run(compiled, feed=feed, fetch_list=[out], scope=scope)[0] for _ in range(2)]
        for scope in (static.Scope(), static.Scope())
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    first, second = runs[0]
    assert (first[0] != first[1]).any()
    assert (first != second).any()


def test_batch_statistics_are_each_devices_own_and_the_first_ones_count(static_mode):
    norm = paddle.nn.BatchNorm1D(4, momentum=0.0)
    out = norm(static.data("x", [None, 4]))
    exe = started(static.global_scope())
    compiled = CompiledProgram(static_mode[0]).with_data_parallel()
    (found,) = exe.run(compiled, feed={"x": X}, fetch_list=[out])
    halves = [(h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5) for h in (X[:4], X[4:])]
    np.testing.assert_allclose(found, np.concatenate(halves), atol=1e-5)
    kept = static.global_scope().find_var(norm._mean.name).get_tensor()
    np.testing.assert_allclose(np.asarray(kept), X[:4].mean(0), atol=1e-6)
    copies = static.global_scope().find(norm._mean.name)._array.addressable_shards
    np.testing.assert_array_equal(copies[0].data, copies[1].data)


@pytest.mark.parametrize(
    ("scale", "factor"),
    [("CoeffNumDevice", 1.0), ("One", 2.0), ("Customized", 6.0)],
)
def test_the_scale_of_gradients(static_mode, scale, factor):
    loss, _ = mlp(paddle.optimizer.SGD(0.05))
    exe = started(static.global_scope())
    strategy = BuildStrategy()
    strategy.gradient_scale_strategy = getattr(BuildStrategy.GradientScaleStrategy, scale)
    compiled = CompiledProgram(static_mode[0], strategy).with_data_parallel(loss_name=loss.name)
    more = {f"{loss.name}@GRAD": np.full(2, 3.0, "float32")} if scale == "Customized" else {}
    gradient, losses = exe.run(compiled, feed=FEED | more, fetch_list=["linear_1.b_0@GRAD", loss])
    alone = started(static.global_scope()).run(feed=FEED, fetch_list=["linear_1.b_0@GRAD"])[0]
    np.testing.assert_allclose(gradient, np.concatenate([alone * factor] * 2), rtol=1e-5)
    assert losses.shape == (2,)
    if scale == "Customized":
        with pytest.raises(ProgramError, match=r"feed lacks \['.*@GRAD'\]"):
            exe.run(compiled, feed=FEED, fetch_list=[loss])


@pytest.mark.parametrize("by", ["layer", "setting"])
def test_synced_batch_norms_train_as_one_device_on_the_whole_batch(static_mode, by):
    kind = paddle.nn.SyncBatchNorm if by == "layer" else paddle.nn.BatchNorm1D
    x, y = static.data("x", [None, 4]), static.data("y", [None, 1])
    norm = kind(3)
    loss = paddle.nn.functional.mse_loss(paddle.nn.Linear(3, 1)(norm(paddle.nn.Linear(4, 3)(x))), y)
    paddle.optimizer.SGD(0.05).minimize(loss)
    scopes = [static.Scope(), static.Scope()]
    exe = started(*scopes)
    strategy = BuildStrategy()
    strategy.sync_batch_norm = by == "setting"
    compiled = CompiledProgram(static_mode[0], strategy).with_data_parallel(loss_name=loss.name)
    fetches = [loss, norm._mean, norm._variance, norm.weight]
    for _ in range(3):
        whole = exe.run(feed=FEED, fetch_list=fetches, scope=scopes[0])
        parts = exe.run(compiled, feed=FEED, fetch_list=fetches, scope=scopes[1])
        np.testing.assert_allclose(parts[0].mean(), whole[0], rtol=1e-5)
        for part, value in zip(parts[1:], whole[1:], strict=True):
            np.testing.assert_allclose(part, np.concatenate([value] * 2), rtol=1e-5, atol=1e-6)
    with pytest.raises(ProgramError, match=r"of the whole batch needs parts of one size, got .*'x': \[2, 4\]"):
        exe.run(compiled, feed={"x": X[:3], "y": Y[:3]}, fetch_list=[loss], scope=scopes[1])


def test_share_vars_from_runs_in_the_others_scope(static_mode):
    loss, test = mlp(paddle.optimizer.SGD(0.05))
    scope = static.Scope()
    exe = started(scope)
    train = CompiledProgram(static_mode[0]).with_data_parallel(loss_name=loss.name)
    evaluate = CompiledProgram(test).with_data_parallel(share_vars_from=train)
    with pytest.raises(ProgramError, match="has not run yet"):
        exe.run(evaluate, feed=FEED, fetch_list=[loss], scope=scope)
    before = exe.run(train, feed=FEED, fetch_list=[loss], scope=scope)[0].mean()
    assert exe.run(evaluate, feed=FEED, fetch_list=[loss])[0].mean() < before
    other = CompiledProgram(test).with_data_parallel(share_vars_from=train, places=[static.CPUPlace()] * 4)
    with pytest.raises(ProgramError, match="runs on 2 devices, this one on 4"):
        exe.run(other, feed=FEED, fetch_list=[loss])
    with pytest.raises(ProgramError, match="has no with_data_parallel"):
        CompiledProgram(test).with_data_parallel(share_vars_from=CompiledProgram(test))
    with pytest.raises(TypeError, match="share_vars_from is a CompiledProgram, got Program"):
        CompiledProgram(test).with_data_parallel(share_vars_from=test)


def test_what_is_called_wrongly_is_refused(static_mode):
    main, startup = static_mode
    loss, test = mlp(paddle.optimizer.SGD(0.05))
    exe = started(static.global_scope())
    with pytest.raises(TypeError, match="takes a Program, got str"):
        CompiledProgram("main")
    with pytest.raises(ProgramError, match="give loss_name"):
        CompiledProgram(main).with_data_parallel()
    with pytest.raises(TypeError, match=r"give loss.name"):
        CompiledProgram(main).with_data_parallel(loss)
    with pytest.raises(ProgramError, match="no variable 'los'"):
        CompiledProgram(main).with_data_parallel("los")
    with pytest.raises(ProgramError, match="loss_name='x', but the Program has the gradient of"):
        CompiledProgram(main).with_data_parallel("x")
    with pytest.raises(TypeError, match="build_strategy is a BuildStrategy, got dict"):
        CompiledProgram(main, {})
    compiled = CompiledProgram(main).with_data_parallel(loss.name)
    with pytest.raises(ProgramError, match="was called before"):
        compiled.with_data_parallel(loss.name)
    with pytest.raises(ProgramError, match="'x' has 1 samples for 2 devices"):
        exe.run(compiled, feed={"x": X[:1], "y": Y[:1]}, fetch_list=[loss])
    with pytest.raises(ProgramError, match="'x' is a number"):
        exe.run(compiled, feed={"x": np.float32(1), "y": Y}, fetch_list=[loss])
    with pytest.raises(ProgramError, match=r"'x' has shape \[-1, 4\], got \[4, 3\]"):
        exe.run(compiled, feed={"x": X[:, :3], "y": Y}, fetch_list=[loss])
    with pytest.raises(ProgramError, match="startup Program"):
        exe.run(CompiledProgram(startup).with_data_parallel())
    with pytest.raises(ProgramError, match="without with_data_parallel runs where its Executor does"):
        CompiledProgram(test).devices()
    np.testing.assert_array_equal(
        exe.run(CompiledProgram(test), feed=FEED, fetch_list=[loss]), exe.run(test, feed=FEED, fetch_list=[loss])
    )
    loss + 1  # recorded
    with pytest.raises(ProgramError, match="changed after it was compiled"):
        exe.run(compiled, feed=FEED, fetch_list=[loss])


@pytest.mark.parametrize(
    ("places", "error", "match"),
    [
        ([], ConfigError, "give one place or more"),
        (["cpu:0", "cpu:0", "cpu:1"], ConfigError, "names a device twice"),
        (["cpu:0", "gpu:0"], ConfigError, "all of one platform"),
        (["cpu"] * 99, DeviceError, "set CPU_NUM=99"),
    ],
)
def test_places_that_cannot_be_had(static_mode, places, error, match):
    compiled = CompiledProgram(static_mode[0]).with_data_parallel(places=places)
    with pytest.raises(error, match=match):
        static.Executor().run(compiled)


def test_one_processor_unless_cpu_num_says_more(static_mode, monkeypatch):
    monkeypatch.delenv("CPU_NUM")
    assert len(CompiledProgram(static_mode[0]).with_data_parallel().devices()) == 1


def test_every_setting_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "compiled_programs.md").read_text()
    for name, field in (BUILD | EXECUTION).items():
        default = getattr(field.default, "name", repr(field.default))
        assert f"| `{name}` | `{default}` | {field.kind} | {field.note} |" in text


def test_strategies_refuse_what_they_cannot_honour():
    build, execution = BuildStrategy(), ExecutionStrategy()
    for strategy, fields in ((build, BUILD), (execution, EXECUTION)):
        for name, field in fields.items():
            assert getattr(strategy, name) == field.default
            assert field.note
    build.fuse_all_optimizer_ops = True
    build.reduce_strategy = BuildStrategy.ReduceStrategy.Reduce
    execution.num_threads = 4
    assert repr(execution) == "ExecutionStrategy(num_threads=4)"
    with pytest.raises(ConfigError, match="async_mode=True cannot be honoured: there is no parameter server"):
        build.async_mode = True
    with pytest.raises(ConfigError, match=r"no setting 'fuse_bn_act_op'; did you mean 'fuse_bn_act_ops'"):
        build.fuse_bn_act_op = True
    with pytest.raises(AttributeError, match="has no setting 'nothing'"):
        _ = build.nothing
    with pytest.raises(ConfigError, match="num_threads is like 0, got True"):
        execution.num_threads = True
    execution.num_iteration_per_run = 0
    with pytest.raises(ConfigError, match="num_iteration_per_run is at least 1"):
        CompiledProgram(static.Program()).with_data_parallel(exec_strategy=execution)
    CompiledProgram(static.Program(), build)
    with pytest.raises(ConfigError, match="was made with it already"):
        build.fuse_bn_act_ops = True


def test_several_iterations_a_run(static_mode):
    loss, _ = mlp(paddle.optimizer.SGD(0.05))
    one, many = static.Scope(), static.Scope()
    exe = started(one, many)
    execution = ExecutionStrategy()
    execution.num_iteration_per_run = 3
    main = static_mode[0]
    single = CompiledProgram(main).with_data_parallel(loss.name)
    triple = CompiledProgram(main).with_data_parallel(loss.name, exec_strategy=execution)
    for _ in range(3):
        want = exe.run(single, feed=FEED, fetch_list=[loss], scope=one)[0]
    np.testing.assert_array_equal(exe.run(triple, feed=FEED, fetch_list=[loss], scope=many)[0], want)
