"""The best plans for a model on a cluster, and what was ruled out and why.

twice: every mesh with a few ways to cut the step, then the best meshes with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.planner.cluster import Cluster
from polyreme.planner.graph import ModelGraph
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.predict import predict
from polyreme.planner.prediction import Prediction, Training
from polyreme.planner.space import Refused, Shape, Space, cuts, shapes, simplicity

TIE = 0.01
"""Predicted times this close, as a share, are taken as equal: the simpler plan goes first."""

MOST_ROWS = 1 << 32
"""Samples of a step: more is a slip, and its divisors would take long to find."""

_SMALL = 1500  # ways to cut that are all looked at
_KEPT = 32  # meshes of a large space that are looked at again
_NEAR = 1.25  # and how much slower than the fastest they may be at the first look

Way = dict[str, object]
"""How a step is cut, as arguments of Shape.plan."""

Refuse = Callable[[Plan], str]
"""Of a plan, why whoever asks cannot run it; "" if he can."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A plan and what is predicted of it."""

    plan: Plan
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search gives.

    plans: that fit, best first. too_big: that do not, the fastest first: what one would run with more memory. refused:
    why meshes are no plans, with how many each reason refuses. looked_at: predictions made.
    """

    plans: tuple[Ranked, ...]
    too_big: tuple[Ranked, ...]
    refused: dict[str, int]
    looked_at: int


def search(
    model: ModelShape | ModelGraph,
    cluster: Cluster,
    batch: int,
    training: Training | None = None,
    space: Space | None = None,
    top: int = 10,
    refuse: Refuse | None = None,
) -> SearchResult:
    """The `top` best plans by predicted step time, and the plans that do not fit.

    batch: samples of a step over all devices. Of recompute and offload a plan has the cheapest that fits. refuse: of a
    mesh's plan, why it cannot be run, or "". The same question gives the same answer. Raises ConfigError for a batch
    below 1 or above MOST_ROWS.
    """
    asked = _Search(model, cluster, batch, training or Training(), space or Space(), refuse)
    return asked.run(top)


def fits_at_all(
    model: ModelShape | ModelGraph,
    cluster: Cluster,
    batch: int,
    training: Training,
    space: Space,
    refuse: Refuse | None = None,
) -> bool:
    """Whether any plan fits, which takes fewer predictions than which is best."""
    asked = _Search(model, cluster, batch, training, space, refuse)
    return any(asked.can_fit(shape, ways) for shape, ways in asked.meshes().items())


class _Search:
    """One search: the plans kept so far."""

    def __init__(
        self,
        model: ModelShape | ModelGraph,
        cluster: Cluster,
        batch: int,
        training: Training,
        space: Space,
        refuse: Refuse | None,
    ) -> None:
        if batch < 1:
            raise ConfigError(f"a global batch of {batch}; give at least 1")
        if batch > MOST_ROWS:
            raise ConfigError(f"a global batch of {batch}; give at most {MOST_ROWS:,}")
        self.graph = model.graph(training.attention) if isinstance(model, ModelShape) else model
        self.cluster, self.batch, self.training = cluster, batch, training
        self.space, self.refuse = space, refuse
        self.refused = Refused()
        # where attention stores no scores there is nothing for core_attn to leave out
        self.modes = [mode for mode in space.recompute if mode != "core_attn" or training.attention == "plain"]
        self.looked_at = 0
        self.fitting: dict[Plan, Ranked] = {}
        self.too_big: dict[Plan, Ranked] = {}

    def meshes(self) -> dict[Shape, list[Way]]:
        """Every mesh that can be run, with the ways to cut a step."""
        ways_of: dict[Shape, list[Way]] = {}
        for shape in shapes(self.graph, self.cluster, self.batch, self.space, self.refused):
            reason = self.refuse(shape.plan()) if self.refuse else ""
            ways = cuts(shape, self.graph, self.batch, self.space)
            if reason:
                self.refused.add(reason)
            elif ways:
                ways_of[shape] = ways
        return ways_of

    def run(self, top: int) -> SearchResult:
        """The answer."""
        ways = self.meshes()
        found = [shape for shape in ways if self.can_fit(shape, ways[shape])]
        if sum(len(ways[shape]) for shape in found) > _SMALL:
            found = self._promising(found, ways)
        for shape in found:
            self._look_at(shape, ways[shape], self.space.offload)
        return SearchResult(
            tuple(_order(self.fitting, top)),
            tuple(_order(self.too_big, top)),
            self.refused.reasons,
            self.looked_at,
        )

    def can_fit(self, shape: Shape, ways: list[Way]) -> bool:
        """Whether a mesh fits with all that saves memory: the first question, as most of a large space fails it."""
        smallest = max(ways, key=lambda way: way["num_microbatches"])  # type: ignore[arg-type,return-value]
        plan = shape.plan(**smallest, recompute=self.modes[-1], offload=self.space.offload[-1])
        return self._predict(plan).prediction.fits

    def _promising(self, found: Sequence[Shape], ways: dict[Shape, list[Way]]) -> list[Shape]:
        """The meshes worth a look at every cut: those that are near the fastest with a few of them, if they fit."""
        best: dict[Shape, float] = {}
        for offloads in (self.space.offload[:1], self.space.offload):
            for shape in found:
                seconds = [r.prediction.step_seconds for r in self._look_at(shape, _few(shape, ways[shape]), offloads)]
                if seconds:
                    best[shape] = min(seconds)
            if best:
                break
        if not best:
            return []
        limit = min(best.values()) * _NEAR
        # sorted() keeps the order of enumeration on ties: the same question, the same answer
        return sorted((shape for shape in best if best[shape] <= limit), key=lambda shape: best[shape])[:_KEPT]

    def _look_at(self, shape: Shape, ways: Iterable[Way], offloads: Sequence[tuple[str, ...]]) -> list[Ranked]:
        """Predict a shape's cuts, each with the cheapest recompute and offload that fits; -> those that fit."""
        ranked: list[Ranked] = []
        for way in ways:
            fitting = self._cheapest(shape, way, offloads)
            ranked += fitting
            if shape.pp == 1 and any(_keeps_all(each.plan) for each in fitting):
                break  # without a pipeline more microbatches only cost: launches, and gathers under stage 3
        return ranked

    def _cheapest(self, shape: Shape, way: Way, offloads: Sequence[tuple[str, ...]]) -> list[Ranked]:
        """Of one cut, for each offload the least recompute that fits, as long as it is less than without."""
        cheapest: list[Ranked] = []
        modes = self.modes
        for offload in offloads:
            # the least and the most first: between them there is something to look for only if they differ
            tried = [modes[0], *(modes[-1:] if len(modes) > 1 else ())]
            ends = [self._predict(shape.plan(**way, recompute=mode, offload=offload)) for mode in tried]
            if ends[0].prediction.fits:
                return [*cheapest, ends[0]]
            if not ends[-1].prediction.fits:
                continue
            between = (self._predict(shape.plan(**way, recompute=mode, offload=offload)) for mode in modes[1:-1])
            chosen = next((each for each in between if each.prediction.fits), ends[-1])
            cheapest.append(chosen)
            modes = modes[: modes.index(chosen.plan.recompute)]
        return cheapest

    def _predict(self, plan: Plan) -> Ranked:
        known = self.fitting.get(plan) or self.too_big.get(plan)
        if known is None:
            known = Ranked(plan, predict(self.graph, plan, self.cluster, self.batch, self.training))
            self.looked_at += 1
            (self.fitting if known.prediction.fits else self.too_big)[plan] = known
        return known


