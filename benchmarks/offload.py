"""Memory and time of training a GPT whose parameters and optimizer state lie in memory, or on a disk.

    python benchmarks/offload.py --path /ssd/offload --save NAME

Each side is a process of its own: parameters, gradients and state in the host's memory; on disk, the next chunk being
read while one computes; on disk with nothing read ahead. Prints the peak of resident memory, seconds of a step after
the first, and how many of those the processor waited for the disk. Ends with an error unless all sides have the same
losses, bit for bit, and the peak on disk is at most a quarter of parameters and moments together.
"""

import argparse
import json
import resource
import time

import sides

SIDES = ("memory", "disk", "disk, nothing ahead")


def _rss() -> int:
    """The peak of this process's resident memory, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _run_side(name: str, args: argparse.Namespace) -> dict:
    """Train, and tell what it took."""
    import jax
    import numpy as np

    import polyreme as paddle
    from polyreme.distributed.planned_step import PlannedStep
    from polyreme.mesh import Plan
    from polyreme.models.decoders.gpt import GPT, GPTConfig
    from polyreme.training import StepPolicy

    start = _rss()
    tier = "host" if name == "memory" else "disk"
    more = {} if tier == "host" else {"offload_path": args.path, "offload_buffers": 1 if name != "disk" else 3}
    plan = Plan.from_degrees(offload={"param": tier, "state": tier}, recompute="full", **more)
    config = GPTConfig(
        vocab_size=args.vocab, hidden_size=args.width, num_layers=args.layers, num_heads=16, seq_len=args.seq
    )
    paddle.seed(0)
    with paddle.LazyGuard():
        model = GPT(config)

    def make_optimizer(model):
        clip = paddle.nn.ClipGradByGlobalNorm(1.0)
        return paddle.optimizer.AdamW(1e-3, parameters=model.parameters(), grad_clip=clip)

    step = PlannedStep(model, plan, make_optimizer, StepPolicy(), jax.devices()[:1])
    waiting, files = step.step.pipeline.waiting, step.optimizer.files
    losses, before, begin = [], (0.0, 0.0), 0.0
    for number in range(args.steps):
        if number == 1:
            begin = time.perf_counter()
            before = waiting.waited, files.stream.waited if files else 0.0
        ids = np.random.default_rng(number).integers(0, args.vocab, (args.batch, args.seq + 1))
        losses.append(float(step(ids[:, :-1], ids[:, 1:]).loss))
    jax.block_until_ready([p._array for p in model.parameters() if isinstance(p._array, jax.Array)])
    seconds = time.perf_counter() - begin
    weights = waiting.waited - before[0]
    state = files.stream.waited - before[1] if files else 0.0
    return {
        "parameters": sum(p.size for p in model.parameters()),
        "losses": losses,
        "step": seconds / (args.steps - 1),
        "weights": weights / (args.steps - 1),
        "state": state / (args.steps - 1),
        "start": start,
        "peak": _rss(),
    }


def _table(results: dict[str, dict], args: argparse.Namespace) -> str:
    count = results["disk"]["parameters"]
    state = 12 * count
    lines = [
        f"GPT of {count / 1e6:.0f} M parameters ({args.layers} layers of {args.width}), float32, AdamW: parameters and "
        f"moments take {state / 1e9:.2f} GB. {args.batch} x {args.seq} tokens a step, recompute full, {args.steps} "
        "steps.",
        "",
        "| side | peak resident, MB | before the model | s a step | stalled for weights, s | stalled for state, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        lines.append(
            f"| {name} | {r['peak'] / 1e6:,.0f} | {r['start'] / 1e6:,.0f} | {r['step']:.2f} | {r['weights']:.2f} | "
            f"{r['state']:.2f} |"
        )
    ahead, waits = (results[n] for n in SIDES[1:])

    def share(r: dict) -> float:
        return (r["weights"] + r["state"]) / r["step"]

    lines += [
        "",
        f"Peak on disk over parameters and moments: {ahead['peak'] / state:.3f}. Stalled seconds with reading ahead "
        f"over those without: {ahead['weights'] / waits['weights']:.2f} for weights and gradients, "
        f"{ahead['state'] / waits['state']:.2f} for state; of the step {share(ahead):.1%} and {share(waits):.1%}. "
        f"Losses: {ahead['losses']}, the same bits on all sides.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the sides, print the table, check the bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", required=True)
    for name, value in (("layers", 26), ("width", 1024), ("vocab", 4096), ("seq", 128), ("batch", 2), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--side")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(_run_side(args.side, args)))
        return
    results = sides.run_each(__file__, SIDES)
    table = _table(results, args)
    print(table)
    if any(r["losses"] != results["memory"]["losses"] for r in results.values()):
        raise SystemExit("the sides have other losses")
    if results["disk"]["peak"] > 12 * results["disk"]["parameters"] / 4:
        raise SystemExit("the peak on disk is above a quarter of parameters and moments")
    if args.save:
        sides.save(
            args.save,
            "Offload",
            "Training a GPT whose parameters and optimizer state lie in memory, or on a disk.",
            table,
            [],
        )


if __name__ == "__main__":
    main()
