"""Contract rows of ops/sequences: within.py, layout.py, recurrent.py and labels.py."""

import numpy as np

from polyreme.conformance import _sequence_reference as ref
from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError

LENGTHS = np.array([2, 0, 3, 1])
FULL = np.array([2, 3, 1])
IDS = np.array([[1], [2], [3], [1], [3], [2]])
HYP, HYP_LENGTHS = np.array([[1], [2], [3], [4], [5], [6], [7]]), np.array([3, 4])
REF, REF_LENGTHS = np.array([[1], [3], [3], [9], [5], [6]]), np.array([2, 4])
NEGATIVE, SHORT = np.array([3, -1, 4]), np.array([2, 3])
WHOLE, NO_GRAD = "integers", "integer result"
ROWS = np.ones((6, 2), "float32")
TIES = np.float32([[3, 1], [3, 2], [0, 2], [5, 2], [5, 0], [1, 1]])


def floats(*shapes):
    return lambda rng: tuple(rng.standard_normal(s).astype("float32") for s in shapes)


def given(*args):
    return lambda rng: args


def ragged(*args, shape=(6, 2), lengths=LENGTHS):
    """x, lengths, then what else the op takes; a tuple of sizes among it stands for random numbers of that shape."""

    def make(rng):
        x = rng.standard_normal(shape).astype("float32")
        return (x, lengths, *(rng.standard_normal(a).astype("float32") if isinstance(a, tuple) else a for a in args))

    return make


def two(rng):
    return [*floats((6, 2), (3, 2))(rng)], [LENGTHS, np.array([0, 2, 0, 1])]


def lstm(*args, bias=21, lengths=LENGTHS):
    return ragged((3, 12), (1, bias), *args, shape=(6, 12), lengths=lengths)


def gru(*args, lengths=LENGTHS):
    return ragged((3, 9), (1, 9), *args, shape=(6, 9), lengths=lengths)


def crf(*args, lengths=LENGTHS):
    return ragged((5, 3), *args, shape=(6, 3), lengths=lengths)


def tags(*args):
    return lambda rng: (*crf()(rng), rng.integers(0, 3, (6, 1)), *args)


def steps(*args):
    return lambda rng: (rng.standard_normal((2, 7, 3)).astype("float32"), np.array([[7], [4]]), *args)


