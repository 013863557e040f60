"""Every name of the root namespace. Written by tools/write_api.py; root.py lists what is not an op."""

import difflib
from collections.abc import Callable

from polyreme import root as _root
from polyreme.eager.methods import INPLACE
from polyreme.ops.arithmetic import (
    add,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    cast,
    divide,
    equal,
    floor_divide,
    greater_equal,
    greater_than,
    less_equal,
    less_than,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    matmul,
    multiply,
    neg,
    not_equal,
    pow,
    remainder,
    subtract,
)
from polyreme.ops.attributes import (
    is_complex,
    is_empty,
    is_floating_point,
    is_integer,
    is_tensor,
    numel,
    rank,
    shape,
    tolist,
)
from polyreme.ops.complex import (
    angle,
    as_complex,
    as_real,
    conj,
    imag,
    isreal,
    polar,
    real,
    sgn,
)
from polyreme.ops.creation import (
    arange,
    assign,
    clone,
    complex,
    diag,
    diag_embed,
    diagflat,
    diagonal,
    empty,
    empty_like,
    eye,
    full,
    full_like,
    linspace,
    logspace,
    meshgrid,
    ones,
    ones_like,
    range,
    tril,
    tril_indices,
    triu,
    triu_indices,
    zeros,
    zeros_like,
)
from polyreme.ops.indices.gather import (
    argwhere,
    gather,
    gather_nd,
    index_sample,
    index_select,
    masked_fill,
    masked_scatter,
    masked_select,
    nonzero,
    shard_index,
    take,
    take_along_axis,
    where,
    where_,
)
from polyreme.ops.indices.scatter import (
    diagonal_scatter,
    index_add,
    index_fill,
    index_put,
    put_along_axis,
    scatter,
    scatter_add,
    scatter_add_,
    scatter_nd,
    scatter_nd_add,
    scatter_reduce,
    select_scatter,
    slice_scatter,
)
from polyreme.ops.manipulation import (
    atleast_1d,
    atleast_2d,
    atleast_3d,
    block_diag,
    chunk,
    column_stack,
    concat,
    dsplit,
    dstack,
    flatten,
    flip,
    hsplit,
    hstack,
    moveaxis,
    permute,
    ravel,
    reshape,
    roll,
    rot90,
    split,
    squeeze,
    stack,
    swapaxes,
    t,
    tensor_split,
    transpose,
    unbind,
    unflatten,
    unsqueeze,
    unstack,
    vsplit,
    vstack,
)
from polyreme.ops.math import (
    abs,
    acos,
    acosh,
    add_n,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    bitwise_left_shift,
    bitwise_right_shift,
    ceil,
    clip,
    copysign,
    cos,
    cosh,
    deg2rad,
    exp,
    expm1,
    floor,
    fmax,
    fmin,
    frac,
    frexp,
    gcd,
    heaviside,
    hypot,
    increment,
    isfinite,
    isinf,
    isnan,
    isneginf,
    isposinf,
    lcm,
    ldexp,
    lerp,
    log,
    log1p,
    log2,
    log10,
    logaddexp,
    maximum,
    minimum,
    multiplex,
    nan_to_num,
    nextafter,
    positive,
    rad2deg,
    reciprocal,
    round,
    rsqrt,
    scale,
    sigmoid,
    sign,
    signbit,
    sin,
    sinc,
    sinh,
    sqrt,
    square,
    stanh,
    tan,
    tanh,
    trunc,
)
from polyreme.ops.matrices.linalg import (
    cholesky,
)
from polyreme.ops.matrices.norms import (
    cdist,
    dist,
    norm,
    pdist,
    renorm,
)
from polyreme.ops.matrices.products import (
    addmm,
    baddbmm,
    bmm,
    cross,
    dot,
    einsum,
    inner,
    kron,
    matrix_transpose,
    mm,
    mv,
    outer,
    tensordot,
    trace,
    vander,
    vecdot,
)
from polyreme.ops.quantile import (
    median,
    nanmedian,
    nanquantile,
    quantile,
)
from polyreme.ops.random import (
    bernoulli,
    bernoulli_,
    binomial,
    cauchy_,
    exponential_,
    gaussian,
    geometric_,
    log_normal,
    log_normal_,
    multinomial,
    normal,
    normal_,
    poisson,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    randperm,
    standard_gamma,
    standard_normal,
    uniform,
)
from polyreme.ops.reduce import (
    all,
    amax,
    amin,
    any,
    count_nonzero,
    logsumexp,
    max,
    mean,
    min,
    nanmean,
    nansum,
    prod,
    reduce_as,
    std,
    sum,
    var,
)
from polyreme.ops.repetition import (
    broadcast_shape,
    broadcast_shapes,
    broadcast_tensors,
    broadcast_to,
    cartesian_prod,
    combinations,
    expand,
    expand_as,
    repeat_interleave,
    tile,
)
from polyreme.ops.scan import (
    cummax,
    cummin,
    cumprod,
    cumsum,
    cumulative_trapezoid,
    diff,
    logcumsumexp,
    trapezoid,
)
from polyreme.ops.search import (
    allclose,
    argmax,
    argmin,
    argsort,
    bucketize,
    equal_all,
    isclose,
    isin,
    kthvalue,
    mode,
    msort,
    searchsorted,
    sort,
    topk,
)
from polyreme.ops.slicing import (
    as_strided,
    crop,
    narrow,
    slice,
    strided_slice,
    unfold,
    view,
    view_as,
)
from polyreme.ops.special import (
    digamma,
    erf,
    erfinv,
    gammainc,
    gammaincc,
    gammaln,
    i0,
    i0e,
    i1,
    i1e,
    lgamma,
    logit,
    multigammaln,
    polygamma,
)
from polyreme.ops.statistics import (
    bincount,
    histogram,
    histogram_bin_edges,
    histogramdd,
)
from polyreme.ops.unique import (
    unique,
    unique_consecutive,
)
from polyreme.root import *

