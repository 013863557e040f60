"""Pretraining in two processes of four devices each, started by `polyreme launch`: as one process of eight trains."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from polyreme.distributed.placement import clear_plan
from polyreme.errors import ConfigError, DataError
from polyreme.recipes.training import run
from polyreme.recipes.training.logs import read_jsonl
from tests.recipes.tiny_run import assert_same_state, history, load, saved, train

# sums of up to 512 float32 terms taken in another order, over up to twenty steps
CLOSE = 1e-5
# parameters lie in pieces in both processes
PLAN = ("plan.dp=1", "plan.sharding=4")
SHORT = (*PLAN, "train.steps=6", "checkpoint.interval=3")
TWELVE = (*PLAN, "train.steps=12", "checkpoint.interval=3", "checkpoint.keep=9")


def launch(output, *overrides, flags=(), **environment):
    """Start it in two processes of four devices each; their output is piped, and in the folder logs beside output."""
    loaded = load(output, *overrides)
    words = ["launch", "--nproc_per_node", "2", "--log_dir", str(logs(output)), *flags, "pretrain", str(loaded.path)]
    return subprocess.Popen(
        [sys.executable, "-m", "polyreme.cli.main", *words, *loaded.overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {"CPU_NUM": "4", "POLYREME_INIT_TIMEOUT": "60", "POLYREME_RESTART_BACKOFF": "0.1"}
        | environment,
    )


def logs(output):
    return Path(output).with_name(f"{Path(output).name}.logs")


def end(process, code=0, seconds=120):
    """What the launcher printed; it is killed if it takes longer than seconds, and its processes die with it."""
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        pytest.fail(f"not done after {seconds} s:\n{out[-3000:]}")
    assert process.returncode == code, out[-3000:]
    return out


def wait_for(process, text):
    """The first line of its output that has this text."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    pytest.fail(f"the run ended without {text!r}")


def pid_of_rank(launcher, rank):
    """The worker among the launcher's children."""
    for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        if f"PADDLE_TRAINER_ID={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    pytest.fail(f"rank {rank} is not there")


def assert_same_losses(one, other, steps=None):
    """steps: how many of the other's count, all by default."""
    mine, theirs = history(one), history(other)[:steps]
    assert [row[0] for row in mine] == [row[0] for row in theirs]
    np.testing.assert_allclose([row[1:] for row in mine], [row[1:] for row in theirs], rtol=CLOSE)


@pytest.fixture(autouse=True)
def _one_device_after():
    yield
    clear_plan()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run in two processes that SIGTERM to rank 1 stopped, and what the launcher printed after that."""
    output = tmp_path_factory.mktemp("stopped") / "run"
    running = launch(output, *TWELVE, "log.validation_interval=3", FAULTS="train.step:delay=0.2")
    wait_for(running, "step  4/12")
    os.kill(pid_of_rank(running, 1), signal.SIGTERM)
    return output, end(running, code=75)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of the same run in one process, which nobody stopped."""
    output = tmp_path_factory.mktemp("alone") / "run"
    train(output, *TWELVE)
    clear_plan()
    return output


def test_sigterm_to_one_rank_stops_both_after_the_same_step(stopped):
    output, out = stopped
    (step,) = re.findall(r"stopped by request after step (\d+); state is saved", out)
    assert int(step) >= 4
    log = (logs(output) / "workerlog.1").read_text()
    assert "SIGTERM: finishing this step, then saving" in log
    assert f"stopped by SIGTERM after step {step};" in log
    assert saved(output)[1]["step"] == int(step) == len(history(output))


def test_two_processes_train_as_one(stopped, alone):
    output, _ = stopped
    assert_same_losses(output, alone, history(output)[-1][0])
    rows = read_jsonl(output / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "validation"][:1] == [3]
    rank_one = (logs(output) / "workerlog.1").read_text()
    assert "/12 |" not in rank_one
    assert "validation" not in rank_one


