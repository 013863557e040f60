"""ViterbiDecoder, and viterbi_decode against numbers of PaddlePaddle, captured and in a Program."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import static
from polyreme.jit import to_static
from polyreme.text import ViterbiDecoder, viterbi_decode
from tests.program.conftest import static_mode  # noqa: F401  (a fixture)

RNG = np.random.default_rng(0)
POTENTIALS = RNG.normal(size=(3, 4, 5)).astype("float32")
TRANSITIONS = RNG.normal(size=(5, 5)).astype("float32")
# PaddlePaddle 3.3.1: paddle.text.viterbi_decode of the above, with and without start and stop tags
THEIRS = {
    True: ([7.712405, 3.4853442, 1.9033619], [[2, 1, 3, 4], [3, 4, 0, 0], [2, 0, 0, 0]]),
    False: ([6.2148347, 2.5740976, 1.5139238], [[1, 1, 3, 4], [3, 4, 0, 0], [1, 0, 0, 0]]),
}


@pytest.mark.parametrize("tags", [True, False])
def test_numbers_of_paddlepaddle(tags):
    decode = ViterbiDecoder(paddle.to_tensor(TRANSITIONS), tags)
    scores, path = decode(paddle.to_tensor(POTENTIALS), paddle.to_tensor([4, 2, 1]))
    # sums of up to 9 numbers below 8
    np.testing.assert_allclose(scores.numpy(), THEIRS[tags][0], rtol=9 * 2.0**-23)
    assert path.dtype == "int64"
    assert path.tolist() == THEIRS[tags][1]


def test_eager_code_cuts_at_the_longest_and_captured_code_does_not():
    args = [paddle.to_tensor(v) for v in (POTENTIALS, TRANSITIONS, np.array([2, 1, 1]))]
    eager, captured = viterbi_decode(*args), to_static(viterbi_decode)(*args)
    assert (eager[1].shape, captured[1].shape) == ([3, 2], [3, 4])
    np.testing.assert_array_equal(captured[1].numpy()[:, :2], eager[1].numpy())
    assert not captured[1].numpy()[:, 2:].any()
    np.testing.assert_array_equal(captured[0].numpy(), eager[0].numpy())


def test_in_a_program(static_mode):  # noqa: F811
    x = static.data("x", [None, 4, 5])
    lengths = static.data("lengths", [None], "int64")
    scores, path = viterbi_decode(x, paddle.to_tensor(TRANSITIONS), lengths)
    found = static.Executor().run(feed={"x": POTENTIALS, "lengths": np.array([4, 2, 1])}, fetch_list=[scores, path])
    np.testing.assert_allclose(found[0], THEIRS[True][0], rtol=9 * 2.0**-23)
    assert found[1].tolist() == THEIRS[True][1]
