"""Contract rows of generation/sampling.py; what filters leave is drawn in tests/generation/test_sampling.py."""

import numpy as np
import scipy.special as sp

import polyreme.generation.sampling  # noqa: F401
from tests.ops.contract import Case
from tests.ops.table_attention import floats, then

SEEN = np.array([[True, False, True], [False, True, True]])
SEEDS, PLACES = np.arange(2, dtype="int64"), np.arange(2, dtype="int64")
ONES, NONE = np.ones(2, "float32"), np.zeros(2, "float32")
ID = "ids have no gradient"


def largest(logits, *_):
    return logits.argmax(-1).astype("int32")


def settings(temperature, top_k, top_p):
    return SEEDS, PLACES, temperature, np.full(2, top_k, "int32"), top_p * ONES, NONE


def penalize(logits, seen, penalty):
    factor = penalty[:, None]
    return np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)


def mark(seen, tokens):
    out = seen.copy()
    for row, token in np.ndindex(tokens.shape):
        if 0 <= tokens[row, token] < seen.shape[1]:
            out[row, tokens[row, token]] = True
    return out


def most(logits, tokens, count):
    logs = sp.log_softmax(logits.astype("float64"), -1)
    ids = np.argsort(-logs, -1)[:, :count]
    return np.take_along_axis(logs, tokens[:, None], 1)[:, 0], np.take_along_axis(logs, ids, 1), ids.astype("int32")


CASES = [
    Case("next_tokens", then(floats((2, 5)), *settings(ONES, 0, 1.0)), largest, no_grad=ID),
    Case("next_tokens", then(floats((2, 5)), *settings(NONE, 0, 1.0), "draw"), largest, no_grad=ID, tag="cold"),
    Case("next_tokens", then(floats((2, 5)), *settings(ONES, 1, 1.0), "filter"), largest, no_grad=ID, tag="top-1"),
    Case("penalized", then(floats((2, 3)), SEEN, np.array([1.5, 0.8], "float32")), penalize),
    Case("marked", lambda rng: (SEEN, np.array([[1, -1], [0, 3]])), mark, no_grad="what was seen has no gradient"),
    Case("likeliest", then(floats((2, 5)), np.array([4, 0]), 3), most),
]  # fmt: skip
