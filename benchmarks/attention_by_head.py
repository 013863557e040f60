"""Time attention and its gradients on CPU, every batch entry and head at once against one after the other.

    python benchmarks/attention_by_head.py --save NAME

Shapes are [batch, seq, heads, head_dim], float32, in alternating rounds within one process. Per shape: median
milliseconds of the clock, milliseconds of processor time (all threads), scratch MiB, for both; and the ratio of the
clock's medians.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import sides as s

from polyreme.core.engine import backend
from polyreme.kernels import attention_blocked

SHAPES = (
    (8, 256, 8, 32),
    (8, 128, 8, 64),
    (16, 128, 12, 64),
    (32, 64, 8, 64),
    (1, 256, 8, 32),
    (2, 512, 12, 64),
    (2, 1024, 8, 64),
    (1, 2048, 4, 64),
    (1, 4096, 2, 128),
)


def step_of(shape: tuple[int, ...], causal: bool, by_head: bool) -> tuple:
    """-> (compiled result and gradients, its arguments)."""
    spec = attention_blocked.AttentionSpec(causal, shape[-1] ** -0.5, 0.0, by_head=by_head)

    def run(q, k, v, cotangent):
        out, pull = jax.vjp(lambda *a: attention_blocked.attention(spec, *a, None, None), q, k, v)
        return out, pull(cotangent)

    rng = np.random.default_rng(0)
    arrays = tuple(jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for _ in range(4))
    return jax.jit(run, compiler_options=backend.step_options()).lower(*arrays).compile(), arrays


def seconds(compiled, arrays, calls: int) -> tuple[float, float]:
    """Seconds of the clock and of the processor a call."""
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        result = compiled(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls, (time.process_time() - cpu) / calls


def row(shape: tuple[int, ...], causal: bool, rounds: int) -> str:
    """One shape's line of the table."""
    ways = [step_of(shape, causal, by_head) for by_head in (False, True)]
    for compiled, arrays in ways:
        seconds(compiled, arrays, 1)
    taken = [[seconds(*way, 2) for way in ways] for _ in range(rounds)]
    clock, cpu = ([statistics.median(t[i][j] for t in taken) * 1e3 for i in (0, 1)] for j in (0, 1))
    scratch = [compiled.memory_analysis().temp_size_in_bytes / 2**20 for compiled, _ in ways]
    numbers = " | ".join(f"{c:.1f} | {p:.1f} | {m:.1f}" for c, p, m in zip(clock, cpu, scratch, strict=True))
    return f"| {list(shape)} | {'causal' if causal else 'all keys'} | {numbers} | {clock[1] / clock[0]:.2f} |"


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    rows = [
        "| shape | | at once, ms | processor | scratch MiB | by head, ms | processor | scratch MiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        for causal in (True, False):
            rows.append(row(shape, causal, options.rounds))
            print(rows[-1], flush=True)
    if options.save:
        what = f"Result and gradients, float32. {options.rounds} rounds of 2 calls, alternating, in one process."
        print(s.save(options.save, "Attention by head", what, "\n".join(rows), []))


if __name__ == "__main__":
    main()
