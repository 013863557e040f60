"""Derivatives of any order along directions, in one pass forward through a function: Taylor mode.

Each value carries the coefficients of its Taylor series along R directions. A sum over directions of the
highest derivative (a Laplacian) carries one sum instead of R highest coefficients: collapsed Taylor mode
(arXiv:2505.13644; for order 2, the forward Laplacian of arXiv:2307.08214). Order 1 is ordinary forward mode. What goes
in and out is arrays; the function is walked as a jaxpr, primitive by primitive (core.taylor.jet_rules).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from polyreme.core import dtype as dtypes
from polyreme.core.taylor.jet_rules import Series, coefficients
from polyreme.core.taylor.primitives import primitives
from polyreme.kernels import select

# Up to so many directions each has arrays of its own, which XLA fuses better (2-64x4-1 network, 1024 points, Laplacian
# and gradient on two cores: 2.2 ms, stacked 4.0); past that they are one array, so that programs do not grow with them.
_MOST_APART = 4


@dataclass(frozen=True)
class JetSpec:
    """The shape of a propagation: `order` coefficients along each of `directions` directions.

    collapsed: of the highest only the sum over directions.
    """

    order: int
    directions: int = 1
    collapsed: bool = False

    @property
    def stacked(self) -> bool:
        """True if the directions are dim 0 of each array."""
        return self.directions > _MOST_APART

    @property
    def ways(self) -> int:
        """The number of lists of coefficients of a value, besides the collapsed one."""
        return 1 if self.stacked else self.directions

    @property
    def num_coefficients(self) -> int:
        """The number of coefficients in each list."""
        return self.order - self.collapsed


Flat = tuple[Any, ...]
"""A value's coefficients in a row, None for zeros: way by way, lowest order first, the collapsed sum at the end."""


@dataclass
class _Jet:
    ways: list[Series]
    top: Any = None

    @classmethod
    def of(cls, flat: Sequence[Any], spec: JetSpec) -> _Jet:
        ways = [list(flat[i * spec.num_coefficients : (i + 1) * spec.num_coefficients]) for i in range(spec.ways)]
        return cls(ways, flat[-1] if spec.collapsed else None)

    def flat(self, spec: JetSpec) -> Flat:
        row = tuple(c for way in self.ways for c in way)
        return (*row, self.top) if spec.collapsed else row

    @property
    def is_zero(self) -> bool:
        return self.top is None and all(c is None for way in self.ways for c in way)


def propagate(
    fn: Callable[..., Any], arrays: Sequence[Any], coefficients: Sequence[Flat | None], spec: JetSpec
) -> list[Flat | None]:
    """The coefficients of each output of fn that is not of integers, None where all are zero.

    given: those of each array, None for a constant. Functions with a backward of their own (custom_vjp) are walked
    inside, in their plain form.
    """
    closed = jax.make_jaxpr(fn)(*arrays)
    if "custom_vjp_call" in primitives(closed.jaxpr):
        with select.portable():
            closed = jax.make_jaxpr(fn)(*arrays)
    jets = [None if g is None else _Jet.of(g, spec) for g in coefficients]
    _, results = _walk(closed.jaxpr, closed.consts, list(arrays), jets, spec)
    kept = zip(results, closed.out_avals, strict=True)
    return [None if j is None or j.is_zero else j.flat(spec) for j, aval in kept if dtypes.is_inexact(aval.dtype)]


def _walk(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], jets: Sequence[_Jet | None], spec: JetSpec
) -> tuple[list[Any], list[_Jet | None]]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    known: dict[Any, _Jet | None] = dict(zip(jaxpr.invars, jets, strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else values[v]

    def jet(v: Any) -> _Jet | None:
        return None if isinstance(v, jex.Literal) else known.get(v)

    for eqn in jaxpr.eqns:
        ins, carried = [value(v) for v in eqn.invars], [jet(v) for v in eqn.invars]
        inner = _inside(eqn)
        if inner is not None and any(j is not None for j in carried):
            outs, out_jets = _walk(inner.jaxpr, inner.consts, ins, carried, spec)
        else:
            bind = _binder(eqn)
            outs = bind(*ins)
            out_jets = [None] * len(outs)
            if any(j is not None for j in carried) and any(dtypes.is_inexact(v.aval.dtype) for v in eqn.outvars):
                out_jets = _through(eqn, bind, ins, carried, spec)
        values.update(zip(eqn.outvars, outs, strict=True))
        known.update(zip(eqn.outvars, out_jets, strict=True))
    return [value(v) for v in jaxpr.outvars], [jet(v) for v in jaxpr.outvars]


def _through(eqn: Any, bind: Callable, ins: list[Any], jets: Sequence[_Jet | None], spec: JetSpec) -> list[_Jet | None]:
    """The jets of one primitive's outputs."""

    def run(series: Sequence[Series | None], order: int) -> list[Series]:
        return coefficients(eqn.primitive.name, eqn.params, bind, ins, series, order)

    def one_way(series: Sequence[Series | None]) -> list[Series]:
        if not any(c is not None for s in series if s is not None for c in s):
            return [[None] * spec.order for _ in eqn.outvars]
        return run([None if s is None or all(c is None for c in s) else s for s in series], spec.order)

    pad = [None] * spec.collapsed
    directions: list[list[Series]] = []
    for way in range(spec.ways):
        series = [None if j is None else [*j.ways[way], *pad] for j in jets]
        directions.append(jax.vmap(one_way)(series) if spec.stacked and _any(series) else one_way(series))
    outs = [_Jet([way[index][: spec.num_coefficients] for way in directions]) for index in range(len(eqn.outvars))]
    if spec.collapsed:
        tops = [None if j is None or j.top is None else [j.top] for j in jets]
        straight = run(tops, 1) if _any(tops) else [[None] for _ in outs]
        for index, out in enumerate(outs):
            out.top = straight[index][0]
            for way in directions:
                out.top = _sum(out.top, way[index][-1], spec.stacked)
    return [None if o.is_zero else o for o in outs]


def _any(series: Sequence[Series | None]) -> bool:
    return any(c is not None for s in series if s is not None for c in s)


def _sum(total: Any, more: Any, stacked: bool) -> Any:
    if more is None:
        return total
    more = jnp.sum(more, 0) if stacked else more
    return more if total is None else total + more


def _binder(eqn: Any) -> Callable[..., list[Any]]:
    """The primitive with its parameters: arrays -> a list of arrays."""
    params = eqn.primitive.get_bind_params(eqn.params)

    def bind(*ins: Any) -> list[Any]:
        with eqn.ctx.manager:
            outs = eqn.primitive.bind(*ins, **params)
        return list(outs) if eqn.primitive.multiple_results else [outs]

    return bind


_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_vjp_call"))


def _inside(eqn: Any) -> Any:
    """The jaxpr that a call runs, closed, or None if eqn is no plain call."""
    if eqn.primitive.name not in _CALLS:
        return None
    found = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return found if found is None or hasattr(found, "consts") else jex.ClosedJaxpr(found, ())
