"""Programs whose sequences are padded with rows give what they give without, gradients included."""

import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyreme as paddle
from polyreme import fluid, static
from polyreme.core import unique_name
from polyreme.errors import ProgramError
from polyreme.fluid import layers
from polyreme.program.padded_rows import PaddedRun
from polyreme.program.parallel import ParallelRun

F32 = float(np.finfo("float32").eps)
WIDTH, WORDS = 4, 11
# both are padded to 32 rows and 12 steps; as many and as long, so that runs that are not padded compile one Program too
LENGTHS = ([5, 0, 9, 3], [1, 9, 3, 4])

# rows -> rows, of as many rows
BY_ROW = {
    "tanh": layers.tanh,
    "wide": lambda x: layers.fc(x, WIDTH, act="sigmoid"),
    "normed": layers.layer_norm,
    "softmax": layers.softmax,
    "log": lambda x: layers.log(layers.softmax(x) + 1e-3),
    "root": lambda x: layers.sqrt(layers.abs(x)),
    "reversed": layers.sequence_reverse,
    "convolved": lambda x: layers.sequence_conv(x, WIDTH, 3),
    "ahead": lambda x: layers.row_conv(x, 2),
    "weighted": lambda x: x * layers.sequence_softmax(layers.fc(x, 1)),
    "log of weights": lambda x: x + layers.log(layers.sequence_softmax(layers.fc(x, 1)) + 1e-6),
    "lstm": lambda x: layers.dynamic_lstm(layers.fc(x, 4 * WIDTH), 4 * WIDTH)[0],
    "gru": lambda x: layers.dynamic_gru(layers.fc(x, 3 * WIDTH), WIDTH, is_reverse=True),
    "spread": lambda x: x + layers.sequence_expand_as(layers.sequence_pool(x, "last"), x),
    "rectangle": lambda x: layers.sequence_unpad(*layers.sequence_pad(x, layers.fill_constant([1], "float32", 0.0))),
    "dropped": lambda x: layers.dropout(x, 0.3),
    "constant": lambda x: x + layers.fill_constant_batch_size_like(x, [-1, WIDTH], "float32", 0.5),
    "joined": lambda x: layers.sequence_concat([x, layers.scale(x, 0.5)]),
    "narrow": lambda x: layers.sequence_reshape(layers.fc(x, 2 * WIDTH), WIDTH),
}
# rows -> [1]
SUMS = {
    "mean": layers.mean,
    "sum": lambda x: layers.reduce_sum(layers.scale(x, 0.1)),
    "by column": lambda x: layers.reduce_mean(layers.square(layers.reduce_mean(x, dim=0))),
    "largest": lambda x: layers.reduce_sum(layers.reduce_max(x, dim=0)),
    "least": lambda x: layers.reduce_min(x),
    "pooled": lambda x: layers.mean(layers.sequence_pool(x, "average")),
    "maxima": lambda x: layers.mean(layers.sequence_pool(x, "max")),
}


def rows(lengths, seed):
    words = np.random.default_rng(seed).integers(0, WORDS, (sum(lengths), 1))
    return fluid.create_lod_tensor(words, [list(lengths)], fluid.CPUPlace())


def run(build, feeds, pads):
    """What is fetched in each run, and how many runs were compiled padded."""
    main, startup = static.Program(), static.Program()
    main.random_seed = startup.random_seed = 3
    with unique_name.guard(), static.program_guard(main, startup), static.scope_guard(static.Scope()):
        try:
            fetches = build()
            exe = fluid.Executor(fluid.CPUPlace(), pad_sequences=pads)
            exe.run(startup)
            found = [exe.run(main, feed=f, fetch_list=fetches, return_numpy=False) for f in feeds]
            return found, [run for run in exe._compiled.values() if isinstance(run, PaddedRun)]
        finally:
            paddle.disable_static()


