"""Sequence layers in Programs: fed LoDTensors of different lengths, against NumPy and against training by hand."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import static
from polyreme.conformance import _sequence_reference as ref
from polyreme.core import unique_name
from polyreme.core.op import OPS
from polyreme.errors import ConfigError, DTypeError, ProgramError, ShapeError
from polyreme.fluid import create_lod_tensor, layers
from polyreme.sequences import lod

F32 = float(np.finfo("float32").eps)
FEEDS = [[2, 0, 3], [1, 4, 2]]


@pytest.fixture
def program():
    """The main Program in force; ops are recorded."""
    main, startup = static.Program(), static.Program()
    with unique_name.guard(), static.program_guard(main, startup), static.scope_guard(static.Scope()):
        paddle.enable_static()
        try:
            yield main
        finally:
            paddle.disable_static()


def sequences(name, width=2, dtype="float32", levels=1):
    return static.data(name, [None, width], dtype, lod_level=levels)


def fed(lengths, width=2, seed=0):
    rows = np.random.default_rng(seed).standard_normal((sum(lengths), width)).astype("float32")
    return create_lod_tensor(rows, [lengths], "cpu")


def ids(lengths, high, seed=0):
    rows = np.random.default_rng(seed).integers(0, high, (sum(lengths), 1))
    return create_lod_tensor(rows, [lengths], "cpu")


def start():
    exe = static.Executor()
    exe.run(static.default_startup_program())
    return exe


def fetch(exe, what, feed):
    return lod.run(exe, None, feed, what, return_numpy=False)


def close(got, want, terms=16):
    np.testing.assert_allclose(np.asarray(got), want, atol=4 * terms * F32, rtol=4 * terms * F32)


def values(*names):
    return [np.asarray(static.global_scope().find_var(n).get_tensor()) for n in names]


# a small model


def sentiment():
    """(loss, logits, convolution): embedding, convolution over each text, its maximum, a linear layer."""
    words = static.data("words", [None, 1], "int64", lod_level=1)
    label = static.data("label", [None, 1], "int64")
    embedded = paddle.nn.Embedding(9, 4)(words).reshape([-1, 4])
    convolved = layers.sequence_conv(embedded, 6, filter_size=3, act="tanh")
    logits = paddle.nn.Linear(6, 2)(layers.sequence_pool(convolved, "max"))
    return paddle.nn.functional.cross_entropy(logits, label).mean(), logits, convolved


def by_hand(texts, label):
    """The same loss, run as it is called, with the parameters in scope as leaves that want gradients."""
    names = ["embedding_0.w_0", "sequence_conv_0.w_0", "sequence_conv_0.b_0", "linear_0.w_0", "linear_0.b_0"]
    leaves = {n: paddle.to_tensor(v, stop_gradient=False) for n, v in zip(names, values(*names), strict=True)}
    table, kernel, bias, weight, offset = leaves.values()
    cut = paddle.to_tensor(np.array(texts.recursive_sequence_lengths()[0]))
    embedded = paddle.nn.functional.embedding(paddle.to_tensor(texts.numpy().reshape(-1)), table)
    convolved = paddle.tanh(OPS["sequence_conv"](embedded, cut, kernel) + bias)
    logits = OPS["sequence_pool"](convolved, cut, "max") @ weight + offset
    loss = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(label)).mean()
    loss.backward()
    return loss.item(), logits.numpy(), {n: t.grad.numpy() for n, t in leaves.items()}


@pytest.mark.slow
def test_a_small_model_is_trained_as_by_hand(program):
    paddle.seed(1)  # the loss falls as far from most values, not from all
    loss, logits, convolved = sentiment()
    assert convolved.lod_level == 1
    assert logits.lod_level == 0
    paddle.optimizer.SGD(0.5).minimize(loss)
    exe = start()
    texts, label = [ids(n, 9, seed=i) for i, n in enumerate(FEEDS)], np.array([[0], [1], [1]])
    losses = []
    for step in range(12):
        text = texts[step % 2]
        paddle.disable_static()
        want_loss, want_logits, gradients = by_hand(text, label)
        before = values(*gradients)
        paddle.enable_static()
        got_loss, got_logits, rows = fetch(exe, [loss, logits, convolved], {"words": text, "label": label})
        close(got_loss, want_loss)
        close(got_logits, want_logits)
        assert rows.lod() == text.lod()
        for name, old, new in zip(gradients, before, values(*gradients), strict=True):
            close(new, old - 0.5 * gradients[name])
        losses.append(want_loss)
    assert losses[-1] < 0.5 * losses[1]
    assert losses[-2] < 0.5 * losses[0]


# layer by layer


def test_layers_without_parameters_are_those_of_numpy(program):
    x, y, one = sequences("x"), sequences("y"), sequences("one", 1)
    words = sequences("words", 1, "int64")
    whole = layers.sequence_pool(x, "sum")
    padded, length = layers.sequence_pad(x, 7.0)
    names = {
        "pool": layers.sequence_pool(x, "average", pad_value=3.0),
        "first": layers.sequence_first_step(x),
        "last": layers.sequence_last_step(x),
        "softmax": layers.sequence_softmax(one),
        "reverse": layers.sequence_reverse(x),
        "enumerate": layers.sequence_enumerate(words, 2, 9),
        "pad": padded,
        "length": length,
        "wider": layers.sequence_pad(x, 0.0, maxlen=6)[0],
        "mask": layers.sequence_mask(length),
        "unpad": layers.sequence_unpad(padded * 2, length),
        "expand": layers.sequence_expand(whole, x),
        "expand_as": layers.sequence_expand_as(whole, y),
        "concat": layers.sequence_concat([x, y]),
        "reshape": layers.sequence_reshape(x, 1),
        "scatter": layers.sequence_scatter(static.data("dense", [None, 5]), words, one),
        "reset": layers.sequence_pool(layers.lod_reset(x, y), "sum"),
        "kept": layers.sequence_pool(layers.lod_reset(x, target_lod=[0, 5]), "sum"),
    }
    exe = start()
    for lengths in ([2, 0, 3], [1, 3, 1]):
        cut = np.array(lengths)
        feed = {"x": fed(lengths), "y": fed([1, 2, 2], seed=1), "one": fed(lengths, 1), "words": ids(lengths, 5)}
        feed["dense"] = np.ones((3, 5), "float32")
        a, b, c, w = (np.asarray(feed[k]) for k in ("x", "y", "one", "words"))
        other = np.array([1, 2, 2])
        pooled, longest = ref.pool(a, cut, "sum"), max(lengths)
        want = {
            "pool": (ref.pool(a, cut, "average", 3.0), None),
            "first": (ref.pool(a, cut, "first"), None),
            "last": (ref.pool(a, cut, "last"), None),
            "softmax": (ref.softmax(c, cut), cut),
            "reverse": (ref.reverse(a, cut), cut),
            "enumerate": (ref.enumerate_ids(w, cut, 2, 9), cut),
            "pad": (ref.pad(a, cut, 7.0)[0], None),
            "length": (np.array(lengths), None),
            "wider": (ref.pad(a, cut, 0.0, 6)[0], None),
            "mask": (np.arange(longest) < np.array(lengths)[:, None], None),
            "unpad": (2 * a, cut),
            "expand": (np.repeat(pooled, lengths, 0), None),
            "expand_as": (np.repeat(pooled, [1, 2, 2], 0), other),
            "concat": ref.concat([a, b], [cut, other]),
            "reshape": (a.reshape(-1, 1), 2 * cut),
            "scatter": (ref.scatter(feed["dense"], w, c, cut), None),
            "reset": (ref.pool(a, other, "sum"), None),
            "kept": (a.sum(0, keepdims=True), None),
        }
        for name, got in zip(names, fetch(exe, list(names.values()), feed), strict=True):
            close(got, want[name][0])
            assert got.recursive_sequence_lengths() == ([] if want[name][1] is None else [want[name][1].tolist()]), name


@pytest.mark.slow
def test_layers_with_parameters_are_those_of_numpy(program):
    x, tags = sequences("x", 12), sequences("tags", 1, "int64")
    few, start_h = sequences("few", 3), static.data("h", [None, 3])
    hidden, cell = layers.dynamic_lstm(x, 12, h_0=start_h, c_0=start_h, is_reverse=True)
    projected, _ = layers.dynamic_lstmp(x, 12, 2, proj_clip=0.4)
    state = layers.dynamic_gru(x[:, :9], 3)
    cost = layers.linear_chain_crf(few, tags, param_attr="crf")
    path = layers.crf_decoding(few, "crf")
    right = layers.crf_decoding(few, "crf", label=tags)
    near = layers.row_conv(few, 2, act="relu")
    distance, count = layers.edit_distance(tags, path, normalized=False)
    decoded = layers.ctc_greedy_decoder(few, blank=2)
    wanted = [hidden, cell, projected, state, cost, path, right, near, distance, count, decoded]
    exe = start()
    names = ["lstm_0.w_0", "lstm_0.b_0", "lstmp_0.w_0", "lstmp_0.b_0", "lstmp_0.w_1", "gru_0.w_0", "gru_0.b_0", "crf"]
    lw, lb, pw, pb, projection, gw, gb, crf, row = values(*names, "row_conv_0.w_0")
    for lengths in FEEDS:
        cut = np.array(lengths)
        feed = {"x": fed(lengths, 12), "tags": ids(lengths, 3), "few": fed(lengths, 3, seed=1)}
        feed["h"] = np.random.default_rng(2).standard_normal((3, 3)).astype("float32")
        a, t, f = (np.asarray(feed[k]) for k in ("x", "tags", "few"))
        best = ref.crf_decode(f, cut, crf)
        decoded_ids, decoded_cut = ref.ctc_ragged(f, cut, 2)
        want = [
            *ref.lstm(a, cut, lw, lb, feed["h"], feed["h"], is_reverse=True),
            ref.lstm(a, cut, pw, pb, projection=projection, proj_clip=0.4)[0],
            ref.gru(a[:, :9], cut, gw, gb),
            ref.crf(f, cut, crf, t),
            best,
            (best == t).astype("int64"),
            np.maximum(ref.row_conv(f, cut, row), 0),
            *ref.edit_ragged(t, cut, best, cut, False),
            decoded_ids[: decoded_cut.sum()],
        ]
        got = fetch(exe, wanted, feed)
        for g, w in zip(got, want, strict=True):
            close(g, w, terms=64)
        assert [bool(g.lod()) for g in got] == [True] * 4 + [False] + [True] * 3 + [False] * 2 + [True]
        assert got[-1].recursive_sequence_lengths() == [decoded_cut.tolist()]


def test_padded_labels_and_their_lengths_give_the_same_as_sequences(program):
    lengths, cut = [2, 1, 3], np.array([2, 1, 3])
    x, tags = (static.data(n, [3, 4, *s], d) for n, s, d in (("x", [3], "float32"), ("tags", [], "int64")))
    length = static.data("length", [3], "int64")
    cost = layers.linear_chain_crf(x, tags, param_attr="crf", length=length)
    path = layers.crf_decoding(x, "crf", length=length)
    distance, _ = layers.edit_distance(tags, path, input_length=length, label_length=length)
    decoded, count = layers.ctc_greedy_decoder(x, 2, input_length=length, padding_value=-1)
    rows, t = fed(lengths, 3).numpy(), ids(lengths, 3).numpy()
    feed = {"x": ref.pad(rows, cut, 9.0, 4)[0], "tags": ref.pad(t, cut, 0, 4)[0][:, :, 0], "length": np.array(lengths)}
    exe = start()
    (crf,) = values("crf")
    got = [np.asarray(g) for g in lod.run(exe, None, feed, [cost, path, distance, decoded, count])]
    best = ref.crf_decode(rows, cut, crf)
    close(got[0], ref.crf(rows, cut, crf, t))
    close(got[1], ref.pad(best, cut, 0, 4)[0][:, :, 0])
    close(got[2], ref.edit_ragged(t, cut, best, cut)[0])
    for g, w in zip(got[3:], ref.ctc_padded(feed["x"], feed["length"], 2, -1), strict=True):
        close(g, w)


def test_gru_and_lstm_units_equal_numpy(program):
    x, h = static.data("x", [None, 4]), static.data("h", [None, 2])
    new, reset, gates = layers.gru_unit(x[:, :3].matmul(paddle.ones([3, 6])), h, 6)
    hidden, cell = layers.lstm_unit(x, h, h, forget_bias=1.0)
    exe = start()
    gw, gb, lw, lb = values("gru_unit_0.w_0", "gru_unit_0.b_0", "fc_0.w_0", "fc_0.b_0")
    a, b = (np.random.default_rng(0).standard_normal((3, n)).astype("float32") for n in (4, 2))
    got = lod.run(exe, None, {"x": a, "h": b}, [new, reset, gates, hidden, cell])
    i, f, o, c = np.split(np.concatenate([a, b], 1) @ lw + lb, 4, 1)
    gate = ref.ACTIVATIONS["sigmoid"]
    cells = gate(f + 1) * b + gate(i) * np.tanh(c)
    want = [*ref.gru_unit(a[:, :3] @ np.ones((3, 6), "float32"), b, gw, gb), gate(o) * np.tanh(cells), cells]
    for g, w in zip(got, want, strict=True):
        close(g, w, terms=64)


def test_sizes_that_only_values_tell_run_op_by_op(program, caplog):
    x, y = sequences("x"), sequences("y")
    offset, length = (static.data(n, [None, 1], "int64") for n in ("offset", "length"))
    part = layers.sequence_slice(x, offset, length)
    copies = layers.sequence_expand(x, y)
    back = layers.sequence_unpad(layers.sequence_pad(x, 0.0)[0], length)
    derived, _ = layers.sequence_pad(layers.sequence_concat([x, y]), 0.0)
    total = layers.sequence_pool(copies, "sum").sum()
    a, b = fed([2, 1, 3]), fed([1, 0, 2], seed=1)
    cut = np.array([2, 1, 3])
    feed = {"x": a, "y": b, "offset": np.array([[1], [0], [1]]), "length": np.array([[1], [1], [2]])}
    got = fetch(start(), [part, copies, back, derived, total], feed)
    rows, lengths = a.numpy(), feed["length"][:, 0]
    expanded = ref.expand(rows, cut, np.array([1, 0, 2]))
    want = [
        (ref.cut(rows, cut, feed["offset"], feed["length"]), lengths),
        expanded,
        (ref.unpad(ref.pad(rows, cut)[0], lengths), lengths),
        (ref.pad(*ref.concat([rows, b.numpy()], [cut, np.array([1, 0, 2])]))[0], None),
        (expanded[0].sum(), None),
    ]
    for g, (value, many) in zip(got, want, strict=True):
        close(g, value)
        assert g.recursive_sequence_lengths() == ([] if many is None else [many.tolist()])
    assert "operation by operation" in caplog.text


def test_windows_of_images_are_sequences(program):
    """Window for window; of two images [2, 3, 4], PaddlePaddle 3.3.1's im2sequence gives these sums and lengths."""
    image = static.data("image", [None, 2, 3, 4])
    rows = layers.im2sequence(image, [2, 2], [1, 2], [1, 0, 0, 1])
    pooled = layers.sequence_pool(rows, "sum")
    value = np.arange(48, dtype="float32").reshape(2, 2, 3, 4)
    got, sums = fetch(start(), [rows, pooled], {"image": value})
    assert got.recursive_sequence_lengths() == [[6, 6]]
    assert got.numpy().sum(0).tolist() == [120, 128, 204, 216, 216, 224, 348, 360]
    wide = np.pad(value, [(0, 0), (0, 0), (1, 0), (0, 1)])
    want = [wide[n, :, i : i + 2, j : j + 2].ravel() for n in range(2) for i in range(3) for j in (0, 2)]
    np.testing.assert_array_equal(got, want)
    close(sums, np.reshape(want, (2, 6, 8)).sum(1))


