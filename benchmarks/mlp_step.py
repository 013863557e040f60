"""Time one training step of a 784-100-10 network, batch 64, with SGD and with Adam, in several frameworks.

    python benchmarks/mlp_step.py --python-torch ~/torch/bin/python --python-paddle ~/paddle/bin/python --save NAME

Each step ends with its loss on the host. All sides start at the same weights and must give the same first loss.
"""

import argparse
from collections.abc import Callable

import mlp_workload as w
import sides as s

SIDES = ("polyreme", "polyreme-eager", "torch", "paddle")
CASES = ("SGD", "Adam")


def build(side: str) -> dict[str, Callable[[], float]]:
    """-> a step for each optimizer; the framework is imported here, in the side's own process."""
    if side == "torch":
        return {case: w.torch_step(w.torch_mlp(), case, w.batch()) for case in CASES}
    if side == "paddle":
        import paddle

        paddle.set_device("cpu")
        return {case: w.paddle_step(paddle, w.paddle_mlp(paddle), case, w.batch()) for case in CASES}
    import polyreme as paddle

    captured = side == "polyreme"
    return {case: w.paddle_step(paddle, w.paddle_mlp(paddle), case, w.batch(), captured) for case in CASES}


def measure(options: argparse.Namespace) -> tuple[str, list[s.Side]]:
    """Runs all sides in alternating rounds -> the table and the sides."""
    return s.table_of_cases(__file__, options, CASES, calls=options.steps, tolerance=w.TOLERANCE)


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=15)
    parser.add_argument("--steps", type=int, default=200, help="steps a side takes in each round")
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    text, sides = measure(options)
    print(text)
    if options.save:
        what = f"784-100-10, ReLU, cross-entropy, batch 64, float32. {options.rounds} rounds of {options.steps} steps."
        print(s.save(options.save, "MLP training step", what, text, sides))


if __name__ == "__main__":
    main()