CASES = [
    *(Case("sequence_pool", ragged(kind, 7.0), ref.pool, tag=kind) for kind in ref.POOLS),
    Case("sequence_pool", ragged("AVERAGE"), ref.pool, tag="case", bad=((ROWS, LENGTHS, "mean"), ConfigError, "pool_type='mean'; choose one of sum")),
    Case("sequence_pool", given(TIES, FULL, "max"), ref.pool, no_grad="ties", tag="ties", bad=((ROWS, NEGATIVE, "sum"), ShapeError, "length -1 is negative")),
    Case("sequence_pool", ragged("sum", shape=(6, 2, 3)), ref.pool, tag="3d", bad=((ROWS, SHORT, "sum"), ShapeError, "lengths add up to 5, x has 6 rows")),
    Case("sequence_pool", given(IDS, LENGTHS, "average"), lambda x, o, k: ref.pool(x.astype("float32"), o, k), no_grad=WHOLE, tag="ids", bad=((ROWS, LENGTHS * 1.0, "sum"), DTypeError, "lengths are float64")),
    Case("sequence_pool", given(np.ones((0, 2), "float32"), np.zeros(2, "int64"), "max", 2.0), ref.pool, no_grad="no rows", tag="empty", bad=((ROWS, LENGTHS[None], "sum"), ShapeError, r"lengths \[1, 4\] must be \[n\]")),
    Case("sequence_softmax", ragged(shape=(6, 1)), ref.softmax, bad=((ROWS, LENGTHS), ShapeError, r"x \[6, 2\] must be \[total\] or \[total, 1\]")),
    Case("sequence_softmax", ragged(shape=6), ref.softmax, tag="flat"),
    Case("sequence_softmax", given(np.float32([1000, 1001, -1000, 0, 1, 9]), LENGTHS), lambda x, o: ref.softmax(x.astype("float64"), o), tag="large"),
    Case("sequence_reverse", ragged(shape=(6, 2, 2)), ref.reverse),
    Case("sequence_conv", ragged((6, 4)), ref.conv, terms=12, bad=((ROWS, LENGTHS, np.ones((5, 4), "float32")), ShapeError, r"weight \[5, 4\] with context_length=3")),
    Case("sequence_conv", ragged((8, 4), 4, -1), ref.conv, terms=16, tag="even", bad=((ROWS, LENGTHS, ROWS, 0), ConfigError, "context_length=0")),
    Case("sequence_conv", ragged((4, 1), 2, 1), ref.conv, tag="ahead"),
    Case("row_conv", ragged((3, 2)), ref.row_conv, bad=((ROWS, LENGTHS, np.ones((3, 1))), ShapeError, r"weight \[3, 1\]")),
    Case("sequence_enumerate", given(IDS, LENGTHS, 2, 9), ref.enumerate_ids, no_grad=WHOLE, bad=((IDS, LENGTHS, 0), ConfigError, "win_size=0")),
    Case("sequence_enumerate", given(IDS[:, 0], LENGTHS, 4), ref.enumerate_ids, no_grad=WHOLE, tag="flat", bad=((ROWS[:, 0], LENGTHS, 2), DTypeError, "x is float32")),
    Case("sequence_offsets", given(np.array([[2], [0], [3]])), lambda n: ref.offsets_of(n), no_grad=WHOLE, bad=((np.array([2, -1]),), ShapeError, "length -1 is negative")),
    Case("sequence_room", given(np.array([2, 0, 3])), lambda n: np.zeros(5, "bool"), no_grad=WHOLE, host="the sum is the result's size"),
    Case("sequence_room", given(np.array([2, 0, 3]), 5), lambda n, most: np.zeros(5, "bool"), no_grad=WHOLE, tag="most"),
    Case("sequence_pad", ragged(5.0), ref.pad, host="the longest sequence is the result's size", bad=((ROWS, LENGTHS, 0.0, 2), ShapeError, "maxlen=2, the longest sequence has 3")),
    Case("sequence_pad", ragged(np.float32([5, 6]), 4), ref.pad, tag="row", bad=((ROWS, LENGTHS, np.ones(3), 4), ShapeError, r"pad_value \[3\]; needs one number or a row \[2\]")),
    Case("sequence_pad", ragged(0.0, 5), ref.pad, tag="longer", bad=((ROWS, LENGTHS, 0.0, -1), ShapeError, "maxlen=-1, the longest")),
    Case("sequence_unpad", lambda rng: (*floats((3, 4, 2))(rng), np.array([2, 0, 4])), ref.unpad, host="the sum of the lengths is the result's size", bad=((np.ones((2, 3)), np.array([1, 4])), ShapeError, "length 4 of x")),
    Case("sequence_unpad", lambda rng: (*floats((2, 4))(rng), np.array([[3], [1]]), 4), ref.unpad, tag="rows", bad=((np.ones((2, 3)), np.array([1, 1, 1])), ShapeError, r"x \[2, 3\] and length \[3\]")),
    Case("sequence_expand_as", ragged(shape=(4, 2)), lambda x, n: np.repeat(x, n, 0), host="the sum of the lengths is the result's size", bad=((ROWS, LENGTHS), ShapeError, "x has 6 rows, lengths 4 sequences")),
    Case("sequence_expand_as", ragged(6, shape=(4, 2)), lambda x, n, *_: np.repeat(x, n, 0), tag="rows"),
    Case("sequence_expand", ragged(np.array([2, 1, 0, 3])), ref.expand, host="the repetitions are the result's size", bad=((ROWS, LENGTHS, FULL), ShapeError, "x has 4 sequences, repeats 3 counts")),
    Case("sequence_expand", ragged(np.array([2, 1, 0, 3]), 6, 7), ref.expand, tag="sizes", bad=((ROWS, LENGTHS, FULL, 6, 7), ShapeError, "x has 4 sequences")),
    Case("sequence_concat", two, ref.concat, bad=(([ROWS, ROWS], [LENGTHS, FULL]), ShapeError, r"lengths \[\[4\], \[3\]\]")),
    Case("sequence_reshape", ragged(1), ref.reshape, bad=((ROWS, LENGTHS, 4), ShapeError, "3 rows of 2 does not divide into rows of 4")),
    Case("sequence_reshape", ragged(4, shape=(6, 2), lengths=np.array([2, 4])), ref.reshape, tag="wide", bad=((ROWS[:, 0], LENGTHS, 4), ShapeError, r"x \[6\] with new_dim=4")),
    Case("sequence_slice", ragged(np.array([[1], [0], [0], [0]]), np.array([[1], [0], [2], [1]])), ref.cut, host="the sum of the lengths is the result's size", bad=((ROWS, FULL, np.array([1, 1, 1]), np.array([1, 1, 1])), ShapeError, "rows 1 to 2 of sequence 2, which has 1")),
    Case("sequence_slice", ragged(np.array([1, 0, 0, 0]), np.array([1, 0, 2, 1]), 4), ref.cut, tag="rows", bad=((ROWS, FULL, np.array([1]), np.array([1])), ShapeError, "3 sequences, 1 offset and 1 length")),
    Case("sequence_scatter", lambda rng: (*floats((4, 4))(rng), IDS, *floats((6, 1))(rng), LENGTHS), ref.scatter, bad=((np.ones((4, 3)), IDS, ROWS[:, :1], LENGTHS), IndexError, "index 3 is out of range for dim 1 of size 3")),
    Case("sequence_scatter", lambda rng: (*floats((4, 4))(rng), np.zeros(6, "int32"), *floats(6)(rng), LENGTHS), ref.scatter, tag="equal", bad=((np.ones((3, 4)), IDS, ROWS[:, :1], LENGTHS), ShapeError, "x has 3 rows, lengths 4 sequences")),
    Case("sequence_erase", given(IDS, LENGTHS, [1, 3]), ref.erase, no_grad=WHOLE, host="how many are left is the shape", bad=((IDS, SHORT, [1]), ShapeError, "x has 6 rows")),
    Case("sequence_lstm", lstm(), ref.lstm, terms=64, host="reads the longest length", bad=((np.ones((6, 8)), LENGTHS, np.ones((3, 12))), ShapeError, r"weight \[3, 12\]; needs \[3, 8\]")),
    Case("sequence_lstm", lstm((4, 3), (4, 3)), ref.lstm, {"is_reverse": True, "maxlen": 3}, terms=64, tag="reverse", bad=((np.ones((6, 12)), LENGTHS, np.ones((3, 12)), np.ones((1, 12))), ShapeError, r"bias \[1, 12\]; needs \[1, 21\]")),
    Case("sequence_lstm", lstm(bias=12), ref.lstm, {"use_peepholes": False, "cell_activation": "identity", "candidate_activation": "sigmoid", "gate_activation": "tanh", "maxlen": 5}, terms=64, tag="plain", bad=((np.ones((6, 12)), LENGTHS, np.ones((3, 12)), None, np.ones((3, 3))), ShapeError, r"h0 \[3, 3\]; needs \[4, 3\]")),
    Case("sequence_lstm", ragged((2, 12), (1, 21), None, None, (3, 2), shape=(6, 12)), ref.lstm, {"cell_clip": 0.4, "proj_clip": 0.3, "maxlen": 3}, terms=64, tag="projection", bad=((np.ones((6, 12)), LENGTHS, np.ones((2, 12))), ShapeError, r"needs \[total, 8\]")),
    Case("sequence_gru", gru(), ref.gru, terms=64, host="reads the longest length", bad=((np.ones((6, 9)), LENGTHS, np.ones((3, 8))), ShapeError, r"weight \[3, 8\]; needs \[3, 9\]")),
    Case("sequence_gru", gru((4, 3)), ref.gru, {"is_reverse": True, "origin_mode": True, "maxlen": 4}, terms=64, tag="reverse", bad=((np.ones((6, 9)), LENGTHS, np.ones((3, 9)), None, np.ones((1, 3))), ShapeError, r"h0 \[1, 3\]; needs \[4, 3\]")),
    Case("gru_unit", floats((4, 9), (4, 3), (3, 9), (1, 9)), ref.gru_unit, terms=64, bad=((np.ones((4, 8)), np.ones((4, 3)), np.ones((3, 9))), ShapeError, r"x \[4, 8\]; needs \[4, 9\]")),
    Case("gru_unit", floats((4, 9), (4, 3), (3, 9)), ref.gru_unit, terms=64, tag="no bias", bad=((np.ones((4, 9)), np.ones((4, 3)), np.ones((3, 9)), None, "swish"), ConfigError, "activation 'swish'; choose one of sigmoid")),
    Case("linear_chain_crf", tags(), ref.crf, terms=32, host="reads the longest length", bad=((np.ones((6, 3)), LENGTHS, np.ones((5, 3)), IDS), IndexError, "index 3 is out of range")),
    Case("linear_chain_crf", tags(4), ref.crf, terms=32, tag="maxlen", bad=((np.ones((6, 3)), LENGTHS, np.ones((3, 3)), IDS - 1), ShapeError, r"transition \[3, 3\]")),
    Case("crf_decoding", crf(), ref.crf_decode, no_grad=NO_GRAD, host="reads the longest length"),
    Case("crf_decoding", tags(4), ref.crf_decode, no_grad=NO_GRAD, tag="label", bad=((np.ones((6, 3)), LENGTHS, np.ones((5, 3)), None, 2), ShapeError, "maxlen=2, the longest sequence has 3")),
    Case("edit_distance", lambda rng: (rng.integers(0, 4, (3, 5)), rng.integers(0, 4, (3, 4))), ref.edit_padded, no_grad=NO_GRAD, bad=((ROWS, ROWS), DTypeError, "float32 and float32, need integers")),
    Case("edit_distance", lambda rng: (rng.integers(0, 4, (3, 5)), rng.integers(0, 4, (3, 4)), False, [1, 3], np.array([5, 0, 2]), np.array([[1], [4], [3]])), ref.edit_padded, no_grad=NO_GRAD, tag="lengths", bad=((IDS, IDS[:3]), ShapeError, r"input \[6, 1\], label \[3, 1\]")),
    Case("sequence_edit_distance", given(HYP, HYP_LENGTHS, REF, REF_LENGTHS), ref.edit_ragged, no_grad=NO_GRAD, host="reads the longest lengths", bad=((HYP, HYP_LENGTHS, REF, np.array([6])), ShapeError, "2 sequences of input, 1 of label")),
    Case("sequence_edit_distance", given(HYP, HYP_LENGTHS, REF, np.array([0, 6]), False, None, 7, 6), ref.edit_ragged, no_grad=NO_GRAD, tag="empty"),
    Case("ctc_greedy_decoder", steps(0, 8), ref.ctc_padded, no_grad=NO_GRAD, bad=((ROWS, IDS, 0), ShapeError, r"input \[6, 2\]; needs \[n, steps, classes\]")),
    Case("sequence_ctc_greedy_decoder", ragged(2, shape=(6, 3)), ref.ctc_ragged, no_grad=NO_GRAD, bad=((ROWS, LENGTHS, 2), ShapeError, "blank=2 of 2 classes")),
]  # fmt: skip
