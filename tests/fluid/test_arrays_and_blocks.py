"""Arrays of Variables, DynamicRNN and IfElse, against NumPy."""

import itertools

import numpy as np
import pytest

from polyreme import fluid
from polyreme.errors import ConfigError, ProgramError, ShapeError

L = fluid.layers
R = np.random.RandomState(5)
EPS = np.finfo("float32").eps


def run(script, feed, fetched):
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    return exe.run(feed=feed, fetch_list=fetched, return_numpy=False)


def parameters(script):
    scope = script.global_scope()
    names = [p.name for p in script.default_main_program().all_parameters()]
    return [np.asarray(scope.find_var(n).get_tensor()).copy() for n in names]


def test_an_array_is_written_and_read_inside_a_loop(script):
    """x, tanh(x), tanh(tanh(x)), ... as often as is fed, with a gradient through all of them."""
    x, n = script.data("x", [2, 3], "float32"), script.data("n", [1], "int64")
    x.stop_gradient = False
    i = L.fill_constant([1], "int64", 0)
    array = L.array_write(x, i)
    go = L.less_than(i, n)
    loop = L.While(go, maximum_iterations=4)
    with loop.block():
        new = L.tanh(L.array_read(array, i))
        L.increment(i)
        L.array_write(new, i, array)
        L.less_than(i, n, cond=go)
    last, length = L.array_read(array, i), L.array_length(array)
    (gradient,) = script.backward.gradients([L.reduce_sum(last)], [x])
    rows = R.randn(2, 3).astype("float32")
    exe = script.Executor(script.CPUPlace())
    for count in (3, 1):
        values = exe.run(feed={"x": rows, "n": np.array([count])}, fetch_list=[last, length, gradient])
        want, slope = rows, np.ones_like(rows)
        for _ in range(count):
            want = np.tanh(want)
            slope = slope * (1 - want**2)
        # a few roundings a step
        np.testing.assert_allclose(values[0], want, atol=16 * EPS)
        np.testing.assert_array_equal(values[1], [count + 1])
        np.testing.assert_allclose(values[2], slope, atol=32 * EPS)


def test_an_array_outside_of_loops_is_a_list(script):
    x = script.data("x", [2, 3], "float32")
    i = L.fill_constant([1], "int64", 0)
    array = L.create_array("float32")
    for factor in (1.0, 2.0):
        L.array_write(L.scale(x, factor), i, array)
        L.increment(i)
    joined, sizes = L.tensor_array_to_tensor(array, axis=1)
    stacked, _ = L.tensor_array_to_tensor(array, axis=1, use_stack=True)
    with pytest.raises(ShapeError, match="element 5 of an array of 2"):
        L.array_write(x, L.fill_constant([1], "int64", 5), array)
    with pytest.raises(ShapeError, match="element 2 of an array of 2"):
        L.array_read(array, i)
    rows = R.randn(2, 3).astype("float32")
    values = run(script, {"x": rows}, [joined, sizes, stacked])
    np.testing.assert_array_equal(values[0], np.concatenate([rows, 2 * rows], 1))
    np.testing.assert_array_equal(values[1], [3, 3])
    np.testing.assert_array_equal(values[2], np.stack([rows, 2 * rows], 1))


def test_dynamic_rnn_is_trained_through(script):
    """Its outputs are those of NumPy, of sequences of any length; and SGD moves weights by finite differences."""
    words, init = script.data("words", [None, 3], "float32", lod_level=1), script.data("init", [None, 4], "float32")
    thrice, rnn = L.scale(words, 3.0), L.DynamicRNN()
    with rnn.block():
        word = L.scale(rnn.step_input(words) + rnn.step_input(thrice), 0.25)
        before = rnn.memory(init=init)
        count = rnn.memory(shape=[1], value=1.0)
        hidden = L.fc([word, before], 4, act="tanh", bias_attr=False)
        rnn.update_memory(before, hidden)
        rnn.update_memory(count, L.scale(count, 2.0))
        rnn.output(hidden, count)
    states, counts = rnn()
    loss = L.mean(L.sequence_pool(states, "last"))
    script.optimizer.SGD(1.0).minimize(loss)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    rows, start = R.randn(6, 3).astype("float32"), R.randn(3, 4).astype("float32")

    def by_hand(weight, feedback, cut):
        outs, lasts = [], []
        for n, (a, b) in enumerate(itertools.pairwise(cut)):
            hidden = start[n].astype("float64")
            for t in range(a, b):
                hidden = np.tanh(rows[t] @ weight + hidden @ feedback)
                outs.append(hidden)
            lasts.append(hidden)
        return np.array(outs), np.mean(lasts)

    for lengths in ([2, 3, 1], [1, 1, 4]):
        weights, cut = parameters(script), np.cumsum([0, *lengths])
        feed = {"words": fluid.create_lod_tensor(rows, [lengths], "cpu"), "init": start}
        values = exe.run(feed=feed, fetch_list=[states, counts], return_numpy=False)
        # steps of sums of 7 terms
        np.testing.assert_allclose(np.asarray(values[0]), by_hand(*weights, cut)[0], atol=4 * 7 * 4 * EPS)
        assert values[0].lod() == [cut.tolist()]
        assert np.asarray(values[1])[:, 0].tolist() == [2.0**t for n in lengths for t in range(n)]
        moved = [old - new for old, new in zip(weights, parameters(script), strict=True)]
        for k in (0, 1):
            step = np.zeros_like(weights[k], dtype="float64")
            step[1, 2] = 1e-4
            up, down = (
                by_hand(*[w + sign * step if j == k else w for j, w in enumerate(weights)], cut)[1] for sign in (1, -1)
            )
            np.testing.assert_allclose(moved[k][1, 2], (up - down) / 2e-4, atol=1e-6)