def check(build, feeds, compiled, exact=0):
    """Padded runs give what others give: the first `exact` fetches to the bit but for products, whose sums a machine
    may take in another order for other numbers of rows, all others to the rounding of sums."""
    got, padded = run(build, feeds, True)
    want, none = run(build, feeds, False)
    assert len(padded) == compiled
    assert not none
    for one, other in zip(got, want, strict=True):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            x, y = np.asarray(a), np.asarray(b)
            assert x.shape == y.shape
            assert a.lod() == b.lod()
            assert np.isfinite(x).all() or not np.isfinite(y).all()
            terms = 8 if i < exact else 64
            np.testing.assert_allclose(x, y, rtol=64 * terms * F32, atol=64 * terms * F32 * max(1, np.abs(y).max()))


@pytest.mark.parametrize(
    ("steps", "total"),
    [
        (["weighted", "spread", "constant"], "by column"),
        (["convolved", "joined", "narrow"], "maxima"),
    ],
)
def test_padding_is_not_seen_in_what_programs_give(steps, total):
    compare(steps, total)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(BY_ROW)), min_size=1, max_size=5), st.sampled_from(sorted(SUMS)))
def test_padding_is_not_seen_in_what_many_random_programs_give(steps, total):
    compare(steps, total)


def compare(steps, total):
    def build():
        words = fluid.data("words", [None, 1], "int64", lod_level=1)
        values = [layers.embedding(words, [WORDS, WIDTH], param_attr="table")]
        for step in steps:
            values.append(BY_ROW[step](values[-1]))
        loss = SUMS[total](values[-1])
        (gradient,) = fluid.gradients(loss, fluid.default_main_program().global_block().var("table"))
        first = fluid.gradients(loss, values[0])[0]
        return [*values, first, loss, gradient]

    check(build, [{"words": rows(n, i)} for i, n in enumerate(LENGTHS)], 1, len(steps) + 1)


def test_two_feeds_of_as_many_rows_are_padded_together_and_others_each():
    def build():
        x, y = (fluid.data(n, [None, 1], "int64", lod_level=1) for n in "xy")
        table = fluid.ParamAttr(name="table")
        a, b = (layers.embedding(v, [WORDS, WIDTH], param_attr=table) for v in (x, y))
        added = a + b
        return [added, layers.mean(added), layers.accuracy(layers.fc(a, WORDS, act="softmax"), y)]

    def fed(x, y):
        return {"x": rows(x, 0), "y": rows(y, 1)}

    check(build, [fed(LENGTHS[0], LENGTHS[0]), fed(LENGTHS[1], LENGTHS[1])], 1)
    # as many with padding, not without
    with pytest.raises(paddle.errors.ShapeError):
        run(build, [fed(LENGTHS[0], LENGTHS[0]), fed([5, 0, 9, 3], [5, 0, 9, 4])], True)


@pytest.mark.slow_cases("trained")
@pytest.mark.parametrize("ends", ["looked at", "trained"])
def test_a_decoder_that_looks_at_its_source_is_padded(ends):
    def build():
        source, target, following = (fluid.data(n, [None, 1], "int64", lod_level=1) for n in ("s", "t", "f"))
        encoded, words = (layers.embedding(v, [WORDS, WIDTH]) for v in (source, target))
        start = layers.sequence_pool(encoded, "first")
        rnn = layers.DynamicRNN()
        with rnn.block():
            word = rnn.step_input(words)
            seen = rnn.static_input(encoded)
            before = rnn.memory(init=start)
            weights = layers.sequence_softmax(layers.fc([layers.sequence_expand_as(before, seen), seen], 1))
            context = layers.sequence_pool(seen * weights, "sum")
            now = layers.fc([context, word, before], WIDTH, act="tanh")
            rnn.update_memory(before, now)
            rnn.output(layers.fc(now, WORDS, act="softmax"))
        loss = layers.mean(layers.cross_entropy(rnn(), following))
        if ends == "trained":
            fluid.optimizer.SGD(0.5).minimize(loss)
        return [loss, rnn()]

    check(build, [{"s": rows([5, 3, 9], 0), "t": rows([7, 1, 10], 1), "f": rows([7, 1, 10], 2)}], 1)


