"""A pure function on arrays, compiled once, and its vector-Jacobian products, compiled once each.

The backward of a kernel takes the kernel's own inputs: what it needs of the forward is computed again inside
it, where XLA drops the parts no gradient needs (all of a matmul, all of a convolution) and, in a captured step, merges
the rest with the forward. A kernel that is dear to run twice says `saves=True` and keeps its residuals instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyreme.core import dtype as dtypes
from polyreme.core.compiled import DRAWS, Alone, ProgramAlone, compiled
from polyreme.core.taylor.jet import Flat, JetSpec, propagate

Mask = tuple[bool, ...]


class Kernel:
    """fn: arrays -> an array, or a tuple or list of arrays. Gradients follow the convention dL/dx + i dL/dy.

    gathered: positions of arrays that fn lays out anew before use: parameters kept in pieces. The backward gathers them
    for itself, which costs a gather and spares keeping the whole from the forward on (arXiv:1910.02054, section 7.2.2);
    whoever walks back says when, by hold_back.
    alone: XLA's options for calls outside of other programs; its fits takes the arrays.
    constant: its results want no gradient.
    """

    alone: Alone | None
    constant: bool
    fn: Callable[..., Any]
    gathered: frozenset[int]
    name: str
    saves: bool

    __slots__ = ("_derived", "alone", "constant", "fn", "forward", "gathered", "name", "saves")

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        *,
        saves: bool = False,
        gathered: frozenset[int] = frozenset(),
        alone: Alone | None = None,
        constant: bool = False,
    ) -> None:
        fn.__name__ = fn.__qualname__ = name
        self.fn = fn
        self.name = name
        self.saves = saves
        self.gathered = gathered
        self.alone = alone
        self.constant = constant
        self.forward: Callable[..., Any] = compiled(fn, alone)
        self._derived: dict[Any, Any] = {}

    def backward(self, mask: Mask) -> Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]:
        """(primals, cotangents of the inexact outputs, None where absent) -> gradients of the inputs in mask."""
        found = self._derived.get(mask)
        if found is None:
            alone = self._alone_of(lambda primals, cotangents: primals)
            found = self._derived[mask] = compiled(_name(self._vjp(mask), f"{self.name}_grad"), alone)
        return found

    def forward_saving(self, mask: Mask) -> Callable[..., tuple[Any, ...]]:
        """arrays -> (outputs, pullback); the pullback is a pytree that holds the residuals."""
        key = ("saving", mask)
        saving = self._derived.get(key)
        if saving is None:
            fn = self.fn  # not self, which keeps what is compiled of this

            def forward(*arrays: jax.Array) -> tuple:
                diff = tuple(a for a, m in zip(arrays, mask, strict=True) if m)
                _, pullback, outs = jax.vjp(lambda *d: _inexact(fn(*_merge(arrays, d, mask))), *diff, has_aux=True)
                return outs, pullback

            saving = self._derived[key] = compiled(_name(forward, self.name), self.alone)
        return saving

    def pull_saved(self, pullback: Callable[..., Any], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gradients from a pullback that forward_saving returned; every cotangent given."""
        return _pull_saved_drawing(pullback, cotangents) if self.alone is DRAWS else _pull_saved(pullback, cotangents)

    def grad_kernel(self, mask: Mask, present: Mask) -> Kernel:
        """(primals..., the cotangents that are present...) -> gradients, as a kernel that has gradients itself."""
        key = ("grad", mask, present)
        kernel = self._derived.get(key)
        if kernel is None:
            vjp, n = self._vjp(mask), len(mask)

            def fn(*arrays: jax.Array) -> tuple:
                given = iter(arrays[n:])
                return vjp(arrays[:n], tuple(next(given) if p else None for p in present))

            kernel = self._derived[key] = Kernel(fn, f"{self.name}_grad", alone=self._alone_of(lambda *a: a[:n]))
        return kernel

    def jet_kernel(
        self, arrays: tuple[Any, ...], masks: Sequence[Mask | None], spec: JetSpec
    ) -> tuple[Kernel, list[Mask | None]]:
        """(primals..., the coefficients that are present...) -> coefficients of the inexact outputs, as a kernel.

        arrays: the primals, for shapes. given: which coefficients each of them has, None for a constant. Returned with
        the kernel: the same of its outputs.
        """
        key = ("jet", spec, tuple(masks), tuple((a.shape, a.dtype) for a in arrays))
        kernel = self._derived.get(key)
        if kernel is None:
            primal, n = self.fn, len(masks)

            def jets(*arrays: jax.Array) -> list[Flat | None]:
                coming = iter(arrays[n:])
                flat = [None if g is None else tuple(next(coming) if p else None for p in g) for g in masks]
                return propagate(primal, arrays[:n], flat, spec)

            def fn(*arrays: jax.Array) -> tuple:
                return tuple(c for flat in jets(*arrays) for c in flat or () if c is not None)

            like = _like(arrays, masks, spec)
            outs = jax.eval_shape(jets, *arrays, *like)
            pattern = [None if flat is None else tuple(c is not None for c in flat) for flat in outs]
            kernel = self._derived[key] = (Kernel(fn, f"{self.name}_jet"), pattern)
        return kernel

    def _alone_of(self, primals: Callable[..., tuple]) -> Alone | None:
        """The same options for a program that takes more than the kernel. primals: its arguments -> the kernel's."""
        alone = self.alone
        if alone is None or alone.fits is None:
            return alone
        fits = alone.fits
        return alone._replace(fits=lambda *args: fits(*primals(*args)))

    def _vjp(self, mask: Mask) -> Callable[[tuple, tuple], tuple]:
        fn = self.fn

        def vjp(primals: tuple, cotangents: tuple) -> tuple:
            diff = tuple(a for a, m in zip(primals, mask, strict=True) if m)
            outs, pullback, _ = jax.vjp(lambda *d: _inexact(fn(*_merge(primals, d, mask))), *diff, has_aux=True)
            return pull(pullback, outs, cotangents)

        return vjp


