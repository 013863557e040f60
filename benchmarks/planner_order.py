"""Does the planner put plans in the right order? 20 plans of a small GPT on 8 virtual CPU devices, and their times.

    polyreme calibrate                      # once on this machine, at a quiet time; else it is done here
    python benchmarks/planner_order.py [--rounds 9] [--seconds 240] [--save NAME]

Every plan's step is compiled, then all are timed in turn, in another order each round; times are compared with
planner.predict by Spearman's rank correlation. The goal is 0.8. Nothing of the prediction is fitted to these steps: it
reads the calibration, one matmul and one collective curve of this machine.
"""

import argparse

import planner_steps as s
from planner_steps import np

from polyreme.mesh import Plan
from polyreme.planner.predict import predict
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.estimate import shape_of
from polyreme.recipes.planning.plan import plan_words, training_of

GOAL = 0.8
of = Plan.from_degrees
PLANS = [
    of(dp=8),
    of(sharding=8, sharding_stage=1),
    of(sharding=8, sharding_stage=2),
    of(sharding=8, sharding_stage=3),
    of(mp=8),
    of(mp=8, sequence_parallel=True),
    of(dp=4, mp=2),
    of(dp=2, mp=4),
    of(dp=2, sep=4),
    of(dp=4, sep=2),
    of(dp=2, sharding=2, mp=2, sharding_stage=3),
    of(dp=8, num_microbatches=4),
    of(dp=8, recompute="full"),
    of(mp=8, recompute="full"),
    of(dp=4, pp=2, num_microbatches=2),
    of(dp=2, pp=4, num_microbatches=8),
    of(pp=8, num_microbatches=8),
    of(pp=4, mp=2, num_microbatches=16),
    of(dp=2, pp=2, mp=2, num_microbatches=4, schedule="ZBH1"),
    of(dp=4, pp=2, num_microbatches=4, schedule="VPP"),
]
CONFIG = PretrainConfig.model_validate(
    {
        "model": {"vocab_size": 2048, "hidden_size": 256, "num_layers": 6, "num_heads": 8, "seq_len": 64},
        "data": {"tokenizer_vocab_size": 2048},
        "train": {"global_batch": 32},
    }
)


def spearman(xs: list[float], ys: list[float]) -> float:
    """Rank correlation; no two values are equal."""
    ranks = [np.argsort(np.argsort(np.array(values))).astype(float) for values in (xs, ys)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=240, help="stop after the round in which these are over")
    parser.add_argument("--plans", type=int, default=len(PLANS), help="the first few, to try the script")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    cluster = s.calibrated()
    shape, training = shape_of(CONFIG.model), training_of(CONFIG, cluster)
    predicted = [predict(shape, plan, cluster, CONFIG.train.global_batch, training) for plan in PLANS[: options.plans]]
    sides = [s.made(f"{at + 1} of {options.plans}", CONFIG, plan) for at, plan in enumerate(PLANS[: options.plans])]
    measured = s.in_turn(sides, options.rounds, options.seconds)
    rows: list[tuple] = [("plan", "measured ms", "least", "predicted ms", "predicted: what binds")]
    for seconds, side, p in sorted(zip(measured, sides, predicted, strict=True), key=lambda found: found[0]):
        times = [f"{each * 1e3:.1f}" for each in (seconds, min(side.rounds), p.step_seconds)]
        rows.append((plan_words(side.plan), *times, p.binds))
    steps = [p.step_seconds for p in predicted]
    least = spearman([min(side.rounds) for side in sides], steps)
    verdict = f"Spearman {spearman(measured, steps):.3f}, {least:.3f} by least times; the goal is {GOAL}."
    text = f"{s.markdown(rows)}\n\n{verdict}"
    print(text)
    if options.save:
        what = f"{s.what(CONFIG)} {len(sides)} plans, {len(sides[0].rounds)} rounds."
        print(s.save(options.save, "Predicted order of plans against measured steps", what, text))


if __name__ == "__main__":
    main()
