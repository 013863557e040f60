"""Qwen3-MoE: the recorded function of transformers' Qwen3MoeForCausalLM, and its heads."""

import pytest

from polyreme.errors import ConfigError
from polyreme.models.decoders.llama import LlamaConfig
from polyreme.models.experts.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from tests.models import parity


@pytest.mark.slow
def test_is_the_function_of_qwen3_moe():
    recording = parity.read("qwen3_moe")
    config = Qwen3MoeConfig(**recording.config)
    assert config.head_dim != config.hidden_size // config.num_heads, "heads of another width are compared"
    model = parity.load_published(Qwen3Moe(config), recording.weights)
    parity.assert_same_function(model, recording, parity.as_ours(model, recording.grads))


def test_heads_of_an_odd_width_are_refused():
    with pytest.raises(ConfigError, match="head_dim 5 is odd, and rotary positions turn pairs; make it 4 or 6"):
        Qwen3MoeConfig.nano(head_dim=5)
    assert LlamaConfig.nano().head_dim == 8
