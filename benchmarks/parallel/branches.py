"""A training step of an Evoformer block on one single-threaded device, and with MSA and pairs on a device each.

    python benchmarks/parallel/branches.py [--rounds 7] [--save NAME]

A side is a process of its own with as many threads as devices; both recompute, have equal losses, and take turns. With
fewer free cores than devices the clock shows less than there is; the processor time of the busiest thread is what the
step would take on cores of its own, but for waiting. Published, on GPUs and of whole steps: 1.37 and 1.39
(arXiv:2211.00235).
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from busiest import spent_since, thread_seconds

import polyreme as pr
from polyreme.core import layout as layouts
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.models.encoders.evoformer import EvoformerConfig, EvoformerStack

GOAL = 1.30
DEVICES = {"bp1": 1, "bp2": 2}
ROWS, RESIDUES = 32, 64
WIDTHS = {"msa_width": 128, "pair_width": 64, "msa_heads": 4, "triangle_width": 64, "outer_width": 16}


def step_under(plan: Plan):
    """A training step under a plan, which returns its loss."""
    clear_plan()
    pr.seed(0)
    config = EvoformerConfig(
        num_layers=1, outer_product_mean="end", recompute="full", msa_dropout=0.0, pair_dropout=0.0, **WIDTHS
    )
    stack = EvoformerStack(config)
    rng = np.random.default_rng(0)
    for p in stack.parameters():
        p.set_value(rng.standard_normal(p.shape, np.float32) * 0.1)
    sizes = (1, ROWS, RESIDUES, config.msa_width), (1, RESIDUES, RESIDUES, config.pair_width)
    msa, pair = (rng.standard_normal(size, np.float32) for size in sizes)
    placed = apply_plan(plan, stack, jax.devices()[: plan.mesh.size])
    msa, pair = (pr.to_tensor(jax.device_put(a, placed.replicated())) for a in (msa, pair))

    @to_static
    def train(msa, pair):
        stack.clear_gradients()
        out = stack(msa, pair)
        loss = (out[0] * out[0]).mean() + (out[1] * out[1]).mean()
        loss.backward()
        return loss

    def step() -> float:
        layouts.active.layout = placed
        loss = train(msa, pair)
        jax.block_until_ready([p.grad._array for p in stack.parameters()])
        return float(loss)

    return step


def work(devices: int) -> None:
    """A side's process: for each line that it reads, one step; answers with its loss, seconds, and processor seconds of
    the busiest thread and of all."""
    plan = Plan() if devices == 1 else Plan.from_degrees(mp=devices, branch_axis="mp")
    step = step_under(plan)
    for _ in sys.stdin:
        before, start = thread_seconds(), time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        spent = spent_since(before)
        sys.stdout.write(f"{loss} {seconds} {max(spent)} {sum(spent)}\n")
        sys.stdout.flush()


def start_side(devices: int) -> subprocess.Popen:
    """A process with so many devices, and as many threads."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    settings = {"CPU_NUM": str(devices), "NPROC": str(devices), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--side", str(devices)]
    return subprocess.Popen(
        command, env=os.environ | settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    """Print, and save, medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", help="file for the table")
    options = parser.parse_args()
    sides = {name: start_side(devices) for name, devices in DEVICES.items()}
    measured: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(2 + options.rounds):
        for name, side in sides.items():
            assert side.stdin is not None
            assert side.stdout is not None
            side.stdin.write("step\n")
            side.stdin.flush()
            measured[name].append([float(number) for number in side.stdout.readline().split()])
    for side in sides.values():
        side.communicate()
    losses = [rounds[0][0] for rounds in measured.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    medians = {
        name: [1e3 * statistics.median(column) for column in list(zip(*rounds[2:], strict=True))[1:]]
        for name, rounds in measured.items()
    }
    ratios = [one / two for one, two in zip(*medians.values(), strict=True)]
    lines = [
        f"{options.rounds} rounds, medians; processes waiting for a core at the end: {os.getloadavg()[0]:.1f}",
        "",
        "| | clock, ms | processor time of the busiest thread, ms | of all threads, ms |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {' | '.join(f'{ms:.0f}' for ms in columns)} |" for name, columns in medians.items()),
        f"| bp1 / bp2 (goal: {GOAL:.2f}) | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |",
    ]
    text = "\n".join(lines)
    sys.stdout.write(text + "\n")
    if options.save:
        Path(options.save).write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        work(int(sys.argv[2]))
    else:
        main()
