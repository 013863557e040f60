"""Time and memory of flashmask_attention: by how much of the mask is seen, and against attention with the mask whole.

    python benchmarks/flashmask.py [--rounds 7] [--save NAME]

Forward with backward unless said, float32, one batch entry, 4 heads of 64, both sides compiled and taking turns.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import sides

import polyreme as paddle
from polyreme.eager.tensor import Tensor
from polyreme.kernels.columns import BLOCK
from polyreme.nn import functional as F

HEADS, WIDTH = 4, 64
SPARSITY_TOKENS, LONG, SHORT = 4096, 8192, 4096
DOCUMENTS = (1, 2, 3, 4, 6, 8, 12, 16)
GOAL_FIT, GOAL_RATIO, GOAL_GROWTH = 0.98, 1.65, 2.2

Compiled = Callable[..., object]


def document_ends(tokens: int, documents: int) -> np.ndarray:
    """startend_row_indices of so many documents of about one length, [1, 1, tokens, 1], to be used with causal."""
    cuts = np.linspace(0, tokens, documents + 1).astype(np.int32)
    return np.repeat(cuts[1:], np.diff(cuts)).reshape(1, 1, tokens, 1)


def seen_share(ends: np.ndarray) -> float:
    """The share of blocks of BLOCK queries and BLOCK keys that hold a pair that is seen."""
    tokens = ends.shape[2]
    blocks = tokens // BLOCK
    last = ends.reshape(blocks, BLOCK).max(1)
    first_row = np.arange(blocks) * BLOCK
    live = (first_row[:, None] < last) & (np.arange(blocks)[:, None] >= np.arange(blocks))
    return float(live.mean())


def by_columns(x: Tensor, ends: Tensor) -> Tensor:
    """The side that is measured."""
    return F.flashmask_attention(x, x, x, ends, causal=True)


def by_whole_mask(x: Tensor, ends: Tensor) -> Tensor:
    """The same attention with every pair's mask in one array."""
    row = paddle.arange(x.shape[1], dtype="int32").reshape([1, 1, -1, 1])
    column = paddle.arange(x.shape[1], dtype="int32").reshape([1, 1, 1, -1])
    mask = (row >= column) & (row < ends.transpose([0, 1, 3, 2]))
    return F.scaled_dot_product_attention(x, x, x, mask)


def compiled(call: Callable[[Tensor, Tensor], Tensor], tokens: int, backward: bool = True) -> Compiled:
    """A program of (x, ends) that gives the output, and the gradient of its sum."""

    def run(x: jax.Array, ends: jax.Array) -> tuple[jax.Array, ...]:
        tensor = Tensor(x, stop_gradient=not backward)
        out = call(tensor, Tensor(ends))
        return (out._array, paddle.grad([out.sum()], [tensor])[0]._array) if backward else (out._array,)

    x = jax.ShapeDtypeStruct((1, tokens, HEADS, WIDTH), jnp.float32)
    return jax.jit(run).lower(x, jax.ShapeDtypeStruct((1, 1, tokens, 1), jnp.int32)).compile()


def seconds(run: Compiled, *arrays: jax.Array) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    return time.perf_counter() - start


def medians(cases: Sequence[tuple[Compiled, tuple]], rounds: int) -> list[float]:
    """Median seconds of each case, all taking turns, after two rounds that warm up."""
    times = [[seconds(run, *arrays) for run, arrays in cases] for _ in range(rounds + 2)]
    return [statistics.median(column) for column in zip(*times[2:], strict=True)]


