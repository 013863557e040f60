"""The watchdog's parts by themselves, and ranks that watch each other without a launcher."""

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from polyreme.distributed.job import last_words, monitor, progress, rendezvous, verdict, watchdog
from polyreme.distributed.job.monitor import Monitor
from polyreme.distributed.job.progress import Phase, Progress
from polyreme.distributed.job.rendezvous import Address, Client
from polyreme.distributed.job.verdict import Verdict, blame, ending_code, meaning, place, process_code
from polyreme.errors import ConfigError, DataError

# ranks not watched


def test_costs_nothing_where_nothing_is_watched():
    assert not watchdog.is_started()
    assert watchdog.phase("all_reduce", group="world") is watchdog.phase("data")
    watchdog.step(1)
    watchdog.idle()
    watchdog.at(step=1, phase="x")
    watchdog.request_stop()
    assert watchdog.stop_requested_anywhere(3, here=True)
    assert not watchdog.stop_requested_anywhere(3)


def test_start_needs_a_store_or_a_way_to_share_one(monkeypatch):
    monkeypatch.delenv("POLYREME_STORE", raising=False)
    with pytest.raises(ConfigError, match="no store for the watchdog: start the job with polyreme launch"):
        watchdog.start(0, 2)


# progress


def phase_of(here: Progress, name: str, **options) -> Phase:
    given = {"group": None, "ranks": None, "detail": None, "timeout": None, **options}
    return Phase(here, name, given["group"], given["ranks"], given["detail"], given["timeout"])


def test_status_tells_the_innermost_phase_and_counts_collectives_by_group():
    here = Progress(timeout=60)
    here.begin_step(7, batch=[3, 4])
    for _ in range(2):
        with phase_of(here, "all_reduce", group="world"):
            pass
    with phase_of(here, "stage 1", detail="F 3"), phase_of(here, "all_gather", group="mp", ranks=(0, 2)):
        status = here.status()
    assert {k: status[k] for k in ("step", "batch", "phase", "group", "number", "ranks")} == {
        "step": 7,
        "batch": "[3, 4]",
        "phase": "all_gather",
        "group": "mp",
        "number": 1,
        "ranks": [0, 2],
    }
    assert status["counts"] == {"world": 2, "mp": 1}
    assert "phase" not in here.status()


def test_overdue_is_a_thread_that_stands_still_in_a_phase_or_a_step():
    here = Progress(timeout=0.05)
    time.sleep(0.1)
    assert not here.overdue()  # nothing was begun
    here.begin_step(1, None)
    time.sleep(0.1)
    assert here.overdue()
    here.end_steps()
    assert not here.overdue()
    with phase_of(here, "save", timeout=math.inf):
        time.sleep(0.1)
        assert not here.overdue()
    with phase_of(here, "outer"):
        time.sleep(0.1)
        with phase_of(here, "inner"):
            assert not here.overdue()  # an end or a beginning is progress
        time.sleep(0.1)
        assert here.overdue()


def test_a_thread_that_moves_hides_no_thread_that_hangs():
    here = Progress(timeout=0.1)
    done = threading.Event()

    def hang():
        with phase_of(here, "data"):
            done.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        here.begin_step(1, None)
        time.sleep(0.01)
    assert here.overdue()
    assert here.status()["phase"] == "data"
    done.set()
    thread.join()


def test_an_exception_is_placed_in_the_phase_that_it_came_out_of():
    here = Progress(timeout=60)

    def fail():
        try:
            with phase_of(here, "step"), phase_of(here, "all_reduce", group="world"):
                raise KeyError("x")
        except KeyError as error:
            raise RuntimeError("wrapped") from error

    with pytest.raises(RuntimeError):
        fail()
    assert here.status()["phase"] == "all_reduce"
    assert not here.overdue()
    here.begin_step(2, None)
    assert "phase" not in here.status()


# verdicts


def waiting(number: int, group: str = "world", step: int = 7, **more) -> dict:
    return {"step": step, "phase": "all_reduce", "group": group, "number": number, "counts": {group: number}, **more}


def busy(counts: dict, phase: str = "data", step: int = 7, **more) -> dict:
    return {"step": step, "phase": phase, "counts": counts, "age": 5.0, **more}


