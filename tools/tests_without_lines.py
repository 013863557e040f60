r"""Names the slow tests that reach no line of the package which others do not reach, dearest first.

    pip install pytest-cov
    python -m pytest -n 2 --dist worksteal -m "not slow and not oracle" --junitxml=suite.xml \
        --cov=polyreme --cov-context=test --cov-report=
    python tools/tests_without_lines.py .coverage suite.xml --seconds 1

What is named may go to `make test-all`, all of it together, if another test claims the same: give it
`@pytest.mark.one_in(n)`, `slow_cases` or `slow`. That a line is reached does not say that its result is looked at:
break one that it reaches and see that other fails, and leave tables with a case for each op, layer or optimizer whole.
"""

import argparse
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

from coverage import CoverageData


def lines_by_test(path: Path) -> dict[str, list[int]]:
    """By test, as pytest names it: the lines that it reaches, numbered over all files."""
    data = CoverageData(str(path))
    data.read()
    lines, count = defaultdict(list), 0
    for file in data.measured_files():
        for contexts in data.contexts_by_lineno(file).values():
            # a test's setup, call and teardown are contexts of their own
            for test in {context.rpartition("|")[0] for context in contexts}:
                lines[test].append(count)
            count += 1
    lines.pop("", None)  # what is reached while modules are imported
    return dict(lines)


def seconds_by_test(path: Path) -> dict[str, float]:
    """By test, as the report names it."""
    cases = ElementTree.parse(path).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": float(case.get("time", 0)) for case in cases}


def in_report(test: str) -> str:
    """The name of a test in the report: tests/a.py::B::test[c] is tests.a.B::test[c]."""
    place, bracket, case = test.partition("[")
    *places, name = place.split("::")
    places[0] = places[0].removesuffix(".py").replace("/", ".")
    return f"{'.'.join(places)}::{name}{bracket}{case}"


def without_lines(lines: dict[str, list[int]], seconds: dict[str, float], least: float) -> list[str]:
    """Tests of at least so many seconds that can all go while every line is still reached; the dearest go first."""
    reached = Counter(line for test in lines.values() for line in test)
    names = []
    for test in sorted(lines, key=lambda test: -seconds.get(in_report(test), 0)):
        if seconds.get(in_report(test), 0) < least:
            break
        if all(reached[line] > 1 for line in lines[test]):
            reached.subtract(lines[test])
            names.append(test)
    return names


def main() -> None:
    """Prints seconds and names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coverage", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=1, help="tests that take less are not looked at")
    options = parser.parse_args()
    seconds = seconds_by_test(options.report)
    names = without_lines(lines_by_test(options.coverage), seconds, options.seconds)
    for test in names:
        print(f"{seconds[in_report(test)]:7.1f}  {test}")
    print(f"{len(names)} tests, {sum(seconds[in_report(test)] for test in names):.0f} of {sum(seconds.values()):.0f} s")


if __name__ == "__main__":
    main()
