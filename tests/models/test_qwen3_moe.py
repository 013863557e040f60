"""Qwen3-MoE: the recorded function of transformers' Qwen3MoeForCausalLM, and its heads."""

import numpy as np
import pytest

from polyreme.errors import ConfigError
from polyreme.models.llama import LlamaConfig
from polyreme.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from tests.models import parity
from tests.models.test_llama import OURS, from_llama

NORMS = {f"self_attn.{name}": f"attention.{name}" for name in ("q_norm", "k_norm")}
THEIRS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def from_qwen(state):
    """Weights (or gradients) of a Qwen3MoeForCausalLM under our names: its experts' matrices stacked."""
    weights, rest, experts = {}, {}, {}
    for name, array in state.items():
        block, _, part = name.removeprefix("model.layers.").partition(".")
        if part == "mlp.gate.weight":
            weights[f"blocks.{block}.ffn.router.weight"] = array.T
        elif part.startswith("mlp.experts."):
            number, matrix = part.split(".")[2:4]
            experts.setdefault(f"blocks.{block}.ffn.{THEIRS[matrix]}", {})[int(number)] = array.T
        elif part.removesuffix(".weight") in NORMS:
            weights[f"blocks.{block}.{NORMS[part.removesuffix('.weight')]}.weight"] = array
        else:
            rest[name] = array
    stacked = {name: np.stack([by[i] for i in range(len(by))]) for name, by in experts.items()}
    return weights | from_llama(rest) | stacked


def test_is_the_function_of_qwen3_moe():
    recording = parity.read("qwen3_moe")
    config = Qwen3MoeConfig(**recording.config)
    assert config.head_dim != config.hidden_size // config.num_heads, "heads of another width are compared"
    assert "self_attn.q_norm" not in OURS
    model = parity.load(Qwen3Moe(config), from_qwen(recording.weights))
    parity.assert_same_function(model, recording, from_qwen(recording.grads))


def test_heads_of_an_odd_width_are_refused():
    with pytest.raises(ConfigError, match="head_dim 5 is odd, and rotary positions turn pairs; make it 4 or 6"):
        Qwen3MoeConfig.nano(head_dim=5)
    assert LlamaConfig.nano().head_dim == 8
