"""The best plans for a model on a cluster, and what was ruled out and why.

Every mesh with a few ways to cut the step, then with all of them, the most promising mesh first. What a lower bound of
its time keeps out of the list is left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.planner.cluster import Cluster
from polyreme.planner.graph import ModelGraph
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.predict import least_seconds, predict
from polyreme.planner.prediction import Prediction, Training
from polyreme.planner.space import Refused, Shape, Space, cuts, shapes, simplicity

TIE = 0.01
"""Predicted times this close, as a share, are taken as equal: the simpler plan goes first."""

MOST_ROWS = 1 << 32
"""Samples of a step: more is a slip, and its divisors would take long to find."""

ENOUGH = 3000
"""Predictions after which a search looks only at the meshes that promise most: _MOST_MESHES, and as near as _NEAR."""

_MOST_MESHES = 32
_NEAR = 1.25  # of the best at the first look

MANY = 4000
"""Meshes above which only those are looked at whose degrees promise most: the best _FAMILIES by one plan of each."""

_FAMILIES = 6
_NARROWED = 1200  # predictions, in place of ENOUGH

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

    plans: that fit, best first. too_big: that do not and would be faster, near misses first. refused:
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
        self.narrowing = 0  # predictions that it took to tell which degrees promise most
        self.fitting: dict[Plan, Ranked] = {}
        self.too_big: dict[Plan, Ranked] = {}
        self.fastest: dict[object, float] = {}  # seconds, by what _placement says

    def meshes(self) -> dict[Shape, list[Way]]:
        """Every mesh that can be run, with the ways to cut a step."""
        ways_of: dict[Shape, list[Way]] = {}
        every = list(shapes(self.graph, self.cluster, self.batch, self.space, self.refused, self.training.cut))
        for shape in every if len(every) <= MANY else self._promising(every):
            reason = self.refuse(shape.plan()) if self.refuse else ""
            ways = self._cuts(shape)
            if reason:
                self.refused.add(reason)
            elif ways:
                ways_of[shape] = ways
        return ways_of

    def _cuts(self, shape: Shape) -> list[Way]:
        return cuts(shape, self.graph, self.batch, self.space, self.training.cut)

    def _promising(self, every: list[Shape]) -> list[Shape]:
        """Of very many meshes those of the best degrees of mp, sep, ep and pp; each by one mesh that has them, which
        holds least: the residual stream split over mp, the state over all replicas, experts over all they can be."""
        families: dict[tuple[int, int, int, int], list[Shape]] = {}
        for shape in every:
            families.setdefault((shape.mp, shape.sep, shape.ep, shape.pp), []).append(shape)
        seconds = {}
        for family, members in families.items():
            thrifty = max(members, key=_thrift)
            ways = self._cuts(thrifty)
            how = ways[-1].get("expert_dispatch") if ways else None  # the last holds least
            plain = [way for way in ways if way.get("expert_dispatch") == how]
            if plain:
                first = {key: value for key, value in plain[0].items() if key != "num_microbatches"}
                most = max(way["num_microbatches"] for way in plain if first.items() <= way.items())  # type: ignore[type-var]
                seconds[family] = self._first_that_fits(thrifty, {**first, "num_microbatches": most})
        best = heapq.nsmallest(_FAMILIES, seconds, key=lambda family: seconds[family])
        self.narrowing = self.looked_at
        skipped = sum(each == math.inf for each in seconds.values())
        if skipped:
            self.refused.add(f"{skipped} of {len(families)} degrees of mp, sep, ep and pp fit with no recompute")
        return [shape for family in best for shape in families[family]]

    def _first_that_fits(self, shape: Shape, way: Way) -> float:
        for mode in (self.modes[0], self.modes[-1]):
            prediction = self._predict(shape.plan(**way, recompute=mode, offload=self.space.offload[0])).prediction
            if prediction.fits:
                return prediction.step_seconds
        return math.inf

    def run(self, top: int) -> SearchResult:
        """The answer."""
        ways = self.meshes()
        bounds = {shape: self._bounds(shape, ways[shape]) for shape in ways}
        promise = self._first_look(ways, bounds, top)
        near = min(promise.values(), default=math.inf) * _NEAR
        enough = _NARROWED if self.narrowing else ENOUGH
        # sorted() keeps the order of enumeration on ties: the same question, the same answer
        for place, shape in enumerate(sorted(promise, key=lambda shape: promise[shape])):
            if self.looked_at - self.narrowing >= enough and (place >= _MOST_MESHES or promise[shape] > near):
                break
            for way in ways[shape]:
                if bounds[shape][way["num_microbatches"]] <= self._slowest_listed(top):
                    self._look_at(shape, way, top)
        return SearchResult(
            tuple(_order(self.fitting, top)),
            tuple(self._near_misses(top)),
            self.refused.reasons,
            self.looked_at,
        )

    def _near_misses(self, top: int) -> list[Ranked]:
        """Of the plans that do not fit and would be faster than all that do, those that lack least, one of a placement;
        if none fits, of all."""
        best = min(self.fastest.values(), default=math.inf)
        faster = [each for each in self.too_big.values() if each.prediction.step_seconds < best]
        nearest: dict[object, Ranked] = {}
        for each in sorted(faster, key=lambda each: (shortfall(each.prediction)[0], each.prediction.step_seconds)):
            nearest.setdefault(_placement(each.plan), each)
        return list(nearest.values())[:top]

    def can_fit(self, shape: Shape, ways: list[Way]) -> bool:
        """Whether a mesh fits with all that saves memory: the first question, as most of a large space fails it."""
        most = max(ways, key=lambda way: way["num_microbatches"])  # type: ignore[arg-type,return-value]
        saving = {"recompute": self.modes[-1], "offload": self.space.offload[-1]}
        smallest = [way for way in ways if all(way[key] == most[key] for key in way if key != "expert_dispatch")]
        return any(self._predict(shape.plan(**way, **saving)).prediction.fits for way in smallest)

    def _bounds(self, shape: Shape, ways: list[Way]) -> dict[object, float]:
        """Seconds that a mesh takes at least, by number of microbatches."""
        least: dict[object, float] = {}
        for count, how in dict.fromkeys((way["num_microbatches"], way.get("expert_dispatch", "auto")) for way in ways):
            plan = shape.plan(num_microbatches=count, expert_dispatch=how)
            seconds = least_seconds(self.graph, plan, self.cluster, self.batch, self.training)
            least[count] = min(seconds, least.get(count, math.inf))
        return least

    def _first_look(
        self, ways: dict[Shape, list[Way]], bounds: dict[Shape, dict[object, float]], top: int
    ) -> dict[Shape, float]:
        """Seconds of each mesh that fits and may be in the list: the best of a few of its cuts, inf if none fits."""
        promise: dict[Shape, float] = {}
        for shape in sorted(ways, key=lambda shape: min(bounds[shape].values())):
            if min(bounds[shape].values()) > self._slowest_listed(top):
                break
            if self.can_fit(shape, ways[shape]):
                for way in _few(shape, ways[shape]):
                    self._look_at(shape, way, top)
                promise[shape] = self.fastest.get(_placement(shape.plan()), math.inf)
        return promise

    def _slowest_listed(self, top: int) -> float:
        """Seconds above which a plan is in no list of the `top` best any more, nor within TIE of one."""
        if len(self.fastest) < top:
            return math.inf
        return heapq.nsmallest(top, self.fastest.values())[-1] * (1 + TIE)

    def _look_at(self, shape: Shape, way: Way, top: int) -> None:
        """Of one cut, for each offload the least recompute that fits, as long as it is less than without; none of a cut
        that is too slow for the list without either."""
        modes = self.modes
        if self._seconds(shape, way) > self._slowest_listed(top):
            return
        for offload in self.space.offload:
            # the least and the most first: between them there is something to look for only if they differ
            if self._fits(shape, way, modes[0], offload):
                return
            if len(modes) == 1 or not self._fits(shape, way, modes[-1], offload):
                continue
            least = next((mode for mode in modes[1:-1] if self._fits(shape, way, mode, offload)), modes[-1])
            any(self._fits(shape, way, least, offload, share) for share in self.space.recompute_shares)  # the least
            modes = modes[: modes.index(least)]

    def _seconds(self, shape: Shape, way: Way) -> float:
        plan = shape.plan(**way, recompute=self.modes[0], offload=self.space.offload[0])
        return self._predict(plan).prediction.step_seconds

    def _fits(self, shape: Shape, way: Way, recompute: str, offload: tuple[str, ...], share: float = 1.0) -> bool:
        plan = shape.plan(**way, recompute=recompute, recompute_share=share, offload=offload)
        return self._predict(plan).prediction.fits

    def _predict(self, plan: Plan) -> Ranked:
        known = self.fitting.get(plan) or self.too_big.get(plan)
        if known is None:
            known = Ranked(plan, predict(self.graph, plan, self.cluster, self.batch, self.training))
            self.looked_at += 1
            (self.fitting if known.prediction.fits else self.too_big)[plan] = known
            if known.prediction.fits:
                place = _placement(plan)
                self.fastest[place] = min(known.prediction.step_seconds, self.fastest.get(place, math.inf))
        return known


def _thrift(shape: Shape) -> tuple[object, ...]:
    return shape.sharding, -shape.sharding_stage, shape.sequence_parallel, len(shape.expert_axes)


def shortfall(prediction: Prediction) -> tuple[float, str]:
    """Bytes by which the fullest device is too small, and the part of its memory that holds most."""
    parts = asdict(prediction.memory)
    return prediction.memory.total - prediction.capacity, max(parts, key=lambda name: parts[name])


def _few(shape: Shape, ways: list[Way]) -> list[Way]:
    """Some cuts that say how good a mesh is: of a pipeline the plainest schedule with the smallest microbatches."""
    if shape.pp == 1:
        return ways
    first = ways[0]
    plain = [way for way in ways if all(way[key] == first[key] for key in ("schedule", "virtual_stages"))]
    largest = sorted({way["num_microbatches"] for way in plain}, reverse=True)[:3]  # type: ignore[type-var]
    return [way for way in plain if way["num_microbatches"] in largest]


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
