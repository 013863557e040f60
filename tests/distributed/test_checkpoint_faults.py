"""Checkpoints under fire: killed at every point, disk full, bits flipped, files cut, two runs in one folder."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from polyreme.distributed.checkpoint import CheckpointStore, CheckpointWarning
from polyreme.errors import CheckpointError, ConfigError, NoSpaceError

# A process that forks a child per trial, so that jax is imported once. A line of JSON in: {folder, faults, first, last,
# overwrite, pace}; lines out: "ready", a step for each that wait() said is saved, "end STATUS".
SERVER = """
import json, os, sys, time, numpy as np
from polyreme.distributed.checkpoint import CheckpointStore

def state(step):
    rng = np.random.default_rng(step)
    return {f"w{i}": rng.random(500) for i in range(8)} | {"step": np.full(3, step)}

def child(job):
    os.environ["FAULTS"] = job["faults"]
    with CheckpointStore(job["folder"], max_to_keep=3) as store:
        print("ready", os.getpid(), flush=True)
        for step in range(job["first"], job["last"] + 1):
            store.save(step, state(step), {"data": step}, overwrite=job.get("overwrite", False))
            time.sleep(job.get("pace", 0))
            if job.get("wait", True):
                store.wait()
                os.write(1, b"%d\\n" % step)  # in one piece, even when killed

