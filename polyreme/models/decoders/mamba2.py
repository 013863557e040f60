"""Mamba-2: a Mamba whose channels are heads, all of one decaying alike, computed in chunks by products of matrices.

Source: arXiv:2405.21060. Same function as transformers' Mamba2ForCausalLM. Logical dims of parameters: as of
models.decoders.mamba.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.models.families import MAMBA2, MAMBA2_STATE
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.cache import LayerCache
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.state_space import (
    DEFAULTS,
    KEYS,
    READ_KEYS,
    GroupedRMSNorm,
    StateSpaceDecoder,
    TokenConvolution,
    first_step_biases,
    linear,
    masked_steps,
    mixer_rules,
    outer_rules,
    read_inner_size,
)
from polyreme.nn import Layer
from polyreme.nn import functional as F
from polyreme.nn.initializer import Assign, Constant
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import Parameter
from polyreme.ops.creation import zeros
from polyreme.ops.layout import constrain
from polyreme.ops.state_space import head_state_scan


@dataclass(frozen=True)
class Mamba2Config:
    """Dimensions of a Mamba-2.

    num_heads, head_dim: heads and their width, which together are the width inside a block; head_dim is 2 * hidden_size
    / num_heads if 0. state_size: numbers of each of a head's channels, 128 if 0. num_groups: of heads that share what
    is taken in and shown, and are normed together. least_step, most_step: bounds of steps, none above if 0. Others as
    of MambaConfig.
    """

    vocab_size: int = 32768
    hidden_size: int = 4096
    num_layers: int = 64
    num_heads: int = 128
    head_dim: int = 0
    seq_len: int = 2048
    state_size: int = 0
    num_groups: int = 1
    conv_width: int = 4
    bias: bool = False
    conv_bias: bool = True
    least_step: float = 0.0
    most_step: float = 0.0
    layer_norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    recompute: str = ""
    residual_in_fp32: bool = True

    def __post_init__(self) -> None:
        if not self.state_size:
            object.__setattr__(self, "state_size", MAMBA2_STATE)
        if not self.head_dim and self.num_heads > 0:
            object.__setattr__(self, "head_dim", max(1, 2 * self.hidden_size // self.num_heads))
        check_dimensions(self)
        if self.num_heads % self.num_groups:
            raise ConfigError(
                f"Mamba2Config: num_heads {self.num_heads} is not a multiple of num_groups {self.num_groups}; give one "
                "that divides it"
            )

    @property
    def inner_size(self) -> int:
        """Width inside a block."""
        return self.num_heads * self.head_dim

    @classmethod
    def nano(cls, **changes: Any) -> Mamba2Config:
        """A Mamba-2 that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_len": 16, "state_size": 8}
        return cls(**{**base, **changes})


class Mamba2Mixer(Layer):
    """[batch, seq, embed] -> the same, of each token and those before it."""

    into: Linear
    convolution: TokenConvolution
    step_bias: Parameter
    log_decay: Parameter
    skip: Parameter
    norm: GroupedRMSNorm
    out: Linear

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        width, inner, heads = config.hidden_size, config.inner_size, config.num_heads
        shared = config.num_groups * config.state_size
        self.heads, self.groups = (heads, config.head_dim), (config.num_groups, config.state_size)
        self.parts, self.mixed = [inner, inner + 2 * shared, heads], [inner, shared, shared]
        self.bounds = (config.least_step, config.most_step or None)
        self.into = linear(width, sum(self.parts), ("embed", "ffn"), config.bias)
        self.convolution = TokenConvolution(sum(self.mixed), config.conv_width, config.conv_bias)
        self.step_bias = self.create_parameter([heads], default_initializer=first_step_biases(heads), dims=("heads",))
        begin = np.log(np.arange(1, heads + 1, dtype=np.float32))
        self.log_decay = self.create_parameter([heads], default_initializer=Assign(begin), dims=("heads",))
        self.skip = self.create_parameter([heads], default_initializer=Constant(1.0), dims=("heads",))
        self.norm = GroupedRMSNorm(inner, config.num_groups, epsilon=config.layer_norm_epsilon)
        self.out = linear(inner, width, ("ffn", "embed"), config.bias)
        history = (config.conv_width - 1, sum(self.mixed))
        self.state_shapes: Sequence[tuple[int, ...]] = (history, (*self.heads, config.state_size))

    def forward(self, x_bse: Any, cache: LayerCache | None = None) -> Any:
        batch, seq, _ = x_bse.shape
        gate, mixed, steps = constrain(self.into(x_bse), "batch", "block_seq", "ffn").split(self.parts, -1)
        before = None
        if cache is None:
            mixed, state = self.convolution(mixed), zeros([batch, *self.state_shapes[1]], "float32")
        else:
            before, state = cache.read_states()
            mixed, before = self.convolution.extend(mixed, before, cache.owner.counts)
        x, into, out_of = (part.astype("float32") for part in mixed.split(self.mixed, -1))
        x = x.reshape([batch, seq, *self.heads])
        into, out_of = (part.reshape([batch, seq, *self.groups]) for part in (into, out_of))
        steps = F.softplus(steps.astype("float32") + self.step_bias.astype("float32")).clip(*self.bounds)
        decay = -self.log_decay.astype("float32").exp()
        y, state = head_state_scan(x, masked_steps(steps, cache), decay, into, out_of, state)
        if cache is not None:
            cache.write_states(before, state)
        y = (y + x * self.skip.astype("float32").unsqueeze(-1)).reshape([batch, seq, -1])
        return self.out(self.norm(y * F.silu(gate.astype("float32"))).astype(x_bse.dtype))


class Mamba2(StateSpaceDecoder):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]; with labels, the mean cross-entropy (0-D, nats a token)."""

    family = MAMBA2

    def make_mixer(self, config: Mamba2Config) -> Mamba2Mixer:
        """A new mixer of a block."""
        return Mamba2Mixer(config)


# as published


def _rules(config: Mamba2Config) -> list[WeightRule]:
    same = {"A_log": "log_decay", "D": "skip", "dt_bias": "step_bias", "norm.weight": "norm.weight"}
    return [*outer_rules(), *mixer_rules(same, {"in_proj": "into", "out_proj": "out"})]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = config["num_heads"], config["head_dim"]
    if heads * width != read_inner_size(config):
        raise ConfigError(
            f"config.json of a mamba2: num_heads {heads} times head_dim {width} is not expand times hidden_size, "
            f"{read_inner_size(config)}"
        )
    least, most = config.get("time_step_limit") or (0.0, math.inf)
    return {"least_step": float(least), "most_step": 0.0 if math.isinf(most) else float(most)}


def _write(config: Mamba2Config) -> dict[str, Any]:
    limit = [config.least_step, config.most_step or math.inf]
    return {"expand": config.inner_size / config.hidden_size, "time_step_limit": limit}


PUBLISHED = PublishedFamily(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    keys={**KEYS, "num_heads": "num_heads", "head_dim": "head_dim", "n_groups": "num_groups"},
    weights=_rules,
    defaults={
        **DEFAULTS,
        "tie_word_embeddings": False,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
    },
    fixed={"hidden_act": ("silu",), "rms_norm": (True,)},
    prefix="backbone.",
    read=_read,
    read_keys=(*READ_KEYS, "time_step_limit", "norm_before_gate"),
    write=_write,
)
