"""Time 60 functions, forward and backward, at small and large sizes, in several frameworks.

    python benchmarks/ops.py --python-torch ~/torch/bin/python --python-paddle ~/paddle/bin/python --save NAME

Sides: `captured` calls a function made by jit.to_static, `eager` calls polyreme's function itself; `torch` and `paddle`
are eager. A forward case calls the function; a backward case calls it on inputs that want gradients and computes the
gradients of all of them for a given gradient of the result. Every side has the same inputs and must give the same
values. The table has the median time of each side and its ratio to PyTorch's; below it are geometric means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import sides as s

SIDES = ("captured", "eager", "torch", "paddle")
SLOW = 3.0  # times PyTorch's: such a case needs a line in WHY
# a few units in size, sums of up to 2048 products of float32; decompositions lose more
TOLERANCE = 2.0**-23 * 2048**0.5 * 64

Inputs = list[np.ndarray]


def normal(*shapes: tuple[int, ...], positive: bool = False) -> Inputs:
    """Standard normal float32 arrays; in (0.5, 2) if positive."""
    rng = np.random.default_rng(0)
    draw = (lambda shape: rng.uniform(0.5, 2.0, shape)) if positive else rng.standard_normal
    return [draw(shape).astype("float32") for shape in shapes]


def square(large: bool) -> Inputs:
    """One matrix."""
    return normal((1024, 1024) if large else (32, 32))


def positive(large: bool) -> Inputs:
    """One matrix of positive numbers."""
    return normal(square(large)[0].shape, positive=True)


def two(large: bool) -> Inputs:
    """Two matrices of positive numbers."""
    return normal(*[square(large)[0].shape] * 2, positive=True)


def batch(large: bool) -> Inputs:
    """Two batches of matrices."""
    return normal(*[(16, 256, 256) if large else (4, 16, 16)] * 2)


def definite(large: bool) -> Inputs:
    """A symmetric positive definite matrix with well-separated eigenvalues, and a right-hand side."""
    n = 256 if large else 16
    a, b = normal((n, n), (n, n))
    return [(a @ a.T / n + np.diag(np.arange(1.0, n + 1))).astype("float32"), b]


def one_definite(large: bool) -> Inputs:
    """A symmetric positive definite matrix."""
    return definite(large)[:1]


def small_det(large: bool) -> Inputs:
    """A matrix whose determinant is near 1."""
    n = 256 if large else 16
    return [(np.eye(n) + normal((n, n))[0] / (4 * n)).astype("float32")]


def image(large: bool) -> Inputs:
    """A batch of images, NCHW."""
    return normal((8, 32, 64, 64) if large else (1, 4, 8, 8))


def image_and(kernel: tuple[int, ...]) -> Callable[[bool], Inputs]:
    """Images, and weights whose dims of -1 are the number of channels."""

    def make(large: bool) -> Inputs:
        x = image(large)[0]
        shape = tuple(x.shape[1] if k == -1 else k for k in kernel)
        return [x, normal(shape)[0] / math.prod(shape[1:]) ** 0.5]

    return make


def signal(large: bool) -> Inputs:
    """A batch of signals and weights of a 1-D convolution."""
    x, w = normal((8, 32, 1024), (32, 32, 5)) if large else normal((1, 4, 32), (4, 4, 5))
    return [x, w / 12]


def rows(large: bool) -> Inputs:
    """A matrix, scales and shifts of its columns."""
    n, c = (4096, 512) if large else (16, 32)
    return normal((n, c), (c,), (c,), positive=True)


def layer(large: bool) -> Inputs:
    """Input, weight and bias of a linear layer."""
    n, i, o = (1024, 512, 512) if large else (16, 32, 32)
    x, w, b = normal((n, i), (i, o), (o,))
    return [x, w / i**0.5, b]


def scores(large: bool) -> Inputs:
    """Scores of classes, and labels."""
    n, c = (1024, 4096) if large else (16, 32)
    return [*normal((n, c)), np.arange(n) * 7 % c]


def table(large: bool) -> Inputs:
    """Rows to look up, and their ids."""
    n, c, k = (8192, 256, 4096) if large else (64, 16, 32)
    return [*normal((n, c)), np.arange(k) * 5 % n]


def heads(large: bool) -> Inputs:
    """Query, key and value [batch, tokens, heads, size]."""
    shape = (4, 256, 8, 32) if large else (1, 16, 2, 8)
    return normal(shape, shape, shape)


def same(name: str, *rest: Any, of: str = "") -> tuple[Callable, Callable]:
    """A function that both APIs have under one name, called with the tensors and then rest."""
    call = lambda lib, *t: _at(lib, of, name)(*t, *rest)
    return call, call


def functional(name: str, *rest: Any) -> tuple[Callable, Callable]:
    """The same in nn.functional."""
    return same(name, *rest, of="nn.functional")


def _at(lib: Any, of: str, name: str) -> Any:
    for part in (of.split(".") if of else []) + [name]:
        lib = getattr(lib, part)
    return lib


def torch_attention(lib: Any, q: Any, k: Any, v: Any) -> Any:
    """Causal attention in Paddle's layout."""
    moved = [t.transpose(1, 2) for t in (q, k, v)]
    return lib.nn.functional.scaled_dot_product_attention(*moved, is_causal=True).transpose(1, 2)


