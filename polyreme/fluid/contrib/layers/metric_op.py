"""Sums that click models are judged by."""

from __future__ import annotations

from typing import Any

from polyreme.fluid.layer import layer
from polyreme.fluid.layers.elementwise import put
from polyreme.fluid.layers.tensor import create_global_var
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops import reduce as rd
from polyreme.ops.creation import ones_like
from polyreme.ops.manipulation import reshape


@layer
def ctr_metric_bundle(input: Any, label: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Sums over all runs, each [1]: squared errors, absolute errors, predictions, their sigmoids, clicks, rows.

    input, label [n, 1]: the predicted chance of a click, and whether there was one.
    """
    clicks = ar.cast(label, input.dtype)
    off = ar.subtract(input, clicks)
    terms = [mt.square(off), mt.abs(off), input, mt.sigmoid(input), clicks, ones_like(input)]
    sums = []
    for term in terms:
        total = create_global_var([1], 0.0, "float32", persistable=True)
        total.stop_gradient = True
        reduced = reshape(ar.cast(rd.sum(term), "float32"), [1]).detach()
        sums.append(put(total, ar.add(total, reduced), "ctr_metric_bundle"))
    return tuple(sums)  # type: ignore[return-value]


__all__ = ["ctr_metric_bundle"]
