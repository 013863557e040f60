"""Llama: the recorded function of transformers' LlamaForCausalLM, capture, checkpoints, placement, refusals."""

import numpy as np
import pytest

from polyreme.core import rng
from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.io import serialization
from polyreme.mesh import Plan
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.parts.rotary import rotary_table, rotate
from tests.models import parity

either_head = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def recorded(tied):
    """A Llama with recorded weights, and the recording."""
    recording = parity.read(f"llama_{'tied' if tied else 'untied'}")
    return parity.load_published(Llama(LlamaConfig(**recording.config)), recording.weights), recording


def nano(**changes):
    rng.seed(5)
    return Llama(LlamaConfig.nano(**changes))


@pytest.fixture
def _one_device_afterwards():
    yield
    clear_plan()


@pytest.mark.slow
@pytest.mark.slow_cases("tied")
@either_head
def test_is_the_function_of_llama(tied):
    model, recording = recorded(tied)
    assert model.config.num_kv_heads < model.config.num_heads, "grouped heads are part of what is compared"
    parity.assert_same_function(model, recording, parity.as_ours(model, recording.grads))


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


def test_rotate_turns_pairs_as_complex_numbers():
    seq, half, theta = 7, 3, 50.0
    x = np.random.default_rng(0).standard_normal((2, seq, 4, 2 * half)).astype(np.float32)
    cos, sin = rotary_table(seq, 2 * half, theta)
    got = rotate(to_tensor(x), to_tensor(cos), to_tensor(sin)).numpy()
    angle = np.arange(seq)[:, None, None] * theta ** (-np.arange(half) / half)
    want = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    # two products and a sum, and the table's own rounding
    np.testing.assert_allclose(
        got, np.concatenate([want.real, want.imag], -1), rtol=0, atol=4 * parity.EPS * np.abs(x).max()
    )


def test_rotary_tables_are_no_part_of_the_state():
    assert not {"cos", "sin"} & nano().state_dict().keys()


@either_head
def test_a_saved_state_comes_back(tied, tmp_path):
    model, other = nano(tie_embeddings=tied), Llama(LlamaConfig.nano(tie_embeddings=tied))
    serialization.save(model.state_dict(), tmp_path / "llama")
    parity.load(other, serialization.load(tmp_path / "llama"))
    tokens = to_tensor([[1, 2, 3]])
    np.testing.assert_array_equal(other(tokens).numpy(), model(tokens).numpy())


@either_head
def test_a_checkpoint_comes_back(tied, tmp_path):
    model, other = nano(tie_embeddings=tied), Llama(LlamaConfig.nano(tie_embeddings=tied))
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(1, {name: tensor._array for name, tensor in model.state_dict().items()})
        parity.load(other, store.restore()[0])
    tokens = to_tensor([[1, 2, 3]])
    np.testing.assert_array_equal(other(tokens).numpy(), model(tokens).numpy())


@pytest.mark.usefixtures("_one_device_afterwards")
def test_mp_halves_heads_ffn_and_vocab():
    model = nano()
    apply_plan(Plan.from_degrees(mp=2, dp=4), model)
    dims = {
        "tokens.weight": ("vocab", "embed"),
        "attention_norm.weight": ("embed",),
        "attention.q.weight": ("embed", "heads"),
        "attention.k.weight": ("embed", "kv_heads"),
        "attention.v.weight": ("embed", "kv_heads"),
        "attention.out.weight": ("heads", "embed"),
        "ffn_norm.weight": ("embed",),
        "ffn.gate.weight": ("embed", "ffn"),
        "ffn.up.weight": ("embed", "ffn"),
        "ffn.down.weight": ("ffn", "embed"),
        "norm.weight": ("embed",),
        "head.weight": ("embed", "vocab"),
    }
    parity.assert_mp_halves_named_dims(model, dims)


@pytest.mark.slow
@pytest.mark.slow_cases("tied")
@pytest.mark.usefixtures("_one_device_afterwards")
@either_head
def test_the_function_is_the_same_under_mp(tied):
    model, recording = recorded(tied)
    apply_plan(Plan.from_degrees(mp=2, dp=4), model)
    parity.assert_same_function(model, recording, parity.as_ours(model, recording.grads))


def test_sizes_left_out_follow_from_the_others():
    config = LlamaConfig(hidden_size=96, num_heads=4)
    assert (config.num_kv_heads, config.ffn_size) == (4, 256)  # 8/3 * 96 is 256, a multiple of 64
    assert LlamaConfig(hidden_size=104, num_heads=4).ffn_size == 320  # 277.3, rounded up


def test_too_many_positions_are_refused():
    model = nano()
    assert model(to_tensor(np.zeros((1, 16), int))).shape == [1, 16, 128]
    with pytest.raises(ShapeError, match=r"17 tokens a row.*positions for 16; shorten"):
        model(to_tensor(np.zeros((1, 17), int)))


def test_tokens_without_a_batch_are_refused():
    with pytest.raises(ShapeError, match=r"Llama: tokens have shape \[3\]; give ids as \[batch, seq\]"):
        nano()(to_tensor([1, 2, 3]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 36}, r"hidden_size 36 is not a multiple of 2 \* num_heads = 8 .*; make it 32 or 40"),
        ({"num_kv_heads": 3}, r"num_heads 4 is not a multiple of num_kv_heads 3; make num_kv_heads 2"),
        ({"num_heads": 0}, r"num_heads is 0; give at least 1"),
        ({"num_kv_heads": -2}, r"num_kv_heads is -2; give at least 1"),
        ({"seq_len": 0}, r"seq_len is 0; give at least 1"),
        ({"full_blocks": 1}, r"full_blocks 1; give the numbers of blocks, each of 0 to 1"),
        ({"full_blocks": [0, 2]}, r"full_blocks \[0, 2\]; give the numbers of blocks, each of 0 to 1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        LlamaConfig.nano(**changes)