bitwise_invert = bitwise_not
div = divide
eq = equal
floor_mod = remainder
ge = greater_equal
greater = greater_than
gt = greater_than
le = less_equal
less = less_than
lt = less_than
mod = remainder
mul = multiply
ne = not_equal
negative = neg
sub = subtract
true_divide = divide
view_as_complex = as_complex
view_as_real = as_real
take_along_dim = take_along_axis
cat = concat
concatenate = concat
reverse = flip
row_stack = vstack
swapdims = swapaxes
clamp = clip
ger = outer

abs_: Callable[..., _root.Tensor] = INPLACE["abs_"]
acos_: Callable[..., _root.Tensor] = INPLACE["acos_"]
acosh_: Callable[..., _root.Tensor] = INPLACE["acosh_"]
add_: Callable[..., _root.Tensor] = INPLACE["add_"]
addmm_: Callable[..., _root.Tensor] = INPLACE["addmm_"]
asin_: Callable[..., _root.Tensor] = INPLACE["asin_"]
asinh_: Callable[..., _root.Tensor] = INPLACE["asinh_"]
atan_: Callable[..., _root.Tensor] = INPLACE["atan_"]
atanh_: Callable[..., _root.Tensor] = INPLACE["atanh_"]
baddbmm_: Callable[..., _root.Tensor] = INPLACE["baddbmm_"]
bitwise_and_: Callable[..., _root.Tensor] = INPLACE["bitwise_and_"]
bitwise_invert_: Callable[..., _root.Tensor] = INPLACE["bitwise_not_"]
bitwise_left_shift_: Callable[..., _root.Tensor] = INPLACE["bitwise_left_shift_"]
bitwise_not_: Callable[..., _root.Tensor] = INPLACE["bitwise_not_"]
bitwise_or_: Callable[..., _root.Tensor] = INPLACE["bitwise_or_"]
bitwise_right_shift_: Callable[..., _root.Tensor] = INPLACE["bitwise_right_shift_"]
bitwise_xor_: Callable[..., _root.Tensor] = INPLACE["bitwise_xor_"]
ceil_: Callable[..., _root.Tensor] = INPLACE["ceil_"]
clamp_: Callable[..., _root.Tensor] = INPLACE["clip_"]
clip_: Callable[..., _root.Tensor] = INPLACE["clip_"]
copysign_: Callable[..., _root.Tensor] = INPLACE["copysign_"]
cos_: Callable[..., _root.Tensor] = INPLACE["cos_"]
cosh_: Callable[..., _root.Tensor] = INPLACE["cosh_"]
cumprod_: Callable[..., _root.Tensor] = INPLACE["cumprod_"]
cumsum_: Callable[..., _root.Tensor] = INPLACE["cumsum_"]
digamma_: Callable[..., _root.Tensor] = INPLACE["digamma_"]
div_: Callable[..., _root.Tensor] = INPLACE["divide_"]
divide_: Callable[..., _root.Tensor] = INPLACE["divide_"]
eq_: Callable[..., _root.Tensor] = INPLACE["equal_"]
equal_: Callable[..., _root.Tensor] = INPLACE["equal_"]
erf_: Callable[..., _root.Tensor] = INPLACE["erf_"]
erfinv_: Callable[..., _root.Tensor] = INPLACE["erfinv_"]
exp_: Callable[..., _root.Tensor] = INPLACE["exp_"]
expm1_: Callable[..., _root.Tensor] = INPLACE["expm1_"]
flatten_: Callable[..., _root.Tensor] = INPLACE["flatten_"]
floor_: Callable[..., _root.Tensor] = INPLACE["floor_"]
floor_divide_: Callable[..., _root.Tensor] = INPLACE["floor_divide_"]
floor_mod_: Callable[..., _root.Tensor] = INPLACE["remainder_"]
frac_: Callable[..., _root.Tensor] = INPLACE["frac_"]
gammainc_: Callable[..., _root.Tensor] = INPLACE["gammainc_"]
gammaincc_: Callable[..., _root.Tensor] = INPLACE["gammaincc_"]
gammaln_: Callable[..., _root.Tensor] = INPLACE["gammaln_"]
gcd_: Callable[..., _root.Tensor] = INPLACE["gcd_"]
ge_: Callable[..., _root.Tensor] = INPLACE["greater_equal_"]
greater_: Callable[..., _root.Tensor] = INPLACE["greater_than_"]
greater_equal_: Callable[..., _root.Tensor] = INPLACE["greater_equal_"]
greater_than_: Callable[..., _root.Tensor] = INPLACE["greater_than_"]
gt_: Callable[..., _root.Tensor] = INPLACE["greater_than_"]
hypot_: Callable[..., _root.Tensor] = INPLACE["hypot_"]
i0_: Callable[..., _root.Tensor] = INPLACE["i0_"]
index_add_: Callable[..., _root.Tensor] = INPLACE["index_add_"]
index_fill_: Callable[..., _root.Tensor] = INPLACE["index_fill_"]
index_put_: Callable[..., _root.Tensor] = INPLACE["index_put_"]
lcm_: Callable[..., _root.Tensor] = INPLACE["lcm_"]
ldexp_: Callable[..., _root.Tensor] = INPLACE["ldexp_"]
le_: Callable[..., _root.Tensor] = INPLACE["less_equal_"]
lerp_: Callable[..., _root.Tensor] = INPLACE["lerp_"]
less_: Callable[..., _root.Tensor] = INPLACE["less_than_"]
less_equal_: Callable[..., _root.Tensor] = INPLACE["less_equal_"]
less_than_: Callable[..., _root.Tensor] = INPLACE["less_than_"]
lgamma_: Callable[..., _root.Tensor] = INPLACE["lgamma_"]
log10_: Callable[..., _root.Tensor] = INPLACE["log10_"]
log1p_: Callable[..., _root.Tensor] = INPLACE["log1p_"]
log2_: Callable[..., _root.Tensor] = INPLACE["log2_"]
log_: Callable[..., _root.Tensor] = INPLACE["log_"]
logical_and_: Callable[..., _root.Tensor] = INPLACE["logical_and_"]
logical_not_: Callable[..., _root.Tensor] = INPLACE["logical_not_"]
logical_or_: Callable[..., _root.Tensor] = INPLACE["logical_or_"]
logical_xor_: Callable[..., _root.Tensor] = INPLACE["logical_xor_"]
logit_: Callable[..., _root.Tensor] = INPLACE["logit_"]
lt_: Callable[..., _root.Tensor] = INPLACE["less_than_"]
masked_fill_: Callable[..., _root.Tensor] = INPLACE["masked_fill_"]
masked_scatter_: Callable[..., _root.Tensor] = INPLACE["masked_scatter_"]
mod_: Callable[..., _root.Tensor] = INPLACE["remainder_"]
mul_: Callable[..., _root.Tensor] = INPLACE["multiply_"]
multigammaln_: Callable[..., _root.Tensor] = INPLACE["multigammaln_"]
multiply_: Callable[..., _root.Tensor] = INPLACE["multiply_"]
nan_to_num_: Callable[..., _root.Tensor] = INPLACE["nan_to_num_"]
ne_: Callable[..., _root.Tensor] = INPLACE["not_equal_"]
neg_: Callable[..., _root.Tensor] = INPLACE["neg_"]
negative_: Callable[..., _root.Tensor] = INPLACE["neg_"]
not_equal_: Callable[..., _root.Tensor] = INPLACE["not_equal_"]
polygamma_: Callable[..., _root.Tensor] = INPLACE["polygamma_"]
pow_: Callable[..., _root.Tensor] = INPLACE["pow_"]
put_along_axis_: Callable[..., _root.Tensor] = INPLACE["put_along_axis_"]
reciprocal_: Callable[..., _root.Tensor] = INPLACE["reciprocal_"]
remainder_: Callable[..., _root.Tensor] = INPLACE["remainder_"]
renorm_: Callable[..., _root.Tensor] = INPLACE["renorm_"]
reshape_: Callable[..., _root.Tensor] = INPLACE["reshape_"]
round_: Callable[..., _root.Tensor] = INPLACE["round_"]
rsqrt_: Callable[..., _root.Tensor] = INPLACE["rsqrt_"]
scale_: Callable[..., _root.Tensor] = INPLACE["scale_"]
scatter_: Callable[..., _root.Tensor] = INPLACE["scatter_"]
sigmoid_: Callable[..., _root.Tensor] = INPLACE["sigmoid_"]
sin_: Callable[..., _root.Tensor] = INPLACE["sin_"]
sinc_: Callable[..., _root.Tensor] = INPLACE["sinc_"]
sinh_: Callable[..., _root.Tensor] = INPLACE["sinh_"]
sqrt_: Callable[..., _root.Tensor] = INPLACE["sqrt_"]
square_: Callable[..., _root.Tensor] = INPLACE["square_"]
squeeze_: Callable[..., _root.Tensor] = INPLACE["squeeze_"]
sub_: Callable[..., _root.Tensor] = INPLACE["subtract_"]
subtract_: Callable[..., _root.Tensor] = INPLACE["subtract_"]
t_: Callable[..., _root.Tensor] = INPLACE["t_"]
tan_: Callable[..., _root.Tensor] = INPLACE["tan_"]
tanh_: Callable[..., _root.Tensor] = INPLACE["tanh_"]
transpose_: Callable[..., _root.Tensor] = INPLACE["transpose_"]
tril_: Callable[..., _root.Tensor] = INPLACE["tril_"]
triu_: Callable[..., _root.Tensor] = INPLACE["triu_"]
true_divide_: Callable[..., _root.Tensor] = INPLACE["divide_"]
trunc_: Callable[..., _root.Tensor] = INPLACE["trunc_"]
unsqueeze_: Callable[..., _root.Tensor] = INPLACE["unsqueeze_"]

