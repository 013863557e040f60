"""Experts without dropping against experts of a capacity, in equal buffers: time of a layer, and choices dropped.

    python benchmarks/experts_capacity.py

Sides run in turns on the same routing; medians of forward and backward, and their ratios to the one that drops nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from grouped import medians

import polyreme.core  # noqa: F401  (configures jax)
from polyreme.kernels.experts import ExpertWeights, experts

TOKENS, EXPERTS, CHOICES, WIDTH, INNER = 2048, 8, 2, 256, 512
FACTORS = (1.25, 1.5, 2.0)


def with_capacity(x, choices, gates, weights, capacity):
    """The same layer in buffers [experts, capacity, width]; the choices behind are dropped."""
    flat = choices.reshape(-1)
    chosen = flat[:, None] == jnp.arange(EXPERTS)
    place = jnp.take_along_axis(jnp.cumsum(chosen, 0) - 1, flat[:, None], 1)[:, 0]
    rows = jnp.repeat(x, CHOICES, 0)
    buffers = jnp.zeros((EXPERTS, capacity, WIDTH), x.dtype).at[flat, place].set(rows, mode="drop")
    hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", buffers, weights.gate))
    hidden = hidden * jnp.einsum("ecd,edf->ecf", buffers, weights.up)
    y = jnp.einsum("ecf,efd->ecd", hidden, weights.down)
    taken = y.at[flat, place].get(mode="fill", fill_value=0).reshape(TOKENS, CHOICES, WIDTH)
    return jnp.einsum("tkd,tk->td", taken, gates)


def main():
    """Print a line for each routing and side."""
    g = np.random.default_rng(0)
    shapes = [(EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER)]
    weights = ExpertWeights(*(g.standard_normal(s).astype("float32") / 16 for s in shapes))
    x = g.standard_normal((TOKENS, WIDTH)).astype("float32")
    for name, spread in (("near even", 0.2), ("skewed", 1.0)):
        logits = spread * g.standard_normal(EXPERTS) + g.gumbel(size=(TOKENS, EXPERTS))
        choices = np.argsort(-logits, -1)[:, :CHOICES].astype(np.int32)
        gates = g.random((TOKENS, CHOICES)).astype("float32")
        loads = np.bincount(choices.reshape(-1), minlength=EXPERTS)
        sizes = [int(np.ceil(factor * TOKENS * CHOICES / EXPERTS)) for factor in FACTORS]
        sides = [lambda x, w, c=choices, v=gates: experts(x, c, v, w, "silu")]
        sides += [lambda x, w, c=choices, v=gates, n=n: with_capacity(x, c, v, w, n) for n in sizes]
        losses = [lambda x, w, side=side: (side(x, w) ** 2).sum() for side in sides]
        times = medians([jax.jit(jax.value_and_grad(loss, (0, 1))) for loss in losses], x, weights)
        print(f"{name}: most rows {loads.max() / loads.mean():.2f} of the mean; no drops {times[0]:.1f} ms")
        for factor, capacity, spent in zip(FACTORS, sizes, times[1:], strict=True):
            dropped = np.maximum(loads - capacity, 0).sum() / loads.sum()
            print(f"  capacity {factor}: {spent:.1f} ms, {spent / times[0]:.2f} of no drops; dropped {dropped:.1%}")


if __name__ == "__main__":
    main()
