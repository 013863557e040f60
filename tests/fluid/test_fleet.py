"""fleet of 1.7 for one worker, its roles, and generators of slot data."""

import sys

import numpy as np
import pytest

from polyreme import fluid as package
from polyreme.errors import ConfigError, DataError, NotReadyError
from polyreme.fluid.incubate import data_generator
from polyreme.fluid.incubate.fleet.base import role_maker
from polyreme.fluid.incubate.fleet.collective import Collective, DistributedStrategy, fleet

X = np.random.RandomState(0).randn(8, 3).astype("float32")


@pytest.fixture
def job():
    """A fleet that forgets its job after the test."""
    yield fleet
    fleet.reset()


def test_a_script_of_one_worker(script, job, tmp_path):
    fluid = script
    with pytest.raises(NotReadyError, match="minimize"):
        Collective().main_program  # noqa: B018
    job.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    x = fluid.data("x", [None, 3])
    hidden = fluid.layers.fc(x, 3, act="tanh")
    loss = fluid.layers.mean(fluid.layers.square(fluid.layers.fc(hidden, 1) - 1.0))
    strategy = DistributedStrategy()
    strategy.nccl_comm_num, strategy.forward_recompute, strategy.recompute_checkpoints = 2, True, [hidden.name]
    job.distributed_optimizer(fluid.optimizer.SGD(0.1), strategy).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(job.startup_program)
    losses = [exe.run(job.main_program, feed={"x": X}, fetch_list=[loss.name])[0] for _ in range(5)]
    assert losses[0].shape == (1,)
    assert losses[-1] < losses[0]
    job.save_persistables(exe, str(tmp_path))
    assert "fc_0.w_0" in {p.name for p in tmp_path.iterdir()}
    assert (job.worker_index(), job.worker_num(), job.is_first_worker(), job.is_server()) == (0, 1, True, False)
    assert job.split_files(["a", "b"]) == ["a", "b"]


def test_workers_have_parts_of_the_files_that_follow_each_other():
    parts = []
    for index in range(3):
        worker = Collective()
        worker._role_maker = role_maker.UserDefinedCollectiveRoleMaker(index, ["a:1", "b:1", "c:1"])
        assert worker._role_maker.get_trainer_endpoints() == ["a:1", "b:1", "c:1"]
        parts.append(worker.split_files(list("12345")))
    assert parts == [["1", "2"], ["3", "4"], ["5"]]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fleet.init(role_maker.UserDefinedRoleMaker(0, role_maker.Role.SERVER, 1, ["a:1"])), "no parameter"),
        (role_maker.MPISymetricRoleMaker, "no parameter servers"),
        (role_maker.GeneralRoleMaker, "no parameter servers"),
        (lambda: fleet.run_server(), "no parameter server"),
        (lambda: fleet.distributed_optimizer(None, amp()), "polyreme.static.amp.decorate"),
        (lambda: setattr(DistributedStrategy(), "fuse_everything", True), "no setting"),
    ],
)
def test_what_needs_servers_is_refused(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


def amp():
    strategy = DistributedStrategy()
    strategy.use_amp = True
    return strategy


def test_the_transpiler_leaves_one_trainer_as_it_is_and_says_what_others_use():
    config, program = package.DistributeTranspilerConfig(), package.Program()
    with pytest.raises(ConfigError, match="no parameter servers"):
        package.DistributeTranspiler(config).transpile(0, program)
    config.mode = "nccl2"
    transpiler = package.DistributeTranspiler(config)
    with pytest.raises(ConfigError, match="call transpile first"):
        transpiler.get_trainer_program()
    with pytest.raises(ConfigError, match=r"trainer 1 of 2; several processes train with polyreme\.distributed"):
        transpiler.transpile(1, program, trainers="a:1,b:1")
    transpiler.transpile(0, program, trainers="127.0.0.1:6170")
    assert transpiler.get_trainer_program() is program


class Squares(data_generator.MultiSlotDataGenerator):
    def generate_sample(self, line):
        def samples():
            yield [("x", [int(line), int(line) ** 2]), ("y", [0.5])]

        return samples


def test_generators_write_what_datasets_read(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", iter(["3\n", "4\n", "5\n"]))
    generator = Squares()
    generator.set_batch(2)
    generator.run_from_stdin()
    assert capsys.readouterr().out == "2 3 9 1 0.5\n2 4 16 1 0.5\n2 5 25 1 0.5\n"
    with pytest.raises(DataError, match="slot x has no values"):
        generator._gen_str([("x", [])])
