"""Bytes, memory and time of training a mixture on a disk: all experts moved each step, or those that tokens chose.

    python benchmarks/experts_on_disk.py --path /ssd/offload --save NAME

Each side is a process of its own, in turns: `offload: {param: disk, state: disk}`, and `expert: disk` beside it. Prints
bytes that a step after the first reads and writes (of the process, as the system counts them), the peak of resident
memory, and processor time and seconds of a step. Ends with an error unless both have the same losses, bit for bit.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import sides

SIDES = {"all experts": ("param", "state"), "chosen experts": ("param", "state", "expert")}


def _moved() -> dict[str, int]:
    """Bytes that this process has read and written so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(counts["rchar"]), "written": int(counts["wchar"])}


def _run_side(name: str, args: argparse.Namespace) -> dict:
    """Train, and tell what it took."""
    import jax
    import numpy as np

    import polyreme as paddle
    from polyreme.distributed.planned_step import PlannedStep
    from polyreme.mesh import Plan
    from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
    from polyreme.training import StepPolicy

    plan = Plan.from_degrees(
        offload=dict.fromkeys(SIDES[name], "disk"), offload_path=args.path, recompute="full", num_microbatches=2
    )
    config = MixtralConfig(
        vocab_size=args.vocab, hidden_size=args.width, num_layers=args.layers, num_heads=4, seq_len=args.seq,
        num_experts=args.experts, experts_per_token=1, expert_ffn_size=args.width,
    )  # fmt: skip
    paddle.seed(0)
    with paddle.LazyGuard():
        model = Mixtral(config)
    step = PlannedStep(
        model, plan, lambda m: paddle.optimizer.AdamW(1e-3, parameters=m.parameters()), StepPolicy(), jax.devices()[:1]
    )
    losses, before, begin, busy = [], {}, 0.0, 0.0
    for number in range(args.steps):
        if number == 1:  # the first step traces, and reads everything once
            before, begin, busy = _moved(), time.perf_counter(), time.process_time()
        ids = np.random.default_rng(number).integers(0, args.vocab, (args.batch, args.seq + 1))
        losses.append(float(step(ids[:, :-1], ids[:, 1:]).loss))
    taken, after = args.steps - 1, _moved()
    return {
        "parameters": sum(p.size for p in model.parameters()),
        "losses": losses,
        **{way: (after[way] - before[way]) / taken for way in after},
        "step": (time.perf_counter() - begin) / taken,
        "processor": (time.process_time() - busy) / taken,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _table(results: dict[str, dict], args: argparse.Namespace) -> str:
    whole, chosen = (results[name] for name in SIDES)
    tokens = args.batch * args.seq
    lines = [
        f"Mixtral of {whole['parameters'] / 1e6:.0f} M parameters: {args.layers} layers of {args.experts} experts of "
        f"{args.width} x {args.width}, one a token; float32, AdamW: parameters and moments take "
        f"{12 * whole['parameters'] / 1e9:.2f} GB. {tokens} tokens a step, which choose {tokens} experts of a layer at "
        f"most; recompute full, {args.steps} steps.",
        "",
        "| side | read a step, MB | written, MB | peak resident, MB | processor s a step | s a step |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        lines.append(
            f"| {name} | {r['read'] / 1e6:,.0f} | {r['written'] / 1e6:,.0f} | {r['peak'] / 1e6:,.0f} | "
            f"{r['processor']:.2f} | {r['step']:.2f} |"
        )
    ratios = ", ".join(
        f"{what} {chosen[key] / whole[key]:.2f}"
        for key, what in (("read", "read"), ("written", "written"), ("peak", "peak"), ("processor", "processor time"))
    )
    return "\n".join([*lines, "", f"Chosen over all: {ratios}. Losses: {whole['losses']}, the same bits."])


def main() -> None:
    """Run the sides, print the table, compare losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", required=True)
    sizes = {"layers": 2, "width": 192, "experts": 256, "vocab": 2048, "seq": 16, "batch": 2, "steps": 4}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--side")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(_run_side(args.side, args)))
        return
    results = sides.run_each(__file__, [*SIDES])
    table = _table(results, args)
    print(table)
    if len({tuple(r["losses"]) for r in results.values()}) > 1:
        raise SystemExit("the sides have other losses")
    if args.save:
        sides.save(
            args.save,
            "Experts on disk",
            "Training a mixture whose experts lie on a disk: all of them moved each step, or those that tokens chose.",
            table,
            [],
        )


if __name__ == "__main__":
    main()