def against_sparsity(rounds: int) -> list[str]:
    """Time against the share of blocks that are seen, with a line through it."""
    x = data(SPARSITY_TOKENS)
    masks = [document_ends(SPARSITY_TOKENS, count) for count in DOCUMENTS]
    run = compiled(by_columns, SPARSITY_TOKENS)
    times = medians([(run, (x, jnp.asarray(mask))) for mask in masks], rounds)
    shares = [seen_share(mask) for mask in masks]
    slope, constant = np.polyfit(shares, times, 1)
    fitted = slope * np.array(shares) + constant
    fit = 1 - np.sum((times - fitted) ** 2) / np.sum((times - np.mean(times)) ** 2)
    lines = [f"## Time by blocks seen, {SPARSITY_TOKENS} tokens, causal documents", ""]
    lines += ["| documents | blocks seen | ms | line, ms |", "|---|---|---|---|"]
    for count, share, spent, line in zip(DOCUMENTS, shares, times, fitted, strict=True):
        lines.append(f"| {count} | {share:.1%} | {1e3 * spent:.1f} | {1e3 * line:.1f} |")
    told = f"{1e3 * constant:.1f} ms and {1e3 * slope:.0f} ms for all blocks; R2 {fit:.4f}"
    return [*lines, "", f"Line: {told} (goal: {GOAL_FIT} at least)."]


def against_whole_mask(rounds: int) -> list[str]:
    """Both sides at the long length."""
    x = data(LONG)
    lines = [f"## Against a whole mask, {LONG} tokens, causal documents", ""]
    lines += ["| documents | pass | by columns, ms | whole mask, ms | ratio |", "|---|---|---|---|---|"]
    for backward in (False, True):
        runs = [compiled(side, LONG, backward) for side in (by_columns, by_whole_mask)]
        for documents in (1, 4, 16):
            ends = jnp.asarray(document_ends(LONG, documents))
            check_equal(runs, x, ends)
            columns, whole = medians([(run, (x, ends)) for run in runs], rounds)
            what = "forward and backward" if backward else "forward"
            lines.append(f"| {documents} | {what} | {1e3 * columns:.0f} | {1e3 * whole:.0f} | {whole / columns:.2f} |")
    return [*lines, "", f"Goal: {GOAL_RATIO} at least for documents."]


def check_equal(runs: Sequence[Compiled], x: jax.Array, ends: jax.Array) -> None:
    """Refuses sides that do not compute the same."""
    ours, theirs = (run(x, ends) for run in runs)
    for a, b in zip(ours, theirs, strict=True):
        apart, largest = float(jnp.abs(a - b).max()), float(jnp.abs(b).max())
        # sums of up to LONG terms in another order
        if apart > 8 * np.finfo(np.float32).eps * np.sqrt(LONG) * max(1, largest):
            raise SystemExit(f"the sides are {apart} apart, of values up to {largest}")


def scratch() -> list[str]:
    """Scratch bytes of the compiled programs at two lengths."""
    lines = ["## Scratch memory of the compiled program, forward and backward", ""]
    lines += [f"| side | {SHORT} tokens, MiB | {LONG} tokens, MiB | growth |", "|---|---|---|---|"]
    for name, side in (("by columns", by_columns), ("whole mask", by_whole_mask)):
        sizes = [compiled(side, n).memory_analysis().temp_size_in_bytes / 2**20 for n in (SHORT, LONG)]
        lines.append(f"| {name} | {sizes[0]:.1f} | {sizes[1]:.1f} | {sizes[1] / sizes[0]:.2f} |")
    return [*lines, "", f"Goal: by columns it doubles, {GOAL_GROWTH} at most."]


def data(tokens: int) -> jax.Array:
    """Queries, keys and values at once."""
    return jnp.asarray(np.random.default_rng(0).standard_normal((1, tokens, HEADS, WIDTH)), jnp.float32)


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    parts = [scratch(), against_sparsity(options.rounds), against_whole_mask(options.rounds)]
    text = "\n\n".join("\n".join(part) for part in parts)
    print(text)
    if options.save:
        what = (
            f"benchmarks/flashmask.py, {options.rounds} rounds, medians; {HEADS} heads of {WIDTH}, float32; processes "
            f"waiting for a core before and after: {before:.1f}, {os.getloadavg()[0]:.1f}, this one among them."
        )
        sides.save(options.save, "flashmask_attention", what, text, [])


if __name__ == "__main__":
    main()
