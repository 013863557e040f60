"""Prints the suite's time by folder from a JUnit file: `make test` with `--junitxml=FILE`, then this with FILE.

A second file, of an earlier run, is printed beside it. Seconds are summed over the workers, children included.
"""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def main(paths: list[str]) -> None:
    """Print the table."""
    runs = [_seconds(Path(path)) for path in paths]
    print("| folder |" + " tests | s |" * len(runs))
    print("|---|" + "---:|---:|" * len(runs))
    folders = sorted({folder for _, seconds in runs for folder in seconds})
    for folder in folders:
        print(f"| {folder} |" + "".join(f" {tests[folder]} | {seconds[folder]:.0f} |" for tests, seconds in runs))
    print("| all |" + "".join(f" {tests.total()} | {seconds.total():.0f} |" for tests, seconds in runs))


def _seconds(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Number of tests and their seconds, by folder of tests/."""
    tests: Counter[str] = Counter()
    seconds: Counter = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        parts = case.get("classname", "").split(".")
        folder = parts[1] if len(parts) > 2 and not parts[1].startswith("test_") else "(files)"
        tests[folder] += 1
        seconds[folder] += float(case.get("time", 0))
    return tests, seconds


if __name__ == "__main__":
    main(sys.argv[1:])
