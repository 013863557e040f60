"""GPT: the recorded function of transformers' GPT2LMHeadModel, capture, checkpoints, placement, refusals."""

import numpy as np
import pytest

from polyreme.core import rng
from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.io import serialization
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from tests.models import parity

either_head = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def recorded(tied):
    """A GPT with recorded weights, and the recording."""
    recording = parity.read(f"gpt_{'tied' if tied else 'untied'}")
    return parity.load_published(GPT(GPTConfig(**recording.config)), recording.weights), recording


def nano(**changes):
    rng.seed(5)
    return GPT(GPTConfig.nano(**changes))


@pytest.fixture
def _one_device_afterwards():
    yield
    clear_plan()


@pytest.mark.slow
@pytest.mark.slow_cases("tied")
@either_head
def test_is_the_function_of_gpt2(tied):
    model, recording = recorded(tied)
    parity.assert_same_function(model, recording, parity.as_ours(model, recording.grads))


def test_qkv_columns_are_put_in_order_of_heads():
    # 2 heads of 2 numbers: q0 q0 q1 q1 k0 k0 k1 k1 v0 v0 v1 v1, numbered
    model = GPT(GPTConfig.nano(hidden_size=4, num_heads=2, num_layers=1))
    got = parity.as_ours(model, {"transformer.h.0.attn.c_attn.bias": np.arange(12)})["blocks.0.attention.qkv.bias"]
    np.testing.assert_array_equal(got, [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11])


@pytest.mark.slow
def test_shortened_rows_predict_the_same():
    model, recording = recorded(True)
    want = recording.arrays["logits"][:, :5]  # causal: what follows does not count
    got = model(to_tensor(recording.tokens[:, :5])).numpy()
    atol = parity.tolerance(parity.forward_terms(recording.config, 13), want)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.slow
@either_head
def test_captured_equals_eager(tied):
    model, recording = recorded(tied)
    parity.assert_captured_equals_eager(model, recording.tokens, recording.next_tokens)


@either_head
def test_a_saved_state_comes_back(tied, tmp_path):
    model, other = nano(tie_embeddings=tied), GPT(GPTConfig.nano(tie_embeddings=tied))
    serialization.save(model.state_dict(), tmp_path / "gpt")
    parity.load(other, serialization.load(tmp_path / "gpt"))
    tokens = to_tensor([[1, 2, 3]])
    np.testing.assert_array_equal(other(tokens).numpy(), model(tokens).numpy())


@either_head
def test_a_checkpoint_comes_back(tied, tmp_path):
    model, other = nano(tie_embeddings=tied), GPT(GPTConfig.nano(tie_embeddings=tied))
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(1, {name: tensor._array for name, tensor in model.state_dict().items()})
        parity.load(other, store.restore()[0])
    tokens = to_tensor([[1, 2, 3]])
    np.testing.assert_array_equal(other(tokens).numpy(), model(tokens).numpy())


@pytest.mark.usefixtures("_one_device_afterwards")
def test_mp_halves_heads_ffn_and_vocab():
    model = nano(tie_embeddings=False)
    apply_plan(Plan.from_degrees(mp=2, dp=4), model)
    dims = {
        "tokens.weight": ("vocab", "embed"),
        "positions.weight": (None, "embed"),
        "attention_norm.weight": ("embed",),
        "attention_norm.bias": ("embed",),
        "attention.qkv.weight": ("embed", "heads"),
        "attention.qkv.bias": ("heads",),
        "attention.out.weight": ("heads", "embed"),
        "attention.out.bias": ("embed",),
        "ffn_norm.weight": ("embed",),
        "ffn_norm.bias": ("embed",),
        "ffn.up.weight": ("embed", "ffn"),
        "ffn.up.bias": ("ffn",),
        "ffn.down.weight": ("ffn", "embed"),
        "ffn.down.bias": ("embed",),
        "norm.weight": ("embed",),
        "norm.bias": ("embed",),
        "head.weight": ("embed", "vocab"),
    }
    parity.assert_mp_halves_named_dims(model, dims)


# two heads a device: distributed/test_prove too
@pytest.mark.slow
@pytest.mark.slow_cases("tied-2", "tied-8", "untied-2")
@pytest.mark.usefixtures("_one_device_afterwards")
@pytest.mark.parametrize("mp", [2, 8])  # of 4 heads: two a device, and half a one
@either_head
def test_the_function_is_the_same_under_mp(tied, mp):
    model, recording = recorded(tied)
    apply_plan(Plan.from_degrees(mp=mp, dp=8 // mp), model)
    parity.assert_same_function(model, recording, parity.as_ours(model, recording.grads))


def test_dropout_counts_only_while_training():
    model, tokens = nano(dropout=0.5), to_tensor([[1, 2, 3, 4]])
    model.eval()
    quiet = model(tokens).numpy()
    np.testing.assert_array_equal(model(tokens).numpy(), quiet)
    model.train()
    assert np.abs(model(tokens).numpy() - quiet).max() > 0


def test_too_many_positions_are_refused():
    model = nano()
    assert model(to_tensor(np.zeros((1, 16), int))).shape == [1, 16, 128]
    with pytest.raises(ShapeError, match=r"17 tokens a row.*positions for 16; shorten"):
        model(to_tensor(np.zeros((1, 17), int)))


def test_tokens_without_a_batch_are_refused():
    with pytest.raises(ShapeError, match=r"GPT: tokens have shape \[3\]; give ids as \[batch, seq\]"):
        nano()(to_tensor([1, 2, 3]))


def test_a_token_out_of_range_is_refused():
    with pytest.raises(IndexError, match=r"128 at \[0, 1\] is out of range"):
        nano()(to_tensor([[1, 128]]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, r"hidden_size 30 is not a multiple of num_heads 4; make it 28 or 32"),
        ({"num_heads": 0}, r"num_heads is 0; give at least 1"),
        ({"num_layers": -1}, r"num_layers is -1; give at least 1"),
        ({"ffn_size": -8}, r"ffn_size is -8; give at least 1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        GPTConfig.nano(**changes)