@pytest.mark.parametrize(
    ("statuses", "overdue", "culprit", "how"),
    [
        ({0: waiting(42), 1: busy({"world": 41})}, 0, 1, "never reached all_reduce #42 of group world, where rank 0"),
        ({0: waiting(3), 1: busy({"world": 2}), 2: busy({"world": 1})}, 0, 2, r"\(nor did ranks 1\)"),
        ({0: waiting(3), 1: waiting(3)}, 0, 0, "though every rank reached that collective"),
        ({0: waiting(3), 1: busy({"world": 2})}, 1, 1, "never reached all_reduce #3 of group world, where rank 0"),
        ({0: busy({"world": 2}), 1: busy({"world": 2})}, 1, 1, "made no progress for 5 s"),
        ({0: {"step": 8, "counts": {}}, 1: {"step": 7, "counts": {}}}, 0, 1, "never reached step 8"),
        ({0: waiting(3), 1: busy({"world": 2}, leaving=True)}, 0, 1, "and has left"),
        (
            {
                0: waiting(5, ranks=[0, 1]),
                1: {**waiting(9, "mp", ranks=[1, 2]), "counts": {"world": 4, "mp": 9}},
                2: busy({"mp": 8}),
            },
            0,
            2,
            "never reached all_reduce #9 of group mp, where rank 1 waits",
        ),
        ({0: waiting(5, ranks=[0, 1]), 1: waiting(5), 2: busy({})}, 0, 0, "every rank reached"),
    ],
    ids=[
        "behind",
        "furthest behind",
        "all there",
        "noticed by itself",
        "own work",
        "steps",
        "left",
        "chain",
        "other group's rank",
    ],
)
def test_blame_falls_on_the_rank_that_did_not_come(statuses, overdue, culprit, how):
    found, why = blame(statuses, overdue)
    assert found == culprit
    assert re.search(how, why)


def test_verdict_in_words_and_as_json():
    death = Verdict("died", 1, "node-a", code=-9, statuses={1: waiting(42), 0: busy({})})
    assert death.headline() == (
        "rank 1 on node-a died of SIGKILL (from outside; often the kernel, out of memory: see dmesg); it was at step "
        "7, in all_reduce #42 of group world"
    )
    assert Verdict.from_json(death.to_json()) == death
    assert place({"step": None}) == "before its first step"
    assert meaning(-64).startswith(("SIGRTMAX", "signal 64"))
    assert [ending_code(Verdict(kind, 0, code=3)) for kind in ("raised", "exited", "died", "hung", "lost")] == [
        3,
        3,
        3,
        86,
        86,
    ]
    assert (process_code(-15), process_code(None)) == (143, 70)


def test_exit_codes_of_exceptions():
    assert last_words.exit_code(DataError("x")) == 3
    assert last_words.exit_code(KeyboardInterrupt()) == 130
    assert last_words.exit_code(KeyError("x")) == 70
    assert last_words.one_line(ValueError("a\n  b")) == "ValueError: a b"


# the monitor


class FakeConnection:
    """What the monitor sends to a rank."""

    def __init__(self, rank: int, world: int = 2) -> None:
        self.who = {"kind": "rank", "rank": rank, "world": world, "host": "h", "attempt": 0}
        self.sent: list[dict] = []

    def send(self, message):
        self.sent.append(message)

    def kinds(self):
        return [message["t"] for message in self.sent]


def run_monitor(scenario, heartbeat_timeout: float = 60.0):
    """Two ranks check in; scenario(monitor, connections) goes on; returns verdicts and connections."""

    async def main():
        verdicts = []
        watching = Monitor(2, 0, heartbeat_timeout, verdicts.append)
        connections = [FakeConnection(0), FakeConnection(1)]
        for connection in connections:
            assert watching.refusal(connection.who) is None
            watching.opened(connection)
        await scenario(watching, connections)
        watching.close()
        return verdicts, connections

    return asyncio.run(main())


def test_a_lost_connection_is_a_death_and_everyone_is_told_once():
    async def scenario(watching, connections):
        watching.received(connections[1], {"t": "beat", "status": waiting(4)})
        watching.closed(connections[1])
        watching.closed(connections[0])

    verdicts, connections = run_monitor(scenario)
    assert [(v.kind, v.rank, v.step) for v in verdicts] == [("died", 1, 7)]
    assert connections[0].kinds() == ["end"]


def test_a_death_comes_before_the_exception_that_it_causes():
    async def scenario(watching, connections):
        error = {"t": "error", "kind": "raised", "error": "ValueError: connection closed", "code": 70}
        watching.received(connections[0], error)
        watching.closed(connections[1])
        await asyncio.sleep(monitor.ERROR_GRACE + 0.1)

    verdicts, _ = run_monitor(scenario)
    assert [(v.kind, v.rank) for v in verdicts] == [("died", 1)]


def test_an_exception_ends_the_job_soon():
    async def scenario(watching, connections):
        watching.received(connections[0], {"t": "error", "kind": "raised", "error": "KeyError: 1", "code": 70})
        assert watching.verdict is None
        await asyncio.sleep(monitor.ERROR_GRACE + 0.1)

    verdicts, connections = run_monitor(scenario)
    assert [(v.kind, v.rank, v.code, v.error) for v in verdicts] == [("raised", 0, 70, "KeyError: 1")]
    assert connections[1].kinds() == ["end"]


