"""Contract rows of ops/math.py."""

import numpy as np
import scipy.special as sp

from polyreme.errors import ShapeError
from tests.ops.contract import Case


def within(low, high, shape=(3, 4)):
    return lambda rng: (rng.uniform(low, high, shape).astype("float32"),)


def unary(name, ref, low=-2.0, high=2.0, **more):
    return Case(name, within(low, high), ref, **more)


CASES = [
    unary("abs", np.abs),
    unary("exp", np.exp),
    unary("log", np.log, 0.1, 3.0),
    unary("sqrt", np.sqrt, 0.1, 3.0),
    unary("square", np.square),
    unary("tanh", np.tanh),
    unary("sigmoid", sp.expit),
    Case("clip", lambda rng: (*within(-2, 2)(rng), -0.5, 0.7), np.clip),
    Case("clip", lambda rng: (*within(-2, 2)(rng), np.float32([0, 0.1, 0.2, 0.3])), lambda x, low: np.maximum(x, low), tag="tensor",
         bad=((np.ones((2, 3), "float32"), np.ones(4, "float32")), ShapeError, "clip")),
    Case("clip", lambda rng: (np.arange(5), None, 3), np.clip, no_grad="integers", tag="int"),
]  # fmt: skip
