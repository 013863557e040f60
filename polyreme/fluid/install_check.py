"""run_check: whether a Program trains here."""

from __future__ import annotations

import sys

import numpy as np

from polyreme.core import unique_name
from polyreme.errors import NumericsError
from polyreme.fluid import layers, optimizer
from polyreme.fluid.executor import Executor
from polyreme.program.current import program_guard
from polyreme.program.program import Program
from polyreme.program.scope import Scope, scope_guard


def run_check() -> None:
    """Train a small Program on the default device, and say that it went well. Raises what goes wrong."""
    main, startup = Program(), Program()
    with unique_name.guard(), program_guard(main, startup), scope_guard(Scope()):
        loss = layers.mean(layers.square(layers.fc(layers.data("x", [2]), 3)))
        optimizer.SGD(0.1).minimize(loss)
        exe = Executor()
        exe.run(startup)
        first, last = (float(exe.run(main, {"x": np.ones((4, 2), np.float32)}, [loss])[0][0]) for _ in range(2))
    if not last < first:
        raise NumericsError(f"run_check: the loss went from {first} to {last} in a step of SGD")
    sys.stdout.write("polyreme.fluid trains a Program on this machine.\n")


__all__ = ["run_check"]
