"""Contract rows of ops/viterbi.py."""

import itertools

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def brute_force(potentials, transition, lengths, include_bos_eos_tag=True):
    """The best of all paths, by trying each."""
    scores, paths = [], np.zeros(potentials.shape[:2], "int64")
    for row, (emitted, n) in enumerate(zip(potentials.astype("float64"), lengths, strict=True)):
        path_scores = {}
        for path in itertools.product(range(potentials.shape[2]), repeat=n):
            score = sum(emitted[t, k] for t, k in enumerate(path))
            score += sum(transition[a, b] for a, b in itertools.pairwise(path))
            if include_bos_eos_tag:
                score += transition[-1, path[0]] + transition[-2, path[-1]]
            path_scores[path] = score
        best = max(path_scores, key=path_scores.get)
        scores.append(path_scores[best])
        paths[row, :n] = best
    return np.array(scores, potentials.dtype), paths


def sentences(*rest):
    def make(rng):
        values = rng.normal(size=(3, 4, 3)).astype("float32"), rng.normal(size=(3, 3)).astype("float32")
        return (*values, np.array([4, 2, 1]), *rest)

    return make


WRONG = (np.zeros((2, 3, 4), "float32"), np.zeros((5, 5), "float32"), np.array([1, 2])), ShapeError, "dim 'k' is 4"
CASES = [
    Case("viterbi_path", sentences(), brute_force, bad=WRONG),
    Case("viterbi_decode", sentences(), brute_force, bad=((*WRONG[0][:1], np.zeros((4, 4), "float32"), np.array([1, 4])), IndexError, r"lengths has 4 at \[1\]; give 1 to 3")),
    Case("viterbi_decode", sentences(False), brute_force, tag="no_tags"),
]  # fmt: skip