def test_silence_is_noticed():
    async def scenario(watching, connections):
        for _ in range(8):
            watching.received(connections[0], {"t": "beat", "status": {}})
            await asyncio.sleep(0.1)

    verdicts, _ = run_monitor(scenario, heartbeat_timeout=0.4)
    assert [(v.kind, v.rank) for v in verdicts] == [("silent", 1)]
    assert "has sent no heartbeat for 0.4 s" in verdicts[0].headline()


def test_a_pause_of_the_monitor_itself_blames_nobody():
    async def scenario(watching, connections):
        await asyncio.sleep(0.05)
        time.sleep(1.0)  # as a suspended machine would
        await asyncio.sleep(0.05)

    verdicts, _ = run_monitor(scenario, heartbeat_timeout=0.4)
    assert verdicts == []


def test_leaving_ends_no_job_but_who_waits_for_a_leaver_is_told():
    async def scenario(watching, connections):
        watching.received(connections[1], {"t": "leave", "status": busy({"world": 2}, leaving=True)})
        watching.closed(connections[1])
        assert watching.verdict is None
        watching.received(connections[0], {"t": "beat", "status": waiting(3)})
        watching.received(connections[0], {"t": "dumped", "status": waiting(3)})
        await asyncio.sleep(0.1)

    verdicts, connections = run_monitor(scenario)
    assert [(v.kind, v.rank) for v in verdicts] == [("hung", 1)]
    assert "never reached all_reduce #3 of group world and has left" in verdicts[0].error
    assert connections[0].kinds() == ["dump", "end"]


