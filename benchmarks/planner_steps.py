"""A training step of a small decoder under a plan, timed in turn with others: what the planner's benchmarks share."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEVICES = 8
os.environ.setdefault("CPU_NUM", str(DEVICES))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_STEPS = 2  # timed of a side in a row
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "parallel")]

import jax  # noqa: E402  (the number of devices is fixed before it starts)
import numpy as np  # noqa: E402
from steps import markdown, save  # noqa: E402, F401  (benchmarks/parallel/steps.py)

from polyreme.core import layout as layouts  # noqa: E402
from polyreme.core import rng, state  # noqa: E402
from polyreme.distributed.placement import clear_plan  # noqa: E402
from polyreme.mesh import Plan  # noqa: E402
from polyreme.planner.calibration import calibration_file, to_yaml  # noqa: E402
from polyreme.planner.cluster import Cluster  # noqa: E402
from polyreme.planner.cluster_file import of_devices  # noqa: E402
from polyreme.recipes.config import PretrainConfig  # noqa: E402
from polyreme.recipes.planning import calibrate  # noqa: E402
from polyreme.recipes.planning.plan import plan_words, with_plan  # noqa: E402
from polyreme.recipes.training.trainer import Trainer  # noqa: E402


@dataclass
class Side:
    """One plan: its training step, and the seconds it took in each round."""

    plan: Plan
    step: Any
    rounds: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Seconds of one step, which ends when the loss and every updated parameter are there."""
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def decoder(config: PretrainConfig, plan: Plan) -> Side:
    """A decoder's step under a plan, compiled and run twice."""
    clear_plan()
    trainer = Trainer(with_plan(config, plan))
    size = (config.train.global_batch, config.model.seq_len + 1)
    rows = np.random.default_rng(0).integers(0, config.model.vocab_size, size)

    parameters = trainer.model.parameters()
    holder = rng.default_generator.key_state()
    key = holder._array

    def step() -> None:
        nonlocal key
        # several plans take turns: each has its own layout in force, and its random key where it left it
        layouts.active.layout = trainer.layout
        state.write(holder, key)
        float(trainer.step(rows[:, :-1], rows[:, 1:]).loss)
        # a pipeline's loss is there before its last tasks and its updates are
        jax.block_until_ready([p._array for p in parameters])
        key = holder._array

    side = Side(plan, step)
    side.run()
    side.run()  # the second step is the first that compiles nothing
    return side


def made(number: str, config: PretrainConfig, plan: Plan) -> Side:
    """decoder, telling how long it took."""
    start = time.perf_counter()
    side = decoder(config, plan)
    text = f"compiled {number}: {plan_words(plan)}, {time.perf_counter() - start:.0f} s; a step took {side.run():.3f} s"
    print(text, file=sys.stderr, flush=True)
    return side


def in_turn(sides: Sequence[Side], rounds: int, seconds: float) -> list[float]:
    """Seconds of each side's step: a few steps of every side a round, until there are enough rounds or time is over.

    A machine is now slower, now faster, for minutes, by more than sides differ. So a side's time is the median over
    rounds of its share of the round's geometric mean; times the geometric mean of all.
    """
    stop = time.perf_counter() + seconds
    for side in sides:
        side.rounds.clear()
    for number in range(rounds):
        # another order each round, so that no side always follows the same one
        for side in np.random.default_rng(number).permutation(np.array(sides, object)):
            side.run()  # finds the caches as the side before left them; training finds its own
            side.rounds.append(statistics.mean(side.run() for _ in range(_STEPS)))
        if time.perf_counter() > stop:
            break
    logs = np.log([side.rounds for side in sides])
    return np.exp(np.median(logs - logs.mean(0), axis=1) + logs.mean()).tolist()


def calibrated() -> Cluster:
    """This machine's devices as `polyreme calibrate` found them; measured now if it was not run."""
    if not calibration_file().exists():
        print("not calibrated yet: measuring")
        calibration_file().parent.mkdir(parents=True, exist_ok=True)
        calibration_file().write_text(to_yaml(calibrate.run(print)))
    return of_devices(DEVICES)


def what(config: PretrainConfig) -> str:
    """A configuration in a sentence."""
    model = config.model
    return (
        f"{model.family}, {model.num_layers} layers, {model.hidden_size} wide, {model.num_heads} heads, vocabulary "
        f"{model.vocab_size}, batch {config.train.global_batch} x {model.seq_len}, float32, AdamW, clipped; "
        f"{DEVICES} virtual CPU devices on the machine's cores."
    )
