"""Is the plan that the planner chooses the fastest? Its step against every mesh of 8 virtual CPU devices that is timed.

    polyreme calibrate                      # once on this machine, at a quiet time; else it is done here
    python benchmarks/planner_best.py --model gpt [--plans 16] [--rounds 5] [--seconds 150] [--save NAME]

One model an invocation: gpt, llama (grouped heads), vocab (a GPT with a large vocabulary), rows (a LLaMA with long
rows). The search gives one plan for each mesh and sharding that fits; timed in turn are the ten best predicted and
others spread evenly over the rest. The goal: the chosen plan's median within 5% of the least median.
"""

import argparse

import planner_steps as s

from polyreme.planner.search import Ranked
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.plan import answer, plan_words

GOAL = 0.05
_BEST = 10  # of the timed plans, those predicted fastest
SIZES = {
    "gpt": {"vocab_size": 2048, "hidden_size": 256, "num_layers": 6, "num_heads": 8, "seq_len": 64},
    "llama": {
        "family": "llama",
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_layers": 6,
        "num_heads": 8,
        "num_kv_heads": 4,
        "seq_len": 64,
        "tie_embeddings": False,
    },
    "vocab": {"vocab_size": 16384, "hidden_size": 192, "num_layers": 4, "num_heads": 8, "seq_len": 64},
    "rows": {
        "family": "llama",
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 8,
        "seq_len": 512,
    },
}


def config_of(name: str) -> PretrainConfig:
    """The configuration of a model."""
    sizes = SIZES[name]
    tokenizer = {"tokenizer_vocab_size": min(1024, sizes["vocab_size"])}
    batch = 16 if name == "rows" else 32
    return PretrainConfig.model_validate({"model": sizes, "data": tokenizer, "train": {"global_batch": batch}})


def bounded(plans: tuple[Ranked, ...], count: int) -> list[Ranked]:
    """The first ones, and others spread evenly over the rest."""
    first, rest = list(plans[: min(_BEST, count)]), plans[min(_BEST, count) :]
    wanted = min(count - len(first), len(rest))
    return first + [rest[at * len(rest) // wanted] for at in range(wanted)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--plans", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150, help="stop after the round in which these are over")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    config = config_of(options.model)
    feasible = answer(config, s.calibrated(), top=1000).found.plans
    ranked = bounded(feasible, options.plans)
    sides = [s.made(f"{at + 1} of {len(ranked)}", config, each.plan) for at, each in enumerate(ranked)]
    s.in_turn(sides, options.rounds, options.seconds)
    best = min(side.median for side in sides)
    rows: list[tuple] = [("predicted rank", "plan", "predicted ms", "measured ms, median", "least", "over the best")]
    for side, each in sorted(zip(sides, ranked, strict=True), key=lambda pair: pair[0].median):
        times = [f"{t * 1e3:.1f}" for t in (each.prediction.step_seconds, side.median, min(side.seconds))]
        rows.append((feasible.index(each) + 1, plan_words(each.plan), *times, f"{side.median / best - 1:+.1%}"))
    over = sides[0].median / best - 1
    verdict = (
        f"The chosen plan, {plan_words(ranked[0].plan)}, is {over:.1%} over the best measured; the goal is {GOAL:.0%}."
    )
    text = f"{s.markdown(rows)}\n\n{verdict}"
    print(text)
    if options.save:
        steps = len(sides[0].seconds)
        what = f"{s.what(config)} {len(sides)} of {len(feasible)} plans that fit, {steps} timed steps of each."
        print(s.save(options.save, f"The planner's choice against measured steps: {options.model}", what, text))


if __name__ == "__main__":
    main()
