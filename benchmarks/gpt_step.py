"""Time one GPT training step (sizes in gpt_workload.py) in several frameworks, in alternating rounds.

    python benchmarks/gpt_step.py --sides plain,fused,polyreme
    python benchmarks/gpt_step.py --python-torch ~/torch/bin/python --python-paddle ~/paddle/bin/python --save NAME

Printed per side: median and least ms/step, tokens/s, ratio of medians to the first side, least processor time of a
round (all threads; it says more than the clock on a machine that does other things), peak memory. All sides must
start at the same loss, to a computed tolerance. --tuned-malloc also times the JAX sides with glibc told to keep freed
memory. How sides are run: sides.py.
"""

import argparse
import math
from collections.abc import Callable

import gpt_workload as g
import sides as s

SIDES = ("plain", "fused", "polyreme", "polyreme-plain", "torch", "torch-compile", "paddle")
JAX_SIDES = ("plain", "fused", "polyreme", "polyreme-plain")


def build(side: str) -> dict[str, Callable[[], float]]:
    """-> the side's step; the framework is imported here, in the side's own process."""
    if side == "plain":
        import gpt_plain_jax

        return {"step": gpt_plain_jax.build()}
    if side == "fused":
        import gpt_fused_jax

        return {"step": gpt_fused_jax.build()}
    if side == "polyreme":
        import gpt_polyreme

        return {"step": gpt_polyreme.build()}
    if side == "polyreme-plain":
        import gpt_polyreme_plain

        return {"step": gpt_polyreme_plain.build()}
    if side in ("torch", "torch-compile"):
        import gpt_torch

        return {"step": gpt_torch.build(compiled=side == "torch-compile")}
    import gpt_paddle

    return {"step": gpt_paddle.build()}


def tolerance(loss: float) -> float:
    """How far apart first losses may be.

    The logits are sums of HIDDEN float32 products after 2 * LAYERS + 1 blocks, each again such a sum; rounding errors
    add like a random walk, the mean over tokens makes them smaller still.
    """
    return 2.0**-23 * math.sqrt(g.HIDDEN) * (2 * g.LAYERS + 1) * loss


def table(sides: list[s.Side]) -> str:
    """The results as markdown."""
    rows = [
        "| side | ms/step, median | least | tokens/s | time to first side's | least processor ms | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    base = sides[0].median("step")
    for side in sides:
        median, least = side.median("step"), side.least("step")
        numbers = f"{median * 1e3:.0f} | {least * 1e3:.0f} | {g.TOKENS / median:.0f} | {median / base:.2f}"
        rows.append(
            f"| {side.name} | {numbers} | {min(side.cpu_seconds['step']) * 1e3:.0f} | {side.peak / 2**20:.0f} |"
        )
    return "\n".join(rows)


def measure(options: argparse.Namespace) -> tuple[str, list[s.Side]]:
    """Runs all sides in alternating rounds -> the table and the sides."""
    sides = s.start(__file__, options, JAX_SIDES if options.tuned_malloc else ())
    try:
        first = {side.name: side.ask("step", 2)["values"][0] for side in sides}
        s.check_values(first, tolerance(first[sides[0].name]))
        for _ in range(options.rounds):
            for side in sides:
                side.measure("step", options.steps)
    finally:
        for side in sides:
            side.close()
    return table(sides), sides


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=7)
    parser.add_argument("--steps", type=int, default=2, help="steps a side takes in each round")
    parser.add_argument("--tuned-malloc", action="store_true")
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    text, sides = measure(options)
    print(text)
    if options.save:
        sizes = (
            f"{g.LAYERS} layers, {g.HIDDEN} wide, {g.HEADS} heads, ffn {g.FFN}, batch {g.BATCH} x {g.SEQ}, "
            f"{g.VOCAB} words, float32, AdamW. {options.rounds} rounds of {options.steps} steps, sides alternating; "
            "one process a side, all alive at once."
            + (f" Instructions kept to {options.isa}: {s.ISA[options.isa]}." if options.isa else "")
        )
        print(s.save(options.save, "GPT training step", sizes, text, sides))


if __name__ == "__main__":
    main()
