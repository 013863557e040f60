"""Derivatives of order two and up along directions, in one pass forward: derivatives and laplacian.

Nesting gradients computes everything several times over: the cost grows exponentially with the order. Taylor
mode carries the coefficients of a series through the function once (core.taylor.jet), so the cost grows with its
square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from polyreme.autograd.functional import DetachedCall, Tensors, as_list, directions
from polyreme.core.taylor.jet import JetSpec
from polyreme.eager.forward import Jet
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ShapeError


def derivatives(func: Callable[..., Any], xs: Tensors, v: Any = None, order: int = 2) -> tuple[Any, ...]:
    """(f, D f, D D f, ...) up to the order, D being the derivative along v; each in the structure of func's result.

    func: takes the Tensors xs. v: a direction, Tensors of the shapes of xs; ones if None. D^k f is the k-th derivative
    by t of func(xs + t v) at t = 0: along ones, for a function of each element by itself, the plain k-th derivatives.
    Differentiable with respect to xs that want gradients, to v and to what func reads (a network's parameters); works
    eagerly and captured, and inside itself: mixed derivatives are derivatives of derivatives.

    >>> x = Tensor([1.0, 2.0])
    >>> f, first, second, third = derivatives(lambda x: x * x * x, x, order=3)
    >>> first.tolist(), second.tolist(), third.tolist()
    ([3.0, 12.0], [6.0, 12.0], [6.0, 6.0])
    """
    if isinstance(order, bool) or not isinstance(order, int) or order < 1:
        raise ConfigError(f"derivatives: order is a whole number of at least 1, got {order!r}")
    call = DetachedCall("derivatives", func, xs)
    found = call.along(*directions("derivatives", v, call.inputs, order))
    made = [[_times(math.factorial(k + 1), jet[k]) for jet in found] for k in range(order)]
    return (call.result, *(call.shaped(values) for values in made))


def laplacian(func: Callable[..., Any], xs: Tensors, coordinates: Sequence[int] | None = None) -> tuple[Any, Any]:
    """(f, the sum of its second derivatives by each coordinate), both in the structure of func's result.

    xs: the last dim of each holds coordinates, [batch, D] or [D]; func treats points one by one. coordinates: count
    these only, indices into the coordinates of all xs in a row; all if None. One pass carries the value, D first
    derivatives and one sum of second ones (forward Laplacian, arXiv:2307.08214). Differentiable as derivatives are.

    >>> x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> laplacian(lambda x: (x**3).sum(-1), x)[1].tolist()
    [18.0, 42.0]
    """
    given = as_list("laplacian", "xs", xs)
    for at, x in enumerate(given):
        if not x.ndim:
            raise ShapeError(f"laplacian: x {at} is 0-D; the last dim holds coordinates, give it shape [1]")
    sizes = [x.shape[-1] for x in given]
    chosen = _choose(coordinates, sum(sizes))
    call = DetachedCall("laplacian", func, xs)
    spec = JetSpec(2, len(chosen), collapsed=True)
    found = call.along(_axes(call.inputs, sizes, chosen, spec), spec)
    return call.result, call.shaped([_times(2, jet[-1]) for jet in found])


def _choose(coordinates: Any, count: int) -> list[int]:
    if coordinates is None:
        return list(range(count))
    chosen = [coordinates] if isinstance(coordinates, int) else list(coordinates)
    for c in chosen:
        if isinstance(c, bool) or not isinstance(c, int) or not -count <= c < count:
            raise ConfigError(f"laplacian: coordinates holds {c!r}; they are whole numbers, there are {count}")
    if not chosen or len({c % count for c in chosen}) != len(chosen):
        raise ConfigError(f"laplacian: coordinates={coordinates!r}; give one or more, each once")
    return [c % count for c in chosen]


def _axes(inputs: list[Tensor], sizes: list[int], chosen: list[int], spec: JetSpec) -> list[Jet]:
    """The unit vectors of the chosen coordinates, as what each input carries."""
    jets: list[Jet] = []
    before = 0
    for x, size in zip(inputs, sizes, strict=True):
        shape, dtype = x._array.shape, x._array.dtype
        units = [jnp.arange(size) == c - before for c in chosen]
        vectors = [jnp.broadcast_to(unit, shape).astype(dtype) for unit in units]
        if spec.stacked:
            ways: list[Tensor | None] = [Tensor(jnp.stack(vectors))]
        else:
            mine = [before <= c < before + size for c in chosen]
            ways = [Tensor(vector) if own else None for vector, own in zip(vectors, mine, strict=True)]
        jets.append((*ways, None))
        before += size
    return jets


def _times(factor: int, value: Any) -> Any:
    return value if factor == 1 else value * factor
