"""Contract rows of generation/sampling.py; what filters leave is drawn in tests/generation/test_sampling.py."""

import numpy as np

import polyreme.generation.sampling  # noqa: F401
from polyreme.conformance._tables.attention import floats, then
from polyreme.conformance.case import Case

SEEN = np.array([[True, False, True], [False, True, True]])
SEEDS, PLACES = np.arange(2, dtype="int64"), np.arange(2, dtype="int64")
NOISE = np.linspace(-1, 1, 10, dtype="float32").reshape(2, 5)
ONES, NONE = np.ones(2, "float32"), np.zeros(2, "float32")
ID = "ids have no gradient"


def largest(logits, *_):
    return logits.argmax(-1).astype("int32")


def drawn(logits, noise, temperature, *_):
    return (logits / temperature[:, None] + noise).argmax(-1).astype("int32")


def has_the_moments(noise, *_):
    """Mean, the Euler-Mascheroni constant, and standard deviation, pi / sqrt(6); 4 errors of 2 * 4096 draws."""
    np.testing.assert_allclose(noise.mean(), 0.5772, atol=4 * 1.2825 / 8192**0.5)
    np.testing.assert_allclose(noise.std(), 1.2825, atol=4 * 1.2825 * (4.4 / 4 / 8192) ** 0.5)


def settings(temperature, top_k, top_p, noise=NOISE):
    return noise, temperature, np.full(2, top_k, "int32"), top_p * ONES, NONE


def penalize(logits, seen, penalty):
    factor = penalty[:, None]
    return np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)


# 0.3 + 0.3 against 0.4; 0.2 + 0.1 against 0.5; a row without a group
GROUPED = np.log(np.array([[0.4, 1e-9, 0.3, 0.3], [0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.3, 0.3]], "float32"))


def without_others(logits, groups):
    out = logits.copy()
    out[0, :2] = -np.inf
    return out


def mark(seen, tokens):
    out = seen.copy()
    for row, token in np.ndindex(tokens.shape):
        if 0 <= tokens[row, token] < seen.shape[1]:
            out[row, tokens[row, token]] = True
    return out


def count(counts, tokens):
    out = counts.copy()
    for row, token in np.ndindex(tokens.shape):
        if 0 <= tokens[row, token] < counts.shape[1]:
            out[row, tokens[row, token]] += 1
    return out


def most(logs, tokens, count):
    ids = np.argsort(-logs, -1)[:, :count]
    return np.take_along_axis(logs, tokens[:, None], 1)[:, 0], np.take_along_axis(logs, ids, 1), ids.astype("int32")


CASES = [
    Case("gumbel_noise", lambda rng: (SEEDS, PLACES, 4096), check=has_the_moments, no_grad="random"),
    Case("next_tokens", then(floats((2, 5)), *settings(ONES, 0, 1.0, None)), largest, no_grad=ID),
    Case("next_tokens", then(floats((2, 5)), *settings(ONES, 0, 1.0), "draw"), drawn, no_grad=ID, tag="warm"),
    Case("next_tokens", then(floats((2, 5)), *settings(NONE, 0, 1.0), "draw"), largest, no_grad=ID, tag="cold"),
    Case("next_tokens", then(floats((2, 5)), *settings(ONES, 1, 1.0), "filter"), largest, no_grad=ID, tag="top-1"),
    Case("penalized", then(floats((2, 3)), SEEN, np.array([1.5, 0.8], "float32")), penalize),
    Case("outweighed", lambda rng: (GROUPED, np.array([2, 2, 4], "int32")), without_others, no_grad="some become -inf"),
    Case("marked", lambda rng: (SEEN, np.array([[1, -1], [0, 3]])), mark, no_grad="what was seen has no gradient"),
    Case("counted", lambda rng: (SEEN.astype("int32"), np.array([[1, -1, 1], [0, 3, 2]])), count, no_grad="counts have no gradient"),
    Case("likeliest", then(floats((2, 5)), np.array([4, 0]), 3), most),
]  # fmt: skip
