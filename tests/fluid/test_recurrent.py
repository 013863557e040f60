"""Cells, rnn and decoding of fluid.layers against the formulas, step by step in NumPy."""

import numpy as np
import pytest

from polyreme import fluid
from polyreme.errors import ConfigError
from polyreme.fluid import layers

BATCH, STEPS, SIZE, HIDDEN, VOCAB = 3, 4, 5, 6, 7
RNG = np.random.default_rng(0)
WORDS = RNG.standard_normal((BATCH, STEPS, SIZE)).astype(np.float32)
LENGTHS = np.array([4, 2, 1], np.int64)
TOLERANCE = 2.0**-23 * (SIZE + HIDDEN) * STEPS * 8  # sums of SIZE + HIDDEN products, in each of STEPS steps


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(x, h, weight, candidate, bias, shift):
    r, u = np.split(sigmoid(np.concatenate([x, h], -1) @ weight + bias), 2, -1)
    new = u * h + (1 - u) * np.tanh(np.concatenate([x, r * h], -1) @ candidate + shift)
    return new, new


def lstm(x, states, weight, bias):
    h, c = states
    i, j, f, o = np.split(np.concatenate([x, h], -1) @ weight + bias, 4, -1)
    c = c * sigmoid(f + 1) + sigmoid(i) * np.tanh(j)
    h = sigmoid(o) * np.tanh(c)
    return h, (h, c)


def walk(step, states, order):
    """Outputs [batch, steps, hidden] and last states of a cell that stands still behind each sequence's end."""
    outputs = np.zeros((BATCH, STEPS, HIDDEN))
    for t in order:
        real = (t < LENGTHS)[:, None]
        output, new = step(WORDS[:, t], states)
        outputs[:, t] = np.where(real, output, 0)
        pairs = zip(new, states, strict=True) if isinstance(states, tuple) else [(new, states)]
        ends = tuple(np.where(real, a, b) for a, b in pairs)
        states = ends if isinstance(states, tuple) else ends[0]
    return outputs, states


def run(script, feed, fetched):
    script.run(fluid.default_startup_program())
    names = [p.name for p in fluid.default_main_program().all_parameters()]
    values = [np.array(fluid.global_scope().find_var(name).get_tensor()) for name in names]
    return values, script.run(feed=feed, fetch_list=fetched)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize(("cell", "step"), [(layers.GRUCell, gru), (layers.LSTMCell, lstm)])
def test_rnn_walks_a_cell_over_padded_sequences(cell, step, is_reverse):
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        words = fluid.data("words", [None, STEPS, SIZE], "float32")
        lengths = fluid.data("lengths", [None], "int64")
        outputs, last = layers.rnn(cell(HIDDEN), words, sequence_length=lengths, is_reverse=is_reverse)
        last = list(last) if isinstance(last, (list, tuple)) else [last]
        weights, (values, *ends) = run(
            fluid.Executor(fluid.CPUPlace()), {"words": WORDS, "lengths": LENGTHS}, [outputs, *last]
        )
    zeros = np.zeros((BATCH, HIDDEN))
    start = zeros if step is gru else (zeros, zeros)
    order = range(STEPS)[::-1] if is_reverse else range(STEPS)
    want, states = walk(lambda x, s: step(x, s, *weights), start, order)
    np.testing.assert_allclose(values, want, atol=TOLERANCE)
    np.testing.assert_allclose(np.stack(ends), np.stack(states if step is lstm else [states]), atol=TOLERANCE)


class Counter(layers.RNNCell):
    """Adds its input to its state."""

    state_shape = (1,)

    def call(self, inputs, states):
        return inputs + states, inputs + states


def test_a_cell_of_ones_own():
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [3, None, 1], "float32")
        outputs, _ = layers.rnn(Counter(), x, time_major=True)
        (values,) = fluid.Executor().run(feed={"x": np.ones((3, 2, 1), np.float32)}, fetch_list=[outputs])
    assert values[:, :, 0].tolist() == [[1, 1], [2, 2], [3, 3]]


class Mixing(layers.RNNCell):
    """tanh of a layer on input and state; the layer is made when the cell is called."""

    state_shape = (HIDDEN,)

    def call(self, inputs, states):
        new = layers.fc([inputs, states], HIDDEN, act="tanh", bias_attr=False)
        return new, new