def test_each_shard_is_saved_once_by_a_process_that_has_it(stopped, alone):
    folder = stopped[0] / "checkpoints" / "step_00000003"
    names = sorted(path.name for path in folder.iterdir())
    expected = [f"data-0000{process}-0000{device}.bin" for process in range(2) for device in range(4)]
    assert names == ["MANIFEST.json", *expected]
    one, many = saved(alone, 3)[0], saved(stopped[0], 3)[0]
    assert sum(path.stat().st_size for path in folder.glob("*.bin")) == sum(a.nbytes for a in many.values())
    assert one.keys() == many.keys()
    for name in one:
        # Adam divides by the root of a second moment: what is near zero may differ by a learning rate of 1e-3 a step
        np.testing.assert_allclose(many[name], one[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_either_goes_on_from_what_the_other_saved(stopped, alone, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    shutil.copytree(stopped[0], one)
    shutil.copytree(alone, two)
    shutil.rmtree(two / "checkpoints" / "step_00000012")
    running = launch(two, *TWELVE)
    train(one, *TWELVE)
    assert f"resumed after step {history(stopped[0])[-1][0]}\n" in capsys.readouterr().out
    out = end(running)
    assert out.count("resumed after step 9") == 1
    assert out.count("step 12/12 |") == 1
    assert len(history(one)) == 12
    assert_same_losses(one, alone)
    assert_same_losses(two, alone)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on_as_if_it_had_never_been(tmp_path):
    whole, output = tmp_path / "whole", tmp_path / "run"
    end(launch(whole, *PLAN))
    running = launch(output, *PLAN, FAULTS="train.step:delay=0.1")
    wait_for(running, "step  8/20")
    os.kill(pid_of_rank(running, 1), signal.SIGKILL)
    killed = time.monotonic()
    wait_for(running, "rank 1 failed first")
    assert time.monotonic() - killed < 10
    assert "SIGKILL" in wait_for(running, "exit:")
    assert "restart 1 of 3" in wait_for(running, "next:")
    out = end(running)
    assert re.search(r"resumed after step (5|10)\b", out)
    assert history(output) == history(whole)
    assert_same_state(output, whole)


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        (["{}", "digest"], ConfigError, "rank 1 has other settings than rank 0"),
        ([None, "another"], DataError, r"rank 1 reads other data \(digest another\) than rank 0"),
    ],
)
def test_ranks_that_would_train_something_else_are_refused(tmp_path, monkeypatch, other, error, match):
    def everyone_says(value):
        return [value, value and [theirs or mine for theirs, mine in zip(other, value, strict=True)]]

    monkeypatch.setattr(run, "everyone_says", everyone_says)
    with pytest.raises(error, match=match):
        train(tmp_path / "run", *SHORT)


# the exit code of the rank that failed first: tests/distributed/test_launch.py, test_sys_exit_with_an_error
@pytest.mark.slow
def test_an_error_of_one_rank_ends_all_with_its_exit_code(tmp_path):
    text = tmp_path / "empty.txt"
    text.write_text("")
    running = launch(tmp_path / "run", *SHORT, f"data.text={text}", flags=("--max_restart", "0"))
    out = end(running, code=3, seconds=60)
    assert f"error: {text}: the file has no text" in out
    assert "rank 0 failed first" in out
    assert "exit code 3 (bad or missing data)" in out


@pytest.mark.slow
def test_a_step_that_always_fails_is_named_with_its_samples(tmp_path):
    output = tmp_path / "run"
    fault = "rank1:train.step:raise@4"
    out = end(launch(output, *SHORT, FAULTS=fault), code=70, seconds=200)
    assert out.count("what:  FaultInjected: fault injected at train.step@4") == 3
    assert out.count("Traceback (most recent call last)") == 3
    found = re.search(r"crash loop: 3 failures in a row at step 4 \(batch of samples ([\d, ]+)\)", out)
    assert found
    assert len(found[1].split(", ")) == 8
    assert saved(output)[1]["step"] == 3
