"""flashmask_attention and attention of ragged batches in every world, their memory, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyreme as paddle
from polyreme import static
from polyreme.distributed.fleet.recompute import recompute
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ShapeError
from polyreme.nn import functional as F
from polyreme.paddle_scripts.internals.attention import flash_attn_unpadded

S = 16
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, S, 2, 4))
ENDS = np.minimum(np.arange(S) + RNG.integers(1, 9, (2, 2, S)), S).astype("int32")[..., None]


def seen():
    """What ENDS and causal leave, as a mask [2, 2, s, s]."""
    row = np.arange(S)[:, None]
    return (row >= row.T) & (row < ENDS[:, :, None, :, 0])


def attend(x, ends=ENDS, **options):
    ends = to_tensor(ends) if isinstance(ends, np.ndarray) else ends
    return F.flashmask_attention(x, x, x, ends, causal=True, **options)


def test_a_program_of_open_sizes_gives_what_eager_code_gives():
    x = X.astype("float32")
    want = attend(to_tensor(x)).numpy()
    paddle.enable_static()
    try:
        with static.program_guard(static.Program()):
            data, ends = static.data("x", [None, None, 2, 4]), static.data("ends", [None, 2, None, 1], "int32")
            (got,) = static.Executor().run(feed={"x": x, "ends": ENDS}, fetch_list=[attend(data, ends)])
    finally:
        paddle.disable_static()
    # a mean of at most 16 values, of scores that sum 4 products
    np.testing.assert_allclose(got, want, rtol=0, atol=20 * np.finfo("float32").eps * np.abs(x).max())


@pytest.mark.slow
def test_second_derivatives_are_those_of_the_whole_mask():
    def curvature(call):
        x = to_tensor(X, stop_gradient=False)
        (slope,) = paddle.grad([(call(x) ** 2).sum()], [x], create_graph=True)
        return paddle.grad([(slope**2).sum()], [x])[0].numpy()

    mask = to_tensor(seen())
    want = curvature(lambda x: F.scaled_dot_product_attention(x, x, x, mask))
    # three passes of sums of 16 terms, in float64
    assert np.abs(curvature(attend) - want).max() <= 3 * 16 * 8 * np.finfo("float64").eps * np.abs(want).max()


@pytest.mark.slow
def test_recompute_draws_the_same_dropout():
    x = to_tensor(X.astype("float32"), stop_gradient=False)

    def gradient(call):
        paddle.seed(1)
        return paddle.grad([call(x).sum()], [x])[0].numpy()

    kept = gradient(lambda x: attend(x, dropout=0.3))
    np.testing.assert_array_equal(gradient(lambda x: recompute(lambda x: attend(x, dropout=0.3), x)), kept)
    assert np.abs(kept - gradient(attend)).max() > 0.1


def test_causal_attention_of_other_lengths_and_its_logsumexp():
    q, k = X[:, :5], X
    scores = np.einsum("bshd,bthd->bhst", q, k) / 2
    weights = np.exp(scores) * np.tri(5, S)
    out, lse = F.flashmask_attention(*map(to_tensor, (q, k, k)), causal=True, return_softmax_lse=True)
    near = {"rtol": 0, "atol": 1e-13}  # float64: sums of at most 16 terms of size up to e^4
    np.testing.assert_allclose(lse.numpy(), np.log(weights.sum(-1)), **near)
    want = np.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdims=True), k)
    np.testing.assert_allclose(out.numpy(), want, **near)
    np.testing.assert_array_equal(F.flashmask_attention(*map(to_tensor, (q, k, k)), causal=True).numpy(), out.numpy())


def scratch(tokens, longest):
    """Bytes of scratch memory of forward and backward over 32 sequences that lie end to end, compiled and not run."""

    def call(x, ends):
        x, ends = Tensor(x, stop_gradient=False), Tensor(ends)
        out, _ = flash_attn_unpadded(x, x, x, ends, ends, longest, longest, 0.5, causal=True)
        return paddle.grad([out.sum()], [x])[0]._array

    shapes = jax.ShapeDtypeStruct((tokens, 2, 16), jnp.float32), jax.ShapeDtypeStruct((33,), jnp.int32)
    return jax.jit(call).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_ragged_batches_take_memory_for_their_tokens_alone():
    # were each sequence a row as long as the longest may be, it would take 32 times as much
    assert scratch(4096, 4096) == scratch(4096, 128)
    assert scratch(8192, 4096) < 2.2 * scratch(4096, 4096)


def test_what_does_not_fit_is_named():
    x = to_tensor(X.astype("float32"))
    with pytest.raises(ShapeError, match=r"startend_row_indices holds -3 at \[0, 0, 0, 0\]; .* give 0 to 16"):
        attend(x, np.where(np.arange(S)[:, None] > 0, ENDS, -3).astype("int32"))
    with pytest.raises(ShapeError, match=r"\[2, 3, 16, 1\] with causal=True; needs \[2, 1 or 2, 16, 1 or 2\]"):
        attend(x, np.zeros((2, 3, S, 1), "int32"))
    with pytest.raises(ShapeError, match=r"query \[16, 2, 4\], key \[16, 2, 4\]; needs \[batch, seq, heads, d\]"):
        F.flashmask_attention(x[0], x[0], x[0], to_tensor(ENDS))
    with pytest.raises(ShapeError, match=r"q \[1, 2, 4\].* needs 4 dims"):
        F.flashmask_attention(x[0, 0], x[0, 0], x[0, 0], causal=True)
    with pytest.raises(ShapeError, match=r"block_mask \[2, 2, 2, 1\]; needs \[2, 1 or 2, 1, 1\]"):
        attend(x, block_mask=to_tensor(np.ones((2, 2, 2, 1), "int32")))
    tokens, ends = x[0], to_tensor(np.array([0, 5, S], "int32"))
    with pytest.raises(ShapeError, match=r"flash_attn_unpadded: cumulated lengths hold 16 at \[2\]; .* max_seqlen 8"):
        flash_attn_unpadded(tokens, tokens, tokens, ends, ends, 8, 16, 1.0)
    with pytest.raises(ShapeError, match=r"cumulated lengths \[3\] of queries, \[2\] of keys"):
        flash_attn_unpadded(tokens, tokens, tokens, ends, ends[:2], 16, 16, 1.0)
    with pytest.raises(ShapeError, match=r"query \[2, 16, 2, 4\], .* needs \[tokens, heads, head_dim\]"):
        flash_attn_unpadded(x, x, x, ends, ends, 16, 16, 1.0)