# case: ((Paddle's call, PyTorch's call), inputs); calls take the library and the tensors
CASES: dict[str, tuple[tuple[Callable, Callable], Callable[[bool], Inputs]]] = {
    **{n: (same(n), square) for n in ("exp", "tanh", "sigmoid", "abs", "sin", "erf", "atan")},
    **{n: (same(n), positive) for n in ("log", "sqrt", "rsqrt", "lgamma", "log1p")},
    **{n: (functional(n), square) for n in ("relu", "gelu", "silu", "softplus", "elu")},
    **{n: (same(n), two) for n in ("add", "multiply", "divide", "pow", "maximum", "atan2")},
    "clip": (same("clip", -0.5, 0.5), square),
    "where": ((lambda p, a, b: p.where(a > b, a, b),) * 2, two),
    "sum": (same("sum", 1), square),
    "mean": (same("mean", 0), square),
    "max": ((lambda p, x: p.max(x, 1), lambda t, x: t.amax(x, 1)), square),
    "logsumexp": (same("logsumexp", -1), square),
    "var": (same("var", 1), square),
    "norm": ((lambda p, x: p.linalg.norm(x),) * 2, square),
    "cumsum": (same("cumsum", 1), square),
    "sort": ((lambda p, x: p.sort(x, -1), lambda t, x: t.sort(x, -1)[0]), square),
    "topk": ((lambda p, x: p.topk(x, 8)[0],) * 2, square),
    "transpose": ((lambda p, x: p.transpose(x, [1, 0]) * 2, lambda t, x: x.T * 2), square),
    "concat": ((lambda p, a, b: p.concat([a, b], 1), lambda t, a, b: t.cat([a, b], 1)), two),
    "stack": ((lambda p, a, b: p.stack([a, b], 0),) * 2, two),
    "tile": ((lambda p, x: p.tile(x, [2, 2]), lambda t, x: x.repeat(2, 2)), square),
    "flip": ((lambda p, x: p.flip(x, [1]),) * 2, square),
    "roll": ((lambda p, x: p.roll(x, 3, 1),) * 2, square),
    "slice": ((lambda p, x: x[1:-1, ::2] * 2,) * 2, square),
    "index_select": ((lambda p, x, i: p.index_select(x, i, 0), lambda t, x, i: t.index_select(x, 0, i)), table),
    "matmul": (same("matmul"), lambda large: [a / 32 for a in normal(*[(1024, 1024) if large else (32, 32)] * 2)]),
    "bmm": (same("bmm"), batch),
    "einsum": ((lambda p, a, b: p.einsum("bij,bkj->bik", a, b),) * 2, batch),
    "solve": (same("solve", of="linalg"), definite),
    "inverse": (same("inv", of="linalg"), one_definite),
    "cholesky": (same("cholesky", of="linalg"), one_definite),
    "det": (same("det", of="linalg"), small_det),
    "eigvalsh": (same("eigvalsh", of="linalg"), one_definite),
    "svdvals": (same("svdvals", of="linalg"), one_definite),
    "fft": ((lambda p, x: p.abs(p.fft.fft(x)),) * 2, square),
    "rfft2": ((lambda p, x: p.abs(p.fft.rfft2(x)),) * 2, square),
    "linear": ((lambda p, x, w, b: p.nn.functional.linear(x, w, b), lambda t, x, w, b: t.addmm(b, x, w)), layer),
    "conv1d": (functional("conv1d", None, 1, 2), signal),
    "conv2d": (functional("conv2d", None, 1, 1), image_and((-1, -1, 3, 3))),
    "depthwise": (
        (
            lambda p, x, w: p.nn.functional.conv2d(x, w, None, 1, 1, 1, x.shape[1]),
            lambda t, x, w: t.nn.functional.conv2d(x, w, None, 1, 1, 1, x.shape[1]),
        ),
        image_and((-1, 1, 3, 3)),
    ),
    "conv2d_transpose": (
        (
            lambda p, x, w: p.nn.functional.conv2d_transpose(x, w, None, 2, 1),
            lambda t, x, w: t.nn.functional.conv_transpose2d(x, w, None, 2, 1),
        ),
        image_and((-1, -1, 4, 4)),
    ),
    "max_pool2d": (functional("max_pool2d", 2, 2), image),
    "avg_pool2d": (functional("avg_pool2d", 3, 2, 1), image),
    "bilinear": (
        (
            lambda p, x: p.nn.functional.interpolate(x, scale_factor=2, mode="bilinear"),
            lambda t, x: t.nn.functional.interpolate(x, scale_factor=2, mode="bilinear"),
        ),
        image,
    ),
    "softmax": ((lambda p, x: p.nn.functional.softmax(x, -1),) * 2, square),
    "layer_norm": (
        (lambda p, x, w, b: p.nn.functional.layer_norm(x, [x.shape[-1]], w, b),) * 2,
        rows,
    ),
    "batch_norm": (
        (
            lambda p, x, w, b: p.nn.functional.batch_norm(
                x, p.zeros([x.shape[1]]), p.ones([x.shape[1]]), w, b, training=True
            ),
            lambda t, x, w, b: t.nn.functional.batch_norm(
                x, t.zeros([x.shape[1]]), t.ones([x.shape[1]]), w, b, training=True
            ),
        ),
        rows,
    ),
    "cross_entropy": (functional("cross_entropy"), scores),
    "mse_loss": (functional("mse_loss"), two),
    "embedding": (
        (lambda p, w, i: p.nn.functional.embedding(i, w), lambda t, w, i: t.nn.functional.embedding(i, w)),
        table,
    ),
    "attention": (
        (lambda p, q, k, v: p.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), torch_attention),
        heads,
    ),
}
CALL = "a call of a compiled program costs about 5 us (captured: 8) before it computes anything"
# cases slower than SLOW times PyTorch, each with its reason, by case or by function; CALL is that of small ones
SCALAR = "XLA's compiler for processors has no vectorized routine for it; PyTorch has"
MEMORY = "0.1 ms of work: the result's new memory and the threads' start are most of it"
WHY: dict[str, str] = {
    **dict.fromkeys(("sin", "atan", "atan2", "lgamma", "rsqrt", "gelu"), SCALAR),
    **dict.fromkeys(("add", "divide", "multiply", "roll", "sum", "stack", "concat", "maximum"), MEMORY),
    "cumsum": "XLA adds in logarithmically many passes, which suits an accelerator",
    "sort": "XLA's sort is stable, compares by a compiled function, and runs on one core",
    "transpose": "PyTorch's result keeps the strides of its input, and nothing is moved; ours is laid out anew",
    "inverse": "LAPACK's LU, then XLA's triangular solves of the identity",
}


