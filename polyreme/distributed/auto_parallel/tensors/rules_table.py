"""The placement rule of each op, in families; see rules.py for what a rule says.

An op that is not here takes its inputs as they lie (Partial ones joined); its results lie as XLA left them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core.sharding_rule import DimNames, OpCall, Padding, Reduce, RuleFor, ShardingRule

RULES: dict[str, RuleFor] = {}


def _rules(names: str) -> Callable[[RuleFor], RuleFor]:
    def declare(rule: RuleFor) -> RuleFor:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return declare


def letters(shape: Sequence[int], prefix: str = "d") -> DimNames:
    """A letter for each dim, counted from the last, so that shapes that broadcast share theirs."""
    return tuple(f"{prefix}{len(shape) - i}" for i in range(len(shape)))


def spread(shape: Sequence[int], out: Sequence[int], prefix: str = "d") -> DimNames:
    """The letters of a shape that broadcasts to out: none for a dim of size 1 that grows."""
    full = letters(shape, prefix)
    grown = out[len(out) - len(shape) :]
    return tuple(None if n != m else at for at, n, m in zip(full, shape, grown, strict=True))


def without(given: DimNames, *dims: int) -> DimNames:
    """The letters, but none for these dims."""
    return tuple(None if i in dims else at for i, at in enumerate(given))


# element by element

_ELEMENTWISE = """
    relu relu6 elu selu celu gelu silu mish hardsigmoid hardswish hardtanh hardshrink softshrink tanhshrink
    thresholded_relu softplus softsign leaky_relu log_sigmoid rrelu_train add subtract multiply divide floor_divide
    remainder pow neg equal not_equal less_than less_equal greater_than greater_equal logical_and logical_or logical_xor
    logical_not bitwise_and bitwise_or bitwise_xor bitwise_not cast abs exp expm1 log log2 log10 log1p sqrt rsqrt square
    reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid deg2rad rad2deg sinc ceil floor trunc
    frac round sign signbit positive scale stanh clip nan_to_num isfinite isinf isnan isposinf isneginf maximum minimum
    fmax fmin atan2 hypot lerp logaddexp copysign nextafter ldexp frexp heaviside gcd lcm bitwise_left_shift
    bitwise_right_shift add_n increment real imag conj angle isreal sgn polar complex erf erfinv lgamma gammaln digamma
    polygamma gammainc gammaincc i0 i0e i1 i1e logit xlogy xlog1py isclose where masked_fill assign clone zeros_like
    ones_like full_like empty_like rand_like randn_like randint_like bernoulli poisson standard_gamma binomial uniform_
    normal_ exponential_ bernoulli_ dropout_train alpha_dropout_train scaled_by_keep square_error_cost log_loss