def read_by_hand(weights, rows, asked, lengths, questions):
    """What the reader below gives: states, weights and questions in their places, memories, and the loss."""
    outer, inner = lengths
    words, asked = iter(np.split(rows, np.cumsum(inner)[:-1])), np.split(asked, np.cumsum(questions)[:-1])
    states, shares, again, memories, lasts = [np.zeros((0, 2))], [], [], [], []
    for count, question in zip(outer, asked, strict=True):
        memory = np.zeros(2)
        for paragraph in (next(words) for _ in range(count)):
            memories.append(memory)
            hidden, seen = memory, [np.zeros((0, 2))]
            for word in paragraph:
                hidden = np.tanh(word @ weights[0] + hidden @ weights[1])
                seen.append(hidden[None])
            states += seen
            again.append(question)
            lasts.append(seen[-1].sum(0))
            share = np.exp(paragraph.sum(1))
            shares.append(share / share.sum())
            memory = np.concatenate(seen).sum(0) / max(len(paragraph), 1) + question.sum(0)
    return [np.concatenate(states), np.concatenate(shares), np.concatenate(again), np.array(memories), np.mean(lasts)]


@pytest.mark.slow_cases("op by op")
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "op by op"])
def test_a_reader_walks_the_paragraphs_of_documents_and_their_words(script, compiled):
    """As models of reading comprehension do: each paragraph's words, read by a recurrence of their own, and its
    question again, are sequences of sequences; and SGD moves weights by finite differences."""
    docs = script.data("docs", [None, 3], "float32", lod_level=2)
    question = script.data("question", [None, 2], "float32", lod_level=1)
    rnn = L.DynamicRNN()
    with rnn.block():
        words, asked = rnn.step_input(docs), rnn.static_input(question)
        before, reader = rnn.memory(shape=[2]), L.DynamicRNN()
        with reader.block():
            word, state = reader.step_input(words), reader.memory(init=before)
            new = L.fc([word, state], 2, act="tanh", bias_attr=False)
            reader.update_memory(state, new)
            reader.output(new)
        read = reader()
        rnn.update_memory(before, L.sequence_pool(read, "average") + L.sequence_pool(asked, "sum"))
        rnn.output(read, L.sequence_softmax(L.reduce_sum(words, 1, keep_dim=True)), asked, before)
    loss = L.mean(L.sequence_pool(rnn()[0], "last"))
    script.optimizer.SGD(1.0).minimize(loss)
    fetched = rnn() if compiled else [*rnn(), L.where(L.less_than(docs, docs))]
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    # with a document without paragraphs, and a paragraph without words
    for lengths, questions in (([[2, 0, 3], [2, 3, 1, 0, 2]], [2, 1, 1]), ([[1, 2], [1, 4, 3]], [3, 1])):
        rows, asked = (R.randn(sum(n), k).astype("float32") for n, k in ((lengths[1], 3), (questions, 2)))
        weights = parameters(script)
        feed = {
            "docs": fluid.create_lod_tensor(rows, lengths, "cpu"),
            "question": fluid.create_lod_tensor(asked, [questions], "cpu"),
        }
        values = exe.run(feed=feed, fetch_list=fetched, return_numpy=False)
        *want, _ = read_by_hand(weights, rows, asked, lengths, questions)
        again = [n for n, count in zip(questions, lengths[0], strict=True) for _ in range(count)]
        for value, by_hand, inner in zip(values, want, (lengths[1], lengths[1], again, None), strict=False):
            # up to 8 steps of sums of 7 terms
            np.testing.assert_allclose(np.asarray(value).reshape(by_hand.shape), by_hand, atol=8 * 7 * 4 * EPS)
            assert value.recursive_sequence_lengths() == [lengths[0], *([] if inner is None else [inner])]
        for k, (old, new) in enumerate(zip(weights, parameters(script), strict=True)):
            step = np.zeros(old.shape)
            step[1, 1] = 1e-4
            up, down = (
                read_by_hand(
                    [w + s * step if j == k else w for j, w in enumerate(weights)], rows, asked, lengths, questions
                )[-1]
                for s in (1, -1)
            )
            np.testing.assert_allclose((old - new)[1, 1], (up - down) / 2e-4, atol=1e-6)


