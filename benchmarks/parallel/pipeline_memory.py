"""Bytes that a device of each pipeline stage holds at the peak of a step, against what the schedule allows.

    python benchmarks/parallel/pipeline_memory.py [--save NAME]

A microbatch costs a chunk its inputs and what its backward needs besides parameters: both are read off the compiled
forward program (the sizes of its arguments and results on one device). The bound of a stage is the most of them that
its row of the schedule's table has between their F and their last task (B, or W where the backward is split); with one
chunk a stage that is peak_live microbatches. "held" is counted during a step on the arrays themselves, after every
task. Fails if a stage holds one byte more or less than its bound. Cotangents that wait for W ("stash") come on top in
split schedules, and values that have arrived for a task to come.
"""

import argparse
import collections
from typing import Any

import steps as s
from steps import jax, np, rng

from polyreme.distributed.pipeline.chunk import Chunk
from polyreme.distributed.pipeline.chunks import in_chunks
from polyreme.distributed.pipeline.run import Run
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.update import StagedUpdate
from polyreme.mesh import SCHEDULES
from polyreme.training.microbatches import cut

STAGES, MICROBATCHES, ROWS = 4, 8, 2
Most = collections.Counter[tuple[str, int]]


def on_one_device(arrays: Any) -> int:
    """Bytes of these arrays on a device, each counted once."""
    different = {id(a): a for a in arrays}.values()
    return sum(int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize for a in different)


class Watched(Run):
    """Notes the most that each stage holds."""

    def __init__(self, chunks: list[Chunk], *given: Any, stages: list[Any], most: Most, **how: Any) -> None:
        super().__init__(chunks, *given, **how)
        self.most = most
        self.at = [next(s for s, stage in enumerate(stages) if stage is chunk.stage) for chunk in chunks]

    def do(self, task: Any) -> None:
        """The task; then counts."""
        super().do(task)
        for stage in set(self.at):
            ours = {k for k, at in enumerate(self.at) if at == stage}
            kept = [done.saved for (k, _), done in self._done.items() if k in ours]
            arrived = [a for (k, _), flow in self._arrived.items() if k in ours for a in flow.arrays]
            waiting = [g for (k, _), gs in self._cotangents.items() if k in ours for g in gs if g is not None]
            self._note("held", stage, [a for one in kept for a in [*one.inputs, *one.residuals]])
            self._note("stash", stage, [a for one in kept for a in one.stash])
            self._note("arrived", stage, [*arrived, *waiting])

    def _note(self, what: str, stage: int, arrays: list[Any]) -> None:
        self.most[what, stage] = max(self.most[what, stage], on_one_device(arrays))


class WatchedPipeline(Pipeline):
    """A pipeline whose runs are watched; most: what was found in the last one."""

    most: Most

    def _run(self, chunks: Any, batch: Any, keys: Any, **how: Any) -> Run:
        self.most = collections.Counter()
        return Watched(chunks, batch, keys, **how, stages=list(self.layout.stages), most=self.most)


def of_a_microbatch(chunk: Chunk) -> int:
    """Bytes on a device that one microbatch costs a chunk, from its compiled forward."""
    (program,) = chunk._programs.values()
    here = [chunk._here(t) for t in program.read]
    key = jax.device_put(np.zeros(2, np.uint32), chunk.stage.replicated())
    inputs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at)
        for a, at in zip(program.example.arrays, program._input_layouts, strict=True)
    ]
    compiled = program._forward.lower([t._array for t in program.written], here, key, inputs).compile()
    chunk.end()
    *_, residuals = compiled.out_info
    *_, places = compiled.output_shardings
    both = [*zip(residuals, places, strict=True), *((a, a.sharding) for a in inputs)]
    return sum(int(np.prod(at.shard_shape(a.shape))) * a.dtype.itemsize for a, at in both)


def bound(schedule: Any, stage: int, costs: list[int]) -> int:
    """The most that a stage's row has between F and last task, a microbatch of chunk k at costs[k]."""
    live = most = 0
    for task in schedule.tables[stage]:
        live += costs[task.chunk] * ((task.kind == "F") - (task.kind == schedule.kinds[-1]))
        most = max(most, live)
    return most


def measure(name: str) -> list[tuple]:
    """The rows of a schedule."""
    plan = s.Plan.from_degrees(pp=STAGES, dp=2, schedule=name, num_microbatches=MICROBATCHES)
    s.clear_plan()
    rng.seed(3)
    model = s.GPT(s.GPTConfig.nano(num_layers=8, dropout=0.1))
    layers = in_chunks(model, plan)
    chunks = layers.get_model_chunks()
    layout = s.apply_plan(plan, layers, jax.devices()[: plan.mesh.size], chunks=chunks)
    pipeline = WatchedPipeline(chunks, [model.pipeline_loss], layout)
    optimizer = s.AdamW(1e-3, parameters=layers.parameters())
    tokens = np.random.default_rng(0).integers(0, 128, (ROWS * MICROBATCHES, 17))
    batch = cut([tokens[:, :-1], tokens[:, 1:]], MICROBATCHES, None)
    for _ in range(2):
        pipeline.train(batch, rng.default_generator.branches(MICROBATCHES))
        StagedUpdate(optimizer).step()
    costs = [of_a_microbatch(chunk) for chunk in pipeline._chunks(0)]
    schedule, rows = pipeline.schedule(MICROBATCHES), []
    moments = {n: t._array for n, t in optimizer.state_dict().items() if "_moment" in n}
    for stage in range(STAGES):
        devices = layout.stages[stage].mesh.devices.flat[0]
        here = [p for p in layers.parameters() if devices in p._array.sharding.device_set]
        allowed = bound(schedule, stage, costs)
        peaks = {what: most for (what, at), most in pipeline.most.items() if at == stage}
        if peaks["held"] != allowed:
            raise SystemExit(f"{name}, stage {stage}: held {peaks['held']} bytes, the schedule allows {allowed}")
        each = " + ".join(f"{costs[k]:,}" for k in schedule.chunks_of(stage))
        state = [a for a in moments.values() if devices in a.sharding.device_set]
        rows.append((
            name, stage, each, schedule.peak_live(stage), f"{allowed:,}", f"{peaks['held']:,}", f"{peaks['stash']:,}",
            f"{peaks['arrived']:,}", f"{on_one_device(p._array for p in here):,}",
            f"{on_one_device(state):,}",
        ))  # fmt: skip
    return rows


HEAD = (
    "schedule", "stage", "one microbatch", "peak live", "bound", "held", "stash", "arrived", "parameters",
    "optimizer state",
)  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    text = s.markdown([HEAD, *(row for name in SCHEDULES for row in measure(name))])
    print(text)
    if options.save:
        what = (
            f"GPT (nano, 8 layers, dropout), float32, {STAGES} stages of 2 virtual CPU devices, {MICROBATCHES} "
            f"microbatches of {ROWS} rows; AdamW. Bytes on one device. 'held' equals 'bound' in every row."
        )
        print(s.save(options.save, "Activations a pipeline stage holds", what, text))


if __name__ == "__main__":
    main()
