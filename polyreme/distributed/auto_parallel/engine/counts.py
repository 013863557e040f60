"""What a microbatch counts for in the loss of its batch, where that is not by its rows.

A step takes the mean of its microbatches' losses, by rows. A batch's sum is another thing, and so is a mean over labels
that are not ignored, or by weights of classes: there each microbatch's loss is multiplied by a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyreme.hapi.step import as_list
from polyreme.nn.layers.functional_layer import FunctionalLayer
from polyreme.nn.layers.loss import CrossEntropyLoss, NLLLoss
from polyreme.training.microbatches import Microbatch


class LossFactor(NamedTuple):
    """What a microbatch's loss is multiplied by, a 0-D array or Tensor; it stands behind the labels."""

    value: Any


_BY_LABELS = (CrossEntropyLoss.function, NLLLoss.function)
_DEFAULTS = {"reduction": "mean", "ignore_index": -100}


def is_counted(loss: Any) -> bool:
    """Whether a batch's loss is something else than the mean of its microbatches' by rows. Of a function of the user's
    own, and of a Layer with a forward of its own, that is not known: False."""
    function, settings = _known(loss)
    reduction = settings.get("reduction")
    return reduction == "sum" or (reduction == "mean" and function in _BY_LABELS)


def weighted(loss: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The losses of (*outputs, *labels), multiplied by the LossFactor that may stand behind the labels."""

    def losses(*args: Any) -> list[Any]:
        if not isinstance(args[-1], LossFactor):
            return as_list(loss(*args))
        *args, factor = args
        return [value * factor.value for value in as_list(loss(*args))]

    return losses


def with_factors(loss: Any, batch: Sequence[Microbatch]) -> list[Microbatch]:
    """The microbatches, with a LossFactor behind the labels of each where is_counted(loss)."""
    if not is_counted(loss):
        return list(batch)
    _, settings = _known(loss)
    rows = sum(microbatch.rows for microbatch in batch)
    if settings["reduction"] == "sum":
        factors = [rows / microbatch.rows for microbatch in batch]
    else:
        counts = [_count(settings, microbatch) for microbatch in batch]
        total = sum(counts)
        factors = [
            n * rows / (total * microbatch.rows) if total else 1.0 for n, microbatch in zip(counts, batch, strict=True)
        ]
    return [
        microbatch._replace(labels=(*microbatch.labels, LossFactor(np.asarray(factor, np.float32))))
        for microbatch, factor in zip(batch, factors, strict=True)
    ]


def _known(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function of a loss, and its settings; (None, {}) for another one than the library's."""
    if isinstance(loss, FunctionalLayer) and type(loss).forward is FunctionalLayer.forward:
        return type(loss).function, loss.settings
    return (loss, _DEFAULTS) if loss in _BY_LABELS else (None, {})


def _count(settings: Mapping[str, Any], microbatch: Microbatch) -> float:
    """What the mean over a microbatch's labels divides by; its rows where there are none."""
    weight, smoothing = settings.get("weight"), settings.get("label_smoothing", 0.0)
    if not microbatch.labels or (settings.get("soft_label") and weight is None):
        return microbatch.rows
    label = np.asarray(microbatch.labels[0])
    live = label[label != settings["ignore_index"]]
    if weight is None:
        return live.size
    weight = np.asarray(getattr(weight, "_array", weight), np.float64)
    if settings.get("soft_label"):
        picked = np.moveaxis(label, settings["axis"], -1) @ weight
    else:
        picked = weight[np.clip(live, 0, weight.size - 1)]
    return float((1 - smoothing) * picked.sum() + smoothing * weight.mean() * picked.size)