# how the division travels


def test_rows_hand_their_sequences_on_and_nothing_else_does(program):
    x = sequences("x", 4)
    weight = paddle.ones([4, 3])
    having = [
        paddle.nn.functional.relu(x),
        x @ weight,
        x.reshape([-1, 2, 2]),
        x + 1,
        x[:, 0],
        paddle.concat([x, x], 1),
        x.sum(1),
    ]
    lacking = [x.sum(0), x.transpose([1, 0]), paddle.concat([x, x]), x[1:], x.reshape([-1, 2]), weight]
    lacking.append(paddle.gather(x, static.data("at", [None], "int64")))
    assert [len(lod.lod_of(v)) for v in having] == [1] * len(having)
    assert [len(lod.lod_of(v)) for v in lacking] == [0] * len(lacking)
    pooled = layers.sequence_pool(having[1], "sum")
    assert lod.lod_of(pooled * 2) == ()
    assert lod.lod_of(program.clone().global_block().vars[having[0].name])[0].name == "x@LOD0"


def test_two_levels_are_pooled_from_the_inside(program):
    x = sequences("x", levels=2)
    inner = layers.sequence_pool(x, "sum")
    outer = layers.sequence_pool(inner, "max")
    rows = static.data("rows", [None, 1])
    twice = layers.sequence_expand(rows, x, ref_level=0)
    appended = layers.lod_append(layers.lod_reset(rows, target_lod=[0, 2]), [0, 1, 2])
    assert [inner.lod_level, outer.lod_level, twice.lod_level, appended.lod_level] == [1, 0, 0, 2]
    value = np.arange(12, dtype="float32").reshape(6, 2)
    tensor = create_lod_tensor(value, [[2, 1], [2, 0, 4]], "cpu")
    got = fetch(start(), [inner, outer, twice], {"x": tensor, "rows": np.float32([[1], [2]])})
    sums = ref.pool(value, np.array([2, 0, 4]), "sum")
    close(got[0], sums)
    assert got[0].lod() == [[0, 2, 3]]
    close(got[1], ref.pool(sums, np.array([2, 1]), "max"))
    close(got[2], np.float32([[1], [1], [2]]))


