"""Time single kernels on one GPU against PyTorch: attention with its backward, attention by columns, grouped products.

    python benchmarks/gpu_ops.py attention|columns|grouped|loss

bfloat16; both sides in one process, taking turns; medians of device time over calls that are queued together. Prints a
JSON line for each case: milliseconds and TFLOP/s of each side (of the work that the sizes ask for), ratio of times, and
the relative error against float32.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("JAX_PLATFORMS", "cuda")

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional as F

import polyreme.core  # noqa: F401  (configures jax)
from polyreme import kernels
from polyreme.kernels import grouped_triton
from polyreme.kernels.columns import Columns

CALLS, ROUNDS = 20, 5


def medians(sides: dict) -> dict[str, float]:
    """Milliseconds a call of each side, which take turns; a side is (function of no arguments, what waits for it)."""
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(ROUNDS + 1):
        for name, (run, wait) in sides.items():
            wait(run())
            start = time.perf_counter()
            for _ in range(CALLS):
                out = run()
            wait(out)
            if turn:
                spent[name].append(1e3 * (time.perf_counter() - start) / CALLS)
    return {name: statistics.median(times) for name, times in spent.items()}


def by_jax(function, *args):
    """A side of jax."""
    program = jax.jit(function).lower(*args).compile()
    return (lambda: program(*args)), jax.block_until_ready


def by_torch(function):
    """A side of torch."""
    return function, lambda _: torch.cuda.synchronize()


def show(case: str, flop: float, sides: dict, error: float, base: str) -> None:
    """Print a case."""
    ms = {}
    for name, side in list(sides.items()):
        try:
            ms |= medians({name: side} if isinstance(side, tuple) else {name: side()})
        except Exception as problem:  # noqa: BLE001  (another side may run)
            print(json.dumps({"case": case, "side": name, "error": repr(problem)[:600]}), flush=True)
            sides.pop(name)
    sides = {n: s if isinstance(s, tuple) else s() for n, s in sides.items()}
    ms = medians(sides)
    rates = {name: round(flop / t / 1e9, 1) for name, t in ms.items()}
    ours = next(iter(ms))
    line = {"part": "ops", "case": case, "ms": {n: round(t, 4) for n, t in ms.items()}, "tflops": rates}
    line |= {"ratio": round(ms[base] / ms[ours], 3) if base in ms else None, "error": error}
    print(json.dumps(line), flush=True)


def relative(got, want) -> float:
    """Norm of the difference over the norm."""
    got, want = (jnp.asarray(x, jnp.float32) for x in (got, want))
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def tensor_of(x) -> torch.Tensor:
    """The same numbers in torch, in a buffer of its own."""
    return torch.utils.dlpack.from_dlpack(x).clone()


def attention() -> None:
    """Causal attention, forward and backward."""
    for batch, seq, heads, width in ((8, 2048, 16, 128), (2, 8192, 16, 128), (16, 1024, 16, 64)):
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, dy = (jax.random.normal(key, (batch, seq, heads, width), jnp.bfloat16) for key in keys)

        def ours(q, k, v, dy):
            out, pull = jax.vjp(lambda *a: kernels.attention(*a, causal=True), q, k, v)
            return out, *pull(dy)

        tq, tk, tv, tdy = (tensor_of(x).transpose(1, 2) for x in (q, k, v, dy))
        leaves = [x.detach().requires_grad_() for x in (tq, tk, tv)]

        def theirs(leaves=leaves, tdy=tdy):
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            return torch.autograd.grad(out, leaves, tdy)

        few = [x[:1, :, :2].astype(jnp.float32) for x in (q, k, v)]
        with jax.default_matmul_precision("highest"):
            want = kernels.attention_plain(*few, causal=True)
        error = relative(jax.jit(ours)(q, k, v, dy)[0][:1, :, :2], want)
        # two products forward, five backward, half of the scores
        flop = 7 * batch * heads * seq * seq * width
        sides = {"polyreme": by_jax(ours, q, k, v, dy), "torch-sdpa": by_torch(theirs)}
        show(f"attention {batch}x{seq}x{heads}x{width} causal fwd+bwd", flop, sides, error, "torch-sdpa")


def columns() -> None:
    """Causal attention among four documents, forward and backward, against the whole mask's and flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, seq, heads, width, documents = 1, 8192, 16, 128, 4
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dy = (jax.random.normal(key, (batch, seq, heads, width), jnp.bfloat16) for key in keys)
    length = seq // documents
    ends = (jnp.arange(seq, dtype=jnp.int32) // length + 1) * length
    bounds = jnp.stack([jnp.arange(seq, dtype=jnp.int32), ends], -1)

    def ours(q, k, v, dy):
        out, pull = jax.vjp(lambda *a: kernels.column_attention(*a, Columns(bounds[None, None]))[0], q, k, v)
        return out, *pull(dy)

    document = torch.arange(seq, device="cuda") // length
    mask = create_block_mask(
        lambda b, h, i, j: (document[i] == document[j]) & (i >= j), None, None, seq, seq, device="cuda"
    )
    flex = torch.compile(flex_attention)
    leaves = [tensor_of(x).transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    tdy = tensor_of(dy).transpose(1, 2)

    def theirs():
        return torch.autograd.grad(flex(*leaves, block_mask=mask), leaves, tdy)

    got = jax.jit(ours)(q, k, v, dy)[0][:, :length, :2]
    with jax.default_matmul_precision("highest"):
        want = kernels.attention_plain(*(x[:, :length, :2].astype(jnp.float32) for x in (q, k, v)), causal=True)
    flop = 7 * batch * heads * seq * seq * width / documents
    sides = {"polyreme": by_jax(ours, q, k, v, dy), "torch-flex": by_torch(theirs)}
    show(f"columns {batch}x{seq}x{heads}x{width} {documents} documents", flop, sides, relative(got, want), "torch-flex")


def grouped() -> None:
    """Products of rows in groups, and of weight gradients, against torch's grouped_mm and a loop over groups."""
    for rows, groups, ins, outs in ((16384, 16, 2048, 4096), (16384, 64, 2048, 1408)):
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (rows, ins), jnp.bfloat16)
        w = jax.random.normal(keys[1], (groups, ins, outs), jnp.bfloat16) / ins**0.5
        parts = jax.random.dirichlet(keys[2], jnp.full(groups, 8.0)) * rows
        sizes = jnp.diff(jnp.round(jnp.cumsum(jnp.concatenate([jnp.zeros(1), parts])))).astype(jnp.int32)
        sizes = sizes.at[-1].add(rows - sizes.sum(dtype=jnp.int32))
        dy = jax.random.normal(keys[0], (rows, outs), jnp.bfloat16)
        first = jnp.diff(jnp.minimum(jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)]), 512))
        want = kernels.grouped_matmul_plain(x[:512], w, first)
        error = relative(jax.jit(kernels.grouped_matmul)(x, w, sizes)[:512], want)
        tx, tw, tdy = tensor_of(x), tensor_of(w), tensor_of(dy)
        ends = torch.cumsum(tensor_of(sizes), 0).int()
        cuts = [int(n) for n in sizes]

        def loop(tx=tx, tw=tw, cuts=cuts):
            return [part @ tw[i] for i, part in enumerate(tx.split(cuts))]

        def mm(tx=tx, tw=tw, ends=ends):
            return torch._grouped_mm(tx, tw, offs=ends)

        sides = {
            "polyreme": by_jax(kernels.grouped_matmul, x, w, sizes),
            "torch-grouped_mm": lambda mm=mm: by_torch(mm),
            "torch-loop": by_torch(loop),
            "jax-ragged_dot": lambda x=x, w=w, sizes=sizes: by_jax(jax.lax.ragged_dot, x, w, sizes),
            **tiled("MATMUL_TILES", lambda *a: grouped_triton.matmul(False, *a), x, w, sizes),
        }
        case = f"grouped {rows} rows {groups} groups {ins}x{outs}"
        show(f"{case} forward", 2 * rows * ins * outs, sides, error, "torch-grouped_mm")

        def outer_loop(tx=tx, tdy=tdy, cuts=cuts):
            return [a.T @ b for a, b in zip(tx.split(cuts), tdy.split(cuts), strict=True)]

        def outer_mm(tx=tx, tdy=tdy, ends=ends):
            return torch._grouped_mm(tx.T, tdy, offs=ends)

        sides = {
            "polyreme": by_jax(kernels.grouped_outer, x, dy, sizes),
            "torch-grouped_mm": lambda mm=outer_mm: by_torch(mm),
            "torch-loop": by_torch(outer_loop),
            **tiled("OUTER_TILES", grouped_triton.outer, x, dy, sizes),
        }
        show(f"{case} weight gradient", 2 * rows * ins * outs, sides, 0.0, "torch-grouped_mm")


