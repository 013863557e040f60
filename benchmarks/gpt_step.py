"""Time one GPT training step (sizes in gpt_workload.py) in several frameworks, in alternating rounds.

    python benchmarks/gpt_step.py --sides plain,fused
    python benchmarks/gpt_step.py --python-torch ~/torch/bin/python --python-paddle ~/paddle/bin/python --save NAME

Every side is a process of its own, alive during the whole run; each round asks each side in turn for some steps, so a
slow minute of the machine falls on all alike. Printed per side: median and least ms/step, tokens/s, ratio of medians to
the first side, peak memory. All sides must start at the same loss, to a computed tolerance. --tuned-malloc also times
the JAX sides with glibc told to keep freed memory.
"""

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import gpt_workload as g

SIDES = ("plain", "fused", "torch", "torch-compile", "paddle")
JAX_SIDES = ("plain", "fused")
TUNED = "+malloc"
# XLA frees a program's scratch memory after every call; by default glibc hands such large blocks back to the kernel,
# and each call pays for zeroed pages again.
KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "200000000",
}


def build(side: str):
    """-> the side's step function; the framework is imported here, in the side's own process."""
    if side == "plain":
        import gpt_plain_jax

        return gpt_plain_jax.build()
    if side == "fused":
        import gpt_fused_jax

        return gpt_fused_jax.build()
    if side in ("torch", "torch-compile"):
        import gpt_torch

        return gpt_torch.build(compiled=side == "torch-compile")
    import gpt_paddle

    return gpt_paddle.build()


def work(side: str) -> None:
    """A side's process: a number of steps comes in on each line, their seconds, losses and peak bytes go out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a framework prints must not mix with the answers
    step = build(side)
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(int(line)):
            start = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "losses": losses, "peak": peak}), file=out, flush=True)


class Side:
    """One side's process and what it has measured."""

    def __init__(self, name: str, python: str):
        here = Path(__file__).resolve()
        paths = [str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "JAX_PLATFORMS": "cpu"}
        self.name, plain_name = name, name.removesuffix(TUNED)
        if name.endswith(TUNED):
            env |= KEEP_FREED
        command = [python, str(here), "--worker", plain_name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.seconds: list[float] = []
        self.peak = 0

    def ask(self, steps: int) -> dict:
        """Runs steps and returns the process's answer."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"side {self.name} ended with exit status {self.process.wait()}; its output is above")
        answer = json.loads(line)
        self.peak = answer["peak"]
        return answer

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait(timeout=60)


def check_first_losses(losses: dict[str, float]) -> None:
    """Refuses sides that do not compute the same thing.

    The logits are sums of HIDDEN float32 products after 2 * LAYERS + 1 blocks, each again such a sum; rounding errors
    add like a random walk, the mean over tokens makes them smaller still.
    """
    reference = next(iter(losses.values()))
    tolerance = 2.0**-23 * math.sqrt(g.HIDDEN) * (2 * g.LAYERS + 1) * reference
    for name, loss in losses.items():
        if not abs(loss - reference) <= tolerance:
            raise SystemExit(
                f"{name} starts at loss {loss}, the first side at {reference}: more than {tolerance} apart"
            )
    print(f"first loss: {losses} (tolerance {tolerance:.1e})", file=sys.stderr)


def table(sides: list[Side]) -> str:
    """The results as markdown."""
    rows = [
        "| side | ms/step, median | least | tokens/s | time to first side's | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    base = statistics.median(sides[0].seconds)
    for side in sides:
        median, least = statistics.median(side.seconds), min(side.seconds)
        numbers = f"{median * 1e3:.0f} | {least * 1e3:.0f} | {g.TOKENS / median:.0f} | {median / base:.2f}"
        rows.append(f"| {side.name} | {numbers} | {side.peak / 2**20:.0f} |")
    return "\n".join(rows)


def measure(options: argparse.Namespace) -> str:
    """Runs all sides in alternating rounds -> the table."""
    pythons = {"torch": options.python_torch, "torch-compile": options.python_torch, "paddle": options.python_paddle}
    names = [n for n in options.sides.split(",") if pythons.get(n, sys.executable)]
    if options.tuned_malloc:
        names = [t for n in names for t in ((n, n + TUNED) if n in JAX_SIDES else (n,))]
    sides = [Side(n, pythons.get(n, sys.executable)) for n in names]
    try:
        check_first_losses({side.name: side.ask(2)["losses"][0] for side in sides})
        for _ in range(options.rounds):
            for side in sides:
                side.seconds += side.ask(options.steps)["seconds"]
    finally:
        for side in sides:
            side.close()
    return table(sides)


def save(name: str, text: str, options: argparse.Namespace) -> Path:
    """Writes the table with what it was measured on to benchmarks/results/."""
    path = Path(__file__).resolve().parent / "results" / f"{name}.md"
    sizes = (
        f"{g.LAYERS} layers, {g.HIDDEN} wide, {g.HEADS} heads, ffn {g.FFN}, batch {g.BATCH} x {g.SEQ}, {g.VOCAB} words"
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    head = f"# GPT training step, {date.today()}\n\n{sizes}, float32, AdamW. {machine}.\n"
    how = (
        f"{options.rounds} rounds of {options.steps} steps, sides alternating; one process a side, all alive at once.\n"
    )
    path.write_text(f"{head}{how}\n{text}\n")
    return path


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default=",".join(SIDES), help="comma-separated, of: " + ", ".join(SIDES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps a side takes in each round")
    parser.add_argument(
        "--python-torch", help="interpreter of an environment with torch; without it those sides are left out"
    )
    parser.add_argument("--python-paddle", help="interpreter of an environment with paddlepaddle; likewise")
    parser.add_argument("--tuned-malloc", action="store_true")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    unknown = set(options.sides.split(",")) - set(SIDES)
    if unknown:
        parser.error(f"unknown sides {sorted(unknown)}; choose from {', '.join(SIDES)}")
    text = measure(options)
    print(text)
    if options.save:
        print(save(options.save, text, options))


if __name__ == "__main__":
    main()
