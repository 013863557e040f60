"""fusion: the table of patterns, and the pass that applies them.

A pattern is here when the one call exists: there is none for linear + activation, nor for residual + norm
(the kernel in kernels.residual_norm is no op), which XLA fuses by itself.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from polyreme.errors import ConfigError, did_you_mean
from polyreme.program.block import Block
from polyreme.program.passes.facts import Facts, direct, kept_names, settle
from polyreme.program.passes.pattern import Bound, Match, Pattern, matches, replaced
from polyreme.program.program import Program

VOCABULARY = 1024
"""Classes from which on logits are worth not having whole: below, they are small beside what makes them."""


def _bias(match: Match) -> Bound | None:
    return {} if len(match.shape("w")) == 2 and len(match.shape("b")) == 1 else None


def _vocabulary(at: int) -> Any:
    def where(match: Match) -> Bound | None:
        shape = match.shape("w")
        return {} if len(shape) == 2 and shape[at] >= VOCABULARY else None

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
        if "t" in match.bound and (match.bound["t"] is True and match.bound["p"] != 0) is not drops:
            return None
        return {"factor": 1 / factor if how.endswith("divided") else factor}

    return where


_LOSS = "loss = cross_entropy(logits, label, ignore_index=i, reduction=r, label_smoothing=e)"
_FUSED_LOSS = "loss = fused_linear_cross_entropy(h, w, label, {}, ignore_index=i, label_smoothing=e, reduction=r)"
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
    Pattern(
        "linear_cross_entropy", ("logits = linear(h, w)", _LOSS), _FUSED_LOSS.format(False), _vocabulary(1)
    ),
    Pattern(
        "linear_cross_entropy", ("logits = matmul(h, w)", _LOSS), _FUSED_LOSS.format(False), _vocabulary(1)
    ),
    Pattern(
        "linear_cross_entropy", ("logits = matmul(h, w, transpose_y=True)", _LOSS), _FUSED_LOSS.format(True),
        _vocabulary(0),
    ),
    *(_attention(*spelled) for spelled in product(_KEYS, _SCALES, (False, True), ("", "idle", "drops"))),
)  # fmt: skip
"""What `fusion` looks for. Several entries of one name are spellings of one thing."""


def fusion(program: Program, keep: Any = (), patterns: Any = None) -> Program:
    """program with one call where several match a pattern of PATTERNS.

    patterns: names of those to apply, one or a list; None for all but `attention_dropout`, whose mask of dropped
    probabilities is another one for the same seed (what other calls draw stays). A pattern applies only where nothing
    else reads what lies between, and it is not kept. Sums are added in another order, so results are equal within
    rounding. Attention over a row of scores that are all -inf gives 0 instead of NaN.
    """
    chosen = _choose(patterns)
    fused = program.clone()
    facts = Facts(fused, kept_names(program, keep))
    for block in fused.blocks:
        while _fuse_one(block, chosen, facts):
            pass
    return settle(fused)


def _choose(patterns: Any) -> list[Pattern]:
    if patterns is None:
        return [p for p in PATTERNS if not p.redraws]
    names = [patterns] if isinstance(patterns, str) else list(patterns)
    known = dict.fromkeys(p.name for p in PATTERNS)
    for name in names:
        if name not in known:
            raise ConfigError(f"fusion: there is no pattern {name!r}{did_you_mean(str(name), known)}")
    return [p for p in PATTERNS if p.name in names]


def _fuse_one(block: Block, patterns: list[Pattern], facts: Facts) -> bool:
    """Apply one pattern somewhere in the block; False if none applies."""
    maker_of = {name: i for i, op in enumerate(block.ops) for name in op.outputs}
    for index, op in enumerate(block.ops):
        for pattern in patterns:
            if pattern.lines[0].op != op.kind:
                continue
            for match in matches(pattern, block, index, maker_of, facts):
                found = replaced(pattern, match)
                if found is not None:
                    _put(block, index, *found, facts)
                    return True
    return False


def _put(block: Block, at: int, call: Any, gone: list[int], facts: Facts) -> None:
    for place in gone:
        facts.readers.subtract(direct(block.ops[place]))
    facts.readers.update(direct(call))
    block.ops = [call if i == at else op for i, op in enumerate(block.ops) if i == at or i not in gone]
