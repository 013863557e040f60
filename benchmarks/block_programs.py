"""A step as one program, or as a program for each part of the model (Plan.compile), by the model's blocks.

    python benchmarks/block_programs.py [--blocks 4 16] [--width 256] [--rows 8] [--dropout 0] [--rounds 8]

A GPT under AdamW on one CPU device. Per side: processor seconds until the first loss, with no program kept
from earlier runs, those of a step (median), and the most memory that the process took. Each side is a process of its
own, and for each number of blocks the sides take turns step by step. Losses must agree.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

ROWS, SEQ, VOCAB = 8, 128, 4096


def build(side):
    """A side's cases: {"BLOCKS": a step} of the sizes in the environment."""
    import jax
    import numpy as np

    from polyreme.core import rng
    from polyreme.distributed.planned_step import PlannedStep
    from polyreme.mesh import Plan
    from polyreme.models.decoders.gpt import GPT, GPTConfig
    from polyreme.optimizer import AdamW
    from polyreme.training import StepPolicy

    blocks, width, rows = (int(os.environ[f"BENCH_{name}"]) for name in ("BLOCKS", "WIDTH", "ROWS"))
    rng.seed(3)
    sizes = GPTConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        num_layers=blocks,
        num_heads=8,
        seq_len=SEQ,
        dropout=float(os.environ["BENCH_DROPOUT"]),
    )
    step = PlannedStep(
        GPT(sizes),
        Plan.from_degrees(compile=side),
        lambda model: AdamW(1e-3, parameters=model.parameters()),
        StepPolicy(),
        jax.devices()[:1],
    )
    ids = np.random.default_rng(0).integers(0, VOCAB, (rows, SEQ + 1))
    return lambda: float(step(ids[:, :-1], ids[:, 1:]).loss)


def work(side):
    """A side's process: a line of numbers for each line that it reads."""
    run = build(side)
    for _ in sys.stdin:
        begin = time.process_time()
        loss = run()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(loss, time.process_time() - begin, peak, flush=True)


def main():
    """Print a row for each number of blocks and side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    print(
        "| blocks | compiled | to the first loss, CPU s | a step, CPU s | MiB | loss |\n|---:|---|---:|---:|---:|---:|"
    )
    for blocks in options.blocks:
        sizes = {"BENCH_BLOCKS": blocks, "BENCH_WIDTH": options.width, "BENCH_ROWS": options.rows}
        sizes["BENCH_DROPOUT"] = options.dropout
        environment = os.environ | {name: str(value) for name, value in sizes.items()}
        environment |= {"CPU_NUM": "1", "POLYREME_COMPILE_CACHE": "0"}
        sides = {
            side: subprocess.Popen(
                [sys.executable, __file__, "--side", side],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for side in ("step", "blocks")
        }
        told = {side: [] for side in sides}
        for _ in range(1 + options.rounds):
            for side, process in sides.items():
                process.stdin.write("\n")
                process.stdin.flush()
                told[side].append([float(value) for value in process.stdout.readline().split()])
        for side, process in sides.items():
            process.stdin.close()
            process.wait()
            first, *others = told[side]
            step = statistics.median(seconds for _, seconds, _ in others)
            loss, _, peak = others[-1]
            print(f"| {blocks} | {side} | {first[1]:.1f} | {step:.3f} | {peak:.0f} | {loss:.5f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        work(sys.argv[2])
    else:
        main()
