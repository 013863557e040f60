"""Every op that takes indices or labels: out of range is an IndexError eagerly, and with checks on in captured code;
with checks off a captured read gives NaN and a write is dropped. A new op of this kind gets a row here."""

import numpy as np
import pytest

from polyreme import flags
from polyreme.eager.tensor import to_tensor
from polyreme.errors import NumericsError
from polyreme.jit import to_static
from polyreme.nn import functional as F
from polyreme.ops import OPS

X = np.arange(1, 7, dtype="float32").reshape(3, 2)
NAN, DROPPED, NEITHER = "NaN", "dropped", "neither"


def op(name, *given, **options):
    """A call of an op, with x in the place of "x", x[:2] of "two", and the index [0, 3] of "i", as a column of "ii"."""

    def run(x, i):
        places = {"x": x, "two": x[:2], "i": i, "ii": i.unsqueeze(1)}
        return OPS[name](*[places[g] if isinstance(g, str) else g for g in given], **options)

    return run


def setitem(x, i):
    y = x.clone()
    y[i] = 9.0
    return y


# what a captured call without checks does -> the calls. i is [0, 3], and x has 3 rows of 2
TABLE = {
    NAN: {
        "gather": op("gather", "x", "i"),
        "gather over dim 1": op("gather", "x", "i", 1),
        "index_select": op("index_select", "x", "i"),
        "index_sample": op("index_sample", "two", "ii"),
        "take_along_axis": op("take_along_axis", "x", "ii", 0),
        "gather_nd": op("gather_nd", "x", "ii"),
        "take": lambda x, i: OPS["take"](x, i * 2),
        "multiplex": lambda x, i: OPS["multiplex"]([x[:2], x[1:]], i),
        "x[i]": lambda x, i: x[i],
        "x[:, i]": lambda x, i: x[:, i],
        "x[i, j]": lambda x, i: x[i, i * 0],
        "embedding": lambda x, i: F.embedding(i, x),
        "cross_entropy": op("cross_entropy", "two", "i", reduction="none"),
        "nll_loss": op("nll_loss", "two", "i", reduction="none"),
        "softmax_with_cross_entropy": op("softmax_with_cross_entropy", "two", "ii"),
    },
    DROPPED: {
        "scatter": op("scatter", "x", "i", np.full((2, 2), 9, "float32")),
        "scatter_nd_add": op("scatter_nd_add", "x", "ii", np.full((2, 2), 9, "float32")),
        "index_add": op("index_add", "x", "i", 0, np.full((2, 2), 9, "float32")),
        "index_fill": op("index_fill", "x", "i", 0, 9.0),
        "index_put": lambda x, i: OPS["index_put"](x, [i], to_tensor(9.0)),
        "put_along_axis": op("put_along_axis", "x", "ii", 9.0, 0, broadcast=False),
        "x[i] = v": setitem,
    },
    # documented with each: no class, no place, another shard's
    NEITHER: {
        "one_hot": op("one_hot", "i", 3),
        "shard_index": op("shard_index", "ii", 3, 1, 0),
        "dice_loss": op("dice_loss", "two", "ii"),
        "scatter_nd": op("scatter_nd", "ii", "two", [3, 2]),
        "max_unpool1d": lambda x, i: F.max_unpool1d(x[:1].unsqueeze(0), i.reshape([1, 1, 2]), 1, output_size=[2]),
    },
}
ROWS = [pytest.param(kind, call, id=name) for kind, calls in TABLE.items() for name, call in calls.items()]


@pytest.mark.parametrize(("kind", "call"), ROWS)
def test_an_index_out_of_range(kind, call):
    x, bad = to_tensor(X), to_tensor(np.array([0, 3]))
    with pytest.raises(IndexError, match=r"\b[36]\b.* is out of range") as eager:
        call(x, bad)
    captured = to_static(call)
    outs = captured(x, bad)
    got = (outs[0] if isinstance(outs, (tuple, list)) else outs).numpy()
    if kind is NAN:
        assert np.isnan(got).any(), "a read out of range passed for a value"
        assert np.isfinite(got).any()
    elif kind is DROPPED:
        assert (got != X).any()
        np.testing.assert_array_equal(got[2], X[2])
        assert np.isfinite(got).all()
    flags.set_flags({"FLAGS_check_nan_inf": True})
    try:
        with pytest.raises(IndexError) as later:
            captured(x, bad)
        captured(x, to_tensor(np.array([0, 1])))
    except NumericsError:
        assert kind is NEITHER  # x of these rows is no probability
    finally:
        flags.set_flags({"FLAGS_check_nan_inf": False})
    assert str(later.value).startswith(f"{eager.value}; outside of any layer, training step 1")


def test_integers_out_of_range_read_the_lowest_integer_in_captured_code():
    x = to_tensor(np.array([5, 6]))
    got = to_static(lambda x, i: x[i])(x, to_tensor(np.array([1, 2]))).numpy()
    np.testing.assert_array_equal(got, [6, np.iinfo(np.int64).min])
