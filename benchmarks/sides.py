"""Timing several frameworks against each other: each side is a process of its own, all alive during the whole run.

A script gives `build(side) -> {case: function}`; each round asks each side in turn, so that a slow minute of
the machine falls on all alike. The framework is imported by build, in the side's own process.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
TUNED = "+malloc"
# XLA frees a program's scratch memory after every call; by default glibc hands such large blocks back to the kernel,
# and each call pays for zeroed pages again.
KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "200000000",
}
_PACKAGES = ("jax", "jaxlib", "numpy", "torch", "paddlepaddle")


def work(build: Callable[[str], dict[str, Callable]], side: str) -> None:
    """A side's process: reads {"case", "times", "calls"}, answers with seconds and processor seconds a call,
    values, peak bytes, versions.

    A case is called `calls` times for each of `times` measurements; its value is read (float) at the end of each, which
    waits for the device.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a framework prints must not mix with the answers
    cases = build(side)
    for line in sys.stdin:
        asked = json.loads(line)
        run, calls = cases[asked["case"]], asked["calls"]
        seconds, values = [], []
        cpu_start = time.process_time()
        for _ in range(asked["times"]):
            start = time.perf_counter()
            for _ in range(calls):
                value = run()
            values.append(float(value))
            seconds.append((time.perf_counter() - start) / calls)
        cpu_seconds = time.process_time() - cpu_start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        cpu = cpu_seconds / (calls * asked["times"])
        print(
            json.dumps({"seconds": seconds, "values": values, "cpu": cpu, "peak": peak, **_versions()}),
            file=out,
            flush=True,
        )


def _versions() -> dict:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"versions": versions}


