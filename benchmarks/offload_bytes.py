"""Bytes of a device with parameters, gradients, state and activations in host memory, compiled for a TPU v5e.

    python benchmarks/offload_bytes.py [LAYERS ...]

The TPU need not be here; takes libtpu. A GPT 1024 wide under `offload: {param: host, state: host, act: host}` and full
recompute is a program for each chunk's forward and backward. A program has in the device's memory its arguments (the
chunk's weights, what comes from its neighbour), its scratch and its results (gradients, what goes on); beside it there
may be the weights of the chunk that comes next and the gradients of the one that leaves.
"""

import sys
from pathlib import Path

import jax

from polyreme.recipes import config_file
from polyreme.recipes.planning.job import AbstractJob, devices_for, job_of

CONFIG = Path(__file__).parent.parent / "configs" / "gpt_kjv.yaml"
MODEL = {"hidden_size": 1024, "ffn_size": 4096, "num_heads": 8, "seq_len": 512}
ONE_DEVICE = {"dp": 1, "pp": 1, "mp": 1, "sharding": 1, "sharding_stage": 0}
OFFLOAD = {"offload": "{param: host, state: host, act: host}", "recompute": "full"}
ROWS = 2


def compiled(layers: int):
    """(bytes of all parameters, of each chunk's, {name: its program's memory analysis})."""
    values = {
        **{f"model.{name}": value for name, value in (MODEL | {"num_layers": layers}).items()},
        **{f"plan.{name}": value for name, value in (ONE_DEVICE | OFFLOAD).items()},
        "train.global_batch": ROWS,
        "train.accumulation": 1,
        "train.amp_level": "O0",
    }
    config = config_file.load(CONFIG, [f"{name}={value}" for name, value in values.items()]).config
    job = AbstractJob(job_of(config), config.parallel_plan, devices_for(config.parallel_plan, "v5e:2x2"))
    try:
        programs = {name: program.memory_analysis() for name, program in job.chunk_programs().items()}
        chunks = [sum(4 * p.size for p in chunk.parameters()) for chunk in job.planned.layers.get_model_chunks()]
        return sum(4 * p.size for p in job.model.parameters()), chunks, programs
    finally:
        job.close()


def main():
    """Print a row for each number of layers."""
    columns = ("parameters", "a chunk's", "program's most", "its arguments", "results", "shared", "scratch", "in all")
    print("layers", *(f"{column:>15}" for column in columns), " MiB")
    for layers in map(int, sys.argv[1:] or ("4", "12")):
        total, chunks, programs = compiled(layers)
        parts = {
            name: [getattr(m, f"{part}_size_in_bytes") for part in ("argument", "output", "alias", "temp")]
            for name, m in programs.items()
        }
        needs = {name: there + made - shared + scratch for name, (there, made, shared, scratch) in parts.items()}
        name = max(needs, key=lambda each: needs[each])
        # the weights that come next and the gradients that leave
        row = (total, max(chunks), needs[name], *parts[name], needs[name] + 2 * max(chunks))
        print(f"{layers:6}", *(f"{nbytes / 2**20:15.1f}" for nbytes in row), f" ({name})", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
