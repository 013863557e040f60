"""Contract rows of ops/reduce.py."""

from tests.ops.contract import Case

CASES = [
    Case(
        "sum", lambda rng: (rng.standard_normal((3, 4)).astype("float32"), 1), lambda x, axis: x.sum(axis), tag="axis"
    ),
]
