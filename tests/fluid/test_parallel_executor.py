"""ParallelExecutor: a Program's batch split over devices, by its 1.7 spelling."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import fluid, static
from polyreme.errors import ConfigError, DeviceError, ProgramError
from polyreme.fluid.compiler import BuildStrategy, CompiledProgram, ExecutionStrategy
from polyreme.fluid.executor import Executor
from polyreme.fluid.lod_tensor import create_lod_tensor
from polyreme.fluid.parallel_executor import ParallelExecutor
from tests.program.conftest import static_mode

__all__ = ["static_mode"]

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setenv("CPU_NUM", "2")


def test_it_trains_as_one_device_and_shares_its_values(static_mode):
    loss = (paddle.nn.Linear(4, 1)(static.data("x", [None, 4])) - 1).square().mean()
    test = static_mode[0].clone(for_test=True)
    paddle.optimizer.SGD(0.1).minimize(loss)
    one, two, exe = static.Scope(), static.Scope(), Executor()
    for scope in (one, two):
        paddle.seed(3)
        exe.run(static_mode[1], scope=scope)
    train = ParallelExecutor(False, loss.name, static_mode[0], scope=two)
    evaluate = ParallelExecutor(False, main_program=test, share_vars_from=train, build_strategy=BuildStrategy())
    assert train.device_count == 2
    for _ in range(5):
        (want,) = exe.run(static_mode[0], feed={"x": X}, fetch_list=[loss], scope=one)
        (values,) = train.run([loss.name], feed_dict={"x": X})
        # each step: float32 sums of 8 terms in another order
        np.testing.assert_allclose(values.mean(), want, rtol=5 * 8 * 2**-24)
    (values,) = evaluate.run([loss.name], feed=[{"x": X[:4]}, {"x": X[4:]}])
    (want,) = exe.run(test, feed={"x": X}, fetch_list=[loss], scope=one)
    np.testing.assert_allclose(values.mean(), want, rtol=6 * 8 * 2**-24)
    train.drop_local_exe_scopes()
    np.testing.assert_array_equal(train.run([loss.name], {"x": X}, return_numpy=False)[0].shape(), [2])


def test_sequences_come_back_whole(static_mode):
    x = static.data("x", [None, 2], lod_level=1)
    sequence = create_lod_tensor(np.arange(12, dtype="float32").reshape(6, 2), [[1, 2, 3]], "cpu")
    program = CompiledProgram(static_mode[0]).with_data_parallel()
    (found,) = Executor().run(program, feed={"x": sequence}, fetch_list=[x], return_numpy=False)
    assert found.lod() == sequence.lod()
    np.testing.assert_array_equal(found, sequence)
    with pytest.raises(ProgramError, match="have sequences, which ndarrays have not"):
        Executor().run(program, feed={"x": sequence}, fetch_list=[x])


def test_layers_that_need_the_longest_sequence_run_on_parts(static_mode):
    x = fluid.data("x", [None, 2], lod_level=1)
    out = fluid.layers.sequence_pad(x, fluid.layers.assign(np.zeros(1, "float32")))[0].sum(1)
    lengths, data = [1, 3, 2, 2], np.arange(16, dtype="float32").reshape(8, 2)
    program = CompiledProgram(static_mode[0]).with_data_parallel()
    whole = {"x": create_lod_tensor(data, [lengths], "cpu")}
    parts = [{"x": create_lod_tensor(d, [n], "cpu")} for d, n in ((data[:4], lengths[:2]), (data[4:], lengths[2:]))]
    want = [data[a:b].sum(0) for a, b in ((0, 1), (1, 4), (4, 6), (6, 8))]
    for feed in (whole, parts):
        np.testing.assert_array_equal(Executor().run(program, feed=feed, fetch_list=[out])[0], want)


def test_what_is_called_wrongly_is_refused(static_mode):
    loss = paddle.nn.Linear(4, 1)(static.data("x", [None, 4])).mean()
    paddle.optimizer.SGD(0.1).minimize(loss)
    with pytest.raises(ConfigError, match="num_trainers=2, trainer_id=0 cannot be honoured"):
        ParallelExecutor(False, loss.name, num_trainers=2)
    with pytest.raises(ProgramError, match="give loss_name"):
        ParallelExecutor(False, exec_strategy=ExecutionStrategy())
    with pytest.raises(TypeError, match="share_vars_from is a ParallelExecutor, got Program"):
        ParallelExecutor(False, loss.name, share_vars_from=static_mode[0])
    with pytest.raises(ConfigError, match="feed and feed_dict are one thing"):
        ParallelExecutor(False, loss.name).run([loss], feed={"x": X}, feed_dict={"x": X})
    with pytest.raises(DeviceError, match="no gpu is available"):
        ParallelExecutor(True, loss.name).run([loss], feed={"x": X})
