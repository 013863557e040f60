"""Shows that the contract table catches faults: breaks twelve ops one at a time in a copy and runs their rows.

Run by `make mutation`; a few minutes. Prints a table and ends with 1 if a fault was not caught, or with 2 if a line to
break is no longer there.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = "tests/ops/test_contract.py"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One fault: `right` stands once in `path`, and is replaced by `wrong`; the rows of `op` are to catch it."""

    op: str
    fault: str
    path: str
    right: str
    wrong: str


MUTATIONS = [
    Mutation(
        "lerp", "wrong sign", "polyreme/ops/math.py", "return x + weight * (y - x)", "return x - weight * (y - x)"
    ),
    Mutation(
        "cumsum", "wrong axis", "polyreme/ops/scan.py", "jnp.cumsum(flat, dim,", "jnp.cumsum(flat, flat.ndim - 1 - dim,"
    ),
    Mutation(
        "layer_norm",
        "dropped term, of the gradient alone",
        "polyreme/kernels/norm.py",
        "(scaled - scaled.mean(-1, keepdims=True) - unit",
        "(scaled - unit",
    ),
    Mutation(
        "linear",
        "wrong sign, of the weight's gradient alone",
        "polyreme/kernels/linear.py",
        "rows_product(x, dy).astype",
        "(-rows_product(x, dy)).astype",
    ),
    Mutation(
        "trace",
        "wrong dtype: float64 of float32",
        "polyreme/ops/matrices/products.py",
        "else x.dtype)\n\n\ndef _einsum",
        "else dtypes.float64)\n\n\ndef _einsum",
    ),
    Mutation(
        "matmul",
        "wrong dtype: float32 under bfloat16 autocast",
        "polyreme/ops/arithmetic.py",
        "y, preferred_element_type=wide).astype(x.dtype)\n        return flat",
        "y, preferred_element_type=wide)\n        return flat",
    ),
    Mutation("var", "wrong divisor: n for n - 1", "polyreme/ops/reduce.py", "ddof=correction,", "ddof=0,"),
    Mutation(
        "angle",
        "swapped arguments",
        "polyreme/ops/complex.py",
        "jnp.arctan2(imag, jnp.where(zero, 1, real))",
        "jnp.arctan2(jnp.where(zero, 1, real), imag)",
    ),
    Mutation(
        "fft",
        "complex gradient not conjugated",
        "polyreme/core/kernel.py",
        "return jnp.conj(x) if dtypes.is_complex(x.dtype) else x",
        "return x",
    ),
    Mutation(
        "softmax",
        "bound of a check off by one",
        "polyreme/ops/activation.py",
        "if not -ndim <= axis < ndim:",
        "if not -ndim <= axis <= ndim:",
    ),
    Mutation(
        "gather",
        "wrong default: the last dim for the first",
        "polyreme/ops/indices/gather.py",
        'dim_of(0 if axis is None else axis, x.ndim, "gather")',
        'dim_of(-1 if axis is None else axis, x.ndim, "gather")',
    ),
    Mutation(
        "roll",
        "dropped attribute: shifts of the first dim alone",
        "polyreme/ops/manipulation.py",
        "return jnp.roll(x, ints(shifts), dims)",
        "return jnp.roll(x, ints(shifts)[0], dims[0])",
    ),
]


def main() -> int:
    """Run every mutation; the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        _copy_tree(copy)
        rows = _rows(copy)
        missing = [m.op for m in MUTATIONS if not rows.get(m.op)]
        stale = [m.op for m in MUTATIONS if (copy / m.path).read_text().count(m.right) != 1]
        if missing or stale:
            print(f"no rows of: {missing}; the line to break is gone, or there twice, for: {stale}")
            return 2
        untouched = _run(copy, [row for m in MUTATIONS for row in rows[m.op]], "-q")
        if untouched.returncode:
            print(untouched.stdout, "\nthe rows fail before anything is broken")
            return 2
        print("| op | fault | rows | rows that fail | first to fail | seconds | caught |")
        print("|---|---|---:|---:|---|---:|---|")
        missed = [m for m in MUTATIONS if not _is_caught(copy, m, rows[m.op])]
    print(f"\n{len(MUTATIONS) - len(missed)} of {len(MUTATIONS)} faults caught")
    return 1 if missed else 0


def _copy_tree(copy: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy / name)


def _rows(copy: Path) -> dict[str, list[str]]:
    """Node ids of the rows of each op."""
    lines = _run(copy, [TABLE], "-q", "--collect-only").stdout.splitlines()
    rows: dict[str, list[str]] = {}
    for line in lines:
        row = re.fullmatch(r".*::test_row\[(\w+).*\]", line)
        if row:
            rows.setdefault(row[1], []).append(line)
    return rows


def _is_caught(copy: Path, mutation: Mutation, rows: list[str]) -> bool:
    """Break the copy, run the rows, mend the copy, print a line of the table."""
    file = copy / mutation.path
    text = file.read_text()
    file.write_text(text.replace(mutation.right, mutation.wrong))
    start = time.perf_counter()
    try:
        result = _run(copy, rows, "-q", "--tb=no", "-rf")
    finally:
        file.write_text(text)
    if result.returncode not in (0, 1):
        raise SystemExit(f"{mutation.op}: pytest ended with {result.returncode}\n{result.stdout}{result.stderr}")
    failed = re.findall(r"^FAILED .*\[(.*?)\](?: - (.*))?$", result.stdout, re.MULTILINE)
    first = ": ".join(part for part in failed[0] if part).replace("|", "/")[:70] if failed else ""
    caught = "yes" if failed else "NO"
    seconds = time.perf_counter() - start
    print(
        f"| {mutation.op} | {mutation.fault} | {len(rows)} | {len(failed)} | {first} | {seconds:.0f} | {caught} |",
        flush=True,
    )
    return bool(failed)


def _run(copy: Path, tests: list[str], *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


if __name__ == "__main__":
    raise SystemExit(main())