"""
_SUMS = {"add", "subtract", "add_n", "neg", "positive", "assign", "clone", "real", "imag", "conj", "deg2rad", "rad2deg"}


@_rules(_ELEMENTWISE)
def elementwise(c: OpCall) -> ShardingRule | None:
    """ShardingRule that broadcast together are one; a dim of size 1 that grows is whole."""
    out = c.outs[0]
    ins = tuple(
        (None,) * len(s) if len(s) > len(out) else spread(s, out) for s in c.shapes
    )  # fmt: skip
    passes, of = _linearity(c)
    made = tuple(letters(s) if s == out else (None,) * len(s) for s in c.outs)
    return ShardingRule(ins, made, linear=passes, linear_in=of, piecewise=not c.drawn)


def _linearity(c: OpCall) -> tuple[Any, tuple[int, ...] | None]:
    inexact = all(dtypes.is_inexact(d) for d in c.dtypes)
    if c.name in _SUMS or (c.name == "cast" and inexact and dtypes.is_inexact(c.out_dtypes[0])):
        return "jointly", None
    if c.name == "scale" and inexact:
        plain = "bias" not in c.params and c.attrs.get("bias") == 0 and c.attrs.get("act") is None
        return ("alone" if plain else "no"), (0,)
    if c.name == "multiply":
        return "alone", None
    if c.name == "divide" and inexact and c.attrs.get("rounding_mode") is None:
        return "alone", (0,)
    return "no", None


@_rules("prelu")
def prelu(c: OpCall) -> ShardingRule:
    """The weight, one number or one per channel, is whole."""
    own = letters(c.shapes[0])
    return ShardingRule(c.inputs(x=own), (own,), piecewise=True)


@_rules("swiglu")
def swiglu(c: OpCall) -> ShardingRule | None:
    """Of two, element by element; of the halves of one, all but the last dim."""
    if len(c.shapes) == 2:
        return elementwise(c)
    own = without(letters(c.shapes[0]), len(c.shapes[0]) - 1)
    return ShardingRule((own,), (own,))


# products


@_rules("matmul bmm mm mv dot")
def matmul(c: OpCall) -> ShardingRule | None:
    """[*b, m, k] x [*b, k, n]; the dim that is summed over makes the result Partial."""
    x, y = c.shapes[0], c.shapes[1]
    if not x or not y or (c.name == "dot" and len(x) > 1):
        return None
    out = c.outs[0]
    batch = out[: len(out) - (len(x) > 1) - (len(y) > 1)]
    last = {True: ("k", "m"), False: ("m", "k")}[bool(c.attrs.get("transpose_x"))]
    xs = (*spread(x[:-2], batch, "b"), *last) if len(x) > 1 else ("k",)
    last = {True: ("n", "k"), False: ("k", "n")}[bool(c.attrs.get("transpose_y"))]
    ys = (*spread(y[:-2], batch, "b"), *last) if len(y) > 1 else ("k",)
    made = (*letters(batch, "b"), *("m",) * (len(x) > 1), *("n",) * (len(y) > 1))
    return ShardingRule((xs, ys), (made,), reduce="sum", linear="alone", piecewise=True)


@_rules("linear")
def linear(c: OpCall) -> ShardingRule:
    """[*b, in] x [in, out] + [out]; with a bias the sum over a split `in` is joined at once."""
    batch = letters(c.shapes[0][:-1], "b")
    biased = "bias" in c.params
    ins = c.inputs(x=(*batch, "k"), weight=("k", "n"), bias=("n",) if len(c.shapes[-1]) == 1 else (None, "n"))
    return ShardingRule(
        ins, ((*batch, "n"),), reduce=None if biased else "sum", linear="no" if biased else "alone", piecewise=True
    )  # fmt: skip


@_rules("outer")
def outer(c: OpCall) -> ShardingRule | None:
    """[m] x [n] -> [m, n]."""
    if any(len(s) != 1 for s in c.shapes):
        return None
    return ShardingRule((("m",), ("n",)), (("m", "n"),), linear="alone", piecewise=True)


@_rules("einsum")
def einsum(c: OpCall) -> ShardingRule | None:
    """The letters of the equation."""
    equation = str(c.attrs["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or any(len(set(t)) != len(t) for t in [*terms, right]):
        return None
    fits = all(len(t) == len(s) for t, s in zip(terms, c.shapes, strict=True))
    return (
        ShardingRule(tuple(map(tuple, terms)), (tuple(right),), reduce="sum", linear="alone", piecewise=True)
        if fits
        else None
    )


@_rules("conv1d conv2d conv3d")
def convolution(c: OpCall) -> ShardingRule:
    """Batch and output channels go through, a sum over split input channels is joined at once; places are whole."""
    last = not str(c.attrs["data_format"]).startswith("NC")
    rank, alone = len(c.shapes[0]), c.attrs["groups"] == 1
    places = (None,) * (rank - 2)
    into, made = "c" if alone else None, "o" if alone else None
    x = ("b", *places, into) if last else ("b", into, *places)
    out = ("b", *places, made) if last else ("b", made, *places)
    ins = c.inputs(x=x, weight=(made, into, *places), bias=(made,))
    return ShardingRule(ins, (out,), laid_out=True)


@_rules("conv1d_transpose conv2d_transpose conv3d_transpose deform_conv2d")
def transposed_convolution(c: OpCall) -> ShardingRule:
    """The batch goes through."""
    own = ("b", *(None,) * (len(c.shapes[0]) - 1))
    deformed = {"offset": own, "mask": own} if c.name == "deform_conv2d" else {}
    return ShardingRule(c.inputs(x=own, **deformed), (own,), laid_out=True)


# reductions

_REDUCTIONS: dict[str, tuple[Reduce | None, Padding | None]] = {
    "sum": ("sum", "zero"),
    "nansum": ("sum", "zero"),
    "count_nonzero": ("sum", "zero"),
    "mean": ("avg", "zero"),
    "prod": ("prod", "one"),
    "max": ("max", "low"),
    "amax": ("max", "low"),
    "min": ("min", "high"),
    "amin": ("min", "high"),
    "any": ("any", "zero"),
    "all": ("all", "one"),
    "var": (None, None),
    "std": (None, None),
    "nanmean": (None, None),
    "logsumexp": (None, None),
    "norm": (None, None),
    "vector_norm": (None, None),
    "argmax": (None, None),
    "argmin": (None, None),
    "median": (None, None),
}
"""Op -> how its pieces join, and what padding changes nothing; None: joined at once."""


@_rules(" ".join(_REDUCTIONS))
def reduction(c: OpCall) -> ShardingRule | None:
    """The dims in axis are gone, or 1 with keepdim; split, they make the result Partial."""
    shape = c.shapes[0]
    axis, keep = c.attrs.get("axis"), bool(c.attrs.get("keepdim", False))
    given = range(len(shape)) if axis is None or axis == () else [axis] if isinstance(axis, int) else axis
    gone = {a % len(shape) for a in given} if shape else set()
    if any(len(o) != len(shape) - (0 if keep else len(gone)) for o in c.outs):
        return None
    own = letters(shape)
    made = tuple(None if i in gone else at for i, at in enumerate(own) if keep or i not in gone)
    reduce, padding = _REDUCTIONS[c.name]
    passes = "jointly" if c.name in ("sum", "mean") and dtypes.is_inexact(c.dtypes[0]) else "no"
    return ShardingRule(c.inputs(x=own), (made,) * len(c.outs), reduce=reduce, padding=padding, linear=passes)


_LOSSES = """
    mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss
    poisson_nll_loss hinge_embedding_loss margin_ranking_loss kl_div gaussian_nll