def test_all_ranks_agree_on_the_step_after_the_last_that_any_began():
    async def scenario(watching, connections):
        watching.received(connections[0], {"t": "stop"})
        watching.received(connections[0], {"t": "counter", "step": 11})
        assert "stop_at" not in connections[0].kinds()
        watching.received(connections[1], {"t": "counter", "step": 12})

    _, connections = run_monitor(scenario)
    assert [c.sent[-1] for c in connections] == [{"t": "stop_at", "step": 13}] * 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"world": 3}, "rank 1 of 3 does not fit this job of 2 ranks"),
        ({"rank": 2}, "rank 2 of 2 does not fit"),
        ({"attempt": 1}, "left over from attempt 1"),
        ({}, "rank 1 is there already, on h"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(change, match):
    async def scenario(watching, connections):
        assert re.search(match, watching.refusal({**connections[1].who, **change}))

    run_monitor(scenario)


# the store


def test_addresses_are_parsed():
    assert Address.parse("[::1]:80", "--master") == ("::1", 80)
    assert str(Address("::1", 80)) == "[::1]:80"
    for text in ("host", "host:", "host:0", "host:70000", ":80"):
        with pytest.raises(ConfigError, match=r"--master .*needs host:port"):
            Address.parse(text, "--master")


def test_nobody_at_an_address_is_an_error_with_a_hint():
    address = Address("127.0.0.1", rendezvous.free_port("127.0.0.1"))
    with pytest.raises(ConfigError, match=rf"nobody answers at {address} within 0.3 s .*firewall"):
        Client(address, {}, print, print, timeout=0.3)


def test_another_program_at_an_address_is_told_apart():
    def greet():
        with server.accept()[0] as client:
            client.sendall(b"220 mail\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ConfigError, match="is not a polyreme store"):
            Client(Address("127.0.0.1", server.getsockname()[1]), {}, print, print, timeout=2)
        thread.join()


def greeted(address, greeting):
    """What a store answers to a line, None if it ends the connection."""
    with socket.create_connection(address, timeout=10) as client, client.makefile("rb") as lines:
        client.sendall(greeting if isinstance(greeting, bytes) else json.dumps(greeting).encode() + b"\n")
        answer = lines.readline()
    return json.loads(answer)["refusal"] if answer else "closed"


RANK = {"protocol": rendezvous.PROTOCOL, "kind": "rank", "rank": 1, "world": 2, "attempt": 0, "host": "h", "token": "t"}


def test_strangers_are_refused_and_told_why(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("POLYREME_JOB_TOKEN", "t")
    hosted = monitor.HostedMonitor("127.0.0.1", 2, 60.0, tmp_path)
    for change, match in (
        ({"rank": True}, "its greeting has rank=True, which is no int"),
        ({"rank": "0"}, "rank='0'"),
        ({"host": None}, "host=None"),
        ({"kind": ["rank"]}, "calls itself"),
        ({"kind": "node", "node": [1], "nodes": 7}, "node=\\[1\\]"),
        ({"kind": "node", "node": 1, "nodes": [1, None], "job": "j"}, "nodes="),
        ({"token": "u"}, "does not show this job's token"),
        ({"token": None}, "does not show this job's token"),
        ({"token": ["t"]}, "does not show this job's token"),
        ({"world": 3}, "does not fit this job"),
    ):
        assert re.search(match, greeted(hosted.address, {**RANK, **change}))
    for noise in (b"GET / HTTP/1.1\r\n", b"[" * 100_000 + b"\n", b"{}\n", b"7\n"):
        assert greeted(hosted.address, noise) == "closed"
    ended = threading.Event()
    rank = Client(
        hosted.address, {n: RANK[n] for n in ("kind", "rank", "world", "attempt", "host")}, print, ended.set, 5
    )
    for message in ({"t": "counter", "step": []}, {"status": 3}, {"t": "error"}, {"t": []}):
        rank.send(message)
    # the connection lives, and no traceback was shown: the rank is still known to be there
    assert "is there already" in greeted(hosted.address, RANK)
    assert not ended.is_set()
    rank.close()
    assert not [r for r in caplog.records if r.name == "asyncio"]


def test_ages_are_measured_by_clocks_that_do_not_jump():
    for module in (watchdog, progress, monitor, rendezvous, last_words, verdict):
        assert "time.time(" not in Path(module.__file__).read_text()


# ranks that watch each other without a launcher: rank 0 keeps the store

ALONE = """
import os, sys, time
from pathlib import Path
from polyreme.distributed.job import watchdog

rank, world, meeting = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

def share(address):
    if address is not None:
        meeting.with_suffix(".new").write_text(address)
        meeting.with_suffix(".new").rename(meeting)
    while not meeting.exists():
        time.sleep(0.02)
    return meeting.read_text()

watchdog.start(rank, world, share=share)
if rank == 1 and os.fork() == 0:  # a child that outlives its parent, as a data worker may
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    time.sleep(8)
    os._exit(0)
watchdog.at(step=5, phase="reading", detail="chapter 1")
time.sleep(0.5)  # more than a heartbeat
Path(f"ready.{rank}").touch()
while rank == 1 and not Path("go").exists():
    time.sleep(0.02)
watchdog.at(phase=None)
with watchdog.collective("all_gather"):
    while not Path("go").exists():
        time.sleep(0.02)
"""


def start_alone(folder: Path, worlds=(2, 2)) -> list[subprocess.Popen]:
    (folder / "script.py").write_text(textwrap.dedent(ALONE))
    gone = {"POLYREME_STORE", "PADDLE_LOG_DIR"}
    env = {**{k: v for k, v in os.environ.items() if k not in gone}, "POLYREME_INIT_TIMEOUT": "30"}
    env["POLYREME_HEARTBEAT"] = "0.2"
    return [
        subprocess.Popen(
            [sys.executable, "script.py", str(rank), str(world), "meeting"],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, world in enumerate(worlds)
    ]


def finish(processes: list[subprocess.Popen]) -> list[str]:
    """Outputs, once all ended; kills what does not end in 40 s."""
    try:
        return [process.communicate(timeout=40)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def until(condition, seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the processes did not come so far"
        time.sleep(0.02)


@pytest.mark.parametrize("victim", [0, 1])
def test_without_a_launcher_a_death_ends_the_other_rank(tmp_path, victim):
    processes = start_alone(tmp_path)
    try:
        until(lambda: all((tmp_path / f"ready.{rank}").exists() for rank in range(2)))
        start = time.monotonic()
        processes[victim].kill()
        processes[1 - victim].wait(10)
        assert time.monotonic() - start < 5
    finally:
        texts = finish(processes)
    assert processes[1 - victim].returncode == 86
    reading = r"at step 5, in reading \(chapter 1\)"
    found = {
        0: f"polyreme watchdog: rank 0, which kept the store .*is gone. Rank 1 was {reading}",
        1: f"polyreme watchdog: rank 1 on .* died: .*it was {reading}. Rank 0 was at step 5, in all_gather #1 of group",
    }
    assert re.search(found[victim], texts[1 - victim])


def test_without_a_launcher_a_job_ends_well_and_leaves_no_files(tmp_path):
    processes = start_alone(tmp_path)
    until(lambda: all((tmp_path / f"ready.{rank}").exists() for rank in range(2)))
    (tmp_path / "go").touch()
    texts = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], texts
    assert not list(tmp_path.glob("stacks*"))


def test_a_rank_that_was_told_another_world_size_is_refused(tmp_path):
    processes = start_alone(tmp_path, worlds=(2, 3))
    try:
        processes[1].wait(40)
        processes[0].send_signal(signal.SIGTERM)
    finally:
        texts = finish(processes)
    assert processes[1].returncode != 0
    assert "rank 1 of 3 does not fit this job of 2 ranks" in texts[1]
