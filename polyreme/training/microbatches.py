"""A batch cut into microbatches, and the share that each has in the batch's loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from polyreme.eager.tensor import Tensor
from polyreme.errors import ShapeError
from polyreme.jit.structure import flatten, rebuild


class Microbatch(NamedTuple):
    """The inputs of a model, the other inputs of the loss, and the number of rows.

    share: what its loss is multiplied by in the batch's, a 0-D number or Tensor; its part of the rows if None.
    """

    inputs: Any
    labels: Any
    rows: int
    share: Any = None


def shares(batch: Sequence[Microbatch]) -> tuple[Any, ...]:
    """The weight of each microbatch's loss in the batch's.

    >>> shares([Microbatch(None, None, 3), Microbatch(None, None, 1)])
    (0.75, 0.25)
    """
    total = sum(part.rows for part in batch)
    return tuple(part.rows / total if part.share is None else part.share for part in batch)


def share_by_counts(batch: Sequence[Microbatch], counts: Sequence[float]) -> list[Microbatch]:
    """The microbatches, whose losses are means over so many terms each, with the shares that make the batch's loss the
    mean over all of them. Where none has any, and for a batch in one piece, shares stay as they are.

    >>> shares(share_by_counts([Microbatch(None, None, 1), Microbatch(None, None, 1)], [6, 2]))
    (np.float64(0.75), np.float64(0.25))
    """
    total = sum(counts)
    if len(batch) == 1 or not total:
        return list(batch)
    return [part._replace(share=np.float64(count / total)) for part, count in zip(batch, counts, strict=True)]


def cut(data: Any, count: int, rows: int | None) -> list[Microbatch]:
    """data in `count` microbatches.

    data: [inputs, labels], each a Tensor, an array, or a tuple or dict of them and plain values, whose arrays of at
    least one dim have the whole batch in dim 0; a list in the place of inputs or labels has one entry a microbatch, and
    its last may have fewer rows. Or an iterator that yields [inputs, labels] for each microbatch.
    rows: rows of a microbatch, checked where data is a whole batch; None takes what there is.

    Raises ShapeError for anything else, saying what a batch must be.
    """
    if isinstance(data, Iterator):
        parts = [_check_pair(next(data, None), i, count) for i in range(count)]
        return [_microbatch(_on_host(inputs), _on_host(labels)) for inputs, labels in parts]
    inputs, labels = _check_pair(data, 0, 1)
    total = None if rows is None else rows * count
    return [
        _microbatch(x, y)
        for x, y in zip(_parts("inputs", inputs, count, total), _parts("labels", labels, count, total), strict=True)
    ]


def _check_pair(data: Any, at: int, count: int) -> tuple[Any, Any]:
    if data is None:
        raise ShapeError(f"the iterator of microbatches ended after {at}; a batch has {count}")
    if not isinstance(data, (list, tuple)) or len(data) != 2:
        kind = f"{type(data).__name__} of {len(data)}" if isinstance(data, (list, tuple, dict)) else type(data).__name__
        raise ShapeError(f"a batch is [inputs, labels], got a {kind}; put several inputs into a tuple of their own")
    return data[0], data[1]


def _parts(name: str, value: Any, count: int, total: int | None) -> list[Any]:
    if isinstance(value, list):
        if len(value) != count:
            raise ShapeError(f"{name} is a list of {len(value)} microbatches, there must be {count}; give one for each")
        return [_on_host(v) for v in value]
    value = _on_host(value)
    leaves: list[Any] = []
    spec = flatten(value, leaves)
    size = _rows(leaves)
    if size is None:
        return [value] * count
    if total is not None and size != total:
        raise ShapeError(
            f"{name} has {size} rows, a batch has {total}: {count} microbatches of {total // count} rows "
            "(micro_batch_size times the degrees of dp and sharding); change the batch size, or give a list of "
            "microbatches"
        )
    each = -(-size // count)
    if (count - 1) * each >= size:
        raise ShapeError(f"{name} has {size} rows, which do not make {count} microbatches; give at least {count} rows")
    bounds = [(i * each, min((i + 1) * each, size)) for i in range(count)]
    return [rebuild(spec, iter([v[a:b] if _has_rows(v) else v for v in leaves])) for a, b in bounds]


def _microbatch(inputs: Any, labels: Any) -> Microbatch:
    leaves: list[Any] = []
    flatten(inputs, leaves)
    flatten(labels, leaves)
    return Microbatch(inputs, labels, _rows(leaves) or 1)


def _rows(leaves: Sequence[Any]) -> int | None:
    """The common size of dim 0, None if no array has one."""
    sizes = {v.shape[0] for v in leaves if _has_rows(v)}
    if len(sizes) > 1:
        raise ShapeError(
            f"the arrays of a batch have {sorted(sizes)} rows in dim 0; they must all have as many: expand "
            "what is not by rows, such as a mask, over the batch"
        )
    return next(iter(sizes), None)


def _has_rows(value: Any) -> bool:
    return isinstance(value, (np.ndarray, jax.Array)) and value.ndim > 0


def _on_host(value: Any) -> Any:
    """Tensors as arrays, which a stage then lays out; on the host where reading them costs no copy."""
    leaves: list[Any] = []
    spec = flatten(value, leaves)
    return rebuild(spec, iter([_array(v) for v in leaves]))


def _array(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    array = value._array
    return np.asarray(array) if next(iter(array.devices())).platform == "cpu" else array
