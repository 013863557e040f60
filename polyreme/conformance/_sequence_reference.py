"""Plain NumPy forms of the sequence ops, one sequence at a time."""

import itertools

import numpy as np


def parts(x, lengths):
    """The rows of each sequence."""
    return [x[a:b] for a, b in itertools.pairwise(offsets_of(lengths))]


def offsets_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype("int64")


def joined(rows, like):
    return np.concatenate([np.zeros((0, *like.shape[1:]), like.dtype), *rows])


POOLS = {
    "sum": lambda s: s.sum(0),
    "average": lambda s: s.mean(0),
    "sqrt": lambda s: s.sum(0) / np.sqrt(len(s)),
    "max": lambda s: s.max(0),
    "min": lambda s: s.min(0),
    "first": lambda s: s[0],
    "last": lambda s: s[-1],
}


def pool(x, lengths, pool_type, pad_value=0.0):
    empty = np.full(x.shape[1:], pad_value, x.dtype)
    return np.stack([POOLS[pool_type.lower()](s) if len(s) else empty for s in parts(x, lengths)])


def softmax(x, lengths):
    return joined([np.exp(s - s.max()) / np.exp(s - s.max()).sum() for s in parts(x, lengths) if len(s)], x)


def reverse(x, lengths):
    return joined([s[::-1] for s in parts(x, lengths)], x)


def windows(s, start, length):
    """Rows t + start .. t + start + length - 1 of s for each t, zeros outside: [len, length, ...]."""
    out = np.zeros((len(s), length, *s.shape[1:]), s.dtype)
    for t, j in itertools.product(range(len(s)), range(length)):
        if 0 <= t + start + j < len(s):
            out[t, j] = s[t + start + j]
    return out


