"""Time an epoch of random lengths on a stacked LSTM under Fluid, with sequences padded with rows and as they are fed.

    python benchmarks/sequence_epoch.py --batches 24 --save sequence_epoch_2_cores_2026-11-27

Both train the same three-layer LSTM on the same batches (Adam), turn by turn in one process, first compiling what they
meet, then once more with everything compiled. Processor seconds: the machine may be busy. No cache of compiled
programs is used.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ["POLYREME_COMPILE_CACHE"] = "0"

import numpy as np

from polyreme import fluid, static
from polyreme.core import unique_name
from polyreme.fluid import layers

WORDS, WIDTH, LAYERS, BATCH, LONGEST = 1000, 32, 3, 16, 50
# sums over up to 800 rows, over three layers of up to 50 steps
TOLERANCE = 2.0**-23 * 800


def build():
    """The loss of a stacked LSTM that reads texts in both directions, trained."""
    words = layers.data("words", shape=[1], dtype="int64", lod_level=1)
    label = layers.data("label", shape=[1], dtype="int64")
    first = layers.fc(layers.embedding(words, size=[WORDS, WIDTH]), 4 * WIDTH)
    inputs = [first, layers.dynamic_lstm(first, 4 * WIDTH)[0]]
    for i in range(1, LAYERS):
        mixed = layers.fc(inputs, 4 * WIDTH)
        inputs = [mixed, layers.dynamic_lstm(mixed, 4 * WIDTH, is_reverse=i % 2 == 1)[0]]
    text = [layers.sequence_pool(x, "max") for x in inputs]
    loss = layers.mean(layers.cross_entropy(layers.fc(text, 2, act="softmax"), label))
    fluid.optimizer.Adam(0.002).minimize(loss)
    return loss


def batches(count):
    """Feeds of texts whose lengths are spread evenly from 1 to LONGEST."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        lengths = rng.integers(1, LONGEST + 1, BATCH).tolist()
        words = fluid.create_lod_tensor(rng.integers(0, WORDS, (sum(lengths), 1)), [lengths], fluid.CPUPlace())
        yield {"words": words, "label": rng.integers(0, 2, (BATCH, 1))}


class Side:
    """A Program with its Executor and scope, and the processor seconds of its steps."""

    def __init__(self, pads):
        self.main, startup, self.scope = static.Program(), static.Program(), static.Scope()
        self.main.random_seed = startup.random_seed = 1
        with unique_name.guard(), static.program_guard(self.main, startup):
            self.loss = build()
        self.exe = fluid.Executor(fluid.CPUPlace(), pad_sequences=pads)
        self.exe.run(startup, scope=self.scope)
        self.before = len(self.exe._compiled)

    def step(self, feed):
        """(processor seconds, loss)."""
        start = time.process_time()
        (loss,) = self.exe.run(self.main, feed=feed, fetch_list=[self.loss], scope=self.scope)
        return time.process_time() - start, float(loss[0])

    @property
    def compiled(self):
        """Programs that were compiled."""
        return len(self.exe._compiled) - self.before


def main():
    """Measure both and print, or save, a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--save", help="name of a file in benchmarks/results")
    args = parser.parse_args()
    feeds = list(batches(args.batches))
    sides = {"padded": Side(True), "as fed": Side(False)}
    epochs = []
    for _ in range(2):
        seconds_of = {name: [] for name in sides}
        for feed in feeds:
            losses = []
            for name, side in sides.items():
                seconds, loss = side.step(feed)
                seconds_of[name].append(seconds)
                losses.append(loss)
            assert abs(losses[0] - losses[1]) < 10 * TOLERANCE, losses
        epochs.append(seconds_of)
    lines = [
        f"{args.batches} batches of {BATCH} texts of 1 to {LONGEST} words, "
        f"{len({f['words'].shape()[0] for f in feeds})} totals of rows; processor seconds.",
        "",
        "| | programs compiled | first epoch | second epoch, median of a step |",
        "|---|---:|---:|---:|",
    ]
    for name, side in sides.items():
        first, second = (e[name] for e in epochs)
        lines.append(f"| {name} | {side.compiled} | {sum(first):.1f} | {statistics.median(second):.4f} |")
    ratios = [b / a for a, b in zip(epochs[1]["padded"], epochs[1]["as fed"], strict=True)]
    first = [sum(epochs[0][name]) for name in sides]
    lines += ["", f"As fed over padded: first epoch {first[1] / first[0]:.2f}, a step {statistics.median(ratios):.2f}."]
    text = "\n".join(lines)
    print(text)
    if args.save:
        (Path(__file__).parent / "results" / f"{args.save}.md").write_text(f"# An epoch of sequences\n\n{text}\n")


if __name__ == "__main__":
    main()
