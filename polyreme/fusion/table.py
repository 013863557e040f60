"""The table of patterns.

A pattern is here when the one call exists: there is none for linear + activation, nor for residual + norm, which XLA
fuses by itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from polyreme.fusion.pattern import Bound, Match, Pattern
from polyreme.ops.slicing import slice_index

VOCABULARY = 1024
"""Classes from which on logits are worth not having whole: below, they are small beside what makes them."""


def _bias(match: Match) -> Bound | None:
    return {} if len(match.shape("w")) == 2 and len(match.shape("b")) == 1 else None


def _vocabulary(match: Match) -> Bound | None:
    """Conditions of a loss over classes; works out the weight, how it lies, and what else the one call is told."""
    transposed = "table" in match.bound
    name = "table" if transposed else "w"
    shape = match.shape(name)
    if len(shape) != 2 or shape[0 if transposed else 1] < VOCABULARY:
        return None
    classes = shape[0 if transposed else 1]
    # they stay the last dim of whatever the logits become on their way
    if any(match.shape(step)[-1:] != (classes,) for step in ("l0", "l1", "l2", "l3", "l4", "l5", "l6")):
        return None
    last = len(match.shape("l6")) - 1
    if match.bound["axis"] not in (-1, last) or ("p" in match.bound and last != 1):
        return None  # nll_loss has its classes in dim 1
    biases = [b for b in ("b", "c") if match.bound.get(b) is not None]
    if len(biases) > 1 or any(match.shape(b) != (classes,) for b in biases):
        return None
    rows = _rows(match)
    if rows is None or not isinstance(match.bound.get("v", ()), (list, tuple)):  # view takes a dtype too
        return None
    bias = match.bound[biases[0]] if biases else None
    kind = match.dtype("loss")
    narrow = None if kind is None or kind.itemsize > 2 else kind.name
    return {"weight": match.bound[name], "transposed": transposed, "bias": bias, "rows": rows, "narrow": narrow}


def _rows(match: Match) -> tuple[slice, ...] | None:
    """The slices of the logits' leading dims that the loss takes, () for all; None if it takes another part."""
    shape, bound = match.shape("l2"), match.bound
    if "axes" in bound:
        index = _sliced(shape, bound["axes"], bound["starts"], bound["ends"])
    elif "at" in bound:
        index = list(bound["at"]) if isinstance(bound["at"], tuple) else [bound["at"]]
    else:
        return ()
    if index is None:
        return None
    for place in [i for i, item in enumerate(index) if item is Ellipsis]:
        index[place : place + 1] = [slice(None)] * (len(shape) - len(index) + 1)
    if not all(isinstance(item, slice) and _is_forward(item) for item in index):
        return None
    if len(index) == len(shape) and index.pop() != slice(None):
        return None  # a part of the classes
    # an exported program's size may be a symbol, which a slice cannot be counted from
    known = all(item == slice(None) or isinstance(size, int) for item, size in zip(index, shape, strict=False))
    return tuple(index) if known else None


def _sliced(shape: tuple[int, ...], axes: Any, starts: Any, ends: Any) -> list[Any] | None:
    """The index that slice(x, axes, starts, ends) takes, None where it is not written out in numbers."""
    if not all(isinstance(g, (list, tuple)) and all(isinstance(n, int) for n in g) for g in (axes, starts, ends)):
        return None
    return list(slice_index(shape, tuple(axes), tuple(starts), tuple(ends), None, "slice"))


def _is_forward(item: slice) -> bool:
    bounds = (item.start, item.stop, item.step)
    return all(b is None or isinstance(b, int) for b in bounds) and (item.step is None or item.step > 0)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _scores(match: Match, drops: bool) -> Bound | None:
    """Conditions of an attention; works out the factor of its scores, its mask and how much is dropped."""
    factor = 1.0
    for name in match.bound.keys() & {"c", "d", "e", "f"}:
        number = _number(match.bound[name])
        if not number:
            return None
        factor *= number if name in "ce" else 1 / number
    if len(match.shape("q")) != 4:
        return None
    if "mask" in match.bound and not match.is_floating("mask"):
        return None  # a bool would be added as 0 and 1
    rate = match.bound["p"] if match.bound.get("t") else 0.0
    if (rate != 0) is not drops:
        return None
    return {"factor": factor, "mask": match.bound.get("mask"), "rate": rate if drops else 0.0}


_LOGITS = (
    "turned = transpose(table, [1, 0])",
    "l0 = matmul(h, table, transpose_y=True) or matmul(h, turned) or matmul(h, w) or linear(h, w, b, ways)",
    "l1 = add(l0, c) or l0",
    "l2 = cast(l1, d) or l1",
    "l3 = l2[at] or slice(l2, axes, starts, ends) or l2",
    "l4 = cast(l3, d2) or l3",
    "l5 = reshape(l4, s) or view(l4, v) or flatten(l4, 0, n) or l4",
    "l6 = cast(l5, d3) or l5",
)
_LOSSES = (
    (
        ("loss = cross_entropy(l6, label, k, ignore_index=i, reduction=r, axis=axis, label_smoothing=e)",),
        "label_smoothing=e, reduction=r, class_weight=k",
    ),
    (("loss = softmax_with_cross_entropy(l6, label, ignore_index=i, axis=axis)",), "reduction='none'"),
    (
        ("p = log_softmax(l6, axis)", "loss = nll_loss(p, label, k, ignore_index=i, reduction=r)"),
        "reduction=r, class_weight=k",
    ),
)


def _linear_cross_entropy(loss: tuple[str, ...], more: str) -> Pattern:
    told = f"ignore_index=i, bias=bias, rows=rows, dtype=narrow, {more}"
    give = f"loss = fused_linear_cross_entropy(h, weight, label, transposed, {told})"
    return Pattern("linear_cross_entropy", (*_LOGITS, *loss), give, _vocabulary)


_ATTENTION = (
    "q4 = transpose(q, [0, 2, 1, 3])",
    "q5 = multiply(q4, c) or divide(q4, d) or scale(q4, c) or q4",
    "k4 = transpose(k, [0, 2, 1, 3])",
    "kt = transpose(k4, [0, 1, 3, 2]) or transpose(k, [0, 2, 3, 1])",
    "s0 = matmul(q5, k4, transpose_y=True) or matmul(q5, kt)",
    "s1 = multiply(s0, e) or divide(s0, f) or scale(s0, e) or s0",
    "s2 = add(s1, mask) or s1",
    "a0 = softmax(s2, -1)",
    "a1 = dropout(a0, p=p, training=t) or a0",
    "v4 = transpose(v, [0, 2, 1, 3])",
    "o4 = matmul(a1, v4)",
    "out = transpose(o4, [0, 2, 1, 3])",
)
"""Attention over [batch, seq, heads, head_dim]."""


def _attention(name: str, drops: bool) -> Pattern:
    give = "out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, scale=factor)"
    return Pattern(name, _ATTENTION, give, partial(_scores, drops=drops), redraws=drops)


PATTERNS = (
    Pattern("linear", ("h = matmul(x, w)", "y = add(h, b)"), "y = linear(x, w, b)", _bias),
    Pattern("linear", ("h = linear(x, w, ways=ways)", "y = add(h, b)"), "y = linear(x, w, b)", _bias),
    *(_linear_cross_entropy(*spelled) for spelled in _LOSSES),
    _attention("attention", drops=False),
    _attention("attention_dropout", drops=True),
)
"""What `fusion` looks for. Several entries of one name are spellings of one thing."""
