"""A pipeline over several processes gives what one process gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from polyreme.distributed.placement import clear_plan
from polyreme.mesh import Plan
from tests.distributed.pipeline import worker

LIMIT = 240  # seconds, on a busy machine; the job takes 15 on a quiet one


def run_job(plan, processes, folder):
    """Each rank's result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "CPU_NUM": str(plan.mesh.size // processes),
        "PADDLE_TRAINERS_NUM": str(processes),
        "PADDLE_MASTER": f"127.0.0.1:{port}",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    words = [sys.executable, "-m", "tests.distributed.pipeline.worker", json.dumps(plan.to_dict())]
    jobs = [
        subprocess.Popen(
            words,
            env=env | {"PADDLE_TRAINER_ID": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [job.communicate(timeout=LIMIT) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for out, err in outputs:
        assert "RESULT" in out, err[-3000:]
    return [json.loads(out.split("RESULT", 1)[1]) for out, _ in outputs]


@pytest.mark.slow_cases("stage_a_process")
@pytest.mark.parametrize(
    ("processes", "degrees"),
    [
        # a stage in each process; both stages over both processes; two stages a process, a sharded one
        (2, {"pp": 2, "mp": 2, "num_microbatches": 4}),
        pytest.param(2, {"dp": 2, "pp": 2, "mp": 2, "schedule": "ZBH1", "num_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param(
            2,
            {"pp": 2, "sharding": 2, "sharding_stage": 3, "schedule": "ZBVPP", "num_microbatches": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(4, {"pp": 4, "schedule": "1F1B", "num_microbatches": 4}, marks=pytest.mark.slow),
    ],
    ids=["stage_a_process", "stages_over_processes", "v_sharded", "four_processes"],
)
def test_processes_give_what_one_gives(processes, degrees, tmp_path):
    plan = Plan.from_degrees(**degrees)
    try:
        want = worker.train(plan, jax.devices()[: plan.mesh.size])
    finally:
        clear_plan()
    found = run_job(plan, processes, tmp_path)
    for result in found:
        assert result["counters"] == want["counters"]
        for name in ("losses", "norms", "validation", "logits"):
            # the same programs; sums between processes may be taken in another order, over two steps
            np.testing.assert_allclose(result[name], want[name], rtol=2.0**-23 * 1024, err_msg=name)
