"""Time Executor.run of static programs against the captured step, the bare jitted call, and PaddlePaddle's Executor.

    python benchmarks/static.py
    python benchmarks/static.py --python-paddle ~/paddle/bin/python --save static_2_cores_2026-11-21

Programs: mlp (784-100-10, batch 64, Adam), gpt (gpt_workload.py, AdamW), tiny (x + 1 of 2 x 4 float32). Each call of an
Executor feeds NumPy arrays and ends with its result on the host. The captured step is given Tensors; "fed Tensors" is
an Executor given the same. All of polyreme's are cases of one process, which share its threads and memory. Rounds
alternate between all; ratios are medians of the rounds' own ratios.
"""

import argparse
import statistics
from collections.abc import Callable

import gpt_workload as g
import mlp_workload as w
import numpy as np
import sides as s

SIDES = ("polyreme", "paddle")
EXECUTOR, FED, CAPTURED, JITTED = "Executor", "Executor fed Tensors", "captured step", "jitted call"
# calls of a case in each round: some milliseconds, or one long step
CALLS = {"mlp": 50, "gpt": 1, "tiny": 500}
OTHERS = {"mlp": (FED, CAPTURED), "gpt": (FED, CAPTURED), "tiny": (JITTED,)}
X = np.ones((2, 4), np.float32)


def build(side: str) -> dict[str, Callable[[], float]]:
    """-> a step for each case; the framework is imported here, in the side's own process."""
    if side == "paddle":
        import paddle

        paddle.set_device("cpu")
        return executors(paddle, paddle_gpt)
    import gpt_polyreme
    import jax

    import polyreme as paddle

    cases = executors(paddle, polyreme_gpt)
    paddle.disable_static()  # PaddlePaddle's Executor has to stay in static mode
    jitted = jax.jit(lambda x: x + 1)
    cases[f"mlp {CAPTURED}"] = w.paddle_step(paddle, w.paddle_mlp(paddle), "Adam", w.batch(), captured=True)
    cases[f"gpt {CAPTURED}"] = gpt_polyreme.build()
    cases[f"tiny {JITTED}"] = lambda: np.asarray(jitted(X))[0, 0]
    return cases


def executors(paddle, gpt) -> dict[str, Callable[[], float]]:
    """The programs as an Executor runs them, in polyreme or PaddlePaddle; gpt builds that one's loss."""
    paddle.enable_static()
    cases = mlp(paddle) | tiny(paddle)
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        ids, labels = (paddle.static.data(name, [g.BATCH, g.SEQ], "int64") for name in ("ids", "labels"))
        loss, values = gpt(paddle, ids, labels)
        constants = {"beta1": g.BETA1, "beta2": g.BETA2, "epsilon": g.EPSILON, "weight_decay": g.WEIGHT_DECAY}
        paddle.optimizer.AdamW(g.LEARNING_RATE, **constants).minimize(loss)
    feed = dict(zip(("ids", "labels"), (a.astype("int64") for a in g.batch()), strict=True))
    return cases | started(paddle, "gpt", main, startup, feed, loss, values)


def started(paddle, name, main, startup, feed, fetch, values) -> dict[str, Callable[[], float]]:
    """-> runs of main in a scope of its own, whose parameters start from these values by name."""
    ours = hasattr(paddle.static, "Scope")
    scope, place = paddle.static.Scope() if ours else new_scope(paddle), paddle.CPUPlace()
    executor = paddle.static.Executor(place)
    if values:
        with paddle.static.scope_guard(scope):
            executor.run(startup)
    for parameter, value in values.items():
        scope.find_var(parameter).get_tensor().set(value, place)

    def run(feed) -> Callable[[], float]:
        return lambda: executor.run(main, feed=feed, fetch_list=[fetch], scope=scope)[0].flat[0]

    cases = {f"{name} {EXECUTOR}": run(feed)}
    if ours and FED in OTHERS[name]:
        paddle.disable_static()
        cases[f"{name} {FED}"] = run({n: paddle.to_tensor(a) for n, a in feed.items()})
        paddle.enable_static()
    return cases


def new_scope(paddle):
    """A scope in PaddlePaddle, whose class is not public."""
    return paddle.base.core.Scope()


def mlp(paddle) -> dict[str, Callable[[], float]]:
    """Runs of mlp_workload.py's network, with Adam."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        x, y = paddle.static.data("x", [w.BATCH, 784], "float32"), paddle.static.data("y", [w.BATCH], "int64")
        layers = [paddle.nn.Linear(784, 100), paddle.nn.Linear(100, 10)]
        loss = paddle.nn.functional.cross_entropy(layers[1](paddle.nn.functional.relu(layers[0](x))), y)
        params = [p for layer in layers for p in layer.parameters()]
        paddle.optimizer.Adam(w.LEARNING_RATE).minimize(loss)
    values = w.weights([tuple(p.shape) for p in params])
    feed = dict(zip("xy", w.batch(), strict=True))
    return started(paddle, "mlp", main, startup, feed, loss, dict(zip([p.name for p in params], values, strict=True)))


def tiny(paddle) -> dict[str, Callable[[], float]]:
    """Runs of x + 1."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        y = paddle.static.data("x", list(X.shape), "float32") + 1
    return started(paddle, "tiny", main, startup, {"x": X}, y, {})


