"""A run whose devices are not as many as its plan's: the planner's best plan for those that are there."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from polyreme.distributed.job.rendezvous import free_port
from polyreme.distributed.placement import clear_plan
from polyreme.errors import ConfigError
from polyreme.recipes.config_file import load as load_file
from polyreme.recipes.planning import elastic
from tests.recipes.tiny_run import history, load, train

QUARTER = ("plan.dp=1", "plan.mp=1", "plan.sharding=4", "plan.elastic=true")


@pytest.fixture(autouse=True)
def _one_device_after():
    yield
    clear_plan()


def test_a_plan_for_other_devices_gives_way_to_the_planner_s(tmp_path):
    """These tests have 8 devices."""
    own = load(tmp_path / "a", "plan.elastic=true").config
    assert elastic.fitted(own) is own
    said: list[str] = []
    other = load(tmp_path / "b", *QUARTER).config
    fitted = elastic.fitted(other, said.append)
    assert fitted.plan.num_devices == 8
    assert fitted.plan.elastic
    assert fitted.model_copy(update={"plan": other.plan, "train": other.train}) == other
    assert fitted.train.model_copy(update={"accumulation": other.train.accumulation}) == other.train
    assert said[0].startswith("8 devices, the plan is for 4: going on with ")
    odd = ("model.hidden_size=33", "model.num_heads=3", "model.seq_len=15", "model.vocab_size=511")
    alone = ("plan.dp=1", "plan.mp=1", "plan.sharding=1", "plan.sharding_stage=0", "train.global_batch=1")
    none = load(tmp_path / "c", *alone, *odd, "plan.elastic=true").config
    with pytest.raises(ConfigError, match=r"plan.elastic: 8 devices are left of 1, and no plan fits them"):
        elastic.fitted(none)


def test_fine_tuning_has_no_plans_to_choose_from(tmp_path):
    (tmp_path / "f.yaml").write_text("{model: somewhere, stage: sft, plan: {elastic: true}}\n")
    with pytest.raises(ConfigError, match="plan"):
        load_file(tmp_path / "f.yaml", [])


@pytest.mark.slow
def test_a_job_that_loses_a_node_goes_on_with_another_plan(tmp_path):
    """Two nodes, as launchers of a process of two devices each, of which one is killed after step 6."""
    config = [*QUARTER, "train.steps=12", "checkpoint.interval=3"]
    loaded = load(tmp_path / "run", *config)
    master = f"127.0.0.1:{free_port('127.0.0.1')}"
    flags = ["--nnodes", "1:2", "--master", master, "--elastic_timeout", "2", "--log_dir", str(tmp_path / "log")]
    words = [sys.executable, "-m", "polyreme.cli.main", "launch", *flags]
    quick = {"CPU_NUM": "2", "POLYREME_RESTART_BACKOFF": "0.1", "FAULTS": "train.step:delay=0.2"}
    nodes = [
        subprocess.Popen(
            [*words, "--rank", str(node), "pretrain", str(loaded.path), *loaded.overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | quick,
            cwd=tmp_path,
        )
        for node in range(2)
    ]
    try:
        first = nodes[0].stdout
        assert first is not None
        before = []
        for line in first:
            before.append(line)
            if "step  7/12" in line:
                break
        nodes[1].send_signal(signal.SIGKILL)
        after = first.read()
        assert nodes[0].wait(60) == 0, "".join(before) + after
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert "is lost with its node" in after
    assert "2 devices, the plan is for 4: going on with " in after
    assert "resumed after step 6" in after
    train(tmp_path / "alone", "plan.mp=1", "plan.sharding=4", "train.steps=12", "checkpoint.interval=3")
    mine, theirs = history(tmp_path / "run"), history(tmp_path / "alone")
    assert [row[0] for row in mine] == [row[0] for row in theirs] == list(range(1, 13))
    # sums of up to 512 float32 terms taken in another order, over up to twelve steps
    np.testing.assert_allclose([row[1:] for row in mine], [row[1:] for row in theirs], rtol=1e-5)