"""


@_rules(_LOSSES)
def loss(c: OpCall) -> ShardingRule | None:
    """Element by element, then a sum (Partial) or mean (Partial, AVG) where all pieces are equal."""
    shape = max(c.shapes, key=len)
    ins = tuple(spread(s, shape) for s in c.shapes)
    how = c.attrs["reduction"]
    if how == "none":
        return ShardingRule(ins, (letters(shape),)) if c.outs[0] == shape else None
    reduce = {"sum": "sum", "mean": "avg"}.get(how)
    alike = all(s == shape for s in c.shapes)
    return ShardingRule(ins, ((),), reduce=reduce if alike else None, padding=None)


# one dim is whole

_ALONG = """
    softmax log_softmax gumbel_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort flip roll normalize
    topk kthvalue mode glu maxout diff
"""
_MOVES = frozenset(["flip", "roll"])


@_rules(_ALONG)
def along(c: OpCall) -> ShardingRule | None:
    """Every device needs the dims in axis whole; the others go through."""
    shape = c.shapes[0]
    axis = c.attrs.get("axis", c.attrs.get("dim"))
    if axis is None and c.name in ("topk", "softmax", "log_softmax", "mode", "kthvalue"):
        axis = -1
    if axis is None or not shape:
        return None
    whole = {a % len(shape) for a in ([axis] if isinstance(axis, int) else axis)}
    own = without(letters(shape), *whole)
    found = [_through(own, whole, shape, out) for out in c.outs]
    made = tuple(each for each in found if each is not None)
    passes = "moves" if c.name in _MOVES else "jointly" if c.name == "cumsum" else "no"
    return ShardingRule(c.inputs(x=own), made, linear=passes) if len(made) == len(found) else None


def _through(own: DimNames, whole: set[int], shape: Sequence[int], out: Sequence[int]) -> DimNames | None:
    """The letters of a result that has the dims of `shape`, those in whole of any size or gone."""
    if len(out) == len(shape):
        return own
    return tuple(at for i, at in enumerate(own) if i not in whole) if len(out) == len(shape) - len(whole) else None


@_rules("layer_norm rms_norm")
def normalization(c: OpCall) -> ShardingRule:
    """The normalized dims are whole, the ones before go through."""
    sizes = c.attrs["normalized_shape"]
    last = 1 if isinstance(sizes, int) else len(sizes)
    own = letters(c.shapes[0])
    own = (*own[: len(own) - last], *(None,) * last)
    return ShardingRule((own, *((None,) * len(s) for s in c.shapes[1:])), (own,), piecewise=True)


@_rules("group_norm instance_norm_train batch_norm_train batch_norm_eval local_response_norm")
def channel_norm(c: OpCall) -> ShardingRule:
    """The batch goes through; statistics over a split batch are of all of it."""
    own = ("b", *(None,) * (len(c.shapes[0]) - 1))
    return ShardingRule(
        (own, *((None,) * len(s) for s in c.shapes[1:])), (own, *((None,) * len(s) for s in c.outs[1:]))
    )


_PLACES = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d interpolate
    pixel_shuffle pixel_unshuffle channel_shuffle
"""