def hold_back(positions: frozenset[int], arrays: tuple, until: tuple) -> tuple:
    """The same arrays, those at these positions not there before `until` is."""
    held, _ = jax.lax.optimization_barrier(({i: arrays[i] for i in positions}, until))
    return tuple(held.get(i, a) for i, a in enumerate(arrays))


def pull(pullback: Callable[..., Any], outs: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients from cotangents, absent ones being zero; conjugated on both sides (jax uses dL/dx - i dL/dy)."""
    full = tuple(
        jnp.zeros(o.shape, o.dtype) if c is None else _conjugate(c.astype(o.dtype))
        for o, c in zip(outs, cotangents, strict=True)
    )
    return tuple(_conjugate(g) for g in pullback(full))


def pull_saved(pullback: Callable[..., Any], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients from a pullback, every cotangent given."""
    return tuple(_conjugate(g) for g in pullback(tuple(_conjugate(c) for c in cotangents)))


_pull_saved, _pull_saved_drawing = jax.jit(pull_saved), ProgramAlone(pull_saved, DRAWS)


def _conjugate(x: jax.Array) -> jax.Array:
    return jnp.conj(x) if dtypes.is_complex(x.dtype) else x


def _like(arrays: tuple, given: Sequence[Mask | None], spec: JetSpec) -> list[jax.ShapeDtypeStruct]:
    """The shapes of the coefficients that are present."""
    results = []
    for array, mask in zip(arrays, given, strict=True):
        for at, present in enumerate(mask or ()):
            if present:
                apart = not spec.stacked or at == spec.ways * spec.num_coefficients
                results.append(
                    jax.ShapeDtypeStruct(array.shape if apart else (spec.directions, *array.shape), array.dtype)
                )
    return results


def _merge(arrays: tuple, diff: tuple, mask: Mask) -> list:
    given = iter(diff)
    return [next(given) if m else a for a, m in zip(arrays, mask, strict=True)]


def _inexact(outs: Any) -> tuple[tuple, Any]:
    """(the outputs that carry a gradient, all outputs)."""
    every = outs if isinstance(outs, (tuple, list)) else (outs,)
    return tuple(o for o in every if dtypes.is_inexact(o.dtype)), outs


def _name(fn: Callable, name: str) -> Callable:
    fn.__name__ = fn.__qualname__ = name
    return fn
