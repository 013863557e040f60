"""Routings that tests of experts share: who chooses whom, from a workload's name, a seed and a step.

W0 balanced, W1 a set of hot experts, W2 a hot rank, W3 hot experts on several ranks, W4 sources with few tokens and
tastes of their own, W5 an expert and a rank without tokens, W6 a hotspot that moves from step to step, W7 bursts.
"""

import numpy as np

WORKLOADS = ("W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7")


def choose(workload, *, seed=0, step=0, sources=8, tokens=4, experts=8, top_k=3, ranks=4):
    """Choices [sources, tokens, top_k] int32, a token's different, -1 for none; experts lie on ranks in order."""
    g = np.random.default_rng([seed, step, WORKLOADS.index(workload)])
    per_rank = experts // ranks
    likely = np.zeros((sources, 1, experts))
    silent = np.zeros((sources, tokens), bool)
    if workload == "W0":
        nth = np.arange(sources * tokens).reshape(sources, tokens, 1)
        return ((nth + np.arange(top_k) * (experts // top_k)) % experts).astype(np.int32)
    if workload == "W1":
        likely[..., : max(1, experts // 8)] = 6
    elif workload == "W2":
        likely[..., -per_rank:] = 6
    elif workload == "W3":
        likely[..., :: 2 * per_rank] = 6
    elif workload == "W4":
        likely[:] = 3 * g.standard_normal((sources, 1, experts))
        silent[:] = np.arange(tokens) >= g.integers(0, tokens + 1, (sources, 1))
        silent[0] = False
    elif workload == "W5":
        likely[..., 0] = likely[..., per_rank : 2 * per_rank] = -np.inf
    elif workload == "W6":
        likely[..., step % experts] = 6
    elif step % 4 == 0:
        likely[..., seed % experts] = 20
    keys = likely + g.gumbel(size=(sources, tokens, experts))
    choices = np.argsort(-keys, -1)[..., :top_k].astype(np.int32)
    choices[np.isneginf(np.take_along_axis(keys, choices, -1)) | silent[..., None]] = -1
    return choices


def rows_per_rank(choices, experts, ranks):
    """Rows for each rank's own experts: [ranks]."""
    return np.bincount(choices[choices >= 0], minlength=experts).reshape(ranks, -1).sum(1)