def shortfall(prediction: Prediction) -> tuple[float, str]:
    """Bytes by which the fullest device is too small, and the part of its memory that holds most."""
    parts = asdict(prediction.memory)
    return prediction.memory.total - prediction.capacity, max(parts, key=lambda name: parts[name])


def _keeps_all(plan: Plan) -> bool:
    return plan.recompute == "none" and not plan.offload


def _few(shape: Shape, ways: list[Way]) -> list[Way]:
    """Some cuts that say how good a mesh is: of a pipeline the plainest schedule with the smallest microbatches."""
    if shape.pp == 1:
        return ways
    first = ways[0]
    plain = [way for way in ways if all(way[key] == first[key] for key in ("schedule", "virtual_stages"))]
    return sorted(plain, key=lambda way: -way["num_microbatches"])[:3]  # type: ignore[operator]


def _order(found: dict[Plan, Ranked], top: int) -> list[Ranked]:
    """The `top` fastest, one of each mesh and sharding: of those within TIE of the fastest left the fastest of the
    simplest."""
    left = sorted(
        found.values(),
        key=lambda each: (each.prediction.step_seconds, simplicity(each.plan), each.prediction.memory.total),
    )
    best: list[Ranked] = []
    while left and len(best) < top:
        limit = left[0].prediction.step_seconds * (1 + TIE)
        near = [ranked for ranked in left if ranked.prediction.step_seconds <= limit]
        chosen = min(near, key=lambda each: simplicity(each.plan))
        best.append(chosen)
        left = [ranked for ranked in left if _placement(ranked.plan) != _placement(chosen.plan)]
    return best


def _placement(plan: Plan) -> tuple[object, object]:
    return plan.mesh, plan.strategy
