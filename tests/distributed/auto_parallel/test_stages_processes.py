"""A plain model in stages that lie in two processes gives what one process gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from polyreme.distributed.placement import clear_plan
from polyreme.mesh import Plan
from tests.distributed.auto_parallel import stages_worker

LIMIT = 240  # seconds, on a busy machine


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    plan = Plan.from_degrees(pp=2, dp=2, num_microbatches=2)
    try:
        want = stages_worker.train(plan, jax.devices()[:4])
    finally:
        clear_plan()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "CPU_NUM": "2",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_MASTER": f"127.0.0.1:{port}",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    words = [sys.executable, "-m", "tests.distributed.auto_parallel.stages_worker", json.dumps(plan.to_dict())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    jobs = [subprocess.Popen(words, env=env | {"PADDLE_TRAINER_ID": str(rank)}, **pipes) for rank in range(2)]
    try:
        outputs = [job.communicate(timeout=LIMIT) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for out, err in outputs:
        assert "RESULT" in out, err[-3000:]
        # the same programs; sums between processes may be taken in another order
        assert json.loads(out.split("RESULT", 1)[1]) == pytest.approx(want, rel=2.0**-23 * 1024)
