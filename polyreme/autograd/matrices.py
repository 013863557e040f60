"""Jacobian and Hessian matrices whose rows are computed when they are asked for; all at once by forward mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.autograd.functional import as_list, zeros
from polyreme.core.state import TensorState
from polyreme.core.taylor.jet import JetSpec
from polyreme.eager import tape, walk
from polyreme.eager.forward import goes_forward, push
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, GradError, ShapeError
from polyreme.ops.manipulation import moveaxis, stack


class Jacobian:
    """d ys / d xs. Indexing computes the rows it needs, once each; `J[:]` is all of it, a Tensor: by one pass forward
    if it has no more columns than rows.

    Not batched: ys 0-D or [M], xs 0-D or [N] -> shape [M, N] without the dims that are missing. Batched: ys [B] or
    [B, M], xs [B] or [B, N], each sample's ys depending on its own xs -> [B, M, N]. Differentiable again.
    """

    def __init__(self, ys: Tensor, xs: Tensor, is_batched: bool = False) -> None:
        self._ys, self._xs, self._batched = ys, xs, is_batched
        low, high = (1, 2) if is_batched else (0, 1)
        for name, t in (("ys", ys), ("xs", xs)):
            if not low <= t.ndim <= high:
                raise ShapeError(
                    f"jacobian: {name} has shape {list(t.shape)}, needs {low} or {high} dims with batch_axis="
                    f"{0 if is_batched else None}; reshape it"
                )
        if is_batched and ys.shape[0] != xs.shape[0]:
            raise ShapeError(f"jacobian: ys has {ys.shape[0]} samples, xs {xs.shape[0]}")
        if xs.stop_gradient:
            raise GradError("jacobian: xs has stop_gradient=True; set it to False before computing ys from it")
        self._row_dim = low
        self._has_rows = ys.ndim == high
        self._rows: dict[int, Tensor] = {}
        self._whole: Tensor | None = None

    @property
    def shape(self) -> list[int]:
        """Size of each dim."""
        return [*self._ys.shape, *self._xs.shape[self._row_dim :]]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        items = self._expanded(index)
        if not self._has_rows:
            return self._rest(self._row(0), items)
        row_dim = self._row_dim
        rows = items[row_dim] if row_dim < len(items) else slice(None)
        if isinstance(rows, (int, np.integer)) and not isinstance(rows, bool):
            count = self._ys.shape[row_dim]
            if not -count <= rows < count:
                raise IndexError(f"row {rows} is out of range for a Jacobian of shape {list(self.shape)}")
            return self._rest(self._row(int(rows) % count), [*items[:row_dim], *items[row_dim + 1 :]])
        chosen = range(self._ys.shape[row_dim])
        if self._whole is None and self._is_dear(rows):
            self._whole = self._columns()
        if self._whole is not None:
            return self._rest(self._whole, items)
        if isinstance(rows, slice):
            chosen = chosen[rows]
            items = [*items[:row_dim], slice(None), *items[row_dim + 1 :]] if row_dim < len(items) else items
        if not len(chosen):
            raise IndexError(f"{rows} selects no row of a Jacobian of shape {list(self.shape)}")
        with tape.GradEnabled(True):
            return self._rest(stack([self._row(i) for i in chosen], axis=row_dim), items)

    def numpy(self) -> np.ndarray:
        """All of it as an ndarray."""
        return self[:].numpy() if self.ndim else self[()].numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self.numpy()
        return value if dtype is None else value.astype(dtype)

    def __repr__(self) -> str:
        count = len(self._rows) if self._whole is None else self._ys.shape[self._row_dim]
        return f"{type(self).__name__}(shape={list(self.shape)}, {count} rows computed)"

    def _expanded(self, index: Any) -> list[Any]:
        items = list(index) if isinstance(index, tuple) else [index]
        if any(item is None for item in items):
            raise IndexError("a Jacobian takes no new dims in an index; index with [:] first")
        dots = [i for i, item in enumerate(items) if item is Ellipsis]
        if dots:
            fill = [slice(None)] * (self.ndim - len(items) + 1)
            items = [*items[: dots[0]], *fill, *items[dots[0] + 1 :]]
        if len(items) > max(self.ndim, 1):
            raise IndexError(f"{len(items)} indices for a Jacobian of shape {list(self.shape)}")
        return items if self.ndim else []

    @staticmethod
    def _rest(value: Tensor, items: list[Any]) -> Tensor:
        plain = all(isinstance(i, slice) and i == slice(None) for i in items)
        with tape.GradEnabled(True):
            return value if plain else value[tuple(items)]

    def _is_dear(self, rows: Any) -> bool:
        """True if all rows are asked for, of which there are no fewer than columns: one pass forward gives these."""
        count, columns = self._ys.shape[self._row_dim], math.prod(self._xs.shape[self._row_dim :])
        asked = isinstance(rows, slice) and len(range(count)[rows]) == count and (rows.step or 1) > 0
        return asked and not self._rows and count > 1 and 0 < columns <= count and goes_forward([self._ys], [self._xs])

    def _columns(self) -> Tensor:
        """All of it, by forward mode."""
        array, has_columns = self._xs._array, self._xs.ndim > self._row_dim
        spec = JetSpec(1, array.shape[-1] if has_columns else 1)
        units = jnp.broadcast_to(
            jnp.eye(spec.directions, dtype=array.dtype), (*array.shape[:-1], *[spec.directions] * 2)
        )
        vectors = jnp.moveaxis(units, -2, 0) if has_columns else jnp.ones((1, *array.shape), array.dtype)
        jet = (Tensor(vectors),) if spec.stacked else tuple(Tensor(v) for v in vectors)
        with tape.GradEnabled(True):
            (found,) = push([self._ys], [(self._xs, jet)], spec)
            if found is None:
                return Tensor(jnp.zeros(self.shape, array.dtype))
            columns = [zeros(self._ys) if c is None else c for c in found]
            if spec.stacked:
                return moveaxis(columns[0], 0, -1)
            return stack(columns, axis=-1) if has_columns else columns[0]  # type: ignore[return-value]

    def _row(self, i: int) -> Tensor:
        if self._whole is not None:
            with tape.GradEnabled(True):
                return self._whole[:, i] if self._batched else self._whole[i]
        if i not in self._rows:
            self._rows[i] = self._computed(i)
        return self._rows[i]

    def _computed(self, i: int) -> Tensor:
        if self._ys.stop_gradient:
            return zeros(self._xs)
        with tape.GradEnabled(True):
            y = self._ys if not self._has_rows else self._ys[:, i] if self._batched else self._ys[i]
        (found,) = walk.grad(
            [y], [self._xs], [None], retain_graph=True, create_graph=True, allow_unused=True, no_grad_vars=[]
        )
        return zeros(self._xs) if found is None else found  # type: ignore[return-value]


class Hessian(Jacobian):
    """The second derivatives of a scalar (per sample, if batched): the Jacobian of its gradient."""


def jacobian(ys: Any, xs: Any, batch_axis: int | None = None) -> Any:
    """Jacobian of ys with respect to xs; a tuple of them for several xs, a tuple of such for several ys.

    batch_axis: None, or 0 if dim 0 is the batch. Raises ShapeError for other numbers of dims than Jacobian takes.

    >>> x = Tensor([1.0, 2.0], stop_gradient=False)
    >>> jacobian(x * x, x)[:].tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    batched = _batch("jacobian", batch_axis)
    _refuse_function("jacobian", ys)
    outputs, inputs = as_list("jacobian", "ys", ys), as_list("jacobian", "xs", xs)
    rows = [[Jacobian(y, x, batched) for x in inputs] for y in outputs]
    found = [_only(row, xs) for row in rows]
    return _only(found, ys)


