"""Time training steps of static Programs before and after `static.passes.fusion` and `recompute`.

    python benchmarks/passes.py [--rounds 15] [--save NAME]

The Programs are spelled out op by op, as a paper has them: matmul + add, attention of seven ops, logits and loss apart.
XLA fuses elementwise work by itself in both; what a pattern can buy is another algorithm. Sides take turns within each
round; "ratio" is the median over rounds of unpassed time / passed time, so above 1 the pass is faster.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.jit import to_static
from polyreme.program.run import replay
from polyreme.static import passes

RNG = np.random.default_rng(0)


def weight(*shape: int):
    """A parameter, normal with deviation 0.02."""
    return paddle.create_parameter(list(shape), "float32", default_initializer=paddle.nn.initializer.Normal(0.0, 0.02))


def mlp():
    """784-256-256-10 at batch 128, the affine maps as matmul + add."""
    h, feed = static.data("x", [128, 784]), {"x": RNG.normal(size=(128, 784)).astype("float32")}
    for a, b in ((784, 256), (256, 256), (256, 10)):
        h = paddle.matmul(h, weight(a, b)) + weight(b)
        h = F.relu(h) if b == 256 else h
    return (h * h).mean(), [], feed


def attention():
    """Causal attention of batch 4, 512 positions, 8 heads of 32, spelled out."""
    x, feed = static.data("x", [4, 512, 256]), {"x": RNG.normal(size=(4, 512, 256)).astype("float32")}
    mask = paddle.assign(np.triu(np.full((512, 512), -1e9, "float32"), 1))
    q, k, v = (paddle.transpose((x @ weight(256, 256)).reshape([4, 512, 8, 32]), [0, 2, 1, 3]) for _ in range(3))
    probabilities = F.softmax(paddle.matmul(q, k, transpose_y=True) * 32**-0.5 + mask)
    out = paddle.transpose(probabilities @ v, [0, 2, 1, 3]).reshape([4, 512, 256])
    return (out @ weight(256, 256)).pow(2).mean(), [], feed


def vocabulary():
    """The loss of 1024 tokens of size 128 over 16384 words, logits and cross entropy apart."""
    x, label = static.data("x", [1024, 128]), static.data("label", [1024], "int64")
    feed = {"x": RNG.normal(size=(1024, 128)).astype("float32"), "label": RNG.integers(0, 16384, 1024)}
    h = x @ weight(128, 128)
    return F.cross_entropy(h @ weight(128, 16384), label), [], feed


def residual():
    """Eight residual blocks of width 128, ffn 512, on 2048 rows; a checkpoint after each."""
    h, feed = static.data("x", [2048, 128]), {"x": RNG.normal(size=(2048, 128)).astype("float32")}
    checkpoints = []
    for _ in range(8):
        h = h + F.gelu(F.linear(h, weight(128, 512), weight(512))) @ weight(512, 128)
        checkpoints.append(h)
    return h.pow(2).mean(), checkpoints, feed


CASES: dict[str, tuple[Callable, Callable]] = {
    "fusion: MLP": (mlp, lambda p, keep, marks: passes.fusion(p, keep)),
    "fusion: attention": (attention, lambda p, keep, marks: passes.fusion(p, keep)),
    "fusion: loss over a vocabulary": (vocabulary, lambda p, keep, marks: passes.fusion(p, keep)),
    "recompute: residual blocks": (residual, lambda p, keep, marks: passes.recompute(p, keep, marks)),
}


def steps(build: Callable, change: Callable) -> tuple[list[Callable], list[int]]:
    """(a training step of the Program before and after the pass, temporary bytes of each)."""
    main, startup, exe = static.Program(), static.Program(), static.Executor()
    with static.program_guard(main, startup):
        paddle.enable_static()
        loss, checkpoints, feed = build()
        paddle.optimizer.SGD(0.01).minimize(loss)
        changed = change(main, [loss], checkpoints)
        paddle.disable_static()
    assert str(changed) != str(main)
    built, used = [], []
    for program in (main, changed):
        paddle.seed(0)
        scope = static.Scope()
        exe.run(startup, scope=scope)

        def step(program=program, scope=scope) -> float:
            return float(exe.run(program, feed, [loss], scope=scope)[0])

        built.append(step)
        used.append(temporary_bytes(program, startup, exe, feed, loss.name))
    assert abs(built[0]() - built[1]()) < 1e-3
    return built, used


def temporary_bytes(program, startup, exe, feed: dict, fetch: str) -> int:
    """Bytes of scratch memory that a step takes, as the compiler plans it."""
    scope = static.Scope()
    exe.run(startup, scope=scope)
    names = list(feed)
    step = to_static(lambda *given: replay(program, scope, dict(zip(names, given, strict=True)), [fetch]))
    tensors = [paddle.to_tensor(v) for v in feed.values()]
    step(*tensors)
    return step.compiled(*tensors).memory_analysis().temp_size_in_bytes


def seconds(step: Callable, calls: int) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", help="also write the table to results/NAME.md")
    options = parser.parse_args()
    lines = ["| case | before, ms | after, ms | ratio | temporary MiB before | after |", "|---|---|---|---|---|---|"]
    for name, (build, change) in CASES.items():
        made, used = steps(build, change)
        calls = max(1, int(0.05 / seconds(made[0], 3)))
        rounds = [[seconds(step, calls) for step in made] for _ in range(options.rounds)]
        before, after = (1000 * statistics.median(times) for times in zip(*rounds, strict=True))
        ratio = statistics.median(a / b for a, b in rounds)
        megabytes = " | ".join(f"{b / 2**20:.1f}" for b in used)
        lines.append(f"| {name} | {before:.2f} | {after:.2f} | {ratio:.2f} | {megabytes} |")
        print(lines[-1], flush=True)
    if options.save:
        path = Path(__file__).resolve().parent / "results" / f"{options.save}.md"
        head = f"# Passes over Programs, {date.today()}\n\nbenchmarks/passes.py, CPU, {options.rounds} rounds.\n\n"
        path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