@_rules(_PLACES)
def places(c: OpCall) -> ShardingRule:
    """Batch (and channels, where they stay) go through; places are whole."""
    last = not str(c.attrs.get("data_format", "NC")).startswith("NC")
    rank = len(c.shapes[0])
    channel = rank - 1 if last else 1
    own: list[str | None] = [None] * rank
    own[0] = "b"
    if c.outs[0][channel] == c.shapes[0][channel] and c.name != "channel_shuffle":
        own[channel] = "c"
    return ShardingRule((tuple(own), *((None,) * len(s) for s in c.shapes[1:])), (tuple(own),) * len(c.outs))


# elements moved


@_rules("reshape flatten ravel unflatten squeeze unsqueeze view")
def reshape(c: OpCall) -> ShardingRule | None:
    """ShardingRule that join or part: the first of each group keeps its letter, where pieces stay whole rows."""
    shape, out = c.shapes[0], c.outs[0]
    if 0 in shape or math.prod(shape) != math.prod(out):
        return None
    own: list[str | None] = [None] * len(shape)
    made: list[str | None] = [None] * len(out)
    aligned = set()
    for number, (ins, outs) in enumerate(_groups(shape, out)):
        if not ins or not outs:
            continue
        own[ins[0]] = made[outs[0]] = f"g{number}"
        if len(ins) > 1 or len(outs) > 1:
            aligned.add(f"g{number}")
    return ShardingRule((tuple(own),), (tuple(made),), linear="moves", aligned=frozenset(aligned))