__all__ = [
    "abs",
    "abs_",
    "acos",
    "acos_",
    "acosh",
    "acosh_",
    "add",
    "add_",
    "add_n",
    "addmm",
    "addmm_",
    "all",
    "allclose",
    "amax",
    "amin",
    "angle",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "argwhere",
    "as_complex",
    "as_real",
    "as_strided",
    "asin",
    "asin_",
    "asinh",
    "asinh_",
    "assign",
    "atan",
    "atan2",
    "atan_",
    "atanh",
    "atanh_",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "baddbmm",
    "baddbmm_",
    "bernoulli",
    "bernoulli_",
    "bincount",
    "binomial",
    "bitwise_and",
    "bitwise_and_",
    "bitwise_invert",
    "bitwise_invert_",
    "bitwise_left_shift",
    "bitwise_left_shift_",
    "bitwise_not",
    "bitwise_not_",
    "bitwise_or",
    "bitwise_or_",
    "bitwise_right_shift",
    "bitwise_right_shift_",
    "bitwise_xor",
    "bitwise_xor_",
    "block_diag",
    "bmm",
    "broadcast_shape",
    "broadcast_shapes",
    "broadcast_tensors",
    "broadcast_to",
    "bucketize",
    "cartesian_prod",
    "cast",
    "cat",
    "cauchy_",
    "cdist",
    "ceil",
    "ceil_",
    "cholesky",
    "chunk",
    "clamp",
    "clamp_",
    "clip",
    "clip_",
    "clone",
    "column_stack",
    "combinations",
    "complex",
    "concat",
    "concatenate",
    "conj",
    "copysign",
    "copysign_",
    "cos",
    "cos_",
    "cosh",
    "cosh_",
    "count_nonzero",
    "crop",
    "cross",
    "cummax",
    "cummin",
    "cumprod",
    "cumprod_",
    "cumsum",
    "cumsum_",
    "cumulative_trapezoid",
    "deg2rad",
    "diag",
    "diag_embed",
    "diagflat",
    "diagonal",
    "diagonal_scatter",
    "diff",
    "digamma",
    "digamma_",
    "dist",
    "div",
    "div_",
    "divide",
    "divide_",
    "dot",
    "dsplit",
    "dstack",
    "einsum",
    "empty",
    "empty_like",
    "eq",
    "eq_",
    "equal",
    "equal_",
    "equal_all",
    "erf",
    "erf_",
    "erfinv",
    "erfinv_",
    "exp",
    "exp_",
    "expand",
    "expand_as",
    "expm1",
    "expm1_",
    "exponential_",
    "eye",
    "flatten",
    "flatten_",
    "flip",
    "floor",
    "floor_",
    "floor_divide",
    "floor_divide_",
    "floor_mod",
    "floor_mod_",
    "fmax",
    "fmin",
    "frac",
    "frac_",
    "frexp",
    "full",
    "full_like",
    "gammainc",
    "gammainc_",
    "gammaincc",
    "gammaincc_",
    "gammaln",
    "gammaln_",
    "gather",
    "gather_nd",
    "gaussian",
    "gcd",
    "gcd_",
    "ge",
    "ge_",
    "geometric_",
    "ger",
    "greater",
    "greater_",
    "greater_equal",
    "greater_equal_",
    "greater_than",
    "greater_than_",
    "gt",
    "gt_",
    "heaviside",
    "histogram",
    "histogram_bin_edges",
    "histogramdd",
    "hsplit",
    "hstack",
    "hypot",
    "hypot_",
    "i0",
    "i0_",
    "i0e",
    "i1",
    "i1e",
    "imag",
    "increment",
    "index_add",
    "index_add_",
    "index_fill",
    "index_fill_",
    "index_put",
    "index_put_",
    "index_sample",
    "index_select",
    "inner",
    "is_complex",
    "is_empty",
    "is_floating_point",
    "is_integer",
    "is_tensor",
    "isclose",
    "isfinite",
    "isin",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "isreal",
    "kron",
    "kthvalue",
    "lcm",
    "lcm_",
    "ldexp",
    "ldexp_",
    "le",
    "le_",
    "lerp",
    "lerp_",
    "less",
    "less_",
    "less_equal",
    "less_equal_",
    "less_than",
    "less_than_",
    "lgamma",
    "lgamma_",
    "linspace",
    "log",
    "log1p",
    "log1p_",
    "log2",
    "log2_",
    "log10",
    "log10_",
    "log_",
    "log_normal",
    "log_normal_",
    "logaddexp",
    "logcumsumexp",
    "logical_and",
    "logical_and_",
    "logical_not",
    "logical_not_",
    "logical_or",
    "logical_or_",
    "logical_xor",
    "logical_xor_",
    "logit",
    "logit_",
    "logspace",
    "logsumexp",
    "lt",
    "lt_",
    "masked_fill",
    "masked_fill_",
    "masked_scatter",
    "masked_scatter_",
    "masked_select",
    "matmul",
    "matrix_transpose",
    "max",
    "maximum",
    "mean",
    "median",
    "meshgrid",
    "min",
    "minimum",
    "mm",
    "mod",
    "mod_",
    "mode",
    "moveaxis",
    "msort",
    "mul",
    "mul_",
    "multigammaln",
    "multigammaln_",
    "multinomial",
    "multiplex",
    "multiply",
    "multiply_",
    "mv",
    "nan_to_num",
    "nan_to_num_",
    "nanmean",
    "nanmedian",
    "nanquantile",
    "nansum",
    "narrow",
    "ne",
    "ne_",
    "neg",
    "neg_",
    "negative",
    "negative_",
    "nextafter",
    "nonzero",
    "norm",
    "normal",
    "normal_",
    "not_equal",
    "not_equal_",
    "numel",
    "ones",
    "ones_like",
    "outer",
    "pdist",
    "permute",
    "poisson",
    "polar",
    "polygamma",
    "polygamma_",
    "positive",
    "pow",
    "pow_",
    "prod",
    "put_along_axis",
    "put_along_axis_",
    "quantile",
    "rad2deg",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "rank",
    "ravel",
    "real",
    "reciprocal",
    "reciprocal_",
    "reduce_as",
    "remainder",
    "remainder_",
    "renorm",
    "renorm_",
    "repeat_interleave",
    "reshape",
    "reshape_",
    "reverse",
    "roll",
    "rot90",
    "round",
    "round_",
    "row_stack",
    "rsqrt",
    "rsqrt_",
    "scale",
    "scale_",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "scatter_nd",
    "scatter_nd_add",
    "scatter_reduce",
    "searchsorted",
    "select_scatter",
    "sgn",
    "shape",
    "shard_index",
    "sigmoid",
    "sigmoid_",
    "sign",
    "signbit",
    "sin",
    "sin_",
    "sinc",
    "sinc_",
    "sinh",
    "sinh_",
    "slice",
    "slice_scatter",
    "sort",
    "split",
    "sqrt",
    "sqrt_",
    "square",
    "square_",
    "squeeze",
    "squeeze_",
    "stack",
    "standard_gamma",
    "standard_normal",
    "stanh",
    "std",
    "strided_slice",
    "sub",
    "sub_",
    "subtract",
    "subtract_",
    "sum",
    "swapaxes",
    "swapdims",
    "t",
    "t_",
    "take",
    "take_along_axis",
    "take_along_dim",
    "tan",
    "tan_",
    "tanh",
    "tanh_",
    "tensor_split",
    "tensordot",
    "tile",
    "tolist",
    "topk",
    "trace",
    "transpose",
    "transpose_",
    "trapezoid",
    "tril",
    "tril_",
    "tril_indices",
    "triu",
    "triu_",
    "triu_indices",
    "true_divide",
    "true_divide_",
    "trunc",
    "trunc_",
    "unbind",
    "unflatten",
    "unfold",
    "uniform",
    "unique",
    "unique_consecutive",
    "unsqueeze",
    "unsqueeze_",
    "unstack",
    "vander",
    "var",
    "vecdot",
    "view",
    "view_as",
    "view_as_complex",
    "view_as_real",
    "vsplit",
    "vstack",
    "where",
    "where_",
    "zeros",
    "zeros_like",
]
__all__ += _root.__all__


def nearest(name: str) -> str:
    """ "; did you mean ...?" for a name that is close to a public one, else nothing."""
    close = difflib.get_close_matches(name, __all__, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
