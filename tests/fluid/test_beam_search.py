"""Beam search in a While over arrays that grow, against every sentence there is and what PaddlePaddle gives."""

import itertools

import numpy as np
import pytest

import polyreme as paddle
from polyreme import fluid
from polyreme.errors import ConfigError, ProgramError, ShapeError
from polyreme.sequences.beams import best_continuations

L = fluid.layers
END, WORDS, STEPS = 0, 3, 3
EPS = np.finfo("float32").eps


def offsets(*levels):
    return [paddle.to_tensor(np.concatenate([[0], np.cumsum(level)])) for level in levels]


PREFIXES = ([[3], [9], [6], [7]], [[0.5], [0.9], [0.6], [0.3]])
CANDIDATES = (
    [[5, 0, 3], [3, 7, 3], [5, 2, 4], [7, 6, 8]],
    [[0.96, 0.38, 0.79], [0.53, 0.57, 0.93], [0.07, 0.09, 0.02], [0.83, 0.78, 0.87]],
)
# what PaddlePaddle 3.3.1's op gave: ids, rows of their prefixes, offsets of level 1
STEP_CASES = {
    "an ended prefix stays": (PREFIXES, CANDIDATES, [2, 2], [5, 9, 8, 7], [0, 1, 3, 3], [0, 1, 2, 2, 4]),
    "a source that has ended has no rows": (
        ([[9], [9], [6], [7]], [[5.0], [4.0], [0.6], [0.3]]), CANDIDATES, [2, 2], [8, 7], [3, 3], [0, 0, 0, 0, 2],
    ),
    "of equal ones a later prefix first": (
        ([[1], [2]], [[0.0], [0.0]]), ([[3, 4], [5, 6]], [[1.0, 1.0], [1.0, 1.0]]), [2], [5, 6], [1, 1], [0, 0, 2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEP_CASES)
def test_a_step_chooses_as_paddlepaddle_does(name):
    (before, had), (ids, scores), sources, words, parents, level = STEP_CASES[name]
    given = [paddle.to_tensor(np.array(v, t)) for v, t in ((before, "int64"), (had, "float32"), (ids, "int64"))]
    values = np.array(scores, "float32")
    cuts = offsets(sources, [1] * len(before))
    found = best_continuations(*given, paddle.to_tensor(values), cuts, 2, 9, True)
    assert [np.asarray(found[i]).reshape(-1).tolist() for i in (0, 2, 4)] == [words, parents, level]


def every_sentence(first, chances):
    """The log probability of each sentence that ends, or has STEPS words after the first one."""
    sentences = {}
    for length in range(1, STEPS + 1):
        for words in itertools.product(range(WORDS), repeat=length):
            ended = words[-1] == END
            if END in words[:-1] or not (ended or length == STEPS):
                continue
            steps = zip((first, *words), words, strict=False)
            sentences[first, *words] = sum(np.log(chances[a, b]) for a, b in steps)
    return sentences


def decoder(fluid, chances, carried):
    """The loop of the guide's translation chapter; carried: sequences that go along with their prefixes."""
    table = fluid.ParamAttr(initializer=fluid.initializer.NumpyArrayInitializer(chances))
    count, i = L.fill_constant([1], "int64", STEPS), L.zeros([1], "int64")
    ids = L.array_write(fluid.data("ids", [None, 1], "int64", lod_level=2), i)
    scores = L.array_write(fluid.data("scores", [None, 1], "float32", lod_level=2), i)
    state = L.array_write(L.sequence_pool(carried, "sum"), i)
    go = L.less_than(i, count)
    loop = L.While(go)
    with loop.block():
        word, had, so_far = L.array_read(ids, i), L.array_read(scores, i), L.array_read(state, i)
        # a state of each prefix that says which sentence it belongs to, computed anew and kept in an array
        pooled = L.sequence_pool(carried, "sum")
        off = L.reduce_sum(L.abs(pooled - so_far), dim=1, keep_dim=True)
        chance = L.embedding(word, [WORDS, WORDS], param_attr=table)
        best, which = L.topk(chance, k=WORDS)
        total = L.elementwise_add(L.log(best), L.reshape(had + off, [-1]), axis=0)
        chosen, value = L.beam_search(word, had, which, L.lod_reset(total, had), WORDS**STEPS, END)
        L.increment(i)
        L.array_write(chosen, i, ids)
        L.array_write(value, i, scores)
        L.array_write(L.sequence_expand(so_far, chosen), i, state)
        L.assign(L.sequence_expand(carried, chosen), carried)
        alive = L.logical_not(L.is_empty(chosen))
        L.logical_and(L.less_than(i, count), alive, out=go)
    return L.beam_search_decode(ids, scores, WORDS**STEPS, END)


def test_a_beam_as_wide_as_all_sentences_finds_every_one(script, tmp_path):
    chances = np.random.RandomState(1).dirichlet(np.ones(WORDS), WORDS).astype("float32")
    source = fluid.data("source", [None, 2], "float32", lod_level=1)
    carried = L.scale(source, 1.0)
    translations, scores_of_words = decoder(script, chances, carried)
    still = L.sequence_pool(source, "sum")  # what shares its sequences with what the loop divided anew
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    lods = [[1, 1], [1, 1]]
    rows = np.random.RandomState(2).randn(5, 2).astype("float32")
    feed = {
        "source": fluid.create_lod_tensor(rows, [[2, 3]], "cpu"),
        "ids": fluid.create_lod_tensor(np.array([[1], [2]]), lods, "cpu"),
        "scores": fluid.create_lod_tensor(np.zeros((2, 1), "float32"), lods, "cpu"),
    }
    words, scores, sums = exe.run(feed=feed, fetch_list=[translations, scores_of_words, still], return_numpy=False)
    sources, lengths = words.recursive_sequence_lengths()
    cuts = np.cumsum(lengths)
    sentences = [tuple(s.tolist()) for s in np.split(np.asarray(words), cuts[:-1])]
    values = np.asarray(scores)[cuts - 1]
    for first, mine in zip((1, 2), np.split(np.arange(len(cuts)), np.cumsum(sources)[:-1]), strict=True):
        expected = every_sentence(first, chances)
        assert {sentences[i] for i in mine} == set(expected)
        assert (np.diff(values[mine]) <= 0).all()
        # a logarithm and a sum a word, of values up to 8
        np.testing.assert_allclose(values[mine], [expected[sentences[i]] for i in mine], atol=8 * 4 * STEPS * EPS)
    np.testing.assert_allclose(np.asarray(sums), [rows[:2].sum(0), rows[2:].sum(0)], atol=8 * EPS)
    script.io.save_inference_model(str(tmp_path), list(feed), [translations], exe)
    with script.scope_guard(script.Scope()):
        program, names, fetched = script.io.load_inference_model(str(tmp_path), exe)
        (again,) = exe.run(program, {n: feed[n] for n in names}, fetched, return_numpy=False)
    assert (np.asarray(again).tolist(), again.lod()) == (np.asarray(words).tolist(), words.lod())


def test_an_array_without_a_bound_grows_and_hands_gradients_on(script):
    x, n = script.data("x", [2, 3], "float32"), script.data("n", [1], "int64")
    x.stop_gradient = False
    i = L.fill_constant([1], "int64", 0)
    array = L.array_write(x, i)
    go = L.less_than(i, n)
    with L.While(go).block():
        again = L.concat([L.array_read(array, i)] * 2, 0)  # twice as many rows at each step
        L.increment(i)
        L.array_write(L.scale(again, 0.5), i, array)
        L.less_than(i, n, cond=go)
    last, length = L.array_read(array, i), L.array_length(array)
    every, sizes = L.tensor_array_to_tensor(array, axis=0)
    (gradient,) = script.backward.gradients([L.reduce_sum(every)], [x])
    rows = np.arange(6, dtype="float32").reshape(2, 3)
    exe = script.Executor(script.CPUPlace())
    results = exe.run(feed={"x": rows, "n": np.array([3])}, fetch_list=[last, length, sizes, gradient])
    np.testing.assert_array_equal(results[0], np.tile(rows / 8, (8, 1)))
    assert [v.tolist() for v in results[1:3]] == [[4], [2, 4, 8, 16]]
    np.testing.assert_array_equal(results[3], np.full((2, 3), 4.0))  # of each element 1: 2**k copies of 0.5**k


def bounded(script, limit, steps):
    i, n = L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", steps)
    array = L.array_write(L.fill_constant([2], "float32", 1.0), i)
    go = L.less_than(i, n)
    with L.While(go, maximum_iterations=limit).block():
        for _ in range(2):  # two elements a step
            L.increment(i)
            L.array_write(L.fill_constant([2], "float32", 2.0), i, array)
        L.less_than(i, n, cond=go)
    return L.array_length(array), array


def test_a_write_beyond_the_room_of_a_bounded_loop_is_an_error(script):
    length, array = bounded(script, 4, script.data("n", [1], "int64").shape[0] * 8)
    exe = script.Executor(script.CPUPlace())
    with pytest.raises(ShapeError, match="element 8 was written into an array with room for 5"):
        exe.run(feed={"n": np.array([1])}, fetch_list=[length])
    with pytest.raises(ProgramError, match="leave that out"):
        L.beam_search_decode(array, array, 2, END)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: L.beam_search(x, x, x, x, 2, 0), ProgramError, "has no sequences"),
        (lambda x: L.beam_search(x, x, x, L.lod_reset(x, target_lod=[0, 4]), 2, 0, 2), ConfigError, "of 1 levels"),
        (lambda x: L.beam_search_decode(x, x, 2, 0), TypeError, "takes an array"),
    ],
    ids=["no sequences", "a level there is not", "no array"],
)  # fmt: skip
def test_what_is_refused(script, call, error, says):
    with pytest.raises(error, match=says):
        call(script.data("x", [4, 1], "float32"))
