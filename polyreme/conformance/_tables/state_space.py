"""Contract rows of ops/state_space.py: against the recurrence, place by place."""

import numpy as np

import polyreme.ops.state_space  # noqa: F401
from polyreme.conformance.case import Case
from polyreme.errors import ShapeError

ONES = np.ones((1, 1, 1), "float32")


def scanned(x, steps, decay, into, out_of, state, chunk=64):
    y = np.empty_like(x)
    for place in range(x.shape[1]):
        step = steps[:, place, :, None]
        state = np.exp(step * decay) * state + step * x[:, place, :, None] * into[:, place, None]
        y[:, place] = (state * out_of[:, place, None]).sum(-1)
    return y, state


def scanned_by_heads(x, steps, decay, into, out_of, state, chunk=64):
    s, h = x.shape[1:3]
    into, out_of = (np.repeat(part, h // part.shape[2], 2) for part in (into, out_of))
    y = np.empty_like(x)
    for place in range(s):
        step = steps[:, place, :, None, None]
        taken = x[:, place, ..., None] * into[:, place, :, None]
        state = np.exp(step * decay[:, None, None]) * state + step * taken
        y[:, place] = (state * out_of[:, place, :, None]).sum(-1)
    return y, state


def channels(chunk, s=5):
    def make(rng):
        x, into, out_of = (rng.standard_normal((2, s, size), "float32") for size in (3, 2, 2))
        steps = rng.uniform(0.1, 1, (2, s, 3)).astype("float32")
        return (
            x,
            steps,
            -rng.uniform(0.1, 1, (3, 2)).astype("float32"),
            into,
            out_of,
            np.ones((2, 3, 2), "float32"),
            chunk,
        )

    return make


def heads(chunk, s=5):
    def make(rng):
        x, into, out_of = (rng.standard_normal((2, s, *size), "float32") for size in ((4, 3), (2, 2), (2, 2)))
        steps = rng.uniform(0.1, 1, (2, s, 4)).astype("float32")
        return (
            x,
            steps,
            -rng.uniform(0.1, 1, 4).astype("float32"),
            into,
            out_of,
            np.ones((2, 4, 3, 2), "float32"),
            chunk,
        )

    return make


CASES = [
    Case("selective_scan", channels(2), scanned, terms=40, bad=((ONES, ONES, ONES[0], ONES, ONES, ONES[0]), ShapeError, "needs .b, s, c. twice")),
    Case("selective_scan", channels(64), scanned, terms=40, tag="one-chunk"),
    Case("selective_scan", channels(64, s=1), scanned, tag="one-place"),
    Case("head_state_scan", heads(2), scanned_by_heads, terms=40, bad=((ONES[None], ONES, ONES[0, 0], ONES[None], ONES[None], ONES), ShapeError, "g dividing h")),
    Case("head_state_scan", heads(64), scanned_by_heads, terms=40, tag="one-chunk"),
    Case("head_state_scan", heads(64, s=1), scanned_by_heads, tag="one-place"),
]  # fmt: skip
