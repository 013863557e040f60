"""dynamic_decode and BeamSearchDecoder: PaddlePaddle's numbers, exhaustive search, capture, other decoders, caches."""

import itertools

import numpy as np
import pytest

import polyreme.nn as nn
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.jit import to_static
from polyreme.ops.manipulation import unsqueeze
from tests.nn.table import wave

EPS = float(np.finfo(np.float32).eps)
H0 = wave((2, 6), 9)


def searcher(beams):
    embed, out, cell = nn.Embedding(5, 4), nn.Linear(6, 5), nn.GRUCell(4, 6)
    embed.weight.set_value(2 * wave((5, 4), 1))
    out.weight.set_value(2 * wave((6, 5), 2))
    out.bias.set_value(wave((5,), 3))
    for at, p in enumerate(cell.parameters()):
        p.set_value(wave(tuple(p.shape), 4 + at))
    return nn.BeamSearchDecoder(cell, 0, 1, beams, embed, out)


def test_beams_are_paddles():
    """Ids and log-probabilities of PaddlePaddle 3.3.1 with the same cell, weights and start."""
    ids, last, lengths = nn.dynamic_decode(searcher(3), to_tensor(H0), max_step_num=4, return_length=True)
    assert ids.tolist() == [
        [[3, 3, 3], [3, 3, 3], [3, 3, 3], [3, 2, 3], [3, 2, 2]],
        [[2, 2, 2], [1, 2, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3]],
    ]
    want = [[-1.6842318, -2.2876811, -2.3184774], [-2.4365511, -2.4770122, -2.6045549]]
    # five log-softmaxes of five classes after as many steps of the cell
    np.testing.assert_allclose(last.log_probs.numpy(), want, rtol=64 * EPS)
    assert lengths.tolist() == [[5, 5, 5], [2, 5, 5]]
    assert last.cell_states.shape == [2, 3, 6]
    major = nn.dynamic_decode(searcher(3), to_tensor(H0), max_step_num=4, output_time_major=True)[0]
    assert major.numpy().swapaxes(0, 1).tolist() == ids.tolist()


def test_enough_beams_find_the_best_sequence_of_all():
    decoder = searcher(25)
    ids, last = nn.dynamic_decode(decoder, to_tensor(H0), max_step_num=2)

    def score(row, tokens):
        h, token, total = to_tensor(H0[row : row + 1]), 0, 0.0
        for t in tokens:
            y, h = decoder.cell(decoder.embedding_fn(to_tensor([token])), h)
            total += nn.functional.log_softmax(decoder.output_fn(y)).numpy()[0, t]
            token = t
            if t == 1:
                break
        return total

    for row in range(2):
        best = max(itertools.product(range(5), repeat=3), key=lambda tokens: score(row, tokens))
        found = ids.numpy()[row, :, 0].tolist()
        assert found[: found.index(1) if 1 in found else 3] == list(best[: best.index(1) if 1 in best else 3])
        np.testing.assert_allclose(last.log_probs.numpy()[row, 0], score(row, best), rtol=64 * EPS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_test", [False, True])
def test_captured_decoding_equals_eager(is_test):
    decoder = searcher(3)
    # the end token becomes likely, so that all beams end before the last step
    decoder.output_fn.bias.set_value(np.float32([-9, 1.5, 0, 0, 0]))
    ids, last, lengths = nn.dynamic_decode(decoder, to_tensor(H0), max_step_num=30, return_length=True)
    assert 2 < ids.shape[1] < 31

    def decode(h):
        return nn.dynamic_decode(decoder, h, max_step_num=30, is_test=is_test, return_length=True)

    got, end, counts = to_static(decode)(to_tensor(H0))
    assert got.shape == [2, 31, 3]
    assert got.numpy()[:, : ids.shape[1]].tolist() == ids.tolist()
    assert (got.numpy()[:, ids.shape[1] :] == 1).all()
    assert counts.tolist() == lengths.tolist()
    np.testing.assert_allclose(end.log_probs.numpy(), last.log_probs.numpy(), rtol=64 * EPS)
    with pytest.raises(ConfigError, match="max_step_num=None in a captured function"):
        to_static(lambda h: nn.dynamic_decode(decoder, h))(to_tensor(H0))


class Countdown:
    """Subtracts step from what is left of each sequence until nothing is; outputs what was."""

    def initialize(self, inits):
        return inits, {"left": inits}, inits <= 0

    def step(self, time, inputs, states, step=1):
        left = states["left"] - step
        return {"was": states["left"], "time": time + inputs * 0}, {"left": left}, inputs, left <= 0


@pytest.mark.parametrize("captured", [False, True])
def test_a_decoder_of_ones_own(captured):
    start = to_tensor(np.array([3, 0, 1]))

    def decode(inits, impute):
        return nn.dynamic_decode(Countdown(), inits, 2, impute_finished=impute, return_length=True)

    run = to_static(decode) if captured else decode
    outputs, last, lengths = run(start, False)
    assert outputs["was"].tolist() == [[3, 2, 1], [0, -1, -2], [1, 0, -1]]
    assert outputs["time"].tolist() == [[0, 1, 2]] * 3
    assert last["left"].tolist() == [0, -3, -2]
    assert lengths.tolist() == [3, 0, 1]
    assert run(start, True)[1]["left"].tolist() == [0, 0, 0]
    assert nn.dynamic_decode(Countdown(), start, step=2)[0]["was"].shape == [3, 2]
    with pytest.raises(ShapeError, match="no step was taken"):
        nn.dynamic_decode(Countdown(), start * 0)
    with pytest.raises(ConfigError, match="beam_size=0"):
        nn.BeamSearchDecoder(None, 0, 1, 0)


class Attends(nn.Layer):
    """A Transformer decoder as a cell: inputs [n, 8], states its caches."""

    def __init__(self, decoder, memory):
        super().__init__()
        self.decoder, self.memory = decoder, memory

    def forward(self, inputs, states):
        out, caches = self.decoder(unsqueeze(inputs, 1), self.memory, cache=states)
        return out[:, 0], caches


@pytest.mark.slow
def test_a_transformer_decodes_with_its_caches():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0), 2).eval()
    embed, out, memory = nn.Embedding(5, 8), nn.Linear(8, 5), to_tensor(wave((2, 3, 8), 2))
    embed.weight.set_value(2 * wave((5, 8), 1))
    out.weight.set_value(wave((8, 5), 3))
    tiled = nn.BeamSearchDecoder.tile_beam_merge_with_batch(memory, 2)
    search = nn.BeamSearchDecoder(Attends(decoder, tiled), 0, 4, 2, embed, out)
    ids, last = nn.dynamic_decode(search, decoder.gen_cache(memory), max_step_num=3)
    # the same sequences scored by whole passes under a causal mask
    for row, beam in itertools.product(range(2), range(2)):
        tokens = ids.numpy()[row, :, beam].tolist()
        before = to_tensor(np.array([[0, *tokens[:-1]]]))
        causal = to_tensor(np.tril(np.ones((len(tokens),) * 2, bool)))
        logits = out(decoder(embed(before), memory[row : row + 1], causal))
        each = nn.functional.log_softmax(logits).numpy()[0, range(len(tokens)), tokens]
        until = tokens.index(4) + 1 if 4 in tokens else len(tokens)
        # four passes through two layers of sums over 8 to 16 terms, with norms between
        np.testing.assert_allclose(last.log_probs.numpy()[row, beam], each[:until].sum(), rtol=2048 * EPS)