def test_labels_of_a_random_field_are_padded():
    def build():
        words, tags = (fluid.data(n, [None, 1], "int64", lod_level=1) for n in ("words", "tags"))
        scores = layers.fc(layers.embedding(words, [WORDS, WIDTH]), WORDS)
        loss = layers.mean(layers.linear_chain_crf(scores, tags, param_attr=fluid.ParamAttr(name="moves")))
        return [loss, layers.crf_decoding(scores, fluid.ParamAttr(name="moves"))]

    check(build, [{"words": rows(LENGTHS[0], 0), "tags": rows(LENGTHS[0], 1)}], 1)


def mixed_softmax(x):
    return [layers.softmax(x, axis=0)]


def shape_of(x):
    return [layers.cast(layers.shape(x), "float32"), x]


def normed_by_batch(x):
    return [layers.batch_norm(x)]


def cut(x):
    return [layers.slice(x, axes=[0], starts=[0], ends=[2])]


@pytest.mark.parametrize("mix", [mixed_softmax, shape_of, normed_by_batch, cut])
def test_a_program_in_which_padding_would_be_seen_runs_as_it_is_fed(mix, caplog):
    def build():
        return mix(layers.embedding(fluid.data("words", [None, 1], "int64", lod_level=1), [WORDS, WIDTH]))

    with caplog.at_level(logging.INFO, "polyreme.program"):
        check(build, [{"words": rows(LENGTHS[0], 0)}], 0)
    assert "compiled for each number of rows" in caplog.text


def test_an_epoch_of_random_lengths_compiles_few_programs():
    rng = np.random.default_rng(0)
    feeds = [rows([int(n) for n in rng.integers(1, 30, 8)], i) for i in range(60)]
    assert len({len(np.asarray(f)) for f in feeds}) > 35

    def build():
        words = fluid.data("words", [None, 1], "int64", lod_level=1)
        looked_up = layers.embedding(
            words,
            [WORDS, 1],
            param_attr=fluid.ParamAttr(
                name="table", initializer=fluid.initializer.NumpyArrayInitializer(np.arange(WORDS, dtype="f")[:, None])
            ),
        )
        return [looked_up, layers.reduce_max(layers.sequence_pool(looked_up, "sum")), layers.mean(looked_up)]

    results, compiled = run(build, [{"words": f} for f in feeds], True)
    assert len(compiled) <= 7
    for feed, (looked_up, largest, mean) in zip(feeds, results, strict=True):
        words = np.asarray(feed)
        np.testing.assert_array_equal(looked_up, words)
        starts = feed.lod()[0][:-1]
        assert np.asarray(largest) == np.add.reduceat(words[:, 0], starts).max()
        np.testing.assert_allclose(mean, words.mean(), rtol=len(words) * F32)