def conv(x, lengths, weight, context_length=3, context_start=None):
    start = -(context_length // 2) if context_start is None else context_start
    near = joined([windows(s, start, context_length).reshape(len(s), len(weight)) for s in parts(x, lengths)], weight.T)
    return near @ weight


def row_conv(x, lengths, weight):
    return joined([(windows(s, 0, len(weight)) * weight).sum(1) for s in parts(x, lengths)], x)


def enumerate_ids(x, lengths, win_size, pad_value=0):
    rows = []
    for s in parts(x.reshape(-1), lengths):
        rows += [[*s[t : t + win_size], *[pad_value] * max(0, t + win_size - len(s))] for t in range(len(s))]
    return np.array(rows, x.dtype).reshape(-1, win_size)


def pad(x, lengths, pad_value=0.0, maxlen=None):
    out = np.empty((len(lengths), lengths.max() if maxlen is None else maxlen, *x.shape[1:]), x.dtype)
    out[:] = pad_value
    for i, s in enumerate(parts(x, lengths)):
        out[i, : len(s)] = s
    return out, lengths.astype("int64")


def unpad(x, length, *_):
    return np.concatenate([row[:n] for row, n in zip(x, length.reshape(-1), strict=True)])


def expand(x, lengths, repeats, *_):
    copies = [s for s, n in zip(parts(x, lengths), repeats, strict=True) for _ in range(n)]
    return joined(copies, x), np.array([len(s) for s in copies])


def concat(xs, lengths):
    rows = [p for group in zip(*(parts(x, o) for x, o in zip(xs, lengths, strict=True)), strict=True) for p in group]
    return joined(rows, xs[0]), sum(lengths)


def reshape(x, lengths, new_dim):
    rows = [s.reshape(-1, new_dim) for s in parts(x, lengths)]
    return np.concatenate(rows), np.array([len(r) for r in rows])


def cut(x, lengths, offset, length, *_):
    offset, length = offset.reshape(-1), length.reshape(-1)
    return joined([s[a : a + n] for s, a, n in zip(parts(x, lengths), offset, length, strict=True)], x)


def scatter(x, index, updates, lengths):
    out = x.copy()
    for row, at, add in zip(out, parts(index.reshape(-1), lengths), parts(updates.reshape(-1), lengths), strict=True):
        np.add.at(row, at, add)
    return out


def erase(x, lengths, tokens):
    rows = [s[~np.isin(s.reshape(-1), tokens)] for s in parts(x, lengths)]
    return joined(rows, x), np.array([len(r) for r in rows])


ACTIVATIONS = {
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "tanh": np.tanh,
    "relu": lambda v: np.maximum(v, 0),
    "identity": lambda v: v,
}


def lstm(x, lengths, weight, bias=None, h0=None, c0=None, projection=None, use_peepholes=True, is_reverse=False,
         gate_activation="sigmoid", cell_activation="tanh", candidate_activation="tanh", proj_activation="tanh",
         cell_clip=None, proj_clip=None, maxlen=None):  # fmt: skip
    gate, cell, new = (ACTIVATIONS[a] for a in (gate_activation, cell_activation, candidate_activation))
    d, p = x.shape[1] // 4, len(weight)
    b = np.zeros(7 * d) if bias is None else np.pad(bias[0], (0, 7 * d - bias.size))
    peep = b[4 * d :].reshape(3, d)
    hidden, cells = np.zeros((len(x), p), x.dtype), np.zeros((len(x), d), x.dtype)
    for i, (a, z) in enumerate(itertools.pairwise(offsets_of(lengths))):
        h = np.zeros(p) if h0 is None else h0[i]
        c = np.zeros(d) if c0 is None else c0[i]
        for t in range(a, z)[:: -1 if is_reverse else 1]:
            g, gi, gf, go = np.split(x[t] + h @ weight + b[: 4 * d], 4)
            c = gate(gf + c * peep[1]) * c + gate(gi + c * peep[0]) * new(g)
            c = c if cell_clip is None else np.clip(c, -cell_clip, cell_clip)
            h = gate(go + c * peep[2]) * cell(c)
            if projection is not None:
                h = ACTIVATIONS[proj_activation](h @ projection)
                h = h if proj_clip is None else np.clip(h, -proj_clip, proj_clip)
            hidden[t], cells[t] = h, c
    return hidden, cells


def gru_step(x, h, weight, gate, new, origin_mode):
    d = h.shape[-1]
    flat = weight.reshape(-1)
    gates = gate(x[..., : 2 * d] + h @ flat[: 2 * d * d].reshape(d, 2 * d))
    u, r = np.split(gates, 2, -1)
    candidate = new(x[..., 2 * d :] + (r * h) @ flat[2 * d * d :].reshape(d, d))
    h_new = u * h + (1 - u) * candidate if origin_mode else (1 - u) * h + u * candidate
    return h_new, r * h, np.concatenate([gates, candidate], -1)


def gru(x, lengths, weight, bias=None, h0=None, is_reverse=False, gate_activation="sigmoid",
        candidate_activation="tanh", origin_mode=False, maxlen=None):  # fmt: skip
    gate, new, d = ACTIVATIONS[gate_activation], ACTIVATIONS[candidate_activation], len(weight)
    x = x if bias is None else x + bias
    out = np.zeros((len(x), d), x.dtype)
    for i, (a, z) in enumerate(itertools.pairwise(offsets_of(lengths))):
        h = np.zeros(d) if h0 is None else h0[i]
        for t in range(a, z)[:: -1 if is_reverse else 1]:
            h = out[t] = gru_step(x[t], h, weight, gate, new, origin_mode)[0]
    return out


def gru_unit(x, hidden, weight, bias=None):
    return gru_step(x if bias is None else x + bias, hidden, weight, ACTIVATIONS["sigmoid"], np.tanh, False)


def path_score(s, path, transition):
    start, stop, move = transition[0], transition[1], transition[2:]
    moves = sum(move[a, b] for a, b in itertools.pairwise(path))
    return start[path[0]] + stop[path[-1]] + moves + sum(row[tag] for row, tag in zip(s, path, strict=True))


def every_path(s):
    return list(itertools.product(range(s.shape[1]), repeat=len(s)))


def crf(x, lengths, transition, label, *_):
    out = []
    for s, tags in zip(parts(x, lengths), parts(label.reshape(-1), lengths), strict=True):
        scores = [path_score(s, p, transition) for p in every_path(s)] if len(s) else [0.0]
        out.append(np.logaddexp.reduce(scores) - (path_score(s, tags, transition) if len(s) else 0))
    return np.array(out, x.dtype)[:, None]


def crf_decode(x, lengths, transition, label=None, *_):
    best = [max(every_path(s), key=lambda p: path_score(s, p, transition)) if len(s) else () for s in parts(x, lengths)]
    path = np.array([tag for p in best for tag in p], "int64")[:, None]
    return path if label is None else (path == label.reshape(-1, 1)).astype("int64")


def levenshtein(a, b):
    row = list(range(len(b) + 1))
    for i, s in enumerate(a, 1):
        new = [i]
        for j, t in enumerate(b, 1):
            new.append(min(row[j] + 1, new[-1] + 1, row[j - 1] + (s != t)))
        row = new
    return row[-1]


def edit(pairs, normalized=True, ignored=()):
    out = []
    for a, b in pairs:
        a, b = ([t for t in s if t not in ignored] for s in (a, b))
        out.append(levenshtein(a, b) / (len(b) if normalized else 1))
    return np.array(out, "float32")[:, None], np.array([len(out)])


def edit_ragged(x, lengths, label, label_lengths, normalized=True, ignored=None, *_):
    return edit(
        zip(parts(x.reshape(-1), lengths), parts(label.reshape(-1), label_lengths), strict=True),
        normalized,
        ignored or (),
    )


def edit_padded(x, label, normalized=True, ignored=None, x_length=None, label_length=None):
    lengths = [
        np.full(len(t), t.shape[1]) if n is None else n.reshape(-1) for t, n in ((x, x_length), (label, label_length))
    ]
    return edit([(a[:n], b[:m]) for a, b, n, m in zip(x, label, *lengths, strict=True)], normalized, ignored or ())


def ctc(steps, blank):
    """Ids of one sequence of class scores [steps, classes]."""
    best = steps.argmax(1) if len(steps) else []
    return [t for t, before in zip(best, [None, *best], strict=False) if t not in (before, blank)]


def ctc_padded(x, length, blank, padding_value=0):
    found = [ctc(row[:n], blank) for row, n in zip(x, length.reshape(-1), strict=True)]
    ids = [f + [padding_value] * (x.shape[1] - len(f)) for f in found]
    return np.array(ids), np.array([[len(f)] for f in found])


def ctc_ragged(x, lengths, blank):
    found = [ctc(s, blank) for s in parts(x, lengths)]
    ids = [t for f in found for t in f]
    return np.array(ids + [-1] * (len(x) - len(ids)))[:, None], np.array([len(f) for f in found])
