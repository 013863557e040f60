"""What hides the collectives of one feed-forward over a split sequence, by rings and as XLA makes it, compiled for
eight TPU v5e, which need not be here: MiB by kind. Takes libtpu.

    python benchmarks/ring_linear.py

Forward and backward of silu(x gate) * (x up), times down: x in parts of its sequence, weights in parts of the inner
width. overlapped, free and critical are as polyreme comm has them.
"""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core.engine import backend
from polyreme.distributed.comm_report import examine
from polyreme.kernels import gather_linears, scatter_linear, select
from polyreme.kernels.ring_linear import RingSplit
from polyreme.mesh import Plan
from polyreme.recipes.planning.job import devices_for

TOKENS, WIDTH, INNER = 2048, 8192, 28672


def by_rings(split):
    """The feed-forward whose parts go round."""

    def compute(x, gate, up, down):
        bent, linear = gather_linears(x, [gate, up], split)
        return scatter_linear(jax.nn.silu(bent) * linear, down, split)

    return compute


def by_xla(split):
    """The feed-forward with layouts and nothing else."""

    def laid_out(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(split.mesh, spec))

    def compute(x, gate, up, down):
        hidden = laid_out(jax.nn.silu(x @ gate) * (x @ up), split.parted)
        return laid_out(hidden @ down, split.whole)

    return compute


def main():
    """Print a row for each kind of collective that moves a MiB or more."""
    devices = devices_for(Plan.from_degrees(mp=8), "v5e:2x4")
    split = RingSplit(Mesh(np.array(devices), "mp"), (), (), "mp")
    columns, rows = PartitionSpec(None, "mp"), PartitionSpec("mp", None)
    layouts = [((1, TOKENS, WIDTH), split.whole), *[((WIDTH, INNER), columns)] * 2, ((INNER, WIDTH), rows)]
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(split.mesh, spec)) for shape, spec in layouts
    ]
    plan = Plan.from_degrees(mp=8, sequence_parallel=True, overlap={"mp": "ring"})
    print(f"{'by':6} {'collective':20} {'number':>6} {'MiB':>7}  overlapped    free  critical")
    for name, make in (("rings", by_rings), ("XLA", by_xla)):
        compute = make(split)

        def loss(*args, compute=compute):
            return (compute(*args).astype(jnp.float32) ** 2).sum()

        with select.compiling_for(devices[0]):
            step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)), compiler_options=backend.step_options())
            text = step.lower(*args).compile().as_text()
        moved = defaultdict(lambda: defaultdict(list))
        for each in examine([(text, 1)], plan, None, "tpu").collectives:
            moved[each.kind][each.overlap].append(each.total_wire / 2**20)
        for kind, by_overlap in sorted(moved.items()):
            parts = [sum(by_overlap[overlap]) for overlap in ("overlapped", "free", "critical")]
            if sum(parts) >= 1:
                shares = "  ".join(f"{part / sum(parts):8.0%}" for part in parts)
                print(
                    f"{name:6} {kind:20} {sum(map(len, by_overlap.values())):6} {sum(parts):7.1f}  {shares}", flush=True
                )


if __name__ == "__main__":
    main()