@pytest.mark.slow
def test_a_decoder_attends_to_whole_sentences(script):
    """Machine translation as 1.x's book writes it: each step pools the source's rows by what they say to its state."""
    source, target, label = (script.data(n, [None, 1], "int64", lod_level=1) for n in ("source", "target", "label"))
    encoded, _ = L.dynamic_lstm(L.fc(L.embedding(source, [20, 8]), 32, bias_attr=False), 32)
    projected, words = L.fc(encoded, 8, bias_attr=False), L.embedding(target, [20, 8])
    start = L.fc(L.sequence_first_step(encoded), 8, act="tanh")
    rnn = L.DynamicRNN()
    with rnn.block():
        word = rnn.step_input(words)
        rows, keys = rnn.static_input(encoded), rnn.static_input(projected)
        hidden = rnn.memory(init=start, need_reorder=True)
        cell = rnn.memory(shape=[8], value=0.0)
        asked = L.sequence_expand(L.fc(hidden, 8, bias_attr=False), keys)
        weight = L.sequence_softmax(L.fc(L.concat([keys, asked], 1), 1, act="tanh", bias_attr=False))
        seen = L.sequence_pool(L.elementwise_mul(rows, L.reshape(weight, [-1]), axis=0), "sum")
        new, new_cell = L.lstm_unit(L.concat([seen, word], 1), hidden, cell)
        rnn.update_memory(hidden, new)
        rnn.update_memory(cell, new_cell)
        rnn.output(L.fc(new, 20, act="softmax"))
    loss = L.mean(L.cross_entropy(rnn(), label))
    script.optimizer.SGD(2.0).minimize(loss)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    ids = {n: R.randint(0, 20, (9, 1)) for n in ("source", "target", "label")}
    feed = {n: fluid.create_lod_tensor(v, [[3, 2, 4] if n == "source" else [2, 4, 3]], "cpu") for n, v in ids.items()}
    losses = [exe.run(feed=feed, fetch_list=[loss])[0].item() for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(20), abs=0.3)
    assert losses[-1] < 0.8 * losses[0]


def test_what_a_dynamic_rnn_refuses(script):
    words = script.data("words", [None, 3], "float32", lod_level=1)
    rnn = L.DynamicRNN()
    with pytest.raises(ProgramError, match="call it inside"):
        rnn.step_input(words)
    with pytest.raises(ProgramError, match="call step_input first"), rnn.block():
        rnn.memory(shape=[2])
    other = L.DynamicRNN()
    with pytest.raises(ConfigError, match="level=1"), other.block():
        other.step_input(words, level=1)
    deep = L.DynamicRNN()
    with pytest.raises(ConfigError, match="walk the innermost or the one above it"), deep.block():
        deep.step_input(script.data("books", [None, 3], "float32", lod_level=3))
    anew = L.DynamicRNN()
    with pytest.raises(ProgramError, match="neither a step input's nor a static input's"), anew.block():
        anew.output(L.lod_reset(anew.step_input(words), target_lod=[0, 1]))
    third = L.DynamicRNN()
    with pytest.raises(ProgramError, match="compute it in front of it"), third.block():
        third.memory(init=L.scale(third.step_input(words), 2.0))
    again = L.DynamicRNN()
    with pytest.raises(ProgramError, match="an update_memory for each memory"), again.block():
        again.output(again.step_input(words), again.memory(shape=[2]))


def test_if_else_takes_rows_apart_and_together(script):
    x = script.data("x", [None, 2], "float32")
    choice = L.IfElse(L.less_than(L.reduce_sum(x, 1, keep_dim=True), L.fill_constant([1], "float32", 0.0)))
    with choice.true_block():
        rows = choice.input(x)
        # of all rows of the block: those of the other have no part in it
        choice.output(L.elementwise_sub(rows, L.reduce_mean(rows, 0, keep_dim=True)))
    with choice.false_block():
        choice.output(choice.input(x))
    (out,) = choice()
    rows = np.array([[1, 2], [-3, 1], [4, 0], [-5, -1]], "float32")
    (values,) = run(script, {"x": rows}, [out])
    np.testing.assert_array_equal(values, [[1, 2], [1, 1], [4, 0], [-1, -1]])
    with pytest.raises(ProgramError, match="call it inside"):
        choice.input(x)
    with pytest.raises(ProgramError, match="true_block gives 0 outputs"):
        L.IfElse(L.less_than(x[:, :1], x[:, 1:]))()
