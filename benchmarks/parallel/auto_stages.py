"""What automatic stages cost beside hand-made ones: one GPT, both ways, seconds a step.

    python benchmarks/parallel/auto_stages.py [--rounds 20] [--layers 4] [--width 128] [--schedule 1F1B] [--save NAME]

Both sides run the same runtime under the same plan, cut at the same place: the one from GPT.pipeline_items(), the other
from GPT called as a plain model (tokens, labels) -> loss, by cut_into_stages. "first" is the first step, which records,
traces and compiles; "step" the median of the rounds, sides alternating.
"""

import argparse
import statistics
import time
from typing import Any

import steps as s
from steps import jax, np, rng

from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.stages.chunks import cut_into_stages
from polyreme.distributed.pipeline.chunks import in_chunks
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.training.microbatches import cut

ROWS, SEQ, MICROBATCHES = 8, 64, 4


class Side:
    """A GPT over two stages and its batch."""

    def __init__(self, options: argparse.Namespace, automatic: bool) -> None:
        s.clear_plan()
        rng.seed(0)
        plan = s.Plan.from_degrees(pp=2, dp=2, schedule=options.schedule, num_microbatches=MICROBATCHES)
        sizes = {"hidden_size": options.width, "num_layers": options.layers, "seq_len": SEQ}
        model = GPT(GPTConfig.nano(vocab_size=1024, **sizes))
        tokens = np.random.default_rng(0).integers(0, 1024, (ROWS * MICROBATCHES, SEQ + 1))
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        devices = jax.devices()[:4]
        data: list[Any] = [inputs, labels]
        chunks: Any = in_chunks(model, plan).get_model_chunks()
        losses: list[Any] = [model.pipeline_loss]
        if automatic:
            data = [(inputs, labels), ()]
            at = [f"blocks.{options.layers // 2 - 1}"]
            with s.layouts.using(Layout(plan, devices).stages[0]):
                chunks = cut_into_stages(model, (inputs[:ROWS], labels[:ROWS]), 2, at)
            losses = [lambda loss, _: loss]
        self.layout = s.apply_plan(plan, model, devices, chunks=chunks)
        self.pipeline = Pipeline(chunks, losses, self.layout)
        self.parameters = model.parameters()
        self.batch = cut(data, MICROBATCHES, None)

    def __call__(self) -> float:
        """One batch -> seconds until every gradient is there."""
        s.layouts.active.layout = self.layout
        for p in self.parameters:
            p.clear_grad()
        start = time.perf_counter()
        self.pipeline.train(self.batch, rng.default_generator.branches(MICROBATCHES))
        jax.block_until_ready([p.grad._array for p in self.parameters])
        return time.perf_counter() - start


def main() -> None:
    """Prints the table and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    made = time.perf_counter()
    sides = {"pipeline_items": Side(options, False)}
    hand = time.perf_counter() - made
    sides["cut_into_stages"] = Side(options, True)
    automatic = time.perf_counter() - made - hand
    first = {name: side() for name, side in sides.items()}
    laps: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, side in sides.items():
            laps[name].append(side())
    rows: list[tuple] = [("stages", "made, s", "first, s", "step, median ms", "least ms")]
    for name, building in zip(sides, (hand, automatic), strict=True):
        times = [1e3 * t for t in laps[name]]
        numbers = (f"{building:.2f}", f"{first[name]:.2f}", f"{statistics.median(times):.1f}", f"{min(times):.1f}")
        rows.append((name, *numbers))
    ratio = statistics.median(a / b for a, b in zip(laps["cut_into_stages"], laps["pipeline_items"], strict=True))
    text = f"{s.markdown(rows)}\n\nAutomatic over hand-made, median of the rounds: {ratio:.3f}."
    print(text)
    if options.save:
        what = (
            f"GPT of {options.layers} layers, width {options.width}, {SEQ} tokens a row, pp2 dp2 on virtual CPU "
            f"devices, {options.schedule}, {MICROBATCHES} microbatches of {ROWS} rows; {options.rounds} rounds, sides "
            "alternating."
        )
        print(s.save(options.save, "Automatic stages beside hand-made ones", what, text))


if __name__ == "__main__":
    main()