class Last:
    """The last result of a measurement; float() waits for it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __float__(self) -> float:
        return float(self.value.detach().numpy().flat[-1])


def build(side: str) -> dict[str, Callable]:
    """Case -> its call; the framework is imported here, in the own process of the side."""
    if side == "torch":
        import torch as lib

        tensor = lambda a, wants: lib.from_numpy(a).requires_grad_(wants)
    else:
        if side == "paddle":
            import paddle as lib

            lib.set_device("cpu")
        else:
            import polyreme as lib
        tensor = lambda a, wants: lib.to_tensor(a, stop_gradient=not wants)
    cases = {}
    for name, (calls, inputs) in CASES.items():
        for large in (False, True):
            for backward in (False, True):
                made = (lib, tensor, calls[side == "torch"], inputs, large, backward, side == "captured")
                cases[_case(name, large, backward)] = _lazily(lambda made=made: _call(*made))
    return cases


def _case(name: str, large: bool, backward: bool) -> str:
    return f"{name}, {'large' if large else 'small'}, {'backward' if backward else 'forward'}"


def _lazily(make: Callable[[], Callable]) -> Callable:
    """The call that make() gives, made at the first use: not all arrays are in memory at once."""
    programs: list[Callable] = []

    def call() -> Last:
        if not programs:
            programs.append(make())
        return Last(programs[0]())

    return call


def _call(
    lib: Any, tensor: Callable, function: Callable, inputs: Callable, large: bool, backward: bool, captured: bool
) -> Callable:
    arrays = inputs(large)
    tensors = [tensor(a, backward and a.dtype.kind == "f") for a in arrays]
    leaves = [t for t, a in zip(tensors, arrays, strict=True) if a.dtype.kind == "f"]
    if not backward:
        run = lib.jit.to_static(lambda *t: function(lib, *t)) if captured else lambda *t: function(lib, *t)
        return lambda: run(*tensors)
    cotangent = tensor(np.cos(np.arange(math.prod(shape := function(lib, *tensors).shape))).astype("float32"), False)
    cotangent = cotangent.reshape([int(n) for n in shape])

    grad = lib.autograd.grad if lib.__name__ == "torch" else lib.grad

    def step(given: Any, *t: Any) -> Any:
        wants = t[: len(leaves)]
        return grad([function(lib, *t)], wants, [given])[0]

    if captured:
        inner = lib.jit.to_static(step)
        return lambda: inner(cotangent, *tensors)
    return lambda: step(cotangent, *tensors)


def measured(options: Any) -> tuple[dict[str, dict[str, float]], list[s.Side]]:
    """case -> side -> seconds, in alternating rounds of as many calls as fit."""
    sides = s.start(__file__, options)
    times: dict[str, dict[str, float]] = {}
    try:
        for name in CASES:
            for large in (False, True):
                for backward in (False, True):
                    case = _case(name, large, backward)
                    if options.only not in case:
                        continue
                    values = {side.name: side.ask(case, 1)["values"][0] for side in sides}
                    s.check_values(values, TOLERANCE * max(1.0, *map(abs, values.values())))
                    calls = {}
                    for side in sides:
                        # of several calls, as reading the last one's value takes longer than a small call
                        least = min(side.ask(case, 3, 1 if large else 50)["seconds"])
                        calls[side.name] = max(1, min(2000, int(options.seconds / least)))
                    for _ in range(options.rounds):
                        for side in sides:
                            side.measure(case, options.measurements, calls[side.name])
                    times[case] = {
                        side.name: side.least(case) if options.least else side.median(case) for side in sides
                    }
    finally:
        for side in sides:
            side.close()
    return times, sides


def report(found: dict[str, dict[str, float]], names: list[str]) -> str:
    """The table of cases and, before it, the geometric means of time to PyTorch's."""
    if "torch" not in names:
        names = [*names]
    others = [n for n in names if n != "torch"]
    lines = ["| time to PyTorch's, geometric mean | " + " | ".join(others) + " |", "|---" * (len(others) + 1) + "|"]
    for label in ("small, forward", "small, backward", "large, forward", "large, backward", ""):
        picked = [times for case, times in found.items() if case.endswith(label) and "torch" in times]
        if picked:
            means = [statistics.geometric_mean([t[n] / t["torch"] for t in picked]) for n in others]
            lines.append(f"| {label or 'all'} | " + " | ".join(f"{m:.2f}" for m in means) + " |")
    lines += ["", "| case | " + " | ".join(f"{n}, us" for n in names) + " | captured to torch | note |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for case, times in found.items():
        ratio = times["captured"] / times["torch"] if {"captured", "torch"} <= set(times) else float("nan")
        reasons = (WHY.get(case), WHY.get(case.split(",")[0]), CALL if "small" in case else None, "no reason given")
        note = next(r for r in reasons if r) if ratio > SLOW else ""
        shown = " | ".join(f"{times[n] * 1e6:.1f}" for n in names)
        lines.append(f"| {case} | {shown} | {ratio:.2f} | {note} |")
    return "\n".join(lines)


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__ or "", SIDES, rounds=5)
    parser.add_argument("--only", default="", help='cases that have this in their name, such as "small, forward"')
    parser.add_argument("--seconds", type=float, default=0.02, help="of one measurement: as many calls as fit")
    parser.add_argument("--measurements", type=int, default=1, help="of each side in a round")
    parser.add_argument("--least", action="store_true", help="least times, not medians: for a busy machine")
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    found, sides = measured(options)
    text = report(found, [side.name for side in sides])
    print(text)
    if options.save:
        shown = "Least" if options.least else "Median"
        what = f"{len(CASES)} functions. {shown} of {options.rounds} rounds of {options.measurements} measurements of "
        what += f"{options.seconds * 1e3:g} ms."
        print(s.save(options.save, "Functions, forward and backward", what, text, sides))


if __name__ == "__main__":
    main()