def test_a_cell_with_layers_inside_has_one_set_of_parameters_and_walks_any_number_of_steps():
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        words, lengths = fluid.data("words", [None, None, SIZE], "float32"), fluid.data("lengths", [None], "int64")
        outputs, _ = layers.rnn(Mixing(), words, sequence_length=lengths)
        rows, rnn = layers.transpose(words, [1, 0, 2]), layers.StaticRNN()
        with rnn.step():  # two memories, of which one is what the other was
            row = rnn.step_input(rows)
            a, b = (rnn.memory(shape=[-1, SIZE], batch_ref=row) for _ in range(2))
            rnn.update_memory(a, a + row)
            rnn.update_memory(b, a)
            rnn.step_output(b)
        loss = layers.reduce_mean(layers.square(outputs - 1.0))
        ((_, gradient), *_) = fluid.backward.append_backward(loss)
        script, feed = fluid.Executor(fluid.CPUPlace()), {"words": WORDS, "lengths": LENGTHS}
        weights, (values, before, first_loss, slope) = run(script, feed, [outputs, rnn(), loss, gradient])
        short = {"words": WORDS[:, :2], "lengths": np.minimum(LENGTHS, 2)}
        (two,) = script.run(feed=short, fetch_list=[outputs])
        fluid.global_scope().find_var("fc_0.w_0").get_tensor().set(weights[0] + 2.0**-8 * slope, "cpu")
        (moved,) = script.run(feed=feed, fetch_list=[loss])
    assert [w.shape for w in weights] == [(SIZE, HIDDEN), (HIDDEN, HIDDEN)]

    def step(x, h):
        return (np.tanh(x @ weights[0] + h @ weights[1]),) * 2

    want, _ = walk(step, np.zeros((BATCH, HIDDEN)), range(STEPS))
    np.testing.assert_allclose(values, want, atol=TOLERANCE)
    np.testing.assert_allclose(two, want[:, :2], atol=TOLERANCE)
    sums = np.cumsum(WORDS, 1).swapaxes(0, 1)
    np.testing.assert_allclose(before, np.concatenate([np.zeros((2, BATCH, SIZE)), sums])[:STEPS], atol=TOLERANCE)
    assert np.abs(slope).min() > 0
    # first order in the step; the second is as small as the step itself
    np.testing.assert_allclose(moved - first_loss, 2.0**-8 * (slope**2).sum(), rtol=2.0**-5)


def test_a_temperature_of_0_is_refused():
    with pytest.raises(ConfigError, match="softmax_temperature=0"):
        layers.SampleEmbeddingHelper(None, None, 0, softmax_temperature=0)


class Next(layers.RNNCell):
    """Logits that want the token after the one it is given, from the state's row on."""

    state_shape = (1,)

    def call(self, inputs, states):
        return layers.one_hot(layers.cast(inputs + 1, "int64"), VOCAB), states + 1


# logits of 1 and 0 at this temperature leave no doubt what is drawn
HELPERS = [(layers.GreedyEmbeddingHelper, {}), (layers.SampleEmbeddingHelper, {"softmax_temperature": 1e-2})]


@pytest.mark.parametrize(("kind", "settings"), HELPERS)
def test_decoding_ends_with_the_end_token(kind, settings):
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        start = fluid.data("start", [2], "int64")
        helper = kind(lambda ids: layers.unsqueeze(ids, [1]), start, end_token=5, **settings)
        cell = Next()
        decoder = layers.BasicDecoder(cell, helper)
        outputs, _, lengths = layers.dynamic_decode(
            decoder, cell.get_initial_states(start), max_step_num=4, return_length=True
        )
        ids, steps = fluid.Executor().run(feed={"start": np.array([1, 3])}, fetch_list=[outputs.sample_ids, lengths])
    assert ids[0, :4].tolist() == [2, 3, 4, 5]
    assert ids[1, :2].tolist() == [4, 5]
    assert steps.tolist() == [4, 2]


def test_a_decoder_trains_on_the_steps_of_sequences():
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        words = fluid.data("words", [BATCH, STEPS, SIZE], "float32")
        lengths = fluid.data("lengths", [BATCH], "int64")
        cell = layers.GRUCell(HIDDEN)
        decoder = layers.BasicDecoder(cell, layers.TrainingHelper(words, lengths))
        outputs, _ = layers.dynamic_decode(decoder, cell.get_initial_states(words), max_step_num=STEPS - 1)
        loss = layers.reduce_mean(layers.square(outputs.cell_outputs - 1.0))
        fluid.optimizer.SGD(0.5).minimize(loss)
        script = fluid.Executor()
        weights, (values,) = run(script, {"words": WORDS, "lengths": LENGTHS}, [outputs.cell_outputs])
        losses = [script.run(feed={"words": WORDS, "lengths": LENGTHS}, fetch_list=[loss])[0].item() for _ in range(3)]
    state, want = np.zeros((BATCH, HIDDEN)), []
    for t in range(STEPS):
        state, _ = gru(WORDS[:, t], state, *weights)
        want.append(state)
    np.testing.assert_allclose(values[0], np.stack(want, 1)[0], atol=TOLERANCE)  # the others are shorter
    assert losses[2] < losses[1] < losses[0]


def test_beam_search_finds_the_only_way():
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        cell = Next()
        decoder = layers.BeamSearchDecoder(
            cell, 1, 4, 2, embedding_fn=lambda ids: layers.cast(ids, "int64"), output_fn=lambda x: 30.0 * x
        )
        batch = fluid.data("batch", [2, 1], "float32")
        ids, _ = layers.dynamic_decode(decoder, cell.get_initial_states(batch), max_step_num=3)
        (values,) = fluid.Executor().run(feed={"batch": np.zeros((2, 1), np.float32)}, fetch_list=[ids])
    assert values[:, :3, 0].tolist() == [[2, 3, 4], [2, 3, 4]]
