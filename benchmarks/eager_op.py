"""Time one imperative op (add, matmul and tanh of 32 x 32 float32), with and without the tape, in several frameworks.

    python benchmarks/eager_op.py --python-torch ~/torch/bin/python --python-paddle ~/paddle/bin/python --save NAME

`jit` is the bare call of a jitted JAX function, the least that anything on JAX can cost. "taped" means that the inputs
want gradients, so the call also records how to compute them.
"""

import time
from collections.abc import Callable

import numpy as np
import sides as s

SIDES = ("jit", "polyreme", "torch", "paddle")
OPS = ("add", "matmul", "tanh")
# a measurement of so many calls takes less than a millisecond: among many, some are not interrupted on a busy machine
CALLS = 50
CASES = (*OPS, *(f"{op} taped" for op in OPS))


class Last:
    """A result whose float() waits for it, as the end of a measurement needs."""

    __slots__ = ("read", "value")

    def __init__(self, value, read):
        self.value, self.read = value, read

    def __float__(self) -> float:
        return self.read(self.value)


def _loop(call: Callable, read: Callable) -> Callable:
    """A function of CALLS calls, so that the loop around it costs nothing."""

    def run() -> Last:
        for _ in range(CALLS):
            value = call()
        return Last(value, read)

    return run


def build(side: str) -> dict[str, Callable]:
    """-> CALLS calls of each op; the framework is imported here, in the side's own process."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((32, 32)).astype("float32") for _ in range(2))
    if side == "jit":
        import jax
        import jax.numpy as jnp

        x, y = jnp.asarray(a), jnp.asarray(b)
        add, matmul, tanh = jax.jit(jnp.add), jax.jit(jnp.matmul), jax.jit(jnp.tanh)
        calls = {"add": lambda: add(x, y), "matmul": lambda: matmul(x, y), "tanh": lambda: tanh(x)}
        # the call knows no tape: the same function stands for both
        cases = {f"{op}{taped}": call for op, call in calls.items() for taped in ("", " taped")}
        return {case: _loop(call, lambda v: float(np.asarray(v)[0, 0])) for case, call in cases.items()}
    if side == "torch":
        import torch as lib

        tensors = [[lib.from_numpy(t).clone().requires_grad_(wants) for t in (a, b)] for wants in (False, True)]
    else:
        if side == "paddle":
            import paddle as lib

            lib.set_device("cpu")
        else:
            import polyreme as lib
        tensors = [[lib.to_tensor(t, stop_gradient=not wants) for t in (a, b)] for wants in (False, True)]
    cases = {}
    for (x, y), taped in zip(tensors, ("", " taped"), strict=True):
        cases[f"add{taped}"] = lambda x=x, y=y: lib.add(x, y)
        cases[f"matmul{taped}"] = lambda x=x, y=y: lib.matmul(x, y)
        cases[f"tanh{taped}"] = lambda x=x: lib.tanh(x)
    return {case: _loop(call, lambda v: float(v.detach().numpy()[0, 0])) for case, call in cases.items()}


def within_one_process(measurements: int) -> str:
    """The table of polyreme's calls and the bare ones, in turn in this process.

    Processes differ by more than that: a call with two inputs takes 5.1 us in some and 7.3 in others.
    """
    cases = {side: build(side) for side in ("jit", "polyreme")}
    seconds: dict[tuple[str, str], list[float]] = {(case, side): [] for case in CASES for side in cases}
    for _ in range(measurements):
        for (case, side), times in seconds.items():
            start = time.perf_counter()
            cases[side][case]()
            times.append((time.perf_counter() - start) / CALLS * 1e6)
    rows = ["| case | bare call, us, least | polyreme, least | ratio | of lower quartiles |", "|---|---|---|---|---|"]
    for case in CASES:
        bare, ours = sorted(seconds[case, "jit"]), sorted(seconds[case, "polyreme"])
        quartiles = ours[measurements // 4] / bare[measurements // 4]
        rows.append(f"| {case} | {bare[0]:.2f} | {ours[0]:.2f} | {ours[0] / bare[0]:.2f} | {quartiles:.2f} |")
    return "\n".join(rows)


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=15)
    parser.add_argument("--within", type=int, help="only: so many measurements of both jit and polyreme in one process")
    options = s.options_of(parser, SIDES)
    if options.within:
        text = within_one_process(options.within)
        print(text)
        if options.save:
            what = f"32 x 32 float32. {options.within} measurements of {CALLS} calls, in one process."
            print(s.save(options.save, "One imperative op and the bare jitted call", what, text, []))
        return
    if options.worker:
        s.work(build, options.worker)
        return
    # a sum of 32 float32 products, a few units in size
    tolerance = 2.0**-23 * 32**0.5 * 8
    text, sides = s.table_of_cases(__file__, options, CASES, calls=1, tolerance=tolerance, per=CALLS, times=40)
    print(text)
    if options.save:
        what = f"32 x 32 float32. {options.rounds} rounds of 40 times {CALLS} calls."
        print(s.save(options.save, "One imperative op", what, text, sides))


if __name__ == "__main__":
    main()
