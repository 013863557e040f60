"""How published tables count: FLOP of a step by a table's own formula, and the step's seconds from what it prints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polyreme.planner.model_shape import ModelShape

HARDWARE = "96BsLh^2(1+s/6h+V/16Lh)"
"""With a whole second forward. Source: arXiv:2104.04473, equation 3."""

MODEL = "72BsLh^2(1+s/6h+V/12Lh)"
"""Source: arXiv:2205.05198, appendix A."""


def flops_by_convention(text: str, model: ModelShape, batch: int) -> float:
    """FLOP of one step of `batch` samples, counted as the text says; what it does not say is counted as PaLM does:
    products of the forward and twice that for the backward, attention whole (arXiv:2204.02311, appendix B).

    >>> gpt = ModelShape(hidden=12288, layers=96, heads=96, seq=2048, vocab=51200, ffn=49152)
    >>> f"{flops_by_convention('model', gpt, 1536) / flops_by_convention(MODEL, gpt, 1536):.3f}"
    '1.000'
    """
    b, s, layers, h, vocab = batch, model.seq, model.layers, model.hidden, model.vocab
    plain = re.sub(r"[\s*]", "", text).lower()
    if "96bslh" in plain:
        head = vocab / (16 * layers * h) if "v/16" in plain else 0.0
        return 96.0 * b * s * layers * h**2 * (1 + s / (6 * h) + head)
    if "72bslh" in plain:
        head = vocab / (12 * layers * h) if "v/12" in plain else 0.0
        return 72.0 * b * s * layers * h**2 * (1 + s / (6 * h) + head)
    graph = model.graph()
    scores = 6.0 * layers * model.score_width * s
    if "6n" in plain:
        active = model.num_active_parameters
        return b * s * (6.0 * active + (scores if "12l" in plain else 0.0))
    exact = graph.flops_per_token
    if "causal" in plain and "nothalved" not in plain and "half" in plain.replace("halved", "half"):
        exact -= scores / 2
    if "hardware" in plain or "full-recompute" in plain:
        exact *= 4 / 3
    return b * s * exact


def measured_seconds(row: Mapping[str, Any], model: ModelShape, batch: int, num_devices: int) -> float | None:
    """Seconds of a step that the row's table reports: as such, from tokens/s, or from FLOP/s by its convention; None if
    it reports none of them."""
    step, tokens, tflops = (_number(row.get(column)) for column in ("step_s", "tokens_s_dev", "tflops_dev"))
    if step:
        return step
    if tokens:
        return batch * model.seq / (tokens * num_devices)
    if tflops:
        return flops_by_convention(str(row.get("flops_convention") or ""), model, batch) / (tflops * 1e12 * num_devices)
    return None


def _number(value: Any) -> float | None:
    match = re.match(r"\s*(\d+(\.\d*)?([eE][+-]?\d+)?)", str(value or ""))
    return float(match[1]) if match else None
