"""Time of one training step on 8 virtual devices over its time on one, on the same total work, for one axis at a time.

    python benchmarks/parallel/mesh_scaling.py [--rounds 7] [--save NAME]

The virtual devices share the machine's cores, so 1.0 would mean that dividing the work costs nothing; what is above
is collectives, smaller products and dispatch. Plans take turns in each round, so a slow minute falls on all alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import steps as s

from polyreme.distributed.planned_step import PlannedStep
from polyreme.training import StepPolicy

PLANS = {
    "one device": {},
    "dp8": {"dp": 8},
    "mp8": {"mp": 8},
    "sharding8, stage 1": {"sharding": 8, "sharding_stage": 1},
    "sharding8, stage 2": {"sharding": 8, "sharding_stage": 2},
    "sharding8, stage 3": {"sharding": 8, "sharding_stage": 3},
    "pp8, 1F1B, 8 microbatches": {"pp": 8, "schedule": "1F1B", "num_microbatches": 8},
    "pp8, ZBH1, 8 microbatches": {"pp": 8, "schedule": "ZBH1", "num_microbatches": 8},
}
SIZES = {"hidden_size": 256, "num_heads": 8, "num_layers": 8, "seq_len": 128, "vocab_size": 4096}


class Stages:
    """A GPT over pipeline stages with one training step, as s.Step has it on one mesh."""

    def __init__(self, plan: s.Plan, batch: int = 16, **sizes: int) -> None:
        s.clear_plan()
        s.rng.seed(3)
        model = s.GPT(s.GPTConfig.nano(**sizes))

        def adamw(model: Any) -> Any:
            return s.AdamW(1e-3, parameters=model.parameters(), grad_clip=s.ClipGradByGlobalNorm(1.0))

        policy = StepPolicy(non_finite="halt")
        self.train = PlannedStep(model, plan, adamw, policy, s.jax.devices()[: plan.mesh.size])
        self.layout = self.train.layout
        self.parameters = model.parameters()
        tokens = s.np.random.default_rng(0).integers(0, sizes["vocab_size"], (batch, sizes["seq_len"] + 1))
        self.arguments = tokens[:, :-1], tokens[:, 1:]

    def __call__(self) -> float:
        """One step; its loss."""
        s.layouts.active.layout = self.layout
        loss = self.train(*self.arguments).loss
        # the loss is there before the last tasks and the updates are
        s.jax.block_until_ready([p._array for p in self.parameters])
        return float(loss)


def step_of(degrees: dict) -> Callable[[], float]:
    """The training step under a plan."""
    plan = s.Plan.from_degrees(**degrees)
    return Stages(plan, **SIZES) if plan.mesh.pp > 1 else s.Step("gpt", plan, **SIZES)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    sides = {name: step_of(degrees) for name, degrees in PLANS.items()}
    losses = {}
    for name, step in sides.items():
        losses[name] = step()
        step()  # the second call is the first that compiles nothing
    first = losses["one device"]
    # float32 sums of up to 1024 terms in another order, through 8 blocks
    if any(abs(loss - first) > 2.0**-23 * 32 * 17 * first for loss in losses.values()):
        raise SystemExit(f"the plans do not compute the same loss: {losses}")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, step in sides.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    base, best = statistics.median(seconds["one device"]), min(seconds["one device"])
    rows: list[tuple] = [("plan", "ms/step, median", "least", "over one device, median", "least")]
    for name, found in seconds.items():
        median = statistics.median(found)
        rows.append(
            (name, f"{median * 1e3:.0f}", f"{min(found) * 1e3:.0f}", f"{median / base:.2f}", f"{min(found) / best:.2f}")
        )
    text = s.markdown(rows)
    print(text)
    if options.save:
        what = (
            "GPT, 8 layers, 256 wide, 8 heads, batch 16 x 128, vocabulary 4096, float32, AdamW clipped by global norm; "
            f"8 virtual CPU devices on the machine's cores. {options.rounds} rounds, plans alternating."
        )
        print(s.save(options.save, "Step time over a mesh", what, text))


if __name__ == "__main__":
    main()
