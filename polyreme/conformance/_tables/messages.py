"""Contract rows of ops.messages; the oracles are loops over rows and edges."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

HOST = "the largest id is the shape"
IDS = np.array([2, 0, 0, 2, 0])
SRC = np.array([0, 1, 2, 0, 3], "int32")
DST = np.array([1, 2, 1, 1, 0])
_NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
_MESSAGE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def by_id(data, ids, num, how="sum"):
    out = np.zeros((num, *data.shape[1:]), data.dtype)
    for i in range(num):
        if (ids == i).any():
            out[i] = _NUMPY[how](data[ids == i], axis=0)
    return out


def segment(how):
    return lambda data, ids: by_id(data, ids, ids.max() + 1, how)


def rows(*shape, dtype="float32"):
    return lambda rng: rng.standard_normal(shape).astype(dtype)


def send_u(x, src, dst, how="sum", out_size=None):
    return by_id(x[src], dst, out_size or len(x), how)


def combined(x, y, op):
    ndim = max(x.ndim, y.ndim)
    x, y = (a.reshape(a.shape[:1] + (1,) * (ndim - a.ndim) + a.shape[1:]) for a in (x, y))
    return _MESSAGE[op](x, y)


def send_ue(x, y, src, dst, op="add", how="sum", out_size=None):
    return by_id(combined(x[src], y, op), dst, out_size or len(x), how)


def ints(rng):
    return rng.integers(-9, 9, (5, 2))


CASES = [
    Case(
        "segment_reduce",
        lambda rng: (rows(5, 3)(rng), IDS, 4, "mean"),
        by_id,
        bad=((np.ones(5), np.array([0, 1, 2, 3, 4]), 4), IndexError, "index 4 is out of range for dim 0 of size 4"),
    ),
    Case("segment_reduce", lambda rng: (rows(0, 3)(rng), np.zeros(0, "int64"), 2, "max"), by_id, tag="empty"),
    Case(
        "segment_reduce",
        lambda rng: (rows(5)(rng), IDS, 3, "min"),
        by_id,
        bad=((np.ones(4), IDS, 3), ShapeError, "a row for each of 5 segment_ids"),
        tag="1d",
    ),
    Case(
        "segment_sum",
        lambda rng: (rows(5, 2)(rng) + 1j * rows(5, 2)(rng), IDS),
        segment("sum"),
        host=HOST,
    ),
    *[Case(f"segment_{how}", lambda rng: (rows(5, 2)(rng), IDS), segment(how), host=HOST) for how in ("max", "min")],
    Case("segment_mean", lambda rng: (rows(5, 2, 2)(rng), IDS.astype("int32")), segment("mean"), host=HOST),
    Case("segment_max", lambda rng: (ints(rng), IDS), segment("max"), no_grad="integers", host=HOST, tag="int"),
    Case(
        "send_u_recv",
        lambda rng: (rows(4, 3)(rng), SRC, DST),
        send_u,
        bad=((np.ones((4, 3)), SRC, DST[:3]), ShapeError, "give as many of each"),
    ),
    Case(
        "send_u_recv",
        lambda rng: (rows(4, 3)(rng), SRC, DST, "max", 6),
        send_u,
        bad=((np.ones((3, 3)), SRC, DST), IndexError, "send_u_recv: index 3"),
        tag="max",
    ),
    Case(
        "send_ue_recv",
        lambda rng: (rows(4, 3)(rng), rows(5)(rng), SRC, DST, "mul", "mean"),
        send_ue,
        bad=((np.ones((4, 3)), np.ones(4), SRC, DST), ShapeError, "a row for each of 5 edges"),
    ),
    Case(
        "send_ue_recv",
        lambda rng: (rows(4, 1, 3)(rng), rows(5, 2, 1)(rng) + 3, SRC, DST, "div", "min", 3),
        send_ue,
        bad=((np.ones((4, 3)), np.ones(5), SRC, DST, "mull"), ConfigError, "did you mean 'mul'"),
        tag="div",
    ),
    Case("send_ue_recv", lambda rng: (rows(4)(rng), rows(5)(rng), SRC, DST, "sub", "max"), send_ue, tag="sub"),
    Case(
        "send_uv",
        lambda rng: (rows(4, 3)(rng), rows(3, 1)(rng), SRC, DST),
        lambda x, y, s, d: x[s] + y[d],
        bad=((np.ones((4, 3)), np.ones((2, 3)), SRC, DST), IndexError, "send_uv: index 2"),
    ),
    Case(
        "send_uv",
        lambda rng: (ints(rng), ints(rng) + 20, SRC, DST, "div"),
        lambda x, y, s, d, op: np.trunc(x[s] / y[d]).astype("int64"),
        no_grad="integers",
        tag="int",
    ),
    # parts of the two above, with the number of rows given
    Case("gather_reduce", lambda rng: (rows(4, 3)(rng), SRC, DST, "mean", 3), send_u),
    Case(
        "gather_message_reduce",
        lambda rng: (rows(4, 3)(rng), rows(5, 3)(rng), SRC, DST, "sub", "sum", 3),
        send_ue,
    ),
]
