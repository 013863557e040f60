"""What the pipeline runtime adds to a task: many tiny stages, every schedule, microseconds a task.

    python benchmarks/parallel/pipeline_overhead.py [--rounds 20] [--save NAME]

8 stages of one device and 16 microbatches; a chunk is a 4 x 4 product and a bias, so nearly all time is overhead: of
the loop, of dispatch, of the transfer between stages. "wall" is from the call of train() until every gradient is there,
"loop" the processor time of the thread that walks the table; both over the number of tasks. "bare" is the processor
time of the same thread for one call of a compiled program of that size, on arrays that are already in place.
"""

import argparse
import statistics
import time

import steps as s
from steps import jax, np, rng

from polyreme import nn
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.mesh import SCHEDULES
from polyreme.training.microbatches import cut

STAGES, MICROBATCHES = 8, 16
TARGET = 150.0


class Side:
    """A pipeline of tiny chunks under one schedule."""

    def __init__(self, schedule: str) -> None:
        plan = s.Plan.from_degrees(pp=STAGES, schedule=schedule, num_microbatches=MICROBATCHES)
        is_v = plan.schedule_kind.is_v
        s.clear_plan()
        layers = PipelineLayer(
            [nn.Linear(4, 4) for _ in plan.stage_of_chunk],
            num_stages=STAGES,
            num_virtual_pipeline_stages=None if is_v else plan.virtual_stages,
            use_dualpipev=is_v,
        )
        chunks = layers.get_model_chunks()
        self.layout = s.apply_plan(plan, layers, jax.devices()[:STAGES], chunks=chunks)
        self.pipeline = Pipeline(chunks, [lambda out, y: (out - y).square().mean()], self.layout)
        self.parameters = layers.parameters()
        data = np.random.default_rng(0).standard_normal((2 * MICROBATCHES, 4)).astype(np.float32)
        self.batch = cut([data, data], MICROBATCHES, None)
        self.tasks = sum(map(len, self.pipeline.schedule(MICROBATCHES).tables))

    def __call__(self) -> tuple[float, float]:
        """One batch -> microseconds a task: wall, of the thread's processor time."""
        s.layouts.active.layout = self.layout
        for p in self.parameters:
            p.clear_grad()
        keys = rng.default_generator.branches(MICROBATCHES)
        jax.block_until_ready(keys)
        wall, thread_seconds = time.perf_counter(), time.thread_time()
        self.pipeline.train(self.batch, keys)
        thread_seconds = time.thread_time() - thread_seconds
        jax.block_until_ready([p.grad._array for p in self.parameters])
        wall = time.perf_counter() - wall
        return wall / self.tasks * 1e6, thread_seconds / self.tasks * 1e6


def bare(calls: int = 400) -> float:
    """Microseconds of processor time that one call of a compiled program of this size costs."""

    @jax.jit
    def run(w: jax.Array, b: jax.Array, x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return x @ w + b, w + x.T @ g, b + g.sum(0)

    w, b, x = np.ones((4, 4), np.float32), np.ones(4, np.float32), np.ones((2, 4), np.float32)
    arrays = jax.device_put([w, b, x, x], jax.devices()[1])
    outputs = jax.block_until_ready(run(*arrays))
    thread_seconds = time.thread_time()
    for _ in range(calls):
        outputs = run(*arrays)
    thread_seconds = time.thread_time() - thread_seconds
    jax.block_until_ready(outputs)
    return thread_seconds / calls * 1e6


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    sides = {schedule: Side(schedule) for schedule in SCHEDULES}
    for side in sides.values():
        side()
        side()  # the second call is the first that compiles nothing
    times_of: dict[str, list[tuple[float, float]]] = {schedule: [] for schedule in sides}
    alone = []
    for _ in range(options.rounds):
        for schedule, side in sides.items():
            times_of[schedule].append(side())
        alone.append(bare())
    rows: list[tuple] = [("schedule", "tasks", "wall, median", "least", "loop, median", "least", "bare, median")]
    for schedule, times in times_of.items():
        wall, own = zip(*times, strict=True)
        cells = [f"{v:.0f}" for v in (statistics.median(wall), min(wall), statistics.median(own), min(own))]
        rows.append((schedule, sides[schedule].tasks, *cells, f"{statistics.median(alone):.0f}"))
    text = s.markdown(rows)
    print(text)
    worst = max(statistics.median([wall for wall, _ in times]) for times in times_of.values())
    verdict = f"Most of any schedule: {worst:.0f} us of wall time a task; the target is below {TARGET:.0f}."
    print(verdict)
    if options.save:
        what = (
            f"{STAGES} stages of one virtual CPU device, {MICROBATCHES} microbatches of 2 rows, chunks of one 4 x 4 "
            f"Linear; microseconds a task. {options.rounds} rounds, schedules alternating."
        )
        print(s.save(options.save, "Overhead of the pipeline runtime", what, f"{text}\n\n{verdict}"))


if __name__ == "__main__":
    main()
