"""Time `import polyreme`, `import polyreme; polyreme.Tensor` and `import jax`, each in fresh processes, in turn.

python benchmarks/import_time.py [--rounds 9] [--save NAME]
"""

import argparse
import statistics
import subprocess
import sys
import time

import sides as s

STATEMENTS = {
    "import jax": "import jax, jax.numpy",
    "import polyreme": "import polyreme",
    "import polyreme; polyreme.Tensor": "import polyreme; polyreme.Tensor",
    "python alone": "pass",
}


def seconds(statement: str) -> float:
    """Wall time of a process that runs the statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    for statement in STATEMENTS.values():
        seconds(statement)  # compiles the .pyc files and fills the disk cache
    times_of: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(options.rounds):
        for name, statement in STATEMENTS.items():
            times_of[name].append(seconds(statement))
    base = statistics.median(times_of["import jax"])
    rows = ["| process | ms, median | least | time to import jax's |", "|---|---|---|---|"]
    for name, times in times_of.items():
        median = statistics.median(times)
        rows.append(f"| `{name}` | {median * 1e3:.0f} | {min(times) * 1e3:.0f} | {median / base:.2f} |")
    text = "\n".join(rows)
    print(text)
    if options.save:
        print(s.save(options.save, "Import time", f"Whole processes. {options.rounds} rounds.", text, []))


if __name__ == "__main__":
    main()