def test_what_is_fetched_as_an_array_has_no_sequences(program):
    x = sequences("x")
    with pytest.raises(ProgramError, match=r"fetch_list: \['x'\] have sequences"):
        lod.run(start(), None, {"x": fed([2])}, "x")
    with pytest.raises(ProgramError, match="'x' has lod_level 1, the value 0 levels"):
        fetch(start(), [x], {"x": fed([2]).numpy()})


# what is refused


def wrong_calls():
    x, dense = "x", "dense"
    return {
        "no sequences": (lambda v: layers.sequence_pool(v[dense], "sum"), ProgramError, "'dense' .* has no sequences"),
        "no Variable": (
            lambda v: layers.sequence_reverse(np.ones(2)),
            ProgramError,
            "takes Variables of a Program, got",
        ),
        "two levels": (lambda v: layers.sequence_pad(v["deep"], 0.0), ProgramError, "'deep' has 2 levels"),
        "stride": (lambda v: layers.sequence_conv(v[x], 2, filter_stride=2), ConfigError, "filter_stride=2"),
        "act": (lambda v: layers.sequence_conv(v[x], 2, act="rleu"), ConfigError, "did you mean 'relu'"),
        "ref_level": (lambda v: layers.sequence_expand(v[dense], v[x], 1), ConfigError, "ref_level=1 of 1 levels"),
        "list": (lambda v: layers.sequence_concat(v[x]), TypeError, "takes a list of Variables, got Variable"),
        "both": (lambda v: layers.lod_reset(v[x]), ConfigError, "give y or target_lod"),
        "target_lod": (lambda v: layers.lod_reset(v[x], target_lod=[0, 3, 2]), ShapeError, r"target_lod=\[0, 3, 2\]"),
        "values": (lambda v: layers.lod_reset(v[x], v[dense]), ShapeError, "no list of offsets"),
        "size": (lambda v: layers.dynamic_lstm(v[x], 12), ShapeError, "size=12 for input"),
        "dtype": (lambda v: layers.dynamic_lstm(v[x], 4, dtype="float64"), DTypeError, "dtype='float64'"),
        "one state": (lambda v: layers.dynamic_lstm(v[x], 4, h_0=v[dense]), ConfigError, "both h_0 and c_0"),
        "no bias": (lambda v: layers.dynamic_lstm(v[x], 4, bias_attr=False), ConfigError, "are not False"),
        "no weight": (
            lambda v: layers.dynamic_gru(v["wide"], 2, param_attr=False),
            ConfigError,
            "False; it has",
        ),
        "step": (
            lambda v: layers.lstm_unit(v[x], v[dense], v["wide"]),
            ShapeError,
            r"hidden \[-1, 4\], cell",
        ),
        "crf": (lambda v: layers.linear_chain_crf(v[x], v[x], False), ConfigError, "param_attr=False"),
        "unnamed": (lambda v: layers.crf_decoding(v[x], "w"), ProgramError, "'w' names no parameter"),
        "sizes": (lambda v: layers.im2sequence(v[x], 2, out_stride=2), ConfigError, "out_stride=2 cannot be honoured"),
        "no height": (lambda v: layers.im2sequence(v["image"], 2), ShapeError, "give data the height and width"),
        "one length": (
            lambda v: layers.edit_distance(v[x], v[x], input_length=v[x]),
            ConfigError,
            "both input_length",
        ),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_what_cannot_be_done_is_refused(program, name):
    call, error, match = wrong_calls()[name]
    made = {"x": sequences("x", 4), "wide": sequences("wide", 6), "deep": sequences("deep", levels=2)}
    made |= {"image": static.data("image", [None, 3, None, 4]), "dense": static.data("dense", [None, 4])}
    with pytest.raises(error, match=match):
        call(made)


def test_a_program_that_was_copied_or_written_divides_as_before(program):
    x = sequences("x")
    padded, length = layers.sequence_pad(x, 0.0)
    back = layers.sequence_unpad(padded * 3, length)
    pooled = layers.sequence_pool(back, "sum") * 1
    feed, exe = {"x": fed([2, 3])}, start()
    read = static.Program.parse_from_string(program.serialize_to_string())
    for other in (program.clone(for_test=True), read):
        got = lod.run(exe, other, feed, [back.name, pooled.name], return_numpy=False)
        assert [g.lod() for g in got] == [[[0, 2, 5]], []]
        close(got[0], 3 * feed["x"].numpy())
        close(got[1], 3 * ref.pool(feed["x"].numpy(), [2, 3], "sum"))
