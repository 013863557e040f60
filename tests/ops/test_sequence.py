"""Sequence ops beyond their table: one program for every division, rows of none, numbers that PaddlePaddle gives."""

import itertools

import jax
import numpy as np
import pytest

from polyreme.conformance import _sequence_reference as ref
from polyreme.core.op import OPS
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, ShapeError
from polyreme.jit import to_static

F32 = float(np.finfo("float32").eps)


def wave(*shape, phase=0.0):
    """Numbers that need no generator: sin(1.7 i + phase)."""
    return np.sin(1.7 * np.arange(np.prod(shape)) + phase).reshape(shape).astype("float32")


def test_one_program_serves_every_division_into_as_many_sequences():
    traces = []

    def pooled(x, lengths):
        traces.append(1)
        return OPS["sequence_pool"](OPS["sequence_conv"](x, lengths, to_tensor(wave(6, 2))), lengths, "max")

    step = to_static(pooled)
    x = wave(6, 2)
    step(to_tensor(x), to_tensor(np.array([2, 2, 2])))
    seen = len(traces)
    for lengths in (np.array([1, 0, 5]), np.array([3, 2, 1])):
        want = ref.pool(ref.conv(x, lengths, wave(6, 2)), lengths, "max")
        # 6 products a sum
        np.testing.assert_allclose(step(to_tensor(x), to_tensor(lengths)).numpy(), want, atol=4 * 6 * F32)
    assert len(traces) == seen


def test_rows_behind_the_last_sequence_count_for_nothing():
    x, lengths = wave(8, 2), np.array([2, 3])
    calls = {
        "pool": lambda x, o: OPS["sequence_pool"](x, o, "average"),
        "softmax": lambda x, o: OPS["sequence_softmax"](x[:, :1], o),
        "conv": lambda x, o: OPS["sequence_conv"](x, o, to_tensor(wave(6, 3))),
        "reverse": OPS["sequence_reverse"],
        "pad": lambda x, o: OPS["sequence_pad"](x, o, 0.0, 3)[0],
        "lstm": lambda x, o: OPS["sequence_lstm"](x @ to_tensor(wave(2, 8)), o, to_tensor(wave(2, 8)), maxlen=3)[0],
    }
    names = list(calls)
    # captured, where lengths that add up to less are not refused; one program, to compile but once
    every = to_static(lambda x, o: [calls[n](x, o) for n in names])
    got = [t.numpy() for t in every(to_tensor(x), to_tensor(lengths))]
    want = [calls[n](to_tensor(x[:5]), to_tensor(lengths)).numpy() for n in names]
    for name, g, w in zip(names, got, want, strict=True):
        np.testing.assert_allclose(g[: len(w)], w, atol=32 * F32, err_msg=name)
        assert not g[len(w) :].any(), name


def test_of_equal_rows_the_first_has_the_gradient_of_max():
    x = to_tensor(np.float32([[3], [3], [1], [5], [5]]), stop_gradient=False)
    OPS["sequence_pool"](x, to_tensor(np.array([3, 2])), "max").sum().backward()
    assert x.grad.numpy()[:, 0].tolist() == [1, 0, 0, 1, 0]


def test_nan_stays_in_its_sequence():
    x = to_tensor(np.float32([[np.nan], [3], [1]]))
    assert np.isnan(OPS["sequence_pool"](x, to_tensor(np.array([2, 1])), "max").numpy()[:, 0]).tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize("maxlen", [3, 8])
def test_more_steps_than_the_longest_sequence_change_nothing(maxlen):
    lengths = to_tensor(np.array([1, 3]))
    x, weight = to_tensor(wave(4, 9)), to_tensor(wave(3, 9))
    got = OPS["sequence_gru"](x, lengths, weight, maxlen=maxlen).numpy()
    np.testing.assert_allclose(got, ref.gru(wave(4, 9), np.array([1, 3]), wave(3, 9)), atol=32 * F32)


def test_too_few_steps_are_refused():
    lengths = to_tensor(np.array([1, 3]))
    with pytest.raises(ShapeError, match="maxlen=2, the longest sequence has 3 rows"):
        OPS["sequence_gru"](to_tensor(wave(4, 9)), lengths, to_tensor(wave(3, 9)), maxlen=2)
    with pytest.raises(ShapeError, match="maxlen=2, the longest sequence has 3 rows"):
        OPS["linear_chain_crf"](
            to_tensor(wave(4, 2)), lengths, to_tensor(wave(4, 2)), to_tensor(np.zeros((4, 1), "int64")), maxlen=2
        )


