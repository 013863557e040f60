"""Predicted step times against published ones, by system; and what the curves would be, had half of the rows set them.

    python benchmarks/planner_published.py [ROWS.csv ...] [--half | --kinds] > results/planner_published_DATE.md

Rows are those of benchmarks/published_runs.csv unless given; published_more.csv has others, published_blind.csv,
published_unseen.csv and published_tables.csv those that were written down before they were predicted. --kinds: by what
is trained and by table, rows that constants were set on apart from the others: median error, share within 35%, share of
the runs, all of which existed, that are called fitting.
--half: for each device kind, scale its matmul and attention curves by the factor that makes the median error of every
second row of each system least; show the others.
"""

import argparse
import platform
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from polyreme.planner.conventions import measured_seconds
from polyreme.planner.published import run_of
from polyreme.planner.published_file import read_rows

ROWS = Path(__file__).with_name("published_runs.csv")

LONG = 16_384
"""Tokens a row from which a run counts as one of long sequences."""

SET = ("r", "mh", "ma", "n07", "n04", "ls")
"""First letters of the ids of rows that constants were set with: the sample (all curves), MPT in 16 bits on H100 and
A100 with 80 GB, NeMo 24.07 (compute._LOW) and 25.04 (frameworks._SYNC) and its long sequences. The others
set no number, but were looked at when mechanisms were sought: they are no blind test."""

HALVES = ("un", "ul", "ug", "uk", "um", "up", "uv", "uf", "uq", "ua", "uo")
"""First letters of the ids of published_unseen.csv: of each table rows of odd number were looked at when what erred was
mended, those of even number never one by one. The same was so of published_blind.csv until its errors had been seen."""


LEARNT = ("xc", "xe", "xf", "xi", "xk", "xl", "xm", "xo", "xq", "xv", "xw", "xx")
"""Tables of published_tables.csv that were looked at when what erred was mended: half of the 23, by the digests of
their names; the others were not until all was mended and figures taken."""


def compared(row, scale=1.0):
    """(run, prediction, measured seconds, relative error) of a row, with curves scaled."""
    run = run_of(row)
    if scale != 1.0:
        device = run.cluster.device
        curves = {
            name: tuple((x, min(1.0, y * scale)) for x, y in getattr(device, name)) for name in ("matmul", "attention")
        }
        run = replace(run, cluster=replace(run.cluster, device=replace(device, **curves)))
    found = run.predict()
    measured = measured_seconds(row, run.model, run.batch, run.cluster.num_devices)
    return run, found, measured, found.step_seconds / measured - 1


def system_of(row):
    """System and year, as rows are grouped."""
    return f"{row['system'].split('@')[0]} {row['date'].lstrip('<=')[:4]}"


def summary(errors):
    """Cells: count, median, p90 and worst of absolute errors, median error with its sign."""
    sizes = sorted(map(abs, errors))
    ninth = sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))]
    signed = statistics.median(errors)
    return f"{len(sizes)} | {statistics.median(sizes):.1%} | {ninth:.1%} | {sizes[-1]:.1%} | {signed:+.1%}"


def table(rows):
    """Every row, then a summary by system."""
    lines = [
        "| row | system | model | devices | plan | measured s | predicted s | error | GiB | what it waits for |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors = defaultdict(list)
    for row in rows:
        run, prediction, measured, error = compared(row)
        errors[system_of(row)].append(error)
        plan = run.plan
        shape = f"{' '.join(f'{axis}{n}' for axis, n in plan.mesh.degrees.items() if n > 1)}"
        shape += (
            f", {plan.num_microbatches} x {plan.rows_per_device(run.batch)}, v{plan.virtual_stages}, {plan.recompute}"
        )
        lines.append(
            f"| {row['id']} | {row['system']} | {row['model']} | {run.cluster.num_devices} {run.cluster.device.name} | "
            f"{shape} | {measured:.3f} | {prediction.step_seconds:.3f} | {error:+.1%} | "
            f"{prediction.memory.total / 2**30:.0f} | {prediction.binds} |"
        )
    lines += ["", "| system | rows | median | p90 | worst | bias |", "|---|---|---|---|---|---|"]
    lines += [f"| {system} | {summary(each)} |" for system, each in sorted(errors.items())]
    lines.append(f"| all | {summary([e for each in errors.values() for e in each])} |")
    return lines


def kind_of(row):
    """What a row is of, for --kinds."""
    if row["experts"]:
        return "experts"
    if any(word in row["dtype"].lower() for word in ("fp8", "fp4")):
        return "dense, 8 or 4 bits"
    return f"dense, 16 bits, {'long rows' if int(row['seq']) >= LONG else 'others'}"


def is_set(row):
    """Whether constants were set with the row, or what it showed was mended."""
    name = row["id"]
    if name.startswith("x"):
        return name.startswith(LEARNT)
    return int(name[-1]) % 2 == 1 if name.startswith(HALVES) else name.startswith(SET)


def source_of(row):
    """The table that a row is from: letters and a version before its number."""
    name = row["id"]
    return "sample" if name.startswith("r") else name[: 3 if name.startswith(("n", "b1")) else 2]


def kinds(rows):
    """By kind and by source, rows that were looked at apart from the others."""
    lines = []
    for name, of in (("kind", kind_of), ("table", source_of)):
        lines += [
            f"| {name} | set with | rows | median | p90 | worst | bias | within 35% | called fitting |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        outcomes = defaultdict(list)
        for row in rows:
            looked_at = is_set(row)
            _, prediction, _, error = compared(row)
            for key in {(of(row), looked_at), ("all", looked_at)}:
                outcomes[key].append((error, prediction.fits))
        for (what, looked_at), each in sorted(outcomes.items()):
            errors, fits = zip(*each, strict=True)
            near = sum(abs(error) <= 0.35 for error in errors) / len(errors)
            told = f"{near:.0%} | {sum(fits) / len(fits):.0%}"
            lines.append(f"| {what} | {'yes' if looked_at else 'no'} | {summary(errors)} | {told} |")
        lines.append("")
    return lines


def halves(rows):
    """Curves scaled on every second row of each system, judged on the others."""
    seen, half = defaultdict(int), {}
    for row in rows:
        half[row["id"]] = seen[system_of(row)] % 2
        seen[system_of(row)] += 1
    lines = ["| device kind | scale from half A | A: rows, median, p90, worst, bias | B |", "|---|---|---|---|"]
    scales = [0.80 + 0.02 * i for i in range(21)]
    for kind in sorted({row["hardware"] for row in rows}):
        mine = [row for row in rows if row["hardware"] == kind]
        a, b = ([row for row in mine if half[row["id"]] == which] for which in (0, 1))
        best = min(scales, key=lambda s: statistics.median(abs(compared(row, s)[3]) for row in a))
        shown = [summary([compared(row, best)[3] for row in each]).replace(" | ", ", ") for each in (a, b) if each]
        lines.append(f"| {kind} | {best:.2f} | {' | '.join(shown)} |")
    return lines


def main() -> None:
    """Prints Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path, default=[ROWS])
    parser.add_argument("--kinds", action="store_true", help="by what is trained and by source")
    parser.add_argument("--half", action="store_true", help="scale curves on half of the rows, show the other half")
    given = parser.parse_args()
    rows = [row for path in given.rows for row in read_rows(path)]
    names = " and ".join(path.name for path in given.rows)
    print(f"Python {platform.python_version()}, {platform.machine()}; {len(rows)} rows of {names}.\n")
    print("\n".join(halves(rows) if given.half else kinds(rows) if given.kinds else table(rows)))


if __name__ == "__main__":
    main()
