"""What types of operations that programs of 1.x alone have are here, beside those in ops.py."""

from __future__ import annotations

from polyreme.core.op import OPS
from polyreme.eager.tensor import Tensor
from polyreme.ops.resample import space_to_depth
from polyreme.paddle_models.call import PaddleCall, Results
from polyreme.paddle_models.rules import Rule, layout_of, plain


def _soft_relu(call: PaddleCall) -> Results:
    threshold = call.attribute("threshold", 40.0)
    return OPS["softplus"](OPS["clip"](call.tensor("X"), -threshold, threshold), threshold=threshold + 1)


def _clip_by_norm(call: PaddleCall) -> Results:
    x, most = call.tensor("X"), call.attribute("max_norm", 1.0)
    return x * (most / OPS["clip"](_norm(x, None), most, None))


def _norm(x: Tensor, dims: list[int] | None) -> Tensor:
    return OPS["sqrt"](OPS["sum"](x * x, dims, keepdim=dims is not None))


def _any(op: str) -> Rule:
    return lambda call: OPS["reshape"](OPS["any"](OPS[op](call.tensor("X"))), [1])


def _all_finite(call: PaddleCall) -> Results:
    return OPS["reshape"](OPS["all"](OPS["isfinite"](call.tensor("X"))), [1])


def _cos_sim(call: PaddleCall) -> Results:
    x, y = (OPS["reshape"](call.tensor(slot), [call.tensor(slot).shape[0], -1]) for slot in ("X", "Y"))
    norms = _norm(x, [1]), _norm(y, [1])
    return {"Out": OPS["sum"](x * y, [1], keepdim=True) / (norms[0] * norms[1]), "XNorm": norms[0], "YNorm": norms[1]}


def _local_response_norm(call: PaddleCall) -> Results:
    n, k, alpha, beta = (call.attribute(name, d) for name, d in (("n", 5), ("k", 1.0), ("alpha", 1e-4), ("beta", 0.75)))
    result = OPS["local_response_norm"](call.tensor("X"), n, alpha * n, beta, k, layout_of(call))
    return {"Out": result}  # MidOut is for its gradient


def _affine_channel(call: PaddleCall) -> Results:
    x, layout = call.tensor("X"), layout_of(call, "data_layout")
    shape = [1, -1, *[1] * (x.ndim - 2)] if layout == "NCHW" else [-1]
    return x * OPS["reshape"](call.tensor("Scale"), shape) + OPS["reshape"](call.tensor("Bias"), shape)


def _one_hot(call: PaddleCall) -> Results:
    depth = (call.numbers("depth_tensor") or [call.attribute("depth", 1)])[0]
    call.ignore("depth", "allow_out_of_range")
    rows = OPS["one_hot"](OPS["squeeze"](call.tensor("X"), [-1]), int(depth))
    return OPS["cast"](rows, call.dtype("dtype", rows.dtype))


def _softmax_with_cross_entropy(call: PaddleCall) -> Results:
    axis = call.attribute("axis", -1)
    call.ignore("numeric_stable_mode")
    loss, softmax = OPS["softmax_with_cross_entropy"](
        call.tensor("Logits"), call.tensor("Label"), call.attribute("soft_label", False),
        call.attribute("ignore_index", -100), return_softmax=True, axis=axis,
    )  # fmt: skip
    return {"Loss": loss, "Softmax": softmax}


def _expand_as(call: PaddleCall) -> Results:
    x, like = call.tensor("X"), call.tensor("target_tensor")
    return OPS["tile"](x, [n // m for n, m in zip(like.shape, x.shape, strict=True)])


def _crop(call: PaddleCall) -> Results:
    shape = list(call.tensor("Y").shape) if call.has("Y") else call.attribute("shape", [])
    offsets = call.numbers("Offsets") or call.attribute("offsets", [])
    call.ignore("shape", "offsets")
    return OPS["crop"](call.tensor("X"), shape, offsets)


def _pad_constant_like(call: PaddleCall) -> Results:
    x, y = call.tensor("X"), call.tensor("Y")
    sizes = [size for n, m in zip(x.shape, y.shape, strict=True) for size in (0, n - m)]
    return OPS["pad"](y, sizes, "constant", call.attribute("pad_value", 0.0), pad_from_left_axis=True)


def _space_to_depth(call: PaddleCall) -> Results:
    return space_to_depth(call.tensor("X"), call.attribute("blocksize", 2))


def _flow_of_solution(call: PaddleCall) -> Results:
    """Products of the channels of two layers, over all pixels."""
    x, y = call.tensor("X"), call.tensor("Y")
    a, b = (OPS["reshape"](v, [0, v.shape[1], -1]) for v in (x, y))
    return OPS["matmul"](a, b, transpose_y=True) / (x.shape[2] * x.shape[3])


def _temporal_shift(call: PaddleCall) -> Results:
    return OPS["temporal_shift"](call.tensor("X"), call.attribute("seg_num", 1), call.attribute("shift_ratio", 0.25))


def _multiplex(call: PaddleCall) -> Results:
    return OPS["multiplex"](call.tensors("X"), call.tensor("Ids"))


def _bilinear(call: PaddleCall) -> Results:
    bias = call.optional("Bias")
    result = OPS["bilinear"](call.tensor("X"), call.tensor("Y"), call.tensor("Weight"))
    return result if bias is None else result + bias


def _shard_index(call: PaddleCall) -> Results:
    names = ("index_num", "nshards", "shard_id", "ignore_value")
    return OPS["shard_index"](
        call.tensor("X"), *(call.attribute(name, -1 if "ignore" in name else 0) for name in names)
    )


FLUID_TABLE: dict[str, Rule] = {
    "stanh": plain("stanh", "X", scale_a=("scale_a", 0.67), scale_b=("scale_b", 1.7159)),
    "soft_relu": _soft_relu, "clip_by_norm": _clip_by_norm, "reverse": plain("flip", "X", axis=("axis", [])),
    "isinf": _any("isinf"), "isnan": _any("isnan"), "isfinite": _all_finite, "cos_sim": _cos_sim,
    "bilinear_tensor_product": _bilinear, "lrn": _local_response_norm, "affine_channel": _affine_channel,
    "one_hot": _one_hot, "softmax_with_cross_entropy": _softmax_with_cross_entropy, "multiplex": _multiplex,
    "expand_as": _expand_as, "crop": _crop, "pad_constant_like": _pad_constant_like, "shard_index": _shard_index,
    "space_to_depth": _space_to_depth, "fsp": _flow_of_solution, "temporal_shift": _temporal_shift,
    "shuffle_channel": plain("channel_shuffle", "X", groups=("group", 1)),
}  # fmt: skip
"""Type of operation -> what it is here."""

__all__ = ["FLUID_TABLE"]
