"""A step of two tasks, 3 to 1, on two single-threaded devices: rows split by TaskPlan against a task on each device.

    python benchmarks/parallel/task_split.py [--rounds 9] [--rows 2048] [--sharding-stage 0]

Where each device has a task of its own, the lighter one is filled up with rows that no expert takes and no loss counts,
as one program on all devices needs; the step lasts as long as the heavier task. Both sides train on the same rows, with
equal losses, and take turns. On two free cores the ratio can reach 1.5; on busy ones the processor time of the busiest
thread is what the step would take on cores of its own, but for waiting.
"""

import argparse
import os
import statistics
import time

os.environ["CPU_NUM"] = "2"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import jax
import numpy as np
from busiest import spent_since, thread_seconds

import polyreme as pr
from polyreme import nn
from polyreme.core import layout as layouts
from polyreme.distributed import TaskPlan
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.mesh import Plan
from polyreme.optimizer import SGD
from polyreme.training import StepPolicy

WIDTH, EXPERTS = 512, 8


class Net(nn.Layer):
    """Two dense layers and a layer of experts of which each task has half."""

    def __init__(self, tasks: TaskPlan) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.experts = nn.MoE(WIDTH, 2 * WIDTH, EXPERTS)
        allowed = tasks.allowed({"heavy": range(4), "light": range(4, 8)}, EXPERTS)
        self.register_buffer("allowed", pr.concat([allowed, pr.zeros([1, EXPERTS], "bool")]))

    def forward(self, rows, y):
        """The mean square error of rows with a task of at least 0."""
        x, task = rows
        x = x + self.second(nn.functional.gelu(self.first(x)))
        out, _ = self.experts(x, self.allowed[task])
        counts = (task >= 0).astype("float32")
        return (((out - y) ** 2).mean(-1) * counts).sum() / counts.sum()


def batches(tasks: TaskPlan) -> dict[str, tuple[np.ndarray, ...]]:
    """x, task and y of the same rows, as TaskPlan lays them and with a device for each task."""
    rng = np.random.default_rng(0)
    heavy, light = tasks.rows.values()
    x, y = rng.standard_normal((2, heavy + light, WIDTH), np.float32)
    task = np.repeat(np.arange(2, dtype=np.int32), (heavy, light))
    fill = ((0, heavy - light), (0, 0))
    alone = np.pad(x, fill), np.pad(task, fill[0], constant_values=-1), np.pad(y, fill)
    return {"a device for each task": alone, "TaskPlan": (x, task, y)}


def step_on(batch: tuple[np.ndarray, ...], tasks: TaskPlan, plan: Plan):
    """One training step on this batch, which returns its loss."""
    clear_plan()
    pr.seed(0)
    model = Net(tasks)

    def sgd(model):
        return SGD(1e-3, parameters=model.parameters())

    train = PlannedStep(model, plan, sgd, StepPolicy(), jax.devices()[:2])

    def step() -> float:
        layouts.active.layout = train.layout
        x, task, y = batch
        loss = train((x, task), y).loss
        jax.block_until_ready([p._array for p in model.parameters()])
        return float(loss)

    return step


def main() -> None:
    """Print medians, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=2048, help="of a batch, both tasks together")
    parser.add_argument("--sharding-stage", type=int, default=0, help="devices hold parts of the update; 0: all of it")
    options = parser.parse_args()
    stage = options.sharding_stage
    plan = Plan.from_degrees(sharding=2, sharding_stage=stage) if stage else Plan.from_degrees(dp=2)
    tasks = TaskPlan({"heavy": options.rows * 3 // 4, "light": options.rows // 4}, devices=2)
    sides = {name: step_on(batch, tasks, plan) for name, batch in batches(tasks).items()}
    losses = [[step() for step in sides.values()] for _ in range(2)]
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-5)
    times = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, step in sides.items():
            before, start = thread_seconds(), time.perf_counter()
            step()
            wall, busy = time.perf_counter() - start, spent_since(before)
            times[name].append((wall, max(busy), sum(busy)))
    columns = ("clock", "busiest thread", "all threads")
    medians = {name: [statistics.median(column) for column in zip(*t, strict=True)] for name, t in times.items()}
    print(" " * 24, *(f"{column:>18}" for column in columns))
    for name, seconds in medians.items():
        print(f"{name:24}", *(f"{1e3 * s:15.1f} ms" for s in seconds))
    print(f"{'ratio':24}", *(f"{alone / split:18.2f}" for alone, split in zip(*medians.values(), strict=True)))


if __name__ == "__main__":
    main()
