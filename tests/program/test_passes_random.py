"""Random programs under random passes in a random order: the same values, bit for bit.

Values are small integers in float32, on which every op used here is exact in whatever order sums are taken; random
numbers are rounded to 0 and 1.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.core import unique_name
from polyreme.jit.control_flow import cond, while_loop
from polyreme.program.run import replay
from polyreme.static import passes

SIZE = 3
WEIGHTS = np.array([[1, 0, -1], [0, 1, 1], [1, 0, 0]], "float32")
ORDER = ("constant_folding", "identity", "common_subexpression", "dead_code", "fusion", "recompute")


def kept_small(x):
    """Integers stay below 8, so that products of a few stay exact."""
    return paddle.clip(x, -8, 8)


def add_in_place(x, y, made):
    fresh = x * 1
    fresh += y
    return fresh


def branch(x, y, made):
    return cond(x.sum() > 0, lambda: kept_small(x + y) + 0 * (x + y), lambda: F.relu(y * 1) - x)


def loop(x, y, made):
    limit = paddle.ones([1], "int64") + 1
    return while_loop(
        lambda i, a: i < limit,
        lambda i, a: [i + 1, kept_small(a * 1 + y * paddle.ones([SIZE]))],
        [paddle.zeros([1], "int64"), x],
        maximum_iterations=3,
    )[1]


def moved(x, y, made):
    """Writes a persistable value between two readings of it."""
    before = made["state"] + x
    with paddle.no_grad():
        paddle.assign(kept_small(made["state"] + 1), made["state"])
    return before + made["state"]


STEPS = {
    "sum": lambda x, y, made: x + y,
    "same sum": lambda x, y, made: (x + y) - (x + y) + x,
    "product": lambda x, y, made: kept_small(x) * kept_small(y),
    "relu": lambda x, y, made: F.relu(x),
    "copied": lambda x, y, made: paddle.assign(x),
    "once": lambda x, y, made: x * 1 / 1,
    "idle": lambda x, y, made: F.dropout(x, 0.5, training=False),
    "turned": lambda x, y, made: paddle.transpose(paddle.transpose(x, [1, 0]), [1, 0]),
    "shape": lambda x, y, made: paddle.reshape(x, [paddle.shape(x)[0], SIZE]),
    "constant": lambda x, y, made: x + paddle.ones([SIZE]) * 2,
    "held": lambda x, y, made: x * made["held"],
    "linear": lambda x, y, made: paddle.matmul(kept_small(x), made["w"]) + made["b"],
    "drawn": lambda x, y, made: x + paddle.floor(paddle.rand([SIZE]) + 0.5),
    "dropped": lambda x, y, made: F.dropout(kept_small(x), 0.5),
    "stopped": lambda x, y, made: x.detach() + y,
    "in place": add_in_place,
    "branch": branch,
    "loop": loop,
    "moved": moved,
    "unused": lambda x, y, made: (paddle.rand([2]), y)[1],
}


@dataclass(frozen=True)
class Step:
    """An entry of STEPS on two of the values there are."""

    name: str
    first: int
    second: int


def recorded(steps, trained):
    """(program, names of results, names of checkpoints)."""
    main, startup = static.Program(), static.Program()
    paddle.disable_static()
    constant = paddle.to_tensor(np.array([1, -1, 2], "float32"))
    with unique_name.guard(), static.program_guard(main, startup):
        paddle.enable_static()
        try:
            parameters = {
                n: paddle.create_parameter(s, "float32", name=n) for n, s in (("w", [SIZE, SIZE]), ("b", [SIZE]))
            }
            parameters["state"] = paddle.create_parameter([SIZE], "float32", name="state")
            parameters["state"].stop_gradient = True
            found = [static.data("x", [2, SIZE]), paddle.matmul(static.data("y", [2, SIZE]), parameters["w"])]
            values = list(found)
            for step in steps:
                x, y = values[step.first % len(values)], values[step.second % len(values)]
                values.append(kept_small(STEPS[step.name](x, y, parameters | {"held": constant})))
            loss = sum((v.sum() for v in [values[1], *values[-2:]]), paddle.zeros([]))
            if trained:
                values += [g for _, g in static.append_backward(loss)]
        finally:
            paddle.disable_static()
        return main, [v._array.name for v in values], [v._array.name for v in values[1 : len(steps) + 2]]


def run(program, names):
    scope = static.Scope()
    for name, value in {"w": WEIGHTS, "b": [1, 0, -1], "state": [0, 1, 2]}.items():
        scope.var(name).get_tensor().set(np.asarray(value, "float32"))
    for name in ("w", "b"):
        scope.find(name).stop_gradient = False
    feed = {"x": [[1, -2, 3], [0, 1, -1]], "y": [[2, 1, 0], [-1, -1, 1]]}
    paddle.seed(3)
    found = []
    for _ in range(2):
        fed = {n: paddle.to_tensor(np.asarray(v, "float32")) for n, v in feed.items()}
        found += [t.numpy() for t in replay(program, scope, fed, names)]
    return [*found, scope.find("state").numpy()]


steps = st.lists(
    st.builds(Step, st.sampled_from(sorted(STEPS)), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=9
)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    steps, st.booleans(), st.lists(st.sampled_from(ORDER), min_size=1, max_size=5), st.randoms(use_true_random=False)
)
def test_passes_change_no_value(steps, trained, order, choose):
    program, names, checkpoints = recorded(steps, trained)
    keep = sorted(choose.sample(names, choose.randint(1, len(names))))
    changed = program
    for name in order:
        options = {"checkpoints": choose.sample(checkpoints, 1)} if name == "recompute" else {}
        fetched = keep + options.get("checkpoints", [])
        if name == "recompute" and options["checkpoints"][0] not in {
            n for op in changed.global_block().ops for n in op.outputs
        }:
            continue
        changed = passes.apply(changed, [(name, options)], fetch=fetched)
    for a, b in zip(run(program, keep), run(changed, keep), strict=True):
        np.testing.assert_array_equal(a, b)
