"""How far a predicted step time may be off: the interval that nine of ten published runs lie in."""

from __future__ import annotations

import math
from functools import lru_cache

from polyreme.mesh import Plan
from polyreme.planner.cluster import Cluster
from polyreme.planner.graph import ModelGraph
from polyreme.planner.prediction import Training

BASE = 0.21
"""Share of the step's time, either way, of dense models in 16 bits on kinds that have curves of their own."""

MORE = {
    "float8": 0.08,
    "experts": 0.58,
    "adapters": 0.60,
    "long rows": 0.12,
    "a split sequence": 0.40,
    "borrowed curves": 0.30,
    "many devices": 0.12,
    "shared units": 0.25,
    "unmeasured software": 0.42,
}
"""What each of these adds, as the root of the sum of squares. Set so that nine of ten rows lie inside, of each kind
with ten or more, of published_runs.csv, published_more.csv, published_blind.csv and those of odd number of
published_unseen.csv; "unmeasured software" on uz of the last and the learnt tables of published_tables.csv.
benchmarks/results/planner_published_2026-11-27.md tells how many of the others do."""

_LONG = 16_384
_MANY = 512


def reasons(graph: ModelGraph, plan: Plan, cluster: Cluster, training: Training) -> tuple[str, ...]:
    """What makes a prediction less sure, of the keys of MORE.

    >>> from polyreme.planner import ModelShape, cluster_of_kind
    >>> graph = ModelShape(hidden=512, layers=4, heads=4, seq=1024, vocab=512, ffn=2048).graph()
    >>> reasons(graph, Plan.from_degrees(dp=8), cluster_of_kind("b200", 8), Training(seen=True))
    ('borrowed curves',)
    """
    holds = {
        "float8": bool(training.products),
        "experts": _has_experts(graph),
        "adapters": training.trains == "adapters",
        "long rows": graph.tokens >= _LONG,
        "a split sequence": plan.mesh.sep > 1,
        "borrowed curves": bool(cluster.device.borrowed),
        "many devices": cluster.num_devices >= _MANY,
        "shared units": cluster.shared > 1,
        "unmeasured software": not training.seen and cluster.shared == 1,
    }
    return tuple(name for name in MORE if holds[name])


def spread(graph: ModelGraph, plan: Plan, cluster: Cluster, training: Training) -> float:
    """Half the interval's width, as a share of the predicted seconds."""
    return math.sqrt(BASE**2 + sum(MORE[name] ** 2 for name in reasons(graph, plan, cluster, training)))


@lru_cache(maxsize=64)
def _has_experts(graph: ModelGraph) -> bool:
    return any("expert" in value.dims for block in graph.blocks for value in block.parameters)