def _groups(shape: Sequence[int], out: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """ShardingRule of both, none of size 1, in the smallest runs that hold equally many elements."""
    ins = [i for i, n in enumerate(shape) if n != 1]
    outs = [i for i, n in enumerate(out) if n != 1]
    found: list[tuple[list[int], list[int]]] = []
    a = b = 0
    while a < len(ins):
        left, right = [ins[a]], [outs[b]]
        a, b = a + 1, b + 1
        while (have := math.prod(shape[i] for i in left)) != (want := math.prod(out[i] for i in right)):
            if have < want:
                left.append(ins[a])
                a += 1
            else:
                right.append(outs[b])
                b += 1
        found.append((left, right))
    return found


@_rules("transpose permute t moveaxis swapaxes matrix_transpose")
def transpose(c: OpCall) -> ShardingRule:
    """DimNames move with their dims."""
    ndim = len(c.shapes[0])
    own = letters(c.shapes[0])
    return ShardingRule((own,), (tuple(own[i] for i in _order(c, ndim)),), linear="moves", piecewise=True)


def _order(c: OpCall, ndim: int) -> list[int]:
    order = list(range(ndim))
    if c.name in ("transpose", "permute"):
        given = c.attrs["perm" if c.name == "transpose" else "dims"]
        return [d % ndim for d in given] if given else order[::-1]
    if c.name == "moveaxis":
        return _moved(order, c.attrs["source"], c.attrs["destination"])
    first, second = {"swapaxes": ("axis0", "axis1")}.get(c.name, ("", ""))
    a, b = (c.attrs[first] % ndim, c.attrs[second] % ndim) if first else (ndim - 2, ndim - 1)
    if ndim > 1:
        order[a], order[b] = order[b], order[a]
    return order


def _moved(order: list[int], source: Any, destination: Any) -> list[int]:
    ndim = len(order)
    given = [source] if isinstance(source, int) else list(source)
    to = [destination] if isinstance(destination, int) else list(destination)
    left = [i for i in order if i not in {g % ndim for g in given}]
    for there, here in sorted((d % ndim, g % ndim) for g, d in zip(given, to, strict=True)):
        left.insert(there, here)
    return left


@_rules("concat")
def concat(c: OpCall) -> ShardingRule:
    """The joined dim is whole."""
    own = without(letters(c.outs[0]), c.dim(c.attrs["axis"]))
    return ShardingRule((own,) * len(c.shapes), (own,), linear="moves", piecewise=True)


@_rules("stack")
def stack(c: OpCall) -> ShardingRule:
    """A new dim that is whole."""
    at = c.attrs["axis"] % len(c.outs[0])
    own = letters(c.shapes[0])
    return ShardingRule((own,) * len(c.shapes), ((*own[:at], None, *own[at:]),), linear="moves", piecewise=True)


@_rules("split chunk tensor_split unbind unstack")
def split(c: OpCall) -> ShardingRule:
    """The dim that is cut is whole."""
    at = c.dim(c.attrs["axis"])
    own = without(letters(c.shapes[0]), at)
    gone = len(c.outs[0]) < len(c.shapes[0]) if c.outs else False
    made = (*own[:at], *own[at + 1 :]) if gone else own
    return ShardingRule((own,), (made,) * len(c.outs), linear="moves")


@_rules("slice strided_slice narrow crop pad zeropad2d")
def same_dims(c: OpCall) -> ShardingRule:
    """A dim whose size changes is whole."""
    own = tuple(
        at if n == m else None for at, n, m in zip(letters(c.shapes[0]), c.shapes[0], c.outs[0], strict=True)
    )  # fmt: skip
    return ShardingRule(c.inputs(**{c.params[0]: own}), (own,), linear="no" if "pad" in c.name else "moves")


@_rules("getitem")
def getitem(c: OpCall) -> ShardingRule | None:
    """ShardingRule taken whole (":") keep their letters; of an index by arrays, only those after it."""
    spec, shape = c.attrs["spec"], c.shapes[0]
    if any(entry[0] == "array" for entry in spec):
        return None
    named = sum(entry[0] in ("int", "slice") for entry in spec)
    if not any(entry[0] == "all" for entry in spec):
        spec = (*spec, ("all",))
    own: list[str | None] = [None] * len(shape)
    made: list[str | None] = []
    dim = 0
    for entry in spec:
        if entry[0] == "new":
            made.append(None)
        elif entry[0] == "int":
            dim += 1
        else:
            for _ in range(len(shape) - named if entry[0] == "all" else 1):
                whole = entry[0] == "all" or entry[1:] in ((None, None, None), (None, None, 1))
                own[dim] = f"d{dim}" if whole else None
                made.append(own[dim])
                dim += 1
    return ShardingRule(c.inputs(x=tuple(own)), (tuple(made),), linear="no")


@_rules("setitem setitem_where tril triu")
def kept(c: OpCall) -> ShardingRule:
    """The result lies as the first input."""
    own = letters(c.shapes[0])
    ins = (own, *((None,) * len(s) for s in c.shapes[1:]))
    return ShardingRule(ins, (own,), linear="moves" if c.name in ("tril", "triu") else "no")


@_rules("expand broadcast_to tile")
def expand(c: OpCall) -> ShardingRule:
    """ShardingRule that keep their size go through."""
    return ShardingRule((spread(c.shapes[0], c.outs[0]),), (_grown(c.shapes[0], c.outs[0]),), linear="moves")


def _grown(shape: Sequence[int], out: Sequence[int]) -> DimNames:
    kept = spread(shape, out)
    return (*(None,) * (len(out) - len(shape)), *kept)


# lookups


@_rules("embedding_rows")
def embedding(c: OpCall) -> ShardingRule:
    """The dims of the ids and of a row go through; split rows make the result Partial: each device adds what it has."""
    ids = letters(c.shapes[0], "b")
    counted = c.attrs.get("scale_grad_by_freq")
    return ShardingRule(
        (ids, ("v", "h")), ((*ids, "h"),), reduce=None if counted else "sum", piecewise=not counted, lookup="v"
    )  # fmt: skip


@_rules("one_hot")
def one_hot(c: OpCall) -> ShardingRule:
    """The dims of the ids go through."""
    ids = letters(c.shapes[0], "b")
    return ShardingRule((ids,), ((*ids, None),))


@_rules("gather index_select")
def gather(c: OpCall) -> ShardingRule | None:
    """The dim that is looked up is whole; the index's takes its place."""
    x, index = c.shapes[0], c.shapes[1]
    if len(index) != 1 or len(c.outs[0]) != len(x):
        return None
    at = (c.attrs.get("axis") or 0) % len(x)
    own = letters(x)
    return ShardingRule((without(own, at), ("i",)), ((*own[:at], "i", *own[at + 1 :]),))


@_rules("take_along_axis")
def take_along_axis(c: OpCall) -> ShardingRule | None:
    """The dim that is looked up is whole in arr."""
    arr, index = c.shapes[0], c.shapes[1]
    at = c.attrs["axis"] % len(arr)
    own = letters(c.outs[0])
    if len(arr) != len(index) or any(n != m for i, (n, m) in enumerate(zip(arr, index, strict=True)) if i != at):
        return None
    return ShardingRule((without(own, at), own), (own,))


# models


@_rules("cross_entropy_of_classes nll_of_classes softmax_and_cross_entropy")
def cross_entropy(c: OpCall) -> ShardingRule:
    """Classes are whole to the result, batches go through; a sum over split ones is Partial, a mean joined at once."""
    shape = c.shapes[0]
    at = 1 if c.name == "nll_of_classes" and len(shape) > 1 else c.dim(c.attrs.get("axis", -1))
    own = letters(shape)
    rest = (*own[:at], *own[at + 1 :])
    label = c.shapes[1]
    seen = own if label == shape else rest if len(label) == len(rest) else (*own[:at], None, *own[at + 1 :])
    ins = (without(own, at), without(seen, at) if label == shape else seen)
    ins = (*ins, *((None,) * len(s) for s in c.shapes[2:]))
    if c.name == "softmax_and_cross_entropy":
        return ShardingRule(ins, (without(own, at), without(own, at)))
    if c.attrs["reduction"] != "none":
        return ShardingRule(ins, ((),), reduce="sum" if c.attrs["reduction"] == "sum" else None, padding=None)
    return ShardingRule(ins, (rest if len(c.outs[0]) == len(rest) else without(own, at),))


@_rules("linear_cross_entropy_of_classes")
def linear_cross_entropy(c: OpCall) -> ShardingRule | None:
    """As cross_entropy; the loss of each token keeps the tokens' letters."""
    batch = letters(c.shapes[0][:-1], "b")
    label = batch if len(c.shapes[2]) == len(batch) else (*batch, None)
    made = batch if len(c.outs[0]) == len(batch) else ()
    return ShardingRule(((*batch, None), (None, None), label), (made,)) if len(c.outs[0]) in (0, len(batch)) else None


@_rules("attention attention_with_dropout")
def attention(c: OpCall) -> ShardingRule:
    """[batch, seq, heads, head_dim]: batches, heads and the queries' places go through, keys are whole."""
    q, k = c.shapes[0], c.shapes[1]
    grouped = q[2] != k[2]
    keys = ("b", None, "h", None)
    queries = ("b", "s", "h", None)
    ins = c.inputs(query=queries, key=keys, value=keys)
    aligned = frozenset({"h"}) if grouped else frozenset()
    return ShardingRule(ins, (queries,), aligned=aligned)


@_rules("rotated turned_by")
def rotary(c: OpCall) -> ShardingRule | None:
    """All but the last dim goes through; angles are whole."""
    first = "tensors" if c.name == "rotated" else "x"
    own = without(letters(c.shapes[0]), len(c.shapes[0]) - 1)
    if any(len(s) != len(own) for p, s in zip(c.params, c.shapes, strict=True) if p == first):
        return None
    share = c.shapes[0][2] == min(s[2] for p, s in zip(c.params, c.shapes, strict=True) if p == first)
    own = own if share or c.name == "turned_by" else without(own, 2)
    return ShardingRule(c.inputs(**{first: own}), (own,) * len(c.outs))
