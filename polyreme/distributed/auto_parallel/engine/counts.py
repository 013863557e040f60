"""The weight of a microbatch in the loss of its batch where that is not its share of the rows: under a loss that is a
sum, a mean over the labels that are not ignored, or a mean by class weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyreme.nn.functional import cross_entropy, nll_loss
from polyreme.nn.layers.functional_layer import FunctionalLayer
from polyreme.training.microbatches import Microbatch, share_by_counts

_BY_LABELS = (cross_entropy, nll_loss)
_DEFAULTS = {"reduction": "mean", "ignore_index": -100}


def is_counted(loss: Any) -> bool:
    """Whether a batch's loss is something else than the mean of its microbatches' by rows. Of a function of the user's
    own, and of a Layer with a forward of its own, that is not known: False."""
    function, settings = _function_of(loss)
    reduction = settings.get("reduction")
    return reduction == "sum" or (reduction == "mean" and function in _BY_LABELS)


def with_shares(loss: Any, batch: Sequence[Microbatch]) -> list[Microbatch]:
    """The microbatches, with the shares that the loss gives them."""
    if not is_counted(loss):
        return list(batch)
    _, settings = _function_of(loss)
    if settings["reduction"] == "sum":
        return [microbatch._replace(share=np.float64(1)) for microbatch in batch]
    return share_by_counts(batch, [_count(settings, microbatch) for microbatch in batch])


def _function_of(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function of a loss, and its settings; (None, {}) for another one than the library's."""
    if isinstance(loss, FunctionalLayer) and type(loss).forward is FunctionalLayer.forward:
        return loss.function, loss.settings
    return (loss, _DEFAULTS) if loss in _BY_LABELS else (None, {})


def _count(settings: Mapping[str, Any], microbatch: Microbatch) -> float:
    """The divisor of the mean over a microbatch's labels; the number of rows where there are no labels."""
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
