"""Causal ring attention in zigzag order against the same with a run of tokens on each device.

    python benchmarks/parallel/zigzag.py [--devices 2] [--tokens 4096] [--rounds 21] [--save NAME]

Forward with backward, float32, one batch entry, 4 heads of 64; as many single-threaded virtual CPU devices as said, one
core for each. Both sides are compiled, checked to be equal, and take turns.
"""

import argparse
import os
import statistics
import sys
import time
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--devices", type=int, default=2)
PARSER.add_argument("--tokens", type=int, default=4096)
PARSER.add_argument("--rounds", type=int, default=21)
PARSER.add_argument("--save", default="")
ARGS = PARSER.parse_args()
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={ARGS.devices} "
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import sides  # noqa: E402
from busiest import spent_since, thread_seconds  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402

from polyreme.core.engine import backend  # noqa: E402
from polyreme.kernels import into_zigzag, ring_attention  # noqa: E402
from polyreme.kernels.ring_attention import Split  # noqa: E402

HEADS, WIDTH, GOAL = 4, 64, 1.3
SIDES = ("contiguous", "zigzag")
WHAT = ("wall time", "processor time of the busiest device", "processor time of all devices")


def inputs(mesh: Mesh, side: str) -> list[jax.Array]:
    """q, k, v and the gradient of the result, laid out over the mesh in the side's order."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, ARGS.tokens, HEADS, WIDTH)).astype(np.float32) for _ in range(4)]
    if side == "zigzag":
        arrays = [np.asarray(into_zigzag(jnp.asarray(x), ARGS.devices, 1)) for x in arrays]
    return [jax.device_put(x, NamedSharding(mesh, split(mesh, side).spec)) for x in arrays]


def split(mesh: Mesh, side: str) -> Split:
    """The sequence over all devices."""
    return Split(mesh, (), ("sep",), (), zigzag=side == "zigzag")


def compiled(mesh: Mesh, side: str):
    """A program of the inputs that gives the result and the gradients."""

    def run(q, k, v, ct):
        out, pull = jax.vjp(lambda *a: ring_attention(*a, split=split(mesh, side), causal=True), q, k, v)
        return out, *pull(ct)

    return jax.jit(run, compiler_options=backend.step_options()).lower(*inputs(mesh, side)).compile()


def seconds(run, arrays) -> tuple[float, float, float]:
    """Of one call: wall time, processor time of the busiest device, and of all."""
    before, start = thread_seconds(), time.perf_counter()
    jax.block_until_ready(run(*arrays))
    wall, busy = time.perf_counter() - start, spent_since(before)
    return wall, max(busy), sum(busy)


def check_equal(results: dict[str, tuple]) -> None:
    """Raise AssertionError if the sides differ by more than rounding."""
    for want, got in zip(results["contiguous"], results["zigzag"], strict=True):
        want = np.asarray(into_zigzag(jnp.asarray(np.asarray(want)), ARGS.devices, 1))
        # sums of as many terms as tokens, of size up to 4
        assert np.abs(np.asarray(got) - want).max() <= 4 * ARGS.tokens * np.finfo(np.float32).eps


def report() -> str:
    """The page."""
    mesh = Mesh(np.array(jax.devices()), ("sep",))
    waiting = [os.getloadavg()[0]]
    cases = {side: (compiled(mesh, side), inputs(mesh, side)) for side in SIDES}
    check_equal({side: run(*arrays) for side, (run, arrays) in cases.items()})
    rounds = [{side: seconds(*case) for side, case in cases.items()} for _ in range(ARGS.rounds)]
    waiting.append(os.getloadavg()[0])
    ratios = [
        sorted(times["contiguous"][what] / times["zigzag"][what] for times in rounds) for what in range(len(WHAT))
    ]
    ways = ARGS.devices
    lines = [
        f"# Ring attention in zigzag order, {date.today()}",
        "",
        f"benchmarks/parallel/zigzag.py: {ways} single-threaded devices, {ARGS.tokens} tokens, {HEADS} heads of "
        f"{WIDTH}, causal, forward and backward, float32; {ARGS.rounds} rounds, medians.",
        f"Processes waiting for one of {os.cpu_count()} cores before and after: {waiting[0]:.1f}, {waiting[1]:.1f}.",
        "",
        "Processor time of the busiest device is what a step takes where every device has a core of its own.",
        "",
        f"| order | {' | '.join(f'{what}, ms' for what in WHAT)} | pairs of the busiest device over the mean |",
        f"|{'---|' * (len(WHAT) + 2)}",
    ]
    for side, busiest in zip(SIDES, ((2 * ways - 1) / ways, 1.0), strict=True):
        columns = zip(*(each[side] for each in rounds), strict=True)
        times = " | ".join(f"{1e3 * statistics.median(column):.0f}" for column in columns)
        lines.append(f"| {side} | {times} | {busiest:.2f} |")
    told = [
        f"{what} {statistics.median(r):.2f} ({r[0]:.2f} to {r[-1]:.2f})" for what, r in zip(WHAT, ratios, strict=True)
    ]
    goal = f"by the pairs {(2 * ways - 1) / ways:.2f}, goal {GOAL} on 2 devices"
    return "\n".join([*lines, "", f"Contiguous over zigzag, median of the rounds: {'; '.join(told)}; {goal}.", ""])


if __name__ == "__main__":
    page = report()
    print(page)
    if ARGS.save:
        (sides.RESULTS / f"{ARGS.save}.md").write_text(page)