def tiled(constant, function, *args) -> dict:
    """Sides of the kernel with other tiles."""
    sides, usual = {}, getattr(grouped_triton, constant)
    for tiles in ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 4), (64, 256, 64, 4, 4)):

        def side(tiles=tiles):
            setattr(grouped_triton, constant, grouped_triton.Tiles(*tiles))
            try:
                return by_jax(lambda *a: function(*a), *args)
            finally:
                setattr(grouped_triton, constant, usual)

        sides["tiles " + " ".join(map(str, tiles))] = side
    return sides


def loss() -> None:
    """Cross-entropy of 16,384 tokens over 50,304 words with its gradients, against torch.compile of the plain form."""
    tokens, width, vocab = 16384, 2048, 50304
    h = jax.random.normal(jax.random.key(0), (tokens, width), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (vocab, width), jnp.bfloat16) * 0.02
    y = jax.random.randint(jax.random.key(2), (tokens,), 0, vocab, jnp.int32)

    def ours(h, w, y):
        return jax.value_and_grad(lambda h, w: kernels.linear_cross_entropy(h, w, y, reduction="mean"), (0, 1))(h, w)

    leaves, ty = [tensor_of(x).requires_grad_() for x in (h, w)], tensor_of(y).long()
    of_torch = torch.compile(lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y))
    sides = {
        "polyreme": by_jax(ours, h, w, y),
        "torch-compile": by_torch(lambda: torch.autograd.grad(of_torch(*leaves, ty), leaves)),
    }
    error = abs(float(ours(h, w, y)[0]) / of_torch(*leaves, ty).item() - 1)
    show(f"linear_cross_entropy {tokens}x{width}x{vocab}", 6 * tokens * width * vocab, sides, error, "torch-compile")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("attention", "columns", "grouped", "loss"))
    globals()[parser.parse_args().part]()
