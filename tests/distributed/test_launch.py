"""The launcher: its flags, what workers are told, and FAULTS cases 32 to 37 and 39 with real processes on loopback."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyreme.cli.main import main as command_line
from polyreme.distributed.job.rendezvous import Address, free_port
from polyreme.distributed.job.verdict import Verdict
from polyreme.distributed.launch import devices, options, worker
from polyreme.distributed.launch.summary import Ending, decide, failure_text, stopped_code
from polyreme.errors import ConfigError
from tests.distributed.launch_scripts import ENVIRONMENT, JOINING, STEPS, TRAINING, write

# flags


@pytest.fixture
def script(tmp_path):
    return str(write(tmp_path, "print(1)"))


def test_flags_stand_before_the_script_and_its_own_after(script):
    words = ["--nnodes=2", "--master", "10.0.0.1:80", "--rank", "1", "--nproc-per-node", "2", "--log_overwrite"]
    found = options.parse([*words, "--gpus", "4,5", script, "--rank", "7", "--", "x"], {})
    assert found.arguments == ("--rank", "7", "--", "x")
    assert (found.node, found.min_nodes, found.max_nodes, found.num_processes) == (1, 2, 2, 2)
    assert (found.master, found.devices, found.log_overwrite) == (("10.0.0.1", 80), (4, 5), True)


def test_a_module_or_a_command_of_polyreme_stands_for_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parsed = options.parse(["--nproc_per_node", "2", "-m", "package.train", "-m", "x"], {})
    assert (parsed.script, parsed.arguments, parsed.is_module) == ("package.train", ("-m", "x"), True)
    assert worker.command(parsed.script, parsed.arguments, True)[-4:] == ["-m", "package.train", "-m", "x"]
    parsed = options.parse(["pretrain", "a.yaml", "train.steps=3"], {})
    assert (parsed.script, parsed.is_module) == ("polyreme.cli.main", True)
    assert parsed.arguments == ("pretrain", "a.yaml", "train.steps=3")
    (tmp_path / "pretrain").write_text("")
    assert not options.parse(["pretrain"], {}).is_module


def test_every_flag_has_a_variable_that_stands_for_it(script):
    variables = {
        "PADDLE_MASTER": "10.0.0.1:80",
        "PADDLE_RANK": "1",
        "PADDLE_NNODES": "2:3",
        "PADDLE_NPROC_PER_NODE": "4",
        "PADDLE_LOG_DIR": "logs",
        "PADDLE_LOG_LEVEL": "error",
        "PADDLE_LOG_OVERWRITE": "1",
        "PADDLE_JOB_ID": "j",
        "POD_IP": "10.0.0.2",
        "PADDLE_START_PORT": "7000",
        "PADDLE_MAX_RESTART": "0",
        "PADDLE_ELASTIC_TIMEOUT": "9",
    }
    found = options.parse([script], variables)
    assert found == options.Options(
        script,
        master=Address("10.0.0.1", 80),
        node=1,
        min_nodes=2,
        max_nodes=3,
        num_processes=4,
        log_dir=Path("logs"),
        log_level="ERROR",
        log_overwrite=True,
        job_id="j",
        host="10.0.0.2",
        start_port=7000,
        max_restart=0,
        elastic_timeout=9.0,
    )
    assert options.parse(["--rank", "0", script], variables).node == 0


def test_ips_give_nodes_rank_and_master(script):
    found = options.parse(["--ips", "10.0.0.1,10.0.0.2", "--host", "10.0.0.2", script], {})
    assert (found.max_nodes, found.node, found.master) == (2, 1, ("10.0.0.1", 6070))


def test_elastic_level_0_restarts_nothing(script):
    assert options.parse(["--elastic_level", "0", script], {}).max_restart == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--nproc_per_nod", "2", "S"], "unknown flag --nproc_per_nod; did you mean 'nproc_per_node'"),
        (["-n", "2", "S"], "unknown flag -n"),
        (["--nproc_per_node"], "--nproc_per_node needs a value"),
        (["--nproc_per_node", "0", "S"], "--nproc_per_node '0': needs a whole number of at least 1"),
        (["--nproc_per_node", "two", "S"], "needs a whole number"),
        ([], "no script given"),
        (["-m"], "-m needs the name of a module"),
        (["pretrian"], "pretrian: no such file; .* or pretrain"),
        (["nowhere.py"], r"nowhere\.py: no such file"),
        (["--servers", "a", "S"], "--servers is of parameter-server mode"),
        (["--server_num=2", "S"], "--server_num is of parameter-server mode"),
        (["--run_mode", "ps", "S"], "--run_mode 'ps': needs 'collective'"),
        (["--legacy", "1", "S"], "--legacy chooses an old launcher"),
        (["--nnodes", "2", "S"], "2 nodes, but no --master"),
        (["--nnodes", "3:2", "S"], "--nnodes '3:2': needs a number of nodes"),
        (["--nnodes", "2", "--rank", "2", "--master", "h:1", "S"], "this job has 2 nodes, so ranks are 0 to 1"),
        (["--master", "h", "S"], "--master 'h': needs host:port"),
        (["--devices", "0,0", "S"], "--devices '0,0': needs indexes"),
        (["--log_level", "LOUD", "S"], "--log_level 'LOUD': needs 'DEBUG'"),
        (["--elastic_level", "2", "S"], "--elastic_level '2'"),
        (["--ips", "10.0.0.1,10.0.0.2", "S"], "none of them is this node's --host"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_flags_that_cannot_be_honoured_are_refused(words, match, script):
    with pytest.raises(ConfigError, match=match):
        options.parse([script if word == "S" else word for word in words], {})


# devices


@pytest.mark.parametrize(
    ("name", "chosen", "count", "visible", "expected"),
    [
        ("cpu", (), 2, None, [{}, {}]),
        ("cuda", (), 0, "0,1", [{}]),
        ("cuda", (1, 0), 0, "5,6", [("6", "0"), ("5", "0")]),
        ("cuda", (), 2, "0,1,2,3", [("0,1", "0,1"), ("2,3", "0,1")]),
        ("cuda", (2,), 1, "0,1,2,3", [("2", "0")]),
    ],
)
def test_devices_are_shared_out(name, chosen, count, visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    named = [
        dict(zip(("CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus"), one, strict=True)) if isinstance(one, tuple) else one
        for one in expected
    ]
    assert devices.share_out(name, chosen, count, environment) == named


@pytest.mark.parametrize(
    ("name", "chosen", "count", "match"),
    [
        ("cpu", (0,), 0, "no accelerators; start processes with --nproc_per_node"),
        ("tpu", (), 4, "one process drives all devices of a node"),
        ("cuda", (0, 1), 3, "2 devices do not divide evenly over --nproc_per_node 3"),
        ("cuda", (7,), 0, "--devices 7: CUDA_VISIBLE_DEVICES=0,1 shows 2 devices"),
    ],
)
def test_devices_that_are_not_there_are_refused(name, chosen, count, match):
    with pytest.raises(ConfigError, match=match):
        devices.share_out(name, chosen, count, {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_the_platform_is_known_without_jax(tmp_path):
    assert devices.platform({"JAX_PLATFORMS": "cpu,cuda"}) == "cpu"
    assert devices.platform({}, tmp_path) == "cpu"
    (tmp_path / "nvidiactl").touch()
    assert devices.platform({}, tmp_path) == "cuda"
    assert [devices.backend(name) for name in ("cpu", "cuda", "tpu")] == ["gloo", "nccl", "xla"]


# what comes after a failure


def failure(step: int | None, code: int = 70) -> Verdict:
    return Verdict("raised", 1, code=code, statuses={1: {"step": step, "batch": "[14, 15]"}})


@pytest.mark.parametrize(
    ("failures", "wait", "text"),
    [
        ([failure(7)], 1.0, "restart 1 of 3 in 1 s"),
        ([failure(7), failure(9)], 2.0, "restart 2 of 3 in 2 s"),
        ([failure(7)] * 3, None, r"crash loop: 3 failures in a row at step 7 \(batch \[14, 15\]\)"),
        ([failure(None)] * 3, None, "3 failures in a row before its first step"),
        ([failure(5), failure(6), failure(7), failure(8)], None, "all 3 restarts"),
        ([failure(7, code=2)], None, "a setting does not mend itself"),
        ([failure(7, code=5)], None, "the same numbers would come again"),
    ],
)
def test_restarts_are_decided_by_what_failed_before(failures, wait, text):
    decision = decide(failures, max_restart=3, backoff=1.0)
    assert decision.wait == wait
    assert re.search(text, decision.text)


def test_the_summary_shows_a_traceback_that_is_not_on_the_console_yet():
    verdict = Verdict("died", 1, "h", code=1)
    hidden = failure_text(verdict, Ending(1, "log/workerlog.1", "Traceback\n boom"), "n", "r")
    assert "    Traceback\n     boom" in hidden
    assert "exit code 1 (Python's code for an uncaught exception)" in hidden
    assert "boom" not in failure_text(verdict, Ending(1, "l", "Traceback\n boom", shown=True), "n", "r")


def test_codes_of_a_job_that_was_asked_to_stop():
    assert stopped_code(15, [75, 75]) == 75
    assert stopped_code(15, [0, 0]) == 0
    assert stopped_code(15, [-15, -15]) == 143
    assert stopped_code(2, [-9, 75]) == 130
    assert stopped_code(15, [4, 75]) == 4


# real processes


class Job:
    """A launcher in a folder of its own, and how it ended."""

    def __init__(self, folder: Path, source: str, *words: str, flags=(), **variables: str) -> None:
        self.folder = folder
        cleaned = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "POLYREME_", "FAULTS"))}
        # programs go where those of this run go, not to the folder of whoever runs the tests
        cleaned |= {k: v for k, v in os.environ.items() if k.startswith("POLYREME_COMPILE_CACHE")}
        quick = {"CPU_NUM": "1", "POLYREME_HEARTBEAT": "0.2", "POLYREME_RESTART_BACKOFF": "0.1"}
        quick["POLYREME_INIT_TIMEOUT"] = "60"
        number = len(list(folder.glob("out.*")))
        self._files = [folder / f"out.{number}", folder / f"err.{number}"]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "polyreme.distributed.launch", *flags, str(write(folder, source)), *words],
                cwd=folder,
                env={**cleaned, **quick, **variables},
                stdout=out,
                stderr=err,
            )

    def finish(self, seconds: float = 90) -> int:
        """Exit code."""
        return self.process.wait(seconds)

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    def log(self, rank: int, name: str = "workerlog") -> str:
        return (self.folder / "log" / f"{name}.{rank}").read_text()

    def report(self, attempt: int = 0) -> dict:
        return json.loads((self.folder / f"log/watchdog.attempt{attempt}.json").read_text())

    def pids(self, seconds: float = 60) -> list[int]:
        """Of both ranks, once they have taken a step."""
        until(lambda: all((self.folder / f"met.2.{rank}.0").exists() for rank in range(2)), seconds)
        return [int((self.folder / f"pid.{rank}").read_text()) for rank in range(2)]

    def seconds_from_fault(self) -> float:
        """From the fault until every rank had ended and the launcher wrote its report."""
        start = (self.folder / "fault").stat().st_mtime
        return (self.folder / "log/watchdog.attempt0.json").stat().st_mtime - start


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come so far"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def jobs_in(base: Path):
    """start(source, *words, flags=..., VARIABLE=...) gives a Job; what is left of it is killed at the end."""
    jobs = []

    def start(source, *words, folder="", **options):
        (base / folder).mkdir(exist_ok=True)
        jobs.append(Job(base / folder, source, *words, **options))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.process.kill()  # and its workers with it
            job.process.wait()


@pytest.fixture
def start(tmp_path):
    with jobs_in(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def cannot_meet(tmp_path_factory):
    """Jobs that wait 6 s for somebody, by what is wrong, and the ports they look at; others may go on meanwhile."""
    nobody, port = free_port("127.0.0.1", 20000), free_port("127.0.0.1")
    second = ["--rank", "1", "--log_dir", "log", "--nnodes", "2", "--master"]
    flags = {
        "absent": [*second, f"127.0.0.1:{nobody}"],
        "wrong": [*second, f"127.0.0.1:{port}"],
        "alone": ["--nnodes", "3", "--rank", "0", "--master", f"127.0.0.1:{port}"],
    }
    with jobs_in(tmp_path_factory.mktemp("cannot_meet")) as start:
        jobs = {
            name: start(ENVIRONMENT, folder=name, flags=words, POLYREME_INIT_TIMEOUT="6")
            for name, words in flags.items()
        }
        yield jobs, nobody, port


TWO = ("--nproc_per_node", "2", "--log_dir", "log")


def test_workers_are_told_their_place_and_have_logs_of_their_own(start, tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log/workerlog.0").write_text("earlier\n")
    port = free_port("127.0.0.1")
    job = start(ENVIRONMENT, "--lr", "1e-4", flags=[*TWO, "--master", f"127.0.0.1:{port}"])
    assert job.finish() == 0, job.err
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2)]
    for rank, variables in enumerate(told):
        ranks = ("PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK", "PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE")
        assert [variables[name] for name in ranks] == [str(rank)] * 4
        assert [variables[name] for name in ("PADDLE_TRAINERS_NUM", "PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_SIZE")] == [
            "2"
        ] * 3
        assert (variables["PADDLE_NNODES"], variables["PADDLE_DISTRI_BACKEND"]) == ("1", "gloo")
        assert variables["PADDLE_TRAINER_ENDPOINTS"].split(",")[rank] == variables["PADDLE_CURRENT_ENDPOINT"]
        assert variables["POLYREME_STORE"] == f"127.0.0.1:{port}"
        assert variables["PADDLE_MASTER"] not in [
            variables["POLYREME_STORE"],
            *variables["PADDLE_TRAINER_ENDPOINTS"].split(","),
        ]
        assert variables["arguments"] == ["--lr", "1e-4"]
    assert told[0]["PADDLE_MASTER"] == told[1]["PADDLE_MASTER"]
    assert job.log(0) == "earlier\nout of rank 0\n"
    assert job.log(1) == "out of rank 1\n"
    assert job.out == "out of rank 0\n"


def test_a_script_without_a_watchdog_is_ended_too(start):
    source = "import os, time\nif os.environ['PADDLE_TRAINER_ID'] == '1': raise KeyError('boom')\ntime.sleep(600)"
    job = start(source, flags=[*TWO, "--max_restart", "0", "--log_overwrite"])
    assert job.finish(30) == 1
    assert "rank 1 failed first" in job.err
    assert job.err.count("KeyError: 'boom'") == 1


def test_case_33_a_killed_rank_ends_the_others_and_a_restart_goes_on_to_the_same_result(start):
    job = start(TRAINING, "6", flags=TWO, FAULTS="rank1:train.step:kill@4")
    assert job.finish() == 0, job.err
    assert job.seconds_from_fault() < 6
    assert re.search(r"rank 1 on \S+ died.* at step 4\. Rank 0 was at step \d, in \w+ #\d+ of group world", job.log(0))
    assert "rank 1 failed first" in job.err
    assert "SIGKILL" in job.err
    assert "restart 1 of 3" in job.err
    assert job.report()["rank"] == 1
    weight = sum(0.1 * 3 / step for step in range(1, 7))
    found = json.loads(re.search(r"weight (\[.*\])", job.out)[1])
    # 6 sums of terms below 0.3, each rounded to float32
    assert found == pytest.approx([-weight] * 4, abs=6 * 0.6 * 2**-23)


@pytest.mark.slow
def test_case_33_the_rank_that_holds_jax_s_coordinator(start):
    job = start(TRAINING, "6", flags=[*TWO, "--max_restart", "0"], FAULTS="rank0:train.step:kill@4")
    assert job.finish() == 137
    assert job.seconds_from_fault() < 6
    assert re.search(r"rank 0 on \S+ died.* at step 4\. Rank 1 was at step \d.*exit code 86", job.log(1))
    assert "Check failure stack trace" not in job.log(1)


def test_case_34_an_exception_ends_all_ranks_and_is_shown_once(start):
    job = start(TRAINING, "6", flags=[*TWO, "--max_restart", "0"], FAULTS="rank1:train.step:raise@4")
    assert job.finish() == 70
    assert job.seconds_from_fault() < 15
    assert "rank 1 failed first" in job.err
    assert (job.err + job.out).count("Traceback (most recent call last)") == 1
    assert "Traceback" not in job.log(0)
    assert re.search(r"rank 1 on \S+ raised FaultInjected: .* Rank 0 was at step \d, in all_reduce #\d+", job.log(0))


# case 36 waits for as long as this one
@pytest.mark.usefixtures("cannot_meet")
def test_case_35_a_hung_rank_is_named_with_the_stacks_of_all(start, tmp_path):
    job = start(
        TRAINING,
        "6",
        flags=[*TWO, "--max_restart", "0"],
        FAULTS="rank1:train.step:hang@4",
        POLYREME_WATCHDOG_TIMEOUT="5",
    )
    assert job.finish() == 86
    assert job.seconds_from_fault() < 5 + 5
    named = r"rank 1 failed first.*\n  what:  hangs: it never reached all_reduce #\d+ of group world, where rank 0"
    assert re.search(named, job.err)
    assert "faults.py" in (tmp_path / "log/stacks.rank1.txt").read_text()
    assert "all_reduce" in (tmp_path / "log/stacks.rank0.txt").read_text()
    found = job.report()["statuses"]
    assert (found["0"]["step"], found["0"]["phase"], found["1"]["step"]) == (4, "all_reduce", 4)


@pytest.mark.slow
def test_a_rank_whose_native_code_keeps_python_s_lock(start, tmp_path):
    job = start(STEPS, "9", "rank1:lock@3", flags=[*TWO, "--max_restart", "0"], POLYREME_WATCHDOG_TIMEOUT="2")
    assert job.finish() == 86
    assert "rank 1" in job.report()["headline"]
    assert "never reached all_reduce #3" in job.err
    assert "script.py" in (tmp_path / "log/stacks.rank1.txt").read_text()


def test_ranks_join_by_themselves_and_gather_what_lies_in_pieces(start):
    job = start(JOINING, flags=[*TWO, "--max_restart", "0"])
    assert job.finish() == 86, job.err
    for rank in range(2):
        said = job.log(rank)
        assert "rank 0 calls Tensor.numpy of float64[2, 3]; rank 1 calls all_reduce of int32[]" in said, said
        assert "so far" in said
    assert "never reached Tensor.numpy" in job.err
    assert "has left" in job.err


def test_sys_exit_with_an_error_and_a_rank_that_leaves_early(start):
    words = [[*TWO, "--max_restart", "0"], {"POLYREME_WATCHDOG_TIMEOUT": "60"}]
    failing = start(STEPS, "9", "rank1:exit@3", folder="a", flags=words[0], **words[1])
    leaving = start(STEPS, "9", "rank1:leave@3", folder="b", flags=words[0], **words[1])
    assert failing.finish(40) == 3
    assert "rank 1 on" in failing.log(0)
    assert "left with exit code 3 (bad or missing data)" in failing.log(0)
    assert leaving.finish(40) == 86
    assert "never reached all_reduce #3 of group world and has left" in leaving.err


def test_case_37_a_crash_loop_stops_and_names_the_step_and_its_batch(start, tmp_path):
    job = start(STEPS, "9", flags=[*TWO, "--max_restart", "9"], FAULTS="rank1:data:raise@7")
    assert job.finish() == 70
    assert "crash loop: 3 failures in a row at step 7 (batch [14, 15])" in job.err
    assert len(list((tmp_path / "log").glob("watchdog.attempt*.json"))) == 3


def test_case_32_sigterm_to_one_rank_stops_all_after_the_same_step(start):
    job = start(STEPS, "100000", flags=TWO)
    os.kill(job.pids()[1], signal.SIGTERM)
    assert job.finish(30) == 75
    steps = [re.search(r"stopped after step (\d+)", job.log(rank))[1] for rank in range(2)]
    assert steps[0] == steps[1]


def test_signals_to_the_launcher_are_passed_on_and_a_second_one_kills(start, tmp_path):
    polite = start(STEPS, "100000", folder="a", flags=TWO)
    source = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('deaf', 'w')\ntime.sleep(600)"
    deaf = start(source, folder="b")
    polite.pids()
    polite.process.send_signal(signal.SIGINT)
    assert polite.finish(30) == 75
    assert "SIGINT: stopping after a step that all ranks agree on" in polite.log(1)
    assert "stopped on request, state saved" in polite.err
    until(lambda: (tmp_path / "b/deaf").exists(), 30)
    deaf.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert deaf.process.poll() is None
    deaf.process.send_signal(signal.SIGTERM)
    assert deaf.finish(10) == 143


def test_case_39_workers_die_with_a_launcher_that_is_killed(start):
    job = start(STEPS, "100000", flags=TWO)
    pids = job.pids()
    job.process.kill()
    until(lambda: not any(is_running(pid) for pid in pids), 10)
    job.finish(10)


# several nodes, as several launchers on this machine


def test_a_rank_that_fails_on_one_node_ends_the_other_node(start):
    master = f"127.0.0.1:{free_port('127.0.0.1')}"
    flags = ["--nnodes", "2", "--master", master, "--log_dir", "log", "--max_restart", "0"]
    fault = "rank1:data:raise@3"
    nodes = [start(STEPS, "9", flags=[*flags, "--rank", str(node)], FAULTS=fault) for node in range(2)]
    assert [node.finish() for node in nodes] == [70, 70]
    for node in nodes:
        assert "rank 1 failed first" in node.err
    assert "rank 1 on" in nodes[0].log(0)


@pytest.mark.slow
def test_nodes_meet_and_share_the_ranks_out(start, tmp_path):
    master = f"127.0.0.1:{free_port('127.0.0.1')}"
    flags = ["--nnodes", "1:3", "--master", master, "--log_dir", "log", "--elastic_timeout", "5"]
    nodes = [start(ENVIRONMENT, flags=[*flags, "--nproc_per_node", str(count)]) for count in (1, 2)]
    assert [node.finish() for node in nodes] == [0, 0]
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(3)]
    assert {one["PADDLE_TRAINERS_NUM"] for one in told} == {"3"}
    assert {one["PADDLE_NNODES"] for one in told} == {"2"}


def test_case_36_what_cannot_meet_ends_with_code_2_and_a_hint(cannot_meet):
    jobs, nobody, port = cannot_meet
    assert {name: job.finish(30) for name, job in jobs.items()} == {"absent": 2, "wrong": 2, "alone": 2}
    absent = jobs["absent"].err
    assert re.search(rf"nobody answers at 127.0.0.1:{nobody} within 6 s .*POLYREME_INIT_TIMEOUT", absent)
    assert "it was told --nnodes 2:2, node 0 3:3" in jobs["wrong"].err
    assert f"1 of 3 nodes came to 127.0.0.1:{port} within 6 s; missing: 1, 2" in jobs["alone"].err


def test_a_port_that_is_taken_is_named(start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = start(ENVIRONMENT, flags=["--master", f"127.0.0.1:{port}"])
        assert job.finish(20) == 2
    assert f"127.0.0.1:{port} is taken by another program" in job.err


# the command line


def test_the_command_hands_its_words_to_the_launcher(capsys, script):
    assert command_line(["launch", "--help"]) == 0
    assert "--nproc_per_node" in capsys.readouterr().out
    assert command_line(["launch", "--servers", "a", script, "--debug"]) == 2
    assert "parameter-server mode" in capsys.readouterr().err


def test_a_folder_for_logs_that_cannot_be_written(start, tmp_path):
    (tmp_path / "file").touch()
    job = start(ENVIRONMENT, flags=["--log_dir", "file/log"])
    assert job.finish(30) == 2
    assert "--log_dir file/log: Not a directory" in job.err
