"""spawn, and the ranks of a job finding each other: who fails is named in time, and nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from polyreme import distributed as dist
from polyreme.distributed.job import roll_call
from polyreme.distributed.job.rendezvous import Address
from polyreme.distributed.spawning import spawn
from polyreme.errors import ConfigError, RankError

LIMIT = 15  # seconds in which every rank must have ended (FAULTS.md, case 34)


def write_settings(folder):
    names = (
        "PADDLE_TRAINER_ID",
        "PADDLE_TRAINERS_NUM",
        "PADDLE_LOCAL_RANK",
        "CPU_NUM",
        "COLOUR",
        "FLAGS_selected_gpus",
    )
    text = ",".join(os.environ[n] for n in names)
    Path(folder, os.environ["PADDLE_TRAINER_ID"]).write_text(text)


def fail_on(rank, folder, how):
    me = int(os.environ["PADDLE_TRAINER_ID"])
    Path(folder, f"pid{me}").write_text(str(os.getpid()))
    if how == "in a collective":
        dist.init_parallel_env()
        dist.barrier()
    if me == rank and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if me == rank:
        raise ValueError(f"rank {me} has had enough")
    if how == "in a collective":
        dist.barrier()
    time.sleep(120)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def pids(folder):
    return [int(f.read_text()) for f in Path(folder).glob("pid*") if f.read_text()]


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class TestSpawn:
    def test_each_rank_has_its_settings(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CPU_NUM", "2")
        before = dict(os.environ)
        # a copy of this process's environment leaves spawn what is its own
        env = {**os.environ, "COLOUR": "red"}
        context = spawn(write_settings, (str(tmp_path),), cpu_num=3, env=env, gpus="5,4")
        assert context.join()
        assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["0,2,0,3,red,5", "1,2,1,3,red,4"]
        assert dict(os.environ) == before

    @pytest.mark.slow_cases("killed")
    @pytest.mark.parametrize("how", ["killed", "in a collective"])
    def test_the_first_rank_to_fail_is_named_and_the_others_end(self, tmp_path, how):
        start = time.monotonic()
        says = "ended by signal 9 and said nothing" if how == "killed" else "(?s)failed first:.*rank 1 has had enough"
        with pytest.raises(RankError, match=f"rank 1 of 2 {says}" if how == "killed" else f"{says}"):
            spawn(fail_on, (1, str(tmp_path), how), nprocs=2, env={"PADDLE_LOG_DIR": tmp_path})
        # two interpreters start in the meantime
        assert time.monotonic() - start < LIMIT + 15
        assert len(pids(tmp_path)) == 2
        assert not any(alive(pid) for pid in pids(tmp_path))

    def test_a_join_with_a_timeout_says_when_it_is_over(self, tmp_path):
        context = spawn(fail_on, (9, str(tmp_path), "sleeps"), nprocs=1, join=False)
        assert context.join(0.1) is False
        context.end()
        assert not any(alive(p.pid) for p in context.processes)

    @pytest.mark.slow
    def test_children_end_with_a_parent_that_is_killed(self, tmp_path):
        code = f"import test_spawn; test_spawn.spawn(test_spawn.fail_on, (9, {str(tmp_path)!r}, 'sleeps'), nprocs=1)"
        # a __main__ that may be imported again: the children do
        script = tmp_path / "parent.py"
        script.write_text(f"if __name__ == '__main__':\n    {code}\n")
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": path}) as parent:
            deadline = time.monotonic() + 60
            while not pids(tmp_path) and parent.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            parent.kill()
        assert len(pids(tmp_path)) == 1
        deadline = time.monotonic() + 10
        while any(alive(p) for p in pids(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(alive(p) for p in pids(tmp_path))

    def test_refuses_what_it_cannot_do(self):
        for bad in (0, -2, 1.5, True):
            with pytest.raises(ConfigError, match=r"nprocs=.*: needs a number of processes, or -1"):
                spawn(write_settings, nprocs=bad)
        with pytest.raises(ConfigError, match="needs a function, got str"):
            spawn("train")
        with pytest.raises(ConfigError, match=r"cpu_nums=...\): no such option; did you mean 'cpu_num'"):
            spawn(write_settings, nprocs=1, cpu_nums=1)
        with pytest.raises(ConfigError, match="only 'spawn' works"):
            spawn(write_settings, nprocs=1, start_method="fork")
        with pytest.raises(ConfigError, match=r"'CPU_NUM': '5'}\): spawn sets it for each rank; give cpu_num="):
            spawn(write_settings, nprocs=1, env={"CPU_NUM": 5})
        with pytest.raises(
            ConfigError, match=r"'PADDLE_TRAINER_ID': '7'}\): spawn sets it for each rank; leave it out"
        ):
            spawn(write_settings, nprocs=1, env={"PADDLE_TRAINER_ID": 7})
        with pytest.raises(ConfigError, match=r"XLA_FLAGS.*give cpu_num="):
            spawn(write_settings, nprocs=1, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=5"})
        with pytest.raises(ConfigError, match="needs device indexes such as '0,1'"):
            spawn(write_settings, nprocs=1, gpus="all")
        with pytest.raises(ConfigError, match=r"2 processes, but gpus='0' names 1"):
            spawn(write_settings, nprocs=2, gpus="0")


class TestRollCall:
    def meet(self, *ranks, address, timeout=10.0):
        """What each (rank, size) meets with, by rank in the order given: None or its error."""
        errors = [None] * len(ranks)

        def one(i, rank, size):
            try:
                roll_call.meet(address, rank, size, timeout)
            except ConfigError as error:
                errors[i] = str(error)

        threads = [threading.Thread(target=one, args=(i, *rank)) for i, rank in enumerate(ranks)]
        for thread in reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def test_ranks_that_are_all_there_meet(self):
        assert self.meet((0, 3), (1, 3), (2, 3), address=free_address()) == [None] * 3

    def test_missing_ranks_are_named(self):
        address = free_address()
        first, second = self.meet((0, 4), (2, 4), address=address, timeout=0.5)
        assert f"ranks 1, 3 of 4 did not come to {address} within 0.5 s" in first
        assert "PADDLE_TRAINERS_NUM" in first
        assert "ranks 1, 3 of 4 did not come" in second

    def test_other_sizes_and_doubles_are_named(self):
        first, second = self.meet((0, 2), (1, 3), address=free_address())
        for error in (first, second):
            assert "rank 1 was told of 3 ranks, rank 0 of 2" in error
        errors = self.meet((0, 3), (1, 3), (1, 3), address=free_address())
        assert all("two processes are rank 1 of 3" in e for e in errors)

    def test_a_stray_connection_is_not_a_rank(self):
        address = free_address()
        host, port = Address.parse(address, "address")

        def stray():
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                try:
                    with socket.create_connection((host, port)) as link:
                        link.sendall(b"GET / HTTP/1.0\r\n\r\n\n")
                        return
                except OSError:
                    time.sleep(0.02)

        knocking = threading.Thread(target=stray)
        late = threading.Timer(0.5, lambda: self.meet((1, 2), address=address))
        knocking.start()
        late.start()
        assert self.meet((0, 2), address=address) == [None]
        knocking.join()
        late.join()

    def test_a_taken_port_and_an_absent_rank_0(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(
                ConfigError, match=rf"at {address}: port \d+ is taken by another program; set PADDLE_MASTER"
            ):
                roll_call.meet(address, 0, 2, 1.0)
        with pytest.raises(
            ConfigError, match=rf"rank 1 found no rank 0 at {address} within 0.3 s .*POLYREME_INIT_TIMEOUT"
        ):
            roll_call.meet(address, 1, 2, 0.3)
        with pytest.raises(ConfigError, match="PADDLE_MASTER 'here': needs host:port"):
            roll_call.meet("here", 1, 2, 0.3)

    def test_another_service_is_told_from_rank_0(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            answering = threading.Thread(target=lambda: other.accept()[0].close())
            answering.start()
            with pytest.raises(ConfigError, match="does not answer as rank 0 of a job"):
                roll_call.meet(f"127.0.0.1:{other.getsockname()[1]}", 1, 2, 1.0)
            answering.join()


class TestInitParallelEnv:
    @pytest.fixture(autouse=True)
    def _settings(self, monkeypatch):
        for name in ("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        if dist.is_initialized():  # by a test of another file, in this process
            dist.destroy_process_group()

    def test_settings_that_do_not_fit(self, monkeypatch):
        monkeypatch.setenv("PADDLE_TRAINERS_NUM", "0")
        with pytest.raises(ConfigError, match="PADDLE_TRAINERS_NUM='0' in the environment"):
            dist.init_parallel_env()
        monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
        monkeypatch.setenv("PADDLE_TRAINER_ID", "2")
        with pytest.raises(ConfigError, match=r"PADDLE_TRAINER_ID=2, but PADDLE_TRAINERS_NUM=2: ranks are 0..1"):
            dist.init_parallel_env()
        monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
        with pytest.raises(ConfigError, match="neither PADDLE_MASTER nor PADDLE_TRAINER_ENDPOINTS says where"):
            dist.init_parallel_env()

    def test_it_must_come_before_devices_are_used(self, monkeypatch):
        jax.devices()
        monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
        monkeypatch.setenv("PADDLE_MASTER", "127.0.0.1:9")
        with pytest.raises(ConfigError, match="a device is in use already"):
            dist.init_parallel_env()

    def test_a_script_that_finds_nobody_ends_with_code_2_in_time(self):
        address = free_address()
        settings = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "1", "PADDLE_MASTER": address}
        start = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-c", "import polyreme.distributed as dist; dist.init_parallel_env()"],
            env={**os.environ, **settings, "POLYREME_INIT_TIMEOUT": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ended.returncode, time.monotonic() - start < 30) == (2, True)
        assert f"rank 1 found no rank 0 at {address} within 1 s" in ended.stderr