def polyreme_gpt(paddle, ids, labels):
    """-> loss, initial values by parameter."""
    import gpt_polyreme

    model = gpt_polyreme.model()
    values, params = gpt_polyreme.weights_of(model), dict(model.named_parameters())
    return model(ids, labels), {params[name].name: array for name, array in values.items()}


def paddle_gpt(paddle, ids, labels):
    """-> loss, initial values by parameter."""
    import gpt_paddle

    values = g.weights()
    params = {name: paddle.create_parameter(list(a.shape), "float32") for name, a in values.items()}
    return gpt_paddle.loss(params, ids, labels), {params[name].name: array for name, array in values.items()}


def measure(options: argparse.Namespace) -> tuple[str, list[s.Side]]:
    """Runs all cases of all sides in alternating rounds -> the tables and the sides."""
    sides = s.start(__file__, options)
    cases = [(side, name, f"{name} {kind}") for name in CALLS for side, kind in kinds(sides, name)]
    try:
        for name in CALLS:
            # fed Tensors, the Executor's program goes on from where it is
            first = {
                f"{side.name} {case}": side.ask(case, 1)["values"][0]
                for side, of, case in cases
                if of == name and not case.endswith(FED)
            }
            s.check_values(first, tolerance(name, next(iter(first.values()))))
        for side, name, case in cases:
            side.ask(case, 2, CALLS[name])  # warms up
        for _ in range(options.rounds):
            for side, name, case in cases:
                side.measure(case, 1, CALLS[name])
    finally:
        for side in sides:
            side.close()
    return tables(sides), sides


def kinds(sides: list[s.Side], name: str) -> list[tuple[s.Side, str]]:
    """Who runs a program, and how."""
    ours = [(side, kind) for side in sides if side.name == "polyreme" for kind in (EXECUTOR, *OTHERS[name])]
    return ours + [(side, EXECUTOR) for side in sides if side.name == "paddle"]


def tolerance(name: str, value: float) -> float:
    """How far apart first values may be: as in mlp_workload.py and gpt_step.py."""
    if name == "gpt":
        return 2.0**-23 * g.HIDDEN**0.5 * (2 * g.LAYERS + 1) * value
    return w.TOLERANCE if name == "mlp" else 0.0


def tables(sides: list[s.Side]) -> str:
    """The results as markdown."""
    rows = ["| program | side | us, median | least | to polyreme's Executor |", "|---|---|---|---|---|"]
    ours = next((side for side in sides if side.name == "polyreme"), sides[0])
    notes = []
    for name in CALLS:
        base = ours.seconds[f"{name} {EXECUTOR}"]
        for side, kind in kinds(sides, name):
            taken = side.seconds[f"{name} {kind}"]
            ratio = statistics.median(t / b for t, b in zip(taken, base, strict=True))
            median, least = statistics.median(taken), min(taken)
            rows.append(f"| {name} | {side.name} {kind} | {median * 1e6:.1f} | {least * 1e6:.1f} | {ratio:.3f} |")
            if kind == JITTED:
                over = statistics.median(b - t for t, b in zip(taken, base, strict=True))
                notes.append(f"Executor.run of the tiny program takes {over * 1e6:.1f} us over the jitted call.")
            elif kind == CAPTURED:
                for how in (EXECUTOR, FED):
                    mine = zip(ours.seconds[f"{name} {how}"], taken, strict=True)
                    over = statistics.median(m / t for m, t in mine) - 1
                    notes.append(f"{how}, step of {name}: {over:+.1%} against the captured step.")
    return "\n".join([*rows, "", *notes])


def main() -> None:
    """Reads the command line, then measures or works."""
    options = s.options_of(s.parser(__doc__, SIDES, rounds=15), SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    text, sides = measure(options)
    print(text)
    if options.save:
        what = (
            f"mlp: 784-100-10, batch 64, Adam. gpt: {g.LAYERS} layers, {g.HIDDEN} wide, batch {g.BATCH} x {g.SEQ}, "
            f"{g.VOCAB} words, AdamW. tiny: x + 1. float32. {options.rounds} rounds, cases and sides alternating."
        )
        print(s.save(options.save, "Static programs", what, text, sides))


if __name__ == "__main__":
    main()
