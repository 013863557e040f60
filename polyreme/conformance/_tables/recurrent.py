"""Contract rows of ops/recurrent.py; the reference is a loop over sequences and steps in NumPy."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
X, IDS = np.ones((4, 3, 5), "float32"), np.array([[[0, 1]], [[0, 2]]])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def one_step(mode, x, h, c, w_ih, w_hh, b_ih, b_hh, w_ho):
    gi, gh = w_ih @ x, w_hh @ h
    gi, gh = gi if b_ih is None else gi + b_ih, gh if b_hh is None else gh + b_hh
    if mode == "LSTM":
        i, f, g, o = np.split(gi + gh, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        return (h if w_ho is None else h @ w_ho), c
    if mode == "GRU":
        (ir, iz, ic), (hr, hz, hc) = np.split(gi, 3), np.split(gh, 3)
        z = sigmoid(iz + hz)
        return z * h + (1 - z) * np.tanh(ic + sigmoid(ir + hr) * hc), c
    return (np.tanh(gi + gh) if mode == "RNN_TANH" else np.maximum(gi + gh, 0)), c


def layer(
    x, w_ih, w_hh, b_ih=None, b_hh=None, w_ho=None, h=None, c=None, lengths=None, mode="LSTM", reverse=False, flat=True
):
    steps, batch, _ = x.shape
    outputs = np.zeros((steps, batch, w_hh.shape[1]), x.dtype)
    size = w_hh.shape[0] // GATES[mode]
    last_h, last_c = np.zeros((batch, w_hh.shape[1]), x.dtype), np.zeros((batch, size), x.dtype)
    for n in range(batch):
        hn = last_h[n] if h is None else h[n]
        cn = last_c[n] if c is None else c[n]
        real = range(steps if lengths is None else lengths[n])
        for t in reversed(real) if reverse else real:
            hn, cn = one_step(mode, x[t, n], hn, cn, w_ih, w_hh, b_ih, b_hh, w_ho)
            outputs[t, n] = hn
        last_h[n], last_c[n] = hn, cn
    return (outputs, last_h, last_c) if mode == "LSTM" else (outputs, last_h)


def step(x, *weights, mode="LSTM"):
    return layer(x[None], *weights, mode=mode)[1:]


def made(mode, *, bias=True, projection=0, state=True, lengths=None, steps=4):
    gates, size = GATES[mode] * 3, projection or 3

    def make(rng):
        shapes = [
            (steps, 3, 5) if steps else (3, 5),
            (gates, 5),
            (gates, size),
            *([(gates,)] * 2 if bias else [None] * 2),
        ]
        shapes += [(3, projection) if projection else None, (3, size) if state else None]
        shapes += [(3, 3) if state and mode == "LSTM" else None]
        arrays = tuple(None if s is None else rng.uniform(-1, 1, s).astype("float32") for s in shapes)
        return arrays if lengths is None else (*arrays, np.array(lengths))

    return make


def weights(*shapes):
    return tuple(np.ones(s, "float32") for s in shapes)


def tree(ids, parents):
    out = ids.copy()
    for n in range(ids.shape[1]):
        for k in range(ids.shape[2]):
            beam = k
            for t in reversed(range(len(ids))):
                out[t, n, k], beam = ids[t, n, beam], parents[t, n, beam]
    return out


def choice(logits, log_probs, finished, lengths, end):
    batch, beams = logits.shape[:2]
    out = [np.zeros((batch, beams), t) for t in ("float32", "int64", "int64", "bool", "int64")]
    for n in range(batch):
        candidates = []
        for k in range(beams):
            p = np.exp(logits[n, k].astype("float64"))
            for token, score in enumerate(np.log(p / p.sum())):
                if not finished[n, k] or token == end:
                    candidates.append((log_probs[n, k] + (0 if finished[n, k] else score), -k, -token))
        for at, (score, k, token) in enumerate(sorted(candidates, reverse=True)[:beams]):
            was = finished[n, -k]
            row = (score, -token, -k, was or -token == end, lengths[n, -k] + (not was))
            for array, value in zip(out, row, strict=True):
                array[n, at] = value
    return out


FLAGS, COUNTS = np.array([[False, True, False], [True, False, False]]), np.array([[2, 1, 2], [0, 2, 2]])
ROWS, FROM = np.arange(12.0).reshape(6, 2), np.array([[2, 0, 0], [1, 1, 2]])
LSTM_WEIGHTS, GRU_WEIGHTS = weights((12, 5), (12, 3)), weights((9, 5), (9, 3))
NONE = (None,) * 3

CASES = [
    Case("recurrent_layer", made("LSTM"), layer, terms=64, bad=((X, *weights((12, 4), (12, 3))), ShapeError, r"weight_ih \[12, 4\]; needs \[12, 5\]")),
    Case("recurrent_layer", made("LSTM", projection=2, lengths=[2, 4, 0]), layer, {"reverse": True}, terms=64, tag="projection", bad=((X[0], *LSTM_WEIGHTS), ShapeError, r"x \[3, 5\].*needs \[steps, batch, input\]")),
    Case("recurrent_layer", made("GRU", lengths=[4, 1, 3]), layer, {"mode": "GRU", "flat": False}, terms=64, tag="gru", bad=((X, *GRU_WEIGHTS, *NONE, None, np.ones((3, 3))), ConfigError, "c for mode='GRU'")),
    Case("recurrent_layer", made("GRU", state=False, bias=False), layer, {"mode": "GRU", "reverse": True}, terms=64, tag="gru bare", bad=((X, *weights((9, 5), (9, 2)), None, None, np.ones((3, 2))), ConfigError, "mode='GRU' has no projection")),
    Case("recurrent_layer", made("RNN_TANH"), layer, {"mode": "RNN_TANH"}, terms=64, tag="tanh", bad=((X, *weights((3, 5), (3, 3)), *NONE, None, None, np.array([4, 5, 0])), ShapeError, "length 5 of a sequence padded to 4")),
    Case("recurrent_layer", made("RNN_RELU", lengths=[0, 0, 4]), layer, {"mode": "RNN_RELU"}, terms=64, tag="relu", bad=((X, *weights((3, 5), (3, 3)), *NONE, None, None, np.ones(3)), DTypeError, "lengths are float64")),
    Case("recurrent_step", made("LSTM", projection=2, steps=0), step, terms=64, bad=((X, X, X), ShapeError, r"x \[4, 3, 5\]; needs \[batch, input\]")),
    Case("recurrent_step", made("GRU", state=False, steps=0), step, {"mode": "GRU"}, terms=64, tag="gru", bad=((X[0], *GRU_WEIGHTS, np.ones(3)), ShapeError, r"bias_ih \[3\]; needs \[9\]")),
    Case("recurrent_step", made("RNN_TANH", steps=0), step, {"mode": "RNN_TANH"}, terms=64, tag="tanh", bad=((X[0], *weights((3, 5), 3)), ShapeError, r"weight_hh \[3\]; needs \[gates, hidden\]")),
    Case("initial_state", lambda rng: (np.ones((2, 3)), [4], 1.5, "float32", 1), lambda *_: np.full((3, 4), 1.5, "float32"), no_grad="a constant", bad=((X, [4], 0.0, "float32", 3), ShapeError, "batch_dim_idx=3 of a Tensor with 3 dims")),
    Case("gather_tree", lambda rng: (rng.integers(0, 9, (5, 2, 3)), rng.integers(0, 3, (5, 2, 3))), tree, no_grad="integers", bad=((IDS, IDS), IndexError, "index 2 is out of range for dim 2 of size 2")),
    Case("beam_choice", lambda rng: (rng.standard_normal((2, 3, 4)).astype("float32"), -rng.random((2, 3)).astype("float32"), FLAGS, COUNTS, 1), choice, no_grad="the choice jumps", bad=((X, X[0], X[0], X[0], 1), ShapeError, r"logits \[4, 3, 5\], log_probs \[3, 5\]")),
    Case("beam_choice", lambda rng: (np.zeros((2, 3, 2), "float32"), np.float32([[0, -1e9, -1e9]] * 2), FLAGS & False, COUNTS, 0), choice, no_grad="the choice jumps", tag="first", bad=((X, X[:, :, 0], X[:, :, 0], X[:, :, 0], 5), ConfigError, "end_token=5 of 5 classes")),
    Case("beam_rows", lambda rng: (rng.standard_normal((6, 2)), FROM), lambda x, p: x[[2, 0, 0, 4, 4, 5]], bad=((ROWS, FROM[:1]), ShapeError, r"x \[6, 2\], parents \[1, 3\]")),
    Case("gather_tree", lambda rng: (np.zeros((0, 2, 3), "int32"), np.zeros((0, 2, 3), "int32")), tree, no_grad="integers", tag="empty", bad=((X, X), DTypeError, "ids are float32")),
]  # fmt: skip
