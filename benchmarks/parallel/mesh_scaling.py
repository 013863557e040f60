"""Time of one training step on 8 virtual devices over its time on one, on the same total work, for one axis at a time.

    python benchmarks/parallel/mesh_scaling.py [--rounds 7] [--save NAME]

The virtual devices share the machine's cores, so 1.0 would mean that dividing the work costs nothing; what is above
is collectives, smaller products and dispatch. Plans take turns in each round, so a slow minute falls on all alike.
"""

import argparse
import statistics
import time

import steps as s

PLANS = {
    "one device": {},
    "dp8": {"dp": 8},
    "mp8": {"mp": 8},
    "sharding8, stage 1": {"sharding": 8, "sharding_stage": 1},
    "sharding8, stage 2": {"sharding": 8, "sharding_stage": 2},
    "sharding8, stage 3": {"sharding": 8, "sharding_stage": 3},
}
SIZES = {"hidden_size": 256, "num_heads": 8, "num_layers": 4, "seq_len": 128, "vocab_size": 4096}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    sides = {name: s.Step("gpt", s.Plan.from_degrees(**degrees), **SIZES) for name, degrees in PLANS.items()}
    losses = {}
    for name, step in sides.items():
        losses[name] = step()
        step()  # the second call is the first that compiles nothing
    first = losses["one device"]
    # float32 sums of up to 1024 terms in another order, through 4 blocks
    if any(abs(loss - first) > 2.0**-23 * 32 * 9 * first for loss in losses.values()):
        raise SystemExit(f"the plans do not compute the same loss: {losses}")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, step in sides.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["one device"])
    rows: list[tuple] = [("plan", "ms/step, median", "least", "over one device")]
    for name, found in seconds.items():
        median = statistics.median(found)
        rows.append((name, f"{median * 1e3:.0f}", f"{min(found) * 1e3:.0f}", f"{median / base:.2f}"))
    text = s.markdown(rows)
    print(text)
    if options.save:
        what = (
            "GPT, 4 layers, 256 wide, 8 heads, batch 16 x 128, vocabulary 4096, float32, AdamW clipped by global norm; "
            f"8 virtual CPU devices on the machine's cores. {options.rounds} rounds, plans alternating."
        )
        print(s.save(options.save, "Step time over a mesh", what, text))


if __name__ == "__main__":
    main()