if __name__ == "__main__":
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
            os._exit(0)
        print("end", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def state(step):
    rng = np.random.default_rng(step)
    return {f"w{i}": rng.random(500) for i in range(8)} | {"step": np.full(3, step)}


class Server:
    """Runs trials in the forking process."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, folder, faults="", first=1, last=6, **rest):
        job = {"folder": str(folder), "faults": faults, "first": first, "last": last, **rest}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def pid(self):
        word, pid = self.process.stdout.readline().split()
        assert word == "ready"
        return int(pid)

    def finish(self):
        """Exit status of the trial and the steps it knew to be saved."""
        saved = []
        while True:
            words = self.process.stdout.readline().split()
            if words[0] == "end":
                return int(words[1]), saved
            saved.append(int(words[0]))

    def run(self, folder, faults="", **rest):
        self.start(folder, faults, **rest)
        self.pid()
        return self.finish()

    def close(self):
        self.process.communicate(timeout=30)
        assert self.process.returncode == 0


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    running.close()


def assert_step(store, step):
    arrays, meta = store.restore(step=step)
    assert meta["step"] == step
    for name, want in state(step).items():
        np.testing.assert_array_equal(arrays[name], want, err_msg=f"{name} of step {step}")


def assert_sound(folder, saved, exact=None):
    """Whatever was saved is whole, the latest is not lost, and the torn step can be saved again."""
    with CheckpointStore(folder, max_to_keep=3) as store:
        steps = store.steps()
        assert not saved or steps[-1] >= saved[-1]
        if exact is not None:
            assert steps == exact
        for step in steps:
            assert_step(store, step)
        assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [f"step_{s:08d}" for s in steps]
        torn = steps[-1] + 1 if steps else 1
        store.save(torn, state(torn), {"data": torn}, blocking=True)
        assert store.latest_step() == torn
        assert_step(store, torn)


# cases 1 to 3: kill -9

POINTS = {  # where killed at the third passing by step, and what must be there then
    "ckpt.data:kill@3": [1, 2],
    "ckpt.write:kill@20": [1, 2],  # 9 tensors a step: the second tensor of step 3
    "ckpt.manifest:kill@3": [1, 2],
    "ckpt.rename:kill@3": [1, 2],
    "ckpt.renamed:kill@3": [1, 2, 3],
    "ckpt.latest:kill@3": [1, 2, 3],
    "ckpt.delete:kill@1": [1, 2, 3, 4],
    "ckpt.trash:kill@1": [2, 3, 4],
    "ckpt.deleting:kill@1": [2, 3, 4],
    "ckpt.deleting:kill@3": [3, 4, 5],  # two files a step: the first file of step 2
}


@pytest.mark.parametrize("faults", POINTS)
def test_killed_at_a_named_point(server, tmp_path, faults):
    status, saved = server.run(tmp_path, faults)
    assert status == -signal.SIGKILL
    assert_sound(tmp_path, saved, exact=POINTS[faults])


@pytest.mark.parametrize(
    ("faults", "left"),
    [
        ("ckpt.rename:kill@1", [3, 4, 5]),
        ("ckpt.replace:kill@1", [3, 4, 5]),
        ("ckpt.replace:kill@2", [3, 4, 5]),
        ("ckpt.renamed:kill@1", [3, 4]),
        ("ckpt.deleting:kill@1", [3, 4]),
        ("ckpt.trash:kill@2", [3, 4]),
    ],
)
def test_killed_while_replacing_a_branch(server, tmp_path, faults, left):
    assert server.run(tmp_path, last=5) == (0, [1, 2, 3, 4, 5])
    status, _ = server.run(tmp_path, faults, first=4, last=4, overwrite=True)
    assert status == -signal.SIGKILL
    assert_sound(tmp_path, [], exact=left)


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_a_random_time(server, tmp_path, seed):
    rng = random.Random(seed)
    server.start(tmp_path, last=400, wait=seed % 2 == 0, pace=rng.choice([0, 0.002]))
    pid = server.pid()
    time.sleep(rng.uniform(0.005, 0.25))
    os.kill(pid, signal.SIGKILL)
    status, saved = server.finish()
    assert status == -signal.SIGKILL
    assert_sound(tmp_path, saved)


def test_killed_again_and_again_in_one_folder(server, tmp_path):
    for trial in range(5):
        with CheckpointStore(tmp_path) as store:
            first = (store.latest_step() or 0) + 1
        faults = list(POINTS)[trial]
        server.run(tmp_path, faults, first=first, last=first + 3)
    assert_sound(tmp_path, [])


# cases 4 to 7


def test_an_error_in_the_background_surfaces_at_the_next_call(tmp_path, monkeypatch):
    with CheckpointStore(tmp_path) as store:
        store.save(1, state(1), blocking=True)
        monkeypatch.setenv("FAULTS", "ckpt.manifest:raise@1")
        store.save(2, state(2))
        with pytest.raises(CheckpointError, match="save of step 2 failed: FaultInjected"):
            store.save(3, state(3))
        assert store.steps() == [1]
        assert not list(tmp_path.glob("*.tmp"))
        monkeypatch.setenv("FAULTS", "ckpt.write:raise@4")
        store.save(2, state(2))
        with pytest.raises(CheckpointError, match="save of step 2 failed"):
            check_until_raised(store)
        store.check()  # raised once
        monkeypatch.delenv("FAULTS")
        store.save(2, state(2))
        assert_step(store, 2)


def check_until_raised(store):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        store.check()
        time.sleep(0.01)


def test_close_raises_what_the_last_save_raised(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS", "ckpt.rename:raise@1")
    store = CheckpointStore(tmp_path)
    store.save(1, state(1))
    with pytest.raises(CheckpointError, match="save of step 1 failed"):
        store.close()
    CheckpointStore(tmp_path).close()  # and the lock was given back


def test_a_failed_replacement_restores_the_old_branch(tmp_path, monkeypatch):
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
        store.wait()
        monkeypatch.setenv("FAULTS", "ckpt.replace:raise@2")
        store.save(2, state(2), overwrite=True)
        with pytest.raises(CheckpointError, match="FaultInjected"):
            store.wait()
        assert store.steps() == [1, 2, 3]


def test_wait_can_give_up(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS", "ckpt.data:delay=0.5")
    with CheckpointStore(tmp_path) as store:
        store.save(1, state(1))
        with pytest.raises(CheckpointError, match=r"save of step 1 .* not done after 0\.05 s"):
            store.wait(timeout=0.05)
        store.wait()
        assert store.steps() == [1]


def test_a_full_disk_met_while_writing(tmp_path, monkeypatch):
    with CheckpointStore(tmp_path) as store:
        store.save(1, state(1), blocking=True)
        monkeypatch.setenv("FAULTS", "ckpt.write:raise=ENOSPC@3")
        store.save(2, state(2))
        with pytest.raises(NoSpaceError, match=r"save of step 2 .* needs \d+ bytes, \d+ are free") as caught:
            store.wait()
        assert caught.value.need > sum(a.nbytes for a in state(2).values())
        assert caught.value.free > 0
        assert not list(tmp_path.glob("*.tmp"))
        monkeypatch.delenv("FAULTS")
        store.save(2, state(2), blocking=True)
        assert store.steps() == [1, 2]


@pytest.mark.parametrize(("keep", "left"), [(2, [3, 4]), (3, [1, 2, 3])])
def test_on_a_full_disk_steps_beyond_those_kept_make_room(tmp_path, monkeypatch, keep, left):
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, state(step), blocking=True)
    full, roomy = (SimpleNamespace(free=free) for free in (0, 1 << 30))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if (tmp_path / "step_00000001").exists() else roomy)
    with CheckpointStore(tmp_path, max_to_keep=keep) as store:
        with contextlib.nullcontext() if 4 in left else pytest.raises(NoSpaceError, match="or keep fewer steps"):
            store.save(4, state(4), blocking=True)
        assert store.steps() == left


def test_a_rollback_on_a_full_disk_deletes_nothing_it_needs(tmp_path, monkeypatch):
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, state(step), blocking=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with CheckpointStore(tmp_path, max_to_keep=1) as store, pytest.raises(NoSpaceError):
        store.save(2, state(2), overwrite=True)
    with CheckpointStore(tmp_path, read_only=True) as store:
        assert store.steps() == [1, 2, 3]


def in_mount_namespace(tmp_path, options, code):
    """Run code with a tmpfs of the options at tmp_path, seen by it alone; skip where the kernel does not allow that."""
    mount = f"mount -t tmpfs -o {options} none {tmp_path}"
    allowed = shutil.which("unshare") and subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True)
    if not allowed or allowed.returncode:
        pytest.skip("mounting in a namespace of its own is not allowed here")
    command = ["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$0" -c "$1" "$2"', sys.executable, code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_disk_that_is_full(tmp_path):
    code = """
import os, pathlib, sys, time, numpy as np
os.environ["FAULTS"] = "ckpt.data:delay=0.2@2"
from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.errors import NoSpaceError
store = CheckpointStore(sys.argv[1] + "/ckpt")
store.save(1, {"x": np.ones(100_000)}, blocking=True)
filler = pathlib.Path(sys.argv[1], "filler")
for size in (900_000, 100_000):  # refused before writing; and with the disk filled up meanwhile
    start = time.monotonic()
    try:
        store.save(2, {"x": np.ones(size)})
        print("begun")
        filler.write_bytes(bytes(900_000))
        store.wait()
    except NoSpaceError as error:
        print(error.need > size * 8, error.free < 2 << 20, time.monotonic() - start < 5)
    else:
        raise SystemExit("no error")
filler.unlink()
print(store.steps(), store.restore()[0]["x"].sum())
store.save(2, {"x": np.ones(10)}, blocking=True)
print(store.steps())
store.close()
"""
    out = in_mount_namespace(tmp_path, "size=2m", code)
    assert out.splitlines() == ["True True True", "begun", "True True True", "[1] 100000.0", "[1, 2]"]


def test_a_read_only_folder_is_refused_at_open(tmp_path):
    code = """
import sys
from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.errors import ConfigError
for path in (sys.argv[1], sys.argv[1] + "/new/one"):
    try:
        CheckpointStore(path)
    except ConfigError as error:
        print(error)
"""
    out = in_mount_namespace(tmp_path, "ro,size=1m", code).splitlines()
    assert len(out) == 2
    assert all("cannot be written (Read-only file system)" in line for line in out)


def test_a_file_in_place_of_the_folder_is_refused_at_open(tmp_path):
    (tmp_path / "ckpt").write_text("")
    with pytest.raises(ConfigError, match="is a file; a folder is needed there"):
        CheckpointStore(tmp_path / "ckpt")
    with pytest.raises(ConfigError, match="cannot be written"):
        CheckpointStore(tmp_path / "ckpt" / "below")


def test_a_second_run_in_the_folder_is_refused(server, tmp_path):
    server.start(tmp_path, last=1, pace=0.5)
    pid = server.pid()
    with pytest.raises(ConfigError, match=f"being written by process {pid} on"):
        CheckpointStore(tmp_path)
    assert server.finish()[0] == 0
    CheckpointStore(tmp_path).close()


def test_a_second_store_in_one_process_is_refused(tmp_path):
    with CheckpointStore(tmp_path), pytest.raises(ConfigError, match=f"being written by process {os.getpid()}"):
        CheckpointStore(tmp_path)


def test_the_lock_of_a_dead_process_is_taken_over(server, tmp_path):
    server.run(tmp_path, "ckpt.manifest:kill@1")
    assert (tmp_path / "LOCK").exists()
    CheckpointStore(tmp_path).close()
    assert not (tmp_path / "LOCK").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}'])
def test_a_torn_lock_is_taken_over(tmp_path, content):
    (tmp_path / "LOCK").write_text(content)
    CheckpointStore(tmp_path).close()


def test_the_lock_of_a_pid_given_out_again_is_taken_over(tmp_path):
    store = CheckpointStore(tmp_path)
    owner = json.loads((tmp_path / "LOCK").read_text())
    (tmp_path / "LOCK").write_text(json.dumps({**owner, "start": owner["start"] - 1}))
    CheckpointStore(tmp_path).close()
    store.close()


def test_the_lock_of_another_host_is_respected_while_its_heart_beats(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("POLYREME_LOCK_TIMEOUT", "1")
    lock = tmp_path / "LOCK"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    os.utime(lock, (1, 1))
    with pytest.raises(ConfigError, match=r"process 1 on elsewhere; .*delete .*LOCK only if it is surely gone"):
        CheckpointStore(tmp_path)  # of a version without heartbeats
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "beat": 0.1}))
    with pytest.raises(ConfigError, match="heartbeat is 0 s old, and the folder is taken over 1 s after the last"):
        CheckpointStore(tmp_path)
    assert json.loads(lock.read_text())["host"] == "elsewhere"
    os.utime(lock, (1, 1))
    with CheckpointStore(tmp_path) as store:
        assert "taken over from process 1 on elsewhere, whose heartbeat stopped" in caplog.text
        os.utime(lock, (1, 1))
        deadline = time.monotonic() + 20
        while lock.stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert lock.stat().st_mtime > 1  # it beats
        # what a process sees that was stopped for long and goes on
        lock.write_text(json.dumps({"pid": 2, "host": "elsewhere", "beat": 0.1}))
        with pytest.raises(CheckpointError, match="was taken over by process 2 on elsewhere"):
            store.save(1, {"w": np.ones(2, "float32")}, blocking=True)
    assert json.loads(lock.read_text())["pid"] == 2  # not ours to remove


def test_a_step_deleted_after_it_was_listed_is_looked_for_again(tmp_path, monkeypatch):
    """As generate does beside a run with checkpoint.keep=1."""
    with CheckpointStore(tmp_path, max_to_keep=1) as writer:
        writer.save(1, {"w": np.full(2, 1.0, "float32")}, blocking=True)
        reader = CheckpointStore(tmp_path, read_only=True)
        read = CheckpointStore._restore_step

        def late(store, step, *settings):
            if step < 3:
                writer.save(step + 1, {"w": np.full(2, step + 1.0, "float32")}, blocking=True)
            return read(store, step, *settings)

        monkeypatch.setattr(CheckpointStore, "_restore_step", late)
        arrays, meta = reader.restore()
        assert (meta["step"], arrays["w"].tolist()) == (3, [3.0, 3.0])


# cases 9 to 12: what is found when reading


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with CheckpointStore(folder) as store:
        for step in (1, 2):
            # on two devices and the host: three data files
            first, second, *rest = state(step).items()
            arrays = {n: jax.device_put(a, d) for (n, a), d in zip((first, second), jax.devices(), strict=False)}
            store.save(step, {**arrays, **dict(rest)}, {"data": step})
    return folder


@pytest.fixture
def copied(two_steps, tmp_path):
    return Path(shutil.copytree(two_steps, tmp_path / "copy"))


def data_files(folder):
    return sorted((folder / "step_00000002").glob("data-*"))


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)


def check_fallback(folder, reason):
    with CheckpointStore(folder) as store:
        with pytest.raises(CheckpointError, match=f"step 2 .*{reason}"):
            store.restore(strict=True)
        with pytest.warns(CheckpointWarning, match=f"step 2 passed over: .*{reason}"):
            arrays, meta = store.restore()
        assert meta["step"] == 1
        np.testing.assert_array_equal(arrays["w0"], state(1)["w0"])
        store.save(2, state(2), blocking=True)  # the run goes on from 1 and meets 2 again
        assert_step(store, 2)
        assert store.restore()[1]["step"] == 2


@pytest.mark.one_in(6)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("seed", range(5))
def test_one_flipped_bit_is_found(copied, number, seed):
    files = data_files(copied)
    assert len(files) == 3
    file = files[number]
    with CheckpointStore(copied, read_only=True) as store:
        chunks = [(n, c) for n, t in store.manifest(2).tensors.items() for c in t.chunks if c.file == file.name]
    position = random.Random(seed).randrange(file.stat().st_size * 8)
    flip(file, position)
    tensor = next(name for name, c in chunks if c.offset <= position // 8 < c.offset + c.nbytes)
    with CheckpointStore(copied, read_only=True) as store, pytest.raises(CheckpointError, match=file.name):
        store.verify(2)
    check_fallback(copied, f"file {file.name}: tensor '{tensor}' .*corrupt")


@pytest.mark.slow
def test_every_flipped_bit_of_the_manifest_is_found(copied):
    path = copied / "step_00000002" / "MANIFEST.json"
    whole = path.read_bytes()
    with CheckpointStore(copied, read_only=True) as store:
        want = store.manifest(2)
    for position in range(0, len(whole) * 8, 3):
        flip(path, position)
        with CheckpointStore(copied, read_only=True) as store, contextlib.suppress(CheckpointError):
            assert store.manifest(2) == want, position  # white space may differ
        path.write_bytes(whole)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("how", ["truncated", "longer", "deleted", "link", "folder"])
def test_a_damaged_shard_is_found(copied, number, how):
    file = data_files(copied)[number]
    if how in ("truncated", "longer"):
        os.truncate(file, file.stat().st_size + (7 if how == "longer" else -7))
    else:
        file.unlink()
    if how == "link":
        file.symlink_to("/etc/hostname")
    if how == "folder":
        file.mkdir()
    reason = {"deleted": "No such file", "link": "not a plain file", "folder": "not a plain file"}.get(
        how, "bytes, expected"
    )
    check_fallback(copied, rf"file {file.name} \(tensor '.*{reason}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "missing"), (b"", "empty"), (b"\0" * 500, "not JSON"), (b"garbage", "not JSON"), (b"[]", "holds a list"),
        (b"[" * 100_000, "not JSON"), (b"\xff\xfe{}", "not JSON"), (b"{}", "format_version is None"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_found(copied, content, reason):
    path = copied / "step_00000002" / "MANIFEST.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with CheckpointStore(copied, read_only=True) as store:
        assert store.steps() == [1]
    check_fallback(copied, f"MANIFEST.json: .*{reason}")


def test_corrupt_steps_are_set_aside_not_deleted(copied):
    flip(data_files(copied)[0], 77)
    with CheckpointStore(copied) as store:
        with pytest.warns(CheckpointWarning, match="step 2 passed over"):
            store.restore()
        assert store.steps() == [1]
        store.save(5, state(5), blocking=True)
        assert store.steps() == [1, 5]
    assert (copied / "step_00000002.corrupt" / "MANIFEST.json").exists()


def test_nothing_valid_left(copied):
    for manifest in copied.glob("*/MANIFEST.json"):
        manifest.write_text("")
    with CheckpointStore(copied) as store:
        with pytest.raises(CheckpointError, match=r"no valid checkpoint in .*\n  step 2: .*empty\n  step 1: .*empty"):
            store.latest_step()
        with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="no valid checkpoint"):
            store.restore()


def test_strays_are_ignored_with_one_warning(copied):
    (copied / "99").mkdir()
    (copied / "foo").mkdir()
    (copied / "7.tmp").mkdir()
    (copied / "8").write_text("")
    (copied / "step_00000003").write_text("")
    (copied / "step_4").mkdir()
    (copied / "step_00000005").symlink_to(copied / "step_00000002")
    with pytest.warns(
        CheckpointWarning, match=r"ignored: 7\.tmp, 8, 99, foo, step_00000003, step_00000005, step_4"
    ) as seen:
        store = CheckpointStore(copied)
    assert len(seen) == 1
    with store:
        assert store.steps() == [1, 2]
        assert store.restore()[1]["step"] == 2  # and no second warning
    assert (copied / "7.tmp").is_dir()


def test_an_empty_step_folder_is_no_step(copied):
    (copied / "step_00000099").mkdir()
    with CheckpointStore(copied) as store:
        assert store.latest_step() == 2
        store.save(99, state(99), blocking=True)
        assert_step(store, 99)


# case 16: other formats


@pytest.mark.parametrize(
    ("head", "what"),
    [(b"\x80\x04\x95\x10\0\0\0\0\0\0\0", "a pickle"), (b"PK\x03\x04", "torch .pt or NumPy .npz"), (b"hello", "a file")],
)
def test_a_file_given_as_checkpoint_folder_is_refused_by_type(tmp_path, head, what):
    (tmp_path / "weights").write_bytes(head)
    with pytest.raises(CheckpointError, match=f"is .*{what}.*not a checkpoint folder; convert"):
        CheckpointStore(tmp_path / "weights", read_only=True).restore()