def test_devices_are_padded_together_and_train_as_by_hand(monkeypatch):
    monkeypatch.setenv("CPU_NUM", "2")
    rng = np.random.default_rng(0)
    feeds = [rows([int(n) for n in rng.integers(1, 7, 4)], i) for i in range(6)]
    table = np.arange(WORDS, dtype="f")[:, None] / WORDS
    main, startup = static.Program(), static.Program()
    with unique_name.guard(), static.program_guard(main, startup), static.scope_guard(static.Scope()):
        words = fluid.data("words", [None, 1], "int64", lod_level=1)
        value = fluid.initializer.NumpyArrayInitializer(table)
        looked_up = layers.embedding(words, [WORDS, 1], param_attr=fluid.ParamAttr(name="table", initializer=value))
        pooled = layers.sequence_pool(looked_up, "sum")
        loss = layers.mean(layers.square(looked_up)) + layers.mean(pooled)
        fluid.optimizer.SGD(0.5).minimize(loss)
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(startup)
        program = fluid.CompiledProgram(main).with_data_parallel(loss.name)
        runs = [
            exe.run(program, feed={"words": f}, fetch_list=[looked_up, loss, pooled], return_numpy=False) for f in feeds
        ]
        trained = np.array(fluid.global_scope().find_var("table").get_tensor())
        compiled = [run for run in exe._compiled.values() if isinstance(run, ParallelRun)]
    paddle.disable_static()
    assert len({len(np.asarray(f)) for f in feeds}) > 4
    assert (len(compiled), compiled[0]._padding is not None) == (1, True)
    for feed, (seen, losses, sums) in zip(feeds, runs, strict=True):
        ids, cuts = np.asarray(feed)[:, 0], feed.lod()[0]
        np.testing.assert_allclose(seen, table[ids], rtol=64 * F32)
        assert seen.lod() == feed.lod()
        np.testing.assert_allclose(sums, np.add.reduceat(table[ids], cuts[:-1]), rtol=64 * F32)
        slopes = []
        for device, part in enumerate((ids[: cuts[2]], ids[cuts[2] :])):
            np.testing.assert_allclose(
                np.asarray(losses)[device], (table[part] ** 2).mean() + table[part].sum() / 2, rtol=64 * F32
            )
            slope = np.zeros_like(table)
            np.add.at(slope, part, 2 * table[part] / len(part) + 1 / 2)
            slopes.append(slope)
        table = table - 0.5 * np.mean(slopes, 0)
    np.testing.assert_allclose(trained, table, rtol=64 * F32, atol=64 * F32)


def squares(x):
    return layers.reduce_sum(layers.square(layers.sequence_pool(x, "sum")))


def loop(body, divides_both=False):
    """Run body three times; what it returns of x and y, which share their sequences, is summed."""
    source = fluid.data("x", [None, 1], "float32", lod_level=1)
    x, y = layers.scale(source, 1.0), layers.scale(source, 2.0)
    i, n = (layers.fill_constant([1], "int64", v) for v in (0, 3))
    sums = [layers.fill_constant([1], "float32", 0.0) for _ in range(2)]
    go = layers.less_than(i, n)
    with layers.While(go).block():
        for total, value in zip(sums, body(x, y), strict=True):
            layers.assign(total + value, total)
        anew = layers.lod_reset(x, target_lod=[0, 1, 5])
        layers.assign(anew, x)
        if divides_both:
            layers.assign(layers.lod_reset(y, anew), y)
        layers.increment(i, 1, in_place=True)
        layers.less_than(i, n, cond=go)
    return [*sums, layers.sequence_pool(x, "sum"), layers.sequence_pool(y, "sum")]


FIVE = fluid.create_lod_tensor(np.arange(1, 6, dtype="float32")[:, None], [[2, 3]], fluid.CPUPlace())


def test_a_loop_that_divides_one_variable_anew_leaves_others_as_they_are():
    (found,), _ = run(lambda: loop(lambda x, y: (squares(x), squares(y))), [{"x": FIVE}], True)
    of_x, of_y, x, y = (np.asarray(v).reshape(-1).tolist() for v in found)
    assert of_x == [(3**2 + 12**2) + 2 * (1**2 + 14**2)]
    assert of_y == [3 * (6**2 + 24**2)]
    assert (x, y) == ([1, 14], [6, 24])


def test_a_loop_may_divide_both_anew_and_use_them_together():
    (found,), _ = run(lambda: loop(lambda x, y: (squares(x + y), squares(y)), True), [{"x": FIVE}], True)
    both, of_y, x, y = (np.asarray(v).reshape(-1).tolist() for v in found)
    assert both == [9**2 + 36**2 + 2 * (3**2 + 42**2)]
    assert of_y == [6**2 + 24**2 + 2 * (2**2 + 28**2)]
    assert (x, y) == ([1, 14], [2, 28])


def test_a_loop_that_uses_both_together_and_divides_one_is_refused():
    with pytest.raises(ProgramError, match="keeps them; give both the same"):
        run(lambda: loop(lambda x, y: (squares(x + y), squares(y))), [], True)
