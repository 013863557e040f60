"""Gradients of depthwise convolutions on CPU, channels first: by jax from the result's sum, and by rules of their own.

    python benchmarks/depthwise_convolution.py

prints, of both gradients, processor seconds of compiling and the least milliseconds of a call, in turns.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pointwise_convolution

from polyreme.ops.windows.depthwise import Windows, depthwise

SHAPES = (
    (2, 72, 16, 3, 2),
    (2, 88, 8, 3, 1),
    (2, 96, 8, 5, 2),
    (2, 120, 4, 5, 1),
    (8, 96, 56, 3, 1),
    (8, 144, 28, 5, 2),
    (32, 192, 14, 7, 1),
)
"""Images, channels, side, the window's side, stride."""


def gradients(convolve):
    """(x, weight, cotangent) -> both gradients."""
    return lambda x, weight, dy: jax.vjp(convolve, x, weight)[1](dy)


def main() -> None:
    """Measure and print."""
    rng = np.random.default_rng(0)
    heads = ("images, channels, side, window, stride", "jax compiles, s", "rules, s", "jax, ms", "rules, ms", "ratio")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for images, channels, side, window, stride in SHAPES:
        pad = window // 2
        windows = Windows((side,) * 2, (window,) * 2, (stride,) * 2, ((pad, pad),) * 2, (1, 1), False)
        x = jnp.asarray(rng.standard_normal((images, channels, side, side)), jnp.float32)
        weight = jnp.asarray(rng.standard_normal((channels, 1, window, window)), jnp.float32)
        by_rules = functools.partial(depthwise, windows)
        by_jax = functools.partial(depthwise.fun, windows)
        dy = by_rules(x, weight)
        compiling, (old, new) = pointwise_convolution.compare([gradients(by_jax), gradients(by_rules)], (x, weight, dy))
        name = f"{images}, {channels}, {side}, {window}, {stride} | {compiling[0]:.3f} | {compiling[1]:.3f}"
        print(f"| {name} | {old:.1f} | {new:.1f} | {old / new:.1f} |", flush=True)


if __name__ == "__main__":
    main()
