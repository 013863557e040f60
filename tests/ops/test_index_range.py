"""Every op that takes indices or labels: out of range is an IndexError eagerly, and with checks on in captured code;
with checks off a captured read gives NaN and a write is dropped. A new op of this kind gets a row here."""

import inspect
import re

import numpy as np
import pytest

from polyreme import flags
from polyreme.eager.tensor import to_tensor
from polyreme.errors import NumericsError
from polyreme.jit import to_static
from polyreme.nn import functional as F
from polyreme.ops import OPS

X = np.arange(1, 7, dtype="float32").reshape(3, 2)
TAILS = [[np.ones((4, 2), "float32"), np.ones((2, 1), "float32")]]
FULL, ONE = np.array([4, 4]), np.array([1, 1])
NAN, DROPPED, NEITHER = "NaN", "dropped", "neither"
FAR = (2**32 + 1, -4, 2 - 2**33)  # what is cut to 32 bits names row 1 or 2


def op(name, *given, **options):
    """A call of an op: x in the place of "x", x[:2] of "two", the index [0, 3] of "i", as a column of "ii", and as two
    columns of "ij"."""

    def run(x, i):
        places = {"x": x, "two": x[:2], "i": i, "ii": i.unsqueeze(1), "ij": i.unsqueeze(1).expand([2, 2])}
        return OPS[name](*[places.get(g, g) if isinstance(g, str) else g for g in given], **options)

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
        "fused_linear_cross_entropy": op(
            "fused_linear_cross_entropy", "two", np.ones((2, 3), "float32"), "i", reduction="none"
        ),
        "ctc_loss": lambda x, i: OPS["ctc_loss"](
            np.zeros((4, 2, 3), "float32"), (i + 1).unsqueeze(1), FULL, ONE, reduction="none"
        ),
        "rnnt_loss": lambda x, i: OPS["rnnt_loss"](
            np.zeros((2, 4, 2, 3), "float32"), (i + 1).unsqueeze(1), FULL, ONE, reduction="none"
        ),
        "fused_rotary_position_embedding": lambda x, i: OPS["fused_rotary_position_embedding"](
            np.ones((1, 2, 1, 2), "float32"), None, None, x, x, i.unsqueeze(0)
        ),
        "margin_cross_entropy": op("margin_cross_entropy", np.full((2, 3), 0.5, "float32"), "i", reduction="none"),
        "multi_margin_loss": op("multi_margin_loss", np.ones((2, 3), "float32"), "i", reduction="none"),
        "multi_label_margin_loss": lambda x, i: OPS["multi_label_margin_loss"](
            np.ones((2, 3), "float32"), OPS["stack"]([i, i * 0 - 1, i * 0 - 1], 1), reduction="none"
        ),
        "adaptive_log_softmax_with_loss": lambda x, i: OPS["adaptive_log_softmax_with_loss"](
            np.ones((2, 4), "float32"), i, np.ones((4, 3), "float32"), TAILS, [2, 3]
        ),
        "hsigmoid_loss": op("hsigmoid_loss", np.ones((2, 4), "float32"), "i", 3, np.ones((2, 4), "float32")),
        "send_u_recv": op("send_u_recv", "x", "i", np.array([0, 1]), "sum", 3),
        "send_ue_recv": op("send_ue_recv", "x", np.ones(2, "float32"), "i", np.array([0, 1]), "add", "sum", 3),
        "send_uv": op("send_uv", "x", "x", "i", np.array([0, 1])),
    },
    DROPPED: {
        "scatter": op("scatter", "x", "i", np.full((2, 2), 9, "float32")),
        "scatter_nd_add": op("scatter_nd_add", "x", "ii", np.full((2, 2), 9, "float32")),
        "index_add": op("index_add", "x", "i", 0, np.full((2, 2), 9, "float32")),
        "index_fill": op("index_fill", "x", "i", 0, 9.0),
        "index_put": lambda x, i: OPS["index_put"](x, [i], to_tensor(9.0)),
        "put_along_axis": op("put_along_axis", "x", "ii", 9.0, 0, broadcast=False),
        "scatter_add": op("scatter_add", "x", 0, "ij", np.full((2, 2), 9, "float32")),
        "scatter_reduce": op("scatter_reduce", "x", 0, "ij", np.full((2, 2), 9, "float32"), "sum"),
        "x[i] = v": setitem,
    },
    # documented with each: no class, no place, another shard's
    NEITHER: {
        "one_hot": op("one_hot", "i", 3),
        "shard_index": op("shard_index", "ii", 3, 1, 0),
        "dice_loss": op("dice_loss", "two", "ii"),
        "scatter_nd": op("scatter_nd", "ii", "two", [3, 2]),
        "gather_tree": lambda x, i: OPS["gather_tree"](
            np.zeros((2, 1, 2), "int64"), i.reshape([2, 1, 1]).expand([2, 1, 2])
        ),
        "segment_reduce": op("segment_reduce", "two", "i", 3, "sum"),
        "sequence_scatter": op("sequence_scatter", "x", "ii", np.ones((2, 1), "float32"), np.array([1, 1, 0])),
        "linear_chain_crf": lambda x, i: OPS["linear_chain_crf"](
            x, np.array([3]), np.ones((4, 2), "float32"), OPS["concat"]([i, i[:1]]), 3
        ),
        "max_unpool1d": lambda x, i: F.max_unpool1d(x[:1].unsqueeze(0), i.reshape([1, 1, 2]), 1, output_size=[2]),
    },
}
ROWS = [pytest.param(kind, call, id=name) for kind, calls in TABLE.items() for name, call in calls.items()]