def test_a_size_that_depends_on_values_is_asked_for_inside_a_capture():
    step = to_static(lambda x, length: OPS["sequence_unpad"](x, length))
    with pytest.raises(CaptureError, match="the sum of the lengths"):
        step(to_tensor(wave(2, 3)), to_tensor(np.array([1, 2])))


def test_crf_gradient_is_that_of_the_sum_over_every_path():
    """Against jax.grad of the likelihood written out over all 3 ** 3 paths."""
    x, transition, label = wave(3, 3), wave(5, 3, phase=1.0), np.array([2, 0, 1])

    def nll(x, w):
        def score(path):
            moves = sum(w[2 + a, b] for a, b in itertools.pairwise(path))
            return w[0, path[0]] + w[1, path[-1]] + moves + sum(x[t, tag] for t, tag in enumerate(path))

        scores = jax.numpy.stack([score(p) for p in ref.every_path(x)])
        return jax.scipy.special.logsumexp(scores) - score(label)

    want = jax.jit(jax.grad(nll, (0, 1)))(x, transition)
    tensors = [to_tensor(v, stop_gradient=False) for v in (x, transition)]
    OPS["linear_chain_crf"](tensors[0], to_tensor(np.array([3])), tensors[1], to_tensor(label)).sum().backward()
    for got, expected in zip(tensors, want, strict=True):
        np.testing.assert_allclose(got.grad.numpy(), expected, atol=4 * 27 * F32)


MEASURED = {
    "lstm": "0.0676389 0.0932679 0.0281258 -0.0679325 0.1204747 -0.4873417 0.1463765 -0.5950454 0.0251808 -0.3667215",
    "gru": "0.5651805 -0.0497081 0.1006132 -0.274305 0.7824869 -0.3105777 0.6356783 -0.1952441 0.4368518 -0.3664579",
    "conv": "-0.366237 0.8356398 -1.2680552 2.3637378 -1.7429551",
    "crf": "1 2 0 2 0",
    "edit": "0.6666667 3",
}
"""What PaddlePaddle 3.3.1's operators lstm (reversed, with peepholes), gru, sequence_conv, crf_decoding and
edit_distance give for the inputs below, with lengths 2 and 3; to 7 decimals."""


def test_numbers_are_those_of_paddlepaddle():
    cut = to_tensor(np.array([2, 3]))
    x = {n: to_tensor(wave(5, n)) for n in (2, 3, 6, 8)}

    def w(*shape, phase=1.0):
        return to_tensor(wave(*shape, phase=phase))

    ids, other = to_tensor(np.array([1, 2, 3, 4, 5])), to_tensor(np.array([1, 3, 3, 9]))
    got = {
        "lstm": OPS["sequence_lstm"](x[8], cut, w(2, 8), w(1, 14, phase=2.0), is_reverse=True)[0],
        "gru": OPS["sequence_gru"](x[6], cut, w(2, 6), w(1, 6, phase=2.0)),
        "conv": OPS["sequence_conv"](x[2], cut, w(6, 1)),
        "crf": OPS["crf_decoding"](x[3], cut, w(5, 3)),
        "edit": OPS["sequence_edit_distance"](ids, cut, other, to_tensor(np.array([3, 1])))[0],
    }
    for name, want in MEASURED.items():
        # half a unit of the last decimal, and float32 rounding of 12 terms on either side
        np.testing.assert_allclose(
            got[name].numpy().reshape(-1), np.array(want.split(), "float64"), atol=5e-8 + 2 * 12 * F32, err_msg=name
        )


def test_steps_behind_the_end_reach_no_gradient():
    """A cell that grows tenfold a step: carried on to step 64 it would be infinite, and its gradient NaN."""
    bias = to_tensor(np.float32([[1, 1, 10, 1]]), stop_gradient=False)
    options = {"use_peepholes": False, "gate_activation": "identity", "cell_activation": "identity"}
    x, weight = to_tensor(np.ones((2, 4), "float32")), to_tensor(np.ones((1, 4), "float32"))
    gradients = []
    for maxlen in (2, 64):
        OPS["sequence_lstm"](x, to_tensor(np.array([2])), weight, bias, maxlen=maxlen, **options)[0].sum().backward()
        gradients.append(bias.grad.numpy())
        bias.clear_grad()
    np.testing.assert_array_equal(gradients[0], gradients[1])