def hessian(ys: Tensor, xs: Any, batch_axis: int | None = None) -> Any:
    """Hessian of a scalar ys (one element, or one per sample with batch_axis=0) with respect to xs.

    A tuple of tuples for several xs: entry [i][j] differentiates by xs[i], then by xs[j].

    >>> x = Tensor([1.0, 2.0], stop_gradient=False)
    >>> hessian((x * x * x).sum(), x)[:].tolist()
    [[6.0, 0.0], [0.0, 12.0]]
    """
    batched = _batch("hessian", batch_axis)
    _refuse_function("hessian", ys)
    (root,), inputs = as_list("hessian", "ys", [ys]), as_list("hessian", "xs", xs)
    per_sample = root.size // root.shape[0] if batched and root.ndim and root.shape[0] else root.size
    if per_sample != 1:
        raise ShapeError(
            f"hessian: ys has shape {list(root.shape)}, needs one element{' per sample' if batched else ''}"
        )
    for x in inputs:
        if x.stop_gradient:
            raise GradError("hessian: xs has stop_gradient=True; set it to False before computing ys from it")
    firsts = walk.grad([root], inputs, [None], retain_graph=True, create_graph=True, allow_unused=True, no_grad_vars=[])
    firsts = [zeros(x) if g is None else g for g, x in zip(firsts, inputs, strict=True)]
    found = [_only([Hessian(g, x, batched) for x in inputs], xs) for g in firsts]  # type: ignore[arg-type]
    return _only(found, xs)


def _refuse_function(what: str, ys: Any) -> None:
    if callable(ys):
        raise GradError(
            f"{what}: ys is a function; give what it returns for xs whose stop_gradient is False, or call "
            f"incubate.autograd.{what.capitalize()}(func, xs)[:]"
        )


def _batch(what: str, batch_axis: Any) -> bool:
    if batch_axis not in (None, 0) or isinstance(batch_axis, bool):
        raise ConfigError(f"{what}: batch_axis is None or 0, got {batch_axis!r}")
    return batch_axis == 0


def _only(found: Sequence[Any], given: Any) -> Any:
    return found[0] if isinstance(given, TensorState) else tuple(found)