def takes(call, x, i):
    try:
        call(x, to_tensor(np.array([0, i])))
    except IndexError:
        return False
    return True


@pytest.mark.parametrize(("kind", "call"), ROWS)
def test_an_index_out_of_range(kind, call):
    x, bad = to_tensor(X), to_tensor(np.array([0, 3]))
    with pytest.raises(IndexError, match=r"\b[3467]\b.* (is out of range|labels are classes)") as eager:
        call(x, bad)
    captured = to_static(call)
    for wrong in (3, *FAR, -1):
        if wrong == -1 and takes(call, x, wrong):
            continue
        outs = captured(x, to_tensor(np.array([0, wrong])))
        got = (outs[0] if isinstance(outs, (tuple, list)) else outs).numpy()
        if kind is NAN:
            assert np.isnan(got).any(), f"a read at {wrong} passed for a value"
            assert np.isfinite(got).any()
        elif kind is DROPPED:
            assert (got != X).any()
            np.testing.assert_array_equal(got[1:], X[1:])
            assert np.isfinite(got).all()
        elif wrong == 3:
            nothing = got
        else:
            np.testing.assert_array_equal(got, nothing)
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


@pytest.mark.parametrize("name", ["gather", "take_along_axis", "take", "x[i]"])
def test_there_is_nothing_to_read_in_a_dim_of_size_0(name):
    call = TABLE[NAN][name]
    for run in (call, to_static(call)):
        with pytest.raises(IndexError):
            run(to_tensor(X[:0]), to_tensor(np.array([0, 0])))


INDEX = re.compile(r"(?!return_)(.*_)?(index|indices|ids|labels?|parents)")
# op -> why it has no row of its own
EXEMPT = {
    "class_center_sample": "it reads the labels on the host", "npair_loss": "labels are compared",
    "angular_margin": "part of margin_cross_entropy",
    "pick_classes": "part of adaptive_log_softmax_with_loss",
    "crf_decoding": "the label is compared with",
    "edit_distance": "tokens are compared, whatever they are",
    "sequence_edit_distance": "tokens are compared, whatever they are",
    "getitem": "x[i]", "setitem": "x[i] = v",
    "cross_entropy_with_softmax_bwd_w_downcast": "a label out of range gives its row no one-hot entry",
    "column_attention": "rows are compared with bounds", "column_attention_with_dropout": "as column_attention",
    "flashmask_attention": "as column_attention; below 0: tests/nn/test_attention_kernels.py",
    "moe_combine": "its index comes from moe_gate_dispatch; see tests/ops/table_routing.py",
    "rows_added": "part of embedding_grad_add_to_",
    "max_unpool2d": "as max_unpool1d", "max_unpool3d": "as max_unpool1d",
    "select_scatter": "its index is an attribute, checked in every world",
    "yolo_loss": "gt_label: tests/vision", "matrix_nms": "its label is an attribute",
    **dict.fromkeys(["segment_sum", "segment_mean", "segment_max", "segment_min"],
                    "the result is as long as the ids say; a negative one: segment_reduce"),
    **dict.fromkeys(["cross_entropy_of_classes", "softmax_and_cross_entropy", "nll_of_classes", "gather_reduce",
                     "linear_cross_entropy_of_classes", "gather_message_reduce", "scatter_to_image", "rotated",
                     "beam_rows", "sparse_compress"], "part of a public function, which checks"),
    **dict.fromkeys(["tensor_split", "hsplit", "vsplit", "dsplit"], "where to cut, as in slices"),
    **dict.fromkeys(["binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
                     "gaussian_nll", "gaussian_nll_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "label_smooth",
                     "log_loss", "margin_ranking_loss", "mse_loss", "multi_label_soft_margin_loss", "poisson_nll_loss",
                     "sigmoid_focal_loss", "smooth_l1_loss", "soft_margin_loss", "square_error_cost"],
                    "the label is a number or a probability, no class"),
}  # fmt: skip


def test_every_op_that_takes_indices_has_a_row():
    takes = {
        name
        for name, fn in OPS.items()
        if fn.__module__.startswith("polyreme.") and any(map(INDEX.fullmatch, inspect.signature(fn).parameters))
    }
    rows = {name.split()[0] for calls in TABLE.values() for name in calls}
    assert sorted(n for n in takes - rows - set(EXEMPT) if not n.endswith("_")) == []
    assert sorted(set(EXEMPT) - set(OPS)) == []


def test_integers_out_of_range_read_the_lowest_integer_in_captured_code():
    x = to_tensor(np.array([5, 6]))
    got = to_static(lambda x, i: x[i])(x, to_tensor(np.array([1, 2]))).numpy()
    np.testing.assert_array_equal(got, [6, np.iinfo(np.int64).min])
