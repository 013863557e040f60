"""Print what eager training over many batch sizes holds: resident memory, memory mappings, compiled programs.

    python benchmarks/growth.py --save growth_cpu

An MLP of four linear layers, trained with Adam and cross-entropy on batches of another size in each step, 1 to 400 in
random order; then single ops over new shapes, in a process of their own each. `--shapes` and `--steps` shorten it.
Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import sides as s

STEPS = (0, 400, 2_000, 5_000, 10_000, 20_000)
OPS = ("multiply", "tanh", "matmul", "softmax", "layer_norm")
WIDTH, CLASSES, WARM_UP = 64, 10, 70


def resident() -> float:
    """MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def mappings() -> int:
    """How many parts of memory the system keeps account of for this process."""
    return Path("/proc/self/maps").read_bytes().count(b"\n")


class Compilations:
    """How many programs jax has compiled or read from its cache."""

    def __init__(self) -> None:
        import jax

        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, _seconds: float, **_: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def train(shapes: int, steps: list[int]) -> None:
    """Prints a JSON row for each number of steps."""
    import polyreme as pr

    compilations, rng = Compilations(), np.random.default_rng(0)
    layers = [pr.nn.Linear(32, WIDTH), pr.nn.ReLU(), pr.nn.Linear(WIDTH, WIDTH), pr.nn.ReLU()]
    net = pr.nn.Sequential(*layers, pr.nn.Linear(WIDTH, WIDTH), pr.nn.ReLU(), pr.nn.Linear(WIDTH, CLASSES))
    optimizer = pr.optimizer.Adam(1e-3, parameters=net.parameters())
    images, labels = rng.standard_normal((shapes, 32), "float32"), rng.integers(0, CLASSES, shapes)

    def step(size: int) -> float:
        loss = pr.nn.functional.cross_entropy(net(pr.to_tensor(images[:size])), pr.to_tensor(labels[:size]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(loss)

    # the optimizer's program of the whole update is there after 64
    for _ in range(WARM_UP):
        step(1)
    compilations.count, done, start = 0, 0, time.perf_counter()
    first = rng.permutation(shapes) + 1
    for until in steps:
        while done < until:
            step(int(first[done] if done < shapes else rng.integers(1, shapes + 1)))
            done += 1
        seconds, start = time.perf_counter() - start, time.perf_counter()
        print(json.dumps([done, resident(), mappings(), compilations.count, seconds]), flush=True)


def call(name: str, shapes: int) -> None:
    """Prints a JSON row: MB, mappings and programs of one op for each new shape, forward and backward."""
    import polyreme as pr

    compilations = Compilations()
    functions = {
        "multiply": lambda x: x * x,
        "tanh": pr.tanh,
        "matmul": lambda x: pr.matmul(x, x, transpose_y=True),
        "softmax": pr.nn.functional.softmax,
        "layer_norm": lambda x: pr.nn.functional.layer_norm(x, [32]),
    }

    def run(size: int) -> None:
        x = pr.to_tensor(np.ones([size, 32], "float32"), stop_gradient=False)
        y = functions[name](x)
        y.backward(y.detach())

    run(1)
    before = resident(), mappings()
    compilations.count = 0
    for size in range(2, shapes + 2):
        run(size)
    now = resident(), mappings()
    each = [(after - earlier) / shapes for after, earlier in zip(now, before, strict=True)]
    print(json.dumps([name, *each, compilations.count / shapes]), flush=True)


def rows_of(arguments: list[str]) -> list[list]:
    """What a fresh process with an empty compile cache prints."""
    with tempfile.TemporaryDirectory() as cache:
        paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
        env["POLYREME_COMPILE_CACHE"] = cache
        command = [sys.executable, __file__, *arguments]
        done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
        return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=int, default=400)
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--op-shapes", type=int, default=200)
    parser.add_argument("--save", metavar="NAME")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work == "train":
        train(options.shapes, options.steps)
        return
    if options.work:
        call(options.work, options.op_shapes)
        return
    sizes = ["--shapes", str(options.shapes), "--op-shapes", str(options.op_shapes)]
    steps = ["--steps", *map(str, options.steps)]
    trained = [
        [f"{done:,}", f"{mb:.0f}", f"{count:,}", f"{compiled:,}", f"{seconds:.0f}"]
        for done, mb, count, compiled, seconds in rows_of(["--work", "train", *sizes, *steps])
    ]
    ops = [
        [name, f"{mb:.2f}", f"{count:.1f}", f"{compiled:.1f}"]
        for op in OPS
        for name, mb, count, compiled in rows_of(["--work", op, *sizes])
    ]
    rows = ["| steps | resident MB | mappings | compilations | s since the row above |", "|---:" * 5 + "|"]
    rows += [f"| {' | '.join(map(str, row))} |" for row in trained]
    rows += ["", "| op, forward and backward | MB a new shape | mappings | programs |", "|---|" + "---:|" * 3]
    rows += [f"| {' | '.join(row)} |" for row in ops]
    text = "\n".join(rows)
    print(text)
    if options.save:
        what = f"An MLP trained eagerly on batches of {options.shapes} sizes; ops over {options.op_shapes} shapes."
        print(s.save(options.save, "Growth of eager training", what, text, []))


if __name__ == "__main__":
    main()
