"""The table of patterns.

A pattern is here when the one call exists: there is none for linear + activation, nor for residual + norm
(the kernel in kernels.residual_norm is no op), which XLA fuses by itself.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from polyreme.fusion.pattern import Bound, Match, Pattern

VOCABULARY = 1024
"""Classes from which on logits are worth not having whole: below, they are small beside what makes them."""


def _bias(match: Match) -> Bound | None:
    return {} if len(match.shape("w")) == 2 and len(match.shape("b")) == 1 else None


def _vocabulary(axis: int) -> Any:
    def where(match: Match) -> Bound | None:
        shape = match.shape("w")
        if len(shape) != 2 or shape[axis] < VOCABULARY:
            return None
        # classes stay the last dim of whatever the logits become on their way
        return {} if all(match.shape(n)[-1:] == (shape[axis],) for n in ("l1", "l2") if n in match.bound) else None

    return where


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _scores(how: str, drops: bool) -> Any:
    """Conditions of an attention whose scores are scaled so; works out `factor`."""

    def where(match: Match) -> Bound | None:
        factor = 1.0 if how == "none" else _number(match.bound["c"])
        if factor is None or factor == 0 or len(match.shape("q")) != 4:
            return None
        if "mask" in match.bound and not match.is_floating("mask"):
            return None  # a bool would be added as 0 and 1
        if "t" in match.bound and (bool(match.bound["t"]) and match.bound["p"] != 0) is not drops:
            return None
        return {"factor": 1 / factor if how.endswith("divided") else factor}

    return where


_LOGITS = {
    "linear(h, w)": (False, 1),
    "matmul(h, w)": (False, 1),
    "matmul(h, w, transpose_y=True)": (True, 0),
    "matmul(h, wt)": (True, 0),
}
"""Logits as they are made: (transpose_weight, the weight's dim of classes); wt is w transposed."""
_BETWEEN = {"": "", "reshaped": "reshape(l0, s)", "flattened": "flatten(l0, 0, n)", "cast": "cast(l0, d)"}
_LOSSES = {
    "cross_entropy({}, label, ignore_index=i, reduction=r, label_smoothing=e)": "label_smoothing=e, reduction=r",
    "softmax_with_cross_entropy({}, label, ignore_index=i)": "reduction='none'",
}


def _linear_cross_entropy(logits: str, between: str, more: str, loss: str) -> Pattern:
    """One spelling of the cross-entropy of a linear map: logits, up to two steps between, loss."""
    transposed, classes = _LOGITS[logits]
    find = ["wt = transpose(w, [1, 0])"] if "wt" in logits else []
    find += [f"l0 = {logits}"]
    last = "l0"
    for number, step in enumerate((between, more), 1):
        if step:
            find += [f"l{number} = {_BETWEEN[step].replace('l0', last)}"]
            last = f"l{number}"
    find += [f"loss = {loss.format(last)}"]
    give = f"loss = fused_linear_cross_entropy(h, w, label, {transposed}, ignore_index=i, {_LOSSES[loss]})"
    return Pattern("linear_cross_entropy", tuple(find), give, _vocabulary(classes))


_HEADS = "[0, 2, 1, 3]"
_KEYS = {
    "transpose_y": ("k4 = transpose(k, [0, 2, 1, 3])", "s0 = matmul({q}, k4, transpose_y=True)"),
    "swapped": ("k4 = transpose(k, [0, 2, 1, 3])", "kt = transpose(k4, [0, 1, 3, 2])", "s0 = matmul({q}, kt)"),
    "turned": ("kt = transpose(k, [0, 2, 3, 1])", "s0 = matmul({q}, kt)"),
}
_SCALES = {
    "none": "",
    "multiplied": "s1 = multiply(s0, c)",
    "divided": "s1 = divide(s0, c)",
    "scaled": "s1 = scale(s0, c)",
    "query multiplied": "q1 = multiply(q4, c)",
    "query divided": "q1 = divide(q4, c)",
    "query scaled": "q1 = scale(q4, c)",
}


def _attention(keys: str, how: str, masked: bool, dropping: str) -> Pattern:
    """One spelling of attention over [batch, seq, heads, head_dim]."""
    ahead = how.startswith("query")
    scaling = [_SCALES[how]] if how != "none" else []
    scores = "s1" if scaling and not ahead else "s0"
    find = [f"q4 = transpose(q, {_HEADS})", *(scaling if ahead else [])]
    find += [line.format(q="q1" if ahead else "q4") for line in _KEYS[keys]]
    find += [] if ahead else scaling
    find += [f"s2 = add({scores}, mask)"] if masked else []
    find += [f"a0 = softmax({'s2' if masked else scores}, -1)"]
    find += ["a1 = dropout(a0, p=p, training=t)"] if dropping else []
    find += [f"v4 = transpose(v, {_HEADS})", f"o4 = matmul({'a1' if dropping else 'a0'}, v4)"]
    find += [f"out = transpose(o4, {_HEADS})"]
    drops = dropping == "drops"
    more = (", attn_mask=mask" if masked else "") + (", dropout_p=p" if drops else "")
    give = f"out = scaled_dot_product_attention(q, k, v{more}, scale=factor)"
    return Pattern("attention_dropout" if drops else "attention", tuple(find), give, _scores(how, drops), drops)


PATTERNS = (
    Pattern("linear", ("h = matmul(x, w)", "y = add(h, b)"), "y = linear(x, w, b)", _bias),
    Pattern("linear", ("h = linear(x, w)", "y = add(h, b)"), "y = linear(x, w, b)", _bias),
    *(
        _linear_cross_entropy(logits, *steps, loss)
        for logits, steps, loss in product(
            _LOGITS, [*((a, "") for a in _BETWEEN), ("cast", "reshaped"), ("reshaped", "cast"), ("cast", "flattened")],
            _LOSSES,
        )
    ),
    *(_attention(*spelled) for spelled in product(_KEYS, _SCALES, (False, True), ("", "idle", "drops"))),
)  # fmt: skip
"""What `fusion` looks for. Several entries of one name are spellings of one thing."""
