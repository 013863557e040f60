"""A pipeline over replicas, this checkout against another: bytes of gradient sums, and the time of a step.

    python benchmarks/parallel/gradient_sums.py --other CHECKOUT [--rounds 8] [--save NAME]

dp2 x pp2 on 4 virtual CPU devices: a GPT of 4 layers, 256 wide, vocabulary 4096, 32 x 64 tokens a step in 2 and 8
microbatches. Each checkout runs in a process of its own, in turn. Bytes: what a device sends in all-reduces over dp
in a step, the mean of the stages, read off the compiled programs.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import sides as s  # noqa: E402  (it lies a folder up)

MICROBATCHES = (2, 8)
ROWS, SEQ, VOCAB = 32, 64, 4096
SETTINGS = {"CPU_NUM": "4", "JAX_PLATFORMS": "cpu"}
SIDES = ("this", "other")


def build(side: str) -> dict[str, Callable[[], float]]:
    """For each number of microbatches a training step, and what a step sends."""
    # the checkout is chosen by this process's PYTHONPATH; the process that times both imports neither
    import jax
    import numpy as np

    from polyreme.recipes.config import PretrainConfig
    from polyreme.recipes.planning import communication
    from polyreme.recipes.training.trainer import Trainer

    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1))

    def config(microbatches: int) -> PretrainConfig:
        model = {"family": "gpt", "vocab_size": VOCAB, "hidden_size": 256, "num_layers": 4, "num_heads": 8}
        return PretrainConfig.model_validate(
            {
                "model": {**model, "seq_len": SEQ},
                "train": {"global_batch": ROWS, "accumulation": microbatches},
                "plan": {"dp": 2, "pp": 2},
            }
        )

    def step(microbatches: int) -> Callable[[], float]:
        trainers: list[Trainer] = []

        def run() -> float:
            if not trainers:
                trainers.append(Trainer(config(microbatches), jax.devices()))
            return float(trainers[0].step(tokens[:, :-1], tokens[:, 1:]).loss)

        return run

    def sent(microbatches: int) -> Callable[[], float]:
        def run() -> float:
            stages = communication.report(config(microbatches)).stages
            sums = [
                t.measured for stage in stages for t in stage.totals if t.kind == "all-reduce" and t.axes == ("dp",)
            ]
            return sum(sums) / len(stages)

        return run

    return {f"{kind} {m}": make(m) for m in MICROBATCHES for kind, make in (("step", step), ("sent", sent))}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", metavar="CHECKOUT", help="the other checkout's root")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        s.work(build, options.worker)
        return
    if not options.other:
        parser.error("give --other, the root of the checkout to compare with")
    roots = {"this": str(ROOT), "other": os.path.abspath(options.other)}
    running = [s.Side(__file__, n, sys.executable, SETTINGS | {"PYTHONPATH": roots[n]}) for n in SIDES]
    rows = [
        "| microbatches | sent by other | by this | step of other | of this | this / other |",
        "|---|---|---|---|---|---|",
    ]
    for m in MICROBATCHES:
        other, this = (side.ask(f"sent {m}", 1)["values"][0] for side in reversed(running))
        losses = {side.name: side.ask(f"step {m}", 2)["values"][0] for side in running}
        s.check_values(losses, 1e-5)  # the first loss, near log 4096, of float32 sums in another order
        for _ in range(options.rounds):
            for side in running:
                side.measure(f"step {m}", 1)
        times = {side.name: side.seconds[f"step {m}"] for side in running}
        ratio = statistics.median(a / b for a, b in zip(times["this"], times["other"], strict=True))
        medians = [f"{side.median(f'step {m}') * 1e3:.0f} ms" for side in reversed(running)]
        rows.append(f"| {m} | {other / 2**20:.1f} MiB | {this / 2**20:.1f} MiB | {' | '.join(medians)} | {ratio:.2f} |")
        print(rows[-1], file=sys.stderr)
    text = "\n".join(rows)
    print(text)
    if options.save:
        what = (
            f"GPT, 4 layers, 256 wide, vocabulary {VOCAB}, {ROWS} x {SEQ} tokens a step, dp2 x pp2 on 4 virtual CPU "
            f"devices, which share the cores and send through memory. Bytes a device and step of all-reduces over dp; "
            f"median step of {options.rounds} rounds in turn, and the median of the rounds' ratios. other: every "
            "microbatch sums its gradients; this: the step's last does."
        )
        print(s.save(options.save, "Gradient sums of a pipeline over replicas", what, text, running))
    for side in running:
        side.close()


if __name__ == "__main__":
    main()
