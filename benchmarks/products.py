"""Time the product of weight gradients, x^T y, as JAX writes it and with the transpose made first (rows_product).

    python benchmarks/products.py [--rounds 15] [--save NAME]

Processor milliseconds of one product, least of the rounds, forms alternating; XLA takes other kernels for the two. To
see a machine without AVX-512 on one that has it: XLA_FLAGS=--xla_cpu_max_isa=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 (the kernels
of the second form look at the processor itself and stay as they are).
"""

import argparse
import os
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import sides

from polyreme.kernels.linear import rows_product

SHAPES = [(2048, 256, 256), (2048, 256, 768), (2048, 256, 1024), (2048, 1024, 256), (256, 256, 8192), (64, 784, 100)]
"""(rows, width of x, width of y)."""


def cpu_seconds(run: Callable[[], jax.Array]) -> float:
    """Processor seconds of a call, all threads together."""
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    forms = [jax.jit(lambda x, y: x.T @ y), jax.jit(rows_product)]
    lines = ["| rows, x, y | x.T @ y, ms | rows_product, ms | ratio |", "|---|---|---|---|"]
    for rows, a, b in SHAPES:
        x, y = (jnp.asarray(rng.standard_normal((rows, n)).astype(np.float32)) for n in (a, b))
        times = [[cpu_seconds(lambda f=f, x=x, y=y: f(x, y)) for f in forms] for _ in range(options.rounds + 2)]
        plain, first = (1e3 * min(column) for column in zip(*times[2:], strict=True))
        lines.append(f"| {rows}, {a}, {b} | {plain:.2f} | {first:.2f} | {plain / first:.2f} |")
    print("\n".join(lines))
    if options.save:
        path = Path(__file__).resolve().parent / "results" / f"{options.save}.md"
        settings = " ".join(f"{k}={os.environ[k]}" for k in ("XLA_FLAGS", "ONEDNN_MAX_CPU_ISA") if os.environ.get(k))
        head = f"# Products of weight gradients, {date.today()}\n\nbenchmarks/products.py, {options.rounds} rounds; "
        path.write_text(
            f"{head}{sides.instruction_sets()}{'; ' if settings else ''}{settings}.\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
