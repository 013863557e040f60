"""Products of rows in groups (kernels.grouped_matmul) against lax.ragged_dot: time, memory, rows computed.

    python benchmarks/grouped.py [EXPERTS ...]

Sides run in turns; what is printed are medians of processor time, which other processes change less than the clock, and
their ratios. The ratio to ragged_dot cannot be above that of the one product, which has no groups.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import polyreme.core  # noqa: F401  (configures jax)
from polyreme.kernels import grouped_matmul
from polyreme.kernels.grouped import block_counts, matmul_blocks

CASES = [(8, 4096, 512, 1024), (16, 4096, 512, 1024), (64, 4096, 256, 512)]
ROUNDS = 9


def compiled(function, *args):
    """(program, MiB of its scratch memory)."""
    program = jax.jit(function).lower(*args).compile()
    return program, program.memory_analysis().temp_size_in_bytes / 2**20


def medians(programs, *args):
    """Milliseconds of processor time of each program, which run in turns."""
    times = [[] for _ in programs]
    for _ in range(ROUNDS + 1):
        for program, spent in zip(programs, times, strict=True):
            start = time.process_time()
            jax.block_until_ready(program(*args))
            spent.append(1e3 * (time.process_time() - start))
    return [statistics.median(spent[1:]) for spent in times]


def with_gradient(product, sizes):
    """Value and gradients of the sum of squares of a product."""
    return jax.value_and_grad(lambda rows, weights: (product(rows, weights, sizes) ** 2).sum(), (0, 1))


def on_sizes(product, sizes):
    """A product as a function of rows and weights."""
    return lambda rows, weights: product(rows, weights, sizes)


def main():
    """Print a line for each case, forward alone and with gradients."""
    print("experts  rows x in x out    what      ours ms  ragged_dot ms  ratio  one product ms  scratch ratio  rows")
    chosen = [int(word) for word in sys.argv[1:]]
    for experts, rows, ins, outs in (case for case in CASES if not chosen or case[0] in chosen):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((rows, ins)).astype(np.float32)
        weights = (rng.standard_normal((experts, ins, outs)) / np.sqrt(ins)).astype(np.float32)
        sizes = rng.multinomial(rows, [1 / experts] * experts).astype(np.int32)
        blocks = matmul_blocks(rows, experts)
        counts = block_counts(sizes, blocks)
        executed = sum(block * count.sum() for block, count in zip(blocks, counts, strict=True)) / rows
        sides = (grouped_matmul, jax.lax.ragged_dot)
        forward = [on_sizes(product, jnp.asarray(sizes)) for product in sides]
        whole = [with_gradient(product, jnp.asarray(sizes)) for product in sides]
        dense = [lambda x, w: x @ w[0], jax.value_and_grad(lambda x, w: ((x @ w[0]) ** 2).sum(), (0, 1))]
        for what, (ours, theirs), one in (("forward", forward, dense[0]), ("both", whole, dense[1])):
            programs = [compiled(f, x, weights) for f in (ours, theirs, one)]
            mine, ragged, single = medians([p for p, _ in programs], x, weights)
            scratch = programs[0][1] / programs[1][1]
            print(
                f"{experts:7}  {rows:4} x {ins:3} x {outs:4}  {what:8}  {mine:7.1f}  {ragged:13.1f}  "
                f"{ragged / mine:5.1f}  {single:14.1f}  {scratch:13.2f}  {executed:.2f}"
            )


if __name__ == "__main__":
    main()
