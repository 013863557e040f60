"""fleet over two processes: each gives its share of the batch, and both train what one process trains."""

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np
from polyreme.core import rng
from polyreme.distributed import fleet
from polyreme.eager.tensor import to_tensor
from polyreme.nn import Linear
from polyreme.optimizer import AdamW

strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"sharding_degree": 2}
fleet.init(is_collective=True, strategy=strategy)
rank, number = fleet.rank(), fleet.worker_num()
rng.seed(1)
model = Linear(4, 2)
net = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(AdamW(0.1, parameters=model.parameters()))
data = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
for _ in range(3):
    loss = (net(to_tensor(data[rank * 8 // number : (rank + 1) * 8 // number])) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
place = fleet.get_hybrid_communicate_group().get_global_rank()
print("RESULT", rank, fleet.plan.mesh, place, fleet.util.all_reduce(rank + 1), repr(float(loss)), flush=True)
fleet.barrier_worker()
"""


def start(rank, number, port):
    variables = {
        "PADDLE_TRAINERS_NUM": str(number), "PADDLE_TRAINER_ID": str(rank), "PADDLE_MASTER": f"127.0.0.1:{port}",
        "CPU_NUM": str(4 // number), "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def results(number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [start(rank, number, port) for rank in range(number)]
    try:
        ended = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    texts = [out.decode() for out, _ in ended]
    for worker, (_, errors) in zip(workers, ended, strict=True):
        assert worker.returncode == 0, errors.decode()[-2000:]
    return [next(line for line in text.splitlines() if line.startswith("RESULT")).split() for text in texts]


@pytest.mark.slow
def test_two_processes_train_what_one_does():
    (alone,) = results(1)
    pair = results(2)
    # rank, mesh, index of the rank's first device, sum of rank + 1 over the workers
    assert alone[1:6] == ["0", "dp2", "sharding2", "0", "1"]
    assert [line[1:6] for line in pair] == [["0", "dp2", "sharding2", "0", "3"], ["1", "dp2", "sharding2", "2", "3"]]
    assert pair[0][6] == pair[1][6]
    # a mean of 16 float32 terms in another order
    assert float(pair[0][6]) == pytest.approx(float(alone[6]), rel=2.0**-23 * 16)