class Side:
    """One side's process and what it has measured: seconds by case, and processor seconds of all its threads."""

    def __init__(self, script: str, name: str, python: str, settings: dict[str, str], options: Sequence[str] = ()):
        here = Path(script).resolve()
        paths = [str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "JAX_PLATFORMS": "cpu"}
        env |= settings
        self.name = name
        if name.endswith(TUNED):
            env |= KEEP_FREED
        command = [python, str(here), "--worker", name.removesuffix(TUNED), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}
        self.peak = 0
        self.versions: dict[str, str] = {}

    def ask(self, case: str, times: int, calls: int = 1) -> dict:
        """Runs a case and returns the process's answer."""
        self.process.stdin.write(json.dumps({"case": case, "times": times, "calls": calls}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"side {self.name} ended with exit status {self.process.wait()}; its output is above")
        answer = json.loads(line)
        self.peak, self.versions = answer["peak"], answer["versions"]
        return answer

    def measure(self, case: str, times: int, calls: int = 1) -> None:
        """Adds measurements of a case."""
        answer = self.ask(case, times, calls)
        self.seconds.setdefault(case, []).extend(answer["seconds"])
        self.cpu_seconds.setdefault(case, []).append(answer["cpu"])

    def median(self, case: str) -> float:
        """Seconds a call."""
        return statistics.median(self.seconds[case])

    def least(self, case: str) -> float:
        """Seconds a call."""
        return min(self.seconds[case])

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait(timeout=60)


def parser(doc: str, sides: tuple[str, ...], rounds: int) -> argparse.ArgumentParser:
    """The options every benchmark of sides has."""
    options_parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_parser.add_argument("--sides", default=",".join(sides), help="comma-separated, of: " + ", ".join(sides))
    options_parser.add_argument("--rounds", type=int, default=rounds)
    options_parser.add_argument(
        "--python-torch", help="interpreter of an environment with torch; else those sides are left out"
    )
    options_parser.add_argument("--python-paddle", help="interpreter of an environment with paddlepaddle; likewise")
    options_parser.add_argument(
        "--isa", choices=tuple(ISA), help="keep all sides to older instructions, as far as they heed it"
    )
    options_parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options_parser.add_argument("--worker", choices=sides, help=argparse.SUPPRESS)
    return options_parser


def options_of(made: argparse.ArgumentParser, sides: tuple[str, ...]) -> argparse.Namespace:
    """The command line's options; unknown sides end the program."""
    options = made.parse_args()
    unknown = set(options.sides.split(",")) - set(sides)
    if unknown:
        made.error(f"unknown sides {sorted(unknown)}; choose from {', '.join(sides)}")
    return options


def start(script: str, options: argparse.Namespace, tuned: tuple[str, ...] = ()) -> list[Side]:
    """The processes of the sides asked for whose interpreter is known; those in `tuned` once more with tuned malloc."""
    asked = vars(options).items()
    pythons = {name.removeprefix("python_"): path for name, path in asked if name.startswith("python_")}
    chosen = {n: pythons.get(n.split("-")[0], sys.executable) for n in options.sides.split(",")}
    names = [t for n, p in chosen.items() if p for t in ((n, n + TUNED) if n in tuned else (n,))]
    return [Side(script, n, chosen[n.removesuffix(TUNED)], ISA.get(options.isa, {})) for n in names]


def run_each(script: str, names: Sequence[str]) -> dict[str, dict]:
    """What each side tells, where one has the machine to itself: the last line, JSON, that the script prints when it is
    run again with `--side NAME`, one after the other. Ends the program with the error of a side that fails."""
    results = {}
    for name in names:
        command = [sys.executable, script, *sys.argv[1:], "--side", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, results[name], flush=True)
    return results


def measure_steps(script: str, options: argparse.Namespace, tolerance: float) -> list[Side]:
    """The sides, ended, of a script whose one case is "step": first values are compared, a second step is left out, and
    then each side takes one step a round."""
    started = start(script, options)
    try:
        check_values({side.name: side.ask("step", 1)["values"][0] for side in started}, tolerance)
        for side in started:
            side.ask("step", 1)
        for _ in range(options.rounds):
            for side in started:
                side.measure("step", 1)
    finally:
        for side in started:
            side.close()
    return started


def check_values(values: dict[str, float], tolerance: float) -> None:
    """Refuses sides that do not compute the same thing; tolerance is absolute."""
    reference = next(iter(values.values()))
    for name, value in values.items():
        if not abs(value - reference) <= tolerance:
            raise SystemExit(f"{name} gives {value}, the first side {reference}: more than {tolerance} apart")
    print(f"first values: {values} (tolerance {tolerance:.1e})", file=sys.stderr)


ISA = {
    "avx2": {
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}
"""What --isa sets for every side. XLA's YNNPACK, which takes most products, looks at the processor itself and heeds
none of these: with AVX-512 there, those products stay as fast as they are with it."""


def instruction_sets() -> str:
    """Vector instruction sets of this processor, as Linux lists them."""
    path = Path("/proc/cpuinfo")
    words = set(path.read_text().split()) if path.exists() else set()
    return (
        " ".join(sorted(w for w in words if w in ("avx", "avx2", "fma") or w.startswith(("avx512", "avx_", "amx"))))
        or "?"
    )


def save(name: str, title: str, what: str, text: str, sides: list[Side]) -> Path:
    """Writes a result with what it was measured on to benchmarks/results/."""
    path = RESULTS / f"{name}.md"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    # of a benchmark without sides, those of the interpreter that runs it
    packages = {k: v for side in sides for k, v in side.versions.items()} or _versions()["versions"]
    versions = ", ".join(f"{k} {v}" for k, v in packages.items())
    sets = f"Instruction sets: {instruction_sets()}."
    path.write_text(f"# {title}, {date.today()}\n\n{what}\n{machine}; {versions}.\n{sets}\n\n{text}\n")
    return path


def table_of_cases(
    script: str,
    options: argparse.Namespace,
    cases: tuple[str, ...],
    calls: int,
    tolerance: float,
    per: int = 1,
    times: int = 1,
) -> tuple[str, list[Side]]:
    """Runs every case of every side in alternating rounds -> a markdown table in microseconds, and the sides.

    calls: of the case's function in each measurement; per: how many units of work one call does; times: measurements of
    a side in each round. All sides' first values of a case must be within tolerance.
    """
    sides = start(script, options)
    try:
        for case in cases:
            check_values({side.name: side.ask(case, 1)["values"][0] for side in sides}, tolerance)
            for side in sides:
                side.ask(case, 2, calls)  # warms up
        for _ in range(options.rounds):
            for case in cases:
                for side in sides:
                    side.measure(case, times, calls)
    finally:
        for side in sides:
            side.close()
    rows = ["| case | side | us, median | least | time to first side's | of least times |", "|---|---|---|---|---|---|"]
    for case in cases:
        first = sides[0]
        for side in sides:
            median, least = side.median(case), side.least(case)
            ratios = f"{median / first.median(case):.2f} | {least / first.least(case):.2f}"
            numbers = f"{median / per * 1e6:.1f} | {least / per * 1e6:.1f} | {ratios}"
            rows.append(f"| {case} | {side.name} | {numbers} |")
    return "\n".join(rows), sides
