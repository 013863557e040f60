"""Pointwise convolutions, channels first, on CPU: as products, as polyreme computes them, and as XLA's.

    python benchmarks/pointwise_convolution.py

prints, alone and with both gradients, processor seconds of compiling and the least milliseconds of a call, in turns.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.ops.windows.convolution import _by_places

SHAPES = (
    (16, 64, 64, 56),
    (16, 64, 256, 56),
    (16, 256, 64, 28),
    (16, 480, 80, 14),
    (32, 16, 96, 32),
    # here a product for all images: the weights for each image would be more numbers than the images
    (32, 960, 160, 7),
    (16, 512, 2048, 7),
    (2, 2048, 512, 2),
)
"""Images, channels, results' channels, side."""
ROUNDS = 15


def by_xla(x: jax.Array, weight: jax.Array) -> jax.Array:
    """XLA's convolution of the same."""
    return jax.lax.conv_general_dilated(x, weight, (1, 1), [(0, 0)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW"))


def with_gradients(convolve):
    """(x, weight, cotangent) -> the result and both gradients."""

    def fn(x, weight, cotangent):
        y, pull = jax.vjp(convolve, x, weight)
        return y, *pull(cotangent)

    return fn


def compare(sides, arrays):
    """Processor seconds of compiling each side for the arrays, and the least milliseconds of its calls, in turns."""
    programs, compiling = [], []
    for side in sides:
        lowered, start = jax.jit(side).lower(*arrays), time.process_time()
        programs.append(lowered.compile())
        compiling.append(time.process_time() - start)
    least = [float("inf")] * len(sides)
    for _ in range(ROUNDS):
        for i, program in enumerate(programs):
            start = time.process_time()
            jax.block_until_ready(program(*arrays))
            least[i] = min(least[i], time.process_time() - start)
    return compiling, [1e3 * seconds for seconds in least]


def main() -> None:
    """Measure and print."""
    rng = np.random.default_rng(0)
    heads = ("images, channels, side", "", "XLA compiles, s", "products, s", "XLA, ms", "products, ms", "ratio")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for images, ins, outs, side in SHAPES:
        x, dy = (jnp.asarray(rng.standard_normal((images, c, side, side)), jnp.float32) for c in (ins, outs))
        weight = jnp.asarray(rng.standard_normal((outs, ins, 1, 1)), jnp.float32)
        for what, wrap, arrays in (("alone", lambda f: f, (x, weight)), ("gradients", with_gradients, (x, weight, dy))):
            compiling, (old, new) = compare([wrap(by_xla), wrap(_by_places)], arrays)
            name = f"{images}, {ins} to {outs}, {side} | {what} | {compiling[0]:.3f} | {compiling[1]:.3f}"
            print(f"| {name} | {old:.1f} | {new:.1f} | {old / new:.1f} |", flush=True)


if __name__ == "__main__":
    main()
