"""Pretraining in a process of its own: killed, told to stop, twice in one folder, resumed on other devices."""

import random
import signal
import time

import pytest

from polyreme.distributed.placement import clear_plan
from polyreme.errors import CheckpointError, ConfigError
from tests.recipes.tiny_run import (
    ONE_DEVICE,
    assert_same_state,
    finish,
    history,
    resume_command,
    start,
    start_command,
    train,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nobody stopped."""
    output = tmp_path_factory.mktemp("whole") / "run"
    finish(start(output))
    return output


def resumed_equals(output, whole, started=None):
    out, _ = finish(started or start(output))
    assert "resumed after step" in out
    assert history(output) == history(whole)
    assert_same_state(output, whole)


@pytest.mark.slow
def test_killed_and_resumed_equals_never_stopped(whole, tmp_path):
    finish(start(tmp_path / "run", FAULTS="train.step:kill@11"), code=-signal.SIGKILL)
    assert [row[0] for row in history(tmp_path / "run")] == list(range(1, 11))
    resumed_equals(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_time(whole, tmp_path, seed):
    process = start(tmp_path / "run", FAULTS="train.step:delay=0.05")
    while not process.stdout.readline().startswith("step  6"):
        pass
    time.sleep(random.Random(seed).uniform(0, 0.6))
    process.kill()
    finish(process, code=-signal.SIGKILL)
    resumed_equals(tmp_path / "run", whole)


@pytest.mark.slow
def test_told_to_stop_saves_and_prints_how_to_go_on(whole, tmp_path):
    process = start(tmp_path / "run", FAULTS="train.step:delay=0.1")
    while not process.stdout.readline().startswith("step  7"):
        pass
    with pytest.raises(ConfigError, match=f"is being written by process {process.pid}"):
        train(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    _, err = finish(process, code=75)
    assert "finishing this step, then saving" in err
    steps = history(tmp_path / "run")
    assert 7 <= len(steps) < 20
    resumed_equals(tmp_path / "run", whole, start_command(resume_command(err)))


@pytest.mark.slow
def test_second_signal_leaves_a_step_that_hangs(tmp_path):
    process = start(tmp_path / "run", FAULTS="train.step:hang@6")
    while not process.stdout.readline().startswith("step  5"):
        pass
    process.send_signal(signal.SIGTERM)
    while "finishing this step" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    finish(process, code=128 + signal.SIGTERM)


@pytest.mark.slow
def test_resume_on_one_device(whole, tmp_path):
    finish(start(tmp_path / "run", FAULTS="train.step:kill@11"), code=-signal.SIGKILL)
    out, _ = finish(start(tmp_path / "run", *ONE_DEVICE, CPU_NUM="1"))
    assert "plan.dp: 2 -> 1" in out
    for mine, theirs in zip(history(tmp_path / "run"), history(whole), strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], rel=1e-5)
        assert mine[2] == theirs[2]


@pytest.fixture(autouse=True)
def _one_device_after():
    yield
    clear_plan()


@pytest.mark.slow
def test_a_failed_update_of_state_on_disk_resumes_from_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    on_disk = ["plan.offload={state: disk}", f"plan.offload_path={tmp_path / 'ssd'}"]
    on_disk += ["train.steps=6", "checkpoint.interval=2"]
    train(tmp_path / "whole", *on_disk)
    assert "optimizer state of 0.2 MB is in" in capsys.readouterr().out
    monkeypatch.setenv("FAULTS", "offload.write:raise=EIO@5")
    with pytest.raises(CheckpointError, match=r"offloaded state: .*safetensors cannot be written"):
        train(tmp_path / "run", *on_disk)
    monkeypatch.delenv("FAULTS")
    clear_plan()
    train(tmp_path / "run", *on_disk)
    clear_plan()
    assert_same_state(tmp_path / "run", tmp_path / "whole")
    assert history(tmp_path / "run") == history(tmp_path / "whole")


# a step fills 46 parts with gradients, then 50 with parameters, and reads 234
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "fault"),
    [
        pytest.param("state: disk", "offload.write:kill@13", id="write"),
        pytest.param("state: disk", "offload.read:kill@13", id="read"),
        pytest.param("param: disk, state: disk", "offload.part:kill@1300", id="weights"),
        pytest.param("param: disk, state: disk", "offload.fill:kill@590", id="parameters"),
    ],
)
def test_killed_in_an_update_of_state_on_disk(kinds, fault, tmp_path):
    on_disk = [f"plan.offload={{{kinds}}}", f"plan.offload_path={tmp_path / 'ssd'}"]
    finish(start(tmp_path / "whole", *on_disk))
    finish(start(tmp_path / "run", *on_disk, FAULTS=fault), code=-signal.SIGKILL)
    resumed_equals(tmp_path / "run", tmp_path / "whole", start(tmp_path / "run", *on_disk))
    assert [entry.name for entry in (tmp_path / "ssd").iterdir()] == ["LOCK"]  # what the killed run left is gone
